"""The sums a · bᵀ that the reference and real machines form: `moe_layer` takes any of them as `matmul`.

The specification fixes the values that are added, not the order or the precision of the sum; these functions span
what a kernel may legitimately do with it. All take fp32 a [n, K] and b [N, K] and return fp32 [n, N].
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def matmul_fp64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Accumulated in fp64 and rounded once: products of E4M3 and E2M1 operands are exact, so this is the
    correctly rounded sum up to 2⁻⁵³, whatever the order, and the same on every device."""
    return (a.double() @ b.double().mT).float()


def matmul_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Accumulated in fp32 in the library's order, without TF32."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return a @ b.mT
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def matmul_truncated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A tensor core's fp32 accumulator: after every 16 columns (one BF16 MMA) the sum is cut toward zero."""
    acc = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], 16):
        columns = slice(start, start + 16)
        exact = acc.double() + a[:, columns].double() @ b[:, columns].double().mT
        nearest = exact.float()
        too_far = nearest.double().abs() > exact.abs()
        acc = torch.where(too_far, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    return acc


def matmul_fp8_wgmma(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The FP8 tensor core of Hopper, as it is publicly known to add: in every 32 columns (one WGMMA) the products
    and the accumulator are aligned to the largest of them and cut toward zero 13 bits below its leading bit.

    Materializes n · N · 33 numbers: for small layers.
    """
    acc = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], 32):
        columns = slice(start, start + 32)
        addends = torch.cat([a[:, None, columns] * b[None, :, columns], acc[..., None]], dim=-1)
        leading = torch.frexp(addends.abs().amax(-1, keepdim=True)).exponent - 1
        unit = torch.exp2((leading - 13).float())
        acc = ((addends / unit).trunc() * unit).double().sum(-1).float()
    return acc
