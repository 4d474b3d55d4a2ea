"""Device code of the pre-dispatch, kinds whose scales cover a few columns: BF16 columns to elements and scales.

Rows are cut into units (a scale group, or 16 columns of one) and a program takes consecutive units of the flat
(row, unit) order: no lane idles whatever the hidden size is, and small batches still fill several programs.

Elements are read once, 16 bytes per lane, and stay in registers between the maximum and the encoding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.kernels.numerics import (
    e2m1_pack_rne,
    e2m1_pack_ties_to_zero,
    e4m3_to_f32,
    f32_to_e4m3,
    ue8m0_ceil,
    ue8m0_inverse,
)

E2M1_UNIT = tl.constexpr(16)
"""Columns a thread of the E2M1 kinds takes: two 16-byte loads, one 8-byte store, NVFP4's whole scale group."""

_COPY_UNIT = tl.constexpr(8)  # columns of BF16 in 16 bytes
_E4M3_MAX = tl.constexpr(448.0)
# For UE8M0 the product with the rounded reciprocal gives the byte that the division gives, whatever the amax
# (checked for every fp32 number): they differ by an ulp, which would matter next to a power of two only.
_INVERSE_E4M3_MAX = tl.constexpr(1 / 448)
_INVERSE_E2M1_MAX = tl.constexpr(1 / 6)


