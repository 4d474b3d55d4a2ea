"""Every call that SGLang makes into `deep_gemm`, bound to our signatures and noted."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch

NAMES = (
    "fp8_fp4_mega_moe",
    "fp8_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "mega_moe_pre_dispatch",
    "mega_moe_pre_dispatch_sm90",
    "set_num_sms",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
)


class Call(NamedTuple):
    """A call's function, its positional arguments' count and its arguments by parameter."""

    name: str
    positional: int
    arguments: dict[str, str]


def record(module: Any) -> list[Call]:
    """Wrap `NAMES` of `module`; the list grows with every call. An argument that does not bind raises `TypeError`."""
    calls: list[Call] = []
    for name in NAMES:
        setattr(module, name, _recorded(name, getattr(module, name), calls))
    return calls


def _recorded(name: str, function: Any, calls: list[Call]) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        calls.append(Call(name, len(args), {key: _shown(value) for key, value in bound.arguments.items()}))
        return function(*args, **kwargs)

    return recorded


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
