"""What stands between a peer's GEMMs, and how a peer that is absent says so."""

from importlib import metadata

import pytest
import torch

from megamoe.bench.backends import find_backend
from megamoe.bench.layers import FP8_BLOCK
from megamoe.bench.peers.glue import combine_rows, scatter_quantized, swiglu_quantized
from megamoe.bench.peers.plan import padded_plan
from megamoe.bench.registry import Point
from megamoe.bench.shapes import MODELS
from megamoe.oracle.reference.quantizers import Quantized, quantize

TOKENS, EXPERTS, TOP_K, HIDDEN = 11, 5, 3, 256


@pytest.fixture
def ids(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices.int().to(device)


@pytest.mark.parametrize("alignment", [1, 4, 16])
def test_the_plan_groups_slots_by_expert(ids: torch.Tensor, alignment: int) -> None:
    plan = padded_plan(ids, EXPERTS, alignment)
    flat = ids.flatten().tolist()
    expected_slots, expected_experts = [], []
    for expert in range(EXPERTS):
        slots = [slot for slot, owner in enumerate(flat) if owner == expert]
        padded = -(-len(slots) // alignment) * alignment
        expected_slots += slots + [-1] * (padded - len(slots))
        expected_experts += [expert] * padded
    assert plan.slot_of_row.tolist() == expected_slots
    assert plan.expert_of_row.tolist() == expected_experts
    assert plan.rows_of_expert.tolist() == [flat.count(expert) for expert in range(EXPERTS)]
    rows = plan.row_of_slot.flatten().tolist()
    assert [plan.slot_of_row[row].item() for row in rows] == list(range(TOKENS * TOP_K))


def _poisoned(rows: int, columns: int, device: str) -> torch.Tensor:
    return torch.full((rows, columns), 0xFF, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)


def _assert_same_bytes(q: torch.Tensor, sf: torch.Tensor, expected: Quantized) -> None:
    assert expected.sf is not None
    assert torch.equal(sf.view(torch.int32), expected.sf.view(torch.int32))
    assert torch.equal(q.view(torch.uint8), expected.q.view(torch.uint8))


@pytest.mark.parametrize("column_major", [False, True])
def test_scatter_quantizes_a_row_for_each_slot(ids: torch.Tensor, device: str, column_major: bool) -> None:
    plan = padded_plan(ids, EXPERTS, 4)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    q = _poisoned(plan.num_rows, HIDDEN, device)
    sf = torch.full(
        (HIDDEN // 128, plan.num_rows) if column_major else (plan.num_rows, HIDDEN // 128), torch.nan, device=device
    )
    sf = sf.t() if column_major else sf
    scatter_quantized(x, plan.row_of_slot, q, sf)
    rows = plan.row_of_slot.flatten().long()
    tokens = torch.arange(TOKENS * TOP_K, device=device) // TOP_K
    _assert_same_bytes(q.view(torch.uint8)[rows], sf[rows], quantize(x[tokens], "fp8_block128"))
    padding = plan.slot_of_row < 0
    assert bool(sf[padding].isnan().all())
    assert bool((q.view(torch.uint8)[padding] == 0xFF).all())


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_swiglu_of_live_rows(ids: torch.Tensor, device: str, clamp: float | None) -> None:
    plan = padded_plan(ids, EXPERTS, 4)
    gate_up = torch.randn(plan.num_rows, 2 * 128, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    q, sf = _poisoned(plan.num_rows, 128, device), torch.full((plan.num_rows, 1), torch.nan, device=device)
    swiglu_quantized(gate_up, plan.slot_of_row, q, sf, clamp)
    gate, up = gate_up.float().chunk(2, 1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    expected = torch.nn.functional.silu(gate) * up
    live = plan.slot_of_row >= 0
    error = (q.float() * sf - expected)[live].norm() / expected[live].norm()
    assert 0 < float(error) < 0.03, "one rounding to E4M3"
    assert bool(sf[~live].isnan().all())


def test_swiglu_quantizes_as_the_pre_dispatch(ids: torch.Tensor, device: str) -> None:
    """From gate 128 up exp(-gate) is 0 in fp32, so that the activation is gate · up exactly and the bytes are fixed."""
    plan = padded_plan(ids, EXPERTS, 4)
    generator = torch.Generator().manual_seed(4)
    gate = 128 * (1 + torch.rand(plan.num_rows, 256, generator=generator))
    up = torch.randn(plan.num_rows, 256, generator=generator)
    gate_up = torch.cat([gate, up], 1).bfloat16().to(device)
    q, sf = _poisoned(plan.num_rows, 256, device), torch.full((plan.num_rows, 2), torch.nan, device=device)
    swiglu_quantized(gate_up, plan.slot_of_row, q, sf, None)
    live = plan.slot_of_row >= 0
    gate, up = gate_up[live].float().chunk(2, 1)
    _assert_same_bytes(q.view(torch.uint8)[live], sf[live], quantize(gate * up, "fp8_block128"))
    assert bool((q.view(torch.uint8)[~live] == 0xFF).all())


def test_combine_weighs_the_rows(ids: torch.Tensor, device: str) -> None:
    plan = padded_plan(ids, EXPERTS, 4)
    generator = torch.Generator().manual_seed(2)
    rows = torch.full((plan.num_rows, 1152), torch.nan, dtype=torch.bfloat16)
    rows[plan.slot_of_row.cpu() >= 0] = torch.randn(TOKENS * TOP_K, 1152, generator=generator).bfloat16()
    rows = rows.to(device)
    weights = torch.rand(TOKENS, TOP_K, generator=generator).to(device)
    out = torch.full((TOKENS, 1152), torch.nan, dtype=torch.bfloat16, device=device)
    combine_rows(rows, plan.row_of_slot, weights, out)
    expected = (weights[..., None] * rows[plan.row_of_slot.long()].float()).sum(1)
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "deep_gemm_fused", "deep_gemm_unfused", "humming_block128", "humming_token", "humming_w8a8", "humming_w4a16",
        "triton_kernels", "flashinfer",
    ],
)  # fmt: skip
def test_an_absent_peer_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(distribution: str) -> str:
        raise metadata.PackageNotFoundError(distribution)

    backend = find_backend(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(metadata, "version", absent)  # some machines have it
    (recipe,) = backend.recipes([FP8_BLOCK])
    point = Point(MODELS["qwen3-30b"], 16, "uniform")
    assert backend.unsupported_reason(point, recipe, torch.device("cpu")) == "needs a CUDA GPU"
    reason = backend.unsupported_reason(point, recipe, torch.device("cuda"))
    assert reason is not None
    if name == "flashinfer":
        assert "compute capability 9.0; served: 10.x" in reason
    else:
        assert "is not installed; bench/peers/stage.sh brings it" in reason
