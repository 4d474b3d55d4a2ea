"""What profilers see: NVTX ranges per stage, and name, FLOPs and bytes of each kernel launch.

`stage("gate_up")` is a range around a launch, on only under `MEGAMOE_PROFILE=1`, since it costs host time. The `*_work`
functions are Triton's `launch_metadata`: called by Triton when a profiler that asks for it (Proton) is on, and never
otherwise. They count every slot as valid and never wait for the GPU, so experts are counted as if each slot chose
another one until all are touched: an upper bound for few tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_BYTES = {"e4m3": 1.0, "e2m1": 0.5, "bf16": 2.0}
_SCALE_BYTES = {"ue8m0": 1.0, "ue4m3": 1.0, "fp32": 4.0, None: 0.0}
_BLOCK = 128  # rows and columns under one fp32 weight scale
_NOTHING: AbstractContextManager[Any] = nullcontext()


def enabled() -> bool:
    return os.environ.get("MEGAMOE_PROFILE") == "1" and torch.cuda.is_available()


def stage(name: str) -> AbstractContextManager[Any]:
    """An NVTX range `megamoe.<name>`; nothing when profiling is off."""
    return torch.cuda.nvtx.range(f"megamoe.{name}") if enabled() else _NOTHING


def gate_up_work(grid: object, kernel: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """`launch_metadata` of `gate_up_kernel`."""
    return _gemm_work(kernel, args, rows=2 * args["I"], columns=args["H"], shared_rows=2 * args["SHARED_I"],
                      shared_columns=args["H"], reads=args["num_tokens"] * args["H"],
                      writes=args["num_tokens"] * (args["TOP_K"] * args["I"] + args["SHARED_I"]))  # fmt: skip


def down_work(grid: object, kernel: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """`launch_metadata` of `down_kernel`."""
    slots = args["TOP_K"] + (args["SHARED_I"] > 0)
    return _gemm_work(kernel, args, rows=args["H"], columns=args["I"], shared_rows=args["H"],
                      shared_columns=args["SHARED_I"],
                      reads=args["num_tokens"] * (args["TOP_K"] * args["I"] + args["SHARED_I"]),
                      writes_bf16=args["num_tokens"] * slots * args["H"])  # fmt: skip


def combine_work(grid: object, kernel: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """`launch_metadata` of `combine_kernel`."""
    rows = args["num_tokens"] * (args["TOP_K"] + bool(args["SHARED"]))
    num_bytes = 2 * args["H"] * (rows + args["num_tokens"]) + 8 * args["num_tokens"] * args["TOP_K"]
    return {"name": f"{kernel.name} [T={args['num_tokens']}]", "bytes": num_bytes}


def pre_dispatch_work(grid: object, kernel: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """`launch_metadata` of `pre_dispatch_kernel`: BF16 tokens read, quantized rows written, routing copied."""
    written = {"bf16": 2.0, "mxfp4": 0.5, "nvfp4": 0.5, "nvfp4_gsf": 0.5}.get(args["KIND"], 1.0)
    entries = args["num_rows"] * args["TOP_K"]
    num_bytes = args["num_tokens"] * args["H"] * (2 + written) + 20 * entries
    return {"name": f"{kernel.name} [T={args['num_tokens']} {args['KIND']}]", "bytes": num_bytes}


def routing_work(grid: object, kernel: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """`launch_metadata` of `build_plan_kernel`: ids read once, slots and tiles written."""
    num_bytes = 12 * args["num_slots"] + 16 * args["num_tiles"]
    return {"name": f"{kernel.name} [slots={args['num_slots']} E={args['num_experts']}]", "bytes": num_bytes}


def _gemm_work(
    kernel: Any, args: Mapping[str, Any], *, rows: int, columns: int, shared_rows: int, shared_columns: int,
    reads: int, writes: int = 0, writes_bf16: int = 0,
) -> dict[str, Any]:  # fmt: skip
    tokens, slots = args["num_tokens"], args["num_tokens"] * args["TOP_K"]
    act, weight = args["A_FORMAT"], args["B_FORMAT"]
    flops = 2 * (slots * rows * columns + tokens * shared_rows * shared_columns)
    matrix = _matrix_bytes(rows, columns, weight, args["B_SCALE"], args["B_GROUP"])
    num_bytes = min(args["num_experts"], slots) * matrix
    if shared_rows * shared_columns:
        num_bytes += _matrix_bytes(
            shared_rows, shared_columns, args["SHARED_FORMAT"], args["SHARED_SCALE"], args["B_GROUP"]
        )
    num_bytes += (reads + writes) * _BYTES[act] + 2 * writes_bf16
    width = 16 if "bf16" in (act, weight) else 8
    return {"name": f"{kernel.name} [T={tokens} {act}×{weight}]", f"flops{width}": flops, "bytes": num_bytes}


def _matrix_bytes(rows: int, columns: int, element: str, scale: str | None, group: int) -> float:
    scaled = _BLOCK * _BLOCK if scale == "fp32" else group
    return rows * columns * (_BYTES[element] + (_SCALE_BYTES[scale] / scaled if scale else 0.0))
