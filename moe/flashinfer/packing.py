"""Routing in an int32 word per slot: the global expert id in the high half, the weight's BF16 bits in the low one."""

from __future__ import annotations

import torch

from megamoe.kernels.layouts import trtllm


def pack_topk_ids(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """int32 words [T, K] of ids int16/int32/int64 [T, K] and weights of any float dtype [T, K], rounded to BF16.

    Ids must lie in −32768 … 32767, which is the caller's promise: to check it would wait for the GPU. Raises
    `TypeError`/`ValueError` for other dtypes and shapes. Contract: FlashInfer 0.6.18's packed top-k.
    """
    return trtllm.pack_topk(topk_ids, topk_weights)


def unpack_topk_ids(topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_topk_ids`: int32 words [T, K] to ids int32 and weights BF16."""
    return trtllm.unpack_topk(topk_ids)
