"""Fused shared expert or a shared MLP on a second stream: the measurement computes one layer both ways."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from megamoe.bench.environment import describe_run
from megamoe.bench.layers import BLOCK128, LayerStore, input_sets
from megamoe.bench.records import write_rows
from megamoe.bench.registry import Point
from megamoe.bench.shapes import ModelShape
from megamoe.bench.shared_layers import Separate, SharedLayer, open_layers, shared_expert, with_mxfp4_shared
from megamoe.bench.shared_mlp import Row, load_rows, main, measure, table, unfit_reason
from megamoe.bench.timing import Windows
from megamoe.oracle.metrics import assert_bytes_equal, compare
from megamoe.recipe import resolve_recipe

ROOT = Path(__file__).parent.parent
SHAPE = ModelShape("small", 256, 256, 4, 2, activation_clamp=10.0)
POINT = Point(SHAPE, 3, "uniform")
ROW = Row(
    "small", 1, "fp8xfp4/block128/deep_gemm_sm90", "fused", 40.04, 39.0, 41.5, 60, "cuda_graph", 5, 0, 0.001, None, "",
)  # fmt: skip
ROWS = [
    ROW,
    replace(ROW, tokens=64, median_us=1234.5),
    replace(ROW, contender="separate", median_us=60.04, launches=11, stream_syncs=2),
    replace(ROW, contender="separate", median_us=1200.4, launches=12, stream_syncs=2, tokens=64),
    replace(ROW, model="another"),
]


@pytest.fixture(scope="module")
def contenders(device: str) -> list[list[SharedLayer]]:
    return open_layers(LayerStore(SHAPE, torch.device(device)), BLOCK128, POINT.tokens, count=2)


def test_both_are_the_layer_of_their_references(contenders: list[list[SharedLayer]], device: str) -> None:
    """Five launches against two layers' ten and, on a GPU, the add; the waits are counted per call."""
    fused, separate = rows = measure(contenders, POINT, BLOCK128, torch.device(device), Windows(0.01, 1))
    assert [row.problem for row in rows] == [None, None]
    assert [row.contender for row in rows] == ["fused", "separate"]
    assert (fused.launches, fused.stream_syncs) == (5, 0)
    assert (separate.launches, separate.stream_syncs) == (11 if device == "cuda" else 10, 2)
    assert {row.recipe for row in rows} == {"fp8xfp4/block128/deep_gemm_sm90"}
    assert {row.method for row in rows} == {"cuda_graph" if device == "cuda" else "clock"}
    assert all(0 < row.p20_us <= row.median_us <= row.p80_us for row in rows)


def test_the_shared_expert_is_felt_and_its_formats_differ_as_they_should(
    contenders: list[list[SharedLayer]], device: str
) -> None:
    """References apart by the requantization of the shared expert, not by more, and not by nothing; a layer of the next
    input set has another shared expert."""
    inputs, tokens = input_sets(POINT, torch.device(device))[0], torch.arange(POINT.tokens, device=device)
    fused, separate = (layers[0].expected(inputs, tokens) for layers in contenders)
    assert 0.02 < compare(fused, separate).rel_rms < 0.2
    assert compare(contenders[1][1].expected(inputs, tokens), separate).rel_rms > 0.3


def test_requantized_scales_and_elements_stand_beside_routed_ones(device: str) -> None:
    routed = LayerStore(SHAPE, torch.device(device)).plain(BLOCK128)
    shared = shared_expert(SHAPE, torch.device(device), 0)
    joined = with_mxfp4_shared(routed, shared)
    assert_bytes_equal(joined.w13, routed.w13)
    assert shared.w13.dtype == torch.float8_e4m3fn
    assert joined.shared_w13 is not None
    assert joined.shared_w13_scale is not None
    assert (tuple(joined.shared_w13.shape), joined.shared_w13.dtype) == ((512, 128), torch.uint8)
    assert (tuple(joined.shared_w13_scale.shape), joined.shared_w13_scale.dtype) == ((512, 8), torch.uint8)


def test_the_mlp_runs_between_fork_and_join(contenders: list[list[SharedLayer]], device: str) -> None:
    """The side stream waits for the caller's before the MLP, the caller's for it before the add."""
    separate = contenders[1][0]
    assert isinstance(separate, Separate)
    log: list[str] = []

    class Logged:
        def __init__(self, name: str, value: float) -> None:
            self.name, self.value = name, value

        def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, output: torch.Tensor) -> None:
            on_side = device == "cuda" and spy._streams.current_stream() == spy._side
            log.append(f"{self.name} on {'side' if on_side else 'main'}")
            output.fill_(self.value)

    class Spy(Separate):
        def __init__(self) -> None:
            vars(self).update(vars(separate), _routed=Logged("routed", 2.0), _shared=Logged("shared", 3.0))

        def _wait(self, stream: object, other: object) -> None:
            log.append("join" if other is self._side else "fork" if stream is self._side else "wrong")
            super()._wait(stream, other)

    spy = Spy()
    inputs = input_sets(POINT, torch.device(device))[0]
    output = torch.full_like(inputs.x, torch.nan)
    spy(inputs, output)
    assert log == ["fork", f"shared on {'side' if device == 'cuda' else 'main'}", "routed on main", "join"]
    assert bool((output == 5).all())


