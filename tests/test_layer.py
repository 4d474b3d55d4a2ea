"""Whole layers through the kernels: pre-dispatch, routing, both GEMMs with shared experts, combine.

On exact-sum inputs every summation order gives the same bits, so the layer must equal the reference byte for byte; on
random ones it must stay within the limits of `oracle.metrics`. Workspace and output are poisoned first.
"""

import dataclasses

import pytest
import torch

from megamoe.oracle.dispatch_paths import PATHS, DispatchPath, configuration, poisoned_workspace, run_path
from megamoe.oracle.exact_sum import exact_sum_layer
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.workspace import Workspace

SHAPE = dict(hidden=256, intermediate=128, num_experts=5, top_k=2)


def _run(layer: Layer, path: DispatchPath, device: str, *, ws: Workspace | None = None) -> torch.Tensor:
    x_before = layer.x.clone()
    output = run_path(layer, path, device, ws=ws)
    assert_bytes_equal(layer.x, x_before, "hidden states after the call")
    return output


def _reference(layer: Layer) -> torch.Tensor:
    return moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec,
        parameters=layer.parameters, full_trace=False,
    ).y  # fmt: skip


def _agree(layer: Layer, path: DispatchPath, device: str) -> torch.Tensor:
    """The kernels' result, once it is within the limits of the reference's."""
    output = _run(layer, path, device)
    problem = check(compare(output, _reference(layer)), LIMITS[path.recipe])
    assert problem is None, problem
    return output


def _random(path: DispatchPath, device: str, *, tokens: int = 10, **changes: object) -> Layer:
    shared = {"shared_weight": path.shared_weight, "num_shared_experts": 1 if path.shared_weight else 0}
    options: dict = {**SHAPE, **shared, "activation_clamp": 2.0, **changes}
    return random_layer(path.recipe, tokens=tokens, device=device, **options)


def _with(layer: Layer, **changes: object) -> Layer:
    return dataclasses.replace(layer, **changes)  # type: ignore[arg-type]


@pytest.mark.every_path
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_exact_sum_layer_is_bitwise_the_reference(path: DispatchPath, device: str) -> None:
    layer = exact_sum_layer(
        path.recipe,
        tokens=12,
        num_shared_experts=1 if path.shared_weight else 0,
        shared_weight=path.shared_weight,
        seed=1,
        device=device,
        **SHAPE,
    )
    assert_bytes_equal(_run(layer, path, device), _reference(layer), "output")


@pytest.mark.parametrize("masked", (0.0, 0.4), ids=lambda share: f"{share:.0%} skipped")
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_random_layer_is_within_limits(path: DispatchPath, masked: float, device: str) -> None:
    layer = _random(path, device, masked=masked)
    _agree(layer, path, device)


def _odd_shape(path: DispatchPath) -> dict[str, int]:
    """No multiple of the tile in K, in N, in either scale word or atom, as far as the recipe's groups allow."""
    if path.recipe.mma_type == "fp8xfp8":
        return dict(hidden=384, intermediate=384)
    if path.recipe.mma_type == "nvfp4xnvfp4":
        return dict(hidden=336, intermediate=80)
    if path.recipe.act_scale in ("block128", "token"):
        return dict(hidden=384, intermediate=192)
    return dict(hidden=352, intermediate=96)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_odd_sizes(path: DispatchPath, device: str) -> None:
    _agree(_random(path, device, tokens=7, **_odd_shape(path)), path, device)


@pytest.mark.parametrize("value", [0.0, 1e-45])
def test_a_dead_experts_global_scale_gives_zeros_not_nan(value: float, device: str) -> None:
    path = PATHS["nvfp4xnvfp4, shared"]
    layer = _random(path, device)
    dead = torch.ones(5, 2, device=device)
    dead[2] = value
    layer = _with(layer, weights=dataclasses.replace(layer.weights, l1_alphas=dead))
    output = _agree(layer, path, device)
    assert output.isfinite().all()


