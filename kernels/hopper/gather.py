"""Tokens that are quantized already, laid out for GEMM 1 on SM90, and the list of its work.

What `scatter` is to BF16 tokens: the launch behind the plan where a pre-dispatch of DeepGEMM's buffer has run before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.hopper.scatter import pack_tiles
from megamoe.kernels.pdl import gdc_launch_dependents, gdc_wait
from megamoe.kernels.routing import RoutingPlan


@triton.jit(do_not_specialize=["x_stride", "sf_stride", "num_tokens", "num_tiles", "capacity"])
def gather_kernel(
    x, sf, topk_weights, slot_rows, tiles, q, scale, row_weight, packed_tiles, tile_count,
    x_stride, sf_stride, num_tokens, num_tiles, capacity,
    H: tl.constexpr, TOP_K: tl.constexpr, K_ORDER: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, g): token t, GROUPS blocks of 128 columns, copied to the row of each of its slots. Program (T, 0)
    packs the tile list.

    x int32 [T, H/4], four E4M3 per word, and sf fp32 [T, H/128], both with strides of rows in elements; q int32
    [capacity, H/4], blocks of 128 columns in `weights.k_order` where K_ORDER; scale fp32 [H/128, capacity]; row_weight
    fp32 [capacity]: the slots' weights as they are, the pre-dispatch has applied factors. Safe: as `scatter_kernel`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.program_id(0) == num_tokens:
        if tl.program_id(1) == 0:
            pack_tiles(tiles, packed_tiles, tile_count, num_tiles)
    else:
        token = tl.program_id(0).to(tl.int64)
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        word = tl.arange(0, 32)
        source = word
        if K_ORDER:  # of words, four columns each: position 8j + 4h + c holds word 8c + 2j + h
            source = word % 4 * 8 + word // 8 * 2 + word // 4 % 2
        live = (group * 128 < H)[:, None]
        codes = tl.load(x + token * x_stride + group[:, None] * 32 + source[None, :], mask=live, other=0)
        scales = tl.load(sf + token * sf_stride + group, mask=group * 128 < H, other=0.0)
        for k in tl.static_range(TOP_K):
            row = tl.load(slot_rows + token * TOP_K + k)
            if row >= 0:
                target = q + row.to(tl.int64) * (H // 4) + group[:, None] * 32 + word[None, :]
                tl.store(target, codes, mask=live)
                tl.store(scale + group * capacity + row, scales, mask=group * 128 < H)
                if tl.program_id(1) == 0:
                    tl.store(row_weight + row, tl.load(topk_weights + token * TOP_K + k))


def gather(
    x: torch.Tensor,
    sf: torch.Tensor,
    topk_weights: torch.Tensor,
    plan: RoutingPlan,
    *,
    num_tiles: int,
    q: torch.Tensor,
    scale: torch.Tensor,
    row_weight: torch.Tensor,
    packed_tiles: torch.Tensor,
    tile_count: torch.Tensor,
    k_order: bool,
    pdl: bool = False,
) -> None:
    """Contract: `gather_kernel`, for x E4M3 [T, H] and sf fp32 [T, H/128] (rows may be strided, by whole words),
    topk_weights fp32 [T, K] contiguous and `plan` of its T·K slots, whose rows are aligned; `pdl` is PDL, on a GPU
    only. One launch; none for no tokens."""
    (tokens, hidden), top_k = x.shape, topk_weights.shape[1]
    if tokens == 0:
        return
    blocks = hidden // 128
    groups = min(16, triton.next_power_of_2(blocks))
    words = x.view(torch.int32)
    with torch.cuda.device_of(x):
        gather_kernel[tokens + 1, triton.cdiv(blocks, groups)](
            words, sf, topk_weights, plan.slot_rows, plan.tiles, q.view(torch.int32), scale, row_weight,
            packed_tiles, tile_count, words.stride(0), sf.stride(0), tokens, num_tiles, q.shape[0],
            H=hidden, TOP_K=top_k, K_ORDER=k_order, GROUPS=groups, PDL=pdl, launch_pdl=pdl,
            num_warps=4,
        )  # fmt: skip


def compile_jobs(arch: int) -> list[CompileJob]:
    if arch != 90:
        return []
    signature = {
        "x": "*i32", "sf": "*fp32", "topk_weights": "*fp32", "slot_rows": "*i32", "tiles": "*i32", "q": "*i32",
        "scale": "*fp32", "row_weight": "*fp32", "packed_tiles": "*i32", "tile_count": "*i32",
        "x_stride": "i32", "sf_stride": "i32", "num_tokens": "i32", "num_tiles": "i32", "capacity": "i32",
    }  # fmt: skip
    return [
        CompileJob(
            name=f"hopper gather/{'k_order' if k_order else 'natural'}",
            kernel="hopper_gather",
            recipe="fp8xfp4/block128/deep_gemm_sm90" if k_order else "fp8xfp8/block128/deep_gemm_sm90",
            fn=gather_kernel,
            signature=signature,
            constexprs={"H": 4096, "TOP_K": 6, "K_ORDER": k_order, "GROUPS": 16, "PDL": True},
            options={"num_warps": 4, "launch_pdl": True},
            divisible_by_16=frozenset(arg for arg, kind in signature.items() if kind.startswith("*")),
        )
        for k_order in (False, True)
    ]
