"""Checks of the public API's arguments, all of them made before anything is launched or written.

`TypeError` for a wrong type or dtype, `ValueError` for a wrong rank, shape, device, stride or value. Every
message starts with the argument's name, then says what it was and what is allowed. Nothing here reads a
tensor's contents: that would wait for the GPU (`check_ids` of `megamoe.debug` does, when asked).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Literal

import torch

from megamoe.formats import round_to_fp32
from megamoe.plain_weights import PlainWeights, element_format
from megamoe.recipe import ElementFormat, Recipe, ScaleFormat, traits
from megamoe.spec import MAX_EXPERTS, MAX_TOP_K

PACKED_E2M1 = (torch.uint8, torch.int8)
WEIGHT_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "e2m1": PACKED_E2M1,
    "e4m3": (torch.float8_e4m3fn,),
    "bf16": (torch.bfloat16,),
}
# Scale bytes may carry the label of their format; a raw byte tensor means the same.
SCALE_DTYPES: dict[str | None, tuple[torch.dtype, ...]] = {
    "ue8m0": (torch.uint8, torch.float8_e8m0fnu),
    "ue4m3": (torch.uint8, torch.float8_e4m3fn),
    "fp32": (torch.float32,),
}
ID_DTYPES = (torch.int32, torch.int64)
BIAS_DTYPES = (torch.float32, torch.bfloat16)
Axes = tuple[tuple[str, int], ...]
"""Names and sizes of a tensor's axes, in the layer's terms: (("E", 8), ("2I", 64), ("H", 96))."""

W13_LAYOUTS = ("gate_up", "interleaved")
BLOCK = (128, 128)
"""Rows × columns of one fp32 weight scale."""
_TILE_ROWS = {"gran8": 8, "gran16_even_odd": 16}  # gate rows, and as many up rows, of one period of the tile order

Layout = Literal["any", "rows", "matrices", "contiguous"]
"""How many of a tensor's axes must be contiguous: none, the last, the last two, all."""


@dataclass(frozen=True)
class WeightDims:
    """What the weights fix: E local experts, hidden H, intermediate I, S shared experts and their format."""

    num_experts: int
    hidden: int
    intermediate: int
    num_shared_experts: int = 0
    shared_weight: str | None = None

    def num_slot_experts(self, recipe: Recipe) -> int:
        """E': experts with a row in per-expert tensors, the routed ones and, under `trtllm_gen`, the shared ones."""
        return self.num_experts + (self.num_shared_experts if has_shared_slots(recipe) else 0)


def has_shared_slots(recipe: Recipe) -> bool:
    """Whether shared experts are experts that ids name (`trtllm_gen`), not one dense MLP."""
    return recipe.numerics == "trtllm_gen"


