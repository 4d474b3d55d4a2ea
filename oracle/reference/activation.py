"""The activations between the two GEMMs, by numerics."""

from __future__ import annotations

import math

import torch

from megamoe.spec import ACTIVATION_DEFAULTS

Parameter = float | torch.Tensor
"""A number of the whole layer, or an fp32 tensor that broadcasts to gate and up (one number per expert)."""


def activate(
    gate: torch.Tensor,
    up: torch.Tensor,
    numerics: str,
    clamp: Parameter | None,
    *,
    activation: str = "swiglu",
    alpha: Parameter | None = None,
    beta: Parameter | None = None,
    gate_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The activation in fp32, of fp32 accumulators; alpha and beta None: the activation's own.

    swiglu: (gate · sigmoid(gate)) · up; it has no alpha and no beta. swigluoai: (gate · sigmoid(alpha · gate)) ·
    (up + beta). situ: (alpha · tanh(gate/alpha) · sigmoid(gate)) · (beta · tanh(up/beta)).

    clamp c limits gate to (−∞, c] and up to [−c, c] first; None and +inf: no clamp. deep_gemm_sm100 rounds gate, up
    and c to BF16 before it, c perhaps to infinity; the others stay in fp32. A clamp replaces NaN, gate by +c and up by
    −c (SM100) or +c, as the comparisons of upstream's kernels do.

    gate_scale (trtllm_gen): what the clamped gate is multiplied by to be in natural units; up keeps its own, and so do
    clamp and beta.
    """
    if numerics not in ("deep_gemm_sm100", "deep_gemm_sm90", "trtllm_gen"):
        raise ValueError(f"numerics={numerics!r} is unknown; allowed: deep_gemm_sm100, deep_gemm_sm90, trtllm_gen")
    if numerics == "deep_gemm_sm100":
        gate, up = gate.bfloat16().float(), up.bfloat16().float()
    if clamp is not None:
        gate, up = _clamp(gate, up, torch.as_tensor(clamp, dtype=torch.float32, device=gate.device), numerics)
    if gate_scale is not None:
        gate = gate * gate_scale
    a, b = (
        torch.as_tensor(default if value is None else value, dtype=torch.float32, device=gate.device)
        for value, default in zip((alpha, beta), ACTIVATION_DEFAULTS[activation])
    )
    # exp and tanh in fp64, rounded once: torch's fp32 functions differ between devices.
    slope = a * gate if activation == "swigluoai" else gate
    sigmoid = (1.0 + torch.exp(-slope.double()).float()).reciprocal()
    if activation == "swigluoai":
        up = up + b
    elif activation == "situ":
        gate = a * torch.tanh(torch.div(gate, a).double()).float()
        up = b * torch.tanh(torch.div(up, b).double()).float()
    return (gate * sigmoid) * up


def _clamp(gate: torch.Tensor, up: torch.Tensor, c: torch.Tensor, numerics: str) -> tuple[torch.Tensor, torch.Tensor]:
    if numerics == "deep_gemm_sm100":
        c = c.bfloat16().float()  # may round to infinity
    limited = c != math.inf  # else NaN stays, which the comparisons would replace
    if numerics == "deep_gemm_sm100":
        low = torch.where(up >= -c, up, -c)
    else:
        low = torch.where(up < -c, -c, up)
    return (
        torch.where(limited & ~(gate <= c), c, gate),
        torch.where(limited, torch.where(low <= c, low, c), up),
    )
