"""`MoEWeights`: a layer's weights in the byte order the kernels read, prepared once at load.

Under DeepGEMM numerics that order is DeepGEMM MegaMoE's (`kernels.layouts.weights`), so that buffers prepared by
upstream's transforms and buffers prepared here are interchangeable. Otherwise, and for interleaved w13, the weights
stay as they are, the kernels find the rows (`kernels.layouts.gate_up.row_in_memory`), and only block scales, a fraction
of the bytes, are re-laid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megamoe.kernels.layouts.gate_up import deinterleave_gate_up, interleave_gate_up
from megamoe.kernels.layouts.scale_atoms import ATOM_ROWS, GROUPS_PER_WORD, from_atom_order, to_atom_order
from megamoe.plain_weights import PlainWeights, element_format
from megamoe.recipe import ElementFormat, Recipe, traits

W13Rows = Literal["tile", "gate_up", "interleaved"]
"""How w13's rows lie in memory: in tile order (DeepGEMM's bytes) or as the checkpoint has them."""


@dataclass(frozen=True)
class ExpertMatrices:
    """Both matrices of the routed experts or of S shared slots (3-D), or of the dense shared MLP (2-D).

    w13 [.., 2I, H], its rows as `MoEWeights.w13_rows` says (a dense shared MLP: always `tile`), w2 [.., H, I]; E2M1
    packs two columns per byte. Scales: int32 words MN-major in atom order, rows in tile order (UE8M0, UE4M3); fp32 per
    128×128 block, as the caller had them; None for BF16.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None

    @property
    def format(self) -> ElementFormat:
        """Element format, which the dtype decides."""
        return element_format(self.w13)

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter((self.w13, self.w13_scale, self.w2, self.w2_scale))


@dataclass(frozen=True)
class MoEWeights:
    """Weights of one layer: this rank's E routed experts and, optionally, S shared ones.

    Biases and global scales are `PlainWeights`'s.
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
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_rows: W13Rows = "tile"

    def __repr__(self) -> str:
        shared = f" + {self.num_shared_experts} shared" if self.num_shared_experts else ""
        return (
            f"MoEWeights({self.recipe}, {self.num_experts} experts{shared}, hidden {self.hidden}, "
            f"intermediate {self.intermediate}, {self.nbytes:,} bytes on {self.device})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices and their scales; experts that share memory (`expand`) count once."""
        parts = [*self.routed, *(self.shared or ())]
        return sum(_nbytes(tensor) for tensor in parts if tensor is not None)

    @property
    def device(self) -> torch.device:
        return self.routed.w13.device

    @property
    def w13_layout(self) -> str:
        """Row order of the plain w13, of its block scales and of its bias."""
        return "interleaved" if self.w13_rows == "interleaved" else "gate_up"


def prepare(plain: PlainWeights, recipe: Recipe, *, donate: bool = False) -> MoEWeights:
    """Plain weights to kernel order. Arguments must be validated.

    `donate` reorders w13 and the scales where they are, one expert at a time, so that the caller's tensors hold the
    kernels' order afterwards; without it they are copied where their order changes. w2 is never copied.
    """
    num_experts, hidden = plain.w2.shape[:2]
    intermediate = plain.w13.shape[1] // 2
    rows: W13Rows = "tile"
    if plain.w13_layout == "interleaved":
        rows = "interleaved"
    elif recipe.numerics == "trtllm_gen":
        rows = "gate_up"
    shared = None
    num_shared = 0
    if plain.shared_w13 is not None:
        assert plain.shared_w2 is not None
        parts = (plain.shared_w13, plain.shared_w13_scale, plain.shared_w2, plain.shared_w2_scale)
        slots = plain.shared_w13.dim() == 3
        shared = _transform(ExpertMatrices(*parts), recipe, rows if slots else "tile", donate)
        num_shared = plain.shared_w13.shape[0] // (1 if slots else 2 * intermediate)
    return MoEWeights(
        recipe,
        num_experts,
        hidden,
        intermediate,
        num_shared,
        _transform(ExpertMatrices(plain.w13, plain.w13_scale, plain.w2, plain.w2_scale), recipe, rows, donate),
        shared,
        plain.l1_alphas,
        plain.l2_alphas,
        plain.l2_act_scales,
        plain.w13_bias,
        plain.w2_bias,
        rows,
    )


