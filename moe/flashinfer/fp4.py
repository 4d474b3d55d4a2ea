"""`trtllm_fp4_block_scale_moe` and its pre-routed sibling: MXFP4 and NVFP4 experts behind FlashInfer's arguments."""

from __future__ import annotations

import torch

from megamoe.flashinfer import arguments, call, routing_arguments, weight_arguments
from megamoe.flashinfer.enums import ActivationType


def trtllm_fp4_block_scale_routed_moe(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu.value,
    per_token_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    gemm1_lora_delta: torch.Tensor | None = None,
    *,
    weight_layout: str = "shuffled",
) -> list[torch.Tensor]:
    """A routed FP4 layer on this rank's L experts (`local_num_experts`), of E in all (`num_experts`).

    topk_ids: int32 words [T, K] (`pack_topk_ids`), or (ids int32, weights float32 or bfloat16) [T, K], used as they
    are. Ids are global; −1 and another rank's skip the slot.

    hidden_states decides the recipe, and is never quantized here:

    | hidden_states | hidden_states_scale | weights |
    |---|---|---|
    | bfloat16 [T, H] | None | MXFP4 |
    | float8_e4m3fn [T, H] | UE8M0 bytes [T, H/32] | MXFP4 |
    | E2M1 uint8 [T, H/2] | UE4M3 bytes [T, H/16] | NVFP4; `per_token_scale` float32 [T] optional |

    Activation scales are row-major and 2-D: tiles are refused by their shape. Scale bytes are labelled float8_e4m3fn or
    uint8, UE8M0 also float8_e8m0fnu.

    gemm1_weights uint8 [L, 2I, H/2], gemm2_weights uint8 [L, H, I/2]; scales one byte per 32 (NVFP4: 16) columns.
    weight_layout: "shuffled", as FlashInfer prepares them ([up; gate] rows alternate, are shuffled in blocks of 32, and
    scales lie in 128×4 tiles, whose shape is but a label); "up_gate" or "gate_up", plain rows in that order of halves
    with scales [L, 2I, H/32] and [L, H, I/32]. Biases, float32 [L, 2I] and [L, H], have the rows' order.

    The layer: gate = min(gate, limit), up = clamp(up, ±limit), out = gate·sigmoid(alpha·gate)·(up + beta), with
    gemm1_alpha (None: 1), gemm1_beta (0), gemm1_clamp_limit (none), float32 [L]; activation_type 3 (Swiglu), or 10
    (Situ, MXFP8 activations alone; alpha and beta are 1 when None). output1_scale_gate_scalar multiplies the clamped
    gate, output1_scale_scalar the activated value, output2_scale_scalar GEMM 2's rows with their bias, float32 [L];
    NVFP4 needs all three, and its bias, limit and beta are in units of the raw accumulators.

    output: BF16 [T, at most H], fewer columns drop the last ones; allocated when None. T = 0 is allowed.

    Returns [output]. With do_finalize=False, [rows, weights, row_of_slot]: GEMM 2's rows BF16 [T·K, H], unweighted; the
    weights in the dtype they came in (BF16 of words); and int32 [T·K], each slot's row, −1 where it is skipped, in
    which case the row is undefined. `output` is not written then.

    routing_bias, n_group, topk_group, routed_scaling_factor and routing_method_type have no say in a routed call, as
    upstream; enable_pdl and tune_max_num_tokens are hints to kernels that are not these. gemm1_lora_delta is refused.

    Weights are reordered at their first call and the copies kept for as long as the caller's tensors live
    (`megamoe.flashinfer.prepared`); that call is not to be captured in a CUDA graph.

    Raises `TypeError`/`ValueError` naming the argument, or `UnsupportedError` where the kernels cannot run; nothing is
    launched or written then. Contract: FlashInfer 0.6.18; numerics: the `trtllm_gen` recipes of `megamoe.recipe`.
    """
    arguments.refuse_lora(gemm1_lora_delta)
    layer = _layer(
        hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm1_bias, gemm1_alpha, gemm1_beta,
        gemm1_clamp_limit, gemm2_weights, gemm2_weights_scale, gemm2_bias, output1_scale_scalar,
        output1_scale_gate_scalar, output2_scale_scalar, activation_type, per_token_scale, weight_layout,
        arguments.check_sizes(num_experts, top_k, intermediate_size, local_expert_offset, local_num_experts),
    )  # fmt: skip
    return call.run(layer, call.precomputed(layer, topk_ids), do_finalize, output)


