"""The drop-in on the SM90 tier: FP8 experts as they come, MXFP4 experts re-laid in place by their owner."""

import dataclasses
from typing import Any

import pytest
import torch

import megamoe.deep_gemm as dg
from megamoe.backends.base import UnsupportedError
from megamoe.kernels.layouts.scale_atoms import pack_scale_words
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.recipe import Recipe

FP4 = Recipe("fp8xfp4", "block128", "deep_gemm_sm90")
FP8 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
SIZES: dict[str, Any] = dict(hidden=512, intermediate=512, num_experts=3, top_k=2, activation_clamp=1.5)
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs compute capability 9.x")


def _layer(recipe: Recipe, tokens: int, device: str) -> Layer:
    return random_layer(recipe, tokens=tokens, masked=0.2, device=device, **SIZES)


def _transformed(layer: Layer) -> Any:
    w = layer.weights
    assert w.w13_scale is not None and w.w2_scale is not None  # noqa: PT018
    if layer.spec.recipe == FP8:
        return dg.transform_weights_for_mega_moe_sm90((w.w13, w.w13_scale), (w.w2, w.w2_scale))
    parts = ((w.w13, w.w13_scale), (w.w2.clone(), w.w2_scale))  # the transform keeps w2 where it is
    return dg.transform_weights_for_mega_moe(*((q.view(torch.int8), pack_scale_words(sf)) for q, sf in parts))


def _buffer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dg, "_pretend_sm", 90)
    buffer = dg.get_symm_buffer_for_mega_moe(None, 3, 384, 2, SIZES["hidden"], SIZES["intermediate"])
    buffer.buffer.fill_(-1)
    return buffer


def _call(layer: Layer, buffer: Any, l1: Any, l2: Any, y: torch.Tensor, **options: Any) -> torch.Tensor:
    dg.mega_moe_pre_dispatch_sm90(
        layer.x, layer.topk_ids, layer.topk_weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights,
        num_tokens=len(layer.x),
    )  # fmt: skip
    fused = dg.fp8_mega_moe if layer.spec.recipe == FP8 else dg.fp8_fp4_mega_moe
    fused(y, l1, l2, buffer, activation_clamp=layer.spec.activation_clamp, **options)
    return y


def _agree(layer: Layer, y: torch.Tensor) -> None:
    expected = moe_layer(layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec, full_trace=False).y
    problem = check(compare(y, expected), LIMITS[layer.spec.recipe])
    assert problem is None, problem


def test_there_and_back(device: str) -> None:
    transformed = _transformed(_layer(FP4, 2, device))
    before = [tensor.clone() for pair in transformed for tensor in pair]
    tiled = dg.to_hopper_(*transformed)
    for (codes, store), (weight, words) in zip(tiled, transformed):
        assert codes.dim() == 4
        assert codes.data_ptr() == weight.data_ptr()
        assert store.data_ptr() == words.data_ptr()
        assert store.numel() == words.numel() * 4
    assert not torch.equal(transformed[0][0], before[0])
    back = dg.from_hopper_(*tiled)
    for tensor, wanted in zip((tensor for pair in back for tensor in pair), before):
        assert_bytes_equal(tensor, wanted)
        assert tensor.stride() == wanted.stride()


def test_what_is_refused_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(FP4, 2, device)
    l1, l2 = _transformed(layer)
    before = l1[0].clone()
    with pytest.raises(TypeError, match=r"^l2_weights\[1\] must be int32 \(3, 512, 4\)"):
        dg.to_hopper_(l1, (l2[0], l2[1][:, :, :2]))
    with pytest.raises(ValueError, match="^l1_weights: 96 rows × 512 columns are not whole tiles of 128 × 256"):
        dg.to_hopper_((l1[0][:, :96].contiguous(), l1[1].mT[..., :96].contiguous().mT), l2)
    with pytest.raises(ValueError, match="^l1_weights is not what to_hopper_ returns"):
        dg.from_hopper_(l1, l2)
    assert_bytes_equal(l1[0], before, "nothing was written")
    apart = torch.empty(l1[0].numel() + 8, dtype=torch.int8, device=device)[8:].view(l1[0].shape)
    with pytest.raises(ValueError, match="^l1_weights: the weights begin at an address that is no multiple of 16"):
        dg.to_hopper_((apart, l1[1]), l2)
    tiled = dg.to_hopper_(l1, l2)
    buffer, y = _buffer(monkeypatch), torch.full_like(layer.x, torch.nan)
    with pytest.raises(TypeError, match="^l2_weights is not in Hopper's order and the other one is"):
        _call(layer, buffer, tiled[0], l2, y)
    buffer.x_sf = buffer.x_sf_ue8m0
    with pytest.raises(ValueError, match="^l1_weights are in Hopper's order; allowed for them: an SM90SymmBuffer"):
        dg.fp8_fp4_mega_moe(y, *tiled, buffer)
    assert y.isnan().all()


