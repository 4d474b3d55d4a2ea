"""The token tile that upstream's SM100 kernel picks: callers lay out `shared_l1_acts_sf` by it."""

from __future__ import annotations

from megamoe.deep_gemm.arguments import SM100_KINDS
from megamoe.validation import check_choice, check_count

_TILES = ((8.5, 16), (16.5, 32), (32.5, 64), (64.5, 96), (96.5, 128))
_LARGEST = 192


def get_block_m_for_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_tokens: int,
    num_topk: int,
    mma_type: str = "fp8xfp4",
) -> int:
    """Upstream's BLOCK_M for `num_tokens` tokens a rank, by the expected tokens of an expert.

    Our kernels have tiles of their own and do not ask for it: it is here for callers that write `shared_l1_acts_sf`.
    """
    check_choice("mma_type", mma_type, SM100_KINDS)
    for name, value, least in (
        ("num_ranks", num_ranks, 1),
        ("num_experts", num_experts, 1),
        ("num_max_tokens_per_rank", num_max_tokens_per_rank, 0),
        ("num_tokens", num_tokens, 0),
        ("num_topk", num_topk, 1),
    ):
        check_count(name, value, least)
    expected = num_tokens * num_ranks * num_topk / num_experts
    return next((block_m for most, block_m in _TILES if expected <= most), _LARGEST)
