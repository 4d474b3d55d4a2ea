"""Sizes that scale layouts round to."""

from __future__ import annotations

from megamoe.deep_gemm.utils.math import align

_TMA_BYTES = 16


def get_tma_aligned_size(mn: int, element_size: int) -> int:
    """`mn` elements of `element_size` bytes (a divisor of 16) rounded up to whole 16-byte units."""
    if element_size < 1 or _TMA_BYTES % element_size:
        raise ValueError(f"element_size is {element_size}; allowed: divisors of {_TMA_BYTES}")
    return align(mn, _TMA_BYTES // element_size)