def check_tensor(
    name: str,
    value: object,
    *,
    dtypes: tuple[torch.dtype, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    rank: int | None = None,
    axes: str = "",
    device: torch.device | None = None,
    layout: Layout = "rows",
) -> torch.Tensor:
    """`value` as a tensor of that memory `layout` that wants no gradient, also where gradients are disabled.

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
        raise ValueError(f"{name} is on {value.device}; allowed: {device}")
    if layout == "contiguous" and not value.is_contiguous():
        raise ValueError(f"{name} has strides {value.stride()}; it must be contiguous")
    if layout != "any" and value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} has strides {value.stride()}; its last axis must be contiguous (stride 1)")
    if layout == "matrices" and value.shape[-2] > 1 and value.stride(-2) != value.shape[-1]:
        raise ValueError(f"{name} has strides {value.stride()}; its last two axes must be contiguous")
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
    return round_to_fp32(number)


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
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def read_dims(weights: PlainWeights, recipe: Recipe) -> WeightDims:
    """Dimensions from ranks and shapes alone.

    Raises for what is no tensor, has the wrong rank or a number of experts out of range.
    """
    w13 = check_tensor("w13", weights.w13, rank=3, axes="[E, 2I, H] (E2M1: [E, 2I, H/2] packed)")
    num_experts, rows, columns = w13.shape
    check_count("w13.shape[0] (E experts)", num_experts, 1, MAX_EXPERTS)
    if rows == 0 or rows % 2:
        raise ValueError(f"w13 has {rows} rows per expert; expected 2I, I gate rows and I up rows")
    if columns == 0:
        raise ValueError("w13 has no columns; expected [E, 2I, H]")
    hidden = columns * (2 if traits(recipe).weight == "e2m1" else 1)
    shared, shared_weight = 0, None
    if _has_shared(weights, recipe):
        shared, shared_weight = _read_shared(weights.shared_w13, recipe, num_experts, rows)
    return WeightDims(num_experts, hidden, rows // 2, shared, shared_weight)


def _read_shared(value: object, recipe: Recipe, num_experts: int, rows: int) -> tuple[int, ElementFormat]:
    """How many shared experts there are, and their element format."""
    if has_shared_slots(recipe):
        shared_w13 = check_tensor("shared_w13", value, rank=3, axes=f"[S, 2I, H] under {recipe}")
        shared = check_count("shared_w13.shape[0] (S experts)", shared_w13.shape[0], 1, MAX_EXPERTS)
        if num_experts + shared > MAX_EXPERTS:
            raise ValueError(f"shared_w13 has {shared} experts beside {num_experts}; allowed: {MAX_EXPERTS} in all")
    else:
        shared_w13 = check_tensor("shared_w13", value, rank=2, axes="[2*I*S, H]")
        shared, rest = divmod(shared_w13.shape[0], rows)
        if rest or shared == 0:
            raise ValueError(f"shared_w13 has {shared_w13.shape[0]} rows; expected 2*I*S, a multiple of 2I = {rows}")
    allowed = tuple(dtype for fmt in shared_formats(recipe) for dtype in WEIGHT_DTYPES[fmt])
    return shared, element_format(check_tensor("shared_w13", shared_w13, dtypes=allowed))


def check_weights(weights: PlainWeights, recipe: Recipe) -> WeightDims:
    """Every weight, scale, bias and global scale against `recipe`; all on w13's device. Returns their dimensions."""
    check_choice("w13_layout", weights.w13_layout, W13_LAYOUTS)
    dims = read_dims(weights, recipe)
    _check_dims(dims, recipe)
    weight = traits(recipe).weight
    experts, two_i, i = ("E", dims.num_experts), ("2I", 2 * dims.intermediate), ("I", dims.intermediate)
    h = ("H", dims.hidden)
    _check_pair("w13", weights.w13, weights.w13_scale, (experts, two_i, h), weight, weights, recipe)
    _check_pair("w2", weights.w2, weights.w2_scale, (experts, h, i), weight, weights, recipe)
    if dims.shared_weight is not None:
        fmt, shared = dims.shared_weight, dims.num_shared_experts
        width = dims.intermediate * shared
        up: Axes = (("2*I*S", 2 * width), h)
        down: Axes = (h, ("I*S", width))
        if has_shared_slots(recipe):
            up, down = (("S", shared), two_i, h), (("S", shared), h, i)
        _check_pair("shared_w13", weights.shared_w13, weights.shared_w13_scale, up, fmt, weights, recipe)
        _check_pair("shared_w2", weights.shared_w2, weights.shared_w2_scale, down, fmt, weights, recipe)
    rows, name = dims.num_slot_experts(recipe), "E+S" if dims.num_slot_experts(recipe) > dims.num_experts else "E"
    device = weights.w13.device
    for argument, last in (("w13_bias", two_i), ("w2_bias", h)):
        value = getattr(weights, argument)
        if value is not None:
            axes = f"[{name}, {last[0]}]"
            check_tensor(
                argument, value, dtypes=BIAS_DTYPES, shape=(rows, last[1]), axes=axes, device=device, layout="any"
            )  # fmt: skip
    factors: tuple[tuple[str, tuple[int, ...]], ...] = (("l1_alphas", (2,)), ("l2_alphas", ()), ("l2_act_scales", ()))
    for argument, columns in factors:
        value = getattr(weights, argument)
        if value is None:
            continue
        if recipe.mma_type != "nvfp4xnvfp4" and recipe.numerics != "trtllm_gen":
            raise ValueError(f"{argument} is given; allowed under {recipe}: None (nvfp4xnvfp4 and trtllm_gen have it)")
        axes, shape = f"[{name}, 2]" if columns else f"[{name}]", (rows, *columns)
        check_tensor(
            argument, value, dtypes=(torch.float32,), shape=shape, axes=axes, device=device, layout="any"
        )  # fmt: skip
    return dims


def shared_formats(recipe: Recipe) -> tuple[ElementFormat, ...]:
    """Element formats the shared experts may have; DeepGEMM keeps them in E4M3 beside routed MXFP4."""
    weight = traits(recipe).weight
    return ("e4m3", weight) if recipe.mma_type == "fp8xfp4" else (weight,)


def scale_of(recipe: Recipe, weight: str) -> tuple[ScaleFormat | None, tuple[int, int]]:
    """Format of the scales of `weight` elements in this layer, and the rows × columns that one covers.

    Only shared E4M3 weights beside MXFP4 ones differ from the routed: they are scaled as the activations are.
    """
    row = traits(recipe)
    if weight == row.weight:
        return row.weight_scale_format, row.weight_group
    return ("fp32", BLOCK) if row.act_scale_format == "fp32" else ("ue8m0", (1, 32))


def _has_shared(weights: PlainWeights, recipe: Recipe) -> bool:
    scales = ("shared_w13_scale", "shared_w2_scale") if traits(recipe).weight_scale_format is not None else ()
    names = ("shared_w13", "shared_w2", *scales)
    given = [name for name in names if getattr(weights, name) is not None]
    missing = [name for name in names if name not in given]
    if given and missing:
        raise ValueError(f"{missing[0]} is None; the {len(names)} shared_* arguments come together or not at all")
    if not given:
        for name in ("shared_w13_scale", "shared_w2_scale"):
            if getattr(weights, name) is not None:
                raise ValueError(f"{name} is given without {name.removesuffix('_scale')}; allowed: None")
    return bool(given)


def size_multiples(recipe: Recipe) -> tuple[int, int]:
    """What H and I must be multiples of: whole scale groups of activations, intermediate and weights, and 32 columns
    where there are none; gate and up each fill whole tiles' runs of rows."""
    row = traits(recipe)
    rows, columns = row.weight_group
    tile = _TILE_ROWS[row.tile_order]
    return math.lcm(row.act_group or 32, columns or 1), math.lcm(row.mid_group or 32, columns or 1, rows, tile)


def _check_dims(dims: WeightDims, recipe: Recipe) -> None:
    multiple_of_h, multiple_of_i = size_multiples(recipe)
    for name, value, multiple in (
        ("H (hidden)", dims.hidden, multiple_of_h),
        ("I (intermediate)", dims.intermediate, multiple_of_i),
    ):
        if value % multiple:
            raise ValueError(f"w13 has {name} = {value}; {recipe} needs a multiple of {multiple}")


def _check_pair(
    name: str, weight: object, scale: object, axes: Axes, fmt: str, weights: PlainWeights, recipe: Recipe
) -> None:
    """One matrix, `axes` in elements, and its scales."""
    device = weights.w13.device
    shape, text = _divided(axes, 1, 2 if fmt == "e2m1" else 1)
    check_tensor(name, weight, dtypes=WEIGHT_DTYPES[fmt], shape=shape, axes=text, device=device, layout="matrices")
    scale_format, group = scale_of(recipe, fmt)
    if scale_format is None:
        if scale is not None:
            raise ValueError(f"{name}_scale is given; allowed under {recipe}: None (BF16 weights have no scales)")
        return
    if name.endswith("w13") and group[0] > 1:
        # No block spans gate and up, or two matrices that lie on top of each other would share it.
        axes = (*axes[:-2], (axes[-2][0], 2 * group[0] * -(-axes[-2][1] // (2 * group[0]))), axes[-1])
    shape, text = _divided(axes, *group)
    dtypes = SCALE_DTYPES[scale_format]
    check_tensor(f"{name}_scale", scale, dtypes=dtypes, shape=shape, axes=text, device=device, layout="any")


def _divided(axes: Axes, rows: int, columns: int) -> tuple[tuple[int, ...], str]:
    """Shape and text of `axes`, the last two divided, rounding up: (8, 64, 3) and "[E, 2I, H/32]"."""
    divisors = (1,) * (len(axes) - 2) + (rows, columns)
    shape = tuple(-(-size // divisor) for (_, size), divisor in zip(axes, divisors))
    names = (f"{name}/{divisor}" if divisor > 1 else name for (name, _), divisor in zip(axes, divisors))
    return shape, f"[{', '.join(names)}]"


def check_donated(weights: PlainWeights, recipe: Recipe) -> None:
    """Where w13's rows are reordered, that no two experts share memory, so that one can be reordered where it lies."""
    w13 = weights.w13
    keeps_rows = recipe.numerics == "trtllm_gen" or weights.w13_layout == "interleaved"
    if not keeps_rows and w13.shape[0] > 1 and w13.stride(0) < w13[0].numel():
        raise ValueError(f"w13 has strides {w13.stride()}; with donate=True its experts must not overlap")


def canonical(weights: PlainWeights, recipe: Recipe) -> PlainWeights:
    """Checked weights as `PlainWeights` states them: packed elements and scale bytes as uint8, whatever label they came
    with, scales and per-expert numbers contiguous, biases fp32. Weights are never copied; what is copied is small."""
    byte_labels = {torch.int8, torch.float8_e8m0fnu}
    changed: dict[str, torch.Tensor] = {}
    for field in fields(weights):
        tensor = getattr(weights, field.name)
        if not isinstance(tensor, torch.Tensor):
            continue
        is_scale = field.name.endswith("_scale")
        if tensor.dtype in byte_labels or (is_scale and tensor.dtype == torch.float8_e4m3fn):
            tensor = tensor.view(torch.uint8)
        if field.name.endswith("_bias"):
            tensor = tensor.float()
        if field.name not in ("w13", "w2", "shared_w13", "shared_w2"):
            tensor = tensor.contiguous()
        changed[field.name] = tensor
    return replace(weights, **changed)  # type: ignore[arg-type]


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
    check_tensor("topk_ids", topk_ids, dtypes=ID_DTYPES, shape=shape, axes=axes, device=device, layout="contiguous")
    check_tensor(
        "topk_weights",
        topk_weights,
        dtypes=(torch.float32,),
        shape=shape,
        axes=axes,
        device=device,
        layout="contiguous",
    )


def check_output(value: object, num_tokens: int, hidden: int, device: torch.device) -> torch.Tensor:
    """BF16 [T, H]; rows may be strided, but not overlap."""
    shape, dtypes = (num_tokens, hidden), (torch.bfloat16,)
    output = check_tensor("output", value, dtypes=dtypes, shape=shape, axes="[T, H]", device=device)
    if num_tokens > 1 and output.stride(0) < hidden:
        raise ValueError(f"output has strides {output.stride()}; its rows must not overlap")
    return output
