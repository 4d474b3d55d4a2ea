"""Exact-sum layers are the same bits under every sum a machine may form, and still show every mistake."""

import dataclasses
import functools
from dataclasses import dataclass

import pytest
import torch

from megamoe.oracle.exact_sum import exact_sum_layer, require_exact
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import (
    LayerTrace,
    Matmul,
    matmul_fp8_wgmma,
    matmul_fp32,
    matmul_fp64,
    matmul_truncated,
    moe_layer,
)
from megamoe.recipe import TABLE, Recipe, traits

FP8 = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
FP8_TRTLLM = Recipe("fp8xfp4", "mx32", "trtllm_gen")
FP8_BLOCK = Recipe("fp8xfp4", "block128", "deep_gemm_sm90")
FP8_TOKEN = Recipe("fp8xfp4", "token", "deep_gemm_sm90")
MXF4 = Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100")
NVFP4_GSF = Recipe("nvfp4xnvfp4", "nv16", "trtllm_gen")
BF16 = Recipe("bf16xbf16", "none", "deep_gemm_sm100")
SM90 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
every_recipe = pytest.mark.parametrize("recipe", TABLE, ids=str)


@dataclass(frozen=True)
class Case:
    """A layer with 8 experts and top-2, slots of shared experts beside them."""

    recipe: Recipe
    hidden: int = 256
    intermediate: int = 128
    tokens: int = 16
    num_shared_experts: int = 1
    shared_weight: str | None = None

    def make(self, seed: int = 0) -> Layer:
        slots = self.num_shared_experts if self.recipe.numerics == "trtllm_gen" else 0
        return exact_sum_layer(num_experts=8, top_k=2 + slots, seed=seed, **vars(self))


CASES = {
    **{str(recipe): Case(recipe) for recipe in TABLE},
    **{f"{recipe}, I 192": Case(recipe, intermediate=192, tokens=40, num_shared_experts=0) for recipe in TABLE},
    **{
        f"{recipe}, two shared in MXFP4": Case(recipe, shared_weight="e2m1", num_shared_experts=2, intermediate=192)
        for recipe in (FP8, FP8_TRTLLM, FP8_BLOCK, FP8_TOKEN)
    },
    "fp8xfp8, two shared": Case(SM90, intermediate=256, num_shared_experts=2),
    "mxf4xmxf4, none shared": Case(MXF4, hidden=512, num_shared_experts=0),
}


def _trace(layer: Layer, matmul: Matmul = matmul_fp64) -> LayerTrace:
    inputs = (layer.x, layer.topk_ids, layer.topk_weights)
    return moe_layer(*inputs, layer.weights, layer.spec, parameters=layer.parameters, matmul=matmul)


