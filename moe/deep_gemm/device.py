"""Which machine buffers are made for, and the SM budget that callers set around a call."""

from __future__ import annotations

import sys

import torch

from megamoe.validation import check_count

_SMS_WITHOUT_GPU = 132
_budget: int | None = None


def capability_major() -> int:
    """Major compute capability: `_pretend_sm`'s, the current GPU's, or 10 without a GPU."""
    pretended = sys.modules["megamoe.deep_gemm"].__dict__["_pretend_sm"]
    if pretended is not None:
        return int(pretended) // 10
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 10


def buffer_device() -> torch.device:
    """The current GPU, or the CPU where there is none: upstream's signatures have no device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def get_num_sms() -> int:
    """SMs that callers leave to a launch: what `set_num_sms` set last, else all of the current GPU's (132 without one).

    The state is this module's own. The kernels of this path are not persistent, wait for nothing and share the GPU with
    whatever else runs, so that no launch has to be kept small; buffers do not depend on it either.
    """
    return _physical_sms() if _budget is None else _budget


def set_num_sms(num_sms: int) -> None:
    """Set what `get_num_sms` returns: 1 … the GPU's SMs. `TypeError`/`ValueError` for anything else."""
    global _budget
    _budget = check_count("num_sms", num_sms, 1, _physical_sms())


def _physical_sms() -> int:
    if not torch.cuda.is_available():
        return _SMS_WITHOUT_GPU
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
