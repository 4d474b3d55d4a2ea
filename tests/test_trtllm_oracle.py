"""The FlashInfer adapter: what may be called where, and the exact arguments of the call that needs Blackwell."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megamoe import formats
from megamoe.kernels.layouts import trtllm
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import layer_spec, random_layer
from megamoe.oracle.reference import quantize
from megamoe.oracle.trtllm_gen import flashinfer_layouts, guards, routed_moe
from megamoe.recipe import resolve_recipe

pytestmark = pytest.mark.differential

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def root() -> Path:
    try:
        return flashinfer_layouts.locate(download=True)
    except OracleUnavailable as error:
        pytest.skip(str(error))


def _machine(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, version: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)

    def installed(name: str) -> str:
        if version is None:
            raise guards.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(
        guards,
        "metadata",
        SimpleNamespace(version=installed, PackageNotFoundError=guards.metadata.PackageNotFoundError),
    )


@pytest.mark.parametrize("name", guards.CUDA_QUANTIZERS)
def test_quantizers_are_refused_below_blackwell(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _machine(monkeypatch, (9, 0), "0.6.18")
    reason = guards.quantizer_unsupported_reason(name, CUDA)
    assert reason == f"{name} compiles to nothing for compute capability 9.0 and returns garbage; it needs 10.0"
    assert guards.quantizer_unsupported_reason(name, torch.device("cpu")) == f"{name} needs a CUDA GPU"
    _machine(monkeypatch, (10, 0), "0.6.18")
    assert guards.quantizer_unsupported_reason(name, CUDA) is None


def test_an_unknown_quantizer_is_an_error() -> None:
    with pytest.raises(ValueError, match="name is 'silu'; allowed: fp4_quantize, "):
        guards.quantizer_unsupported_reason("silu", CUDA)


@pytest.mark.parametrize(
    "capability, version, reason",
    [
        (None, None, "no CUDA GPU"),
        ((9, 0), "0.6.18", "the GPU has compute capability 9.0; trtllm-gen's kernels are for 10.0 and 10.3"),
        ((12, 0), "0.6.18", "the GPU has compute capability 12.0; trtllm-gen's kernels are for 10.0 and 10.3"),
        ((10, 0), None, "flashinfer-python is not installed"),
        ((10, 3), "0.7.4", "flashinfer-python 0.7.4 is installed; the contract is that of 0.6.18"),
        ((10, 0), "0.6.18", None),
    ],
)
def test_kernels_have_a_reason(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, version: str | None, reason: str | None
) -> None:
    _machine(monkeypatch, capability, version)
    assert guards.kernel_unsupported_reason() == reason


def test_the_call_names_every_argument_of_the_op(root: Path) -> None:
    (function,) = (
        node
        for node in ast.parse((root / "fused_moe" / "core.py").read_text()).body
        if getattr(node, "name", None) == "trtllm_fp4_block_scale_routed_moe"
    )
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in function.args.args]
    required = set(names[: len(names) - len(function.args.defaults)])
    layer = random_layer(routed_moe.RECIPE, tokens=3, hidden=256, intermediate=128, num_experts=4, top_k=2)
    given = routed_moe.arguments(
        layer.spec, layer.weights, quantize(layer.x, "mxfp8", amax_floor=0.0), layer.topk_ids, layer.topk_weights
    )
    assert required <= set(given) <= set(names)


def test_the_arguments_are_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(
        routed_moe.RECIPE, tokens=3, hidden=256, intermediate=128, num_experts=4, top_k=2, activation_clamp=7.0
    )
    x = quantize(layer.x, "mxfp8", amax_floor=0.0)
    given = routed_moe.arguments(layer.spec, layer.weights, x, layer.topk_ids, layer.topk_weights)
    assert given["hidden_states"] is x.q
    assert given["hidden_states_scale"].dtype == torch.float8_e4m3fn
    assert given["hidden_states_scale"].shape == (3, 8), "row-major and two-dimensional"
    assert given["topk_ids"][0].dtype == torch.int32
    assert given["gemm1_clamp_limit"].tolist() == [7.0] * 4
    assert (given["num_experts"], given["local_num_experts"], given["intermediate_size"]) == (4, 4, 128)
    for name, plain in (("gemm1_weights", layer.weights.w13), ("gemm2_weights", layer.weights.w2)):
        assert given[name].shape == plain.shape
        assert given[name].dtype == torch.uint8
    scales = trtllm.unswizzle_scales(given["gemm1_weights_scale"].view(torch.uint8), 256, 8)
    assert layer.weights.w13_scale is not None
    assert_bytes_equal(trtllm.unshuffle_w13(scales), layer.weights.w13_scale)
    # Kernel row 8 is gate row 0 of an expert, row 0 is its up row 0.
    values = formats.decode_e2m1(formats.unpack_e2m1(given["gemm1_weights"][2]))
    plain = formats.decode_e2m1(formats.unpack_e2m1(layer.weights.w13[2]))
    assert torch.equal(values[8], plain[0])
    assert torch.equal(values[0], plain[128])


def test_no_tokens_are_refused() -> None:
    layer = random_layer(routed_moe.RECIPE, tokens=1, hidden=256, intermediate=128, num_experts=4, top_k=2)
    x = quantize(layer.x, "mxfp8", amax_floor=0.0)
    with pytest.raises(ValueError, match="topk_ids has no rows"):
        routed_moe.arguments(layer.spec, layer.weights, x, layer.topk_ids[:0], layer.topk_weights[:0])


def test_the_call_is_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(routed_moe.RECIPE, tokens=1, hidden=256, intermediate=128, num_experts=4, top_k=2)
    x = quantize(layer.x, "mxfp8", amax_floor=0.0)
    _machine(monkeypatch, (9, 0), "0.6.18")
    with pytest.raises(OracleUnavailable, match=r"compute capability 9\.0"):
        routed_moe.routed_moe(layer.spec, layer.weights, x, layer.topk_ids, layer.topk_weights)
    _machine(monkeypatch, (10, 0), "0.6.18")
    other = layer_spec(resolve_recipe("mxf4xmxf4"), 256, 128, 4, 2)
    with pytest.raises(ValueError, match="this adapter serves fp8xfp4/mx32/trtllm_gen"):
        routed_moe.routed_moe(other, layer.weights, x, layer.topk_ids, layer.topk_weights)
    assert "hidden=192" in str(routed_moe.layer_unsupported_reason(layer_spec(routed_moe.RECIPE, 192, 128, 4, 2)))


def test_other_files_are_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(flashinfer_layouts.VARIABLE, str(tmp_path))
    with pytest.raises(OracleUnavailable, match="holds no flashinfer/fused_moe/core.py"):
        flashinfer_layouts.locate()
    (tmp_path / "fused_moe").mkdir()
    (tmp_path / "fused_moe" / "core.py").write_text("")
    (tmp_path / "utils.py").write_text("")
    with pytest.raises(OracleUnavailable, match="does not define get_shuffle_block_size"):
        flashinfer_layouts.load()
