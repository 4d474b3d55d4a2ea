"""`megamoe bench` and `megamoe report` as a user types them."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from megamoe import cli
from megamoe.bench import backends, own, suite
from megamoe.bench.layers import FP8_BLOCK, LayerStore, input_sets
from megamoe.bench.registry import Plan, Point
from megamoe.bench.shapes import ModelShape
from megamoe.kernels.layer import LAUNCHES

SHAPE = "H=128,I=128,E=4,K=2,S=1,name=small"
FAST = ("--shape", SHAPE, "--tokens", "2", "--recipe", "fp8xfp8", "--window", "0.01", "--rounds", "2")
REQUIRED = {
    "model", "tokens", "mma_type", "act_scale", "numerics", "backend", "stage", "n_shared", "routing", "median_us",
    "p20_us", "p80_us", "launches", "useful_tflops", "weight_gbps", "roofline_pct", "ratio_to",
}  # fmt: skip


def _bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["bench", *arguments])


@pytest.mark.slow
def test_results_of_a_small_layer(tmp_path: Path, device: str) -> None:
    result = _bench(
        *FAST, "--backend", "triton", "--backend", "reference", "--stage", "layer", "--stage", "layer_with_plan",
        "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "small, 2 tokens" in result.output
    data = json.loads((tmp_path / "r.json").read_text())
    assert set(data) == {"meta", "records"}
    assert data["meta"]["schema"] == 1
    assert (data["meta"]["roofline"] is None) == (device == "cpu")
    rows = {(row["backend"], row["stage"]): row for row in data["records"]}
    assert set(rows) == {("triton", "layer"), ("triton", "layer_with_plan"), ("reference", "layer")}
    for row in data["records"]:
        assert set(row) >= REQUIRED
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert row["problem"] is None
    layer = rows["triton", "layer"]
    assert layer["launches"] == len(LAUNCHES) - 1
    assert rows["triton", "layer_with_plan"]["launches"] == len(LAUNCHES)
    assert layer["rel_rms"] is not None
    reference = rows["reference", "layer"]
    assert layer["ratio_to"] == {"reference": round(reference["median_us"] / layer["median_us"], 4)}
    assert '"small"' in (tmp_path / "r.html").read_text()


def test_what_is_unknown_does_not_stop_the_rest(tmp_path: Path) -> None:
    result = _bench(
        *FAST, "--model", "llama", "--backend", "cutlass", "--backend", "reference", "--routing", "none",
        "--routing", "zipf", "--shape", "H=1", "--json", str(tmp_path / "r.json"),
    )  # fmt: skip
    assert result.exit_code == 1
    flat = " ".join(result.output.split())
    for line in (
        "model 'llama' is unknown; known: deepseek-v4-flash",
        "backend 'cutlass' is unknown; known: triton",
        "routing 'none' is unknown; known: uniform",
        "shape 'H=1': intermediate is missing",
    ):
        assert line in flat
    assert "Traceback" not in result.output
    last = result.output.rpartition(" rows in ")[2]
    assert "backend 'cutlass' is unknown" in last, "said again where the reader still sees it"
    assert [row["routing"] for row in json.loads((tmp_path / "r.json").read_text())["records"]] == ["zipf"]


@pytest.mark.parametrize(
    "arguments", [("--model", "llama"), ("--backend", "cutlass"), ("--recipe", "int4"), ("--tokens", "none")]
)
def test_unknown_names_that_leave_nothing_stop_the_run(arguments: tuple[str, str]) -> None:
    result = _bench(*arguments)
    assert result.exit_code == 2
    assert f"nothing is left to measure; {arguments[0][2:]} {arguments[1]!r}" in " ".join(result.output.split())
    assert "rows in" not in result.output


def test_files_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, words in (
        (("--append",), "--append keeps the rows of a file: it needs --json FILE"),
        (("--json", str(tmp_path / "file" / "r.json")), "--json: the folder "),
        (("--html", str(tmp_path / "file" / "r.html")), "--html: the folder "),
    ):
        result = _bench(*FAST, *arguments)
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())
        assert "megamoe 0" not in result.output


def test_nothing_that_can_run_is_a_failure() -> None:
    result = _bench(*FAST, "--backend", "flashinfer")
    assert result.exit_code == 1
    assert "flashinfer did not run (1 row): " in result.output
    assert "0 rows in" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_a_large_layer_is_declined_in_a_line() -> None:
    result = _bench("--model", "deepseek-v4-flash", "--tokens", "8192", "--backend", "triton", "--backend", "reference")
    assert result.exit_code == 1
    flat = " ".join(result.output.split())
    assert "triton did not run (2 rows): no GPU here, and this layer is too large for Triton's interpreter" in flat
    assert "reference did not run (2 rows): no GPU here" in flat


def test_a_row_that_fails_is_a_line_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no kernel image\nsecond line")

    monkeypatch.setattr(own.TritonTier, "open", fail)
    result = _bench(*FAST, "--backend", "triton", "--backend", "reference")
    assert result.exit_code == 1
    assert (
        "FAILED small, 2 tokens, triton, fp8xfp8/block128/deep_gemm_sm90: RuntimeError: no kernel image\n"
        in result.output
    )
    assert "second line" not in result.output
    assert "1 rows in" in result.output


def test_a_contender_that_cannot_be_imported_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._HOMES, "flashinfer", "peers.nowhere")
    result = _bench(*FAST, "--backend", "flashinfer", "--backend", "reference")
    assert result.exit_code == 1
    assert "FAILED small, 2 tokens, flashinfer: ModuleNotFoundError: No module named" in result.output
    assert "1 rows in" in result.output


@pytest.mark.slow
def test_a_wrong_result_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "combine", lambda rows, ids, out, **options: out.fill_(1.0))
    result = _bench(*FAST, "--backend", "triton")
    assert result.exit_code == 1
    assert "WRONG small, 2 tokens, triton fp8xfp8 block128, layer: rel_rms" in " ".join(result.output.split())
    assert _bench(*FAST, "--backend", "triton", "--no-check").exit_code == 0


def test_the_budget_ends_a_run(tmp_path: Path) -> None:
    result = _bench(
        *FAST, "--backend", "reference", "--tokens", "1", "--budget", "1e9", "--json", str(tmp_path / "r.json")
    )
    assert result.exit_code == 0, result.output
    assert "stage `layer` starts with a routing plan that is given" in " ".join(result.output.split())
    over = suite.Settings(torch.device("cpu"), deadline=0.0)
    plan = Plan((ModelShape("a", 128, 128, 4, 2),), (1, 2), (), ("reference",), ("layer",))
    outcomes = list(suite.run(plan, over, None, lambda text: None))
    assert [(records, [str(skip) for skip in skipped]) for _, records, skipped in outcomes] == [
        ([], ["a, 1 token, every backend: not started: the time budget is used up"]),
        ([], ["a, 2 tokens, every backend: not started: the time budget is used up"]),
    ]


def test_append_keeps_other_points(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run = ("--shape", SHAPE, "--recipe", "fp8xfp8", "--backend", "reference", "--json", str(path))
    assert _bench(*run, "--tokens", "1,2").exit_code == 0
    before = {row["tokens"]: row for row in json.loads(path.read_text())["records"]}
    assert _bench(*run, "--tokens", "2,4", "--append").exit_code == 0
    data = json.loads(path.read_text())
    assert [row["tokens"] for row in data["records"]] == [1, 2, 4]
    assert data["records"][0] == before[1]
    assert data["records"][1] != before[2]
    assert [earlier["arguments"]["tokens"] for earlier in data["meta"]["earlier_runs"]] == [["1,2"]]
    assert _bench(*run, "--tokens", "2").exit_code == 0
    assert len(json.loads(path.read_text())["records"]) == 1
    path.write_text("not json")
    refused = _bench(*run, "--append")
    assert refused.exit_code == 2
    assert "--append: " in refused.output


def test_list_names_everything() -> None:
    result = _bench("--list")
    assert result.exit_code == 0
    for name in ("deepseek-v4-pro", "layer_with_plan", "all_to_one", "humming_w4a16"):
        assert f"  {name}" in result.output


@pytest.mark.slow
def test_every_stage_runs_on_its_own(device: str) -> None:
    shape = ModelShape("small", 128, 128, 4, 2)
    point = Point(shape, 3, "uniform")
    store = LayerStore(shape, torch.device(device))
    inputs = input_sets(point, store.device)
    layer = own.PORTABLE.open(store, point, FP8_BLOCK, inputs)
    whole = torch.full_like(inputs[0].x, torch.nan)
    for call in layer.calls("layer_with_plan", whole):
        call()
    combined = torch.full_like(whole, torch.nan)
    for stage in ("pre_dispatch", "routing", "gate_up", "down", "combine"):
        calls = layer.calls(stage, combined)
        combined.fill_(torch.nan)
        for call in calls:
            call()
        assert bool(combined.isnan().all()) == (stage != "combine")
    assert torch.equal(combined, whole)


@pytest.mark.parametrize("name", ("layer_h200.json", "differential_h200.json"))
def test_report_of_another_kind_of_result(name: str) -> None:
    result = CliRunner().invoke(cli.main, ["report", str(Path(__file__).parent.parent / "bench" / "results" / name)])
    assert result.exit_code == 2
    assert f"{name}: not a bench result: " in "".join(result.output.split("\n"))


def test_report_of_what_is_no_result_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "text.json").write_text("rows")
    (tmp_path / "pointer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    for name, words in (
        ("x.json", "not a bench result: it has nothing"),
        ("no.json", "no.json: no such file"),
        ("text.json", "not a bench result: not JSON (Expecting value"),
        ("pointer.json", "not a bench result: not JSON (a Git LFS pointer, not the file itself: run `git lfs pull`"),
        (".", ": a folder, not a file"),
    ):
        result = CliRunner().invoke(cli.main, ["report", str(tmp_path / name)])
        assert result.exit_code == 2
        assert "Error: " in result.output
        assert words in " ".join(result.output.split())
        assert "Errno" not in result.output
        assert "Traceback" not in result.output
