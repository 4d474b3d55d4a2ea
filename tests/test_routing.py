"""The routing plan against one written in torch: every written entry, holes included, and nothing beyond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.kernels.routing import RoutingPlan, allocate_plan, build_plan, max_rows, max_tiles

POISON = -0x5A5A5A5B
TENSORS = ("sorted_slots", "expert_offsets", "tiles", "skipped")
INT32, INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)


def poisoned_plan(num_slots: int, num_experts: int, block_m: int, device: str) -> RoutingPlan:
    """A plan with room to spare, so that writes beyond its end are seen."""
    plan = allocate_plan(num_slots + 40, 1, num_experts, block_m, device)
    for name in TENSORS:
        getattr(plan, name).fill_(POISON)
    return plan


def reference_plan(
    topk_ids: torch.Tensor, plan: RoutingPlan, num_experts: int, block_m: int, offset: int, num_global: int
) -> RoutingPlan:
    """What `build_plan` must leave in a poisoned `plan`."""
    ids = topk_ids.flatten().tolist()
    expected = RoutingPlan(**{name: torch.full_like(getattr(plan, name), POISON).cpu() for name in TENSORS})
    local = [slot for slot, expert in enumerate(ids) if offset <= expert < offset + num_experts]
    by_expert: list[list[int]] = [[] for _ in range(num_experts)]
    for slot in local:
        by_expert[ids[slot] - offset].append(slot)
    expected.sorted_slots[: len(local)] = torch.tensor([s for slots in by_expert for s in slots], dtype=torch.int32)

    tiles: list[tuple[int, int, int, int]] = []
    end = 0
    for expert, slots in enumerate(by_expert):
        expected.expert_offsets[expert] = begin = end
        end += len(slots)
        tiles += [(expert, row, min(block_m, end - row), 0) for row in range(begin, end, block_m)]
        is_last = expert == num_experts - 1
        stop = max_tiles(len(ids), num_experts, block_m) if is_last else end // block_m + min(expert + 1, end)
        assert len(tiles) <= stop, "the tiles of these experts do not fit before the next expert's"
        tiles += [(expert, end, 0, 0)] * (stop - len(tiles))
    expected.expert_offsets[num_experts] = end
    if tiles:
        expected.tiles[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
    expected.skipped[0] = sum(expert < -1 or expert >= num_global for expert in ids)
    return expected


def check_plan(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    block_m: int,
    expert_offset: int = 0,
    num_global_experts: int | None = None,
    plan: RoutingPlan | None = None,
) -> RoutingPlan:
    """Build a plan for `topk_ids` and compare all of it with the reference."""
    if plan is None:
        plan = poisoned_plan(topk_ids.numel(), num_experts, block_m, topk_ids.device.type)
    before = topk_ids.clone()
    build_plan(
        topk_ids,
        plan,
        num_experts=num_experts,
        block_m=block_m,
        expert_offset=expert_offset,
        num_global_experts=num_global_experts,
    )
    num_global = expert_offset + num_experts if num_global_experts is None else num_global_experts
    expected = reference_plan(topk_ids, plan, num_experts, block_m, expert_offset, num_global)
    for name in TENSORS:
        actual, wanted = getattr(plan, name).cpu(), getattr(expected, name)
        different = (actual != wanted).nonzero()
        assert not len(different), (
            f"{name}: {len(different)} entries differ, first {tuple(different[0].tolist())}: "
            f"{actual[tuple(different[0])]}, expected {wanted[tuple(different[0])]}"
        )
    assert torch.equal(topk_ids, before)
    return plan


def uniform(tokens: int, top_k: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_experts, (tokens, top_k), generator=generator)


def with_invalid(ids: torch.Tensor, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Every third id replaced by −1 or by one that names no expert."""
    info = torch.iinfo(dtype)
    bad = torch.tensor([-1, num_experts, -2, info.max, info.min, num_experts + 1, info.min + 1])
    flat = ids.flatten().clone()
    flat[::3] = bad[torch.arange(len(flat[::3])) % len(bad)]
    return flat.reshape(ids.shape)


