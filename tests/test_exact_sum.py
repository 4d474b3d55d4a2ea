"""Exact-sum layers come out the same bits whatever order or precision their sums are formed with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from megamoe.oracle.exact_sum import ExactSumError, check_exact, exact_sum_layer
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import LayerTrace, Matmul, matmul_fp32, moe_layer
from megamoe.recipe import SERVED, Recipe

SM100, MXF4, NVFP4, SM90 = SERVED


@dataclass(frozen=True)
class Case:
    name: str
    recipe: Recipe
    hidden: int = 256
    intermediate: int = 128
    num_shared_experts: int = 0
    shared_weight: str | None = None

    def make(self, seed: int = 0) -> Layer:
        return exact_sum_layer(
            self.recipe, tokens=12, hidden=self.hidden, intermediate=self.intermediate, num_experts=3,
            top_k=2, num_shared_experts=self.num_shared_experts, shared_weight=self.shared_weight,
            masked=0.1, seed=seed,
        )  # fmt: skip


CASES = [
    Case("fp8xfp4", SM100),
    Case("fp8xfp4-shared-e4m3", SM100, num_shared_experts=1, shared_weight="e4m3"),
    Case("fp8xfp4-shared-e2m1", SM100, num_shared_experts=2, shared_weight="e2m1"),
    Case("fp8xfp4-tails", SM100, hidden=224, intermediate=96, num_shared_experts=1),
    Case("mxf4xmxf4-shared", MXF4, num_shared_experts=1),
    Case("mxf4xmxf4-tails", MXF4, hidden=224, intermediate=96),
    Case("nvfp4xnvfp4-shared", NVFP4, num_shared_experts=1),
    Case("nvfp4xnvfp4-tails", NVFP4, hidden=224, intermediate=96),
    Case("fp8xfp8-shared", SM90, num_shared_experts=1),
    Case("fp8xfp8-H-tail", SM90, hidden=320, intermediate=256),
]
BY_CASE = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


def trace(case: Layer, **options: Matmul) -> LayerTrace:
    return moe_layer(case.x, case.topk_ids, case.topk_weights, case.weights, case.spec, **options)


def reversed_one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp32 sums over K from the last column to the first."""
    acc = torch.zeros(a.shape[0], b.shape[0])
    for k in reversed(range(a.shape[1])):
        acc = acc + a[:, k, None] * b[None, :, k]
    return acc


def thirteen_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An MMA of 32 columns that aligns products and accumulator to the largest and keeps 13 bits below its
    first."""
    acc = torch.zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], 32):
        columns = slice(start, start + 32)
        terms = torch.cat((acc[..., None], a[:, None, columns] * b[None, :, columns]), dim=-1)
        exponent = torch.frexp(terms.abs().amax(-1, keepdim=True)).exponent
        ulp = torch.exp2((exponent - 1 - 13).float())
        acc = (torch.trunc(terms / ulp) * ulp).sum(-1)
    return acc


@BY_CASE
@pytest.mark.parametrize("matmul", [matmul_fp32, reversed_one_by_one, thirteen_bits])
def test_bitwise_equal_in_any_order(case: Case, matmul: Matmul) -> None:
    made = case.make()
    expected, actual = trace(made), trace(made, matmul=matmul)
    for routed, other in ((expected.routed, actual.routed), (expected.shared, actual.shared)):
        if routed is not None and other is not None:
            for stage in ("h", "act", "act_q", "act_sf"):
                assert_bytes_equal(getattr(other, stage), getattr(routed, stage), stage)
    assert_bytes_equal(actual.rows, expected.rows, "rows")
    assert_bytes_equal(actual.y, expected.y, "y")


@BY_CASE
def test_layers_are_not_trivial(case: Case) -> None:
    made = case.make()
    result = trace(made)
    assert result.routed is not None
    act = result.routed.act[result.valid.flatten()]
    assert (act != 0).float().mean() > 0.1
    assert (result.y[result.valid.any(1)] != 0).float().mean() > 0.9
    scales = result.routed.act_sf[result.valid.flatten()]
    assert scales.unique().numel() > 2
    assert result.x.sf.unique().numel() > 2
    assert made.weights.w13_scale.unique().numel() > 2
    assert made.weights.w2_scale.unique().numel() == 2


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if "fp8xfp8" in
case.name]) def test_a_scale_read_from_the_next_group_shows(case: Case) -> None:
    made = case.make()
    shifted = replace(made.weights, w13_scale=made.weights.w13_scale.roll(1, dims=-1))
    assert not torch.equal(trace(replace(made, weights=shifted)).y, trace(made).y)


@dataclass(frozen=True)
class Violation:
    name: str
    message: str
    layer: Layer


def violations() -> list[Violation]:
    made = CASES[0].make()
    sm90 = CASES[-2].make()
    unequal = made.topk_weights.clone()
    unequal[0, 0] = 0.3
    odd = made.x.clone()
    odd[0, 0] *= 1.0078125
    small = made.weights.w13_scale.clone()
    small[:, : made.spec.intermediate] -= 8
    dense = torch.full_like(made.weights.w2, 0x27)  # 6 and 1 in every byte
    mixed = sm90.weights.w13_scale.clone()
    mixed[:, :, 0] *= 2
    return [
        Violation("clamp", "the layer has a clamp", replace(made, spec=replace(made.spec,
        activation_clamp=8.0))), Violation("weight", "a top-k weight is not a power of two", replace(made,
        topk_weights=unequal)), Violation("x", "x is not exactly representable", replace(made, x=odd)),
        Violation("gate", "GATE", replace(made, weights=replace(made.weights, w13_scale=small))),
        Violation("bits", "GEMM 2: a sum needs", replace(made, weights=replace(made.weights, w2=dense))),
        Violation("mid", "in one scale group|448", replace(sm90, weights=replace(sm90.weights,
        w13_scale=mixed))),
    ]


@pytest.mark.parametrize("index", range(6), ids=["clamp", "weight", "x", "gate", "bits", "mid"])
def test_violated_conditions_raise(index: int) -> None:
    violation = violations()[index]
    with pytest.raises(ExactSumError, match=violation.message.replace("GATE", "a gate is neither 0")):
        check_exact(violation.layer)


@pytest.mark.parametrize("recipe", SERVED, ids=lambda recipe: recipe.mma_type)
def test_a_random_layer_is_not_exact(recipe: Recipe) -> None:
    with pytest.raises(ExactSumError):
        check_exact(random_layer(recipe, tokens=4, hidden=128, intermediate=128, num_experts=2, top_k=1))


def test_same_seed_same_layer() -> None:
    first, second, other = CASES[0].make(), CASES[0].make(), CASES[0].make(seed=1)
    assert_bytes_equal(first.x, second.x)
    assert_bytes_equal(first.weights.w13, second.weights.w13)
    assert not torch.equal(first.x, other.x)


def test_shared_scale_blocks_of_gate_and_up_are_refused() -> None:
    with pytest.raises(ValueError, match="intermediate=64: allowed are multiples of 128"):
        replace(CASES[-1], intermediate=64).make()
