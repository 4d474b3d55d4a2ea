"""Runs a plan: at every point all contenders are set up, checked, captured and timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megamoe.bench.backends import BenchBackend, OpenLayer, find_backend
from megamoe.bench.layers import LayerStore, input_sets, spec_of, touched_experts
from megamoe.bench.records import Record, with_ratios
from megamoe.bench.registry import THROTTLED_FROM, Plan, Point
from megamoe.bench.roofline import Roofline
from megamoe.bench.timing import ClockTimed, Contender, EventTimed, GraphReplay, Timing, Windows, time_interleaved
from megamoe.bench.work import LAYER_STAGES, Work, count_work
from megamoe.cli.measure import count_launches
from megamoe.oracle.metrics import LIMITS, ErrorReport, check, compare
from megamoe.oracle.random_layers import Inputs
from megamoe.oracle.reference import moe_layer
from megamoe.recipe import Recipe

_JUDGED_TOKENS = 8
_PEER_REL_RMS = 0.1
"""A peer rounds elsewhere, so its limit only says that it computes this layer. Two E4M3 roundings differ by 4 %."""


@dataclass(frozen=True)
class Skipped:
    """A row that gave no time, and why. `failed`: it should have run."""

    point: Point
    backend: str
    recipe: Recipe | None
    reason: str
    stage: str | None = None
    failed: bool = False

    def __str__(self) -> str:
        parts = [str(self.point), self.backend, self.recipe and str(self.recipe), self.stage]
        return f"{', '.join(part for part in parts if part)}: {self.reason}"


class DeviceLost(RuntimeError):
    """The GPU stopped answering: no later row of this process can be measured."""


@dataclass(frozen=True)
class Settings:
    """How to measure; `window_seconds` None means a quarter of a second, or one from `THROTTLED_FROM` tokens up."""

    device: torch.device
    window_seconds: float | None = None
    rounds: int = 5
    judge: bool = True
    deadline: float | None = None  # of time.monotonic(): no point starts later

    def windows(self, tokens: int) -> Windows:
        if self.device.type == "cpu":
            return Windows(self.window_seconds or 0.0, 1)
        default = 1.0 if tokens >= THROTTLED_FROM else 0.25
        return Windows(self.window_seconds or default, self.rounds)


@dataclass
class _Row:
    """A contender on its way to becoming a record."""

    backend: BenchBackend
    recipe: Recipe
    stage: str
    layer: OpenLayer
    contender: Contender
    launches: int
    errors: ErrorReport | None = None
    problem: str | None = None


def run(
    plan: Plan, settings: Settings, roofline: Roofline | None, say: Callable[[str], object]
) -> Iterator[tuple[Point, list[Record], list[Skipped]]]:
    """The records of every point as soon as it is done, and what was skipped there. `say` hears what goes on.

    Raises `DeviceLost` when a row has killed the CUDA context.
    """
    store: LayerStore | None = None
    for point in plan.points():
        if settings.deadline is not None and time.monotonic() > settings.deadline:
            yield point, [], [Skipped(point, "every backend", None, "not started: the time budget is used up")]
            continue
        routed_only = replace(point.shape, num_shared_experts=0)
        if store is None or store.shape != routed_only:
            store = None  # before the next model's weights are made
            if settings.device.type == "cuda":
                torch.cuda.empty_cache()
            store = LayerStore(routed_only, settings.device)
        records, skipped = _run_point(plan, point, store, settings, roofline, say)
        yield point, with_ratios(records), skipped


def _run_point(
    plan: Plan, point: Point, store: LayerStore, settings: Settings, roofline: Roofline | None,
    say: Callable[[str], object],
) -> tuple[list[Record], list[Skipped]]:  # fmt: skip
    chosen: list[tuple[BenchBackend, Recipe]] = []
    skipped: list[Skipped] = []
    for name in plan.backends:
        try:
            backend = find_backend(name)
        except ImportError as error:
            skipped.append(Skipped(point, name, None, _first_line(error), failed=True))
            continue
        for recipe in backend.recipes(plan.recipes):
            reason = backend.unsupported_reason(point, recipe, settings.device)
            if reason is None:
                chosen.append((backend, recipe))
            else:
                skipped.append(Skipped(point, name, recipe, reason))
    if not chosen:
        return [], skipped
    inputs = input_sets(point, settings.device)
    judge = _Judge(store, point, inputs[0]) if settings.judge else None
    rows: list[_Row] = []
    for backend, recipe in chosen:
        say(f"{point}: setting up {backend.name} {recipe.mma_type}")
        stages = [stage for stage in plan.stages if stage in backend.stages]
        try:
            layer = backend.open(store, point, recipe, inputs)
        except Exception as error:  # one row's failure is one line; the others go on
            skipped.append(_failure(error, point, backend, recipe, None))
            continue
        for stage in stages:
            try:
                rows.append(_set_up(backend, recipe, stage, layer, inputs, judge))
            except Exception as error:
                skipped.append(_failure(error, point, backend, recipe, stage))
    say(f"{point}: timing {len(rows)} rows")
    try:
        timings = time_interleaved([row.contender for row in rows], settings.windows(point.tokens))
    except RuntimeError as error:
        raise DeviceLost(f"{point}: {_first_line(error)}") from error
    touched = touched_experts(inputs)
    return [_record(point, row, timing, touched, roofline) for row, timing in zip(rows, timings)], skipped


def _set_up(
    backend: BenchBackend, recipe: Recipe, stage: str, layer: OpenLayer, inputs: Sequence[Inputs], judge: _Judge | None
) -> _Row:
    device = inputs[0].x.device
    output = torch.full_like(inputs[0].x, torch.nan)
    calls = layer.calls(stage, output)
    output.fill_(torch.nan)
    _, launches = count_launches(lambda: (calls[0](), output)[1], device)
    errors = problem = None
    if judge is not None and _judged(backend, stage):
        errors, problem = judge(output, backend, recipe)
    contender: Contender
    if device.type == "cpu":
        contender = ClockTimed(calls)
    elif layer.graph_reason is not None:
        contender = EventTimed(calls, layer.graph_reason)
    else:
        contender = GraphReplay(calls)
    return _Row(backend, recipe, stage, layer, contender, launches, errors, problem)


def _judged(backend: BenchBackend, stage: str) -> bool:
    """Whether there is a y to compare, by someone else's arithmetic."""
    return stage in LAYER_STAGES and backend.name != "reference"


