"""Our own contenders: the Triton kernels, stage by stage, and the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.backends.base import LayerRequest, layer_unsupported_reason
from megamoe.backends.triton import architecture, device_unsupported_reason
from megamoe.bench.layers import LayerStore, spec_of
from megamoe.bench.registry import Point
from megamoe.bench.timing import Call
from megamoe.bench.work import LAYER_STAGES, STAGES, count_work
from megamoe.kernels.combine import combine
from megamoe.kernels.config import GemmConfig, LayerConfig, choose_config, illegal_reason
from megamoe.kernels.down import down
from megamoe.kernels.gate_up import gate_up
from megamoe.kernels.layer import pre_dispatch_kind
from megamoe.kernels.pre_dispatch import MAX_HIDDEN, pre_dispatch
from megamoe.kernels.routing import allocate_plan, build_plan, max_tiles
from megamoe.oracle.random_layers import Inputs
from megamoe.oracle.reference import moe_layer
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import ALL_RECIPES, Recipe
from megamoe.spec import LayerSpec
from megamoe.validation import size_multiples
from megamoe.weights import MoEWeights
from megamoe.workspace import Workspace

_INTERPRETED_FLOPS = 2e8  # a minute or so in Triton's interpreter

Choice = Callable[[LayerSpec, int, int], LayerConfig]
"""(spec, arch, tokens) -> configuration."""


Step = Callable[[Inputs, Any, torch.Tensor], None]
"""(inputs, their workspace, output): one launch of a layer."""


def staged_calls(
    sets: Sequence[tuple[Inputs, Any]], steps: Mapping[str, Sequence[Step]], stage: str, output: torch.Tensor
) -> list[Call]:
    """A call of `stage` per input set, once whole layers have made what it reads and compiled everything."""

    def bound(i: Inputs, ws: Any) -> Call:
        def call() -> None:
            for step in steps[stage]:
                step(i, ws, output)

        return call

    for i, ws in sets:
        for step in steps["layer_with_plan"]:
            step(i, ws, output)
    return [bound(i, ws) for i, ws in sets]


@dataclass(frozen=True)
class TritonTier:
    """Our portable kernels under one way to choose the configuration."""

    name: str
    choose: Choice
    own: bool = True
    stages: tuple[str, ...] = STAGES

    def recipes(self, wanted: Sequence[Recipe]) -> list[Recipe]:
        return list(wanted)

    def judge(self, recipe: Recipe) -> Recipe:
        return recipe

    def unsupported_reason(self, point: Point, recipe: Recipe, device: torch.device) -> str | None:
        spec = spec_of(point.shape, recipe)
        request = LayerRequest(spec, device, point.tokens)
        reason = layer_unsupported_reason(request) or device_unsupported_reason(device) or _shape_reason(spec)
        if reason is not None:
            return reason
        if spec.hidden > MAX_HIDDEN:
            return f"hidden={spec.hidden} is more than the pre-dispatch serves, {MAX_HIDDEN}"
        if device.type == "cpu" and _layer_flops(spec, point.tokens) > _INTERPRETED_FLOPS:
            return "no GPU here, and this layer is too large for Triton's interpreter; try --model tiny"
        arch = architecture(device)
        return illegal_reason(self.choose(spec, arch, point.tokens), spec, arch)

    def open(self, store: LayerStore, point: Point, recipe: Recipe, inputs: Sequence[Inputs]) -> TritonLayer:
        spec = spec_of(point.shape, recipe)
        config = self.choose(spec, architecture(store.device), point.tokens)
        weights = store.prepared(recipe, point.shape.num_shared_experts)
        return TritonLayer(spec, config, weights, store.parameters(recipe), inputs)


class TritonLayer:
    """One workspace, as a server has it; routing and plan are each input set's own, so that stages can start alone."""

    graph_reason = None

    def __init__(
        self,
        spec: LayerSpec,
        config: LayerConfig,
        weights: MoEWeights,
        parameters: LayerParameters,
        inputs: Sequence[Inputs],
    ) -> None:
        self._spec, self._config, self._weights, self._parameters = spec, config, weights, parameters
        self._tokens = len(inputs[0].x)
        device = inputs[0].x.device
        shared = Workspace.allocate(spec, self._tokens, device, min_block_m=config.block_m)
        for tensor in shared.tensors().values():
            tensor.view(torch.uint8).fill_(0xFF)
        self._sets = [
            (
                i,
                replace(
                    shared,
                    topk_ids=torch.empty_like(shared.topk_ids),
                    topk_weights=torch.empty_like(shared.topk_weights),
                    plan=allocate_plan(self._tokens, spec.top_k, spec.num_slot_experts, config.block_m, device),
                ),
            )
            for i in inputs
        ]

    @property
    def note(self) -> str:
        return f"gate_up {_tile(self._config.gate_up)}, down {_tile(self._config.down)}"

    def calls(self, stage: str, output: torch.Tensor) -> list[Call]:
        steps: dict[str, Sequence[Step]] = {
            "pre_dispatch": [self._pre_dispatch],
            "routing": [self._routing],
            "gate_up": [self._gate_up],
            "down": [self._down],
            "combine": [self._combine],
            "layer": [self._pre_dispatch, self._gate_up, self._down, self._combine],
            "layer_with_plan": [self._pre_dispatch, self._routing, self._gate_up, self._down, self._combine],
        }

        return staged_calls(self._sets, steps, stage, output)

    def _pre_dispatch(self, i: Inputs, ws: Workspace, output: torch.Tensor) -> None:
        t = self._spec.traits
        pre_dispatch(
            i.x,
            i.topk_ids,
            i.topk_weights,
            q=ws.x_q,
            sf=ws.x_sf,
            ids_out=ws.topk_ids,
            weights_out=ws.topk_weights,
            token_scale=ws.x_scale,
            kind=pre_dispatch_kind(self._spec.recipe),
            group=t.act_group or None,
            x_gsf=self._parameters.x_gsf,
        )

    def _routing(self, i: Inputs, ws: Workspace, output: torch.Tensor) -> None:
        build_plan(ws.topk_ids, ws.plan, num_experts=self._spec.num_slot_experts, block_m=self._config.block_m)

    def _gate_up(self, i: Inputs, ws: Workspace, output: torch.Tensor) -> None:
        gate_up(ws, self._weights, self._spec, self._config, self._parameters, self._tokens, self._num_tiles)

    def _down(self, i: Inputs, ws: Workspace, output: torch.Tensor) -> None:
        down(ws, self._weights, self._spec, self._config, self._tokens, self._num_tiles)

    def _combine(self, i: Inputs, ws: Workspace, output: torch.Tensor) -> None:
        spec = self._spec
        combine(
            ws.rows,
            ws.topk_ids,
            output,
            num_experts=spec.num_slot_experts,
            shared=spec.shared_intermediate > 0,
            topk_weights=ws.topk_weights if spec.recipe.numerics == "trtllm_gen" else None,
        )

    @property
    def _num_tiles(self) -> int:
        return max_tiles(self._tokens * self._spec.top_k, self._spec.num_slot_experts, self._config.block_m)


