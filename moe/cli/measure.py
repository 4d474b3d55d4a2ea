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


def timed(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float]:
    """The result of one call and its seconds by the clock, waiting for the GPU if there is one."""
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start


def count_launches(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, int]:
    """The result of one call and how many kernels (on a GPU: and copies and fills) it launched."""
    if device.type == "cpu":
        with _interpreted_launches() as launches:
            result = call()
        return result, len(launches)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        result = call()
        torch.cuda.synchronize(device)
    events = profile.events() or ()
    return result, sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)


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
