"""The arithmetic of the reference: two GEMMs per expert, SwiGLU between them, the combine.

Source of the rules: DeepGEMM MegaMoE of `sgl-deep-gemm` 0.1.7, its SM100 and its SM90 kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megamoe.oracle.reference.quantizers import (
    BlockFormat,
    Quantized,
    act_format,
    decode,
    dequantize_act,
    dequantize_weight,
    expand_scales,
    kind_of,
    mid_format,
    pre_dispatch_reference,
    requantize,
    shared_weight_format,
    weight_format,
)
from megamoe.oracle.reference.summation import Matmul, matmul_fp64
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe, traits
from megamoe.spec import SWIGLUOAI_ALPHA, SWIGLUOAI_BETA, LayerSpec


@dataclass
class Stages:
    """Intermediate values of n rows through an MLP of width W; a routed row that no expert serves is poison.

    h: fp32 [n, 2W] accumulators, gate then up, as SwiGLU receives them (NVFP4: times the token scale). act:
    fp32 [n, W] with the top-k weight. act_q, act_sf: its requantization (`mid_format`), row-major.
    """

    h: torch.Tensor
    act: torch.Tensor
    act_q: torch.Tensor
    act_sf: torch.Tensor

    def take(self, rows: torch.Tensor) -> Stages:
        """The stages of some rows."""
        act_q = self.act_q.view(torch.uint8)[rows].view(self.act_q.dtype)  # as in `_take`
        return Stages(self.h[rows], self.act[rows], act_q, self.act_sf[rows])


@dataclass
class LayerTrace:
    """Everything the layer computed, T tokens with K slots each; slot s = t·K + k.

    x: the quantized input. ids int64 and weights fp32 [T, K] as the pre-dispatch passes them on; valid bool
    [T, K]: ids in [0, E). skipped: ids that are neither −1 nor valid. routed: stages of the T·K slots,
    shared: of the T tokens (None without shared experts or without `full_trace`). rows: BF16 [T, K (+1),
    H], NaN where not valid, the shared row last. y: BF16 [T, H].
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
    amax_floor: float | None = None,
    expert_scales: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    tokens: torch.Tensor | None = None,
    full_trace: bool = True,
    matmul: Matmul = matmul_fp64,
) -> LayerTrace:
    """One layer: x BF16 [T, H], topk_ids int [T, K], topk_weights fp32 [T, K].

    `tokens` (integer indices) restricts the work, and every tensor returned, to those tokens: rows never
    meet before the combine. `full_trace=False` keeps no `Stages`. `matmul` forms every sum over K (under
    SM90 rules: within one scale block). Raises `NotImplementedError` for a recipe or an option that is not
    served yet.
    """
    _require_served(spec)
    if tokens is not None:
        x, topk_ids, topk_weights = x[tokens], topk_ids[tokens], topk_weights[tokens]
    routed_input = pre_dispatch_reference(
        x, topk_ids, topk_weights, kind=kind_of(spec.recipe), amax_floor=amax_floor,
        expert_scales=expert_scales, routed_scaling_factor=routed_scaling_factor,
    )  # fmt: skip
    quantized, ids, slot_weights = routed_input
    num_tokens, top_k = ids.shape
    valid = (ids >= 0) & (ids < spec.num_experts)
    rows = torch.full((num_tokens, spec.combine_slots, spec.hidden), math.nan, dtype=torch.bfloat16, device=x.device)
    routed = _poisoned_stages(spec, num_tokens * top_k, x.device) if full_trace else None

    fmt = weight_format(spec.traits)
    for expert, slots in slots_by_expert(ids, valid):
        token = slots // top_k
        stages, out = _expert_mlp(
            _take(quantized, token), slot_weights.flatten()[slots], spec, fmt, matmul,
            weights.w13[expert], weights.w13_scale[expert], weights.w2[expert], weights.w2_scale[expert],
            _global_scales(weights, expert),
        )  # fmt: skip
        rows[token, slots % top_k] = out
        if routed is not None:
            _put(routed, slots, stages)

    shared = None
    if spec.num_shared_experts:
        w13, w13_scale, w2, w2_scale = shared_tensors(weights)
        ones = torch.ones(num_tokens, device=x.device)
        fmt = shared_weight_format(spec.recipe, w13.dtype)
        shared, out = _expert_mlp(quantized, ones, spec, fmt, matmul, w13, w13_scale, w2, w2_scale, GlobalScales())
        rows[:, top_k] = out
    return LayerTrace(
        y=combine(rows, valid),
        rows=rows,
        x=quantized,
        ids=ids,
        weights=slot_weights,
        valid=valid,
        skipped=int(((ids != -1) & ~valid).sum()),
        routed=routed,
        shared=shared if full_trace else None,
    )


