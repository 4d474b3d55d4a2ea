"""A shared expert in the SM90 tier without a GPU: every launch but the GEMMs runs, those are the reference's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megamoe.backends.base import LayerRequest
from megamoe.backends.hopper import HopperLayer, hopper_unsupported_reason
from megamoe.debug import Routing
from megamoe.kernels.hopper import layer as tier
from megamoe.kernels.hopper.config import ROW_ALIGN, HopperTile
from megamoe.kernels.hopper.layer import HopperWeights, HopperWorkspace, plain_weights, prepare_hopper, run_hopper_layer
from megamoe.kernels.hopper.weights import k_order
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import Expert, Quantized, dense_shared_expert, moe_layer, slot_expert
from megamoe.oracle.reference.layer import expert_mlp
from megamoe.oracle.reference.summation import matmul_fp64
from megamoe.recipe import Recipe
from megamoe.spec import LayerSpec
from megamoe.weights import prepare

RECIPES = [Recipe("fp8xfp4", scale, "deep_gemm_sm90") for scale in ("block128", "token")]
SIZES = dict(hidden=256, intermediate=256, num_experts=4, top_k=3, num_shared_experts=1, shared_weight="e2m1")


def _layer(recipe: Recipe, tokens: int, device: str, **options: object) -> Layer:
    return random_layer(recipe, tokens=tokens, device=device, **{**SIZES, **options})  # type: ignore[arg-type]


def _experts(layer: Layer, weights: HopperWeights) -> Callable[[int], Expert]:
    """The experts that the tiled weights hold, by the number that a tile names."""
    plain, spec = plain_weights(weights), layer.spec

    def expert(index: int) -> Expert:
        if index == spec.num_local_experts:
            return dense_shared_expert(plain, spec)
        return slot_expert(plain, layer.parameters, spec, index)

    return expert


def _both_gemms(ws: HopperWorkspace, experts: Callable[[int], Expert], spec: LayerSpec) -> list[tuple[int, ...]]:
    """What the GEMMs do with the packed tiles: read rows of q, put rows where the targets say. The tiles taken.

    The intermediate stays in its natural order: no other kernel reads it.
    """
    natural = torch.argsort(k_order(ws.q.device))
    targets = ws.plan.sorted_slots if ws.row_targets is None else ws.row_targets
    tiles = ws.packed_tiles[: int(ws.tile_count)].tolist()
    for index, first, count, _ in tiles:
        assert first % ROW_ALIGN == 0, "TMA reads scales by 16 bytes"
        rows = slice(first, first + count)
        q = ws.q.view(torch.uint8)[rows].unflatten(1, (-1, 128))[:, :, natural].flatten(1).view(ws.q.dtype)
        sf = ws.scale[..., rows].reshape(-1, count).T
        stages, out = expert_mlp(Quantized(q, sf, None), ws.row_weight[rows], experts(index), spec, matmul_fp64)
        assert stages.act_sf is not None
        ws.act.view(torch.uint8)[rows] = stages.act_q.view(torch.uint8)
        ws.act_scale[:, rows] = stages.act_sf.T
        ws.rows.view(-1, spec.hidden)[targets[rows].long()] = out
    return [tuple(tile) for tile in tiles]


@pytest.mark.parametrize("tokens", (1, 7, 19))
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_layer_equals_the_reference(
    recipe: Recipe, tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with factors that the shared expert must not meet; the workspace is larger than the call."""
    layer = _layer(recipe, tokens, device, masked=0.2, expert_scales=True, routed_scaling_factor=2.5)
    spec = layer.spec
    weights = prepare_hopper(prepare(layer.weights, recipe))
    assert isinstance(weights, HopperWeights)
    ws = HopperWorkspace.allocate(spec, 24, device)
    for tensor in ws.tensors().values():
        tensor.view(torch.uint8).fill_(0xFF)
    taken: list[tuple[int, ...]] = []

    def gate_up(ws: HopperWorkspace, *_: object) -> None:
        taken.extend(_both_gemms(ws, _experts(layer, weights), spec))

    monkeypatch.setattr(tier, "gate_up", gate_up)
    monkeypatch.setattr(tier, "down", lambda *_: None)
    output = torch.full_like(layer.x, torch.nan)
    run_hopper_layer(
        layer.x, layer.topk_ids, layer.topk_weights, output,
        ws=ws, weights=weights, spec=spec, parameters=layer.parameters, tile=HopperTile((16, 0, 0), 5, 2),
    )  # fmt: skip
    inputs = (layer.x, layer.topk_ids, layer.topk_weights)
    expected = moe_layer(*inputs, layer.weights, spec, parameters=layer.parameters, full_trace=False)
    assert_bytes_equal(output, expected.y, "y")
    shared = [(rows, block) for expert, rows, block, _ in taken if expert == spec.num_experts]
    first = ws.first_shared_row
    assert shared == [(first + start, min(16, tokens - start)) for start in range(0, tokens, 16)]
    assert taken[: len(shared)] == [(spec.num_experts, *tile, 0) for tile in shared]
    assert bool((ws.rows[tokens:].view(torch.int16) == -1).all()), "rows beyond the call's tokens"


