"""`megamoe bench`: who is how fast on which layer, and what the hardware would allow."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import megamoe
from megamoe.cli.console import open_console
from megamoe.cli.device import describe, open_device
from megamoe.cli.output import prepare_output

if TYPE_CHECKING:  # they load triton, which `open_device` must do first
    from megamoe.bench.records import Record, Results
    from megamoe.bench.registry import Plan, Point
    from megamoe.bench.suite import Skipped

_ALL = "all"
_LEGEND = (
    "±: half of p20 … p80; GB/s: of touched weights; roof: share of the measured roofline; stage `layer` starts with a "
    "routing plan that is given, `layer_with_plan` makes it, as a call of MegaMoE does"
)


@dataclass
class _Outcome:
    records: list[Record] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@click.command()
@click.option("--model", "models", multiple=True, help="A known shape; several times for several. See --list.")
@click.option("--shape", "shapes", multiple=True, metavar="H=…,I=…,E=…,K=…[,S=…]", help="A shape of your own.")
@click.option("--shapes", "file", type=click.Path(path_type=Path), help="A TOML file with a table [name] per shape.")
@click.option("--tokens", multiple=True, help="64, 1,16,64 or 1-8192 (its powers of two).")
@click.option("--recipe", "recipes", multiple=True, help="mma_type[/act_scale[/numerics]], or `served`.")
@click.option("--backend", "backends", multiple=True, help="A contender, or all; default: all but the tiers.")
@click.option("--stage", "stages", multiple=True, help="Default: layer on the CPU, every stage on a GPU.")
@click.option("--routing", "routings", multiple=True, help="uniform (default), zipf or all_to_one.")
@click.option("--shared", multiple=True, type=click.IntRange(0, 8), help="Shared experts; default: 0.")
@click.option(
    "--window", type=click.FloatRange(0.01), help="Measured seconds per row; default: 0.25, from 2048 tokens 1."
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Pieces of a window, interleaved.")
@click.option("--quick", is_flag=True, help="Few token counts, whole layers only, 0.1 s windows.")
@click.option("--budget", type=click.FloatRange(1), help="Seconds after which no further point is started.")
@click.option("--check/--no-check", "judge", default=True, help="Compare every y with the reference.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results here.")
@click.option("--append", is_flag=True, help="Keep the rows of other points that --json already holds.")
@click.option("--html", "html_path", type=click.Path(path_type=Path, dir_okay=False), help="Write a report here.")
@click.option("--list", "show", is_flag=True, help="List models, stages and contenders, and stop.")
def bench(
    models: tuple[str, ...], shapes: tuple[str, ...], file: Path | None, tokens: tuple[str, ...],
    recipes: tuple[str, ...], backends: tuple[str, ...], stages: tuple[str, ...], routings: tuple[str, ...],
    shared: tuple[int, ...], window: float | None, rounds: int, quick: bool, budget: float | None, judge: bool,
    json_path: Path | None, append: bool, html_path: Path | None, show: bool,
) -> None:  # fmt: skip
    """Measure MoE layers: time, TFLOP/s, GB/s, share of the measured roofline and ratio to every other contender.

    What is unknown, cannot run here or fails is one line each; the other rows go on. Exits with status 1 when a name
    was unknown, a row failed or was wrong, or nothing was measured; with 2, before anything runs, when unknown names
    leave nothing to measure or a file cannot be written. `docs/bench.md` describes the method.
    """
    started = time.monotonic()
    if append and json_path is None:
        raise click.UsageError("--append keeps the rows of a file: it needs --json FILE")
    prepare_output("--json", json_path)
    prepare_output("--html", html_path)
    console = open_console()
    device, triton_reason = open_device()
    from megamoe.bench.environment import describe_run
    from megamoe.bench.records import Results
    from megamoe.bench.roofline import measure_roofline
    from megamoe.bench.suite import Settings
    from megamoe.bench.timing import Windows

    if show:
        _list(console)
        return
    asked = dict(
        model=models, shape=shapes, tokens=tokens, recipe=recipes, backend=backends, stage=stages, routing=routings,
        shared=shared, window=window, rounds=rounds, quick=quick,
    )  # fmt: skip
    outcome = _Outcome()
    plan = _plan(asked, file, device, outcome)
    unknown = list(outcome.problems)
    if not plan.has_rows:
        raise click.UsageError("; ".join(["nothing is left to measure", *unknown]))
    console.print(f"megamoe {megamoe.__version__} on {describe(device)}")
    for problem in [*unknown, *([triton_reason] if triton_reason else [])]:
        console.print(problem, style="red", markup=False)
    kept = _kept(json_path if append else None)
    roofline = None
    if device.type == "cuda":
        with console.status("measuring the roofline"):
            roofline = measure_roofline(Windows(0.2 if quick else 0.5, 3))
        fp8 = "" if roofline.fp8_tflops is None else f", FP8 {roofline.fp8_tflops:,.0f} TFLOP/s"
        console.print(
            f"roofline: read {roofline.read_gbps:,.0f} GB/s, copy {roofline.copy_gbps:,.0f} GB/s, "
            f"BF16 {roofline.bf16_tflops:,.0f} TFLOP/s{fp8}"
        )
    settings = Settings(
        device, window or (0.1 if quick else None), 3 if quick else rounds, judge,
        None if budget is None else started + budget,
    )  # fmt: skip
    meta = describe_run(device, roofline, {name: value for name, value in asked.items() if value})
    if kept is not None:
        meta["earlier_runs"] = [*kept.meta.pop("earlier_runs", []), kept.meta]
    with warnings.catch_warnings():
        # NumPy notices that exp(-gate) overflows in a sigmoid of 0; a GPU does not.
        warnings.filterwarnings("ignore", "overflow encountered in exp|divide by zero encountered", RuntimeWarning)
        _measure(plan, settings, roofline, console, outcome, Results(meta, kept.records if kept else []), json_path)
    if outcome.records:
        console.print(_LEGEND, style="dim", markup=False)
    _print_skipped(console, outcome.skipped)
    wrong = [record for record in outcome.records if record.problem is not None]
    for record in wrong:
        where = f"{record.model}, {record.tokens} tokens, {record.backend} {record.label}, {record.stage}"
        console.print(f"WRONG {where}: {record.problem}", style="red", markup=False)
    if json_path is not None:
        console.print(f"results: {json_path}", markup=False)
    if html_path is not None and outcome.records:
        from megamoe.bench.report.html import write_html

        write_html(_merged(Results(meta, kept.records if kept else []), outcome.records), html_path)
        console.print(f"report: {html_path}", markup=False)
    console.print(f"{len(outcome.records)} rows in {time.monotonic() - started:.0f} s")
    for problem in unknown:  # again: tables have scrolled the first away
        console.print(problem, style="red", markup=False)
    if outcome.problems or wrong or not outcome.records or any(skip.failed for skip in outcome.skipped):
        raise SystemExit(1)


def _plan(asked: dict[str, Any], file: Path | None, device: torch.device, outcome: _Outcome) -> Plan:
    """What was asked for, with defaults for the rest; unknown names become `outcome.problems`."""
    from megamoe.bench import registry
    from megamoe.bench.backends import NAMES, TIERS
    from megamoe.bench.shapes import load_shapes, parse_shape

    on_gpu, quick = device.type == "cuda", asked["quick"]
    problems = outcome.problems
    own_shapes = []
    for text in asked["shape"]:
        try:
            own_shapes.append(parse_shape(text))
        except ValueError as error:
            problems.append(str(error))
    if file is not None:
        try:
            own_shapes += load_shapes(file)
        except ValueError as error:
            problems.append(str(error))
    default_models: Sequence[str] = ("deepseek-v4-flash",) if on_gpu else ("tiny",)
    no_shape_asked = not asked["model"] and not asked["shape"] and file is None
    models, unknown = registry.find_models(asked["model"] or (default_models if no_shape_asked else ()))
    problems += unknown
    tokens, unknown = registry.find_tokens(asked["tokens"])
    problems += unknown
    if not asked["tokens"]:
        tokens = [4] if not on_gpu else list(registry.QUICK_TOKENS if quick else registry.DEFAULT_TOKENS)
    recipes, unknown = registry.find_recipes(asked["recipe"] or ("fp8xfp4", "fp8xfp8"))
    problems += unknown
    stages, unknown = registry.find_stages(asked["stage"])
    problems += unknown
    if not asked["stage"]:
        stages = list(registry.STAGES) if on_gpu and not quick else ["layer"]
    routings, unknown = registry.find_routings(asked["routing"] or ("uniform",))
    problems += unknown
    names = [name for name in dict.fromkeys(asked["backend"]) if name != _ALL]
    problems += [f"backend {name!r} is unknown; known: {', '.join(NAMES)}" for name in names if name not in NAMES]
    backends = [name for name in names if name in NAMES]
    if not asked["backend"] or _ALL in asked["backend"]:
        # On a GPU the reference takes minutes where the others take milliseconds.
        backends = [name for name in NAMES if name != "reference" or not on_gpu or name in names]
        if not asked["backend"]:  # `triton` is one of them: beside it they would take half of the time
            backends = [name for name in backends if name not in TIERS]
    return registry.Plan(
        shapes=(*models, *own_shapes),
        tokens=tuple(tokens),
        recipes=tuple(recipes),
        backends=tuple(backends),
        stages=tuple(stages),
        routings=tuple(routings),
        shared=asked["shared"] or (0,),
    )


def _kept(path: Path | None) -> Results | None:
    """What `--append` adds to: the file's results, or None where there is none yet."""
    from megamoe.bench.records import load

    if path is None or not path.exists():
        return None
    try:
        return load(path)
    except ValueError as error:
        raise click.UsageError(f"--append: {error}") from None


