"""`LayerParameters`: what a layer's calls have in common beside its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerParameters:
    """Tensors and numbers of a layer that are no weights; None: absent.

    expert_scales: fp32 [num_experts], by global id; multiplied into the top-k weights of that expert's slots.
    routed_scaling_factor: multiplies the top-k weight of every routed slot, after expert_scales; never a shared one's.
    expert_map: int32 [num_experts], global id → local expert, −1 where this rank has none (skipped silently).
    x_gsf: fp32, one element: global factor of `nv16` activations, values are quantized as x·x_gsf. The raw accumulators
    carry it; l1_alphas take it out again and are 1/x_gsf where absent.
    clamp, alpha, beta: fp32 [E'], per local expert (`trtllm_gen`), instead of the numbers in `LayerSpec`.
    """

    expert_scales: torch.Tensor | None = None
    routed_scaling_factor: float = 1.0
    expert_map: torch.Tensor | None = None
    x_gsf: torch.Tensor | None = None
    clamp: torch.Tensor | None = None
    alpha: torch.Tensor | None = None
    beta: torch.Tensor | None = None