@triton.jit
def columns_at(at, COLUMNS: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers [units, COLUMNS] to the columns of units that start at `at`, multiples of BYTES if ALIGNED.

    No launch is specialised on pointers and strides, so that this hint alone lets the compiler merge accesses.
    """
    pointers = at[:, None] + tl.arange(0, COLUMNS)[None, :]
    return tl.multiple_of(pointers, (1, BYTES)) if ALIGNED else pointers


@triton.jit
def quantize_e4m3(
    x, q, sf, x_stride, q_stride, sf_stride, pid, num_tokens, amax_floor,
    H: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, UE8M0: tl.constexpr, HAS_FLOOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """GROUPS scale groups of GROUP columns → E4M3 and UE8M0 bytes, or fp32 scales by IEEE division.

    Without a floor (UE8M0 only) the byte may be 0, and a group of NaN alone has byte 254; with one its amax is the
    floor.
    """
    PER_ROW: tl.constexpr = H // GROUP
    unit = pid * GROUPS + tl.arange(0, GROUPS)
    live = unit < num_tokens * PER_ROW
    row = (unit // PER_ROW).to(tl.int64)
    group = unit % PER_ROW
    at = columns_at(x + (row * x_stride + group * GROUP), GROUP, 16, ALIGNED)
    v = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(v), axis=1)
    if HAS_FLOOR:
        amax = tl.maximum(amax, amax_floor)
    if UE8M0:
        byte = ue8m0_ceil(amax * _INVERSE_E4M3_MAX, 1 if HAS_FLOOR else 0, 254)
        inverse = ue8m0_inverse(byte)
        scale = byte.to(tl.uint8)
    else:
        scale = tl.div_rn(amax, _E4M3_MAX)
        inverse = tl.div_rn(1.0, scale)
    at = columns_at(q + (row * q_stride + group * GROUP), GROUP, 16, ALIGNED)
    tl.store(at, f32_to_e4m3(v * inverse[:, None]), mask=live[:, None])
    tl.store(sf + (row * sf_stride + group), scale, mask=live)


@triton.jit
def quantize_mxfp4(
    x, q, sf, x_stride, q_stride, sf_stride, pid, num_tokens, amax_floor,
    H: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """GROUPS scale groups of GROUP columns → packed E2M1 and UE8M0 bytes. `q` and q_stride count int32 words."""
    SHARE: tl.constexpr = GROUP // E2M1_UNIT  # units of a group
    UNITS: tl.constexpr = GROUPS * SHARE
    PER_ROW: tl.constexpr = H // E2M1_UNIT
    unit = pid * UNITS + tl.arange(0, UNITS)
    live = unit < num_tokens * PER_ROW
    row = (unit // PER_ROW).to(tl.int64)
    column = unit % PER_ROW
    low, high = load_unit(x + (row * x_stride + column * E2M1_UNIT), live, UNITS, ALIGNED)
    amax = tl.max(tl.reshape(unit_amax(low, high), (GROUPS, SHARE)), axis=1)
    byte = ue8m0_ceil(tl.maximum(amax, amax_floor) * _INVERSE_E2M1_MAX, 1, 254)
    inverse = tl.broadcast_to(ue8m0_inverse(byte)[:, None], (GROUPS, SHARE)).reshape(UNITS)
    low = e2m1_pack_ties_to_zero(low, inverse, True)
    high = e2m1_pack_ties_to_zero(high, inverse, True)
    store_words(q + (row * q_stride + column * 2), low, high, live, ALIGNED)
    group = pid * GROUPS + tl.arange(0, GROUPS)
    row = (group // (H // GROUP)).to(tl.int64)
    live = group < num_tokens * (H // GROUP)
    tl.store(sf + (row * sf_stride + group % (H // GROUP)), byte.to(tl.uint8), mask=live)


@triton.jit
def quantize_nvfp4_gsf(
    x, q, sf, gsf, x_stride, q_stride, sf_stride, pid, num_tokens,
    H: tl.constexpr, GROUPS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """GROUPS scale groups of 16 columns, times the global factor `gsf` → packed E2M1 (nearest even, −0 kept), UE4M3.

    No floor; a group of NaN alone has UE4M3's NaN. `q` and q_stride count int32 words.
    """
    PER_ROW: tl.constexpr = H // E2M1_UNIT
    unit = pid * GROUPS + tl.arange(0, GROUPS)
    live = unit < num_tokens * PER_ROW
    row = (unit // PER_ROW).to(tl.int64)
    column = unit % PER_ROW
    low, high = load_unit(x + (row * x_stride + column * E2M1_UNIT), live, GROUPS, ALIGNED)
    scale = f32_to_e4m3(unit_amax(low, high) * _INVERSE_E2M1_MAX * gsf)
    decoded = e4m3_to_f32(scale)
    inverse = tl.where(decoded > 0, tl.div_rn(gsf, tl.where(decoded > 0, decoded, 1.0)), 0.0)
    at = q + (row * q_stride + column * 2)
    store_words(at, e2m1_pack_rne(low, inverse), e2m1_pack_rne(high, inverse), live, ALIGNED)
    tl.store(sf + (row * sf_stride + column), scale.to(tl.uint8, bitcast=True), mask=live)


@triton.jit
def copy_bf16(
    x, q, x_stride, q_stride, pid, num_tokens,
    H: tl.constexpr, UNITS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """UNITS units of 8 columns as they are."""
    PER_ROW: tl.constexpr = H // _COPY_UNIT
    unit = pid * UNITS + tl.arange(0, UNITS)
    live = (unit < num_tokens * PER_ROW)[:, None]
    row = (unit // PER_ROW).to(tl.int64)
    column = unit % PER_ROW * _COPY_UNIT
    v = tl.load(columns_at(x + (row * x_stride + column), _COPY_UNIT, 16, ALIGNED), mask=live)
    tl.store(columns_at(q + (row * q_stride + column), _COPY_UNIT, 16, ALIGNED), v, mask=live)


@triton.jit
def load_unit(at, live, UNITS: tl.constexpr, ALIGNED: tl.constexpr):
    """Two tuples of eight fp32 tensors [UNITS]: columns 0 … 7 and 8 … 15 of each unit. Lanes not live read 0.

    Two loads of eight columns rather than one of sixteen, so that a unit lies in one thread.
    """
    low = tl.load(columns_at(at, 8, 16, ALIGNED), mask=live[:, None], other=0.0)
    high = tl.load(columns_at(at + 8, 8, 16, ALIGNED), mask=live[:, None], other=0.0)
    return _columns(low, UNITS), _columns(high, UNITS)


@triton.jit
def _columns(tile, UNITS: tl.constexpr):
    """The eight columns of a BF16 tile [UNITS, 8] as fp32 tensors; moves nothing, a row lies in one thread."""
    even, odd = tl.split(tl.reshape(tile, (UNITS, 4, 2)))
    c04, c26 = tl.split(tl.reshape(even, (UNITS, 2, 2)))
    c15, c37 = tl.split(tl.reshape(odd, (UNITS, 2, 2)))
    c0, c4 = tl.split(c04.to(tl.float32))
    c1, c5 = tl.split(c15.to(tl.float32))
    c2, c6 = tl.split(c26.to(tl.float32))
    c3, c7 = tl.split(c37.to(tl.float32))
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def unit_amax(low, high):
    """Largest magnitude of each unit; NaN is ignored unless there is nothing else."""
    amax = tl.abs(low[0])
    for i in tl.static_range(1, 8):
        amax = tl.maximum(amax, tl.abs(low[i]))
    for i in tl.static_range(8):
        amax = tl.maximum(amax, tl.abs(high[i]))
    return amax


@triton.jit
def store_words(at, low, high, live, ALIGNED: tl.constexpr):
    """Two uint32 words of E2M1 codes per unit, low first, to int32 pointers."""
    words = tl.join(low, high).to(tl.int32, bitcast=True)
    tl.store(columns_at(at, 2, 8, ALIGNED), words, mask=live[:, None])
