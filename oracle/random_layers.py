"""Random layers of any recipe and with any option: weights, inputs and routing for tests, the demo and the benches.

Weights are normal with variance 1/K and then quantized, so that gate and up have about unit variance for
the inputs made here. Every function draws from the `torch.Generator` it is given, on that generator's
device; the same seed gives other numbers on CPU than on CUDA.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from megamoe import formats
from megamoe.oracle.reference.quantizers import (
    BlockFormat,
    expand_scales,
    quantize,
    requantize,
    shared_weight_format,
    weight_format,
)
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe, traits
from megamoe.spec import LayerSpec

_NVFP4 = Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100")
DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8, "bf16": torch.bfloat16}
"""Of a weight's elements."""
_PER_EXPERT = {
    "swiglu": {"clamp": (0.5, 2.5)},
    "swigluoai": {"clamp": (0.5, 2.5), "alpha": (1.0, 2.4), "beta": (0.5, 1.5)},
    "situ": {"alpha": (1.0, 4.0), "beta": (1.0, 4.0)},
}
"""Ranges of random per-expert parameters."""


@dataclass(frozen=True)
class Inputs:
    """x BF16 [T, H], topk_ids int32 [T, K], topk_weights fp32 [T, K]."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """A layer and one call's inputs: what `moe_layer(layer.x, …, layer.weights, layer.spec, parameters=…)` takes."""

    spec: LayerSpec
    weights: PlainWeights
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    parameters: LayerParameters = field(default_factory=LayerParameters)


