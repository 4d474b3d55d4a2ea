"""Transformed weights as the calls take them: checked for upstream's layout and wrapped, never copied."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megamoe.deep_gemm.arguments import on_device, pair
from megamoe.kernels.layouts.scale_atoms import GROUPS_PER_WORD
from megamoe.recipe import Recipe, traits
from megamoe.validation import PACKED_E2M1, WEIGHT_DTYPES, scale_of, shared_formats
from megamoe.weights import ExpertMatrices


class GlobalScales(NamedTuple):
    """NVFP4's factors, routed experts only: fp32 [E, 2] (gate, up), [E] and [E]; None: 1."""

    l1_alphas: torch.Tensor | None = None
    l2_alphas: torch.Tensor | None = None
    l2_act_scales: torch.Tensor | None = None

    def check(self, experts: int, device: torch.device) -> None:
        for name, value in self._asdict().items():
            if value is not None:
                shape, axes = ((experts, 2), "[E, 2]") if name == "l1_alphas" else ((experts,), "[E]")
                on_device(name, value, device, (torch.float32,), axes, shape=shape)


NO_SCALES = GlobalScales()


def read_matrices(
    names: tuple[str, str],
    values: tuple[Any, Any],
    recipe: Recipe,
    device: torch.device,
    *,
    lead: tuple[int, ...],
    hidden: int,
    intermediate: int,
    formats: tuple[str, ...] = (),
) -> ExpertMatrices:
    """Both matrices of the experts (`lead` (E,)) or of a dense shared MLP (()), `intermediate` wide.

    `formats`: allowed element formats; empty: the routed experts' alone. `TypeError`/`ValueError` naming the argument.
    """
    allowed = formats or (traits(recipe).weight,)
    found: list[torch.Tensor | None] = []
    for name, value, rows, columns in (
        (names[0], values[0], 2 * intermediate, hidden),
        (names[1], values[1], hidden, intermediate),
    ):
        if traits(recipe).weight == "bf16":
            shape = (*lead, rows, columns)
            found += [on_device(name, value, device, WEIGHT_DTYPES["bf16"], "[.., rows, columns]", shape=shape), None]
        else:
            found += _read_pair(name, value, recipe, device, lead, rows, columns, allowed)
    w13, w13_scale, w2, w2_scale = found
    assert w13 is not None
    assert w2 is not None
    if w13.dtype != w2.dtype:
        raise TypeError(f"{names[1]}[0] has dtype {w2.dtype}; allowed: {w13.dtype}, as {names[0]}[0]")
    return ExpertMatrices(w13, w13_scale, w2, w2_scale)


def read_shared(
    values: tuple[Any, Any], num_shared: int, recipe: Recipe, device: torch.device, *, hidden: int, intermediate: int
) -> ExpertMatrices | None:
    """The S = `num_shared` shared experts of the buffer: both matrices, or neither where S is 0."""
    names = ("shared_l1_weights", "shared_l2_weights")
    for name, value in zip(names, values):
        if (value is not None) != (num_shared > 0):
            given, need = ("given", "None") if num_shared == 0 else ("None", "required")
            raise ValueError(f"{name} is {given}; with a buffer of {num_shared} shared experts it is {need}")
    if num_shared == 0:
        return None
    return read_matrices(
        names, values, recipe, device,
        lead=(), hidden=hidden, intermediate=intermediate * num_shared, formats=shared_formats(recipe),
    )  # fmt: skip


def _read_pair(
    name: str,
    value: object,
    recipe: Recipe,
    device: torch.device,
    lead: tuple[int, ...],
    rows: int,
    columns: int,
    allowed: tuple[str, ...],
) -> list[torch.Tensor | None]:
    weight, scale = pair(name, value)
    dtypes = tuple(dtype for fmt in allowed for dtype in WEIGHT_DTYPES[fmt])
    weight = on_device(f"{name}[0]", weight, device, dtypes, "[.., rows, columns]", rank=len(lead) + 2)
    packed = weight.dtype in PACKED_E2M1
    expected = (*lead, rows, columns // 2 if packed else columns)
    if tuple(weight.shape) != expected:
        raise ValueError(f"{name}[0] has shape {tuple(weight.shape)}; expected {expected}, as the buffer's sizes ask")
    fmt, group = scale_of(recipe, "e2m1" if packed else "e4m3")
    if fmt == "fp32":
        blocks = (*lead, rows // group[0], columns // group[1])
        return [weight, on_device(f"{name}[1]", scale, device, (torch.float32,), "[.., blocks]", shape=blocks)]
    words = (*lead, rows, columns // (group[1] * GROUPS_PER_WORD))
    scale = on_device(f"{name}[1]", scale, device, (torch.int32,), "[.., rows, K/4g]", shape=words, layout="any")
    if (rows > 1 and scale.stride(-2) != 1) or (words[-1] > 1 and scale.stride(-1) != rows):
        raise ValueError(f"{name}[1] has strides {scale.stride()}; expected MN-major words, (.., 1, {rows})")
    return [weight, scale]
