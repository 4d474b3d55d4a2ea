"""Encode and decode of the number formats that cross a byte boundary, in plain torch.

Every function is elementwise, keeps the shape and device of its argument and never synchronises. Rounding
rules are those of the DeepGEMM MegaMoE contract (`sgl-deep-gemm` 0.1.7) and of the PTX `cvt` instructions
that it is built from.

=======  ====  ======================================================================================
format   bits  value
=======  ====  ======================================================================================
E2M1     4     bit 3 sign, magnitudes `E2M1_VALUES`; no Inf, no NaN; two to a byte, low nibble first
E4M3     8     `torch.float8_e4m3fn`: largest 448 (0x7E), NaN 0x7F and 0xFF, no Inf
UE8M0    8     2^(byte − 127); byte 0 is 2^−127, not 0; byte 255 is NaN
UE4M3    8     E4M3 of a non-negative number: bit 7 is 0
=======  ====  ======================================================================================
"""

from __future__ import annotations

import math
import struct
from itertools import pairwise
from typing import Literal

import torch

E2M1_VALUES: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0

Ties = Literal["even", "toward_zero"]

_E2M1_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(E2M1_VALUES))
_SIGN_CODE = 8
_FP32_MANTISSA_BITS = 23
_FP32_MANTISSA = (1 << _FP32_MANTISSA_BITS) - 1


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 value of each E2M1 code (uint8, one code per element; bits 4–7 are ignored). Code 8 is −0."""
    _require("codes", codes, torch.uint8)
    values = E2M1_VALUES + tuple(-value for value in E2M1_VALUES)
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[(codes & 0xF).long()]


def encode_e2m1(x: torch.Tensor, ties: Ties) -> torch.Tensor:
    """E2M1 code (uint8, 0…15) nearest to each fp32 element; magnitudes above 6 and ±Inf become ±6.

    `ties="even"` is the hardware's `cvt.rn.satfinite.e2m1x2` (also DeepGEMM's fused requantizer): ties go to
    the even code, the sign of a zero or of a negative that rounds to zero is kept (code 8), NaN becomes +6
    (code 7). `ties="toward_zero"` is DeepGEMM's pre-dispatch: the code counts the midpoints strictly below
    |x|, so ties go to the smaller magnitude, −0 is never produced, and NaN becomes 0.
    """
    _require("x", x, torch.float32)
    if ties not in ("even", "toward_zero"):
        raise ValueError(f"ties={ties!r} is unknown; allowed: 'even', 'toward_zero'")
    midpoints = list(_E2M1_MIDPOINTS)
    if ties == "even":
        # A midpoint whose lower neighbour has an odd code must round up: move it just below itself in fp32,
        # so that "strictly below" admits it too.
        midpoints[1::2] = [_fp32_before(midpoint) for midpoint in midpoints[1::2]]
    magnitude = x.abs().contiguous()
    code = torch.bucketize(magnitude, torch.tensor(midpoints, dtype=torch.float32, device=x.device), out_int32=True)
    negative = torch.signbit(x)
    if ties == "toward_zero":
        negative = negative & (code != 0)
    code = code + _SIGN_CODE * negative
    return torch.where(x.isnan(), 7 if ties == "even" else 0, code).to(torch.uint8)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes `[..., N]` (0…15, N even) to bytes `[..., N/2]`; the low nibble holds the even column."""
    _require("codes", codes, torch.uint8)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes has shape {tuple(codes.shape)}; its last dimension must exist and be even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_e2m1`: uint8 or int8 bytes `[..., N/2]` to uint8 codes `[..., N]`."""
    _require("packed", packed, torch.uint8, torch.int8)
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 to `float8_e4m3fn` as `cvt.rn.satfinite.e4m3x2` does it.

    Nearest, ties to even, −0 kept; magnitudes above 448 and ±Inf become ±448; NaN becomes 0x7F.
    """
    _require("x", x, torch.float32)
    # Torch's own cast saturates in 2.13; older ones, which we support, turn what is above 464 into NaN.
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, code).view(torch.float8_e4m3fn)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Exact fp32 value of `float8_e4m3fn` elements or of their bytes as uint8; 0x7F and 0xFF are NaN."""
    _require("codes", codes, torch.float8_e4m3fn, torch.uint8)
    return codes.view(torch.float8_e4m3fn).float()


def encode_ue4m3(x: torch.Tensor) -> torch.Tensor:
    """UE4M3 byte (uint8, bit 7 clear) of non-negative fp32: `encode_e4m3`, so +Inf becomes 448 and NaN 0x7F.

    A negative element is outside the domain; its sign is lost.
    """
    return encode_e4m3(x).view(torch.uint8) & 0x7F


def decode_ue4m3(codes: torch.Tensor) -> torch.Tensor:
    """fp32 value of UE4M3 bytes (uint8). Bit 7 is ignored, as the tensor core ignores it; 0x7F is NaN."""
    _require("codes", codes, torch.uint8)
    return decode_e4m3(codes & 0x7F)


def ue8m0_ceil(raw: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """UE8M0 byte (uint8) within [lo, hi] of the smallest power of two ≥ `raw` (fp32, non-negative).

    The byte is the biased exponent field, plus one if the mantissa is not zero, then clamped. Hence 0 gives
    0, every subnormal gives 1 (also 2^−127, which byte 0 could hold), and NaN gives `hi`. DeepGEMM's
    pre-dispatch clamps to [1, 254]; its fused requantizer lets 0 through.
    """
    _require("raw", raw, torch.float32)
    if not 0 <= lo <= hi <= 255:
        raise ValueError(f"lo={lo}, hi={hi}: allowed are 0 <= lo <= hi <= 255")
    bits = raw.view(torch.int32)
    exponent = (bits >> _FP32_MANTISSA_BITS) & 0xFF
    rounded_up = exponent + ((bits & _FP32_MANTISSA) != 0)
    return rounded_up.clamp(lo, hi).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """Exact fp32 value 2^(byte − 127) of UE8M0 bytes (uint8): 0 is the subnormal 2^−127, 255 is NaN."""
    _require("codes", codes, torch.uint8)
    bits = codes.int() << _FP32_MANTISSA_BITS
    bits = torch.where(codes == 0, 1 << (_FP32_MANTISSA_BITS - 1), bits)
    return torch.where(codes == 255, math.nan, bits.view(torch.float32))


def ue8m0_inverse(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 factor 2^(127 − byte) that quantizers multiply by, formed as (254 − byte) << 23.

    So byte 254 gives +0.0 instead of 2^−127 and byte 0 gives 2^127. Byte 255 is NaN as a scale and outside
    the domain; the shift makes −Inf of it.
    """
    _require("codes", codes, torch.uint8)
    return ((254 - codes.int()) << _FP32_MANTISSA_BITS).view(torch.float32)


def round_to_fp32(value: float) -> float:
    """The fp32 number nearest to `value`, ties to even; one too large becomes infinite, NaN stays.

    Of a Python number, without a tensor: whatever torch's default device and dtype, and without waiting for a GPU.
    """
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def round_to_bf16(value: float) -> float:
    """As `round_to_fp32`, then to the nearest BF16 number, ties to even: what a launch passes as a BF16 limit."""
    value = round_to_fp32(value)
    if not math.isfinite(value):
        return value
    bits = _fp32_bits(value)
    bits += 0x7FFF + (bits >> 16 & 1)
    return _fp32_of_bits(bits & 0xFFFF0000)


def _fp32_before(value: float) -> float:
    """The largest fp32 number below `value`, which is one itself and positive."""
    return _fp32_of_bits(_fp32_bits(value) - 1)


def _fp32_bits(value: float) -> int:
    bits: int = struct.unpack("I", struct.pack("f", value))[0]
    return bits


def _fp32_of_bits(bits: int) -> float:
    value: float = struct.unpack("f", struct.pack("I", bits))[0]
    return value


def _require(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {names}")
