"""GEMM 1's epilogue: fp32 accumulators of interleaved gate/up rows → activation → requantized intermediate.

The device functions are shared by the fused kernel and by `requantize_accumulators`, the same arithmetic on
accumulators from memory, so that its bytes can be compared where an MMA's summation order plays no part.

Rounding rules. SM100 (DeepGEMM 0.1.7): gate and up round to BF16 before the clamp. SM90 and trtllm-gen: fp32
throughout. DeepGEMM multiplies by the top-k weight before requantization, trtllm-gen only in the combine. Block
scales are powers of two (or UE4M3) without a floor, E2M1 rounds to nearest even and keeps −0; fp32 scales have the
floor 1e-10, amax·fl(1/448) and an IEEE reciprocal. Only the sigmoid (and tanh) may be approximate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.formats import round_to_bf16
from megamoe.kernels.layouts.gate_up import split_gran8, split_gran16_even_odd
from megamoe.kernels.numerics import e2m1_code_rne, e4m3_to_f32, f32_to_e4m3, ue8m0_ceil, ue8m0_inverse
from megamoe.kernels.operands import POINTER_TYPES
from megamoe.recipe import ALL_RECIPES, Recipe, traits
from megamoe.spec import ACTIVATION_DEFAULTS

# The requantizers multiply by these instead of dividing; as fp32 they are fl(1/448) and fl(1/6).
RECIPROCAL_448 = tl.constexpr(1 / 448)
RECIPROCAL_6 = tl.constexpr(1 / 6)


@triton.jit
def _tanh(x):
    """fp32 tanh to about 4e-7 of its value: a series below 1/4, where 1 − 2/(1 + exp(2x)) would cancel."""
    magnitude = tl.abs(x)
    tail = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * magnitude))
    square = x * x
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(magnitude < 0.25, x * series, tl.where(x < 0, tail * -1.0, tail))


@triton.jit
def _clamp(gate, up, clamp, ROUND_BF16: tl.constexpr):
    """gate = min(gate, c), up within ±c; a limit of infinity clamps nothing, NaN neither.

    A BF16 clamp of BF16 values is the same comparison in fp32. Comparisons instead of minimum and maximum fix what
    becomes of −0 and of NaN: a NaN gate gives c, a NaN up −c (SM100) or c.
    """
    lowest = clamp * -1.0  # Triton's unary minus is 0 − x, which loses the sign of zero
    unlimited = clamp == float("inf")
    gate = tl.where(unlimited, gate, tl.where(gate <= clamp, gate, clamp))
    if ROUND_BF16:
        limited = tl.where(up >= lowest, up, lowest)
    else:
        limited = tl.where(up < lowest, lowest, up)
    limited = tl.where(limited <= clamp, limited, clamp)
    return gate, tl.where(unlimited, up, limited)


@triton.jit
def activate(
    gate, up, gate_scale, weight, clamp, alpha, beta,
    ACTIVATION: tl.constexpr, ROUND_BF16: tl.constexpr, HAS_CLAMP: tl.constexpr,
    HAS_GATE_SCALE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """The activation of fp32 tiles times `weight`, which must broadcast against them.

    With g = min(gate, c)·gate_scale and u = clamp(up, −c, c): `swiglu` g·sigmoid(g)·u; `swigluoai`
    g·sigmoid(alpha·g)·(u + beta); `situ` (alpha·tanh(g/alpha)·sigmoid(g))·(beta·tanh(u/beta)).
    """
    if ROUND_BF16:
        gate = gate.to(tl.bfloat16).to(tl.float32)
        up = up.to(tl.bfloat16).to(tl.float32)
    if HAS_CLAMP:
        gate, up = _clamp(gate, up, clamp, ROUND_BF16)
    if HAS_GATE_SCALE:
        gate = gate * gate_scale
    if ACTIVATION == "swigluoai":
        sigmoid = 1.0 / (1.0 + tl.exp(-(alpha * gate)))
        up = up + beta
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    if ACTIVATION == "situ":
        gate = alpha * _tanh(tl.div_rn(gate, tl.full(gate.shape, alpha, tl.float32)))
        up = beta * _tanh(tl.div_rn(up, tl.full(up.shape, beta, tl.float32)))
    act = gate * sigmoid * up
    if HAS_WEIGHT:
        act = act * weight
    return act


@triton.jit
def group_amax(act, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """Largest magnitude per GROUP consecutive columns of [ROWS, COLS]: [ROWS, COLS // GROUP]."""
    return tl.max(tl.abs(act).reshape(ROWS, COLS // GROUP, GROUP), axis=2)


@triton.jit
def scale_columns(act, factor, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """`act` [ROWS, COLS] times `factor` [ROWS, COLS // GROUP] of its group."""
    return (act.reshape(ROWS, COLS // GROUP, GROUP) * factor[:, :, None]).reshape(ROWS, COLS)


@triton.jit
def store_mxfp8(act, q, sf, rows, live, col, n_cols, sf_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """E4M3 with UE8M0/32 and no floor: amax 0 gives byte 0 and zeros. `col` is the tile's first column."""
    amax = group_amax(act, ROWS, COLS, 32)
    byte = ue8m0_ceil(amax * RECIPROCAL_448, 0, 254)
    values = f32_to_e4m3(scale_columns(act, ue8m0_inverse(byte), ROWS, COLS, 32))
    cols = col + tl.arange(0, COLS)
    tl.store(q + rows[:, None] * n_cols + cols[None, :], values, mask=live[:, None] & (cols < n_cols)[None, :])
    groups = col // 32 + tl.arange(0, COLS // 32)
    sf_live = live[:, None] & (groups * 32 < n_cols)[None, :]
    tl.store(sf + rows[:, None] * sf_stride + groups[None, :], byte.to(tl.uint8), mask=sf_live)


@triton.jit
def store_fp4(
    even, odd, q, sf, rows, live, col, n_cols, sf_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """E2M1 with UE8M0/32 (GROUP 32) or UE4M3/16 (GROUP 16), no floor, ties to even, −0 kept.

    `even` and `odd` hold the even and odd columns [ROWS, PAIRS]: the 16-row interleave brings both nibbles of a byte
    into one thread. `col` is the tile's first column.
    """
    amax = tl.maximum(group_amax(even, ROWS, PAIRS, GROUP // 2), group_amax(odd, ROWS, PAIRS, GROUP // 2))
    raw = amax * RECIPROCAL_6
    if GROUP == 32:
        byte = ue8m0_ceil(raw, 0, 254)
        inverse = ue8m0_inverse(byte)
        byte = byte.to(tl.uint8)
    else:
        scale = f32_to_e4m3(raw)
        decoded = e4m3_to_f32(scale)
        inverse = tl.where(decoded > 0, tl.div_rn(1.0, tl.where(decoded > 0, decoded, 1.0)), 0.0)
        byte = scale.to(tl.uint8, bitcast=True)
    low = e2m1_code_rne(scale_columns(even, inverse, ROWS, PAIRS, GROUP // 2))
    high = e2m1_code_rne(scale_columns(odd, inverse, ROWS, PAIRS, GROUP // 2))
    packed = (low | (high << 4)).to(tl.uint8)
    pairs = col // 2 + tl.arange(0, PAIRS)
    tl.store(
        q + rows[:, None] * (n_cols // 2) + pairs[None, :],
        packed,
        mask=live[:, None] & (pairs < n_cols // 2)[None, :],
    )
    groups = col // GROUP + tl.arange(0, 2 * PAIRS // GROUP)
    sf_live = live[:, None] & (groups * GROUP < n_cols)[None, :]
    tl.store(sf + rows[:, None] * sf_stride + groups[None, :], byte, mask=sf_live)


@triton.jit
def store_fp8_block(
    act, q, sf, rows, live, col, n_cols, sf_stride, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """E4M3 with fp32 scales per GROUP columns: floor 1e-10, multiply by fl(1/448), IEEE reciprocal."""
    cols = col + tl.arange(0, COLS)
    act = tl.where((cols < n_cols)[None, :], act, 0.0)  # a tail group's scale comes from its live columns alone
    scale = tl.maximum(group_amax(act, ROWS, COLS, GROUP), 1e-10) * RECIPROCAL_448
    values = f32_to_e4m3(scale_columns(act, tl.div_rn(1.0, scale), ROWS, COLS, GROUP))
    tl.store(q + rows[:, None] * n_cols + cols[None, :], values, mask=live[:, None] & (cols < n_cols)[None, :])
    groups = col // GROUP + tl.arange(0, COLS // GROUP)
    sf_live = live[:, None] & (groups * GROUP < n_cols)[None, :]
    tl.store(sf + rows[:, None] * sf_stride + groups[None, :], scale, mask=sf_live)


@triton.jit
def store_bf16(act, q, rows, live, col, n_cols, COLS: tl.constexpr):
    cols = col + tl.arange(0, COLS)
    mask = live[:, None] & (cols < n_cols)[None, :]
    tl.store(q + rows[:, None] * n_cols + cols[None, :], act.to(tl.bfloat16), mask=mask)


@triton.jit
def activate_and_store(
    acc, gate_scale, weight, clamp, alpha, beta, q, sf, rows, live, n0, n_cols, sf_stride,
    MID: tl.constexpr, ROUND_BF16: tl.constexpr, ACTIVATION: tl.constexpr, HAS_CLAMP: tl.constexpr,
    HAS_GATE_SCALE: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """From scaled and biased accumulators to stored intermediate, one tile.

    acc [BLOCK_M, BLOCK_N] covers tile rows n0 … n0+BLOCK_N of the weight, hence intermediate columns n0/2 …; `weight`
    is fp32 [BLOCK_M] (the top-k weight, or one expert's output scale), the other factors are scalars. MID names the
    requantization (`Traits.mid_kind`).
    """
    if MID == "mxfp4" or MID == "nvfp4":
        gate_even, gate_odd, up_even, up_odd = split_gran16_even_odd(acc, BLOCK_M, BLOCK_N)
        even = activate(
            gate_even, up_even, gate_scale, weight[:, None], clamp, alpha, beta,
            ACTIVATION, ROUND_BF16, HAS_CLAMP, HAS_GATE_SCALE, HAS_WEIGHT,
        )  # fmt: skip
        odd = activate(
            gate_odd, up_odd, gate_scale, weight[:, None], clamp, alpha, beta,
            ACTIVATION, ROUND_BF16, HAS_CLAMP, HAS_GATE_SCALE, HAS_WEIGHT,
        )  # fmt: skip
        GROUP: tl.constexpr = 32 if MID == "mxfp4" else 16
        store_fp4(even, odd, q, sf, rows, live, n0 // 2, n_cols, sf_stride, GROUP, BLOCK_M, BLOCK_N // 4)
    else:
        gate, up = split_gran8(acc, BLOCK_M, BLOCK_N)
        act = activate(
            gate, up, gate_scale, weight[:, None], clamp, alpha, beta,
            ACTIVATION, ROUND_BF16, HAS_CLAMP, HAS_GATE_SCALE, HAS_WEIGHT,
        )  # fmt: skip
        if MID == "bf16":
            store_bf16(act, q, rows, live, n0 // 2, n_cols, BLOCK_N // 2)
        elif MID == "mxfp8":
            store_mxfp8(act, q, sf, rows, live, n0 // 2, n_cols, sf_stride, BLOCK_M, BLOCK_N // 2)
        else:
            COLUMNS: tl.constexpr = 128 if MID == "fp8_block128" else 64
            store_fp8_block(act, q, sf, rows, live, n0 // 2, n_cols, sf_stride, COLUMNS, BLOCK_M, BLOCK_N // 2)


@triton.jit(do_not_specialize=["num_rows"])
def requantize_kernel(
    acc, weight, q, sf, num_rows, clamp, alpha, beta,
    I: tl.constexpr, SF_STRIDE: tl.constexpr,
    MID: tl.constexpr, ROUND_BF16: tl.constexpr, ACTIVATION: tl.constexpr, HAS_CLAMP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`activate_and_store` on accumulators from memory; one program per (BLOCK_M rows, BLOCK_N interleaved columns).

    Safe: programs write disjoint ranges and read only inputs.
    """
    n0 = tl.program_id(1) * BLOCK_N
    lane = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = lane < num_rows
    rows = lane.to(tl.int64)
    n = n0 + tl.arange(0, BLOCK_N)
    tile = tl.load(acc + rows[:, None] * (2 * I) + n[None, :], mask=live[:, None] & (n < 2 * I)[None, :], other=0.0)
    row_weight = tl.full((BLOCK_M,), 1.0, tl.float32)
    if HAS_WEIGHT:
        row_weight = tl.load(weight + rows, mask=live, other=0.0)
    activate_and_store(
        tile, 1.0, row_weight, clamp, alpha, beta, q, sf, rows, live, n0, I, SF_STRIDE,
        MID, ROUND_BF16, ACTIVATION, HAS_CLAMP, False, HAS_WEIGHT, BLOCK_M, BLOCK_N,
    )  # fmt: skip


class ActivationArguments(NamedTuple):
    """What a launch passes for the activation: compile-time choices and three fp32 scalars."""

    ACTIVATION: str
    ROUND_BF16: bool
    HAS_CLAMP: bool
    clamp: float
    alpha: float
    beta: float

    @property
    def constexprs(self) -> dict[str, object]:
        return {"ACTIVATION": self.ACTIVATION, "ROUND_BF16": self.ROUND_BF16, "HAS_CLAMP": self.HAS_CLAMP}

    @property
    def scalars(self) -> tuple[float, float, float]:
        return self.clamp, self.alpha, self.beta


def activation_arguments(
    recipe: Recipe, activation: str, clamp: float | None, alpha: float | None = None, beta: float | None = None
) -> ActivationArguments:
    """None and infinity clamp nothing; SM100 rules round the limit to BF16. None: the activation's own alpha, beta."""
    own_alpha, own_beta = ACTIVATION_DEFAULTS[activation]
    round_bf16 = recipe.numerics == "deep_gemm_sm100"
    has_clamp = clamp is not None and clamp != float("inf")
    limit = clamp if clamp is not None and has_clamp else 0.0
    if round_bf16:
        limit = round_to_bf16(limit)
    return ActivationArguments(
        activation,
        round_bf16,
        has_clamp,
        limit,
        own_alpha if alpha is None else alpha,
        own_beta if beta is None else beta,
    )


REQUANTIZE_OPTIONS: dict[str, object] = {"num_warps": 4, "enable_fp_fusion": False}


def requantize_tile(mid_group: int) -> dict[str, int]:
    """Two interleaved columns make one: a tile holds whole scale groups."""
    return {"BLOCK_M": 16, "BLOCK_N": max(128, 2 * mid_group)}


def requantize_accumulators(
    acc: torch.Tensor,
    weight: torch.Tensor | None,
    recipe: Recipe,
    *,
    activation: str = "swiglu",
    clamp: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Activation and requantization of given GEMM 1 accumulators, with the fused kernel's arithmetic.

    acc: fp32 [R, 2I], columns in the recipe's tile order (`Traits.tile_order`); weight: fp32 [R], the top-k weight that
    DeepGEMM numerics multiply in here, None under `trtllm_gen`. Returns (q, sf): E4M3 or BF16 [R, I] or packed E2M1
    [R, I/2], and uint8 [R, I/g], fp32 [R, I/g] or None.
    """
    t = traits(recipe)
    rows, two_i = acc.shape
    width = two_i // 2
    dtype = {"e2m1": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}[t.act]
    q = torch.empty((rows, width // 2 if t.act == "e2m1" else width), dtype=dtype, device=acc.device)
    sf = None
    if t.mid_scale_format is not None:
        sf_dtype = torch.float32 if t.mid_scale_format == "fp32" else torch.uint8
        sf = torch.empty((rows, -(-width // t.mid_group)), dtype=sf_dtype, device=acc.device)
    if rows:
        tile = requantize_tile(t.mid_group)
        arguments = activation_arguments(recipe, activation, clamp, alpha, beta)
        with torch.cuda.device_of(acc):
            requantize_kernel[triton.cdiv(rows, tile["BLOCK_M"]), triton.cdiv(two_i, tile["BLOCK_N"])](
                acc, acc if weight is None else weight, q, acc if sf is None else sf, rows, *arguments.scalars,
                I=width, SF_STRIDE=0 if sf is None else sf.shape[1], MID=t.mid_kind, HAS_WEIGHT=weight is not None,
                **arguments.constexprs, **tile, **REQUANTIZE_OPTIONS,
            )  # fmt: skip
    return q, sf


def compile_jobs(arch: int) -> list[CompileJob]:
    """One per kind of intermediate and arithmetic."""
    jobs = {}
    for recipe in ALL_RECIPES:
        t = traits(recipe)
        signature = {
            "acc": "*fp32", "weight": "*fp32", "q": POINTER_TYPES[t.act],
            "sf": "*u8" if t.mid_scale_format in ("ue8m0", "ue4m3") else "*fp32",
            "num_rows": "i32", "clamp": "fp32", "alpha": "fp32", "beta": "fp32",
        }  # fmt: skip
        activation = activation_arguments(recipe, "swiglu", 10.0)
        name = f"requantize/{t.mid_kind}" + ("/trtllm" if recipe.numerics == "trtllm_gen" else "")
        jobs[name] = CompileJob(
            name=name,
            kernel="requantize",
            recipe=str(recipe),
            fn=requantize_kernel,
            signature=signature,
            constexprs={
                "I": 2048, "SF_STRIDE": 2048 // t.mid_group if t.mid_group else 0, "MID": t.mid_kind,
                "HAS_WEIGHT": recipe.numerics != "trtllm_gen",
                **activation.constexprs, **requantize_tile(t.mid_group),
            },
            options=REQUANTIZE_OPTIONS,
            divisible_by_16=frozenset(arg for arg, kind in signature.items() if kind.startswith("*")),
            contract=frozenset({"ex2.approx", "div.full"}),  # the sigmoid
        )  # fmt: skip
    return list(jobs.values())
