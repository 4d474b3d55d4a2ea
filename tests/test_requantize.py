"""GEMM 1's epilogue on given accumulators: bytes, where no MMA and no approximate sigmoid can blur them.

A gate of 32 has sigmoid 1 exactly, in fp32 and by every approximation, so that with weight 1/32 the activated value is
the up value itself, and every awkward value can be put in front of the requantizer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from megamoe.kernels.epilogue import requantize_accumulators
from megamoe.kernels.layouts.gate_up import interleave_gate_up
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.reference import activate, requantize
from megamoe.recipe import ALL_RECIPES, Recipe, traits

RECIPES = {f"{traits(recipe).mid_kind}, {recipe.numerics}": recipe for recipe in reversed(ALL_RECIPES)}
FP8XFP4 = ALL_RECIPES[0]
E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _requantize(
    recipe: Recipe, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None, device: str, **options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    acc = interleave_gate_up(torch.cat((gate, up), dim=1), traits(recipe).tile_order, dim=1)
    weight = None if weight is None else weight.to(device)
    q, sf = requantize_accumulators(acc.to(device), weight, recipe, **options)
    return q.cpu(), None if sf is None else sf.cpu()


def _weights(recipe: Recipe, values: torch.Tensor) -> torch.Tensor | None:
    """The top-k weights, which `trtllm_gen` multiplies elsewhere."""
    return None if recipe.numerics == "trtllm_gen" else values


def _expected(
    recipe: Recipe, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None, **options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    act = activate(gate, up, recipe.numerics, options.pop("clamp", None), **options)
    return requantize(act if weight is None else act * weight[:, None], recipe)


def _same_bytes(
    got: tuple[torch.Tensor, torch.Tensor | None], expected: tuple[torch.Tensor, torch.Tensor | None], name: object
) -> None:
    assert_bytes_equal(got[0], expected[0], f"{name} elements")
    assert (got[1] is None) == (expected[1] is None)
    if got[1] is not None and expected[1] is not None:
        assert_bytes_equal(got[1], expected[1], f"{name} scales")


def _check(recipe: Recipe, up: torch.Tensor, device: str, *, weight: float = 1 / 32) -> None:
    weights = _weights(recipe, torch.full((up.shape[0],), weight))
    if weights is None:
        up = up * weight  # the same activated values: 32·weight·up
    gate = torch.full_like(up, 32.0)
    _same_bytes(_requantize(recipe, gate, up, weights, device), _expected(recipe, gate, up, weights), recipe)


def _codes(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.int16 if q.dtype == torch.bfloat16 else torch.uint8)


@dataclass(frozen=True)
class Case:
    """`make(generator)` gives rows of up values [n, 128] that BF16 holds."""

    make: Callable[[torch.Generator], torch.Tensor]


def _normal(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(64, 128, generator=generator).bfloat16().float()


def _wide_range(generator: torch.Generator) -> torch.Tensor:
    return (
        (torch.randn(64, 128, generator=generator) * 2.0 ** torch.randint(-60, 60, (64, 128), generator=generator))
        .bfloat16()
        .float()
    )


def _scale_boundaries(generator: torch.Generator) -> torch.Tensor:
    """amax at 448·2^k and 6·2^k, one BF16 ulp below and above, in every position of a group in turn."""
    values = torch.rand(128, 128, generator=generator).bfloat16().float()
    step = 2.0**-7
    for row in range(128):
        top = (448.0, 6.0)[row % 2] * 2.0 ** (row // 6 - 10)
        amax = top * (1 + (row % 3 - 1) * step)
        values[row] *= amax / 2
        values[row, row] = -amax if row % 5 == 0 else amax
    return values.bfloat16().float()


def _ties(generator: torch.Generator) -> torch.Tensor:
    """Every E2M1 tie and its BF16 neighbours, both signs, in groups whose scale is exactly 1 (amax 6) or 1/8."""
    values = torch.tensor([t * (1 + d * 2.0**-7) for t in E2M1_TIES for d in (-1, 0, 1)]).bfloat16().float()
    row = torch.zeros(128)
    row[::16] = 6.0
    free = [c for c in range(128) if c % 16]
    picks = torch.randint(0, len(values), (64, len(free)), generator=generator)
    signs = 1 - 2 * torch.randint(0, 2, (64, len(free)), generator=generator).float()
    rows = row.repeat(64, 1)
    rows[:, free] = values[picks] * signs
    rows[32:] /= 8
    return rows


def _zeros_and_denormals(generator: torch.Generator) -> torch.Tensor:
    values = torch.zeros(16, 128)
    values[1] = -0.0
    values[2, 5] = 2.0**-126
    values[3, ::7] = -(2.0**-130)
    values[4, 64:] = 1.0
    values[5, 3] = 1e-11
    values[6, 3] = 1e-10
    values[7, 3] = 1e-9
    values[8] = torch.linspace(-1e-38, 1e-38, 128)
    values[9:] = torch.randn(7, 128, generator=generator) * (torch.rand(7, 128, generator=generator) < 0.1)
    return values.bfloat16().float()


CASES = {
    "normal": Case(_normal),
    "wide range": Case(_wide_range),
    "scale boundaries": Case(_scale_boundaries),
    "E2M1 ties": Case(_ties),
    "zeros and denormals": Case(_zeros_and_denormals),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_bytes(recipe: Recipe, case: Case, device: str) -> None:
    up = case.make(torch.Generator().manual_seed(7))
    _check(recipe, up, device)


DEEP_GEMM = {name: recipe for name, recipe in RECIPES.items() if recipe.numerics != "trtllm_gen"}


@pytest.mark.parametrize("recipe", DEEP_GEMM.values(), ids=DEEP_GEMM)
def test_weight_multiplies_before_the_scale_is_formed(recipe: Recipe, device: str) -> None:
    up = _normal(torch.Generator().manual_seed(8))
    _check(recipe, up, device, weight=0.3)


@pytest.mark.parametrize("rows", (1, 15, 17))
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_row_tails(recipe: Recipe, rows: int, device: str) -> None:
    _check(recipe, _normal(torch.Generator().manual_seed(9))[:rows], device)


@pytest.mark.parametrize("columns", (64, 192, 320))
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_column_tails(recipe: Recipe, columns: int, device: str) -> None:
    generator = torch.Generator().manual_seed(10)
    _check(recipe, torch.randn(5, columns, generator=generator).bfloat16().float(), device)


@pytest.mark.parametrize("clamp", (None, 0.0, 1.0, 1.3, 10.0, math.inf))
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_clamp(recipe: Recipe, clamp: float | None, device: str) -> None:
    """The reference's codes but for the few that an approximate sigmoid moves; zeros for a limit of zero."""
    generator = torch.Generator().manual_seed(11)
    gate, up = torch.randn(2, 32, 128, generator=generator) * 4
    weights = _weights(recipe, torch.rand(32, generator=generator) + 0.5)
    q, _ = _requantize(recipe, gate, up, weights, device, clamp=clamp)
    expected_q, _ = _expected(recipe, gate, up, weights, clamp=clamp)
    # The sigmoid is approximate on a GPU: a value on a rounding boundary may fall to the neighbouring code.
    different = (_codes(q) != _codes(expected_q)).float().mean().item()
    allowed = 0.01 if device == "cuda" else 0.002
    # BF16 has 16 times E4M3's codes, as many more boundaries to cross.
    assert different < allowed * (16 if q.dtype == torch.bfloat16 else 1), different
    if clamp == 0.0:
        mask = {torch.uint8: 0x77, torch.float8_e4m3fn: 0x7F, torch.bfloat16: 0x7FFF}[q.dtype]
        magnitudes = _codes(q) & mask
        assert_bytes_equal(magnitudes, torch.zeros_like(magnitudes), "elements without their signs")


