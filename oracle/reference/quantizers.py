"""Every step of the reference that makes or reads bytes: pre-dispatch, requantization, dequantization.

Source of the rules: DeepGEMM MegaMoE of `sgl-deep-gemm` 0.1.7; FlashInfer's MXFP8 quantizer for `trtllm_gen`; ours
where neither has a rule (`fp8_token`, `nvfp4_gsf`). All arithmetic is elementwise fp32, one rounding per written
operation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe import formats
from megamoe.id_map import IdMap
from megamoe.oracle.reference.ids import local_ids, slot_weights
from megamoe.recipe import Recipe, Traits, traits

_MAX = {"e4m3": formats.E4M3_MAX, "e2m1": formats.E2M1_MAX}
_INVERSE_MAX = {"e4m3": 1 / 448, "e2m1": 1 / 6}  # become fl(1/448) and fl(1/6) where they meet an fp32 tensor
_NVFP4_RANGE = 2688.0  # 448 · 6: the largest UE4M3 scale times the largest E2M1 magnitude
SM90_FLOOR = 1e-10
_WEIGHT_DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8, "bf16": torch.bfloat16}


class BlockFormat(NamedTuple):
    """Elements and what one scale covers: `rows` × `cols` elements, tails shorter; cols 0 is the whole row.

    element: e4m3, e2m1 or bf16. scale: ue8m0, ue4m3, fp32, or none (bf16), where `cols` is 0.
    """

    element: str
    scale: str
    rows: int
    cols: int


class Quantized(NamedTuple):
    """q: float8_e4m3fn [n, H], packed E2M1 uint8 [n, H/2] or BF16 [n, H]; sf: uint8 or fp32 [n, ⌈H/g⌉] row-major,
    [n, 1] where one scale covers a row, None under bf16; token_scale: fp32 [n] (NVFP4 with one) or None."""

    q: torch.Tensor
    sf: torch.Tensor | None
    token_scale: torch.Tensor | None


class PreDispatched(NamedTuple):
    """Output of the pre-dispatch. The quantized rows are the T real ones (the contract leaves pad rows
    untouched), local ids int64 [P, K] and weights fp32 [P, K] include the pad rows (−1 and +0)."""

    x: Quantized
    ids: torch.Tensor
    weights: torch.Tensor


class _Kind(NamedTuple):
    """`amax_floor` is the default; None: the kind has no floor."""

    format: BlockFormat
    amax_floor: float | None


_KINDS = {
    "mxfp8": _Kind(BlockFormat("e4m3", "ue8m0", 1, 32), 1e-4),
    "mxfp8_trtllm": _Kind(BlockFormat("e4m3", "ue8m0", 1, 32), None),
    "mxfp4": _Kind(BlockFormat("e2m1", "ue8m0", 1, 32), 1e-4),
    "nvfp4": _Kind(BlockFormat("e2m1", "ue4m3", 1, 16), 1e-4),
    "nvfp4_gsf": _Kind(BlockFormat("e2m1", "ue4m3", 1, 16), None),
    "fp8_block128": _Kind(BlockFormat("e4m3", "fp32", 1, 128), SM90_FLOOR),
    "fp8_token": _Kind(BlockFormat("e4m3", "fp32", 1, 0), SM90_FLOOR),
    "bf16": _Kind(BlockFormat("bf16", "none", 1, 0), None),
}


def act_format(row: Traits) -> BlockFormat:
    """Format of GEMM 1's activations."""
    return BlockFormat(row.act, row.act_scale_format or "none", 1, row.act_group)


def mid_format(row: Traits) -> BlockFormat:
    """Format of GEMM 2's activations, the intermediate."""
    return BlockFormat(row.act, row.mid_scale_format or "none", 1, row.mid_group)


def weight_format(row: Traits) -> BlockFormat:
    """Format of the routed expert weights."""
    return BlockFormat(row.weight, row.weight_scale_format or "none", *row.weight_group)


def shared_weight_format(recipe: Recipe, weight_dtype: torch.dtype) -> BlockFormat:
    """Format of shared weights of `weight_dtype` beside the experts of `recipe`.

    A dtype that the routed weights have means their format. float8_e4m3fn beside MXFP4 (fp8xfp4) is E4M3 with UE8M0/32
    where the activations have UE8M0 scales, and with fp32 128×128 where theirs are fp32. `ValueError` for any other
    pair.
    """
    row = traits(recipe)
    if weight_dtype == _WEIGHT_DTYPES[row.weight]:
        return weight_format(row)
    if weight_dtype == torch.float8_e4m3fn and row.act == "e4m3":
        return BlockFormat("e4m3", *(("ue8m0", 1, 32) if row.act_scale_format == "ue8m0" else ("fp32", 128, 128)))
    raise ValueError(f"shared_w13 has dtype {weight_dtype}, which {recipe} has no shared weight format for")


