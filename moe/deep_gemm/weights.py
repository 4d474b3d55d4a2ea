"""Weight transforms under upstream's names: upstream's bytes on every device and architecture.

Source of the contract: `transform_weights_for_mega_moe(_sm90)` of `sgl-deep-gemm` 0.1.7.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.deep_gemm.arguments import SM100_KINDS, pair
from megamoe.kernels.layouts.gate_up import interleave_gate_up
from megamoe.kernels.layouts.weights import WeightPair, transform_weights_sm90, transform_weights_sm100
from megamoe.spec import ACTIVATIONS
from megamoe.validation import check_choice

Weights = torch.Tensor | WeightPair


def transform_weights_for_mega_moe(
    l1_weights: Weights, l2_weights: Weights, activation: str = "swiglu", mma_type: str = "fp8xfp4"
) -> tuple[Any, Any]:
    """Weights in the order the SM100 kinds read: routed ones with an expert axis, shared ones without.

    l1_weights, l2_weights: (weight, scale) pairs, weight [.., 2I, H] rows [gate; up] and [.., H, I] (E2M1 int8, two
    columns a byte; shared ones of `fp8xfp4` float8_e4m3fn), scale int32 [.., rows, K/4g] MN-major as
    `transform_sf_into_required_layout` returns it, or its bytes uint8 [.., rows, K/g]. BF16: plain tensors.
    Returns them alike: l1 reordered into copies, l2's weight the same tensor, scales in tensor-memory copy order.
    `activation` changes nothing. `ValueError`/`TypeError` naming what does not fit.
    """
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("mma_type", mma_type, SM100_KINDS)
    is_pair = isinstance(l1_weights, (tuple, list))
    if is_pair != (mma_type != "bf16xbf16") or is_pair != isinstance(l2_weights, (tuple, list)):
        expected = "plain tensors" if mma_type == "bf16xbf16" else "(weight, scale) pairs"
        raise TypeError(
            f"l1_weights is a {type(l1_weights).__name__} and l2_weights a {type(l2_weights).__name__}; under "
            f"{mma_type} both are {expected}"
        )
    if isinstance(l1_weights, torch.Tensor):
        return interleave_gate_up(l1_weights, "gran8"), l2_weights
    return transform_weights_sm100(pair("l1_weights", l1_weights), pair("l2_weights", l2_weights), mma_type)


def transform_weights_for_mega_moe_sm90(
    l1_weights: WeightPair, l2_weights: WeightPair
) -> tuple[WeightPair, WeightPair]:
    """FP8 weights in SM90's order: l1's rows interleaved by eights into a copy, everything else the same tensors.

    l1: float8_e4m3fn [.., 2I, H] rows [gate; up] and fp32 [.., 2I/128, H/128]; l2: [.., H, I] and [.., H/128, I/128],
    scales row-major.
    """
    return transform_weights_sm90(pair("l1_weights", l1_weights), pair("l2_weights", l2_weights))
