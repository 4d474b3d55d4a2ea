"""The tokens quantized and laid out for GEMM 1 on SM90, and the list of its work: the launch behind the plan."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.numerics import f32_to_e4m3
from megamoe.kernels.pdl import gdc_launch_dependents, gdc_wait
from megamoe.kernels.routing import RoutingPlan

FP8_FLOOR = 1e-10
_TILES = tl.constexpr(256)  # tile entries looked at together


class SharedRows(NamedTuple):
    """Where the shared expert's rows go: one per token, in order, from `first_row` on, in tiles of `block_m` that name
    `expert`. `targets` int32 [capacity]: where GEMM 2 puts each row among the K + 1 rows per token of the combine."""

    targets: torch.Tensor
    first_row: int
    expert: int
    block_m: int


@triton.jit
def shared_tiles(packed, num_tokens, first_row, expert, block_m):
    """Puts the tiles of an expert that has every token at the front of `packed`; their number.

    At the front, because they are full: programs take items in turn, and those of the last round should be short.
    """
    number = tl.cdiv(num_tokens, block_m)
    field = tl.arange(0, 4)[None, :]
    for start in range(0, number, _TILES):
        tile = start + tl.arange(0, _TILES)[:, None]
        before = tile * block_m
        rows = tl.minimum(num_tokens - before, block_m)
        value = tl.where(field == 0, expert, tl.where(field == 1, first_row + before, tl.where(field == 2, rows, 0)))
        tl.store(packed + tile * 4 + field, value, mask=tile < number)
    return number


@triton.jit
def pack_tiles(tiles, packed, count, num_tiles, begin=0):
    """The tiles that hold rows, without the holes between them, in the same order, behind `begin` others; `count` says
    how many there are then.

    Persistent programs take every n-th item: holes would give some of them a fifth less to do than others.
    """
    field = tl.arange(0, 4)[None, :]
    total = begin
    for start in range(0, num_tiles, _TILES):
        tile = start + tl.arange(0, _TILES)
        live = tl.load(tiles + tile * 4 + 2, mask=tile < num_tiles, other=0) > 0
        target = total + tl.cumsum(live.to(tl.int32), axis=0) - 1
        entry = tl.load(tiles + tile[:, None] * 4 + field, mask=live[:, None], other=0)
        tl.store(packed + target[:, None] * 4 + field, entry, mask=live[:, None])
        total += tl.sum(live.to(tl.int32), axis=0)
    tl.store(count, total)


@triton.jit
def slot_weight(topk_weights, topk_ids, expert_scales, slot, factor, HAS_SCALES: tl.constexpr):
    """The top-k weight times expert_scales and the factor, one product each."""
    weight = tl.load(topk_weights + slot)
    if HAS_SCALES:
        weight = weight * tl.load(expert_scales + tl.load(topk_ids + slot))
    return weight * factor


@triton.jit
def _store_row(
    q, scale, row, codes, block_scale, group, position, capacity, H: tl.constexpr, PER_TOKEN: tl.constexpr
):  # fmt: skip
    """A token's blocks `group` of 128 columns and their scales into one row."""
    target = q + row.to(tl.int64) * H + group[:, None] * 128 + position[None, :]
    tl.store(target, codes, mask=(group * 128 < H)[:, None])
    if PER_TOKEN:
        tl.store(scale + row + tl.zeros_like(group), block_scale, mask=group == 0)
    else:
        tl.store(scale + group * capacity + row, block_scale, mask=group * 128 < H)


@triton.jit(
    do_not_specialize=[
        "x_stride", "num_tokens", "num_tiles", "capacity", "shared_row", "shared_expert", "block_m"
    ]
)  # fmt: skip
def scatter_kernel(
    x, topk_ids, topk_weights, expert_scales, slot_rows, tiles, q, scale, row_weight, packed_tiles, tile_count,
    row_targets, x_stride, num_tokens, num_tiles, capacity, shared_row, shared_expert, block_m, amax_floor, factor,
    H: tl.constexpr, TOP_K: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    K_ORDER: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, g): token t, GROUPS blocks of 128 columns (PER_TOKEN: all of them), quantized once and stored in the
    row of each of its slots. Program (T, 0) packs the tile list.

    q E4M3 [capacity, H], K_ORDER: every block of 128 columns in `weights.k_order`; scale fp32 [capacity] (PER_TOKEN) or
    [H/128, capacity]; row_weight fp32 [capacity], each slot's `slot_weight`. Arithmetic as `fp8_token` and
    `fp8_block128` of the pre-dispatch. Safe: a row belongs to one slot, so programs write disjoint ranges and read only
    inputs.

    SHARED: token t is also in row shared_row + t, with weight 1 (no factor meets it), and the tiles of these rows, of
    expert `shared_expert`, come first. row_targets int32 [capacity] is t·(TOP_K + 1) + k for a slot's row and
    t·(TOP_K + 1) + TOP_K for a shared one. Safe: the plan's rows end before shared_row.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.program_id(0) == num_tokens:
        if tl.program_id(1) == 0:
            if SHARED:
                begin = shared_tiles(packed_tiles, num_tokens, shared_row, shared_expert, block_m)
                pack_tiles(tiles, packed_tiles, tile_count, num_tiles, begin)
            else:
                pack_tiles(tiles, packed_tiles, tile_count, num_tiles)
    else:
        token = tl.program_id(0).to(tl.int64)
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        position = tl.arange(0, 128)
        column = position
        if K_ORDER:
            column = position // 4 % 4 * 32 + position // 32 * 8 + position // 16 % 2 * 4 + position % 4
        live = (group * 128 < H)[:, None]
        source = x + token * x_stride + group[:, None] * 128 + column[None, :]
        values = tl.load(source, mask=live, other=0.0).to(tl.float32)
        amax = tl.max(tl.abs(values), axis=1)
        if PER_TOKEN:
            amax = tl.zeros_like(amax) + tl.max(amax, axis=0)
        block_scale = tl.div_rn(tl.maximum(amax, amax_floor), 448.0)
        codes = f32_to_e4m3(values * tl.div_rn(1.0, block_scale)[:, None])
        for k in tl.static_range(TOP_K):
            row = tl.load(slot_rows + token * TOP_K + k)
            if row >= 0:
                _store_row(q, scale, row, codes, block_scale, group, position, capacity, H, PER_TOKEN)
                if tl.program_id(1) == 0:
                    weight = slot_weight(topk_weights, topk_ids, expert_scales, token * TOP_K + k, factor, HAS_SCALES)
                    tl.store(row_weight + row, weight)
                    if SHARED:
                        tl.store(row_targets + row, (token * (TOP_K + 1) + k).to(tl.int32))
        if SHARED:
            row = shared_row + tl.program_id(0)
            _store_row(q, scale, row, codes, block_scale, group, position, capacity, H, PER_TOKEN)
            if tl.program_id(1) == 0:
                tl.store(row_weight + row, 1.0)
                tl.store(row_targets + row, (token * (TOP_K + 1) + TOP_K).to(tl.int32))


