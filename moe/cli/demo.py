"""`megamoe demo`: whole layers through every backend that can run here, against the reference, timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import click
import torch
from rich.console import Console
from rich.table import Table

import megamoe
from megamoe.cli.console import open_console
from megamoe.cli.device import describe, open_device

_COLUMNS = (
    "recipe", "backend", "rel. RMS", "worst row", "fitted scale", "within limits", "exact sums", "time", "launches"
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
# Every sum of these inputs is exact, so any order of adding gives the same bits; small, since no more is learnt.
_EXACT = {"tokens": 12, "hidden": 256, "intermediate": 128, "num_experts": 5, "top_k": 2, "num_shared_experts": 1}


@dataclass(frozen=True)
class Row:
    """One backend on one recipe: its errors and times as text, and what is wrong with it."""

    recipe: str
    backend: str
    cells: tuple[str, ...]
    problem: str | None = None


@click.command()
@click.option(
    "--shape", "name", type=click.Choice(list(SHAPES)), help="Default: medium on a GPU, small in the interpreter."
)
@click.option("--tokens", type=click.IntRange(1), help="Tokens of the call instead of the shape's.")
def demo(name: str | None, tokens: int | None) -> None:
    """Run one MoE layer of every served recipe (pre-dispatch, routed and shared experts, combine) on every backend,
    compare it with the reference and time it.

    Exits with status 1 when a result is beyond its limits, or when nothing but the reference could run.
    """
    console = open_console()
    device, triton_reason = open_device()
    shape = SHAPES[name or ("medium" if device.type == "cuda" else "small")]
    shape = shape if tokens is None else replace(shape, tokens=tokens)
    console.print(f"megamoe {megamoe.__version__} on {describe(device)}")
    console.print(f"{shape}; random weights, clamp {shape.clamp:g}\n")
    rows, declined = _run(shape, device, console)
    console.print(_table(rows, device))
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


def _run(
    shape: Shape, device: torch.device, console: Console
) -> tuple[list[Row], dict[tuple[str, str], list[str]]]:
    """The table's rows, and for every (backend, reason) the recipes it declined."""
    from megamoe.backends import NAMES, unsupported_reason
    from megamoe.backends.base import LayerRequest
    from megamoe.oracle.random_layers import random_layer
    from megamoe.recipe import SERVED

    rows: list[Row] = []
    declined: dict[tuple[str, str], list[str]] = {}
    options = {field: getattr(shape, field) for field in _EXACT}
    with console.status("") as status:
        for recipe in SERVED:
            status.update(f"{recipe}: making a layer")
            layer = random_layer(recipe, activation_clamp=shape.clamp, device=device, **options)
            request = LayerRequest(layer.spec, device, shape.tokens)
            for backend in sorted(NAMES, key=lambda name: name != "reference"):  # the judge first
                reason = unsupported_reason(backend, request)
                if reason is not None:
                    declined.setdefault((backend, reason), []).append(recipe.mma_type)
                    continue
                status.update(f"{recipe}: {backend}")
                if backend == "reference":
                    expected, row = _judge(layer, device)
                    rows.append(row)
                else:
                    rows.append(_compare(layer, backend, expected, device))
    return rows, declined


def _judge(layer, device: torch.device) -> tuple[torch.Tensor, Row]:
    from megamoe.cli.measure import wall_seconds

    call = _prepared_call(layer, "reference")
    seconds = wall_seconds(lambda: call(), device)
    cells = ("-", "-", "-", "the judge", "the judge", f"{1000 * seconds:.0f} ms, eager", "-")
    return call(), Row(str(layer.spec.recipe), "reference", cells)


def _compare(layer, backend: str, expected: torch.Tensor, device: torch.device) -> Row:
    from megamoe.cli.measure import count_launches, graph_microseconds, wall_seconds
    from megamoe.oracle.metrics import LIMITS, check, compare

    recipe = layer.spec.recipe
    call = _prepared_call(layer, backend)
    first = call()
    report = compare(first, expected)
    beyond = check(report, LIMITS[recipe])
    repeats = torch.equal(first, call())
    exact = _exact_sums_agree(recipe, backend, device)
    launches = count_launches(call, device)
    if device.type == "cuda":
        time = f"{graph_microseconds(call):.1f} µs, graph"
    else:
        time = f"{wall_seconds(call, device):.2f} s, interpreter"
    problems = [
        beyond,
        None if repeats else "two runs differ",
        None if exact else "exact-sum inputs: the bytes differ from the reference's",
    ]
    cells = (
        f"{report.rel_rms:.2e}", f"{report.worst_row:.2e}", f"{report.fitted_scale:.5f}",
        "yes" if beyond is None else "NO", "equal bytes" if exact else "DIFFER", time, str(launches),
    )  # fmt: skip
    return Row(str(recipe), backend, cells, "; ".join(filter(None, problems)) or None)


def _exact_sums_agree(recipe, backend: str, device: torch.device) -> bool:
    from megamoe.oracle.exact_sum import exact_sum_layer

    layer = exact_sum_layer(recipe, device=device, **_EXACT)
    return torch.equal(_prepared_call(layer, backend)(), _prepared_call(layer, "reference")())


def _prepared_call(layer, backend: str) -> Callable[[], torch.Tensor]:
    """A call of `layer` (`oracle.random_layers.Layer`) on `backend` through the public API, into one output."""
    weights, spec, recipe = layer.weights, layer.spec, layer.spec.recipe
    prepared = megamoe.prepare_weights(
        **vars(weights), mma_type=recipe.mma_type, act_scale=recipe.act_scale, numerics=recipe.numerics
    )
    moe = megamoe.MegaMoE(
        prepared, len(layer.x), spec.top_k, activation_clamp=spec.activation_clamp, moe_backend=backend
    )
    moe.warmup([len(layer.x)])
    return lambda: moe(layer.x, layer.topk_ids, layer.topk_weights)


def _table(rows: list[Row], device: torch.device) -> Table:
    table = Table(*_COLUMNS)
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].recipe != row.recipe
        style = "red" if row.problem else None
        table.add_row(row.recipe, row.backend, *row.cells, style=style, end_section=last)
    return table
