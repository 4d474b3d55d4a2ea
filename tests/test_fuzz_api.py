"""Random calls of the public API: valid ones are the reference's layer, invalid ones are refused by name, none crashes.

A few examples, the same ones every time, run with the suite. `MEGAMOE_FUZZ=1000` runs as many of each test, new ones
every time, and prints how to repeat a failure.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import megamoe
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.public_arguments import call_arguments, layer_arguments, weight_arguments
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.recipe import ALL_RECIPES
from megamoe.validation import shared_formats, size_multiples

LONG = int(os.environ.get("MEGAMOE_FUZZ", "0"))


def _settings(examples: int) -> settings:
    return settings(
        max_examples=LONG or examples,
        derandomize=not LONG,
        print_blob=bool(LONG),
        database=None,
        deadline=None,
        phases=list(Phase) if LONG else [Phase.generate],  # shrinking what the interpreter runs takes minutes
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Call:
    """A layer with one call's inputs, and how it is called: with which strides, into what, prepared or not."""

    layer: Layer
    strided: bool
    output: str  # "none", "given", "slice" or "input"
    prepared: bool
    donate: bool

    def __repr__(self) -> str:
        spec, weights = self.layer.spec, self.layer.weights
        given = [name for name, value in {**vars(weights), **vars(self.layer.parameters)}.items() if value is not None]
        how = f"strided={self.strided}, output={self.output}, prepared={self.prepared}, donate={self.donate}"
        return f"Call({spec}, T={len(self.layer.x)}, {weights.w13_layout}, {how}, given: {', '.join(given)})"


