"""Which backend a layer runs on: the call's argument, else the program's default, else the environment's, else triton.

    moe_backend="…" of the call  >  megamoe.set_default_backend("…")  >  MEGAMOE_BACKEND=…  >  "triton"

A default decides where a layer runs, never its numbers, and never gives way: one that cannot run a layer is refused as
the argument would be. Each choice is logged once, with its reason, to the logger "megamoe" at level INFO.
"""

from __future__ import annotations

import logging
import os
from threading import Lock

from megamoe.backends import AUTO, AUTO_ORDER, NAMES, select, unsupported_reason
from megamoe.backends.base import Backend, LayerRequest, UnsupportedError
from megamoe.validation import check_choice

ENVIRONMENT_VARIABLE = "MEGAMOE_BACKEND"
BUILT_IN = "triton"
ALLOWED = (*NAMES, AUTO)

_ARGUMENT = "the argument moe_backend"
_logger = logging.getLogger("megamoe")
_lock = Lock()
_logged: set[str] = set()
_default: str | None = None


def set_default_backend(name: str | None) -> None:
    """The backend of every layer made from now on without `moe_backend`; None: the environment's or triton again.

    name: what `moe_backend` takes. Holds for the process; layers that exist keep theirs. Raises `ValueError` for
    another name.
    """
    global _default
    if name is not None:
        check_choice("name", name, ALLOWED)
    _default = name


def requested_backend(argument: str | None = None) -> tuple[str, str]:
    """The name that is asked for, and by what. The variable is read at every call; empty, it asks for nothing.

    Raises `ValueError` naming `moe_backend` or the variable when it holds another name.
    """
    if argument is not None:
        check_choice("moe_backend", argument, ALLOWED)
        return argument, _ARGUMENT
    if _default is not None:
        return _default, "megamoe.set_default_backend"
    named = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if named:
        check_choice(ENVIRONMENT_VARIABLE, named, ALLOWED)
        return named, f"{ENVIRONMENT_VARIABLE}={named}"
    return BUILT_IN, "the built-in default"


def choose(argument: str | None, request: LayerRequest) -> Backend:
    """The backend that runs `request`. Raises as `requested_backend`, and `UnsupportedError` with the reason when what
    is asked for cannot run it."""
    name, source = requested_backend(argument)
    try:
        backend = select(name, request)
    except UnsupportedError as error:
        if source == _ARGUMENT:
            raise
        raise UnsupportedError(f"{error} (asked for by {source})") from None
    _log_once(f"backend {backend.name}: {_why(name, backend.name, source, request)}")
    return backend


def _why(name: str, chosen: str, source: str, request: LayerRequest) -> str:
    if name != AUTO:
        return source
    declined = AUTO_ORDER[: AUTO_ORDER.index(chosen)]
    reasons = [f"{candidate} cannot run: {unsupported_reason(candidate, request)}" for candidate in declined]
    return "; ".join([f"{AUTO!r} from {source}", *reasons])


def _log_once(message: str) -> None:
    with _lock:
        if message in _logged:
            return
        _logged.add(message)
    _logger.info(message)