def activate(
    gate: torch.Tensor,
    up: torch.Tensor,
    numerics: str,
    clamp: float | None,
    *,
    activation: str = "swiglu",
    alpha: float = SWIGLUOAI_ALPHA,
    beta: float = SWIGLUOAI_BETA,
) -> torch.Tensor:
    """The activation in fp32, of fp32 accumulators; `clamp` None or +inf: no clamp.

    swiglu: (gate · sigmoid(gate)) · up. swigluoai: (gate · sigmoid(alpha · gate)) · (up + beta).
    situ: (4 · tanh(gate/4) · sigmoid(gate)) · (25 · tanh(up/25)). SM100 rounds gate and up to BF16 first and clamps in
    BF16, SM90 stays in fp32. A clamp replaces NaN: gate by +c, up by −c (SM100) or +c (SM90), as the comparisons of
    upstream's kernels do.
    """
    if numerics == "deep_gemm_sm100":
        gate, up = _round_to_bf16(gate), _round_to_bf16(up)
    elif numerics != "deep_gemm_sm90":
        raise NotImplementedError(f"numerics={numerics!r} is not served; allowed: deep_gemm_sm100, deep_gemm_sm90")
    if clamp is not None and clamp != math.inf:
        c = torch.tensor(clamp, device=gate.device)
        if numerics == "deep_gemm_sm100":
            c = _round_to_bf16(c)
            up = torch.where(up >= -c, up, -c)
        else:
            up = torch.where(up < -c, -c, up)
        gate = torch.where(gate <= c, gate, c)
        up = torch.where(up <= c, up, c)
    # exp and tanh in fp64, rounded once: torch's fp32 functions differ between devices.
    slope = alpha * gate if activation == "swigluoai" else gate
    sigmoid = (1.0 + torch.exp(-slope.double()).float()).reciprocal()
    if activation == "swigluoai":
        up = up + beta
    elif activation == "situ":
        gate = 4 * torch.tanh((gate / 4).double()).float()
        up = 25 * torch.tanh((up / 25).double()).float()
    return (gate * sigmoid) * up


