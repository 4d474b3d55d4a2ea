"""Upstream's own Python, imported from the files of 0.1.7 on any machine: weight transforms and host quantizers.

Its modules import the compiled `_C` of their package. They get a package of another name, so that an installed
`deep_gemm` is left alone, and a `_C` of the one function that the transforms call.
"""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple, Optional

import torch

from megamoe.oracle.deep_gemm.upstream import Upstream, locate
from megamoe.oracle.definitions import execute_definitions
from megamoe.oracle.downloads import OracleUnavailable

_PACKAGE = "_megamoe_upstream_deep_gemm"
_MODULES = ("mega", "utils.math", "utils.layout")
_SM90_NAMES = ("_from_dlpack_if_needed", "SM90SymmBuffer", "transform_weights_for_mega_moe_sm90")


class PythonHelpers(NamedTuple):
    """`mega`, `math` and `layout` are the modules; `sm90` has the SM90 functions of the package's `__init__`."""

    mega: Any
    math: Any
    layout: Any
    sm90: Any


def load(*, download: bool = False) -> PythonHelpers:
    """Import once per process. Raises `OracleUnavailable`."""
    return _load(locate(download=download))


@lru_cache(maxsize=1)
def _load(upstream: Upstream) -> PythonHelpers:
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(upstream.root)]
    extension = ModuleType(f"{_PACKAGE}._C")
    extension.get_tma_aligned_size = _tma_aligned_size  # type: ignore[attr-defined]
    package._C = extension  # type: ignore[attr-defined]
    sys.modules[_PACKAGE] = package
    sys.modules[extension.__name__] = extension
    try:
        mega, math, layout = (importlib.import_module(f"{_PACKAGE}.{name}") for name in _MODULES)
    except Exception as error:
        raise OracleUnavailable(f"{upstream.root} does not import: {type(error).__name__}: {error}") from error
    # The rest of `__init__.py` loads the compiled module.
    namespace = dict(torch=torch, _C=extension, Optional=Optional, Tuple=tuple)
    sm90 = execute_definitions(upstream.root / "__init__.py", _SM90_NAMES, namespace)
    return PythonHelpers(mega, math, layout, sm90)


def _tma_aligned_size(rows: int, itemsize: int) -> int:
    """Rows of a column that starts at 16-byte units."""
    unit = 16 // itemsize
    return -(-rows // unit) * unit
