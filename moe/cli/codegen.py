"""`megamoe codegen`: compile every kernel for GPUs that need not be here and show what it became."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import megamoe
from megamoe.cli.console import open_console
from megamoe.cli.output import prepare_output
from megamoe.codegen.job import ARCHS
from megamoe.codegen.pool import Entry, Pool, Result, WorkerDied


@click.command()
@click.option(
    "--arch",
    "archs",
    type=click.Choice([str(arch) for arch in ARCHS]),
    multiple=True,
    help="Default: all of them.",
)
@click.option("--kernel", help="Only this kernel family, e.g. gate_up.")
@click.option("--recipe", help="Only this recipe: its mma_type or its full name.")
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results here.")
def codegen(archs: tuple[str, ...], kernel: str | None, recipe: str | None, path: Path | None) -> None:
    """Compile the default launches of every kernel without a GPU: MMA kind, memory, registers, stack and
    spills. Exits with status 1 when one does not compile or breaks its contract."""
    console = open_console()
    prepare_output("--json", path)
    with Pool() as pool:
        try:
            entries = [entry for arch in archs or ARCHS for entry in pool.list_jobs(int(arch))]
        except WorkerDied as death:
            raise click.ClickException(f"the kernels' compile jobs cannot be listed: {death}") from None
        chosen = [entry for entry in entries if _selected(entry, kernel, recipe)]
        if not chosen:
            raise click.UsageError(_no_match(entries, kernel, recipe))
        console.print(f"megamoe {megamoe.__version__}, " + ", ".join(f"{k} {v}" for k, v in pool.versions.items()))
        results = _compile(pool, chosen, console)
        versions = {"megamoe": megamoe.__version__, **pool.versions}
    console.print(_table(results))
    failures = [result for result in results if not result.ok]
    for result in failures:
        where = f"sm_{result.entry.arch} {result.entry.name}"
        for problem in [result.error] if result.error else result.violations:
            console.print(f"{where}: {problem}", style="red", markup=False)
    if path is not None:
        path.write_text(_json(versions, results))
    console.print(f"{len(results) - len(failures)} of {len(results)} jobs keep their contract")
    if failures:
        raise SystemExit(1)


def _selected(entry: Entry, kernel: str | None, recipe: str | None) -> bool:
    return kernel in (None, entry.kernel) and recipe in (None, entry.recipe, entry.recipe.split("/")[0])


def _no_match(entries: list[Entry], kernel: str | None, recipe: str | None) -> str:
    """What is allowed of the option that failed; of both, where each alone would have matched."""
    if kernel is not None and not any(_selected(entry, kernel, None) for entry in entries):
        return f"--kernel {kernel!r} is unknown; allowed: {', '.join(sorted({entry.kernel for entry in entries}))}"
    rest = [entry for entry in entries if _selected(entry, kernel, None)]
    names = sorted({entry.recipe for entry in rest})
    recipes = [name for name in names if "/" in name]
    kinds = [name for name in names if "/" not in name]
    of = "" if kernel is None else f" of --kernel {kernel}"
    lists = [f"{what}{of}: {', '.join(found)}" for what, found in (("recipes", recipes), ("kinds", kinds)) if found]
    return f"--recipe {recipe!r} matches no job; {'; '.join(lists)}"


def _compile(pool: Pool, entries: list[Entry], console: Console) -> list[Result]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    results = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(entries))
        for result in pool.run(entries):
            results.append(result)
            progress.update(task, advance=1, description=f"sm_{result.entry.arch} {result.entry.kernel}")
    return sorted(results, key=lambda result: result.entry.key)


def _table(results: list[Result]) -> Table:
    table = Table("sm", "job", "MMA", "smem", "TMEM", "regs", "stack", "STL/LDL", "in loops", "inexact", "", "s")
    for result in results:
        entry, report = result.entry, result.report
        row = ["-"] * 8
        if report is not None:
            row = [
                "\n".join(report.mma) or "-",
                str(report.smem),
                str(report.tmem),
                str(report.registers),
                str(report.stack),
                f"{report.stl}/{report.ldl}",
                f"{report.stl_in_loops}/{report.ldl_in_loops}",
                "\n".join(f"{count} {name}" for name, count in report.inexact.items()) or "-",
            ]
        verdict = "[green]ok[/]" if result.ok else "[red]FAILED[/]" if result.error else "[red]BROKEN[/]"
        table.add_row(str(entry.arch), entry.name, *row, verdict, f"{result.seconds:.1f}")
    return table


def _json(versions: dict[str, str], results: list[Result]) -> str:
    """One job per line, sorted, no times or dates: two runs of the same versions give the same file."""
    lines = []
    for result in results:
        entry = {"arch": result.entry.arch, "name": result.entry.name, "kernel": result.entry.kernel}
        report = {} if result.report is None else asdict(result.report)
        outcome = {"violations": result.violations, "error": result.error}
        lines.append(json.dumps({**entry, "recipe": result.entry.recipe, **report, **outcome}))
    jobs = ",\n".join(f"  {line}" for line in lines)
    return f'{{\n "versions": {json.dumps(versions)},\n "jobs": [\n{jobs}\n ]\n}}\n'
