"""Our SM90 tier stage by stage, and `triton`: whatever the Triton backend picks for a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megamoe.backends.triton import architecture, device_unsupported_reason
from megamoe.bench.layers import LayerStore, spec_of
from megamoe.bench.own import PORTABLE, Step, TritonLayer, staged_calls
from megamoe.bench.registry import Point
from megamoe.bench.timing import Call
from megamoe.bench.work import STAGES
from megamoe.kernels.hopper.config import ROW_ALIGN, choose_tile, unsupported_reason
from megamoe.kernels.routing import allocate_plan, build_plan
from megamoe.oracle.random_layers import Inputs
from megamoe.parameters import LayerParameters
from megamoe.recipe import Recipe
from megamoe.spec import LayerSpec

if TYPE_CHECKING:
    from megamoe.kernels.hopper.layer import HopperWorkspace, Weights


@dataclass(frozen=True)
class HopperTier:
    """The kernels of `kernels/hopper`, whether or not the Triton backend would pick them."""

    name: str = "triton_hopper"
    own: bool = True
    stages: tuple[str, ...] = STAGES

    def recipes(self, wanted: Sequence[Recipe]) -> list[Recipe]:
        return list(wanted)

    def judge(self, recipe: Recipe) -> Recipe:
        return recipe

    def unsupported_reason(self, point: Point, recipe: Recipe, device: torch.device) -> str | None:
        reason = device_unsupported_reason(device)
        if reason is not None:
            return reason
        if architecture(device) != 90:
            return "the SM90 tier needs a GPU of compute capability 9.x"
        return unsupported_reason(spec_of(point.shape, recipe), has_bias=point.shape.bias, has_id_map=False)

    def open(self, store: LayerStore, point: Point, recipe: Recipe, inputs: Sequence[Inputs]) -> HopperTierLayer:
        from megamoe.kernels.hopper.layer import prepare_hopper

        spec = spec_of(point.shape, recipe)
        weights = store.cached(
            ("hopper", spec.traits.weight, spec.num_shared_experts),
            lambda: prepare_hopper(store.prepared(recipe, spec.num_shared_experts)),
        )
        return HopperTierLayer(spec, weights, store.parameters(recipe), inputs)


class HopperTierLayer:
    """One workspace, as a server has it; plan and packed tiles are each input set's own, so that stages start alone."""

    graph_reason = None

    def __init__(
        self, spec: LayerSpec, weights: Weights, parameters: LayerParameters, inputs: Sequence[Inputs]
    ) -> None:
        from megamoe.kernels.hopper.layer import HopperWorkspace

        self._spec, self._weights, self._parameters = spec, weights, parameters
        self._tokens = len(inputs[0].x)
        self._tile = choose_tile(spec, self._tokens)
        device = inputs[0].x.device
        shared = HopperWorkspace.allocate(spec, self._tokens, device)
        for tensor in shared.tensors().values():
            tensor.view(torch.uint8).fill_(0xFF)

        def own_plan() -> HopperWorkspace:
            plan = allocate_plan(
                self._tokens, spec.top_k, spec.num_local_experts, self._tile.block_m, device, row_align=ROW_ALIGN
            )
            packed = torch.empty_like(shared.packed_tiles)
            return replace(shared, plan=plan, packed_tiles=packed, tile_count=torch.empty_like(shared.tile_count))

        self._sets = [(i, own_plan()) for i in inputs]

    @property
    def note(self) -> str:
        chunks = "+".join(str(chunk) for chunk in self._tile.chunks if chunk)
        stage = 256 if self._spec.traits.weight == "e2m1" else 128
        box = f"128×({chunks})×{stage}" if self._tile.swapped else f"({chunks})×128×{stage}, tokens as rows"
        return f"{box}, {self._tile.stages} stages, {self._tile.ctas_per_sm} CTAs per SM"

    def calls(self, stage: str, output: torch.Tensor) -> list[Call]:
        steps: dict[str, Sequence[Step]] = {
            "routing": [self._routing],
            "pre_dispatch": [self._scatter],
            "gate_up": [self._gate_up],
            "down": [self._down],
            "combine": [self._combine],
            "layer": [self._scatter, self._gate_up, self._down, self._combine],
            "layer_with_plan": [self._routing, self._scatter, self._gate_up, self._down, self._combine],
        }

        return staged_calls(self._sets, steps, stage, output)

    def _routing(self, i: Inputs, ws: HopperWorkspace, output: torch.Tensor) -> None:
        build_plan(i.topk_ids, ws.plan, num_experts=self._spec.num_local_experts, block_m=self._tile.block_m)

    def _scatter(self, i: Inputs, ws: HopperWorkspace, output: torch.Tensor) -> None:
        from megamoe.kernels.hopper.layer import lay_out

        lay_out(i.x, i.topk_ids, i.topk_weights, ws, self._spec, self._parameters, self._tile)

    def _gate_up(self, i: Inputs, ws: HopperWorkspace, output: torch.Tensor) -> None:
        from megamoe.kernels.hopper.layer import gate_up

        gate_up(ws, self._weights.w13, self._spec, self._tile, self._tokens)

    def _down(self, i: Inputs, ws: HopperWorkspace, output: torch.Tensor) -> None:
        from megamoe.kernels.hopper.layer import down

        down(ws, self._weights.w2, self._spec, self._tile, self._tokens)

    def _combine(self, i: Inputs, ws: HopperWorkspace, output: torch.Tensor) -> None:
        from megamoe.kernels.hopper.layer import add_rows

        add_rows(ws, i.topk_ids, output, self._spec, self._tile)


@dataclass(frozen=True)
class Chosen:
    """`triton`: the SM90 tier where it serves the layer, else the portable kernels."""

    name: str = "triton"
    own: bool = True
    stages: tuple[str, ...] = STAGES

    def recipes(self, wanted: Sequence[Recipe]) -> list[Recipe]:
        return list(wanted)

    def judge(self, recipe: Recipe) -> Recipe:
        return recipe

    def unsupported_reason(self, point: Point, recipe: Recipe, device: torch.device) -> str | None:
        if HOPPER.unsupported_reason(point, recipe, device) is None:
            return None
        return PORTABLE.unsupported_reason(point, recipe, device)

    def open(
        self, store: LayerStore, point: Point, recipe: Recipe, inputs: Sequence[Inputs]
    ) -> HopperTierLayer | TritonLayer:
        tier = HOPPER if HOPPER.unsupported_reason(point, recipe, store.device) is None else PORTABLE
        return tier.open(store, point, recipe, inputs)


HOPPER = HopperTier()
BACKENDS = {backend.name: backend for backend in (Chosen(), HOPPER)}
