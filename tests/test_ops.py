"""Compiled models: the layer as torch.library ops, whole-graph compilation, what is refused while tracing."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch._dynamo.utils import counters
from torch.library import opcheck

import megamoe
from megamoe import ops
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.recipe import TABLE, Recipe

T, H, I, E, K = 5, 128, 128, 3, 2
DEEP_GEMM = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
TRTLLM = Recipe("fp8xfp4", "mx32", "trtllm_gen")


def _layer(recipe: Recipe = DEEP_GEMM, device: str = "cpu", **options: object) -> Layer:
    sizes = {"tokens": T, "hidden": H, "intermediate": I, "num_experts": E, "top_k": K, **options}
    return random_layer(recipe, seed=5, device=device, **sizes)  # type: ignore[arg-type]


def _recipe(layer: Layer) -> dict[str, str]:
    return vars(layer.spec.recipe)


def _moe(layer: Layer, backend: str = "reference", **options: object) -> megamoe.MegaMoE:
    weights = megamoe.prepare_weights(**vars(layer.weights), **_recipe(layer))
    return megamoe.MegaMoE(weights, T, K, moe_backend=backend, **options)  # type: ignore[arg-type]


def _call(layer: Layer, **options: object) -> Callable[..., torch.Tensor]:
    """`mega_moe` on the layer's weights, between operations of a model."""
    tensors = {**vars(layer.weights), **_recipe(layer)}  # unpacked here: Dynamo of torch 2.11 can't unpack `vars`

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return 1 + megamoe.mega_moe(2 * x, ids, weights, **tensors, **options, **more)  # type: ignore[arg-type]

    return call


def _inputs(layer: Layer, tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return layer.x[:tokens], layer.topk_ids[:tokens], layer.topk_weights[:tokens]


def _whole_graph(function: Callable, backend: str = "aot_eager") -> Callable:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, fullgraph=True, backend=backend)


