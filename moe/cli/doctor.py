"""`megamoe doctor`: what this machine is, and what can run on it or why not."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata

import click
import torch
from rich.console import Console
from rich.table import Table

import megamoe
from megamoe.cli.console import open_console
from megamoe.cli.device import describe, open_device
from megamoe.oracle import interpreter
from megamoe.recipe import ALL_RECIPES
from megamoe.spec import LayerSpec

_PACKAGES = ("torch", "triton", "numpy", "ml_dtypes")


@click.command()
def doctor() -> None:
    """Print device, driver and versions, and for every backend and oracle if it can run here or why not."""
    console = open_console()
    device, interpreter_reason = open_device()
    _print(console, "machine", _machine(device, interpreter_reason))
    _print(console, "backends", _backends(device, interpreter_reason))
    _print(console, "oracles", _oracles(device, interpreter_reason))


def _print(console: Console, title: str, rows: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)


def _machine(device: torch.device, interpreter_reason: str | None) -> dict[str, str]:
    rows = {"device": describe(device), "driver": driver_version(), "python": platform.python_version()}
    rows["megamoe"] = megamoe.__version__
    for package in _PACKAGES:
        try:
            rows[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            rows[package] = "not installed"
    return rows


def driver_version() -> str:
    """The NVIDIA driver's version, or that there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "no NVIDIA driver found"
    return found[0] if found else "no NVIDIA driver found"


def _backends(device: torch.device, interpreter_reason: str | None) -> dict[str, str]:
    """Every backend, asked for a small layer of each served recipe."""
    # They load triton, which `open_device` must do first.
    from megamoe.backends import AUTO, NAMES, select, unsupported_reason
    from megamoe.backends.base import LayerRequest, UnsupportedError

    specs = [LayerSpec(recipe, 512, 512, num_experts=8, top_k=2) for recipe in ALL_RECIPES]
    requests = {spec.recipe: LayerRequest(spec, device, 16) for spec in specs}
    rows = {}
    for name in NAMES:
        reasons = {recipe: unsupported_reason(name, request) for recipe, request in requests.items()}
        served = ", ".join(str(recipe) for recipe, reason in reasons.items() if reason is None)
        if not any(reasons.values()):
            served = f"every recipe, {len(reasons)} of them"
        declined = dict.fromkeys(reason for reason in reasons.values() if reason is not None)
        rows[name] = "\n".join([f"yes: {served}"] * bool(served) + [f"no: {reason}" for reason in declined])
        if name == "triton" and interpreter_reason is not None:
            rows[name] += f"\n{interpreter_reason}"
    try:
        rows[AUTO] = f"chooses {select(AUTO, requests[ALL_RECIPES[0]]).name}"
    except UnsupportedError as error:
        rows[AUTO] = f"no: {error}"
    return rows


def _oracles(device: torch.device, interpreter_reason: str | None) -> dict[str, str]:
    from megamoe.oracle import suites  # it loads triton, which `open_device` must do first

    if device.type == "cuda":
        patch = "not used: the kernels run on the GPU"
    else:
        patch = "yes, installed" if interpreter.is_active() else f"no: {interpreter_reason}"
    judges = {judge: "yes" if reason is None else f"no: {reason}" for judge, reason in suites.reasons().items()}
    return {"reference": "yes", "interpreter patch": patch, **judges}
