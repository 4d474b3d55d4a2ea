"""Every option of a layer on every dispatch path that allows it: the kernels against the reference.

A table, not samples: upstreams dropped alpha, beta or the limit silently on some paths. Each option also has to change
the result, so that one which both sides forget is seen.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from megamoe.oracle.dispatch_paths import PATHS, DispatchPath, run_path
from megamoe.oracle.metrics import LIMITS, check, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.parameters import LayerParameters
from megamoe.recipe import Recipe

SHAPE = dict(hidden=128, intermediate=128, num_experts=3, top_k=2)
# Hopper's FP8 adder has heavy tails in small layers: emulated (`matmul_fp8_wgmma`), 5 in 100 layers of 5 tokens go past
# the limits of FP8 blocks, none of 60 with 40 tokens. The interpreter adds in fp32 and is slow.
TOKENS = {"cpu": 5, "cuda": 40}


def _layer(path: DispatchPath, device: str, **options: object) -> Layer:
    shared = {"shared_weight": path.shared_weight, "num_shared_experts": 1 if path.shared_weight else 0}
    merged: dict = {"tokens": TOKENS[device], **SHAPE, **shared, **options}
    return random_layer(path.recipe, device=device, **merged)


def _reference(layer: Layer) -> torch.Tensor:
    return moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec,
        parameters=layer.parameters, full_trace=False,
    ).y  # fmt: skip


def _is_trtllm(recipe: Recipe) -> bool:
    return recipe.numerics == "trtllm_gen"


def _has_situ(recipe: Recipe) -> bool:
    return recipe.mma_type == "fp8xfp4" and recipe.act_scale == "mx32"


def _anywhere(recipe: Recipe) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Option:
    """Arguments of `random_layer` and the recipes that have the option; `base` is what it is compared against."""

    arguments: dict[str, object]
    allowed: Callable[[Recipe], bool] = _anywhere
    base: dict[str, object] = dataclasses.field(default_factory=dict)


SWIGLUOAI = {"activation": "swigluoai"}
OPTIONS = {
    "clamp 0": Option({"activation_clamp": 0.0}),
    "clamp 0.7": Option({"activation_clamp": 0.7}),
    "swigluoai": Option(SWIGLUOAI),
    "swigluoai, clamp": Option({**SWIGLUOAI, "activation_clamp": 0.7}, base=SWIGLUOAI),
    "swigluoai, alpha 1": Option({**SWIGLUOAI, "activation_alpha": 1.0}, base=SWIGLUOAI),
    "swigluoai, beta 0.5": Option({**SWIGLUOAI, "activation_beta": 0.5}, base=SWIGLUOAI),
    "situ": Option({"activation": "situ"}, _has_situ),
    "situ, alpha and beta": Option(
        {"activation": "situ", "activation_alpha": 1.5, "activation_beta": 2.5},
        lambda recipe: _has_situ(recipe) and _is_trtllm(recipe),
        base={"activation": "situ"},
    ),
    "clamp per expert": Option({"per_expert": ("clamp",)}, _is_trtllm),
    "alpha per expert": Option({**SWIGLUOAI, "per_expert": ("alpha",)}, _is_trtllm, base=SWIGLUOAI),
    "beta per expert": Option({**SWIGLUOAI, "per_expert": ("beta",)}, _is_trtllm, base=SWIGLUOAI),
    "all per expert": Option({**SWIGLUOAI, "per_expert": ("clamp", "alpha", "beta")}, _is_trtllm, base=SWIGLUOAI),
    "situ per expert": Option(
        {"activation": "situ", "per_expert": ("alpha", "beta")},
        lambda recipe: _has_situ(recipe) and _is_trtllm(recipe),
        base={"activation": "situ"},
    ),
    "bias": Option({"bias": True}),
    "bias, clamp": Option({"bias": True, "activation_clamp": 0.7}, base={"bias": True}),
    "global scales": Option({"global_scales": True}, lambda recipe: recipe.mma_type == "nvfp4xnvfp4"),
    "global scales, bias, beta, clamp": Option(
        {**SWIGLUOAI, "global_scales": True, "bias": True, "activation_clamp": 0.7},
        lambda recipe: recipe.mma_type == "nvfp4xnvfp4",
    ),
    "expert scales": Option({"expert_scales": True}),
    "factor 2.5": Option({"routed_scaling_factor": 2.5}),
    "interleaved w13": Option({"w13_layout": "interleaved"}),
    "interleaved w13, bias": Option({"w13_layout": "interleaved", "bias": True}),
    "some of the experts": Option({"num_experts": 9, "local_experts": 4, "local_expert_offset": 3}),
    "expert map": Option({"num_experts": 9, "local_experts": 4, "expert_map": True}),
    "two shared experts": Option({"num_shared_experts": 2, "top_k": 3}),
}


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(name, option, id=f"{name}-{option}")
        for name, path in PATHS.items()
        for option, entry in OPTIONS.items()
        if entry.allowed(path.recipe) and not (option == "two shared experts" and path.shared_weight is None)
    ],
)
def test_option(name: str, option: str, device: str) -> None:
    path, entry = PATHS[name], OPTIONS[option]
    layer = _layer(path, device, **entry.arguments)
    expected = _reference(layer)
    problem = check(compare(run_path(layer, path, device), expected), LIMITS[path.recipe])
    assert problem is None, problem
    without = _reference(_layer(path, device, **{**_sizes(entry.arguments), **entry.base}))
    assert compare(without, expected).rel_rms > 0.01, "the option changes the result"


def _sizes(arguments: dict[str, object]) -> dict[str, object]:
    """What an option's layer and the one without it must share to be comparable."""
    return {name: arguments[name] for name in ("num_experts", "top_k") if name in arguments}


