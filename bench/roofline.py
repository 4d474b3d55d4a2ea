"""What the machine can do, measured before anything else: read and copy bandwidth, FP8 and BF16 matrix rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megamoe.bench.timing import GraphReplay, Windows, time_interleaved

_BYTES = 1 << 31  # read per call, many times L2
_SIZE = 8192


@dataclass(frozen=True)
class Roofline:
    """Sustained rates: GB/s (of the copy: bytes read plus written) and TFLOP/s on random data.

    `fp8_tflops` is None where torch has no FP8 matmul. FP4 is not measured: torch has no portable call for it.
    """

    read_gbps: float
    copy_gbps: float
    bf16_tflops: float
    fp8_tflops: float | None

    def matrix_tflops(self, act: str) -> float:
        """The rate for activations of element format `act`; E2M1 counts as FP8, into which it decodes exactly."""
        return self.bf16_tflops if act == "bf16" or self.fp8_tflops is None else self.fp8_tflops

    def floor_us(self, flops: float, num_bytes: float, act: str) -> float:
        """The least time for this much work: memory and matrix units each at their measured rate, side by side."""
        return max(num_bytes / self.read_gbps / 1e3, flops / self.matrix_tflops(act) / 1e6)


def measure_roofline(windows: Windows) -> Roofline:
    """Measured on the current GPU as the contenders are: graph replays, interleaved, median of the samples."""
    source = torch.randint(-(2**31), 2**31 - 1, (_BYTES // 4,), dtype=torch.int32, device="cuda").view(torch.float32)
    source = torch.where(source.isfinite(), source, 1.0)
    target = torch.empty_like(source)
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    total = torch.empty((), dtype=torch.float32, device="cuda")
    flops = 2 * _SIZE**3
    work: dict[str, tuple[float, Callable[[], object]]] = {
        "read_gbps": (_BYTES / 1e3, lambda: torch.sum(source, 0, out=total)),
        "copy_gbps": (2 * _BYTES / 1e3, lambda: torch.add(source, 1.0, out=target)),
        "bf16_tflops": (flops / 1e6, lambda: torch.mm(a, b, out=out)),
    }
    out = torch.empty_like(a)
    fp8 = _fp8_call(a, b)
    if fp8 is not None:
        work["fp8_tflops"] = flops / 1e6, fp8
    for _, call in work.values():
        call()
    timings = time_interleaved([GraphReplay([call]) for _, call in work.values()], windows)
    rates = {name: round(amount / timing.median_us, 1) for (name, (amount, _)), timing in zip(work.items(), timings)}
    return Roofline(**{"fp8_tflops": None, **rates})  # type: ignore[arg-type]


def _fp8_call(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object] | None:
    """`a @ b` in E4M3 with one scale per matrix and fast accumulation, or None where torch cannot."""
    one = torch.ones((), device="cuda")
    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()

    def call() -> object:
        return torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        call()
    except (RuntimeError, ValueError, NotImplementedError):
        return None
    return call
