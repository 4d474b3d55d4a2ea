"""Humming (`humming-kernels`) on Hopper: indexed grouped GEMMs of four formats under its own heuristics.

Per layer: its input quantization, GEMM 1 gathering the tokens, its SwiGLU with quantization, GEMM 2, and our weighted
combine, which it leaves to the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from megamoe.bench.layers import BF16_FP4, BLOCK128, FP8_BLOCK, MXFP4, TOKEN, LayerStore
from megamoe.bench.peers.base import Peer, PeerLayer, multiple_reason
from megamoe.bench.peers.glue import combine_rows
from megamoe.bench.peers.plan import PaddedPlan, padded_plan
from megamoe.bench.registry import TOKENS, Point
from megamoe.bench.shapes import ModelShape
from megamoe.bench.timing import Call
from megamoe.oracle.random_layers import Inputs
from megamoe.recipe import Recipe

_DISTRIBUTION = "humming-kernels"
_LOCKS = 2048  # int32 counters of its stream-K
_COMPUTE = {"gemm_type": "indexed"}


@dataclass(frozen=True)
class _Format:
    """weights: whose plain weights it takes; judge: the nearest recipe of ours. activation: element of the inputs, None
    for BF16. group: columns per activation scale, 0 for one per token."""

    name: str
    weights: Recipe
    judge: Recipe
    recipe: Recipe
    activation: str | None
    group: int = 0


_FORMATS = (
    _Format("humming_block128", MXFP4, BLOCK128, Recipe("fp8xfp4", "block128", "humming"), "float8e4m3", 128),
    _Format("humming_token", MXFP4, TOKEN, Recipe("fp8xfp4", "token", "humming"), "float8e4m3"),
    _Format("humming_w8a8", FP8_BLOCK, FP8_BLOCK, Recipe("fp8xfp8", "block128", "humming"), "float8e4m3", 128),
    _Format("humming_w4a16", MXFP4, BF16_FP4, Recipe("bf16xfp4", "none", "humming"), None),
)


@dataclass(frozen=True)
class _Gemm:
    """One matrix of all experts in Humming's order, and how it is launched for a token count."""

    config: Any
    tensors: dict[str, torch.Tensor]

    def launcher(self, rows: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """(kernel handle, rows per block) that Humming's heuristic picks for `rows` routed rows."""
        tuning = _heuristic(self.config, rows, device)
        return _compile(self.config, tuning, device), tuning["block_shape"][0]


def _open(fmt: _Format, store: LayerStore, point: Point, inputs: Sequence[Inputs]) -> PeerLayer:
    ops = import_module("humming.ops")
    shape, device = point.shape, inputs[0].x.device
    gemm_1, gemm_2 = store.cached((fmt.name,), lambda: _prepare(fmt, store))
    slots = point.tokens * shape.top_k
    kernel_1, block_1 = gemm_1.launcher(slots, device)
    kernel_2, block_2 = gemm_2.launcher(slots, device)
    plans_1 = [_sorted_ids(padded_plan(i.topk_ids, shape.num_experts, block_1)) for i in inputs]
    plans_2 = [_sorted_ids(padded_plan(i.topk_ids, shape.num_experts, block_2)) for i in inputs]
    slot_rows = torch.arange(slots, dtype=torch.int32, device=device).view(point.tokens, shape.top_k)
    locks = torch.zeros(_LOCKS, dtype=torch.int32, device=device)
    gate_up = torch.empty(slots, 2 * shape.intermediate, dtype=torch.bfloat16, device=device)
    rows = torch.empty(slots, shape.hidden, dtype=torch.bfloat16, device=device)
    quantization = _quantization(gemm_1.config)

    def bind(index: int, output: torch.Tensor) -> Call:
        i = inputs[index]

        def call() -> None:
            q, sf = i.x, None
            if quantization:
                q, group_scales, token_scales = ops.process_input(i.x, **quantization)
                sf = token_scales if group_scales is None else group_scales
            ops.launch_kernel(
                configs=kernel_1, inputs=q, input_scale=sf, outputs=gate_up, locks=locks, top_k=shape.top_k,
                **plans_1[index], **gemm_1.tensors,
            )  # fmt: skip
            act, group_scales, token_scales = ops.process_input(
                gate_up, activation_type="binary_split", activation_impl=_swiglu(shape), **quantization
            )
            sf = token_scales if group_scales is None else group_scales
            ops.launch_kernel(
                configs=kernel_2, inputs=act, input_scale=sf, outputs=rows, locks=locks, top_k=1,
                **plans_2[index], **gemm_2.tensors,
            )  # fmt: skip
            combine_rows(rows, slot_rows, i.topk_weights, output)

        return call

    return PeerLayer(inputs, bind, note=f"indexed, blocks of {block_1} and {block_2} rows")


def _prepare(fmt: _Format, store: LayerStore) -> tuple[_Gemm, _Gemm]:
    plain = store.plain(fmt.weights)
    gemms = _prepare_matrix(fmt, plain.w13, plain.w13_scale), _prepare_matrix(fmt, plain.w2, plain.w2_scale)
    for gemm in gemms:
        _compile_ahead(gemm.config, [tokens * store.shape.top_k for tokens in TOKENS], store.device)
    return gemms


def _compile_ahead(config: Any, row_counts: Sequence[int], device: torch.device) -> None:
    """The kernels for all these rows at once: one by one, point after point, they would take minutes."""
    tunings = [_heuristic(config, rows, device) for rows in row_counts]
    distinct = {json.dumps(tuning): tuning for tuning in tunings}
    _compile(config, [[number, number + 1, tuning] for number, tuning in enumerate(distinct.values())], device)


def _heuristic(config: Any, rows: int, device: torch.device) -> dict[str, Any]:
    choose = import_module("humming.tune").get_heuristics_config
    return choose(config, shape_m=rows, **_COMPUTE, device=device)


def _compile(config: Any, tuning: dict[str, Any] | list[Any], device: torch.device) -> torch.Tensor:
    """The handle of a kernel, or of one per [first row, last row, tuning], compiled side by side."""
    kernel = import_module("humming.kernel.humming").HummingKernel
    return kernel.prepare_kernels(config.to_str(), json.dumps(_COMPUTE), json.dumps(tuning), device)


def _prepare_matrix(fmt: _Format, weight: torch.Tensor, scale: torch.Tensor | None) -> _Gemm:
    """[E, N, K] in checkpoint order to Humming's."""
    dtypes, schema = import_module("humming.dtypes"), import_module("humming.schema")
    assert scale is not None
    is_fp4 = fmt.weights == MXFP4
    experts, n, packed = weight.shape
    if is_fp4:
        weight_schema = schema.HummingWeightSchema(
            b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0, weight_scale_group_size=32
        )
        scale = scale.view(torch.float8_e8m0fnu)
    else:
        weight_schema = schema.HummingWeightSchema(
            b_dtype=dtypes.float8e4m3, bs_dtype=dtypes.float32,
            weight_scale_group_size=128, weight_scale_group_size_n=128, weight_scale_type="block",
        )  # fmt: skip
    input_schema = None
    if fmt.activation is not None:
        input_schema = schema.HummingInputSchema(a_dtype=fmt.activation, input_scale_group_size=fmt.group)
    config, tensors = import_module("humming.transform").prepare_and_transform_humming_tensors(
        {"weight": weight.contiguous().view(torch.int32), "weight_scale": scale.contiguous()},
        shape_n=n,
        shape_k=packed * (2 if is_fp4 else 1),
        weight_schema=weight_schema,
        input_schema=input_schema,
        num_experts=experts,
        torch_dtype=torch.bfloat16,
        device=weight.device,
    )
    return _Gemm(config, tensors)


def _quantization(config: Any) -> dict[str, Any]:
    """How Humming quantizes rows for a layer of this configuration; empty for BF16."""
    if not config.input_quant_mode.should_quantize:
        return {}
    return dict(
        quant_mode=config.input_quant_mode.value,
        quant_dtype=str(config.a_dtype),
        quant_group_size=config.input_scale_group_size or None,
        group_scale_dtype=str(config.as_dtype),
    )


def _swiglu(shape: ModelShape) -> str:
    """The activation as the C expression of gate `a` and up `b` that Humming compiles into its kernel."""
    if shape.activation_clamp is None:
        return "a / (1.0f + __expf(-a)) * b"
    c = f"{float(shape.activation_clamp)}f"
    gate, up = f"fminf(a, {c})", f"fminf(fmaxf(b, -{c}), {c})"
    return f"{gate} / (1.0f + __expf(-{gate})) * {up}"


def _sorted_ids(plan: PaddedPlan) -> dict[str, torch.Tensor]:
    """The plan as Humming's indexed GEMM takes it: padding rows name a slot beyond the last."""
    ids = plan.slot_of_row
    return {
        "sorted_ids": torch.where(ids < 0, plan.row_of_slot.numel(), ids).int(),
        "expert_ids": plan.expert_of_row[:: plan.alignment].contiguous(),
        "num_tokens_padded": torch.tensor(plan.num_rows, dtype=torch.int32, device=ids.device),
    }


def _opener(fmt: _Format) -> Any:
    return lambda store, point, inputs: _open(fmt, store, point, inputs)


BACKENDS = {
    fmt.name: Peer(
        fmt.name, _DISTRIBUTION, fmt.recipe, fmt.judge, (9,), lambda point: multiple_reason(point, 128), _opener(fmt)
    )
    for fmt in _FORMATS
}
