"""Faults of routing that this field's MoE layers had: skipped and wild ids, duplicates, idle and crowded experts.

Workspace and output are poisoned first. `docs/field_reports.md` says which public report each test stands for.
"""

import dataclasses
import math

import pytest
import torch

from megamoe.oracle.dispatch_paths import PATHS, DispatchPath, configuration, poisoned_workspace, run_path
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.validation import size_multiples

# One path for each way that rows get their top-k weight and meet in the combine.
COMBINES = ("fp8xfp4, E4M3 shared", "fp8xfp8, shared", "trtllm fp8xfp4, E4M3 shared", "bf16xfp4, shared")
SHARED = [name for name, path in PATHS.items() if path.shared_weight]


def _layer(path: DispatchPath, device: str, **options: object) -> Layer:
    """Five tokens, top-3 of four experts (under `trtllm_gen` one slot is the shared expert's, where there is one)."""
    multiple_of_h, multiple_of_i = size_multiples(path.recipe)
    merged: dict = {
        "tokens": 5,
        "hidden": max(128, multiple_of_h),
        "intermediate": max(64, multiple_of_i),
        "num_experts": 4,
        "top_k": 3,
        "num_shared_experts": 1 if path.shared_weight else 0,
        "shared_weight": path.shared_weight,
        **options,
    }
    return random_layer(path.recipe, device=device, **merged)


def _with(layer: Layer, **changes: object) -> Layer:
    return dataclasses.replace(layer, **changes)  # type: ignore[arg-type]


def _reference(layer: Layer) -> torch.Tensor:
    return moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec,
        parameters=layer.parameters, full_trace=False,
    ).y  # fmt: skip


def _agree(layer: Layer, path: DispatchPath, device: str) -> torch.Tensor:
    output = run_path(layer, path, device)
    problem = check(compare(output, _reference(layer)), LIMITS[path.recipe])
    assert problem is None, problem
    return output


@pytest.mark.parametrize("slot", (0, 1, 2))
@pytest.mark.parametrize("name", COMBINES)
def test_a_skipped_slot_in_each_position(name: str, slot: int, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device)
    layer.topk_ids[:, slot] = -1
    _agree(layer, path, device)


@pytest.mark.parametrize("fill", (1e38, math.inf, math.nan))
@pytest.mark.parametrize("name", COMBINES)
def test_rows_that_nothing_writes_may_hold_anything(name: str, fill: float, device: str) -> None:
    """A sum of two values of 1e38 is still finite, so that no check for NaN would see them."""
    path = PATHS[name]
    layer = _layer(path, device, masked=0.5)
    ws = poisoned_workspace(layer, 5, configuration(layer, path, device, 5), device)
    expected = run_path(layer, path, device, ws=ws)
    for tensor in ws.tensors().values():
        if tensor.dtype in (torch.float32, torch.bfloat16):
            tensor.fill_(fill)
    assert_bytes_equal(run_path(layer, path, device, ws=ws), expected, "output")
    assert expected.isfinite().all()


@pytest.mark.parametrize("name", SHARED)
def test_an_idle_rank_still_adds_its_shared_experts(name: str, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device)
    layer.topk_ids[layer.topk_ids < layer.spec.num_experts] = -1
    output = _agree(layer, path, device)
    assert output.any(dim=1).all()


WILD = {
    torch.int32: (-2, -(2**31), 2**31 - 1, 7),
    torch.int64: (-2, -(2**31), -(2**63), 2**63 - 1, 2**32, 2**32 + 1, -(2**32), 7),
}
"""Ids of no expert; the low halves of some int64 ones name one. 4 is the first beyond the experts, or a shared slot."""


@pytest.mark.parametrize("weight", (1e30, math.inf, math.nan))
@pytest.mark.parametrize("dtype", WILD, ids=str)
@pytest.mark.parametrize("mapped", (False, True), ids=("all experts", "some experts"))
@pytest.mark.parametrize("name", ("fp8xfp4, E4M3 shared", "trtllm fp8xfp4, E4M3 shared"))
def test_ids_of_no_expert_are_skipped_whatever_their_weight(
    name: str, mapped: bool, dtype: torch.dtype, weight: float, device: str
) -> None:
    path = PATHS[name]
    options = {"num_experts": 4, "local_experts": 2, "local_expert_offset": 1} if mapped else {}
    layer = _layer(path, device, tokens=len(WILD[dtype]), **options)
    ids, weights = layer.topk_ids.to(dtype), layer.topk_weights.clone()
    skipped = ids.clone()
    skipped[:, 0] = -1
    ids[:, 0] = torch.tensor(WILD[dtype], dtype=dtype, device=device)
    weights[:, 0] = weight
    wild = _with(layer, topk_ids=ids, topk_weights=weights)
    expected = run_path(_with(layer, topk_ids=skipped), path, device)
    assert_bytes_equal(run_path(wild, path, device), expected, "output")
    assert_bytes_equal(_reference(wild), _reference(_with(layer, topk_ids=skipped)), "reference")