@dataclass(frozen=True)
class Reference:
    """The reference in plain torch. It syncs with the host, so it is timed by events; it makes y and nothing else."""

    name: str = "reference"
    own: bool = True
    stages: tuple[str, ...] = LAYER_STAGES[:1]

    def recipes(self, wanted: Sequence[Recipe]) -> list[Recipe]:
        return [recipe for recipe in wanted if recipe in ALL_RECIPES]

    def judge(self, recipe: Recipe) -> Recipe:
        return recipe

    def unsupported_reason(self, point: Point, recipe: Recipe, device: torch.device) -> str | None:
        spec = spec_of(point.shape, recipe)
        if device.type == "cpu" and _layer_flops(spec, point.tokens) > 100 * _INTERPRETED_FLOPS:
            return "no GPU here, and this layer is too large for a CPU; try --model tiny"
        return layer_unsupported_reason(LayerRequest(spec, device, point.tokens)) or _shape_reason(spec)

    def open(self, store: LayerStore, point: Point, recipe: Recipe, inputs: Sequence[Inputs]) -> ReferenceLayer:
        plain = store.plain(recipe, point.shape.num_shared_experts)
        return ReferenceLayer(spec_of(point.shape, recipe), plain, store.parameters(recipe), inputs)


@dataclass(frozen=True)
class ReferenceLayer:
    spec: LayerSpec
    weights: PlainWeights
    parameters: LayerParameters
    inputs: Sequence[Inputs]
    note: str | None = None
    graph_reason: str = "the reference asks the GPU which experts have rows"

    def calls(self, stage: str, output: torch.Tensor) -> list[Call]:
        def bound(i: Inputs) -> Call:
            return lambda: output.copy_(
                moe_layer(
                    i.x, i.topk_ids, i.topk_weights, self.weights, self.spec,
                    parameters=self.parameters, full_trace=False,
                ).y
            )  # fmt: skip

        return [bound(i) for i in self.inputs]


def _shape_reason(spec: LayerSpec) -> str | None:
    for name, multiple in zip(("hidden", "intermediate"), size_multiples(spec.recipe)):
        if getattr(spec, name) % multiple:
            return f"{name}={getattr(spec, name)} is not a multiple of {multiple}, which {spec.recipe} needs"
    if spec.shared_slots:
        return "its shared experts are slots that the router names, which the bench's routings do not"
    return None


def _layer_flops(spec: LayerSpec, tokens: int) -> float:
    return count_work(spec, "layer", tokens, 0, tokens * spec.top_k).flops


def _tile(gemm: GemmConfig) -> str:
    return f"{gemm.block_m}×{gemm.block_n}×{gemm.block_k} {gemm.mma} {gemm.num_warps}w{gemm.num_stages}s"


PORTABLE = TritonTier("triton_portable", choose_config)
BACKENDS = {
    backend.name: backend
    for backend in (
        PORTABLE,
        Reference(),
    )
}
