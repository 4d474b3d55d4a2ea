"""Makes Triton 3.9's CPU interpreter compute what the GPU computes, so that it can judge bytes.

As shipped, the interpreter truncates fp32 → BF16 (the GPU rounds to nearest even), rounds fp32 → FP8 half up,
overflows FP8 into other values' codes, decodes the NaN of E4M3 as ±480, sends BF16 operands of
`tl.dot_scaled` through FP16, reads UE4M3 scales as UE8M0, and multiplies the raw bits of BF16 operands of
`tl.dot`. `install` replaces the private functions behind these:

===============================  =============================================================================
`_convert_float`                 between fp32, BF16, FP16, E4M3 and E5M2: round to nearest even like
                                 `cvt.rn(.satfinite)`; FP8 saturates to finite, NaN becomes the canonical NaN
`_dot_scaled_scale_to_f32`       UE4M3 scales (operands of type `tl.float8e4nv`) are decoded as E4M3
`_mxfp_value_handle_to_float32`  operands of `tl.dot_scaled` are decoded straight to fp32
`InterpreterBuilder.create_dot`  BF16 operands of `tl.dot` are widened to fp32 first
`_patch_lang`                    not again within a launch: stock repeats it at every call of a device function,
                                 which takes a fifth of a kernel's time
===============================  =============================================================================

Products of these formats are exact in fp32; sums are fp32 in NumPy's order. Still wrong, and silently so:
elementwise arithmetic and comparisons *on* BF16 values, and int → BF16 (kernels widen to fp32 first); maxima over
signalling NaN, which a GPU ignores and NumPy does not.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import torch

from megamoe import formats

_E5M2_MAX = 57344.0

# Keyed by the name of a Triton dtype: importing this module must not import triton.
_TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}

# The private functions that are replaced, with the parameters that this file was written against.
_PATCHED = {
    "_convert_float": ("input", "input_dtype", "output_dtype", "rounding_mode"),
    "_dot_scaled_scale_to_f32": ("scale_handle", "compute_type"),
    "_mxfp_value_handle_to_float32": ("value_handle",),
    "_patch_lang": ("fn",),
    "InterpreterBuilder.create_dot": ("self", "a", "b", "d", "input_precision", "max_num_imprecise_acc"),
}
_MARK = "megamoe_exact_conversions"


def install() -> None:
    """Patch the interpreter of this process; calling it again does nothing.

    Raises `RuntimeError` when triton was imported without TRITON_INTERPRET=1 (its own library is then
    compiled, not interpreted), or when this Triton's interpreter lacks the private functions it replaces.
    """
    if is_active():
        return
    stock = _interpreter_module()
    stock_convert = stock._convert_float
    stock_scale = stock._dot_scaled_scale_to_f32
    stock_operand = stock._mxfp_value_handle_to_float32
    stock_dot = stock.InterpreterBuilder.create_dot
    stock_patch_lang = stock._patch_lang

    def convert_float(input: np.ndarray, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> np.ndarray:
        known = input_dtype.name in _TORCH_DTYPES and output_dtype.name in _TORCH_DTYPES
        # None is the interpreter's own "no choice": plain widening, or fp32 → BF16, which rounds to nearest.
        if known and (rounding_mode is None or rounding_mode.name == "RTNE"):
            return _narrow(_widen(input, input_dtype.name), output_dtype.name)
        return stock_convert(input, input_dtype, output_dtype, rounding_mode)

    def scale_to_f32(scale_handle: Any, compute_type: Any) -> np.ndarray:
        if scale_handle.dtype.scalar.name == "fp8e4nv":
            return _widen(scale_handle.data, "fp8e4nv").numpy()
        return stock_scale(scale_handle, compute_type)

    def operand_to_f32(value_handle: Any) -> np.ndarray:
        name = value_handle.dtype.scalar.name
        if name in _TORCH_DTYPES:
            return _widen(value_handle.data, name).numpy()
        return stock_operand(value_handle)  # packed E2M1

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        def widened(operand: Any) -> Any:
            if operand.dtype.scalar.name != "bf16":
                return operand
            return stock.TensorHandle(_widen(operand.data, "bf16").numpy(), stock.tl.float32)

        return stock_dot(self, widened(a), widened(b), d, input_precision, max_num_imprecise_acc)

    def patch_lang(fn: Any) -> Any:
        tl = stock.tl
        langs = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if langs and not any(tl.core.is_builtin(lang.arange) for lang in langs):
            return stock._LangPatchScope()  # nothing to undo: whoever patched restores
        return stock_patch_lang(fn)

    stock._patch_lang = patch_lang
    stock._convert_float = convert_float
    stock._dot_scaled_scale_to_f32 = scale_to_f32
    stock._mxfp_value_handle_to_float32 = operand_to_f32
    stock.InterpreterBuilder.create_dot = create_dot
    setattr(stock, _MARK, True)


def is_active() -> bool:
    """Whether this process's interpreter is patched. Does not import triton."""
    return hasattr(sys.modules.get("triton.runtime.interpreter"), _MARK)


def _interpreter_module() -> Any:
    """Triton's interpreter module, after making sure that it is in use and is the one this file knows."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter, jit

    # Triton decides for each function where it is decorated, hence for its own library at import.
    if isinstance(tl.zeros, jit.JITFunction) or not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "triton runs without its interpreter: TRITON_INTERPRET=1 must be set before triton is first imported"
        )
    unknown = [path for path, expected in _PATCHED.items() if _parameters(interpreter, path) != expected]
    if unknown:
        raise RuntimeError(
            f"triton {triton.__version__} has another interpreter than the one of Triton 3.9 that this patch "
            f"replaces parts of; missing or changed: {', '.join(unknown)}"
        )
    return interpreter


def _parameters(module: Any, path: str) -> tuple[str, ...] | None:
    target = module
    for name in path.split("."):
        target = getattr(target, name, None)
    return tuple(inspect.signature(target).parameters) if callable(target) else None


def _widen(data: np.ndarray, name: str) -> torch.Tensor:
    """Exact fp32 values of an interpreter array; BF16 and FP8 are held as unsigned integers of their bits."""
    bits = torch.from_numpy(np.array(data, order="C"))  # a copy: operands may be read-only broadcasts
    return bits.view(_TORCH_DTYPES[name]).float()


def _narrow(values: torch.Tensor, name: str) -> np.ndarray:
    """Bits of fp32 `values` in another format, as an array of unsigned integers, rounded once."""
    if name == "fp8e4nv":
        return formats.encode_e4m3(values).view(torch.uint8).numpy()
    if name == "fp8e5":
        return _bits(values.clamp(-_E5M2_MAX, _E5M2_MAX).to(torch.float8_e5m2), values.isnan(), 0x7F)
    if name == "bf16":
        return _bits(values.bfloat16(), values.isnan(), 0x7FFF)
    if name == "fp16":
        return _bits(values.half(), values.isnan(), 0x7FFF)
    return values.numpy().view(np.uint32)


def _bits(values: torch.Tensor, nan: torch.Tensor, canonical_nan: int) -> np.ndarray:
    """Unsigned bits of `values`; where `nan`, the NaN that `cvt` writes (torch's varies with the CPU)."""
    unsigned = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16)}[values.element_size()]
    return torch.where(nan, canonical_nan, values.view(unsigned[0])).numpy().view(unsigned[1])
