"""A layer of this tier on tokens that a pre-dispatch has quantized: DeepGEMM's buffer as it is."""

from __future__ import annotations

import torch

from megamoe import profile
from megamoe.kernels.hopper.config import choose_tile
from megamoe.kernels.hopper.gather import gather
from megamoe.kernels.hopper.layer import HopperWorkspace, Weights, add_rows, down, gate_up, plan_routing
from megamoe.kernels.hopper.options import overlap
from megamoe.kernels.routing import max_tiles
from megamoe.spec import LayerSpec


def run_quantized_layer(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    output: torch.Tensor,
    *,
    ws: HopperWorkspace,
    weights: Weights,
    spec: LayerSpec,
) -> None:
    """output BF16 [T, H] = the layer of x E4M3 [T, H] with scales x_sf fp32 [T, H/128], columns in natural order.

    topk_ids int32 or int64 [T, K], contiguous, negative ones skipped; topk_weights fp32 [T, K], contiguous, as they
    multiply. Arguments must be validated, `config.unsupported_reason` None and the recipe's scales per 128 columns.
    """
    num_tokens = len(output)
    if num_tokens == 0:
        return
    tile = choose_tile(spec, num_tokens)
    plan_routing(topk_ids, ws, spec, tile)
    with profile.stage("gather"):
        gather(
            x, x_sf, topk_weights, ws.plan,
            num_tiles=max_tiles(topk_ids.numel(), spec.num_local_experts, tile.block_m),
            q=ws.q, scale=ws.scale, row_weight=ws.row_weight, packed_tiles=ws.packed_tiles, tile_count=ws.tile_count,
            k_order=spec.traits.weight == "e2m1", pdl=overlap(tile, x),
        )  # fmt: skip
    with profile.stage("gate_up"):
        gate_up(ws, weights.w13, spec, tile, num_tokens)
    with profile.stage("down"):
        down(ws, weights.w2, spec, tile, num_tokens)
    with profile.stage("combine"):
        add_rows(ws, topk_ids, output, spec, tile)
