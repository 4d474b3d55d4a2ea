"""Checks of the weights, their layout, and the activation between the GEMMs; see `megamoe.flashinfer.arguments`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megamoe.flashinfer.arguments import MXFP4_MXFP8, SCALE_BYTES, Activations, Sizes
from megamoe.flashinfer.enums import ActivationType, WeightLayout
from megamoe.flashinfer.enums import Fp8QuantizationType as Fp8
from megamoe.flashinfer.weights import GATE_UP, SHUFFLED, UP_GATE, Layout, Weights
from megamoe.kernels.layouts.trtllm import padded_shape
from megamoe.recipe import Recipe, traits
from megamoe.validation import check_choice, check_count, check_flag, check_tensor, size_multiples

FP4_LAYOUTS = {"shuffled": SHUFFLED, "up_gate": UP_GATE, "gate_up": GATE_UP}


@dataclass(frozen=True)
class Gate:
    """The activation between the GEMMs. clamp, alpha, beta: fp32 [L+S] or None, for which alpha is 1 and beta
    `beta_number`."""

    name: str
    clamp: torch.Tensor | None
    alpha: torch.Tensor | None
    beta: torch.Tensor | None
    beta_number: float = 0.0


def fp4_layout(weight_layout: object) -> Layout:
    check_choice("weight_layout", weight_layout, tuple(FP4_LAYOUTS))
    return FP4_LAYOUTS[str(weight_layout)]


def fp8_layout(weight_layout: object, use_shuffled_weight: object, kind: Fp8) -> Layout:
    """FlashInfer's pair of arguments; "gate_up" for plain [gate; up] rows."""
    check_flag("use_shuffled_weight", use_shuffled_weight)
    if isinstance(weight_layout, str):
        check_choice("weight_layout", weight_layout, ("gate_up",))
        if use_shuffled_weight:
            raise ValueError("use_shuffled_weight is True; allowed with weight_layout='gate_up': False")
        return GATE_UP
    blocked = check_count("weight_layout", weight_layout, 0, 2)
    if blocked not in tuple(WeightLayout):
        raise ValueError(f"weight_layout is {blocked} (MajorMn); allowed: 0 (MajorK), 2 (BlockMajorK), 'gate_up'")
    if kind == Fp8.MxFp8:
        if blocked:
            raise ValueError(f"weight_layout is {blocked}; allowed with MxFp8: 0 (MajorK), 'gate_up'")
        return SHUFFLED if use_shuffled_weight else UP_GATE
    if blocked and not use_shuffled_weight:
        raise ValueError("weight_layout is 2 (BlockMajorK); allowed with use_shuffled_weight=False: 0, 'gate_up'")
    # The unfused activation kernel of this recipe wants both halves apart; the shuffle stays inside 16 rows.
    return Layout(16 if use_shuffled_weight else 0, "up_gate", block_major=bool(blocked))


class _Matrix(NamedTuple):
    """One of the two GEMMs' matrices, of `experts` experts, and what its axes are called."""

    experts: int
    rows: int
    columns: int
    row_axis: str
    column_axis: str


def check_weights(
    layout: Layout,
    sizes: Sizes,
    x: Activations,
    gemm1: tuple[object, object],
    gemm2: tuple[object, object],
    *,
    biases: tuple[object, object] = (None, None),
    factors: tuple[object, object, object] = (None, None, None),
) -> Weights:
    """gemm1, gemm2: weights and their scales; biases: GEMM 1's and GEMM 2's; factors: output1_scale_scalar,
    output1_scale_gate_scalar, output2_scale_scalar."""
    recipe, h, i, device = x.recipe, x.hidden, sizes.intermediate, x.q.device
    for name, size, multiple in zip(("hidden_states", "intermediate_size"), (h, i), size_multiples(recipe)):
        if size % multiple:
            raise ValueError(f"{name} is {size} wide; {recipe} allows multiples of {multiple}")
    if layout.shuffle and h % layout.shuffle:
        raise ValueError(f"hidden_states is {h} wide; shuffled weights allow multiples of {layout.shuffle}")
    w13 = _Matrix(sizes.rows, 2 * i, h, "2I", "H")
    w2 = _Matrix(sizes.rows, h, i, "H", "I")
    names = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    if traits(recipe).act == "e2m1":
        for name, value in zip(names, factors):
            if value is None:
                raise ValueError(f"{name} is None; NVFP4 needs it, float32 [{sizes.rows}]")
    out, gate, down = (_per_expert(name, value, (sizes.rows,), device) for name, value in zip(names, factors))
    return Weights(
        recipe,
        layout,
        sizes.rows,
        h,
        i,
        _check_elements("gemm1_weights", gemm1[0], w13, recipe, layout, device),
        _check_scale("gemm1_weights_scale", gemm1[1], w13, recipe, layout, device),
        _check_elements("gemm2_weights", gemm2[0], w2, recipe, layout, device),
        _check_scale("gemm2_weights_scale", gemm2[1], w2, recipe, layout, device),
        w13_bias=_per_expert("gemm1_bias", biases[0], (sizes.rows, 2 * i), device),
        w2_bias=_per_expert("gemm2_bias", biases[1], (sizes.rows, h), device),
        out_factor=out,
        gate_factor=gate,
        down_factor=down,
    )


