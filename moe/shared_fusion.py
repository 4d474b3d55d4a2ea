"""Shared experts among the routed ones: whether that is possible, which weights they then have, which slot names them.

DeepSeek's checkpoints keep the shared expert in E4M3 with one scale per 128×128 block beside MXFP4 experts. Fused, it
takes one of two forms:

- E4M3 + UE8M0/32 (`expand_block_scales`), without loss where the block scales are powers of two: what `mega_moe` takes
  as shared_w13 and shared_w2 beside `fp8xfp4` experts.
- MXFP4 (`quantize_block_fp8_weight_to_mxfp4`), SGLang's fused slot: the format of the routed experts, at about 12 %
  relative RMS error of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe import validation
from megamoe.backends.triton import device_unsupported_reason
from megamoe.oracle.reference.mxfp4_requant import GROUP, mxfp4_requant_reference

FORMATS = ("e2m1", "e4m3", "bf16")
"""Elements of expert weights, the coarsest first."""
SCALED = ("output", "topk")
_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)


def quantize_block_fp8_weight_to_mxfp4(
    fp8_weight: torch.Tensor,
    fp8_scale: torch.Tensor,
    weight_block_size: Sequence[int] = validation.BLOCK,
    mxfp4_block_size: int = GROUP,
    *,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-scaled FP8 to MXFP4: (int8 [N, K/2], two E2M1 each; float8_e8m0fnu [N, K/32]).

    fp8_weight float8_e4m3fn [N, K], rows contiguous; fp8_scale float32 or float8_e8m0fnu [⌈N/r⌉, ⌈K/c⌉], what elements
    of a block of r × c = weight_block_size are multiplied by; c and K are multiples of 32. On one device; one launch
    where the kernels run, else plain torch with the same bytes.

    Bytes are those of SGLang 0.5.19's function of this name: low nibble = even column, bit 3 = sign, scale byte = 127 +
    exponent, ties to the smaller magnitude, and zeros have code 8. Its exponent comes from a BF16 logarithm, which may
    be one less than ⌈log2(amax/6)⌉ where amax/6 is just above a power of two: by up to 0.8 % for exponents of −5 … −8,
    1.6 % for −9 … −16, 3.9 % for −17 … −32. The largest values of such a group saturate at 6. `exact=True` rounds
    nothing to BF16 and takes that exponent as it is; all else is the same. A group with a NaN or an infinity gets scale
    byte 255, NaN; upstream leaves that undefined.

    Raises `TypeError`/`ValueError` naming the argument.
    """
    block = _check_blocks(fp8_weight, fp8_scale, weight_block_size)
    if mxfp4_block_size != GROUP:
        raise ValueError(f"mxfp4_block_size is {mxfp4_block_size!r}; allowed: {GROUP}, MXFP4's")
    validation.check_flag("exact", exact)
    scale = fp8_scale.float().contiguous()
    if device_unsupported_reason(fp8_weight.device) is None:
        from megamoe.kernels.mxfp4_requant import mxfp4_requant as requant
    else:
        requant = mxfp4_requant_reference
    q, sf = requant(fp8_weight, scale, block, exact=exact)
    return q.view(torch.int8), sf.view(torch.float8_e8m0fnu)


