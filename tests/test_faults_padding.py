"""Faults of padding and of state that stays: pad rows and pad bytes that are felt, graphs that share memory.

`docs/field_reports.md` says which public report each test stands for.
"""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import torch

import megamoe
from megamoe.kernels import layer as kernels_layer
from megamoe.kernels.combine import combine
from megamoe.kernels.layer import run_layer
from megamoe.kernels.layouts.scale_atoms import to_atom_order
from megamoe.oracle.dispatch_paths import PATHS, configuration, poisoned_workspace, run_path
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.public_arguments import layer_arguments, weight_arguments
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.validation import size_multiples
from megamoe.weights import ExpertMatrices, MoEWeights, prepare

LOOPS = (
    "fp8xfp4, E4M3 shared",
    "fp8xfp4 decoded, E4M3 shared",
    "nvfp4xnvfp4, shared",
    "fp8xfp8, shared",
    "fp8xfp4 token, E4M3 shared",
    "bf16xbf16, shared",
    "trtllm fp8xfp4, E4M3 shared",
    "trtllm nvfp4xnvfp4 nv16, shared",
    "bf16xfp4, shared",
)


def _layer(name: str, device: str, **options: object) -> Layer:
    path = PATHS[name]
    multiple_of_h, multiple_of_i = size_multiples(path.recipe)
    merged: dict = {
        "tokens": 4,
        "hidden": max(128, multiple_of_h),
        "intermediate": max(64, multiple_of_i),
        "num_experts": 3,
        "top_k": 2,
        "num_shared_experts": 1 if path.shared_weight else 0,
        "shared_weight": path.shared_weight,
        **options,
    }
    return random_layer(path.recipe, device=device, **merged)


@pytest.mark.parametrize("name", LOOPS)
def test_pad_rows_change_no_byte_of_the_others(name: str, device: str) -> None:
    """A batch filled up to a graph's size: pad rows hold NaN and skipped slots, with NaN for their weights."""
    path = PATHS[name]
    layer = _layer(name, device)
    pad = torch.full_like(layer.x, torch.nan)
    padded = dataclasses.replace(
        layer,
        x=torch.cat([layer.x, pad]),
        topk_ids=torch.cat([layer.topk_ids, torch.full_like(layer.topk_ids, -1)]),
        topk_weights=torch.cat([layer.topk_weights, torch.full_like(layer.topk_weights, torch.nan)]),
    )
    expected = run_path(layer, path, device)
    assert_bytes_equal(run_path(padded, path, device)[:4], expected, "the first 4 of 8 rows")
    assert expected.isfinite().all()


def _poison_pad_rows(matrices: ExpertMatrices) -> ExpertMatrices:
    """0xFF, NaN, in the scales of rows that a matrix does not have."""
    changed = {}
    for name, scale, rows in (
        ("w13_scale", matrices.w13_scale, matrices.w13.shape[-2]),
        ("w2_scale", matrices.w2_scale, matrices.w2.shape[-2]),
    ):
        assert scale is not None
        words = torch.ones(rows, scale.shape[-1], dtype=torch.int32, device=scale.device)
        has_row = to_atom_order(words) != 0
        assert has_row.shape == scale.shape[-2:]
        assert not has_row.all()
        changed[name] = torch.where(has_row, scale, -1)
        changed[name] = changed[name].mT.contiguous().mT
    return dataclasses.replace(matrices, **changed)


@pytest.mark.parametrize("name", ("fp8xfp4", "fp8xfp4 decoded, E4M3 shared", "nvfp4xnvfp4, shared", "bf16xfp4, shared"))
def test_scales_of_rows_that_do_not_exist_are_not_felt(name: str, device: str) -> None:
    path = PATHS[name]
    layer = _layer(name, device, hidden=352, intermediate=96)
    prepared = prepare(layer.weights, path.recipe)
    poisoned = dataclasses.replace(prepared, routed=_poison_pad_rows(prepared.routed))
    assert_bytes_equal(_run(layer, poisoned, name, device), _run(layer, prepared, name, device), "output")


def _run(layer: Layer, weights: MoEWeights, name: str, device: str) -> torch.Tensor:
    tokens = layer.x.shape[0]
    config = configuration(layer, PATHS[name], device, tokens)
    output = torch.full_like(layer.x, torch.nan)
    run_layer(
        layer.x, layer.topk_ids, layer.topk_weights, output,
        ws=poisoned_workspace(layer, tokens, config, device), weights=weights, spec=layer.spec, config=config,
        parameters=layer.parameters,
    )  # fmt: skip
    assert output.isfinite().all()
    return output


@pytest.mark.parametrize("name", LOOPS)
def test_a_call_does_not_see_what_a_larger_one_left(name: str, device: str) -> None:
    """Six tokens, then two others in the same workspace: the bytes of a fresh one."""
    path = PATHS[name]
    large, small = _layer(name, device, tokens=6, seed=1), _layer(name, device, tokens=2, seed=2)
    small = dataclasses.replace(small, weights=large.weights, parameters=large.parameters)
    ws = poisoned_workspace(large, 6, configuration(large, path, device, 6), device)
    run_path(large, path, device, ws=ws)
    assert_bytes_equal(run_path(small, path, device, ws=ws), run_path(small, path, device), "the small call")


