"""The pre-dispatch on one GPU: bytes against the reference first, then time, bandwidth and ratio to the copy floor.

    PYTHONPATH=src python bench/pre_dispatch_h200.py [--out DIR] [--sweep]

Method: every launch of a CUDA graph reads and writes its own set of buffers, sets are rotated and together exceed L2
many times over, so that a launch finds nothing of its own in L2 (8192 tokens; for 1 and 16 tokens the figure is the
launch's latency in a graph). The time of a launch is the median over replays of replay time / launches. `copy` is
torch's device-to-device copy of as many bytes, measured alike in the same run. Needs torch and Triton only.

Exit status 1 when a byte differs. The JSON goes to DIR/pre_dispatch.json (default: $OUT, or the current folder).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton

from megamoe.kernels import pre_dispatch as family
from megamoe.kernels.pre_dispatch import KINDS, pre_dispatch
from megamoe.oracle import reference
from megamoe.oracle.metrics import assert_bytes_equal

TOP_K = 6
NUM_EXPERTS = 256
# Measured copy time of each kind's bytes at 8192 × 4096 on an H200, µs.
FLOORS_US = {"mxfp8": 24.0, "mxfp4": 20.0, "nvfp4": 20.0, "fp8_block128": 24.0}
FLOOR_SHAPE = (8192, 4096)
SHAPES = ((8192, 4096, 8192), (8192, 7168, 8192), (1, 4096, 1), (16, 4096, 16), (1, 4096, 8192), (16, 7168, 8192))
ROTATION_BYTES = 1 << 30  # of all sets together: an H200's L2 has 60 MB
LEAST_SETS, MOST_SETS = 8, 64
CPU_REFERENCE_ELEMENTS = 1 << 23
REPLAYS = 60


@dataclass(frozen=True)
class Timing:
    """`bytes` moved by a launch, useful bytes only; `floor_ratio` only where a floor is known."""

    kind: str
    tokens: int
    hidden: int
    rows: int
    groups: int
    num_warps: int
    us: float
    bytes: int
    gb_per_s: float
    copy_us: float
    copy_ratio: float
    floor_ratio: float | None


class Call:
    """Buffers of one pre-dispatch, poisoned, and the launch."""

    def __init__(self, x: torch.Tensor, kind: str, rows: int, group: int | None = None) -> None:
        tokens, hidden = x.shape
        spec = KINDS[kind]
        group = group or spec.groups[0]

        def poisoned(row_bytes: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows, row_bytes), 0xFF, dtype=torch.uint8, device=x.device).view(dtype)

        self.x, self.kind, self.group = x, kind, group
        self.ids = torch.randint(-1, NUM_EXPERTS, (tokens, TOP_K), dtype=torch.int32, device=x.device)
        self.weights = torch.rand(tokens, TOP_K, device=x.device)
        self.expert_scales = torch.rand(NUM_EXPERTS, device=x.device)
        self.q = poisoned(hidden // spec.elements_per_byte, spec.element_dtypes[0])
        self.sf = poisoned(hidden // group * spec.scale_dtype.itemsize, spec.scale_dtype)
        self.token_scale = poisoned(4, torch.float32)[:, 0] if spec.token_scale else None
        self.ids_out = poisoned(8 * TOP_K, torch.int64)
        self.weights_out = poisoned(4 * TOP_K, torch.float32)

    def __call__(self) -> None:
        pre_dispatch(
            self.x, self.ids, self.weights,
            q=self.q, sf=self.sf, ids_out=self.ids_out, weights_out=self.weights_out,
            token_scale=self.token_scale, kind=self.kind, group=self.group,
            expert_scales=self.expert_scales,
        )  # fmt: skip

    @property
    def moved_bytes(self) -> int:
        tokens, rows = self.x.shape[0], self.q.shape[0]
        per_token = sum(t[0].nbytes for t in (self.x, self.ids, self.weights, self.q, self.sf) if t.shape[0])
        return tokens * (per_token + 4 * (self.token_scale is not None)) + rows * TOP_K * 12

    @property
    def held_bytes(self) -> int:
        return self.x.nbytes + self.q.nbytes + self.sf.nbytes

    def check(self) -> None:
        tokens, rows = self.x.shape[0], self.q.shape[0]
        device = "cpu" if self.x.numel() <= CPU_REFERENCE_ELEMENTS else self.x.device
        x, ids, weights, scales = (t.to(device) for t in (self.x, self.ids, self.weights, self.expert_scales))
        expected = reference.pre_dispatch_reference(
            x, ids, weights, kind=self.kind, rows=rows, group=self.group, expert_scales=scales
        )
        name = f"{self.kind}/{self.group}"
        assert_bytes_equal(self.sf[:tokens], expected.x.sf, f"{name} sf")
        if self.token_scale is not None and expected.x.token_scale is not None:
            assert_bytes_equal(self.token_scale[:tokens], expected.x.token_scale, f"{name} token_scale")
        assert_bytes_equal(self.q[:tokens], expected.x.q, f"{name} q")
        assert_bytes_equal(self.ids_out, expected.ids, f"{name} ids")
        assert_bytes_equal(self.weights_out, expected.weights, f"{name} weights")
        pads = self.q[tokens:].view(torch.uint8)
        assert_bytes_equal(pads, torch.full_like(pads, 0xFF), f"{name} pad rows of q")


def inputs(device: str) -> dict[str, torch.Tensor]:
    """Rows with every BF16 number, every E2M1 tie, every amax, Inf and NaN of all payloads; and 2^25 normal numbers."""
    generator = torch.Generator(device=device).manual_seed(1)
    every = torch.arange(65536, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16)
    by_exponent = every.reshape(-1, 128)
    shuffled = every[torch.randperm(65536, generator=generator, device=device)].reshape(-1, 256)
    finite = torch.where(shuffled.isfinite(), shuffled, 1.0)
    positive = every[1:0x7F80].float()
    maxima = torch.zeros(positive.numel(), 128, device=device)
    maxima[torch.arange(positive.numel()), torch.arange(positive.numel()) % 128] = positive
    maxima += (torch.rand(maxima.shape, generator=generator, device=device) * positive[:, None] * 0.9) * (maxima == 0)
    ties = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=device)
    near = (ties.bfloat16().view(torch.int16)[:, None] + torch.arange(-2, 3, device=device)).to(torch.int16)
    near = near.view(torch.bfloat16).float().flatten()
    tied = near[torch.randint(near.numel(), (512, 256), generator=generator, device=device)]
    tied *= 1 - 2 * torch.randint(0, 2, tied.shape, generator=generator, device=device)
    tied[:, ::16] = 6.0
    tied *= 2.0 ** torch.randint(-12, 20, (512, 1), generator=generator, device=device)
    rows, hidden = FLOOR_SHAPE
    return {
        "every BF16 number, by exponent": by_exponent,
        "every BF16 number, shuffled": shuffled,
        "every finite BF16 number, shuffled": finite,
        "every BF16 maximum": maxima.bfloat16(),
        "E2M1 ties": tied.bfloat16(),
        "normal": torch.randn(rows, hidden, generator=generator, device=device).bfloat16(),
        "normal, 2880 columns": torch.randn(1000, 2944, generator=generator, device=device).bfloat16()[:, :2880],
    }


def check_bytes(device: str) -> list[str]:
    """Every kind and group on every input, against the reference on the CPU where that is quick; the failures."""
    failures = []
    for name, x in inputs(device).items():
        for kind, spec in KINDS.items():
            for group in spec.groups:
                if x.shape[1] % group:
                    continue
                call = Call(x, kind, x.shape[0] + 3, group)
                try:
                    call()
                    call.check()
                except AssertionError as error:
                    failures.append(f"{name}: {error}")
                    print("FAILED", failures[-1], flush=True)
    print(f"bytes: {'as the reference' if not failures else f'{len(failures)} cases differ'}", flush=True)
    return failures


def time_us(launches: list[Callable[[], object]]) -> float:
    """Median time of one launch, of all of them captured in one CUDA graph in order, µs."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(launches))
    return statistics.median(times)


