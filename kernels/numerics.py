"""Device functions for the number formats: E4M3, E2M1 codes, UE8M0 exponents. Plain `tl` operations only.

They run as they are under the CPU interpreter (with `megamoe.oracle.interpreter`) and on the GPU, and agree there
bit for bit, NaN included. Kernels that use them must be launched with `enable_fp_fusion=False` where bytes are a
contract.

Source of the rules: DeepGEMM MegaMoE of `sgl-deep-gemm` 0.1.7 (E2M1 ties toward zero in the pre-dispatch, to even
in the fused requantization) and the PTX conversions `cvt.rn.satfinite.{e4m3x2,e2m1x2}`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 2^-126 moves 1.0, the smallest normal E2M1 number, onto the smallest normal fp32 number, so that E2M1's
# subnormals become fp32 subnormals and a code is the top bits of an fp32 number.
_E2M1_ALIGN = tl.constexpr(2.0**-126)
_E2M1_UNALIGN = tl.constexpr(2.0**126)
_HALF_UNIT = tl.constexpr(2.0**-24)  # of the multiples that numbers below 1 become when they are aligned
_STEP_EXPONENT = tl.constexpr(22 << 23)  # times 2^22: a number whose last place is 0.5 for |x| in [1, 2)
_STEP = tl.constexpr(2.0**22)
_ONE_BITS = tl.constexpr(127 << 23)


@triton.jit
def f32_to_e4m3(x):
    """fp32 → `tl.float8e4nv`: nearest even, saturating to ±448 (±Inf too), −0 kept, NaN of any sign → 0x7F.

    On NVIDIA GPUs this is `cvt.rn.satfinite.e4m3x2.f32`.
    """
    return x.to(tl.float8e4nv)


@triton.jit
def e4m3_to_f32(x):
    """`tl.float8e4nv` → fp32, exact. UE4M3 scale bytes take `.to(tl.float8e4nv, bitcast=True)` first."""
    return x.to(tl.float32)


@triton.jit
def ue8m0_ceil(raw, LO: tl.constexpr, HI: tl.constexpr):
    """Byte (as int32) of the smallest power of two ≥ `raw`, an fp32 ≥ 0, clamped to [LO, HI].

    Byte b stands for 2^(b−127). It is the exponent field of `raw`, plus one where the mantissa is not zero;
    subnormal `raw` gives 1, Inf and NaN give HI.
    """
    bits = raw.to(tl.int32, bitcast=True)
    byte = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    return tl.minimum(tl.maximum(byte, LO), HI)


@triton.jit
def ue8m0_inverse(byte):
    """fp32 1/2^(byte−127) for an int32 `byte` in 0 … 254; 254 gives +0, not the subnormal 2^-127."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_code_rne(x):
    """fp32 → E2M1 code (int32, 0 … 15): nearest even, saturating; −0 and negative underflow → 8, NaN → 7.

    What `cvt.rn.satfinite.e2m1x2.f32` writes. Adding 2^(22+e), where 2^e ≤ |x| < 2^(e+1) and e ≥ 0, rounds |x|
    once to E2M1's step in that binade, because fp32's last place is then exactly that step. The rounded value has
    at most two significant bits, so that the alignment is exact.
    """
    x = tl.maximum(tl.minimum(x, 6.0), -6.0)  # min first: NaN → 6
    bits = x.to(tl.int32, bitcast=True)
    step = (tl.maximum(bits & 0x7F800000, _ONE_BITS) + _STEP_EXPONENT).to(tl.float32, bitcast=True)
    rounded = (tl.abs(x) + step) - step
    code = (rounded * _E2M1_ALIGN).to(tl.int32, bitcast=True) >> 22
    return code | ((bits >> 28) & 8)


