"""One GEMM of quantized rows with one weight matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe.oracle.reference.quantizers import (
    BlockFormat,
    decode,
    dequantize_act,
    dequantize_weight,
    expand_scales,
)
from megamoe.oracle.reference.summation import Matmul


class Matrix(NamedTuple):
    """A weight matrix [N, K] as its format stores it; scale None: BF16."""

    elements: torch.Tensor
    scale: torch.Tensor | None
    format: BlockFormat

    def dequantize(self) -> torch.Tensor:
        """fp32 [N, K]."""
        return dequantize_weight(self.elements, self.scale, self.format)


def gemm(q: torch.Tensor, sf: torch.Tensor | None, act: BlockFormat, weight: Matrix, matmul: Matmul) -> torch.Tensor:
    """fp32 accumulators [n, N] of activations [n, K] in format `act`; `matmul` forms every sum of products.

    Without fp32 scales of the activations: one sum over K of products of dequantized values, as block-scaled (or BF16)
    MMA forms it. With them: a sum p of unscaled activations per block of columns, over which no fp32 scale changes;
    the blocks are promoted in ascending K as acc = fma(sa, p, acc). A weight's UE8M0 scales are exact within p, its
    fp32 scales join the activation's: fma(sa · sw, p, acc).
    """
    if sf is None or act.scale != "fp32":
        return matmul(dequantize_act(q, sf, act), weight.dequantize())
    a, columns = decode(q, act.element), q.shape[1]
    act_cols = act.cols or columns  # 0: one scale per row
    if weight.scale is not None and weight.format.scale == "fp32":
        b = decode(weight.elements, weight.format.element)
        w_scale = expand_scales(weight.scale, weight.format._replace(cols=1), len(b), weight.scale.shape[1])
        block = min(act_cols, weight.format.cols)
    else:
        b, w_scale, block = weight.dequantize(), None, act_cols
    acc = torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
    for start in range(0, columns, block):
        within = slice(start, start + block)
        scale = sf[:, start // act_cols, None]
        if w_scale is not None:
            scale = scale * w_scale[None, :, start // weight.format.cols]
        acc = _fma(scale, matmul(a[:, within], b[:, within]), acc)
    return acc


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fp32 fma through fp64: the product is exact, the sum rounds twice (a wrong tie at most every 2²⁹
    results)."""
    return (a.double() * b.double() + c.double()).float()
