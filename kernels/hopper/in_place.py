"""MXFP4 weights in this tier's tiles, in the memory of DeepGEMM's transformed weights: no second copy.

Codes take the place of codes, tile for row. A byte of scale shrinks to the four bits of a distance, so that the memory
of the scales holds, for all experts, first the distances (`spans`), then one fp32 per row (`row_scale`), and a rest
that means nothing. Re-laying goes expert by expert, forwards, and its inverse backwards: what is written never lies
where the scales or distances of an expert have yet to be read.
"""

from __future__ import annotations

import torch

from megamoe.kernels.hopper.weights import (
    TILE_COLUMNS,
    TILE_ROWS,
    HopperMatrix,
    from_hopper,
    scales_unsupported_reason,
    to_hopper,
)
from megamoe.kernels.layouts.scale_atoms import from_atom_order, to_atom_order

_ALIGNMENT = 16  # TMA's, of an address in bytes


def matrix_view(codes: torch.Tensor, store: torch.Tensor) -> HopperMatrix:
    """The matrix that codes uint8 [E, N/128, K/256, 16384] and the scales' memory, uint8 [E·N·K/32], hold."""
    experts, tiles, blocks, _ = codes.shape
    rows = tiles * TILE_ROWS
    num_spans = experts * tiles * blocks * TILE_ROWS * TILE_COLUMNS // 64
    row_scale = store[num_spans : num_spans + 4 * experts * rows].view(torch.float32)
    return HopperMatrix(codes, store[:num_spans].view(experts, tiles, blocks, -1), row_scale.view(experts, rows))


def unsupported_reason(codes: torch.Tensor, words: torch.Tensor) -> str | None:
    """Why `to_hopper_in_place` can't take these, or None. Waits for the GPU: it looks at the scales."""
    experts, rows, half = codes.shape
    if rows % TILE_ROWS or 2 * half % TILE_COLUMNS:
        return f"{rows} rows × {2 * half} columns are not whole tiles of {TILE_ROWS} × {TILE_COLUMNS}"
    if not codes.is_contiguous() or not words.mT.is_contiguous():
        return "the weights or their scales are not contiguous"
    for what, tensor in (("weights", codes), ("scales", words)):
        if tensor.data_ptr() % _ALIGNMENT:
            return f"the {what} begin at an address that is no multiple of {_ALIGNMENT} bytes, as TMA wants it"
    for expert in range(experts):
        reason = scales_unsupported_reason(_scales(words[expert], rows, half))
        if reason is not None:
            return f"scales of expert {expert} {reason}"
    return None


def to_hopper_in_place(
    codes: torch.Tensor, words: torch.Tensor, *, pair_columns: bool
) -> tuple[HopperMatrix, torch.Tensor]:
    """E2M1 codes uint8 [E, N, K/2] and UE8M0 words int32 [E, N, K/128] in atom order (DeepGEMM's transformed weights)
    → the matrix, in their memory, and the scales' part of that, uint8 [E·N·K/32]. `unsupported_reason` must be None.
    Extra memory: one expert, and fp32 [E, N]."""
    experts, rows, half = codes.shape
    store = words.mT.flatten().view(torch.uint8)
    tiled = codes.view(experts, rows // TILE_ROWS, 2 * half // TILE_COLUMNS, -1)
    matrix = matrix_view(tiled, store)
    row_scale = torch.empty_like(matrix.row_scale)  # its place holds scales that are read until the end
    for expert in range(experts):
        one = to_hopper(codes[expert : expert + 1], _scales(words[expert], rows, half)[None], pair_columns=pair_columns)
        tiled[expert], matrix.spans[expert], row_scale[expert] = one.codes[0], one.spans[0], one.row_scale[0]
    matrix.row_scale.copy_(row_scale)
    return matrix, store


def from_hopper_in_place(
    codes: torch.Tensor, store: torch.Tensor, *, pair_columns: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: codes uint8 [E, N, K/2] and words int32 [E, N, K/128], MN-major, in the same memory."""
    matrix = matrix_view(codes, store)
    experts, tiles, blocks, _ = codes.shape
    rows, columns = tiles * TILE_ROWS, blocks * TILE_COLUMNS
    plain = codes.view(experts, rows, columns // 2)
    words = store.view(torch.int32).view(experts, columns // 128, rows)
    row_scale = matrix.row_scale.clone()
    for expert in reversed(range(experts)):
        part = slice(expert, expert + 1)
        one = HopperMatrix(codes[part], matrix.spans[part], row_scale[part])
        one_codes, one_scales = from_hopper(one, pair_columns=pair_columns)
        plain[expert] = one_codes[0]
        words[expert] = to_atom_order(one_scales[0]).mT
    return plain, words.mT


def _scales(words: torch.Tensor, rows: int, half: int) -> torch.Tensor:
    return from_atom_order(words, rows=rows, groups=half // 16)
