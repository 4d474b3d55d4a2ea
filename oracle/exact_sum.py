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
and weight rows, but from K group to K group the scales of x and of w13 cancel, so that sums keep one unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megamoe import formats
from megamoe.oracle.random_layers import Layer, layer_spec
from megamoe.oracle.reference import (
    BlockFormat,
    LayerTrace,
    Stages,
    dequantize_act,
    dequantize_weight,
    kind_of,
    mid_format,
    moe_layer,
    shared_tensors,
    shared_weight_format,
    slots_by_expert,
    weight_format,
)
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


# By the scale format of the activations. fp32 scales are amax / 448, NVFP4's are amax / 2688 per token: A is a
# multiple of that. E4M3 then holds 256 beside 448, so B is a power of two and act = gate · up is 448 · 2^k again.
_MAGNITUDES = {
    "ue8m0": _Magnitudes(up=1.0, gate=1.0, gate_weight=1, up_weight=-5),
    "ue4m3": _Magnitudes(up=2688 / 1024, gate=1792 / 1024, gate_weight=1, up_weight=-5),
    "fp32": _Magnitudes(up=448 / 512, gate=256 / 512, gate_weight=2, up_weight=-5),
}


@dataclass(frozen=True)
class _Columns:
    """The columns of x: class and sign int64 [H], and the exponent of each K group's scale, int64 [H / group]."""

    kind: torch.Tensor
    sign: torch.Tensor
    exponent: torch.Tensor


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
    if hidden % spec.traits.act_group:
        raise ValueError(f"hidden={hidden} must be a multiple of the scale group, {spec.traits.act_group}")
    generator = torch.Generator(device).manual_seed(seed)
    columns = _columns(spec, generator)
    layer = Layer(spec, _weights(spec, columns, generator), *_inputs(spec, tokens, columns, generator))
    require_exact(layer, moe_layer(layer.x, layer.topk_ids, layer.topk_weights, layer.weights, spec))
    return layer


