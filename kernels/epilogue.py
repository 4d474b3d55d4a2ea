"""GEMM 1's epilogue: fp32 accumulators of interleaved gate/up rows → SwiGLU → requantized intermediate.

The device functions are shared by the fused kernel and by `requantize_accumulators`, the same arithmetic on
accumulators from memory, so that its bytes can be compared where an MMA's summation order plays no part.

Rounding rules (DeepGEMM 0.1.7). SM100: gate and up round to BF16 before the clamp, scales are powers of two (or UE4M3)
without a floor, E2M1 rounds to nearest even and keeps −0. SM90: fp32 throughout, floor 1e-10, scale amax·fl(1/448),
IEEE reciprocal. Both: the top-k weight multiplies before requantization, and only the sigmoid may be approximate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.layouts.gate_up import split_gran8, split_gran16_even_odd
from megamoe.kernels.numerics import e2m1_code_rne, e4m3_to_f32, f32_to_e4m3, ue8m0_ceil, ue8m0_inverse
from megamoe.recipe import SERVED, Recipe, traits
from megamoe.spec import SWIGLUOAI_ALPHA, SWIGLUOAI_BETA

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
def activate(
    gate, up, weight, clamp, alpha, beta,
    ACTIVATION: tl.constexpr, ROUND_BF16: tl.constexpr, HAS_CLAMP: tl.constexpr,
):  # fmt: skip
    """The activation of fp32 tiles times `weight`, which must broadcast against them.

    With g = min(gate, c) and u = clamp(up, −c, c): `swiglu` g·sigmoid(g)·u; `swigluoai` g·sigmoid(alpha·g)·(u + beta);
    `situ` (4·tanh(g/4)·sigmoid(g))·(25·tanh(u/25)). The scalars come from `activation_arguments`. A BF16 clamp of BF16
    values is the same comparison in fp32. Comparisons instead of minimum and maximum fix what becomes of −0 and of NaN:
    a NaN gate gives c, a NaN up −c (SM100) or c (SM90).
    """
    if ROUND_BF16:
        gate = gate.to(tl.bfloat16).to(tl.float32)
        up = up.to(tl.bfloat16).to(tl.float32)
    if HAS_CLAMP:
        lowest = clamp * -1.0  # Triton's unary minus is 0 − x, which loses the sign of zero
        gate = tl.where(gate <= clamp, gate, clamp)
        if ROUND_BF16:
            up = tl.where(up >= lowest, up, lowest)
        else:
            up = tl.where(up < lowest, lowest, up)
        up = tl.where(up <= clamp, up, clamp)
    if ACTIVATION == "swigluoai":
        sigmoid = 1.0 / (1.0 + tl.exp(-(alpha * gate)))
        up = up + beta
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    if ACTIVATION == "situ":
        gate = 4.0 * _tanh(0.25 * gate)
        up = 25.0 * _tanh(tl.div_rn(up, 25.0))
    return gate * sigmoid * up * weight


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
def store_fp8_block64(act, q, sf, rows, live, col, n_cols, sf_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """E4M3 with fp32 scales per 64 columns: floor 1e-10, multiply by fl(1/448), IEEE reciprocal."""
    cols = col + tl.arange(0, COLS)
    act = tl.where((cols < n_cols)[None, :], act, 0.0)  # a tail group's scale comes from its live columns alone
    scale = tl.maximum(group_amax(act, ROWS, COLS, 64), 1e-10) * RECIPROCAL_448
    values = f32_to_e4m3(scale_columns(act, tl.div_rn(1.0, scale), ROWS, COLS, 64))
    tl.store(q + rows[:, None] * n_cols + cols[None, :], values, mask=live[:, None] & (cols < n_cols)[None, :])
    groups = col // 64 + tl.arange(0, COLS // 64)
    sf_live = live[:, None] & (groups * 64 < n_cols)[None, :]
    tl.store(sf + rows[:, None] * sf_stride + groups[None, :], scale, mask=sf_live)


@triton.jit
def activate_and_store(
    acc, gate_factor, up_factor, weight, clamp, alpha, beta, q, sf, rows, live, n0, n_cols, sf_stride,
    MID: tl.constexpr, HAS_FACTOR: tl.constexpr, ACTIVATION: tl.constexpr, HAS_CLAMP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """From accumulators to stored intermediate, one tile.

    acc [BLOCK_M, BLOCK_N] covers interleaved weight rows n0 … n0+BLOCK_N, hence intermediate columns n0/2 …;
    the factors and `weight` are fp32 [BLOCK_M] (NVFP4's token scale and alphas; the top-k weight). MID names the
    requantization: `mxfp8`, `mxfp4`, `nvfp4` (SM100 rules) or `fp8_block64` (SM90 rules).
    """
    if MID == "mxfp8":
        gate, up = split_gran8(acc, BLOCK_M, BLOCK_N)
        act = activate(gate, up, weight[:, None], clamp, alpha, beta, ACTIVATION, True, HAS_CLAMP)
        store_mxfp8(act, q, sf, rows, live, n0 // 2, n_cols, sf_stride, BLOCK_M, BLOCK_N // 2)
    elif MID == "fp8_block64":
        gate, up = split_gran8(acc, BLOCK_M, BLOCK_N)
        act = activate(gate, up, weight[:, None], clamp, alpha, beta, ACTIVATION, False, HAS_CLAMP)
        store_fp8_block64(act, q, sf, rows, live, n0 // 2, n_cols, sf_stride, BLOCK_M, BLOCK_N // 2)
    else:
        gate_even, gate_odd, up_even, up_odd = split_gran16_even_odd(acc, BLOCK_M, BLOCK_N)
        if HAS_FACTOR:
            gate_even = gate_even * gate_factor[:, None]
            gate_odd = gate_odd * gate_factor[:, None]
            up_even = up_even * up_factor[:, None]
            up_odd = up_odd * up_factor[:, None]
        even = activate(gate_even, up_even, weight[:, None], clamp, alpha, beta, ACTIVATION, True, HAS_CLAMP)
        odd = activate(gate_odd, up_odd, weight[:, None], clamp, alpha, beta, ACTIVATION, True, HAS_CLAMP)
        GROUP: tl.constexpr = 32 if MID == "mxfp4" else 16
        store_fp4(even, odd, q, sf, rows, live, n0 // 2, n_cols, sf_stride, GROUP, BLOCK_M, BLOCK_N // 4)


@triton.jit(do_not_specialize=["num_rows"])
def requantize_kernel(
    acc, factor, weight, q, sf, num_rows, clamp, alpha, beta,
    I: tl.constexpr, SF_STRIDE: tl.constexpr,
    MID: tl.constexpr, HAS_FACTOR: tl.constexpr, ACTIVATION: tl.constexpr, HAS_CLAMP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
    row_factor = tl.load(factor + rows, mask=live, other=0.0)
    row_weight = tl.load(weight + rows, mask=live, other=0.0)
    activate_and_store(
        tile, row_factor, row_factor, row_weight, clamp, alpha, beta, q, sf, rows, live, n0, I, SF_STRIDE,
        MID, HAS_FACTOR, ACTIVATION, HAS_CLAMP, BLOCK_M, BLOCK_N,
    )  # fmt: skip


class ActivationArguments(NamedTuple):
    """What a launch passes for the activation: two compile-time choices and three fp32 scalars."""

    ACTIVATION: str
    HAS_CLAMP: bool
    clamp: float
    alpha: float
    beta: float

    @property
    def constexprs(self) -> dict[str, object]:
        return {"ACTIVATION": self.ACTIVATION, "HAS_CLAMP": self.HAS_CLAMP}

    @property
    def scalars(self) -> tuple[float, float, float]:
        return self.clamp, self.alpha, self.beta


def activation_arguments(
    recipe: Recipe, activation: str, clamp: float | None, alpha: float, beta: float
) -> ActivationArguments:
    """None and infinity clamp nothing; SM100 rules round the limit to BF16. alpha and beta are `swigluoai`'s."""
    if clamp is None or clamp == float("inf"):
        return ActivationArguments(activation, False, 0.0, alpha, beta)
    if recipe.numerics == "deep_gemm_sm100":
        clamp = torch.tensor(clamp).bfloat16().item()
    return ActivationArguments(activation, True, clamp, alpha, beta)


REQUANTIZE_TILE = {"BLOCK_M": 16, "BLOCK_N": 128}


def requantize_accumulators(
    acc: torch.Tensor,
    weight: torch.Tensor,
    recipe: Recipe,
    *,
    factor: torch.Tensor | None = None,
    activation: str = "swiglu",
    clamp: float | None = None,
    alpha: float = SWIGLUOAI_ALPHA,
    beta: float = SWIGLUOAI_BETA,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activation and requantization of given GEMM 1 accumulators, with the fused kernel's arithmetic.

    acc: fp32 [R, 2I], columns in the recipe's interleaved order; weight: fp32 [R], the top-k weight; factor: fp32 [R],
    multiplied into the accumulators first (NVFP4's token scale). Returns (q, sf): E4M3 [R, I] or packed E2M1 [R, I/2],
    and uint8 [R, I/g] or fp32 [R, I/64].
    """
    t = traits(recipe)
    rows, two_i = acc.shape
    width = two_i // 2
    groups = -(-width // t.mid_group)
    q = torch.empty(
        (rows, width // 2 if t.act == "e2m1" else width),
        dtype=torch.uint8 if t.act == "e2m1" else torch.float8_e4m3fn,
        device=acc.device,
    )
    sf_dtype = torch.float32 if t.mid_scale_format == "fp32" else torch.uint8
    sf = torch.empty((rows, groups), dtype=sf_dtype, device=acc.device)
    if rows:
        grid = (triton.cdiv(rows, REQUANTIZE_TILE["BLOCK_M"]), triton.cdiv(two_i, REQUANTIZE_TILE["BLOCK_N"]))
        arguments = activation_arguments(recipe, activation, clamp, alpha, beta)
        with torch.cuda.device_of(acc):
            requantize_kernel[grid](
                acc, weight if factor is None else factor, weight, q, sf, rows, *arguments.scalars,
                I=width, SF_STRIDE=groups, MID=t.mid_kind, HAS_FACTOR=factor is not None,
                **arguments.constexprs, **REQUANTIZE_TILE, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return q, sf


def compile_jobs(arch: int) -> list[CompileJob]:
    jobs = []
    for recipe in SERVED:
        t = traits(recipe)
        q, sf = (
            ("*u8" if t.act == "e2m1" else "*fp8e4nv"),
            ("*fp32" if t.mid_scale_format == "fp32" else "*u8"),
        )
        signature = {
            "acc": "*fp32", "factor": "*fp32", "weight": "*fp32", "q": q, "sf": sf, "num_rows": "i32",
            "clamp": "fp32", "alpha": "fp32", "beta": "fp32",
        }  # fmt: skip
        jobs.append(
            CompileJob(
                name=f"requantize/{t.mid_kind}",
                kernel="requantize",
                recipe=str(recipe),
                fn=requantize_kernel,
                signature=signature,
                constexprs={
                    "I": 2048, "SF_STRIDE": 2048 // t.mid_group, "MID": t.mid_kind,
                    "HAS_FACTOR": t.token_scale, "ACTIVATION": "swiglu", "HAS_CLAMP": True, **REQUANTIZE_TILE,
                },
                options={"num_warps": 4, "enable_fp_fusion": False},
                divisible_by_16=frozenset(arg for arg, kind in signature.items() if kind.startswith("*")),
                contract=frozenset({"ex2.approx", "div.full"}),  # the sigmoid
            )
        )  # fmt: skip
    return jobs
