"""What a result file says about where it was measured."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch

import megamoe
from megamoe.bench.records import SCHEMA
from megamoe.bench.roofline import Roofline
from megamoe.cli.device import describe

_PEERS = ("sgl-deep-gemm", "humming-kernels", "tokenspeed-triton-kernels", "flashinfer-python")

METHOD = (
    "Random weights and inputs. A row's time is the median (and 20th, 80th percentile) of CUDA-graph replays; the "
    "graph holds one call per input set, each set with its own tokens and routing, at least 1 GiB of touched weights "
    "between two uses of a set. All rows of a point (model, tokens, shared experts, routing) are timed in turn, in "
    "several rounds of equal windows. layer: from BF16 tokens to y with the routing plan given; layer_with_plan: with "
    "it. Launches are counted by the profiler. Roofline: sustained rates measured at the start of the run; a row's "
    "share is the larger of bytes/read rate and FLOPs/matrix rate over its time, bytes and FLOPs being counted for "
    "touched experts and useful rows only."
)


def describe_run(device: torch.device, roofline: Roofline | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """The `meta` of a result file."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": describe(device),
        "driver": _driver() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "megamoe": megamoe.__version__,
        "versions": _versions("torch", "triton", *_PEERS),
        "method": METHOD if device.type == "cuda" else "CPU: one call after another by the clock.",
        "roofline": None if roofline is None else asdict(roofline),
        "arguments": arguments,
        "skipped": [],
    }


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
