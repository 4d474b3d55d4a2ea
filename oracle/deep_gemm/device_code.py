"""Upstream's device code, live on the GPU at hand: the headers of 0.1.7 compiled with nvcc and launched directly.

The pre-dispatch kernels are portable CUDA, so those of the SM100 kinds judge bytes on any GPU from sm_89 on, whatever
torch is installed. The library is kept in the user's cache under a hash of everything it was made from.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from megamoe.oracle.deep_gemm.device_source import INSTANTIATIONS, REQUANTIZE_GROUPS, kind_number, source
from megamoe.oracle.deep_gemm.upstream import Upstream, locate
from megamoe.oracle.downloads import OracleUnavailable, cache_folder

LEAST_CAPABILITY = 89  # the first with FP8 conversions
MAX_HIDDEN = 8192
DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")
# Upstream's own, without its warnings' switches: no fast math, products and sums may fuse.
_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-shared", "-Xcompiler", "-fPIC")
_ARCH_SPECIFIC = (90, 100, 103, 120, 121)
_TIMEOUT_SECONDS = 500

_POINTER, _STREAM = ctypes.c_void_p, ctypes.c_void_p


class DeviceCode:
    """The library at `path`. Calls run on the current stream of the tensors' device and do not wait."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.pre_dispatch.argtypes = (
            [ctypes.c_int, ctypes.c_uint32] + [_POINTER] * 9 + [ctypes.c_uint32] * 4 + [ctypes.c_float, _STREAM]
        )
        library.requantize.argtypes = [ctypes.c_int, *[_POINTER] * 3, ctypes.c_uint64, _STREAM]
        library.error_text.argtypes, library.error_text.restype = [ctypes.c_int], ctypes.c_char_p
        self._library = library

    def pre_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        q: torch.Tensor,
        sf: torch.Tensor,
        ids_out: torch.Tensor,
        weights_out: torch.Tensor,
        token_scale: torch.Tensor | None = None,
        kind: str,
        group: int,
        expert_scales: torch.Tensor | None = None,
        routed_scaling_factor: float = 1.0,
    ) -> None:
        """Arguments of `megamoe.kernels.pre_dispatch.pre_dispatch`, all contiguous, ids int32.

        `ValueError` for a shape that upstream's host code refuses, a layout it could not know, or a kind that lacks
        an argument.
        """
        (tokens, hidden), (rows, top_k) = x.shape, ids_out.shape
        reason = shape_unsupported_reason(kind, group, hidden, top_k)
        tensors = [x, topk_ids, topk_weights, q, sf, ids_out, weights_out]
        tensors += [tensor for tensor in (token_scale, expert_scales) if tensor is not None]
        if reason is None and not all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors):
            reason = "every tensor must be contiguous and on a GPU"
        if reason is None and topk_ids.dtype != torch.int32:
            reason = f"topk_ids has dtype {topk_ids.dtype}; upstream takes int32"
        if reason is None and (token_scale is not None) != (kind == "nvfp4"):
            reason = f"token_scale belongs to nvfp4, the kind is {kind!r}"
        if reason is None and (expert_scales is not None) and kind == "fp8_block128":
            reason = "expert_scales: the SM90 kernel has none"
        if reason is None and routed_scaling_factor != 1.0 and kind != "fp8_block128":
            reason = "routed_scaling_factor: only the SM90 kernel has one"
        if reason is not None:
            raise ValueError(reason)
        pointers = (x, topk_ids, topk_weights, expert_scales, q, sf, token_scale, ids_out, weights_out)
        self._launch(
            "pre_dispatch", x.device, kind_number(kind), group, *map(_pointer, pointers),
            tokens, rows, hidden, top_k, routed_scaling_factor,
        )  # fmt: skip

    def requantize(self, act: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Requantization of the fused kernels: act fp32 [R, I] to elements and scales [R, I/g].

        mxfp8: float8_e4m3fn [R, I], UE8M0 bytes, g = 32. mxfp4 and nvfp4: packed uint8 [R, I/2], UE8M0 and UE4M3
        bytes, g = 32 and 16. fp8_block64: float8_e4m3fn, fp32, g = 64. Scales come from upstream's functions, E2M1
        elements from CUDA's conversion, which is the instruction from sm_100 on.
        """
        group = REQUANTIZE_GROUPS[kind]
        rows, columns = act.shape
        if act.dtype != torch.float32 or not (act.is_cuda and act.is_contiguous()) or columns % group:
            raise ValueError(f"act must be fp32, contiguous, on a GPU, with columns a multiple of {group}")
        fp8 = kind in ("mxfp8", "fp8_block64")
        scale = torch.float32 if kind == "fp8_block64" else torch.uint8
        q = torch.full((rows, columns if fp8 else columns // 2), 0xFF, dtype=torch.uint8, device=act.device)
        sf = torch.empty((rows, columns // group), dtype=scale, device=act.device)
        sf.view(torch.uint8).fill_(0xFF)
        if rows:
            self._launch("requantize", act.device, kind_number(kind), *map(_pointer, (act, q, sf)), act.numel())
        return (q.view(torch.float8_e4m3fn) if fp8 else q), sf

    def _launch(self, name: str, device: torch.device, *arguments: object) -> None:
        with torch.cuda.device(device):
            error = getattr(self._library, name)(*arguments, torch.cuda.current_stream().cuda_stream)
        if error:
            text = "no such instantiation" if error < 0 else self._library.error_text(error).decode()
            raise RuntimeError(f"upstream's {name} was not launched: {text}")


def shape_unsupported_reason(kind: str, group: int, hidden: int, top_k: int) -> str | None:
    """Why upstream's host code refuses such a pre-dispatch, or None."""
    if (kind, group) not in INSTANTIATIONS:
        return f"kind {kind!r} with group {group} has no kernel"
    if hidden % group or hidden % 8 or (kind != "fp8_block128" and hidden // group % 4):
        return f"hidden={hidden} is no multiple of {group if kind == 'fp8_block128' else 4 * group}"
    if hidden > MAX_HIDDEN:
        return f"hidden={hidden} is more than {MAX_HIDDEN}"
    if hidden // 8 < top_k:
        return f"top_k={top_k} is more than hidden / 8 = {hidden // 8}"
    return None


def unsupported_reason() -> str | None:
    """Why `load` would fail here, short of compiling; None when it should not."""
    try:
        _capability()
        find_nvcc()
        locate()
    except OracleUnavailable as error:
        return str(error)
    return None


def load(*, download: bool = False) -> DeviceCode:
    """Compiled for the current GPU, once per content. Raises `OracleUnavailable`."""
    return _load(_capability(), locate(download=download), find_nvcc())


def build(capability: int, upstream: Upstream, nvcc: Path) -> Path:
    """The shared library for GPUs of `capability` (90 for 9.0), from the cache or compiled; needs no GPU."""
    text = source()
    arch = f"{capability}a" if capability in _ARCH_SPECIFIC else str(capability)
    flags = (*_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}")
    library = cache_folder() / "device_code" / f"{_digest(text, flags, upstream, nvcc)}-sm_{arch}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        unit, made = Path(scratch) / "device_code.cu", Path(scratch) / "device_code.so"
        unit.write_text(text)
        command = [str(nvcc), *flags, "-I", str(upstream.include), str(unit), "-o", str(made)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise OracleUnavailable(f"{nvcc} failed: {error}") from error
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or ["no message"]
            raise OracleUnavailable(f"{nvcc} refused upstream's headers for sm_{arch}: {lines[0]}")
        os.replace(made, library)
    return library


def find_nvcc() -> Path:
    """nvcc of CUDA_HOME, CUDA_PATH, PATH, or `DEFAULT_NVCC`. Raises `OracleUnavailable`."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for home in homes:
        if (Path(home) / "bin" / "nvcc").exists():
            return Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path)
    if DEFAULT_NVCC.exists():
        return DEFAULT_NVCC
    raise OracleUnavailable(f"no nvcc in CUDA_HOME, CUDA_PATH, PATH or at {DEFAULT_NVCC}")


@lru_cache(maxsize=4)
def _load(capability: int, upstream: Upstream, nvcc: Path) -> DeviceCode:
    path = build(capability, upstream, nvcc)
    try:
        return DeviceCode(path)
    except OSError as error:
        raise OracleUnavailable(f"{path} does not load: {error}") from error


def _capability() -> int:
    if not torch.cuda.is_available():
        raise OracleUnavailable("no CUDA GPU")
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < LEAST_CAPABILITY:
        raise OracleUnavailable(f"the GPU has compute capability {major}.{minor}; FP8 conversions need 8.9")
    return 10 * major + minor


def _digest(text: str, flags: tuple[str, ...], upstream: Upstream, nvcc: Path) -> str:
    compiler = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=60).stdout
    digest = hashlib.sha256("\0".join([text, *flags, compiler]).encode())
    for header in sorted((upstream.include / "deep_gemm").rglob("*.cuh")):
        digest.update(header.read_bytes())
    return digest.hexdigest()[:32]


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