def kind_of(recipe: Recipe) -> str:
    """Name of the pre-dispatch quantizer of `recipe`, as `quantize` takes it."""
    row = traits(recipe)
    if row.act == "bf16":
        return "bf16"
    if row.act_scale_format == "fp32":
        return "fp8_block128" if row.act_group else "fp8_token"
    if row.act_scale_format == "ue4m3":
        return "nvfp4" if row.token_scale else "nvfp4_gsf"
    if row.act == "e2m1":
        return "mxfp4"
    return "mxfp8_trtllm" if recipe.numerics == "trtllm_gen" else "mxfp8"


def quantize(
    x: torch.Tensor,
    kind: str,
    group: int | None = None,
    amax_floor: float | None = None,
    x_gsf: torch.Tensor | None = None,
) -> Quantized:
    """Pre-dispatch quantization of x [n, H], BF16 (or anything that fp32 holds exactly).

    `group` replaces the kind's columns per scale. Kinds of DeepGEMM's contract, with their floors, which `amax_floor`
    replaces: mxfp8, mxfp4 (1e-4, of a group), nvfp4 (1e-4, of a row), fp8_block128 (1e-10). Kinds beside it:

    - fp8_token: fp8_block128 with the whole row as the group, sf [n, 1].
    - mxfp8_trtllm: `requantize`'s MXFP8: no floor, byte 0 for amax 0, amax·fl(1/448).
    - nvfp4_gsf: x·x_gsf, with x_gsf fp32 of one element: sf = UE4M3(fl(fl(amax·fl(1/6))·x_gsf)); values are E2M1 of
      fl(x·f), nearest even and −0 kept, f = fl(x_gsf/sf), or 0 where sf is 0 or NaN (a group of NaN alone).
    - bf16: x itself, without scales.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r} is unknown; allowed: {', '.join(_KINDS)}")
    fmt, floor = _KINDS[kind]
    if (x_gsf is not None) != (kind == "nvfp4_gsf"):
        raise ValueError(f"x_gsf is {x_gsf!r}; kind nvfp4_gsf needs it and no other takes it, kind={kind!r}")
    if amax_floor is not None:
        if floor is None:
            raise ValueError(f"amax_floor is {amax_floor!r}; kind {kind!r} has no floor")
        floor = amax_floor
    if group is not None:
        fmt = fmt._replace(cols=group)
    if kind == "bf16":
        return Quantized(x.bfloat16(), None, None)
    if kind == "mxfp8_trtllm":
        return Quantized(*_quantize_without_floor(x.float(), fmt), None)
    if x_gsf is not None:
        return Quantized(*_quantize_without_floor(x.float(), fmt, x_gsf.to(x.device).reshape(())), None)

    assert floor is not None  # the kinds without one are done
    values = x.float()
    amax = _group_amax(values, fmt.cols)
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
    scaled = values * expand_scales(inverse, fmt, *values.shape[-2:])
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
    x_gsf: torch.Tensor | None = None,
    id_map: IdMap | None = None,
) -> PreDispatched:
    """What the pre-dispatch writes: x [T, H] BF16 quantized, ids and weights [T, K] mapped, scaled and padded to
    `rows`.

    A weight is multiplied by `expert_scales[id]` (fp32 [E], global ids; ids outside it keep theirs), then by
    `routed_scaling_factor` unless its id names a shared slot of `id_map`: one fp32 product each, where given. Without
    `id_map` ids are copied verbatim.
    """
    experts = {} if id_map is None else id_map._asdict()
    ids = local_ids(topk_ids, **experts) if experts else topk_ids.long()
    weights = slot_weights(
        topk_ids,
        topk_weights,
        num_experts=experts.get("num_experts", 0),
        shared_slots=experts.get("shared_slots", 0),
        expert_scales=expert_scales,
        routed_scaling_factor=routed_scaling_factor,
    )
    pad = (0, 0, 0, 0 if rows is None else rows - x.shape[0])
    return PreDispatched(
        quantize(x, kind, group, amax_floor, x_gsf),
        torch.nn.functional.pad(ids, pad, value=-1),
        torch.nn.functional.pad(weights, pad, value=0.0),
    )


def requantize(act: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The fused quantization between the GEMMs: act fp32 [n, I] to (q, sf); its format is `mid_format`'s.

    UE8M0 and UE4M3 scales: no floor (amax 0 gives byte 0), multiply by fl(1/448) or fl(1/6), E2M1 ties to even and −0
    kept, NVFP4 without an outer scale. fp32 scales: floor 1e-10, multiply by fl(1/448), IEEE reciprocal. BF16: one
    rounding to nearest even, no sf. NaN is ignored where a group has anything else; a group of NaN alone has a NaN
    maximum, which fp32 scales' floor replaces and the others turn into byte 254 or UE4M3's NaN, so that it stays
    visible (ours: upstream's contract is silent, as it is on an infinite maximum, byte 254).
    """
    fmt = mid_format(traits(recipe))
    if fmt.scale == "none":
        return act.bfloat16(), None
    if fmt.scale != "fp32":
        return _quantize_without_floor(act, fmt)
    sf = _group_amax(act, fmt.cols).clamp_min(SM90_FLOOR) * _INVERSE_MAX[fmt.element]
    return _encode(act * expand_scales(sf.reciprocal(), fmt, *act.shape[-2:]), fmt.element, "even"), sf


