"""The arithmetic of the reference: two GEMMs per expert, an activation between them, the combine.

Source of the rules: DeepGEMM MegaMoE of `sgl-deep-gemm` 0.1.7, its SM100 and its SM90 kernel, and FlashInfer's
trtllm-gen MoE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megamoe.oracle.reference.activation import activate
from megamoe.oracle.reference.experts import Expert, dense_shared_expert, slot_expert
from megamoe.oracle.reference.gemm import gemm
from megamoe.oracle.reference.ids import local_ids, slot_weights
from megamoe.oracle.reference.quantizers import (
    Quantized,
    act_format,
    kind_of,
    mid_format,
    quantize,
    requantize,
)
from megamoe.oracle.reference.summation import Matmul, matmul_fp64
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.spec import LayerSpec


@dataclass
class Stages:
    """Intermediate values of n rows through an MLP of width W; a slot's row that no expert serves is poison.

    h: fp32 [n, 2W] accumulators, gate then up, as the activation receives them: times the token scale, under DeepGEMM
    numerics also times l1_alphas, plus the bias. act: fp32 [n, W] as the requantizer receives it. act_q, act_sf: its
    requantization (`mid_format`), row-major; BF16 has no scales.
    """

    h: torch.Tensor
    act: torch.Tensor
    act_q: torch.Tensor
    act_sf: torch.Tensor | None

    def take(self, rows: torch.Tensor) -> Stages:
        """The stages of some rows."""
        act_sf = None if self.act_sf is None else self.act_sf[rows]
        return Stages(self.h[rows], self.act[rows], _rows_of(self.act_q, rows), act_sf)

    def put(self, rows: torch.Tensor, part: Stages) -> None:
        self.h[rows] = part.h
        self.act[rows] = part.act
        self.act_q.view(torch.uint8)[rows] = part.act_q.view(torch.uint8)
        if self.act_sf is not None and part.act_sf is not None:
            self.act_sf[rows] = part.act_sf


@dataclass
class LayerTrace:
    """Everything the layer computed, T tokens with K slots each; slot s = t·K + k.

    x: the quantized input. ids int64 and weights fp32 [T, K] as the pre-dispatch passes them on, ids local; valid bool
    [T, K]: ids of this rank's experts. skipped: ids that are neither −1 nor valid. routed: stages of the T·K slots,
    shared: of the T tokens (None without a dense shared MLP or without `full_trace`). rows: BF16 [T, K (+1), H], NaN
    where not valid, the dense shared row last. y: BF16 [T, H].
    """

    y: torch.Tensor
    rows: torch.Tensor
    x: Quantized
    ids: torch.Tensor
    weights: torch.Tensor
    valid: torch.Tensor
    skipped: int
    routed: Stages | None
    shared: Stages | None


def moe_layer(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: PlainWeights,
    spec: LayerSpec,
    *,
    parameters: LayerParameters | None = None,
    amax_floor: float | None = None,
    tokens: torch.Tensor | None = None,
    full_trace: bool = True,
    matmul: Matmul = matmul_fp64,
) -> LayerTrace:
    """One layer: x BF16 [T, H], topk_ids int [T, K] (global), topk_weights fp32 [T, K].

    `tokens` (integer indices) restricts the work, and every tensor returned, to those tokens: rows never meet before
    the combine. `full_trace=False` keeps no `Stages`. `matmul` forms every sum of products (under fp32 activation
    scales: within one scale block). `ValueError` for options that contradict each other, `NotImplementedError` for
    ep_size > 1.
    """
    parameters = parameters or LayerParameters()
    _require_consistent(spec, parameters)
    if tokens is not None:
        x, topk_ids, topk_weights = x[tokens], topk_ids[tokens], topk_weights[tokens]
    quantized = quantize(x, kind_of(spec.recipe), amax_floor=amax_floor, x_gsf=parameters.x_gsf)
    ids = local_ids(
        topk_ids, num_experts=spec.num_experts, num_local_experts=spec.num_local_experts,
        expert_offset=spec.expert_offset, shared_slots=spec.shared_slots, expert_map=parameters.expert_map,
    )  # fmt: skip
    scaled_weights = slot_weights(
        topk_ids, topk_weights, num_experts=spec.num_experts, shared_slots=spec.shared_slots,
        expert_scales=parameters.expert_scales, routed_scaling_factor=parameters.routed_scaling_factor,
    )  # fmt: skip
    num_tokens, top_k = ids.shape
    valid = (ids >= 0) & (ids < spec.num_slot_experts)
    rows = torch.full((num_tokens, spec.combine_slots, spec.hidden), math.nan, dtype=torch.bfloat16, device=x.device)
    routed = _poisoned_stages(spec, num_tokens * top_k, x.device) if full_trace else None

    for index, slots in slots_by_expert(ids, valid):
        token = slots // top_k
        expert = slot_expert(weights, parameters, spec, index)
        stages, out = expert_mlp(_take(quantized, token), scaled_weights.flatten()[slots], expert, spec, matmul)
        rows[token, slots % top_k] = out
        if routed is not None:
            routed.put(slots, stages)

    shared = None
    if spec.shared_intermediate:
        ones = torch.ones(num_tokens, dtype=torch.float32, device=x.device)
        shared, rows[:, top_k] = expert_mlp(quantized, ones, dense_shared_expert(weights, spec), spec, matmul)
    return LayerTrace(
        y=combine(rows, valid, scaled_weights if spec.recipe.numerics == "trtllm_gen" else None),
        rows=rows,
        x=quantized,
        ids=ids,
        weights=scaled_weights,
        valid=valid,
        skipped=int(((ids != -1) & ~valid).sum()),
        routed=routed,
        shared=shared if full_trace else None,
    )


def expert_mlp(
    x: Quantized, slot_weights: torch.Tensor, expert: Expert, spec: LayerSpec, matmul: Matmul
) -> tuple[Stages, torch.Tensor]:
    """n rows through one expert, with their top-k weights fp32 [n]: the stages, and GEMM 2's rows in BF16 [n, H]."""
    row = spec.traits
    gate, up = (gemm(x.q, x.sf, act_format(row), half, matmul) for half in (expert.gate, expert.up))
    trtllm_gen = spec.recipe.numerics == "trtllm_gen"
    gate, up, act = (_trtllm_gen_act if trtllm_gen else _deep_gemm_act)(
        gate, up, x.token_scale, slot_weights, expert, spec
    )
    act_q, act_sf = requantize(act, spec.recipe)
    out = gemm(act_q, act_sf, mid_format(row), expert.down, matmul)
    if trtllm_gen:
        out = _times(_plus(out, expert.down_bias), expert.down_scale)
    else:
        # The combine only adds, so that the bias takes its weight here.
        bias = None if expert.down_bias is None else slot_weights[:, None] * expert.down_bias
        out = _plus(_times(out, expert.down_scale), bias)
    return Stages(torch.cat([gate, up], dim=-1), act, act_q, act_sf), out.bfloat16()