def test_the_way_back_is_checked_before_it_begins(device: str) -> None:
    """What is wrong with the second pair leaves the first one as it is."""
    l1, (codes, store) = dg.to_hopper_(*_transformed(_layer(FP4, 2, device)))
    before = [tensor.clone() for tensor in (*l1, codes, store)]
    apart = torch.empty(len(store) + 1, dtype=torch.uint8, device=device)[1:]
    bad: list[tuple[Any, str]] = [
        (
            (codes, store[:-4]),
            rf"\[1\] has {len(store) - 4} bytes; expected {len(store)}, E·rows·K/32 of l2_weights\[0\]",
        ),
        ((codes[:2], store), rf"\[1\] has {len(store)} bytes; expected {len(store) * 2 // 3}"),
        (
            (codes.view(3, 4, 4, 8192), store),
            r"\[0\] has shape \(3, 4, 4, 8192\); expected \[E, rows/128, K/256, 16384\]",
        ),
        ((codes[:0], store[:0]), r"\[0\] has shape \(0, 4, 2, 16384\)"),
        ((codes.mT.contiguous().mT, store), " has strides "),
        ((codes, store.repeat_interleave(2)[::2]), " has strides "),
        ((codes, apart), r" has strides .* begin 1 bytes into their memory"),
        ((codes, store.to("meta")), rf"\[1\] is on meta; allowed: {codes.device}, where l2_weights\[0\] is"),
        ((codes.view(torch.int8), store), " is not what to_hopper_ returns"),
    ]
    for l2, message in bad:
        with pytest.raises(ValueError, match=f"^l2_weights{message}"):
            dg.from_hopper_(l1, l2)
    for tensor, wanted in zip((*l1, codes, store), before):
        assert_bytes_equal(tensor, wanted, "nothing was written")


@pytest.mark.parametrize("recipe", (FP4, FP8), ids=str)
def test_options_share_the_tiers_memory(recipe: Recipe, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One workspace of the tier per buffer and recipe, whatever the clamps of its calls."""
    ran: list[Any] = []
    monkeypatch.setattr("megamoe.deep_gemm.fused.tier_unsupported_reason", lambda spec, arch: None)
    monkeypatch.setattr("megamoe.deep_gemm.fused.run_tier", lambda tier, *_: ran.append(tier))
    layer = _layer(recipe, 2, device)
    l1, l2 = _transformed(layer)
    if recipe == FP4:
        l1, l2 = dg.to_hopper_(l1, l2)
    buffer, y = _buffer(monkeypatch), torch.full_like(layer.x, torch.nan)
    for clamp in (1.5, 2.5, 1.5):
        clamped = dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, activation_clamp=clamp))
        _call(clamped, buffer, l1, l2, y)
    assert len(buffer.prepared) == 2
    assert len(ran) == 3
    assert {id(tier) for tier in ran} == {id(ran[0])}
    assert ran[0].rows.untyped_storage().data_ptr() == buffer.buffer.untyped_storage().data_ptr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_hopper_the_reason_is_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(FP4, 2, device)
    tiled = dg.to_hopper_(*_transformed(layer))
    with pytest.raises(UnsupportedError, match="in Hopper's order: the SM90 tier needs a GPU of compute capability 9"):
        _call(layer, _buffer(monkeypatch), *tiled, torch.full_like(layer.x, torch.nan))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("tokens", (3, 40, 300))
@pytest.mark.parametrize("recipe", (FP4, FP8), ids=str)
def test_layers_on_the_tier(recipe: Recipe, tokens: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(recipe, tokens, device)
    l1, l2 = _transformed(layer)
    if recipe == FP4:
        l1, l2 = dg.to_hopper_(l1, l2)
    buffer = _buffer(monkeypatch)
    stats = torch.full((3,), 7, dtype=torch.int32, device=device)
    y = _call(layer, buffer, l1, l2, torch.full_like(layer.x, torch.nan), cumulative_local_expert_recv_stats=stats)
    assert all(prepared.tier is not None for prepared in buffer.prepared.values())
    if tokens >= 40:  # fewer tell little of FP8 sums: see oracle/metrics.py
        _agree(layer, y)
    assert (stats - 7).tolist() == torch.bincount(layer.topk_ids[layer.topk_ids >= 0], minlength=3).tolist()

    more = dataclasses.replace(layer, x=layer.x.flip(0).contiguous(), topk_ids=layer.topk_ids.roll(1, 0))
    again = _call(more, buffer, l1, l2, torch.full_like(layer.x, torch.nan))
    graph = torch.cuda.CUDAGraph()
    output = torch.full_like(layer.x, torch.nan)
    with torch.cuda.graph(graph):
        _call(more, buffer, l1, l2, output)
    graph.replay()
    assert_bytes_equal(output, again, "the graph's output")
