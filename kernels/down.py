"""Expert GEMM 2: down projection of every slot, routed and shared in one launch, one BF16 row per slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.config import LayerConfig, choose_config
from megamoe.kernels.mainloop import expert_tile, slot_tile
from megamoe.kernels.operands import (
    default_specs,
    example_strides,
    expert_constexprs,
    launch_options,
    operand_constexprs,
    or_absent,
    pointer_types,
    scale_bytes,
    scale_stride,
    weight_bytes,
)
from megamoe.profile import down_work
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights
from megamoe.workspace import Workspace


@triton.jit
def _store_rows(acc, out, out_rows, live, n0, H: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = n0 + tl.arange(0, BLOCK_N)
    ptr = out + out_rows[:, None] * H + cols[None, :]
    tl.store(ptr, acc.to(tl.bfloat16), mask=live[:, None] & (cols < H)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_experts"], launch_metadata=down_work)
def down_kernel(
    act, act_sf, shared_act, shared_act_sf, topk_weights, sorted_slots, tiles,
    l2_alphas, w2_bias, w2, w2_sf, shared_w2, shared_w2_sf, out,
    num_tokens, num_experts,
    H: tl.constexpr, I: tl.constexpr, SHARED_I: tl.constexpr, SHARED_SLOTS: tl.constexpr, TOP_K: tl.constexpr,
    ACT_SF_STRIDE: tl.constexpr, SHARED_ACT_SF_STRIDE: tl.constexpr,
    W_STRIDE: tl.constexpr, W_SF_STRIDE: tl.constexpr, SHARED_STRIDE: tl.constexpr, SHARED_SF_STRIDE: tl.constexpr,
    TRTLLM: tl.constexpr, MMA: tl.constexpr,
    A_FORMAT: tl.constexpr, A_SCALE: tl.constexpr, A_GROUP: tl.constexpr,
    B_FORMAT: tl.constexpr, B_SCALE: tl.constexpr, SHARED_FORMAT: tl.constexpr, SHARED_SCALE: tl.constexpr,
    B_GROUP: tl.constexpr, HAS_ALPHAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per (tile of rows, BLOCK_N output columns); the tile order is `gate_up_kernel`'s.

    A tile reads consecutive rows of the permuted intermediate and scatters its rows to `out` [T, K (+1), H]: the row of
    slot (t, k) goes to (t, k), a dense shared MLP's row of token t to (t, K).

    DeepGEMM's rows carry the top-k weight already, so its bias is multiplied by it: acc · l2_alpha + w·bias. trtllm-gen
    weighs in the combine: (acc + bias) · l2_alpha.

    Safe: every slot belongs to one row of one tile, so programs write disjoint ranges, and they read nothing another
    program of this launch writes.
    """
    BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    SLOTS: tl.constexpr = TOP_K + (1 if SHARED_I > 0 else 0)
    pid = tl.program_id(0)
    n0 = pid % BLOCKS * BLOCK_N
    tile_rows = tl.arange(0, BLOCK_N)
    n = n0 + tile_rows
    b_origin = n0.to(tl.int64)
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
                shared_w2, b_origin, tile_rows, n0, H, shared_w2_sf, n // 128,
                SHARED_I, MMA, A_FORMAT, A_SCALE, A_GROUP, SHARED_FORMAT, SHARED_SCALE, B_GROUP,
                BLOCK_M, BLOCK_N, BLOCK_K,
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
            acc = slot_tile(
                expert, num_experts, act, rows, live, act_sf, ACT_SF_STRIDE,
                w2, w2_sf, shared_w2, shared_w2_sf,
                b_origin, tile_rows, n0, H, n // 128,
                W_STRIDE, W_SF_STRIDE, SHARED_STRIDE, SHARED_SF_STRIDE, SHARED_SLOTS, I, MMA,
                A_FORMAT, A_SCALE, A_GROUP, B_FORMAT, B_SCALE, SHARED_FORMAT, SHARED_SCALE, B_GROUP,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if TRTLLM and HAS_BIAS:
                acc = acc + tl.load(w2_bias + expert * H + n, mask=n < H, other=0.0)[None, :]
            if HAS_ALPHAS:
                acc = acc * tl.load(l2_alphas + expert)
            if HAS_BIAS and not TRTLLM:
                weight = tl.load(topk_weights + slots, mask=live, other=0.0)
                acc = acc + weight[:, None] * tl.load(w2_bias + expert * H + n, mask=n < H, other=0.0)[None, :]
            _store_rows(acc, out, slots // TOP_K * SLOTS + slots % TOP_K, live, n0, H, BLOCK_N)


def down(
    ws: Workspace, weights: MoEWeights, spec: LayerSpec, config: LayerConfig, num_tokens: int, num_tiles: int
) -> None:
    """Fill `ws.rows` from `ws.act_*` (and `ws.shared_act_*`); rows of skipped slots stay as they are.

    `num_tiles` is the length of the plan's tile list for these tokens. One launch; none when there is nothing to do.
    """
    tile = config.down
    tiles = num_tiles + (triton.cdiv(num_tokens, tile.block_m) if spec.shared_intermediate else 0)
    if tiles == 0 or num_tokens == 0:
        return
    routed, shared = weights.routed, weights.shared or weights.routed  # never read without shared experts
    absent = ws.topk_weights
    with torch.cuda.device_of(ws.rows):
        down_kernel[(tiles * triton.cdiv(spec.hidden, tile.block_n),)](
            ws.act_q, or_absent(ws.act_sf, ws.act_q),
            or_absent(ws.shared_act_q, ws.act_q),
            or_absent(ws.shared_act_sf, or_absent(ws.act_sf, ws.act_q)),
            ws.topk_weights, ws.plan.sorted_slots, ws.plan.tiles,
            or_absent(weights.l2_alphas, absent), or_absent(weights.w2_bias, absent),
            weight_bytes(routed.w2), scale_bytes(routed.w2_scale, routed.w2),
            weight_bytes(shared.w2), scale_bytes(shared.w2_scale, shared.w2),
            ws.rows, num_tokens, spec.num_local_experts,
            **_constexprs(spec, config),
            **expert_constexprs("W_", routed.w2, routed.w2_scale),
            **expert_constexprs("SHARED_", shared.w2, shared.w2_scale),
            HAS_ALPHAS=weights.l2_alphas is not None, HAS_BIAS=weights.w2_bias is not None,
            **launch_options(tile),
        )  # fmt: skip


def _constexprs(spec: LayerSpec, config: LayerConfig) -> dict[str, object]:
    t = spec.traits
    return dict(
        operand_constexprs(spec, config.down),
        A_SCALE=t.mid_scale_format or "none",
        A_GROUP=t.mid_group,
        ACT_SF_STRIDE=scale_stride(spec.intermediate, t.mid_scale_format, t.mid_group),
        SHARED_ACT_SF_STRIDE=scale_stride(spec.shared_intermediate, t.mid_scale_format, t.mid_group),
    )


def compile_jobs(arch: int) -> list[CompileJob]:
    """The launches that the default layers make on `arch`, one per recipe and tile the heuristic picks."""
    jobs = {}
    for spec in default_specs():
        pointer = pointer_types(spec)
        has_bias = spec.recipe.numerics == "trtllm_gen" and spec.traits.act == "bf16"  # gpt-oss's
        for num_tokens in (1, 8192):
            config = choose_config(spec, arch, num_tokens)
            tile = config.down
            name = f"down/{spec.recipe}/{tile.block_m}x{tile.block_n}x{tile.block_k}"
            signature = {
                "act": pointer["act"], "act_sf": pointer["mid_sf"],
                "shared_act": pointer["act"], "shared_act_sf": pointer["mid_sf"],
                "topk_weights": "*fp32", "sorted_slots": "*i32", "tiles": "*i32",
                "l2_alphas": "*fp32", "w2_bias": "*fp32",
                "w2": pointer["weight"], "w2_sf": pointer["weight_sf"],
                "shared_w2": pointer["shared"], "shared_w2_sf": pointer["shared_sf"],
                "out": "*bf16", "num_tokens": "i32", "num_experts": "i32",
            }  # fmt: skip
            jobs[name] = CompileJob(
                name=name,
                kernel="down",
                recipe=str(spec.recipe),
                fn=down_kernel,
                signature=signature,
                constexprs=_constexprs(spec, config)
                | example_strides(spec, "W_", spec.hidden, spec.intermediate)
                | example_strides(spec, "SHARED_", spec.hidden, spec.intermediate)
                | {"HAS_ALPHAS": spec.traits.act_scale_format == "ue4m3", "HAS_BIAS": has_bias},
                options=launch_options(tile),
                divisible_by_16=frozenset(arg for arg, kind in signature.items() if kind.startswith("*")),
            )
    return list(jobs.values())
