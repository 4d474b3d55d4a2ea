"""Routing plan: slots grouped by expert and a tile schedule, made on the device in one launch.

A slot s = t·K + k is one routed (token, choice) pair. The plan lists the slots of expert 0, then of expert
1, …, each in ascending order, and cuts every expert's rows into tiles of `block_m`. Everything downstream
walks the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.profile import routing_work

MAX_EXPERTS = 1024
MAX_TOP_K = 32
MAX_SLOTS = 2**30
"""Slots and their offsets are int32 in the plan and in the kernel."""

_EXPERTS = tl.constexpr(3)  # per program: three counters and “before mine” fill the four bytes of a word
_LANES = tl.constexpr(32)  # ids of one segment per step
_SEGMENTS = tl.constexpr(32)  # stretches of the id list scanned side by side, one warp each
_TILES = tl.constexpr(64)  # tile entries written at a time
# Left alone, ptxas halves the registers to fit two such programs on an SM, and spills.
_OPTIONS: dict[str, object] = {"num_warps": 32, "maxnreg": 64}


@dataclass(frozen=True)
class RoutingPlan:
    """Device tensors, all int32, that `build_plan` overwrites.

    sorted_slots [cap]: row r of the permuted order holds slot sorted_slots[r]; rows that hold none are not written.
    expert_offsets [E+1]: expert e has expert_offsets[e+1] - expert_offsets[e] slots, in rows from expert_offsets[e] on;
    with `row_align` > 1 its rows start elsewhere (`build_plan_kernel`). slot_rows [T·K], only with `row_align` > 1: the
    row of each slot, −1 where no expert serves it. tiles [cap_tiles, 4]: (expert, first_row, num_rows, 0), experts
    ascending; num_rows == 0 is a hole; the first `max_tiles` entries for the current number of slots are written.
    skipped [1]: ids that name no expert at all.
    """

    sorted_slots: torch.Tensor
    expert_offsets: torch.Tensor
    tiles: torch.Tensor
    skipped: torch.Tensor
    slot_rows: torch.Tensor | None = None
    row_align: int = 1


def max_rows(num_slots: int, num_experts: int, row_align: int) -> int:
    """Rows of the permuted order where every expert's first is a multiple of `row_align`."""
    return num_slots if row_align == 1 else row_align * max_tiles(num_slots, num_experts, row_align)


def max_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """Length of the tile list of `num_slots` slots, whatever their routing: the grid of the expert GEMMs."""
    return num_slots // block_m + min(num_experts, num_slots)


def allocate_plan(
    max_tokens: int, top_k: int, num_experts: int, block_m: int, device: torch.device | str, *, row_align: int = 1
) -> RoutingPlan:
    """A plan for up to `max_tokens`·`top_k` slots and tiles of `block_m` rows or more; contents undefined.

    `row_align`: every expert's rows start at a multiple of it, as TMA wants of what is fetched by rows.
    """
    _check_sizes(max_tokens * top_k, top_k, num_experts, block_m)
    num_slots = max_tokens * top_k

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return RoutingPlan(
        sorted_slots=new(max_rows(num_slots, num_experts, row_align)),
        expert_offsets=new(num_experts + 1),
        tiles=new(max_tiles(num_slots, num_experts, block_m), 4),
        skipped=new(1),
        slot_rows=new(num_slots) if row_align > 1 else None,
        row_align=row_align,
    )


