"""One MoE layer on one GPU: five launches, no host sync, no allocation."""

from __future__ import annotations

import torch

from megamoe.kernels.combine import combine
from megamoe.kernels.config import LayerConfig
from megamoe.kernels.down import down
from megamoe.kernels.gate_up import gate_up
from megamoe.kernels.pre_dispatch import pre_dispatch
from megamoe.kernels.routing import build_plan, max_tiles
from megamoe.recipe import Traits
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights
from megamoe.workspace import Workspace

LAUNCHES = ("pre_dispatch", "routing", "gate_up", "down", "combine")


def pre_dispatch_kind(traits: Traits) -> str:
    """Name of the activations' quantization, as `kernels.pre_dispatch` takes it."""
    if traits.act == "e4m3":
        return "fp8_block128" if traits.act_scale_format == "fp32" else "mxfp8"
    return "nvfp4" if traits.act_scale_format == "ue4m3" else "mxfp4"


def run_layer(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    output: torch.Tensor,
    *,
    ws: Workspace,
    weights: MoEWeights,
    spec: LayerSpec,
    config: LayerConfig,
    expert_scales: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    amax_floor: float | None = None,
) -> None:
    """output [T, H] BF16 = the layer of `hidden_states` BF16 [T, H] under `spec`; arguments must be validated.

    topk_ids int32 or int64 [T, K], topk_weights fp32 [T, K]; T at most what `ws` was allocated for. Everything between
    goes to `ws`, whose rows beyond T are neither read nor written.
    """
    num_tokens = hidden_states.shape[0]
    x_scale = None if ws.x_scale is None else ws.x_scale[:num_tokens]
    pre_dispatch(
        hidden_states,
        topk_ids,
        topk_weights,
        q=ws.x_q[:num_tokens],
        sf=ws.x_sf[:num_tokens],
        ids_out=ws.topk_ids[:num_tokens],
        weights_out=ws.topk_weights[:num_tokens],
        token_scale=x_scale,
        kind=pre_dispatch_kind(spec.traits),
        group=spec.traits.act_group,
        amax_floor=amax_floor,
        expert_scales=expert_scales,
        routed_scaling_factor=routed_scaling_factor,
    )
    run_dispatched(ws, output, num_tokens, weights=weights, spec=spec, config=config)


def run_dispatched(
    ws: Workspace,
    output: torch.Tensor,
    num_tokens: int,
    *,
    weights: MoEWeights,
    spec: LayerSpec,
    config: LayerConfig,
) -> None:
    """The layer after the pre-dispatch: `ws` already holds the quantized tokens and their routing."""
    ids = ws.topk_ids[:num_tokens]
    build_plan(ids, ws.plan, num_experts=spec.num_local_experts, block_m=config.block_m)
    num_tiles = max_tiles(num_tokens * spec.top_k, spec.num_local_experts, config.block_m)
    gate_up(ws, weights, spec, config, num_tokens, num_tiles)
    down(ws, weights, spec, config, num_tokens, num_tiles)
    combine(
        ws.rows[:num_tokens],
        ids,
        output,
        num_experts=spec.num_local_experts,
        shared=spec.num_shared_experts > 0,
    )
