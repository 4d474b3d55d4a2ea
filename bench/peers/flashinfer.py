"""FlashInfer's trtllm-gen MoE with MXFP4 weights and MXFP8 activations: on Blackwell alone, where its cubins run.

Written from its contract; no such GPU has been at hand to run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import torch

from megamoe.bench.layers import MXFP4, LayerStore
from megamoe.bench.peers.base import Peer, PeerLayer, multiple_reason
from megamoe.bench.registry import Point
from megamoe.bench.timing import Call
from megamoe.oracle.random_layers import Inputs
from megamoe.recipe import resolve_recipe

_RECIPE = resolve_recipe("fp8xfp4", "mx32", "trtllm_gen")
_ROUTED_BY_TOP_K = 5  # its routing methods; ids and weights are given, so that nothing else follows from it
_SWIGLU = 3


@dataclass(frozen=True)
class _Weights:
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


def _prepare(store: LayerStore) -> _Weights:
    from megamoe.kernels.layouts.trtllm import shuffle_rows, shuffle_w13, swizzle_scales

    plain = store.plain(MXFP4)
    assert plain.w13_scale is not None
    assert plain.w2_scale is not None
    return _Weights(
        shuffle_w13(plain.w13),
        swizzle_scales(shuffle_w13(plain.w13_scale)).view(torch.float8_e4m3fn),
        shuffle_rows(plain.w2),
        swizzle_scales(shuffle_rows(plain.w2_scale)).view(torch.float8_e4m3fn),
    )


def _open(store: LayerStore, point: Point, inputs: Sequence[Inputs]) -> PeerLayer:
    mxfp8_quantize = import_module("flashinfer").mxfp8_quantize
    routed_moe = import_module("flashinfer.fused_moe").trtllm_fp4_block_scale_routed_moe
    shape, device = point.shape, inputs[0].x.device
    weights = store.cached(("flashinfer",), lambda: _prepare(store))
    clamp = None
    if shape.activation_clamp is not None:
        clamp = torch.full((shape.num_experts,), shape.activation_clamp, device=device)

    def bind(index: int, output: torch.Tensor) -> Call:
        i = inputs[index]

        def call() -> None:
            q, sf = mxfp8_quantize(i.x, False)
            routed_moe(
                topk_ids=(i.topk_ids, i.topk_weights),
                routing_bias=None,
                hidden_states=q,
                hidden_states_scale=sf.view(torch.float8_e4m3fn).view(point.tokens, -1),
                gemm1_weights=weights.w13,
                gemm1_weights_scale=weights.w13_scale,
                gemm1_bias=None,
                gemm1_alpha=None,
                gemm1_beta=None,
                gemm1_clamp_limit=clamp,
                gemm2_weights=weights.w2,
                gemm2_weights_scale=weights.w2_scale,
                gemm2_bias=None,
                output1_scale_scalar=None,
                output1_scale_gate_scalar=None,
                output2_scale_scalar=None,
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                n_group=None,
                topk_group=None,
                intermediate_size=shape.intermediate,
                local_expert_offset=0,
                local_num_experts=shape.num_experts,
                routed_scaling_factor=None,
                routing_method_type=_ROUTED_BY_TOP_K,
                do_finalize=True,
                activation_type=_SWIGLU,
                output=output,
            )

        return call

    return PeerLayer(inputs, bind, note="its launches include the routing plan")


def _reason(point: Point) -> str | None:
    return multiple_reason(point, 128)


BACKENDS = {"flashinfer": Peer("flashinfer", "flashinfer-python", _RECIPE, _RECIPE, (10,), _reason, _open)}
