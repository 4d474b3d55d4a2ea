"""`IdMap`: how a caller's global expert ids become this rank's local ones."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_GLOBAL_EXPERTS = 2**30
"""Experts of all ranks, shared slots included, that ids may name: kernels number them in int32."""


class IdMap(NamedTuple):
    """Global ids to local ids, and which of them name shared slots.

    ========================================  ==============================================================
    global id                                 local id
    ========================================  ==============================================================
    negative                                  itself: −1 is skipped silently, others are counted as invalid
    [0, num_experts), a map                   expert_map[id] if in [−1, num_local_experts), else 2^31 − 1
    [0, num_experts), no map                  id − expert_offset if in [0, num_local_experts), else −1
    num_experts + s, s < shared_slots         num_local_experts + s
    beyond                                    2^31 − 1, no rank's expert: counted as invalid
    ========================================  ==============================================================

    Where local ids are the global ones (`is_identity`) they are copied verbatim instead, as DeepGEMM does it, what is
    beyond too. expert_map: int32 [num_experts], contiguous, or None.
    """

    num_experts: int
    expert_offset: int
    num_local_experts: int
    shared_slots: int
    expert_map: torch.Tensor | None = None

    @property
    def is_identity(self) -> bool:
        """Whether every expert is here, under its own number, and no id names a shared slot."""
        return self.expert_map is None and self[:4] == (self.num_experts, 0, self.num_experts, 0)
