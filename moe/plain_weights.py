"""`PlainWeights`: expert weights as a checkpoint has them, before any kernel layout."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megamoe.recipe import ElementFormat


@dataclass(frozen=True)
class PlainWeights:
    """Quantized weights of one layer, rows of the contraction axis contiguous.

    w13 [E, 2I, H], w2 [E, H, I]. `w13_layout` is the order of w13's rows, of its scales' and of its bias's: `gate_up`,
    I gate rows, then I up rows, or `interleaved`, gate 0, up 0, gate 1, … (gpt-oss). Shared experts, all four tensors
    or none: under DeepGEMM numerics one dense MLP of width W = I·S, shared_w13 [2W, H] and shared_w2 [H, W], whose rows
    are always [gate; up]; under `trtllm_gen` S separate experts, shared_w13 [S, 2I, H] and shared_w2 [S, H, I], laid
    out as the routed ones. Elements and scales:

    ================  =================================  ====================================================
    element           tensor                             scale tensor
    ================  =================================  ====================================================
    E2M1              uint8 [.., N, K/2], low nibble =   uint8 [.., N, K/g]: UE8M0 bytes (g = 32) or UE4M3
                      even column                        bytes (g = 16)
    E4M3, MX scaled   float8_e4m3fn [.., N, K]           uint8 [.., N, K/32], UE8M0 bytes
    E4M3, block       float8_e4m3fn [.., N, K]           fp32 [.., ⌈N/128⌉, ⌈K/128⌉]: element [n, k] has
    scaled                                               scale [n // 128, k // 128]
    ================  =================================  ====================================================

    Block scales of w13 never span gate and up: gate's ⌈I/128⌉ rows of scales, then as many of up, so that
    each half counts its rows from 0. (For I % 128 = 0 that is ⌈2I/128⌉ rows, as DeepGEMM has them.)

    NVFP4's global scales, routed experts only, all optional: l1_alphas fp32 [E, 2] multiply the gate and up
    accumulators, l2_act_scales fp32 [E] the activated values before they are requantized, l2_alphas fp32 [E] the rows
    of GEMM 2.

    The format of the shared weights is decided by their dtype, not by the recipe: beside MXFP4 experts they
    may be E4M3 with UE8M0 scales (DeepGEMM) or MXFP4 as well.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    shared_w13: torch.Tensor | None = None
    shared_w13_scale: torch.Tensor | None = None
    shared_w2: torch.Tensor | None = None
    shared_w2_scale: torch.Tensor | None = None
    l1_alphas: torch.Tensor | None = None
    l2_alphas: torch.Tensor | None = None
    l2_act_scales: torch.Tensor | None = None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_layout: str = "gate_up"

    @property
    def shared_weight(self) -> str | None:
        """Element format of the shared weights, `"e4m3"`, `"e2m1"` or `"bf16"`; None without shared experts."""
        return None if self.shared_w13 is None else element_format(self.shared_w13)

    def to(self, device: torch.device | str) -> PlainWeights:
        """The same weights on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **moved)


def element_format(weight: torch.Tensor) -> ElementFormat:
    """Element format of a weight, told by its dtype: bytes are packed E2M1."""
    if weight.dtype == torch.float8_e4m3fn:
        return "e4m3"
    return "bf16" if weight.dtype == torch.bfloat16 else "e2m1"
