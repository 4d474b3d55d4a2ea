"""`megamoe check` and what it stands on: downloads, reasons, filters, JSON, exit status."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from megamoe import cli
from megamoe.oracle import downloads, reference_differential, suites
from megamoe.oracle.comparison import Case, Outcome, compare_bytes, total
from megamoe.oracle.deep_gemm import upstream
from megamoe.oracle.definitions import execute_definitions
from megamoe.oracle.downloads import OracleUnavailable, unpacked_wheel
from megamoe.oracle.reference import moe_layer
from megamoe.recipe import resolve_recipe

pytestmark = pytest.mark.differential


def _case(name: str, outcome: Any, *, recipe: str = "mxfp8", unavailable: str | None = None) -> Case:
    def run() -> Outcome:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Case("pre_dispatch", recipe, "deep_gemm", "device code", name, run, unavailable)


GOOD = Outcome(1000, 0)
BAD = Outcome(1000, 3, problem="first difference at [0]")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`megamoe check` with these cases and arguments."""

    def run(cases: list[Case], *arguments: str) -> Result:
        monkeypatch.setattr(suites, "cases", lambda device: cases)
        return CliRunner().invoke(cli.main, ["check", *arguments])

    return run


def test_a_difference_fails_and_is_named(check: Any) -> None:
    assert check([_case("good", GOOD)]).exit_code == 0
    result = check([_case("good", GOOD), _case("bad", BAD)])
    assert result.exit_code == 1
    assert "FAILED pre_dispatch/mxfp8/bad (device code): first difference at [0]" in result.output
    assert "1 of 2 comparisons hold; 0 could not run" in result.output


def test_nothing_compared_fails(check: Any) -> None:
    result = check([_case("gone", GOOD, unavailable="no nvcc")])
    assert result.exit_code == 1
    assert "deep_gemm, device code: 1 did not run: no nvcc" in result.output


def test_a_judge_that_vanishes_is_no_failure_and_an_exception_is_one(check: Any) -> None:
    result = check([_case("good", GOOD), _case("gone", OracleUnavailable("no wheel"))])
    assert result.exit_code == 0
    assert "1 did not run: no wheel" in result.output
    result = check([_case("good", GOOD), _case("broken", RuntimeError("launch failed\nmore"))])
    assert result.exit_code == 1
    assert "RuntimeError: launch failed" in result.output
    assert "1 of 2 comparisons hold" in result.output


def test_filters(check: Any) -> None:
    cases = [_case("a 32", GOOD), _case("b", GOOD, recipe="fp8_block128"), _case("c", GOOD, recipe="mxf4xmxf4/x/y")]
    assert "1 of 1 " in check(cases, "--case", "mxfp8/a").output
    assert "1 of 1 " in check(cases, "--mma-type", "mxf4xmxf4").output
    assert "1 of 1 " in check(cases, "--mma-type", "fp8xfp4", "--case", "mxfp8").output, "by its pre-dispatch"
    assert "3 of 3 " in check(cases, "--backend", "deep_gemm").output
    nothing = check(cases, "--backend", "flashinfer_trtllm")
    assert nothing.exit_code == 2
    assert "no case matches" in nothing.output