def _deep_gemm_act(
    gate: torch.Tensor,
    up: torch.Tensor,
    token_scale: torch.Tensor | None,
    slot_weights: torch.Tensor,
    expert: Expert,
    spec: LayerSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up and act of raw accumulators: one product per accumulator, for which the token's scale meets the
    expert's first; the top-k weight (times act_scale) before the requantization."""
    outer = None if token_scale is None else token_scale[:, None]
    gate = _plus(_times(gate, _product(outer, expert.gate_scale)), expert.gate_bias)
    up = _plus(_times(up, _product(outer, expert.up_scale)), expert.up_bias)
    act = _activate(gate, up, expert, spec) * _times(slot_weights, expert.act_scale)[:, None]
    return gate, up, act


def _trtllm_gen_act(
    gate: torch.Tensor,
    up: torch.Tensor,
    token_scale: torch.Tensor | None,
    slot_weights: torch.Tensor,
    expert: Expert,
    spec: LayerSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up and act of raw accumulators: bias, clamp and beta in their units (NVFP4's carry the inverse of
    gate_scale and up_scale); no top-k weight, which the combine has."""
    outer = None if token_scale is None else token_scale[:, None]
    gate = _plus(_times(gate, outer), expert.gate_bias)
    up = _plus(_times(up, outer), expert.up_bias)
    act = _times(_activate(gate, up, expert, spec, expert.gate_scale), _product(expert.up_scale, expert.act_scale))
    return gate, up, act


def _activate(
    gate: torch.Tensor, up: torch.Tensor, expert: Expert, spec: LayerSpec, gate_scale: torch.Tensor | None = None
) -> torch.Tensor:
    return activate(
        gate, up, spec.recipe.numerics, expert.clamp,
        activation=spec.activation, alpha=expert.alpha, beta=expert.beta, gate_scale=gate_scale,
    )  # fmt: skip


def combine(rows: torch.Tensor, valid: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of rows BF16 [T, K (+1), H] per token: fp32 from +0, slots ascending where valid [T, K], then the dense
    shared row; one rounding to BF16. `weights` fp32 [T, K] multiply the rows of slots, each product rounded to fp32
    before it is added."""
    total = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32, device=rows.device)
    top_k = valid.shape[1]
    for slot in range(rows.shape[1]):
        row = rows[:, slot].float()
        if slot < top_k:
            row = row if weights is None else weights[:, slot, None] * row
            row = torch.where(valid[:, slot, None], row, 0.0)
        total += row
    return total.bfloat16()


def slots_by_expert(ids: torch.Tensor, valid: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """(expert, its slots ascending) for every expert that has one."""
    slots = valid.flatten().nonzero().flatten()
    experts, order = ids.flatten()[slots].sort(stable=True)
    present, counts = experts.unique_consecutive(return_counts=True)
    return list(zip(present.tolist(), slots[order].split(counts.tolist())))


def _times(values: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return values if factor is None else values * factor


def _plus(values: torch.Tensor, term: torch.Tensor | None) -> torch.Tensor:
    return values if term is None else values + term


def _product(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else _times(a, b)


def _take(x: Quantized, token: torch.Tensor) -> Quantized:
    return Quantized(
        _rows_of(x.q, token),
        None if x.sf is None else x.sf[token],
        None if x.token_scale is None else x.token_scale[token],
    )


def _rows_of(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return q.view(torch.uint8)[rows].view(q.dtype)  # indexing float8 is not implemented everywhere


def _poisoned_stages(spec: LayerSpec, slots: int, device: torch.device) -> Stages:
    width, mid = spec.intermediate, mid_format(spec.traits)
    dtype, size = {
        "e4m3": (torch.float8_e4m3fn, width),
        "e2m1": (torch.uint8, width // 2),
        "bf16": (torch.bfloat16, 2 * width),
    }[mid.element]
    act_sf = None
    if mid.element != "bf16":
        groups = -(-width // mid.cols)
        act_sf = torch.full((slots, groups), 0xFF, dtype=torch.uint8, device=device)
        if mid.scale == "fp32":
            act_sf = torch.full((slots, groups), math.nan, dtype=torch.float32, device=device)
    return Stages(
        h=torch.full((slots, 2 * width), math.nan, dtype=torch.float32, device=device),
        act=torch.full((slots, width), math.nan, dtype=torch.float32, device=device),
        act_q=torch.full((slots, size), 0xFF, dtype=torch.uint8, device=device).view(dtype),
        act_sf=act_sf,
    )


def _require_consistent(spec: LayerSpec, parameters: LayerParameters) -> None:
    if spec.ep_size != 1:
        raise NotImplementedError(f"ep_size={spec.ep_size} is not served yet; allowed: 1")
    if spec.has_expert_map != (parameters.expert_map is not None):
        given = "None" if parameters.expert_map is None else "given"
        raise ValueError(f"spec.has_expert_map is {spec.has_expert_map}, but parameters.expert_map is {given}")
    if (spec.recipe.act_scale == "nv16") != (parameters.x_gsf is not None):
        given = "None" if parameters.x_gsf is None else "given"
        raise ValueError(f"parameters.x_gsf is {given} under {spec.recipe}; act_scale nv16 needs it, no other takes it")
    per_expert = [name for name in ("clamp", "alpha", "beta") if getattr(parameters, name) is not None]
    if per_expert and spec.recipe.numerics != "trtllm_gen":
        raise ValueError(f"parameters.{per_expert[0]} is given; allowed under {spec.recipe}: None (trtllm_gen has it)")
    if spec.activation == "swiglu" and set(per_expert) - {"clamp"}:
        raise ValueError(f"parameters.{per_expert[-1]} is given, but swiglu has no alpha and no beta: use swigluoai")
