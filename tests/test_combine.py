"""The combine against its contract written as a loop, byte for byte: fp32 from +0, ascending slots, one rounding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megamoe.kernels.combine import combine
from megamoe.oracle.metrics import assert_bytes_equal

NAN = float("nan")
EXPERTS = 7
INT64 = torch.iinfo(torch.int64)


def reference(
    rows: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, shared: bool, weights: torch.Tensor | None = None
) -> torch.Tensor:
    total = torch.zeros(rows.shape[0], rows.shape[2])
    for k in range(topk_ids.shape[1]):
        valid = (topk_ids[:, k] >= 0) & (topk_ids[:, k] < num_experts)
        part = rows[valid, k].float()
        total[valid] += part if weights is None else weights[valid, k, None] * part
    if shared:
        total += rows[:, -1].float()
    return total.to(torch.bfloat16)


def random_rows(tokens: int, slots: int, hidden: int, seed: int = 0) -> torch.Tensor:
    """Exponents 32 binades apart and both signs: most orders of summation and roundings differ."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, slots, hidden, generator=generator)
    return (values * torch.exp2(torch.randint(-16, 17, values.shape, generator=generator).float())).bfloat16()


def random_ids(tokens: int, top_k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A third is no expert: −1, E, and both ends of the type."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, EXPERTS, (tokens * top_k,), generator=generator)
    info = torch.iinfo(dtype)
    bad = torch.tensor([-1, EXPERTS, info.max, info.min, -1])
    ids[::3] = bad[torch.arange(len(ids[::3])) % len(bad)]
    return ids.reshape(tokens, top_k).to(dtype)


def run(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    shared: bool,
    device: str,
    weights: torch.Tensor | None = None,
    columns: int = 0,
) -> torch.Tensor:
    """Combine into the middle of a NaN-filled tensor, `columns` wider on either side; rows and weights of invalid slots
    are NaN; nothing else may change."""
    tokens, _, hidden = rows.shape
    invalid = (topk_ids < 0) | (topk_ids >= EXPERTS)
    poisoned = rows.clone()
    poisoned[:, : topk_ids.shape[1]][invalid] = NAN
    if weights is not None:
        weights = torch.where(invalid, NAN, weights).to(device)
    larger = torch.full((tokens + 2, hidden + 2 * columns), NAN, dtype=torch.bfloat16, device=device)
    inputs = (poisoned.to(device), topk_ids.to(device))
    out = larger[1:-1, columns : columns + hidden]
    combine(*inputs, out, num_experts=EXPERTS, shared=shared, topk_weights=weights)
    result = out.cpu().clone()
    out.fill_(NAN)
    assert_bytes_equal(larger, torch.full_like(larger, NAN), "what lies around the output")
    assert_bytes_equal(inputs[0].cpu(), poisoned, "rows after the call")
    return result


@dataclass(frozen=True)
class Case:
    tokens: int
    top_k: int
    hidden: int
    shared: bool = False
    dtype: torch.dtype = torch.int64


CASES = {
    "one token, one slot": Case(1, 1, 512),
    "hidden 8": Case(5, 3, 8, shared=True),
    "hidden 520, int32": Case(6, 2, 520, dtype=torch.int32),
    "V4-Flash": Case(3, 6, 4096, shared=True),
    "gpt-oss": Case(5, 4, 2880),
    "tokens not a multiple of the tile": Case(13, 6, 256, shared=True, dtype=torch.int32),
    "top_k 32": Case(2, 32, 64),
    "no token": Case(0, 4, 512),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_combine(case: Case, device: str) -> None:
    rows = random_rows(case.tokens, case.top_k + case.shared, case.hidden)
    ids = random_ids(case.tokens, case.top_k, case.dtype)
    actual = run(rows, ids, shared=case.shared, device=device)
    assert_bytes_equal(actual, reference(rows, ids, EXPERTS, case.shared), "y")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_weights_multiply_rows_one_rounded_product_each(case: Case, device: str) -> None:
    rows = random_rows(case.tokens, case.top_k + case.shared, case.hidden)
    ids = random_ids(case.tokens, case.top_k, case.dtype)
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(3))
    actual = run(rows, ids, shared=case.shared, device=device, weights=weights)
    assert_bytes_equal(actual, reference(rows, ids, EXPERTS, case.shared, weights), "y")


def test_a_product_is_rounded_before_it_is_added(device: str) -> None:
    """(1 + 2^-7)(1 + 2^-23) less its rounding: an FMA would keep what the product's own rounding drops."""
    rows = torch.tensor([1 + 2.0**-7, -(1 + 2.0**-7)]).bfloat16()[None, :, None].expand(1, 2, 8).contiguous()
    weights = torch.tensor([[1 + 2.0**-23, 1 + 2.0**-23]])
    product = (rows[0, 0, 0].float() * weights[0, 0]).double()
    assert product != rows[0, 0, 0].double() * weights[0, 0].double(), "the product is not exact"
    actual = run(rows, torch.ones(1, 2, dtype=torch.int64), shared=False, device=device, weights=weights)
    assert_bytes_equal(actual, torch.zeros(1, 8, dtype=torch.bfloat16), "y")


@pytest.mark.parametrize("columns", (8, 24))
def test_output_may_be_a_slice_of_wider_rows(columns: int, device: str) -> None:
    rows, ids = random_rows(5, 3, 64), random_ids(5, 3, torch.int64)
    actual = run(rows, ids, shared=False, device=device, columns=columns)
    assert_bytes_equal(actual, reference(rows, ids, EXPERTS, False), "y")


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_a_token_without_experts(shared: bool, device: str) -> None:
    """Without a shared row it is +0; with one it is that row."""
    rows = random_rows(4, 2 + shared, 64)
    actual = run(rows, torch.full((4, 2), -1), shared=shared, device=device)
    assert_bytes_equal(actual, rows[:, -1] if shared else torch.zeros(4, 64, dtype=torch.bfloat16), "y")


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([2.0**25, 1.0, -(2.0**25)], 0.0),  # 1 is lost in 2^25 before it is taken away
        ([2.0**25, -(2.0**25), 1.0], 1.0),
        ([1.0, 2.0**25, -(2.0**25)], 0.0),
        ([1.0, 2.0**-8, 2.0**-8], 1.0 + 2.0**-7),  # BF16 partial sums would tie to 1 twice
        ([-0.0, -0.0, -0.0], 0.0),  # the sum starts at +0
        ([3.0, float("inf"), 1.0], float("inf")),
    ],
    ids=["lost", "cancelled first", "lost later", "one rounding", "negative zero", "infinity"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared last"])
def test_order_and_rounding(slots: list[float], expected: float, shared: bool, device: str) -> None:
    rows = torch.tensor(slots).bfloat16()[None, :, None].expand(2, 3, 16).contiguous()
    actual = run(rows, torch.ones(2, 3 - shared, dtype=torch.int64), shared=shared, device=device)
    assert_bytes_equal(actual, torch.full((2, 16), expected, dtype=torch.bfloat16), "y")


def test_nan_of_a_valid_slot_reaches_its_token_only(device: str) -> None:
    rows = random_rows(3, 2, 64)
    rows[1, 0, 5] = NAN
    actual = run(rows, torch.ones(3, 2, dtype=torch.int64), shared=False, device=device)
    assert actual.isnan().nonzero().tolist() == [[1, 5]]


def test_two_runs_and_two_batch_sizes_are_equal(device: str) -> None:
    rows, ids = random_rows(11, 4, 264), random_ids(11, 4, torch.int64)
    first, second = (run(rows, ids, shared=False, device=device) for _ in range(2))
    assert_bytes_equal(first, second, "second run")
    assert_bytes_equal(run(rows[5:6], ids[5:6], shared=False, device=device), first[5:6], "token 5 alone")


ROWS, IDS, OUT = (torch.zeros(2, 3, 16).bfloat16(), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 16).bfloat16())
REFUSED = [
    ("fp32 rows", ROWS.float(), IDS, OUT, TypeError, r"rows has dtype torch\.float32"),
    ("int16 ids", ROWS, IDS.short(), OUT, TypeError, r"topk_ids has dtype torch\.int16"),
    ("fp32 out", ROWS, IDS, OUT.float(), TypeError, r"out has dtype torch\.float32"),
    ("strided ids", ROWS, IDS.t().contiguous().t(), OUT, ValueError, "topk_ids has strides"),
    ("one axis", ROWS, IDS[0], OUT, ValueError, r"topk_ids has shape \(3,\)"),
    ("tokens", ROWS, IDS[:1], OUT, ValueError, r"must be \[T, K\] and \[T, H\]"),
    ("hidden", ROWS, IDS, OUT[:, :8].contiguous(), ValueError, r"\(2, 3, 16\); .* ask for \(2, 3, 8\)"),
    ("no shared row", ROWS[:, :2].contiguous(), IDS, OUT, ValueError, r"\(2, 2, 16\); .* ask for \(2, 3, 16\)"),
    ("hidden 12", ROWS[..., :12].contiguous(), IDS, OUT[:, :12].contiguous(), ValueError, "multiple of 8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "ids", "out", "error", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refuses_before_writing(
    rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, error: type[Exception], message: str
) -> None:
    out = out.clone().fill_(NAN)
    with pytest.raises(error, match=message):
        combine(rows, ids, out, num_experts=EXPERTS, shared=False)
    assert out.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1024, 6, 4096), (300, 8, 7168), (1027, 4, 2880)])
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_full_size(tokens: int, top_k: int, hidden: int, shared: bool, device: str) -> None:
    rows = random_rows(tokens, top_k + shared, hidden)
    ids = random_ids(tokens, top_k, torch.int64)
    actual = run(rows, ids, shared=shared, device=device)
    assert_bytes_equal(actual, reference(rows, ids, EXPERTS, shared), "y")


@pytest.mark.gpu
def test_offsets_beyond_2_31_elements(device: str) -> None:
    tokens, top_k, hidden = 40_000, 8, 7168  # 2.3e9 elements, 4.6 GB
    rows = torch.full((tokens, top_k, hidden), NAN, dtype=torch.bfloat16, device=device)
    ids = torch.full((tokens, top_k), -1, device=device)
    tail = random_rows(3, top_k, hidden)
    rows[-3:] = tail.to(device)
    ids[-3:] = 1
    out = torch.full((tokens, hidden), NAN, dtype=torch.bfloat16, device=device)
    combine(rows, ids, out, num_experts=EXPERTS, shared=False)
    assert_bytes_equal(out[-3:].cpu(), reference(tail, ids[-3:].cpu(), EXPERTS, False), "last tokens")
    assert not out[:-3].any()
