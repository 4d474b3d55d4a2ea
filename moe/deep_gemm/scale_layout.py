"""`transform_sf_into_required_layout` for the scales of MegaMoE weights, on every architecture.

Source of the contract: `sgl-deep-gemm` 0.1.7, its branches of 32 columns per scale, which upstream refuses on SM90.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.kernels.layouts.scale_atoms import pack_scale_words
from megamoe.validation import check_count, check_tensor

_ROWS_PER_SCALE = (1, 128)
_COLUMNS_PER_SCALE = 32


def serves(recipe: Sequence[int]) -> bool:
    """Whether `recipe` names MX scales, (1 or 128, 32): others belong to upstream's GEMMs."""
    return len(recipe) in (2, 3) and recipe[-1] == _COLUMNS_PER_SCALE


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, int] | tuple[int, int, int],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """UE8M0 scales of a weight [.., mn, k] as the kernels read them: int32 [.., mn, ⌈k/128⌉], four bytes a word.

    sf: fp32 [.., ⌈mn/r⌉, k/32] for recipe (r, 32), r 1 or 128, its values powers of two (only the exponent is kept, as
    upstream does); or, with r = 1, what this function returned, which is returned as it is. `recipe` of three names r
    for both operands: `is_sfa` picks the first, else the second. `num_groups`: the leading axis, None for 2-D.
    Returns words with strides (.., 1, mn rounded up to 4); byte b of word j is the scale of columns 128·j + 32·b ….
    `ValueError`/`TypeError` naming the argument for anything else.
    """
    if not isinstance(recipe, (tuple, list)) or not serves(recipe):
        raise ValueError(f"recipe is {recipe!r}; allowed: (1, 32), (128, 32) and their forms of three")
    if len(recipe) == 3 and is_sfa is None:
        raise ValueError("is_sfa is None; a recipe of three needs True or False")
    rows_per_scale = recipe[0] if len(recipe) == 2 or is_sfa else recipe[1]
    if rows_per_scale not in _ROWS_PER_SCALE:
        raise ValueError(f"recipe has {rows_per_scale} rows per scale; allowed: 1, 128")
    if disable_ue8m0_cast is not False:
        raise ValueError(f"disable_ue8m0_cast is {disable_ue8m0_cast!r}; allowed for scales of 32 columns: False")
    check_count("mn", mn, 1)
    if check_count("k", k, 1) % _COLUMNS_PER_SCALE:
        raise ValueError(f"k is {k}; allowed: multiples of {_COLUMNS_PER_SCALE}")
    lead = () if num_groups is None else (check_count("num_groups", num_groups, 1),)
    axes = "[num_groups, mn, k]" if lead else "[mn, k]"
    check_tensor("sf", sf, dtypes=(torch.float32, torch.int32), rank=len(lead) + 2, axes=axes, layout="any")
    if sf.dtype == torch.int32:
        return _already_packed(sf, lead, mn, k, rows_per_scale)
    expected = (*lead, -(-mn // rows_per_scale), k // _COLUMNS_PER_SCALE)
    if tuple(sf.shape) != expected:
        raise ValueError(f"sf has shape {tuple(sf.shape)}; mn={mn}, k={k}, recipe={tuple(recipe)} and "
                         f"num_groups={num_groups} ask for {expected}")  # fmt: skip
    exponents = torch.empty(sf.shape, dtype=torch.uint8, device=sf.device)
    # One expert at a time: fp32 scales are four times what they become.
    for source, target in zip(sf, exponents) if lead else ((sf, exponents),):
        target.copy_(source.contiguous().view(torch.int32) >> 23)
    if rows_per_scale > 1:
        exponents = exponents.repeat_interleave(rows_per_scale, -2)[..., :mn, :]
    return pack_scale_words(exponents)


def _already_packed(sf: torch.Tensor, lead: tuple[int, ...], mn: int, k: int, rows_per_scale: int) -> torch.Tensor:
    expected = (*lead, mn, -(-k // 128))
    if rows_per_scale != 1 or tuple(sf.shape) != expected:
        raise ValueError(f"sf is int32 {tuple(sf.shape)}; packed words are {expected}, with one row per scale")
    if (mn > 1 and sf.stride(-2) != 1) or (expected[-1] > 1 and sf.stride(-1) != -(-mn // 4) * 4):
        raise ValueError(f"sf has strides {sf.stride()}; packed words are MN-major: (.., 1, {-(-mn // 4) * 4})")
    return sf
