"""Upstream's kernels as backends: what they decline and why, and what their layers pass on, with the kernels faked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megamoe
from megamoe.backends import select, unsupported_reason
from megamoe.backends.base import LayerRequest, UnsupportedError
from megamoe.backends.deep_gemm import BACKEND as DEEP_GEMM
from megamoe.backends.flashinfer_trtllm import BACKEND as FLASHINFER
from megamoe.backends.upstream import scaled_weights
from megamoe.oracle.deep_gemm import sm90_fused
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.parameters import LayerParameters
from megamoe.recipe import Recipe
from megamoe.spec import LayerSpec
from megamoe.weights import prepare

FP8 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
TRTLLM = Recipe("fp8xfp4", "mx32", "trtllm_gen")


def _request(recipe: Recipe, device: str = "cuda", **spec: Any) -> LayerRequest:
    sizes = {"hidden": 512, "intermediate": 512, "num_experts": 8, "top_k": 2, **spec}
    return LayerRequest(LayerSpec(recipe, **sizes), torch.device(device), 16)


@pytest.mark.parametrize("name", ("deep_gemm", "flashinfer_trtllm"))
def test_cpu_tensors_are_declined(name: str) -> None:
    assert unsupported_reason(name, _request(FP8, "cpu")) == "device type 'cpu'; served: cuda"
    with pytest.raises(UnsupportedError, match=f"moe_backend='{name}': device type 'cpu'"):
        select(name, _request(FP8, "cpu"))


def test_recipes_and_ranks_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_fused, "unsupported_reason", lambda: None)
    reason = DEEP_GEMM.unsupported_reason(_request(TRTLLM))
    assert reason == "recipe fp8xfp4/mx32/trtllm_gen is not DeepGEMM's"
    hopper = Recipe("fp8xfp4", "block128", "deep_gemm_sm90")
    assert str(DEEP_GEMM.unsupported_reason(_request(hopper))).startswith(f"recipe {hopper}; the SM90 kernel serves")
    assert DEEP_GEMM.unsupported_reason(_request(FP8)) is None
    part = _request(FP8, num_experts=16, local_experts=8)
    assert "one rank" in str(DEEP_GEMM.unsupported_reason(part))
    assert "one rank" in str(FLASHINFER.unsupported_reason(_request(TRTLLM, num_experts=16, local_experts=8)))
    assert str(DEEP_GEMM.unsupported_reason(_request(FP8, hidden=384))).startswith("hidden=384")


class _FakeFused:
    """Stands for the live kernel: keeps what it is given, returns the tokens times the sum of their weights."""

    nbytes = 1234

    def __init__(self, spec: LayerSpec, weights: object, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls.append((x, ids, weights))
        return (x.float() * weights.sum(-1, keepdim=True)).bfloat16()


def _layer(**options: Any) -> Layer:
    return random_layer(FP8, tokens=5, hidden=512, intermediate=512, num_experts=4, top_k=2, **options)


def test_a_deep_gemm_layer_passes_on_dense_rows_int32_ids_and_scaled_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_fused, "Sm90Fused", _FakeFused)
    layer = _layer(expert_scales=True, routed_scaling_factor=2.5)
    request = LayerRequest(layer.spec, torch.device("cpu"), 8)
    opened = DEEP_GEMM.open(request, layer.weights, layer.parameters)
    wide = torch.cat((layer.x, layer.x), dim=1)
    ids = layer.topk_ids.long()
    ids[1, 0] = 99
    output = torch.full_like(layer.x, torch.nan)
    opened(wide[:, :512], ids, layer.topk_weights, output)
    ((x, passed_ids, weights),) = opened._fused.calls  # type: ignore[attr-defined]
    assert x.is_contiguous()
    assert passed_ids.dtype == torch.int32
    expected = scaled_weights(ids, layer.topk_weights, layer.parameters)
    assert_bytes_equal(weights, expected, "weights")
    assert_bytes_equal(output, (layer.x.float() * expected.sum(-1, keepdim=True)).bfloat16(), "output")
    assert opened.skipped_ids == 1
    assert opened.workspace_bytes == 1234


def test_weights_are_scaled_by_global_id_then_by_the_factor() -> None:
    ids = torch.tensor([[0, 2, -1, 7]])
    parameters = LayerParameters(expert_scales=torch.tensor([2.0, 3.0, 5.0]), routed_scaling_factor=10.0)
    scaled = scaled_weights(ids, torch.tensor([[1.0, 1.0, 1.0, 1.0]]), parameters)
    assert scaled.tolist() == [[20.0, 50.0, 10.0, 10.0]]


@pytest.mark.parametrize("options", [{"bias": True}, {"w13_layout": "interleaved"}], ids=str)
def test_options_without_an_argument_upstream_are_refused(options: dict[str, Any]) -> None:
    layer = _layer(**options)
    request = LayerRequest(layer.spec, torch.device("cpu"), 8)
    for backend in (DEEP_GEMM, FLASHINFER):
        with pytest.raises(UnsupportedError, match="its kernel takes no w13_"):
            backend.open(request, prepare(layer.weights, FP8), layer.parameters)


def test_the_public_call_names_the_backend_and_its_reason() -> None:
    layer = _layer()
    arguments = {**vars(layer.weights), "mma_type": "fp8xfp8"}
    output = torch.full_like(layer.x, torch.nan)
    with pytest.raises(UnsupportedError, match="moe_backend='deep_gemm': device type 'cpu'"):
        megamoe.mega_moe(
            layer.x, layer.topk_ids, layer.topk_weights, **arguments, output=output, moe_backend="deep_gemm"
        )
    assert output.isnan().all()
