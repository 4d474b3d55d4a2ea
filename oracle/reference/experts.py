"""One expert's MLP taken out of a layer's weights and parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe.oracle.reference.activation import Parameter
from megamoe.oracle.reference.gemm import Matrix
from megamoe.oracle.reference.quantizers import BlockFormat, shared_weight_format, weight_format
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.spec import LayerSpec


class Expert(NamedTuple):
    """An MLP of width W: gate, up [W, H] and down [H, W], and what else its arithmetic takes; None: absent.

    clamp, alpha, beta as `activate` takes them. Biases fp32 [W], [W] and [H]. Factors fp32 without dimensions:
    gate_scale and up_scale of the accumulators (l1_alphas, or 1/x_gsf), act_scale of the activated values, down_scale
    of GEMM 2's rows (l2_alphas).
    """

    gate: Matrix
    up: Matrix
    down: Matrix
    clamp: Parameter | None
    alpha: Parameter
    beta: Parameter
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_scale: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None
    act_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None


def slot_expert(weights: PlainWeights, parameters: LayerParameters, spec: LayerSpec, index: int) -> Expert:
    """The expert with local id `index`: a routed one or, from `spec.num_local_experts` on, a shared slot's."""
    at, fmt = index, weight_format(spec.traits)
    w13, w13_scale, w2, w2_scale = weights.w13, weights.w13_scale, weights.w2, weights.w2_scale
    if index >= spec.num_local_experts:
        at = index - spec.num_local_experts
        w13, w13_scale, w2, w2_scale = shared_tensors(weights)
        fmt = shared_weight_format(spec.recipe, w13.dtype)
    gate, up = _gate_and_up(w13[at], None if w13_scale is None else w13_scale[at], fmt, weights.w13_layout)
    bias = _of(weights.w13_bias, index)
    gate_bias, up_bias = (None, None) if bias is None else _halves(bias, weights.w13_layout)
    gate_scale, up_scale = _gate_and_up_scales(weights.l1_alphas, parameters.x_gsf, index)
    return Expert(
        gate,
        up,
        Matrix(w2[at], None if w2_scale is None else w2_scale[at], fmt),
        clamp=spec.activation_clamp if parameters.clamp is None else parameters.clamp[index],
        alpha=spec.alpha if parameters.alpha is None else parameters.alpha[index],
        beta=spec.beta if parameters.beta is None else parameters.beta[index],
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=_of(weights.w2_bias, index),
        gate_scale=gate_scale,
        up_scale=up_scale,
        act_scale=_of(weights.l2_act_scales, index),
        down_scale=_of(weights.l2_alphas, index),
    )


def dense_shared_expert(weights: PlainWeights, spec: LayerSpec) -> Expert:
    """The shared experts of DeepGEMM numerics, one MLP: [gate; up] rows, no biases and no factors."""
    w13, w13_scale, w2, w2_scale = shared_tensors(weights)
    fmt = shared_weight_format(spec.recipe, w13.dtype)
    gate, up = _gate_and_up(w13, w13_scale, fmt, "gate_up")
    return Expert(gate, up, Matrix(w2, w2_scale, fmt), spec.activation_clamp, spec.alpha, spec.beta)


def shared_tensors(
    weights: PlainWeights,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """shared_w13, its scale, shared_w2, its scale; `ValueError` where one is None (BF16 has no scales)."""
    w13, w13_scale = weights.shared_w13, weights.shared_w13_scale
    w2, w2_scale = weights.shared_w2, weights.shared_w2_scale
    if w13 is not None and w2 is not None:
        if w13.dtype == torch.bfloat16:
            return w13, None, w2, None
        if w13_scale is not None and w2_scale is not None:
            return w13, w13_scale, w2, w2_scale
    raise ValueError("spec.num_shared_experts > 0, but a shared weight or scale is None; all four are needed")


def _gate_and_up(w13: torch.Tensor, scale: torch.Tensor | None, fmt: BlockFormat, layout: str) -> tuple[Matrix, Matrix]:
    """w13 [2W, H] as two matrices. In [gate; up] no scale spans both; interleaved, a block of scales covers as many
    rows of the one as of the other."""
    gate, up = _halves(w13, layout)
    if layout == "interleaved" and fmt.rows > 1:
        half = fmt._replace(rows=fmt.rows // 2)
        return Matrix(gate, scale, half), Matrix(up, scale, half)
    gate_sf, up_sf = (None, None) if scale is None else _halves(scale, layout)
    return Matrix(gate, gate_sf, fmt), Matrix(up, up_sf, fmt)


def _halves(rows: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate's and up's of [2W, …]."""
    if layout == "interleaved":
        return rows[0::2], rows[1::2]
    gate, up = rows.chunk(2)
    return gate, up


def _gate_and_up_scales(
    l1_alphas: torch.Tensor | None, x_gsf: torch.Tensor | None, index: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if l1_alphas is not None:
        gate, up = l1_alphas[index].unbind()
        return gate, up
    undone = None if x_gsf is None else x_gsf.reshape(()).reciprocal()
    return undone, undone


def _of(tensor: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[index]
