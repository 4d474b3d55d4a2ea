"""The contenders: what each must offer to be measured, and the list of them.

A contender is a module-level `BACKENDS` entry in `bench/own.py`, `bench/hopper.py` or `bench/peers/*.py`, imported when
it is first asked for. Peers are optional: one that is not installed has a reason instead of a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import torch

from megamoe.bench.layers import LayerStore
from megamoe.bench.registry import Point
from megamoe.bench.timing import Call
from megamoe.oracle.random_layers import Inputs
from megamoe.recipe import Recipe


class OpenLayer(Protocol):
    """A layer set up for the input sets of one point."""

    def calls(self, stage: str, output: torch.Tensor) -> list[Call]:
        """One call per input set, warm and free of host syncs. Stages that make y write it to `output` BF16 [T, H]."""

    @property
    def note(self) -> str | None:
        """What a reader of this row should know: the configuration, or what else the stage holds here."""

    @property
    def graph_reason(self) -> str | None:
        """Why its calls cannot be captured in a CUDA graph, or None."""


class BenchBackend(Protocol):
    """One way to run a layer. `judge` is the served recipe whose reference judges y; `own`: held to its limits."""

    name: str
    own: bool
    stages: tuple[str, ...]

    def recipes(self, wanted: Sequence[Recipe]) -> list[Recipe]:
        """The rows it can give: its own recipe, or those of `wanted` that it serves."""

    def judge(self, recipe: Recipe) -> Recipe: ...

    def unsupported_reason(self, point: Point, recipe: Recipe, device: torch.device) -> str | None:
        """Why it cannot run here, or None."""

    def open(self, store: LayerStore, point: Point, recipe: Recipe, inputs: Sequence[Inputs]) -> OpenLayer: ...


_HOMES = {
    "triton": "hopper",
    "triton_portable": "own",
    "triton_hopper": "hopper",
    "reference": "own",
    "deep_gemm_fused": "peers.deep_gemm",
    "deep_gemm_unfused": "peers.deep_gemm",
    "humming_block128": "peers.humming",
    "humming_token": "peers.humming",
    "humming_w8a8": "peers.humming",
    "humming_w4a16": "peers.humming",
    "triton_kernels": "peers.triton_kernels",
    "flashinfer": "peers.flashinfer",
}
NAMES = tuple(_HOMES)
TIERS = ("triton_portable", "triton_hopper")
"""Ours, one of which `triton` picks for a layer."""


def find_backend(name: str) -> BenchBackend:
    """`KeyError` for a name that is not in `NAMES`."""
    return import_module(f"megamoe.bench.{_HOMES[name]}").BACKENDS[name]
