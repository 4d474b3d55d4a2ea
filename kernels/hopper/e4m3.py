"""Launches of the expert GEMMs with E4M3 weights: transposed for few tokens per expert, not for many."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.kernels.hopper.config import HopperTile
from megamoe.kernels.hopper.e4m3_few import e4m3_few_down_kernel, e4m3_few_gate_up_kernel
from megamoe.kernels.hopper.e4m3_many import e4m3_many_down_kernel, e4m3_many_gate_up_kernel
from megamoe.kernels.hopper.layouts import PLAIN_FP32, SWIZZLED_64, SWIZZLED_128
from megamoe.kernels.hopper.options import e4m3_boxes, e4m3_constexprs, launch_options
from megamoe.spec import LayerSpec

if TYPE_CHECKING:
    from megamoe.kernels.hopper.layer import HopperWorkspace


class E4m3Matrix(NamedTuple):
    """weight E4M3 [E, N, K]; scale fp32 [E, N/128, K/128], of w13 gate's blocks first."""

    weight: torch.Tensor
    scale: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self)


def e4m3_gate_up(ws: HopperWorkspace, matrix: E4m3Matrix, spec: LayerSpec, tile: HopperTile, programs: int) -> None:
    """GEMM 1 of the scattered tokens into `ws.act` and `ws.act_scale`."""
    kernel = e4m3_few_gate_up_kernel if tile.swapped else e4m3_many_gate_up_kernel
    clamp = spec.activation_clamp
    with torch.cuda.device_of(ws.q):
        kernel[(programs,)](
            *_descriptors(ws.q, matrix, ws.scale, tile, groups=1),
            ws.packed_tiles, ws.tile_count, matrix.scale, ws.row_weight,
            ws.act.view(torch.uint8), ws.act_scale, ws.q.shape[0],
            0.0 if clamp is None else clamp, spec.alpha, spec.beta,
            H=spec.hidden, I=spec.intermediate, **e4m3_constexprs(tile),
            ACTIVATION=spec.activation, HAS_CLAMP=clamp is not None, **launch_options(tile),
        )  # fmt: skip


def e4m3_down(ws: HopperWorkspace, matrix: E4m3Matrix, spec: LayerSpec, tile: HopperTile, programs: int) -> None:
    """GEMM 2 of `ws.act` into the slots' rows."""
    kernel = e4m3_few_down_kernel if tile.swapped else e4m3_many_down_kernel
    with torch.cuda.device_of(ws.q):
        kernel[(programs,)](
            *_descriptors(ws.act, matrix, ws.act_scale, tile, groups=2),
            ws.packed_tiles, ws.tile_count, matrix.scale, ws.plan.sorted_slots, ws.rows,
            H=spec.hidden, I=spec.intermediate, **e4m3_constexprs(tile), **launch_options(tile),
        )  # fmt: skip


def _descriptors(
    x: torch.Tensor, matrix: E4m3Matrix, scale: torch.Tensor, tile: HopperTile, *, groups: int
) -> list[object]:
    boxes = e4m3_boxes(tile, groups)
    layout = SWIZZLED_128 if boxes[0][1] == 128 else SWIZZLED_64
    return [
        TensorDescriptor.from_tensor(x, boxes[0], layout),
        TensorDescriptor.from_tensor(matrix.weight.flatten(0, 1), boxes[1], layout),
        TensorDescriptor.from_tensor(scale, boxes[2], PLAIN_FP32),
    ]
