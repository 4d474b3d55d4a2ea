"""Quantizers and scale layouts of `deep_gemm.utils` that MegaMoE's callers use."""

from megamoe.deep_gemm.utils import layout, math
from megamoe.deep_gemm.utils.layout import get_tma_aligned_size
from megamoe.deep_gemm.utils.math import (
    align,
    ceil_div,
    pack_ue8m0_to_int,
    per_block_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
    per_token_cast_to_nvfp4,
    transform_ue4m3_sf_into_required_layout,
)

__all__ = [
    "align",
    "ceil_div",
    "get_tma_aligned_size",
    "layout",
    "math",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "per_token_cast_to_nvfp4",
    "transform_ue4m3_sf_into_required_layout",
]
