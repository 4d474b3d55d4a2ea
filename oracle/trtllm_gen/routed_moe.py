"""trtllm-gen's fused MoE, live on Blackwell: FlashInfer's pre-routed FP4 op, MXFP4 weights and MXFP8 activations."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.kernels.layouts.trtllm import shuffle_rows, shuffle_w13, swizzle_scales
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.oracle.reference import Quantized, known_ids
from megamoe.oracle.trtllm_gen.guards import kernel_unsupported_reason
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe
from megamoe.spec import LayerSpec

RECIPE = Recipe("fp8xfp4", "mx32", "trtllm_gen")
_SWIGLU, _TOPK_ROUTING = 3, 5
_MULTIPLES = 128


def layer_unsupported_reason(spec: LayerSpec) -> str | None:
    """Why the op has no kernel for such a layer, or None."""
    if spec.recipe != RECIPE:
        return f"recipe {spec.recipe}; this adapter serves {RECIPE}"
    if spec.activation != "swiglu" or spec.num_shared_experts:
        return "this adapter serves swiglu without shared slots"
    if spec.top_k > spec.num_experts:
        return f"top_k={spec.top_k}; allowed: at most num_experts = {spec.num_experts}"
    if spec.hidden % _MULTIPLES or spec.intermediate % _MULTIPLES:
        return f"hidden={spec.hidden}, intermediate={spec.intermediate}; both must be multiples of {_MULTIPLES}"
    return None


def arguments(
    spec: LayerSpec, weights: PlainWeights, x: Quantized, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> dict[str, Any]:
    """The keyword arguments of `flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe`, on any device."""
    ids = known_ids(topk_ids, spec.num_experts)
    return layer_arguments(spec, weights) | call_arguments(x, ids, topk_weights)


def call_arguments(x: Quantized, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> dict[str, Any]:
    """Those of one call: x quantized by the caller, its scales row-major; int32 ids, −1 or an expert's, and fp32
    weights [T, K], which the op applies in the combine as they are. T is at least 1: the op divides by it."""
    if not len(topk_ids):
        raise ValueError("topk_ids has no rows; trtllm-gen needs at least one token")
    assert x.sf is not None
    return dict(
        topk_ids=(topk_ids, topk_weights),
        hidden_states=x.q,
        hidden_states_scale=x.sf.view(torch.float8_e4m3fn),  # the label it takes for UE8M0 bytes
    )


def layer_arguments(spec: LayerSpec, weights: PlainWeights) -> dict[str, Any]:
    """Those of a layer, made once: `weights` with [gate; up] rows, shuffled into copies."""
    assert weights.w13_scale is not None  # MXFP4 has scales
    assert weights.w2_scale is not None
    experts = spec.num_experts
    limit = spec.activation_clamp
    clamp = None
    if limit is not None:
        clamp = torch.full((experts,), limit, dtype=torch.float32, device=weights.w13.device)
    return dict(
        routing_bias=None,
        gemm1_weights=shuffle_w13(weights.w13),
        gemm1_weights_scale=swizzle_scales(shuffle_w13(weights.w13_scale)).view(torch.float8_e4m3fn),
        gemm1_bias=None,
        gemm1_alpha=None,
        gemm1_beta=None,
        gemm1_clamp_limit=clamp,
        gemm2_weights=shuffle_rows(weights.w2),
        gemm2_weights_scale=swizzle_scales(shuffle_rows(weights.w2_scale)).view(torch.float8_e4m3fn),
        gemm2_bias=None,
        output1_scale_scalar=None,
        output1_scale_gate_scalar=None,
        output2_scale_scalar=None,
        num_experts=experts,
        top_k=spec.top_k,
        n_group=1,
        topk_group=1,
        intermediate_size=spec.intermediate,
        local_expert_offset=0,
        local_num_experts=experts,
        routed_scaling_factor=None,
        routing_method_type=_TOPK_ROUTING,
        do_finalize=True,
        activation_type=_SWIGLU,
    )


def routed_moe(
    spec: LayerSpec, weights: PlainWeights, x: Quantized, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """y BF16 [T, H]; see `arguments`. Raises `OracleUnavailable` off Blackwell, `ValueError` for other layers."""
    reason = kernel_unsupported_reason()
    if reason is not None:
        raise OracleUnavailable(reason)
    reason = layer_unsupported_reason(spec)
    if reason is not None:
        raise ValueError(reason)
    return run(arguments(spec, weights, x, topk_ids, topk_weights))


def run(keywords: dict[str, Any]) -> torch.Tensor:
    """The op's y BF16 [T, H], for the keywords of `arguments`."""
    from flashinfer.fused_moe import trtllm_fp4_block_scale_routed_moe  # type: ignore[import-not-found]

    return trtllm_fp4_block_scale_routed_moe(**keywords)[0]