def trtllm_fp4_block_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int | str = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu.value,
    per_token_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    num_fused_shared_experts: int | None = None,
    *,
    weight_layout: str = "shuffled",
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """`trtllm_fp4_block_scale_routed_moe` with the router: routing_logits float32 or bfloat16 [T, E].

    routing_method_type: a `RoutingMethodType`, "sqrt_softplus" or "hash" (`megamoe.flashinfer.routing` has the rules
    and says which of routing_bias [E], n_group, topk_group, routed_scaling_factor and norm_topk_prob a method takes).
    "hash" takes the experts of token t from tid2eid[input_ids[t]], integers [T] and [vocabulary, K]. Weights are
    rounded to BF16, as upstream's are, but for these two methods.

    num_fused_shared_experts: S more rows in every per-expert tensor, the last ones, and S more slots per token with
    ids E + s and weight 1; for DeepSeekV3, "sqrt_softplus" and "hash" routing with all experts on this rank.
    routing_replay_out: int16 [at least T, K] to write the chosen ids into; not with S above 0.

    Returns as the routed function does, with K + S slots and the weights that the router made.
    """
    sizes = arguments.check_sizes(
        num_experts, top_k, intermediate_size, local_expert_offset, local_num_experts, num_fused_shared_experts
    )
    layer = _layer(
        hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm1_bias, gemm1_alpha, gemm1_beta,
        gemm1_clamp_limit, gemm2_weights, gemm2_weights_scale, gemm2_bias, output1_scale_scalar,
        output1_scale_gate_scalar, output2_scale_scalar, activation_type, per_token_scale, weight_layout, sizes,
    )  # fmt: skip
    tokens, device = len(layer.x.q), layer.x.q.device
    logits, router = routing_arguments.check_router(
        routing_logits, routing_bias, n_group, topk_group, routed_scaling_factor, routing_method_type, norm_topk_prob,
        input_ids, tid2eid, tokens, sizes, device,
    )  # fmt: skip
    replay = routing_arguments.check_replay(routing_replay_out, tokens, sizes, device)
    return call.run(layer, call.from_logits(logits, router, replay), do_finalize, output)


def _layer(
    hidden_states: object, hidden_states_scale: object, gemm1_weights: object, gemm1_weights_scale: object,
    gemm1_bias: object, gemm1_alpha: object, gemm1_beta: object, gemm1_clamp_limit: object, gemm2_weights: object,
    gemm2_weights_scale: object, gemm2_bias: object, output1_scale_scalar: object, output1_scale_gate_scalar: object,
    output2_scale_scalar: object, activation_type: object, per_token_scale: object, weight_layout: object,
    sizes: arguments.Sizes,
) -> call.Layer:  # fmt: skip
    x = arguments.check_fp4_activations(hidden_states, hidden_states_scale, per_token_scale)
    weights = weight_arguments.check_weights(
        weight_arguments.fp4_layout(weight_layout),
        sizes,
        x,
        (gemm1_weights, gemm1_weights_scale),
        (gemm2_weights, gemm2_weights_scale),
        biases=(gemm1_bias, gemm2_bias),
        factors=(output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar),
    )
    gate = weight_arguments.check_gate(
        activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, sizes, x.recipe, x.q.device
    )
    return call.Layer(x, weights, sizes, gate)
