"""The pre-dispatch under upstream's names: tokens quantized into a buffer's views, routing copied and padded.

Source of the contract: `mega_moe_pre_dispatch` and `mega_moe_pre_dispatch_sm90` of `sgl-deep-gemm` 0.1.7, bit for bit.
One launch on the current stream; on CPU tensors without Triton's interpreter, the reference.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megamoe.backends.base import UnsupportedError
from megamoe.backends.triton import device_unsupported_reason
from megamoe.deep_gemm.arguments import on_device
from megamoe.validation import check_choice, check_count, check_number, check_tensor

_KINDS = {"fp8xfp4": "mxfp8", "mxf4xmxf4": "mxfp4", "nvfp4xnvfp4": "nvfp4"}
_MX_GROUPS, _NV_GROUPS = (32, 64, 128), (16,)
_E4M3 = (torch.float8_e4m3fn, torch.int8)
_BYTES = (torch.int8, torch.uint8)


def mega_moe_pre_dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buf_x: torch.Tensor,
    buf_x_sf: torch.Tensor,
    buf_topk_idx: torch.Tensor,
    buf_topk_weights: torch.Tensor,
    num_tokens: int,
    group_size: int = 32,
    mma_type: str = "fp8xfp4",
    buf_x_scales: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> None:
    """Quantize n tokens for an SM100 kind into views of P ≥ n rows.

    x            BF16 [n, H], n = num_tokens; topk_idx int32 (int64 too) and topk_weights fp32 [n, K], contiguous
    buf_x        [P, H] float8_e4m3fn, or int8 as `SymmBuffer.x` is typed; FP4 kinds [P, H/2] int8 or uint8
    buf_x_sf     int32 [P, H/(4·group_size)], rows may be padded; scale byte g of a row at byte g
    buf_topk_idx, buf_topk_weights: int64 and fp32 [P, K], contiguous; rows from n on become −1 and +0.0
    group_size   columns per scale: 32, 64 or 128, NVFP4 16 (the layers read 32 and 16)
    buf_x_scales fp32 [≥ n], NVFP4's factor per token: needed there, refused elsewhere
    expert_scales fp32 [E], multiplied into the weight of every slot of that global id

    Rows from n on of buf_x, buf_x_sf and buf_x_scales are not touched. n = 0 only pads.
    """
    check_choice("mma_type", mma_type, tuple(_KINDS))
    nvfp4 = mma_type == "nvfp4xnvfp4"
    groups = _NV_GROUPS if nvfp4 else _MX_GROUPS
    if group_size not in groups:
        raise ValueError(f"group_size is {group_size!r}; {mma_type} allows {', '.join(map(str, groups))}")
    if nvfp4 != (buf_x_scales is not None):
        given, need = ("None", "required") if nvfp4 else ("given", "not allowed")
        raise ValueError(f"buf_x_scales is {given}; under {mma_type} it is {need}")
    stage(
        x, topk_idx, topk_weights, buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights, num_tokens,
        kind=_KINDS[mma_type], group=group_size, token_scale=buf_x_scales, expert_scales=expert_scales,
    )  # fmt: skip


def mega_moe_pre_dispatch_sm90(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buf_x: torch.Tensor,
    buf_x_sf: torch.Tensor,
    buf_topk_idx: torch.Tensor,
    buf_topk_weights: torch.Tensor,
    num_tokens: int,
    group_size: int = 128,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Quantize n tokens to E4M3 with an fp32 scale per 128 columns, and multiply every weight by the factor.

    As `mega_moe_pre_dispatch`, with buf_x_sf fp32 [P, H/128] and group_size 128. On every architecture.
    """
    if group_size != 128:
        raise ValueError(f"group_size is {group_size!r}; allowed: 128")
    stage(
        x, topk_idx, topk_weights, buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights, num_tokens,
        kind="fp8_block128", group=128,
        factor=check_number("routed_scaling_factor", routed_scaling_factor, "a finite number"),
    )  # fmt: skip


