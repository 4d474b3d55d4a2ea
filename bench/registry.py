"""The registry: which cases there are. A case is a model shape × tokens × routing × recipe × backend × stage.

`Plan` holds what was asked for; `points` lists the conditions (`Point`) in measuring order, and at each of them every
backend, recipe and stage is measured in one interleaved group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from megamoe.bench.routings import ROUTINGS
from megamoe.bench.shapes import MODELS, ModelShape, with_shared
from megamoe.bench.work import STAGES
from megamoe.recipe import ALL_RECIPES, Recipe, resolve_recipe

_T = TypeVar("_T")

MAX_TOKENS = 16384
TOKENS = tuple(2**power for power in range(15))
"""1 … 16384."""
DEFAULT_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
QUICK_TOKENS = (1, 64, 1024)
THROTTLED_FROM = 2048
"""Tokens from which power throttling decides: a second per contender and point, at least."""


@dataclass(frozen=True)
class Point:
    """Conditions under which backends are compared."""

    shape: ModelShape
    tokens: int
    routing: str

    def __str__(self) -> str:
        shared = f", {self.shape.num_shared_experts} shared" if self.shape.num_shared_experts else ""
        routing = "" if self.routing == "uniform" else f", {self.routing}"
        return f"{self.shape.name}, {self.tokens} token{'s' if self.tokens > 1 else ''}{shared}{routing}"


@dataclass(frozen=True)
class Plan:
    """What to measure. `shared`: numbers of shared experts, each measured beside the others."""

    shapes: tuple[ModelShape, ...]
    tokens: tuple[int, ...]
    recipes: tuple[Recipe, ...]
    backends: tuple[str, ...]
    stages: tuple[str, ...]
    routings: tuple[str, ...] = ("uniform",)
    shared: tuple[int, ...] = (0,)

    @property
    def has_rows(self) -> bool:
        """Whether anything is asked for at all; whether it can run is another question."""
        return all((self.shapes, self.tokens, self.recipes, self.backends, self.stages, self.routings, self.shared))

    def points(self) -> Iterator[Point]:
        """Ascending tokens within a shape, so that a run that is cut short has the cheap ones."""
        for shape, shared, routing, tokens in product(self.shapes, self.shared, self.routings, self.tokens):
            yield Point(with_shared(shape, shared), tokens, routing)


def find_models(names: Sequence[str]) -> tuple[list[ModelShape], list[str]]:
    """(shapes, one line for each unknown name)."""
    return _find(names, MODELS, "model")


def find_recipes(names: Sequence[str]) -> tuple[list[Recipe], list[str]]:
    """Recipes by `mma_type`, `mma_type/act_scale` or in full; `served` means every served one."""
    recipes: list[Recipe] = []
    problems = []
    for name in names:
        if name == "served":
            recipes += ALL_RECIPES
            continue
        parts = name.split("/")
        try:
            recipes.append(resolve_recipe(*parts[:3]))
        except ValueError as error:
            problems.append(f"recipe {name!r}: {error}")
    return list(dict.fromkeys(recipes)), problems


def find_stages(names: Sequence[str]) -> tuple[list[str], list[str]]:
    return _find(names, {stage: stage for stage in STAGES}, "stage")


def find_routings(names: Sequence[str]) -> tuple[list[str], list[str]]:
    return _find(names, {routing: routing for routing in ROUTINGS}, "routing")


def find_tokens(texts: Sequence[str]) -> tuple[list[int], list[str]]:
    """Counts from `64`, `1,16,64` or `1-8192` (powers of two in that range)."""
    counts: list[int] = []
    problems = []
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        first, dash, last = text.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            problems.append(f"tokens {text!r} is neither a number nor a range like 1-8192")
            continue
        if not 1 <= low <= high <= MAX_TOKENS:
            problems.append(f"tokens {text!r} is out of range; allowed: 1 … {MAX_TOKENS}")
            continue
        counts += [n for n in TOKENS if low <= n <= high] if dash else [low]
    return sorted(set(counts)), problems


def _find(names: Sequence[str], known: dict[str, _T], what: str) -> tuple[list[_T], list[str]]:
    found = [known[name] for name in dict.fromkeys(names) if name in known]
    problems = [
        f"{what} {name!r} is unknown; known: {', '.join(known)}" for name in dict.fromkeys(names) if name not in known
    ]
    return found, problems
