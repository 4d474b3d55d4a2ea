"""What the backends run on: random weights, made once per model, and input sets that rotate."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from megamoe.bench.registry import Point
from megamoe.bench.routings import expert_ids
from megamoe.bench.shapes import ModelShape
from megamoe.oracle.random_layers import DTYPES, Inputs, layer_spec, random_inputs, random_parameters, random_weights
from megamoe.oracle.reference import shared_weight_format
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe, resolve_recipe, traits
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights, prepare

_T = TypeVar("_T")
_SEED = 0
_ROTATION_BYTES = 1 << 30  # of touched weights between two uses of an input set: an H200's L2 has 60 MB
_LEAST_SETS, _MOST_SETS = 3, 24

MXFP4 = resolve_recipe("fp8xfp4")
"""The recipe whose plain weights are E2M1 with UE8M0 scales."""
FP8_BLOCK = resolve_recipe("fp8xfp8")
"""The recipe whose plain weights are E4M3 with fp32 scales per 128×128."""


BLOCK128 = resolve_recipe("fp8xfp4", "block128")
TOKEN = resolve_recipe("fp8xfp4", "token")
BF16_FP4 = resolve_recipe("bf16xfp4")


def spec_of(shape: ModelShape, recipe: Recipe) -> LayerSpec:
    """The layer of `shape` under `recipe`. Shared experts are as DeepGEMM has them (`layer_spec`); under its SM90
    numerics, where its kernel has none, they have the routed experts' format, which the SM90 tier fuses."""
    shared_weight = traits(recipe).weight if recipe.numerics == "deep_gemm_sm90" else None
    return layer_spec(
        recipe,
        shape.hidden,
        shape.intermediate,
        shape.num_experts,
        shape.top_k,
        shape.num_shared_experts,
        shared_weight,
        activation_clamp=shape.activation_clamp,
        activation=shape.activation,
    )


class LayerStore:
    """One model's weights on one device, made when first asked for and kept while the model is measured.

    Recipes with the same weight format share the same numbers; so do the same experts with and without shared ones.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self._cache: dict[Hashable, Any] = {}

    def cached(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """`make()`'s result, kept under `key`: where a backend keeps weights in its own form."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def plain(self, recipe: Recipe, num_shared_experts: int = 0) -> PlainWeights:
        spec = spec_of(replace(self.shape, num_shared_experts=num_shared_experts), recipe)
        t = spec.traits
        form = t.weight, t.weight_scale_format, t.weight_group
        routed = self.cached(("plain", form), lambda: self._random(replace(spec, num_shared_experts=0)))
        if not num_shared_experts:
            return routed
        # One routed expert, thrown away: the generator has no way to make shared ones alone.
        shared_form = shared_weight_format(recipe, DTYPES[str(spec.shared_weight)])
        shared = self.cached(
            ("plain shared", shared_form, num_shared_experts),
            lambda: self._random(replace(spec, num_experts=1, top_k=1)),
        )
        return replace(
            routed,
            shared_w13=shared.shared_w13,
            shared_w13_scale=shared.shared_w13_scale,
            shared_w2=shared.shared_w2,
            shared_w2_scale=shared.shared_w2_scale,
        )

    def prepared(self, recipe: Recipe, num_shared_experts: int = 0) -> MoEWeights:
        """The weights in the order our kernels read; recipes that agree on it share them."""
        t = traits(recipe)
        form = t.weight, t.weight_scale_format, t.weight_group, t.tile_order, recipe.numerics == "trtllm_gen"
        routed = self.cached(("prepared", form), lambda: prepare(self.plain(recipe), recipe))
        if not num_shared_experts:
            return replace(routed, recipe=recipe)

        def prepare_shared() -> MoEWeights:
            plain = self.plain(recipe, num_shared_experts)
            one_expert = replace(
                plain,
                w13=plain.w13[:1],
                w13_scale=_first(plain.w13_scale),
                w2=plain.w2[:1],
                w2_scale=_first(plain.w2_scale),
            )
            return prepare(one_expert, recipe)

        shared = self.cached(("prepared shared", form, recipe, num_shared_experts), prepare_shared)
        return replace(routed, recipe=recipe, shared=shared.shared, num_shared_experts=num_shared_experts)

    def parameters(self, recipe: Recipe) -> LayerParameters:
        """What the recipe needs beside weights."""
        spec = spec_of(self.shape, recipe)
        return self.cached(("parameters", recipe), lambda: random_parameters(spec, self._generator()))

    def _random(self, spec: LayerSpec) -> PlainWeights:
        return random_weights(spec, self._generator(), bias=self.shape.bias)

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(_SEED)


def _first(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale[:1]


def input_sets(point: Point, device: torch.device) -> list[Inputs]:
    """So many inputs, each with its own routing, that weights are read from memory again when a set's turn comes."""
    spec = spec_of(point.shape, MXFP4)
    generator = torch.Generator(device).manual_seed(point.tokens)
    sets = []
    for _ in range(_count_sets(point, device)):
        ids = expert_ids(point.routing, point.tokens, spec.num_experts, spec.top_k, generator)
        sets.append(replace(random_inputs(spec, point.tokens, generator), topk_ids=ids))
    return sets


def touched_experts(inputs: list[Inputs]) -> float:
    """Mean number of different experts that a set's tokens chose."""
    return sum(len(i.topk_ids.unique()) for i in inputs) / len(inputs)


def _count_sets(point: Point, device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    shape = point.shape
    experts = shape.top_k if point.routing == "all_to_one" else min(shape.num_experts, point.tokens * shape.top_k)
    weights = experts * 3 * shape.hidden * shape.intermediate // 2
    return max(_LEAST_SETS, min(_MOST_SETS, -(-_ROTATION_BYTES // weights)))
