"""`megamoe report`: pictures and an HTML page of a committed result file."""

from __future__ import annotations

from pathlib import Path

import click

from megamoe.cli.console import open_console
from megamoe.cli.output import prepare_output


@click.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the self-contained page here.")
@click.option("--png", type=click.Path(path_type=Path, file_okay=False), help="Write one picture per plot into here.")
@click.option("--table", "tables", multiple=True, help="Print this model's layers as a Markdown table.")
def report(results: Path, html: Path | None, png: Path | None, tables: tuple[str, ...]) -> None:
    """Make a page (--html), pictures (--png, needs matplotlib) or a table (--table MODEL) of RESULTS, what
    `megamoe bench --json` wrote.

    Without any option: the page, beside RESULTS.
    """
    from megamoe.bench.records import load

    console = open_console()
    prepare_output("--html", html)
    try:
        loaded = load(results)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not loaded.records:
        raise click.UsageError(f"{results} has no records")
    for model in tables:
        from megamoe.bench.report.markdown import layer_table

        try:
            click.echo(layer_table(loaded, model), nl=False)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    if html is None and png is None and not tables:
        html = results.with_suffix(".html")
    if html is not None:
        from megamoe.bench.report.html import write_html

        write_html(loaded, html)
        console.print(str(html), markup=False)
    if png is not None:
        from megamoe.bench.report.png import MissingMatplotlib, write_pngs

        try:
            written = write_pngs(loaded, png)
        except MissingMatplotlib as error:
            raise click.ClickException(str(error)) from None
        for path in written:
            console.print(str(path), markup=False)
