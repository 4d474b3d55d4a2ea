"""Shared experts that become routed ones: refusals, weights without loss and with, slots and their weights."""

from dataclasses import replace

import pytest
import torch

import megamoe
from megamoe import formats, shared_fusion
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.public_arguments import weight_arguments
from megamoe.oracle.random_layers import random_layer
from megamoe.oracle.reference.mxfp4_requant import mxfp4_requant_reference
from megamoe.oracle.reference.quantizers import BlockFormat, dequantize_weight
from megamoe.recipe import Recipe
from megamoe.shared_fusion import (
    append_shared_slots,
    expand_block_scales,
    quantize_block_fp8_weight_to_mxfp4,
    shared_fusion_unsupported_reason,
)

FP8XFP4 = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
TRTLLM = Recipe("fp8xfp4", "mx32", "trtllm_gen")
T, H, I, E, K = 3, 256, 128, 3, 2


def _blocks(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP8 matrix and scales that are powers of two."""
    generator = torch.Generator().manual_seed(seed)
    weight = formats.encode_e4m3(60 * torch.randn(rows, columns, generator=generator))
    exponents = torch.randint(-12, -7, (-(-rows // 128), -(-columns // 128)), generator=generator)
    return weight, torch.exp2(exponents.float())


FUSABLE = dict(
    n_shared_experts=1, routed_format="e2m1", shared_format="e4m3", weight_block_size=[128, 128], asked_for=True
)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"shared_format": "e2m1", "weight_block_size": None}, None),
        ({"n_shared_experts": 2, "exactly_one": False}, None),
        ({"ep_size": 8, "per_rank_slots": True}, None),
        ({"n_shared_experts": 0}, "n_shared_experts=0: there is no shared expert"),
        ({"shared_format": "bf16"}, "shared experts in bf16 beside routed ones in e2m1: only e4m3 beside e2m1"),
        ({"routed_format": "e4m3", "shared_format": "bf16"}, "shared experts in bf16 beside routed ones in e4m3"),
        ({"weight_block_size": None}, "shared experts in e4m3 without weight_block_size"),
        ({"weight_block_size": (128, 48)}, "weight_block_size=(128, 48): its columns are no multiple of 32"),
        ({"ep_size": 8}, "ep_size=8 without per-rank shared slots"),
        ({"asked_for": False}, "fusion was not asked for"),
        ({"n_shared_experts": 2}, "n_shared_experts=2: the engine fuses exactly one"),
        ({"ep_size": 2, "shared_format": "bf16", "asked_for": False}, "shared experts in bf16"),
        ({"ep_size": 2, "asked_for": False}, "ep_size=2"),
    ],
)
def test_reasons(changed: dict[str, object], reason: str | None) -> None:
    found = shared_fusion_unsupported_reason(**{**FUSABLE, **changed})  # type: ignore[arg-type]
    assert found is None if reason is None else str(found).startswith(reason)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"n_shared_experts": -1}, ValueError, "n_shared_experts is -1"),
        ({"routed_format": "fp4"}, ValueError, "routed_format is 'fp4'; allowed: 'e2m1', 'e4m3', 'bf16'"),
        ({"asked_for": 1}, TypeError, "asked_for is 1"),
        ({"weight_block_size": 128}, TypeError, "weight_block_size is 128; allowed: two ints"),
        ({"weight_block_size": (128, 0)}, ValueError, r"weight_block_size\[1\] is 0"),
    ],
)
def test_reasons_are_given_for_sound_questions(changed: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        shared_fusion_unsupported_reason(**{**FUSABLE, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [False, True])
def test_requantized_weights_have_upstreams_dtypes(exact: bool, device: str) -> None:
    weight, scale = _blocks(130, 160)
    expected = mxfp4_requant_reference(weight, scale, (128, 128), exact=exact)
    for given in (scale, scale.to(torch.float8_e8m0fnu)):
        q, sf = quantize_block_fp8_weight_to_mxfp4(weight.to(device), given.to(device), [128, 128], exact=exact)
        assert (q.dtype, sf.dtype) == (torch.int8, torch.float8_e8m0fnu)
        assert_bytes_equal(q.cpu().view(torch.uint8), expected[0], "elements")
        assert_bytes_equal(sf.cpu().view(torch.uint8), expected[1], "scales")


def test_without_kernels_the_reference_makes_the_same_bytes(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    weight, scale = (t.to(device) for t in _blocks(64, 64))
    expected = quantize_block_fp8_weight_to_mxfp4(weight, scale)
    monkeypatch.setattr(shared_fusion, "device_unsupported_reason", lambda device: "none here")
    for ours, theirs in zip(quantize_block_fp8_weight_to_mxfp4(weight, scale), expected):
        assert_bytes_equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("block", [(128, 128), (64, 96)])
def test_expanded_scales_lose_nothing(block: tuple[int, int]) -> None:
    weight, _ = _blocks(130, 160)
    shape = (-(-130 // block[0]), -(-160 // block[1]))
    exponents = torch.arange(shape[0] * shape[1]).reshape(shape) * 7 - 12
    scale = torch.exp2(exponents.float())
    expected = dequantize_weight(weight, scale, BlockFormat("e4m3", "fp32", *block))
    for given in (scale, scale.to(torch.float8_e8m0fnu)):
        sf = expand_block_scales(weight, given, block)
        assert (sf.dtype, tuple(sf.shape), sf.is_contiguous()) == (torch.uint8, (130, 5), True)
        assert_bytes_equal(dequantize_weight(weight, sf, BlockFormat("e4m3", "ue8m0", 1, 32)), expected, "values")


def test_the_ends_of_ue8m0_expand() -> None:
    weight = torch.ones(2, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0**-127, 2.0**127]])
    assert expand_block_scales(weight, scale, (2, 32)).tolist() == [[0, 254], [0, 254]]


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0, 2.0**-128, torch.inf, torch.nan])
def test_scales_that_are_no_powers_of_two_are_refused(value: float) -> None:
    weight, scale = _blocks(130, 256)
    scale[1, 1] = value
    with pytest.raises(ValueError, match=rf"^fp8_scale has {value:g} at \[1, 1\]; allowed: powers of two"):
        expand_block_scales(weight, scale)
    if value != value:
        with pytest.raises(ValueError, match=r"^fp8_scale has nan at \[1, 1\]"):
            expand_block_scales(weight, scale.to(torch.float8_e8m0fnu))


@pytest.mark.parametrize("function", [quantize_block_fp8_weight_to_mxfp4, expand_block_scales])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda w, s: (w.float(), s), TypeError, "fp8_weight has dtype torch.float32"),
        (lambda w, s: (w[:, :130], s), ValueError, "fp8_weight has K = 130 columns; allowed: a multiple of 32"),
        (lambda w, s: (w.T, s), ValueError, "fp8_weight has strides"),
        (lambda w, s: (w[0], s), ValueError, "fp8_weight has shape"),
        (lambda w, s: (w, s[:1]), ValueError, "fp8_scale has shape"),
        (lambda w, s: (w, s.bfloat16()), TypeError, "fp8_scale has dtype torch.bfloat16"),
        (lambda w, s: (w, s, (128, 48)), ValueError, "weight_block_size is "),
        (lambda w, s: (w, s, "128"), TypeError, "weight_block_size is '128'"),
    ],
)
def test_bad_matrices(function, change, error: type[Exception], words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=f"^{words}"):
        function(*change(*_blocks(256, 256)))


def test_other_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="^mxfp4_block_size is 16; allowed: 32"):
        quantize_block_fp8_weight_to_mxfp4(*_blocks(128, 128), mxfp4_block_size=16)
    with pytest.raises(TypeError, match="^exact is 1"):
        quantize_block_fp8_weight_to_mxfp4(*_blocks(128, 128), exact=1)  # type: ignore[arg-type]


def test_slots_and_their_weights() -> None:
    ids = torch.tensor([[2, -1], [-1, -1], [0, 1]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]])
    for scaled, expected in (("output", 1 / 1.5), ("topk", 1.0)):
        found, factors = append_shared_slots(
            ids, weights, num_experts=E, num_shared_experts=2, routed_scaling_factor=1.5, scaled=scaled
        )
        assert found.dtype == ids.dtype
        assert found.tolist() == [[2, -1, 3, 4], [-1, -1, -1, -1], [0, 1, 3, 4]]
        assert_bytes_equal(factors[:, :2], weights, "routed weights")
        assert_bytes_equal(factors[:, 2:], torch.full((3, 2), expected), "shared weights")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scaled": "weights"}, "scaled is 'weights'; allowed: 'output', 'topk'"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0.0; allowed: a finite number above 0"),
        ({"num_shared_experts": 0}, "num_shared_experts is 0"),
    ],
)
def test_bad_slots(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        append_shared_slots(torch.zeros(1, 1).int(), torch.ones(1, 1), **{"num_experts": 4, **options})  # type: ignore[arg-type]


def test_slots_elsewhere() -> None:
    with pytest.raises(ValueError, match="^topk_weights is on meta; allowed: cpu$"):
        append_shared_slots(torch.zeros(1, 1).int(), torch.ones(1, 1, device="meta"), num_experts=4)


@pytest.mark.parametrize("scaled", ["output", "topk"])
def test_a_requantized_shared_expert_in_a_slot_is_one_more_expert(scaled: str, device: str) -> None:
    """The layer as SGLang fuses it, E + 1 experts, equals the layer with a shared slot, by bytes; both weight rules
    give f·Σ routed + shared."""
    layer = random_layer(TRTLLM, tokens=T, hidden=H, intermediate=I, num_experts=E, top_k=K, device=device)
    w13, w2 = ([t.to(device) for t in _blocks(*shape)] for shape in ((2 * I, H), (H, I)))
    names = ("shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale")
    shared = [t[None] for pair in (w13, w2) for t in quantize_block_fp8_weight_to_mxfp4(*pair)]
    f = 1.5
    ids, weights = append_shared_slots(
        layer.topk_ids, layer.topk_weights * (f if scaled == "topk" else 1), num_experts=E,
        routed_scaling_factor=f, scaled=scaled,
    )  # fmt: skip
    plain = weight_arguments(layer)
    slot = {**plain, **dict(zip(names, shared))}
    y = megamoe.mega_moe(layer.x, ids, weights, **slot)
    joined = {
        name: torch.cat([plain[name], part.view(plain[name].dtype)])
        for name, part in zip(("w13", "w13_scale", "w2", "w2_scale"), shared)
    }
    assert_bytes_equal(megamoe.mega_moe(layer.x, ids, weights, **{**plain, **joined}), y, "E + 1 experts")
    alone = megamoe.mega_moe(
        layer.x, torch.full_like(ids[:, :1], E), torch.ones_like(weights[:, :1]), **slot, moe_backend="reference"
    )
    routed = megamoe.mega_moe(layer.x, layer.topk_ids, layer.topk_weights, **plain, moe_backend="reference")
    expected = f * routed.float() + alone.float()
    result = y.float() * (f if scaled == "output" else 1)
    limits = replace(LIMITS[TRTLLM], rel_rms=8e-3, calc_diff=1e-4)  # three BF16 roundings lie between the two
    assert check(compare(result, expected), limits) is None


def test_an_expanded_shared_expert_beside_mxfp4_experts(device: str) -> None:
    """DeepSeek's checkpoint in one launch, without loss: the reference with the blocks' own values agrees."""
    layer = random_layer(FP8XFP4, tokens=T, hidden=H, intermediate=I, num_experts=E, top_k=K, device=device)
    w13, w2 = ([t.to(device) for t in _blocks(*shape)] for shape in ((2 * I, H), (H, I)))
    arguments = weight_arguments(layer)
    arguments |= dict(
        shared_w13=w13[0], shared_w13_scale=expand_block_scales(*w13),
        shared_w2=w2[0], shared_w2_scale=expand_block_scales(*w2),
    )  # fmt: skip
    inputs = layer.x, layer.topk_ids, layer.topk_weights
    y = megamoe.mega_moe(*inputs, **arguments)
    expected = megamoe.mega_moe(*inputs, **arguments, moe_backend="reference")
    assert check(compare(y, expected), LIMITS[FP8XFP4]) is None