def test_the_json(check: Any, tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    layer = Outcome(details={"ours": {"rel_rms": 0.25}, "ratio": 0.75, "worst": [torch.inf], "outputs": 7})
    check([_case("bad", BAD), _case("good", GOOD), _case("layer", layer), _case("no", GOOD, unavailable="why")],
          "--json", str(path))  # fmt: skip
    report = json.loads(path.read_text())
    assert report["totals"]["pre_dispatch vs device code"] == {"bytes_compared": 2000, "bytes_mismatched": 3}
    bad, good, errors, no = report["cases"]
    assert (bad["bytes_compared"], bad["bytes_mismatched"]) == (1000, 3)
    assert bad["problem"] == "first difference at [0]"
    assert good["problem"] is None
    assert (errors["ours"], errors["ratio"]) == ({"rel_rms": 0.25}, 0.75)
    assert errors["worst"] == ["inf"]
    assert no["unavailable"] == "why"
    assert "bytes_compared" not in no
    assert {"device", "driver", "torch", "triton", "method"} <= set(report)


def test_compare_bytes_counts() -> None:
    expected = torch.arange(12, dtype=torch.float32).view(3, 4)
    actual = expected.clone()
    actual[1, 2] = -0.0
    actual[2, 3] = torch.nan
    outcome = compare_bytes([("same", expected, expected.clone()), ("y", actual, expected)])
    assert outcome.bytes_compared == 96
    assert outcome.bytes_mismatched > 2
    assert str(outcome.problem).startswith("y: first difference at [1, 2]")
    summed = total([outcome, Outcome(4, 1, problem="later"), compare_bytes([("none", expected[:0], expected[:0])])])
    assert (summed.bytes_compared, summed.bytes_mismatched) == (100, outcome.bytes_mismatched + 1)
    assert summed.problem == outcome.problem


def test_every_judge_has_a_reason_or_runs(device: str) -> None:
    reasons = suites.reasons()
    assert len(reasons) == 7
    if device == "cpu":
        assert reasons["deep_gemm: device code of 0.1.7"] == "no CUDA GPU"
        assert reasons["deep_gemm: live SM90 kernel"] == "no CUDA GPU"
        assert reasons["flashinfer_trtllm: trtllm-gen kernels"] == "no CUDA GPU"


def test_the_suites_name_every_case_once(device: str) -> None:
    cases = suites.cases(torch.device(device))
    names = [(case.path, case.backend, case.judge) for case in cases]
    assert len(set(names)) == len(names)
    kernels = {case.kernel for case in cases}
    assert {"weights", "quantize", "layout", "pre_dispatch", "requantize", "buffer", "layer"} == kernels
    assert {case.backend for case in cases} == {"reference", "deep_gemm", "flashinfer_trtllm"}


def test_downloads_that_fail_have_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(upstream.VARIABLE, raising=False)
    with pytest.raises(OracleUnavailable, match=r"sgl-deep-gemm==0\.1\.7 is not in .*; `pip download` was not asked"):
        upstream.locate()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OracleUnavailable, match=r"`pip download sgl-deep-gemm==0\.1\.7` failed: "):
        upstream.locate(download=True)
    assert not list((tmp_path / "megamoe").iterdir()), "nothing is left behind"


def test_a_wheel_with_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def fake(requirement: str, options: Any, folder: Path) -> Path:
        (folder / "x-1-py3-none-any.whl").write_bytes(b"not it")
        return folder / "x-1-py3-none-any.whl"

    monkeypatch.setattr(downloads, "_download", fake)
    with pytest.raises(OracleUnavailable, match="x-1-py3-none-any.whl has SHA-256 .*, expected abc"):
        unpacked_wheel("x==1", "abc", download=True)


def test_single_definitions(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("import nowhere\nTABLE = [1, 2]\n@nowhere.decorate\ndef f(x):\n    return TABLE[x] + offset\n")
    module = execute_definitions(source, ["f", "TABLE"], {"offset": 10})
    assert module.f(1) == 12
    with pytest.raises(OracleUnavailable, match=r"module\.py does not define g"):
        execute_definitions(source, ["f", "g"], {})
    with pytest.raises(OracleUnavailable, match="cannot be read"):
        execute_definitions(tmp_path / "none.py", ["f"], {})


@pytest.mark.parametrize(
    "broken",
    [
        lambda y: y * 1.05,
        lambda y: torch.cat([y[:-1], y[-1:].roll(1, -1)]),
        lambda y: torch.where(torch.arange(len(y))[:, None] == 3, torch.nan, y),
    ],
    ids=["5 % scale", "one wrong row", "a row of NaN"],
)
def test_a_broken_layer_is_caught(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, shape = resolve_recipe("fp8xfp8"), (*reference_differential._SMALL["small"].items(),)
    device = torch.device("cpu")
    held = reference_differential.held_layer(recipe, shape, device)
    right: list[bool] = []

    def answer(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        y = moe_layer(x, topk_ids, topk_weights, held.plain, held.spec, full_trace=False).y
        return y if right else broken(y)

    monkeypatch.setattr(reference_differential, "run_ours", lambda *arguments: answer)
    assert reference_differential.compare_random(recipe, "small", shape, 1000, device).problem is not None
    right.append(True)
    assert reference_differential.compare_random(recipe, "small", shape, 1000, device).problem is None
