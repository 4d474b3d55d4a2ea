"""Two result files side by side: which rows moved by more than their noise."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from megamoe.bench.records import Record, Results

Verdict = Literal["same", "noise", "slower", "faster", "wrong"]


@dataclass(frozen=True)
class Change:
    """`ratio` is after/before of the medians. `noise`: past the threshold, but the bands overlap, or a side has too few
    samples for a band."""

    before: Record
    after: Record
    ratio: float
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    warnings: list[str]

    @property
    def failed(self) -> bool:
        return any(change.verdict in ("slower", "wrong") for change in self.changes)

    @property
    def summary(self) -> str:
        counts = Counter(change.verdict for change in self.changes)
        mean = math.exp(sum(math.log(change.ratio) for change in self.changes) / len(self.changes))
        words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("slower", "faster", "wrong", "noise", "same"))
        return f"{len(self.changes)} rows: {words}; geometric mean {100 * (mean - 1):+.1f} %"


def compare_results(before: Results, after: Results, threshold: float) -> Comparison:
    """Rows of the same key in both. `threshold` is a fraction: 0.05 lets a row become 5 % slower."""
    old = {record.key: record for record in before.records}
    new = {record.key: record for record in after.records}
    changes = [_change(old[key], record, threshold) for key, record in new.items() if key in old]
    return Comparison(changes, _warnings(before, after, len(old) - len(changes), len(new) - len(changes)))


def _change(before: Record, after: Record, threshold: float) -> Change:
    ratio = after.median_us / before.median_us
    verdict: Verdict = "same"
    bands = before.has_spread and after.has_spread
    if after.problem is not None and before.problem is None:
        verdict = "wrong"
    elif ratio > 1 + threshold:
        verdict = "slower" if bands and after.p20_us > before.p80_us else "noise"
    elif ratio < 1 / (1 + threshold):
        verdict = "faster" if bands and after.p80_us < before.p20_us else "noise"
    return Change(before, after, ratio, verdict)


def _warnings(before: Results, after: Results, only_before: int, only_after: int) -> list[str]:
    lines = []
    for name in ("device", "driver", "cuda", "versions"):
        a, b = before.meta.get(name), after.meta.get(name)
        if a != b:
            lines.append(f"{name} differs: {a} before, {b} after")
    for name, rate in (before.meta.get("roofline") or {}).items():
        other = (after.meta.get("roofline") or {}).get(name)
        if rate and other and abs(other / rate - 1) > 0.03:
            lines.append(f"the machine itself differs: {name} {rate:,.0f} before, {other:,.0f} after")
    if only_before:
        lines.append(f"{only_before} rows are only in the first file")
    if only_after:
        lines.append(f"{only_after} rows are only in the second file")
    return lines
