"""FP8 weights with block scales to MXFP4, at load, for shared experts that take a slot among MXFP4 experts.

Contract: `quantize_block_fp8_weight_to_mxfp4` of SGLang 0.5.19, byte for byte, and an exact variant of it
(`oracle.reference.mxfp4_requant` states both).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.numerics import ue8m0_ceil, ue8m0_inverse

GROUP = 32
_GROUPS = 64  # per program: 16 elements per thread
_OPTIONS: dict[str, object] = {"num_warps": 4, "enable_fp_fusion": False}
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _bf16_log2_ceil(d):
    """Byte (int32) of ⌈BF16(log2 d)⌉ + 127, at least 0, for an fp32 d >= 0 that BF16 holds.

    d = 2^e · (1 + j/128). Its logarithm is between e and e + 1, and BF16 rounds it to e itself where it is within half
    a step: steps grow with the magnitude n of the exponent's integer part, so that j up to 2^(step/2) − 1 slips:
    1 for n from 4 on, 2 from 8, 5 from 16, 11 from 32, 24 from 64. A negative e is at the far end of its interval,
    whose other numbers are nearer to zero: n = −e − 1. Below 2^-126 the bits of d are those of j/64 − 1 in the binade
    of byte 0, and byte 0 is the least: the same count with j up to 24 of 128, 76 of the bits.
    """
    bits = d.to(tl.int32, bitcast=True) >> 16
    byte, j = bits >> 7, bits & 127
    n = tl.where(byte > 127, byte - 127, 126 - byte)
    slips = tl.where(n < 4, 0, tl.where(n < 8, 1, tl.where(n < 16, 2, tl.where(n < 32, 5, tl.where(n < 64, 11, 24)))))
    slips = tl.where(byte == 0, 76, slips)
    return byte + tl.where(j > slips, 1, 0)


@triton.jit
def mxfp4_code(value, inverse):
    """E2M1 code (int32) of value·inverse: ties to the smaller magnitude, 7 at most; bit 3 unless value is positive."""
    m = tl.abs(value) * inverse
    code = (m > 0.25).to(tl.int32) + (m > 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m > 1.75).to(tl.int32)
    code += (m > 2.5).to(tl.int32) + (m > 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    return code | tl.where(value > 0, 0, 8)


@triton.jit(do_not_specialize=["rows", "w_stride", "scale_stride"])
def mxfp4_requant_kernel(
    w, scale, q, sf, rows, w_stride, scale_stride,
    K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, EXACT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """w E4M3 [rows, K], scale fp32 → q packed E2M1 [rows, K/2], sf UE8M0 [rows, K/32], both contiguous.

    A program takes GROUPS consecutive groups of 32 columns of the flat (row, group) order; a group has one block scale,
    since BLOCK_COLUMNS is a multiple of 32. Safe: programs write disjoint ranges and read only inputs.
    """
    PER_ROW: tl.constexpr = K // _GROUP
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    row = group // PER_ROW
    column = (group % PER_ROW) * _GROUP
    live = row < rows
    block = tl.load(scale + (row // BLOCK_ROWS) * scale_stride + column // BLOCK_COLUMNS, mask=live, other=0.0)
    at = w + (row * w_stride + column)[:, None] + tl.arange(0, _GROUP)[None, :]
    v = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32) * block[:, None]
    if not EXACT:
        v = v.to(tl.bfloat16).to(tl.float32)
    finite = tl.min((tl.abs(v) < float("inf")).to(tl.int32), axis=1) > 0  # a NaN is not
    amax = tl.where(finite, tl.max(tl.abs(v), axis=1), 0.0)
    d = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    if EXACT:
        byte = ue8m0_ceil(d, 0, 254)
    else:
        byte = _bf16_log2_ceil(d.to(tl.bfloat16).to(tl.float32))
    inverse = tl.where(finite, ue8m0_inverse(byte), 0.0)
    code = mxfp4_code(v, inverse[:, None])
    even, odd = tl.split(tl.reshape(code, (GROUPS, _GROUP // 2, 2)))
    at = q + (group * (_GROUP // 2))[:, None] + tl.arange(0, _GROUP // 2)[None, :]
    tl.store(at, (even | (odd << 4)).to(tl.uint8), mask=live[:, None])
    tl.store(sf + group, tl.where(finite, byte, 255).to(tl.uint8), mask=live)


def mxfp4_requant(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `mxfp4_requant_reference`, in one launch. Arguments must be validated (`megamoe.shared_fusion`): weight
    float8_e4m3fn [N, K], rows contiguous, scale fp32 with contiguous rows, block columns a multiple of 32."""
    rows, columns = weight.shape
    q = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    sf = torch.empty(rows, columns // GROUP, dtype=torch.uint8, device=weight.device)
    if sf.numel():
        with torch.cuda.device_of(weight):
            mxfp4_requant_kernel[(triton.cdiv(sf.numel(), _GROUPS),)](
                weight, scale, q, sf, rows, weight.stride(0), scale.stride(0),
                K=columns, BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1], EXACT=exact, GROUPS=_GROUPS, **_OPTIONS,
            )  # fmt: skip
    return q, sf


def compile_jobs(arch: int) -> list[CompileJob]:
    """The shared expert of DeepSeek-V4-Flash, by both rules."""
    signature = {
        "w": "*fp8e4nv", "scale": "*fp32", "q": "*u8", "sf": "*u8",
        "rows": "i32", "w_stride": "i64", "scale_stride": "i64",
    }  # fmt: skip
    return [
        CompileJob(
            name=f"mxfp4_requant/{'exact' if exact else 'sglang'}",
            kernel="mxfp4_requant",
            recipe="E4M3 blocks",
            fn=mxfp4_requant_kernel,
            signature=signature,
            constexprs={"K": 4096, "BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "EXACT": exact, "GROUPS": _GROUPS},
            options=_OPTIONS,
            divisible_by_16=frozenset({"w", "scale", "q", "sf"}),
        )
        for exact in (False, True)
    ]
