"""`Workspace`: every buffer a layer call writes between its input and its output, allocated once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from megamoe.kernels.layouts.scale_atoms import GROUPS_PER_WORD
from megamoe.kernels.routing import RoutingPlan, allocate_plan
from megamoe.recipe import ElementFormat, ScaleFormat
from megamoe.spec import LayerSpec


class Tokens(NamedTuple):
    """The first five of `Workspace`, which the pre-dispatch writes, or which a caller has already."""

    x_q: torch.Tensor
    x_sf: torch.Tensor | None
    x_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Workspace:
    """Buffers for up to `max_tokens` tokens. Rows beyond the live ones hold anything, NaN included.

    x_q          [T, H] E4M3 or BF16, or [T, H/2] packed E2M1; x_sf: its scales, row-major (bytes padded to whole
                 words), None for BF16
    x_scale      fp32 [T], NVFP4's per-token factor; None elsewhere
    topk_ids     int64 [T, K], local; topk_weights fp32 [T, K], as the pre-dispatch wrote them
    plan         permuted order of the routed slots and the tile list, for tiles of `plan`'s block_m rows
    act_q/act_sf intermediate of the routed slots in permuted order, [T·K, I] and its scales
    shared_act_* intermediate of a dense shared MLP in token order, [T, I·S]; None without one
    rows         BF16 [T, K (+1), H], GEMM 2's row of each slot, that of a dense shared MLP last
    """

    x_q: torch.Tensor
    x_sf: torch.Tensor | None
    x_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    plan: RoutingPlan
    act_q: torch.Tensor
    act_sf: torch.Tensor | None
    shared_act_q: torch.Tensor | None
    shared_act_sf: torch.Tensor | None
    rows: torch.Tensor

    @classmethod
    def allocate(
        cls,
        spec: LayerSpec,
        max_tokens: int,
        device: torch.device | str,
        *,
        min_block_m: int,
        tokens: Tokens | None = None,
    ) -> Workspace:
        """Uninitialised buffers, but for `tokens` where they are given; the tile list is sized for tiles of at least
        `min_block_m` rows."""
        t = spec.traits
        slots = max_tokens * spec.top_k
        make = _Allocator(device)
        has_shared = spec.shared_intermediate > 0
        if tokens is None:
            tokens = Tokens(
                x_q=make.elements(max_tokens, spec.hidden, t.act),
                x_sf=make.scales(max_tokens, spec.hidden, t.act_scale_format, t.act_group),
                x_scale=make(torch.float32, max_tokens) if t.token_scale else None,
                topk_ids=make(torch.int64, max_tokens, spec.top_k),
                topk_weights=make(torch.float32, max_tokens, spec.top_k),
            )
        return cls(
            *tokens,
            plan=allocate_plan(max_tokens, spec.top_k, spec.num_slot_experts, min_block_m, device),
            act_q=make.elements(slots, spec.intermediate, t.act),
            act_sf=make.scales(slots, spec.intermediate, t.mid_scale_format, t.mid_group),
            shared_act_q=make.elements(max_tokens, spec.shared_intermediate, t.act) if has_shared else None,
            shared_act_sf=make.scales(max_tokens, spec.shared_intermediate, t.mid_scale_format, t.mid_group)
            if has_shared
            else None,
            rows=make(torch.bfloat16, max_tokens, spec.combine_slots, spec.hidden),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, the plan's under `plan.<name>`."""
        found: dict[str, torch.Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                found[field.name] = value
        for field in fields(self.plan):
            value = getattr(self.plan, field.name)
            if isinstance(value, torch.Tensor):
                found[f"plan.{field.name}"] = value
        return found

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


class _Allocator:
    def __init__(self, device: torch.device | str) -> None:
        self.device = device

    def __call__(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def elements(self, rows: int, columns: int, element: ElementFormat) -> torch.Tensor:
        if element == "e2m1":
            return self(torch.uint8, rows, columns // 2)
        return self(torch.bfloat16 if element == "bf16" else torch.float8_e4m3fn, rows, columns)

    def scales(self, rows: int, columns: int, scale: ScaleFormat | None, group: int) -> torch.Tensor | None:
        if scale is None:
            return None
        groups = -(-columns // group) if group else 1
        if scale == "fp32":
            return self(torch.float32, rows, groups)
        return self(torch.uint8, rows, -(-groups // GROUPS_PER_WORD) * GROUPS_PER_WORD)
