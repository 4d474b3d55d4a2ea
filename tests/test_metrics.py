"""The judges themselves: what they accept, what they must catch, and what their messages say."""

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch

from megamoe import formats
from megamoe.oracle.metrics import LIMITS, ErrorReport, Limits, assert_bytes_equal, check, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import (
    LayerTrace,
    Matmul,
    combine,
    matmul_fp8_wgmma,
    matmul_fp32,
    matmul_fp64,
    matmul_truncated,
    moe_layer,
    quantize,
    requantize,
)
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import TABLE, Recipe, traits

MXF4 = Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100")
NVFP4 = Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100")
FP4_WEIGHTS = [recipe for recipe in TABLE if traits(recipe).weight == "e2m1"]
FP8_WGMMA = [recipe for recipe in TABLE if traits(recipe).act_scale_format == "fp32"]
"""Recipes whose sums Hopper's FP8 tensor core may form."""
DTYPES = (
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)

every_recipe = pytest.mark.parametrize("recipe", TABLE, ids=str)


@functools.cache
def _layer(recipe: Recipe, clamp: float | None = None, seed: int = 3, tokens: int = 40) -> Layer:
    return random_layer(
        recipe,
        tokens=tokens,
        hidden=256,
        intermediate=128,
        num_experts=4,
        top_k=3,
        num_shared_experts=1,
        activation_clamp=clamp,
        seed=seed,
    )


def _y(layer: Layer, matmul: Matmul = matmul_fp64, **weights: torch.Tensor) -> torch.Tensor:
    """The reference's y, with some of the weights replaced."""
    plain = dataclasses.replace(layer.weights, **weights)
    return _trace(dataclasses.replace(layer, weights=plain), matmul, full_trace=False).y


def _trace(layer: Layer, matmul: Matmul = matmul_fp64, **options: bool) -> LayerTrace:
    inputs = (layer.x, layer.topk_ids, layer.topk_weights)
    return moe_layer(*inputs, layer.weights, layer.spec, parameters=layer.parameters, matmul=matmul, **options)


def _verdict(recipe: Recipe, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    return check(compare(actual, expected), LIMITS[recipe])


# assert_bytes_equal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_is_named(dtype: torch.dtype) -> None:
    numbers = [[1.0, 2.0, 3.0, 0.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]]
    expected = torch.tensor(numbers).to(dtype)
    assert_bytes_equal(expected.clone(), expected, "same")
    actual = expected.clone()
    actual.view(torch.uint8)[1, 2 * dtype.itemsize] ^= 1
    actual.view(torch.uint8)[2, 0] ^= 1
    with pytest.raises(AssertionError) as caught:
        assert_bytes_equal(actual, expected, "scales")
    message = str(caught.value)
    assert message.startswith("scales: first difference at [1, 2]: actual ")
    assert message.endswith("; 2 of 12 elements differ")
    bits = [part.split("(0x")[1].split(")")[0] for part in message.split(", expected ")]
    assert [len(text) for text in bits] == [2 * dtype.itemsize] * 2, message
    assert int(bits[0], 16) ^ int(bits[1], 16) == 1, message
    assert f"expected {expected[1, 2].item()} (" in message


def test_message_shows_values_and_bits() -> None:
    actual, expected = torch.tensor([1.25, 2]).bfloat16(), torch.tensor([1.0, 2]).bfloat16()
    with pytest.raises(AssertionError, match=r"at \[0\]: actual 1\.25 \(0x3FA0\), expected 1\.0 \(0x3F80\); 1 of 2"):
        assert_bytes_equal(actual, expected)


def test_zeros_of_both_signs_and_nans_are_told_apart() -> None:
    with pytest.raises(AssertionError, match=r"-0\.0 \(0x80000000\), expected 0\.0 \(0x00000000\)"):
        assert_bytes_equal(torch.tensor([-0.0]), torch.tensor([0.0]))
    nan, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert_bytes_equal(nan, nan.clone())
    with pytest.raises(AssertionError, match="0x7FC00000"):
        assert_bytes_equal(nan, other)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        pytest.param(torch.ones(2, 3), torch.ones(3, 2), id="shape"),
        pytest.param(torch.ones(2, 3), torch.ones(1, 2, 3), id="rank"),
        pytest.param(torch.ones(2, dtype=torch.int8), torch.ones(2, dtype=torch.uint8), id="sign of the dtype"),
        pytest.param(torch.ones(2), torch.ones(2, dtype=torch.int32), id="kind of dtype"),
    ],
)
def test_other_shapes_and_dtypes_are_errors(actual: torch.Tensor, expected: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match=r"^rows: actual is torch\..*, expected is torch\."):
        assert_bytes_equal(actual, expected, "rows")


