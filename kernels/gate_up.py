"""Expert GEMM 1: gate/up projection, SwiGLU, top-k weight and requantization, routed and shared in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.config import LayerConfig, choose_config
from megamoe.kernels.epilogue import ActivationArguments, activate_and_store, activation_arguments
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
def _block_scale_rows(n0, INTERMEDIATE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row of the fp32 128×128 scales for each interleaved weight row: those stay apart, gate's first, then up's."""
    n = n0 + tl.arange(0, BLOCK_N)
    column = n // 16 * 8 + n % 8
    return column // 128 + n // 8 % 2 * ((INTERMEDIATE + 127) // 128)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_up_kernel(
    x, x_sf, x_scale, topk_weights, sorted_slots, tiles,
    l1_alphas, l2_act_scales, w13, w13_sf, shared_w13, shared_w13_sf,
    act, act_sf, shared_act, shared_act_sf,
    num_tokens, clamp, alpha, beta,
    H: tl.constexpr, I: tl.constexpr, SHARED_I: tl.constexpr, TOP_K: tl.constexpr,
    X_SF_STRIDE: tl.constexpr, ACT_SF_STRIDE: tl.constexpr, SHARED_ACT_SF_STRIDE: tl.constexpr,
    W_STRIDE: tl.constexpr, W_SF_STRIDE: tl.constexpr,
    MMA: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SHARED_FORMAT: tl.constexpr,
    SCALE_FORMAT: tl.constexpr, GROUP: tl.constexpr, MID: tl.constexpr,
    TOKEN_SCALE: tl.constexpr, HAS_L1_ALPHAS: tl.constexpr, HAS_ACT_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_CLAMP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per (tile of rows, BLOCK_N interleaved weight rows).

    Shared experts take the first programs: their rows are the tokens themselves, their weight is 1, their width is
    SHARED_I. The others take the routing plan's tiles in order, the weight blocks of one tile next to each other, so
    that tiles of one expert meet its weights in L2. A hole in the tile list is an empty program.

    Safe: programs write disjoint (row, column) ranges and read nothing another program of this launch writes.
    """
    SHARED_BLOCKS: tl.constexpr = (2 * SHARED_I + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (2 * I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    shared_programs = tl.cdiv(num_tokens, BLOCK_M) * SHARED_BLOCKS
    lane = tl.arange(0, BLOCK_M)
    if pid < shared_programs:
        if SHARED_I > 0:
            n0 = pid % SHARED_BLOCKS * BLOCK_N
            first = pid // SHARED_BLOCKS * BLOCK_M
            live = first + lane < num_tokens
            rows = (first + lane).to(tl.int64)
            factor = tl.full((BLOCK_M,), 1.0, tl.float32)
            if TOKEN_SCALE:
                factor = tl.load(x_scale + rows, mask=live, other=0.0)
            acc = expert_tile(
                x, rows, live, x_sf, X_SF_STRIDE,
                shared_w13, n0, 2 * SHARED_I, shared_w13_sf, _block_scale_rows(n0, SHARED_I, BLOCK_N),
                H, MMA, A_FORMAT, SHARED_FORMAT, SCALE_FORMAT, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            activate_and_store(
                acc, factor, factor, tl.full((BLOCK_M,), 1.0, tl.float32), clamp, alpha, beta,
                shared_act, shared_act_sf, rows, live, n0, SHARED_I, SHARED_ACT_SF_STRIDE,
                MID, TOKEN_SCALE, ACTIVATION, HAS_CLAMP, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        pid -= shared_programs
        n0 = pid % BLOCKS * BLOCK_N
        tile = tiles + pid // BLOCKS * 4
        num_rows = tl.load(tile + 2)
        if num_rows > 0:
            expert = tl.load(tile).to(tl.int64)
            first = tl.load(tile + 1)
            live = lane < num_rows
            rows = (first + lane).to(tl.int64)
            slots = tl.load(sorted_slots + rows, mask=live, other=0).to(tl.int64)
            tokens = slots // TOP_K
            weight = tl.load(topk_weights + slots, mask=live, other=0.0)
            factor = tl.full((BLOCK_M,), 1.0, tl.float32)
            if TOKEN_SCALE:
                factor = tl.load(x_scale + tokens, mask=live, other=0.0)
            gate_factor = factor
            up_factor = factor
            if HAS_L1_ALPHAS:
                gate_factor = factor * tl.load(l1_alphas + expert * 2)
                up_factor = factor * tl.load(l1_alphas + expert * 2 + 1)
            if HAS_ACT_SCALES:
                weight = weight * tl.load(l2_act_scales + expert)
            acc = expert_tile(
                x, tokens, live, x_sf, X_SF_STRIDE,
                w13 + expert * W_STRIDE, n0, 2 * I, w13_sf + expert * W_SF_STRIDE,
                _block_scale_rows(n0, I, BLOCK_N),
                H, MMA, A_FORMAT, B_FORMAT, SCALE_FORMAT, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            activate_and_store(
                acc, gate_factor, up_factor, weight, clamp, alpha, beta,
                act, act_sf, rows, live, n0, I, ACT_SF_STRIDE,
                MID, TOKEN_SCALE or HAS_L1_ALPHAS, ACTIVATION, HAS_CLAMP, BLOCK_M, BLOCK_N,
            )  # fmt: skip


def gate_up(
    ws: Workspace, weights: MoEWeights, spec: LayerSpec, config: LayerConfig, num_tokens: int, num_tiles: int
) -> None:
    """Fill `ws.act_*` (and `ws.shared_act_*`) for the `num_tokens` tokens that the pre-dispatch put into `ws`.

    `num_tiles` is the length of the plan's tile list for these tokens. One launch; none when there is nothing to do.
    """
    tile = config.gate_up
    shared_blocks = triton.cdiv(2 * spec.shared_intermediate, tile.block_n)
    programs = triton.cdiv(num_tokens, tile.block_m) * shared_blocks
    programs += num_tiles * triton.cdiv(2 * spec.intermediate, tile.block_n)
    if programs == 0 or num_tokens == 0:
        return
    shared = weights.shared or weights.routed  # never read without shared experts
    with torch.cuda.device_of(ws.x_q):
        gate_up_kernel[(programs,)](
            ws.x_q, ws.x_sf, ws.x_sf if ws.x_scale is None else ws.x_scale, ws.topk_weights,
            ws.plan.sorted_slots, ws.plan.tiles,
            ws.topk_weights if weights.l1_alphas is None else weights.l1_alphas,
            ws.topk_weights if weights.l2_act_scales is None else weights.l2_act_scales,
            weight_bytes(weights.routed.w13), scale_bytes(weights.routed.w13_scale),
            weight_bytes(shared.w13), scale_bytes(shared.w13_scale),
            ws.act_q, ws.act_sf,
            ws.act_q if ws.shared_act_q is None else ws.shared_act_q,
            ws.act_sf if ws.shared_act_sf is None else ws.shared_act_sf,
            num_tokens, *_activation(spec).scalars,
            **_constexprs(spec, config),
            HAS_L1_ALPHAS=weights.l1_alphas is not None, HAS_ACT_SCALES=weights.l2_act_scales is not None,
            **launch_options(tile),
        )  # fmt: skip


def _activation(spec: LayerSpec) -> ActivationArguments:
    return activation_arguments(
        spec.recipe, spec.activation, spec.activation_clamp, spec.activation_alpha, spec.activation_beta
    )


def _constexprs(spec: LayerSpec, config: LayerConfig) -> dict[str, object]:
    t = spec.traits
    return dict(
        operand_constexprs(spec, config.gate_up),
        X_SF_STRIDE=scale_stride(spec.hidden, t.act_scale_format, t.act_group),
        ACT_SF_STRIDE=scale_stride(spec.intermediate, t.mid_scale_format, t.mid_group),
        SHARED_ACT_SF_STRIDE=scale_stride(spec.shared_intermediate, t.mid_scale_format, t.mid_group),
        MID=t.mid_kind,
        TOKEN_SCALE=t.token_scale,
        **_activation(spec).constexprs,
        **expert_constexprs(spec.intermediate, spec.hidden, spec, matrices=2),
    )


def compile_jobs(arch: int) -> list[CompileJob]:
    """The launches that the default layers make on `arch`, one per recipe and tile the heuristic picks."""
    jobs = {}
    for spec in default_specs():
        pointer = pointer_types(spec)
        has_alphas = spec.traits.token_scale  # NVFP4's checkpoints bring global scales
        for num_tokens in (1, 8192):
            config = choose_config(spec, arch, num_tokens)
            tile = config.gate_up
            name = f"gate_up/{spec.recipe}/{tile.block_m}x{tile.block_n}x{tile.block_k}"
            signature = {
                "x": pointer["act"], "x_sf": pointer["sf"],
                "x_scale": "*fp32" if spec.traits.token_scale else pointer["sf"],
                "topk_weights": "*fp32", "sorted_slots": "*i32", "tiles": "*i32",
                "l1_alphas": "*fp32", "l2_act_scales": "*fp32",
                "w13": pointer["weight"], "w13_sf": pointer["sf"],
                "shared_w13": pointer["shared"], "shared_w13_sf": pointer["sf"],
                "act": pointer["act"], "act_sf": pointer["sf"],
                "shared_act": pointer["act"], "shared_act_sf": pointer["sf"],
                "num_tokens": "i32", "clamp": "fp32", "alpha": "fp32", "beta": "fp32",
            }  # fmt: skip
            jobs[name] = CompileJob(
                name=name,
                kernel="gate_up",
                recipe=str(spec.recipe),
                fn=gate_up_kernel,
                signature=signature,
                constexprs=_constexprs(spec, config) | {"HAS_L1_ALPHAS": has_alphas, "HAS_ACT_SCALES": has_alphas},
                options=launch_options(tile),
                divisible_by_16=frozenset(arg for arg, kind in signature.items() if kind.startswith("*")),
                contract=frozenset({"ex2.approx", "div.full"}),  # the sigmoid
            )
    return list(jobs.values())