def to_plain(weights: MoEWeights) -> PlainWeights:
    """The inverse of `prepare`."""
    recipe, rows, shared = weights.recipe, weights.w13_rows, weights.shared
    shared_parts: tuple[torch.Tensor | None, ...] = (None,) * 4
    if shared is not None:
        shared_parts = tuple(_restore(shared, recipe, rows if shared.w13.dim() == 3 else "tile"))
    plain = PlainWeights(*_restore(weights.routed, recipe, rows), *shared_parts)
    return replace(
        plain,
        l1_alphas=weights.l1_alphas,
        l2_alphas=weights.l2_alphas,
        l2_act_scales=weights.l2_act_scales,
        w13_bias=weights.w13_bias,
        w2_bias=weights.w2_bias,
        w13_layout=weights.w13_layout,
    )


def plain_scales(weights: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Block scale bytes of the routed w13, its rows in tile order, and of w2: uint8 [E, rows, K/g]."""
    w13, w13_scale, w2, w2_scale = weights.routed
    assert w13 is not None
    assert w13_scale is not None
    assert w2 is not None
    assert w2_scale is not None
    return _from_atoms(w13_scale, w13, weights.recipe), _from_atoms(w2_scale, w2, weights.recipe)


def _transform(plain: ExpertMatrices, recipe: Recipe, rows: W13Rows, donate: bool) -> ExpertMatrices:
    order = traits(recipe).tile_order
    w13, w13_scale, w2, w2_scale = plain.w13, plain.w13_scale, plain.w2, plain.w2_scale
    if rows == "tile":
        w13 = interleave_gate_up(w13, order, in_place=donate)
    if w13_scale is not None and w2_scale is not None and w13_scale.dtype != torch.float32:

        def tile_order(scale: torch.Tensor) -> torch.Tensor:
            return interleave_gate_up(_pairs_to_halves(scale) if rows == "interleaved" else scale, order)

        w13_scale, w2_scale = _atoms(w13_scale, tile_order, donate), _atoms(w2_scale, lambda scale: scale, donate)
    return ExpertMatrices(w13, w13_scale, w2, w2_scale)


def _atoms(scale: torch.Tensor, reorder: Callable[[torch.Tensor], torch.Tensor], donate: bool) -> torch.Tensor:
    """Atom order of uint8 scales whose rows `reorder` rearranges; donated, in the memory of `scale` where that has the
    size (no padding), expert by expert."""
    rows, groups = scale.shape[-2:]
    padded = rows % ATOM_ROWS or groups % GROUPS_PER_WORD
    if not donate or scale.dim() == 2 or padded or not scale.is_contiguous() or scale.storage_offset() % 4:
        return to_atom_order(reorder(scale))
    words = scale.flatten(1).view(torch.int32).unflatten(1, (groups // GROUPS_PER_WORD, rows))
    for expert in range(len(scale)):
        words[expert] = to_atom_order(reorder(scale[expert])).mT
    return words.mT


def _restore(ours: ExpertMatrices, recipe: Recipe, rows: W13Rows) -> ExpertMatrices:
    order = traits(recipe).tile_order
    w13, w13_scale, w2, w2_scale = ours.w13, ours.w13_scale, ours.w2, ours.w2_scale
    if w13_scale is not None and w2_scale is not None and w13_scale.dtype != torch.float32:
        w13_scale = deinterleave_gate_up(_from_atoms(w13_scale, w13, recipe), order)
        if rows == "interleaved":
            w13_scale = _halves_to_pairs(w13_scale)
        w2_scale = _from_atoms(w2_scale, w2, recipe)
    if rows == "tile":
        w13 = deinterleave_gate_up(w13, order)
    return ExpertMatrices(w13, w13_scale, w2, w2_scale)


def _from_atoms(scale: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    columns = weight.shape[-1] * (2 if element_format(weight) == "e2m1" else 1)
    return from_atom_order(scale, rows=weight.shape[-2], groups=columns // traits(recipe).weight_group[1])


def _pairs_to_halves(scale: torch.Tensor) -> torch.Tensor:
    """[gate 0, up 0, gate 1, …] rows to [gate; up]."""
    return scale.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)


def _halves_to_pairs(scale: torch.Tensor) -> torch.Tensor:
    return scale.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)


def _nbytes(tensor: torch.Tensor) -> int:
    distinct = [size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0]
    return torch.Size(distinct).numel() * tensor.element_size()
