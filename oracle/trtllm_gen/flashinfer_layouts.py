"""FlashInfer's own layout functions, from the files of 0.6.18 on any machine.

The permutations are plain torch, but the modules that hold them import a CUDA driver and a JIT compiler; their
definitions are executed without the rest. The 128×4 offset is a C++ function of one page, compiled by itself.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch

from megamoe.oracle.definitions import execute_definitions
from megamoe.oracle.downloads import OracleUnavailable, cache_folder, unpacked_wheel

DISTRIBUTION = "flashinfer-python"
VERSION = "0.6.18"
VARIABLE = "MEGAMOE_FLASHINFER"
"""Environment variable: the folder of an unpacked wheel, for machines without a network."""

_SHA256 = "d5d26edb48f8def0bf28b2c94415aef7f0754e2cd9e3cb3d6e7081262d068aad"
_UTILS = (
    "srcToDstBlk16RowMap",
    "srcToDstBlk32RowMap",
    "get_shuffle_block_size",
    "get_shuffle_matrix_a_row_indices",
    "get_shuffle_matrix_sf_a_row_indices",
)
_CORE = (
    "_maybe_get_cached_w3_w1_permute_indices",
    "get_w2_permute_indices_with_cache",
    "get_reorder_rows_for_gated_act_gemm_row_indices",
    "reorder_rows_for_gated_act_gemm",
)
_QUANTIZATION = ("shuffle_matrix_a",)

_OFFSET_FUNCTION = "computeSFIndex"
_OFFSET_HEAD = """
#include <stdexcept>
#define TLLM_THROW(text) throw std::runtime_error(text)
namespace tensorrt_llm { enum class QuantizationSFLayout { SWIZZLED_128x4, SWIZZLED_8x4, LINEAR }; }
static int PadUpFn(int n, int unit) { return (n + unit - 1) / unit * unit; }
"""
_OFFSET_TAIL = """
extern "C" void scale_offsets(int rows, int cols, long* out) {
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < cols; ++c)
            out[r * cols + c] = computeSFIndex(r, c, rows, cols, tensorrt_llm::QuantizationSFLayout::SWIZZLED_128x4);
}
"""


class Layouts(NamedTuple):
    """Namespaces of FlashInfer's functions: `flashinfer.utils`, `.fused_moe.core`, `.quantization.fp4_quantization`."""

    utils: Any
    core: Any
    quantization: Any


def locate(*, download: bool = False) -> Path:
    """The folder `flashinfer` of exactly 0.6.18: what `VARIABLE` names, else the installed one, else the cache's.

    `download` allows fetching the wheel into the cache, without dependencies. Raises `OracleUnavailable`.
    """
    named = os.environ.get(VARIABLE)
    if named:
        folder = Path(named)
    else:
        try:
            installed = metadata.distribution(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            installed = None
        if installed is not None and installed.version == VERSION:
            folder = Path(str(installed.locate_file("")))
        else:
            folder = unpacked_wheel(f"{DISTRIBUTION}=={VERSION}", _SHA256, download=download)
    root = (folder / "flashinfer" if (folder / "flashinfer").is_dir() else folder).resolve()
    if not (root / "fused_moe" / "core.py").is_file():
        raise OracleUnavailable(f"{folder} holds no flashinfer/fused_moe/core.py")
    return root


def load(*, download: bool = False) -> Layouts:
    """Raises `OracleUnavailable`."""
    return _load(locate(download=download))


def load_scale_offsets(*, download: bool = False) -> Callable[[int, int], torch.Tensor]:
    """FlashInfer's host function for 128×4 tiles: (rows, cols) to the byte of each scale, int64 [rows, cols].

    Needs a C++ compiler. Raises `OracleUnavailable`.
    """
    library = _offset_library(locate(download=download))

    def offsets(rows: int, cols: int) -> torch.Tensor:
        out = torch.full((rows, cols), -1, dtype=torch.int64)
        library.scale_offsets(rows, cols, ctypes.c_void_p(out.data_ptr()))
        return out

    return offsets


@lru_cache(maxsize=1)
def _load(root: Path) -> Layouts:
    utils = execute_definitions(root / "utils.py", _UTILS, {"torch": torch})
    shared = {"torch": torch, "Union": Union, **{name: getattr(utils, name) for name in _UTILS}}
    return Layouts(
        utils,
        execute_definitions(root / "fused_moe" / "core.py", _CORE, shared),
        execute_definitions(root / "quantization" / "fp4_quantization.py", _QUANTIZATION, shared),
    )


@lru_cache(maxsize=1)
def _offset_library(root: Path) -> ctypes.CDLL:
    source = root / "data" / "csrc" / "nv_internal" / "tensorrt_llm" / "thop" / "fp4Op.cpp"
    try:
        text = source.read_text()
    except OSError as error:
        raise OracleUnavailable(f"{source} cannot be read: {error}") from error
    match = re.search(rf"^int {_OFFSET_FUNCTION}\(.*?^}}$", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise OracleUnavailable(f"{source} does not define {_OFFSET_FUNCTION}")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OracleUnavailable(f"no C++ compiler for FlashInfer's {_OFFSET_FUNCTION}")
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        unit, made = Path(folder) / "offsets.cpp", Path(folder) / "offsets.so"
        unit.write_text(_OFFSET_HEAD + match.group() + _OFFSET_TAIL)
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", str(unit), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if result.returncode:
            raise OracleUnavailable(f"{compiler} refused FlashInfer's {_OFFSET_FUNCTION}: {result.stderr[:200]!r}")
        return ctypes.CDLL(str(made))