def test_debug_mode_sees_the_shared_experts_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(RECIPES[0], 5, device)
    request = LayerRequest(layer.spec, torch.device(device), 8)
    opened = HopperLayer(request, prepare(layer.weights, RECIPES[0]), layer.parameters)
    assert isinstance(opened._weights, HopperWeights)
    experts = _experts(layer, opened._weights)
    monkeypatch.setattr(tier, "gate_up", lambda ws, *_: _both_gemms(ws, experts, layer.spec))
    monkeypatch.setattr(tier, "down", lambda *_: None)
    opened(layer.x, layer.topk_ids, layer.topk_weights, torch.empty_like(layer.x))
    routing = Routing.of(layer.topk_ids, layer.spec, None)
    stages = opened.stages(routing)
    assert [stage.name for stage in stages] == ["pre_dispatch", "gate_up", "shared gate_up", "down", "shared down"]
    assert not any(bool(stage.nan.any()) for stage in stages)
    ws = opened._workspace
    ws.act_scale[1, ws.first_shared_row + 3] = torch.nan
    flagged = {stage.name: stage.token[stage.nan].tolist() for stage in opened.stages(routing) if stage.nan.any()}
    assert flagged == {"shared gate_up": [3]}


def test_tiles_hold_the_shared_expert_and_give_it_back(device: str) -> None:
    layer = _layer(RECIPES[0], 1, device)
    weights = prepare_hopper(prepare(layer.weights, RECIPES[0]))
    assert isinstance(weights, HopperWeights)
    assert len(weights.w13.codes) == len(weights.w2.codes) == 5
    back = plain_weights(weights)
    for name, tensor in vars(layer.weights).items():
        if isinstance(tensor, torch.Tensor):
            assert_bytes_equal(getattr(back, name).view(torch.uint8), tensor.view(torch.uint8), name)


def test_buffers_without_a_shared_expert_are_as_they_were(device: str) -> None:
    spec = _layer(RECIPES[0], 1, device).spec
    both, routed = (
        HopperWorkspace.allocate(s, 40, device) for s in (spec, replace(spec, num_shared_experts=0, shared_weight=None))
    )
    assert routed.row_targets is None
    assert "row_targets" not in routed.tensors()
    assert len(routed.packed_tiles) == len(routed.plan.tiles)
    assert routed.rows.shape == (40, 3, 256)
    assert both.rows.shape == (40, 4, 256)
    assert both.first_shared_row % ROW_ALIGN == 0
    assert len(both.q) >= both.first_shared_row + 40
    assert len(both.packed_tiles) == len(both.plan.tiles) + 3


def test_scales_of_the_shared_expert_are_looked_at(device: str) -> None:
    layer = _layer(RECIPES[0], 1, device)
    request = LayerRequest(layer.spec, torch.device(device), 1)
    assert hopper_unsupported_reason(request, prepare(layer.weights, RECIPES[0]), layer.parameters) is None
    scale = layer.weights.shared_w2_scale
    assert scale is not None
    scale[5, 1] = scale[5].min() - 12
    weights = prepare(layer.weights, RECIPES[0])
    reason = str(hopper_unsupported_reason(request, weights, layer.parameters))
    assert reason == "the scales in shared_w2_scale span 12 binades in one row; allowed: 11"
    with pytest.raises(ValueError, match="^scales of the shared expert span 12 binades"):
        prepare_hopper(weights)
