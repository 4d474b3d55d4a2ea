"""The routing plan and the combine on one GPU: checked against torch, then timed.

    PYTHONPATH=src python3 -m megamoe.bench.routing_h200 results.json

Method: uniform random routing with every 50th id −1. Each CUDA graph holds 24 launches over rotating inputs (for
the combine: up to 24 sets or 1 GB of them, so that small batches do not sit in L2); the median of seven
replays, divided by 24. The copy floor is `Tensor.copy_` of as many bytes, read and written together, as the combine
moves, in the same graph form.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from megamoe.kernels.combine import combine, combine_kernel
from megamoe.kernels.routing import RoutingPlan, allocate_plan, build_plan, max_tiles

TOKENS = (1, 64, 1024, 8192)
ROUTINGS = ((256, 6), (384, 8))  # experts, top-k
LARGE = (16384, 384, 8)  # tokens, experts, top-k
COMBINES = ((4096, 6, True), (7168, 6, True), (7168, 8, False), (2880, 4, False))  # hidden, top-k, shared
TILES = ((1, 1024, 4), (1, 2048, 8), (2, 512, 4), (2, 1024, 8), (4, 256, 4), (4, 512, 4), (4, 512, 8), (8, 256, 4))
BLOCK_M = 64
LAUNCHES, REPLAYS = 24, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="where the results go")
    arguments = parser.parse_args()
    for tokens, (experts, top_k), dtype in itertools.product(TOKENS, ROUTINGS, (torch.int32, torch.int64)):
        check_plan(tokens, experts, top_k, dtype, "cuda")
    for tokens, (hidden, top_k, shared) in itertools.product(TOKENS[:-1], COMBINES):
        check_combine(tokens, hidden, top_k, shared, "cuda")
    print("plan and combine equal torch's")
    report = {
        "method": " ".join((__doc__ or "").split("Method: ")[1].split()),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "routing": [time_plan(*case) for case in plan_cases()],
        "combine": [time_combine(tokens, *case) for tokens in TOKENS for case in COMBINES],
        "combine_tiles": [
            time_tile(*case, *tile) for case in ((64, *COMBINES[0]), (8192, *COMBINES[0])) for tile in TILES
        ],
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def plan_cases() -> list[tuple[int, int, int, torch.dtype]]:
    sizes = [(tokens, experts, top_k) for tokens in TOKENS for experts, top_k in ROUTINGS]
    return [(*size, dtype) for size in [*sizes, LARGE] for dtype in (torch.int32, torch.int64)]


def random_ids(tokens: int, experts: int, top_k: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, top_k), generator=generator).to(dtype)
    ids.view(-1)[::50] = -1
    return ids.to(device)


def check_plan(tokens: int, experts: int, top_k: int, dtype: torch.dtype, device: str) -> None:
    """The whole plan equals one made by a stable sort; `AssertionError` otherwise."""
    ids = random_ids(tokens, experts, top_k, dtype, device)
    ids.view(-1)[1::7] = experts + 3
    plan = allocate_plan(tokens, top_k, experts, BLOCK_M, device)
    for tensor in vars(plan).values():
        tensor.fill_(-77)
    build_plan(ids, plan, num_experts=experts, block_m=BLOCK_M)
    flat = ids.flatten().long().cpu()
    valid = ((flat >= 0) & (flat < experts)).nonzero().flatten()
    order = valid[torch.argsort(flat[valid], stable=True)]
    offsets = torch.zeros(experts + 1, dtype=torch.int64)
    offsets[1:] = torch.bincount(flat[valid], minlength=experts).cumsum(0)
    tiles = [
        (expert, row, min(BLOCK_M, end - row), 0)
        for expert, (begin, end) in enumerate(itertools.pairwise(offsets.tolist()))
        for row in range(begin, end, BLOCK_M)
    ]
    written = plan.tiles[: max_tiles(flat.numel(), experts, BLOCK_M)].cpu()
    title = f"T={tokens} E={experts} K={top_k} {dtype}"
    assert torch.equal(plan.sorted_slots[: len(order)].cpu().long(), order), f"{title}: sorted_slots"
    assert bool((plan.sorted_slots[len(order) :] == -77).all()), f"{title}: wrote slots beyond the last"
    assert torch.equal(plan.expert_offsets.cpu().long(), offsets), f"{title}: expert_offsets"
    assert [tuple(tile) for tile in written.tolist() if tile[2]] == tiles, f"{title}: tiles"
    assert bool((written[:, 2] >= 0).all()), f"{title}: tiles not written"
    assert int(plan.skipped) == int((flat >= experts).sum()), f"{title}: skipped"


def check_combine(tokens: int, hidden: int, top_k: int, shared: bool, device: str) -> None:
    """Bytes equal the fp32 sum in slot order; rows of invalid slots are NaN; `AssertionError` otherwise."""
    ids = random_ids(tokens, 256, top_k, torch.int64, device)
    rows, out = combine_tensors(tokens, hidden, top_k, shared, device)
    rows[:, :top_k][ids < 0] = torch.nan
    combine(rows, ids, out, num_experts=256, shared=shared)
    total = torch.zeros(tokens, hidden, device=device)
    for k in range(top_k + shared):
        valid = ids[:, k] >= 0 if k < top_k else torch.ones(tokens, dtype=torch.bool, device=device)
        total[valid] += rows[valid, k].float()
    equal = torch.equal(out.view(torch.int16), total.bfloat16().view(torch.int16))
    assert equal, f"combine T={tokens} H={hidden} K={top_k} shared={shared}"


def combine_tensors(
    tokens: int, hidden: int, top_k: int, shared: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(tokens, top_k + shared, hidden, device=device, dtype=torch.bfloat16)
    return rows, torch.full((tokens, hidden), torch.nan, dtype=torch.bfloat16, device=device)


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Time per call of LAUNCHES of `calls`, taken in turn, in one CUDA graph."""
    turn = [calls[i % len(calls)] for i in range(LAUNCHES)]
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in turn:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / LAUNCHES)
    return statistics.median(times)


