"""Buffer views, ours against upstream's: equal in shape, stride and dtype where callers touch them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megamoe.kernels.layouts.buffers import BufferLayout, slice_buffer

OURS_TO_SIZE = ("l1_", "l2_")
"""Prefixes of the views that only kernels touch: their dtype and width are upstream's, their row count is ours."""


class View(NamedTuple):
    """One of upstream's views."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The view that `tensor` is."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def view_differences(layout: BufferLayout, theirs: Sequence[View]) -> list[str]:
    """One line per view of `layout` that differs from upstream's in its place; E4M3 typed int8 is no difference."""
    ours = slice_buffer(layout, torch.empty(layout.nbytes, dtype=torch.int8))
    found = []
    for (name, tensor), other in zip(ours.items(), theirs, strict=True):
        view = View.of(tensor)
        same = (_untyped(view.dtype), view.shape[1:]) == (_untyped(other.dtype), other.shape[1:])
        if not name.startswith(OURS_TO_SIZE):
            same = same and view.shape == other.shape and (not tensor.numel() or view.stride == other.stride)
        if not same:
            found.append(f"{name}: {view}, upstream's {other}")
    return found


def _untyped(dtype: torch.dtype) -> torch.dtype:
    return torch.int8 if dtype == torch.float8_e4m3fn else dtype
