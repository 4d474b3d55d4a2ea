"""Hopper's own order of MXFP4 weights, in the memory of the transformed ones: ours, no upstream has it.

On Hopper MXFP4 experts run fastest from an order of their own (`kernels.hopper.weights`). `to_hopper_` re-lays what
`transform_weights_for_mega_moe` returned, expert by expert, and `from_hopper_` takes it back. The result describes
itself: its codes have four dimensions and cannot be taken for rows. Only the owner of the weights may call it: whoever
else reads the same memory (an engine's fallback) would read garbage.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.deep_gemm.arguments import on_device, pair

WeightPair = tuple[torch.Tensor, torch.Tensor]
_NAMES = ("l1_weights", "l2_weights")
_TILE_BYTES = 16384  # 128 rows × 256 columns of codes
_CODE_BYTES_PER_SCALE = 16  # 32 codes


def to_hopper_(l1_weights: WeightPair, l2_weights: WeightPair) -> tuple[WeightPair, WeightPair]:
    """Re-lay both matrices in place for `fp8_fp4_mega_moe` on an `SM90SymmBuffer` with its fp32 `x_sf`.

    l1_weights, l2_weights: int8 [E, 2I, H/2] and [E, H, I/2] with int32 scales [E, rows, K/128], MN-major, as
    `transform_weights_for_mega_moe` returns them; H and I multiples of 256. Returns (codes uint8 [E, rows/128, K/256,
    16384], scales' memory uint8 [E·rows·K/32]) of each: the same memory. Extra memory: one expert, fp32 [E, rows].
    Waits for the GPU. Raises `ValueError`/`TypeError` naming the argument, before anything is written, also where the
    scales of a row span more than 11 binades or are all above 2^122, and where an address is no multiple of 16 bytes:
    such weights stay as they are.
    """
    from megamoe.kernels.hopper import in_place

    matrices = [_read(name, value) for name, value in zip(_NAMES, (l1_weights, l2_weights))]
    for name, (codes, words) in zip(_NAMES, matrices):
        reason = in_place.unsupported_reason(codes, words)
        if reason is not None:
            raise ValueError(f"{name}: {reason}")
    found: list[WeightPair] = []
    for (codes, words), pair_columns in zip(matrices, (False, True)):
        tiled, store = in_place.to_hopper_in_place(codes, words, pair_columns=pair_columns)
        found.append((tiled.codes, store))
    return found[0], found[1]


def from_hopper_(l1_weights: WeightPair, l2_weights: WeightPair) -> tuple[WeightPair, WeightPair]:
    """The inverse of `to_hopper_`, byte for byte, in place. Raises `ValueError` naming the argument, before anything is
    written."""
    from megamoe.kernels.hopper import in_place

    for name, value in zip(_NAMES, (l1_weights, l2_weights)):
        _check_tiled(name, value)
    found: list[WeightPair] = []
    for (tiles, store), pair_columns in zip((l1_weights, l2_weights), (False, True)):
        codes, words = in_place.from_hopper_in_place(tiles, store, pair_columns=pair_columns)
        found.append((codes.view(torch.int8), words))
    return found[0], found[1]


def is_tiled(value: Any) -> bool:
    """Whether a pair of weights lies in Hopper's order."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8 for tensor in value)
        and (value[0].dim(), value[1].dim()) == (4, 1)
    )


def read_tiled(values: tuple[Any, Any], device: torch.device, *, experts: int, hidden: int, intermediate: int) -> Any:
    """The tier's weights (`kernels.hopper.layer.HopperWeights`) of two pairs, their sizes checked."""
    from megamoe.kernels.hopper.in_place import matrix_view
    from megamoe.kernels.hopper.layer import HopperWeights

    matrices = []
    for name, value, rows, columns in (
        (_NAMES[0], values[0], 2 * intermediate, hidden),
        (_NAMES[1], values[1], hidden, intermediate),
    ):
        if not is_tiled(value):
            raise TypeError(f"{name} is not in Hopper's order and the other one is; to_hopper_ takes both")
        shape = (experts, rows // 128, columns // 256, 16384)
        codes = on_device(f"{name}[0]", value[0], device, (torch.uint8,), "[E, rows/128, K/256, 16384]", shape=shape)
        size = (experts * rows * columns // 32,)
        store = on_device(f"{name}[1]", value[1], device, (torch.uint8,), "[E·rows·K/32]", shape=size)
        matrices.append(matrix_view(codes, store))
    return HopperWeights(*matrices)


def _check_tiled(name: str, value: Any) -> None:
    """Everything that would stop `from_hopper_in_place` halfway."""
    if not is_tiled(value):
        raise ValueError(f"{name} is not what to_hopper_ returns: (uint8 of four dimensions, uint8 of one)")
    codes, store = value
    if codes.shape[-1] != _TILE_BYTES or codes.numel() == 0:
        raise ValueError(f"{name}[0] has shape {tuple(codes.shape)}; expected [E, rows/128, K/256, {_TILE_BYTES}]")
    if store.numel() != codes.numel() // _CODE_BYTES_PER_SCALE:
        wanted = codes.numel() // _CODE_BYTES_PER_SCALE
        raise ValueError(f"{name}[1] has {store.numel()} bytes; expected {wanted}, E·rows·K/32 of {name}[0]")
    if not codes.is_contiguous() or not store.is_contiguous() or store.storage_offset() % 4:
        raise ValueError(
            f"{name} has strides {codes.stride()} and {store.stride()}, its scales begin {store.storage_offset()} "
            "bytes into their memory; expected contiguous tensors, the scales at a multiple of 4"
        )
    if codes.device != store.device:
        raise ValueError(f"{name}[1] is on {store.device}; allowed: {codes.device}, where {name}[0] is")


def _read(name: str, value: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [E, N, K/2] and words, views of a transformed pair."""
    weight, scale = pair(name, value)
    if not isinstance(weight, torch.Tensor) or weight.dtype not in (torch.int8, torch.uint8) or weight.dim() != 3:
        raise TypeError(f"{name}[0] must be int8 [E, rows, K/2], as transform_weights_for_mega_moe returns it")
    experts, rows, half = weight.shape
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.int32 or scale.shape != (experts, rows, half // 64):
        raise TypeError(f"{name}[1] must be int32 {(experts, rows, half // 64)}, MN-major words of UE8M0 scales")
    if not weight.is_contiguous() or not scale.mT.is_contiguous():
        raise ValueError(
            f"{name} has strides {weight.stride()} and {scale.stride()}; expected what the transform returns"
        )
    return weight.view(torch.uint8), scale
