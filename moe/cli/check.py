"""`megamoe check`: every kernel against every judge that can run here, by bytes where bytes are the contract."""

from __future__ import annotations

import json
import math
import time
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import megamoe
from megamoe.cli.console import open_console
from megamoe.cli.device import describe, open_device
from megamoe.cli.doctor import driver_version
from megamoe.cli.output import prepare_output
from megamoe.recipe import ALL_RECIPES, MMA_TYPES

if TYPE_CHECKING:
    from megamoe.oracle.comparison import Case, Outcome

BACKENDS = ("reference", "deep_gemm", "flashinfer_trtllm")


@dataclass(frozen=True)
class Result:
    """A case that ran, or the reason why it did not."""

    case: Case
    outcome: Outcome | None
    seconds: float = 0.0
    unavailable: str | None = None


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Write every result here.")
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, help="Only these judges.")
@click.option("--mma-type", "mma_types", type=click.Choice(MMA_TYPES), multiple=True, help="Only these recipes.")
@click.option("--case", "texts", multiple=True, help="Only cases whose kernel/recipe/name holds this text.")
@click.option("--download", is_flag=True, help="Fetch upstream's published wheels into the user's cache first.")
@click.option("--list", "show", is_flag=True, help="List the cases that the other options choose, and stop.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="A model's local folder: check one of its layers instead, on every backend that can run.",
)
@click.option("--layer", type=click.IntRange(0), help="The layer's number in the checkpoint's names.")
@click.option("--tokens", type=click.IntRange(1), help="Tokens of the checkpoint layer's call. Default: 16.")
def check(
    path: Path | None,
    backends: tuple[str, ...],
    mma_types: tuple[str, ...],
    texts: tuple[str, ...],
    download: bool,
    show: bool,
    checkpoint: Path | None,
    layer: int | None,
    tokens: int | None,
) -> None:
    """Compare every kernel with the reference and with the upstream kernels, layouts and functions that can run on
    this machine, and say why the others can't; with --checkpoint, one layer of a model's weights on every backend.

    Exits with status 1 when a byte or an error is beyond its limit, or when nothing was compared.
    """
    if checkpoint is None and (layer is not None or tokens is not None):
        raise click.UsageError("--layer and --tokens are of a --checkpoint")
    if checkpoint is not None and (layer is None or texts or download or show or "reference" in backends):
        raise click.UsageError(
            "--checkpoint needs --layer and takes no --case, --list, --download or --backend reference"
        )
    prepare_output("--json", path)
    console = open_console()
    device, triton_reason = open_device()
    from megamoe.oracle import suites  # it loads triton, which `open_device` must do first

    if not show:
        console.print(f"megamoe {megamoe.__version__} on {describe(device)}")
    if triton_reason is not None:
        console.print(f"triton: {triton_reason}", markup=False)
    if checkpoint is not None and layer is not None:
        from megamoe.cli.check_checkpoint import check_checkpoint

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, in the interpreter
            check_checkpoint(console, device, checkpoint, layer, tokens or 16, backends, mma_types, path)
        return
    problems = suites.fetch() if download else []
    for problem in problems:
        console.print(problem, style="yellow", markup=False)
    chosen = [case for case in suites.cases(device) if _selected(case, backends, mma_types, texts)]
    if not chosen:
        raise click.UsageError("no case matches; `megamoe check --list` lists them, with the same options to choose")
    if show:
        for case in chosen:
            click.echo(f"{case.path}  ({case.judge})")
        return
    results: list[Result] = []
    with warnings.catch_warnings(), _progress() as progress:
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, in the interpreter, about infinities put there
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.path)
            results.append(_run(case, device))
            progress.advance(task)
            if path is not None:  # after every case: a run that is cut short leaves what it has
                path.write_text(json.dumps(strict(_report(device, results)), indent=1) + "\n")
    _print(console, results)
    ran = [result for result in results if result.outcome is not None]
    failed = [result for result in ran if result.outcome is not None and result.outcome.problem is not None]
    live = "" if any(_judged_by_kernel(result.case) for result in ran) else "; no upstream kernel ran here"
    could_not = f"{len(results) - len(ran)} could not run{live}"
    console.print(f"{len(ran) - len(failed)} of {len(ran)} comparisons hold; {could_not}")
    if failed or not ran:
        raise SystemExit(1)


def _selected(case: Case, backends: tuple[str, ...], mma_types: tuple[str, ...], texts: tuple[str, ...]) -> bool:
    if backends and case.backend not in backends:
        return False
    if mma_types and not any(_concerns(case, mma_type) for mma_type in mma_types):
        return False
    return not texts or any(text in case.path for text in texts)


def _concerns(case: Case, mma_type: str) -> bool:
    """A case names a recipe, an mma_type, or a quantization kind that recipes of the mma_type use."""
    from megamoe.kernels.layer import pre_dispatch_kind

    if case.recipe.split("/")[0] == mma_type:
        return True
    return case.recipe in {pre_dispatch_kind(recipe) for recipe in ALL_RECIPES if recipe.mma_type == mma_type}


