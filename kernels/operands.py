"""How a layer's tensors and recipe reach the GEMM kernels: byte views, strides and compile-time constants."""

from __future__ import annotations

import torch

from megamoe.kernels.config import GemmConfig
from megamoe.kernels.layouts.scale_atoms import GROUPS_PER_WORD, padded_shape
from megamoe.recipe import SERVED, ScaleFormat
from megamoe.spec import LayerSpec

_POINTER = {"e4m3": "*fp8e4nv", "e2m1": "*u8", "bf16": "*bf16"}


def weight_bytes(weight: torch.Tensor) -> torch.Tensor:
    """The weight as the kernels address it: float8_e4m3fn, or uint8 for packed E2M1 (DeepGEMM types it int8)."""
    return weight if weight.dtype == torch.float8_e4m3fn else weight.view(torch.uint8)


def scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    """fp32 block scales as they are; MN-major words as their bytes, in memory order."""
    return scale if scale.dtype == torch.float32 else scale.mT.view(torch.uint8)


def scale_stride(columns: int, scale_format: ScaleFormat | None, group: int) -> int:
    """Elements per row of an activation scale matrix (`Workspace`): bytes come in whole words."""
    groups = -(-columns // group)
    return groups if scale_format == "fp32" else -(-groups // GROUPS_PER_WORD) * GROUPS_PER_WORD


def expert_constexprs(rows: int, columns: int, spec: LayerSpec, *, matrices: int = 1) -> dict[str, object]:
    """Distances between routed experts, in elements of the byte views; an expert holds `matrices` of [rows, columns].

    fp32 block scales of gate and up are two matrices even where their rows interleave.
    """
    t = spec.traits
    pack = 2 if t.weight == "e2m1" else 1
    group_rows, group = t.weight_group
    if t.weight_scale_format == "fp32":
        scales = matrices * -(-rows // group_rows) * -(-columns // group)
    else:
        padded_rows, words = padded_shape(matrices * rows, -(-columns // group))
        scales = padded_rows * words * GROUPS_PER_WORD
    return {"W_STRIDE": matrices * rows * columns // pack, "W_SF_STRIDE": scales}


def operand_constexprs(spec: LayerSpec, tile: GemmConfig) -> dict[str, object]:
    """What both GEMMs are compiled for: the layer's sizes, the number formats and the tile."""
    t = spec.traits
    return {
        "H": spec.hidden,
        "I": spec.intermediate,
        "SHARED_I": spec.shared_intermediate,
        "TOP_K": spec.top_k,
        "MMA": tile.mma,
        "A_FORMAT": t.act,
        "B_FORMAT": t.weight,
        "SHARED_FORMAT": spec.shared_weight or t.weight,
        "SCALE_FORMAT": t.act_scale_format,
        "GROUP": t.act_group,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }


def launch_options(tile: GemmConfig) -> dict[str, object]:
    # Fused multiply-adds stand where the contract writes tl.fma and nowhere else.
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}


def pointer_types(spec: LayerSpec) -> dict[str, str]:
    """Triton pointer types of the operands: activations, their scales, weights, shared weights, their scales."""
    t = spec.traits
    scale = "*fp32" if t.act_scale_format == "fp32" else "*u8"
    return {
        "act": _POINTER[t.act],
        "sf": scale,
        "weight": _POINTER[t.weight],
        "shared": _POINTER[spec.shared_weight or t.weight],
    }


def default_specs() -> list[LayerSpec]:
    """DeepSeek-V4-Flash under every served recipe, with its shared expert: what the codegen proof compiles."""
    specs = []
    for recipe in SERVED:
        # DeepGEMM keeps the shared experts of fp8xfp4 in E4M3.
        shared = "e4m3" if recipe.mma_type in ("fp8xfp4", "fp8xfp8") else "e2m1"
        specs.append(
            LayerSpec(
                recipe=recipe,
                hidden=4096,
                intermediate=2048,
                num_experts=256,
                top_k=6,
                num_shared_experts=1,
                shared_weight=shared,
                activation_clamp=10.0,
            )
        )
    return specs
