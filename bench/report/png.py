"""Pictures for the README, one per model and plot, drawn by matplotlib from a committed result file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from megamoe.bench.backends import TIERS
from megamoe.bench.records import Record, Results

_STAGE = "layer"
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7b61b8", "#9a9a9a", "#b03a5b")
_LINES = ("-", "--", ":", "-.")


class MissingMatplotlib(RuntimeError):
    """The pictures need matplotlib, which the extra `bench` brings."""


def write_pngs(results: Results, folder: Path) -> list[Path]:
    """`latency-`, `speedup-` and `roofline-<model>.png` of the whole layer; a plot without data is left out."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        raise MissingMatplotlib(
            "the pictures need matplotlib: pip install '.[bench]' in a checkout of megamoe"
        ) from None
    matplotlib.use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    plots: dict[str, Callable[..., bool]] = {"latency": _latency, "speedup": _speedup, "roofline": _roofline}
    for model in dict.fromkeys(record.model for record in results.records):
        rows = _layer_rows(results.records, model)
        for name, plot in plots.items():
            figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
            axes.grid(True, which="major", color="#d1d9e0", linewidth=0.6)
            axes.set_axisbelow(True)
            if rows and plot(axes, rows, results.meta):
                axes.set_title(f"{model}, whole layer, {results.meta.get('device', '')}", fontsize=10)
                path = folder / f"{name}-{model}.png"
                # Without the writer's name and version, the same data gives the same file.
                figure.savefig(path, metadata={"Software": None})
                written.append(path)
            pyplot.close(figure)
    return written


def _layer_rows(records: Sequence[Record], model: str) -> list[Record]:
    """The layers of `model` under uniform routing with the fewest shared experts, which all contenders can run."""
    rows = [
        r
        for r in records
        if (r.model, r.stage, r.routing) == (model, _STAGE, "uniform") and r.problem is None and r.backend not in TIERS
    ]
    least = min((r.n_shared for r in rows), default=0)
    return [r for r in rows if r.n_shared == least]


def _series(rows: Sequence[Record]) -> dict[str, tuple[list[Record], dict[str, Any]]]:
    """Rows of each contender by tokens, with its style; recipes of one backend share a colour."""
    backends = list(dict.fromkeys(row.backend for row in rows))
    recipes: dict[str, list[str]] = {}
    found: dict[str, tuple[list[Record], dict[str, Any]]] = {}
    for row in rows:
        known = recipes.setdefault(row.backend, [])
        if row.recipe not in known:
            known.append(row.recipe)
        style = {
            "color": _COLORS[backends.index(row.backend) % len(_COLORS)],
            "linestyle": _LINES[known.index(row.recipe) % len(_LINES)],
        }
        found.setdefault(f"{row.backend} {row.label}", ([], style))[0].append(row)
    for line, _ in found.values():
        line.sort(key=lambda row: row.tokens)
    return found


def _latency(axes: Any, rows: Sequence[Record], meta: dict[str, Any]) -> bool:
    for name, (line, style) in _series(rows).items():
        tokens = [row.tokens for row in line]
        axes.plot(tokens, [row.median_us for row in line], marker="o", markersize=3, label=name, **style)
        axes.fill_between(
            tokens, [row.p20_us for row in line], [row.p80_us for row in line], color=style["color"], alpha=0.15, lw=0
        )
    _tokens_axis(axes, rows)
    axes.set_yscale("log")
    axes.set_ylabel("µs per call")
    _legend(axes)
    return True


def _speedup(axes: Any, rows: Sequence[Record], meta: dict[str, Any]) -> bool:
    """Bars: every contender's time over that of our first recipe."""
    series = _series(rows)
    base_name = next((name for name in series if name.startswith("triton ")), None)
    if base_name is None or len(series) < 2:
        return False
    base = {row.tokens: row.median_us for row in series[base_name][0]}
    tokens = sorted(base)
    others = {name: entry for name, entry in series.items() if name != base_name}
    width = 0.84 / len(others)
    for number, (name, (line, style)) in enumerate(others.items()):
        bars = [(tokens.index(row.tokens), row.median_us / base[row.tokens]) for row in line if row.tokens in base]
        left = [place + (number - (len(others) - 1) / 2) * width for place, _ in bars]
        axes.bar(
            left, [ratio - 1 for _, ratio in bars], width, bottom=1, color=style["color"], label=name,
            alpha=1 if style["linestyle"] == "-" else 0.55,
        )  # fmt: skip
    axes.axhline(1, color="#1b1f24", linewidth=1)
    axes.set_yscale("log")  # half the time is as far from 1 as twice the time
    ticks = [0.2, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10]
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}×")
    axes.set_xticks(range(len(tokens)), [str(count) for count in tokens])
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"their time / {base_name}", fontsize=8)
    _legend(axes)
    return True


def _roofline(axes: Any, rows: Sequence[Record], meta: dict[str, Any]) -> bool:
    roof = meta.get("roofline")
    if not roof:
        return False
    for name, (line, style) in _series(rows).items():
        axes.plot(
            [row.flops / row.bytes for row in line], [row.useful_tflops for row in line], "o", markersize=4, label=name,
            color=style["color"], markerfacecolor=style["color"] if style["linestyle"] == "-" else "none",
        )  # fmt: skip
    rates = {"BF16": roof["bf16_tflops"], "FP8": roof.get("fp8_tflops")}
    top = max(rate for rate in rates.values() if rate)
    intensities = [row.flops / row.bytes for row in rows]
    right = max(1000 * top / roof["read_gbps"], *intensities) * 2
    left = min(intensities) / 2
    axes.plot([left, 1000 * top / roof["read_gbps"]], [left * roof["read_gbps"] / 1000, top], color="#59636e", lw=1)
    for name, rate in rates.items():
        if rate:
            axes.plot([1000 * rate / roof["read_gbps"], right], [rate, rate], color="#59636e", lw=1)
            axes.annotate(f"{name} {rate:,.0f}", (right, rate), ha="right", va="bottom", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte that must move")
    axes.set_ylabel("useful TFLOP/s")
    _legend(axes)
    return True


def _legend(axes: Any) -> None:
    """Below the plot, where it hides nothing."""
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)


def _tokens_axis(axes: Any, rows: Sequence[Record]) -> None:
    tokens = sorted({row.tokens for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
