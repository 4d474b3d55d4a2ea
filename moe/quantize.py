"""The pre-dispatch's quantization alone: BF16 rows to elements and block scales, bit for bit.

Contract: DeepGEMM MegaMoE of `sgl-deep-gemm` 0.1.7. On a GPU, or under Triton's interpreter, the pre-dispatch kernel
runs; elsewhere the reference, which it equals. Rows of x may be strided. The kernel serves H up to 16384 and
raises `ValueError` beyond; the reference has no such limit. Every function raises `TypeError` (type, dtype) or
`ValueError` (shape, group, floor), naming the argument, before anything runs.
"""

from __future__ import annotations

import math

import torch

from megamoe import validation
from megamoe.backends.triton import device_unsupported_reason

MX_GROUPS = (32, 64, 128)
NVFP4_GROUP = 16
FP8_GROUP = 128
LEAST_FLOOR = 1e-30
"""Smallest `amax_floor` of the kinds with fp32 scales: zeros alone must have a scale with a reciprocal."""


def quantize_mxfp8(
    x: torch.Tensor, *, group: int = 32, amax_floor: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x BF16 [n, H] to (q float8_e4m3fn [n, H], sf uint8 [n, H/group] UE8M0 bytes).

    Columns per scale: 32, 64 or 128, a divisor of H. `amax_floor` >= 0 is the least magnitude that a group's scale is
    made for; None: DeepGEMM's 1e-4. Nearest even, saturating; NaN becomes 0x7F.
    """
    q, sf, _ = _quantize(x, "mxfp8", group, amax_floor)
    return q, sf


def quantize_mxfp4(
    x: torch.Tensor, *, group: int = 32, amax_floor: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x BF16 [n, H] to (q uint8 [n, H/2] packed E2M1, sf uint8 [n, H/group] UE8M0 bytes).

    Low nibble = even column. Ties round toward zero, −0 is never produced and NaN becomes 0, as in DeepGEMM 0.1.7.
    Other arguments as `quantize_mxfp8`.
    """
    q, sf, _ = _quantize(x, "mxfp4", group, amax_floor)
    return q, sf


def quantize_nvfp4(
    x: torch.Tensor, *, amax_floor: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x BF16 [n, H] to (q uint8 [n, H/2] packed E2M1, sf uint8 [n, H/16] UE4M3 bytes, token_scale float32 [n]).

    An element is worth E2M1 · UE4M3 · token_scale; E2M1 as in `quantize_mxfp4`. `amax_floor` >= 1e-30 is that of the
    whole row; None: DeepGEMM's 1e-4.
    """
    q, sf, token_scale = _quantize(x, "nvfp4", NVFP4_GROUP, amax_floor)
    assert token_scale is not None
    return q, sf, token_scale


def quantize_fp8_block128(x: torch.Tensor, *, amax_floor: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x BF16 [n, H] to (q float8_e4m3fn [n, H], sf float32 [n, H/128], scales that are no powers of two).

    `amax_floor` >= 1e-30 is that of a group; None: DeepGEMM's 1e-10. Elements as in `quantize_mxfp8`.
    """
    q, sf, _ = _quantize(x, "fp8_block128", FP8_GROUP, amax_floor)
    return q, sf


def _quantize(
    x: torch.Tensor, kind: str, group: int, amax_floor: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    validation.check_tensor("x", x, dtypes=(torch.bfloat16,), rank=2, axes="[n, H]")
    if kind.startswith("mx"):
        allowed = ", ".join(map(str, MX_GROUPS))
        if isinstance(group, bool) or not isinstance(group, int):
            raise TypeError(f"group is {group!r} ({type(group).__name__}); allowed: {allowed}")
        if group not in MX_GROUPS:
            raise ValueError(f"group is {group!r}; allowed: {allowed}")
    rows, hidden = x.shape
    if hidden == 0 or hidden % group:
        raise ValueError(f"x has {hidden} columns; expected a positive multiple of the scale group {group}")
    if amax_floor is not None:
        least = 0.0 if kind.startswith("mx") else LEAST_FLOOR
        allowed = f"None or a finite float32 number >= {least}"
        number = validation.check_number("amax_floor", amax_floor, allowed)
        if not least <= number < math.inf:
            raise ValueError(f"amax_floor is {amax_floor}; allowed: {allowed}")
        amax_floor = number  # rounded to fp32, as the kernel takes it
    if device_unsupported_reason(x.device) is not None:
        from megamoe.oracle import reference

        quantized = reference.quantize(x, kind, group, amax_floor)
        assert quantized.sf is not None  # no kind here is without scales
        return quantized.q, quantized.sf, quantized.token_scale

    from megamoe.kernels import pre_dispatch

    groups = hidden // group
    fp8, fp32_scales = kind in ("mxfp8", "fp8_block128"), kind == "fp8_block128"
    q = torch.empty(
        (rows, hidden if fp8 else hidden // 2),
        dtype=torch.float8_e4m3fn if fp8 else torch.uint8,
        device=x.device,
    )
    sf = torch.empty((rows, groups), dtype=torch.float32 if fp32_scales else torch.uint8, device=x.device)
    token_scale = torch.empty(rows, dtype=torch.float32, device=x.device) if kind == "nvfp4" else None
    pre_dispatch.quantize(x, q=q, sf=sf, token_scale=token_scale, kind=kind, group=group, amax_floor=amax_floor)
    return q, sf, token_scale