def test_portable_kernels_use_nothing_that_depends_on_launch_order_or_scratch() -> None:
    """No programmatic dependent launch (a producer's writes are always complete; the combine offers it to the SM90
    tier, and no portable call asks for it), no atomics (every sum has one order), no descriptors (no
    scratch that a graph could keep a dangling pointer to) and no warp specialisation."""
    folder = Path(kernels_layer.__file__).parent
    names = set()
    for file in [*folder.glob("*.py"), *(folder / "layouts").glob("*.py")]:  # the rest is one architecture's
        if file.name == "pdl.py":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        found |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
        found |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        if file.name == "combine.py":
            assert inspect.signature(combine).parameters["pdl"].default is False
            found -= {"launch_pdl", "gdc_wait"}
        else:
            assert "pdl" not in found, file.name
        names |= found
    assert {"program_id", "num_warps"} <= names
    forbidden = {
        "launch_pdl",
        "gdc_wait",
        "make_tensor_descriptor",
        "TensorDescriptor",
        "set_allocator",
        "warp_specialize",
    }
    assert not names & forbidden
    assert not [name for name in names if name.startswith("atomic_")]


def _serving(name: str, max_tokens: int, device: str, **options: object) -> tuple[Layer, megamoe.MegaMoE]:
    layer = _layer(name, device, tokens=max_tokens, hidden=512, intermediate=256, **options)
    weights = megamoe.prepare_weights(**weight_arguments(layer))
    return layer, megamoe.MegaMoE(weights, max_tokens, layer.spec.top_k, **layer_arguments(layer))


SERVED_PATHS = ("fp8xfp4, E4M3 shared", "fp8xfp8, shared", "bf16xfp4, shared")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED_PATHS)
def test_a_graph_survives_larger_calls_outside_it(name: str) -> None:
    """Captured small, run large by itself, replayed: nothing it points to was freed or moved."""
    layer, serve = _serving(name, 600, "cuda")
    small = (layer.x[:5], layer.topk_ids[:5], layer.topk_weights[:5])
    expected = serve(*small)
    output = torch.full_like(expected, torch.nan)
    serve.warmup([5])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serve(*small, output)
    large = serve(layer.x, layer.topk_ids, layer.topk_weights)
    ballast = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(8)]  # over whatever was given back
    output.fill_(torch.nan)
    graph.replay()
    assert_bytes_equal(output, expected, "replayed after a larger call")
    assert large.isfinite().all()
    assert len(ballast) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED_PATHS)
def test_two_layers_in_two_graphs_replay_in_turn(name: str) -> None:
    """Each layer has its own workspace: replays in any order give the bytes of each alone."""
    made = [_serving(name, 33, "cuda", seed=seed) for seed in (1, 2)]
    expected = [serve(layer.x, layer.topk_ids, layer.topk_weights) for layer, serve in made]
    outputs = [torch.full_like(y, torch.nan) for y in expected]
    graphs = [torch.cuda.CUDAGraph() for _ in made]
    for graph, (layer, serve), output in zip(graphs, made, outputs):
        with torch.cuda.graph(graph):
            serve(layer.x, layer.topk_ids, layer.topk_weights, output)
    for index in (0, 1, 1, 0, 0, 1):
        outputs[index].fill_(torch.nan)
        graphs[index].replay()
        assert_bytes_equal(outputs[index], expected[index], f"graph {index}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED_PATHS)
def test_the_first_call_of_all_may_be_captured(name: str) -> None:
    """No warmup: compilation happens within the capture and leaves nothing in the graph but the launches.

    Sizes that no other test has, so that nothing is compiled yet.
    """
    layer = _layer(name, "cuda", tokens=9, hidden=640, intermediate=384)
    weights = megamoe.prepare_weights(**weight_arguments(layer))
    serve = megamoe.MegaMoE(weights, 9, layer.spec.top_k, **layer_arguments(layer))
    output = torch.full_like(layer.x, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serve(layer.x, layer.topk_ids, layer.topk_weights, output)
    graph.replay()
    assert_bytes_equal(output, serve(layer.x, layer.topk_ids, layer.topk_weights), "the first replay")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED_PATHS)
def test_a_chain_of_producers_and_layers_is_in_order(name: str) -> None:
    """A kernel writes the tokens, the layer reads them at once, a thousand times: as with a wait after every launch."""
    layer, serve = _serving(name, 17, "cuda")
    serve.warmup([17])

    def chain(steps: int, *, wait: bool) -> torch.Tensor:
        x, y = layer.x.clone(), torch.empty_like(layer.x)
        for _ in range(steps):
            serve(x, layer.topk_ids, layer.topk_weights, y)
            torch.add(layer.x, y.clamp(-4, 4), alpha=0.5, out=x)
            if wait:
                torch.cuda.synchronize()
        return y

    assert_bytes_equal(chain(1000, wait=False), chain(1000, wait=True), "the last output")
