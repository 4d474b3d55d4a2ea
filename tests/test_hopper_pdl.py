"""Programmatic dependent launches of the SM90 tier: the rule of `kernels.pdl`, read off the compiled kernels."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megamoe
from megamoe.codegen.registry import collect
from megamoe.kernels import pdl
from megamoe.kernels.combine import combine
from megamoe.kernels.hopper.config import TILES
from megamoe.kernels.hopper.options import launch_options
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.public_arguments import layer_arguments, weight_arguments
from megamoe.oracle.random_layers import random_layer
from megamoe.recipe import Recipe

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

# One job of each kernel that is launched so, the smallest tile's where there are several.
JOBS = {job.fn.__name__: name for name, job in reversed(collect(90).items()) if job.options.get("launch_pdl")}
GEMM_2 = ("hopper_down_kernel", "e2m1_bf16_down_kernel", "e4m3_few_down_kernel")
COMPILE = """
import json, sys
from pathlib import Path
from triton import knobs
from megamoe.codegen.compile import compile_job
from megamoe.codegen.registry import collect

code = {}

def keep(*, metadata_group, **_):
    code.update({Path(name).suffix: Path(path).read_text() for name, path in metadata_group.items()
                 if name.endswith((".ttgir", ".ptx"))})

knobs.compilation.listener = keep
jobs = collect(90)
answers = {}
for name in json.loads(sys.argv[1]):
    compile_job(jobs[name], 90)
    answers[name] = [code.pop(".ttgir"), code.pop(".ptx")]
Path(sys.argv[2]).write_text(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """TTGIR and PTX of `JOBS`, from a process without the interpreter."""
    path = tmp_path_factory.mktemp("pdl") / "code.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(megamoe.__file__).parent.parent)
    environment["PYTHONSAFEPATH"] = "1"
    command = [sys.executable, "-c", COMPILE, json.dumps(list(JOBS.values())), str(path)]
    subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True)
    return json.loads(path.read_text())


OPERATIONS = {
    "wait": r"grid_dependency_wait|griddepcontrol\.wait",
    "launch": r"grid_dependency_launch_dependents|griddepcontrol\.launch_dependents",
    "read past L1": r"tt\.load .*(cache_modifier|cacheModifier) = cg",
    "read": r"tt\.load|tt\.descriptor_load",
    "write": r"tt\.store|tt\.atomic|tt\.descriptor_store|async_tma_copy_local_to_global",
    "fetch weights": r"async_tma_copy_global_to_local .*tensordesc<(tensor<)?(\d+x\d+xu?i8|128x\d+xf8E4M3FN)",
    "fetch tokens": r"async_tma_copy_global_to_local",
}


def partitions(ttgir: str) -> list[list[tuple[str, int]]]:
    """Of a kernel's body, then of each of its warp-specialised partitions: what it does to global memory in the order
    of the text, each with the depth of its line."""
    found: list[list[tuple[str, int]]] = [[]]
    for line in ttgir[ttgir.index("tt.func public") :].splitlines():
        if re.match(r"\s*(default \{|partition\d+\()", line):
            found.append([])
        kind = next((kind for kind, pattern in OPERATIONS.items() if re.search(pattern, line)), None)
        if kind is not None:
            found[-1].append((kind, len(line) - len(line.lstrip())))
    return found


@pytest.mark.compile_only
@pytest.mark.parametrize("kernel", JOBS)
def test_kernels_keep_the_rule(compiled: dict, kernel: str) -> None:
    ttgir, ptx = compiled[JOBS[kernel]]
    assert ptx.count("griddepcontrol.wait") >= 1
    body, *parts = partitions(ttgir)
    in_body = [depth for kind, depth in body if kind == "wait"]
    for part in [body] if in_body else parts:
        kinds = [kind for kind, _ in part]
        assert kinds.count("wait") == 1
        before, after = kinds[: kinds.index("wait")], kinds[kinds.index("wait") + 1 :]
        assert set(before) <= ({"read past L1", "fetch weights"} if kernel in GEMM_2 else set())
        depth = part[kinds.index("wait")][1]
        assert depth == (4 if in_body else 6), "a wait inside a branch or loop"
        assert "launch" not in after or after[0] == "launch"
    if not in_body:
        assert body == []
        assert len(parts) == 3
    kinds = [kind for part in (body, *parts) for kind, _ in part]
    assert kinds.count("launch") == (kernel != "combine_kernel")


