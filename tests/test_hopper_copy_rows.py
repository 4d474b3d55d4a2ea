"""The SM90 tier's rows of BF16 tokens: where the plan wants them, in the tensor cores' K order, and packed tiles."""

import pytest
import torch

from megamoe.kernels.hopper.config import ROW_ALIGN
from megamoe.kernels.hopper.copy_rows import copy_rows
from megamoe.kernels.hopper.weights import bf16_k_order
from megamoe.kernels.routing import allocate_plan, build_plan, max_rows, max_tiles
from megamoe.oracle.metrics import assert_bytes_equal

EXPERTS, TOP_K, BLOCK_M = 5, 3, 16


@pytest.mark.parametrize("scaled", (False, True))
@pytest.mark.parametrize("tokens, hidden", ((1, 256), (7, 2304), (40, 256)))
def test_rows_weights_and_tiles(tokens: int, hidden: int, scaled: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, hidden + 64, generator=generator).bfloat16()
    wide[0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=generator)  # −1 and E name no expert
    weights, scales = torch.randn(tokens, TOP_K, generator=generator), torch.rand(EXPERTS, generator=generator)
    slots = tokens * TOP_K
    plan = allocate_plan(tokens, TOP_K, EXPERTS, BLOCK_M, device, row_align=ROW_ALIGN)
    build_plan(ids.to(device), plan, num_experts=EXPERTS, block_m=BLOCK_M)
    assert plan.slot_rows is not None
    rows = torch.full((max_rows(slots, EXPERTS, ROW_ALIGN), hidden), torch.nan, dtype=torch.bfloat16, device=device)
    slot_weights = torch.full((tokens, TOP_K), torch.nan, device=device)
    packed, count = torch.full_like(plan.tiles, -1), torch.full((1,), -1, dtype=torch.int32, device=device)
    num_tiles = max_tiles(slots, EXPERTS, BLOCK_M)
    copy_rows(
        wide.to(device)[:, :hidden], ids.to(device), weights.to(device), plan, num_tiles=num_tiles,
        rows=rows, slot_weights=slot_weights, packed_tiles=packed, tile_count=count,
        expert_scales=scales.to(device) if scaled else None, routed_scaling_factor=2.5,
    )  # fmt: skip

    at = plan.slot_rows.cpu()
    served = ((ids >= 0) & (ids < EXPERTS)).flatten()
    expected = wide[:, :hidden].unflatten(1, (-1, 128))[:, :, bf16_k_order()].flatten(1)
    token = torch.arange(slots)[served] // TOP_K
    assert_bytes_equal(rows.cpu()[at[served]], expected[token], "rows")
    wanted = weights.flatten()[served]
    if scaled:
        wanted = wanted * scales[ids.flatten()[served]]
    assert_bytes_equal(slot_weights.cpu().flatten()[served], wanted * 2.5, "weights")
    untouched = torch.ones(len(rows), dtype=torch.bool)
    untouched[at[served]] = False
    assert bool(rows.cpu()[untouched].isnan().all())
    live = plan.tiles[:num_tiles].cpu()
    live = live[live[:, 2] > 0]
    assert int(count) == len(live)
    assert_bytes_equal(packed[: len(live)].cpu(), live, "packed tiles")