def _judged_by_kernel(case: Case) -> bool:
    """Whether the judge is upstream's GPU code, not its layouts, its Python or our reference."""
    from megamoe.oracle.deep_gemm import differential, fused_differential
    from megamoe.oracle.trtllm_gen.differential import KERNELS

    return case.judge in (differential.DEVICE_CODE, fused_differential.SM90, fused_differential.SM100, KERNELS)


def _run(case: Case, device: torch.device) -> Result:
    from megamoe.oracle.comparison import Outcome
    from megamoe.oracle.downloads import OracleUnavailable

    if case.unavailable is not None:
        return Result(case, None, unavailable=case.unavailable)
    start = time.perf_counter()
    try:
        outcome = case.run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except OracleUnavailable as error:
        return Result(case, None, unavailable=str(error))
    except Exception as error:  # one case must not hide the others
        lines = str(error).strip().splitlines() or ["no message"]
        outcome = Outcome(problem=f"{type(error).__name__}: {lines[0]}")
    return Result(case, outcome, time.perf_counter() - start)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _print(console: Console, results: list[Result]) -> None:
    table = Table("kernel", "recipe or kind", "judge", "cases", "bytes", "differ", "largest error", "")
    groups: dict[tuple[str, str, str, str], list[Outcome]] = {}
    reasons: dict[tuple[str, str, str], int] = {}
    for result in results:
        case = result.case
        if result.outcome is None:
            key = (case.backend, case.judge, str(result.unavailable))
            reasons[key] = reasons.get(key, 0) + 1
        else:
            groups.setdefault((case.kernel, case.recipe, case.backend, case.judge), []).append(result.outcome)
    for (kernel, recipe, backend, judge), outcomes in groups.items():
        failed = sum(outcome.problem is not None for outcome in outcomes)
        table.add_row(
            kernel,
            recipe.replace("/", " "),
            judge if judge == backend else f"{backend}: {judge}",
            str(len(outcomes)),
            f"{sum(outcome.bytes_compared for outcome in outcomes):,}",
            f"{sum(outcome.bytes_mismatched for outcome in outcomes):,}",
            _largest_error(outcomes),
            f"{failed} beyond" if failed else "ok",
            style="red" if failed else None,
        )
    console.print(table)
    for (backend, judge, reason), count in reasons.items():
        console.print(f"{backend}, {judge}: {count} did not run: {reason}", markup=False)
    for result in results:
        if result.outcome is not None and result.outcome.problem is not None:
            text = f"FAILED {result.case.path} ({result.case.judge}): {result.outcome.problem}"
            console.print(text, style="red", markup=False)


def _largest_error(outcomes: list[Outcome]) -> str:
    errors = [outcome.details["ours"] for outcome in outcomes if "ours" in outcome.details]
    if not errors:
        return "-"
    text = f"rel. RMS {max(error['rel_rms'] for error in errors):.1e}"  # type: ignore[index]
    ratios = [outcome.details["ratio"] for outcome in outcomes if "ratio" in outcome.details]
    return f"{text}, {max(ratios):.3f} × judge's" if ratios else text  # type: ignore[type-var]


def _report(device: torch.device, results: list[Result]) -> dict[str, Any]:
    cases = []
    for result in results:
        case, outcome = result.case, result.outcome
        row: dict[str, Any] = {"kernel": case.kernel, "recipe": case.recipe, "case": case.name,
                               "backend": case.backend, "judge": case.judge}  # fmt: skip
        if outcome is None:
            row["unavailable"] = result.unavailable
        else:
            row |= {"bytes_compared": outcome.bytes_compared, "bytes_mismatched": outcome.bytes_mismatched,
                    "problem": outcome.problem, "seconds": round(result.seconds, 3), **outcome.details}  # fmt: skip
        cases.append(row)
    by_bytes = [result for result in results if result.outcome is not None]
    totals: dict[str, dict[str, int]] = {}
    for result in by_bytes:
        assert result.outcome is not None
        row = totals.setdefault(f"{result.case.kernel} vs {result.case.judge}", dict(compared=0, mismatched=0))
        row["compared"] += result.outcome.bytes_compared
        row["mismatched"] += result.outcome.bytes_mismatched
    versions = {name: _version(name) for name in ("torch", "triton", "sgl-deep-gemm", "flashinfer-python")}
    return {
        "method": "ours and the judge on the same inputs over poisoned outputs; bytes counted are those the kernel "
        "must write; errors are of BF16 outputs against the fp64 reference with the same requantization points",
        "megamoe": megamoe.__version__,
        "device": describe(device),
        "driver": driver_version(),
        **versions,
        "totals": {key: {f"bytes_{name}": n for name, n in row.items()} for key, row in totals.items()},
        "cases": cases,
    }


def strict(value: Any) -> Any:
    """JSON has no infinity and no NaN: their names instead."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