@triton.jit
def e2m1_pack_ties_to_zero(v, inverse, SHORT: tl.constexpr):
    """Eight fp32 tensors → uint32 of the E2M1 codes of v[i]·inverse, code i in bits 4i … 4i+3.

    DeepGEMM's encoder: nearest, ties to the smaller magnitude (the code counts the thresholds .25, .75, 1.25,
    1.75, 2.5, 3.5 and 5 strictly below the magnitude), saturating; −0 is never produced; NaN gives 0. The product
    is rounded to fp32. |v[i]·inverse| must be below 10, or NaN.

    Aligned by 2^-126, a magnitude has its code in its bits from bit 22 on, and adding 2^21 − 1, half a unit of that
    bit less one, rounds half down. Aligning is exact for magnitudes from 1 on. Below, it rounds to multiples of 2^-23;
    SHORT promises that nothing is lost there: products of at most 11 significant bits (a BF16 number times a power of
    two), exact from 2^-12 on. Otherwise a number just above the threshold .25 or .75 could round onto it: adding
    2^-24, half such a unit, sends it to the next multiple, while a threshold, an even multiple, rounds back to itself
    (as do those above 1, for which 2^-24 is half a unit of fp32, or less). Magnitudes in (7, 10) count as 8, which
    becomes 7 when all eight codes are there.

    On SM90 about 8 instructions per element (9 unless SHORT), most of them at half rate. The clamp to [0, 1]
    serves NaN alone and is free: ptxas folds it into FMUL.SAT. Shifting and inserting is one funnel shift.
    """
    codes = tl.zeros_like(inverse).to(tl.uint32, bitcast=True)
    signs = codes
    for i in tl.static_range(7, -1, -1):
        magnitude = tl.abs(v[i]) * inverse
        if not SHORT:
            magnitude += _HALF_UNIT
        aligned = tl.minimum(tl.maximum(magnitude * _E2M1_ALIGN, 0.0), 1.0)  # max first: NaN → 0
        top = (aligned.to(tl.uint32, bitcast=True) + 0x1FFFFF) << 6  # the code in bits 28 … 31
        codes = (codes << 4) | (top >> 28)
        signs = (signs << 4) | (v[i].to(tl.uint32, bitcast=True) >> 28)
    if not SHORT:
        codes -= (codes & 0x88888888) >> 3
    return codes | (signs & (codes + 0x77777777) & 0x88888888)  # code + 7 reaches bit 3 unless the code is 0


@triton.jit
def e2m1_pack_rne(v, inverse):
    """Eight fp32 tensors → uint32 of `e2m1_code_rne` of v[i]·inverse, code i in bits 4i … 4i+3.

    The product is rounded to fp32. Written for instructions at full rate on SM90: the step that is added and subtracted
    is the binade of the magnitude, 1 at least, times 2^22, so that both are one FMA.
    """
    codes = tl.zeros_like(inverse).to(tl.uint32, bitcast=True)
    signs = codes
    for i in tl.static_range(7, -1, -1):
        x = tl.maximum(tl.minimum(v[i] * inverse, 6.0), -6.0)  # min first: NaN → 6
        magnitude = tl.abs(x)
        binade = (tl.maximum(magnitude, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        rounded = tl.fma(binade, _STEP * -1.0, tl.fma(binade, _STEP, magnitude))
        # The code in bits 28 … 30. The 1 changes nothing there; with it one LEA adds and shifts, and the next line is a
        # funnel shift, where without it LLVM would extract the code with a shift, a mask and another shift.
        top = ((rounded * _E2M1_ALIGN).to(tl.uint32, bitcast=True) + 1) << 6
        codes = (codes << 4) | (top >> 28)
        signs = (signs << 4) | (x.to(tl.uint32, bitcast=True) >> 28)
    return codes | (signs & 0x88888888)


@triton.jit
def e2m1_to_f32(code):
    """E2M1 code (an integer, bits 0 … 3) → fp32, exact: its magnitude bits are the top of an fp32 at 2^-126."""
    code = code.to(tl.int32)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * _E2M1_UNALIGN


@triton.jit
def e2m1_to_e4m3(code):
    """E2M1 code (uint8, bits 0 … 3) → `tl.float8e4nv`, exact: from 1 on both have one mantissa bit at the top."""
    magnitude = code & 7
    bits = tl.where(magnitude >= 2, 0x30 + 4 * magnitude, 0x30 * magnitude) | ((code & 8) << 4)
    return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
