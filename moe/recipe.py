"""Recipes: the one table that fixes number formats, scale groups and arithmetic of a layer.

A `Recipe` is a key, `traits(recipe)` is what follows from it. Every part of the package (buffers, pre-dispatch,
weight preparation, kernels, references, benches) takes the recipe and reads its traits; nothing re-derives them
from tensor shapes or environment variables.

Source of the contracts: DeepGEMM MegaMoE of `sgl-deep-gemm` 0.1.7 and FlashInfer's trtllm-gen MoE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ElementFormat = Literal["e4m3", "e2m1", "bf16"]
ScaleFormat = Literal["ue8m0", "ue4m3", "fp32"]
Interleave = Literal["gran8", "gran16_even_odd", "none"]

MMA_TYPES = (
    "fp8xfp4",
    "mxf4xmxf4",
    "nvfp4xnvfp4",
    "fp8xfp8",
    "mxfp8xmxfp8",
    "bf16xbf16",
    "bf16xfp4",
)
ACT_SCALES = ("mx32", "block128", "token", "nv16_token", "nv16", "none")
NUMERICS = ("deep_gemm_sm100", "deep_gemm_sm90", "trtllm_gen")


@dataclass(frozen=True)
class Recipe:
    """Key of the legality table: which numbers meet (`mma_type`), how activations are scaled, whose arithmetic."""

    mma_type: str
    act_scale: str
    numerics: str

    def __str__(self) -> str:
        return f"{self.mma_type}/{self.act_scale}/{self.numerics}"


@dataclass(frozen=True)
class Traits:
    """What a recipe implies.

    `*_group` counts columns of the contraction axis per scale (0: unscaled); weight scales cover
    `weight_group[0]` rows × `weight_group[1]` columns. `mid_*` describe the intermediate between the two GEMMs.
    `token_scale` says that each token carries one more fp32 factor (NVFP4 of DeepGEMM).
    """

    act: ElementFormat
    act_scale_format: ScaleFormat | None
    act_group: int
    weight: ElementFormat
    weight_scale_format: ScaleFormat | None
    weight_group: tuple[int, int]
    mid_scale_format: ScaleFormat | None
    mid_group: int
    interleave: Interleave
    judge: str
    token_scale: bool = False

    @property
    def mid_kind(self) -> str:
        """Name of the requantization between the GEMMs: `mxfp8`, `mxfp4`, `nvfp4`, `fp8_block64`, … or `bf16`."""
        if self.mid_scale_format is None:
            return "bf16"
        if self.mid_scale_format == "fp32":
            return f"fp8_block{self.mid_group}"
        if self.act == "e4m3":
            return "mxfp8"
        return "mxfp4" if self.mid_scale_format == "ue8m0" else "nvfp4"

    @property
    def tile_order(self) -> Literal["gran8", "gran16_even_odd"]:
        """Order of gate and up rows within a tile of GEMM 1, however the weight lies in memory.

        Both nibbles of a byte of an E2M1 intermediate must come from one thread.
        """
        return "gran16_even_odd" if self.mid_scale_format is not None and self.act == "e2m1" else "gran8"


_MX_WEIGHT = dict(weight="e2m1", weight_scale_format="ue8m0", weight_group=(1, 32))
_BLOCK_WEIGHT = dict(weight="e4m3", weight_scale_format="fp32", weight_group=(128, 128))


def _row(**fields: object) -> Traits:
    return Traits(**fields)  # type: ignore[arg-type]


# Order matters: the first legal row of an mma_type is its default.
TABLE: dict[Recipe, Traits] = {
    Recipe("fp8xfp4", "mx32", "deep_gemm_sm100"): _row(
        act="e4m3", act_scale_format="ue8m0", act_group=32, **_MX_WEIGHT,
        mid_scale_format="ue8m0", mid_group=32, interleave="gran8", judge="DeepGEMM SM100",
    ),
    Recipe("fp8xfp4", "mx32", "trtllm_gen"): _row(
        act="e4m3", act_scale_format="ue8m0", act_group=32, **_MX_WEIGHT,
        mid_scale_format="ue8m0", mid_group=32, interleave="none", judge="trtllm-gen",
    ),
    Recipe("fp8xfp4", "block128", "deep_gemm_sm90"): _row(
        act="e4m3", act_scale_format="fp32", act_group=128, **_MX_WEIGHT,
        mid_scale_format="fp32", mid_group=128, interleave="gran8", judge="reference",
    ),
    Recipe("fp8xfp4", "token", "deep_gemm_sm90"): _row(
        act="e4m3", act_scale_format="fp32", act_group=0, **_MX_WEIGHT,
        mid_scale_format="fp32", mid_group=128, interleave="gran8", judge="reference",
    ),
    Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100"): _row(
        act="e2m1", act_scale_format="ue8m0", act_group=32, **_MX_WEIGHT,
        mid_scale_format="ue8m0", mid_group=32, interleave="gran16_even_odd", judge="DeepGEMM SM100",
    ),
    Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100"): _row(
        act="e2m1", act_scale_format="ue4m3", act_group=16,
        weight="e2m1", weight_scale_format="ue4m3", weight_group=(1, 16),
        mid_scale_format="ue4m3", mid_group=16, interleave="gran16_even_odd", token_scale=True,
        judge="DeepGEMM SM100",
    ),
    Recipe("nvfp4xnvfp4", "nv16_token", "trtllm_gen"): _row(
        act="e2m1", act_scale_format="ue4m3", act_group=16,
        weight="e2m1", weight_scale_format="ue4m3", weight_group=(1, 16),
        mid_scale_format="ue4m3", mid_group=16, interleave="none", token_scale=True,
        judge="trtllm-gen",
    ),
    Recipe("nvfp4xnvfp4", "nv16", "trtllm_gen"): _row(
        act="e2m1", act_scale_format="ue4m3", act_group=16,
        weight="e2m1", weight_scale_format="ue4m3", weight_group=(1, 16),
        mid_scale_format="ue4m3", mid_group=16, interleave="none", judge="trtllm-gen",
    ),
    Recipe("fp8xfp8", "block128", "deep_gemm_sm90"): _row(
        act="e4m3", act_scale_format="fp32", act_group=128, **_BLOCK_WEIGHT,
        mid_scale_format="fp32", mid_group=64, interleave="gran8", judge="DeepGEMM SM90",
    ),
    Recipe("fp8xfp8", "block128", "trtllm_gen"): _row(
        act="e4m3", act_scale_format="fp32", act_group=128, **_BLOCK_WEIGHT,
        mid_scale_format="fp32", mid_group=128, interleave="none", judge="trtllm-gen",
    ),
    Recipe("mxfp8xmxfp8", "mx32", "trtllm_gen"): _row(
        act="e4m3", act_scale_format="ue8m0", act_group=32,
        weight="e4m3", weight_scale_format="ue8m0", weight_group=(1, 32),
        mid_scale_format="ue8m0", mid_group=32, interleave="none", judge="trtllm-gen",
    ),
    Recipe("bf16xbf16", "none", "deep_gemm_sm100"): _row(
        act="bf16", act_scale_format=None, act_group=0,
        weight="bf16", weight_scale_format=None, weight_group=(1, 0),
        mid_scale_format=None, mid_group=0, interleave="gran8", judge="DeepGEMM SM100",
    ),
    Recipe("bf16xfp4", "none", "trtllm_gen"): _row(
        act="bf16", act_scale_format=None, act_group=0, **_MX_WEIGHT,
        mid_scale_format=None, mid_group=0, interleave="none", judge="trtllm-gen",
    ),
}  # fmt: skip

ALL_RECIPES: tuple[Recipe, ...] = tuple(TABLE)


def traits(recipe: Recipe) -> Traits:
    """The table's row of `recipe`; `ValueError` if it is not a legal combination."""
    row = TABLE.get(recipe)
    if row is None:
        raise ValueError(illegal_reason(recipe))
    return row


