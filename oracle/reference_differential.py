"""Our kernels against the reference, case by case: pre-dispatch bytes, exact-sum layers, errors of random layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

import megamoe
from megamoe.backends import unsupported_reason
from megamoe.backends.base import LayerRequest
from megamoe.oracle.comparison import Case, Outcome, compare_bytes
from megamoe.oracle.exact_sum import exact_sum_layer
from megamoe.oracle.metrics import LIMITS, check, compare
from megamoe.oracle.random_layers import layer_spec, random_inputs, random_parameters, random_weights
from megamoe.oracle.reference import moe_layer
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import ALL_RECIPES, Recipe
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights

MODELS = {
    "V4-Flash": dict(hidden=4096, intermediate=2048, num_experts=256, top_k=6, activation_clamp=10.0),
    "V4-Pro": dict(hidden=7168, intermediate=3072, num_experts=384, top_k=6, activation_clamp=10.0),
}
TOKENS = (1, 7, 64, 129, 1024, 8192)
# What Triton's interpreter can run in seconds.
_SMALL = {"small": dict(hidden=256, intermediate=128, num_experts=5, top_k=2, activation_clamp=10.0)}
_SMALL_TOKENS = (1, 7)
_EXACT = dict(tokens=6, hidden=128, intermediate=128, num_experts=3, top_k=2)


def cases(device: torch.device) -> list[Case]:
    """Every served recipe; `device` decides the sizes."""
    on_gpu = device.type == "cuda"
    models, tokens = (MODELS, TOKENS) if on_gpu else (_SMALL, _SMALL_TOKENS)
    found = []
    for recipe in ALL_RECIPES:
        request = LayerRequest(layer_spec(recipe, 256, 128, 8, 2), device, 16)
        reference = partial(
            Case, "layer", str(recipe), "reference", "reference", unavailable=unsupported_reason("triton", request)
        )
        found.append(reference(name="exact sums", run=partial(compare_exact_sums, recipe, device)))
        for model, shape in models.items():
            for count in tokens:
                run = partial(compare_random, recipe, model, tuple(shape.items()), count, device)
                found.append(reference(name=f"{model}, {count} tokens", run=run))
    return found


def prepared_layer(weights: PlainWeights, recipe: Recipe) -> MoEWeights:
    """The weights in kernel order, through the public API."""
    return megamoe.prepare_weights(
        **vars(weights), mma_type=recipe.mma_type, act_scale=recipe.act_scale, numerics=recipe.numerics
    )


def run_ours(
    spec: LayerSpec, weights: MoEWeights, max_tokens: int, x_gsf: torch.Tensor | None = None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Our layer on prepared weights, through the public API, into an output of NaN."""
    layer = megamoe.MegaMoE(
        weights, max_tokens, spec.top_k, activation_clamp=spec.activation_clamp, x_gsf=x_gsf, moe_backend="triton"
    )

    def call(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        return layer(x, topk_ids, topk_weights, torch.full_like(x, torch.nan))

    return call


def compare_exact_sums(recipe: Recipe, device: torch.device) -> Outcome:
    layer = exact_sum_layer(recipe, device=device, **_EXACT)  # type: ignore[arg-type]
    inputs = (layer.x, layer.topk_ids, layer.topk_weights)
    ours = run_ours(layer.spec, prepared_layer(layer.weights, recipe), len(layer.x), layer.parameters.x_gsf)(*inputs)
    expected = moe_layer(*inputs, layer.weights, layer.spec, parameters=layer.parameters, full_trace=False).y
    return compare_bytes([("y", ours, expected)])


def compare_random(
    recipe: Recipe, model: str, shape: tuple[tuple[str, object], ...], tokens: int, device: torch.device
) -> Outcome:
    held = held_layer(recipe, shape, device)
    generator = torch.Generator(device).manual_seed(tokens)
    inputs = random_inputs(held.spec, tokens, generator)
    arguments = (inputs.x, inputs.topk_ids, inputs.topk_weights)
    ours = run_ours(held.spec, held.prepared, tokens, held.parameters.x_gsf)(*arguments)
    # Every token, not a sample: one wrong row among thousands must show.
    expected = moe_layer(*arguments, held.plain, held.spec, parameters=held.parameters, full_trace=False).y
    report = compare(ours, expected)
    if recipe not in LIMITS:
        problem: str | None = "oracle/metrics.py has no limits for this recipe"
    else:
        problem = check(report, LIMITS[recipe])
    details = {"outputs": expected.numel(), "ours": vars(report), "shared_experts": held.spec.num_shared_experts}
    return Outcome(details=details, problem=problem)


@dataclass(frozen=True)
class HeldLayer:
    """A layer's weights, plain and in kernel order, and the parameters its recipe needs."""

    spec: LayerSpec
    plain: PlainWeights
    prepared: MoEWeights
    parameters: LayerParameters


@lru_cache(maxsize=1)  # tens of gigabytes
def held_layer(recipe: Recipe, shape: tuple[tuple[str, object], ...], device: torch.device) -> HeldLayer:
    """Random weights of `shape`, arguments of `layer_spec`; by default a shared expert where the recipe serves one."""
    held_layer.cache_clear()  # before the next one is made, not after
    spec = layer_spec(recipe, **{"num_shared_experts": 1, **dict(shape)})  # type: ignore[arg-type]
    if unsupported_reason("triton", LayerRequest(spec, device, 1)) is not None:
        spec = replace(spec, num_shared_experts=0, shared_weight=None)
    generator = torch.Generator(device).manual_seed(0)
    plain = random_weights(spec, generator)
    return HeldLayer(spec, plain, prepared_layer(plain, recipe), random_parameters(spec, generator))
