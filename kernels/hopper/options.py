"""What a tile means for a launch."""

from __future__ import annotations

import torch

from megamoe.kernels import pdl
from megamoe.kernels.hopper.config import HopperTile


def constexprs(tile: HopperTile) -> dict[str, int]:
    """Of the kernels of E2M1 weights. Registers per thread: 12 warps share what the CTA gets, the producer needs
    few."""
    n0, n1, n2 = tile.chunks
    return {"N0": n0, "N1": n1, "N2": n2, **_pipeline(tile)}


def wide_constexprs(tile: HopperTile) -> dict[str, int]:
    """Of GEMM 1 of E2M1 weights with 256 rows per item."""
    return _pipeline(tile)


def bf16_constexprs(tile: HopperTile) -> dict[str, int]:
    """Of the kernels of BF16 tokens and E2M1 weights."""
    chunks = sum(1 for chunk in tile.chunks if chunk)
    blocks = {"SUBS": 2, "HALVES": 1} if tile.wide else {"SUBS": 1, "HALVES": 2}
    return {"N": tile.chunks[0], "CHUNKS": chunks, **blocks, **_pipeline(tile)}


def e4m3_constexprs(tile: HopperTile) -> dict[str, int]:
    """Of the kernels of E4M3 weights."""
    return {"N": tile.block_m, **_pipeline(tile)} if tile.swapped else _pipeline(tile)


def e4m3_boxes(tile: HopperTile, groups: int) -> tuple[list[int], list[int], list[int]]:
    """Boxes of tokens, weights and token scales that a fetch of E4M3 weights takes, for `groups` activation scales per
    128 columns. Tokens as the MMA's columns: all of them to a stage; as its rows: a stage per scale, and boxes per
    chunk."""
    if tile.swapped:
        return [tile.chunks[0], 128], [128, 128], [groups, tile.scale_box]
    return [tile.chunks[0], 128 // groups], [128, 128 // groups], [1, tile.chunks[0]]


def _pipeline(tile: HopperTile) -> dict[str, int]:
    consumer = 104 if tile.ctas_per_sm == 2 else 240
    return {"STAGES": tile.stages, "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": 24}


def overlap(tile: HopperTile, tensor: torch.Tensor) -> bool:
    """Whether the launches around the expert GEMMs overlap with their neighbours, for a layer on `tensor`'s device."""
    return tile.overlap and pdl.overlaps(tensor)


def launch_options(tile: HopperTile) -> dict[str, int]:
    """Of both expert GEMMs. Those of an overlapping tile must wait for the kernel before (`pdl`)."""
    registers = {"maxnreg": 80} if tile.ctas_per_sm == 2 else {}
    return {"num_warps": 4, "launch_pdl": pdl.PDL and tile.overlap, **registers}
