"""torch.library ops, so that compiled models (`torch.compile(fullgraph=True)`, `torch.export`) can contain a layer.

`mega_moe` and `MegaMoE` call these ops while they are traced, and only then; an op calls back what it stands for, which
checks, launches and raises as ever. `*_out` ops write their `output`, the others return a new tensor: what they declare
is all they change, a `MegaMoE`'s workspace aside, which no call reads from an earlier one.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:
    from megamoe.api import MegaMoE

_INPUTS = "Tensor hidden_states, Tensor topk_ids, Tensor topk_weights"
_WEIGHTS = "Tensor w13, Tensor? w13_scale, Tensor w2, Tensor? w2_scale"
# An op's argument has one type: where a number or a tensor is allowed, there are two arguments.
_OPTIONS = """str mma_type, str? act_scale=None, str? numerics=None, str w13_layout="gate_up",
    Tensor? shared_w13=None, Tensor? shared_w13_scale=None, Tensor? shared_w2=None, Tensor? shared_w2_scale=None,
    Tensor? w13_bias=None, Tensor? w2_bias=None, Tensor? l1_alphas=None, Tensor? l2_alphas=None,
    Tensor? l2_act_scales=None, Tensor? expert_scales=None, Tensor? x_gsf=None, str activation="swiglu",
    float? activation_clamp=None, float? activation_alpha=None, float? activation_beta=None,
    Tensor? clamp_tensor=None, Tensor? alpha_tensor=None, Tensor? beta_tensor=None,
    float routed_scaling_factor=1.0, int local_expert_offset=0, int? num_experts=None, Tensor? expert_map=None,
    bool check_ids=False, str? moe_backend=None"""
_EITHER = {"activation_clamp": "clamp_tensor", "activation_alpha": "alpha_tensor", "activation_beta": "beta_tensor"}

_LAYERS: WeakValueDictionary[int, MegaMoE] = WeakValueDictionary()
_handles = itertools.count()


def register(layer: MegaMoE) -> int:
    """A number by which ops find `layer`, for as long as it exists."""
    handle = next(_handles)
    _LAYERS[handle] = layer
    return handle


def traced_mega_moe(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: tuple[torch.Tensor | None, ...],
    output: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """`mega_moe` as an op; weights: w13, w13_scale, w2, w2_scale, options: its keywords."""
    for name, tensor_name in _EITHER.items():
        if isinstance(options[name], torch.Tensor):
            options[tensor_name], options[name] = options[name], None
    inputs = (hidden_states, topk_ids, topk_weights, *weights)
    if output is None:
        return torch.ops.megamoe.mega_moe(*inputs, **options)
    torch.ops.megamoe.mega_moe_out(*inputs, output, **options)
    return output


def traced_layer(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    output: torch.Tensor | None,
    handle: int,
) -> torch.Tensor:
    """A call of the `MegaMoE` registered under `handle`, as an op."""
    if output is None:
        return torch.ops.megamoe.layer(hidden_states, topk_ids, topk_weights, handle)
    torch.ops.megamoe.layer_out(hidden_states, topk_ids, topk_weights, output, handle)
    return output


@torch.library.custom_op("megamoe::mega_moe", mutates_args=(), schema=f"({_INPUTS}, {_WEIGHTS}, {_OPTIONS}) -> Tensor")
def _mega_moe(*values):
    from megamoe.api import mega_moe

    return mega_moe(**_arguments(torch.ops.megamoe.mega_moe.default, values))


@torch.library.custom_op(
    "megamoe::mega_moe_out",
    mutates_args=("output",),
    schema=f"({_INPUTS}, {_WEIGHTS}, Tensor(a!) output, {_OPTIONS}) -> ()",
)
def _mega_moe_out(*values):
    from megamoe.api import mega_moe

    mega_moe(**_arguments(torch.ops.megamoe.mega_moe_out.default, values))


@torch.library.custom_op("megamoe::layer", mutates_args=(), schema=f"({_INPUTS}, SymInt handle) -> Tensor")
def _layer(hidden_states, topk_ids, topk_weights, handle):
    return _find(handle)(hidden_states, topk_ids, topk_weights)


@torch.library.custom_op(
    "megamoe::layer_out",
    mutates_args=("output",),
    schema=f"({_INPUTS}, Tensor(a!) output, SymInt handle) -> ()",
)
def _layer_out(hidden_states, topk_ids, topk_weights, output, handle):
    _find(handle)(hidden_states, topk_ids, topk_weights, output)


@_mega_moe.register_fake
@_layer.register_fake
def _new_output(hidden_states, *rest):
    _refuse_gradients(hidden_states, *rest)
    return hidden_states.new_empty(hidden_states.shape, dtype=torch.bfloat16)


@_mega_moe_out.register_fake
@_layer_out.register_fake
def _nothing(*values):
    _refuse_gradients(*values)


def _refuse_gradients(*values):
    """While tracing: when the op runs, autograd has already taken it for a differentiable one."""
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
        raise ValueError("a tensor has requires_grad=True; megamoe computes no gradients: pass it detached")


def _arguments(op: torch._ops.OpOverload, values: tuple[object, ...]) -> dict[str, Any]:
    """`mega_moe`'s arguments from the op's values; the dispatcher leaves out last ones that equal their defaults."""
    arguments = dict(zip((argument.name for argument in op._schema.arguments), values))
    tensors = {name: arguments.pop(tensor_name, None) for name, tensor_name in _EITHER.items()}
    return {**arguments, **{name: tensor for name, tensor in tensors.items() if tensor is not None}}


def _find(handle: int) -> MegaMoE:
    layer = _LAYERS.get(handle)
    if layer is None:
        raise RuntimeError("the MegaMoE that this graph was compiled with does not exist any more: keep it alive")
    return layer
