"""`CheckpointLayer`: one MoE layer as a checkpoint has it, and as arguments of the public API."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe, traits
from megamoe.shared_fusion import expand_block_scales, quantize_block_fp8_weight_to_mxfp4
from megamoe.validation import BLOCK, has_shared_slots


@dataclass(frozen=True)
class SharedExpert:
    """S shared experts as one dense MLP of block-scaled FP8, gate rows, then up rows.

    w13 float8_e4m3fn [2·I·S, H], w13_scale fp32 [2·I·S/128, H/128], w2 [H, I·S], w2_scale fp32 [H/128, I·S/128].
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    count: int

    def arguments(self, recipe: Recipe) -> dict[str, Any]:
        """shared_* of `prepare_weights`: as they are beside fp32 activation scales; E4M3 + UE8M0/32 without loss where
        a dense MLP meets UE8M0 activations; MXFP4, with its loss, where shared experts are slots (`trtllm_gen`)."""
        parts = self.w13, self.w13_scale, self.w2, self.w2_scale
        if has_shared_slots(recipe):
            parts = self._slots()
        elif traits(recipe).act_scale_format == "ue8m0":
            scales = expand_block_scales(self.w13, self.w13_scale), expand_block_scales(self.w2, self.w2_scale)
            parts = self.w13, scales[0], self.w2, scales[1]
        return dict(zip(("shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale"), parts))

    def _slots(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[2·I·S, ..] to [S, 2I, ..] and [H, I·S ..] to [S, H, I ..]: each expert's own rows and columns."""
        w13 = quantize_block_fp8_weight_to_mxfp4(self.w13, self.w13_scale, BLOCK)
        w2 = quantize_block_fp8_weight_to_mxfp4(self.w2, self.w2_scale, BLOCK)
        up = [_bytes(t).unflatten(0, (2, self.count, -1)).transpose(0, 1).flatten(1, 2).contiguous() for t in w13]
        down = [_bytes(t).unflatten(1, (self.count, -1)).transpose(0, 1).contiguous() for t in w2]
        return up[0], up[1], down[0], down[1]


@dataclass(frozen=True)
class CheckpointLayer:
    """Layer `number` of a checkpoint of `kind`: routed weights, shared experts, and what its config says of a call.

    recipes: those whose numbers the weights are, the first as the checkpoint's own engines run it. options: keywords of
    `MegaMoE` (activation, clamp, routed_scaling_factor).
    """

    kind: str
    number: int
    weights: PlainWeights
    shared: SharedExpert | None
    recipes: tuple[Recipe, ...]
    top_k: int
    options: dict[str, Any]

    @property
    def num_experts(self) -> int:
        return self.weights.w2.shape[0]

    @property
    def hidden(self) -> int:
        return self.weights.w2.shape[1]

    @property
    def intermediate(self) -> int:
        return self.weights.w13.shape[1] // 2

    def __str__(self) -> str:
        shared = "" if self.shared is None else f" + {self.shared.count} shared"
        return (
            f"{self.kind}, layer {self.number}: hidden {self.hidden}, intermediate {self.intermediate}, "
            f"{self.num_experts} experts{shared}, top-{self.top_k}"
        )

    def weight_arguments(self, recipe: Recipe) -> dict[str, Any]:
        """Keywords of `prepare_weights` under one of `recipes`."""
        weights = self.weights
        if self.shared is not None:
            weights = replace(weights, **self.shared.arguments(recipe))
        return {**vars(weights), **vars(recipe)}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Without the label, which few operations know."""
    return tensor.view(torch.uint8)
