"""Every comparison that `megamoe check` knows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.oracle import reference_differential
from megamoe.oracle.comparison import Case
from megamoe.oracle.deep_gemm import device_code, fused_differential, host_code, sm90_fused, sm100_fused, upstream
from megamoe.oracle.deep_gemm import differential as deep_gemm
from megamoe.oracle.deep_gemm import python_differential as deep_gemm_python
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.oracle.trtllm_gen import differential as trtllm_gen
from megamoe.oracle.trtllm_gen import flashinfer_layouts, guards


def cases(device: torch.device) -> list[Case]:
    """Those that can run on `device` and those that cannot, cheap ones first."""
    return [
        *deep_gemm_python.cases(device),
        *trtllm_gen.cases(device),
        *deep_gemm.cases(device),
        *reference_differential.cases(device),
    ]


def reasons() -> dict[str, str | None]:
    """Every judge beside the reference, and why it cannot run here (None: it can)."""
    return {
        f"deep_gemm: {deep_gemm_python.JUDGE}": _reason(upstream.locate),
        f"deep_gemm: {deep_gemm_python.HOST_CODE}": host_code.unsupported_reason(),
        f"deep_gemm: {deep_gemm.DEVICE_CODE}": device_code.unsupported_reason(),
        f"deep_gemm: {fused_differential.SM90}": sm90_fused.unsupported_reason(),
        f"deep_gemm: {fused_differential.SM100}": sm100_fused.unsupported_reason(),
        f"flashinfer_trtllm: {trtllm_gen.JUDGE}": _reason(flashinfer_layouts.locate),
        f"flashinfer_trtllm: {trtllm_gen.KERNELS}": guards.kernel_unsupported_reason(),
    }


def fetch() -> list[str]:
    """Download what judges on any machine; one line for each that could not be had."""
    attempts = [_reason(locate, download=True) for locate in (host_code.find, flashinfer_layouts.locate)]
    return [reason for reason in attempts if reason is not None]


def _reason(locate: Callable[..., object], **arguments: bool) -> str | None:
    try:
        locate(**arguments)
    except OracleUnavailable as error:
        return str(error)
    return None
