"""Argument over program over environment over built-in: who decides, in what words, logged how often."""

import logging

import pytest
import torch

import megamoe
from megamoe import backend_choice
from megamoe.backend_choice import ENVIRONMENT_VARIABLE, requested_backend
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.public_arguments import call_arguments, layer_arguments, weight_arguments
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.recipe import ALL_RECIPES

ALLOWED = "allowed: 'triton', 'reference', 'deep_gemm', 'flashinfer_trtllm', 'auto'"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice, "_default", None)
    monkeypatch.setattr(backend_choice, "_logged", set())
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def layer(device: str) -> Layer:
    return random_layer(
        ALL_RECIPES[0], tokens=2, hidden=128, intermediate=128, num_experts=2, top_k=1, device=device
    )  # fmt: skip


def _moe(layer: Layer, **options: object) -> megamoe.MegaMoE:
    weights = megamoe.prepare_weights(**weight_arguments(layer))
    return megamoe.MegaMoE(weights, 2, 1, **layer_arguments(layer), **options)  # type: ignore[arg-type]


def test_each_source_gives_way_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested_backend() == ("triton", "the built-in default")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert requested_backend() == ("triton", "the built-in default"), "empty asks for nothing"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "deep_gemm")
    assert requested_backend() == ("deep_gemm", "MEGAMOE_BACKEND=deep_gemm")
    megamoe.set_default_backend("auto")
    assert requested_backend() == ("auto", "megamoe.set_default_backend")
    assert requested_backend("reference") == ("reference", "the argument moe_backend")
    megamoe.set_default_backend(None)
    assert requested_backend()[0] == "deep_gemm"


def test_a_layer_follows_it(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _moe(layer).backend == "triton"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    by_variable = _moe(layer)
    assert by_variable.backend == "reference"
    assert _moe(layer, moe_backend="triton").backend == "triton"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "triton")
    assert by_variable.backend == "reference", "a layer keeps what it was made with"
    megamoe.set_default_backend("reference")
    assert _moe(layer).backend == "reference"


def test_the_plain_call_follows_it(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = call_arguments(layer)
    expected = megamoe.mega_moe(**arguments, moe_backend="reference")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    assert_bytes_equal(megamoe.mega_moe(**arguments), expected, "eager")
    options = {name: value for name, value in arguments.items() if name not in ("hidden_states", "topk_ids")}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, ids: megamoe.mega_moe(x, ids, **options), backend="aot_eager", fullgraph=True
    )  # fmt: skip
    assert_bytes_equal(compiled(layer.x, layer.topk_ids), expected, "in a graph")


def test_the_choice_and_its_reason_are_logged_once(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "megamoe"):
        for _ in range(2):
            _moe(layer, moe_backend="reference")
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
        for _ in range(2):
            _moe(layer)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("megamoe", "backend reference: the argument moe_backend"),
        ("megamoe", "backend reference: MEGAMOE_BACKEND=reference"),
    ]


def test_auto_says_what_it_passed_over(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megamoe.backends.triton.device_unsupported_reason", lambda device: "no such GPU")
    megamoe.set_default_backend("auto")
    with caplog.at_level(logging.INFO, "megamoe"):
        assert _moe(layer).backend == "reference"
    assert [record.getMessage() for record in caplog.records] == [
        "backend reference: 'auto' from megamoe.set_default_backend; triton cannot run: no such GPU"
    ]


def test_unknown_names_are_refused_by_name(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nonsense", 3, ["triton"]):
        with pytest.raises(ValueError, match=f"^name is .*; {ALLOWED}$"):
            megamoe.set_default_backend(name)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"^moe_backend is .*; {ALLOWED}$"):
            _moe(layer, moe_backend=name)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "nonsense")
    with pytest.raises(ValueError, match=f"^MEGAMOE_BACKEND is 'nonsense'; {ALLOWED}$"):
        _moe(layer)
    assert _moe(layer, moe_backend="reference").backend == "reference", "the argument makes the variable irrelevant"


@pytest.mark.skipif(torch.cuda.is_available(), reason="deep_gemm may run on a GPU")
def test_an_impossible_default_is_refused_not_replaced(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "deep_gemm")
    with pytest.raises(megamoe.UnsupportedError) as caught:
        _moe(layer)
    assert str(caught.value) == (
        "moe_backend='deep_gemm': device type 'cpu'; served: cuda (asked for by MEGAMOE_BACKEND=deep_gemm)"
    )
