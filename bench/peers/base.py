"""What all peers share: one recipe of their own, whole layers only, no shared experts, uniform reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

import torch

from megamoe.bench.backends import OpenLayer
from megamoe.bench.layers import LayerStore
from megamoe.bench.registry import Point
from megamoe.bench.timing import Call
from megamoe.oracle.random_layers import Inputs
from megamoe.recipe import Recipe

Opener = Callable[[LayerStore, Point, Sequence[Inputs]], OpenLayer]


@dataclass(frozen=True)
class Peer:
    """A contender from the package `distribution`, judged against the reference of `judged_by`.

    `capabilities`: major compute capabilities it runs on. `reason`: what else it does not serve. `layer`: sets it up.
    """

    name: str
    distribution: str
    recipe: Recipe
    judged_by: Recipe
    capabilities: tuple[int, ...]
    reason: Callable[[Point], str | None]
    layer: Opener
    own: bool = False
    stages: tuple[str, ...] = ("layer",)

    def recipes(self, wanted: Sequence[Recipe]) -> list[Recipe]:
        return [self.recipe]

    def judge(self, recipe: Recipe) -> Recipe:
        return self.judged_by

    def unsupported_reason(self, point: Point, recipe: Recipe, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA GPU"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in self.capabilities:
            served = ", ".join(f"{capability}.x" for capability in self.capabilities)
            return f"the GPU has compute capability {major}.{minor}; served: {served}"
        try:
            metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return f"the package {self.distribution} is not installed; bench/peers/stage.sh brings it"
        if point.shape.num_shared_experts:
            return "runs no shared experts"
        if point.shape.activation != "swiglu":
            return f"runs no {point.shape.activation} here"
        return self.reason(point)

    def open(self, store: LayerStore, point: Point, recipe: Recipe, inputs: Sequence[Inputs]) -> OpenLayer:
        return self.layer(store, point, inputs)


@dataclass(frozen=True)
class PeerLayer:
    """Calls made by `bind(inputs, output)`, one per input set, warmed up once."""

    inputs: Sequence[Inputs]
    bind: Callable[[int, torch.Tensor], Call]
    note: str | None = None
    graph_reason: str | None = None

    def calls(self, stage: str, output: torch.Tensor) -> list[Call]:
        calls = [self.bind(index, output) for index in range(len(self.inputs))]
        for call in calls:
            call()
        torch.cuda.synchronize()
        return calls


def multiple_reason(point: Point, multiple: int) -> str | None:
    """Why H or I does not fit blocks of `multiple`, or None."""
    for name in ("hidden", "intermediate"):
        if getattr(point.shape, name) % multiple:
            return f"{name}={getattr(point.shape, name)} is not a multiple of {multiple}"
    return None