@pytest.mark.parametrize("name", COMBINES)
def test_the_first_id_beyond_the_experts_is_the_shared_slot_or_nobody(name: str, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device, tokens=3)
    layer.topk_ids[0, 0] = layer.spec.num_experts
    layer.topk_ids[1, 0] = layer.spec.num_experts + 1
    ws = poisoned_workspace(layer, 3, configuration(layer, path, device, 3), device)
    output = run_path(layer, path, device, ws=ws)
    problem = check(compare(output, _reference(layer)), LIMITS[path.recipe])
    assert problem is None, problem
    assert int(ws.plan.skipped) == (1 if path.recipe.numerics == "trtllm_gen" else 2)


@pytest.mark.parametrize("name", COMBINES)
def test_one_expert_in_every_slot_counts_once_per_slot(name: str, device: str) -> None:
    """More duplicates than there are experts: the buffers hold tokens · top-k rows."""
    path = PATHS[name]
    layer = _layer(path, device, num_experts=2, top_k=2)
    top_k = 6
    ids = torch.ones(5, top_k, dtype=torch.int32, device=device)
    weights = torch.rand(5, top_k, generator=torch.Generator(device).manual_seed(3), device=device)
    spec = dataclasses.replace(layer.spec, top_k=top_k)
    _agree(_with(layer, spec=spec, topk_ids=ids, topk_weights=weights), path, device)


@pytest.mark.parametrize("name", ("fp8xfp4, E4M3 shared", "fp8xfp8, shared", "trtllm fp8xfp4, E4M3 shared"))
def test_renamed_experts_are_permuted_weights(name: str, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device, num_experts=4, local_experts=4, expert_map=True)
    order = layer.parameters.expert_map
    assert order is not None
    assert not torch.equal(order, torch.arange(4, device=device))
    here = {field: getattr(layer.weights, field) for field in ("w13", "w13_scale", "w2", "w2_scale")}
    permuted = dataclasses.replace(layer.weights, **{field: tensor[order.long()] for field, tensor in here.items()})
    plain = _with(
        layer,
        spec=dataclasses.replace(layer.spec, has_expert_map=False),
        parameters=dataclasses.replace(layer.parameters, expert_map=None),
        weights=permuted,
    )
    assert_bytes_equal(run_path(layer, path, device), run_path(plain, path, device), "output")


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_an_empty_batch_launches_nothing(path: DispatchPath, device: str) -> None:
    layer = _layer(path, device)
    empty = _with(layer, x=layer.x[:0], topk_ids=layer.topk_ids[:0], topk_weights=layer.topk_weights[:0])
    ws = poisoned_workspace(layer, 2, configuration(layer, path, device, 1), device)
    before = {name: tensor.clone() for name, tensor in ws.tensors().items() if name in ("rows", "act_q", "x_q")}
    assert run_path(empty, path, device, ws=ws).shape == (0, layer.spec.hidden)
    for name, tensor in before.items():
        assert_bytes_equal(ws.tensors()[name].view(torch.uint8), tensor.view(torch.uint8), name)


@pytest.mark.parametrize("name", COMBINES)
def test_experts_between_two_busy_ones_may_be_idle(name: str, device: str) -> None:
    """Only the first and the last expert have tokens; the others' tiles are holes."""
    path = PATHS[name]
    layer = _layer(path, device, num_experts=6)
    routed = layer.topk_ids < layer.spec.num_experts
    ids = torch.where(routed, torch.where(layer.topk_ids % 2 == 0, 0, 5), layer.topk_ids).int()
    _agree(_with(layer, topk_ids=ids), path, device)


@pytest.mark.gpu
@pytest.mark.parametrize("expert", (0, 63))
@pytest.mark.parametrize("name", COMBINES)
def test_a_large_batch_on_one_of_many_experts(name: str, expert: int, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device, tokens=4096, num_experts=64, hidden=512, intermediate=256)
    ids = torch.where(layer.topk_ids < 64, expert, layer.topk_ids).int()
    _agree(_with(layer, topk_ids=ids), path, device)