SHARED = [name for name, path in PATHS.items() if path.shared_weight]


@pytest.mark.parametrize("num_shared", (1, 2))
@pytest.mark.parametrize("name", SHARED)
def test_the_routed_scaling_factor_leaves_shared_experts_at_weight_one(name: str, num_shared: int, device: str) -> None:
    """With every routed slot skipped, the factor changes no byte."""
    path = PATHS[name]
    layer = _layer(path, device, num_shared_experts=num_shared, top_k=3)
    routed = (layer.topk_ids >= 0) & (layer.topk_ids < layer.spec.num_experts)
    alone = dataclasses.replace(layer, topk_ids=torch.where(routed, -1, layer.topk_ids))
    scaled = dataclasses.replace(alone, parameters=dataclasses.replace(layer.parameters, routed_scaling_factor=2.5))
    once, with_factor = run_path(alone, path, device), run_path(scaled, path, device)
    assert once.abs().amax() > 0.1
    assert torch.equal(once, with_factor)


@pytest.mark.parametrize("name", [name for name in SHARED if _is_trtllm(PATHS[name].recipe)])
def test_a_shared_slots_weight_is_the_callers(name: str, device: str) -> None:
    """SGLang's other rule: weight 1/factor here, and the factor on the output."""
    path = PATHS[name]
    layer = _layer(path, device)
    weights = torch.where(layer.topk_ids >= layer.spec.num_experts, 1 / 2.5, layer.topk_weights)
    layer = dataclasses.replace(layer, topk_weights=weights)
    problem = check(compare(run_path(layer, path, device), _reference(layer)), LIMITS[path.recipe])
    assert problem is None, problem


def test_parameters_of_the_table_are_all_in_use() -> None:
    """A field that nothing above sets would be an untested option."""
    used = {argument for entry in OPTIONS.values() for argument in entry.arguments}
    per_expert = {name for entry in OPTIONS.values() for name in entry.arguments.get("per_expert", ())}
    fields = {field.name for field in dataclasses.fields(LayerParameters)}
    assert fields - used - per_expert == {"x_gsf"}, "x_gsf is what every nv16 layer has"