def _check_elements(
    name: str, value: object, matrix: _Matrix, recipe: Recipe, layout: Layout, device: torch.device
) -> torch.Tensor:
    experts, rows, columns, row_axis, column_axis = matrix
    dtype, shape, axes = torch.float8_e4m3fn, (experts, rows, columns), f"[E, {row_axis}, {column_axis}]"
    if traits(recipe).weight == "e2m1":
        dtype, shape, axes = torch.uint8, (experts, rows, columns // 2), f"[E, {row_axis}, {column_axis}/2]"
    if layout.block_major:
        blocks = (experts, columns // 128, rows, 128)
        axes = f"[E, {column_axis}/128, {row_axis}, 128]"
        return check_tensor(name, value, dtypes=(dtype,), shape=blocks, axes=axes, device=device, layout="contiguous")
    return check_tensor(name, value, dtypes=(dtype,), shape=shape, axes=axes, device=device, layout="contiguous")


def _check_scale(
    name: str, value: object, matrix: _Matrix, recipe: Recipe, layout: Layout, device: torch.device
) -> torch.Tensor:
    experts, rows, columns, row_axis, column_axis = matrix
    scale_format, group = traits(recipe).weight_scale_format, traits(recipe).weight_group
    shape = (experts, rows // group[0], columns // group[1])
    axes = f"[E, {row_axis}{'/128' if group[0] > 1 else ''}, {column_axis}/{group[1]}]"
    if scale_format == "fp32":
        dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    else:
        dtypes = SCALE_BYTES[str(scale_format)]
    if scale_format == "fp32" or not layout.tiled:
        return check_tensor(name, value, dtypes=dtypes, shape=shape, axes=axes, device=device, layout="contiguous")
    scale = check_tensor(name, value, dtypes=dtypes, device=device, layout="contiguous")
    expected = experts * math.prod(padded_shape(*shape[1:]))
    if scale.numel() != expected:
        raise ValueError(
            f"{name} has {scale.numel()} elements; expected {expected}: {axes} = {shape}, in whole 128×4 tiles, under "
            f"{recipe}, which hidden_states asks for"
        )
    return scale


def check_gate(
    activation_type: object, gemm1_alpha: object, gemm1_beta: object, gemm1_clamp_limit: object, sizes: Sizes,
    recipe: Recipe, device: torch.device,
) -> Gate:  # fmt: skip
    served = (ActivationType.Swiglu, ActivationType.Situ) if recipe == MXFP4_MXFP8 else (ActivationType.Swiglu,)
    if isinstance(activation_type, bool) or activation_type not in served:
        allowed = ", ".join(f"{int(value)} ({value.name})" for value in served)
        raise ValueError(f"activation_type is {activation_type!r}; allowed under {recipe}: {allowed}")
    alpha, beta, clamp = (
        _per_expert(name, value, (sizes.rows,), device)
        for name, value in (
            ("gemm1_alpha", gemm1_alpha), ("gemm1_beta", gemm1_beta), ("gemm1_clamp_limit", gemm1_clamp_limit)
        )
    )  # fmt: skip
    if activation_type == ActivationType.Situ:
        return Gate("situ", clamp, alpha, beta, beta_number=1.0)
    return Gate("swiglu" if alpha is None and beta is None else "swigluoai", clamp, alpha, beta)


def _per_expert(name: str, value: object, shape: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    if value is None:
        return None
    return check_tensor(
        name, value, dtypes=(torch.float32,), shape=shape, axes=f"[E{', ..' * (len(shape) - 1)}]", device=device,
        layout="contiguous",
    )  # fmt: skip
