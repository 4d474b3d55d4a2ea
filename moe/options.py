"""A layer's optional arguments: checked, then split into what is compiled and what is only passed along."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megamoe.id_map import MAX_GLOBAL_EXPERTS
from megamoe.parameters import LayerParameters
from megamoe.recipe import Recipe
from megamoe.spec import ACTIVATION_DEFAULTS, ACTIVATIONS, LayerSpec
from megamoe.validation import WeightDims, check_choice, check_count, check_number, check_tensor, has_shared_slots


@dataclass(frozen=True)
class LayerOptions:
    """The arguments that `mega_moe` and `MegaMoE` have in common, as the caller wrote them."""

    activation: str = "swiglu"
    activation_clamp: float | torch.Tensor | None = None
    activation_alpha: float | torch.Tensor | None = None
    activation_beta: float | torch.Tensor | None = None
    expert_scales: torch.Tensor | None = None
    x_gsf: torch.Tensor | None = None
    routed_scaling_factor: float = 1.0
    local_expert_offset: int = 0
    num_experts: int | None = None
    expert_map: torch.Tensor | None = None


def resolve(
    options: LayerOptions, recipe: Recipe, dims: WeightDims, top_k: int, device: torch.device
) -> tuple[LayerSpec, LayerParameters]:
    """`options` of a layer with weights of `dims` on `device`. Raises `TypeError`/`ValueError` naming the argument."""
    activation = _activation(options, recipe, dims.num_slot_experts(recipe), device)
    factor = check_number("routed_scaling_factor", options.routed_scaling_factor, "a finite number")
    if not math.isfinite(factor):
        raise ValueError(f"routed_scaling_factor is {factor}; allowed: a finite number")
    num_experts = _num_experts(options, recipe, dims, device)
    _check_per_expert("expert_scales", options.expert_scales, num_experts, "[num_experts]", device)
    _check_x_gsf(options.x_gsf, recipe, device)
    spec = LayerSpec(
        recipe,
        hidden=dims.hidden,
        intermediate=dims.intermediate,
        num_experts=num_experts,
        top_k=top_k,
        num_shared_experts=dims.num_shared_experts,
        shared_weight=dims.shared_weight,
        activation=options.activation,
        activation_clamp=activation.clamp.number,
        activation_alpha=activation.alpha.number,
        activation_beta=activation.beta.number,
        local_experts=None if dims.num_experts == num_experts else dims.num_experts,
        local_expert_offset=options.local_expert_offset,
        has_expert_map=options.expert_map is not None,
    )
    parameters = LayerParameters(
        expert_scales=options.expert_scales,
        routed_scaling_factor=factor,
        expert_map=options.expert_map,
        x_gsf=options.x_gsf,
        clamp=activation.clamp.tensor,
        alpha=activation.alpha.tensor,
        beta=activation.beta.tensor,
    )
    return spec, parameters


class _Parameter(NamedTuple):
    """One parameter of the activation: a number of the layer, or one per expert; neither: the activation's own."""

    number: float | None = None
    tensor: torch.Tensor | None = None


class _Activation(NamedTuple):
    clamp: _Parameter
    alpha: _Parameter
    beta: _Parameter


def _activation(options: LayerOptions, recipe: Recipe, rows: int, device: torch.device) -> _Activation:
    """No clamp where it clamps nothing (None and +inf); `rows` of per-expert tensors."""
    name = options.activation
    check_choice("activation", name, ACTIVATIONS)
    if name == "situ" and (recipe.mma_type != "fp8xfp4" or recipe.numerics == "deep_gemm_sm90"):
        raise ValueError(f"activation is 'situ'; under {recipe} allowed: 'swiglu', 'swigluoai'")
    if name == "situ" and options.activation_clamp is not None:
        limit = _shown(options.activation_clamp)
        raise ValueError(f"activation_clamp is {limit}; allowed with activation='situ': None")
    alpha_and_beta = []
    for argument, default in zip(("activation_alpha", "activation_beta"), ACTIVATION_DEFAULTS[name]):
        value = getattr(options, argument)
        if value is not None and name == "swiglu":
            raise ValueError(
                f"{argument} is {_shown(value)}; allowed with activation='swiglu': None "
                "(activation='swigluoai' takes alpha and beta, also 1 and 0)"
            )
        if value is not None and name == "situ" and recipe.numerics != "trtllm_gen":
            raise ValueError(f"{argument} is {_shown(value)}; allowed with 'situ' under {recipe}: None ({default:g})")
        least = 0.0 if name == "situ" else -math.inf
        alpha_and_beta.append(_alpha_or_beta(argument, value, least, recipe, rows, device))
    return _Activation(_clamp(options.activation_clamp, recipe, rows, device), *alpha_and_beta)


