"""Every step of the reference that makes or reads bytes: pre-dispatch, requantization, dequantization.

Source of the rules: DeepGEMM MegaMoE of `sgl-deep-gemm` 0.1.7. All arithmetic is elementwise fp32, one
rounding per written operation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe import formats
from megamoe.recipe import Recipe, Traits, traits

_MAX = {"e4m3": formats.E4M3_MAX, "e2m1": formats.E2M1_MAX}
_INVERSE_MAX = {"e4m3": 1 / 448, "e2m1": 1 / 6}  # become fl(1/448) and fl(1/6) where they meet an fp32 tensor
_NVFP4_RANGE = 2688.0  # 448 · 6: the largest UE4M3 scale times the largest E2M1 magnitude
SM90_FLOOR = 1e-10


class BlockFormat(NamedTuple):
    """Elements and what one scale covers: `rows` × `cols` elements, tails shorter."""

    element: str
    scale: str
    rows: int
    cols: int


class Quantized(NamedTuple):
    """q: float8_e4m3fn [n, H] or packed E2M1 uint8 [n, H/2]; sf: uint8 or fp32 [n, ⌈H/g⌉] row-major;
    token_scale: fp32 [n] (NVFP4) or None."""

    q: torch.Tensor
    sf: torch.Tensor
    token_scale: torch.Tensor | None


class PreDispatched(NamedTuple):
    """Output of the pre-dispatch. The quantized rows are the T real ones (the contract leaves pad rows
    untouched), ids int64 [P, K] and weights fp32 [P, K] include the pad rows (−1 and +0)."""

    x: Quantized
    ids: torch.Tensor
    weights: torch.Tensor


class _Kind(NamedTuple):
    format: BlockFormat
    amax_floor: float


_KINDS = {
    "mxfp8": _Kind(BlockFormat("e4m3", "ue8m0", 1, 32), 1e-4),
    "mxfp4": _Kind(BlockFormat("e2m1", "ue8m0", 1, 32), 1e-4),
    "nvfp4": _Kind(BlockFormat("e2m1", "ue4m3", 1, 16), 1e-4),
    "fp8_block128": _Kind(BlockFormat("e4m3", "fp32", 1, 128), SM90_FLOOR),
}


def act_format(row: Traits) -> BlockFormat:
    """Format of GEMM 1's activations."""
    return BlockFormat(row.act, str(row.act_scale_format), 1, row.act_group)


def mid_format(row: Traits) -> BlockFormat:
    """Format of GEMM 2's activations, the intermediate."""
    return BlockFormat(row.act, str(row.mid_scale_format), 1, row.mid_group)


def weight_format(row: Traits) -> BlockFormat:
    """Format of the routed expert weights."""
    return BlockFormat(row.weight, str(row.weight_scale_format), *row.weight_group)


def shared_weight_format(recipe: Recipe, weight_dtype: torch.dtype) -> BlockFormat:
    """Format of shared weights of `weight_dtype` beside the experts of `recipe`.

    uint8 means the experts' own E2M1 format; float8_e4m3fn means E4M3 with UE8M0/32 under fp8xfp4 and with
    fp32 128×128 under fp8xfp8. `ValueError` for any other pair.
    """
    row = traits(recipe)
    if weight_dtype == torch.uint8 and row.weight == "e2m1":
        return weight_format(row)
    if weight_dtype == torch.float8_e4m3fn and row.act == "e4m3":
        return BlockFormat("e4m3", "ue8m0", 1, 32) if row.weight == "e2m1" else weight_format(row)
    raise ValueError(f"shared_w13 has dtype {weight_dtype}, which {recipe} has no shared weight format for")


def kind_of(recipe: Recipe) -> str:
    """Name of the pre-dispatch quantizer of `recipe`: mxfp8, mxfp4, nvfp4 or fp8_block128."""
    wanted = act_format(traits(recipe))
    for name, kind in _KINDS.items():
        if kind.format == wanted:
            return name
    raise NotImplementedError(f"no pre-dispatch kind quantizes the activations of {recipe}")


