"""The command line as a user types it: fresh processes for what decides at start-up, in-process for the rest."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import megamoe
from megamoe import cli
from megamoe.cli import demo_layers
from megamoe.cli.measure import count_launches, timed
from megamoe.codegen.pool import Entry
from megamoe.kernels.layer import LAUNCHES
from megamoe.oracle import suites
from megamoe.oracle.comparison import Case, Outcome
from megamoe.oracle.deep_gemm import fused_differential
from megamoe.oracle.metrics import LIMITS, Limits
from megamoe.recipe import ALL_RECIPES, TABLE

codegen = import_module("megamoe.cli.codegen")  # the module; the package's attribute may be the command


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m megamoe …` in a process of its own, with no TRITON_INTERPRET to help it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-m", "megamoe", *arguments],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture
def fast_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the recipe that the interpreter runs fastest."""
    monkeypatch.setattr(demo_layers, "ALL_RECIPES", (ALL_RECIPES[3],))


@pytest.mark.slow
def test_demo_in_a_fresh_process(device: str) -> None:
    result = _run("demo", "--shape", "small", "--tokens", "4")
    assert result.returncode == 0, result.stdout + result.stderr
    if device == "cpu":
        assert result.stderr == "", "NumPy's warnings in the interpreter are the demo's to silence"
    assert "4 tokens, hidden 256, intermediate 128, 8 experts + 1 shared, top-2" in result.stdout
    for recipe in ALL_RECIPES:
        assert recipe.mma_type in result.stdout
    assert result.stdout.count("within") == len(ALL_RECIPES)
    assert result.stdout.count("equal bytes") == len(ALL_RECIPES)
    if device == "cpu":
        assert "deep_gemm did not run: device type 'cpu'; served: cuda" in result.stdout
    recipes = len(ALL_RECIPES)
    assert result.stdout.endswith(f"{recipes} of {recipes} layers agree with the reference\n")


@pytest.mark.usefixtures("fast_recipe")
def test_demo_fails_when_a_result_is_beyond_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    impossible = Limits(rel_rms=-1.0, worst_row=1.0, scale_error=1.0, calc_diff=1.0, reason="to fail")
    monkeypatch.setitem(LIMITS, ALL_RECIPES[3], impossible)
    result = CliRunner().invoke(cli.main, ["demo", "--shape", "small", "--tokens", "2"])
    assert result.exit_code == 1
    assert "BEYOND" in result.output
    assert f"FAILED {ALL_RECIPES[3]} triton: rel_rms " in result.output
    assert "0 of 1 layers agree" in result.output


@pytest.mark.usefixtures("fast_recipe")
def test_demo_fails_when_nothing_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_layers, "NAMES", ("reference", "deep_gemm"))
    result = CliRunner().invoke(cli.main, ["demo", "--shape", "small", "--tokens", "2"])
    assert result.exit_code == 1
    assert "0 of 0 layers agree" in result.output


@pytest.mark.usefixtures("fast_recipe")
def test_demo_counts_the_launches_of_a_layer(device: str) -> None:
    shape = demo_layers.Shape(tokens=2, hidden=128, intermediate=128, num_experts=2, top_k=1)
    rows, _ = demo_layers.run_layers(shape, torch.device(device), lambda text: None)
    judge, row = rows
    assert (judge.backend, row.backend, row.problem) == ("reference", "triton", None)
    assert row.cells[-1] == str(len(LAUNCHES))


def test_a_call_that_launches_nothing(device: str) -> None:
    result, launches = count_launches(lambda: torch.empty(3), torch.device(device))
    assert (result.shape, launches) == ((3,), 0)
    assert timed(lambda: torch.empty(3), torch.device(device))[1] >= 0


def test_doctor_in_a_fresh_process() -> None:
    result = _run("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    for line in (megamoe.__version__, torch.__version__.split("+")[0], "driver", "oracles", "auto", "chooses triton"):
        assert line in result.stdout
    assert result.stdout.count(f"yes: every recipe, {len(TABLE)} of them") == 2, "triton and the reference"
    assert "flashinfer_trtllm" in result.stdout


def test_doctor_says_why_triton_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the command sets it; this puts it back
    monkeypatch.setattr("megamoe.oracle.interpreter.is_active", lambda: False)
    monkeypatch.setattr("megamoe.oracle.interpreter.install", _fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(cli.main, ["doctor"])
    assert result.exit_code == 0
    assert "another interpreter" in result.output
    assert "chooses reference" in result.output


def _fail() -> None:
    raise RuntimeError("triton 99 has another interpreter")


def test_check_lists_its_cases() -> None:
    result = CliRunner().invoke(cli.main, ["check", "--list", "--case", "quantize/mxfp4"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines
    assert all(line.startswith("quantize/mxfp4") for line in lines)
    nothing = CliRunner().invoke(cli.main, ["check", "--case", "nothing"])
    assert nothing.exit_code == 2
    assert "no case matches; `megamoe check --list` lists them" in " ".join(nothing.output.split())


def test_check_says_that_no_upstream_kernel_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def case(judge: str) -> Case:
        return Case("layer", "fp8xfp8", "deep_gemm", judge, "a", lambda: Outcome(bytes_compared=1))

    path = tmp_path / "deep" / "er" / "c.json"
    for judge, said in (("reference", True), ("Python of 0.1.7", True), (fused_differential.SM90, False)):
        monkeypatch.setattr(suites, "cases", lambda device, judge=judge: [case(judge)])
        result = CliRunner().invoke(cli.main, ["check", "--json", str(path)])
        assert result.exit_code == 0, result.output
        assert result.output.endswith("0 could not run; no upstream kernel ran here\n") == said
    assert json.loads(path.read_text())["cases"][0]["judge"] == fused_differential.SM90
    refused = CliRunner().invoke(cli.main, ["check", "--json", str(path / "c.json")])
    assert refused.exit_code == 2
    assert "--json: the folder " in refused.output


def test_codegen_lists_what_the_wrong_option_allows() -> None:
    jobs = (("down", "fp8xfp4/mx32/trtllm_gen"), ("down", "fp8xfp8/block128/trtllm_gen"), ("combine", "bf16 rows"))
    entries = [Entry(90, kernel, recipe, f"{kernel}/{recipe}") for kernel, recipe in jobs]
    recipes = "fp8xfp4/mx32/trtllm_gen, fp8xfp8/block128/trtllm_gen"
    for kernel, recipe, words in (
        ("gateup", None, "--kernel 'gateup' is unknown; allowed: combine, down"),
        (None, "int4", f"--recipe 'int4' matches no job; recipes: {recipes}; kinds: bf16 rows"),
        ("combine", "fp8xfp8", "--recipe 'fp8xfp8' matches no job; kinds of --kernel combine: bf16 rows"),
    ):
        assert codegen._no_match(entries, kernel, recipe) == words


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(cli.main, ["--help"])
    assert result.exit_code == 0
    for command in ("check", "codegen", "demo", "doctor"):
        assert f"\n  {command} " in result.output
    assert CliRunner().invoke(cli.main, ["no-such-command"]).exit_code == 2


def test_version() -> None:
    assert CliRunner().invoke(cli.main, ["--version"]).output == f"megamoe, version {megamoe.__version__}\n"