@dataclass(frozen=True)
class Case:
    tokens: int
    top_k: int
    num_experts: int
    block_m: int = 16
    ids: Callable[[torch.Tensor, int], torch.Tensor] | None = None  # changes uniform ids


CASES = {
    "no token": Case(0, 3, 5),
    "one slot, one expert": Case(1, 1, 1),
    "decode": Case(1, 6, 64),
    "experts not a power of two": Case(40, 8, 7, 32),
    "block_m 1": Case(9, 4, 6, 1),
    "block_m not a power of two": Case(50, 4, 5, 24),
    "top_k 32": Case(5, 32, 40),
    "several steps per segment": Case(700, 6, 9, 64),
    "slots end inside a segment": Case(1025, 3, 4, 128),
    "all tokens to the first": Case(70, 4, 8, 32, lambda ids, experts: torch.zeros_like(ids)),
    "all tokens to the last": Case(70, 4, 8, 32, lambda ids, experts: torch.full_like(ids, experts - 1)),
    "most experts empty": Case(30, 4, 32, 16, lambda ids, experts: ids // 9 * 9),
    "duplicates inside a token": Case(33, 6, 12, 16, lambda ids, experts: ids[:, :1].expand(-1, 6).contiguous()),
    "nothing valid": Case(20, 4, 8, 16, lambda ids, experts: torch.full_like(ids, -1)),
    "descending ids": Case(64, 2, 128, 16, lambda ids, experts: torch.arange(127, -1, -1).reshape(64, 2)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_plan(case: Case, dtype: torch.dtype, device: str) -> None:
    ids = uniform(case.tokens, case.top_k, case.num_experts)
    if case.ids is not None:
        ids = case.ids(ids, case.num_experts)
    check_plan(ids.to(device, dtype), num_experts=case.num_experts, block_m=case.block_m)


@pytest.mark.parametrize("num_experts", [1, 5, 66])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_that_name_no_expert(num_experts: int, dtype: torch.dtype, device: str) -> None:
    ids = with_invalid(uniform(64, 6, num_experts), num_experts, dtype)
    plan = check_plan(ids.to(device, dtype), num_experts=num_experts, block_m=16)
    assert int(plan.skipped) == 109  # of 128 replaced ids, 19 are −1


def test_1024_experts(device: str) -> None:
    check_plan(uniform(50, 8, 1024).to(device, torch.int32), num_experts=1024, block_m=16)


def test_more_slots_than_a_byte_per_lane_counts(device: str) -> None:
    """257 steps per segment: the counters of pass 1 are emptied once on the way."""
    ids = torch.zeros(8192 * 4 + 1, 8, dtype=torch.int32, device=device)
    ids[-1, -1] = 1
    plan = poisoned_plan(ids.numel(), 2, 128, device)
    build_plan(ids, plan, num_experts=2, block_m=128)
    last = ids.numel() - 1
    assert plan.expert_offsets.tolist() == [0, last, last + 1]
    assert torch.equal(plan.sorted_slots[: last + 1].cpu(), torch.arange(last + 1, dtype=torch.int32))
    assert (plan.sorted_slots[last + 1 :] == POISON).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rank", range(4))
def test_other_ranks_experts_are_silent(rank: int, dtype: torch.dtype, device: str) -> None:
    """Each of four ranks plans its own 6 of 24 experts; only ids outside all 24 are counted."""
    ids = with_invalid(uniform(40, 5, 24), 24, dtype).to(device, dtype)
    plan = check_plan(ids, num_experts=6, block_m=16, expert_offset=6 * rank, num_global_experts=24)
    assert int(plan.skipped) == 57


def test_ids_at_any_address(device: str) -> None:
    """A view that starts at an odd element: aligned to nothing but the element."""
    base = uniform(21, 3, 6).to(device, torch.int32)
    check_plan(base[1:], num_experts=6, block_m=16)


def test_a_plan_is_reused_for_fewer_tokens(device: str) -> None:
    """What an earlier, larger call left does not show, beyond entries that are not written."""
    plan = poisoned_plan(400, 8, 16, device)
    build_plan(uniform(100, 4, 8).to(device), plan, num_experts=8, block_m=16)
    ids = uniform(7, 4, 8, seed=1).to(device)
    build_plan(ids, plan, num_experts=8, block_m=32)
    fresh = check_plan(ids, num_experts=8, block_m=32)
    num_slots, num_tiles = 28, max_tiles(28, 8, 32)
    assert torch.equal(plan.sorted_slots[:num_slots], fresh.sorted_slots[:num_slots])
    assert torch.equal(plan.tiles[:num_tiles], fresh.tiles[:num_tiles])
    assert torch.equal(plan.expert_offsets, fresh.expert_offsets)
    assert torch.equal(plan.skipped, fresh.skipped)


def test_two_runs_are_equal(device: str) -> None:
    ids = with_invalid(uniform(300, 6, 10), 10, torch.int64).to(device)
    first, second = (check_plan(ids, num_experts=10, block_m=16) for _ in range(2))
    for name in TENSORS:
        assert torch.equal(getattr(first, name), getattr(second, name)), name


IDS = st.one_of(st.integers(-1, 9), st.sampled_from([INT64.min, INT64.max, INT32.min, INT32.max, 2**32, -(2**32), -2]))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_routing(data: st.DataObject, device: str) -> None:
    num_experts, top_k = data.draw(st.integers(1, 9), "num_experts"), data.draw(st.integers(1, 5), "top_k")
    tokens = data.draw(st.lists(st.lists(IDS, min_size=top_k, max_size=top_k), max_size=12), "tokens")
    ids = torch.tensor(tokens, dtype=torch.int64, device=device).reshape(-1, top_k)
    offset = data.draw(st.integers(0, 4), "expert_offset")
    num_global = offset + num_experts + data.draw(st.integers(0, 3), "experts behind mine")
    check_plan(
        ids,
        num_experts=num_experts,
        block_m=data.draw(st.integers(1, 20), "block_m"),
        expert_offset=offset,
        num_global_experts=num_global,
    )


@settings(max_examples=500, deadline=None)
@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=40), block_m=st.integers(1, 130))
def test_every_expert_s_tiles_fit_before_the_next_one_s(counts: list[int], block_m: int) -> None:
    """ceil(c / M) <= start(e+1) - start(e), and start(E) = max_tiles when every slot is valid."""
    before, start = 0, 0
    for expert, count in enumerate(counts):
        before += count
        next_start = before // block_m + min(expert + 1, before)
        assert start + -(-count // block_m) <= next_start
        start = next_start
    assert start == max_tiles(before, len(counts), block_m)


OK = dict(num_experts=4, block_m=16)
REFUSED = [
    ("float ids", lambda: torch.zeros(3, 2), OK, TypeError, r"dtype torch\.float32"),
    ("one axis", lambda: torch.zeros(6, dtype=torch.int32), OK, ValueError, r"shape \(6,\)"),
    ("strided", lambda: torch.zeros(2, 3, dtype=torch.int32).t(), OK, ValueError, "contiguous"),
    ("top_k 33", lambda: torch.zeros(1, 33, dtype=torch.int32), OK, ValueError, "top_k=33"),
    ("no expert", lambda: torch.zeros(3, 2, dtype=torch.int32), {**OK, "num_experts": 0}, ValueError, "num_experts=0"),
    ("1025 experts", lambda: torch.zeros(3, 2, dtype=torch.int32), {**OK, "num_experts": 1025}, ValueError, "1025"),
    ("other plan", lambda: torch.zeros(3, 2, dtype=torch.int32), {**OK, "num_experts": 5}, ValueError, "4 experts"),
    ("block_m 0", lambda: torch.zeros(3, 2, dtype=torch.int32), {**OK, "block_m": 0}, ValueError, "block_m=0"),
    ("slots", lambda: torch.zeros(30, 2, dtype=torch.int32), OK, ValueError, r"46 slots.*needs 60"),
    ("tiles", lambda: torch.zeros(20, 2, dtype=torch.int32), {**OK, "block_m": 1}, ValueError, "needs 40 and 44"),
    ("offset", lambda: torch.zeros(3, 2, dtype=torch.int32), {**OK, "expert_offset": -1}, ValueError, "offset=-1"),
    ("global", lambda: torch.zeros(3, 2, dtype=torch.int32), {**OK, "expert_offset": 4, "num_global_experts": 7},
     ValueError, "num_global_experts=7"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refuses_before_writing(
    ids: Callable[[], torch.Tensor], options: dict, error: type[Exception], message: str, device: str
) -> None:
    plan = poisoned_plan(6, 4, 16, device)
    with pytest.raises(error, match=message):
        build_plan(ids().to(device), plan, **options)
    for name in TENSORS:
        assert (getattr(plan, name) == POISON).all(), name


@pytest.mark.gpu
def test_captured_plan_follows_its_ids(device: str) -> None:
    static = uniform(64, 6, 256).to(device)
    plan = poisoned_plan(static.numel(), 256, 16, device)
    build_plan(static, plan, num_experts=256, block_m=16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build_plan(static, plan, num_experts=256, block_m=16)
    for seed in (1, 2):
        static.copy_(uniform(64, 6, 256, seed=seed))
        for name in TENSORS:
            getattr(plan, name).fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        fresh = check_plan(static.clone(), num_experts=256, block_m=16)
        for name in TENSORS:
            assert torch.equal(getattr(plan, name), getattr(fresh, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(8192, 6, 256), (16384, 8, 384), (4096, 8, 1024)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_full_size(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype, device: str) -> None:
    ids = with_invalid(uniform(tokens, top_k, num_experts), num_experts, dtype)
    check_plan(ids.to(device, dtype), num_experts=num_experts, block_m=128)


@pytest.mark.parametrize("row_align", (4, 8))
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (3, 2, 7), (40, 3, 5), (129, 6, 64)])
def test_aligned_rows_are_the_dense_order_moved_apart(
    tokens: int, top_k: int, experts: int, row_align: int, device: str
) -> None:
    """Every expert starts at a multiple of the alignment, its slots ascend, and tiles and inverse follow."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, experts + 1, (tokens, top_k), generator=generator)
    plan = allocate_plan(tokens, top_k, experts, 16, device, row_align=row_align)
    assert plan.slot_rows is not None
    for tensor in (plan.sorted_slots, plan.tiles, plan.slot_rows):
        tensor.fill_(POISON)
    build_plan(ids.to(device), plan, num_experts=experts, block_m=16)
    slots = ids.flatten().tolist()
    rows = plan.slot_rows.tolist()
    assert all((row == -1) == (not 0 <= expert < experts) for row, expert in zip(rows, slots))
    expected_tiles = []
    for expert in range(experts):
        mine = [slot for slot, named in enumerate(slots) if named == expert]
        taken = [rows[slot] for slot in mine]
        if mine:
            assert taken[0] % row_align == 0
            assert taken == list(range(taken[0], taken[0] + len(mine)))
            assert plan.sorted_slots[taken[0] : taken[-1] + 1].tolist() == mine
            assert taken[-1] < max_rows(len(slots), experts, row_align) <= plan.sorted_slots.numel()
            expected_tiles += [
                [expert, row, min(16, taken[-1] + 1 - row), 0] for row in range(taken[0], taken[-1] + 1, 16)
            ]
    tiles = plan.tiles[: max_tiles(len(slots), experts, 16)].tolist()
    assert [tile for tile in tiles if tile[2] > 0] == expected_tiles
    used = [row for row in rows if row >= 0]
    assert len(set(used)) == len(used)
