"""The registry: who can run what, the words it declines with, and the choice of `auto`."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import megamoe
from megamoe.backends import AUTO, select, unsupported_reason
from megamoe.backends import triton as triton_backend
from megamoe.backends.base import LayerRequest, UnsupportedError
from megamoe.kernels.config import ARCHITECTURES, INTERPRETER, GemmConfig, LayerConfig, choose_config
from megamoe.oracle import interpreter
from megamoe.recipe import ALL_RECIPES, TABLE, Recipe
from megamoe.spec import LayerSpec

REAL = ("triton", "reference")


def _request(recipe: Recipe = ALL_RECIPES[0], device: str = "cpu", **spec: object) -> LayerRequest:
    sizes = {"hidden": 256, "intermediate": 128, "num_experts": 8, "top_k": 2, **spec}
    return LayerRequest(LayerSpec(recipe, **sizes), torch.device(device), max_tokens=16)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("recipe", TABLE, ids=str)
def test_every_recipe_is_served(recipe: Recipe, name: str, device: str) -> None:
    assert unsupported_reason(name, _request(recipe, device)) is None


@pytest.mark.parametrize("name", REAL)
def test_ranks_and_devices_have_reasons(name: str, device: str) -> None:
    request = _request(device=device)
    two_ranks = replace(request, spec=replace(request.spec, ep_size=2))
    assert str(unsupported_reason(name, two_ranks)).startswith("ep_size=2 is not served yet")
    assert str(unsupported_reason(name, replace(request, device=torch.device("meta")))).startswith(
        "device type 'meta'; served: "
    )


def test_a_hidden_size_beyond_the_pre_dispatch(device: str) -> None:
    assert unsupported_reason("triton", _request(device=device, hidden=16384)) is None
    reason = unsupported_reason("triton", _request(device=device, hidden=16384 + 128))
    assert reason == "hidden=16512 is more than the pre-dispatch serves, 16384"
    assert select(AUTO, _request(device=device, hidden=16384 + 128)).name == "reference"


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
@pytest.mark.parametrize("arch", [INTERPRETER, *ARCHITECTURES])
def test_every_configuration_the_heuristic_picks_is_found(arch: int, recipe: Recipe) -> None:
    spec = _request(recipe).spec
    chosen = {choose_config(spec, arch, tokens) for tokens in range(1, 600)}
    assert set(triton_backend.configs(spec, arch, 599)) == chosen
    assert triton_backend.configs(spec, arch, 1) == [choose_config(spec, arch, 1)]


def test_every_configuration_is_asked_not_only_the_largest(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for few tokens does not fit: neither does a layer that serves more."""
    few, many = (LayerConfig(*[GemmConfig(m, 128, 128, 4, 1, "decoded")] * 2) for m in (24, 32))
    monkeypatch.setattr(triton_backend, "choose_config", lambda spec, arch, tokens: few if tokens < 7 else many)
    reason = triton_backend.kernels_unsupported_reason(_request().spec, INTERPRETER, 1000)
    assert reason == "gate_up: block_m=24 is not a power of two of at least 16"


def test_more_tokens_than_can_be_numbered_or_held(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is allocated."""
    request = replace(_request(device=device), max_tokens=2**40)
    assert unsupported_reason("triton", request) == (
        f"max_tokens={2**40} with top_k=2 makes more slots than routing numbers, {2**30}"
    )
    monkeypatch.setattr(triton_backend, "device_memory", lambda device: 2**30)
    assert unsupported_reason("triton", replace(request, max_tokens=2**17)) is None
    assert str(unsupported_reason("triton", replace(request, max_tokens=2**20))).startswith(
        "max_tokens=1048576 needs a workspace of 1."
    )


def test_auto_takes_triton_where_it_runs(device: str) -> None:
    assert select(AUTO, _request(device=device)).name == "triton"


def test_auto_gives_every_reason_when_nothing_runs(device: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        select(AUTO, _request(device=device, ep_size=2))
    for name in REAL:
        assert f"moe_backend='{name}': ep_size=2 is not served yet" in str(caught.value)


def test_an_unknown_name_lists_the_known_ones(device: str) -> None:
    with pytest.raises(ValueError, match="^moe_backend is 'cuda'; allowed: 'triton', 'reference', .*'auto'"):
        select("cuda", _request(device=device))


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), 90), ((10, 0), 100), ((10, 3), 100), ((12, 0), 120), ((12, 1), 120)]
)  # fmt: skip
def test_served_gpus(capability: tuple[int, int], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpu(capability, monkeypatch)
    device = torch.device("cuda", 0)
    assert triton_backend.device_unsupported_reason(device) is None
    assert triton_backend.architecture(device) == expected
    for recipe in ALL_RECIPES:
        assert unsupported_reason("triton", _request(recipe, "cuda:0")) is None


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (11, 0)])
def test_other_gpus_are_named(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpu(capability, monkeypatch)
    major, minor = capability
    assert unsupported_reason("triton", _request(device="cuda:0")) == (
        f"a GPU has compute capability {major}.{minor}; served: 9.x, 10.x, 12.x"
    )
    assert select(AUTO, _request(device="cuda:0")).name == "reference"


def _pretend_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without the interpreter, on a GPU of that capability."""
    monkeypatch.setattr(interpreter, "is_active", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(triton_backend, "device_memory", lambda device: 2**34)


def test_the_interpreter_needs_its_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "is_active", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = str(unsupported_reason("triton", _request()))
    assert reason.startswith("TRITON_INTERPRET=1 without megamoe.oracle.interpreter.install()")


def test_the_interpreter_is_an_architecture(device: str) -> None:
    if device == "cpu":
        assert triton_backend.architecture(torch.device("cpu")) == INTERPRETER


def test_cpu_tensors_without_the_interpreter_go_to_the_reference() -> None:
    """In a fresh process, as a user without TRITON_INTERPRET has it."""
    script = """
import torch, megamoe
q, sf = megamoe.quantize_mxfp4(torch.ones(2 * 64, 64).bfloat16())
w = q.reshape(1, 128, 32), sf.reshape(1, 128, 2), q[:64].reshape(1, 64, 32), sf[:64].reshape(1, 64, 2)
x, ids, weights = torch.ones(3, 64).bfloat16(), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
y = megamoe.mega_moe(x, ids, weights, *w, mma_type="fp8xfp4", moe_backend="auto")
print(y[2, 63].item())
try:
    megamoe.mega_moe(x, ids, weights, *w, mma_type="fp8xfp4")
except megamoe.UnsupportedError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    value, reason = result.stdout.splitlines()
    # gate = up = 64, silu(64) · 64 = 4096, as E4M3 exactly; 64 of them in the down projection.
    assert float(value) == 64 * 4096
    assert reason.startswith("moe_backend='triton': CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1")


def test_unsupported_is_not_implemented() -> None:
    assert issubclass(megamoe.UnsupportedError, NotImplementedError)
