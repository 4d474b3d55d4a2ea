"""Time and launches of one layer call: a CUDA graph's replays on a GPU, one call by the clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_REPLAYS = 20


def graph_microseconds(call: Callable[[], object]) -> float:
    """Median time of a replay of `call`, which must be warm, captured in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def wall_seconds(call: Callable[[], object], device: torch.device) -> float:
    """One call by the clock, waiting for the GPU if there is one."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def count_launches(call: Callable[[], object], device: torch.device) -> int:
    """Kernels (on a GPU: and copies and fills) that one call launches, counted as they happen."""
    if device.type == "cuda":
        return _count_on_gpu(call)
    with _interpreted_launches() as launches:
        call()
    return len(launches)


def _count_on_gpu(call: Callable[[], object]) -> int:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_device for event in profile.events() or ())


@contextmanager
def _interpreted_launches() -> Iterator[list[str]]:
    """The names of the kernels that the interpreter runs inside the `with` block."""
    from triton.runtime import interpreter

    launches: list[str] = []
    run = interpreter.GridExecutor.__call__

    def counted(self: interpreter.GridExecutor, *args: object, **kwargs: object) -> object:
        launches.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counted
    try:
        yield launches
    finally:
        interpreter.GridExecutor.__call__ = run
