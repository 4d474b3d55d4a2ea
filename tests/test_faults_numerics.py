"""Faults of numbers that this field's MoE layers had: scales off by one, dead experts, clipped outliers, overflow.

`docs/field_reports.md` says which public report each test stands for.
"""

import dataclasses

import pytest
import torch

from megamoe.kernels.config import mma_of
from megamoe.kernels.epilogue import requantize_accumulators
from megamoe.kernels.layouts.gate_up import interleave_gate_up
from megamoe.kernels.pre_dispatch import KINDS, quantize
from megamoe.oracle.dispatch_paths import PATHS, DispatchPath, architecture, run_path
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import activate, dequantize_act, moe_layer, requantize
from megamoe.recipe import ALL_RECIPES, Recipe, traits
from megamoe.validation import size_multiples

LOOPS = (
    "fp8xfp4",
    "fp8xfp4 decoded, E4M3 shared",
    "nvfp4xnvfp4, shared",
    "fp8xfp8, shared",
    "fp8xfp4 token, E4M3 shared",
    "bf16xbf16, shared",
    "trtllm fp8xfp4",
    "mxfp8xmxfp8, shared",
    "bf16xfp4, shared",
)
FP4_WEIGHTS = {
    f"{path.recipe}, {path.mma or 'default'}": path for path in PATHS.values() if traits(path.recipe).weight == "e2m1"
}
NVFP4 = [name for name, path in PATHS.items() if path.recipe.mma_type == "nvfp4xnvfp4"]


def _layer(path: DispatchPath, device: str, **options: object) -> Layer:
    """Without shared experts."""
    multiple_of_h, multiple_of_i = size_multiples(path.recipe)
    merged: dict = {
        "tokens": 5,
        "hidden": max(128, multiple_of_h),
        "intermediate": max(64, multiple_of_i),
        "num_experts": 3,
        "top_k": 2,
        **options,
    }
    return random_layer(path.recipe, device=device, **merged)


def _with_weights(layer: Layer, **changes: torch.Tensor) -> Layer:
    return dataclasses.replace(layer, weights=dataclasses.replace(layer.weights, **changes))


def _reference(layer: Layer) -> torch.Tensor:
    return moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec,
        parameters=layer.parameters, full_trace=False,
    ).y  # fmt: skip


def _agree(layer: Layer, path: DispatchPath, device: str) -> torch.Tensor:
    output = run_path(layer, path, device)
    problem = check(compare(output, _reference(layer)), LIMITS[path.recipe])
    assert problem is None, problem
    return output


def _one_product_per_output(path: DispatchPath, device: str) -> tuple[Layer, torch.Tensor]:
    """A layer in which y[t, h] is act · w2[h, t], and w2's scale bytes.

    Token t is 32 in column t and 0 elsewhere; gate row t and up row t meet that column alone. Gate is 32, whose sigmoid
    is 1, up is 1/4 (1/2 under NVFP4), act 8 (16). Columns of w2 run through the 16 codes, rows and groups through the
    scales: UE8M0 from 2^-127 to 2^112, so that 448 · 6 · 2^e stays within fp32; UE4M3 from 0 to 448.
    """
    ue4m3 = traits(path.recipe).weight_scale_format == "ue4m3"
    width = 32 if ue4m3 else max(64, size_multiples(path.recipe)[1])
    layer = _layer(path, device, tokens=width, hidden=128, intermediate=width, num_experts=1, top_k=1)
    weights = layer.weights
    one, small = (0x38, 0x08) if ue4m3 else (127, 127 - 7)  # 2^-6 and 2^-7
    w13 = torch.zeros(1, 2 * width, 128, dtype=torch.uint8, device=device)
    diagonal = torch.arange(width, device=device)
    w13[0, diagonal, diagonal] = 2  # the code of 1
    w13[0, width + diagonal, diagonal] = 2
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    w13_scale = torch.full_like(weights.w13_scale, one)
    w13_scale[:, width:] = small
    codes = (torch.arange(width, device=device) % 16).to(torch.uint8).expand(1, 128, width)
    scales = torch.arange(weights.w2_scale.numel(), device=device)
    w2_scale = (scales % (127 if ue4m3 else 240)).to(torch.uint8).view_as(weights.w2_scale)
    layer = _with_weights(
        layer, w13=_packed(w13), w13_scale=w13_scale, w2=_packed(codes), w2_scale=w2_scale
    )  # fmt: skip
    x = torch.zeros_like(layer.x)
    x[diagonal, diagonal] = 32.0
    layer = dataclasses.replace(
        layer, x=x, topk_ids=torch.zeros_like(layer.topk_ids), topk_weights=torch.ones_like(layer.topk_weights)
    )
    return layer, w2_scale


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