def test_table() -> None:
    assert table(ROWS, "small") == (
        "| µs | launches | stream waits | 1 | 64 |\n"
        "|---|--:|--:|--:|--:|\n"
        "| `fp8xfp4` `block128`, fused | 5 | 0 | **40.0** | 1,234 |\n"
        "| `fp8xfp4` `block128`, separate | 11 to 12 | 2 | 60.0 | **1,200** |\n"
    )
    wrong = [replace(row, problem="rel_rms 1 > 0.01") for row in ROWS]
    with pytest.raises(ValueError, match="^no rows of small$"):
        table(wrong, "small")


def test_the_page_shows_the_measured_figures() -> None:
    page = (ROOT / "docs" / "shared_experts.md").read_text()
    results = ROOT / "bench" / "results" / "shared_mlp_h200.json"
    found = re.search("<!-- separate -->\n(.*?)<!-- /separate -->", page, re.DOTALL)
    assert found is not None
    measured = table(load_rows(results), "deepseek-v4-flash") if results.exists() else "Not yet measured.\n"
    assert found[1] == measured


def test_a_file_says_where_it_was_measured_and_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_rows(describe_run(torch.device("cpu"), None, {"tokens": [1]}), ROWS, path)
    data = json.loads(path.read_text())
    assert {"device", "driver", "versions", "method", "date"} <= data["meta"].keys()
    assert {"model", "tokens", "recipe", "contender", "median_us", "p20_us", "p80_us", "launches", "stream_syncs"} <= (
        data["records"][0].keys()
    )
    assert load_rows(path) == ROWS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], "tokens '0' is out of range; allowed: 1 … 16384"),
        (["--tokens", "few"], "tokens 'few' is neither a number nor a range"),
        (["--recipe", "fp8xfp8"], "recipe fp8xfp8/block128/deep_gemm_sm90: its experts are not MXFP4"),
        (["--recipe", "fp8xfp4/mx32/trtllm_gen"], "its shared experts are slots that the router names"),
        (["--recipe", "fp9"], "recipe 'fp9': "),
        (["--model", "qwen3-30b"], "'qwen3-30b' is not one of 'deepseek-v4-flash', 'deepseek-v4-pro'"),
        (["--json", "{folder}"], "{folder}' is a directory"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(main, [argument.format(folder=tmp_path) for argument in arguments])
    assert found.exit_code == 2
    assert words.format(folder=tmp_path) in found.output


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = CliRunner().invoke(main, ["--json", str(tmp_path / "rows.json"), "--tokens", "1-8"])
    assert found.exit_code == 1
    assert found.output == "Error: needs a CUDA GPU (torch.cuda.is_available() is False)\n"
    assert not list(tmp_path.iterdir())


def test_the_whole_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Up to the measuring itself, which others test: the file and the table hold every recipe and count, and a wrong
    row is an error."""
    asked: list[tuple[str, int]] = []
    problem: list[str | None] = [None]

    def measured(contenders, point, recipe, device, windows):  # type: ignore[no-untyped-def]
        asked.append((recipe.act_scale, point.tokens))
        found = replace(ROW, model=point.shape.name, tokens=point.tokens, recipe=str(recipe), problem=problem[0])
        return [found, replace(found, contender="separate")]

    home = "megamoe.bench.shared_mlp."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(home + "device_unsupported_reason", lambda device: None)
    monkeypatch.setattr(home + "describe_run", lambda device, roofline, arguments: {"arguments": arguments})
    monkeypatch.setattr(home + "open_layers", lambda store, recipe, max_tokens: [[], []])
    monkeypatch.setattr(home + "measure", measured)
    path = tmp_path / "new" / "rows.json"
    found = CliRunner().invoke(main, ["--json", str(path), "--tokens", "4,1"])
    assert found.exit_code == 0, found.output
    assert asked == [("block128", 1), ("block128", 4), ("token", 1), ("token", 4)]
    rows = load_rows(path)
    assert len(rows) == 8
    assert found.output.endswith(table(rows, "deepseek-v4-flash"))
    problem[0] = "rel_rms 1 > 0.01"
    found = CliRunner().invoke(main, ["--tokens", "4"])
    assert found.exit_code == 1
    assert "WRONG: rel_rms 1 > 0.01" in found.output
    assert "Error: 4 of 4 rows are wrong: see above" in found.output


def test_recipes_that_can_be_asked_for() -> None:
    fit = [("fp8xfp4", "block128"), ("fp8xfp4", "token"), ("fp8xfp4", "mx32"), ("mxf4xmxf4", "mx32")]
    assert [unfit_reason(resolve_recipe(*name)) for name in fit] == [None] * 4