def expand_block_scales(
    fp8_weight: torch.Tensor, fp8_scale: torch.Tensor, weight_block_size: Sequence[int] = validation.BLOCK
) -> torch.Tensor:
    """UE8M0 bytes uint8 [N, K/32] that mean the same as block scales; the E4M3 elements stay as they are.

    Arguments as in `quantize_block_fp8_weight_to_mxfp4`. Every scale must be a power of two, 2^-127 … 2^127, as in
    checkpoints whose scale format is UE8M0: anything else raises `ValueError` naming the first that is none, since it
    could not be expanded without loss. Reads the scales, so it waits for a GPU.
    """
    block = _check_blocks(fp8_weight, fp8_scale, weight_block_size)
    rows, columns = fp8_weight.shape
    if fp8_scale.dtype == torch.float8_e8m0fnu:
        encoded, wrong = fp8_scale.view(torch.uint8), fp8_scale.view(torch.uint8) == 255
    else:
        mantissa, exponent = torch.frexp(fp8_scale)
        byte = exponent + 126
        wrong = (mantissa != 0.5) | (byte < 0) | (byte > 254)
        encoded = byte.to(torch.uint8)
    if bool(wrong.any()):
        where = tuple(int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"fp8_scale has {float(fp8_scale[where]):g} at {list(where)}; allowed: powers of two, 2^-127 … 2^127 "
            "(other scales take weights of another format: quantize_block_fp8_weight_to_mxfp4)"
        )
    per_row = encoded.repeat_interleave(block[0], 0)[:rows]
    return per_row.repeat_interleave(block[1] // GROUP, 1)[:, : columns // GROUP].contiguous()


def shared_fusion_unsupported_reason(
    *,
    n_shared_experts: int,
    routed_format: str,
    shared_format: str,
    weight_block_size: Sequence[int] | None,
    asked_for: bool,
    ep_size: int = 1,
    per_rank_slots: bool = False,
    exactly_one: bool = True,
) -> str | None:
    """Why a model's shared experts cannot take slots among its routed ones, or None. Asked before any weight is loaded.

    n_shared_experts: as the model's config has it. routed_format, shared_format: elements in the checkpoint, "e2m1",
    "e4m3" or "bf16". weight_block_size: rows × columns of one FP8 scale, None without block scales. asked_for: whether
    the operator asked for fusion (SGLang: --enforce-shared-experts-fusion). ep_size: ranks that share the experts;
    per_rank_slots: every one of them has slots for shared experts of its own. exactly_one: whether the engine fuses no
    other number than one (SGLang for DeepSeek-V4).

    Raises `TypeError`/`ValueError` for arguments that are not such.
    """
    validation.check_count("n_shared_experts", n_shared_experts, 0)
    validation.check_count("ep_size", ep_size, 1)
    for name, value in (("routed_format", routed_format), ("shared_format", shared_format)):
        validation.check_choice(name, value, FORMATS)
    for name, flag in (("asked_for", asked_for), ("per_rank_slots", per_rank_slots), ("exactly_one", exactly_one)):
        validation.check_flag(name, flag)
    block = None if weight_block_size is None else _check_block(weight_block_size)
    if n_shared_experts == 0:
        return "n_shared_experts=0: there is no shared expert"
    if shared_format != routed_format:
        if (routed_format, shared_format) != ("e2m1", "e4m3"):
            return (
                f"shared experts in {shared_format} beside routed ones in {routed_format}: "
                "only e4m3 beside e2m1 can be brought into one launch"
            )
        if block is None:
            return "shared experts in e4m3 without weight_block_size: only block scales can be converted"
        if block[1] % GROUP:
            return f"weight_block_size={block}: its columns are no multiple of {GROUP}, MXFP4's group"
    if ep_size > 1 and not per_rank_slots:
        return f"ep_size={ep_size} without per-rank shared slots: one id for all ranks belongs to none of their ranges"
    if not asked_for:
        return "fusion was not asked for, and it changes results"
    if exactly_one and n_shared_experts != 1:
        return f"n_shared_experts={n_shared_experts}: the engine fuses exactly one"
    return None


def append_shared_slots(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    num_experts: int,
    num_shared_experts: int = 1,
    routed_scaling_factor: float = 1.0,
    scaled: str = "output",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing [T, K] with a slot more per shared expert, last: ids num_experts + s, and their weights.

    For `trtllm_gen` layers, whose shared experts are experts that ids name. topk_ids int32 or int64; topk_weights
    float32. A token whose ids are all negative (padding) gets −1. `scaled` says where the routed_scaling_factor f is
    applied, which decides the shared weight:

    - "output": to the layer's output, f·(Σ routed + 1/f·shared): weight 1/f.
    - "topk": to the routed weights before this call: weight 1.

    New tensors; no host sync. Raises `TypeError`/`ValueError` naming the argument.
    """
    ids = validation.check_tensor("topk_ids", topk_ids, dtypes=validation.ID_DTYPES, rank=2, axes="[T, K]")
    validation.check_tensor(
        "topk_weights", topk_weights, dtypes=(torch.float32,), shape=tuple(ids.shape), axes="[T, K]", device=ids.device
    )
    validation.check_count("num_experts", num_experts, 1)
    validation.check_count("num_shared_experts", num_shared_experts, 1)
    validation.check_choice("scaled", scaled, SCALED)
    factor = validation.check_number("routed_scaling_factor", routed_scaling_factor, "a finite number above 0")
    if not 0 < factor < float("inf"):
        raise ValueError(f"routed_scaling_factor is {factor}; allowed: a finite number above 0")
    shared = num_experts + torch.arange(num_shared_experts, dtype=ids.dtype, device=ids.device)
    padding = (ids < 0).all(1, keepdim=True)
    weight = topk_weights.new_full((1, 1), 1.0 if scaled == "topk" else 1.0 / factor)
    return (
        torch.cat([ids, torch.where(padding, -1, shared)], dim=1),
        torch.cat([topk_weights, weight.expand(len(ids), num_shared_experts)], dim=1),
    )


def _check_blocks(weight: torch.Tensor, scale: torch.Tensor, weight_block_size: Sequence[int]) -> tuple[int, int]:
    block = _check_block(weight_block_size)
    if block[1] % GROUP:
        raise ValueError(f"weight_block_size is {block}; its columns must be a multiple of {GROUP}, MXFP4's group")
    validation.check_tensor("fp8_weight", weight, dtypes=(torch.float8_e4m3fn,), rank=2, axes="[N, K]")
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"fp8_weight has K = {columns} columns; allowed: a multiple of {GROUP}")
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    validation.check_tensor(
        "fp8_scale", scale, dtypes=_SCALE_DTYPES, shape=shape, axes=f"[N/{block[0]}, K/{block[1]}]",
        device=weight.device, layout="any",
    )  # fmt: skip
    return block


def _check_block(value: Sequence[int]) -> tuple[int, int]:
    """As a pair of positive ints; lists come from JSON configs."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"weight_block_size is {value!r}; allowed: two ints, rows and columns of a block")
    return (
        validation.check_count("weight_block_size[0]", value[0], 1),
        validation.check_count("weight_block_size[1]", value[1], 1),
    )
