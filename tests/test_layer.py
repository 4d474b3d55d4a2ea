"""Whole layers through the kernels: pre-dispatch, routing, both GEMMs with shared experts, combine.

On exact-sum inputs every summation order gives the same bits, so the layer must equal the reference byte for byte; on
random ones it must stay within the limits of `oracle.metrics`. Workspace and output are poisoned first.
"""

import dataclasses

import pytest
import torch

from megamoe.kernels.config import INTERPRETER, LayerConfig, choose_config
from megamoe.kernels.layer import run_layer
from megamoe.oracle.exact_sum import exact_sum_layer
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.recipe import SERVED, Recipe
from megamoe.weights import prepare
from megamoe.workspace import Workspace


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe, how its shared experts are stored, and which K loop serves it where that is not the default."""

    recipe: Recipe
    shared_weight: str | None = None
    mma: str | None = None


CASES = {
    "fp8xfp4": Case(SERVED[0]),
    "fp8xfp4, E4M3 shared": Case(SERVED[0], "e4m3"),
    "fp8xfp4, MXFP4 shared": Case(SERVED[0], "e2m1"),
    "mxf4xmxf4, shared": Case(SERVED[1], "e2m1"),
    "nvfp4xnvfp4, shared": Case(SERVED[2], "e2m1"),
    "nvfp4xnvfp4 decoded, shared": Case(SERVED[2], "e2m1", mma="decoded"),
    "fp8xfp4 decoded, E4M3 shared": Case(SERVED[0], "e4m3", mma="decoded"),
    "fp8xfp4 widened, E4M3 shared": Case(SERVED[0], "e4m3", mma="widened"),
    "mxf4xmxf4 decoded": Case(SERVED[1], mma="decoded"),
    "fp8xfp8, shared": Case(SERVED[3], "e4m3"),
}
SHAPE = dict(hidden=256, intermediate=128, num_experts=5, top_k=2)


def _arch(device: str) -> int:
    return INTERPRETER if device == "cpu" else 10 * torch.cuda.get_device_capability()[0]


def _config(layer: Layer, case: Case, device: str, num_tokens: int) -> LayerConfig:
    config = choose_config(layer.spec, _arch(device), num_tokens)
    if case.mma is None:
        return config
    return LayerConfig(
        dataclasses.replace(config.gate_up, mma=case.mma), dataclasses.replace(config.down, mma=case.mma)
    )


def _poisoned_workspace(layer: Layer, max_tokens: int, config: LayerConfig, device: str) -> Workspace:
    ws = Workspace.allocate(layer.spec, max_tokens, device, min_block_m=config.block_m)
    for tensor in ws.tensors().values():
        tensor.view(torch.uint8).fill_(0xFF)
    return ws


def _run(layer: Layer, case: Case, device: str, *, ws: Workspace | None = None) -> torch.Tensor:
    num_tokens = layer.x.shape[0]
    config = _config(layer, case, device, num_tokens)
    ws = ws or _poisoned_workspace(layer, num_tokens, config, device)
    output = torch.full_like(layer.x, torch.nan)
    x_before = layer.x.clone()
    run_layer(
        layer.x,
        layer.topk_ids,
        layer.topk_weights,
        output,
        ws=ws,
        weights=prepare(layer.weights, layer.spec.recipe),
        spec=layer.spec,
        config=config,
    )
    assert_bytes_equal(layer.x, x_before, "hidden states after the call")
    return output


def _reference(layer: Layer) -> torch.Tensor:
    return moe_layer(layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec, full_trace=False).y


def _random(case: Case, device: str, *, tokens: int = 20, **changes: object) -> Layer:
    shared = {"shared_weight": case.shared_weight, "num_shared_experts": 1 if case.shared_weight else 0}
    options: dict = {**SHAPE, **shared, "activation_clamp": 2.0, **changes}
    return random_layer(case.recipe, tokens=tokens, device=device, **options)


def _with(layer: Layer, **changes: object) -> Layer:
    return dataclasses.replace(layer, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exact_sum_layer_is_bitwise_the_reference(case: Case, device: str) -> None:
    layer = exact_sum_layer(
        case.recipe,
        tokens=20,
        num_shared_experts=1 if case.shared_weight else 0,
        shared_weight=case.shared_weight,
        seed=1,
        device=device,
        **SHAPE,
    )
    assert_bytes_equal(_run(layer, case, device), _reference(layer), "output")


@pytest.mark.parametrize("masked", (0.0, 0.4), ids=lambda share: f"{share:.0%} skipped")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_random_layer_is_within_limits(case: Case, masked: float, device: str) -> None:
    layer = _random(case, device, masked=masked)
    problem = check(compare(_run(layer, case, device), _reference(layer)), LIMITS[case.recipe])
    assert problem is None, problem


SHAPES = {
    # No multiple of the tile in K, in N, in either scale word or atom.
    "fp8xfp4": dict(hidden=352, intermediate=96),
    "fp8xfp4, E4M3 shared": dict(hidden=352, intermediate=96),
    "mxf4xmxf4, shared": dict(hidden=352, intermediate=96),
    "nvfp4xnvfp4, shared": dict(hidden=336, intermediate=80),
    "nvfp4xnvfp4 decoded, shared": dict(hidden=336, intermediate=80),
    "fp8xfp4 decoded, E4M3 shared": dict(hidden=352, intermediate=96),
    "fp8xfp8, shared": dict(hidden=384, intermediate=128),
}


@pytest.mark.parametrize("name", SHAPES)
def test_odd_sizes(name: str, device: str) -> None:
    case = CASES[name]
    layer = _random(case, device, tokens=7, **SHAPES[name])
    problem = check(compare(_run(layer, case, device), _reference(layer)), LIMITS[case.recipe])
    assert problem is None, problem


@pytest.mark.parametrize("num_shared", (1, 2))
@pytest.mark.parametrize("name", ("fp8xfp4, E4M3 shared", "fp8xfp8, shared"))
def test_several_shared_experts_are_one_wider_mlp(name: str, num_shared: int, device: str) -> None:
    case = CASES[name]
    layer = _random(case, device, num_shared_experts=num_shared)
    problem = check(compare(_run(layer, case, device), _reference(layer)), LIMITS[case.recipe])
    assert problem is None, problem


# situ is legal beside fp8xfp4 only.
ACTIVATIONS = [("swigluoai", name) for name in CASES] + [("situ", name) for name in CASES if name.startswith("fp8xfp4")]


@pytest.mark.parametrize(("activation", "name"), ACTIVATIONS)
def test_activations(activation: str, name: str, device: str) -> None:
    case = CASES[name]
    clamp = 1.5 if activation == "swigluoai" else None
    layer = _random(case, device, activation=activation, activation_clamp=clamp)
    problem = check(compare(_run(layer, case, device), _reference(layer)), LIMITS[case.recipe])
    assert problem is None, problem


GLOBAL_SCALES = {
    "l1_alphas": lambda g: torch.rand(5, 2, generator=g) + 0.5,  # gate's and up's differ
    "l2_alphas": lambda g: torch.rand(5, generator=g) + 0.5,
    "l2_act_scales": lambda g: torch.rand(5, generator=g) * 20 + 0.1,
}


@pytest.mark.parametrize("names", [*((name,) for name in GLOBAL_SCALES), tuple(GLOBAL_SCALES)], ids="+".join)
@pytest.mark.parametrize("name", ["nvfp4xnvfp4, shared", "nvfp4xnvfp4 decoded, shared"])
def test_global_scales(name: str, names: tuple[str, ...], device: str) -> None:
    """Each expert has its own; the shared experts have none."""
    case = CASES[name]
    layer = _random(case, device)
    generator = torch.Generator().manual_seed(4)
    scales = {scale: GLOBAL_SCALES[scale](generator).to(device) for scale in names}
    layer = _with(layer, weights=dataclasses.replace(layer.weights, **scales))
    plain = _reference(_with(layer, weights=dataclasses.replace(layer.weights, **dict.fromkeys(names))))
    expected = _reference(layer)
    problem = check(compare(_run(layer, case, device), expected), LIMITS[case.recipe])
    assert problem is None, problem
    assert compare(plain, expected).rel_rms > 0.05, "the scales change the result"


@pytest.mark.parametrize("value", [0.0, 1e-45])
def test_a_dead_experts_global_scale_gives_zeros_not_nan(value: float, device: str) -> None:
    case = CASES["nvfp4xnvfp4, shared"]
    layer = _random(case, device)
    dead = torch.ones(5, 2, device=device)
    dead[2] = value
    layer = _with(layer, weights=dataclasses.replace(layer.weights, l1_alphas=dead))
    output = _run(layer, case, device)
    problem = check(compare(output, _reference(layer)), LIMITS[case.recipe])
    assert problem is None, problem
    assert output.isfinite().all()


@pytest.mark.parametrize("name", ["fp8xfp4", "fp8xfp4 decoded, E4M3 shared", "mxf4xmxf4 decoded"])
def test_the_smallest_weight_scale_is_not_zero(name: str, device: str) -> None:
    """UE8M0 byte 0 is 2^-127, not 0: visible once the top-k weights are 2^120."""
    case = CASES[name]
    layer = _random(case, device, num_shared_experts=0, shared_weight=None)
    scale = layer.weights.w2_scale.clone()
    scale[:] = 0
    layer = _with(
        layer,
        weights=dataclasses.replace(layer.weights, w2_scale=scale),
        topk_weights=layer.topk_weights * 2.0**120,
    )
    output, expected = _run(layer, case, device), _reference(layer)
    assert expected.abs().max() > 1e-3
    problem = check(compare(output, expected), LIMITS[case.recipe])
    assert problem is None, problem


@pytest.mark.parametrize("where", ["x is Inf", "x is NaN", "weight is NaN"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_not_finite_is_so_in_the_reference_too(case: Case, where: str, device: str) -> None:
    layer = _random(case, device, activation_clamp=None)
    if where == "weight is NaN":
        layer.topk_weights[3, 0] = torch.nan
    else:
        layer.x[3, 17] = float(where.split()[-1])
    assert_bytes_equal(_run(layer, case, device).isnan(), _reference(layer).isnan(), "NaN")


ROUTINGS = {
    "all to one expert": lambda ids: torch.full_like(ids, 3),
    "every slot skipped": lambda ids: torch.full_like(ids, -1),
    "out of range": lambda ids: torch.where(ids % 2 == 0, ids, 5 + ids * 1000),
    "first slots skipped": lambda ids: torch.cat((torch.full_like(ids[:, :1], -1), ids[:, 1:]), dim=1),
    "int64 ids": lambda ids: ids.long(),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", ("fp8xfp4, E4M3 shared", "fp8xfp8, shared", "nvfp4xnvfp4, shared"))
def test_routing(name: str, routing: str, device: str) -> None:
    case = CASES[name]
    layer = _random(case, device, tokens=40)
    layer = _with(layer, topk_ids=ROUTINGS[routing](layer.topk_ids))
    output = _run(layer, case, device)
    problem = check(compare(output, _reference(layer)), LIMITS[case.recipe])
    assert problem is None, problem


def test_without_shared_experts_skipped_tokens_are_positive_zero(device: str) -> None:
    case = CASES["fp8xfp4"]
    layer = _random(case, device)
    layer = _with(layer, topk_ids=torch.full_like(layer.topk_ids, -1))
    assert_bytes_equal(_run(layer, case, device), torch.zeros_like(layer.x), "output")


def test_an_invalid_id_with_a_huge_weight_does_not_leak(device: str) -> None:
    case = CASES["fp8xfp4, E4M3 shared"]
    layer = _random(case, device)
    ids, weights = layer.topk_ids.clone(), layer.topk_weights.clone()
    ids[:, 0], weights[:, 0] = 1 << 20, 1e30
    harmless = _with(layer, topk_ids=torch.where(ids == 1 << 20, -1, ids), topk_weights=layer.topk_weights)
    wild = _run(_with(layer, topk_ids=ids, topk_weights=weights), case, device)
    assert_bytes_equal(wild, _run(harmless, case, device), "output")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_runs_are_bitwise_equal_and_so_is_a_bigger_batch(case: Case, device: str) -> None:
    """The rows of a batch do not depend on the rows that follow, nor on what an earlier call left in the workspace."""
    layer = _random(case, device, tokens=36)
    ws = _poisoned_workspace(layer, 40, _config(layer, case, device, 36), device)
    first = _run(layer, case, device, ws=ws)
    head = _with(layer, x=layer.x[:9], topk_ids=layer.topk_ids[:9], topk_weights=layer.topk_weights[:9])
    assert_bytes_equal(_run(head, case, device, ws=ws), first[:9], "the first 9 of 36 tokens")
    assert_bytes_equal(_run(layer, case, device, ws=ws), first, "the second run")


def test_no_tokens(device: str) -> None:
    case = CASES["fp8xfp4, E4M3 shared"]
    layer = _random(case, device, tokens=3)
    empty = _with(layer, x=layer.x[:0], topk_ids=layer.topk_ids[:0], topk_weights=layer.topk_weights[:0])
    ws = _poisoned_workspace(layer, 3, _config(layer, case, device, 1), device)
    assert _run(empty, case, device, ws=ws).shape == (0, SHAPE["hidden"])
