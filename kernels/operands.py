"""How a layer's tensors and recipe reach the GEMM kernels: byte views, strides and compile-time constants."""

from __future__ import annotations

from typing import cast

import torch

from megamoe.kernels.config import GemmConfig
from megamoe.kernels.layouts.scale_atoms import GROUPS_PER_WORD, padded_shape
from megamoe.recipe import ALL_RECIPES, ElementFormat, ScaleFormat, traits
from megamoe.spec import LayerSpec

POINTER_TYPES = {"e4m3": "*fp8e4nv", "e2m1": "*u8", "bf16": "*bf16"}


def weight_bytes(weight: torch.Tensor) -> torch.Tensor:
    """The weight as the kernels address it: packed E2M1 as uint8 (DeepGEMM types it int8), anything else as it is."""
    return weight.view(torch.uint8) if weight.dtype == torch.int8 else weight


def scale_bytes(scale: torch.Tensor | None, absent: torch.Tensor) -> torch.Tensor:
    """fp32 block scales as they are; MN-major words as their bytes, in memory order; `absent` for None."""
    if scale is None:
        return absent
    return scale if scale.dtype == torch.float32 else scale.mT.view(torch.uint8)


def or_absent(tensor: torch.Tensor | None, absent: torch.Tensor) -> torch.Tensor:
    """A pointer for an argument that the compiled kernel does not read when it is None."""
    return absent if tensor is None else tensor


def scale_stride(columns: int, scale_format: ScaleFormat | None, group: int) -> int:
    """Elements per row of an activation scale matrix (`Workspace`): bytes come in whole words."""
    groups = -(-columns // group) if group else 1
    return groups if scale_format in ("fp32", None) else -(-groups // GROUPS_PER_WORD) * GROUPS_PER_WORD


def _shared_format(spec: LayerSpec) -> ElementFormat:
    """Element format of the shared weights; the routed one where there are none, and nothing reads them."""
    return cast(ElementFormat, spec.shared_weight or spec.traits.weight)


def weight_scale_format(spec: LayerSpec, weight: ElementFormat) -> ScaleFormat | None:
    """How weights of format `weight` are scaled in this layer; only shared ones may differ from the routed."""
    t = spec.traits
    if weight == "e4m3" and t.weight != "e4m3":
        return t.act_scale_format
    return t.weight_scale_format


def expert_constexprs(prefix: str, weight: torch.Tensor, scale: torch.Tensor | None) -> dict[str, int]:
    """Distances between experts (`<prefix>STRIDE`, `<prefix>SF_STRIDE`) in elements of the byte views.

    Strides, not sizes: an expanded weight has one expert's memory for all of them. 0 for the matrix of a dense MLP.
    """
    if weight.dim() == 2:
        return {f"{prefix}STRIDE": 0, f"{prefix}SF_STRIDE": 0}
    per_word = 1 if scale is None or scale.dtype == torch.float32 else GROUPS_PER_WORD
    return {
        f"{prefix}STRIDE": weight.stride(0),
        f"{prefix}SF_STRIDE": 0 if scale is None else scale.stride(0) * per_word,
    }


def operand_constexprs(spec: LayerSpec, tile: GemmConfig) -> dict[str, object]:
    """What both GEMMs are compiled for: the layer's sizes, the number formats and the tile."""
    t = spec.traits
    shared = _shared_format(spec)
    return {
        "H": spec.hidden,
        "I": spec.intermediate,
        "SHARED_I": spec.shared_intermediate,
        "SHARED_SLOTS": spec.shared_slots,
        "TOP_K": spec.top_k,
        "TRTLLM": spec.recipe.numerics == "trtllm_gen",
        "MMA": tile.mma,
        "A_FORMAT": t.act,
        "B_FORMAT": t.weight,
        "B_SCALE": t.weight_scale_format or "none",
        "SHARED_FORMAT": shared,
        "SHARED_SCALE": weight_scale_format(spec, shared) or "none",
        "B_GROUP": t.weight_group[1],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }


def launch_options(tile: GemmConfig) -> dict[str, object]:
    # Fused multiply-adds stand where the contract writes tl.fma and nowhere else.
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}


def pointer_types(spec: LayerSpec) -> dict[str, str]:
    """Triton pointer types of the operands; an absent scale's pointer is the one of its matrix."""
    t = spec.traits
    shared = _shared_format(spec)

    def scale(scale_format: ScaleFormat | None, element: str) -> str:
        if scale_format is None:
            return POINTER_TYPES[element]
        return "*fp32" if scale_format == "fp32" else "*u8"

    return {
        "act": POINTER_TYPES[t.act],
        "act_sf": scale(t.act_scale_format, t.act),
        "mid_sf": scale(t.mid_scale_format, t.act),
        "weight": POINTER_TYPES[t.weight],
        "weight_sf": scale(t.weight_scale_format, t.weight),
        "shared": POINTER_TYPES[shared],
        "shared_sf": scale(weight_scale_format(spec, shared), shared),
    }


def default_specs() -> list[LayerSpec]:
    """DeepSeek-V4-Flash under every served recipe, with its shared expert: what the codegen proof compiles."""
    specs = []
    for recipe in ALL_RECIPES:
        t = traits(recipe)
        # Beside E4M3 activations shared experts stay E4M3, as DeepGEMM keeps them.
        shared = "e4m3" if t.act == "e4m3" else t.weight
        specs.append(
            LayerSpec(
                recipe=recipe,
                hidden=4096,
                intermediate=2048,
                num_experts=256,
                top_k=6 + (recipe.numerics == "trtllm_gen"),  # there the shared expert is a slot
                num_shared_experts=1,
                shared_weight=shared,
                activation_clamp=10.0,
            )
        )
    return specs


def example_strides(spec: LayerSpec, prefix: str, rows: int, columns: int, *, matrices: int = 1) -> dict[str, int]:
    """`expert_constexprs` of contiguous weights that do not exist: what a compile-only job stands for."""
    element = spec.traits.weight
    if prefix.startswith("SHARED"):
        element = _shared_format(spec)
        if not spec.shared_slots:
            return {f"{prefix}STRIDE": 0, f"{prefix}SF_STRIDE": 0}
    scale_format = weight_scale_format(spec, element)
    group = spec.traits.weight_group[1]
    scales = 0
    if scale_format == "fp32":
        scales = matrices * -(-rows // 128) * -(-columns // 128)
    elif scale_format is not None:
        padded_rows, words = padded_shape(matrices * rows, -(-columns // group))
        scales = padded_rows * words * GROUPS_PER_WORD
    weights = matrices * rows * columns // (2 if element == "e2m1" else 1)
    return {f"{prefix}STRIDE": weights, f"{prefix}SF_STRIDE": scales}
