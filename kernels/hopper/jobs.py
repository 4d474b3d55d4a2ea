"""The expert GEMMs of this tier as compile jobs: every tile of the heuristic, for every kind of activation scales."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.hopper.config import TILES, HopperTile
from megamoe.kernels.hopper.e2m1_bf16 import e2m1_bf16_down_kernel, e2m1_bf16_gate_up_kernel
from megamoe.kernels.hopper.e2m1_many import e2m1_many_gate_up_kernel
from megamoe.kernels.hopper.e4m3_few import e4m3_few_down_kernel, e4m3_few_gate_up_kernel
from megamoe.kernels.hopper.e4m3_many import e4m3_many_down_kernel, e4m3_many_gate_up_kernel
from megamoe.kernels.hopper.expert_gemm import hopper_down_kernel, hopper_gate_up_kernel
from megamoe.kernels.hopper.layouts import BF16_SWIZZLED_128, PLAIN_FP32, SWIZZLED_32, SWIZZLED_64, SWIZZLED_128
from megamoe.kernels.hopper.options import (
    bf16_constexprs,
    constexprs,
    e4m3_boxes,
    e4m3_constexprs,
    launch_options,
    wide_constexprs,
)

_H, _I = 4096, 2048  # DeepSeek-V4-Flash
_E4M3 = "fp8xfp8/block128/deep_gemm_sm90"
_BF16 = "bf16xfp4/none/trtllm_gen"
_GATE_UP = {
    "row_weight": "*fp32", "out": "*u8", "out_scale": "*fp32", "capacity": "i32",
    "clamp": "fp32", "alpha": "fp32", "beta": "fp32",
}  # fmt: skip
_TILE_LIST = {"tiles": "*i32", "tile_count": "*i32"}


def compile_jobs(arch: int) -> list[CompileJob]:
    if arch != 90:
        return []
    jobs = []
    for _, tile in TILES["e2m1"]:
        jobs += [_gate_up(tile, per_token) for per_token in (False, True)] + [_down(tile)]
    for _, tile in TILES["bf16"]:
        jobs += [_bf16_gate_up(tile), _bf16_down(tile)]
    for _, tile in TILES["e4m3"]:
        jobs += [_e4m3_gate_up(tile), _e4m3_down(tile)]
    return jobs


def _descriptor(element: str, box: list[int], layout: gl.NVMMASharedLayout) -> str:
    return f"tensordesc<{element}{box},{layout!r}>"


def _operands(tile: HopperTile) -> dict[str, str]:
    boxes = [[chunk or tile.chunks[0], 128] for chunk in tile.chunks]
    return {
        **{f"x{i}": _descriptor("fp8e4nv", box, SWIZZLED_128) for i, box in enumerate(boxes)},
        "codes": _descriptor("u8", [128, 128], SWIZZLED_128),
        "spans": _descriptor("u8", [16, 32], SWIZZLED_32),
        "scales": _descriptor("fp32", [2, tile.scale_box], PLAIN_FP32),
        **_TILE_LIST,
        "row_scale": "*fp32",
    }


_SCALES = {"fp8xfp8": "e4m3", "bf16xfp4": "bf16"}  # where the recipe's scale does not tell its kernels from others


def _job(
    kernel: str, recipe: str, tile: HopperTile, fn: object, signature: dict[str, str], consts: dict[str, object]
) -> CompileJob:
    mma_type, scale, _ = recipe.split("/")
    return CompileJob(
        name=f"hopper {kernel}/{_SCALES.get(mma_type, scale)}/{tile}",
        kernel=f"hopper_{kernel}",
        recipe=recipe,
        fn=fn,
        signature=signature,
        constexprs={"H": _H, "I": _I, **consts},
        options=dict(launch_options(tile)),
        divisible_by_16=frozenset(name for name, kind in signature.items() if kind.startswith("*")),
        contract=frozenset({"div.full", "ex2.approx", "fusion"}),
    )


def _wide_gate_up(tile: HopperTile) -> CompileJob:
    signature = {
        "x": _descriptor("fp8e4nv", [tile.chunks[0], 128], SWIZZLED_128),
        "codes": _descriptor("u8", [64, 128], SWIZZLED_128),
        "spans": _descriptor("u8", [16, 32], SWIZZLED_32),
        **_TILE_LIST, "row_scale": "*fp32", "token_scale": "*fp32", **_GATE_UP,
    }  # fmt: skip
    consts = {**wide_constexprs(tile), "ACTIVATION": "swiglu", "HAS_CLAMP": True}
    return _job("gate_up", "fp8xfp4/token/deep_gemm_sm90", tile, e2m1_many_gate_up_kernel, signature, consts)


def _gate_up(tile: HopperTile, per_token: bool) -> CompileJob:
    if per_token and tile.wide:
        return _wide_gate_up(tile)
    signature = {**_operands(tile), "token_scale": "*fp32", **_GATE_UP}
    consts = {**constexprs(tile), "PER_TOKEN": per_token, "ACTIVATION": "swiglu", "HAS_CLAMP": True}
    recipe = f"fp8xfp4/{'token' if per_token else 'block128'}/deep_gemm_sm90"
    return _job("gate_up", recipe, tile, hopper_gate_up_kernel, signature, consts)


def _down(tile: HopperTile) -> CompileJob:
    signature = {**_operands(tile), "row_slots": "*i32", "out": "*i32"}
    return _job("down", "fp8xfp4/block128/deep_gemm_sm90", tile, hopper_down_kernel, signature, dict(constexprs(tile)))


def _bf16_operands(tile: HopperTile) -> dict[str, str]:
    return {
        "x": _descriptor("bf16", [tile.chunks[0], 64], BF16_SWIZZLED_128),
        "codes": _descriptor("u8", [64 if tile.wide else 128, 128], SWIZZLED_128),
        "spans": _descriptor("u8", [16, 32], SWIZZLED_32),
        **_TILE_LIST,
        "row_scale": "*fp32",
    }


def _bf16_gate_up(tile: HopperTile) -> CompileJob:
    signature = {**_bf16_operands(tile), "out": "*i32", "clamp": "fp32", "alpha": "fp32", "beta": "fp32"}
    consts = {**bf16_constexprs(tile), "ACTIVATION": "swiglu", "HAS_CLAMP": True}
    return _job("gate_up", _BF16, tile, e2m1_bf16_gate_up_kernel, signature, consts)


def _bf16_down(tile: HopperTile) -> CompileJob:
    signature = {**_bf16_operands(tile), "row_slots": "*i32", "out": "*i32"}
    return _job("down", _BF16, tile, e2m1_bf16_down_kernel, signature, dict(bf16_constexprs(tile)))


def _e4m3_operands(tile: HopperTile, groups: int) -> dict[str, str]:
    x, w, scales = e4m3_boxes(tile, groups)
    layout = SWIZZLED_128 if x[1] == 128 else SWIZZLED_64
    return {
        "x": _descriptor("fp8e4nv", x, layout),
        "w": _descriptor("fp8e4nv", w, layout),
        "scales": _descriptor("fp32", scales, PLAIN_FP32),
        **_TILE_LIST,
        "weight_scale": "*fp32",
    }


def _e4m3_gate_up(tile: HopperTile) -> CompileJob:
    kernel = e4m3_few_gate_up_kernel if tile.swapped else e4m3_many_gate_up_kernel
    signature = {**_e4m3_operands(tile, 1), **_GATE_UP}
    consts = {**e4m3_constexprs(tile), "ACTIVATION": "swiglu", "HAS_CLAMP": True}
    return _job("gate_up", _E4M3, tile, kernel, signature, consts)


def _e4m3_down(tile: HopperTile) -> CompileJob:
    kernel = e4m3_few_down_kernel if tile.swapped else e4m3_many_down_kernel
    signature = {**_e4m3_operands(tile, 2), "row_slots": "*i32", "out": "*bf16"}
    return _job("down", _E4M3, tile, kernel, signature, dict(e4m3_constexprs(tile)))