def require_exact(layer: Layer, trace: LayerTrace) -> None:
    """`ValueError` naming the condition, the first place and the value, where `layer` breaks one of these:

    x survives quantization, without an all-zero scale group; gates are 0 or ≥ 32; every row has an activated value
    that is not 0; under fp32 intermediate scales activated values are 0 or ±448 · 2^k, one magnitude per scale;
    sums of both GEMMs stay within `SUM_BITS` of their unit, in every order, and the combine's within `COMBINE_BITS`.
    """
    spec = layer.spec
    x = dequantize_act(trace.x.q, trace.x.sf, kind_of(spec.recipe), trace.x.token_scale)
    _require(x == layer.x.float(), layer.x, "x must survive its quantization")
    group_amax = x.unflatten(-1, (-1, spec.traits.act_group)).abs().amax(-1)
    _require(group_amax > 0, group_amax, "every scale group of x must have a nonzero element")
    for name, x_rows, stages, w13, w2 in _mlps(layer, trace, x):
        gate = stages.h[:, : stages.h.shape[1] // 2]
        _require((gate == 0) | (gate >= MIN_GATE), gate, f"{name}: a gate must be 0 or >= {MIN_GATE}")
        row_amax = stages.act.abs().amax(-1)
        _require(row_amax > 0, row_amax, f"{name}: every row must have a nonzero activated value")
        fmt = mid_format(spec.traits)
        if fmt.scale == "fp32":
            _require_one_magnitude(stages.act, fmt.cols, name)
        _require_bits(x_rows, w13, SUM_BITS, f"{name}: GEMM 1")
        _require_bits(dequantize_act(stages.act_q, stages.act_sf, fmt), w2, SUM_BITS, f"{name}: GEMM 2")
    rows = trace.rows.float().nan_to_num(0.0)
    bits = rows.abs().sum(1) / _unit(rows, dim=1)
    _require(bits <= 2.0**COMBINE_BITS, bits, f"the combine must stay within {COMBINE_BITS} bits of its unit")


def _columns(spec: LayerSpec, generator: torch.Generator) -> _Columns:
    device, hidden = generator.device, spec.hidden
    order = torch.rand(hidden // 16, 16, generator=generator, device=device).argsort(-1)
    kind = torch.tensor(_CLASS_OF_16, device=device)[order].flatten()
    exponent = torch.randint(0, 3, (hidden // spec.traits.act_group,), generator=generator, device=device)
    return _Columns(kind, _signs(generator, hidden), exponent)


def _inputs(
    spec: LayerSpec, tokens: int, columns: _Columns, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_ids and topk_weights: distinct experts per token, weights 1, ½ or ¼."""
    device = generator.device
    size = _MAGNITUDES[str(spec.traits.act_scale_format)]
    on = torch.randint(0, _GATE_CLASSES, (tokens, 1), generator=generator, device=device)
    gates = size.gate * (on == torch.arange(_GATE_CLASSES, device=device))
    ups = size.up * _signs(generator, tokens, _UP_CLASSES)
    by_class = torch.cat([gates, ups], dim=1)
    exponent = torch.randint(0, 2, (tokens, 1), generator=generator, device=device)
    exponent = exponent + columns.exponent.repeat_interleave(spec.traits.act_group)
    x = by_class[:, columns.kind] * columns.sign * torch.exp2(exponent.float())
    ids = torch.rand(tokens, spec.num_experts, generator=generator, device=device).topk(spec.top_k).indices
    halvings = torch.randint(0, 3, ids.shape, generator=generator, device=device)
    return x.bfloat16(), ids.int(), torch.exp2(-halvings.float())


def _weights(spec: LayerSpec, columns: _Columns, generator: torch.Generator) -> PlainWeights:
    fmt = weight_format(spec.traits)
    routed = _stack([_expert(spec, spec.intermediate, fmt, columns, generator) for _ in range(spec.num_experts)])
    if not spec.num_shared_experts:
        return PlainWeights(*routed)
    dtype = torch.float8_e4m3fn if spec.shared_weight == "e4m3" else torch.uint8
    fmt = shared_weight_format(spec.recipe, dtype)
    return PlainWeights(*routed, *_expert(spec, spec.shared_intermediate, fmt, columns, generator))


def _expert(
    spec: LayerSpec, width: int, fmt: BlockFormat, columns: _Columns, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """w13 [2 · width, H], w2 [H, width] and their scales, in the order of `PlainWeights`."""
    size = _MAGNITUDES[str(spec.traits.act_scale_format)]
    terms = min(_MAX_TERMS, 1 << ((spec.hidden // 16).bit_length() - 1))
    fewer = 4 - (terms.bit_length() - 1)  # exponent that keeps the sums' size at 16 terms
    device = generator.device

    def scale_exponents(rows: int, lowest: int) -> torch.Tensor:
        by_row = torch.randint(0, 2, (-(-rows // fmt.rows), 1), generator=generator, device=device)
        return by_row + lowest + fewer - columns.exponent

    gate_class = torch.randint(0, _GATE_CLASSES, (width,), generator=generator, device=device)
    gate = torch.zeros(width, spec.hidden, dtype=torch.int8, device=device)
    _put_terms(gate, gate_class, columns, terms, generator)
    pair = torch.randint(0, len(_UP_PAIRS), (width,), generator=generator, device=device)
    up = torch.zeros_like(gate)
    for first_or_second in torch.tensor(_UP_PAIRS, device=device)[pair].T:
        _put_terms(up, first_or_second, columns, terms, generator)
    up *= _signs(generator, width, 1).to(torch.int8)
    w13, w13_scale = zip(
        _encode(gate, scale_exponents(width, size.gate_weight), fmt),
        _encode(up, scale_exponents(width, size.up_weight), fmt),
    )

    terms = min(_MAX_TERMS, width // 2)
    down = torch.zeros(spec.hidden, width, dtype=torch.int8, device=device)
    _scatter(down, torch.arange(width, device=device), terms, generator)
    down *= _signs(generator, spec.hidden, width).to(torch.int8)
    sf_shape = (-(-spec.hidden // fmt.rows), -(-width // fmt.cols))
    exponents = torch.randint(-4, -2, sf_shape, generator=generator, device=device)
    w13_bytes = torch.cat([half.view(torch.uint8) for half in w13]).view(w13[0].dtype)
    return (w13_bytes, torch.cat(w13_scale), *_encode(down, exponents, fmt))


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


def _encode(signs: torch.Tensor, exponents: torch.Tensor, fmt: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 signs [N, K] and scale exponents to elements and scales of `fmt`."""
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


def _stack(experts: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype) for parts in zip(*experts)]


def _signs(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return 2 * torch.randint(0, 2, shape, generator=generator, device=generator.device) - 1


def _mlps(
    layer: Layer, trace: LayerTrace, x: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, Stages, torch.Tensor, torch.Tensor]]:
    """Name, rows of x, stages and dequantized w13, w2 of every expert that has a token, then of the shared ones."""
    spec, weights = layer.spec, layer.weights
    assert trace.routed is not None  # asked for above
    fmt = weight_format(spec.traits)
    for expert, slots in slots_by_expert(trace.ids, trace.valid):
        w13 = _dequantize_halves(weights.w13[expert], weights.w13_scale[expert], fmt)
        w2 = dequantize_weight(weights.w2[expert], weights.w2_scale[expert], fmt)
        yield f"expert {expert}", x[slots // spec.top_k], trace.routed.take(slots), w13, w2
    if trace.shared is not None:
        shared_w13, w13_scale, shared_w2, w2_scale = shared_tensors(weights)
        fmt = shared_weight_format(spec.recipe, shared_w13.dtype)
        w13 = _dequantize_halves(shared_w13, w13_scale, fmt)
        yield "shared experts", x, trace.shared, w13, dequantize_weight(shared_w2, w2_scale, fmt)


def _dequantize_halves(w13: torch.Tensor, scale: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """No block scale spans gate and up."""
    return torch.cat([dequantize_weight(w, sf, fmt) for w, sf in zip(w13.chunk(2), scale.chunk(2))])


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