def _merged(base: Results, records: list[Record]) -> Results:
    """`records`, after those of `base` from points that were not measured again."""
    from megamoe.bench.records import Results

    points = {record.point for record in records}
    return Results(base.meta, [*(record for record in base.records if record.point not in points), *records])


def _measure(
    plan: Plan,
    settings: Any,
    roofline: Any,
    console: Console,
    outcome: _Outcome,
    base: Results,
    json_path: Path | None,
) -> None:
    """Run the plan; print and save each point as soon as it is done, so that a run that is cut short keeps it."""
    from megamoe.bench.records import save
    from megamoe.bench.suite import DeviceLost, run

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(1 for _ in plan.points()))
        try:
            for point, records, skipped in run(
                plan, settings, roofline, lambda text: progress.update(task, description=text)
            ):
                outcome.records += records
                outcome.skipped += skipped
                base.meta["skipped"] = sorted({str(skip) for skip in outcome.skipped})
                if records:
                    progress.console.print(_table(point, records))
                    if json_path is not None:
                        save(_merged(base, outcome.records), json_path)
                progress.update(task, advance=1)
        except DeviceLost as error:
            outcome.problems.append(str(error))
            console.print(f"the GPU stopped answering; the rows so far are kept. {error}", style="red", markup=False)


def _table(point: Point, records: list[Record]) -> Table:
    """One point, best first within a stage; `_LEGEND` explains the columns."""
    table = Table(title=str(point), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("stage", "backend", "recipe"):
        table.add_column(name, no_wrap=True)
    for name in ("µs", "±", "launches", "TFLOP/s", "GB/s", "roof", "error", "vs best"):
        table.add_column(name, justify="right", no_wrap=True)
    stages = list(dict.fromkeys(record.stage for record in records))
    for stage in stages:
        rows = sorted((record for record in records if record.stage == stage), key=lambda row: row.median_us)
        for number, row in enumerate(rows):
            table.add_row(
                stage if number == 0 else "",
                row.backend,
                row.label,
                _number(row.median_us),
                f"{50 * (row.p80_us - row.p20_us) / row.median_us:.1f} %" if row.has_spread else "–",
                str(row.launches),
                "-" if row.useful_tflops is None else f"{row.useful_tflops:,.3g}",
                "-" if row.weight_gbps is None else f"{row.weight_gbps:,.0f}",
                "-" if row.roofline_pct is None else f"{row.roofline_pct:.0f} %",
                "-" if row.rel_rms is None else f"{row.rel_rms:.0e}",
                f"{row.median_us / rows[0].median_us:.2f}×",
                style="red" if row.problem else None,
                end_section=number + 1 == len(rows),
            )
    return table


def _number(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if microseconds >= 1000 else f"{microseconds:.4g}"


def _print_skipped(console: Console, skipped: list[Skipped]) -> None:
    """What declined, a line per backend and reason; what failed, a line per row."""
    declined: dict[tuple[str, str], int] = {}
    for skip in skipped:
        if not skip.failed:
            declined[skip.backend, skip.reason] = declined.get((skip.backend, skip.reason), 0) + 1
    for (backend, reason), count in declined.items():
        console.print(f"{backend} did not run ({count} row{'s' if count > 1 else ''}): {reason}", markup=False)
    for skip in skipped:
        if skip.failed:
            console.print(f"FAILED {skip}", style="red", markup=False)


def _list(console: Console) -> None:
    from megamoe.bench.backends import NAMES
    from megamoe.bench.routings import ROUTINGS
    from megamoe.bench.shapes import MODELS
    from megamoe.bench.work import STAGES

    for title, lines in (
        ("models", [str(shape) for shape in MODELS.values()]),
        ("stages", STAGES),
        ("routings", ROUTINGS),
        ("backends", NAMES),
    ):
        console.print(f"{title}:")
        for line in lines:
            console.print(f"  {line}", markup=False)
