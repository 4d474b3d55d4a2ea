"""Row order of GEMM 1's weight: gate and up rows interleaved, so that one tile's accumulator holds both.

Source of the contract: the L1 weight transform of DeepGEMM MegaMoE (`sgl-deep-gemm` 0.1.7).

The plain order is [gate 0 … I-1; up 0 … I-1] on an axis of 2·I rows.

* `gran8`: 16 rows per period a: gate 8a … 8a+7, then up 8a … 8a+7.
* `gran16_even_odd`: 32 rows per period a, made of 16 gate and 16 up rows: 8 even gates 16a, 16a+2, …,
  8 even ups, 8 odd gates 16a+1, 16a+3, …, 8 odd ups. (Two neighbouring columns of the FP4 intermediate share
  a byte; this order gives both to one thread of upstream's epilogue.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GRANULARITY = {"gran8": 8, "gran16_even_odd": 16}
"""Source rows of gate (and as many of up) that one period of each order consumes."""


def interleave_gate_up(tensor: torch.Tensor, kind: str, dim: int = -2, *, in_place: bool = False) -> torch.Tensor:
    """Reorder the 2·I rows of `tensor` along `dim` from [gate; up] to `kind`.

    Any dtype, any leading and trailing axes; used for weights and, where a scale row belongs to one weight
    row, for their scales. The result has the strides of `tensor` where those are dense (an MN-major scale
    stays MN-major). `in_place` writes into `tensor` and returns it, holding one leading index's copy at a
    time. Raises `ValueError` for an unknown `kind` or when I is not a multiple of the granularity.
    """
    return _reorder(tensor, kind, dim, in_place, inverse=False)


def deinterleave_gate_up(tensor: torch.Tensor, kind: str, dim: int = -2, *, in_place: bool = False) -> torch.Tensor:
    """The exact inverse of `interleave_gate_up`; same arguments, same errors."""
    return _reorder(tensor, kind, dim, in_place, inverse=True)


def _reorder(tensor: torch.Tensor, kind: str, dim: int, in_place: bool, *, inverse: bool) -> torch.Tensor:
    if kind not in GRANULARITY:
        raise ValueError(f"kind={kind!r} is unknown; allowed: {', '.join(GRANULARITY)}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim={dim} is outside the {tensor.dim()} axes of a tensor of shape {tuple(tensor.shape)}")
    dim %= tensor.dim()
    rows = tensor.shape[dim]
    if rows % (2 * GRANULARITY[kind]):
        raise ValueError(
            f"tensor has {rows} gate and up rows along dim {dim}; {kind} needs 2·I rows with I a multiple of "
            f"{GRANULARITY[kind]}"
        )
    out = tensor if in_place else torch.empty_like(tensor)
    if tensor.numel() == 0:
        return out
    # Some one-byte dtypes have no copy kernel of their own; their bytes do.
    source, target = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (tensor, out))
    if in_place and dim > 0:
        for expert in range(tensor.shape[0]):
            _copy(source[expert].clone(), target[expert], kind, dim - 1, inverse)
    else:
        _copy(source.clone() if in_place else source, target, kind, dim, inverse)
    return out


def _copy(source: torch.Tensor, target: torch.Tensor, kind: str, dim: int, inverse: bool) -> None:
    """One strided copy between views whose axes at `dim` are those of the interleaved order."""
    if inverse:
        _as_interleaved(target, kind, dim).copy_(_as_periods(source, kind, dim))
    else:
        _as_periods(target, kind, dim).copy_(_as_interleaved(source, kind, dim))


def _as_periods(tensor: torch.Tensor, kind: str, dim: int) -> torch.Tensor:
    """View of an interleaved axis as (period, [parity,] gate/up, 8)."""
    return tensor.unflatten(dim, (-1, 2, 8) if kind == "gran8" else (-1, 2, 2, 8))


def _as_interleaved(tensor: torch.Tensor, kind: str, dim: int) -> torch.Tensor:
    """View of a plain [gate; up] axis with the axes of `_as_periods`."""
    if kind == "gran8":
        return tensor.unflatten(dim, (2, -1, 8)).movedim(dim, dim + 1)
    # (gate/up, period, 8, parity) -> (period, parity, gate/up, 8)
    plain = tensor.unflatten(dim, (2, -1, 8, 2))
    return plain.movedim((dim + 1, dim + 3, dim, dim + 2), (dim, dim + 1, dim + 2, dim + 3))


@triton.jit
def is_up_row(n):
    """1 where tile row n holds an up row, 0 where it holds a gate row; the same in both orders."""
    return n // 8 % 2


@triton.jit
def intermediate_column(n, ORDER: tl.constexpr):
    """Intermediate column that tile row n contributes to."""
    if ORDER == "gran8":
        return n // 16 * 8 + n % 8
    else:
        return n // 32 * 16 + n % 8 * 2 + n // 16 % 2


@triton.jit
def row_in_memory(n, INTERMEDIATE: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr):
    """Row of the weight that tile row n reads.

    ROWS says how the weight lies: `tile`, already in tile order; `gate_up`, [gate; up]; `interleaved`, gate 0, up 0, …
    Rows come in runs of 8 (16 bytes and more each), so that reading a plain weight costs no more than reading a
    reordered one, and no second copy of it has to exist.
    """
    if ROWS == "tile":
        return n
    elif ROWS == "gate_up":
        return intermediate_column(n, ORDER) + is_up_row(n) * INTERMEDIATE
    else:
        return intermediate_column(n, ORDER) * 2 + is_up_row(n)


@triton.jit
def split_gran8(acc, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Accumulators [ROWS, COLS] of `gran8` weight rows -> (gate, up), each [ROWS, COLS // 2].

    A gate column and its up column lie 8 apart: the same thread holds both in MMA fragments and in tensor
    memory rows, so that nothing moves between threads.
    """
    periods = acc.reshape(ROWS, COLS // 16, 2, 8)
    gate, up = tl.split(tl.permute(periods, 0, 1, 3, 2))
    return gate.reshape(ROWS, COLS // 2), up.reshape(ROWS, COLS // 2)


@triton.jit
def split_gran16_even_odd(acc, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Accumulators [ROWS, COLS] of `gran16_even_odd` rows -> gate even, gate odd, up even, up odd.

    Each of the four is [ROWS, COLS // 4].
    """
    periods = acc.reshape(ROWS, COLS // 32, 2, 2, 8)  # row, period, parity, gate/up, 8
    even, odd = tl.split(tl.permute(periods, 0, 1, 4, 3, 2))
    gate_even, up_even = tl.split(even)
    gate_odd, up_odd = tl.split(odd)
    return (
        gate_even.reshape(ROWS, COLS // 4),
        gate_odd.reshape(ROWS, COLS // 4),
        up_even.reshape(ROWS, COLS // 4),
        up_odd.reshape(ROWS, COLS // 4),
    )
