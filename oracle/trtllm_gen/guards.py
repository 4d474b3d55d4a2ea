"""What of FlashInfer may be called on this machine. Some of it answers garbage instead of an error."""

from __future__ import annotations

from importlib import metadata

import torch

from megamoe.oracle.trtllm_gen.flashinfer_layouts import DISTRIBUTION, VERSION

CUDA_QUANTIZERS = ("fp4_quantize", "nvfp4_quantize", "mxfp4_quantize", "mxfp8_quantize")
"""FlashInfer's functions whose device code is empty below compute capability 10: they return what was in memory."""


def quantizer_unsupported_reason(name: str, device: torch.device) -> str | None:
    """Why FlashInfer's quantizer `name`, one of `CUDA_QUANTIZERS`, must not be called on `device`, or None."""
    if name not in CUDA_QUANTIZERS:
        raise ValueError(f"name is {name!r}; allowed: {', '.join(CUDA_QUANTIZERS)}")
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{name} needs a CUDA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 10:
        return f"{name} compiles to nothing for compute capability {major}.{minor} and returns garbage; it needs 10.0"
    return None


def kernel_unsupported_reason() -> str | None:
    """Why the trtllm-gen MoE kernels cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != 10:
        return f"the GPU has compute capability {major}.{minor}; trtllm-gen's kernels are for 10.0 and 10.3"
    try:
        installed = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"{DISTRIBUTION} is not installed"
    if installed != VERSION:
        return f"{DISTRIBUTION} {installed} is installed; the contract is that of {VERSION}"
    return None
