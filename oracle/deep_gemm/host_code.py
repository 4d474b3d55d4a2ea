"""Upstream's compiled host code of 0.1.7 on a machine without a GPU, in a process of its own: buffer sizes and views.

The module needs CUDA's libraries and torch's CUDA half to load. It gets a stand-in for them: `cudaGetDevice` and
`cudaGetDeviceProperties` describe a B200 or an H200, torch's CUDA hooks take host memory for the GPU's, and whatever
else is called aborts the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megamoe.oracle.deep_gemm.device_code import DEFAULT_NVCC, find_nvcc
from megamoe.oracle.deep_gemm.upstream import Upstream, locate
from megamoe.oracle.deep_gemm.views import View
from megamoe.oracle.downloads import OracleUnavailable, cache_folder, unpacked_wheel

TORCH = "2.13"
"""The torch that the module of 0.1.7 is built for."""
_TVM_FFI = "apache-tvm-ffi==0.1.11"
_LIBRARIES = (
    "libcudart.so.13", "libnvrtc.so.13", "libcublas.so.13", "libcublasLt.so.13", "libc10_cuda.so", "libtorch_cuda.so",
)  # fmt: skip
_TIMEOUT_SECONDS = 180

# Called when the module sets itself up; nothing that sizes buffers needs their results.
_HARMLESS = ("cublasLtCreate", "cublasLtDestroy")
_FORBIDDEN = (
    "cublasGetStatusString", "cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy", "cublasLtMatmulDescSetAttribute", "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy", "cublasLtMatmulPreferenceSetAttribute", "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy", "cublasLtMatrixLayoutSetAttribute", "nvrtcCompileProgram", "nvrtcCreateProgram",
    "nvrtcDestroyProgram", "nvrtcGetCUBIN", "nvrtcGetCUBINSize", "nvrtcGetErrorString", "nvrtcGetPTX",
    "nvrtcGetPTXSize", "nvrtcGetProgramLog", "nvrtcGetProgramLogSize", "nvrtcVersion",
    "_ZN2at4cuda26getCurrentCUDABlasLtHandleEv", "_ZN3c104cuda20getCurrentCUDAStreamEa",
    "_ZNK3c104cuda10CUDAStream6streamEv",
)  # fmt: skip

_STAND_IN = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <cuda_runtime_api.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }

#undef cudaGetDeviceProperties
extern "C" cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    std::memset(properties, 0, sizeof(*properties));
    properties->major = std::atoi(std::getenv("MEGAMOE_FAKE_MAJOR"));
    properties->multiProcessorCount = std::atoi(std::getenv("MEGAMOE_FAKE_SMS"));
    properties->sharedMemPerBlockOptin = 227 * 1024;
    return cudaSuccess;
}

namespace {
struct CUDAHooks : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    at::Device getDeviceFromPtr(void*) const override { return at::Device(at::kCUDA, 0); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}

#define HARMLESS(name) extern "C" int name() { return 0; }
#define FORBIDDEN(name) extern "C" int name() { std::fputs("called " #name "\n", stderr); std::abort(); }
"""

_SCRIPT = """
import ctypes, json, os, sys
ctypes.CDLL(os.environ["MEGAMOE_STAND_IN"], ctypes.RTLD_GLOBAL)  # torch asks for its hooks once, when it is imported
import torch
library = torch.library.Library("aten", "IMPL", "CUDA")
library.impl("empty.memory_format", lambda size, **options: torch.empty(size, dtype=options.get("dtype")))
import deep_gemm
answers = []
for name, arguments in json.load(sys.stdin):
    answer = getattr(deep_gemm._C, name)(*arguments)
    if name.startswith("get_symm_buffer_size"):
        nbytes, cut = answer
        buffer = torch.empty(int(nbytes), dtype=torch.int8)
        views = [[list(v.shape), list(v.stride()), str(v.dtype)] for v in cut(buffer)]
        answer = [int(nbytes), views]
    answers.append(answer)
print(json.dumps(answers))
"""


