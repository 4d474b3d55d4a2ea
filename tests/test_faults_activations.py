"""Faults of the epilogue that this field's MoE layers had: pairs that depend on the tile, shared experts miscounted.

`docs/field_reports.md` says which public report each test stands for; the table of every option on every path is
`test_layer_options.py`.
"""

import dataclasses
import itertools

import pytest
import torch

from megamoe.kernels.config import LayerConfig, illegal_reason
from megamoe.kernels.layer import run_layer
from megamoe.oracle.dispatch_paths import PATHS, architecture, configuration, poisoned_workspace, run_path
from megamoe.oracle.exact_sum import exact_sum_layer
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.validation import size_multiples
from megamoe.weights import prepare

LOOPS = (
    "fp8xfp4",
    "fp8xfp4 decoded, E4M3 shared",
    "nvfp4xnvfp4, shared",
    "fp8xfp8, shared",
    "fp8xfp4 block128, E4M3 shared",
    "bf16xbf16, shared",
    "trtllm fp8xfp4",
    "trtllm fp8xfp8, shared",
    "bf16xfp4, shared",
)


def _reference(layer: Layer) -> torch.Tensor:
    return moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec,
        parameters=layer.parameters, full_trace=False,
    ).y  # fmt: skip


def _exact(name: str, device: str, *, tokens: int, hidden: int, intermediate: int) -> Layer:
    return exact_sum_layer(
        PATHS[name].recipe, tokens=tokens, hidden=hidden, intermediate=intermediate, num_experts=2, top_k=1,
        device=device,
    )  # fmt: skip


def _run(layer: Layer, name: str, config: LayerConfig, device: str) -> torch.Tensor:
    output = torch.full_like(layer.x, torch.nan)
    run_layer(
        layer.x, layer.topk_ids, layer.topk_weights, output,
        ws=poisoned_workspace(layer, layer.x.shape[0], config, device),
        weights=prepare(layer.weights, PATHS[name].recipe), spec=layer.spec, config=config, parameters=layer.parameters,
    )  # fmt: skip
    return output


def _tiles(layer: Layer, name: str, device: str, changes: list[dict[str, int]]) -> list[LayerConfig]:
    """The heuristic's configuration with each of `changes`, but for `block_k` where a GEMM's recipe fixes it."""
    start = configuration(layer, PATHS[name], device, layer.x.shape[0])
    found = []
    for change in changes:
        without_k = {field: value for field, value in change.items() if field != "block_k"}
        for up, down in itertools.product((change, without_k), repeat=2):
            config = LayerConfig(dataclasses.replace(start.gate_up, **up), dataclasses.replace(start.down, **down))
            if illegal_reason(config, layer.spec, architecture(device)) is None:
                found.append(config)
                break
    return found


@pytest.mark.parametrize("name", LOOPS)
def test_pairs_of_gate_and_up_do_not_depend_on_the_tile(name: str, device: str) -> None:
    layer = _exact(name, device, tokens=3, hidden=128, intermediate=128)
    changes = [{"block_m": 16, "block_n": 256}, {"block_m": 64, "block_k": 64}, {"block_m": 128, "block_k": 256}]
    expected = _reference(layer)
    tiles = _tiles(layer, name, device, changes)
    assert len(tiles) >= (2 if device == "cpu" else 1)  # a GPU's MMAs have tiles of their own
    for config in tiles:
        assert_bytes_equal(_run(layer, name, config, device), expected, str(config))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOOPS)
def test_pairs_of_gate_and_up_do_not_depend_on_tile_and_warps(name: str, device: str) -> None:
    layer = _exact(name, device, tokens=150, hidden=512, intermediate=384)
    expected = _reference(layer)
    changes: list[dict[str, int]] = [
        {"block_m": m, "block_n": n, "num_warps": warps, "num_stages": 2}
        for m, n, warps in itertools.product((64, 128), (128, 256), (4, 8))
    ]
    changes += [{"block_k": k, "num_stages": 2} for k in (64, 128, 256)]
    tiles = _tiles(layer, name, device, changes)
    assert len(tiles) >= 4
    for config in tiles:
        assert_bytes_equal(_run(layer, name, config, device), expected, str(config))


@pytest.mark.parametrize("name", [name for name, path in PATHS.items() if path.shared_weight])
def test_six_routed_experts_leave_the_shared_one_its_place(name: str, device: str) -> None:
    """The shared expert's rows are several times as large as the routed ones: whoever takes its place is seen."""
    path = PATHS[name]
    multiple_of_h, multiple_of_i = size_multiples(path.recipe)
    layer = random_layer(
        path.recipe, tokens=2, hidden=max(128, multiple_of_h), intermediate=max(64, multiple_of_i), num_experts=7,
        top_k=6 + (path.recipe.numerics == "trtllm_gen"), num_shared_experts=1, shared_weight=path.shared_weight,
        device=device,
    )  # fmt: skip
    scale = layer.weights.shared_w2_scale
    if scale is None:
        assert layer.weights.shared_w2 is not None
        louder = {"shared_w2": layer.weights.shared_w2 * 4}
    elif scale.dtype == torch.float32:
        louder = {"shared_w2_scale": scale * 4}
    else:
        two_binades = 16 if path.recipe.mma_type == "nvfp4xnvfp4" else 2  # of UE4M3 and UE8M0 bytes
        louder = {"shared_w2_scale": scale + two_binades}
    loud = dataclasses.replace(layer, weights=dataclasses.replace(layer.weights, **louder))
    expected = _reference(loud)
    problem = check(compare(run_path(loud, path, device), expected), LIMITS[path.recipe])
    assert problem is None, problem
    quiet = _reference(layer)
    alone = dataclasses.replace(
        layer, topk_ids=torch.where(layer.topk_ids < layer.spec.num_experts, -1, layer.topk_ids).int()
    )
    added = 3 * _reference(alone).float()  # four times as loud, once of it there before
    torch.testing.assert_close(expected.float() - quiet.float(), added, rtol=0.02, atol=0.05)
