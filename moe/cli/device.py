"""Where a command runs: the GPU when there is one, Triton's patched interpreter when there is none."""

from __future__ import annotations

import os

import torch


def open_device() -> tuple[torch.device, str | None]:
    """The device, and why Triton cannot run on it after all (None: it can).

    Without a GPU this sets TRITON_INTERPRET, so it must come before anything imports triton.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), None
    os.environ["TRITON_INTERPRET"] = "1"
    from megamoe.oracle import interpreter

    try:
        interpreter.install()
    except (RuntimeError, ImportError) as error:
        return torch.device("cpu"), str(error)
    return torch.device("cpu"), None


def describe(device: torch.device) -> str:
    """One line for a headline."""
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads, Triton's interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
