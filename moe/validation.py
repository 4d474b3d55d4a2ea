"""Checks of the public API's arguments, all of them made before anything is launched or written.

`TypeError` for a wrong type or dtype, `ValueError` for a wrong rank, shape, device, stride or value. Every
message starts with the argument's name, then says what it was and what is allowed. Nothing here reads a
tensor's contents: that would wait for the GPU (`check_ids` of `megamoe.debug` does, when asked).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch

from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe, traits
from megamoe.spec import ACTIVATIONS, MAX_EXPERTS, MAX_TOP_K, SWIGLUOAI_ALPHA, SWIGLUOAI_BETA

PACKED_E2M1 = (torch.uint8, torch.int8)
WEIGHT_DTYPES: dict[str, tuple[torch.dtype, ...]] = {"e2m1": PACKED_E2M1, "e4m3": (torch.float8_e4m3fn,)}
# Scale bytes may carry the label of their format; a raw byte tensor means the same.
SCALE_DTYPES: dict[str | None, tuple[torch.dtype, ...]] = {
    "ue8m0": (torch.uint8, torch.float8_e8m0fnu),
    "ue4m3": (torch.uint8, torch.float8_e4m3fn),
    "fp32": (torch.float32,),
}
ID_DTYPES = (torch.int32, torch.int64)
Axes = tuple[tuple[str, int], ...]
"""Names and sizes of a tensor's axes, in the layer's terms: (("E", 8), ("2I", 64), ("H", 96))."""

W13_LAYOUTS = ("gate_up", "interleaved")
_GATE_UP_ROWS = {"gran8": 8, "gran16_even_odd": 16, "none": 1}


@dataclass(frozen=True)
class WeightDims:
    """What the weights fix: E experts, hidden H, intermediate I, S shared experts and their format."""

    num_experts: int
    hidden: int
    intermediate: int
    num_shared_experts: int = 0
    shared_weight: str | None = None


def check_tensor(
    name: str,
    value: object,
    *,
    dtypes: tuple[torch.dtype, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    rank: int | None = None,
    axes: str = "",
    device: torch.device | None = None,
    contiguous: bool = False,
) -> torch.Tensor:
    """`value` as a tensor whose last axis (`contiguous`: all of it) is contiguous and that wants no gradient.

    `axes` spells the shape in the layer's terms ("[E, 2I, H/32]"); `None` leaves that property unchecked.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a torch.Tensor {axes}".rstrip())
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; allowed: torch.strided")
    if dtypes is not None and value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {value.dtype}; allowed: {', '.join(map(str, dtypes))}")
    rank = rank if shape is None else len(shape)
    if rank is not None and value.dim() != rank:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {rank} axes {axes}".rstrip())
    if shape is not None and tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {axes} = {shape}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} is on {value.device}; allowed: {device}, where hidden_states or w13 is")
    if contiguous and not value.is_contiguous():
        raise ValueError(f"{name} has strides {value.stride()}; it must be contiguous")
    if value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} has strides {value.stride()}; its last axis must be contiguous (stride 1)")
    if value.requires_grad:
        raise ValueError(f"{name} has requires_grad=True; megamoe computes no gradients: pass it detached")
    return value


def check_number(name: str, value: object, allowed: str) -> float:
    """`value` as a number that fp32 holds: too large a one is infinite; bool and what is no real number are refused.

    So are magnitudes below fp32's normal range: Triton passes such an argument in another type.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); allowed: {allowed}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf  # type: ignore[operator]
    if 0 < abs(number) < 2.0**-126:
        raise ValueError(f"{name} is {number}; allowed: {allowed}, and if not 0 at least 2^-126 in magnitude")
    return torch.tensor(number, dtype=torch.float32).item()


def check_count(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high]."""
    allowed = f"an int of at least {low}" if high is None else f"an int in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); allowed: {allowed}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is {value}; allowed: {allowed}")
    return value


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); allowed: True, False")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


class Activation(NamedTuple):
    """The activation of a `LayerSpec`, by its field names."""

    activation: str
    activation_clamp: float | None
    activation_alpha: float
    activation_beta: float


def check_activation(
    recipe: Recipe, activation: str, clamp: object, alpha: object = None, beta: object = None
) -> Activation:
    """The arguments as numbers: no clamp where it clamps nothing (None and +inf), alpha and beta's defaults."""
    check_choice("activation", activation, ACTIVATIONS)
    if activation == "situ" and recipe.mma_type != "fp8xfp4":
        raise ValueError(f"activation is 'situ'; under {recipe} allowed: 'swiglu', 'swigluoai'")
    limit = _check_clamp(clamp)
    if activation == "situ" and limit is not None:
        raise ValueError(f"activation_clamp is {limit}; allowed with activation='situ': None")
    numbers = []
    for name, value, default in (
        ("activation_alpha", alpha, SWIGLUOAI_ALPHA),
        ("activation_beta", beta, SWIGLUOAI_BETA),
    ):
        if value is not None and activation != "swigluoai":
            raise ValueError(f"{name} is {value!r}; allowed with activation={activation!r}: None")
        number = check_number(name, default if value is None else value, "None or a finite number")
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}; allowed: None or a finite number")
        numbers.append(number)
    return Activation(activation, limit, *numbers)


