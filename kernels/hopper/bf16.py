"""Launches of the expert GEMMs with MXFP4 weights and BF16 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.kernels.hopper.config import HopperTile
from megamoe.kernels.hopper.e2m1_bf16 import e2m1_bf16_down_kernel, e2m1_bf16_gate_up_kernel
from megamoe.kernels.hopper.layouts import BF16_SWIZZLED_128, SWIZZLED_32, SWIZZLED_128
from megamoe.kernels.hopper.options import bf16_constexprs, launch_options
from megamoe.kernels.hopper.weights import HopperMatrix
from megamoe.spec import LayerSpec

if TYPE_CHECKING:
    from megamoe.kernels.hopper.layer import HopperWorkspace


def bf16_gate_up(ws: HopperWorkspace, matrix: HopperMatrix, spec: LayerSpec, tile: HopperTile, programs: int) -> None:
    """GEMM 1 of the copied tokens into `ws.act`."""
    clamp = spec.activation_clamp
    with torch.cuda.device_of(ws.q):
        e2m1_bf16_gate_up_kernel[(programs,)](
            *_descriptors(ws.q, matrix, tile), ws.packed_tiles, ws.tile_count, matrix.row_scale,
            ws.act.view(torch.int32), 0.0 if clamp is None else clamp, spec.alpha, spec.beta,
            H=spec.hidden, I=spec.intermediate, **bf16_constexprs(tile),
            ACTIVATION=spec.activation, HAS_CLAMP=clamp is not None, **launch_options(tile),
        )  # fmt: skip


def bf16_down(ws: HopperWorkspace, matrix: HopperMatrix, spec: LayerSpec, tile: HopperTile, programs: int) -> None:
    """GEMM 2 of `ws.act` into the slots' rows."""
    with torch.cuda.device_of(ws.q):
        e2m1_bf16_down_kernel[(programs,)](
            *_descriptors(ws.act, matrix, tile), ws.packed_tiles, ws.tile_count, matrix.row_scale,
            ws.plan.sorted_slots, ws.rows.view(torch.int32),
            H=spec.hidden, I=spec.intermediate, **bf16_constexprs(tile), **launch_options(tile),
        )  # fmt: skip


def _descriptors(x: torch.Tensor, matrix: HopperMatrix, tile: HopperTile) -> list[object]:
    return [
        TensorDescriptor.from_tensor(x, [tile.chunks[0], 64], BF16_SWIZZLED_128),
        TensorDescriptor.from_tensor(matrix.codes.view(-1, 128), [64 if tile.wide else 128, 128], SWIZZLED_128),
        TensorDescriptor.from_tensor(matrix.spans.view(-1, 32), [16, 32], SWIZZLED_32),
    ]
