"""Tables for the documentation: microseconds of whole layers, ours and the peers' of the same recipe together."""

from __future__ import annotations

from collections.abc import Sequence

from megamoe.bench.backends import TIERS
from megamoe.bench.records import Record, Results

OURS = "triton"


def layer_table(results: Results, model: str, *, stage: str = "layer", n_shared: int = 0) -> str:
    """Rows: contenders (of ours, what a call runs), grouped by the recipe whose reference judges them, ours first;
    columns: tokens.

    Uniform routing. The fastest of each group and column is bold; a cell nobody measured is empty. `ValueError` when
    there is no such row.
    """
    chosen = [
        r
        for r in results.records
        if (r.model, r.stage, r.n_shared, r.routing) == (model, stage, n_shared, "uniform")
        and r.problem is None
        and r.backend not in TIERS
    ]
    if not chosen:
        raise ValueError(f"no rows of {model}, stage {stage}, {n_shared} shared experts")
    tokens = sorted({r.tokens for r in chosen})
    lines = [f"| µs | {' | '.join(f'{count:,}' for count in tokens)} |", f"|---|{'--:|' * len(tokens)}"]
    for rows in _groups(chosen).values():
        best = {count: min((r.median_us for r in rows if r.tokens == count), default=0.0) for count in tokens}
        for name in dict.fromkeys(_name(r) for r in sorted(rows, key=_order)):
            cells = {r.tokens: _cell(r, r.median_us == best[r.tokens]) for r in rows if _name(r) == name}
            lines.append(f"| {name} | {' | '.join(cells.get(count, '') for count in tokens)} |")
    return "\n".join(lines) + "\n"


def _groups(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """By the judging recipe; groups without a row of ours come last."""
    found: dict[str, list[Record]] = {}
    for row in rows:
        found.setdefault(row.judged_by or row.recipe, []).append(row)
    return dict(sorted(found.items(), key=lambda item: all(row.backend != OURS for row in item[1])))


def _order(row: Record) -> bool:
    return row.backend != OURS


def _name(row: Record) -> str:
    if row.backend == OURS:
        return f"**ours**, `{row.mma_type}` " + " ".join(f"`{part}`" for part in row.label.split()[1:])
    return f"`{row.backend}`"


def _cell(row: Record, is_best: bool) -> str:
    text = f"{row.median_us:,.1f}" if row.median_us < 100 else f"{row.median_us:,.0f}"
    return f"**{text}**" if is_best else text