@pytest.mark.compile_only
@pytest.mark.parametrize("kernel", GEMM_2)
def test_gemm_2_asks_for_weights_first(compiled: dict, kernel: str) -> None:
    *_, producer = partitions(compiled[JOBS[kernel]][0])
    kinds = [kind for kind, _ in producer]
    wait = kinds.index("wait")
    assert "fetch weights" in kinds[:wait]
    assert {"fetch weights", "fetch tokens"} <= set(kinds[wait:])


def test_who_is_launched_so() -> None:
    kernels = {job.fn.__name__ for job in collect(90).values()}
    gemms = {name for name in kernels if re.match("(hopper|e2m1|e4m3)_.*(gate_up|down)_kernel", name)}
    gemms -= {name for name in gemms if "_many_" in name}  # of prefill alone
    assert set(JOBS) == {"scatter_kernel", "copy_rows_kernel", "gather_kernel", "combine_kernel"} | gemms
    assert set(GEMM_2) < set(JOBS)
    assert "build_plan_kernel" in kernels - set(JOBS)
    for arch in (100, 120):
        assert not any(job.options.get("launch_pdl") for job in collect(arch).values())


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = [tile for group in TILES.values() for _, tile in group]
    assert all(launch_options(tile)["launch_pdl"] is tile.overlap for tile in tiles)
    assert not pdl.overlaps(torch.ones(1))
    monkeypatch.setattr(pdl, "PDL", False)
    assert all(launch_options(tile)["launch_pdl"] is False for tile in tiles)


def test_combine_overlaps_on_a_gpu_only() -> None:
    rows, ids = torch.ones(2, 3, 8, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int32)
    out = torch.full((2, 8), torch.nan, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="pdl=True with out on cpu; allowed on a GPU only"):
        combine(rows, ids, out, num_experts=1, shared=False, pdl=True)
    assert out.isnan().all()


RECIPES = {
    "block128": Recipe("fp8xfp4", "block128", "deep_gemm_sm90"),
    "token": Recipe("fp8xfp4", "token", "deep_gemm_sm90"),
    "e4m3": Recipe("fp8xfp8", "block128", "deep_gemm_sm90"),
    "bf16": Recipe("bf16xfp4", "none", "trtllm_gen"),
}


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.x")
@pytest.mark.parametrize("tokens", (1, 4, 64, 300))
@pytest.mark.parametrize("recipe", RECIPES)
def test_overlap_changes_no_bit(recipe: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls behind each other in one workspace, each with other tokens and experts: what is read too early is what the
    call before left there."""
    shape = dict(hidden=1024, intermediate=1536, num_experts=24, top_k=4)
    layers = [random_layer(RECIPES[recipe], tokens=tokens, seed=seed, device="cuda", **shape) for seed in range(8)]  # type: ignore[arg-type]
    weights = megamoe.prepare_weights(**weight_arguments(layers[0]))
    moe = megamoe.MegaMoE(weights, tokens, 4, **layer_arguments(layers[0]))
    assert type(moe._layer).__name__ == "HopperLayer"
    calls = [(layer.x, layer.topk_ids, layer.topk_weights) for layer in layers]
    monkeypatch.setattr(pdl, "PDL", False)
    expected = [moe(*call) for call in calls]
    torch.cuda.synchronize()
    monkeypatch.setattr(pdl, "PDL", True)
    moe(*calls[0])  # compiles
    outputs = [torch.full_like(y, torch.nan) for y in expected]

    def agree(where: str) -> None:
        for i, (output, y) in enumerate(zip(outputs, expected)):
            assert_bytes_equal(output, y, f"{where}, call {i}")
            output.fill_(torch.nan)

    for _ in range(25):
        for call, output in zip(calls, outputs):
            moe(*call, output)
        agree("launched")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call, output in zip(calls, outputs):
            moe(*call, output)
    for _ in range(25):
        graph.replay()
        agree("replayed")
