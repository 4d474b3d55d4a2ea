"""The expert GEMMs of this tier as compile jobs: every tile of the heuristic, for both kinds of activation scales."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.hopper.config import TILES, HopperTile
from megamoe.kernels.hopper.expert_gemm import hopper_down_kernel, hopper_gate_up_kernel
from megamoe.kernels.hopper.layouts import PLAIN_FP32, SWIZZLED_32, SWIZZLED_128
from megamoe.kernels.hopper.options import constexprs, launch_options

_H, _I = 4096, 2048  # DeepSeek-V4-Flash


def compile_jobs(arch: int) -> list[CompileJob]:
    if arch != 90:
        return []
    jobs = []
    for _, tile in TILES:
        jobs += [_gate_up(tile, per_token) for per_token in (False, True)] + [_down(tile)]
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
        "tiles": "*i32",
        "tile_count": "*i32",
        "row_scale": "*fp32",
    }


def _job(kernel: str, recipe: str, tile: HopperTile, fn: object, more: dict[str, str], consts: dict) -> CompileJob:
    signature = {**_operands(tile), **more}
    chunks = "+".join(str(chunk) for chunk in tile.chunks if chunk)
    return CompileJob(
        name=f"hopper {kernel}/{recipe}/{chunks}x{tile.stages}",
        kernel=f"hopper_{kernel}",
        recipe=f"fp8xfp4/{recipe}/deep_gemm_sm90",
        fn=fn,
        signature=signature,
        constexprs={"H": _H, "I": _I, **constexprs(tile), **consts},
        options=launch_options(tile),
        divisible_by_16=frozenset(name for name, kind in signature.items() if kind.startswith("*")),
        contract=frozenset({"div.full", "ex2.approx", "fusion"}),
    )


def _gate_up(tile: HopperTile, per_token: bool) -> CompileJob:
    more = {
        "token_scale": "*fp32", "row_weight": "*fp32", "out": "*u8", "out_scale": "*fp32", "capacity": "i32",
        "clamp": "fp32", "alpha": "fp32", "beta": "fp32",
    }  # fmt: skip
    consts = {"PER_TOKEN": per_token, "ACTIVATION": "swiglu", "HAS_CLAMP": True}
    return _job("gate_up", "token" if per_token else "block128", tile, hopper_gate_up_kernel, more, consts)


def _down(tile: HopperTile) -> CompileJob:
    more = {"row_slots": "*i32", "out": "*i32"}
    return _job("down", "block128", tile, hopper_down_kernel, more, {})
