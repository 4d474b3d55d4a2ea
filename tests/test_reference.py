"""The reference against the contract: known bytes, every rounding rule, and a second, naive layer with every option.

Bytes and formulas are those of DeepGEMM's MegaMoE, `sgl-deep-gemm` 0.1.7, and of FlashInfer's trtllm-gen MoE.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import (
    INVALID_ID,
    BlockFormat,
    LayerTrace,
    Matrix,
    activate,
    combine,
    dequantize_act,
    gemm,
    kind_of,
    local_ids,
    matmul_fp64,
    moe_layer,
    pre_dispatch_reference,
    quantize,
    requantize,
    slot_weights,
)
from megamoe.parameters import LayerParameters
from megamoe.recipe import TABLE, Recipe, traits

FP8 = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
FP8_TRTLLM = Recipe("fp8xfp4", "mx32", "trtllm_gen")
FP8_BLOCK = Recipe("fp8xfp4", "block128", "deep_gemm_sm90")
FP8_TOKEN = Recipe("fp8xfp4", "token", "deep_gemm_sm90")
MXF4 = Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100")
NVFP4 = Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100")
NVFP4_GSF = Recipe("nvfp4xnvfp4", "nv16", "trtllm_gen")
SM90 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
SM90_TRTLLM = Recipe("fp8xfp8", "block128", "trtllm_gen")
BF16 = Recipe("bf16xbf16", "none", "deep_gemm_sm100")
BF16_TRTLLM = Recipe("bf16xfp4", "none", "trtllm_gen")
every_recipe = pytest.mark.parametrize("recipe", TABLE, ids=str)

NAN, INF = math.nan, math.inf
F32 = np.float32


def _row(*values: float, width: int = 128) -> torch.Tensor:
    """[1, width]: the values, then zeros."""
    row = torch.zeros(1, width)
    row[0, : len(values)] = torch.tensor(values)
    return row


def _codes(q: torch.Tensor) -> list[int]:
    """E4M3 bytes, or E2M1 codes, of one row."""
    if q.dtype == torch.float8_e4m3fn:
        return q[0].view(torch.uint8).tolist()
    return [code for byte in q[0].tolist() for code in (byte & 0xF, byte >> 4)]


def _bits(x: torch.Tensor | float) -> int:
    return int(torch.as_tensor(x, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF


# Pre-dispatch


@dataclass(frozen=True)
class Vector:
    """First values of a row of zeros, and the first scale and codes they become."""

    kind: str
    values: tuple[float, ...]
    scale: int  # byte, or bits of fp32
    codes: tuple[int, ...]
    token_scale: int | None = None  # bits of fp32


VECTORS = {
    "mxfp8: amax 1": Vector("mxfp8", (1.0,), 119, (0x78,)),
    "mxfp8: amax 448": Vector("mxfp8", (448.0, -448.0), 127, (0x7E, 0xFE)),
    "mxfp8: zeros get the floor": Vector("mxfp8", (0.0,), 105, (0,)),
    "mxfp8: -0 is kept": Vector("mxfp8", (-0.0, 448.0), 127, (0x80, 0x7E)),
    "mxfp8: tie to even": Vector("mxfp8", (448.0, 17.0, 19.0), 127, (0x7E, 0x58, 0x5A)),
    "mxfp8: NaN is not the amax": Vector("mxfp8", (NAN, 448.0), 127, (0x7F, 0x7E)),
    "mxfp8: Inf zeroes the rest": Vector("mxfp8", (INF, 448.0, -1.0), 254, (0x7F, 0, 0x80)),
    "mxfp4: amax 1": Vector("mxfp4", (1.0,), 125, (6,)),
    "mxfp4: amax 6": Vector("mxfp4", (6.0, -6.0), 127, (7, 15)),
    "mxfp4: zeros get the floor": Vector("mxfp4", (0.0,), 112, (0,)),
    "mxfp4: ties toward zero": Vector("mxfp4", (6.0, 0.25, 0.75, 1.25, 1.75), 127, (7, 0, 1, 2, 3)),
    "mxfp4: larger ties": Vector("mxfp4", (6.0, 2.5, 3.5, 5.0, -5.0), 127, (7, 4, 5, 6, 14)),
    "mxfp4: no -0": Vector("mxfp4", (6.0, -0.0, -0.25, -0.75), 127, (7, 0, 0, 9)),
    "mxfp4: NaN is 0": Vector("mxfp4", (6.0, NAN), 127, (7, 0)),
    "nvfp4: zeros": Vector("nvfp4", (0.0,), 0, (0,), _bits(3.72023798e-08)),
    "nvfp4: the row's maximum": Vector("nvfp4", (2688.0, -1344.0, 672.0), 0x7E, (7, 13, 3), _bits(1.0)),
    "nvfp4: Inf": Vector("nvfp4", (INF, 1.0), 0x7F, (0, 0), _bits(INF)),
    "fp8_block128: amax 1": Vector("fp8_block128", (1.0,), 0x3B124925, (0x7E,)),
    "fp8_block128: zeros get the floor": Vector("fp8_block128", (0.0,), 0x2A7B5123, (0,)),
    "fp8_token: amax 1 of the row": Vector("fp8_token", (1.0,), 0x3B124925, (0x7E,)),
    "fp8_token: zeros get the floor": Vector("fp8_token", (0.0,), 0x2A7B5123, (0,)),
    "mxfp8_trtllm: no floor": Vector("mxfp8_trtllm", (2.0**-40,), 127 - 48, (0x78,)),
    "mxfp8_trtllm: zeros have byte 0": Vector("mxfp8_trtllm", (0.0, -0.0), 0, (0, 0x80)),
    "mxfp8_trtllm: FlashInfer's 57": Vector(
        "mxfp8_trtllm", (57.0, -3.3, 0.01, 28.0, -56.0, 1.0, 0.4375, -0.0), 125, (118, 213, 18, 110, 246, 72, 62, 128)
    ),
    "mxfp8_trtllm: FlashInfer's 56": Vector(
        "mxfp8_trtllm", (56.0, -3.3, 0.01, 28.0, -56.0, 1.0, 0.4375, -0.0), 124, (126, 221, 26, 118, 254, 80, 70, 128)
    ),
    "fp8_block128: scale below 1e-4": Vector("fp8_block128", (2.0**-20 * 448,), _bits(2.0**-20), (0x7E,)),
}  # fmt: skip


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_known_bytes(vector: Vector) -> None:
    got = quantize(_row(*vector.values).bfloat16(), vector.kind)
    first = got.sf[0, 0]
    assert (int(first) if got.sf.dtype == torch.uint8 else _bits(first)) == vector.scale
    assert tuple(_codes(got.q)[: len(vector.codes)]) == vector.codes
    assert (None if got.token_scale is None else _bits(got.token_scale[0])) == vector.token_scale


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "nvfp4", "fp8_block128"])
def test_quantize_against_numpy(kind: str) -> None:
    """The formulas once more in NumPy, whose fp32 division is IEEE, over many magnitudes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator) * torch.exp2(40 * torch.rand(64, 1, generator=generator) - 20)
    x = x.bfloat16()
    v, f32 = x.float().numpy(), np.float32
    got = quantize(x, kind)
    group = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "fp8_block128": 128}[kind]
    amax = np.abs(v).reshape(64, -1, group).max(-1)
    if kind == "fp8_block128":
        sf = np.maximum(amax, f32(1e-10)) / f32(448)
        inverse = f32(1) / sf
        assert_bytes_equal(got.sf, torch.from_numpy(sf))
    elif kind == "nvfp4":
        pts = np.maximum(np.abs(v).max(-1), f32(1e-4)) / f32(2688)
        ratio = amax / (f32(6) * pts)[:, None]
        sf = torch.from_numpy(ratio).to(torch.float8_e4m3fn)  # at most 448: no saturation needed
        assert_bytes_equal(got.sf, sf.view(torch.uint8))
        assert got.token_scale is not None
        assert_bytes_equal(got.token_scale, torch.from_numpy(pts))
        product = sf.float().numpy() * pts[:, None]
        inverse = np.where(product > 0, f32(1) / np.where(product > 0, product, f32(1)), f32(0))
    else:
        raw = np.maximum(amax, f32(1e-4)) / f32(448 if kind == "mxfp8" else 6)
        exponent = np.ceil(np.log2(raw.astype(np.float64))).astype(int)
        assert_bytes_equal(got.sf, torch.from_numpy((exponent + 127).astype(np.uint8)))
        inverse = np.exp2(-exponent).astype(f32)
    scaled = torch.from_numpy(v * np.repeat(inverse, group, axis=1))
    if got.q.dtype == torch.float8_e4m3fn:
        assert_bytes_equal(got.q, scaled.clamp(-448, 448).to(torch.float8_e4m3fn))
        return
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(np.abs(scaled.numpy()[..., None].astype(np.float64)) - magnitudes)
    code = distance.argmin(-1)  # the first of two equal distances: toward zero
    code = code + 8 * ((scaled.numpy() < 0) & (code > 0))
    assert_bytes_equal(got.q, torch.from_numpy((code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8)))


