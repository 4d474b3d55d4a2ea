"""Fused shared expert against a shared MLP on a second stream: time, launches and stream waits of a layer.

    python -m megamoe.bench.shared_mlp --json bench/results/shared_mlp_h200.json

The contenders are those of `bench.shared_layers`. Each has several layers with weights of their own, as a model has,
which take the input sets in turn: every call reads the shared expert, and a single one might stay in L2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from megamoe.backends.triton import device_unsupported_reason
from megamoe.bench.environment import describe_run
from megamoe.bench.layers import FP8_BLOCK, LayerStore, input_sets
from megamoe.bench.records import write_rows
from megamoe.bench.registry import Point, find_recipes, find_tokens
from megamoe.bench.shapes import MODELS, with_shared
from megamoe.bench.shared_layers import LAYERS, SharedLayer, open_layers
from megamoe.bench.timing import Call, ClockTimed, Contender, GraphReplay, Windows, time_interleaved
from megamoe.cli.measure import count_launches
from megamoe.cli.output import prepare_output
from megamoe.oracle.metrics import check, compare
from megamoe.recipe import Recipe, traits

_JUDGED_TOKENS = 8
_RECIPES = ("fp8xfp4/block128", "fp8xfp4/token")
_MODELS = [name for name, shape in MODELS.items() if shape.num_shared_experts == 1]

METHOD = (
    "fused: one MegaMoE whose shared expert is MXFP4, requantized at load from E4M3 with 128×128 blocks. separate: the "
    "routed experts on the current stream and, on a second one that events fork and join, the shared expert as it was, "
    f"a layer of one expert with top-1, weight 1 and {FP8_BLOCK}; then y += shared. Random weights and inputs. Times "
    "are of one call, from BF16 tokens to y, routing plan included: median, 20th and 80th percentile of CUDA-graph "
    "replays. A graph holds one call per input set, each with its own tokens and routing, at least 1 GiB of touched "
    f"routed weights between two uses of a set; {LAYERS} layers with weights of their own take the sets in turn. Both "
    "contenders replay in turn, in several rounds of equal windows. launches: kernels, copies and fills of one call, "
    "by the profiler. stream_syncs: how often one call makes a stream wait for the other. rel_rms: y against the "
    "reference of the contender's own weights."
)


@dataclass(frozen=True)
class Row:
    """One contender at one point. Times in microseconds of one call; `problem`: how y misses its reference, or None."""

    model: str
    tokens: int
    recipe: str
    contender: str
    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    method: str
    launches: int
    stream_syncs: int
    rel_rms: float
    problem: str | None
    note: str


def measure(
    contenders: Sequence[Sequence[SharedLayer]], point: Point, recipe: Recipe, device: torch.device, windows: Windows
) -> list[Row]:
    """A row per contender (the layers that take its input sets in turn), timed side by side: CUDA graphs on a GPU,
    elsewhere by the clock. `point.tokens` is at most what the layers were opened for."""
    inputs = input_sets(point, device)
    judged = torch.linspace(0, point.tokens - 1, min(point.tokens, _JUDGED_TOKENS), device=device).long()
    timed: list[Contender] = []
    counted: list[dict[str, Any]] = []
    for layers in contenders:
        output = torch.full_like(inputs[0].x, torch.nan)
        calls = [partial(layers[n % len(layers)], i, output) for n, i in enumerate(inputs)]
        for call in calls:  # compiles: nothing may under capture
            call()
        output.fill_(torch.nan)
        first = layers[0]
        waits = first.stream_syncs
        _, launches = count_launches(partial(_result, calls[0], output), device)
        report = compare(output[judged], first.expected(inputs[0], judged))
        counted.append(
            dict(
                contender=first.name,
                launches=launches,
                stream_syncs=first.stream_syncs - waits,
                rel_rms=float(f"{report.rel_rms:.3g}"),
                problem=check(report, first.limits),
                note=first.note,
            )
        )
        timed.append(GraphReplay(calls) if device.type == "cuda" else ClockTimed(calls))
    return [
        Row(
            model=point.shape.name,
            tokens=point.tokens,
            recipe=str(recipe),
            median_us=round(timing.median_us, 3),
            p20_us=round(timing.p20_us, 3),
            p80_us=round(timing.p80_us, 3),
            samples=timing.samples,
            method=timing.method,
            **counts,
        )
        for timing, counts in zip(time_interleaved(timed, windows), counted)
    ]


def table(rows: Sequence[Row], model: str) -> str:
    """Markdown for docs/shared_experts.md: microseconds by tokens, the faster contender of a recipe bold. `ValueError`
    where no row of `model` is without a problem."""
    sound = [row for row in rows if row.model == model and row.problem is None]
    if not sound:
        raise ValueError(f"no rows of {model}")
    tokens = sorted({row.tokens for row in sound})
    lines = [
        f"| µs | launches | stream waits | {' | '.join(f'{count:,}' for count in tokens)} |",
        f"|---|--:|--:|{'--:|' * len(tokens)}",
    ]
    for recipe, name in dict.fromkeys((row.recipe, row.contender) for row in sound):
        own = [row for row in sound if (row.recipe, row.contender) == (recipe, name)]
        cells = {row.tokens: _cell(row, sound) for row in own}
        mma_type, act_scale = recipe.split("/")[:2]
        lines.append(
            f"| `{mma_type}` `{act_scale}`, {name} | {_span(row.launches for row in own)} "
            f"| {_span(row.stream_syncs for row in own)} | {' | '.join(cells.get(count, '') for count in tokens)} |"
        )
    return "\n".join(lines) + "\n"


def load_rows(path: Path) -> list[Row]:
    """The rows of a file of this script."""
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["records"]]


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results here.")
@click.option("--model", type=click.Choice(_MODELS), default="deepseek-v4-flash", show_default=True)
@click.option("--tokens", default="1,4,16,64", show_default=True, help="64, 1,16,64 or 1-64 (its powers of two).")
@click.option("--recipe", "names", multiple=True, help=f"With MXFP4 experts; default: {', '.join(_RECIPES)}.")
@click.option("--window", type=click.FloatRange(0.01), default=0.5, show_default=True, help="Seconds per row.")
def main(json_path: Path | None, model: str, tokens: str, names: tuple[str, ...], window: float) -> None:
    """Fused shared expert or a shared MLP on a second stream: microseconds, launches and stream waits of a layer.

    Exits with status 1 when a result is wrong, with 2 before anything runs when an argument is.
    """
    counts, problems = find_tokens([tokens])
    recipes, unknown = find_recipes(names or _RECIPES)
    problems += unknown + [f"recipe {recipe}: {reason}" for recipe in recipes if (reason := unfit_reason(recipe))]
    if problems:
        raise click.UsageError("; ".join(problems))
    prepare_output("--json", json_path)
    if not torch.cuda.is_available():
        raise click.ClickException("needs a CUDA GPU (torch.cuda.is_available() is False)")
    device = torch.device("cuda", torch.cuda.current_device())
    reason = device_unsupported_reason(device)
    if reason is not None:
        raise click.ClickException(reason)
    asked = dict(model=model, tokens=counts, recipe=[str(recipe) for recipe in recipes], window=window)
    meta = describe_run(device, None, asked) | {"method": METHOD}
    store = LayerStore(with_shared(MODELS[model], 0), device)
    rows: list[Row] = []
    for recipe in recipes:
        contenders = open_layers(store, recipe, max(counts))
        for count in counts:
            point = Point(store.shape, count, "uniform")
            rows += measure(contenders, point, recipe, device, Windows(window))
            for row in rows[-len(contenders) :]:
                click.echo(_line(row))
            if json_path is not None:
                write_rows(meta, rows, json_path)
        del contenders  # before the next recipe's are made: a layer of DeepSeek-V4-Pro has 13 GB
    wrong = sum(row.problem is not None for row in rows)
    if wrong:
        raise click.ClickException(f"{wrong} of {len(rows)} rows are wrong: see above")
    click.echo(f"\n{table(rows, model)}", nl=False)


def _result(call: Call, output: torch.Tensor) -> torch.Tensor:
    call()
    return output


def unfit_reason(recipe: Recipe) -> str | None:
    """Why `recipe` cannot be measured here, or None."""
    row = traits(recipe)
    if (row.weight, row.weight_scale_format) != ("e2m1", "ue8m0"):
        return "its experts are not MXFP4"
    if recipe.numerics == "trtllm_gen":
        return "its shared experts are slots that the router names, which this script's routing does not"
    return None


def _line(row: Row) -> str:
    spread = f"{row.median_us:,.1f} µs ({row.p20_us:,.1f} … {row.p80_us:,.1f})"
    counts = f"{row.launches} launches, {row.stream_syncs} stream waits"
    wrong = "" if row.problem is None else f"; WRONG: {row.problem}"
    return f"{row.recipe}, {row.tokens} tokens, {row.contender}: {spread}, {counts}, {row.note}{wrong}"


def _cell(row: Row, rows: Sequence[Row]) -> str:
    text = f"{row.median_us:,.1f}" if row.median_us < 100 else f"{row.median_us:,.0f}"
    best = min(other.median_us for other in rows if (other.recipe, other.tokens) == (row.recipe, row.tokens))
    return f"**{text}**" if row.median_us == best else text


def _span(counts: Iterable[int]) -> str:
    """One number where all are the same."""
    found = sorted(set(counts))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


if __name__ == "__main__":
    main()