def _check_clamp(clamp: object) -> float | None:
    if clamp is None:
        return None
    allowed = "None or a number of at least 0 (0 and inf included)"
    value = check_number("activation_clamp", clamp, allowed)
    if math.isnan(value) or value < 0:
        raise ValueError(f"activation_clamp is {value}; allowed: {allowed}")
    return None if math.isinf(value) else value


def check_routed_scaling_factor(value: object) -> float:
    factor = check_number("routed_scaling_factor", value, "a finite number")
    if not math.isfinite(factor):
        raise ValueError(f"routed_scaling_factor is {factor}; allowed: a finite number")
    return factor


def read_dims(weights: PlainWeights, recipe: Recipe) -> WeightDims:
    """Dimensions from ranks and shapes alone, so that a backend can be asked before all else is checked.

    Raises for what is no tensor, has the wrong rank or a number of experts out of range.
    """
    w13 = check_tensor("w13", weights.w13, rank=3, axes="[E, 2I, H] (E2M1: [E, 2I, H/2] packed)")
    check_tensor("w2", weights.w2, rank=3, axes="[E, H, I] (E2M1: [E, H, I/2] packed)")
    num_experts, rows, columns = w13.shape
    check_count("w13.shape[0] (E experts)", num_experts, 1, MAX_EXPERTS)
    if rows == 0 or rows % 2:
        raise ValueError(f"w13 has {rows} rows per expert; expected 2I, I gate rows and I up rows")
    if columns == 0:
        raise ValueError("w13 has no columns; expected [E, 2I, H]")
    hidden = columns * (2 if traits(recipe).weight == "e2m1" else 1)
    shared, shared_weight = 0, None
    if _has_shared(weights):
        shared_w13 = check_tensor("shared_w13", weights.shared_w13, rank=2, axes="[2*I*S, H]")
        shared, rest = divmod(shared_w13.shape[0], rows)
        if rest or shared == 0:
            raise ValueError(f"shared_w13 has {shared_w13.shape[0]} rows; expected 2*I*S, a multiple of 2I = {rows}")
        shared_weight = next((f for f, dtypes in WEIGHT_DTYPES.items() if shared_w13.dtype in dtypes), None)
    return WeightDims(num_experts, hidden, rows // 2, shared, shared_weight)


def check_weights(weights: PlainWeights, recipe: Recipe) -> WeightDims:
    """Every weight and scale against `recipe`; all on w13's device. Returns their dimensions."""
    dims = read_dims(weights, recipe)
    _check_dims(dims, recipe)
    weight = traits(recipe).weight
    experts, two_i, i = ("E", dims.num_experts), ("2I", 2 * dims.intermediate), ("I", dims.intermediate)
    h = ("H", dims.hidden)
    _check_pair("w13", weights.w13, weights.w13_scale, (experts, two_i, h), weight, weights, recipe)
    _check_pair("w2", weights.w2, weights.w2_scale, (experts, h, i), weight, weights, recipe)
    if dims.num_shared_experts:
        formats = shared_formats(recipe)
        allowed = tuple(dtype for fmt in formats for dtype in WEIGHT_DTYPES[fmt])
        shared_w13 = check_tensor("shared_w13", weights.shared_w13, dtypes=allowed)
        fmt = next(fmt for fmt in formats if shared_w13.dtype in WEIGHT_DTYPES[fmt])
        width = dims.intermediate * dims.num_shared_experts
        up, down = (("2*I*S", 2 * width), h), (h, ("I*S", width))
        _check_pair("shared_w13", shared_w13, weights.shared_w13_scale, up, fmt, weights, recipe)
        _check_pair("shared_w2", weights.shared_w2, weights.shared_w2_scale, down, fmt, weights, recipe)
    experts_shape = (dims.num_experts,)
    _check_global_scale("l1_alphas", weights.l1_alphas, (*experts_shape, 2), "[E, 2]", weights, recipe)
    _check_global_scale("l2_alphas", weights.l2_alphas, experts_shape, "[E]", weights, recipe)
    _check_global_scale("l2_act_scales", weights.l2_act_scales, experts_shape, "[E]", weights, recipe)
    return dims


def _check_global_scale(
    name: str, value: object, shape: tuple[int, ...], axes: str, weights: PlainWeights, recipe: Recipe
) -> None:
    if value is None:
        return
    if recipe.mma_type != "nvfp4xnvfp4":
        raise ValueError(f"{name} is given; allowed under {recipe}: None (only nvfp4xnvfp4 has global scales)")
    check_tensor(name, value, dtypes=(torch.float32,), shape=shape, axes=axes, device=weights.w13.device)


def shared_formats(recipe: Recipe) -> tuple[str, ...]:
    """Element formats the shared experts may have; DeepGEMM keeps them in E4M3 beside routed MXFP4."""
    weight = traits(recipe).weight
    return ("e4m3", weight) if recipe.mma_type == "fp8xfp4" else (weight,)


def _has_shared(weights: PlainWeights) -> bool:
    names = ("shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale")
    missing = [name for name in names if getattr(weights, name) is None]
    if 0 < len(missing) < len(names):
        raise ValueError(f"{missing[0]} is None; the four shared_* arguments come together or not at all")
    return not missing


def _check_dims(dims: WeightDims, recipe: Recipe) -> None:
    row = traits(recipe)
    rows, columns = row.weight_group
    # Gate and up each fill whole scale blocks and whole interleaved groups.
    multiple_of_i = math.lcm(row.mid_group or 1, columns or 1, rows, _GATE_UP_ROWS[row.interleave])
    for name, value, multiple in (
        ("H (hidden)", dims.hidden, math.lcm(row.act_group or 1, columns or 1)),
        ("I (intermediate)", dims.intermediate, multiple_of_i),
    ):
        if value % multiple:
            raise ValueError(f"w13 has {name} = {value}; {recipe} needs a multiple of {multiple}")


def _check_pair(
    name: str, weight: object, scale: object, axes: Axes, fmt: str, weights: PlainWeights, recipe: Recipe
) -> None:
    """One matrix, `axes` in elements, and its scales."""
    row, device = traits(recipe), weights.w13.device
    shape, text = _divided(axes, 1, 2 if fmt == "e2m1" else 1)
    check_tensor(name, weight, dtypes=WEIGHT_DTYPES[fmt], shape=shape, axes=text, device=device, contiguous=True)
    shape, text = _divided(axes, *row.weight_group)
    dtypes = SCALE_DTYPES[row.weight_scale_format]
    check_tensor(f"{name}_scale", scale, dtypes=dtypes, shape=shape, axes=text, device=device, contiguous=True)


def _divided(axes: Axes, rows: int, columns: int) -> tuple[tuple[int, ...], str]:
    """Shape and text of `axes`, the last two divided, rounding up: (8, 64, 3) and "[E, 2I, H/32]"."""
    divisors = (1,) * (len(axes) - 2) + (rows, columns)
    shape = tuple(-(-size // divisor) for (_, size), divisor in zip(axes, divisors))
    names = (f"{name}/{divisor}" if divisor > 1 else name for (name, _), divisor in zip(axes, divisors))
    return shape, f"[{', '.join(names)}]"


def read_token_dims(hidden_states: object, topk_ids: object) -> tuple[int, int]:
    """(T, K) from ranks and shapes alone."""
    x = check_tensor("hidden_states", hidden_states, rank=2, axes="[T, H]")
    ids = check_tensor("topk_ids", topk_ids, rank=2, axes="[T, K]")
    check_count("topk_ids.shape[1] (K)", ids.shape[1], 1, MAX_TOP_K)
    return x.shape[0], ids.shape[1]


def check_hidden_states(value: object, hidden: int, device: torch.device) -> torch.Tensor:
    """BF16 [T, H]; rows may be strided."""
    x = check_tensor("hidden_states", value, dtypes=(torch.bfloat16,), rank=2, axes="[T, H]", device=device)
    if x.shape[1] != hidden:
        raise ValueError(f"hidden_states has {x.shape[1]} columns; expected H = {hidden}, as the weights have")
    return x


def check_routing(topk_ids: object, topk_weights: object, num_tokens: int, top_k: int, device: torch.device) -> None:
    """Ids int32/int64 and weights float32, both [T, K] and contiguous."""
    shape, axes = (num_tokens, top_k), "[T, K]"
    check_tensor("topk_ids", topk_ids, dtypes=ID_DTYPES, shape=shape, axes=axes, device=device, contiguous=True)
    check_tensor(
        "topk_weights",
        topk_weights,
        dtypes=(torch.float32,),
        shape=shape,
        axes=axes,
        device=device,
        contiguous=True,
    )


def check_output(value: object, num_tokens: int, hidden: int, device: torch.device) -> torch.Tensor:
    """BF16 [T, H], contiguous."""
    shape, dtypes = (num_tokens, hidden), (torch.bfloat16,)
    return check_tensor("output", value, dtypes=dtypes, shape=shape, axes="[T, H]", device=device, contiguous=True)


def check_expert_scales(value: object, num_experts: int, device: torch.device) -> torch.Tensor:
    """float32 [E], indexed by the global expert id."""
    return check_tensor(
        "expert_scales", value, dtypes=(torch.float32,), shape=(num_experts,), axes="[E]", device=device
    )