@pytest.mark.parametrize("path", FP4_WEIGHTS.values(), ids=FP4_WEIGHTS)
def test_every_code_under_every_scale_of_a_weight(path: DispatchPath, device: str) -> None:
    """Shifting a scale into a number's exponent field goes wrong at 0, at subnormals and at either end."""
    layer, scales = _one_product_per_output(path, device)
    own = mma_of(layer.spec, architecture(device))
    if device == "cuda" and path.mma not in (None, own):
        pytest.skip(f"mma={path.mma!r} is emulated here, without UE8M0's byte 0: this GPU's is {own!r}")
    expected = _reference(layer)
    assert len(scales.unique()) == (127 if traits(path.recipe).weight_scale_format == "ue4m3" else 240)
    assert len(expected.unique()) > 250
    assert expected.isfinite().all()
    assert_bytes_equal(run_path(layer, path, device), expected, "output")


@pytest.mark.parametrize("name", LOOPS)
def test_gates_and_ups_of_ten_thousand_stay_finite(name: str, device: str) -> None:
    """Their product is 1e8: beyond FP16, within BF16 and fp32. UE4M3 scales end at 448: NVFP4 brings global ones."""
    path = PATHS[name]
    layer = _layer(path, device)
    if traits(path.recipe).mid_scale_format == "ue4m3":
        act_scale = torch.full((3,), 2.0**-17, device=device)
        layer = _with_weights(layer, l2_act_scales=act_scale, l2_alphas=1 / act_scale)
    output = _agree(dataclasses.replace(layer, x=layer.x * 1e4), path, device)
    assert output.isfinite().all()
    assert output.abs().amax() > 1e6


@pytest.mark.parametrize("value", (0.0, 1e-45))
@pytest.mark.parametrize("scale", ("l1_alphas", "l2_alphas", "l2_act_scales"))
@pytest.mark.parametrize("name", NVFP4)
def test_a_dead_experts_global_scales_give_no_nan(name: str, scale: str, value: float, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device, global_scales=True, num_experts=2)
    dead = getattr(layer.weights, scale).clone()
    dead[1] = value
    layer = _with_weights(layer, **{scale: dead})
    assert _agree(layer, path, device).isfinite().all()


@pytest.mark.parametrize("name", NVFP4)
def test_gate_and_up_have_their_own_global_scales(name: str, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device, global_scales=True)
    alphas = layer.weights.l1_alphas
    assert alphas is not None
    assert (alphas[:, 0] - alphas[:, 1]).abs().amin() > 0.01
    _agree(layer, path, device)
    for column in (0, 1):
        one_for_both = _with_weights(layer, l1_alphas=alphas[:, column : column + 1].repeat(1, 2))
        assert compare(_reference(one_for_both), _reference(layer)).rel_rms > 0.01