def test_quantize_with_a_global_factor_against_numpy() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, :16], x[1, :2] = 0, torch.tensor([-0.0, 6.0])
    v, gsf = x.float().numpy(), F32(37.3)
    got = quantize(x, "nvfp4_gsf", x_gsf=torch.tensor([37.3]))
    raw = (np.abs(v).reshape(64, 16, 16).max(-1) * (F32(1) / F32(6))) * gsf
    sf = torch.from_numpy(raw).to(torch.float8_e4m3fn)
    assert_bytes_equal(got.sf, sf.view(torch.uint8))
    decoded = sf.float().numpy()
    factor = np.where(decoded > 0, gsf / np.where(decoded > 0, decoded, F32(1)), F32(0))
    scaled = v * np.repeat(factor, 16, axis=1)
    distance = np.abs(np.abs(scaled[..., None].astype(np.float64)) - [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    low = distance.argmin(-1)  # the first of two equal distances
    tie = (np.sort(distance, -1)[..., 0] == np.sort(distance, -1)[..., 1]) & (low % 2 == 1)
    code = (low + tie) | 8 * np.signbit(scaled)
    assert_bytes_equal(got.q, torch.from_numpy((code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8)))
    assert got.token_scale is None


def test_bf16_is_not_quantized() -> None:
    x = torch.tensor([[1.0, -0.0, NAN, INF]]).bfloat16()
    got = quantize(x, "bf16")
    assert_bytes_equal(got.q, x)
    assert got.sf is None
    assert got.token_scale is None


def test_amax_floor_and_group_can_be_set() -> None:
    x = _row(1e-6, 1e-6).bfloat16()
    assert quantize(x, "mxfp8").sf[0, 0] == 105
    assert quantize(x, "mxfp8", amax_floor=1e-10).sf[0, 0] == 127 - 28  # 1e-6 / 448 = 2^-28.7
    assert quantize(x, "mxfp8", group=64).sf.shape == (1, 2)
    with pytest.raises(ValueError, match="kind='int8' is unknown; allowed: mxfp8, "):
        quantize(x, "int8")


def test_pre_dispatch_passes_ids_and_weights_on() -> None:
    ids = torch.tensor([[0, -1], [2, 1]], dtype=torch.int32)
    weights = torch.tensor([[0.3, 0.7], [0.1, 0.9]])
    x = torch.ones(2, 128).bfloat16()
    plain = pre_dispatch_reference(x, ids, weights, kind="mxfp8", rows=4)
    assert_bytes_equal(plain.ids, torch.tensor([[0, -1], [2, 1], [-1, -1], [-1, -1]]))
    assert_bytes_equal(plain.weights, torch.cat([weights, torch.zeros(2, 2)]))
    assert plain.x.q.shape[0] == 2
    scales = torch.tensor([1.1, 1.2, 1.3])
    scaled = pre_dispatch_reference(x, ids, weights, kind="mxfp8", expert_scales=scales)
    expected = torch.stack(
        [weights[0, 0] * scales[0], weights[0, 1], weights[1, 0] * scales[2], weights[1, 1] * scales[1]]
    )
    assert_bytes_equal(scaled.weights.flatten(), expected)
    factor = pre_dispatch_reference(x, ids, weights, kind="fp8_block128", routed_scaling_factor=2.5)
    assert_bytes_equal(factor.weights, weights * torch.tensor(2.5))


# Requantization between the GEMMs


def test_requantize_has_no_floor_under_sm100() -> None:
    for recipe in (FP8, MXF4, NVFP4):
        q, sf = requantize(torch.zeros(1, 64), recipe)
        assert sf.unique().tolist() == [0]
        assert q.view(torch.uint8).unique().tolist() == [0]
    tiny = requantize(_row(2.0**-40), FP8)
    assert (int(tiny[1][0, 0]), _codes(tiny[0])[0]) == (127 - 48, 0x78)  # 256 · 2^-48


def test_requantize_rounds_e2m1_ties_to_even_and_keeps_minus_zero() -> None:
    values = (6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0, -0.25, -0.75)
    expected = [7, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10]
    q, sf = requantize(_row(*values), MXF4)
    assert (int(sf[0, 0]), _codes(q)[:11]) == (127, expected)
    q, sf = requantize(_row(*values), NVFP4)
    assert (int(sf[0, 0]), _codes(q)[:11]) == (0x38, expected)  # 1.0 in UE4M3: there is no outer scale


def test_nvfp4_requantization_divides_by_the_rounded_scale() -> None:
    q, sf = requantize(_row(100.0, 50.0, 25.0, -12.5), NVFP4)
    assert int(sf[0, 0]) == 0x58  # 16.67 rounds to 16
    assert _codes(q)[:4] == [7, 5, 3, 10]  # 6.25, 3.125, 1.5625 and -0.78125 of it


def test_sm90_requantization_multiplies_by_the_rounded_reciprocal() -> None:
    amax = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    act = torch.cat([amax, torch.zeros(1000, 63)], dim=1)
    _, sf = requantize(act, SM90)
    assert_bytes_equal(sf, torch.from_numpy(amax.numpy() * (np.float32(1) / np.float32(448))))
    assert (sf != torch.from_numpy(amax.numpy() / np.float32(448))).float().mean() > 0.2
    assert _bits(requantize(torch.zeros(1, 64), SM90)[1][0, 0]) == _bits(
        np.float32(1e-10) * (np.float32(1) / np.float32(448))
    )
    assert requantize(torch.ones(1, 128), SM90)[1].shape == (1, 2)


@every_recipe
def test_requantization_of_a_tail_ignores_what_is_not_there(recipe: Recipe) -> None:
    act = torch.randn(3, 128, generator=torch.Generator().manual_seed(4))
    q, sf = requantize(act[:, :80], recipe)
    padded = torch.cat([act[:, :80], torch.zeros(3, 48)], dim=1)
    whole_q, whole_sf = requantize(padded, recipe)
    assert_bytes_equal(q.view(torch.uint8), whole_q.view(torch.uint8)[:, : q.view(torch.uint8).shape[1]])
    if sf is not None and whole_sf is not None:
        assert_bytes_equal(sf, whole_sf[:, : sf.shape[1]])


# SwiGLU and combine


def _swiglu(gate: float, up: float, recipe: Recipe, clamp: float | None = None, **options: object) -> float:
    return activate(torch.tensor([gate]), torch.tensor([up]), recipe.numerics, clamp, **options).item()  # type: ignore[arg-type]


def test_only_sm100_rounds_gate_and_up_to_bf16() -> None:
    up = 1 + 2.0**-9
    assert _swiglu(64.0, up, FP8) == 64.0
    assert _swiglu(64.0 * up, 1.0, FP8) == 64.0
    for recipe in (SM90, FP8_TRTLLM):
        assert _swiglu(64.0, up, recipe) == 64.0 * up
        assert _swiglu(64.0 * up, 1.0, recipe) == 64.0 * up
    with pytest.raises(ValueError, match="numerics='deep_gemm' is unknown; allowed: deep_gemm_sm100"):
        activate(torch.ones(1), torch.ones(1), "deep_gemm", None)


@pytest.mark.parametrize("recipe", [FP8, SM90, FP8_TRTLLM], ids=["SM100", "SM90", "trtllm-gen"])
def test_swiglu_in_ieee_steps(recipe: Recipe) -> None:
    gate, up = (torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)) * 5).bfloat16().float()
    expected = (gate.numpy() * _sigmoid(gate.numpy())) * up.numpy()
    assert_bytes_equal(activate(gate, up, recipe.numerics, None), torch.from_numpy(expected))


