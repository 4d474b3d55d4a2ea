"""Ours against the own Python of `sgl-deep-gemm` 0.1.7, imported from its wheel: transforms, quantizers, buffers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megamoe
from megamoe.kernels.layouts import buffers
from megamoe.kernels.layouts.gate_up import interleave_gate_up
from megamoe.kernels.layouts.scale_atoms import pack_scale_words
from megamoe.kernels.layouts.weights import (
    restore_weights_sm90,
    restore_weights_sm100,
    transform_weights_sm90,
    transform_weights_sm100,
)
from megamoe.oracle import reference
from megamoe.oracle.deep_gemm import python_helpers
from megamoe.oracle.deep_gemm.inputs import awkward_rows, random_rows
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import quantize_weight
from megamoe.oracle.reference.quantizers import BlockFormat
from megamoe.recipe import resolve_recipe, traits

pytestmark = pytest.mark.differential

E, H, I = 3, 512, 256


@pytest.fixture(scope="module")
def upstream() -> python_helpers.PythonHelpers:
    try:
        return python_helpers.load(download=True)
    except OracleUnavailable as error:
        pytest.skip(str(error))


def _random_bytes(*shape: int, seed: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).view(dtype)


def _layer(lead: tuple[int, ...], width: int, dtype: torch.dtype, group: int) -> Any:
    """l1 and l2 of random bytes: weights [.., N, K], scale bytes [.., N, K / group]."""
    packed = 2 if dtype == torch.int8 else 1
    pairs = []
    for seed, (rows, columns) in enumerate(((2 * width, H), (H, width))):
        weight = _random_bytes(*lead, rows, columns // packed, seed=seed, dtype=dtype)
        pairs.append((weight, _random_bytes(*lead, rows, columns // group, seed=seed + 2)))
    return pairs


def _assert_same(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert_bytes_equal(actual, expected, name)
    assert actual.stride() == expected.stride(), name


SM100_WEIGHTS = {
    "fp8xfp4": ("fp8xfp4", (E,), torch.int8),
    "mxf4xmxf4": ("mxf4xmxf4", (E,), torch.int8),
    "nvfp4xnvfp4": ("nvfp4xnvfp4", (E,), torch.int8),
    "shared fp8xfp4": ("fp8xfp4", (), torch.float8_e4m3fn),
    "shared mxf4xmxf4": ("mxf4xmxf4", (), torch.int8),
    "shared nvfp4xnvfp4": ("nvfp4xnvfp4", (), torch.int8),
}


@pytest.mark.parametrize("mma_type, lead, dtype", SM100_WEIGHTS.values(), ids=SM100_WEIGHTS)
def test_sm100_weight_transform(
    upstream: python_helpers.PythonHelpers, mma_type: str, lead: tuple[int, ...], dtype: torch.dtype
) -> None:
    group = traits(resolve_recipe(mma_type)).weight_group[1]
    l1, l2 = _layer(lead, I, dtype, group)
    words = [(w, pack_scale_words(s)) for w, s in (l1, l2)]
    theirs = upstream.mega.transform_weights_for_mega_moe(*words, mma_type=mma_type)
    for ours in (transform_weights_sm100(l1, l2, mma_type), transform_weights_sm100(*words, mma_type)):
        for name, mine, other in zip(("l1", "l2"), ours, theirs):
            _assert_same(mine[0], other[0], f"{name} weight")
            _assert_same(mine[1], other[1], f"{name} scale")
    for name, plain, back in zip(("l1", "l2"), (l1, l2), restore_weights_sm100(*theirs, mma_type)):
        assert_bytes_equal(back[0], plain[0], f"{name} weight, restored from upstream's")
        assert_bytes_equal(back[1], plain[1], f"{name} scale, restored from upstream's")


def test_a_swapped_gate_and_up_is_caught(upstream: python_helpers.PythonHelpers) -> None:
    (w1, s1), l2 = _layer((E,), I, torch.int8, 32)
    theirs, _ = upstream.mega.transform_weights_for_mega_moe(
        (w1, pack_scale_words(s1)), (l2[0], pack_scale_words(l2[1]))
    )
    swapped = [torch.cat(list(reversed(t.chunk(2, -2))), -2) for t in (w1, s1)]
    (mine, scale), _ = transform_weights_sm100((swapped[0], swapped[1]), l2, "fp8xfp4")
    for actual, expected in ((mine, theirs[0]), (scale, theirs[1])):
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bytes_equal(actual, expected)


def test_bf16_weight_transform(upstream: python_helpers.PythonHelpers) -> None:
    w1 = _random_bytes(E, 2 * I, 2 * H).view(torch.bfloat16)
    w2 = _random_bytes(E, H, 2 * I).view(torch.bfloat16)
    theirs, untouched = upstream.mega.transform_weights_for_mega_moe(w1, w2, mma_type="bf16xbf16")
    assert untouched is w2
    _assert_same(interleave_gate_up(w1, traits(resolve_recipe("bf16xbf16")).interleave), theirs, "l1")


def test_sm90_weight_transform(upstream: python_helpers.PythonHelpers) -> None:
    l1 = _random_bytes(E, 2 * I, H, dtype=torch.float8_e4m3fn), torch.rand(E, 2 * I // 128, H // 128)
    l2 = _random_bytes(E, H, I, seed=1, dtype=torch.float8_e4m3fn), torch.rand(E, H // 128, I // 128)
    theirs = upstream.sm90.transform_weights_for_mega_moe_sm90(l1, l2)
    for mine, other in zip(transform_weights_sm90(l1, l2), theirs):
        _assert_same(mine[0], other[0], "weight")
        _assert_same(mine[1], other[1], "scale")
    for plain, back in zip((l1, l2), restore_weights_sm90(*theirs)):
        assert_bytes_equal(back[0], plain[0], "weight, restored from upstream's")
        assert_bytes_equal(back[1], plain[1], "scale, restored from upstream's")


@pytest.mark.parametrize("rows, groups", [(256, 16), (130, 6), (4, 1), (3, 3)])
def test_packed_ue8m0_words(upstream: python_helpers.PythonHelpers, rows: int, groups: int) -> None:
    scales = _random_bytes(E, rows, groups).clamp(1, 254)
    fp32 = (scales.int() << 23).view(torch.float32)
    _assert_same(pack_scale_words(scales), upstream.layout._pack_fp32_into_ue8m0_fallback(fp32), "words")


def test_packed_ue4m3_words(upstream: python_helpers.PythonHelpers) -> None:
    scales = _random_bytes(E, 256, 8).clamp(0, 0x7E)
    fp32 = scales.view(torch.float8_e4m3fn).float()
    _assert_same(pack_scale_words(scales), upstream.math.transform_ue4m3_sf_into_required_layout(fp32, 256), "words")


QUANTIZERS = {
    "mxfp8": (megamoe.quantize_mxfp8, "per_token_cast_to_fp8"),
    "mxfp4": (megamoe.quantize_mxfp4, "per_token_cast_to_fp4"),
}


def _finite_rows(hidden: int, group: int) -> torch.Tensor:
    x = torch.cat([awkward_rows(hidden, group, finite=True), random_rows(40, hidden, torch.Generator().manual_seed(5))])
    return torch.where(x.isfinite(), x, 1.0)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_mx_quantizer_of_finite_rows(upstream: python_helpers.PythonHelpers, kind: str, group: int) -> None:
    ours, name = QUANTIZERS[kind]
    x = _finite_rows(4 * group, group)
    q, packed = getattr(upstream.math, name)(x, use_ue8m0=True, gran_k=group, use_packed_ue8m0=True)
    q, sf = q.view(torch.float8_e4m3fn if kind == "mxfp8" else torch.uint8), packed.view(torch.uint8)
    by_reference = reference.quantize(x, kind, group)
    for by, (mine, scales) in {"kernel": ours(x, group=group), "reference": by_reference[:2]}.items():
        assert_bytes_equal(mine, q, f"{by}: elements")
        assert_bytes_equal(scales, sf, f"{by}: scales")


def test_ties_to_even_and_swapped_nibbles_are_caught(upstream: python_helpers.PythonHelpers) -> None:
    x = _finite_rows(128, 32)
    expected, _ = upstream.math.per_token_cast_to_fp4(x, use_ue8m0=True, gran_k=32)
    mine, sf = megamoe.quantize_mxfp4(x)
    scaled = x.float() * reference.expand_scales(
        megamoe.formats.ue8m0_inverse(sf), BlockFormat("e2m1", "ue8m0", 1, 32), *x.shape
    )
    even = megamoe.formats.pack_e2m1(megamoe.formats.encode_e2m1(scaled, "even"))
    for broken in (even, (mine << 4) | (mine >> 4)):
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bytes_equal(broken, expected.view(torch.uint8))


def test_fp8_block128_quantizer_above_upstreams_floor(upstream: python_helpers.PythonHelpers) -> None:
    """The host helper's floor is 1e-4, the kernel's and ours 1e-10: they agree where neither is met."""
    x = _finite_rows(512, 128)
    x = x[(x.unflatten(-1, (-1, 128)).abs().amax(-1) >= 2e-4).all(-1)]
    assert len(x) > 30
    q, sf = upstream.math.per_token_cast_to_fp8(x, use_ue8m0=False, gran_k=128)
    by_reference = reference.quantize(x, "fp8_block128")
    for by, (mine, scales) in {"kernel": megamoe.quantize_fp8_block128(x), "reference": by_reference[:2]}.items():
        assert_bytes_equal(mine, q, f"{by}: elements")
        assert_bytes_equal(scales, sf, f"{by}: scales")


def test_weight_quantizers_of_the_random_layers(upstream: python_helpers.PythonHelpers) -> None:
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(2))
    q, sf = upstream.math.per_block_cast_to_fp8(w, use_ue8m0=False, gran_k=128)
    mine, scales = quantize_weight(w, BlockFormat("e4m3", "fp32", 128, 128))
    assert_bytes_equal(mine, q, "E4M3 128x128")
    assert_bytes_equal(scales, sf, "E4M3 128x128, scales")
    q, packed = upstream.math.per_token_cast_to_fp4(w, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True)
    mine, scales = quantize_weight(w, BlockFormat("e2m1", "ue8m0", 1, 32))
    assert_bytes_equal(mine, q.view(torch.uint8), "MXFP4")
    assert_bytes_equal(scales, packed.view(torch.uint8), "MXFP4, scales")


class _OneRank:
    def size(self) -> int:
        return 1

    def barrier(self) -> None:
        pass


class _Torch:
    """torch for upstream's buffer classes on a machine without a GPU: "cuda" tensors come from the CPU."""

    cuda = SimpleNamespace(synchronize=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)


