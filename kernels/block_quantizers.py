"""Device code of the pre-dispatch: BF16 columns to elements and their scales, one function per kind.

Rows are cut into units (a scale group, or 16 columns of one) and a program takes consecutive units of the flat
(row, unit) order: no lane idles whatever the hidden size is, and small batches still fill several programs. NVFP4's
outer scale needs a whole row, so there a program is a row, its groups padded to a power of two.

Elements are read once, 16 bytes per lane, and stay in registers between the maximum and the encoding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.kernels.numerics import (
    e2m1_pack_ties_to_zero,
    e4m3_to_f32,
    f32_to_e4m3,
    ue8m0_ceil,
    ue8m0_inverse,
)

E2M1_UNIT = tl.constexpr(16)
"""Columns a thread of the E2M1 kinds takes: two 16-byte loads, one 8-byte store, NVFP4's whole scale group."""

_E4M3_MAX = tl.constexpr(448.0)
_NVFP4_RANGE = tl.constexpr(2688.0)  # 448 · 6: the largest UE4M3 scale, the largest E2M1 magnitude
# For UE8M0 the product with the rounded reciprocal gives the byte that the division gives, whatever the amax
# (checked for every fp32 number): they differ by an ulp, which would matter next to a power of two only.
_INVERSE_E4M3_MAX = tl.constexpr(1 / 448)
_INVERSE_E2M1_MAX = tl.constexpr(1 / 6)


@triton.jit
def _at(base, first, lane, PER_ROW: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Pointers to units first + lane of WIDTH elements, PER_ROW to a row; rows are STRIDE elements apart."""
    if STRIDE == PER_ROW * WIDTH:
        return base + first.to(tl.int64) * WIDTH + lane * WIDTH
    else:
        row = (first + lane) // PER_ROW
        return base + (row.to(tl.int64) * STRIDE + (first + lane - row * PER_ROW) * WIDTH)


@triton.jit
def quantize_e4m3(
    x, q, sf, pid, num_tokens, amax_floor,
    H: tl.constexpr, X_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, SF_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    """GROUPS scale groups of GROUP columns → E4M3 and UE8M0 bytes, or fp32 scales by IEEE division."""
    PER_ROW: tl.constexpr = H // GROUP
    first = pid * GROUPS
    lane = tl.arange(0, GROUPS)
    live = first + lane < num_tokens * PER_ROW
    column = tl.arange(0, GROUP)
    at = _at(x, first, lane, PER_ROW, GROUP, X_STRIDE)
    v = tl.load(at[:, None] + column[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(v), axis=1), amax_floor)  # a group of NaN alone: the floor
    if UE8M0:
        byte = ue8m0_ceil(amax * _INVERSE_E4M3_MAX, 1, 254)
        inverse = ue8m0_inverse(byte)
        scale = byte.to(tl.uint8)
    else:
        scale = tl.div_rn(amax, _E4M3_MAX)
        inverse = tl.div_rn(1.0, scale)
    at = _at(q, first, lane, PER_ROW, GROUP, Q_STRIDE)
    tl.store(at[:, None] + column[None, :], f32_to_e4m3(v * inverse[:, None]), mask=live[:, None])
    tl.store(_at(sf, first, lane, PER_ROW, 1, SF_STRIDE), scale, mask=live)


@triton.jit
def quantize_mxfp4(
    x, q, sf, pid, num_tokens, amax_floor,
    H: tl.constexpr, X_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, SF_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """GROUPS scale groups of GROUP columns → packed E2M1 and UE8M0 bytes. `q`, Q_STRIDE count int32 words."""
    SHARE: tl.constexpr = GROUP // E2M1_UNIT  # units of a group
    UNITS: tl.constexpr = GROUPS * SHARE
    PER_ROW: tl.constexpr = H // E2M1_UNIT
    first = pid * UNITS
    lane = tl.arange(0, UNITS)
    live = first + lane < num_tokens * PER_ROW
    low, high = _load_unit(_at(x, first, lane, PER_ROW, E2M1_UNIT, X_STRIDE), live, UNITS)
    amax = tl.max(tl.reshape(_amax(low, high), (GROUPS, SHARE)), axis=1)
    byte = ue8m0_ceil(tl.maximum(amax, amax_floor) * _INVERSE_E2M1_MAX, 1, 254)
    inverse = tl.broadcast_to(ue8m0_inverse(byte)[:, None], (GROUPS, SHARE)).reshape(UNITS)
    _store_unit(_at(q, first, lane, PER_ROW, 2, Q_STRIDE), low, high, inverse, live, True)
    group = tl.arange(0, GROUPS)
    live_group = pid * GROUPS + group < num_tokens * (H // GROUP)
    tl.store(_at(sf, pid * GROUPS, group, H // GROUP, 1, SF_STRIDE), byte.to(tl.uint8), mask=live_group)


@triton.jit
def quantize_nvfp4(
    x, q, sf, token_scale, row, amax_floor,
    H: tl.constexpr, X_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, SF_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """One row → packed E2M1, a UE4M3 byte per 16 columns, the row's fp32 scale. `q`, Q_STRIDE: int32 words.

    Rounding takes at most a third off a group's scale (from just below 1.5 to 1 of E4M3's subnormal steps), so
    that magnitudes stay below 6 · 1.5, as the encoder asks.
    """
    row = row.to(tl.int64)
    lane = tl.arange(0, GROUPS)
    live = lane < H // E2M1_UNIT
    low, high = _load_unit(x + row * X_STRIDE + lane * E2M1_UNIT, live, GROUPS)
    amax = _amax(low, high)
    outer = tl.div_rn(tl.maximum(tl.max(amax, axis=0), amax_floor), _NVFP4_RANGE)
    scale = f32_to_e4m3(tl.div_rn(amax, 6.0 * outer))
    decoded = e4m3_to_f32(scale)
    inverse = tl.where(decoded > 0, tl.div_rn(1.0, decoded * outer), 0.0)
    _store_unit(q + row * Q_STRIDE + lane * 2, low, high, inverse, live, False)
    tl.store(sf + row * SF_STRIDE + lane, scale.to(tl.uint8, bitcast=True), mask=live)
    tl.store(token_scale + row, outer)


@triton.jit
def _load_unit(at, live, UNITS: tl.constexpr):
    """Two tuples of eight fp32 tensors [UNITS]: columns 0 … 7 and 8 … 15 of each unit. Lanes not live read 0.

    Two loads of eight columns rather than one of sixteen, so that a unit lies in one thread.
    """
    column = tl.arange(0, 8)
    at = at[:, None] + column[None, :]
    low = tl.load(at, mask=live[:, None], other=0.0)
    high = tl.load(at + 8, mask=live[:, None], other=0.0)
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
def _amax(low, high):
    """Largest magnitude of each unit; NaN is ignored, and 0 where there is nothing else."""
    amax = tl.maximum(tl.abs(low[0]), 0.0)
    for i in tl.static_range(1, 8):
        amax = tl.maximum(amax, tl.abs(low[i]))
    for i in tl.static_range(8):
        amax = tl.maximum(amax, tl.abs(high[i]))
    return amax


@triton.jit
def _store_unit(at, low, high, inverse, live, SHORT: tl.constexpr):
    """Two int32 words per unit, sixteen E2M1 codes of column · inverse, low nibble first."""
    words = tl.join(e2m1_pack_ties_to_zero(low, inverse, SHORT), e2m1_pack_ties_to_zero(high, inverse, SHORT))
    word = tl.arange(0, 2)
    tl.store(at[:, None] + word[None, :], words.to(tl.int32, bitcast=True), mask=live[:, None])
