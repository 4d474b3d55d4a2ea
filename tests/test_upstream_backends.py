"""Upstream's kernels as backends: what they decline and why, and what their layers pass on, with the kernels faked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import megamoe
from megamoe.backends import flashinfer_trtllm, select, unsupported_reason
from megamoe.backends.base import LayerRequest, UnsupportedError
from megamoe.backends.deep_gemm import BACKEND as DEEP_GEMM
from megamoe.backends.flashinfer_trtllm import BACKEND as FLASHINFER
from megamoe.backends.upstream import UpstreamLayer
from megamoe.formats import round_to_fp32
from megamoe.oracle.deep_gemm import sm90_fused, sm100_fused
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.trtllm_gen import routed_moe
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe
from megamoe.spec import LayerSpec
from megamoe.weights import prepare

FP8 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
SM100 = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
MXF4 = Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100")
NVFP4 = Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100")
NV16 = Recipe("nvfp4xnvfp4", "nv16", "trtllm_gen")
BF16 = Recipe("bf16xbf16", "none", "deep_gemm_sm100")
TRTLLM = Recipe("fp8xfp4", "mx32", "trtllm_gen")
BACKENDS: dict[str, Any] = {"deep_gemm": DEEP_GEMM, "flashinfer_trtllm": FLASHINFER}


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


def _fake_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """A machine on which both upstreams run, faked; what reaches them, as it comes."""
    passed: dict[str, torch.Tensor] = {}

    class Fused(_FakeFused):
        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            passed.update(x=x, ids=ids, weights=weights)
            return super().__call__(x, ids, weights)

    def run(keywords: dict[str, Any]) -> torch.Tensor:
        passed["ids"], passed["weights"] = keywords["topk_ids"]
        return torch.ones(keywords["hidden_states"].shape, dtype=torch.bfloat16, device=passed["ids"].device)

    for module, name in ((sm90_fused, "Sm90Fused"), (sm100_fused, "Sm100Fused")):
        monkeypatch.setattr(module, "unsupported_reason", lambda: None)
        monkeypatch.setattr(module, name, Fused)
    monkeypatch.setattr(flashinfer_trtllm, "kernel_unsupported_reason", lambda: None)
    monkeypatch.setattr(routed_moe, "run", run)
    return passed


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
    scales = layer.parameters.expert_scales
    assert scales is not None
    expected = torch.where(ids < 4, layer.topk_weights * scales[ids.clamp_max(3)], layer.topk_weights) * 2.5
    assert_bytes_equal(weights, expected, "weights")
    assert_bytes_equal(output, (layer.x.float() * expected.sum(-1, keepdim=True)).bfloat16(), "output")
    assert opened.skipped_ids == 1
    assert opened.workspace_bytes == 1234


def test_weights_are_scaled_by_global_id_then_by_the_factor() -> None:
    ids = torch.tensor([[0, 2, -1, 7]])
    parameters = LayerParameters(expert_scales=torch.tensor([2.0, 3.0, 5.0]), routed_scaling_factor=10.0)
    request, ones = _request(FP8, "cpu", num_experts=3), torch.ones(1, 4)
    known, scaled = UpstreamLayer(request, parameters)._routing(ids, ones)
    assert known.tolist() == [[0, 2, -1, -1]]
    assert scaled.tolist() == [[20.0, 50.0, 10.0, 10.0]]
    assert UpstreamLayer(request, LayerParameters())._routing(ids, ones)[1] is ones, "without factors, as they are"


@dataclass(frozen=True)
class Option:
    """A layer's option under one backend: `words` of its refusal, None where it is served. `fields` of `LayerSpec`,
    `LayerParameters` and `PlainWeights` are what it sets."""

    backend: str
    recipe: Recipe
    options: dict[str, Any]
    fields: tuple[str, ...]
    words: str | None

    def __str__(self) -> str:
        return f"{self.backend}: {self.options or self.fields} under {self.recipe}"


SHARED = ("num_shared_experts", "shared_weight", "shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale")
PER_EXPERT = ("clamp", "alpha", "beta")
GLOBAL_SCALES = ("l1_alphas", "l2_alphas", "l2_act_scales")
TOP_32: dict[str, Any] = {"top_k": 32, "num_experts": 40}
OAI: dict[str, Any] = {"activation": "swigluoai"}
RANKS: dict[str, Any] = {"num_experts": 8, "local_experts": 4, "local_expert_offset": 2}
RANK_FIELDS = ("local_experts", "local_expert_offset")
OPTIONS = [
    Option("deep_gemm", SM100, {}, (), None),
    Option("deep_gemm", SM100, {"activation_clamp": 7.0}, ("activation_clamp",), None),
    Option("deep_gemm", SM100, OAI, ("activation",), None),
    Option("deep_gemm", SM100, {**OAI, "activation_alpha": 1.702}, ("activation_alpha",), None),
    Option("deep_gemm", SM100, {**OAI, "activation_alpha": 1.0}, ("activation_alpha",), "activation_alpha=1;"),
    Option("deep_gemm", SM100, {**OAI, "activation_beta": 0.0}, ("activation_beta",), "activation_beta=0; swigluoai"),
    Option("deep_gemm", MXF4, {**OAI, "activation_alpha": 0.5}, ("activation_alpha",), "activation_alpha=0.5;"),
    Option("deep_gemm", NVFP4, {**OAI, "activation_beta": 0.5}, ("activation_beta",), "activation_beta=0.5; swigluoai"),
    Option("deep_gemm", SM100, {"activation": "situ"}, ("activation",), None),
    Option("deep_gemm", BF16, OAI, ("activation",), "activation='swigluoai'; bf16xbf16 has swiglu"),
    Option("deep_gemm", FP8, {"activation_clamp": 7.0}, ("activation_clamp",), None),
    Option("deep_gemm", FP8, OAI, ("activation",), "activation='swigluoai'; the SM90 kernel has swiglu"),
    Option("deep_gemm", SM100, {"num_shared_experts": 1}, SHARED, None),
    Option("deep_gemm", SM100, {"num_shared_experts": 1, "shared_weight": "e2m1"}, SHARED, "shared weights of e2m1"),
    Option("deep_gemm", FP8, {"num_shared_experts": 1}, SHARED, "num_shared_experts=1; the SM90 kernel has none"),
    Option("deep_gemm", SM100, {**TOP_32, "num_shared_experts": 1}, ("top_k",), "top_k=32 and the shared"),
    Option("deep_gemm", FP8, {"expert_scales": True}, ("expert_scales",), None),
    Option("deep_gemm", FP8, {"routed_scaling_factor": 2.5}, ("routed_scaling_factor",), None),
    Option("deep_gemm", FP8, RANKS, RANK_FIELDS, "experts of other ranks"),
    Option("deep_gemm", FP8, {"expert_map": True}, ("has_expert_map", "expert_map"), "an expert_map"),
    Option("deep_gemm", FP8, {"bias": True}, ("w13_bias", "w2_bias"), "its adapter passes on no w13_bias"),
    Option("deep_gemm", FP8, {"w13_layout": "interleaved"}, ("w13_layout",), "no w13_layout='interleaved'"),
    Option("deep_gemm", NVFP4, {"global_scales": True}, GLOBAL_SCALES, None),
    Option("deep_gemm", NV16, {}, ("x_gsf",), "recipe nvfp4xnvfp4/nv16/trtllm_gen is not DeepGEMM's"),
    Option("deep_gemm", TRTLLM, {**OAI, "per_expert": PER_EXPERT}, PER_EXPERT, "is not DeepGEMM's"),
    Option("flashinfer_trtllm", TRTLLM, {}, (), None),
    Option("flashinfer_trtllm", TRTLLM, {"activation_clamp": 7.0}, ("activation_clamp",), None),
    Option("flashinfer_trtllm", TRTLLM, OAI, ("activation",), "this adapter serves swiglu"),
    Option("flashinfer_trtllm", TRTLLM, {**OAI, "activation_alpha": 1.0}, ("activation_alpha",), "serves swiglu"),
    Option("flashinfer_trtllm", TRTLLM, {**OAI, "activation_beta": 0.0}, ("activation_beta",), "serves swiglu"),
    Option("flashinfer_trtllm", TRTLLM, {"per_expert": ("clamp",)}, ("clamp",), "no activation_clamp per expert"),
    Option(
        "flashinfer_trtllm", TRTLLM, {**OAI, "per_expert": ("alpha", "beta")}, ("alpha", "beta"), "serves swiglu"
    ),
    Option("flashinfer_trtllm", TRTLLM, {"top_k": 3, "num_shared_experts": 1}, SHARED, "without shared slots"),
    Option("flashinfer_trtllm", TRTLLM, TOP_32, ("top_k",), None),
    Option("flashinfer_trtllm", TRTLLM, {"expert_scales": True}, ("expert_scales",), None),
    Option("flashinfer_trtllm", TRTLLM, {"routed_scaling_factor": 2.5}, ("routed_scaling_factor",), None),
    Option("flashinfer_trtllm", TRTLLM, RANKS, RANK_FIELDS, "experts of other ranks"),
    Option("flashinfer_trtllm", TRTLLM, {"expert_map": True}, ("has_expert_map", "expert_map"), "an expert_map"),
    Option("flashinfer_trtllm", TRTLLM, {"bias": True}, ("w13_bias", "w2_bias"), "its adapter passes on no w13_bias"),
    Option("flashinfer_trtllm", TRTLLM, {"w13_layout": "interleaved"}, ("w13_layout",), "no w13_layout='interleaved'"),
    Option("flashinfer_trtllm", TRTLLM, {"global_scales": True}, GLOBAL_SCALES, "its adapter passes on no l1_alphas"),
    Option("flashinfer_trtllm", NV16, {}, ("x_gsf",), "this adapter serves fp8xfp4/mx32/trtllm_gen"),
]  # fmt: skip
STRUCTURE = {
    "recipe", "hidden", "intermediate", "num_experts", "ep_rank", "ep_size", "w13", "w13_scale", "w2", "w2_scale",
}  # fmt: skip
"""Fields that are no options; `test_recipes_and_ranks_have_reasons` has their reasons."""


@pytest.mark.parametrize("name", BACKENDS)
def test_the_table_has_every_option(name: str) -> None:
    known = {field.name for kind in (LayerSpec, LayerParameters, PlainWeights) for field in dataclasses.fields(kind)}
    given = {field for option in OPTIONS if option.backend == name for field in option.fields}
    assert given | STRUCTURE >= known, known - given - STRUCTURE


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_an_option_is_served_or_refused_by_name(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that can run both; no option is left out in silence."""
    _fake_kernels(monkeypatch)
    layer = random_layer(
        option.recipe,
        **{"tokens": 3, "hidden": 512, "intermediate": 512, "num_experts": 4, "top_k": 2, **option.options},
    )
    backend = BACKENDS[option.backend]
    reason = backend.unsupported_reason(LayerRequest(layer.spec, torch.device("cuda"), 8))
    if reason is None:
        try:
            backend.open(LayerRequest(layer.spec, torch.device("cpu"), 8), layer.weights, layer.parameters)
        except UnsupportedError as error:
            reason = str(error)
    if option.words is None:
        assert reason is None
    else:
        assert option.words in str(reason)