@pytest.mark.parametrize("num_shared_experts", [0, 1, 2])
@pytest.mark.parametrize("mma_type", ["fp8xfp4", "mxf4xmxf4", "nvfp4xnvfp4", "bf16xbf16"])
def test_upstreams_sm100_buffer_class_takes_our_views(
    upstream: python_helpers.PythonHelpers, monkeypatch: pytest.MonkeyPatch, mma_type: str, num_shared_experts: int
) -> None:
    """Its attributes, in the order and through the DLPack exchange of its code, are the views of our names."""
    shape: Any = dict(num_experts=4, top_k=2, hidden=512, intermediate=512, num_shared_experts=num_shared_experts)
    layout = buffers.sm100_layout(mma_type, max_tokens=5, **shape)
    asked = []

    def size(*arguments: Any) -> Any:
        asked.append(arguments)
        return layout.nbytes, lambda buffer: list(buffers.slice_buffer(layout, buffer).values())

    monkeypatch.setattr(upstream.mega, "torch", _Torch())
    monkeypatch.setattr(upstream.mega._C, "get_symm_buffer_size_for_mega_moe", size, raising=False)
    monkeypatch.setattr(upstream.mega._C, "get_token_alignment_for_mega_moe", lambda: 384, raising=False)
    theirs = upstream.mega.get_symm_buffer_for_mega_moe(
        _OneRank(), 4, 5, 2, 512, 512, num_shared_experts, mma_type=mma_type
    )
    assert asked == [(1, 4, 384, 2, 512, 512, mma_type, "swiglu", num_shared_experts)]
    for name, view in buffers.slice_buffer(layout, theirs.buffer).items():
        attribute = getattr(theirs, name)
        assert (attribute.shape, attribute.dtype) == (view.shape, view.dtype), name
        assert not view.numel() or (attribute.stride(), attribute.data_ptr()) == (view.stride(), view.data_ptr()), name


def test_upstreams_sm90_buffer_class_takes_our_views(
    upstream: python_helpers.PythonHelpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    symmetric_memory = pytest.importorskip("torch.distributed._symmetric_memory", reason="torch without distributed")
    layout = buffers.sm90_layout(num_experts=4, max_tokens=5, top_k=2, hidden=512, intermediate=256)

    def size(*arguments: Any) -> Any:
        assert arguments == (1, 4, 384, 2, 512, 256, True, "swiglu")
        return layout.nbytes, lambda buffer: list(buffers.slice_buffer(layout, buffer).values())

    monkeypatch.setattr(upstream.sm90, "torch", _Torch())
    monkeypatch.setattr(symmetric_memory, "empty", _Torch.empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda buffer, group: None)
    monkeypatch.setattr(upstream.sm90._C, "get_symm_buffer_size_for_sm90_mega_moe", size, raising=False)
    theirs = upstream.sm90.SM90SymmBuffer(_OneRank(), 4, 384, 2, 512, 256)
    for name, view in buffers.slice_buffer(layout, theirs.buffer).items():
        attribute = getattr(theirs, name)
        assert (attribute.shape, attribute.dtype, attribute.stride()) == (view.shape, view.dtype, view.stride()), name
