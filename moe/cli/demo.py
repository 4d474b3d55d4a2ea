"""`megamoe demo`: whole layers through every backend that can run here, against the reference, timed."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import click
from rich.table import Table

import megamoe
from megamoe.cli.console import open_console
from megamoe.cli.device import describe, open_device

_CLOCK = {"cpu": "one call by the clock, interpreted", "cuda": "median of replays of a CUDA graph of one call"}
_COLUMNS = (
    "recipe", "backend", "rel. RMS", "worst row", "fitted scale", "limits", "exact sums", "time", "launches",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The layer that is shown; `clamp` is its activation clamp."""

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 1
    clamp: float = 10.0

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of `random_layer` and `exact_sum_layer`."""
        return {name: size for name, size in vars(self).items() if name != "clamp"}

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, hidden {self.hidden}, intermediate {self.intermediate}, "
            f"{self.num_experts} experts + {self.num_shared_experts} shared, top-{self.top_k}"
        )


SHAPES = {
    "small": Shape(16, 256, 128, 8, 2),
    "medium": Shape(256, 2048, 1024, 32, 6),
    "deepseek-v4-flash": Shape(1024, 4096, 2048, 256, 6),
}


@dataclass(frozen=True)
class Row:
    """One backend on one recipe: its errors and times as text, and what is wrong with it."""

    recipe: str
    backend: str
    cells: tuple[str, ...]
    problem: str | None = None


@click.command()
@click.option(
    "--shape",
    "name",
    type=click.Choice(list(SHAPES)),
    help="Default: medium on a GPU, small in the interpreter.",
)
@click.option("--tokens", type=click.IntRange(1), help="Tokens of the call instead of the shape's.")
def demo(name: str | None, tokens: int | None) -> None:
    """Run one MoE layer of every served recipe (pre-dispatch, routed and shared experts, combine) on every
    backend, compare it with the reference and time it.

    Exits with status 1 when a result is beyond its limits, or when nothing but the reference could run.
    """
    console = open_console()
    device, triton_reason = open_device()
    from megamoe.cli.demo_layers import run_layers  # it loads triton, which `open_device` must do first

    shape = SHAPES[name or ("medium" if device.type == "cuda" else "small")]
    shape = shape if tokens is None else replace(shape, tokens=tokens)
    console.print(f"megamoe {megamoe.__version__} on {describe(device)}")
    console.print(f"{shape}; random weights, clamp {shape.clamp:g}\n")
    with warnings.catch_warnings():
        # NumPy notices that exp(-gate) overflows in a sigmoid of 0; a GPU does not.
        warnings.filterwarnings("ignore", "overflow encountered in exp|divide by zero encountered", RuntimeWarning)
        with console.status("") as status:
            rows, declined = run_layers(shape, device, status.update)
    console.print(_table(rows))
    console.print(f"time: {_CLOCK[device.type]}; the reference: one call by the clock\n")
    for (backend, reason), recipes in declined.items():
        which = "" if len(recipes) == len({row.recipe for row in rows}) else f" ({', '.join(recipes)})"
        reason = triton_reason or reason if backend == "triton" else reason
        console.print(f"{backend}{which} did not run: {reason}", markup=False)
    problems = [row for row in rows if row.problem is not None]
    for row in problems:
        console.print(f"FAILED {row.recipe} {row.backend}: {row.problem}", style="red", markup=False)
    judged = [row for row in rows if row.backend != "reference"]
    console.print(f"{len(judged) - len(problems)} of {len(judged)} layers agree with the reference")
    if problems or not judged:
        raise SystemExit(1)


def _table(rows: list[Row]) -> Table:
    table = Table(*_COLUMNS)
    for index, row in enumerate(rows):
        first = index == 0 or rows[index - 1].recipe != row.recipe
        last = index + 1 == len(rows) or rows[index + 1].recipe != row.recipe
        name = row.recipe.replace("/", " ", 1).replace("/", "\n") if first else ""
        table.add_row(name, row.backend, *row.cells, style="red" if row.problem else None, end_section=last)
    return table