def _quantized(x: torch.Tensor, kind: str, gsf: torch.Tensor | None) -> torch.Tensor:
    """x through the kernel and back, fp32."""
    row, (tokens, hidden) = KINDS[kind], x.shape
    group = row.groups[0]
    q = torch.empty(tokens, hidden // row.elements_per_byte, dtype=row.element_dtypes[0], device=x.device)
    sf = None
    if row.scale_dtype is not None:
        sf = torch.empty(tokens, hidden // group if group else 1, dtype=row.scale_dtype, device=x.device)
    token_scale = torch.empty(tokens, device=x.device) if row.token_scale else None
    quantize(x, q=q, sf=sf, token_scale=token_scale, kind=kind, x_gsf=gsf)
    values = dequantize_act(q, sf, kind, token_scale)
    return values if gsf is None else values / gsf


@pytest.mark.parametrize("value", (1e4, -1e38))
@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_keeps_its_size(kind: str, value: float, device: str) -> None:
    """Half a step of E2M1 is at most a fifth of the number; a clipped one would lose far more."""
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    x[2, 37] = value
    gsf = torch.tensor([448 * 6 / abs(value)], device=device) if KINDS[kind].x_gsf else None
    values = _quantized(x, kind, gsf)
    torch.testing.assert_close(values[2, 37], x[2, 37].float(), rtol=0.2, atol=0)
    if gsf is None:
        assert_bytes_equal(values[[0, 1, 3]], _quantized(x[[0, 1, 3]].contiguous(), kind, None), "other rows")


QUANTIZED = {str(recipe): recipe for recipe in ALL_RECIPES if traits(recipe).mid_scale_format is not None}


def _requantized(
    recipe: Recipe, up: torch.Tensor, weight: torch.Tensor, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and sf of the kernel and of the reference, for gates of 32 and these up values; weight: the top-k weights."""
    gate = torch.full_like(up, 32.0)
    acc = interleave_gate_up(torch.cat((gate, up), dim=1), traits(recipe).tile_order, dim=1).to(device)
    act = activate(gate, up, recipe.numerics, None)
    if recipe.numerics == "trtllm_gen":
        q, sf = requantize_accumulators(acc, None, recipe)
    else:
        q, sf = requantize_accumulators(acc, weight.to(device), recipe)
        act = act * weight[:, None]
    expected_q, expected_sf = requantize(act, recipe)
    assert sf is not None
    assert expected_sf is not None
    return q.cpu(), sf.cpu(), expected_q, expected_sf


@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
def test_scales_change_exactly_where_the_maximum_passes_a_boundary(recipe: Recipe, device: str) -> None:
    """fp32 maxima at largest · 2^k and one fp32 step to either side: rounding to BF16 first would merge them."""
    row = traits(recipe)
    largest = 448.0 if row.act == "e4m3" else 6.0
    steps = torch.tensor([1 - 2.0**-24, 1.0, 1 + 2.0**-23]).repeat(20)
    tops = largest * torch.exp2(torch.arange(20).repeat_interleave(3) - 10.0)
    up = torch.randn(60, 128, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) / 1024
    up = (up * tops[:, None] / 32).bfloat16().float()
    up[:, 5] = tops / 32  # act is 32 · up · weight
    if recipe.numerics == "trtllm_gen":
        up[:, 5] *= steps
    q, sf, expected_q, expected_sf = _requantized(recipe, up, steps, device)
    assert_bytes_equal(q, expected_q, "elements")
    assert_bytes_equal(sf, expected_sf, "scales")
    if row.mid_scale_format == "ue8m0":
        below, at, above = sf[:, 0].int().view(20, 3).unbind(1)
        assert torch.equal(above, at + 1), "one step above the boundary is the next power of two"
        assert torch.equal(below, at), "one step below is the same as the boundary itself"


@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
def test_an_outlier_is_felt_by_its_own_group_alone(recipe: Recipe, device: str) -> None:
    """Each group's first, last and a middle column in turn; groups of 16, 32, 64 or 128 columns."""
    group = traits(recipe).mid_group
    up = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    ones = torch.ones(1)
    q, sf, _, _ = _requantized(recipe, up, ones, device)
    packed = 256 // q.shape[1]
    columns = [start + offset for start in range(0, 256, group) for offset in (0, group // 2 - 1, group - 1)]
    spiked = up.repeat(len(columns), 1)
    spiked[torch.arange(len(columns)), columns] = 1000.0
    got_q, got_sf, expected_q, expected_sf = _requantized(
        recipe, spiked, ones.expand(len(columns)).contiguous(), device
    )
    assert_bytes_equal(got_q, expected_q, "elements")
    assert_bytes_equal(got_sf, expected_sf, "scales")
    own = torch.tensor(columns) // group
    assert torch.equal((got_sf != sf).nonzero()[:, 1], own), "one scale of each row changed, its own"
    same = (got_q.view(torch.uint8) == q.view(torch.uint8)).unflatten(1, (-1, group // packed)).all(-1)
    others = torch.arange(256 // group)[None, :] != own[:, None]
    assert same[others].all()