def test_strided_empty_and_scalar_tensors() -> None:
    strided = torch.arange(24.0).view(4, 6)[::2, 1::2]
    assert_bytes_equal(strided, strided.contiguous())
    assert_bytes_equal(torch.empty(0, 4), torch.empty(0, 4))
    assert_bytes_equal(torch.tensor(2.0), torch.tensor(2.0))
    with pytest.raises(AssertionError, match=r"at \[\]"):
        assert_bytes_equal(torch.tensor(2.0), torch.tensor(3.0))
    with pytest.raises(TypeError, match="complex128"):
        assert_bytes_equal(torch.ones(1, dtype=torch.complex128), torch.ones(1, dtype=torch.complex128))


# compare and check


def test_a_perfect_result() -> None:
    expected = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    for perfect in (expected, torch.empty(0, 8), torch.zeros(2, 8)):
        report = compare(perfect.clone(), perfect)
        assert dataclasses.astuple(report) == pytest.approx((0, 0, 1, 0), abs=1e-15)


def test_fields_by_hand() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    actual = torch.tensor([[3.0, 4.5], [0.0, 10.0]])
    report = compare(actual, expected)
    assert report.rel_rms == pytest.approx(0.5 / math.sqrt(125))
    assert report.worst_row == pytest.approx(0.5 / 5)
    assert report.fitted_scale == pytest.approx(127 / 125)
    assert report.calc_diff == pytest.approx(1 - 2 * 127 / (129.25 + 125))


def test_worst_row_is_found_behind_the_first_chunk() -> None:
    expected = torch.ones(3, 3000, 2)
    actual = expected.clone()
    actual[2, 2500, 1] = 3.0
    assert compare(actual, expected).worst_row == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (math.inf, -math.inf), (math.nan, math.inf)],
)
def test_a_nonfinite_element_on_one_side_is_infinitely_wrong(actual: float, expected: float) -> None:
    a, e = torch.ones(3, 4), torch.ones(3, 4)
    a[1, 2], e[1, 2] = actual, expected
    report = compare(a, e)
    assert report == ErrorReport(math.inf, math.inf, math.inf, math.inf)
    assert all(check(report, limits) for limits in LIMITS.values())


def test_elements_poisoned_on_both_sides_are_left_out() -> None:
    expected = torch.tensor([[math.nan, math.nan], [math.inf, 2.0]])
    actual = torch.tensor([[math.nan, math.nan], [math.inf, 2.2]])
    assert compare(actual, expected).worst_row == pytest.approx(0.1)


def test_something_where_zeros_are_expected_is_infinitely_wrong() -> None:
    expected = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert compare(torch.tensor([[1e-9, 0.0], [1.0, 1.0]]), expected).worst_row == math.inf
    assert compare(torch.full((1, 2), 1e-9), torch.zeros(1, 2)) == ErrorReport(math.inf, math.inf, math.inf, 1.0)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"actual has shape \(2, 3\), expected \(3, 2\)"):
        compare(torch.ones(2, 3), torch.ones(3, 2))


