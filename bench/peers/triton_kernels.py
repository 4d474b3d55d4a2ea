"""OpenAI's triton_kernels (`tokenspeed-triton-kernels`): BF16 × MXFP4 ragged matmuls, SwiGLU in the first one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from megamoe.bench.layers import BF16_FP4, MXFP4, LayerStore
from megamoe.bench.peers.base import Peer, PeerLayer, multiple_reason
from megamoe.bench.peers.glue import combine_rows
from megamoe.bench.peers.plan import padded_plan
from megamoe.bench.registry import Point
from megamoe.bench.timing import Call
from megamoe.oracle.random_layers import Inputs
from megamoe.recipe import Recipe

_WARPS = 8  # of its Hopper scale layout, and so of its kernels
_NO_CLAMP = 3.0e38


@triton.jit
def swiglu_pairs(input, clamp):
    """SwiGLU of columns gate, up, gate, … : triton_kernels' own adds 1 to up, as gpt-oss has it."""
    gate, up = tl.split(tl.reshape(input, (input.shape[0], input.shape[1] // 2, 2)))
    gate = tl.minimum(gate.to(tl.float32), clamp)
    up = tl.minimum(tl.maximum(up.to(tl.float32), -clamp), clamp)
    return gate / (1 + tl.exp(-gate)) * up


@triton.constexpr_function
def _is_not_this_gpu():
    return False


def _import() -> SimpleNamespace:
    """The package's names, after what it expects of a newer Triton than 3.6 has been added to this one."""
    from triton.language import target_info
    from triton.runtime.jit import JITFunction

    if not hasattr(target_info, "is_hip_gfx1250"):
        target_info.is_hip_gfx1250 = _is_not_this_gpu
    for name in ("def_file_line_number", "def_file_col_number"):  # of error messages only
        if not hasattr(JITFunction, name):
            setattr(JITFunction, name, 1)
    return SimpleNamespace(
        matmul=import_module("triton_kernels.matmul"),
        specialize=import_module("triton_kernels.specialize"),
        tensor=import_module("triton_kernels.tensor"),
        layout=import_module("triton_kernels.tensor_details.layout"),
        ragged=import_module("triton_kernels.tensor_details.ragged_tensor"),
    )


def _open(store: LayerStore, point: Point, inputs: Sequence[Inputs]) -> PeerLayer:
    tk = _import()
    shape = point.shape
    (w13, config_1), (w2, config_2) = store.cached(("triton_kernels",), lambda: _prepare(tk, store))
    plans = [padded_plan(i.topk_ids, shape.num_experts, 1) for i in inputs]
    slots = point.tokens * shape.top_k
    ragged = [tk.ragged.make_ragged_tensor_metadata(plan.rows_of_expert, slots) for plan in plans]
    tokens_of_row = [plan.slot_of_row // shape.top_k for plan in plans]
    device = inputs[0].x.device
    act = torch.empty(slots, shape.intermediate, dtype=torch.bfloat16, device=device)
    rows = torch.empty(slots, shape.hidden, dtype=torch.bfloat16, device=device)
    slot_rows = torch.arange(slots, dtype=torch.int32, device=device).view(point.tokens, shape.top_k)
    clamp = _NO_CLAMP if shape.activation_clamp is None else float(shape.activation_clamp)
    swiglu = tk.matmul.FusedActivation(
        tk.specialize.FnSpecs("swiglu_pairs", swiglu_pairs, ("clamp",), reduction_n=2), (clamp,)
    )

    def bind(index: int, output: torch.Tensor) -> Call:
        i = inputs[index]

        def call() -> None:
            tk.matmul.matmul(
                i.x, w13, None, a_ragged_metadata=ragged[index], gather_indx=tokens_of_row[index],
                precision_config=config_1, fused_activation=swiglu, c=act,
            )  # fmt: skip
            tk.matmul.matmul(
                act, w2, None, a_ragged_metadata=ragged[index], scatter_indx=plans[index].slot_of_row,
                precision_config=config_2, c=rows,
            )  # fmt: skip
            combine_rows(rows, slot_rows, i.topk_weights, output)

        return call

    return PeerLayer(inputs, bind, note="default options, Hopper layouts")


def _prepare(tk: SimpleNamespace, store: LayerStore) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    plain = store.plain(MXFP4)
    assert plain.w13_scale is not None
    assert plain.w2_scale is not None
    return (
        _prepare_matrix(tk, _interleaved(plain.w13), _interleaved(plain.w13_scale)),
        _prepare_matrix(tk, plain.w2, plain.w2_scale),
    )


def _interleaved(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2I, …], gate rows then up rows, to gate, up, gate, …"""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _prepare_matrix(tk: SimpleNamespace, weight: torch.Tensor, scale: torch.Tensor) -> tuple[Any, Any]:
    """[E, N, K/2] bytes and their scales to (tensor [E, K, N], precision config) in the layouts it prefers here."""
    values = tk.tensor.wrap_torch_tensor(weight.contiguous().mT, dtype=tk.tensor.FP4)
    scales = tk.tensor.wrap_torch_tensor(scale.contiguous().mT)
    values = tk.tensor.convert_layout(values, tk.layout.make_default_matmul_mxfp4_w_layout(mx_axis=-2))
    scales = tk.tensor.convert_layout(
        scales, tk.layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=-2, num_warps=_WARPS)
    )
    config = tk.matmul.PrecisionConfig(b_mx_scale=scales, b_microblock_size=32, out_dtype=torch.bfloat16)
    return values, config


def _reason(point: Point) -> str | None:
    return multiple_reason(point, 64)


_RECIPE = Recipe("bf16xfp4", "none", "triton_kernels")
_DISTRIBUTION = "tokenspeed-triton-kernels"
BACKENDS = {"triton_kernels": Peer("triton_kernels", _DISTRIBUTION, _RECIPE, BF16_FP4, (9,), _reason, _open)}