@pytest.mark.parametrize("name", ["fp8xfp4", "fp8xfp4 decoded, E4M3 shared", "mxf4xmxf4 decoded"])
def test_the_smallest_weight_scale_is_not_zero(name: str, device: str) -> None:
    """UE8M0 byte 0 is 2^-127, not 0: visible once the top-k weights are 2^120."""
    path = PATHS[name]
    layer = _random(path, device, num_shared_experts=0, shared_weight=None)
    scale = layer.weights.w2_scale.clone()
    scale[:] = 0
    layer = _with(
        layer,
        weights=dataclasses.replace(layer.weights, w2_scale=scale),
        topk_weights=layer.topk_weights * 2.0**120,
    )
    output, expected = _run(layer, path, device), _reference(layer)
    assert expected.abs().max() > 1e-3
    problem = check(compare(output, expected), LIMITS[path.recipe])
    assert problem is None, problem


@pytest.mark.parametrize("where", ["x is Inf", "x is NaN", "weight is NaN"])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_what_is_not_finite_is_so_in_the_reference_too(path: DispatchPath, where: str, device: str) -> None:
    layer = _random(path, device, tokens=5, hidden=128, activation_clamp=None)
    if where == "weight is NaN":
        layer.topk_weights[3, 0] = torch.nan
    else:
        layer.x[3, 17] = float(where.split()[-1])
    assert_bytes_equal(_run(layer, path, device).isnan(), _reference(layer).isnan(), "NaN")


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
    path = PATHS[name]
    layer = _random(path, device, tokens=15)
    layer = _with(layer, topk_ids=ROUTINGS[routing](layer.topk_ids))
    _agree(layer, path, device)


def test_without_shared_experts_skipped_tokens_are_positive_zero(device: str) -> None:
    path = PATHS["fp8xfp4"]
    layer = _random(path, device)
    layer = _with(layer, topk_ids=torch.full_like(layer.topk_ids, -1))
    assert_bytes_equal(_run(layer, path, device), torch.zeros_like(layer.x), "output")


def test_an_invalid_id_with_a_huge_weight_does_not_leak(device: str) -> None:
    path = PATHS["fp8xfp4, E4M3 shared"]
    layer = _random(path, device)
    ids, weights = layer.topk_ids.clone(), layer.topk_weights.clone()
    ids[:, 0], weights[:, 0] = 1 << 20, 1e30
    harmless = _with(layer, topk_ids=torch.where(ids == 1 << 20, -1, ids), topk_weights=layer.topk_weights)
    wild = _run(_with(layer, topk_ids=ids, topk_weights=weights), path, device)
    assert_bytes_equal(wild, _run(harmless, path, device), "output")


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_two_runs_are_bitwise_equal_and_so_is_a_bigger_batch(path: DispatchPath, device: str) -> None:
    """The rows of a batch do not depend on the rows that follow, nor on what an earlier call left in the workspace."""
    layer = _random(path, device, tokens=14, hidden=128)
    ws = poisoned_workspace(layer, 16, configuration(layer, path, device, 14), device)
    first = _run(layer, path, device, ws=ws)
    head = _with(layer, x=layer.x[:5], topk_ids=layer.topk_ids[:5], topk_weights=layer.topk_weights[:5])
    assert_bytes_equal(_run(head, path, device, ws=ws), first[:5], "the first 5 of 14 tokens")
    assert_bytes_equal(_run(layer, path, device, ws=ws), first, "the second run")


def test_no_tokens(device: str) -> None:
    path = PATHS["fp8xfp4, E4M3 shared"]
    layer = _random(path, device, tokens=3)
    empty = _with(layer, x=layer.x[:0], topk_ids=layer.topk_ids[:0], topk_weights=layer.topk_weights[:0])
    ws = poisoned_workspace(layer, 3, configuration(layer, path, device, 1), device)
    assert _run(empty, path, device, ws=ws).shape == (0, SHAPE["hidden"])
