"""Random layers of any served recipe: weights, inputs and routing for tests, the demo and the benches.

Weights are normal with variance 1/K and then quantized, so that gate and up have about unit variance for
the inputs made here. Every function draws from the `torch.Generator` it is given, on that generator's
device; the same seed gives other numbers on CPU than on CUDA.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from megamoe import formats
from megamoe.oracle.reference.quantizers import (
    BlockFormat,
    expand_scales,
    quantize,
    requantize,
    shared_weight_format,
    weight_format,
)
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe, traits
from megamoe.spec import LayerSpec

_NVFP4 = Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100")


@dataclass(frozen=True)
class Inputs:
    """x BF16 [T, H], topk_ids int32 [T, K], topk_weights fp32 [T, K]."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """A layer and one call's inputs: what `moe_layer(layer.x, …, layer.weights, layer.spec)` takes."""

    spec: LayerSpec
    weights: PlainWeights
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def random_layer(
    recipe: Recipe,
    *,
    tokens: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    num_shared_experts: int = 0,
    shared_weight: str | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    masked: float = 0.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Layer:
    """A whole random layer; see `layer_spec`, `random_weights` and `random_inputs`."""
    spec = layer_spec(
        recipe,
        hidden,
        intermediate,
        num_experts,
        top_k,
        num_shared_experts,
        shared_weight,
        activation_clamp,
        activation,
    )
    generator = torch.Generator(device).manual_seed(seed)
    weights = random_weights(spec, generator)
    inputs = random_inputs(spec, tokens, generator, masked=masked)
    return Layer(spec, weights, inputs.x, inputs.topk_ids, inputs.topk_weights)


def layer_spec(
    recipe: Recipe,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    num_shared_experts: int = 0,
    shared_weight: str | None = None,
    activation_clamp: float | None = None,
    activation: str = "swiglu",
) -> LayerSpec:
    """A `LayerSpec`; with shared experts their element defaults to DeepGEMM's: E4M3 beside E4M3
    activations."""
    if num_shared_experts and shared_weight is None:
        shared_weight = traits(recipe).act
    return LayerSpec(
        recipe,
        hidden,
        intermediate,
        num_experts,
        top_k,
        num_shared_experts,
        shared_weight if num_shared_experts else None,
        activation=activation,
        activation_clamp=activation_clamp,
    )


def random_weights(spec: LayerSpec, generator: torch.Generator) -> PlainWeights:
    """Weights of `spec`, made and quantized expert by expert: one expert in fp32 is the extra memory."""
    fmt = weight_format(spec.traits)
    hidden, width, shared_width = spec.hidden, spec.intermediate, spec.shared_intermediate
    w13, w13_scale = _stacked(spec.num_experts, 2, width, hidden, fmt, generator)
    w2, w2_scale = _stacked(spec.num_experts, 1, hidden, width, fmt, generator)
    if not spec.num_shared_experts:
        return PlainWeights(w13, w13_scale, w2, w2_scale)
    dtype = torch.float8_e4m3fn if spec.shared_weight == "e4m3" else torch.uint8
    fmt = shared_weight_format(spec.recipe, dtype)
    shared13, shared13_scale = _stacked(1, 2, shared_width, hidden, fmt, generator)
    shared2, shared2_scale = _stacked(1, 1, hidden, shared_width, fmt, generator)
    return PlainWeights(w13, w13_scale, w2, w2_scale, shared13[0], shared13_scale[0], shared2[0], shared2_scale[0])


def random_inputs(spec: LayerSpec, tokens: int, generator: torch.Generator, *, masked: float = 0.0) -> Inputs:
    """Normal rows whose scale differs from token to token (½ … 2), distinct experts per token, weights that
    sum to 1.

    `masked` is the share of slots whose id is −1.
    """
    device = generator.device
    x = torch.randn(tokens, spec.hidden, generator=generator, device=device)
    x *= torch.exp2(2 * torch.rand(tokens, 1, generator=generator, device=device) - 1)
    scores = torch.rand(tokens, spec.num_experts, generator=generator, device=device)
    ids = scores.topk(spec.top_k, dim=-1).indices.int()
    ids[torch.rand(tokens, spec.top_k, generator=generator, device=device) < masked] = -1
    weights = 0.25 + torch.rand(tokens, spec.top_k, generator=generator, device=device)
    return Inputs(x.bfloat16(), ids, weights / weights.sum(-1, keepdim=True))


def quantize_weight(w: torch.Tensor, fmt: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K] to (elements, scales) of `fmt`: amax to the element's largest value, as upstream's test
    helpers do."""
    if fmt.scale == "ue8m0":
        return quantize(w, "mxfp8" if fmt.element == "e4m3" else "mxfp4")[:2]
    if fmt.scale == "ue4m3":
        return requantize(w, _NVFP4)  # weights use the fused requantizer's rule: no outer scale
    rows, cols = w.shape
    padded = torch.nn.functional.pad(w, (0, -cols % fmt.cols, 0, -rows % fmt.rows))
    blocks = padded.unflatten(1, (-1, fmt.cols)).unflatten(0, (-1, fmt.rows))
    sf = blocks.abs().amax((1, 3)).clamp_min(1e-4) / formats.E4M3_MAX
    return formats.encode_e4m3(w / expand_scales(sf, fmt, rows, cols)), sf


def _stacked(
    count: int, halves: int, rows: int, cols: int, fmt: BlockFormat, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` matrices [halves · rows, cols] and their scales; no scale spans two halves (gate and up)."""
    device = generator.device
    packed = cols // 2 if fmt.element == "e2m1" else cols
    sf_shape = (count, halves, -(-rows // fmt.rows), -(-cols // fmt.cols))
    q = torch.empty(count, halves, rows, packed, dtype=torch.uint8, device=device)
    sf = torch.empty(sf_shape, dtype=torch.float32 if fmt.scale == "fp32" else torch.uint8, device=device)
    for index in itertools.product(range(count), range(halves)):
        w = torch.randn(rows, cols, generator=generator, device=device) * cols**-0.5
        elements, sf[index] = quantize_weight(w, fmt)
        q[index] = elements.view(torch.uint8)
    q, sf = q.flatten(1, 2), sf.flatten(1, 2)
    return (q.view(torch.float8_e4m3fn) if fmt.element == "e4m3" else q), sf
