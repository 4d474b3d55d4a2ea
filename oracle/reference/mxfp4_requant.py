"""FP8 weights with block scales to MXFP4, at load: the rule by which SGLang makes a fused shared expert's weights.

Source of the rule: `quantize_block_fp8_weight_to_mxfp4` of SGLang 0.5.19. It is another contract than those of the
pre-dispatch and of the fused requantizer: zeros have a sign bit, ties go to the smaller magnitude, and the exponent is
a BF16 logarithm's, which may be one too small.
"""

from __future__ import annotations

import torch

from megamoe import formats
from megamoe.oracle.reference.quantizers import BlockFormat, dequantize_weight

GROUP = 32
NAN_BYTE = 255


def mxfp4_requant_reference(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed E2M1 uint8 [N, K/2], UE8M0 uint8 [N, K/32]) of block-scaled E4M3; scale fp32, K a multiple of 32.

    Upstream's rule: values rounded to BF16; of each group's largest magnitude d = amax/6 and log2(d), both rounded to
    BF16; the byte is ⌈max(log2 d, −127)⌉ + 127. Codes count E2M1's midpoints strictly below |value / 2^e| (7 at most);
    bit 3 is set unless the value is positive, so that zeros and what rounds to zero from below are 8.

    `exact`: no BF16 anywhere, and the byte is the smallest power of two >= amax/6 (fp32 division; 0 for a group of
    zeros). Codes as above.

    Ours, where upstream's is undefined: a group with a NaN or an infinity has byte 255 and codes of zeros.
    """
    values = dequantize_weight(weight, scale, BlockFormat("e4m3", "fp32", *block))
    if not exact:
        values = values.bfloat16().float()
    groups = values.unflatten(1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    sf = _exact_byte(amax) if exact else _upstream_byte(amax)
    finite = amax < torch.inf  # a NaN is not
    scaled = groups * formats.ue8m0_inverse(torch.where(finite, sf, 254))[..., None]
    magnitude = formats.encode_e2m1(scaled.abs(), "toward_zero")
    codes = torch.where(finite[..., None], magnitude, 0) + torch.where(groups > 0, 0, 8)
    return formats.pack_e2m1(codes.flatten(1).to(torch.uint8)), torch.where(finite, sf, NAN_BYTE).to(torch.uint8)


def _upstream_byte(amax: torch.Tensor) -> torch.Tensor:
    descale = (amax.bfloat16().float() / 6).bfloat16()
    exponent = torch.log2(descale.float()).bfloat16().float().clamp_min(-127).ceil()
    return torch.where(exponent.isfinite(), exponent + 127, 0).to(torch.uint8)


def _exact_byte(amax: torch.Tensor) -> torch.Tensor:
    return formats.ue8m0_ceil(amax / 6, 0, 254)