def combine(rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Sum of rows BF16 [T, K (+1), H] per token: fp32 from +0, slots ascending where valid [T, K], then the
    shared row; one rounding to BF16."""
    total = torch.zeros(rows.shape[0], rows.shape[2], device=rows.device)
    top_k = valid.shape[1]
    for slot in range(rows.shape[1]):
        row = rows[:, slot].float()
        total += row if slot == top_k else torch.where(valid[:, slot, None], row, 0.0)
    return total.bfloat16()


class GlobalScales(NamedTuple):
    """One expert's factors, fp32: l1_alphas [2] (gate, up), the others without dimensions; None: absent."""

    l1_alphas: torch.Tensor | None = None
    l2_alpha: torch.Tensor | None = None
    l2_act_scale: torch.Tensor | None = None


def _global_scales(weights: PlainWeights, expert: int) -> GlobalScales:
    tensors = (weights.l1_alphas, weights.l2_alphas, weights.l2_act_scales)
    return GlobalScales(*(None if tensor is None else tensor[expert] for tensor in tensors))


def _expert_mlp(
    x: Quantized,
    slot_weights: torch.Tensor,
    spec: LayerSpec,
    weight: BlockFormat,
    matmul: Matmul,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    scales: GlobalScales,
) -> tuple[Stages, torch.Tensor]:
    """Rows through one expert: the stages, and GEMM 2's rows in BF16 [n, H]."""
    row = spec.traits
    # Gate and up are two matrices: no block scale spans both (`PlainWeights`).
    gate, up = (
        _gemm(x.q, x.sf, act_format(row), w, sf, weight, spec.recipe, matmul)
        for w, sf in zip(w13.chunk(2), w13_scale.chunk(2))
    )
    gate_factor = up_factor = x.token_scale
    if scales.l1_alphas is not None:
        # One multiplication per accumulator: the token's scale meets the expert's first.
        gate_factor, up_factor = (
            alpha if x.token_scale is None else x.token_scale * alpha for alpha in scales.l1_alphas.unbind()
        )
    if gate_factor is not None and up_factor is not None:
        gate, up = gate * gate_factor[..., None], up * up_factor[..., None]
    if scales.l2_act_scale is not None:
        slot_weights = slot_weights * scales.l2_act_scale
    act = activate(
        gate, up, spec.recipe.numerics, spec.activation_clamp,
        activation=spec.activation, alpha=spec.activation_alpha, beta=spec.activation_beta,
    ) * slot_weights[:, None]  # fmt: skip
    act_q, act_sf = requantize(act, spec.recipe)
    out = _gemm(act_q, act_sf, mid_format(row), w2, w2_scale, weight, spec.recipe, matmul)
    if scales.l2_alpha is not None:
        out = out * scales.l2_alpha
    return Stages(torch.cat([gate, up], dim=-1), act, act_q, act_sf), out.bfloat16()


def _gemm(
    q: torch.Tensor,
    sf: torch.Tensor,
    act: BlockFormat,
    w: torch.Tensor,
    w_sf: torch.Tensor,
    weight: BlockFormat,
    recipe: Recipe,
    matmul: Matmul,
) -> torch.Tensor:
    """fp32 accumulators [n, N]. SM100: the sum of scaled products, as block-scaled MMA forms it. SM90:
    unscaled sums p per activation scale group (128 in GEMM 1, 64 in GEMM 2), promoted in ascending K as acc
    = fma(sa · sw, p, acc)."""
    if recipe.numerics == "deep_gemm_sm100":
        return matmul(dequantize_act(q, sf, act), dequantize_weight(w, w_sf, weight))
    a, b = decode(q, act.element), decode(w, weight.element)
    w_scale = expand_scales(w_sf, weight._replace(cols=1), b.shape[0], w_sf.shape[1])
    acc = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for block, start in enumerate(range(0, a.shape[1], act.cols)):
        columns = slice(start, start + act.cols)
        partial = matmul(a[:, columns], b[:, columns])
        scale = sf[:, block, None] * w_scale[None, :, start // weight.cols]
        acc = _fma(scale, partial, acc)
    return acc


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fp32 fma through fp64: the product is exact, the sum rounds twice (a wrong tie at most every 2²⁹
    results)."""
    return (a.double() * b.double() + c.double()).float()


def _round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def slots_by_expert(ids: torch.Tensor, valid: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """(expert, its slots ascending) for every expert that has one."""
    slots = valid.flatten().nonzero().flatten()
    experts, order = ids.flatten()[slots].sort(stable=True)
    present, counts = experts.unique_consecutive(return_counts=True)
    return list(zip(present.tolist(), slots[order].split(counts.tolist())))


def _take(x: Quantized, token: torch.Tensor) -> Quantized:
    q = x.q.view(torch.uint8)[token].view(x.q.dtype)  # indexing float8 is not implemented everywhere
    return Quantized(q, x.sf[token], None if x.token_scale is None else x.token_scale[token])


def _poisoned_stages(spec: LayerSpec, slots: int, device: torch.device) -> Stages:
    width, mid = spec.intermediate, mid_format(spec.traits)
    groups = -(-width // mid.cols)
    packed = width // 2 if mid.element == "e2m1" else width
    act_q = torch.full((slots, packed), 0xFF, dtype=torch.uint8, device=device)
    act_sf = torch.full((slots, groups), 0xFF, dtype=torch.uint8, device=device)
    if mid.scale == "fp32":
        act_sf = torch.full((slots, groups), math.nan, device=device)
    return Stages(
        h=torch.full((slots, 2 * width), math.nan, device=device),
        act=torch.full((slots, width), math.nan, device=device),
        act_q=act_q.view(torch.float8_e4m3fn) if mid.element == "e4m3" else act_q,
        act_sf=act_sf,
    )


def _put(stages: Stages, slots: torch.Tensor, part: Stages) -> None:
    stages.h[slots] = part.h
    stages.act[slots] = part.act
    stages.act_q.view(torch.uint8)[slots] = part.act_q.view(torch.uint8)
    stages.act_sf[slots] = part.act_sf


def shared_tensors(
    weights: PlainWeights,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """shared_w13, its scale, shared_w2, its scale; `ValueError` where one is None."""
    w13, w13_scale = weights.shared_w13, weights.shared_w13_scale
    w2, w2_scale = weights.shared_w2, weights.shared_w2_scale
    if w13 is None or w13_scale is None or w2 is None or w2_scale is None:
        raise ValueError("spec.num_shared_experts > 0, but a shared weight or scale is None; all four are needed")
    return w13, w13_scale, w2, w2_scale


def _require_served(spec: LayerSpec) -> None:
    missing = traits(spec.recipe).missing
    if missing is not None:
        raise NotImplementedError(f"{spec.recipe} {missing}")
    if spec.ep_size != 1:
        raise NotImplementedError(f"ep_size={spec.ep_size} is not served yet; allowed: 1")