def test_more_slots_than_experts_are_too_many_for_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_kernels(monkeypatch)
    reason = FLASHINFER.unsupported_reason(_request(TRTLLM, top_k=9))
    assert reason == "top_k=9; allowed: at most num_experts = 8"


def test_alpha_and_beta_that_upstream_has_built_in_are_compared_in_fp32() -> None:
    """`mega_moe` rounds numbers to fp32."""
    spec = _request(SM100, activation="swigluoai", activation_alpha=round_to_fp32(1.702), activation_beta=1.0).spec
    assert sm100_fused.layer_unsupported_reason(spec) is None
    assert sm100_fused.layer_unsupported_reason(dataclasses.replace(spec, activation_alpha=1.7020001)) is not None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name, recipe", [("deep_gemm", FP8), ("flashinfer_trtllm", TRTLLM)])
def test_ids_of_no_expert_reach_upstream_as_minus_one(
    name: str, recipe: Recipe, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they would become as int32: 2^32 is 0 there."""
    passed = _fake_kernels(monkeypatch)
    layer = random_layer(recipe, tokens=5, hidden=512, intermediate=512, num_experts=4, top_k=2, device=device)
    opened = BACKENDS[name].open(LayerRequest(layer.spec, torch.device(device), 8), layer.weights, layer.parameters)
    ids = layer.topk_ids.to(dtype)
    ids[2, 0], ids[3, 0] = -1, 4
    expected = ids.int().clone()
    expected[3, 0] = -1
    for (token, slot), wild in {(0, 0): 99, (1, 1): 2**32, (2, 1): -5, (4, 0): 2**32 + 1}.items():
        if dtype == torch.int64 or wild < 2**31:
            ids[token, slot], expected[token, slot] = wild, -1
    output = torch.full_like(layer.x, torch.nan)
    opened(layer.x, ids, layer.topk_weights, output)
    assert_bytes_equal(passed["ids"], expected, "ids")
    assert output.isfinite().all()
    assert opened.skipped_ids == int((expected == -1).sum()) - 1


@pytest.mark.parametrize("matrix", ["w13", "w2", "shared_w13", "shared_w2"])
@pytest.mark.parametrize("how", ["expanded", "strided"])
def test_deep_gemm_declines_experts_that_are_not_contiguous(
    matrix: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_kernels(monkeypatch)
    layer = random_layer(
        SM100, tokens=3, hidden=512, intermediate=512, num_experts=4, top_k=2, num_shared_experts=1
    )  # fmt: skip
    weights = prepare(layer.weights, SM100)
    part = "shared" if matrix.startswith("shared") else "routed"
    matrices = getattr(weights, part)
    tensor = getattr(matrices, matrix.removeprefix("shared_"))
    changed = tensor[:1].expand_as(tensor) if how == "expanded" else torch.cat((tensor, tensor), dim=-1)
    changed = changed[..., : tensor.shape[-1]]
    matrices = dataclasses.replace(matrices, **{matrix.removeprefix("shared_"): changed})
    weights = dataclasses.replace(weights, **{part: matrices})
    with pytest.raises(UnsupportedError, match=rf"^moe_backend='deep_gemm': {matrix} has strides \("):
        DEEP_GEMM.open(LayerRequest(layer.spec, torch.device("cpu"), 8), weights, layer.parameters)


def test_the_public_call_names_the_backend_and_its_reason() -> None:
    layer = _layer()
    arguments = {**vars(layer.weights), "mma_type": "fp8xfp8"}
    output = torch.full_like(layer.x, torch.nan)
    with pytest.raises(UnsupportedError, match="moe_backend='deep_gemm': device type 'cpu'"):
        megamoe.mega_moe(
            layer.x, layer.topk_ids, layer.topk_weights, **arguments, output=output, moe_backend="deep_gemm"
        )
    assert output.isnan().all()
