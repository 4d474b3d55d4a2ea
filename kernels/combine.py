"""The combine: one BF16 row per token from the rows of its slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.pdl import gdc_wait
from megamoe.profile import combine_work

_TILE = {"BLOCK_T": 1, "BLOCK_H": 1024}  # the fastest of those swept on an H200, from 64 tokens to 8192
_OPTIONS: dict[str, object] = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["num_tokens"], launch_metadata=combine_work)
def combine_kernel(
    rows, topk_ids, topk_weights, out, out_stride, num_tokens, num_experts,
    H: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, WEIGHTED: tl.constexpr, PDL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[t] = BF16(Σ_k [w ·] rows[t, k] over valid ids (ascending k) + shared row), fp32 from +0, rounded once.

    WEIGHTED (trtllm-gen): rows meet the top-k weights here, one rounded product each. DeepGEMM's carry them already.

    One program per BLOCK_T tokens × BLOCK_H columns; its loads are 16 bytes wide and independent of each other. Rows
    of slots without a valid id are never read: GEMM 2 did not write them. They count as +0, which changes no sum: one
    that starts at +0 is never −0. Nothing is fused, and every token is summed in the same order whatever the batch.
    Safe: programs write disjoint ranges and read only inputs.

    PDL: the last launch of a chain (`pdl`).
    """
    if PDL:
        gdc_wait()
    SLOTS: tl.constexpr = TOP_K + (1 if SHARED else 0)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    token = token.to(tl.int64)
    col = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = (col < H)[None, :]
    row = rows + token[:, None] * (SLOTS * H) + col[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(topk_ids + token * TOP_K + k, mask=live, other=-1)
        valid = (expert >= 0) & (expert < num_experts)
        part = tl.load(row + k * H, mask=valid[:, None] & in_row, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(topk_weights + token * TOP_K + k, mask=valid, other=0.0)[:, None]
        total += part
    if SHARED:
        total += tl.load(row + TOP_K * H, mask=live[:, None] & in_row, other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * out_stride + col[None, :], total.to(tl.bfloat16), mask=live[:, None] & in_row)


def combine(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    *,
    num_experts: int,
    shared: bool,
    topk_weights: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out BF16 [T, H] = the sum of each token's rows, BF16 [T, K, H] or, with a last shared one, [T, K+1, H].

    topk_ids [T, K], int32 or int64; ids outside [0, num_experts) contribute nothing. topk_weights fp32 [T, K] weigh
    the rows of the slots; None: they carry their weights already. Contiguous, except that rows of `out` may be strided;
    H a multiple of 8. `pdl`: PDL, on a GPU only. One launch; none for T = 0. `TypeError`/`ValueError` before the launch
    for anything else.
    """
    tensors = [
        ("rows", rows, (torch.bfloat16,)),
        ("topk_ids", topk_ids, (torch.int32, torch.int64)),
        ("out", out, (torch.bfloat16,)),
    ]
    if topk_weights is not None:
        tensors.append(("topk_weights", topk_weights, (torch.float32,)))
        if topk_weights.shape != topk_ids.shape:
            raise ValueError(f"topk_weights has shape {tuple(topk_weights.shape)}, topk_ids {tuple(topk_ids.shape)}")
    for name, tensor, dtypes in tensors:
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")
        if not (tensor.is_contiguous() or (name == "out" and tensor.dim() == 2 and tensor.stride(1) == 1)):
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
        if tensor.device != out.device:
            raise ValueError(f"{name} is on {tensor.device}, out on {out.device}")
    if topk_ids.dim() != 2 or out.dim() != 2 or out.shape[0] != topk_ids.shape[0]:
        raise ValueError(
            f"topk_ids has shape {tuple(topk_ids.shape)}, out {tuple(out.shape)}; they must be [T, K] and [T, H]"
        )
    if pdl and not out.is_cuda:
        raise ValueError(f"pdl=True with out on {out.device}; allowed on a GPU only")
    num_tokens, top_k = topk_ids.shape
    hidden = out.shape[1]
    if tuple(rows.shape) != (num_tokens, top_k + shared, hidden):
        raise ValueError(
            f"rows has shape {tuple(rows.shape)}; topk_ids, out and shared={shared} ask for "
            f"{(num_tokens, top_k + shared, hidden)}"
        )
    if hidden % 8:
        raise ValueError(f"out has hidden size {hidden}; it must be a multiple of 8")
    if num_tokens == 0:
        return
    grid = (triton.cdiv(num_tokens, _TILE["BLOCK_T"]), triton.cdiv(hidden, _TILE["BLOCK_H"]))
    with torch.cuda.device_of(out):
        combine_kernel[grid](
            rows, topk_ids, rows if topk_weights is None else topk_weights, out, out.stride(0), num_tokens, num_experts,
            H=hidden, TOP_K=top_k, SHARED=shared, WEIGHTED=topk_weights is not None, PDL=pdl, launch_pdl=pdl,
            **_TILE, **_OPTIONS,
        )  # fmt: skip


def compile_jobs(arch: int) -> list[CompileJob]:
    """DeepSeek-V4's Flash shape, and gpt-oss's, whose hidden size is no multiple of the tile; on SM90 the first as the
    tier there launches it."""
    signature = {
        "rows": "*bf16",
        "topk_ids": "*i64",
        "topk_weights": "*fp32",
        "out": "*bf16",
        "out_stride": "i64",
        "num_tokens": "i32",
        "num_experts": "i32",
    }
    return [
        CompileJob(
            name=f"combine/{hidden}" + ("/weighted" if weighted else ""),
            kernel="combine",
            recipe="bf16 rows",
            fn=combine_kernel,
            signature=signature,
            constexprs={
                "H": hidden, "TOP_K": top_k, "SHARED": shared, "WEIGHTED": weighted, "PDL": pdl, **_TILE,
            },
            options={**_OPTIONS, "launch_pdl": pdl},
            divisible_by_16=frozenset({"rows", "topk_ids", "topk_weights", "out", "out_stride"}),
        )
        for hidden, top_k, shared, weighted, pdl in ((4096, 6, True, False, arch == 90), (2880, 4, False, True, False))
    ]  # fmt: skip
