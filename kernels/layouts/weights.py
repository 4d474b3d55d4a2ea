"""Weight transforms: plain expert weights to the bytes the MegaMoE kernels read, and back.

Source of the contract: `transform_weights_for_mega_moe` and `transform_weights_for_mega_moe_sm90` of
`sgl-deep-gemm` 0.1.7. Routed weights are 3-D [E, rows, columns]; dense shared experts are the same without E.

| | SM100 kinds | SM90 |
|---|---|---|
| L1 weight [.., 2I, H] | rows interleaved (`gate_up.py`) | rows interleaved |
| L1 scale | rows interleaved, then atom order (`scale_atoms.py`) | untouched: its blocks stay [gate; up] |
| L2 weight [.., H, I] | untouched, the same tensor | untouched |
| L2 scale | atom order | untouched |
"""

from __future__ import annotations

import torch

from megamoe.kernels.layouts.gate_up import deinterleave_gate_up, interleave_gate_up
from megamoe.kernels.layouts.scale_atoms import from_atom_order, to_atom_order, unpack_scale_words
from megamoe.recipe import resolve_recipe, traits

WeightPair = tuple[torch.Tensor, torch.Tensor]
"""(weight, scale)."""


def transform_weights_sm100(
    l1: WeightPair, l2: WeightPair, mma_type: str, *, in_place: bool = False
) -> tuple[WeightPair, WeightPair]:
    """Bytes of the SM100 MegaMoE weights; works on every device and architecture.

    l1: weight [.., 2I, H] (E2M1: [.., 2I, H/2] int8 or uint8; E4M3: float8_e4m3fn), rows [gate; up], and its
    scales, either bytes [.., 2I, H/g] uint8 or int32 words of four bytes [.., 2I, H/4g]. l2: [.., H, I]
    alike. `mma_type` picks the interleave and must have `deep_gemm_sm100` numerics. `in_place` reorders l1's
    weight where it is (scales are small and always copied), so that a layer is never held twice.

    Returns ((weight, scale), (weight, scale)); scales int32 MN-major in atom order, padded as there.
    Raises `ValueError`/`TypeError` for an unknown mma_type, shapes that do not belong together, other dtypes.
    """
    kind = _sm100_interleave(mma_type)
    (w1, s1), (w2, s2) = l1, l2
    s1, s2 = _scale_bytes(w1, s1, mma_type, "l1"), _scale_bytes(w2, s2, mma_type, "l2")
    return (
        (interleave_gate_up(w1, kind, in_place=in_place), to_atom_order(interleave_gate_up(s1, kind))),
        (w2, to_atom_order(s2)),
    )


def restore_weights_sm100(
    l1: WeightPair, l2: WeightPair, mma_type: str, *, in_place: bool = False
) -> tuple[WeightPair, WeightPair]:
    """The inverse of `transform_weights_sm100`; scales come back as uint8 bytes [.., rows, groups]."""
    kind = _sm100_interleave(mma_type)
    (w1, s1), (w2, s2) = l1, l2
    s1 = from_atom_order(s1, rows=w1.shape[-2], groups=num_scale_groups(w1, mma_type))
    s2 = from_atom_order(s2, rows=w2.shape[-2], groups=num_scale_groups(w2, mma_type))
    return (
        (deinterleave_gate_up(w1, kind, in_place=in_place), deinterleave_gate_up(s1, kind)),
        (w2, s2),
    )


def transform_weights_sm90(l1: WeightPair, l2: WeightPair, *, in_place: bool = False) -> tuple[WeightPair, WeightPair]:
    """Bytes of the SM90 MegaMoE weights: l1's weight interleaved 8 by 8, everything else the same tensors.

    l1: float8_e4m3fn [.., 2I, H] rows [gate; up], fp32 [.., 2 ceil(I/128), ceil(H/128)], gate's blocks
    first; l2: [.., H, I], fp32 [.., ceil(H/128), ceil(I/128)].
    Scales must be row-major: the kernels index them so, and upstream silently misreads any other order.
    """
    (w1, s1), (w2, s2) = l1, l2
    _check_block_scales(w1, s1, "l1", halves=2)
    _check_block_scales(w2, s2, "l2", halves=1)
    return (interleave_gate_up(w1, "gran8", in_place=in_place), s1), (w2, s2)


def restore_weights_sm90(l1: WeightPair, l2: WeightPair, *, in_place: bool = False) -> tuple[WeightPair, WeightPair]:
    """The inverse of `transform_weights_sm90`."""
    (w1, s1), (w2, s2) = l1, l2
    _check_block_scales(w1, s1, "l1", halves=2)
    _check_block_scales(w2, s2, "l2", halves=1)
    return (deinterleave_gate_up(w1, "gran8", in_place=in_place), s1), (w2, s2)


def num_scale_groups(weight: torch.Tensor, mma_type: str) -> int:
    """K-groups per row of `weight`, whose dtype tells its format: E4M3 (fp8xfp4's shared) or packed E2M1."""
    group = traits(resolve_recipe(mma_type, numerics="deep_gemm_sm100")).weight_group[1]
    if weight.dtype == torch.float8_e4m3fn:
        columns = weight.shape[-1]
    elif weight.dtype in (torch.int8, torch.uint8):
        columns = 2 * weight.shape[-1]
    else:
        raise TypeError(f"weight has dtype {weight.dtype}; allowed: int8 or uint8 (packed E2M1), float8_e4m3fn")
    if columns % group:
        raise ValueError(f"weight has {columns} columns; {mma_type} scales them in groups of {group}")
    return columns // group


def _sm100_interleave(mma_type: str) -> str:
    return traits(resolve_recipe(mma_type, numerics="deep_gemm_sm100")).interleave


def _scale_bytes(weight: torch.Tensor, scale: torch.Tensor, mma_type: str, name: str) -> torch.Tensor:
    groups = num_scale_groups(weight, mma_type)
    if scale.dtype not in (torch.uint8, torch.int32):
        raise TypeError(f"{name} scale has dtype {scale.dtype}; allowed: uint8 (bytes) or int32 (words of four)")
    columns = groups if scale.dtype == torch.uint8 else -(-groups // 4)
    expected = (*weight.shape[:-1], columns)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"{name} scale has shape {tuple(scale.shape)}; a {scale.dtype} scale of a weight of shape "
            f"{tuple(weight.shape)} under {mma_type} has {expected}"
        )
    return scale if scale.dtype == torch.uint8 else unpack_scale_words(scale, groups)


def _check_block_scales(weight: torch.Tensor, scale: torch.Tensor, name: str, *, halves: int) -> None:
    """`halves` matrices lie on top of each other in `weight` (gate and up: 2); no block spans two of them."""
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name} weight has dtype {weight.dtype}; allowed: float8_e4m3fn")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} scale has dtype {scale.dtype}; allowed: float32")
    *lead, rows, columns = weight.shape
    expected = (*lead, halves * -(-(rows // halves) // 128), -(-columns // 128))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"{name} scale has shape {tuple(scale.shape)}; one scale per 128×128 block"
            f"{' of gate, then of up, for' if halves == 2 else ' of'} a weight of shape "
            f"{tuple(weight.shape)} is {expected}"
        )
    if not scale.is_contiguous():
        raise ValueError(f"{name} scale has strides {scale.stride()}; it must be row-major (contiguous)")
