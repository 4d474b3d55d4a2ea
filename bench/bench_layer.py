"""pytest-benchmark over the registry: the backends of one point and stage are one group, so that their rows line up.

    pytest bench --benchmark-only

Tiny on a CPU; DeepSeek-V4-Flash on a GPU. It times by the clock around a synchronised call, launch costs included, and
one contender after the other: good for a quick look and a history. `megamoe bench` measures for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec

import pytest
import torch

from megamoe.bench.backends import NAMES, find_backend
from megamoe.bench.layers import LayerStore, input_sets
from megamoe.bench.registry import Point
from megamoe.bench.shapes import MODELS, with_shared
from megamoe.bench.timing import Call
from megamoe.bench.work import LAYER_STAGES, STAGES
from megamoe.oracle.random_layers import Inputs
from megamoe.recipe import Recipe, resolve_recipe

pytestmark = pytest.mark.skipif(
    find_spec("pytest_benchmark") is None, reason="needs the package pytest-benchmark (the extra `bench`)"
)

_ON_GPU = torch.cuda.is_available()
_DEVICE = torch.device("cuda" if _ON_GPU else "cpu")
_MODEL = with_shared(MODELS["deepseek-v4-flash" if _ON_GPU else "tiny"], 0)
_TOKENS = (1, 64, 1024) if _ON_GPU else (2,)
_RECIPES = (resolve_recipe("fp8xfp4"), resolve_recipe("fp8xfp8"))
_STAGES = STAGES if _ON_GPU else ("layer",)


def _cases() -> Iterator[object]:
    for tokens in _TOKENS:
        for name in NAMES:
            backend = find_backend(name)
            for recipe in dict.fromkeys(backend.recipes(_RECIPES)):
                for stage in _STAGES:
                    if stage in backend.stages and (name != "reference" or not _ON_GPU):
                        yield pytest.param(tokens, name, recipe, stage, id=f"{stage}-{tokens}-{name}-{recipe.mma_type}")


@lru_cache(maxsize=1)
def _store() -> LayerStore:
    return LayerStore(_MODEL, _DEVICE)


@lru_cache(maxsize=1)
def _inputs(tokens: int) -> list[Inputs]:
    return input_sets(_point(tokens), _DEVICE)


def _point(tokens: int) -> Point:
    return Point(_MODEL, tokens, "uniform")


def _call(calls: list[Call]) -> None:
    for call in calls:
        call()
    if _ON_GPU:
        torch.cuda.synchronize()


@pytest.mark.parametrize(("tokens", "name", "recipe", "stage"), list(_cases()))
def test_layer(benchmark: object, tokens: int, name: str, recipe: Recipe, stage: str) -> None:
    """One round is a call of every input set."""
    backend, point = find_backend(name), _point(tokens)
    reason = backend.unsupported_reason(point, recipe, _DEVICE)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    inputs = _inputs(tokens)
    output = torch.full_like(inputs[0].x, torch.nan)
    calls = backend.open(_store(), point, recipe, inputs).calls(stage, output)
    benchmark.group = f"{_MODEL.name}, {tokens} tokens, {stage}"  # type: ignore[attr-defined]
    benchmark.extra_info["calls_per_round"] = len(calls)  # type: ignore[attr-defined]
    benchmark.pedantic(  # type: ignore[attr-defined]
        _call, args=(calls,), rounds=20 if _ON_GPU else 3, warmup_rounds=2 if _ON_GPU else 0
    )
    assert bool(output.isfinite().all()) or stage not in ("combine", *LAYER_STAGES)