def _sigmoid(slope: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(−slope) = Inf: the sigmoid is 0
        return F32(1) / (F32(1) + np.exp(-slope.astype(np.float64)).astype(F32))


def _tanh(x: np.ndarray) -> np.ndarray:
    return np.tanh(x.astype(np.float64)).astype(F32)


def test_trtllm_gen_activations_in_ieee_steps() -> None:
    """Per row: a clamp in raw units, gate_scale on the clamped gate alone, then alpha and beta; +inf clamps nothing."""
    generator = torch.Generator().manual_seed(1)
    gate, up = 30 * torch.randn(2, 4, 500, generator=generator)
    rows = {name: 0.5 + torch.rand(4, 1, generator=generator) for name in ("alpha", "beta", "gate_scale")}
    clamp = torch.tensor([[20.0], [INF], [0.0], [35.0]])
    g, u, c = gate.numpy(), up.numpy(), clamp.numpy()
    alpha, beta, scale = (rows[name].numpy() for name in ("alpha", "beta", "gate_scale"))

    g_scaled, u_clamped = np.minimum(g, c) * scale, np.clip(u, -c, c)
    expected = (g_scaled * _sigmoid(alpha * g_scaled)) * (u_clamped + beta)
    got = activate(gate, up, "trtllm_gen", clamp, activation="swigluoai", **rows)
    assert_bytes_equal(got, torch.from_numpy(expected))

    g_scaled = g * scale
    expected = ((alpha * _tanh(g_scaled / alpha)) * _sigmoid(g_scaled)) * (beta * _tanh(u / beta))
    got = activate(gate, up, "trtllm_gen", None, activation="situ", **rows)
    assert_bytes_equal(got, torch.from_numpy(expected))


@pytest.mark.parametrize("recipe", [FP8, SM90, FP8_TRTLLM], ids=["SM100", "SM90", "trtllm-gen"])
@pytest.mark.parametrize(("activation", "alpha", "beta"), [("swigluoai", 1.702, 1.0), ("situ", 4.0, 25.0)])
def test_activations_without_alpha_and_beta_have_their_own(
    activation: str, alpha: float, beta: float, recipe: Recipe
) -> None:
    given = _swiglu(1.5, 3.0, recipe, activation=activation, alpha=alpha, beta=beta)
    assert _swiglu(1.5, 3.0, recipe, activation=activation) == given
    assert _swiglu(1.5, 3.0, recipe, activation=activation, alpha=1.1 * alpha) != given
    assert _swiglu(1.5, 3.0, recipe, activation=activation, beta=1.1 * beta) != given


def test_known_activations() -> None:
    """Rounded, from the formulas: 2·σ(3.404)·4 and 4·tanh(½)·σ(2)·25·tanh(0.12)."""
    assert _swiglu(2.0, 3.0, FP8, activation="swigluoai") == pytest.approx(7.742634, abs=1e-5)
    assert _swiglu(2.0, 3.0, FP8_TRTLLM, activation="situ") == pytest.approx(4.861067, abs=1e-5)


def test_clamp_limits_gate_from_above_and_up_on_both_sides() -> None:
    for recipe in (FP8, SM90, FP8_TRTLLM):
        assert _swiglu(100.0, 1.0, recipe, clamp=64.0) == 64.0
        assert _swiglu(-100.0, 1.0, recipe, clamp=64.0) == _swiglu(-100.0, 1.0, recipe)
        assert _swiglu(64.0, 100.0, recipe, clamp=64.0) == 64.0 * 64
        assert _swiglu(64.0, -100.0, recipe, clamp=64.0) == -64.0 * 64
        assert _swiglu(100.0, 100.0, recipe, clamp=INF) == 1e4
        assert _swiglu(100.0, 100.0, recipe, clamp=0.0) == 0.0
    limit = 64 * (1 + 2.0**-9)  # SM100 rounds the limit to BF16 too
    assert _swiglu(100.0, 1.0, FP8, clamp=limit) == 64.0
    assert _swiglu(100.0, 1.0, SM90, clamp=limit) == _swiglu(100.0, 1.0, FP8_TRTLLM, clamp=limit) == limit


def test_clamp_replaces_nan() -> None:
    assert _swiglu(NAN, 1.0, FP8, clamp=64.0) == _swiglu(NAN, 1.0, SM90, clamp=64.0) == 64.0
    assert _swiglu(64.0, NAN, FP8, clamp=64.0) == -64.0 * 64
    assert _swiglu(64.0, NAN, SM90, clamp=64.0) == _swiglu(64.0, NAN, FP8_TRTLLM, clamp=64.0) == 64.0 * 64
    for recipe in (FP8, SM90, FP8_TRTLLM):
        for clamp in (None, INF):
            assert math.isnan(_swiglu(NAN, 1.0, recipe, clamp=clamp))
            assert math.isnan(_swiglu(1.0, NAN, recipe, clamp=clamp))
    beyond_bf16 = 3.4e38  # rounds to infinity where limits are BF16: no clamp then
    assert math.isnan(_swiglu(NAN, 1.0, FP8, clamp=beyond_bf16))
    assert math.isnan(_swiglu(1.0, NAN, FP8, clamp=beyond_bf16))
    for recipe in (SM90, FP8_TRTLLM):
        assert not math.isnan(_swiglu(NAN, 1.0, recipe, clamp=beyond_bf16))
    per_expert = activate(torch.tensor([NAN, NAN]), torch.ones(2), "trtllm_gen", torch.tensor([64.0, INF]))
    assert per_expert[0] == 64.0
    assert per_expert[1].isnan()


def test_combine_adds_ascending_slots_then_the_shared_row_and_rounds_once() -> None:
    big = 2.0**24
    rows = torch.tensor([big, 1.0, -big, 3.0])[None, :, None].bfloat16()
    every = torch.ones(1, 3, dtype=torch.bool)
    assert combine(rows, every).item() == 3.0  # (2^24 + 1) - 2^24 = 0
    assert combine(rows[:, [0, 2, 1, 3]], every).item() == 4.0
    halves = torch.tensor([1.0, 2.0**-8, 2.0**-8])[None, :, None].bfloat16()
    assert combine(halves, every).item() == 1 + 2.0**-7  # one rounding at the end keeps both halves


def test_combine_skips_poison_and_gives_plus_zero() -> None:
    rows = torch.tensor([NAN, -0.0, NAN])[None, :, None].bfloat16()
    got = combine(rows, torch.tensor([[False, True, False]]))
    assert_bytes_equal(got, torch.zeros(1, 1).bfloat16())
    assert_bytes_equal(combine(rows, torch.zeros(1, 3, dtype=torch.bool)), torch.zeros(1, 1).bfloat16())


def test_combine_with_weights_rounds_each_product_and_skips_what_is_not_valid() -> None:
    """trtllm-gen: the weight of a slot nobody serves may be anything."""
    rows = torch.tensor([3.0, 5.0, NAN])[None, :, None].bfloat16()
    third = torch.tensor(1 / 3)
    weights = torch.tensor([[third, -third, NAN]])
    expected = F32(third) * F32(3) + F32(-third) * F32(5)
    got = combine(rows, torch.tensor([[True, True, False]]), weights)
    assert_bytes_equal(got, torch.tensor([[expected]]).bfloat16())
    weights[0, :2] = INF
    assert_bytes_equal(combine(rows, torch.zeros(1, 3, dtype=torch.bool), weights), torch.zeros(1, 1).bfloat16())
    # The product is rounded before it is added: (1 + 2^-23) · 3 lies between two numbers and becomes 3 + 4 · 2^-23.
    rows = torch.tensor([-3.0, 3.0])[None, :, None].bfloat16()
    weights = torch.tensor([[1.0, 1 + 2.0**-23]])
    assert combine(rows, torch.ones(1, 2, dtype=torch.bool), weights).item() == 4 * 2.0**-23


# GEMM


def _ones(columns: int) -> Matrix:
    """One row of MXFP4 ones, of scale 1."""
    elements = torch.full((1, columns // 2), 0x22, dtype=torch.uint8)
    scales = torch.full((1, columns // 32), 127, dtype=torch.uint8)
    return Matrix(elements, scales, BlockFormat("e2m1", "ue8m0", 1, 32))


def test_fp32_scales_are_promoted_in_ascending_k_with_one_fma_each() -> None:
    """Three blocks of 128 columns, p = 1, 1 and −1: fl(fl(2^24 + 1·1) − 2^24·1) = 0 where any other order gives 1."""
    act, rows = BlockFormat("e4m3", "fp32", 1, 128), torch.zeros(3, 128)
    rows[:, 5] = torch.tensor([1.0, 1.0, -1.0])
    sf = torch.tensor([[2.0**24, 1.0, 2.0**24]])
    for order, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        q = rows[order].reshape(1, -1).to(torch.float8_e4m3fn)
        assert gemm(q, sf[:, order], act, _ones(384), matmul_fp64).item() == expected


def test_ue8m0_weight_scales_are_exact_within_a_block_of_fp32_scales() -> None:
    """448·2^-1 − 448·2^-1 + 2^-20 within 128 columns; rounding each group's part to fp32 of that size would lose it."""
    q = torch.zeros(1, 128)
    q[0, [0, 32, 64]] = torch.tensor([448.0, -448.0, 1.0])
    scales = torch.tensor([[126, 126, 127 - 20, 127]], dtype=torch.uint8)
    weight = _ones(128)._replace(scale=scales)
    for cols, sf in ((128, [[3.0]]), (0, [[3.0]]), (64, [[3.0, 3.0]])):
        act = BlockFormat("e4m3", "fp32", 1, cols)
        got = gemm(q.to(torch.float8_e4m3fn), torch.tensor(sf), act, weight, matmul_fp64)
        assert got.item() == pytest.approx(3 * 2.0**-20)


def test_a_scale_per_token_is_one_product_at_the_end() -> None:
    third = F32(1) / F32(3)
    q = torch.zeros(1, 256)
    q[0, [0, 128]] = torch.tensor([5.0, 7.0])
    act = BlockFormat("e4m3", "fp32", 1, 0)
    got = gemm(q.to(torch.float8_e4m3fn), torch.tensor([[third]]), act, _ones(256), matmul_fp64)
    assert got.item() == third * F32(12)
    # Beside it a dense shared E4M3 weight: fma(sa · sw, p, acc) per 128 columns.
    sw = np.array([F32(0.7), F32(1.3)])
    ones = torch.ones(1, 256).to(torch.float8_e4m3fn)
    dense = Matrix(ones, torch.from_numpy(sw)[None], BlockFormat("e4m3", "fp32", 128, 128))
    got = gemm(q.to(torch.float8_e4m3fn), torch.tensor([[third]]), act, dense, matmul_fp64)
    first = F32(np.float64(third * sw[0]) * 5)
    assert got.item() == F32(np.float64(third * sw[1]) * 7 + np.float64(first))


# Ids and weights


def _local_by_hand(i: int, num_experts: int, offset: int, local: int, shared: int, table: list[int] | None) -> int:
    if i < 0:
        return i
    if i < num_experts:
        if table is not None:
            return table[i] if -1 <= table[i] < local else INVALID_ID
        return i - offset if offset <= i < offset + local else -1
    return local + i - num_experts if i < num_experts + shared else INVALID_ID


ID_MAPS = {
    "offset": (8, 2, 3, 0, None),
    "offset and shared slots": (8, 5, 3, 2, None),
    "shared slots": (8, 0, 8, 1, None),
    "map": (8, 0, 3, 0, [-1, 2, 0, -1, 1, 3, -2, 7]),
    "map and shared slots": (8, 0, 3, 2, [2, -1, -1, 0, -1, -1, 1, -1]),
    "map of all": (8, 0, 8, 0, [3, 1, 0, 2, 7, 6, 5, 4]),
}


@pytest.mark.parametrize("arguments", ID_MAPS.values(), ids=ID_MAPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_local_ids(arguments: tuple, dtype: torch.dtype) -> None:
    num_experts, offset, local, shared, table = arguments
    ids = [*range(-3, 13), 2**31 - 1, -(2**31)] + ([2**40, -(2**40)] if dtype == torch.int64 else [])
    got = local_ids(
        torch.tensor([ids], dtype=dtype),
        num_experts=num_experts,
        num_local_experts=local,
        expert_offset=offset,
        shared_slots=shared,
        expert_map=None if table is None else torch.tensor(table, dtype=torch.int32),
    )
    assert got.dtype == torch.int64
    assert got[0].tolist() == [_local_by_hand(i, *arguments) for i in ids]


def test_ids_that_are_local_already_stay_verbatim() -> None:
    ids = torch.tensor([[0, 7, 8, 1000, -1, -5, 2**40]])
    assert_bytes_equal(local_ids(ids, num_experts=8, num_local_experts=8), ids)


def test_shared_slots_take_no_factor() -> None:
    ids = torch.tensor([[0, 3, 4, 5, 6, -1]])
    weights = torch.tensor([[0.3, 0.7, 0.9, 0.6, 0.2, 0.8]])
    scales = torch.tensor([1.1, 1.2, 1.3, 1.4])
    got = slot_weights(ids, weights, num_experts=4, shared_slots=2, expert_scales=scales, routed_scaling_factor=2.5)
    w, s, f = weights.numpy(), scales.numpy(), F32(2.5)
    expected = [w[0, 0] * s[0] * f, w[0, 1] * s[3] * f, w[0, 2], w[0, 3], w[0, 4] * f, w[0, 5] * f]
    assert_bytes_equal(got, torch.tensor([expected]))


# The whole layer


def _layer(recipe: Recipe, **options: object) -> Layer:
    sizes = dict(tokens=6, hidden=256, intermediate=128, num_experts=4, top_k=2, seed=7)
    return random_layer(recipe, **(sizes | options))  # type: ignore[arg-type]


def _trace(layer: Layer, **options: object) -> LayerTrace:
    return moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec, parameters=layer.parameters, **options
    )  # type: ignore[arg-type]  # fmt: skip


class Naive:
    """One slot after the other in fp64, from the rules; only the bytes of both quantizations are the reference's."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.spec, self.recipe = layer, layer.spec, layer.spec.recipe
        self.trtllm = self.recipe.numerics == "trtllm_gen"
        p = layer.parameters
        gsf = {} if p.x_gsf is None else {"x_gsf": p.x_gsf}
        x = quantize(layer.x, kind_of(self.recipe), **gsf)
        self.x = self.matrix(x.q, x.sf, act=True)
        if x.token_scale is not None:
            self.x = self.x * x.token_scale.double().numpy()[:, None]

    def matrix(self, q: torch.Tensor, sf: torch.Tensor | None, *, act: bool = False) -> np.ndarray:
        """fp64 values of elements and scales; an fp32 scale covers 128 rows of a weight."""
        if q.dtype == torch.uint8:
            table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            codes = np.stack([q.numpy() & 0xF, q.numpy() >> 4], axis=-1).reshape(q.shape[0], -1)
            values = table[codes & 7] * np.where(codes & 8, -1, 1)
        else:
            values = q.double().numpy()
        if sf is None:
            return values
        if sf.dtype == torch.float32:
            scales = sf.double().numpy()
        elif self.recipe.mma_type == "nvfp4xnvfp4":
            scales = sf.view(torch.float8_e4m3fn).double().numpy()
        else:
            scales = np.exp2(sf.numpy().astype(np.float64) - 127)
        columns = values.shape[1]
        group = next(g for g in (16, 32, 64, 128, columns) if -(-columns // g) == sf.shape[1])
        if sf.dtype == torch.float32 and not act:
            group, scales = 128, scales.repeat(128, axis=0)[: values.shape[0]]
        return values * scales.repeat(group, axis=1)[:, :columns]

    def gate_and_up(self, w13: torch.Tensor, sf: torch.Tensor | None, layout: str) -> tuple[np.ndarray, np.ndarray]:
        if layout == "interleaved":
            whole = self.matrix(w13, sf)
            return whole[0::2], whole[1::2]
        half, half_sf = w13.shape[0] // 2, 0 if sf is None else sf.shape[0] // 2
        first = self.matrix(w13[:half], None if sf is None else sf[:half_sf])
        return first, self.matrix(w13[half:], None if sf is None else sf[half_sf:])

    def shared_row(self, token: int) -> np.ndarray:
        """Of DeepGEMM's dense MLP."""
        w = self.layer.weights
        gate_w, up_w = self.gate_and_up(w.shared_w13, w.shared_w13_scale, "gate_up")
        act = self.activate(gate_w @ self.x[token], up_w @ self.x[token], -1)
        return self.product(act, w.shared_w2, w.shared_w2_scale)

    def row(self, token: int, slot: int) -> tuple[float, np.ndarray] | None:
        """Weight and row of a slot, None where this rank has no expert for it."""
        spec, w, p = self.spec, self.layer.weights, self.layer.parameters
        i = int(self.layer.topk_ids[token, slot])
        table = None if p.expert_map is None else p.expert_map.tolist()
        local, shared = spec.num_local_experts, spec.shared_slots
        e = _local_by_hand(i, spec.num_experts, spec.local_expert_offset, local, shared, table)
        if not 0 <= e < local + shared:
            return None
        weight = float(self.layer.topk_weights[token, slot])
        if i < spec.num_experts:
            weight *= 1.0 if p.expert_scales is None else float(p.expert_scales[i])
            weight *= p.routed_scaling_factor
        source = [w.w13, w.w13_scale, w.w2, w.w2_scale]
        if e >= local:
            source = [w.shared_w13, w.shared_w13_scale, w.shared_w2, w.shared_w2_scale]
        at = e - local if e >= local else e
        w13, s13, w2, s2 = (None if t is None else t.view(torch.uint8)[at].view(t.dtype) for t in source)
        gate_w, up_w = self.gate_and_up(w13, s13, w.w13_layout)
        gate, up = gate_w @ self.x[token], up_w @ self.x[token]
        raw = 1.0 if p.x_gsf is None else 1 / float(p.x_gsf)
        a_gate, a_up = (raw, raw) if w.l1_alphas is None else w.l1_alphas[e].tolist()
        bias = np.zeros(2 * len(gate)) if w.w13_bias is None else w.w13_bias[e].double().numpy()
        interleaved = w.w13_layout == "interleaved"
        b_gate, b_up = (bias[0::2], bias[1::2]) if interleaved else (bias[: len(gate)], bias[len(gate) :])
        act_scale = 1.0 if w.l2_act_scales is None else float(w.l2_act_scales[e])
        l2_alpha = 1.0 if w.l2_alphas is None else float(w.l2_alphas[e])
        w2_bias = 0.0 if w.w2_bias is None else w.w2_bias[e].double().numpy()
        if self.trtllm:
            act = self.activate(gate + b_gate, up + b_up, e, a_gate) * a_up * act_scale
            return weight, (self.product(act, w2, s2) + w2_bias) * l2_alpha
        act = self.activate(gate * a_gate + b_gate, up * a_up + b_up, e) * weight * act_scale
        return 1.0, self.product(act, w2, s2) * l2_alpha + weight * w2_bias

    def activate(self, gate: np.ndarray, up: np.ndarray, e: int, gate_scale: float = 1.0) -> np.ndarray:
        spec, p = self.spec, self.layer.parameters
        if self.recipe.numerics == "deep_gemm_sm100":
            gate, up = (torch.from_numpy(v).float().bfloat16().double().numpy() for v in (gate, up))
        own = {"swiglu": (1, 0), "swigluoai": (1.702, 1), "situ": (4, 25)}[spec.activation]
        numbers = (spec.activation_clamp, spec.activation_alpha, spec.activation_beta)
        clamp, alpha, beta = (
            float(tensor[e]) if tensor is not None else number
            for tensor, number in zip((p.clamp, p.alpha, p.beta), numbers)
        )
        alpha, beta = own[0] if alpha is None else alpha, own[1] if beta is None else beta
        if clamp is not None:
            gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
        gate = gate * gate_scale
        if spec.activation == "situ":
            return alpha * np.tanh(gate / alpha) / (1 + np.exp(-gate)) * beta * np.tanh(up / beta)
        return gate / (1 + np.exp(-alpha * gate)) * (up + beta)

    def product(self, act: np.ndarray, w2: torch.Tensor, sf: torch.Tensor | None) -> np.ndarray:
        q, act_sf = requantize(torch.from_numpy(act).float()[None], self.recipe)
        return self.matrix(w2, sf) @ self.matrix(q, act_sf, act=True)[0]


def _assert_naive(layer: Layer) -> None:
    """What fp64 rounds differently moves one element of the intermediate at most."""
    trace, naive = _trace(layer), Naive(layer)
    seen = 0
    for token in range(len(layer.x)):
        total = np.zeros(layer.spec.hidden)
        for slot in range(layer.spec.top_k):
            weighted = naive.row(token, slot)
            assert bool(trace.valid[token, slot]) == (weighted is not None)
            if weighted is not None:
                _assert_close(trace.rows[token, slot], weighted[1])
                total += weighted[0] * weighted[1]
                seen += 1
        if layer.spec.shared_intermediate:
            _assert_close(trace.rows[token, layer.spec.top_k], naive.shared_row(token))
            total += naive.shared_row(token)
        if trace.valid[token].any() or layer.spec.shared_intermediate:
            _assert_close(trace.y[token], total)
    assert seen >= 2, "slots that this rank serves"


def _assert_close(actual: torch.Tensor, expected: np.ndarray) -> None:
    error = np.linalg.norm(actual.double().numpy() - expected) / np.linalg.norm(expected)
    assert error < 2.0**-8, f"BF16 rounding leaves at most 2^-9 per element, this is {error:.2g}"


@pytest.mark.parametrize("intermediate", [128, 192])
@pytest.mark.parametrize(
    ("recipe", "shared_weight"),
    [(FP8, "e2m1"), (FP8_TRTLLM, "e2m1"), (FP8_BLOCK, "e2m1"), (FP8_TOKEN, "e2m1"), *((r, None) for r in TABLE)],
    ids=lambda value: str(value or ""),
)
def test_layer_against_a_naive_one(recipe: Recipe, shared_weight: str | None, intermediate: int) -> None:
    """With two shared experts of every format: dense, or in two slots."""
    _assert_naive(
        _layer(
            recipe,
            tokens=3,
            intermediate=intermediate,
            top_k=4,
            num_shared_experts=2,
            shared_weight=shared_weight,
            activation_clamp=2.0,
        )
    )


EVERYTHING = dict(
    bias=True, global_scales=True, activation_clamp=1.5, expert_scales=True, routed_scaling_factor=2.5, masked=0.2
)
OPTIONS: dict[str, dict] = {
    "clamp 0.5": dict(activation_clamp=0.5),
    "swigluoai": dict(activation="swigluoai"),
    "swigluoai with alpha, beta and clamp": dict(
        activation="swigluoai", activation_alpha=1.1, activation_beta=0.3, activation_clamp=1.5
    ),
    "biases": dict(bias=True),
    "global scales": dict(global_scales=True),
    "expert scales": dict(expert_scales=True),
    "factor 2.5": dict(routed_scaling_factor=2.5),
    "w13 interleaved": dict(w13_layout="interleaved"),
    "local experts": dict(local_experts=2, local_expert_offset=1),
    "expert map": dict(local_experts=3, expert_map=True),
    "everything": dict(EVERYTHING, activation="swigluoai", num_shared_experts=1, top_k=3),
    "everything, interleaved, mapped": dict(
        EVERYTHING, activation="swigluoai", w13_layout="interleaved", local_experts=3, expert_map=True
    ),
}
TRTLLM_OPTIONS: dict[str, dict] = {
    "clamp per expert": dict(per_expert=("clamp",)),
    "alpha per expert": dict(per_expert=("alpha",), activation="swigluoai"),
    "beta per expert": dict(per_expert=("beta",), activation="swigluoai"),
    "everything per expert, shared slots": dict(
        EVERYTHING, activation="swigluoai", per_expert=("clamp", "alpha", "beta"), num_shared_experts=2, top_k=4,
        w13_layout="interleaved",
    ),
}  # fmt: skip
SITU_OPTIONS: dict[str, dict] = {
    "situ": dict(activation="situ"),
    "situ with biases and global scales": dict(activation="situ", bias=True, global_scales=True),
}
TRTLLM_SITU_OPTIONS: dict[str, dict] = {
    "situ with alpha and beta": dict(activation="situ", activation_alpha=1.2, activation_beta=1.7),
    "situ per expert": dict(activation="situ", per_expert=("alpha", "beta")),
}


def _options(recipe: Recipe) -> dict[str, dict]:
    options = dict(OPTIONS)
    trtllm = recipe.numerics == "trtllm_gen"
    if trtllm:
        options |= TRTLLM_OPTIONS
    if recipe in (FP8, FP8_TRTLLM):
        options |= SITU_OPTIONS | (TRTLLM_SITU_OPTIONS if trtllm else {})
    return options


def _each_option(recipes: Iterable[Recipe]) -> pytest.MarkDecorator:
    cases = [pytest.param(r, options, id=f"{r}, {name}") for r in recipes for name, options in _options(r).items()]
    return pytest.mark.parametrize(("recipe", "options"), cases)


@_each_option(TABLE)
def test_options_against_a_naive_layer(recipe: Recipe, options: dict) -> None:
    _assert_naive(_layer(recipe, tokens=3, intermediate=192, **options))


@_each_option([FP8, FP8_TRTLLM, NVFP4_GSF])
def test_options_are_felt(recipe: Recipe, options: dict) -> None:
    """A layer that ignores one of its tensors or numbers gives another y: random layers are good enough to tell."""
    layer = _layer(recipe, **options)
    y = _trace(layer).y.float()
    w, p, spec = layer.weights, layer.parameters, layer.spec
    without = []
    for name in ("w13_bias", "w2_bias", "l1_alphas", "l2_alphas", "l2_act_scales"):
        if getattr(w, name) is not None:
            without.append((name, dataclasses.replace(layer, weights=dataclasses.replace(w, **{name: None}))))
    for name in ("expert_scales", "clamp", "alpha", "beta"):
        if getattr(p, name) is not None:
            without.append((name, dataclasses.replace(layer, parameters=dataclasses.replace(p, **{name: None}))))
    if p.routed_scaling_factor != 1.0:
        unscaled = dataclasses.replace(p, routed_scaling_factor=1.0)
        without.append(("factor", dataclasses.replace(layer, parameters=unscaled)))
    for name in ("activation_alpha", "activation_beta", "activation_clamp"):
        if getattr(spec, name) is not None and getattr(p, name.removeprefix("activation_")) is None:
            without.append((name, dataclasses.replace(layer, spec=dataclasses.replace(spec, **{name: None}))))
    if w.w13_layout == "interleaved" and traits(recipe).weight_scale_format != "fp32":
        without.append(("layout", dataclasses.replace(layer, weights=dataclasses.replace(w, w13_layout="gate_up"))))
    if spec.activation != "swiglu" and p.alpha is None and p.beta is None:
        without.append(("activation", dataclasses.replace(layer, spec=dataclasses.replace(spec, activation="swiglu"))))
    for name, other in without:
        assert (_trace(other).y.float() - y).norm() / y.norm() > 0.02, name


@every_recipe
def test_y_is_the_combine_of_the_rows_and_stages_follow_from_each_other(recipe: Recipe) -> None:
    trtllm = recipe.numerics == "trtllm_gen"
    layer = _layer(recipe, num_shared_experts=1, top_k=3, masked=0.3)
    trace = _trace(layer)
    assert trace.routed is not None
    assert_bytes_equal(trace.y, combine(trace.rows, trace.valid, layer.topk_weights if trtllm else None))
    served = trace.valid.flatten()
    assert 0 < served.sum() < served.numel()
    parts = [(trace.routed.take(served), layer.topk_weights.flatten()[served])]
    if not trtllm:
        assert trace.shared is not None
        parts.append((trace.shared, torch.ones(6)))
    x_gsf = layer.parameters.x_gsf
    for stages, weights in parts:
        undo = None if x_gsf is None else 1 / x_gsf
        act = activate(*stages.h.chunk(2, dim=1), recipe.numerics, None, gate_scale=undo)
        if not trtllm:
            act = act * weights[:, None]
        if undo is not None:
            act = act * undo
        assert_bytes_equal(stages.act, act, "act")
        act_q, act_sf = requantize(act, recipe)
        assert_bytes_equal(stages.act_q, act_q, "act_q")
        assert (stages.act_sf is None) == (act_sf is None) == (traits(recipe).mid_scale_format is None)
        if stages.act_sf is not None and act_sf is not None:
            assert_bytes_equal(stages.act_sf, act_sf, "act_sf")
    assert trace.routed.take(~served).h.isnan().all()
    assert trace.rows[:, :3][~trace.valid].isnan().all()


@pytest.mark.parametrize("intermediate", [128, 192])
def test_block_scales_of_gate_and_up_are_apart(intermediate: int) -> None:
    """The first scale row of up belongs to up's first 128 rows, also where gate's last block is short."""
    layer = _layer(SM90, intermediate=intermediate)
    blocks = -(-intermediate // 128)
    assert layer.weights.w13_scale.shape == (4, 2 * blocks, 2)
    doubled = layer.weights.w13_scale.clone()
    doubled[:, blocks] *= 2
    weights = dataclasses.replace(layer.weights, w13_scale=doubled)
    before, after = _trace(layer).routed, _trace(dataclasses.replace(layer, weights=weights)).routed
    assert before is not None
    assert after is not None
    expected = before.h.clone()
    expected[:, intermediate : intermediate + 128] *= 2
    assert_bytes_equal(after.h, expected)


@every_recipe
def test_some_tokens_alone_are_the_same_rows(recipe: Recipe) -> None:
    layer = _layer(recipe, num_shared_experts=1, top_k=3, **EVERYTHING)
    some = torch.tensor([4, 1])
    assert_bytes_equal(_trace(layer, tokens=some, full_trace=False).y, _trace(layer).y[some])


def test_ids_that_no_expert_has_are_skipped_and_counted() -> None:
    layer = _layer(FP8)
    ids = layer.topk_ids.clone()
    ids[0] = torch.tensor([-1, 4])
    ids[1] = torch.tensor([-2, 1000])
    trace = _trace(dataclasses.replace(layer, topk_ids=ids))
    assert trace.skipped == 3
    assert_bytes_equal(trace.y[:2], torch.zeros(2, 256).bfloat16())
    assert_bytes_equal(trace.y[2:], _trace(layer).y[2:])


@every_recipe
def test_no_tokens(recipe: Recipe) -> None:
    assert _trace(_layer(recipe, tokens=0, num_shared_experts=1, top_k=3, bias=True)).y.shape == (0, 256)


def test_shared_slots_are_experts_that_no_factor_reaches() -> None:
    """Whatever routed_scaling_factor and expert_scales are, the shared contribution keeps weight 1, to the bit."""
    for recipe in (r for r in TABLE if r.numerics == "trtllm_gen"):
        layer = _layer(recipe, num_shared_experts=2, top_k=4)
        ids = layer.topk_ids.clone()
        ids[:, :2] = -1
        layer = dataclasses.replace(layer, topk_ids=ids)
        trace = _trace(layer)
        assert trace.ids[0].tolist() == [-1, -1, 4, 5]
        assert_bytes_equal(trace.y, (trace.rows[:, 2].float() + trace.rows[:, 3].float()).bfloat16())
        scaled = LayerParameters(
            x_gsf=layer.parameters.x_gsf, routed_scaling_factor=2.5, expert_scales=torch.full((4,), 3.0)
        )
        assert_bytes_equal(_trace(dataclasses.replace(layer, parameters=scaled)).y, trace.y)


def test_a_slot_without_an_expert_may_have_any_weight() -> None:
    """−1, another rank's, and invalid ids beside NaN and infinite weights."""
    for recipe in (FP8, FP8_TRTLLM):
        layer = _layer(recipe, local_experts=2, local_expert_offset=1, top_k=3)
        ids = torch.tensor([[1, -1, 0], [2, 3, 1000], [-7, 1, 3]] * 2, dtype=torch.int32)
        weights = torch.tensor([[0.5, NAN, INF], [0.5, -INF, NAN], [NAN, 0.5, NAN]] * 2)
        trace = _trace(dataclasses.replace(layer, topk_ids=ids, topk_weights=weights))
        assert trace.skipped == 4
        assert trace.valid.sum(1).tolist() == [1] * 6
        assert trace.ids[:3].tolist() == [[0, -1, -1], [1, -1, INVALID_ID], [-7, 0, -1]]
        assert trace.y.isfinite().all()
        assert (trace.y != 0).any(1).all()


def test_an_expert_map_renames_experts() -> None:
    """The same experts in another order, found through a map, make the same bytes."""
    for recipe in (FP8, BF16_TRTLLM):
        layer = _layer(recipe, bias=True)
        order = torch.tensor([2, 0, 3, 1])
        renamed = {
            name: value.view(torch.uint8)[order].view(value.dtype)
            for name, value in vars(layer.weights).items()
            if isinstance(value, torch.Tensor)
        }
        other = dataclasses.replace(
            layer,
            weights=dataclasses.replace(layer.weights, **renamed),
            spec=dataclasses.replace(layer.spec, has_expert_map=True),
            parameters=LayerParameters(expert_map=order.argsort().int()),
        )
        assert_bytes_equal(_trace(other).y, _trace(layer).y)


def test_bias_clamp_and_beta_are_in_raw_units_under_x_gsf() -> None:
    """Twice the global factor with twice the bias, clamp and beta is the same layer, to the bit."""
    layer = _layer(NVFP4_GSF, bias=True, activation="swigluoai", activation_clamp=3.0, activation_beta=0.75)
    assert layer.parameters.x_gsf is not None
    assert layer.weights.w13_bias is not None
    twice = dataclasses.replace(
        layer,
        parameters=LayerParameters(x_gsf=2 * layer.parameters.x_gsf),
        spec=dataclasses.replace(layer.spec, activation_clamp=6.0, activation_beta=1.5),
        weights=dataclasses.replace(layer.weights, w13_bias=2 * layer.weights.w13_bias),
    )
    assert_bytes_equal(_trace(twice).y, _trace(layer).y)
    unscaled = dataclasses.replace(twice, weights=layer.weights)
    assert not torch.equal(_trace(unscaled).y, _trace(layer).y)


def test_interleaved_rows_are_the_same_layer() -> None:
    """Gate 0, up 0, gate 1, … of weights, scales and biases; only fp32 blocks cover other rows then."""
    for recipe in (r for r in TABLE if traits(r).weight_scale_format != "fp32"):
        layer = _layer(recipe, bias=True, num_shared_experts=1, top_k=3)
        names = ["w13", "w13_scale", "w13_bias"]
        names += ["shared_w13", "shared_w13_scale"] if layer.spec.shared_slots else []
        rows = torch.arange(256).view(2, 128).T.flatten()
        moved = {}
        for name in names:
            value = getattr(layer.weights, name)
            if value is not None:
                moved[name] = value.view(torch.uint8).unflatten(1, (256, -1))[:, rows].flatten(1).view(value.dtype)
                moved[name] = moved[name].view(value.shape)
        weights = dataclasses.replace(layer.weights, w13_layout="interleaved", **moved)
        assert_bytes_equal(_trace(dataclasses.replace(layer, weights=weights)).y, _trace(layer).y)


def test_interleaved_block_scales_cover_64_gates_and_64_ups() -> None:
    layer = _layer(SM90_TRTLLM, w13_layout="interleaved")
    assert layer.weights.w13_scale is not None
    assert layer.weights.w13_scale.shape == (4, 2, 2)
    doubled = layer.weights.w13_scale.clone()
    doubled[:, 1] *= 2
    weights = dataclasses.replace(layer.weights, w13_scale=doubled)
    before, after = _trace(layer).routed, _trace(dataclasses.replace(layer, weights=weights)).routed
    assert before is not None
    assert after is not None
    expected = before.h.unflatten(1, (2, 2, 64)).clone()
    expected[:, :, 1] *= 2
    assert_bytes_equal(after.h, expected.flatten(1))


def test_bf16_rounds_gate_and_up_then_act_once() -> None:
    layer = _layer(BF16, bias=True)
    stages = _trace(layer).routed
    assert stages is not None
    gate, up = stages.h.numpy()[:, :128], stages.h.numpy()[:, 128:]
    gate, up = (torch.from_numpy(v).bfloat16().float().numpy() for v in (gate, up))
    act = (gate * _sigmoid(gate)) * up * layer.topk_weights.flatten().numpy()[:, None]
    assert_bytes_equal(stages.act_q, torch.from_numpy(act).bfloat16())
    assert stages.act_sf is None


def test_contradictions_are_named() -> None:
    layer = _layer(FP8, num_shared_experts=1)
    trtllm = _layer(FP8_TRTLLM)
    ones = torch.ones(4)
    for whole, parameters, problem in (
        (layer, LayerParameters(alpha=ones), "parameters.alpha is given; allowed under"),
        (layer, LayerParameters(x_gsf=ones[:1]), "parameters.x_gsf is given under"),
        (_layer(NVFP4_GSF), LayerParameters(), "parameters.x_gsf is None under"),
        (
            trtllm,
            LayerParameters(clamp=ones, beta=ones),
            "parameters.beta is given, but swiglu has no alpha and no beta",
        ),
        (trtllm, LayerParameters(expert_map=ones.int()), "has_expert_map is False, but parameters.expert_map is given"),
    ):
        with pytest.raises(ValueError, match=problem):
            _trace(dataclasses.replace(whole, parameters=parameters))
    with pytest.raises(ValueError, match="all four are needed"):
        _trace(dataclasses.replace(layer, weights=dataclasses.replace(layer.weights, shared_w2=None)))
    with pytest.raises(NotImplementedError, match="ep_size=2"):
        _trace(dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, ep_size=2)))
    with pytest.raises(ValueError, match="top_k=2 counts the 2 shared slots"):
        _layer(FP8_TRTLLM, num_shared_experts=2)


@every_recipe
def test_dequantized_input_is_near_x(recipe: Recipe) -> None:
    layer = _layer(recipe)
    x = _trace(layer).x
    back = dequantize_act(x.q, x.sf, kind_of(recipe), x.token_scale)
    if layer.parameters.x_gsf is not None:
        back = back / layer.parameters.x_gsf
    error = (back - layer.x.float()).norm() / layer.x.float().norm()
    assert error <= {torch.bfloat16: 0, torch.float8_e4m3fn: 0.03, torch.uint8: 0.15}[x.q.dtype]
