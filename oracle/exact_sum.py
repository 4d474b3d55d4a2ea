"""Exact-sum layers: inputs on which a whole layer has one bit pattern, whatever order its sums are formed in.

Every sum over K is a sum of few equal magnitudes, so that an accumulator of 13 bits below its largest term (FP8
WGMMA's) already holds it exactly; SwiGLU's gates are 0 or so large that every sigmoid, approximate or not, is 1;
everything else is elementwise and fixed by the contract. What two implementations then differ in is an error.

How it is made. Columns of x have a fixed sign each and belong to a class; in every 16 columns all classes appear:

- two gate classes: a token switches one of them on (sign · B) and the other off. A row of gate weights meets columns
  of one class with their signs, so a gate is 0 or terms · B.
- four up classes: a token gives each a sign s, its columns hold s · sign · A. A row of up weights meets two classes,
  so an up value is 0, by cancellation, or ±2 · terms · A.

A and B are such that the quantizer keeps them and makes power-of-two scales. Scales differ between tokens, K groups
and weight rows, but from K group to K group the scales of x and of w13 cancel, so that sums keep one unit. Values
without scales (BF16) carry the power of two themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megamoe import formats
from megamoe.oracle.random_layers import DTYPES, Layer, layer_spec
from megamoe.oracle.reference import (
    BlockFormat,
    Expert,
    LayerTrace,
    Stages,
    act_format,
    dense_shared_expert,
    dequantize_act,
    mid_format,
    moe_layer,
    shared_weight_format,
    slot_expert,
    slots_by_expert,
    weight_format,
)
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe
from megamoe.spec import LayerSpec

SUM_BITS = 13  # of an FP8 WGMMA accumulator below its largest addend
COMBINE_BITS = 24  # fp32
MIN_GATE = 32.0  # 1 + exp(-32) is 1 in fp32, with any approximation of exp

_CLASS_OF_16 = (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)  # two gate classes, four up classes
_GATE_CLASSES, _UP_CLASSES = 2, 4
_UP_PAIRS = ((2, 3), (2, 4), (2, 5), (3, 4), (3, 5), (4, 5))
_MAX_TERMS = 32


@dataclass(frozen=True)
class _Magnitudes:
    """A (up columns) and B (gate columns) of a token and K group with scale exponents 0, and the exponents of gate
    and up weight scales at 16 terms: gates from 32 on, up values of some units, so that every scale is normal."""

    up: float
    gate: float
    gate_weight: int
    up_weight: int


# By the scale of the activations. fp32 scales are amax / 448, NVFP4's are amax / 2688 per token or, with a global
# factor, amax / 6 per group: A is a multiple of that. E4M3 then holds 256 beside 448, so B is a power of two and
# act = gate · up is 448 · 2^k again; E2M1 holds 4 beside 6.
_POWERS_OF_TWO = _Magnitudes(up=1.0, gate=1.0, gate_weight=1, up_weight=-5)
_FP32 = _Magnitudes(up=448 / 512, gate=256 / 512, gate_weight=2, up_weight=-5)
_MAGNITUDES = {
    "none": _POWERS_OF_TWO,
    "mx32": _POWERS_OF_TWO,
    "nv16_token": _Magnitudes(up=2688 / 1024, gate=1792 / 1024, gate_weight=1, up_weight=-5),
    "nv16": _Magnitudes(up=1.5, gate=1.0, gate_weight=1, up_weight=-5),
    "block128": _FP32,
    "token": _FP32,
}
_X_GSF = 8.0
_UNSCALED_GROUP = 32  # columns of BF16 weights that share a power of two


_Matrix = tuple[torch.Tensor, torch.Tensor | None]
"""Elements and scales of a weight; BF16 has none."""


@dataclass(frozen=True)
class _Columns:
    """The columns of x: class and sign int64 [H], and the exponents of their K groups, int64 [H / group]."""

    kind: torch.Tensor
    sign: torch.Tensor
    exponent: torch.Tensor
    group: int


def exact_sum_layer(
    recipe: Recipe,
    *,
    tokens: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    num_shared_experts: int = 0,
    shared_weight: str | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Layer:
    """A layer whose y, and every stage of it, is the same bits for every order of summation; no clamp.

    The promise is checked on the stages of the reference. `ValueError` where it does not hold, and for a `hidden`
    that is no multiple of the recipe's scale group.
    """
    spec = layer_spec(
        recipe, hidden, intermediate, num_experts, top_k, num_shared_experts, shared_weight, activation_clamp=None
    )
    group = max(spec.traits.act_group, *(fmt.cols or _UNSCALED_GROUP for fmt in _weight_formats(spec)))
    if hidden % group:
        raise ValueError(f"hidden={hidden} must be a multiple of the scale group, {group}")
    generator = torch.Generator(device).manual_seed(seed)
    columns = _columns(spec, group, generator)
    weights = _weights(spec, columns, generator)
    inputs = _inputs(spec, tokens, columns, generator)
    x_gsf = torch.tensor([_X_GSF], device=device) if recipe.act_scale == "nv16" else None
    layer = Layer(spec, weights, *inputs, LayerParameters(x_gsf=x_gsf))
    trace = moe_layer(layer.x, layer.topk_ids, layer.topk_weights, weights, spec, parameters=layer.parameters)
    require_exact(layer, trace)
    return layer


def require_exact(layer: Layer, trace: LayerTrace) -> None:
    """`ValueError` naming the condition, the first place and the value, where `layer` breaks one of these:

    x survives quantization, without an all-zero scale group; gates, in natural units, are 0 or ≥ 32; every row has an
    activated value that is not 0; under fp32 intermediate scales activated values are 0 or ±448 · 2^k, one magnitude
    per scale; sums of both GEMMs stay within `SUM_BITS` of their unit, in every order, and the combine's within
    `COMBINE_BITS`.
    """
    spec = layer.spec
    trtllm_gen = spec.recipe.numerics == "trtllm_gen"
    x = dequantize_act(trace.x.q, trace.x.sf, act_format(spec.traits), trace.x.token_scale)
    if layer.parameters.x_gsf is not None:
        x = x / layer.parameters.x_gsf
    _require(x == layer.x.float(), layer.x, "x must survive its quantization")
    group_amax = x.unflatten(-1, (-1, spec.traits.act_group or spec.hidden)).abs().amax(-1)
    _require(group_amax > 0, group_amax, "every scale group of x must have a nonzero element")
    for name, x_rows, stages, expert in _mlps(layer, trace, x):
        gate = stages.h[:, : stages.h.shape[1] // 2]
        if trtllm_gen and expert.gate_scale is not None:
            gate = gate * expert.gate_scale
        _require((gate == 0) | (gate >= MIN_GATE), gate, f"{name}: a gate must be 0 or >= {MIN_GATE}")
        row_amax = stages.act.abs().amax(-1)
        _require(row_amax > 0, row_amax, f"{name}: every row must have a nonzero activated value")
        fmt = mid_format(spec.traits)
        if fmt.scale == "fp32":
            _require_one_magnitude(stages.act, fmt.cols, name)
        w13 = torch.cat([expert.gate.dequantize(), expert.up.dequantize()])
        _require_bits(x_rows, w13, SUM_BITS, f"{name}: GEMM 1")
        act = dequantize_act(stages.act_q, stages.act_sf, fmt)
        _require_bits(act, expert.down.dequantize(), SUM_BITS, f"{name}: GEMM 2")
    rows = trace.rows.float()
    if trtllm_gen:
        rows = trace.weights[..., None] * rows
    rows = rows.nan_to_num(0.0)
    bits = rows.abs().sum(1) / _unit(rows, dim=1)
    _require(bits <= 2.0**COMBINE_BITS, bits, f"the combine must stay within {COMBINE_BITS} bits of its unit")


def _weight_formats(spec: LayerSpec) -> list[BlockFormat]:
    """Of the routed experts and, where there are any, of the shared ones."""
    formats = [weight_format(spec.traits)]
    if spec.num_shared_experts:
        formats.append(shared_weight_format(spec.recipe, DTYPES[str(spec.shared_weight)]))
    return formats


def _columns(spec: LayerSpec, group: int, generator: torch.Generator) -> _Columns:
    device, hidden = generator.device, spec.hidden
    order = torch.rand(hidden // 16, 16, generator=generator, device=device).argsort(-1)
    kind = torch.tensor(_CLASS_OF_16, device=device)[order].flatten()
    exponent = torch.randint(0, 3, (hidden // group,), generator=generator, device=device)
    return _Columns(kind, _signs(generator, hidden), exponent, group)


def _inputs(
    spec: LayerSpec, tokens: int, columns: _Columns, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_ids and topk_weights: distinct experts per token, weights 1, ½ or ¼; then the shared slots, weight 1."""
    device, size = generator.device, _MAGNITUDES[spec.recipe.act_scale]
    on = torch.randint(0, _GATE_CLASSES, (tokens, 1), generator=generator, device=device)
    gates = size.gate * (on == torch.arange(_GATE_CLASSES, device=device))
    ups = size.up * _signs(generator, tokens, _UP_CLASSES)
    by_class = torch.cat([gates, ups], dim=1)
    exponent = torch.randint(0, 2, (tokens, 1), generator=generator, device=device)
    exponent = exponent + columns.exponent.repeat_interleave(columns.group)
    x = by_class[:, columns.kind] * columns.sign * torch.exp2(exponent.float())
    routed = spec.top_k - spec.shared_slots
    ids = torch.rand(tokens, spec.num_experts, generator=generator, device=device).topk(routed).indices
    halvings = torch.randint(0, 3, ids.shape, generator=generator, device=device)
    shared = spec.num_experts + torch.arange(spec.shared_slots, device=device).expand(tokens, -1)
    weights = torch.cat([torch.exp2(-halvings.float()), torch.ones(shared.shape, device=device)], dim=1)
    return x.bfloat16(), torch.cat([ids, shared], dim=1).int(), weights