@st.composite
def layers(draw: st.DrawFn, device: str) -> Layer:
    """Any legal layer that is small: every recipe, every option."""
    recipe = draw(st.sampled_from(ALL_RECIPES))
    is_trtllm = recipe.numerics == "trtllm_gen"
    hidden, intermediate = (draw(st.integers(1, max(1, 192 // m))) * m for m in size_multiples(recipe))
    local = draw(st.integers(1, 4))
    placed: dict[str, Any] = {"num_experts": local}
    kind = draw(st.sampled_from(["all", "all", "offset", "map"]))
    if kind != "all":
        before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        placed = {"num_experts": before + local + after, "local_experts": local}
        placed.update({"expert_map": True} if kind == "map" else {"local_expert_offset": before})
    shared = draw(st.integers(0, 2))
    situ = ["situ"] if recipe.mma_type == "fp8xfp4" and recipe.numerics != "deep_gemm_sm90" else []
    activation = draw(st.sampled_from(["swiglu", "swigluoai", *situ]))
    numbers: dict[str, Any] = {}
    if activation != "situ":
        numbers["activation_clamp"] = draw(st.sampled_from([None, 0.0, 0.25, 1.5, math.inf]))
    if activation == "swigluoai":
        numbers["activation_alpha"] = draw(st.sampled_from([1.702, 1.0, 0.0, -0.5]))
        numbers["activation_beta"] = draw(st.sampled_from([1.0, 0.0, -2.0]))
    names = {"swiglu": ["clamp"], "swigluoai": ["clamp", "alpha", "beta"], "situ": ["alpha", "beta"]}[activation]
    layer = random_layer(
        recipe,
        tokens=draw(st.integers(0, 5)),
        hidden=hidden,
        intermediate=intermediate,
        top_k=draw(st.integers(1, min(4, placed["num_experts"]))) + (shared if is_trtllm else 0),
        num_shared_experts=shared,
        shared_weight=draw(st.sampled_from(shared_formats(recipe))),
        activation=activation,
        per_expert=draw(st.sets(st.sampled_from(names))) if is_trtllm else (),
        w13_layout=draw(st.sampled_from(["gate_up", "interleaved"])),
        bias=draw(st.booleans()),
        global_scales=(is_trtllm or recipe.mma_type == "nvfp4xnvfp4") and draw(st.booleans()),
        expert_scales=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5, -0.75, 0.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
        device=device,
        **placed,
        **numbers,
    )
    return _with_wild_inputs(draw, layer)


def _with_wild_inputs(draw: st.DrawFn, layer: Layer) -> Layer:
    """Ids of no expert, weights of any sign, rows of zeros and of other sizes; ids of either width."""
    x, ids, weights = layer.x.clone(), layer.topk_ids.clone(), layer.topk_weights.clone()
    tokens, top_k = ids.shape
    total = layer.spec.num_experts + layer.spec.shared_slots
    if tokens:
        token, slot = st.integers(0, tokens - 1), st.integers(0, top_k - 1)
        for _ in range(draw(st.integers(0, 3))):
            where = draw(token), draw(slot)
            ids[where] = draw(st.sampled_from([-1, -2, -(2**31), total, total + 7, 2**31 - 1, 0, total - 1]))
        for _ in range(draw(st.integers(0, 2))):
            weights[draw(token), draw(slot)] = draw(st.sampled_from([0.0, -0.5, 8.0]))
        x[draw(token)] *= draw(st.sampled_from([0.0, 2.0**-12, 2.0**6]))
    return replace(layer, x=x, topk_ids=ids.to(draw(st.sampled_from([torch.int32, torch.int64]))), topk_weights=weights)


@st.composite
def calls(draw: st.DrawFn, device: str) -> Call:
    output = draw(st.sampled_from(["none", "given", "slice", "input"]))
    return Call(draw(layers(device)), draw(st.booleans()), output, draw(st.booleans()), draw(st.booleans()))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of a larger buffer full of NaN."""
    rows, columns = tensor.shape
    buffer = torch.full((rows + 3, columns + 16), torch.nan, dtype=tensor.dtype, device=tensor.device)
    buffer[1 : 1 + rows, 8 : 8 + columns] = tensor
    return buffer[1 : 1 + rows, 8 : 8 + columns]


def _run(call: Call, backend: str) -> torch.Tensor:
    layer = call.layer
    x = _wide(layer.x) if call.strided else layer.x.clone()
    nan = torch.full_like(layer.x, torch.nan)
    output = {"none": None, "given": nan, "slice": _wide(nan), "input": x}[call.output]
    if call.prepared:
        donated = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in weight_arguments(layer).items()}
        weights = megamoe.prepare_weights(**donated, donate=call.donate)
        arguments = {**layer_arguments(layer), "moe_backend": backend}
        moe = megamoe.MegaMoE(weights, len(x) + 1, layer.spec.top_k, **arguments)
        result = moe(x, layer.topk_ids, layer.topk_weights, output)
    else:
        arguments = {**call_arguments(layer), "hidden_states": x, "output": output, "moe_backend": backend}
        result = megamoe.mega_moe(**arguments)
    assert output is None or result is output
    return result.contiguous()


def _judged(call: Call, result: torch.Tensor) -> None:
    layer = call.layer
    expected = moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec, parameters=layer.parameters,
        full_trace=False,
    ).y  # fmt: skip
    problem = check(compare(result, expected), LIMITS[layer.spec.recipe])
    assert problem is None, problem


# Hypothesis and a fixture do not mix: the device is the session's anyway.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@_settings(12)
@given(call=calls(DEVICE))
def test_a_valid_call_on_the_kernels_is_the_reference(call: Call) -> None:
    _judged(call, _run(call, "triton"))


@_settings(40)
@given(call=calls(DEVICE))
def test_a_valid_call_on_the_reference_backend_is_the_reference(call: Call) -> None:
    _judged(call, _run(call, "reference"))


@dataclass(frozen=True)
class Damage:
    """A change that no argument of its kind survives. `named`: whether the message must name that very argument, not
    another one that no longer fits to it."""

    change: Callable[[Any], Any]
    named: bool
    applies: Callable[[torch.Tensor], bool] = lambda tensor: True


TENSOR_DAMAGE = {
    "a list": Damage(lambda t: t.tolist() if t.numel() < 9 else [1.0], named=True),
    "complex": Damage(lambda t: torch.empty(t.shape, dtype=torch.complex64, device=t.device), named=True),
    "float64": Damage(lambda t: torch.empty(t.shape, dtype=torch.float64, device=t.device), named=True),
    "one axis more": Damage(lambda t: t[None], named=False),
    "one column less": Damage(lambda t: t[..., :-1], named=False, applies=lambda t: t.shape[-1] > 0),
    "on no device": Damage(lambda t: t.to("meta"), named=False),
    "sparse": Damage(lambda t: torch.sparse_coo_tensor(size=t.shape, dtype=torch.float32), named=True),
    "wanting a gradient": Damage(
        lambda t: t.clone().requires_grad_(), named=True, applies=lambda t: t.is_floating_point()
    ),
}
NUMBER_DAMAGE: tuple[object, ...] = ("1", math.nan, True, [2.0], 1j)
COUNT_DAMAGE: tuple[object, ...] = ("1", -1, 1.0, True, 2**40)
WORD_DAMAGE: tuple[object, ...] = ("", "nonsense", 3, ["mx32"], torch.ones(2))
SCALARS = {
    "routed_scaling_factor": (*NUMBER_DAMAGE, math.inf, None),
    "activation_clamp": (*NUMBER_DAMAGE, -0.5),
    "local_expert_offset": (*COUNT_DAMAGE, None),
    "num_experts": COUNT_DAMAGE,
    "activation": (*WORD_DAMAGE, None),
    "w13_layout": (*WORD_DAMAGE, None),
    "mma_type": (*WORD_DAMAGE, None),
    "act_scale": WORD_DAMAGE,
    "numerics": WORD_DAMAGE,
    "moe_backend": WORD_DAMAGE,
    "check_ids": (1, None, "yes"),
}


@dataclass(frozen=True)
class Wrong:
    """Arguments of a call of which `name` is wrong; `named`: the message must start with it."""

    arguments: dict[str, Any]
    name: str
    named: bool

    def __repr__(self) -> str:
        value = self.arguments[self.name]
        if isinstance(value, torch.Tensor):
            value = f"{value.dtype} {tuple(value.shape)} {value.device} {value.layout} {value.requires_grad}"
        recipe = "/".join(str(self.arguments[key]) for key in ("mma_type", "act_scale", "numerics"))
        return f"Wrong({recipe}, {self.name}={value})"


@st.composite
def wrong_calls(draw: st.DrawFn, device: str) -> Wrong:
    layer = draw(layers(device))
    output = torch.full_like(layer.x, torch.nan)
    arguments = {**call_arguments(layer), "output": output, "moe_backend": "reference"}
    name = draw(st.sampled_from(sorted({*SCALARS, *arguments})))
    value = arguments.get(name)
    if isinstance(value, torch.Tensor):
        kind = draw(st.sampled_from(sorted(k for k, damage in TENSOR_DAMAGE.items() if damage.applies(value))))
        return Wrong({**arguments, name: TENSOR_DAMAGE[kind].change(value)}, name, TENSOR_DAMAGE[kind].named)
    if name in SCALARS:
        # With a map or the weights' own count these meet another check first.
        named = name not in ("num_experts", "local_expert_offset")
        return Wrong({**arguments, name: draw(st.sampled_from(SCALARS[name]))}, name, named)
    # Of the shared tensors, one alone: the message may name the one that is missing.
    return Wrong({**arguments, name: object()}, name, not name.startswith("shared_"))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@_settings(150)
@given(wrong=wrong_calls(DEVICE))
def test_an_invalid_call_is_refused_by_name_and_writes_nothing(wrong: Wrong) -> None:
    tensors = {key: t for key, t in wrong.arguments.items() if isinstance(t, torch.Tensor)}
    kept = {key: t.detach().clone() for key, t in tensors.items() if not t.is_meta and not t.is_sparse}
    with pytest.raises((TypeError, ValueError)) as caught:
        megamoe.mega_moe(**wrong.arguments)
    message = str(caught.value)
    assert message.startswith(wrong.name) or not wrong.named, message
    assert any(message.startswith(argument) for argument in wrong.arguments), message
    for key, before in kept.items():
        assert_bytes_equal(tensors[key].detach(), before, key)