def stage(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buf_x: torch.Tensor,
    buf_x_sf: torch.Tensor,
    buf_topk_idx: torch.Tensor,
    buf_topk_weights: torch.Tensor,
    num_tokens: int,
    *,
    kind: str,
    group: int,
    amax_floor: float | None = None,
    token_scale: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    factor: float | None = None,
) -> None:
    """Check upstream's arguments under their names and write the views; `kind` is `kernels.pre_dispatch`'s."""
    check_tensor("x", x, dtypes=(torch.bfloat16,), rank=2, axes="[n, H]")
    tokens, hidden = x.shape
    if check_count("num_tokens", num_tokens, 0) != tokens:
        raise ValueError(f"num_tokens is {num_tokens}; x has {tokens} rows")
    per_word = 1 if kind == "fp8_block128" else 4
    if hidden == 0 or hidden % (group * per_word):
        raise ValueError(f"x has {hidden} columns; scales per {group} columns ask for multiples of {group * per_word}")
    fp4 = kind in ("mxfp4", "nvfp4")
    _with_x("buf_x", buf_x, x, _BYTES if fp4 else _E4M3, "[P, H]", rank=2)
    rows = buf_x.shape[0]
    if buf_x.shape[1] != (hidden // 2 if fp4 else hidden) or rows < tokens:
        width = hidden // 2 if fp4 else hidden
        raise ValueError(f"buf_x has shape {tuple(buf_x.shape)}; expected at least {tokens} rows of {width}")
    sf_dtype = torch.float32 if per_word == 1 else torch.int32
    sf_shape = (rows, hidden // (group * per_word))
    _with_x("buf_x_sf", buf_x_sf, x, (sf_dtype,), "[P, H/group words]", shape=sf_shape, layout="rows")
    _with_x("topk_idx", topk_idx, x, (torch.int32, torch.int64), "[n, K]", rank=2)
    top_k = topk_idx.shape[1]
    if topk_idx.shape[0] != tokens or top_k == 0:
        raise ValueError(f"topk_idx has shape {tuple(topk_idx.shape)}; expected ({tokens}, at least 1)")
    _with_x("topk_weights", topk_weights, x, (torch.float32,), "[n, K]", shape=(tokens, top_k))
    _with_x("buf_topk_idx", buf_topk_idx, x, (torch.int64,), "[P, K]", shape=(rows, top_k))
    _with_x("buf_topk_weights", buf_topk_weights, x, (torch.float32,), "[P, K]", shape=(rows, top_k))
    for name, tensor in (("buf_x_scales", token_scale), ("expert_scales", expert_scales)):
        if tensor is not None:
            _with_x(name, tensor, x, (torch.float32,), "[..]", rank=1)
    if token_scale is not None and token_scale.numel() < tokens:
        raise ValueError(f"buf_x_scales has {token_scale.numel()} elements; expected at least {tokens}")

    q = buf_x.view(torch.uint8 if fp4 else torch.float8_e4m3fn)
    sf = buf_x_sf if per_word == 1 else buf_x_sf.view(torch.uint8)
    options = dict(kind=kind, group=group, amax_floor=amax_floor, expert_scales=expert_scales)
    reason = _unsupported_reason(x.device)
    if reason is None:
        from megamoe.kernels.pre_dispatch import pre_dispatch

        pre_dispatch(
            x, topk_idx, topk_weights, q=q, sf=sf, ids_out=buf_topk_idx, weights_out=buf_topk_weights,
            token_scale=token_scale, routed_scaling_factor=factor, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        return
    if x.device.type != "cpu":
        raise UnsupportedError(reason)
    from megamoe.oracle.reference import pre_dispatch_reference

    result = pre_dispatch_reference(
        x, topk_idx, topk_weights, rows=rows, routed_scaling_factor=factor, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    q[:tokens].view(torch.uint8).copy_(result.x.q.view(torch.uint8))
    assert result.x.sf is not None  # every kind here has scales
    sf[:tokens].copy_(result.x.sf)
    if token_scale is not None and result.x.token_scale is not None:
        token_scale[:tokens].copy_(result.x.token_scale)
    buf_topk_idx.copy_(result.ids)
    buf_topk_weights.copy_(result.weights)


def _with_x(name: str, value: object, x: torch.Tensor, *rules: Any, **more: Any) -> torch.Tensor:
    return on_device(name, value, x.device, *rules, owner="x", **more)


def _unsupported_reason(device: torch.device) -> str | None:
    """`device_unsupported_reason`, looked up once per GPU; on the CPU it depends on the interpreter's state."""
    return device_unsupported_reason(device) if device.type == "cpu" else _gpu_unsupported_reason(device)


@functools.cache
def _gpu_unsupported_reason(device: torch.device) -> str | None:
    return device_unsupported_reason(device)
