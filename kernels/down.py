"""Expert GEMM 2: down projection of every slot, routed and shared in one launch, one BF16 row per slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.config import LayerConfig, choose_config
from megamoe.kernels.mainloop import expert_tile
from megamoe.kernels.operands import (
    default_specs,
    expert_constexprs,
    launch_options,
    operand_constexprs,
    pointer_types,
    scale_bytes,
    scale_stride,
    weight_bytes,
)
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights
from megamoe.workspace import Workspace


@triton.jit
def _store_rows(acc, out, out_rows, live, n0, H: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = n0 + tl.arange(0, BLOCK_N)
    ptr = out + out_rows[:, None] * H + cols[None, :]
    tl.store(ptr, acc.to(tl.bfloat16), mask=live[:, None] & (cols < H)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def down_kernel(
    act, act_sf, shared_act, shared_act_sf, sorted_slots, tiles,
    l2_alphas, w2, w2_sf, shared_w2, shared_w2_sf, out,
    num_tokens,
    H: tl.constexpr, I: tl.constexpr, SHARED_I: tl.constexpr, TOP_K: tl.constexpr,
    ACT_SF_STRIDE: tl.constexpr, SHARED_ACT_SF_STRIDE: tl.constexpr,
    W_STRIDE: tl.constexpr, W_SF_STRIDE: tl.constexpr,
    MMA: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SHARED_FORMAT: tl.constexpr,
    SCALE_FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ALPHAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per (tile of rows, BLOCK_N output columns); the tile order is `gate_up_kernel`'s.

    A tile reads consecutive rows of the permuted intermediate and scatters its rows to `out` [T, K (+1), H]: the row of
    slot (t, k) goes to (t, k), the shared experts' row of token t to (t, K).

    Safe: every slot belongs to one row of one tile, so programs write disjoint ranges, and they read nothing another
    program of this launch writes.
    """
    BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    SLOTS: tl.constexpr = TOP_K + (1 if SHARED_I > 0 else 0)
    pid = tl.program_id(0)
    n0 = pid % BLOCKS * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_M)
    tile_index = pid // BLOCKS
    shared_tiles = tl.cdiv(num_tokens, BLOCK_M) if SHARED_I > 0 else 0
    if tile_index < shared_tiles:
        if SHARED_I > 0:
            first = tile_index * BLOCK_M
            live = first + lane < num_tokens
            rows = (first + lane).to(tl.int64)
            acc = expert_tile(
                shared_act, rows, live, shared_act_sf, SHARED_ACT_SF_STRIDE,
                shared_w2, n0, H, shared_w2_sf, n // 128,
                SHARED_I, MMA, A_FORMAT, SHARED_FORMAT, SCALE_FORMAT, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            _store_rows(acc, out, rows * SLOTS + TOP_K, live, n0, H, BLOCK_N)
    else:
        tile = tiles + (tile_index - shared_tiles) * 4
        num_rows = tl.load(tile + 2)
        if num_rows > 0:
            expert = tl.load(tile).to(tl.int64)
            first = tl.load(tile + 1)
            live = lane < num_rows
            rows = (first + lane).to(tl.int64)
            slots = tl.load(sorted_slots + rows, mask=live, other=0).to(tl.int64)
            acc = expert_tile(
                act, rows, live, act_sf, ACT_SF_STRIDE,
                w2 + expert * W_STRIDE, n0, H, w2_sf + expert * W_SF_STRIDE, n // 128,
                I, MMA, A_FORMAT, B_FORMAT, SCALE_FORMAT, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if HAS_ALPHAS:
                acc = acc * tl.load(l2_alphas + expert)
            _store_rows(acc, out, slots // TOP_K * SLOTS + slots % TOP_K, live, n0, H, BLOCK_N)


def down(
    ws: Workspace, weights: MoEWeights, spec: LayerSpec, config: LayerConfig, num_tokens: int, num_tiles: int
) -> None:
    """Fill `ws.rows` from `ws.act_*` (and `ws.shared_act_*`); rows of skipped slots stay as they are.

    `num_tiles` is the length of the plan's tile list for these tokens. One launch; none when there is nothing to do.
    """
    tile = config.down
    tiles = num_tiles + (triton.cdiv(num_tokens, tile.block_m) if spec.num_shared_experts else 0)
    if tiles == 0 or num_tokens == 0:
        return
    shared = weights.shared or weights.routed  # never read without shared experts
    with torch.cuda.device_of(ws.rows):
        down_kernel[(tiles * triton.cdiv(spec.hidden, tile.block_n),)](
            ws.act_q, ws.act_sf,
            ws.act_q if ws.shared_act_q is None else ws.shared_act_q,
            ws.act_sf if ws.shared_act_sf is None else ws.shared_act_sf,
            ws.plan.sorted_slots, ws.plan.tiles,
            ws.topk_weights if weights.l2_alphas is None else weights.l2_alphas,
            weight_bytes(weights.routed.w2), scale_bytes(weights.routed.w2_scale),
            weight_bytes(shared.w2), scale_bytes(shared.w2_scale),
            ws.rows, num_tokens,
            **_constexprs(spec, config),
            HAS_ALPHAS=weights.l2_alphas is not None,
            **launch_options(tile),
        )  # fmt: skip


def _constexprs(spec: LayerSpec, config: LayerConfig) -> dict[str, object]:
    t = spec.traits
    return dict(
        operand_constexprs(spec, config.down),
        ACT_SF_STRIDE=scale_stride(spec.intermediate, t.mid_scale_format, t.mid_group),
        SHARED_ACT_SF_STRIDE=scale_stride(spec.shared_intermediate, t.mid_scale_format, t.mid_group),
        **expert_constexprs(spec.hidden, spec.intermediate, spec),
    )


def compile_jobs(arch: int) -> list[CompileJob]:
    """The launches that the default layers make on `arch`, one per recipe and tile the heuristic picks."""
    jobs = {}
    for spec in default_specs():
        pointer = pointer_types(spec)
        for num_tokens in (1, 8192):
            config = choose_config(spec, arch, num_tokens)
            tile = config.down
            name = f"down/{spec.recipe}/{tile.block_m}x{tile.block_n}x{tile.block_k}"
            signature = {
                "act": pointer["act"], "act_sf": pointer["sf"],
                "shared_act": pointer["act"], "shared_act_sf": pointer["sf"],
                "sorted_slots": "*i32", "tiles": "*i32", "l2_alphas": "*fp32",
                "w2": pointer["weight"], "w2_sf": pointer["sf"],
                "shared_w2": pointer["shared"], "shared_w2_sf": pointer["sf"],
                "out": "*bf16", "num_tokens": "i32",
            }  # fmt: skip
            jobs[name] = CompileJob(
                name=name,
                kernel="down",
                recipe=str(spec.recipe),
                fn=down_kernel,
                signature=signature,
                constexprs=_constexprs(spec, config) | {"HAS_ALPHAS": spec.traits.token_scale},
                options=launch_options(tile),
                divisible_by_16=frozenset(arg for arg, kind in signature.items() if kind.startswith("*")),
            )
    return list(jobs.values())
