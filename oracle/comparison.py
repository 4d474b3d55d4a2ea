"""One comparison of a kernel with a judge: what `megamoe check` runs, prints and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from megamoe.oracle.metrics import ErrorReport, assert_bytes_equal


@dataclass(frozen=True)
class Outcome:
    """Bytes compared and how many differ, or errors in `details`; `problem` says what is beyond its limit."""

    bytes_compared: int = 0
    bytes_mismatched: int = 0
    details: dict[str, object] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Case:
    """`kernel` on `recipe` (a recipe or a quantization kind) against one judge.

    `backend` is the judge's name among the backends, `judge` which part of it. `unavailable` is the reason why it
    cannot run here; `run` is called only where that is None.
    """

    kernel: str
    recipe: str
    backend: str
    judge: str
    name: str
    run: Callable[[], Outcome]
    unavailable: str | None = None

    @property
    def path(self) -> str:
        """What `--case` filters by."""
        return f"{self.kernel}/{self.recipe}/{self.name}"


def compare_bytes(pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> Outcome:
    """(name, actual, expected) of equal dtype and shape: their bytes, and the first difference as the problem."""
    compared = mismatched = 0
    problem = None
    for name, actual, expected in pairs:
        if not actual.numel() and actual.shape == expected.shape:
            continue
        compared += actual.numel() * actual.element_size()
        different = actual.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8).to(actual.device)
        count = int(different.sum())
        mismatched += count
        if count and problem is None:
            try:
                assert_bytes_equal(actual, expected, name)
            except AssertionError as error:
                problem = str(error)
    return Outcome(compared, mismatched, problem=problem)


def error_ratio(ours: ErrorReport, theirs: ErrorReport) -> float:
    """Our relative RMS over theirs, both against the reference; 1 where both are 0."""
    if theirs.rel_rms == 0:
        return 1.0 if ours.rel_rms == 0 else math.inf
    return ours.rel_rms / theirs.rel_rms


def total(outcomes: Iterable[Outcome]) -> Outcome:
    """The sum of byte comparisons, with the first one's problem and the last one's details."""
    compared = mismatched = 0
    problem: str | None = None
    details: dict[str, object] = {}
    for outcome in outcomes:
        compared += outcome.bytes_compared
        mismatched += outcome.bytes_mismatched
        problem, details = problem or outcome.problem, outcome.details or details
    return Outcome(compared, mismatched, details, problem)