def quantize(x: torch.Tensor, kind: str, group: int | None = None, amax_floor: float | None = None) -> Quantized:
    """Pre-dispatch quantization of x [n, H], BF16 (or anything that fp32 holds exactly).

    kind: mxfp8, mxfp4, nvfp4, fp8_block128. `group` replaces the kind's columns per scale, `amax_floor` its
    floor: 1e-4 under the SM100 kinds (of each group, under NVFP4 of the whole row), 1e-10 under
    fp8_block128.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r} is unknown; allowed: {', '.join(_KINDS)}")
    fmt, default_floor = _KINDS[kind]
    if group is not None:
        fmt = fmt._replace(cols=group)
    floor = default_floor if amax_floor is None else amax_floor
    values = x.float()
    amax = _group_amax(values, fmt.cols)
    width = values.shape[-1]
    token_scale = None

    if fmt.scale == "ue8m0":
        sf = formats.ue8m0_ceil(_divide(amax.clamp_min(floor), _MAX[fmt.element]), 1, 254)
        inverse = formats.ue8m0_inverse(sf)
    elif fmt.scale == "ue4m3":
        token_scale = _divide(_amax(values).clamp_min(floor), _NVFP4_RANGE)
        outer = token_scale[..., None]
        sf = formats.encode_ue4m3(_divide(amax, 6.0 * outer))
        inverse = _reciprocal_or_zero(formats.decode_ue4m3(sf), outer)
    else:
        sf = _divide(amax.clamp_min(floor), _MAX[fmt.element])
        inverse = sf.reciprocal()
    scaled = values * expand_scales(inverse, fmt, values.shape[-2], width)
    return Quantized(_encode(scaled, fmt.element, "toward_zero"), sf, token_scale)


def pre_dispatch_reference(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    kind: str,
    rows: int | None = None,
    group: int | None = None,
    amax_floor: float | None = None,
    expert_scales: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
) -> PreDispatched:
    """What the pre-dispatch writes: x [T, H] BF16 quantized, ids and weights [T, K] copied and padded to
    `rows`.

    A weight is multiplied by `expert_scales[id]` (fp32 [E], ids outside it keep theirs) and by
    `routed_scaling_factor`, one fp32 product each, where given.
    """
    ids = topk_ids.long()
    weights = topk_weights.float()
    if expert_scales is not None:
        known = (ids >= 0) & (ids < expert_scales.numel())
        weights = torch.where(known, weights * expert_scales[torch.where(known, ids, 0)], weights)
    if routed_scaling_factor is not None:
        weights = weights * routed_scaling_factor
    pad = (0, 0, 0, 0 if rows is None else rows - x.shape[0])
    return PreDispatched(
        quantize(x, kind, group, amax_floor),
        torch.nn.functional.pad(ids, pad, value=-1),
        torch.nn.functional.pad(weights, pad, value=0.0),
    )


def requantize(act: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """The fused quantization between the GEMMs: act fp32 [n, I] to (q, sf).

    SM100: no floor (amax 0 gives byte 0), multiply by fl(1/448) or fl(1/6), E2M1 ties to even and −0 kept,
    NVFP4 without an outer scale. SM90: floor 1e-10, multiply by fl(1/448), IEEE reciprocal, 64 columns per
    fp32 scale. NaN is ignored where a group has anything else; a group of NaN alone has a NaN maximum, which SM90's
    floor replaces and SM100's scales turn into byte 254 or UE4M3's NaN, so that it stays visible (ours: upstream's
    contract is silent, as it is on an infinite maximum, byte 254).
    """
    fmt = mid_format(traits(recipe))
    amax = _group_amax(act, fmt.cols)
    if fmt.scale != "fp32":
        amax = torch.where(_in_groups(act, fmt.cols).isnan().all(-1), torch.nan, amax)
    if fmt.scale == "ue8m0":
        sf = formats.ue8m0_ceil(amax * _INVERSE_MAX[fmt.element], 0, 254)
        inverse = formats.ue8m0_inverse(sf)
    elif fmt.scale == "ue4m3":
        sf = formats.encode_ue4m3(amax * _INVERSE_MAX[fmt.element])
        inverse = _reciprocal_or_zero(formats.decode_ue4m3(sf))
    else:
        sf = amax.clamp_min(SM90_FLOOR) * _INVERSE_MAX[fmt.element]
        inverse = sf.reciprocal()
    return _encode(act * expand_scales(inverse, fmt, act.shape[-2], act.shape[-1]), fmt.element, "even"), sf


def dequantize_act(
    q: torch.Tensor, sf: torch.Tensor, kind: str | BlockFormat, token_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 [n, H] of a quantized activation; `kind` as in `quantize`, or its format (`act_format`,
    `mid_format`)."""
    values = _dequantize(q, sf, _KINDS[kind].format if isinstance(kind, str) else kind)
    return values if token_scale is None else values * token_scale[..., None]


