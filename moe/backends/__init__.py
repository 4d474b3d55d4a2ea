"""The backend registry: names, what each can run here, and the choice made by `auto`.

A backend is a module with a `BACKEND`; it is imported when it is first asked.
"""

from __future__ import annotations

from importlib import import_module

from megamoe.backends.base import Backend, LayerRequest, UnsupportedError

_MODULES = {
    "triton": "megamoe.backends.triton",
    "reference": "megamoe.backends.reference",
    "deep_gemm": "megamoe.backends.deep_gemm",
    "flashinfer_trtllm": "megamoe.backends.flashinfer_trtllm",
}
NAMES = tuple(_MODULES)
AUTO = "auto"
# Never chosen by speed or numerics: all backends follow the recipe, so the first that can run is the one.
AUTO_ORDER = ("triton", "reference")


def unsupported_reason(name: str, request: LayerRequest) -> str | None:
    """Why the backend `name`, one of `NAMES`, cannot run `request` on this machine, or None."""
    return _backend(name).unsupported_reason(request)


def select(name: str, request: LayerRequest) -> Backend:
    """The backend called `name`, or for `auto` the first of `AUTO_ORDER` that can run `request`.

    Raises `ValueError` for an unknown name and `UnsupportedError` with every reason when none can.
    """
    if not isinstance(name, str) or name not in (*NAMES, AUTO):
        raise ValueError(f"moe_backend is {name!r}; allowed: {', '.join(map(repr, (*NAMES, AUTO)))}")
    reasons = []
    for candidate in AUTO_ORDER if name == AUTO else (name,):
        reason = unsupported_reason(candidate, request)
        if reason is None:
            return _backend(candidate)
        reasons.append(f"moe_backend={candidate!r}: {reason}")
    raise UnsupportedError("; ".join(reasons))


def _backend(name: str) -> Backend:
    return import_module(_MODULES[name]).BACKEND