def _quantize_without_floor(
    values: torch.Tensor, fmt: BlockFormat, gsf: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [n, W] to (q, UE8M0 or UE4M3 bytes) by `requantize`'s rules; under UE4M3 `gsf` multiplies them."""
    amax = _group_amax(values, fmt.cols)
    amax = torch.where(_in_groups(values, fmt.cols).isnan().all(-1), torch.nan, amax)
    raw = amax * _INVERSE_MAX[fmt.element]
    if fmt.scale == "ue8m0":
        sf = formats.ue8m0_ceil(raw, 0, 254)
        inverse = formats.ue8m0_inverse(sf)
    elif gsf is None:
        sf = formats.encode_ue4m3(raw)
        inverse = _reciprocal_or_zero(formats.decode_ue4m3(sf))
    else:
        sf = formats.encode_ue4m3(raw * gsf)
        decoded = formats.decode_ue4m3(sf)
        inverse = torch.where(decoded > 0, torch.div(gsf, decoded), 0.0)
    return _encode(values * expand_scales(inverse, fmt, *values.shape[-2:]), fmt.element, "even"), sf


def dequantize_act(
    q: torch.Tensor, sf: torch.Tensor | None, kind: str | BlockFormat, token_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 [n, H] of a quantized activation; `kind` as in `quantize`, or its format (`act_format`, `mid_format`). What
    nvfp4_gsf made is worth x·x_gsf."""
    values = _dequantize(q, sf, _KINDS[kind].format if isinstance(kind, str) else kind)
    return values if token_scale is None else values * token_scale[..., None]


def dequantize_weight(w: torch.Tensor, sf: torch.Tensor | None, format: Recipe | BlockFormat) -> torch.Tensor:
    """fp32 [.., N, K] of a weight matrix; a `Recipe` stands for its routed weights' format."""
    return _dequantize(w, sf, weight_format(traits(format)) if isinstance(format, Recipe) else format)


def decode(q: torch.Tensor, element: str) -> torch.Tensor:
    """fp32 values of E4M3, packed E2M1 or BF16 elements, without scales."""
    if element == "bf16":
        return q.float()
    return formats.decode_e2m1(formats.unpack_e2m1(q)) if element == "e2m1" else formats.decode_e4m3(q)


def decode_scales(sf: torch.Tensor, scale: str) -> torch.Tensor:
    """fp32 values of UE8M0 or UE4M3 bytes; fp32 scales are themselves."""
    if scale == "fp32":
        return sf
    return formats.decode_ue8m0(sf) if scale == "ue8m0" else formats.decode_ue4m3(sf)


def expand_scales(scales: torch.Tensor, fmt: BlockFormat, rows: int, cols: int) -> torch.Tensor:
    """One scale per element: [.., ⌈rows/r⌉, ⌈cols/c⌉] to [.., rows, cols]."""
    wide = scales.repeat_interleave(fmt.cols or cols, dim=-1)[..., :cols]
    return wide if fmt.rows == 1 else wide.repeat_interleave(fmt.rows, dim=-2)[..., :rows, :]


def _dequantize(q: torch.Tensor, sf: torch.Tensor | None, fmt: BlockFormat) -> torch.Tensor:
    values = decode(q, fmt.element)
    if fmt.scale == "none":
        return values
    if sf is None:
        raise ValueError(f"sf is None; {fmt.element} with {fmt.scale} scales needs them")
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
    """[.., columns] as [.., groups, group], a tail filled up with zeros; group 0 is the whole row."""
    group = group or max(1, values.shape[-1])
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % group)).unflatten(-1, (-1, group))


def _divide(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    """IEEE a / b. Torch on CUDA replaces division by a Python number by a product with its reciprocal."""
    return torch.div(a, torch.as_tensor(b, dtype=torch.float32, device=a.device))


def _reciprocal_or_zero(scale: torch.Tensor, outer: torch.Tensor | None = None) -> torch.Tensor:
    """1 / scale, or 1 / (scale · outer), where scale > 0; else 0 (also for a NaN scale)."""
    denominator = scale if outer is None else scale * outer
    return torch.where(scale > 0, denominator.reciprocal(), 0.0)