def build_plan(
    topk_ids: torch.Tensor,
    plan: RoutingPlan,
    *,
    num_experts: int,
    block_m: int,
    expert_offset: int = 0,
    num_global_experts: int | None = None,
) -> None:
    """Fill `plan` from `topk_ids` [T, K], int32 or int64, contiguous, in one launch without host sync.

    This rank owns the experts [expert_offset, expert_offset + num_experts) of `num_global_experts` (None: it
    owns all there are). Ids are global; the plan's experts are local, id - expert_offset. Experts of other
    ranks and -1 are left out silently; every other id is left out and counted in `plan.skipped`. Equal ids
    give an equal plan, bit for bit. Raises `ValueError`/`TypeError` before the launch for arguments outside
    these limits or a plan too small.
    """
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids has dtype {topk_ids.dtype}; allowed: int32, int64")
    if topk_ids.dim() != 2 or not topk_ids.is_contiguous():
        raise ValueError(
            f"topk_ids has shape {tuple(topk_ids.shape)} and strides {topk_ids.stride()}; it must be [T, K], contiguous"
        )
    num_slots, top_k = topk_ids.numel(), topk_ids.shape[1]
    _check_sizes(num_slots, top_k, num_experts, block_m)
    if num_global_experts is None:
        num_global_experts = expert_offset + num_experts
    if not 0 <= expert_offset <= num_global_experts - num_experts:
        raise ValueError(
            f"expert_offset={expert_offset} with num_experts={num_experts} does not lie within "
            f"num_global_experts={num_global_experts}"
        )
    num_tiles = max_tiles(num_slots, num_experts, block_m)
    if plan.sorted_slots.numel() < max_rows(num_slots, num_experts, plan.row_align) or plan.tiles.shape[0] < num_tiles:
        raise ValueError(
            f"plan holds {plan.sorted_slots.numel()} slots and {plan.tiles.shape[0]} tiles; topk_ids of "
            f"shape {tuple(topk_ids.shape)} with block_m={block_m} needs {num_slots} and {num_tiles}"
        )
    if plan.expert_offsets.numel() != num_experts + 1:
        raise ValueError(f"plan is for {plan.expert_offsets.numel() - 1} experts, num_experts is {num_experts}")
    if plan.tiles.device != topk_ids.device:
        raise ValueError(f"plan is on {plan.tiles.device}, topk_ids on {topk_ids.device}")
    with torch.cuda.device_of(topk_ids):
        build_plan_kernel[(triton.cdiv(num_experts, _EXPERTS.value) + 1,)](
            topk_ids,
            plan.sorted_slots,
            plan.expert_offsets,
            plan.tiles,
            plan.skipped,
            plan.skipped if plan.slot_rows is None else plan.slot_rows,
            num_slots,
            num_tiles,
            num_experts,
            expert_offset,
            num_global_experts,
            BLOCK_M=block_m,
            ROW_ALIGN=plan.row_align,
            **_OPTIONS,
        )


def _check_sizes(num_slots: int, top_k: int, num_experts: int, block_m: int) -> None:
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"top_k={top_k}; allowed: 1 … {MAX_TOP_K}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts={num_experts}; allowed: 1 … {MAX_EXPERTS}")
    if not 0 <= num_slots <= MAX_SLOTS:
        raise ValueError(f"tokens · top_k = {num_slots}; allowed: 0 … {MAX_SLOTS}")
    if block_m < 1:
        raise ValueError(f"block_m={block_m}; allowed: 1 or more")


@triton.jit
def _load_ids(ids_ptr, num_slots, segment, step):
    """(ids, slots) [SEGMENTS, LANES]: step `step` of every segment; beyond the end of the list, -1."""
    slots = tl.arange(0, _SEGMENTS)[:, None] * segment + (step * _LANES + tl.arange(0, _LANES)[None, :])
    return tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1), slots


@triton.jit
def _relative(ids, expert_offset, first, num_experts):
    """Expert of each id counted from `first`, int32: 0, 1, 2 are mine, negatives come before, 3 is any other.

    Compares before it subtracts, so that no id can wrap.
    """
    last = tl.minimum(first + _EXPERTS, num_experts)
    mine_or_before = (ids >= expert_offset) & (ids < expert_offset + last)
    return tl.where(mine_or_before, ids - (expert_offset + first), _EXPERTS).to(tl.int32)


@triton.jit
def _tile_start(rows_before, expert, BLOCK_M: tl.constexpr):
    return rows_before // BLOCK_M + tl.minimum(expert, rows_before)


@triton.jit
def _first_row(rows_before, expert, ROW_ALIGN: tl.constexpr):
    if ROW_ALIGN == 1:
        return rows_before
    else:
        return _tile_start(rows_before, expert, ROW_ALIGN) * ROW_ALIGN


@triton.jit
def _write_tiles(tiles_ptr, expert, first_row, end_row, start, end, BLOCK_M: tl.constexpr):
    """Entries start … end-1: the tiles of rows first_row … end_row-1, then holes."""
    field = tl.arange(0, 4)[None, :]
    for block in range(start, end, _TILES):
        tile = block + tl.arange(0, _TILES)[:, None]
        row = tl.minimum(first_row + (tile - start) * BLOCK_M, end_row)
        num_rows = tl.minimum(end_row - row, BLOCK_M)
        value = tl.where(field == 0, expert, tl.where(field == 1, row, tl.where(field == 2, num_rows, 0)))
        tl.store(tiles_ptr + tile * 4 + field, value, mask=tile < end)