def time_plan(tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> dict[str, object]:
    plan = allocate_plan(tokens, top_k, experts, BLOCK_M, "cuda")

    def call(ids: torch.Tensor, plan: RoutingPlan = plan) -> Callable[[], object]:
        return lambda: build_plan(ids, plan, num_experts=experts, block_m=BLOCK_M)

    time = microseconds([call(random_ids(tokens, experts, top_k, dtype, "cuda", seed)) for seed in range(8)])
    print(f"build_plan T={tokens} E={experts} K={top_k} {dtype}: {time:.2f} us")
    return {"tokens": tokens, "experts": experts, "top_k": top_k, "ids": str(dtype), "us": round(time, 3)}


def combine_sets(tokens: int, hidden: int, top_k: int, shared: bool) -> list[tuple[torch.Tensor, ...]]:
    """(rows, ids, out) for as many launches as differ."""
    size = 2 * tokens * hidden * (top_k + shared + 1)
    count = max(2, min(LAUNCHES, 2**30 // size))
    return [
        (rows, random_ids(tokens, 256, top_k, torch.int64, "cuda", seed), out)
        for seed in range(count)
        for rows, out in [combine_tensors(tokens, hidden, top_k, shared, "cuda")]
    ]


def time_combine(tokens: int, hidden: int, top_k: int, shared: bool) -> dict[str, object]:
    sets = combine_sets(tokens, hidden, top_k, shared)

    def call(rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        return lambda: combine(rows, ids, out, num_experts=256, shared=shared)

    moved = sum(2 * hidden * (int((ids >= 0).sum()) + tokens * (shared + 1)) for _, ids, _ in sets) / len(sets)
    copies = [torch.empty(2, int(moved / 4), dtype=torch.bfloat16, device="cuda") for _ in sets]
    time = microseconds([call(*tensors) for tensors in sets])
    floor = microseconds([lambda pair=pair: pair[0].copy_(pair[1]) for pair in copies])  # type: ignore[misc]
    print(
        f"combine T={tokens} H={hidden} K={top_k} shared={shared}: {time:.2f} us, copy {floor:.2f} us, "
        f"{moved / time / 1e3:.0f} GB/s"
    )
    return {
        "tokens": tokens,
        "hidden": hidden,
        "top_k": top_k,
        "shared": shared,
        "us": round(time, 3),
        "copy_us": round(floor, 3),
        "gb_per_s": round(moved / time / 1e3, 1),
    }


def time_tile(
    tokens: int, hidden: int, top_k: int, shared: bool, block_t: int, block_h: int, num_warps: int
) -> dict[str, object]:
    """The combine with another tile than the launcher's."""
    grid = (triton.cdiv(tokens, block_t), triton.cdiv(hidden, block_h))

    def call(rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        return lambda: combine_kernel[grid](
            rows, ids, out, tokens, 256, H=hidden, TOP_K=top_k, SHARED=shared,
            BLOCK_T=block_t, BLOCK_H=block_h, num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip

    time = microseconds([call(*tensors) for tensors in combine_sets(tokens, hidden, top_k, shared)])
    print(f"combine T={tokens} H={hidden} tile {block_t}x{block_h}, {num_warps} warps: {time:.2f} us")
    return {"tokens": tokens, "hidden": hidden, "tile": [block_t, block_h, num_warps], "us": round(time, 3)}


if __name__ == "__main__":
    main()