def _alpha_or_beta(
    argument: str, value: object, least: float, recipe: Recipe, rows: int, device: torch.device
) -> _Parameter:
    if value is None:
        return _Parameter()
    allowed = "None or a finite number" + (" above 0" if least == 0 else "")
    if isinstance(value, torch.Tensor):
        return _Parameter(tensor=_per_expert(argument, value, recipe, rows, device, allowed))
    number = check_number(argument, value, allowed)
    if not (math.isfinite(number) and number > least):
        raise ValueError(f"{argument} is {number}; allowed: {allowed}")
    return _Parameter(number)


def _clamp(value: object, recipe: Recipe, rows: int, device: torch.device) -> _Parameter:
    if value is None:
        return _Parameter()
    allowed = "None or a number of at least 0 (0 and inf included)"
    if isinstance(value, torch.Tensor):
        return _Parameter(tensor=_per_expert("activation_clamp", value, recipe, rows, device, allowed))
    number = check_number("activation_clamp", value, allowed)
    if not number >= 0:
        raise ValueError(f"activation_clamp is {number}; allowed: {allowed}")
    return _Parameter(None if math.isinf(number) else number)


def _per_expert(
    argument: str, value: torch.Tensor, recipe: Recipe, rows: int, device: torch.device, allowed: str
) -> torch.Tensor:
    if recipe.numerics != "trtllm_gen":
        raise TypeError(
            f"{argument} is a torch.Tensor; allowed: {allowed}; one number per expert is served under "
            f"trtllm_gen numerics, not under {recipe}"
        )
    _check_per_expert(argument, value, rows, "[E] (with shared experts [E+S])", device)
    return value


def _check_per_expert(name: str, value: object, rows: int, axes: str, device: torch.device) -> None:
    if value is not None:
        check_tensor(
            name, value, dtypes=(torch.float32,), shape=(rows,), axes=axes, device=device, layout="contiguous"
        )  # fmt: skip


def _num_experts(options: LayerOptions, recipe: Recipe, dims: WeightDims, device: torch.device) -> int:
    """The number of routed experts of all ranks, from `num_experts`, the map or the weights."""
    most = MAX_GLOBAL_EXPERTS - (dims.num_shared_experts if has_shared_slots(recipe) else 0)
    given = options.num_experts
    if given is not None:
        check_count("num_experts", given, 1, most)
    offset = check_count("local_expert_offset", options.local_expert_offset, 0, most - dims.num_experts)
    if options.expert_map is not None:
        expert_map = check_tensor(
            "expert_map", options.expert_map, dtypes=(torch.int32,), rank=1, axes="[num_experts]", device=device,
            layout="contiguous",
        )  # fmt: skip
        if given not in (None, len(expert_map)) or len(expert_map) == 0:
            expected = "one for every global expert" if given is None else f"num_experts = {given}"
            raise ValueError(f"expert_map has {len(expert_map)} entries; expected {expected}")
        check_count("expert_map.shape[0] (num_experts)", len(expert_map), 1, most)
        if offset:
            raise ValueError(f"local_expert_offset is {offset}; allowed with expert_map, which places the experts: 0")
        return len(expert_map)
    if given is None:
        if offset:
            raise ValueError(f"num_experts is None; with local_expert_offset={offset} it must count all ranks' experts")
        return dims.num_experts
    if offset + dims.num_experts > given:
        raise ValueError(
            f"num_experts is {given}; expected at least {offset + dims.num_experts}: w13 holds the experts "
            f"{offset}..{offset + dims.num_experts - 1}"
        )
    return given


def _check_x_gsf(x_gsf: object, recipe: Recipe, device: torch.device) -> None:
    if recipe.act_scale != "nv16":
        if x_gsf is not None:
            raise ValueError(
                f"x_gsf is given; allowed under {recipe}: None (only act_scale='nv16' has a global factor)"
            )
        return
    if x_gsf is None:
        raise ValueError(
            f"x_gsf is None; under {recipe} expected a float32 tensor [1], such as 448·6/amax of all tokens"
        )
    check_tensor("x_gsf", x_gsf, dtypes=(torch.float32,), shape=(1,), axes="[1]", device=device)


def _shown(value: object) -> str:
    return "a torch.Tensor" if isinstance(value, torch.Tensor) else repr(value)
