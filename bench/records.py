"""Results: one `Record` per measured row, `{"meta": …, "records": […]}` as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

SCHEMA = 1
Point = tuple[str, int, str, int, str]
"""(model, tokens, stage, n_shared, routing): rows that may be compared with each other."""


@dataclass(frozen=True)
class Record:
    """One backend on one stage of one case. Times are microseconds of one call.

    launches: kernels, copies and fills of one call. useful_tflops, weight_gbps: counted work over the median
    (`bench.work`), the weights' bytes being those of touched experts; None where the stage has none. roofline_pct: the
    least time the measured roofline allows over the median. ratio_to: for every other backend at the same point, its
    median over this row's (2.0: it takes twice as long). method: `cuda_graph`, `clock`, or `events: <reason>`.
    rel_rms, worst_row, fitted_scale: error of y against the reference (`oracle.metrics`); judged_by: the recipe of that
    reference; problem: what is wrong with the row although it was measured, or None.
    """

    model: str
    tokens: int
    mma_type: str
    act_scale: str
    numerics: str
    backend: str
    stage: str
    n_shared: int
    routing: str
    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    method: str
    launches: int
    touched_experts: float
    flops: float
    bytes: float
    useful_tflops: float | None
    weight_gbps: float | None
    roofline_pct: float | None
    ratio_to: dict[str, float] = field(default_factory=dict)
    rel_rms: float | None = None
    worst_row: float | None = None
    fitted_scale: float | None = None
    judged_by: str | None = None
    problem: str | None = None
    note: str | None = None

    @property
    def point(self) -> Point:
        return self.model, self.tokens, self.stage, self.n_shared, self.routing

    @property
    def recipe(self) -> str:
        return f"{self.mma_type}/{self.act_scale}/{self.numerics}"

    @property
    def label(self) -> str:
        """The recipe as tables show it: numerics only where it is not the usual one."""
        return f"{self.mma_type} {self.act_scale}" + (" trtllm" if self.numerics == "trtllm_gen" else "")

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies a row within one file."""
        return (*self.point, self.backend, self.recipe)


@dataclass(frozen=True)
class Results:
    """A file: where and how it was measured, and the rows."""

    meta: dict[str, Any]
    records: list[Record]


def with_ratios(records: Sequence[Record]) -> list[Record]:
    """The same records with `ratio_to` filled in.

    A backend with several recipes at a point is compared by the row's own recipe; without such a row it is left out.
    """
    points: dict[Point, list[Record]] = {}
    for record in records:
        points.setdefault(record.point, []).append(record)
    return [replace(record, ratio_to=_ratios(record, points[record.point])) for record in records]


def _ratios(record: Record, others: Iterable[Record]) -> dict[str, float]:
    rows: dict[str, list[Record]] = {}
    for other in others:
        if other.backend != record.backend:
            rows.setdefault(other.backend, []).append(other)
    ratios = {}
    for backend, candidates in rows.items():
        same = [row for row in candidates if row.recipe == record.recipe]
        chosen = same or (candidates if len(candidates) == 1 else [])
        if chosen:
            ratios[backend] = round(chosen[0].median_us / record.median_us, 4)
    return ratios


def save(results: Results, path: Path) -> None:
    """One record per line: two files diff row by row."""
    meta = json.dumps(results.meta, indent=1, ensure_ascii=False).replace("\n", "\n ")
    rows = ",\n".join(f"  {json.dumps(asdict(record), ensure_ascii=False)}" for record in results.records)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n "meta": {meta},\n "records": [\n{rows}\n ]\n}}\n', encoding="utf-8")


def load(path: Path) -> Results:
    """`ValueError` with the file's name when it is not such a file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("records"), list)
        or not isinstance(data.get("meta"), dict)
    ):
        raise ValueError(f'{path}: not a bench result; expected {{"meta": {{…}}, "records": […]}}')
    known = {f.name for f in fields(Record)}
    try:
        records = [Record(**{key: value for key, value in row.items() if key in known}) for row in data["records"]]
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: a record is incomplete: {error}") from None
    return Results(data["meta"], records)
