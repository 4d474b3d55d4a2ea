"""The reference against the contract: known bytes, every rounding rule, and a second, naive layer.

Bytes and formulas are those of DeepGEMM's MegaMoE, `sgl-deep-gemm` 0.1.7.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import (
    LayerTrace,
    activate,
    combine,
    dequantize_act,
    kind_of,
    moe_layer,
    pre_dispatch_reference,
    quantize,
    requantize,
)
from megamoe.recipe import SERVED, TABLE, Recipe

RECIPES = {recipe.mma_type: recipe for recipe in SERVED}
FP8, MXF4, NVFP4, SM90 = SERVED
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)

NAN, INF = math.nan, math.inf


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


def test_amax_floor_and_group_can_be_set() -> None:
    x = _row(1e-6, 1e-6).bfloat16()
    assert quantize(x, "mxfp8").sf[0, 0] == 105
    assert quantize(x, "mxfp8", amax_floor=1e-10).sf[0, 0] == 127 - 28  # 1e-6 / 448 = 2^-28.7
    assert quantize(x, "mxfp8", group=64).sf.shape == (1, 2)
    with pytest.raises(ValueError, match="kind='int8' is unknown; allowed: mxfp8, mxfp4, nvfp4, fp8_block128"):
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
    assert_bytes_equal(q.view(torch.uint8), whole_q.view(torch.uint8)[:, : q.shape[1]])
    assert_bytes_equal(sf, whole_sf[:, : sf.shape[1]])


# SwiGLU and combine


def _swiglu(gate: float, up: float, recipe: Recipe, clamp: float | None = None) -> float:
    return activate(torch.tensor([gate]), torch.tensor([up]), recipe.numerics, clamp).item()


def test_sm100_rounds_gate_and_up_to_bf16_and_sm90_does_not() -> None:
    up = 1 + 2.0**-9
    assert _swiglu(64.0, up, FP8) == 64.0
    assert _swiglu(64.0, up, SM90) == 64.0 * up
    assert _swiglu(64.0 * up, 1.0, FP8) == 64.0
    assert _swiglu(64.0 * up, 1.0, SM90) == 64.0 * up


@pytest.mark.parametrize("recipe", [FP8, SM90], ids=["SM100", "SM90"])
def test_swiglu_in_ieee_steps(recipe: Recipe) -> None:
    gate, up = (torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)) * 5).bfloat16().float()
    f32 = np.float32
    sigmoid = f32(1) / (f32(1) + np.exp(-gate.double().numpy()).astype(f32))
    assert_bytes_equal(
        activate(gate, up, recipe.numerics, None), torch.from_numpy((gate.numpy() * sigmoid) * up.numpy())
    )


def test_clamp_limits_gate_from_above_and_up_on_both_sides() -> None:
    for recipe in (FP8, SM90):
        assert _swiglu(100.0, 1.0, recipe, clamp=64.0) == 64.0
        assert _swiglu(-100.0, 1.0, recipe, clamp=64.0) == _swiglu(-100.0, 1.0, recipe)
        assert _swiglu(64.0, 100.0, recipe, clamp=64.0) == 64.0 * 64
        assert _swiglu(64.0, -100.0, recipe, clamp=64.0) == -64.0 * 64
        assert _swiglu(100.0, 100.0, recipe, clamp=INF) == 1e4
        assert _swiglu(100.0, 100.0, recipe, clamp=0.0) == 0.0
    limit = 64 * (1 + 2.0**-9)  # SM100 rounds the limit to BF16 too
    assert _swiglu(100.0, 1.0, FP8, clamp=limit) == 64.0
    assert _swiglu(100.0, 1.0, SM90, clamp=limit) == limit


def test_clamp_replaces_nan() -> None:
    assert _swiglu(NAN, 1.0, FP8, clamp=64.0) == _swiglu(NAN, 1.0, SM90, clamp=64.0) == 64.0
    assert _swiglu(64.0, NAN, FP8, clamp=64.0) == -64.0 * 64
    assert _swiglu(64.0, NAN, SM90, clamp=64.0) == 64.0 * 64
    assert math.isnan(_swiglu(NAN, 1.0, FP8)) and math.isnan(_swiglu(1.0, NAN, SM90))  # noqa: PT018


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


# The whole layer


def _layer(recipe: Recipe, **options: object) -> Layer:
    sizes = dict(tokens=6, hidden=256, intermediate=128, num_experts=4, top_k=2, seed=7)
    return random_layer(recipe, **(sizes | options))  # type: ignore[arg-type]


def _trace(layer: Layer, **options: object) -> LayerTrace:
    return moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec, **options  # type: ignore[arg-type]
    )  # fmt: skip


def _values(q: torch.Tensor) -> np.ndarray:
    """fp64 values of E4M3 or packed E2M1."""
    if q.dtype == torch.float8_e4m3fn:
        return q.double().numpy()
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack([q.numpy() & 0xF, q.numpy() >> 4], axis=-1).reshape(*q.shape[:-1], -1)
    return table[codes & 7] * np.where(codes & 8, -1, 1)


def _factors(sf: torch.Tensor, recipe: Recipe) -> np.ndarray:
    if sf.dtype == torch.float32:
        return sf.double().numpy()
    if recipe is NVFP4:
        return sf.view(torch.float8_e4m3fn).double().numpy()
    return np.exp2(sf.numpy().astype(np.float64) - 127)


def _product(
    q: torch.Tensor, sf: torch.Tensor, group: int, w: torch.Tensor, w_sf: torch.Tensor, recipe: Recipe
) -> np.ndarray:
    """One row times a weight matrix, fp64, scale by scale."""
    a, b = _values(q), _values(w)
    sa, sb = _factors(sf, recipe), _factors(w_sf, recipe)
    out = np.zeros(b.shape[0])
    for n in range(b.shape[0]):
        for start in range(0, len(a), group):
            row, column = (n // 128, start // 128) if recipe is SM90 else (n, start // group)
            partial = a[start : start + group] @ b[n, start : start + group]
            out[n] += partial * sa[start // group] * sb[row, column]
    return out


def _naive_mlp(x: tuple, weight: float, matrices: tuple, recipe: Recipe, clamp: float | None) -> np.ndarray:
    """One token through one expert: loops, fp64 sums, and the rounding steps of the contract."""
    q, sf, token_scale = x
    w13, s13, w2, s2 = matrices
    half, half_sf = w13.shape[0] // 2, s13.shape[0] // 2
    group, mid_group = {FP8: (32, 32), MXF4: (32, 32), NVFP4: (16, 16), SM90: (128, 64)}[recipe]
    gate = _product(q, sf, group, w13[:half], s13[:half_sf], recipe) * token_scale
    up = _product(q, sf, group, w13[half:], s13[half_sf:], recipe) * token_scale
    if recipe is not SM90:
        gate, up = (torch.from_numpy(v).float().bfloat16().double().numpy() for v in (gate, up))
    if clamp is not None:
        gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
    act = gate / (1 + np.exp(-gate)) * up * weight
    act_q, act_sf = requantize(torch.from_numpy(act).float()[None], recipe)
    return _product(act_q[0], act_sf[0], mid_group, w2, s2, recipe)


@pytest.mark.parametrize("intermediate", [128, 192])
@pytest.mark.parametrize(
    ("recipe", "shared_weight"),
    [(FP8, "e4m3"), (FP8, "e2m1"), (MXF4, "e2m1"), (NVFP4, "e2m1"), (SM90, "e4m3")],
    ids=["fp8xfp4, E4M3 shared", "fp8xfp4, MXFP4 shared", "mxf4xmxf4", "nvfp4xnvfp4", "fp8xfp8"],
)
def test_layer_against_a_naive_one(recipe: Recipe, shared_weight: str, intermediate: int) -> None:
    """Rows of a few tokens; what fp64 SwiGLU rounds differently moves one element of the intermediate at most."""
    layer = _layer(
        recipe,
        tokens=3,
        intermediate=intermediate,
        num_shared_experts=1,
        shared_weight=shared_weight,
        activation_clamp=2.0,
    )
    trace, w = _trace(layer), layer.weights
    for token in range(3):
        scale = 1.0 if trace.x.token_scale is None else trace.x.token_scale[token].item()
        x = (trace.x.q[token], trace.x.sf[token], scale)
        for slot in range(2):
            expert = int(layer.topk_ids[token, slot])
            matrices = (w.w13[expert], w.w13_scale[expert], w.w2[expert], w.w2_scale[expert])
            expected = _naive_mlp(x, layer.topk_weights[token, slot].item(), matrices, recipe, 2.0)
            _assert_close(trace.rows[token, slot], expected)
        shared = (w.shared_w13, w.shared_w13_scale, w.shared_w2, w.shared_w2_scale)
        _assert_close(trace.rows[token, 2], _naive_mlp(x, 1.0, shared, recipe, 2.0))


def _assert_close(actual: torch.Tensor, expected: np.ndarray) -> None:
    error = np.linalg.norm(actual.double().numpy() - expected) / np.linalg.norm(expected)
    assert error < 2.0**-8, f"BF16 rounding leaves at most 2^-9 per element, this is {error:.2g}"


@every_recipe
def test_y_is_the_combine_of_the_rows_and_stages_follow_from_each_other(recipe: Recipe) -> None:
    layer = _layer(recipe, num_shared_experts=1, masked=0.3)
    trace = _trace(layer)
    assert trace.routed is not None
    assert trace.shared is not None
    assert_bytes_equal(trace.y, combine(trace.rows, trace.valid))
    served = trace.valid.flatten()
    assert 0 < served.sum() < served.numel()
    for stages, weights in (
        (trace.routed.take(served), layer.topk_weights.flatten()[served]),
        (trace.shared, torch.ones(6)),
    ):
        act = activate(*stages.h.chunk(2, dim=1), recipe.numerics, None) * weights[:, None]
        assert_bytes_equal(stages.act, act, "act")
        assert_bytes_equal(stages.act_q, requantize(act, recipe)[0], "act_q")
        assert_bytes_equal(stages.act_sf, requantize(act, recipe)[1], "act_sf")
    assert trace.routed.take(~served).h.isnan().all()
    assert trace.rows[:, :2][~trace.valid].isnan().all()


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
    layer = _layer(recipe, num_shared_experts=1, masked=0.2)
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
    assert _trace(_layer(recipe, tokens=0, num_shared_experts=1)).y.shape == (0, 256)


@pytest.mark.parametrize("recipe", [r for r in TABLE if r not in SERVED], ids=str)
def test_recipes_not_served_say_why(recipe: Recipe) -> None:
    layer = _layer(FP8)
    layer = dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, recipe=recipe))
    reason = TABLE[recipe].missing
    assert reason is not None
    with pytest.raises(NotImplementedError) as caught:
        _trace(layer)
    assert str(caught.value) == f"{recipe} {reason}"


def test_missing_options_and_weights_are_named() -> None:
    layer = _layer(FP8, num_shared_experts=1)
    with pytest.raises(NotImplementedError, match="ep_size=2"):
        _trace(dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, ep_size=2)))
    with pytest.raises(ValueError, match="all four are needed"):
        _trace(dataclasses.replace(layer, weights=dataclasses.replace(layer.weights, shared_w2=None)))


@every_recipe
def test_dequantized_input_is_near_x(recipe: Recipe) -> None:
    layer = _layer(recipe)
    x = _trace(layer).x
    back = dequantize_act(x.q, x.sf, kind_of(recipe), x.token_scale)
    error = (back - layer.x.float()).norm() / layer.x.float().norm()
    assert error < (0.03 if x.q.dtype == torch.float8_e4m3fn else 0.15)
