"""Device code of the pre-dispatch, kinds with one fp32 scale per row: NVFP4's outer scale, E4M3 with a token scale.

A program is a row. Its units of 16 columns are dealt out in pieces of LANES, one unit a thread and piece; few lanes and
several pieces, because a hidden size is rarely a power of two: 7168 columns are 7 pieces of 64 units without an idle
lane, but 512 lanes would be idle by an eighth. All pieces are read before the row's maximum is known and stay in
registers until they are encoded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.kernels.block_quantizers import E2M1_UNIT, columns_at, load_unit, store_words, unit_amax
from megamoe.kernels.numerics import e2m1_pack_ties_to_zero, e4m3_to_f32, f32_to_e4m3

E4M3_UNIT = tl.constexpr(16)
_E4M3_MAX = tl.constexpr(448.0)
_NVFP4_RANGE = tl.constexpr(2688.0)  # 448 · 6: the largest UE4M3 scale, the largest E2M1 magnitude


@triton.jit
def quantize_nvfp4(
    x, q, sf, token_scale, row, amax_floor, x_stride, q_stride, sf_stride,
    H: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row → packed E2M1, a UE4M3 byte per 16 columns, the row's fp32 scale. `q`, q_stride: int32 words.

    Rounding takes at most a third off a group's scale (from just below 1.5 to 1 of E4M3's subnormal steps), so
    that magnitudes stay below 6 · 1.5, as the encoder asks.
    """
    GROUPS: tl.constexpr = H // E2M1_UNIT
    PIECES: tl.constexpr = (GROUPS + LANES - 1) // LANES
    row = row.to(tl.int64)
    x += row * x_stride
    q += row * q_stride
    sf += row * sf_stride
    units = ()
    top = tl.zeros([LANES], tl.float32)
    for piece in tl.static_range(PIECES):
        group = piece * LANES + tl.arange(0, LANES)
        low, high = load_unit(x + group * E2M1_UNIT, group < GROUPS, LANES, ALIGNED)
        amax = tl.maximum(unit_amax(low, high), 0.0)  # a group of NaN alone: 0
        top = tl.maximum(top, amax)
        units += ((low, high, amax),)  # type: ignore[assignment]
    outer = tl.div_rn(tl.maximum(tl.max(top, axis=0), amax_floor), _NVFP4_RANGE)
    for piece in tl.static_range(PIECES):
        low, high, amax = units[piece]
        group = piece * LANES + tl.arange(0, LANES)
        scale = f32_to_e4m3(tl.div_rn(amax, 6.0 * outer))
        decoded = e4m3_to_f32(scale)
        inverse = tl.where(decoded > 0, tl.div_rn(1.0, decoded * outer), 0.0)
        low = e2m1_pack_ties_to_zero(low, inverse, False)
        high = e2m1_pack_ties_to_zero(high, inverse, False)
        store_words(q + group * 2, low, high, group < GROUPS, ALIGNED)
        tl.store(sf + group, scale.to(tl.uint8, bitcast=True), mask=group < GROUPS)
    tl.store(token_scale + row, outer)


@triton.jit
def quantize_fp8_token(
    x, q, sf, row, amax_floor, x_stride, q_stride, sf_stride,
    H: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row → E4M3 and its fp32 scale, by IEEE division."""
    UNITS: tl.constexpr = H // E4M3_UNIT
    PIECES: tl.constexpr = (UNITS + LANES - 1) // LANES
    row = row.to(tl.int64)
    x += row * x_stride
    q += row * q_stride
    tiles = ()
    top = tl.zeros([LANES, E4M3_UNIT], tl.float32)
    for piece in tl.static_range(PIECES):
        unit = piece * LANES + tl.arange(0, LANES)
        at = columns_at(x + unit * E4M3_UNIT, E4M3_UNIT, 16, ALIGNED)
        v = tl.load(at, mask=(unit < UNITS)[:, None], other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(v))
        tiles += (v,)  # type: ignore[assignment]
    scale = tl.div_rn(tl.maximum(tl.max(tl.max(top, axis=1), axis=0), amax_floor), _E4M3_MAX)
    inverse = tl.div_rn(1.0, scale)
    for piece in tl.static_range(PIECES):
        unit = piece * LANES + tl.arange(0, LANES)
        at = columns_at(q + unit * E4M3_UNIT, E4M3_UNIT, 16, ALIGNED)
        tl.store(at, f32_to_e4m3(tiles[piece] * inverse), mask=(unit < UNITS)[:, None])
    tl.store(sf + row * sf_stride, scale)
