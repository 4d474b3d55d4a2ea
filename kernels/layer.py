"""One MoE layer on one GPU: five launches, no host sync, no allocation."""

from __future__ import annotations

import torch

from megamoe import profile
from megamoe.id_map import IdMap
from megamoe.kernels.combine import combine
from megamoe.kernels.config import LayerConfig
from megamoe.kernels.down import down
from megamoe.kernels.gate_up import gate_up
from megamoe.kernels.pre_dispatch import pre_dispatch
from megamoe.kernels.routing import build_plan, max_tiles
from megamoe.parameters import LayerParameters
from megamoe.recipe import Recipe, traits
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights
from megamoe.workspace import Workspace

LAUNCHES = ("pre_dispatch", "routing", "gate_up", "down", "combine")


def pre_dispatch_kind(recipe: Recipe) -> str:
    """Name of the activations' quantization, as `kernels.pre_dispatch` takes it."""
    t = traits(recipe)
    if t.act == "bf16":
        return "bf16"
    if t.act == "e2m1":
        if t.act_scale_format == "ue8m0":
            return "mxfp4"
        return "nvfp4" if t.token_scale else "nvfp4_gsf"
    if t.act_scale_format == "fp32":
        return "fp8_block128" if t.act_group else "fp8_token"
    return "mxfp8_trtllm" if recipe.numerics == "trtllm_gen" else "mxfp8"


def id_map(spec: LayerSpec, parameters: LayerParameters) -> IdMap:
    """How the caller's ids become local ones."""
    return IdMap(spec.num_experts, spec.expert_offset, spec.num_local_experts, spec.shared_slots, parameters.expert_map)


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
    parameters: LayerParameters,
    amax_floor: float | None = None,
) -> None:
    """output [T, H] BF16 = the layer of `hidden_states` BF16 [T, H] under `spec`; arguments must be validated.

    topk_ids int32 or int64 [T, K], topk_weights fp32 [T, K]; T at most what `ws` was allocated for. Everything between
    goes to `ws`, whose rows beyond T are neither read nor written.
    """
    num_tokens = hidden_states.shape[0]
    with profile.stage("pre_dispatch"):
        pre_dispatch(
            hidden_states,
            topk_ids,
            topk_weights,
            q=ws.x_q[:num_tokens],
            sf=None if ws.x_sf is None else ws.x_sf[:num_tokens],
            ids_out=ws.topk_ids[:num_tokens],
            weights_out=ws.topk_weights[:num_tokens],
            token_scale=None if ws.x_scale is None else ws.x_scale[:num_tokens],
            kind=pre_dispatch_kind(spec.recipe),
            group=spec.traits.act_group or None,
            amax_floor=amax_floor,
            expert_scales=parameters.expert_scales,
            routed_scaling_factor=parameters.routed_scaling_factor,
            x_gsf=parameters.x_gsf,
            id_map=id_map(spec, parameters),
        )
    run_dispatched(ws, output, num_tokens, weights=weights, spec=spec, config=config, parameters=parameters)


def run_dispatched(
    ws: Workspace,
    output: torch.Tensor,
    num_tokens: int,
    *,
    weights: MoEWeights,
    spec: LayerSpec,
    config: LayerConfig,
    parameters: LayerParameters,
) -> None:
    """The layer after the pre-dispatch: `ws` already holds the quantized tokens and their routing."""
    ids = ws.topk_ids[:num_tokens]
    num_experts = spec.num_slot_experts
    num_tiles = max_tiles(num_tokens * spec.top_k, num_experts, config.block_m)
    with profile.stage("routing"):
        build_plan(ids, ws.plan, num_experts=num_experts, block_m=config.block_m)
    with profile.stage("gate_up"):
        gate_up(ws, weights, spec, config, parameters, num_tokens, num_tiles)
    with profile.stage("down"):
        down(ws, weights, spec, config, num_tokens, num_tiles)
    with profile.stage("combine"):
        combine(
            ws.rows[:num_tokens],
            ids,
            output,
            num_experts=num_experts,
            shared=spec.shared_intermediate > 0,
            topk_weights=ws.topk_weights[:num_tokens] if spec.recipe.numerics == "trtllm_gen" else None,
        )