class _Judge:
    """Compares y of the first input set with the reference's, at tokens spread over the batch."""

    def __init__(self, store: LayerStore, point: Point, inputs: Inputs) -> None:
        self._store, self._point, self._inputs = store, point, inputs
        count = min(point.tokens, _JUDGED_TOKENS)
        self._tokens = torch.linspace(0, point.tokens - 1, count, device=inputs.x.device).long()
        self._expected: dict[Recipe, torch.Tensor] = {}

    def __call__(self, output: torch.Tensor, backend: BenchBackend, recipe: Recipe) -> tuple[ErrorReport, str | None]:
        judge = backend.judge(recipe)
        report = compare(output[self._tokens], self._reference(judge))
        if backend.own:
            return report, check(report, LIMITS[judge])
        beyond = not report.rel_rms <= _PEER_REL_RMS
        return report, f"rel_rms {report.rel_rms:.3g} > {_PEER_REL_RMS}: not this layer" if beyond else None

    def _reference(self, recipe: Recipe) -> torch.Tensor:
        if recipe not in self._expected:
            shape, i = self._point.shape, self._inputs
            self._expected[recipe] = moe_layer(
                i.x, i.topk_ids, i.topk_weights,
                self._store.plain(recipe, shape.num_shared_experts), spec_of(shape, recipe),
                parameters=self._store.parameters(recipe), tokens=self._tokens, full_trace=False,
            ).y  # fmt: skip
        return self._expected[recipe]


def _record(point: Point, row: _Row, timing: Timing, touched: float, roofline: Roofline | None) -> Record:
    spec = spec_of(point.shape, row.backend.judge(row.recipe))
    work = count_work(spec, row.stage, point.tokens, touched, point.tokens * point.shape.top_k)
    time_us = timing.median_us
    return Record(
        model=point.shape.name,
        tokens=point.tokens,
        mma_type=row.recipe.mma_type,
        act_scale=row.recipe.act_scale,
        numerics=row.recipe.numerics,
        backend=row.backend.name,
        stage=row.stage,
        n_shared=point.shape.num_shared_experts,
        routing=point.routing,
        median_us=round(time_us, 3),
        p20_us=round(timing.p20_us, 3),
        p80_us=round(timing.p80_us, 3),
        samples=timing.samples,
        method=timing.method,
        launches=row.launches,
        touched_experts=round(touched, 2),
        flops=work.flops,
        bytes=work.num_bytes,
        useful_tflops=_rounded(work.flops / time_us / 1e6) if work.flops else None,
        weight_gbps=_rounded(work.weight_bytes / time_us / 1e3) if work.weight_bytes else None,
        roofline_pct=None if roofline is None else _roofline_pct(work, row.recipe, roofline, time_us),
        rel_rms=None if row.errors is None else float(f"{row.errors.rel_rms:.3g}"),
        worst_row=None if row.errors is None else float(f"{row.errors.worst_row:.3g}"),
        fitted_scale=None if row.errors is None else float(f"{row.errors.fitted_scale:.6g}"),
        judged_by=str(row.backend.judge(row.recipe)) if _judged(row.backend, row.stage) else None,
        problem=row.problem,
        note=row.layer.note,
    )


def _roofline_pct(work: Work, recipe: Recipe, roofline: Roofline, time_us: float) -> float:
    act = "bf16" if recipe.mma_type.startswith("bf16x") else "e4m3"
    return round(100 * roofline.floor_us(work.flops, work.num_bytes, act) / time_us, 1)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _failure(error: Exception, point: Point, backend: BenchBackend, recipe: Recipe, stage: str | None) -> Skipped:
    """The failed row, or `DeviceLost` when the error has taken the CUDA context with it."""
    reason = _first_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        reason = "out of GPU memory beside the other backends; run it in a call of its own (--backend)"
    elif torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise DeviceLost(f"{point}, {backend.name}, {stage or 'set-up'}: {reason}") from error
    return Skipped(point, backend.name, recipe, reason, stage, failed=True)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