def random_layer(
    recipe: Recipe,
    *,
    tokens: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    num_shared_experts: int = 0,
    shared_weight: str | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    local_experts: int | None = None,
    local_expert_offset: int = 0,
    expert_map: bool = False,
    w13_layout: str = "gate_up",
    bias: bool = False,
    global_scales: bool = False,
    per_expert: Sequence[str] = (),
    expert_scales: bool = False,
    routed_scaling_factor: float = 1.0,
    masked: float = 0.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Layer:
    """A whole random layer; see `layer_spec`, `random_weights`, `random_inputs` and `random_parameters`."""
    spec = layer_spec(
        recipe, hidden, intermediate, num_experts, top_k, num_shared_experts, shared_weight, activation_clamp,
        activation, activation_alpha=activation_alpha, activation_beta=activation_beta, local_experts=local_experts,
        local_expert_offset=local_expert_offset, has_expert_map=expert_map,
    )  # fmt: skip
    generator = torch.Generator(device).manual_seed(seed)
    weights = random_weights(spec, generator, w13_layout=w13_layout, bias=bias, global_scales=global_scales)
    inputs = random_inputs(spec, tokens, generator, masked=masked)
    parameters = random_parameters(
        spec, generator,
        per_expert=per_expert, expert_scales=expert_scales, routed_scaling_factor=routed_scaling_factor,
    )  # fmt: skip
    return Layer(spec, weights, inputs.x, inputs.topk_ids, inputs.topk_weights, parameters)


def layer_spec(
    recipe: Recipe,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    num_shared_experts: int = 0,
    shared_weight: str | None = None,
    activation_clamp: float | None = None,
    activation: str = "swiglu",
    *,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    local_experts: int | None = None,
    local_expert_offset: int = 0,
    has_expert_map: bool = False,
) -> LayerSpec:
    """A `LayerSpec`; with shared experts their element defaults to E4M3 beside E4M3 activations, as in DeepGEMM, and to
    the routed experts' otherwise."""
    row = traits(recipe)
    if num_shared_experts and shared_weight is None:
        shared_weight = "e4m3" if row.act == "e4m3" else row.weight
    return LayerSpec(
        recipe,
        hidden,
        intermediate,
        num_experts,
        top_k,
        num_shared_experts,
        shared_weight if num_shared_experts else None,
        activation=activation,
        activation_clamp=activation_clamp,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        local_experts=local_experts,
        local_expert_offset=local_expert_offset,
        has_expert_map=has_expert_map,
    )


def random_weights(
    spec: LayerSpec,
    generator: torch.Generator,
    *,
    w13_layout: str = "gate_up",
    bias: bool = False,
    global_scales: bool = False,
) -> PlainWeights:
    """Weights of `spec`, made and quantized expert by expert: one expert in fp32 is the extra memory.

    `bias` adds normal biases of size 0.3, `global_scales` l1_alphas, l2_alphas and l2_act_scales between ½ and 1½.
    """
    device, hidden, width = generator.device, spec.hidden, spec.intermediate
    fmt = weight_format(spec.traits)
    local, experts = spec.num_local_experts, spec.num_slot_experts
    weights = PlainWeights(
        *_stacked(local, width, hidden, fmt, generator, w13_layout),
        *_stacked(local, hidden, width, fmt, generator),
        w13_layout=w13_layout,
    )
    if spec.num_shared_experts:
        fmt = shared_weight_format(spec.recipe, DTYPES[str(spec.shared_weight)])
        if spec.shared_slots:
            w13 = _stacked(spec.shared_slots, width, hidden, fmt, generator, w13_layout)
            w2 = _stacked(spec.shared_slots, hidden, width, fmt, generator)
        else:
            dense = spec.shared_intermediate
            w13 = _first(_stacked(1, dense, hidden, fmt, generator, "gate_up"))
            w2 = _first(_stacked(1, hidden, dense, fmt, generator))
        weights = replace(weights, shared_w13=w13[0], shared_w13_scale=w13[1], shared_w2=w2[0], shared_w2_scale=w2[1])
    if bias:
        weights = replace(
            weights,
            w13_bias=0.3 * torch.randn(experts, 2 * width, generator=generator, dtype=torch.float32, device=device),
            w2_bias=0.3 * torch.randn(experts, hidden, generator=generator, dtype=torch.float32, device=device),
        )
    if global_scales:
        weights = replace(
            weights,
            l1_alphas=_uniform(generator, 0.5, 1.5, experts, 2),
            l2_alphas=_uniform(generator, 0.5, 1.5, experts),
            l2_act_scales=_uniform(generator, 0.5, 1.5, experts),
        )
    return weights


def random_inputs(spec: LayerSpec, tokens: int, generator: torch.Generator, *, masked: float = 0.0) -> Inputs:
    """Normal rows whose scale differs from token to token (½ … 2), distinct experts per token, weights that
    sum to 1.

    Where there are shared slots, the last columns of ids name them, all of them, with weight 1. `masked` is the share
    of slots whose id is −1.
    """
    device, routed = generator.device, spec.top_k - spec.shared_slots
    if routed < 1:
        raise ValueError(f"top_k={spec.top_k} counts the {spec.shared_slots} shared slots; at least one more is needed")
    x = torch.randn(tokens, spec.hidden, generator=generator, dtype=torch.float32, device=device)
    x *= torch.exp2(2 * torch.rand(tokens, 1, generator=generator, dtype=torch.float32, device=device) - 1)
    scores = torch.rand(tokens, spec.num_experts, generator=generator, dtype=torch.float32, device=device)
    shared = spec.num_experts + torch.arange(spec.shared_slots, dtype=torch.int32, device=device)
    ids = torch.cat([scores.topk(routed, dim=-1).indices.int(), shared.expand(tokens, -1)], dim=1)
    ids[torch.rand(tokens, spec.top_k, generator=generator, dtype=torch.float32, device=device) < masked] = -1
    weights = 0.25 + torch.rand(tokens, routed, generator=generator, dtype=torch.float32, device=device)
    weights = weights / weights.sum(-1, keepdim=True)
    ones = torch.ones(tokens, spec.shared_slots, dtype=torch.float32, device=device)
    return Inputs(x.bfloat16(), ids, torch.cat([weights, ones], dim=1))


def random_parameters(
    spec: LayerSpec,
    generator: torch.Generator,
    *,
    per_expert: Sequence[str] = (),
    expert_scales: bool = False,
    routed_scaling_factor: float = 1.0,
) -> LayerParameters:
    """What `spec` needs (a random expert map, x_gsf) and what is asked for.

    per_expert: any of clamp (½ … 2½, and +inf for one expert), alpha and beta (around the activation's own, situ's
    small enough to be felt by values of size 1).
    """
    experts = spec.num_slot_experts
    values: dict[str, torch.Tensor] = {}
    for name in per_expert:
        values[name] = _uniform(generator, *_PER_EXPERT[spec.activation][name], experts)
    if "clamp" in values:
        values["clamp"][experts // 2] = torch.inf
    if expert_scales:
        values["expert_scales"] = _uniform(generator, 0.5, 1.5, spec.num_experts)
    if spec.has_expert_map:
        order = torch.randperm(spec.num_experts, generator=generator, device=generator.device)
        expert_map = torch.full((spec.num_experts,), -1, dtype=torch.int32, device=generator.device)
        local = torch.arange(spec.num_local_experts, dtype=torch.int32, device=generator.device)
        expert_map[order[: spec.num_local_experts]] = local
        values["expert_map"] = expert_map
    if spec.recipe.act_scale == "nv16":
        values["x_gsf"] = _uniform(generator, 1.5, 3.5, 1)
    return LayerParameters(routed_scaling_factor=routed_scaling_factor, **values)


def quantize_weight(w: torch.Tensor, fmt: BlockFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 [N, K] to (elements, scales) of `fmt`: amax to the element's largest value, as upstream's test
    helpers do; BF16 has no scales."""
    if fmt.element == "bf16":
        return w.bfloat16(), None
    if fmt.scale == "ue8m0":
        return quantize(w, "mxfp8" if fmt.element == "e4m3" else "mxfp4")[:2]
    if fmt.scale == "ue4m3":
        return requantize(w, _NVFP4)  # weights use the fused requantizer's rule: no outer scale
    rows, cols = w.shape
    padded = torch.nn.functional.pad(w, (0, -cols % fmt.cols, 0, -rows % fmt.rows))
    blocks = padded.unflatten(1, (-1, fmt.cols)).unflatten(0, (-1, fmt.rows))
    sf = blocks.abs().amax((1, 3)).clamp_min(1e-4) / formats.E4M3_MAX
    return formats.encode_e4m3(w / expand_scales(sf, fmt, rows, cols)), sf


def _stacked(
    count: int, rows: int, cols: int, fmt: BlockFormat, generator: torch.Generator, w13_layout: str | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`count` matrices [rows, cols] and their scales; with a `w13_layout`, gate and up of `rows` each.

    Interleaved, scale blocks cover the rows as they lie; otherwise none spans gate and up.
    """
    device = generator.device
    halves = 1 if w13_layout is None else 2
    parts, part_rows = (1, 2 * rows) if w13_layout == "interleaved" else (halves, rows)
    packed = cols // 2 if fmt.element == "e2m1" else cols
    q = torch.empty(count, parts, part_rows, packed, dtype=DTYPES[fmt.element], device=device)
    sf = None
    if fmt.element != "bf16":
        sf_shape = (count, parts, -(-part_rows // fmt.rows), -(-cols // fmt.cols))
        sf = torch.empty(sf_shape, dtype=torch.float32 if fmt.scale == "fp32" else torch.uint8, device=device)
    for index in itertools.product(range(count), range(parts)):
        w = torch.randn(part_rows, cols, generator=generator, dtype=torch.float32, device=device) * cols**-0.5
        elements, scales = quantize_weight(w, fmt)
        q.view(torch.uint8)[index] = elements.view(torch.uint8)
        if sf is not None and scales is not None:
            sf[index] = scales
    return q.flatten(1, 2), None if sf is None else sf.flatten(1, 2)


def _first(stacked: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, sf = stacked
    return q[0], None if sf is None else sf[0]


def _uniform(generator: torch.Generator, low: float, high: float, *shape: int) -> torch.Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float32, device=generator.device)
