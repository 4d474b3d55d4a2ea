"""Host-side quantizers in plain torch, byte for byte those of `deep_gemm.utils.math` 0.1.7 for finite input.

They define what weights and test inputs look like; tokens go through the pre-dispatch. All take x [m, n], fp32 or BF16.
"""

from __future__ import annotations

import torch

from megamoe import formats

_FLOOR = 1e-4
_BITS_BELOW_EXPONENT = 23


def ceil_div(x: int, y: int) -> int:
    """x / y rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The smallest multiple of y that is at least x."""
    return ceil_div(x, y) * y


def pack_ue8m0_to_int(x: torch.Tensor) -> torch.Tensor:
    """fp32 [.., 4k], positive powers of two, to int32 [.., k]: their exponent bytes, four a word. Waits for the GPU."""
    if x.dtype != torch.float32 or x.shape[-1] % 4:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; expected float32 with a last axis of whole fours")
    bits = x.contiguous().view(torch.int32)
    if bool(((bits < 0) | (bits & ((1 << _BITS_BELOW_EXPONENT) - 1) != 0)).any()):
        raise ValueError("x has elements that are no positive powers of two")
    return (bits >> _BITS_BELOW_EXPONENT).to(torch.uint8).view(torch.int32)


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [m, n] and a scale per row and `gran_k` columns: fp32 [m, ⌈n/gran_k⌉], powers of two with `use_ue8m0`, or
    int32 words of four exponent bytes (the count rounded up to four with 2^0) with `use_packed_ue8m0` too."""
    groups, sf = _scaled_groups(x, 448.0, use_ue8m0, gran_k, use_packed_ue8m0)
    return formats.encode_e4m3(groups).flatten(1)[:, : x.shape[1]].contiguous(), sf


def per_token_cast_to_fp4(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed E2M1 int8 [m, n/2], ties to the smaller magnitude, and scales as `per_token_cast_to_fp8` has them."""
    _require_even(x)
    groups, sf = _scaled_groups(x, 6.0, use_ue8m0, gran_k, use_packed_ue8m0)
    return _fp4_bytes(groups.flatten(1))[:, : x.shape[1] // 2].contiguous(), sf


def per_token_cast_to_nvfp4(
    x: torch.Tensor, gran_k: int = 16, use_packed_ue4m3: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed E2M1 int8 [m, n/2] and UE4M3 scales amax/6 per `gran_k` columns, as fp32 or, packed, int32 words of four.

    Without an outer scale: the rule of weights and of the intermediate, not of the pre-dispatch.
    """
    _require_even(x)
    if x.shape[1] % gran_k:
        raise ValueError(f"x has {x.shape[1]} columns; allowed: multiples of gran_k = {gran_k}")
    groups = x.float().unflatten(1, (-1, gran_k))
    sf = formats.encode_e4m3(groups.abs().amax(-1) / 6.0).float()
    inverse = torch.where(sf > 0, 1.0 / sf, 0.0)
    packed = _fp4_bytes((groups * inverse[..., None]).flatten(1))
    return packed, _pack_ue4m3(sf) if use_packed_ue4m3 else sf


def per_block_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [m, n] and an fp32 scale per `gran_k` × `gran_k` block, [⌈m/gran_k⌉, ⌈n/gran_k⌉]."""
    _require_matrix(x)
    rows, columns = x.shape
    padded = _padded(x, align(rows, gran_k), align(columns, gran_k))
    blocks = padded.unflatten(1, (-1, gran_k)).unflatten(0, (-1, gran_k))
    sf = _scales(blocks.float().abs().amax((1, 3), keepdim=True), 448.0, use_ue8m0)
    q = formats.encode_e4m3(blocks * (1.0 / sf)).reshape(padded.shape)
    return q[:rows, :columns].contiguous(), sf[:, 0, :, 0]


def transform_ue4m3_sf_into_required_layout(sf: torch.Tensor, mn: int) -> torch.Tensor:
    """UE4M3 scales of a weight, fp32 [.., mn, K/16], to int32 words [.., mn, K/64] with strides (.., 1, mn)."""
    if sf.dim() not in (2, 3) or sf.shape[-2] != mn or sf.shape[-1] % 4:
        raise ValueError(f"sf has shape {tuple(sf.shape)}; expected [.., mn = {mn}, whole fours]")
    if mn % 4:
        raise ValueError(f"mn is {mn}; allowed: multiples of 4")
    return _pack_ue4m3(sf).mT.contiguous().mT


def _pack_ue4m3(sf: torch.Tensor) -> torch.Tensor:
    return formats.encode_e4m3(sf.float()).contiguous().view(torch.uint8).view(torch.int32)


def _scaled_groups(
    x: torch.Tensor, largest: float, use_ue8m0: bool, gran_k: int, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [m, groups, gran_k] divided by their scales, and the scales as the caller wants them."""
    _require_matrix(x)
    if packed and not use_ue8m0:
        raise ValueError("use_packed_ue8m0 is True; it needs use_ue8m0=True")
    groups = _padded(x, x.shape[0], align(x.shape[1], gran_k)).unflatten(1, (-1, gran_k))
    sf = _scales(groups.float().abs().amax(-1), largest, use_ue8m0)
    scaled = groups * (1.0 / sf)[..., None]
    if packed:
        sf = pack_ue8m0_to_int(torch.nn.functional.pad(sf, (0, -sf.shape[1] % 4), value=1.0))
    return scaled, sf


def _scales(amax: torch.Tensor, largest: float, use_ue8m0: bool) -> torch.Tensor:
    sf = amax.clamp_min(_FLOOR) / largest
    return formats.decode_ue8m0(formats.ue8m0_ceil(sf, 1, 254)) if use_ue8m0 else sf


def _fp4_bytes(values: torch.Tensor) -> torch.Tensor:
    return formats.pack_e2m1(formats.encode_e2m1(values, "toward_zero")).view(torch.int8)


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def _require_matrix(x: torch.Tensor) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; expected float32 or bfloat16 [m, n]")


def _require_even(x: torch.Tensor) -> None:
    _require_matrix(x)
    if x.shape[1] % 2:
        raise ValueError(f"x has {x.shape[1]} columns; two E2M1 numbers share a byte: allowed: an even number")
