"""Checks of upstream's arguments under upstream's names; nothing here reads a tensor's contents."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from megamoe.backends.base import UnsupportedError
from megamoe.validation import Layout, check_tensor

SM100_KINDS = ("fp8xfp4", "mxf4xmxf4", "nvfp4xnvfp4", "bf16xbf16")

_REPLACED = {
    "DG_USE_FP4_ACTS": "pass mma_type='mxf4xmxf4' or 'nvfp4xnvfp4' to the buffer and to transform_weights_for_mega_moe",
    "DG_USE_MXF4_KIND": "pass mma_type='mxf4xmxf4' to the buffer and to transform_weights_for_mega_moe",
    "DG_USE_FP8_COMBINE": "the combine sums BF16 rows; unset it",
}


class Group(Protocol):
    """What is asked of a process group."""

    def size(self) -> int: ...


def check_environment() -> None:
    """Raise `RuntimeError` for a variable that would change upstream's numbers and does not change ours."""
    for name, instead in _REPLACED.items():
        value = os.environ.get(name, "0")
        if value.strip() not in ("", "0"):
            raise RuntimeError(f"{name}={value} is not served; allowed: unset or 0; {instead}")


def check_group(group: Group | None) -> None:
    """None, or one rank. `UnsupportedError` for more."""
    if group is None:
        return
    ranks = group.size()
    if ranks != 1:
        raise UnsupportedError(
            f"group has {ranks} ranks; expert parallelism is not built yet; allowed: None or a group of one rank"
        )


def on_device(
    name: str,
    value: object,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    axes: str,
    *,
    shape: tuple[int, ...] | None = None,
    rank: int | None = None,
    layout: Layout = "contiguous",
    owner: str = "the buffer",
) -> torch.Tensor:
    """`check_tensor` for tensors that belong to `owner`, which is on `device`."""
    tensor = check_tensor(name, value, dtypes=dtypes, shape=shape, rank=rank, axes=axes, layout=layout)
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; allowed: {device}, where {owner} is")
    return tensor


def pair(name: str, value: object) -> tuple[torch.Tensor, torch.Tensor]:
    """A (weight, scale) tuple or list of two."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} is {_shown(value)}; expected a (weight, scale) pair")
    return value[0], value[1]


def _shown(value: object) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{size}"