@triton.jit
def _count_skipped(
    ids_ptr, skipped_ptr, slot_rows_ptr, num_slots, segment, num_experts, expert_offset, num_global,
    ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """Counts ids that name no expert at all, and gives the slots that none of mine serves row −1."""
    count = tl.zeros([_SEGMENTS, _LANES], tl.int32)
    for step in tl.range(segment // _LANES, loop_unroll_factor=4):
        ids, slots = _load_ids(ids_ptr, num_slots, segment, step)
        count += ((ids < -1) | (ids >= num_global)).to(tl.int32)
        if ROW_ALIGN > 1:
            served = (ids >= expert_offset) & (ids < expert_offset + num_experts)
            tl.store(slot_rows_ptr + slots, tl.full(slots.shape, -1, tl.int32), mask=(slots < num_slots) & ~served)
    tl.store(skipped_ptr, tl.sum(tl.sum(count, axis=1), axis=0))


@triton.jit(
    do_not_specialize=["num_slots", "num_tiles"],
    do_not_specialize_on_alignment=["ids_ptr"],
    launch_metadata=routing_work,
)
def build_plan_kernel(
    ids_ptr,
    sorted_slots_ptr,
    expert_offsets_ptr,
    tiles_ptr,
    skipped_ptr,
    slot_rows_ptr,
    num_slots,
    num_tiles,
    num_experts,
    expert_offset,
    num_global,
    BLOCK_M: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
):
    """Contract: `build_plan`. Grid: ceil(E / 3) programs of three experts, and one that counts skipped ids.

    Schedule. Every program reads all ids (they stay in L2) and talks to no other. The ids are cut into 32
    segments, one per warp, read 32 at a time. Pass 1 counts, per segment, the ids of my three experts and of
    all experts before them, in four bytes of one word per lane. An exclusive sum over segments turns the
    counts into the first row of each (segment, expert). Pass 2 reads again and writes each slot at that row
    plus its rank among the equal ids before it in its segment: slots ascend within an expert because
    segments, steps and lanes do. The cost does not depend on how ids are distributed, and hardly on how many
    experts there are.

    Tile list. With b rows before expert e and c of its own, its entries are start(e) … start(e+1)-1, where
    start(e) = floor(b / M) + min(e, b), which e's program knows alone. They suffice, i.e. ceil(c / M) <=
    start(e+1) - start(e): for c = 0 both terms grow or stay as b does; for c > 0 the first term grows by at
    least floor(c / M) >= ceil(c / M) - 1, and the second by at least 1, since b + c >= b + 1 and e + 1 both
    exceed min(e, b). start is monotone with start(0) = 0 and start(E) <= floor(N / M) + min(E, N) =
    num_tiles for N slots; the last expert fills up to num_tiles. So every entry is written exactly once.

    Aligned rows (ROW_ALIGN > 1) are the same scheme once more: expert e's rows start at ROW_ALIGN · start(e) for tiles
    of ROW_ALIGN rows, which leaves room for its c slots without knowing any other expert's count.
    """
    segment = tl.cdiv(num_slots, _SEGMENTS * _LANES) * _LANES
    num_steps = segment // _LANES
    program = tl.program_id(0)
    if program == tl.num_programs(0) - 1:
        _count_skipped(
            ids_ptr, skipped_ptr, slot_rows_ptr, num_slots, segment, num_experts, expert_offset, num_global, ROW_ALIGN
        )
    else:
        first = program * _EXPERTS

        # Counts of (mine 0, mine 2) and (mine 1, before mine) per segment, as two 32-bit halves.
        even = tl.zeros([_SEGMENTS], tl.int64)
        odd = tl.zeros([_SEGMENTS], tl.int64)
        for chunk in range(0, num_steps, 255):  # a byte counts to 255
            counts = tl.zeros([_SEGMENTS, _LANES], tl.int32)
            for step in tl.range(chunk, tl.minimum(chunk + 255, num_steps), loop_unroll_factor=4):
                ids, _ = _load_ids(ids_ptr, num_slots, segment, step)
                mine = _relative(ids, expert_offset, first, num_experts)
                field = tl.where(mine >= 0, mine, 3)
                counts += (mine < _EXPERTS).to(tl.int32) << (field * 8)
            # 255 · LANES < 2^16: two bytes at a time sum in halves of a word.
            low = tl.sum(counts & 0x00FF00FF, axis=1)
            high = tl.sum((counts >> 8) & 0x00FF00FF, axis=1)
            even += (low & 0xFFFF).to(tl.int64) + ((low >> 16).to(tl.int64) << 32)
            odd += (high & 0xFFFF).to(tl.int64) + ((high >> 16).to(tl.int64) << 32)

        even_total = tl.sum(even, axis=0)
        odd_total = tl.sum(odd, axis=0)
        begin_0 = (odd_total >> 32).to(tl.int32)
        begin_1 = begin_0 + even_total.to(tl.int32)
        begin_2 = begin_1 + odd_total.to(tl.int32)
        end = begin_2 + (even_total >> 32).to(tl.int32)
        even = tl.cumsum(even, axis=0) - even
        odd = tl.cumsum(odd, axis=0) - odd
        row_0 = _first_row(begin_0, first, ROW_ALIGN)
        row_1 = _first_row(begin_1, first + 1, ROW_ALIGN)
        row_2 = _first_row(begin_2, first + 2, ROW_ALIGN)
        next_0 = row_0 + even.to(tl.int32)
        next_1 = row_1 + odd.to(tl.int32)
        next_2 = row_2 + (even >> 32).to(tl.int32)

        ids, slots = _load_ids(ids_ptr, num_slots, segment, 0)
        for step in range(num_steps):
            # Ask for the next ids before the stores: the compiler can't move a load above them.
            next_ids, next_slots = _load_ids(ids_ptr, num_slots, segment, step + 1)
            mine = _relative(ids, expert_offset, first, num_experts)
            hit = (mine >= 0) & (mine < _EXPERTS)
            shift = tl.where(hit, mine, 0) * 8
            one = hit.to(tl.int32) << shift
            rank = ((tl.cumsum(one, axis=1) >> shift) & 0xFF) - 1  # a byte counts to LANES
            row = tl.where(mine == 0, next_0[:, None], tl.where(mine == 1, next_1[:, None], next_2[:, None]))
            # Scattered addresses have no contiguous axis by which the compiler could choose a 2-D layout; in
            # 1-D there is only this one, so that nothing moves between threads.
            flat: tl.constexpr = [_SEGMENTS * _LANES]
            target = sorted_slots_ptr + tl.reshape(row + rank, flat)
            tl.store(target, tl.reshape(slots, flat), mask=tl.reshape(hit, flat))
            if ROW_ALIGN > 1:
                tl.store(slot_rows_ptr + slots, row + rank, mask=hit)
            taken = tl.sum(one, axis=1)
            next_0 += taken & 0xFF
            next_1 += (taken >> 8) & 0xFF
            next_2 += (taken >> 16) & 0xFF
            ids, slots = next_ids, next_slots

        for i in tl.static_range(_EXPERTS):
            expert = first + i
            if expert < num_experts:
                begin = begin_0 if i == 0 else begin_1 if i == 1 else begin_2
                stop = begin_1 if i == 0 else begin_2 if i == 1 else end
                tl.store(expert_offsets_ptr + expert, begin)
                last_tile = _tile_start(stop, expert + 1, BLOCK_M)
                if expert == num_experts - 1:
                    tl.store(expert_offsets_ptr + num_experts, stop)
                    last_tile = num_tiles
                row = row_0 if i == 0 else row_1 if i == 1 else row_2
                first_tile = _tile_start(begin, expert, BLOCK_M)
                _write_tiles(tiles_ptr, expert, row, row + (stop - begin), first_tile, last_tile, BLOCK_M)


def compile_jobs(arch: int) -> list[CompileJob]:
    """Both id types, dense and aligned rows; the kernel is the same on every architecture."""
    outputs = ("sorted_slots_ptr", "expert_offsets_ptr", "tiles_ptr", "skipped_ptr", "slot_rows_ptr")
    sizes = ("num_slots", "num_tiles", "num_experts", "expert_offset", "num_global")
    return [
        CompileJob(
            name=f"routing/int{bits}" + ("/aligned" if row_align > 1 else ""),
            kernel="routing",
            recipe=f"int{bits} ids",
            fn=build_plan_kernel,
            signature={
                "ids_ptr": f"*i{bits}",
                **dict.fromkeys(outputs, "*i32"),
                **dict.fromkeys(sizes, "i32"),
            },
            constexprs={"BLOCK_M": 64, "ROW_ALIGN": row_align},
            options=_OPTIONS,
            divisible_by_16=frozenset(outputs),
        )
        for bits, row_align in ((32, 1), (64, 1), (64, 8))
    ]
