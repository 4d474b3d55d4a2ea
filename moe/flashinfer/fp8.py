"""`trtllm_fp8_block_scale_moe` and its pre-routed sibling: DeepSeek FP8 and MXFP8 experts."""

from __future__ import annotations

import torch

from megamoe.flashinfer import arguments, call, routing_arguments, weight_arguments
from megamoe.flashinfer.enums import ActivationType, Fp8QuantizationType


def trtllm_fp8_block_scale_routed_moe(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int | str = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    gemm1_lora_delta: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: int = Fp8QuantizationType.DeepSeekFp8,
    activation_type: int = ActivationType.Swiglu.value,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """A routed FP8 layer; what is not said here is as in `trtllm_fp4_block_scale_routed_moe`.

    fp8_quantization_type:

    | | hidden_states_scale | weight scales |
    |---|---|---|
    | 1 `DeepSeekFp8` | float32 [H/128, T] | float32 [L, 2I/128, H/128] and [L, H/128, I/128] |
    | 2 `MxFp8` | UE8M0 bytes [T, H/32] | UE8M0 bytes, one per 32 columns |

    hidden_states float8_e4m3fn [T, H], gemm1_weights float8_e4m3fn [L, 2I, H], gemm2_weights [L, H, I]. Their layout:

    | use_shuffled_weight | weight_layout | `DeepSeekFp8` | `MxFp8` |
    |---|---|---|---|
    | False | 0 | [up; gate] rows | [up; gate] rows, row-major scales (upstream refuses it) |
    | True | 0 | the same, shuffled in blocks of 16 | pairs, shuffled in blocks of 32, tiled scales |
    | True | 2 | shuffled, then [L, H/128, 2I, 128] | refused |
    | False | "gate_up" | [gate; up] rows | [gate; up] rows, row-major scales |

    activation_type: 3 (Swiglu) alone. Returns the output itself, as 0.6.18 does; a list with do_finalize=False.
    """
    arguments.refuse_lora(gemm1_lora_delta)
    layer = _layer(
        hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        use_shuffled_weight, weight_layout, fp8_quantization_type, activation_type, gemm1_alpha, gemm1_beta,
        gemm1_clamp_limit,
        arguments.check_sizes(num_experts, top_k, intermediate_size, local_expert_offset, local_num_experts),
    )  # fmt: skip
    result = call.run(layer, call.precomputed(layer, topk_ids), do_finalize, output)
    return result[0] if do_finalize else result


def trtllm_fp8_block_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int | str = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int | str = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: int = Fp8QuantizationType.DeepSeekFp8,
    num_fused_shared_experts: int | None = None,
    activation_type: int = ActivationType.Swiglu.value,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """`trtllm_fp8_block_scale_routed_moe` with the router of `trtllm_fp4_block_scale_moe`."""
    sizes = arguments.check_sizes(
        num_experts, top_k, intermediate_size, local_expert_offset, local_num_experts, num_fused_shared_experts
    )
    layer = _layer(
        hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        use_shuffled_weight, weight_layout, fp8_quantization_type, activation_type, gemm1_alpha, gemm1_beta,
        gemm1_clamp_limit, sizes,
    )  # fmt: skip
    tokens, device = len(layer.x.q), layer.x.q.device
    logits, router = routing_arguments.check_router(
        routing_logits, routing_bias, n_group, topk_group, routed_scaling_factor, routing_method_type, norm_topk_prob,
        input_ids, tid2eid, tokens, sizes, device,
    )  # fmt: skip
    replay = routing_arguments.check_replay(routing_replay_out, tokens, sizes, device)
    result = call.run(layer, call.from_logits(logits, router, replay), do_finalize, output)
    return result[0] if do_finalize else result


def _layer(
    hidden_states: object, hidden_states_scale: object, gemm1_weights: object, gemm1_weights_scale: object,
    gemm2_weights: object, gemm2_weights_scale: object, use_shuffled_weight: object, weight_layout: object,
    fp8_quantization_type: object, activation_type: object, gemm1_alpha: object, gemm1_beta: object,
    gemm1_clamp_limit: object, sizes: arguments.Sizes,
) -> call.Layer:  # fmt: skip
    kind = arguments.fp8_kind(fp8_quantization_type)
    layout = weight_arguments.fp8_layout(weight_layout, use_shuffled_weight, kind)
    x = arguments.check_fp8_activations(hidden_states, hidden_states_scale, kind)
    weights = weight_arguments.check_weights(
        layout, sizes, x, (gemm1_weights, gemm1_weights_scale), (gemm2_weights, gemm2_weights_scale)
    )
    gate = weight_arguments.check_gate(
        activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, sizes, x.recipe, x.q.device
    )
    return call.Layer(x, weights, sizes, gate)
