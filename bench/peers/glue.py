"""The small kernels between a peer's GEMMs, where the peer brings none: scatter, activation, weighted combine."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from megamoe.kernels.numerics import f32_to_e4m3

_GROUP = 128
_E4M3_MAX = tl.constexpr(448.0)
_AMAX_FLOOR = tl.constexpr(1e-10)
_BLOCK_H = 1024


@triton.jit
def _store_group(values, q, sf, live, ROWS: tl.constexpr):
    """E4M3 of one group of 128 per row and its fp32 scale; q [ROWS, 128] and sf [ROWS] are pointers.

    Arithmetic as the pre-dispatch's `fp8_block128`, byte for byte: `/` would be an approximate division on a GPU.
    """
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), axis=1), _AMAX_FLOOR), _E4M3_MAX)
    tl.store(q, f32_to_e4m3(values * tl.div_rn(1.0, scale)[:, None]), mask=live[:, None])
    tl.store(sf, scale, mask=live)


@triton.jit
def scatter_quantized_kernel(
    x, row_of_slot, q, sf, sf_row, sf_group, num_tokens,
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """x BF16 [T, H] to q E4M3 [M, H] and its scales per 128: each token's row goes to the K rows of its slots.

    Grid: (token blocks, groups). Safe: rows of different slots differ.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.program_id(1)
    live = token < num_tokens
    col = group * 128 + tl.arange(0, 128)
    values = tl.load(x + token.to(tl.int64)[:, None] * H + col[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of_slot + token * TOP_K + k, mask=live, other=0).to(tl.int64)
        at = q + row[:, None] * H + col[None, :]
        _store_group(values, at, sf + row * sf_row + group * sf_group, live, BLOCK_T)


@triton.jit
def swiglu_quantized_kernel(
    gate_up, slot_of_row, q, sf, sf_row, sf_group, num_rows, clamp,
    I: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """gate_up BF16 [M, 2I], gate columns first, to E4M3 [M, I] and scales per 128; padding rows are skipped.

    Grid: (row blocks, groups).
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(1)
    live = row < num_rows
    live &= tl.load(slot_of_row + row, mask=live, other=-1) >= 0
    row = row.to(tl.int64)
    col = group * 128 + tl.arange(0, 128)
    at = gate_up + row[:, None] * (2 * I) + col[None, :]
    gate = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
    up = tl.load(at + I, mask=live[:, None], other=0.0).to(tl.float32)
    gate = tl.minimum(gate, clamp)
    up = tl.minimum(tl.maximum(up, -clamp), clamp)
    values = gate / (1 + tl.exp(-gate)) * up
    _store_group(values, q + row[:, None] * I + col[None, :], sf + row * sf_row + group * sf_group, live, BLOCK_M)


@triton.jit
def combine_rows_kernel(
    rows, row_of_slot, weights, out, num_tokens,
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[t] = BF16(Σ_k weights[t, k] · rows[row_of_slot[t, k]]), fp32 sums. Grid: (tokens, column blocks)."""
    token = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of_slot + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + k)
        total += weight * tl.load(rows + row * H + col, mask=col < H, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * H + col, total.to(tl.bfloat16), mask=col < H)


def scatter_quantized(x: torch.Tensor, row_of_slot: torch.Tensor, q: torch.Tensor, sf: torch.Tensor) -> None:
    """q E4M3 [M, H] and sf fp32 [M, H/128] (any strides) of x BF16 [T, H], by row_of_slot int32 [T, K]."""
    tokens, hidden = x.shape
    block = 4
    grid = (triton.cdiv(tokens, block), hidden // _GROUP)
    scatter_quantized_kernel[grid](
        x, row_of_slot, q, sf, sf.stride(0), sf.stride(1), tokens,
        H=hidden, TOP_K=row_of_slot.shape[1], BLOCK_T=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def swiglu_quantized(
    gate_up: torch.Tensor, slot_of_row: torch.Tensor, q: torch.Tensor, sf: torch.Tensor, clamp: float | None
) -> None:
    """q E4M3 [M, I] and sf fp32 [M, I/128] (any strides) of SwiGLU(gate_up BF16 [M, 2I]) under `clamp`."""
    num_rows, width = q.shape
    block = 8
    grid = (triton.cdiv(num_rows, block), width // _GROUP)
    swiglu_quantized_kernel[grid](
        gate_up, slot_of_row, q, sf, sf.stride(0), sf.stride(1), num_rows, math.inf if clamp is None else clamp,
        I=width, BLOCK_M=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def combine_rows(rows: torch.Tensor, row_of_slot: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """out BF16 [T, H] = the weighted sum of each token's rows of BF16 [M, H]."""
    tokens, hidden = out.shape
    combine_rows_kernel[(tokens, triton.cdiv(hidden, _BLOCK_H))](
        rows, row_of_slot, weights, out, tokens,
        H=hidden, TOP_K=row_of_slot.shape[1], BLOCK_H=_BLOCK_H, num_warps=4,
    )  # fmt: skip
