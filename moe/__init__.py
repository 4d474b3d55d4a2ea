"""megamoe: Mixture-of-Experts layers in FP8, MXFP4 and NVFP4, as Triton kernels.

Importing this package loads neither torch nor triton nor a kernel; each public name loads what it needs when
it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megamoe.api import MegaMoE, mega_moe, prepare_weights
    from megamoe.backend_choice import set_default_backend
    from megamoe.backends.base import UnsupportedError
    from megamoe.quantize import quantize_fp8_block128, quantize_mxfp4, quantize_mxfp8, quantize_nvfp4
    from megamoe.recipe import Recipe, resolve_recipe
    from megamoe.weights import MoEWeights

__version__ = "0.1.0"

__all__ = [
    "MegaMoE",
    "MoEWeights",
    "Recipe",
    "UnsupportedError",
    "mega_moe",
    "prepare_weights",
    "quantize_fp8_block128",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "resolve_recipe",
    "set_default_backend",
]

_HOME = {
    "MegaMoE": "megamoe.api",
    "MoEWeights": "megamoe.weights",
    "Recipe": "megamoe.recipe",
    "UnsupportedError": "megamoe.backends.base",
    "mega_moe": "megamoe.api",
    "prepare_weights": "megamoe.api",
    "quantize_fp8_block128": "megamoe.quantize",
    "quantize_mxfp4": "megamoe.quantize",
    "quantize_mxfp8": "megamoe.quantize",
    "quantize_nvfp4": "megamoe.quantize",
    "resolve_recipe": "megamoe.recipe",
    "set_default_backend": "megamoe.backend_choice",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562) and keep it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
