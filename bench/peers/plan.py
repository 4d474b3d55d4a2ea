"""A routing plan in the forms the peers want. Made before the clock starts: the stage `layer` begins with one given."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PaddedPlan:
    """Slots grouped by expert, each expert's rows padded to a multiple of `alignment`; M rows in all.

    row_of_slot int32 [T, K]; slot_of_row int32 [M], −1 for padding; expert_of_row int32 [M]; rows_of_expert int32 [E],
    without padding.
    """

    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    expert_of_row: torch.Tensor
    rows_of_expert: torch.Tensor
    alignment: int

    @property
    def num_rows(self) -> int:
        return len(self.slot_of_row)


def padded_plan(topk_ids: torch.Tensor, num_experts: int, alignment: int) -> PaddedPlan:
    """The plan of topk_ids int [T, K], all within [0, E); slots ascend within an expert."""
    flat = topk_ids.flatten().long()
    device = flat.device
    counts = flat.bincount(minlength=num_experts)
    padded = (counts + alignment - 1) // alignment * alignment
    first_row = padded.cumsum(0) - padded
    order = flat.argsort(stable=True)
    rank = torch.arange(len(flat), device=device) - (counts.cumsum(0) - counts)[flat[order]]
    row = torch.empty_like(flat)
    row[order] = first_row[flat[order]] + rank
    slot_of_row = torch.full((int(padded.sum()),), -1, dtype=torch.int32, device=device)
    slot_of_row[row] = torch.arange(len(flat), dtype=torch.int32, device=device)
    expert_of_row = torch.arange(num_experts, device=device).repeat_interleave(padded).int()
    return PaddedPlan(row.int().view(topk_ids.shape), slot_of_row, expert_of_row, counts.int(), alignment)