class HostCode:
    """Calls of the compiled module's functions, each list in one process; `major` is the GPU it is made to see."""

    def __init__(self, major: int, environment: dict[str, str]) -> None:
        self._environment = environment | {
            "MEGAMOE_FAKE_MAJOR": str(major),
            "MEGAMOE_FAKE_SMS": "148" if major == 10 else "132",
        }

    def call(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """(function, arguments) each, of integers and strings; sizes of buffers come with `View`s."""
        try:
            result = subprocess.run(
                [sys.executable, "-c", _SCRIPT], input=json.dumps(calls), env=self._environment,
                capture_output=True, text=True, timeout=_TIMEOUT_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise OracleUnavailable(f"upstream's host code did not answer within {_TIMEOUT_SECONDS} s") from None
        if result.returncode:
            lines = result.stderr.strip().splitlines() or ["no message"]
            raise OracleUnavailable(f"upstream's host code ended with status {result.returncode}: {lines[-1]}")
        answers = json.loads(result.stdout.strip().splitlines()[-1])
        return [_answer(name, answer) for (name, _), answer in zip(calls, answers)]


def unsupported_reason() -> str | None:
    """Why `load` would fail here, short of compiling; None when it should not."""
    try:
        find(download=False)
    except OracleUnavailable as error:
        return str(error)
    return None


def load(major: int, *, download: bool = False) -> HostCode:
    """For SM90 (9) or SM100 (10) buffers. Raises `OracleUnavailable`."""
    upstream, tvm_ffi = find(download=download)
    folder = Path(torch.__file__).parent
    stand_in = _stand_in(folder)
    libraries = (stand_in, folder / "lib", tvm_ffi / "tvm_ffi" / "lib")
    return HostCode(major, _environment(upstream, tvm_ffi, stand_in, libraries))


def find(*, download: bool = False) -> tuple[Upstream, Path]:
    """Upstream's files and those of tvm-ffi, which its module is built on. Raises `OracleUnavailable`."""
    upstream = locate(download=download)
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise OracleUnavailable(f"{platform.system()} on {platform.machine()}: the module is for Linux on x86_64")
    if not torch.__version__.startswith(f"{TORCH}."):
        raise OracleUnavailable(f"torch is {torch.__version__}; the module of 0.1.7 is built for {TORCH}")
    if torch.version.cuda is not None:
        raise OracleUnavailable("torch has its own CUDA half; the stand-in is for one without")
    _cuda_home()
    return upstream, unpacked_wheel(_TVM_FFI, None, download=download)


def _environment(upstream: Upstream, tvm_ffi: Path, stand_in: Path, libraries: Sequence[Path]) -> dict[str, str]:
    site_packages = Path(torch.__file__).parent.parent
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PYTHONPATH": os.pathsep.join(map(str, (upstream.root.parent, tvm_ffi, site_packages))),
        "MEGAMOE_STAND_IN": str(stand_in / "libtorch_cuda.so"),
        "CUDA_HOME": str(_cuda_home()),
        "DG_USE_TEMP_CUBLASLT_WORKSPACE": "1",  # or it allocates one at the first call
    }


def _stand_in(torch_folder: Path) -> Path:
    """The folder with the stand-in under every name it answers to, compiled once per torch."""
    source = _STAND_IN + "".join(f"HARMLESS({name})\n" for name in _HARMLESS)
    source += "".join(f"FORBIDDEN({name})\n" for name in _FORBIDDEN)
    digest = hashlib.sha256(f"{source}{torch.__version__}".encode()).hexdigest()[:16]
    target = cache_folder() / "stand_in" / digest
    if target.is_dir():
        return target
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OracleUnavailable("no C++ compiler for the stand-in of CUDA's libraries")
    includes = (torch_folder / "include", _cuda_home() / "include")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        unit = Path(scratch) / "stand_in.cpp"
        unit.write_text(source)
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", *(f"-I{folder}" for folder in includes),
                   str(unit), "-o", str(made / "stand_in.so"),
                   f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or ["no message"]
            raise OracleUnavailable(f"{compiler} refused the stand-in of CUDA's libraries: {lines[0]}")
        for name in _LIBRARIES:
            (made / name).symlink_to("stand_in.so")
        try:
            os.replace(made, target)
        except OSError:  # another process was first
            shutil.rmtree(made)
    return target


def _cuda_home() -> Path:
    homes = (find_nvcc().parent.parent, find_nvcc().resolve().parent.parent, DEFAULT_NVCC.parent.parent)
    for home in homes:
        if (home / "include" / "cuda_runtime_api.h").exists():
            return home
    raise OracleUnavailable(f"no cuda_runtime_api.h in the include folder of {', '.join(map(str, homes))}")


def _answer(name: str, answer: Any) -> Any:
    if not name.startswith("get_symm_buffer_size"):
        return answer
    nbytes, views = answer
    dtypes = {str(dtype): dtype for dtype in (torch.int8, torch.int32, torch.int64, torch.float32, torch.bfloat16,
                                              torch.float8_e4m3fn)}  # fmt: skip
    return nbytes, [View(tuple(shape), tuple(stride), dtypes[dtype]) for shape, stride, dtype in views]