def test_check_names_every_field_beyond_its_limit() -> None:
    limits = Limits(rel_rms=0.1, worst_row=0.2, scale_error=0.25, calc_diff=0.001, reason="")
    assert check(ErrorReport(0.1, 0.2, 0.75, 0.001), limits) is None
    message = check(ErrorReport(0.11, 0.2, 0.5, math.nan), limits)
    assert message is not None
    assert message.startswith("rel_rms 0.11 > 0.1, |fitted_scale - 1| 0.5 > 0.25, calc_diff nan > 0.001 (")


# Limits: wide enough for every sum a machine may form, narrow enough for every mistake.


def test_every_recipe_has_limits_and_a_reason() -> None:
    assert set(LIMITS) == set(TABLE)
    assert all(len(limits.reason) > 50 for limits in LIMITS.values())


SUMS = {"fp32": matmul_fp32, "cut after each MMA": matmul_truncated}
SHAPES = {"narrow": (256, 128, 64), "K 1024": (1024, 128, 12), "K 4096": (4096, 128, 4)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@every_recipe
def test_other_sums_stay_within_the_limits(recipe: Recipe, shape: tuple[int, int, int]) -> None:
    hidden, intermediate, tokens = shape
    layer = random_layer(
        recipe, tokens=tokens, hidden=hidden, intermediate=intermediate, num_experts=2, top_k=2, seed=5
    )
    expected = _y(layer)
    for name, matmul in SUMS.items():
        assert _verdict(recipe, _y(layer, matmul), expected) is None, name


def _fp8_wgmma(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Promoted to fp32 every 128 columns."""
    acc = torch.zeros(a.shape[0], b.shape[0])
    for columns in torch.arange(a.shape[1]).split(128):
        acc = acc + matmul_fp8_wgmma(a[:, columns], b[:, columns])
    return acc


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("recipe", FP8_WGMMA, ids=str)
def test_fp8_wgmma_sums_stay_within_the_limits(recipe: Recipe, seed: int) -> None:
    layer = _layer(recipe, seed=seed, tokens=12)
    report = compare(_y(layer, _fp8_wgmma), _y(layer))
    assert check(report, LIMITS[recipe]) is None
    assert report.rel_rms > 1e-3, "these sums must be visibly inexact for this test to say anything"


def _roll_bytes(t: torch.Tensor, shift: int, dim: int) -> torch.Tensor:
    return t.view(torch.uint8).roll(shift, dims=dim).view(t.dtype)


def _swap_halves(t: torch.Tensor) -> torch.Tensor:
    return _roll_bytes(t, t.shape[-2] // 2, -2)


def _swap_nibbles(t: torch.Tensor) -> torch.Tensor:
    return (t >> 4) | (t << 4)


def _without_last_group(scale: torch.Tensor) -> torch.Tensor:
    """The last K group counts (almost) nothing, as in a loop that ends one block early."""
    return torch.cat([scale[..., :-1], torch.zeros_like(scale[..., -1:])], dim=-1)


Mistake = Callable[[PlainWeights], dict[str, torch.Tensor]]
MISTAKES: dict[str, Mistake] = {
    "w2 of the next expert": lambda w: {"w2": _roll_bytes(w.w2, 1, 0)},
    "w2 of the next row": lambda w: {"w2": _roll_bytes(w.w2, 1, 1)},
    "gate and up weights swapped": lambda w: {"w13": _swap_halves(w.w13)},
}
SCALE_MISTAKES: dict[str, Mistake] = {
    "gate and up swapped": lambda w: {"w13": _swap_halves(w.w13), "w13_scale": _swap_halves(w.w13_scale)},
    "gate and up scales swapped": lambda w: {"w13_scale": _swap_halves(w.w13_scale)},
    "w13 scales one group off": lambda w: {"w13_scale": w.w13_scale.roll(1, dims=-1)},
    "w2 scales of the next row": lambda w: {"w2_scale": w.w2_scale.roll(1, dims=-2)},
    "last K group of w13 dropped": lambda w: {"w13_scale": _without_last_group(w.w13_scale)},
}


def _mistakes(recipe: Recipe) -> dict[str, Mistake]:
    scaled = traits(recipe).weight_scale_format is not None
    return MISTAKES | SCALE_MISTAKES if scaled else MISTAKES


@pytest.mark.parametrize(
    ("recipe", "mistake"),
    [pytest.param(r, mistake, id=f"{r}, {name}") for r in TABLE for name, mistake in _mistakes(r).items()],
)
def test_mistakes_with_weights_are_caught(recipe: Recipe, mistake: Mistake) -> None:
    layer = _layer(recipe)
    assert _verdict(recipe, _y(layer, **mistake(layer.weights)), _y(layer)) is not None


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("recipe", FP4_WEIGHTS, ids=str)
def test_swapped_nibbles_are_caught(recipe: Recipe, name: str) -> None:
    layer = _layer(recipe)
    wrong = _y(layer, **{name: _swap_nibbles(getattr(layer.weights, name))})
    assert _verdict(recipe, wrong, _y(layer)) is not None


@every_recipe
def test_a_scale_error_of_5_percent_is_caught_as_one(recipe: Recipe) -> None:
    expected = _y(_layer(recipe))
    message = _verdict(recipe, expected * 1.05, expected)
    assert message is not None
    assert "|fitted_scale - 1|" in message


@every_recipe
def test_one_wrong_row_in_1000_is_caught_as_one(recipe: Recipe) -> None:
    expected = _y(_layer(recipe)).repeat(25, 1)
    assert expected.shape[0] == 1000
    actual = expected.clone()
    actual[777] = expected[776]
    message = _verdict(recipe, actual, expected)
    assert message is not None
    assert "worst_row" in message


@every_recipe
def test_a_dropped_clamp_is_caught(recipe: Recipe) -> None:
    layer = _layer(recipe, clamp=2.0)
    unclamped = dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, activation_clamp=None))
    assert _verdict(recipe, _y(unclamped), _y(layer)) is not None


@every_recipe
def test_a_dropped_shared_row_is_caught(recipe: Recipe) -> None:
    trace = _trace(_layer(recipe))
    rows = trace.rows[:, :-1]
    weights = trace.weights[:, :-1] if recipe.numerics == "trtllm_gen" else None
    assert _verdict(recipe, combine(rows, trace.valid[:, : rows.shape[1]], weights), trace.y) is not None


@pytest.mark.parametrize("recipe", [r for r in TABLE if r.numerics == "trtllm_gen"], ids=str)
def test_top_k_weights_in_the_wrong_place_are_caught(recipe: Recipe) -> None:
    """The combine that DeepGEMM's rows need, which carry their weight already."""
    trace = _trace(_layer(recipe))
    unweighted = trace.rows.float().sum(1).bfloat16()
    assert _verdict(recipe, unweighted, trace.y) is not None


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_ties_to_even_are_caught_in_the_pre_dispatch(kind: str) -> None:
    """The contract's E2M1 ties go toward zero, the hardware's to even."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    x[:, ::16] = 6.0  # the scales of every group multiply to 1
    x[2, 5] = 0.75
    got = quantize(x.bfloat16(), kind).q
    codes = formats.unpack_e2m1(got)
    assert codes[2, 5] == 1
    codes[2, 5] = formats.encode_e2m1(torch.tensor([0.75]), "even")[0]
    with pytest.raises(AssertionError, match=r"E2M1: first difference at \[2, 2\].* 1 of 128 elements differ"):
        assert_bytes_equal(formats.pack_e2m1(codes), got, "E2M1")


@pytest.mark.parametrize("recipe", [MXF4, NVFP4], ids=str)
def test_ties_toward_zero_are_caught_in_the_requantizer(recipe: Recipe) -> None:
    act = torch.tensor([[6.0, 0.75, -0.75, 1.75, 3.5, -0.0, -0.1, 0.25] * 4])
    got = requantize(act, recipe)[0]
    assert_bytes_equal(got, formats.pack_e2m1(formats.encode_e2m1(act, "even")))
    with pytest.raises(AssertionError, match=r"first difference at \[0, 0\]"):
        assert_bytes_equal(formats.pack_e2m1(formats.encode_e2m1(act, "toward_zero")), got)
