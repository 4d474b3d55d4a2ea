"""BF16 tokens laid out for GEMM 1 on SM90, and the list of its work: what `scatter` is to quantized ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.hopper.scatter import pack_tiles, slot_weight
from megamoe.kernels.pdl import gdc_launch_dependents, gdc_wait
from megamoe.kernels.routing import RoutingPlan

_GROUPS = 16  # blocks of 128 columns per program
_OPTIONS: dict[str, object] = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["x_stride", "num_tokens", "num_tiles"])
def copy_rows_kernel(
    x, topk_ids, topk_weights, expert_scales, slot_rows, tiles, rows, slot_weights, packed_tiles, tile_count,
    x_stride, num_tokens, num_tiles, factor,
    H: tl.constexpr, TOP_K: tl.constexpr, HAS_SCALES: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, g): GROUPS blocks of 128 columns of token t, stored in the row of each of its slots. Program (T, 0)
    packs the tile list.

    rows BF16 [capacity, H], every block of 128 columns in `weights.bf16_k_order`; slot_weights fp32 [T, TOP_K], of the
    slots that have a row: `slot_weight`, for the combine. Safe: a row belongs to one slot, so programs write
    disjoint ranges and read only inputs.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.program_id(0) == num_tokens:
        if tl.program_id(1) == 0:
            pack_tiles(tiles, packed_tiles, tile_count, num_tiles)
    else:
        token = tl.program_id(0).to(tl.int64)
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
        position = tl.arange(0, 128)[None, :]
        live = group * 128 < H
        values = tl.load(x + token * x_stride + group * 128 + position, mask=live, other=0.0)
        # Scale group, octet, two bits of the column → as `bf16_k_order` has them: lines are read and written whole.
        values = values.reshape(GROUPS, 4, 8, 2, 2).permute(0, 2, 3, 1, 4).reshape(GROUPS, 128)
        for k in tl.static_range(TOP_K):
            row = tl.load(slot_rows + token * TOP_K + k)
            if row >= 0:
                tl.store(rows + row.to(tl.int64) * H + group * 128 + position, values, mask=live)
                if tl.program_id(1) == 0:
                    slot = token * TOP_K + k
                    weight = slot_weight(topk_weights, topk_ids, expert_scales, slot, factor, HAS_SCALES)
                    tl.store(slot_weights + slot, weight)


def copy_rows(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    plan: RoutingPlan,
    *,
    num_tiles: int,
    rows: torch.Tensor,
    slot_weights: torch.Tensor,
    packed_tiles: torch.Tensor,
    tile_count: torch.Tensor,
    expert_scales: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    pdl: bool = False,
) -> None:
    """Contract: `copy_rows_kernel`, for x BF16 [T, H] (rows may be strided) and `plan` of its T·K slots, whose rows are
    aligned; `pdl` is PDL, on a GPU only. One launch; none for no tokens."""
    (tokens, hidden), top_k = x.shape, topk_ids.shape[1]
    if tokens == 0:
        return
    with torch.cuda.device_of(x):
        copy_rows_kernel[tokens + 1, triton.cdiv(hidden // 128, _GROUPS)](
            x, topk_ids, topk_weights, slot_weights if expert_scales is None else expert_scales,
            plan.slot_rows, plan.tiles, rows, slot_weights, packed_tiles, tile_count,
            x.stride(0), tokens, num_tiles, routed_scaling_factor,
            H=hidden, TOP_K=top_k, HAS_SCALES=expert_scales is not None, GROUPS=_GROUPS,
            PDL=pdl, launch_pdl=pdl, **_OPTIONS,
        )  # fmt: skip


def compile_jobs(arch: int) -> list[CompileJob]:
    if arch != 90:
        return []
    signature = {
        "x": "*bf16", "topk_ids": "*i32", "topk_weights": "*fp32", "expert_scales": "*fp32", "slot_rows": "*i32",
        "tiles": "*i32", "rows": "*bf16", "slot_weights": "*fp32", "packed_tiles": "*i32", "tile_count": "*i32",
        "x_stride": "i32", "num_tokens": "i32", "num_tiles": "i32", "factor": "fp32",
    }  # fmt: skip
    return [
        CompileJob(
            name="hopper copy rows",
            kernel="hopper_scatter",
            recipe="bf16xfp4/none/trtllm_gen",
            fn=copy_rows_kernel,
            signature=signature,
            constexprs={"H": 4096, "TOP_K": 6, "HAS_SCALES": False, "GROUPS": _GROUPS, "PDL": True},
            options={**_OPTIONS, "launch_pdl": True},
            divisible_by_16=frozenset(arg for arg, kind in signature.items() if kind.startswith("*")),
        )
    ]