def measure(kind: str, tokens: int, hidden: int, rows: int) -> Timing:
    device = "cuda"
    generator = torch.Generator(device=device).manual_seed(2)

    def call() -> Call:
        return Call(torch.randn(tokens, hidden, generator=generator, device=device).bfloat16(), kind, rows)

    calls = [call()]
    sets = min(MOST_SETS, max(LEAST_SETS, ROTATION_BYTES // calls[0].held_bytes))
    calls += [call() for _ in range(sets - 1)]
    us = time_us(list(calls))
    moved = calls[0].moved_bytes
    del calls
    halves = [torch.empty(2, moved // 2, dtype=torch.uint8, device=device) for _ in range(sets)]
    copy_us = time_us([partial(pair[1].copy_, pair[0]) for pair in halves])
    groups, num_warps = family.tile(kind, hidden, KINDS[kind].groups[0])
    floor = FLOORS_US[kind] if (tokens, hidden) == FLOOR_SHAPE else None
    return Timing(
        kind, tokens, hidden, rows, groups, num_warps, us, moved, moved / us / 1000,
        copy_us, us / copy_us, None if floor is None else us / floor,
    )  # fmt: skip


def report(timing: Timing) -> Timing:
    ratio = "" if timing.floor_ratio is None else f"  {timing.floor_ratio:5.2f} × floor"
    print(
        f"{timing.kind:>12} {timing.tokens:>5} × {timing.hidden:<5} P {timing.rows:<5} "
        f"{timing.groups:>4} groups {timing.num_warps:>2} warps: {timing.us:8.2f} µs {timing.gb_per_s:7.0f} GB/s "
        f" {timing.copy_ratio:5.2f} × copy ({timing.copy_us:.2f} µs){ratio}",
        flush=True,
    )
    return timing


@dataclass(frozen=True)
class Fixed:
    """Stands in for `pre_dispatch.tile`."""

    groups: int
    num_warps: int

    def __call__(self, kind: str, hidden: int, group: int) -> tuple[int, int]:
        return self.groups, self.num_warps


def sweep() -> list[Timing]:
    """8192 × 4096 and × 7168 over groups per program and warps."""
    chosen, timings = family.tile, []
    for kind, spec in KINDS.items():
        for hidden in (4096, 7168):
            group = spec.groups[0]
            whole, _ = chosen(kind, hidden, group)
            elements = (whole * group,) if kind == "nvfp4" else (1024, 2048, 4096, 8192)
            for size in elements:
                for num_warps in (1, 2, 4, 8, 16):
                    per_thread = size // (32 * num_warps)
                    if not 16 <= per_thread <= 128:
                        continue
                    family.tile = Fixed(size // group, num_warps)
                    timings.append(report(measure(kind, 8192, hidden, 8192)))
    family.tile = chosen
    return timings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of the JSON")
    parser.add_argument("--sweep", action="store_true", help="also try other tile sizes and warps")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU", file=sys.stderr)
        return 2
    failures = check_bytes("cuda")
    timings = [report(measure(kind, *shape)) for shape in SHAPES for kind in KINDS]
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "method": (__doc__ or "").partition("Method: ")[2].partition("\n\n")[0].replace("\n", " "),
        "failures": failures,
        "timings": [asdict(timing) for timing in timings],
        "sweep": [asdict(timing) for timing in sweep()] if options.sweep else [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pre_dispatch.json").write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
