"""Quantized tokens into the SM90 tier's rows: what scatter would have made of the BF16 ones."""

import pytest
import torch

from megamoe.kernels.hopper.config import ROW_ALIGN
from megamoe.kernels.hopper.gather import gather
from megamoe.kernels.hopper.scatter import scatter
from megamoe.kernels.routing import allocate_plan, build_plan, max_rows, max_tiles
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.reference.quantizers import quantize

EXPERTS, TOP_K, BLOCK_M = 5, 3, 16


@pytest.mark.parametrize("k_order", (True, False))
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 256), (7, 1024), (40, 2304)])
def test_rows_scales_weights_and_tiles(tokens: int, hidden: int, k_order: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=generator).to(device)
    weights = torch.randn(tokens, TOP_K, generator=generator).to(device)
    plan = allocate_plan(tokens, TOP_K, EXPERTS, BLOCK_M, device, row_align=ROW_ALIGN)
    build_plan(ids, plan, num_experts=EXPERTS, block_m=BLOCK_M)
    capacity = max_rows(tokens * TOP_K, EXPERTS, ROW_ALIGN)
    num_tiles = max_tiles(tokens * TOP_K, EXPERTS, BLOCK_M)
    quantized = quantize(x, "fp8_block128")
    assert quantized.sf is not None
    # As in DeepGEMM's buffer: rows of a larger one, scales strided.
    wide_q = torch.full((tokens, hidden + 64), 0x7F, dtype=torch.uint8)
    wide_q[:, :hidden] = quantized.q.view(torch.uint8)
    wide_sf = torch.full((tokens, hidden // 128 + 4), torch.nan)
    wide_sf[:, : hidden // 128] = quantized.sf
    x_q = wide_q.to(device).view(torch.float8_e4m3fn)[:, :hidden]
    x_sf = wide_sf.to(device)[:, : hidden // 128]

    def outputs() -> dict[str, torch.Tensor]:
        return {
            "q": torch.full((capacity, hidden), 0xFF, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
            "scale": torch.full((hidden // 128, capacity), torch.nan, device=device),
            "row_weight": torch.full((capacity,), torch.nan, device=device),
            "packed_tiles": torch.full_like(plan.tiles, -1),
            "tile_count": torch.full((1,), -1, dtype=torch.int32, device=device),
        }

    mine, theirs = outputs(), outputs()
    gather(x_q, x_sf, weights, plan, num_tiles=num_tiles, k_order=k_order, **mine)
    if k_order:
        scatter(x.to(device), ids, weights, plan, num_tiles=num_tiles, k_order=True, **theirs)
    else:
        assert plan.slot_rows is not None
        rows = plan.slot_rows.long()
        served = rows >= 0
        token = torch.arange(tokens * TOP_K, device=device)[served] // TOP_K
        theirs["q"].view(torch.uint8)[rows[served]] = x_q.view(torch.uint8)[token]
        theirs["scale"][:, rows[served]] = x_sf[token].T
        theirs["row_weight"][rows[served]] = weights.flatten()[served]
        theirs["packed_tiles"], theirs["tile_count"] = mine["packed_tiles"], mine["tile_count"]
        assert int(mine["tile_count"]) == int((plan.tiles[:num_tiles, 2] > 0).sum())
    for name, tensor in mine.items():
        assert_bytes_equal(tensor, theirs[name], name)
