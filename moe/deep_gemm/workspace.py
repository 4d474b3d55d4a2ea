"""The kernels' `Workspace` over the regions of a buffer: nothing beside the buffer is allocated."""

from __future__ import annotations

import torch

from megamoe.kernels.layouts.buffers import BufferLayout
from megamoe.kernels.operands import scale_stride
from megamoe.kernels.routing import RoutingPlan
from megamoe.recipe import ScaleFormat
from megamoe.spec import LayerSpec
from megamoe.workspace import Workspace

_ELEMENTS = {"e4m3": (torch.float8_e4m3fn, 1), "e2m1": (torch.uint8, 2), "bf16": (torch.bfloat16, 1)}


def workspace_of(
    layout: BufferLayout, buffer: torch.Tensor, spec: LayerSpec, x_scale: torch.Tensor | None
) -> Workspace:
    """Views for calls of `spec`, whose sizes are the buffer's. `x_scale` fp32 [T]: NVFP4's factors per token.

    Views that upstream has too keep their order of rows: `x` and `x_sf` are row-major. The intermediate's scales are
    ours alone and row-major as well, in the memory of the MN-major views.
    """
    t, tokens = spec.traits, layout.num_tokens
    slots = tokens * spec.top_k
    dtype, per_element = _ELEMENTS[t.act]

    def region(name: str) -> torch.Tensor:
        return layout.region(name).of(buffer)

    def flat(name: str) -> torch.Tensor:
        found = layout.region(name)
        return buffer[found.offset : found.offset + found.nbytes]

    def elements(name: str, rows: int, columns: int) -> torch.Tensor:
        return flat(name).view(dtype)[: rows * columns // per_element].view(rows, columns // per_element)

    def scales(name: str, rows: int, columns: int, scale: ScaleFormat | None, group: int) -> torch.Tensor | None:
        if scale is None:
            return None
        stride = scale_stride(columns, scale, group)
        memory = flat(name).view(torch.float32 if scale == "fp32" else torch.uint8)
        return memory[: rows * stride].view(rows, stride)

    shared = spec.shared_intermediate
    return Workspace(
        x_q=elements("x", tokens, spec.hidden),
        x_sf=scales("x_sf", tokens, spec.hidden, t.act_scale_format, t.act_group),
        x_scale=x_scale,
        topk_ids=region("topk_idx"),
        topk_weights=region("topk_weights"),
        plan=RoutingPlan(
            sorted_slots=region("plan.sorted_slots"),
            expert_offsets=region("plan.expert_offsets"),
            tiles=region("plan.tiles"),
            skipped=region("plan.skipped"),
        ),
        act_q=elements("l2_acts", slots, spec.intermediate),
        act_sf=scales("l2_acts_sf", slots, spec.intermediate, t.mid_scale_format, t.mid_group),
        shared_act_q=elements("shared_l2_acts", tokens, shared) if shared else None,
        shared_act_sf=scales("shared_l2_acts_sf", tokens, shared, t.mid_scale_format, t.mid_group) if shared else None,
        rows=flat("combine")
        .view(torch.bfloat16)[: tokens * spec.combine_slots * spec.hidden]
        .view(tokens, spec.combine_slots, spec.hidden),
    )
