"""`MoEWeights`: a layer's weights in the byte order the kernels read, prepared once at load.

The order is DeepGEMM MegaMoE's (`kernels.layouts.weights`), so that buffers prepared by upstream's transforms and
buffers prepared here are interchangeable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megamoe.kernels.layouts.weights import (
    restore_weights_sm90,
    restore_weights_sm100,
    transform_weights_sm90,
    transform_weights_sm100,
)
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe, traits


@dataclass(frozen=True)
class ExpertMatrices:
    """Both matrices of the routed experts (3-D) or of the dense shared one (2-D), in DeepGEMM's order.

    w13 [.., 2I, H] with interleaved gate/up rows, w2 [.., H, I]; E2M1 packs two columns per byte. Scales: int32 words
    MN-major in atom order (UE8M0/UE4M3), or fp32 per 128×128 block.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor

    @property
    def format(self) -> str:
        """Element format, which the dtype decides: `e4m3` or `e2m1`."""
        return "e4m3" if self.w13.dtype == torch.float8_e4m3fn else "e2m1"

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.w13, self.w13_scale, self.w2, self.w2_scale))


@dataclass(frozen=True)
class MoEWeights:
    """Weights of one layer: E routed experts and, optionally, S shared ones as a dense MLP of width I·S.

    The global scales are `PlainWeights`'s.
    """

    recipe: Recipe
    num_experts: int
    hidden: int
    intermediate: int
    num_shared_experts: int
    routed: ExpertMatrices
    shared: ExpertMatrices | None = None
    l1_alphas: torch.Tensor | None = None
    l2_alphas: torch.Tensor | None = None
    l2_act_scales: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = [*self.routed, *(self.shared or ())]
        return sum(tensor.numel() * tensor.element_size() for tensor in parts)

    @property
    def device(self) -> torch.device:
        return self.routed.w13.device


def prepare(plain: PlainWeights, recipe: Recipe) -> MoEWeights:
    """Transform plain weights ([gate; up] rows, row-major scales) into kernel order. Arguments must be validated."""
    num_experts, hidden, _ = plain.w2.shape
    intermediate = plain.w13.shape[1] // 2
    shared = None
    num_shared = 0
    if plain.shared_w13 is not None:
        parts = (plain.shared_w13, plain.shared_w13_scale, plain.shared_w2, plain.shared_w2_scale)
        shared = _transform(*parts, recipe)  # type: ignore[arg-type]
        num_shared = plain.shared_w13.shape[0] // (2 * intermediate)
    return MoEWeights(
        recipe,
        num_experts,
        hidden,
        intermediate,
        num_shared,
        _transform(plain.w13, plain.w13_scale, plain.w2, plain.w2_scale, recipe),
        shared,
        plain.l1_alphas,
        plain.l2_alphas,
        plain.l2_act_scales,
    )


def to_plain(weights: MoEWeights) -> PlainWeights:
    """The inverse of `prepare`."""
    shared = _restore(weights.shared, weights.recipe) if weights.shared is not None else (None,) * 4
    plain = PlainWeights(*_restore(weights.routed, weights.recipe), *shared)
    return replace(
        plain,
        l1_alphas=weights.l1_alphas,
        l2_alphas=weights.l2_alphas,
        l2_act_scales=weights.l2_act_scales,
    )


def _transform(
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor, recipe: Recipe
) -> ExpertMatrices:
    if traits(recipe).weight_scale_format == "fp32":
        (w13, w13_scale), (w2, w2_scale) = transform_weights_sm90((w13, w13_scale), (w2, w2_scale))
    else:
        (w13, w13_scale), (w2, w2_scale) = transform_weights_sm100((w13, w13_scale), (w2, w2_scale), recipe.mma_type)
    return ExpertMatrices(w13, w13_scale, w2, w2_scale)


def _restore(matrices: ExpertMatrices, recipe: Recipe) -> tuple[torch.Tensor, ...]:
    w13, w13_scale, w2, w2_scale = matrices
    if traits(recipe).weight_scale_format == "fp32":
        l1, l2 = restore_weights_sm90((w13, w13_scale), (w2, w2_scale))
    else:
        l1, l2 = restore_weights_sm100((w13, w13_scale), (w2, w2_scale), recipe.mma_type)
    return (*l1, *l2)