def illegal_reason(recipe: Recipe) -> str | None:
    """Why `recipe` is no row of the table, naming the offending field and what is allowed; None if it is one."""
    if recipe.mma_type not in MMA_TYPES:
        return f"mma_type={recipe.mma_type!r} is unknown; allowed: {', '.join(MMA_TYPES)}"
    rows = [row for row in TABLE if row.mma_type == recipe.mma_type]
    if recipe.act_scale not in {row.act_scale for row in rows}:
        allowed = ", ".join(dict.fromkeys(row.act_scale for row in rows))
        return f"act_scale={recipe.act_scale!r} is not legal for mma_type={recipe.mma_type!r}; allowed: {allowed}"
    if recipe not in TABLE:
        allowed = ", ".join(row.numerics for row in rows if row.act_scale == recipe.act_scale)
        return (
            f"numerics={recipe.numerics!r} is not legal for mma_type={recipe.mma_type!r} with "
            f"act_scale={recipe.act_scale!r}; allowed: {allowed}"
        )
    return None


def resolve_recipe(mma_type: str, act_scale: str | None = None, numerics: str | None = None) -> Recipe:
    """The first legal row that matches the given fields, in table order; never chosen by the GPU present.

    `numerics="deep_gemm"` stands for `deep_gemm_sm100` or `deep_gemm_sm90`, whichever the table has.
    Raises `TypeError` for what is no string and `ValueError` when nothing matches, naming the field.
    """
    for name, value in (("mma_type", mma_type), ("act_scale", act_scale), ("numerics", numerics)):
        if value is not None and not isinstance(value, str):
            allowed = "a string" if name == "mma_type" else "None or a string"
            raise TypeError(f"{name} is {value!r} ({type(value).__name__}); allowed: {allowed}")
    for row in TABLE:
        if row.mma_type != mma_type or (act_scale is not None and row.act_scale != act_scale):
            continue
        if numerics in (None, row.numerics) or (numerics == "deep_gemm" and row.numerics.startswith("deep_gemm_")):
            return row
    if act_scale is None:
        scales = [row.act_scale for row in TABLE if row.mma_type == mma_type]
        act_scale = scales[0] if scales else "none"
    raise ValueError(illegal_reason(Recipe(mma_type, act_scale, str(numerics))))