def scatter(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    plan: RoutingPlan,
    *,
    num_tiles: int,
    q: torch.Tensor,
    scale: torch.Tensor,
    row_weight: torch.Tensor,
    packed_tiles: torch.Tensor,
    tile_count: torch.Tensor,
    k_order: bool,
    expert_scales: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    shared: SharedRows | None = None,
    pdl: bool = False,
) -> None:
    """Contract: `scatter_kernel`, for x BF16 [T, H] (rows may be strided) and `plan` of its T·K slots, whose rows are
    aligned. `scale` of one axis means one scale per token; `k_order` is K_ORDER, `shared` SHARED, `pdl` PDL, on a GPU
    only. One launch; none for no tokens."""
    (tokens, hidden), top_k = x.shape, topk_ids.shape[1]
    if tokens == 0:
        return
    blocks, per_token = hidden // 128, scale.dim() == 1
    groups = triton.next_power_of_2(blocks) if per_token else min(16, triton.next_power_of_2(blocks))
    targets, *shared_rows = shared or (plan.slot_rows, 0, 0, 1)  # without it nothing reads them
    with torch.cuda.device_of(x):
        scatter_kernel[tokens + 1, triton.cdiv(blocks, groups)](
            x, topk_ids, topk_weights, row_weight if expert_scales is None else expert_scales,
            plan.slot_rows, plan.tiles, q, scale, row_weight, packed_tiles, tile_count, targets,
            x.stride(0), tokens, num_tiles, q.shape[0], *shared_rows, FP8_FLOOR, routed_scaling_factor,
            H=hidden, TOP_K=top_k, PER_TOKEN=per_token, HAS_SCALES=expert_scales is not None, GROUPS=groups,
            K_ORDER=k_order, SHARED=shared is not None, PDL=pdl, launch_pdl=pdl,
            num_warps=8 if groups > 16 else 4, enable_fp_fusion=False,
        )  # fmt: skip


def compile_jobs(arch: int) -> list[CompileJob]:
    if arch != 90:
        return []
    signature = {
        "x": "*bf16", "topk_ids": "*i32", "topk_weights": "*fp32", "expert_scales": "*fp32", "slot_rows": "*i32",
        "tiles": "*i32", "q": "*fp8e4nv", "scale": "*fp32", "row_weight": "*fp32", "packed_tiles": "*i32",
        "tile_count": "*i32", "row_targets": "*i32", "x_stride": "i32", "num_tokens": "i32", "num_tiles": "i32",
        "capacity": "i32", "shared_row": "i32", "shared_expert": "i32", "block_m": "i32",
        "amax_floor": "fp32", "factor": "fp32",
    }  # fmt: skip
    recipes = (("fp8xfp4", "block128"), ("fp8xfp4", "token"), ("fp8xfp8", "block128"))
    return [
        CompileJob(
            name=f"hopper scatter/{'e4m3' if mma_type == 'fp8xfp8' else scale}{'/shared' if shared else ''}",
            kernel="hopper_scatter",
            recipe=f"{mma_type}/{scale}/deep_gemm_sm90",
            fn=scatter_kernel,
            signature=signature,
            constexprs={
                "H": 4096, "TOP_K": 6, "PER_TOKEN": scale == "token", "HAS_SCALES": False,
                "GROUPS": 32 if scale == "token" else 16, "K_ORDER": mma_type == "fp8xfp4", "SHARED": shared,
                "PDL": True,
            },
            options={"num_warps": 8 if scale == "token" else 4, "enable_fp_fusion": False, "launch_pdl": True},
            divisible_by_16=frozenset(arg for arg, kind in signature.items() if kind.startswith("*")),
        )
        for mma_type, scale in recipes
        for shared in ((False, True) if mma_type == "fp8xfp4" else (False,))
    ]  # fmt: skip
