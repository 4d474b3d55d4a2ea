"""Results: one `Record` per measured row, `{"meta": …, "records": […]}` as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from megamoe.file_errors import why_unreadable

SCHEMA = 1
LEAST_SAMPLES = 3
"""With fewer a row has no spread: its percentiles are the samples themselves."""
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
    reference, also where the errors are None because nothing was compared; problem: what is wrong with the
    row although it was measured, or None.
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
    def has_spread(self) -> bool:
        return self.samples >= LEAST_SAMPLES

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies a row within one file."""
        return (*self.point, self.backend, self.recipe)


_TYPES = get_type_hints(Record)


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
    """The results as `load` reads them."""
    write_rows(results.meta, results.records, path)


def write_rows(meta: dict[str, Any], records: Sequence[Any], path: Path) -> None:
    """`{"meta": …, "records": […]}` of dataclasses, one record per line: two files diff row by row."""
    head = json.dumps(meta, indent=1, ensure_ascii=False).replace("\n", "\n ")
    rows = ",\n".join(f"  {json.dumps(asdict(record), ensure_ascii=False)}" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n "meta": {head},\n "records": [\n{rows}\n ]\n}}\n', encoding="utf-8")


def load(path: Path) -> Results:
    """What `save` wrote. `ValueError` with the file's name, and what is wrong with it, for any other file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise _no_result(path, f"not JSON ({why_unreadable(path, error)})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {why_unreadable(path, error)}") from None
    if not isinstance(data, dict):
        raise _no_result(path, f"it holds a {type(data).__name__}")
    meta, rows = data.get("meta"), data.get("records")
    if not isinstance(meta, dict) or not isinstance(rows, list):
        raise _no_result(path, f"it has {', '.join(map(repr, data)) or 'nothing'}")
    if not isinstance(meta.get("roofline"), (dict, type(None))):
        raise _no_result(path, "its roofline is no object")
    return Results(meta, [_record(path, number, row) for number, row in enumerate(rows)])


def _record(path: Path, number: int, row: object) -> Record:
    if not isinstance(row, dict):
        raise _no_result(path, f"record {number} is a {type(row).__name__}")
    known = {key: value for key, value in row.items() if key in _TYPES}
    try:
        record = Record(**known)
    except TypeError:
        missing = [f.name for f in fields(Record) if f.name not in known]
        raise _no_result(path, f"record {number} has no {missing[0]}") from None
    wrong = [name for name, value in known.items() if not _fits(value, _TYPES[name])]
    if wrong or not record.median_us > 0:
        name = wrong[0] if wrong else "median_us"
        raise _no_result(path, f"record {number} has {name} {known[name]!r}")
    return record


def _fits(value: object, hint: Any) -> bool:
    """Whether JSON's `value` is of a field's type; a whole number is as good as a float."""
    if type(None) in get_args(hint):
        return any(_fits(value, choice) for choice in get_args(hint))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


def _no_result(path: Path, found: str) -> ValueError:
    return ValueError(
        f'{path}: not a bench result: {found}; expected {{"meta": {{…}}, "records": […]}} of megamoe bench'
    )
