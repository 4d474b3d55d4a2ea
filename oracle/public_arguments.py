"""A random layer as arguments of the public API: what a caller of `mega_moe` or `MegaMoE` would write for it."""

from __future__ import annotations

from typing import Any

from megamoe.oracle.random_layers import Layer


def weight_arguments(layer: Layer) -> dict[str, Any]:
    """Keywords of `prepare_weights`."""
    return {**vars(layer.weights), **vars(layer.spec.recipe)}


def layer_arguments(layer: Layer) -> dict[str, Any]:
    """Keywords of `MegaMoE` beside its weights, max_tokens and top_k."""
    spec, parameters = layer.spec, layer.parameters
    activation: dict[str, Any] = {"activation": spec.activation}
    takes_numbers = spec.activation == "swigluoai" or (
        spec.activation == "situ" and spec.recipe.numerics == "trtllm_gen"
    )
    for name in ("clamp", "alpha", "beta"):
        number, per_expert = getattr(spec, f"activation_{name}"), getattr(parameters, name)
        if per_expert is not None:
            activation[f"activation_{name}"] = per_expert
        elif name == "clamp" or takes_numbers:
            activation[f"activation_{name}"] = number
    return {
        **activation,
        "expert_scales": parameters.expert_scales,
        "x_gsf": parameters.x_gsf,
        "routed_scaling_factor": parameters.routed_scaling_factor,
        "local_expert_offset": spec.local_expert_offset,
        "num_experts": spec.num_experts,
        "expert_map": parameters.expert_map,
    }


def call_arguments(layer: Layer) -> dict[str, Any]:
    """Keywords of `mega_moe`."""
    inputs = {"hidden_states": layer.x, "topk_ids": layer.topk_ids, "topk_weights": layer.topk_weights}
    return {**inputs, **weight_arguments(layer), **layer_arguments(layer)}
