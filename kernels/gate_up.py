"""Expert GEMM 1: gate/up projection, activation and requantization, routed and shared experts in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.config import LayerConfig, choose_config
from megamoe.kernels.epilogue import ActivationArguments, activate_and_store, activation_arguments
from megamoe.kernels.layouts.gate_up import intermediate_column, is_up_row, row_in_memory
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
from megamoe.parameters import LayerParameters
from megamoe.profile import gate_up_work
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights, W13Rows
from megamoe.workspace import Workspace


@triton.jit
def _block_scale_rows(n, INTERMEDIATE: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr):
    """Row of the fp32 128×128 scales for tile rows n: gate's come first, then up's, unless plain rows interleave."""
    if ROWS == "interleaved":
        return row_in_memory(n, INTERMEDIATE, ORDER, ROWS) // 128
    else:
        return intermediate_column(n, ORDER) // 128 + is_up_row(n) * ((INTERMEDIATE + 127) // 128)


@triton.jit
def _expert_factors(
    expert, x_gsf, l1_alphas, l2_act_scales,
    HAS_GSF: tl.constexpr, HAS_ALPHAS: tl.constexpr, HAS_ACT_SCALES: tl.constexpr,
):  # fmt: skip
    """trtllm-gen: (factor of the clamped gate, factor of the activated value); 1 where nothing gives one."""
    gate_scale = 1.0
    out_scale = 1.0
    if HAS_ALPHAS:
        gate_scale = tl.load(l1_alphas + expert * 2)
        out_scale = tl.load(l1_alphas + expert * 2 + 1)
    elif HAS_GSF:
        gate_scale = tl.div_rn(1.0, tl.load(x_gsf))
        out_scale = gate_scale
    if HAS_ACT_SCALES:
        out_scale = out_scale * tl.load(l2_act_scales + expert)
    return gate_scale, out_scale


@triton.jit(do_not_specialize=["num_tokens", "num_experts"], launch_metadata=gate_up_work)
def gate_up_kernel(
    x, x_sf, x_scale, topk_weights, sorted_slots, tiles,
    x_gsf, l1_alphas, l2_act_scales, w13_bias, expert_clamp, expert_alpha, expert_beta,
    w13, w13_sf, shared_w13, shared_w13_sf,
    act, act_sf, shared_act, shared_act_sf,
    num_tokens, num_experts, clamp, alpha, beta,
    H: tl.constexpr, I: tl.constexpr, SHARED_I: tl.constexpr, SHARED_SLOTS: tl.constexpr, TOP_K: tl.constexpr,
    X_SF_STRIDE: tl.constexpr, ACT_SF_STRIDE: tl.constexpr, SHARED_ACT_SF_STRIDE: tl.constexpr,
    W_STRIDE: tl.constexpr, W_SF_STRIDE: tl.constexpr, SHARED_STRIDE: tl.constexpr, SHARED_SF_STRIDE: tl.constexpr,
    TRTLLM: tl.constexpr, MMA: tl.constexpr, ORDER: tl.constexpr, W13_ROWS: tl.constexpr,
    A_FORMAT: tl.constexpr, A_SCALE: tl.constexpr, A_GROUP: tl.constexpr,
    B_FORMAT: tl.constexpr, B_SCALE: tl.constexpr, SHARED_FORMAT: tl.constexpr, SHARED_SCALE: tl.constexpr,
    B_GROUP: tl.constexpr, MID: tl.constexpr, TOKEN_SCALE: tl.constexpr,
    HAS_GSF: tl.constexpr, HAS_L1_ALPHAS: tl.constexpr, HAS_ACT_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ROUND_BF16: tl.constexpr, HAS_CLAMP: tl.constexpr,
    EXPERT_CLAMP: tl.constexpr, EXPERT_ALPHA: tl.constexpr, EXPERT_BETA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per (tile of rows, BLOCK_N weight rows in tile order).

    A dense shared MLP takes the first programs: its rows are the tokens themselves, their weight is 1, its width is
    SHARED_I. The others take the routing plan's tiles in order, the weight blocks of one tile next to each other, so
    that tiles of one expert meet its weights in L2; experts from `num_experts` on are the shared slots. A hole in the
    tile list is an empty program.

    Order of the arithmetic on an accumulator. DeepGEMM: · (token scale · l1_alpha), + bias, activation (which rounds
    first under SM100 rules), · (top-k weight · l2_act_scale). trtllm-gen: · token scale, + bias, clamp, then l1_alphas
    or 1/x_gsf on the gate and, with l2_act_scale, on the activated value; the top-k weight waits for the combine.

    Safe: programs write disjoint (row, column) ranges and read nothing another program of this launch writes.
    """
    SHARED_BLOCKS: tl.constexpr = (2 * SHARED_I + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (2 * I + BLOCK_N - 1) // BLOCK_N
    GATE_SCALE: tl.constexpr = TRTLLM and (HAS_L1_ALPHAS or HAS_GSF)
    WEIGHTED: tl.constexpr = not TRTLLM or HAS_L1_ALPHAS or HAS_GSF or HAS_ACT_SCALES
    pid = tl.program_id(0)
    shared_programs = tl.cdiv(num_tokens, BLOCK_M) * SHARED_BLOCKS
    lane = tl.arange(0, BLOCK_M)
    tile_rows = tl.arange(0, BLOCK_N)
    if pid < shared_programs:
        if SHARED_I > 0:
            n0 = pid % SHARED_BLOCKS * BLOCK_N
            n = n0 + tile_rows
            first = pid // SHARED_BLOCKS * BLOCK_M
            live = first + lane < num_tokens
            rows = (first + lane).to(tl.int64)
            acc = expert_tile(
                x, rows, live, x_sf, X_SF_STRIDE,
                shared_w13, n0.to(tl.int64), tile_rows, n0, 2 * SHARED_I,
                shared_w13_sf, _block_scale_rows(n, SHARED_I, ORDER, "tile"),
                H, MMA, A_FORMAT, A_SCALE, A_GROUP, SHARED_FORMAT, SHARED_SCALE, B_GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if TOKEN_SCALE:
                acc = acc * tl.load(x_scale + rows, mask=live, other=0.0)[:, None]
            activate_and_store(
                acc, 1.0, tl.full((BLOCK_M,), 1.0, tl.float32), clamp, alpha, beta,
                shared_act, shared_act_sf, rows, live, n0, SHARED_I, SHARED_ACT_SF_STRIDE,
                MID, ROUND_BF16, ACTIVATION, HAS_CLAMP, False, True, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        pid -= shared_programs
        n0 = pid % BLOCKS * BLOCK_N
        tile = tiles + pid // BLOCKS * 4
        num_rows = tl.load(tile + 2)
        if num_rows > 0:
            n = n0 + tile_rows
            expert = tl.load(tile).to(tl.int64)
            first = tl.load(tile + 1)
            live = lane < num_rows
            slots = tl.load(sorted_slots + first + lane, mask=live, other=0)
            tokens = (slots // TOP_K).to(tl.int64)
            # A matrix may exceed 2^31 elements, a tile of consecutive rows cannot: there the first row takes 64 bits.
            b_origin = n0.to(tl.int64)
            b_rows = tile_rows
            if W13_ROWS != "tile":
                b_origin = tl.zeros((), tl.int64)
                b_rows = row_in_memory(n, I, ORDER, W13_ROWS)
                if 2 * I * H >= 2**31:
                    b_rows = b_rows.to(tl.int64)
            acc = slot_tile(
                expert, num_experts, x, tokens, live, x_sf, X_SF_STRIDE,
                w13, w13_sf, shared_w13, shared_w13_sf,
                b_origin, b_rows, n0, 2 * I, _block_scale_rows(n, I, ORDER, W13_ROWS),
                W_STRIDE, W_SF_STRIDE, SHARED_STRIDE, SHARED_SF_STRIDE, SHARED_SLOTS, H, MMA,
                A_FORMAT, A_SCALE, A_GROUP, B_FORMAT, B_SCALE, SHARED_FORMAT, SHARED_SCALE, B_GROUP,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if TOKEN_SCALE:
                token_scale = tl.load(x_scale + tokens, mask=live, other=0.0)
                if HAS_L1_ALPHAS and not TRTLLM:
                    gate_factor = token_scale * tl.load(l1_alphas + expert * 2)
                    up_factor = token_scale * tl.load(l1_alphas + expert * 2 + 1)
                    acc = acc * tl.where(is_up_row(n)[None, :] == 1, up_factor[:, None], gate_factor[:, None])
                else:
                    acc = acc * token_scale[:, None]
            if HAS_BIAS:
                memory_rows = row_in_memory(n, I, ORDER, "gate_up" if W13_ROWS == "tile" else W13_ROWS)
                acc = acc + tl.load(w13_bias + expert * (2 * I) + memory_rows, mask=n < 2 * I, other=0.0)[None, :]

            rows = (first + lane).to(tl.int64)
            gate_scale = 1.0
            if TRTLLM:
                gate_scale, out_scale = _expert_factors(
                    expert, x_gsf, l1_alphas, l2_act_scales, HAS_GSF, HAS_L1_ALPHAS, HAS_ACT_SCALES
                )
                weight = tl.zeros((BLOCK_M,), tl.float32) + out_scale
            else:
                weight = tl.load(topk_weights + slots, mask=live, other=0.0)
                if HAS_ACT_SCALES:
                    weight = weight * tl.load(l2_act_scales + expert)
            if EXPERT_CLAMP:
                clamp = tl.load(expert_clamp + expert)
            if EXPERT_ALPHA:
                alpha = tl.load(expert_alpha + expert)
            if EXPERT_BETA:
                beta = tl.load(expert_beta + expert)
            activate_and_store(
                acc, gate_scale, weight, clamp, alpha, beta,
                act, act_sf, rows, live, n0, I, ACT_SF_STRIDE,
                MID, ROUND_BF16, ACTIVATION, HAS_CLAMP or EXPERT_CLAMP, GATE_SCALE, WEIGHTED, BLOCK_M, BLOCK_N,
            )  # fmt: skip


def gate_up(
    ws: Workspace,
    weights: MoEWeights,
    spec: LayerSpec,
    config: LayerConfig,
    parameters: LayerParameters,
    num_tokens: int,
    num_tiles: int,
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
    routed, shared = weights.routed, weights.shared or weights.routed  # never read without shared experts
    absent = ws.topk_weights
    activation = _activation(spec)
    with torch.cuda.device_of(ws.x_q):
        gate_up_kernel[(programs,)](
            ws.x_q, or_absent(ws.x_sf, ws.x_q), or_absent(ws.x_scale, absent), ws.topk_weights,
            ws.plan.sorted_slots, ws.plan.tiles,
            or_absent(parameters.x_gsf, absent), or_absent(weights.l1_alphas, absent),
            or_absent(weights.l2_act_scales, absent), or_absent(weights.w13_bias, absent),
            or_absent(parameters.clamp, absent), or_absent(parameters.alpha, absent),
            or_absent(parameters.beta, absent),
            weight_bytes(routed.w13), scale_bytes(routed.w13_scale, routed.w13),
            weight_bytes(shared.w13), scale_bytes(shared.w13_scale, shared.w13),
            ws.act_q, or_absent(ws.act_sf, ws.act_q),
            or_absent(ws.shared_act_q, ws.act_q),
            or_absent(ws.shared_act_sf, or_absent(ws.act_sf, ws.act_q)),
            num_tokens, spec.num_local_experts, *activation.scalars,
            **_constexprs(spec, config, weights.w13_rows, activation),
            **expert_constexprs("W_", routed.w13, routed.w13_scale),
            **expert_constexprs("SHARED_", shared.w13, shared.w13_scale),
            HAS_GSF=parameters.x_gsf is not None, HAS_L1_ALPHAS=weights.l1_alphas is not None,
            HAS_ACT_SCALES=weights.l2_act_scales is not None, HAS_BIAS=weights.w13_bias is not None,
            EXPERT_CLAMP=parameters.clamp is not None, EXPERT_ALPHA=parameters.alpha is not None,
            EXPERT_BETA=parameters.beta is not None,
            **launch_options(tile),
        )  # fmt: skip


def _activation(spec: LayerSpec) -> ActivationArguments:
    return activation_arguments(spec.recipe, spec.activation, spec.activation_clamp, spec.alpha, spec.beta)


def _constexprs(
    spec: LayerSpec, config: LayerConfig, w13_rows: W13Rows, activation: ActivationArguments
) -> dict[str, object]:
    t = spec.traits
    return dict(
        operand_constexprs(spec, config.gate_up),
        A_SCALE=t.act_scale_format or "none",
        A_GROUP=t.act_group,
        X_SF_STRIDE=scale_stride(spec.hidden, t.act_scale_format, t.act_group),
        ACT_SF_STRIDE=scale_stride(spec.intermediate, t.mid_scale_format, t.mid_group),
        SHARED_ACT_SF_STRIDE=scale_stride(spec.shared_intermediate, t.mid_scale_format, t.mid_group),
        ORDER=t.tile_order,
        W13_ROWS=w13_rows,
        MID=t.mid_kind,
        TOKEN_SCALE=t.token_scale,
        **activation.constexprs,
    )


def compile_jobs(arch: int) -> list[CompileJob]:
    """The launches that the default layers make on `arch`, one per recipe and tile the heuristic picks."""
    jobs = {}
    for spec in default_specs():
        t, pointer = spec.traits, pointer_types(spec)
        trtllm = spec.recipe.numerics == "trtllm_gen"
        has_alphas = t.act_scale_format == "ue4m3"  # NVFP4's checkpoints bring global scales
        expert = trtllm and t.act == "bf16"  # gpt-oss's bias; its alpha, beta and limit as FlashInfer passes them
        for num_tokens in (1, 8192):
            config = choose_config(spec, arch, num_tokens)
            tile = config.gate_up
            name = f"gate_up/{spec.recipe}/{tile.block_m}x{tile.block_n}x{tile.block_k}"
            signature = {
                "x": pointer["act"], "x_sf": pointer["act_sf"], "x_scale": "*fp32",
                "topk_weights": "*fp32", "sorted_slots": "*i32", "tiles": "*i32",
                "x_gsf": "*fp32", "l1_alphas": "*fp32", "l2_act_scales": "*fp32", "w13_bias": "*fp32",
                "expert_clamp": "*fp32", "expert_alpha": "*fp32", "expert_beta": "*fp32",
                "w13": pointer["weight"], "w13_sf": pointer["weight_sf"],
                "shared_w13": pointer["shared"], "shared_w13_sf": pointer["shared_sf"],
                "act": pointer["act"], "act_sf": pointer["mid_sf"],
                "shared_act": pointer["act"], "shared_act_sf": pointer["mid_sf"],
                "num_tokens": "i32", "num_experts": "i32", "clamp": "fp32", "alpha": "fp32", "beta": "fp32",
            }  # fmt: skip
            jobs[name] = CompileJob(
                name=name,
                kernel="gate_up",
                recipe=str(spec.recipe),
                fn=gate_up_kernel,
                signature=signature,
                constexprs=_constexprs(spec, config, "gate_up" if trtllm else "tile", _activation(spec))
                | example_strides(spec, "W_", spec.intermediate, spec.hidden, matrices=2)
                | example_strides(spec, "SHARED_", spec.intermediate, spec.hidden, matrices=2)
                | {
                    "HAS_GSF": False, "HAS_L1_ALPHAS": has_alphas, "HAS_ACT_SCALES": has_alphas, "HAS_BIAS": expert,
                    "EXPERT_CLAMP": expert, "EXPERT_ALPHA": False, "EXPERT_BETA": False,
                },
                options=launch_options(tile),
                divisible_by_16=frozenset(arg for arg, kind in signature.items() if kind.startswith("*")),
                contract=frozenset({"ex2.approx", "div.full"}),  # the sigmoid
            )  # fmt: skip
    return list(jobs.values())