def _weights(spec: LayerSpec, columns: _Columns, generator: torch.Generator) -> PlainWeights:
    def experts(count: int, fmt: BlockFormat) -> tuple[_Matrix, _Matrix]:
        made = [_expert(spec, spec.intermediate, fmt, columns, generator) for _ in range(count)]
        return _stack([w13 for w13, _ in made]), _stack([w2 for _, w2 in made])

    formats = _weight_formats(spec)
    w13, w2 = experts(spec.num_experts, formats[0])
    weights = PlainWeights(*w13, *w2)
    if not spec.num_shared_experts:
        return weights
    if spec.shared_slots:
        w13, w2 = experts(spec.shared_slots, formats[1])
    else:
        w13, w2 = _expert(spec, spec.shared_intermediate, formats[1], columns, generator)
    return replace(weights, shared_w13=w13[0], shared_w13_scale=w13[1], shared_w2=w2[0], shared_w2_scale=w2[1])


def _expert(
    spec: LayerSpec, width: int, fmt: BlockFormat, columns: _Columns, generator: torch.Generator
) -> tuple[_Matrix, _Matrix]:
    """w13 [2 · width, H] and w2 [H, width]."""
    size, mid = _MAGNITUDES[spec.recipe.act_scale], mid_format(spec.traits)
    terms = min(_MAX_TERMS, 1 << ((spec.hidden // 16).bit_length() - 1))
    fewer = 4 - (terms.bit_length() - 1)  # exponent that keeps the sums' size at 16 terms
    device, cols = generator.device, fmt.cols or _UNSCALED_GROUP
    # Rows of one exponent: their activated values share an fp32 scale, which holds one magnitude.
    equal_rows = max(fmt.rows, mid.cols if mid.scale == "fp32" else 1)

    def scale_exponents(rows: int, lowest: int) -> torch.Tensor:
        by_row = torch.randint(0, 2, (-(-rows // equal_rows), 1), generator=generator, device=device)
        by_row = by_row.repeat_interleave(equal_rows // fmt.rows, dim=0)[: -(-rows // fmt.rows)]
        return by_row + lowest + fewer - columns.exponent.repeat_interleave(columns.group // cols)

    gate_class = torch.randint(0, _GATE_CLASSES, (width,), generator=generator, device=device)
    gate = torch.zeros(width, spec.hidden, dtype=torch.int8, device=device)
    _put_terms(gate, gate_class, columns, terms, generator)
    pair = torch.randint(0, len(_UP_PAIRS), (width,), generator=generator, device=device)
    up = torch.zeros_like(gate)
    for first_or_second in torch.tensor(_UP_PAIRS, device=device)[pair].T:
        _put_terms(up, first_or_second, columns, terms, generator)
    up *= _signs(generator, width, 1).to(torch.int8)
    w13 = _cat(
        [
            _encode(gate, scale_exponents(width, size.gate_weight), fmt),
            _encode(up, scale_exponents(width, size.up_weight), fmt),
        ]
    )

    terms = min(_MAX_TERMS, width // 2)
    down = torch.zeros(spec.hidden, width, dtype=torch.int8, device=device)
    _scatter(down, torch.arange(width, device=device), terms, generator)
    down *= _signs(generator, spec.hidden, width).to(torch.int8)
    sf_shape = (-(-spec.hidden // fmt.rows), -(-width // cols))
    exponents = torch.randint(-4, -2, sf_shape, generator=generator, device=device)
    return w13, _encode(down, exponents, fmt)


def _put_terms(
    w: torch.Tensor, row_class: torch.Tensor, columns: _Columns, terms: int, generator: torch.Generator
) -> None:
    """`terms` elements of each row of int8 w [n, H], in columns of the row's class, become those columns' signs."""
    for kind in row_class.unique().tolist():
        rows = (row_class == kind).nonzero().flatten()
        of_class = (columns.kind == kind).nonzero().flatten()
        part = torch.zeros(len(rows), w.shape[1], dtype=w.dtype, device=w.device)
        _scatter(part, of_class, terms, generator)
        w[rows] += part * columns.sign.to(torch.int8)


def _scatter(w: torch.Tensor, columns: torch.Tensor, terms: int, generator: torch.Generator) -> None:
    """Ones at `terms` of `columns` in each row of w: a window of one random order, at a random place per row."""
    order = columns[torch.randperm(len(columns), generator=generator, device=w.device)]
    start = torch.randint(0, len(columns), (w.shape[0], 1), generator=generator, device=w.device)
    w.scatter_(1, order[(start + torch.arange(terms, device=w.device)) % len(columns)], 1)


def _encode(signs: torch.Tensor, exponents: torch.Tensor, fmt: BlockFormat) -> _Matrix:
    """int8 signs [N, K] and scale exponents to elements and scales of `fmt`."""
    if fmt.element == "bf16":
        powers = torch.exp2(exponents.float()).repeat_interleave(_UNSCALED_GROUP, dim=1)
        return (signs * powers[:, : signs.shape[1]]).bfloat16(), None
    values = torch.tensor([-1.0, 0.0, 1.0], device=signs.device)
    at = signs.long() + 1
    if fmt.element == "e2m1":
        elements = formats.pack_e2m1(formats.encode_e2m1(values, "even")[at])
    else:
        elements = formats.encode_e4m3(values).view(torch.uint8)[at].view(torch.float8_e4m3fn)
    if fmt.scale == "ue8m0":
        return elements, (exponents + 127).to(torch.uint8)
    scales = torch.exp2(exponents.float())
    return elements, formats.encode_ue4m3(scales) if fmt.scale == "ue4m3" else scales


def _stack(matrices: list[_Matrix]) -> _Matrix:
    return _cat([(elements[None], None if sf is None else sf[None]) for elements, sf in matrices])


def _cat(matrices: list[_Matrix]) -> _Matrix:
    elements = torch.cat([part.view(torch.uint8) for part, _ in matrices]).view(matrices[0][0].dtype)
    scales = [sf for _, sf in matrices if sf is not None]
    return elements, torch.cat(scales) if scales else None


def _signs(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return 2 * torch.randint(0, 2, shape, generator=generator, device=generator.device) - 1


def _mlps(layer: Layer, trace: LayerTrace, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, Stages, Expert]]:
    """Name, rows of x and stages of every expert that has a token, then of the dense shared ones."""
    spec, weights = layer.spec, layer.weights
    assert trace.routed is not None  # asked for above
    for index, slots in slots_by_expert(trace.ids, trace.valid):
        expert = slot_expert(weights, layer.parameters, spec, index)
        yield f"expert {index}", x[slots // spec.top_k], trace.routed.take(slots), expert
    if trace.shared is not None:
        yield "shared experts", x, trace.shared, dense_shared_expert(weights, spec)


def _require_bits(a: torch.Tensor, b: torch.Tensor, bits: int, name: str) -> None:
    """Sums of a [n, K] · b [N, K]: all magnitudes together stay within 2^bits of the smallest product's unit."""
    total = (a.abs() @ b.abs().mT) / _unit(b, dim=1)
    total = total / _unit(a, dim=1)[:, None]
    _require(total <= 2.0**bits, total, f"{name} must stay within {bits} bits of its unit")


def _require_one_magnitude(act: torch.Tensor, group: int, name: str) -> None:
    magnitudes = torch.nn.functional.pad(act.abs(), (0, -act.shape[-1] % group)).unflatten(-1, (-1, group))
    top = magnitudes.amax(-1, keepdim=True)
    _require(
        (magnitudes == 0) | (magnitudes == top),
        magnitudes,
        f"{name}: activated values of a scale group must be 0 or of one magnitude",
    )
    mantissa = torch.frexp(top / 448).mantissa
    _require((top == 0) | (mantissa == 0.5), top, f"{name}: that magnitude must be 448 times a power of two")


def _unit(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The largest power of two that divides all fp32 `values` along `dim` (1 where all are zero)."""
    magnitude = values.abs()
    bits = magnitude.view(torch.int32)
    # Clearing the lowest mantissa bit takes the unit away; a power of two has none and is its own unit.
    rest = torch.where(bits & 0x7FFFFF == 0, 0, bits & (bits - 1)).view(torch.float32)
    smallest = torch.where(magnitude == 0, torch.inf, magnitude - rest).amin(dim)
    return torch.where(smallest == torch.inf, 1.0, smallest)


def _require(holds: torch.Tensor, values: torch.Tensor, condition: str) -> None:
    if bool(holds.all()):
        return
    where = (~holds).nonzero()[0].tolist()
    raise ValueError(f"not an exact-sum layer: {condition}; at {where} it is {values[tuple(where)].item():g}")