def _permuted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp32 sums over a random order of K, in chunks of 8 columns."""
    acc = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for columns in torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(1)).split(8):
        acc = acc + a[:, columns] @ b[:, columns].mT
    return acc


def _backwards(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return matmul_truncated(a.flip(1), b.flip(1))


SUMS = {
    "fp32": matmul_fp32,
    "fp32, permuted K": _permuted,
    "cut after each MMA": matmul_truncated,
    "cut, from the last column": _backwards,
    "FP8 WGMMA": matmul_fp8_wgmma,
}


def _assert_same_bits(actual: LayerTrace, expected: LayerTrace) -> None:
    for part in ("routed", "shared"):
        if getattr(expected, part) is None:
            continue
        for stage in ("h", "act", "act_q", "act_sf"):
            got, wanted = getattr(getattr(actual, part), stage), getattr(getattr(expected, part), stage)
            if wanted is not None:  # BF16 has no scales
                assert_bytes_equal(got, wanted, f"{part} {stage}")
    assert_bytes_equal(actual.rows, expected.rows, "rows")
    assert_bytes_equal(actual.y, expected.y, "y")


@functools.cache
def _made(case: Case) -> Layer:
    """Nobody writes to a layer."""
    return case.make()


@functools.cache
def _expected(case: Case, tokens: int) -> LayerTrace:
    return _trace(_first(_made(case), tokens))


def _first(layer: Layer, tokens: int) -> Layer:
    inputs = {name: getattr(layer, name)[:tokens] for name in ("x", "topk_ids", "topk_weights")}
    return dataclasses.replace(layer, **inputs)


@pytest.mark.parametrize("matmul", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_sum_gives_the_same_bits(case: Case, matmul: Matmul) -> None:
    tokens = 4 if matmul is matmul_fp8_wgmma else case.tokens  # it holds 33 times the accumulators
    _assert_same_bits(_trace(_first(_made(case), tokens), matmul), _expected(case, tokens))


@pytest.mark.parametrize("recipe", [FP8_TRTLLM, FP8_TOKEN, NVFP4_GSF, SM90, BF16], ids=str)
def test_at_the_widths_of_v4_flash(recipe: Recipe) -> None:
    layer = exact_sum_layer(recipe, tokens=8, hidden=4096, intermediate=2048, num_experts=1, top_k=1, seed=2)
    trace = _trace(layer)
    assert (trace.y != 0).float().mean() > 0.8
    _assert_same_bits(_trace(layer, matmul_fp32), trace)


@every_recipe
def test_many_seeds(recipe: Recipe) -> None:
    for seed in range(5):
        layer = Case(recipe, tokens=24).make(seed)
        _assert_same_bits(_trace(layer, matmul_fp32), _trace(layer))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layers_are_not_trivial(case: Case) -> None:
    layer, trace = _made(case), _expected(case, case.tokens)
    assert trace.routed is not None
    assert (trace.y != 0).float().mean() > 0.9
    assert trace.y.float().abs().unique().numel() > 100
    assert 0.1 < (trace.routed.act != 0).float().mean() < 0.5
    magnitudes = trace.routed.act.abs() if trace.routed.act_sf is None else trace.routed.act_sf
    assert magnitudes.unique().numel() >= 3
    w = layer.weights
    for scales in (trace.x.sf, w.w13.abs() if w.w13_scale is None else w.w13_scale, w.w2_scale):
        assert scales is None or scales.unique().numel() >= 2
    up = trace.routed.h[:, case.intermediate :]
    assert (up == 0).float().mean() > 0.2, "up values of 0 come from terms that cancel"
    assert layer.topk_weights.unique().numel() == 3


@every_recipe
def test_every_k_group_of_both_gemms_counts(recipe: Recipe) -> None:
    """A scale read from another group, or a group left out, changes y."""
    layer = Case(recipe, hidden=512, intermediate=256).make()
    expected = _trace(layer).y
    scaled = traits(recipe).weight_scale_format is not None
    for name in ("w13_scale", "w2_scale") if scaled else ("w13", "w2"):
        scale = getattr(layer.weights, name)
        width = 1 if scaled else 32
        for group in range(scale.shape[-1] // width):
            wrong = scale.clone()
            wrong[..., group * width : (group + 1) * width] = 0
            weights = dataclasses.replace(layer.weights, **{name: wrong})
            assert not torch.equal(_trace(dataclasses.replace(layer, weights=weights)).y, expected), (name, group)


def test_the_seed_decides() -> None:
    case = CASES[str(FP8)]
    first, again, other = case.make(5), case.make(5), case.make(6)
    assert_bytes_equal(again.x, first.x)
    assert_bytes_equal(again.weights.w13, first.weights.w13)
    assert not torch.equal(other.x, first.x)
    assert not torch.equal(other.weights.w13, first.weights.w13)


def test_hidden_must_be_whole_groups() -> None:
    with pytest.raises(ValueError, match="hidden=320 must be a multiple of the scale group, 128"):
        Case(SM90, hidden=320).make()


# Each condition refuses a layer that breaks it.


def _refused(layer: Layer, condition: str) -> None:
    with pytest.raises(ValueError, match=condition):
        require_exact(layer, _trace(layer))


def _with_weights(layer: Layer, **weights: torch.Tensor) -> Layer:
    return dataclasses.replace(layer, weights=dataclasses.replace(layer.weights, **weights))


@every_recipe
def test_a_random_layer_is_refused(recipe: Recipe) -> None:
    layer = random_layer(recipe, tokens=4, hidden=256, intermediate=128, num_experts=2, top_k=1)
    survives = traits(recipe).act == "bf16"
    _refused(layer, f"not an exact-sum layer: {'expert 0: a gate' if survives else 'x must survive its quantization'}")


def test_an_empty_group_is_refused() -> None:
    layer = _made(Case(FP8))
    x = layer.x.clone()
    x[3, 64:96] = 0
    _refused(dataclasses.replace(layer, x=x), r"every scale group of x must have .*; at \[3, 2\] it is 0")


def test_a_small_gate_is_refused() -> None:
    layer = _made(Case(FP8))
    scale = layer.weights.w13_scale.clone()
    scale[:, :128] -= 3
    _refused(_with_weights(layer, w13_scale=scale), r"expert \d: a gate must be 0 or >= 32")


def test_a_negative_gate_is_refused() -> None:
    layer = _made(Case(FP8))
    _refused(dataclasses.replace(layer, x=-layer.x), "a gate must be 0 or >= 32.0; at .* it is -")


def test_a_row_without_activated_values_is_refused() -> None:
    layer = _made(Case(FP8))
    weights = layer.topk_weights.clone()
    weights[:, 1] = 0
    _refused(dataclasses.replace(layer, topk_weights=weights), "every row must have a nonzero activated value")


def test_two_magnitudes_under_one_fp32_scale_are_refused() -> None:
    layer = _made(Case(SM90))
    scale = layer.weights.w13_scale.clone()
    scale[:, 1, 0] *= 2  # one K group of up weighs double
    _refused(_with_weights(layer, w13_scale=scale), "activated values of a scale group")


def test_a_magnitude_other_than_448_is_refused() -> None:
    layer = _made(Case(SM90))
    weights = 0.75 * layer.topk_weights
    _refused(dataclasses.replace(layer, topk_weights=weights), "that magnitude must be 448 times a power of two")


@pytest.mark.parametrize(("name", "gemm"), [("w13_scale", "GEMM 1"), ("w2_scale", "GEMM 2")])
def test_terms_too_far_apart_are_refused(name: str, gemm: str) -> None:
    layer = _made(Case(MXF4))
    scale = getattr(layer.weights, name).clone()
    scale[..., 0] += 9
    _refused(_with_weights(layer, **{name: scale}), f"{gemm} must stay within 13 bits of its unit")


def test_rows_too_far_apart_to_combine_are_refused() -> None:
    layer = _made(Case(MXF4))
    scale = layer.weights.w2_scale.clone()
    scale[::2] += 24
    _refused(_with_weights(layer, w2_scale=scale), "the combine must stay within 24 bits of its unit")
