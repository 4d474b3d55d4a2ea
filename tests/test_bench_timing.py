"""How contenders are timed: interleaved, in equal windows, every input set in turn."""

import time

import pytest
import torch

from megamoe.bench.roofline import Roofline
from megamoe.bench.timing import ClockTimed, GraphReplay, Timing, Windows, time_interleaved


class _Fake:
    method = "fake"

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def window(self, seconds: float) -> list[float]:
        self.log.append(f"{self.name} {seconds:g}")
        return [float(len(self.log))]


def test_windows_are_equal_and_their_order_turns_round() -> None:
    log: list[str] = []
    contenders = [_Fake(name, log) for name in "abc"]
    timings = time_interleaved(contenders, Windows(0.9, 3))  # type: ignore[arg-type]
    assert log == [f"{name} 0.3" for name in "abccbaabc"]
    assert [timing.median_us for timing in timings] == [6.0, 5.0, 4.0]


def test_spread_is_the_20th_to_the_80th_percentile() -> None:
    timing = Timing.of([float(value) for value in range(101)], "fake")
    assert (timing.p20_us, timing.median_us, timing.p80_us, timing.samples) == (20.0, 50.0, 80.0, 101)
    assert Timing.of([3.0], "fake") == Timing(3.0, 3.0, 3.0, 1, "fake")


def test_the_clock_times_every_call() -> None:
    calls = [lambda: time.sleep(0.002), lambda: time.sleep(0.004)]
    samples = ClockTimed(calls).window(0)
    assert len(samples) == 2
    assert 2000 <= samples[0] < samples[1]


def test_the_roof_is_memory_or_arithmetic() -> None:
    roofline = Roofline(read_gbps=4000, copy_gbps=4000, bf16_tflops=700, fp8_tflops=1400)
    assert roofline.floor_us(flops=0, num_bytes=4e9, act="e4m3") == 1000
    assert roofline.floor_us(flops=1.4e12, num_bytes=1, act="e4m3") == 1000
    assert roofline.floor_us(flops=1.4e12, num_bytes=1, act="bf16") == 2000
    assert Roofline(4000, 4000, 700, None).matrix_tflops("e4m3") == 700


@pytest.mark.gpu
def test_a_graph_replays_every_call_in_turn() -> None:
    counters = torch.zeros(3, device="cuda")
    calls = [lambda index=index: counters[index].add_(1) for index in range(3)]
    for call in calls:
        call()
    samples = GraphReplay(calls).window(0.01)
    assert len(samples) >= 2
    assert all(0 < sample < 1000 for sample in samples)
    counts = counters.tolist()
    assert counts[0] == counts[1] == counts[2] > 10


@pytest.mark.gpu
def test_a_graph_keeps_what_it_writes() -> None:
    """Whoever made the calls may forget them: their memory must not become another tensor's."""

    def contender() -> GraphReplay:
        output = torch.zeros(1 << 20, device="cuda")
        output.add_(1)
        return GraphReplay([lambda: output.add_(1)])

    graph = contender()
    others = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
    graph.window(0.01)
    assert not any(other.any() for other in others)