def dequantize_weight(w: torch.Tensor, sf: torch.Tensor, format: Recipe | BlockFormat) -> torch.Tensor:
    """fp32 [.., N, K] of a weight matrix; a `Recipe` stands for its routed weights' format."""
    return _dequantize(w, sf, weight_format(traits(format)) if isinstance(format, Recipe) else format)


def decode(q: torch.Tensor, element: str) -> torch.Tensor:
    """fp32 values of E4M3 or packed E2M1 elements, without scales."""
    return formats.decode_e2m1(formats.unpack_e2m1(q)) if element == "e2m1" else formats.decode_e4m3(q)


def decode_scales(sf: torch.Tensor, scale: str) -> torch.Tensor:
    """fp32 values of UE8M0 or UE4M3 bytes; fp32 scales are themselves."""
    if scale == "fp32":
        return sf
    return formats.decode_ue8m0(sf) if scale == "ue8m0" else formats.decode_ue4m3(sf)


def expand_scales(scales: torch.Tensor, fmt: BlockFormat, rows: int, cols: int) -> torch.Tensor:
    """One scale per element: [.., ⌈rows/r⌉, ⌈cols/c⌉] to [.., rows, cols]."""
    wide = scales.repeat_interleave(fmt.cols, dim=-1)[..., :cols]
    return wide if fmt.rows == 1 else wide.repeat_interleave(fmt.rows, dim=-2)[..., :rows, :]


def _dequantize(q: torch.Tensor, sf: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    values = decode(q, fmt.element)
    return values * expand_scales(decode_scales(sf, fmt.scale), fmt, *values.shape[-2:])


def _encode(scaled: torch.Tensor, element: str, ties: formats.Ties) -> torch.Tensor:
    if element == "e4m3":
        return formats.encode_e4m3(scaled)
    return formats.pack_e2m1(formats.encode_e2m1(scaled, ties))


def _amax(values: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of the last dimension; NaN is ignored, as fmaxf ignores it."""
    return torch.where(values.isnan(), 0.0, values.abs()).amax(-1)


def _group_amax(values: torch.Tensor, group: int) -> torch.Tensor:
    return _amax(_in_groups(values, group))


def _in_groups(values: torch.Tensor, group: int) -> torch.Tensor:
    """[.., columns] as [.., groups, group], a tail filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % group)).unflatten(-1, (-1, group))


def _divide(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    """IEEE a / b. Torch on CUDA replaces division by a Python number by a product with its reciprocal."""
    return torch.div(a, torch.as_tensor(b, dtype=torch.float32, device=a.device))


def _reciprocal_or_zero(scale: torch.Tensor, outer: torch.Tensor | None = None) -> torch.Tensor:
    """1 / scale, or 1 / (scale · outer), where scale > 0; else 0 (also for a NaN scale)."""
    denominator = scale if outer is None else scale * outer
    return torch.where(scale > 0, denominator.reciprocal(), 0.0)
