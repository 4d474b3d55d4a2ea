"""Time on one GPU: CUDA-graph replays of all contenders, interleaved, in windows of equal length.

A contender is a list of calls, one per input set; its graph holds them all in turn, so that consecutive launches read
other experts and other tokens. In every round each contender replays for the same time, in an order that turns round
from one round to the next. So all of them meet the same clocks: above 2048 tokens the chip throttles by power, and
whoever runs after a pause would win 10 to 20 %.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

_SAMPLE_SECONDS = 4e-3  # events around less than this would count their own cost
_SETTLE = 0.1  # share of a window that is replayed first and not counted

Call = Callable[[], object]


@dataclass(frozen=True)
class Windows:
    """`seconds` of measured time per contender, in `rounds` equal pieces."""

    seconds: float = 0.25
    rounds: int = 5


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call over the samples: median, 20th and 80th percentile."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    method: str

    @classmethod
    def of(cls, samples: Sequence[float], method: str) -> Timing:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1, method)
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), fifths[0], fifths[3], len(samples), method)


class GraphReplay:
    """The calls of one contender in one CUDA graph. Every call must be warm: nothing may compile under capture."""

    method = "cuda_graph"

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls  # they own what the graph reads and writes: freed memory would become other tensors
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            for call in calls:
                call()
        self._graph.replay()
        self._seconds = max(_event_seconds(self._graph.replay), 1e-7)

    def window(self, seconds: float) -> list[float]:
        """Microseconds per call of each sample of a window, at least two of them."""
        replays = max(1, round(_SAMPLE_SECONDS / self._seconds))
        count = max(2, round(seconds / (replays * self._seconds)))
        for _ in range(round(_SETTLE * seconds / self._seconds)):
            self._graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            for _ in range(replays):
                self._graph.replay()
            event.record()
        events[-1].synchronize()
        scale = 1000 / (replays * len(self._calls))
        return [scale * before.elapsed_time(after) for before, after in pairwise(events)]


class EventTimed:
    """Calls that cannot be captured, and why: one pair of events around each. The CPU's launch cost is in it."""

    def __init__(self, calls: Sequence[Call], reason: str) -> None:
        self._calls = calls
        self.method = f"events: {reason}"

    def window(self, seconds: float) -> list[float]:
        samples: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(samples) < 2:
            samples += [1e6 * _event_seconds(call) for call in self._calls]
        return samples


class ClockTimed:
    """Calls on the CPU, by the clock."""

    method = "clock"

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def window(self, seconds: float) -> list[float]:
        samples: list[float] = []
        end = time.perf_counter() + seconds
        while not samples or time.perf_counter() < end:
            for call in self._calls:
                start = time.perf_counter()
                call()
                samples.append(1e6 * (time.perf_counter() - start))
        return samples


Contender = GraphReplay | EventTimed | ClockTimed


def time_interleaved(contenders: Sequence[Contender], windows: Windows) -> list[Timing]:
    """One `Timing` per contender."""
    samples: list[list[float]] = [[] for _ in contenders]
    for number in range(windows.rounds):
        order = range(len(contenders))
        for index in order if number % 2 == 0 else reversed(order):
            samples[index] += contenders[index].window(windows.seconds / windows.rounds)
    return [Timing.of(times, contender.method) for times, contender in zip(samples, contenders)]


def _event_seconds(call: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
