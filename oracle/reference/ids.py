"""Whose expert a slot names, and the weight of that slot: what the pre-dispatch makes of the caller's routing."""

from __future__ import annotations

import torch

INVALID_ID = 2**31 - 1
"""Local id of an id beyond every range: no expert has it, and it is counted."""
NOT_HERE = -1
"""Local id of a slot to skip in silence: masked by the caller, or another rank's."""


def local_ids(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    num_local_experts: int,
    expert_offset: int = 0,
    shared_slots: int = 0,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [T, K], this rank's expert of every slot, from global ids.

    A routed id, [0, num_experts), becomes expert_map[id] (int32 [num_experts]) where there is a map, else
    id − expert_offset; shared slot num_experts + s becomes num_local_experts + s. `NOT_HERE`: the id is −1, or the map
    says −1, or the expert is outside [0, num_local_experts) without a map. Everything else is invalid: negative ids
    stay what they are, others (also where a map's entry is no expert of this rank) become `INVALID_ID`.

    Ids stay verbatim where global and local ids are the same and there are no shared slots (DeepGEMM's contract).
    """
    ids = topk_ids.long()
    if expert_map is None and expert_offset == 0 and num_local_experts == num_experts and not shared_slots:
        return ids
    is_routed = (ids >= 0) & (ids < num_experts)
    is_shared = (ids >= num_experts) & (ids < num_experts + shared_slots)
    if expert_map is None:
        local = ids - expert_offset
        here = (local >= 0) & (local < num_local_experts)
        routed = torch.where(here, local, NOT_HERE)
    else:
        local = expert_map.long()[torch.where(is_routed, ids, 0)]
        legal = (local >= NOT_HERE) & (local < num_local_experts)
        routed = torch.where(legal, local, INVALID_ID)
    shared = ids - num_experts + num_local_experts
    others = torch.where(ids < 0, ids, INVALID_ID)
    return torch.where(is_routed, routed, torch.where(is_shared, shared, others))


def known_ids(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32 [T, K], as upstream's kernels take ids: −1 for whatever is no expert of [0, num_experts).

    Before the cast: an int64 id of 2^32 would become expert 0, and what is beyond makes DeepGEMM write out of bounds.
    """
    return torch.where((topk_ids >= 0) & (topk_ids < num_experts), topk_ids, NOT_HERE).int()


def slot_weights(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    num_experts: int,
    shared_slots: int = 0,
    expert_scales: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
) -> torch.Tensor:
    """fp32 [T, K]: top-k weights of global ids, one fp32 product per factor.

    expert_scales fp32 [num_experts] multiply the weights of routed ids, routed_scaling_factor then every weight but a
    shared slot's.
    """
    ids, weights = topk_ids.long(), topk_weights.float()
    if expert_scales is not None:
        known = (ids >= 0) & (ids < expert_scales.numel())
        weights = torch.where(known, weights * expert_scales[torch.where(known, ids, 0)], weights)
    if routed_scaling_factor is not None:
        is_shared = (ids >= num_experts) & (ids < num_experts + shared_slots)
        weights = torch.where(is_shared, weights, weights * routed_scaling_factor)
    return weights
