"""`megamoe compare`: what became slower between two result files, beyond their noise."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from megamoe.cli.console import open_console


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--threshold", type=click.FloatRange(0), default=5.0, show_default=True, help="Per cent that counts.")
@click.option("--backend", "backends", multiple=True, help="Only these contenders.")
@click.option("--all", "show_all", is_flag=True, help="Show unchanged rows too.")
def compare(before: Path, after: Path, threshold: float, backends: tuple[str, ...], show_all: bool) -> None:
    """Compare the rows that BEFORE and AFTER share.

    A row is slower (or faster) when its median moved by more than the threshold and the bands from the 20th to the 80th
    percentile do not overlap; a row of fewer than three samples has no band, so that its change is noise. Exits with
    status 1 when a row became slower or wrong, 2 when nothing can be compared.
    """
    from megamoe.bench.compare import compare_results
    from megamoe.bench.records import load

    console = open_console()
    try:
        old, new = load(before), load(after)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if backends:
        old.records[:] = [record for record in old.records if record.backend in backends]
        new.records[:] = [record for record in new.records if record.backend in backends]
    result = compare_results(old, new, threshold / 100)
    for line in result.warnings:
        console.print(line, style="yellow", markup=False)
    if not result.changes:
        raise click.UsageError(f"{before} and {after} have no row in common")
    table = Table("model", "tokens", "stage", "backend", "recipe", "before µs", "after µs", "change", "")
    for column in (1, 5, 6, 7):
        table.columns[column].justify = "right"
    styles = {"slower": "red", "wrong": "red", "faster": "green"}
    shown = [change for change in result.changes if show_all or change.verdict in styles]
    for change in sorted(shown, key=lambda change: -change.ratio):
        row = change.after
        shared = f" +{row.n_shared}s" if row.n_shared else ""
        routing = "" if row.routing == "uniform" else f" {row.routing}"
        table.add_row(
            row.model + shared + routing, str(row.tokens), row.stage, row.backend, row.label,
            f"{change.before.median_us:,.1f}", f"{row.median_us:,.1f}", f"{100 * (change.ratio - 1):+.1f} %",
            change.verdict, style=styles.get(change.verdict),
        )  # fmt: skip
    if shown:
        console.print(table)
    console.print(result.summary)
    if result.failed:
        raise SystemExit(1)