class Block(torch.nn.Module):
    """A model's layer that holds a `MegaMoE`."""

    def __init__(self, moe: megamoe.MegaMoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x + self.moe(2 * x, ids, weights)


@pytest.mark.parametrize("op", ["mega_moe", "mega_moe_out"])
@pytest.mark.parametrize("recipe", [DEEP_GEMM, TRTLLM], ids=str)
def test_opcheck_of_the_plain_call(recipe: Recipe, op: str, device: str) -> None:
    # E2M1 everywhere: opcheck cannot compare float8 tensors.
    layer = _layer(
        recipe, device, num_shared_experts=1, shared_weight="e2m1", bias=True, activation="swigluoai",
        expert_scales=True,
    )  # fmt: skip
    w = layer.weights
    options = {name: value for name, value in vars(w).items() if name not in ("w13", "w13_scale", "w2", "w2_scale")}
    if recipe is TRTLLM:
        options["alpha_tensor"] = torch.full((E + 1,), 1.5, device=device)
    options = {**options, **_recipe(layer), "activation": "swigluoai", "expert_scales": layer.parameters.expert_scales}
    output = (torch.full_like(layer.x, torch.nan),) if op == "mega_moe_out" else ()
    arguments = (*_inputs(layer), w.w13, w.w13_scale, w.w2, w.w2_scale, *output)
    checked = opcheck(getattr(torch.ops.megamoe, op).default, arguments, {**options, "moe_backend": "reference"})
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", ["layer", "layer_out"])
def test_opcheck_of_a_prepared_layer(op: str, device: str) -> None:
    layer = _layer(device=device)
    moe = _moe(layer)
    output = (torch.full_like(layer.x, torch.nan),) if op == "layer_out" else ()
    arguments = (*_inputs(layer), *output, moe._handle)
    assert set(opcheck(getattr(torch.ops.megamoe, op).default, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_plain_call_in_one_graph(backend: str, device: str) -> None:
    layer = _layer(device=device, num_shared_experts=1)
    call = _call(layer, activation_clamp=1.5, routed_scaling_factor=2.5, moe_backend=backend)
    compiled = _whole_graph(call)
    expected = call(*_inputs(layer))
    assert_bytes_equal(compiled(*_inputs(layer)), expected, "new output")
    buffer = torch.full((T, H + 8), torch.nan, dtype=torch.bfloat16, device=device)
    assert_bytes_equal(compiled(*_inputs(layer), output=buffer[:, :H]), expected, "given output")
    assert_bytes_equal(1 + buffer[:, :H], expected, "the slice that was written")
    assert buffer[:, H:].isnan().all()


def test_every_kind_of_argument_survives_tracing(device: str) -> None:
    """Numbers, strings, optional tensors, and numbers that may be tensors."""
    layer = _layer(
        TRTLLM, device, num_shared_experts=1, bias=True, activation="swigluoai", per_expert=("clamp", "beta"),
        expert_scales=True, num_experts=6, local_experts=E, expert_map=True, w13_layout="interleaved",
    )  # fmt: skip
    p = layer.parameters
    call = _call(
        layer, activation="swigluoai", activation_clamp=p.clamp, activation_alpha=1.25, activation_beta=p.beta,
        expert_scales=p.expert_scales, routed_scaling_factor=3, expert_map=p.expert_map, num_experts=6, check_ids=True,
        moe_backend="reference",
    )  # fmt: skip
    assert_bytes_equal(_whole_graph(call)(*_inputs(layer)), call(*_inputs(layer)), "output")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_prepared_layer_in_one_graph(backend: str, device: str) -> None:
    layer = _layer(device=device)
    block = Block(_moe(layer, backend))
    compiled = _whole_graph(block)
    for tokens in (T, T - 1, T - 2, T - 3):
        inputs = _inputs(layer, tokens)
        assert_bytes_equal(compiled(*inputs), block(*inputs), f"{tokens} tokens")
    assert counters["stats"]["unique_graphs"] <= 2, "one for the first token count, one for all others"


def test_layers_of_one_model_are_not_confused(device: str) -> None:
    layer = _layer(device=device)
    blocks = [Block(_moe(layer, activation_clamp=clamp)) for clamp in (0.25, 0.5, 1.0)]
    model = torch.nn.Sequential()
    model.forward = lambda *inputs: [block(*inputs) for block in blocks]  # type: ignore[method-assign]
    results = _whole_graph(model)(*_inputs(layer))
    for result, block in zip(results, blocks):
        assert_bytes_equal(result, block(*_inputs(layer)), "output")
    assert not torch.equal(results[0], results[1])


def test_blocks_compiled_one_by_one_share_a_graph_where_integers_are_dynamic(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `MegaMoE` says: Dynamo takes a module's integers for constants unless told otherwise."""
    monkeypatch.setattr(torch._dynamo.config, "allow_unspec_int_on_nn_module", True)
    layer = _layer(device=device)
    torch._dynamo.reset()
    counters.clear()
    for index in range(10):
        block = Block(_moe(layer, activation_clamp=0.25 + index))
        expected = block(*_inputs(layer))
        block.compile(fullgraph=True, backend="aot_eager")
        assert_bytes_equal(block(*_inputs(layer)), expected, f"block {index}")
    assert counters["stats"]["unique_graphs"] <= 2


def test_a_copy_is_a_layer_of_its_own(device: str) -> None:
    layer = _layer(device=device)
    moe = _moe(layer, "triton")
    twin = copy.deepcopy(moe)
    assert twin._handle != moe._handle
    assert ops._find(twin._handle) is twin
    mine, its = (m._layer._workspace.tensors() for m in (moe, twin))  # type: ignore[attr-defined]
    assert {t.data_ptr() for t in mine.values()}.isdisjoint(t.data_ptr() for t in its.values())
    assert_bytes_equal(twin(*_inputs(layer)), moe(*_inputs(layer)), "output")


def test_a_graph_outlives_its_layer(device: str) -> None:
    layer = _layer(device=device)
    handle = _moe(layer)._handle
    with pytest.raises(RuntimeError, match="the MegaMoE that this graph was compiled with does not exist any more"):
        torch.ops.megamoe.layer(*_inputs(layer), handle)


def test_a_wrong_argument_is_named_when_the_graph_runs(device: str) -> None:
    layer = _layer(device=device)
    x, ids, weights = _inputs(layer)
    with pytest.raises(TypeError, match="^hidden_states has dtype torch.float32"):
        _whole_graph(_moe(layer))(x.float(), ids, weights)
    with pytest.raises(ValueError, match="^activation is 'relu'"):
        _whole_graph(_call(layer, activation="relu", moe_backend="reference"))(x, ids, weights)


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_refused(compiled: bool, grad_mode: Callable, device: str) -> None:
    """Whether or not they would be computed: a leaf that wants one is never taken for a constant."""
    layer = _layer(Recipe("bf16xbf16", "none", "deep_gemm_sm100"), device)
    x, ids, weights = _inputs(layer)
    wanting = layer.weights.w2.clone().requires_grad_()
    tensors = {**vars(layer.weights), "w2": wanting, **_recipe(layer)}

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return megamoe.mega_moe(x, ids, weights, **tensors, moe_backend="reference")

    with grad_mode(), pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match="requires_grad=True"):
        (_whole_graph(call) if compiled else call)(x, ids, weights)


def test_the_first_use_may_be_in_a_compiled_function() -> None:
    """`import megamoe` loads nothing: the public names must be found while tracing."""
    script = """
import torch, megamoe
def layer(x, ids, weights, w13, w13_scale, w2, w2_scale):
    return megamoe.mega_moe(x, ids, weights, w13, None, w2, None, mma_type="bf16xbf16", moe_backend="reference")
x, ids, weights = torch.ones(3, 64).bfloat16(), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
w = torch.ones(1, 128, 64).bfloat16() / 64, None, torch.ones(1, 64, 64).bfloat16() / 64, None
print(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, ids, weights, *w)[2, 63].item())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) == pytest.approx(0.731, rel=1e-2), "silu(1) · 1"


@pytest.mark.gpu
class TestInductor:
    @pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
    @pytest.mark.parametrize("recipe", TABLE, ids=str)
    def test_a_model_with_a_prepared_layer(self, recipe: Recipe, mode: str, device: str) -> None:
        layer = _layer(recipe, device)
        block = Block(_moe(layer, "triton", x_gsf=layer.parameters.x_gsf))
        block.moe.warmup([T])
        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, mode=mode)
        for _ in range(4):  # reduce-overhead: two warm-up runs, the recording, a replay
            inputs = tuple(tensor.clone() for tensor in _inputs(layer))
            assert_bytes_equal(compiled(*inputs), block(*inputs), "output")

    def test_the_plain_call(self, device: str) -> None:
        layer = _layer(device=device)
        call = _call(layer)
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True)
        assert_bytes_equal(compiled(*_inputs(layer)), call(*_inputs(layer)), "output")
