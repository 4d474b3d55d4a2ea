"""Layouts of trtllm-gen's MoE (FlashInfer 0.6.18): shuffled weight rows, 128×4 scale tiles, packed routing words.

A permutation of rows applies alike to packed elements, to scales before they are tiled and to biases (as [M, 1]).

* Row shuffle: inside 32 rows, row 8p + q of the kernel's order is row 4q + p of the plain one (p < 4, q < 8). The
  shuffled DeepSeek FP8 path has blocks of 16: 8p + q is 2q + p.
* w13: the plain rows [up; gate] alternate first, up 0, gate 0, up 1, …, then they are shuffled; w2: only shuffled.
* Scales: an expert's bytes [M, C], padded to 128 rows and 4 columns, lie in tiles of 128 × 4, columns of tiles first;
  in a tile, row 32a + b, column c is byte 16b + 4a + c.
* Routing word: the expert's global id in the high half, the weight's BF16 bits in the low one.
"""

from __future__ import annotations

import torch

SHUFFLE_BLOCKS = (16, 32)
TILE_ROWS, TILE_COLS = 128, 4
HALVES = ("gate_up", "up_gate")
"""Order of w13's plain rows: a checkpoint's (and this package's), and the one that FlashInfer's own functions take."""

_LANES = 8


def shuffle_rows(tensor: torch.Tensor, *, block: int = 32) -> torch.Tensor:
    """Plain rows [.., M, K], any dtype, to the kernel's order; M a multiple of `block`, 32 or 16. w2's transform."""
    _check_rows(tensor, block)
    return tensor.unflatten(-2, (-1, _LANES, block // _LANES)).transpose(-3, -2).flatten(-4, -2)


def unshuffle_rows(tensor: torch.Tensor, *, block: int = 32) -> torch.Tensor:
    """The inverse of `shuffle_rows`."""
    _check_rows(tensor, block)
    return tensor.unflatten(-2, (-1, block // _LANES, _LANES)).transpose(-3, -2).flatten(-4, -2)


def shuffle_w13(tensor: torch.Tensor, *, halves: str = "gate_up", block: int = 32) -> torch.Tensor:
    """Plain rows [.., 2I, K] of both halves, in the order that `halves` names, to the kernel's order."""
    _check_halves(halves)
    _check_rows(tensor, block)
    first, second = tensor.chunk(2, dim=-2)
    up, gate = (second, first) if halves == "gate_up" else (first, second)
    return shuffle_rows(torch.stack([up, gate], dim=-2).flatten(-3, -2), block=block)


def unshuffle_w13(tensor: torch.Tensor, *, halves: str = "gate_up", block: int = 32) -> torch.Tensor:
    """The inverse of `shuffle_w13`."""
    _check_halves(halves)
    up, gate = unshuffle_rows(tensor, block=block).unflatten(-2, (-1, 2)).unbind(-2)
    return torch.cat([gate, up] if halves == "gate_up" else [up, gate], dim=-2)


def padded_shape(rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of a scale matrix in whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-cols // TILE_COLS) * TILE_COLS


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scale bytes uint8 [.., M, C] to tiles, per matrix: uint8 [.., *padded_shape(M, C)], whose shape is but a label.

    Padding bytes are zero.
    """
    _check_bytes(scales)
    rows, cols = scales.shape[-2:]
    padded_rows, padded_cols = padded_shape(rows, cols)
    padded = torch.nn.functional.pad(scales, (0, padded_cols - cols, 0, padded_rows - rows))
    tiles = padded.unflatten(-1, (-1, TILE_COLS)).unflatten(-3, (-1, 4, 32))  # [.., tile row, a, b, tile column, c]
    a = tiles.ndim - 4
    order = (*range(a), a + 2, a + 1, a, a + 3)
    return tiles.permute(order).reshape(*scales.shape[:-2], padded_rows, padded_cols)


def unswizzle_scales(tiles: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of `swizzle_scales`: uint8 [.., *padded_shape(rows, cols)] to row-major bytes [.., rows, cols]."""
    _check_bytes(tiles)
    if tuple(tiles.shape[-2:]) != padded_shape(rows, cols):
        raise ValueError(
            f"tiles has shape {tuple(tiles.shape)}; {rows} rows of {cols} scales have "
            f"{padded_shape(rows, cols)} in whole tiles"
        )
    padded_rows, padded_cols = tiles.shape[-2:]
    lead = tiles.shape[:-2]
    parts = tiles.reshape(*lead, padded_rows // TILE_ROWS, padded_cols // TILE_COLS, 32, 4, TILE_COLS)
    a = len(lead) + 1
    order = (*range(a), a + 2, a + 1, a, a + 3)
    return parts.permute(order).reshape(*lead, padded_rows, padded_cols)[..., :rows, :cols].contiguous()


def scale_offset(row: int, col: int, cols: int) -> int:
    """Byte of scale (row, col) in the tiles of a matrix with `cols` columns."""
    tiles_per_band = padded_shape(1, cols)[1] // TILE_COLS
    tile = row // TILE_ROWS * tiles_per_band + col // TILE_COLS
    return tile * TILE_ROWS * TILE_COLS + row % 32 * 16 + row % TILE_ROWS // 32 * 4 + col % TILE_COLS


def pack_topk(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """ids int [T, K] in −32768 … 32767 and weights of any float dtype [T, K] to int32 words; weights round to BF16.

    The ids' range is the caller's promise: checking it would wait for the GPU.
    """
    if topk_ids.dtype not in (torch.int16, torch.int32, torch.int64):
        raise TypeError(f"topk_ids has dtype {topk_ids.dtype}; allowed: int16, int32, int64")
    if not topk_weights.is_floating_point():
        raise TypeError(f"topk_weights has dtype {topk_weights.dtype}; allowed: a floating-point dtype")
    if topk_ids.shape != topk_weights.shape:
        raise ValueError(f"topk_weights has shape {tuple(topk_weights.shape)}; expected {tuple(topk_ids.shape)}")
    # A negative weight's bits extend their sign over the id unless they are masked.
    low = topk_weights.bfloat16().view(torch.int16).int() & 0xFFFF
    return (topk_ids.int() << 16) | low


def unpack_topk(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_topk`: ids int32 and weights BF16."""
    if words.dtype != torch.int32:
        raise TypeError(f"words has dtype {words.dtype}; allowed: int32")
    return words >> 16, words.to(torch.int16).view(torch.bfloat16)


def _check_rows(tensor: torch.Tensor, block: int) -> None:
    if block not in SHUFFLE_BLOCKS:
        raise ValueError(f"block={block}; allowed: {', '.join(map(str, SHUFFLE_BLOCKS))}")
    if tensor.ndim < 2 or tensor.shape[-2] % block:
        raise ValueError(f"tensor has shape {tuple(tensor.shape)}; its rows must be a multiple of {block}")


def _check_halves(halves: str) -> None:
    if halves not in HALVES:
        raise ValueError(f"halves={halves!r}; allowed: {', '.join(map(repr, HALVES))}")


def _check_bytes(tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.uint8:
        raise TypeError(f"scales have dtype {tensor.dtype}; allowed: uint8")
    if tensor.ndim < 2:
        raise ValueError(f"scales have shape {tuple(tensor.shape)}; they need at least a row and a K axis")
