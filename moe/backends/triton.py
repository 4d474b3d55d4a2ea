"""The Triton kernels: on GPUs of compute capability 9.x, 10.x and 12.x, and in Triton's CPU interpreter."""

from __future__ import annotations

import os

import torch

from megamoe.backends.base import LayerRequest, layer_unsupported_reason
from megamoe.kernels.config import INTERPRETER, choose_config, illegal_reason
from megamoe.oracle import interpreter

CAPABILITIES = (9, 10, 12)


def device_unsupported_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on tensors of `device` in this process, or None."""
    if interpreter.is_active():
        return None
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 without megamoe.oracle.interpreter.install(): the interpreter would misround"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major not in CAPABILITIES:
            served = ", ".join(f"{m}.x" for m in CAPABILITIES)
            return f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; served: {served}"
        return None
    if device.type == "cpu":
        return (
            "CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before triton is first imported, then "
            "call megamoe.oracle.interpreter.install()"
        )
    return f"device type {device.type!r}; served: cuda, and cpu in Triton's interpreter"


def architecture(device: torch.device) -> int:
    """The `arch` of `megamoe.kernels.config` for a device the kernels can run on: 90, 100, 120 or `INTERPRETER`."""
    return INTERPRETER if interpreter.is_active() else 10 * torch.cuda.get_device_capability(device)[0]
