"""FlashInfer's shuffle undone in place, for who owns the weights and does not want them twice."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.flashinfer.prepared import forget_prepared_weights
from megamoe.flashinfer.weights import SHUFFLED, Layout, w2_rows, w13_rows
from megamoe.kernels.layouts import trtllm

_Rows = Callable[[torch.Tensor, Layout], torch.Tensor]


def unshuffle_(
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None = None,
    gemm2_bias: torch.Tensor | None = None,
) -> None:
    """Reorder FlashInfer-shuffled weights where they lie, one expert at a time, to plain [gate; up] rows and row-major
    scales. For their owner, once: pass them with `weight_layout="gate_up"` from then on, and nothing is kept twice but
    the scales.

    Weights [E, 2I, H(/2)] and [E, H, I(/2)], packed E2M1 or E4M3, shuffled in blocks of 32 rows, `MajorK`; scales one
    byte per 32 or 16 columns in 128×4 tiles without padding (rows a multiple of 128, scale columns of 4); biases
    [E, 2I] and [E, H]. Copies that calls made before are freed. Raises `ValueError` naming the argument for other
    shapes and for experts that overlap, before anything is written.
    """
    steps: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = []
    for name, weight, scale, bias, rows in (
        ("gemm1", gemm1_weights, gemm1_weights_scale, gemm1_bias, w13_rows),
        ("gemm2", gemm2_weights, gemm2_weights_scale, gemm2_bias, w2_rows),
    ):
        experts, size = _check(name, weight, scale, bias)
        columns = scale.numel() // (experts * size)

        def plain(matrix: torch.Tensor, rows: _Rows = rows) -> torch.Tensor:
            return rows(matrix, SHUFFLED)

        def plain_scale(
            flat: torch.Tensor, rows: _Rows = rows, shape: tuple[int, int] = (size, columns)
        ) -> torch.Tensor:
            return rows(trtllm.unswizzle_scales(flat.view(shape), *shape), SHUFFLED).flatten()

        steps += [(weight.view(torch.uint8), plain), (scale.view(torch.uint8).view(experts, -1), plain_scale)]
        if bias is not None:
            steps.append((bias[..., None], plain))
    for tensor, reorder in steps:
        for expert in tensor:
            expert.copy_(reorder(expert))
    given = (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale, gemm1_bias, gemm2_bias)
    forget_prepared_weights(*(tensor for tensor in given if tensor is not None))


def _check(name: str, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int]:
    """(E, M)."""
    if weight.dim() != 3 or weight.element_size() != 1 or weight.shape[1] % trtllm.TILE_ROWS:
        raise ValueError(
            f"{name}_weights is {weight.dtype} {tuple(weight.shape)}; expected [E, M, ..] of one byte per element, M a "
            f"multiple of {trtllm.TILE_ROWS}"
        )
    experts, rows = weight.shape[:2]
    if scale.element_size() != 1 or scale.numel() % (experts * rows * trtllm.TILE_COLS):
        raise ValueError(
            f"{name}_weights_scale is {scale.dtype} {tuple(scale.shape)}; expected bytes in tiles of {experts} experts "
            f"with {rows} rows and a multiple of {trtllm.TILE_COLS} columns"
        )
    if bias is not None and tuple(bias.shape) != (experts, rows):
        raise ValueError(f"{name}_bias has shape {tuple(bias.shape)}; expected {(experts, rows)}")
    for suffix, tensor in (("weights", weight), ("weights_scale", scale), ("bias", bias)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name}_{suffix} has strides {tensor.stride()}; it must be contiguous")
    return experts, rows
