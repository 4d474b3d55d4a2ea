"""The SM90 tier's scatter: quantized rows where the plan wants them, in the tensor cores' K order, and packed tiles."""

import pytest
import torch

from megamoe.kernels.hopper.config import ROW_ALIGN
from megamoe.kernels.hopper.scatter import SharedRows, scatter
from megamoe.kernels.hopper.weights import k_order
from megamoe.kernels.routing import allocate_plan, build_plan, max_rows, max_tiles
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.reference.quantizers import quantize

EXPERTS, TOP_K, BLOCK_M = 5, 3, 16


@pytest.mark.parametrize("tokens", (1, 7, 40))
@pytest.mark.parametrize("hidden", (256, 1024))
@pytest.mark.parametrize("act_scale, permuted", (("block128", True), ("token", True), ("block128", False)))
def test_rows_scales_weights_and_tiles(act_scale: str, permuted: bool, hidden: int, tokens: int, device: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, hidden + 64, generator=generator).bfloat16()
    wide[0, :128] = 0
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=generator)  # −1 and E name no expert
    weights, scales = torch.randn(tokens, TOP_K, generator=generator), torch.rand(EXPERTS, generator=generator)
    slots = tokens * TOP_K
    plan = allocate_plan(tokens, TOP_K, EXPERTS, BLOCK_M, device, row_align=ROW_ALIGN)
    build_plan(ids.to(device), plan, num_experts=EXPERTS, block_m=BLOCK_M)
    assert plan.slot_rows is not None
    capacity = max_rows(slots, EXPERTS, ROW_ALIGN)
    q = torch.full((capacity, hidden), 0xFF, dtype=torch.uint8, device=device)
    scale = torch.full((capacity,) if act_scale == "token" else (hidden // 128, capacity), torch.nan, device=device)
    row_weight = torch.full((capacity,), torch.nan, device=device)
    packed, count = torch.full_like(plan.tiles, -1), torch.full((1,), -1, dtype=torch.int32, device=device)
    num_tiles = max_tiles(slots, EXPERTS, BLOCK_M)
    scatter(
        wide.to(device)[:, :hidden], ids.to(device), weights.to(device), plan, num_tiles=num_tiles,
        q=q.view(torch.float8_e4m3fn), scale=scale, row_weight=row_weight, packed_tiles=packed, tile_count=count,
        k_order=permuted, expert_scales=scales.to(device), routed_scaling_factor=2.5,
    )  # fmt: skip

    expected = quantize(wide[:, :hidden], "fp8_token" if act_scale == "token" else "fp8_block128")
    assert expected.sf is not None
    rows = plan.slot_rows.cpu()
    served = ((ids >= 0) & (ids < EXPERTS)).flatten()
    assert torch.equal(rows >= 0, served)
    assert len(rows[served].unique()) == int(served.sum()), "every slot has a row of its own"
    token = torch.arange(slots)[served] // TOP_K
    codes = expected.q.view(torch.uint8)[token]
    if permuted:
        codes = codes.unflatten(1, (-1, 128))[:, :, k_order()].flatten(1)
    assert_bytes_equal(q.cpu()[rows[served]], codes, "rows")
    got_scale = scale.cpu()[..., rows[served]].reshape(-1, len(token)).T.contiguous()
    assert_bytes_equal(got_scale, expected.sf[token], "scales")
    expected_weight = weights.flatten()[served] * scales[ids.flatten()[served]] * 2.5
    assert_bytes_equal(row_weight.cpu()[rows[served]], expected_weight, "weights")
    untouched = torch.ones(capacity, dtype=torch.bool)
    untouched[rows[served]] = False
    assert bool((q.cpu()[untouched] == 0xFF).all())

    tiles = plan.tiles[:num_tiles].cpu()
    live = tiles[tiles[:, 2] > 0]
    assert int(count) == len(live)
    assert_bytes_equal(packed[: len(live)].cpu(), live, "packed tiles")
    assert bool((packed[len(live) :] == -1).all())


@pytest.mark.parametrize(
    "act_scale, tokens, block_m",
    [("block128", 1, 16), ("block128", 7, 32), ("block128", 257, 1), ("token", 1, 16), ("token", 40, 16)],
)
def test_a_shared_expert_has_a_row_of_every_token(act_scale: str, tokens: int, block_m: int, device: str) -> None:
    """Behind the plan's rows, with weight 1 whatever the factors, its tiles first; the slots' rows stay as they are.

    257 tokens in tiles of one: more tiles than are written at a time.
    """
    hidden, top_k = 256, 1 if tokens == 257 else TOP_K
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS + 1, (tokens, top_k), generator=generator)
    weights, scales = torch.rand(tokens, top_k, generator=generator), torch.rand(EXPERTS, generator=generator)
    plan = allocate_plan(tokens, top_k, EXPERTS, block_m, device, row_align=ROW_ALIGN)
    build_plan(ids.to(device), plan, num_experts=EXPERTS, block_m=block_m)
    assert plan.slot_rows is not None
    first = max_rows(tokens * top_k, EXPERTS, ROW_ALIGN)
    num_tiles = max_tiles(tokens * top_k, EXPERTS, block_m)
    shared_tiles = -(-tokens // block_m)

    def scattered(extra: int, shared: SharedRows | None) -> dict[str, torch.Tensor]:
        capacity = first + extra
        out = dict(
            q=torch.full((capacity, hidden), 0xFF, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
            scale=torch.full((capacity,) if act_scale == "token" else (2, capacity), torch.nan, device=device),
            row_weight=torch.full((capacity,), torch.nan, device=device),
            packed_tiles=torch.full((num_tiles + shared_tiles, 4), -1, dtype=torch.int32, device=device),
            tile_count=torch.full((1,), -1, dtype=torch.int32, device=device),
        )
        scatter(
            x.to(device), ids.to(device), weights.to(device), plan, num_tiles=num_tiles, k_order=True, shared=shared,
            expert_scales=scales.to(device), routed_scaling_factor=2.5, **out,
        )  # fmt: skip
        return {name: tensor.cpu() for name, tensor in out.items()}

    extra = tokens + 5
    targets = torch.full((first + extra,), -1, dtype=torch.int32, device=device)
    routed, both = scattered(0, None), scattered(extra, SharedRows(targets, first, EXPERTS, block_m))

    expected = quantize(x, "fp8_token" if act_scale == "token" else "fp8_block128")
    assert expected.sf is not None
    codes = expected.q.view(torch.uint8).unflatten(1, (-1, 128))[:, :, k_order()].flatten(1)
    end = first + tokens
    assert_bytes_equal(both["q"].view(torch.uint8)[first:end], codes, "rows")
    assert_bytes_equal(both["scale"][..., first:end].reshape(-1, tokens).T.contiguous(), expected.sf, "scales")
    assert_bytes_equal(both["row_weight"][first:end], torch.ones(tokens), "weights")
    for name in ("q", "scale", "row_weight"):
        tensor = both[name].view(torch.uint8) if name == "q" else both[name]
        axis = 0 if name == "q" else -1
        ours, theirs = tensor.narrow(axis, 0, first), routed[name].view(tensor.dtype)
        assert_bytes_equal(ours.contiguous(), theirs, f"the slots' {name}")
        tail = tensor.narrow(axis, end, 5)
        assert bool((tail == 0xFF).all() if name == "q" else tail.isnan().all()), f"{name} beyond the last token"

    wanted = torch.full((first + extra,), -1, dtype=torch.int32)
    rows, slot = plan.slot_rows.cpu(), torch.arange(tokens * top_k, dtype=torch.int32)
    wanted[rows[rows >= 0].long()] = (slot + slot // top_k)[rows >= 0]
    wanted[first:end] = torch.arange(tokens, dtype=torch.int32) * (top_k + 1) + top_k
    assert_bytes_equal(targets.cpu(), wanted, "targets")

    live = int(routed["tile_count"])
    assert int(both["tile_count"]) == shared_tiles + live
    start = torch.arange(0, tokens, block_m)
    rows_of = (tokens - start).clamp(max=block_m)
    tiles = torch.stack([torch.full_like(start, EXPERTS), first + start, rows_of, torch.zeros_like(start)])
    assert_bytes_equal(both["packed_tiles"][:shared_tiles], tiles.T.int().contiguous(), "the shared expert's tiles")
    assert_bytes_equal(both["packed_tiles"][shared_tiles:], routed["packed_tiles"][:num_tiles], "the slots' tiles")


def test_no_tokens(device: str) -> None:
    plan = allocate_plan(1, TOP_K, EXPERTS, BLOCK_M, device, row_align=ROW_ALIGN)
    q = torch.full((8, 256), 0xFF, dtype=torch.uint8, device=device)
    scatter(
        torch.empty(0, 256, dtype=torch.bfloat16, device=device),
        torch.empty(0, TOP_K, dtype=torch.int32, device=device),
        torch.empty(0, TOP_K, device=device), plan, num_tiles=0, q=q.view(torch.float8_e4m3fn),
        scale=torch.empty(8, device=device), row_weight=torch.empty(8, device=device),
        packed_tiles=plan.tiles, tile_count=plan.skipped, k_order=True,
    )  # fmt: skip
    assert bool((q == 0xFF).all())