@pytest.mark.parametrize(("alpha", "beta"), [(1.702, 1.0), (1.0, 0.5), (0.75, -2.0)])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_swigluoai_bytes(recipe: Recipe, alpha: float, beta: float, device: str) -> None:
    """The sigmoid of 32·alpha is 1 as well, so that only (up + beta) stands between accumulators and bytes."""
    up = _normal(torch.Generator().manual_seed(13))
    gate, weights = torch.full_like(up, 32.0), _weights(recipe, torch.full((up.shape[0],), 1 / 32))
    options = dict(activation="swigluoai", alpha=alpha, beta=beta)
    got = _requantize(recipe, gate, up, weights, device, **options)
    _same_bytes(got, _expected(recipe, gate, up, weights, **options), recipe)


ACTIVATIONS = {
    "swigluoai": dict(activation="swigluoai", alpha=1.702, beta=1.0),
    "swigluoai, other constants": dict(activation="swigluoai", alpha=0.8, beta=-0.25),
    "situ": dict(activation="situ"),
}


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_from_small_to_saturated(name: str, scale: float, device: str) -> None:
    recipe = FP8XFP4
    gate, up = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(14)) * scale
    weights = torch.ones(64)
    q, sf = _requantize(recipe, gate, up, weights, device, **ACTIVATIONS[name])
    expected_q, expected_sf = _expected(recipe, gate, up, weights, **ACTIVATIONS[name])
    different = (q.view(torch.uint8) != expected_q.view(torch.uint8)).float().mean().item()
    assert different < 2e-3, different
    assert (sf != expected_sf).float().mean().item() < 2e-3


def test_no_rows(device: str) -> None:
    q, sf = requantize_accumulators(torch.empty(0, 256, device=device), torch.empty(0, device=device), FP8XFP4)
    assert q.shape == (0, 128)
    assert sf.shape == (0, 4)
