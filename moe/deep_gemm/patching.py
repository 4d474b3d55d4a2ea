"""Our functions inside a `deep_gemm` that is installed, or this package in its place where none is."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from megamoe.backends.base import UnsupportedError
from megamoe.deep_gemm.scale_layout import serves

VERSION = "0.1.7"
_PACKAGE = "megamoe.deep_gemm"
_SUBMODULES = ("testing", "utils", "utils.layout", "utils.math")

PATCHED_NAMES = (
    "SM90SymmBuffer",
    "SymmBuffer",
    "bf16_mega_moe",
    "fp8_fp4_mega_moe",
    "fp8_mega_moe",
    "get_block_m_for_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "mega_moe_pre_dispatch",
    "mega_moe_pre_dispatch_sm90",
    "nvfp4_mega_moe",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
)
"""What `patch` replaces: MegaMoE's names. The SM budget stays upstream's, whose GEMMs obey it."""

_originals: list[tuple[ModuleType, str, Any]] = []
"""What `patch` replaced, in that order; a module that was loaded again is there twice."""


def version_unsupported_reason(module: ModuleType) -> str | None:
    """Why `module` is not the `deep_gemm` whose contract this package follows, or None."""
    version = getattr(module, "__version__", None)
    if version == VERSION:
        return None
    return f"deep_gemm {version or 'of unknown version'} is installed; allowed: {VERSION}, whose contract this is"


def replacement(name: str, original: Any) -> Any:
    """Ours of `PATCHED_NAMES`; scales of other groups than 32 columns stay the business of `original`."""
    ours = getattr(sys.modules[_PACKAGE], name)
    if name == "transform_sf_into_required_layout" and callable(original):
        return _mx_scales_or(original, ours)
    return ours


def patch(module: ModuleType | None = None, names: Sequence[str] | None = None) -> None:
    """Put our functions and classes into an installed `deep_gemm` (None: import it), its `mega` included.

    `names`: some of `PATCHED_NAMES`; None: all. Its GEMMs and attention kernels are left alone. Code that took a name
    with `from deep_gemm import …` before keeps upstream's. A second call changes nothing, unless the module was loaded
    again. Raises `UnsupportedError` for another version than 0.1.7, `ImportError` where none is installed (`stand_in`
    is for that), `ValueError` for unknown names.
    """
    unknown = sorted(set(names or ()) - set(PATCHED_NAMES))
    if unknown:
        raise ValueError(f"names has {unknown[0]!r}; allowed: {', '.join(PATCHED_NAMES)}")
    target = _installed() if module is None else module
    if target is sys.modules[_PACKAGE]:
        return
    reason = version_unsupported_reason(target)
    if reason is not None:
        raise UnsupportedError(reason)
    for name in PATCHED_NAMES if names is None else names:
        for home in (target, getattr(target, "mega", None)):
            if isinstance(home, ModuleType) and hasattr(home, name) and not _has_ours(home, name):
                original = getattr(home, name)
                _originals.append((home, name, original))
                setattr(home, name, replacement(name, original))


def unpatch() -> None:
    """Undo `patch`; what was loaded again since then is upstream's already and stays."""
    for home, name, original in reversed(_originals):
        if _has_ours(home, name):
            setattr(home, name, original)
    _originals.clear()


def _has_ours(home: ModuleType, name: str) -> bool:
    """Whether `home` has what `replacement` returned, bare or wrapped."""
    ours, found = getattr(sys.modules[_PACKAGE], name), getattr(home, name, None)
    return found is ours or getattr(found, "__wrapped__", None) is ours


def stand_in() -> bool:
    """Make `import deep_gemm` find this package where no `deep_gemm` is installed; whether it does now.

    It has MegaMoE alone: whoever calls this keeps its process from using DeepGEMM's other kernels.
    """
    ours = sys.modules[_PACKAGE]
    present = sys.modules.get("deep_gemm")
    if present is ours:
        return True
    if present is not None or importlib.util.find_spec("deep_gemm") is not None:
        return False
    sys.modules["deep_gemm"] = ours
    for name in _SUBMODULES:
        sys.modules[f"deep_gemm.{name}"] = importlib.import_module(f"{_PACKAGE}.{name}")
    return True


def _installed() -> ModuleType:
    try:
        return importlib.import_module("deep_gemm")
    except ModuleNotFoundError as error:
        if error.name != "deep_gemm":  # one that is installed, but lacks something
            raise
        raise ImportError(
            "patch() found no deep_gemm to patch: none is installed. megamoe.deep_gemm.stand_in() makes "
            "`import deep_gemm` find this package instead, which has MegaMoE alone",
            name="deep_gemm",
        ) from None


def _mx_scales_or(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ours)
    def transform_sf_into_required_layout(
        sf: Any,
        mn: int,
        k: int,
        recipe: Any,
        num_groups: Any = None,
        is_sfa: Any = None,
        disable_ue8m0_cast: Any = False,
    ) -> Any:
        chosen = ours if serves(recipe) and not disable_ue8m0_cast else original
        return chosen(sf, mn, k, recipe, num_groups, is_sfa, disable_ue8m0_cast)

    return transform_sf_into_required_layout
