"""The pre-dispatch: BF16 tokens to quantized rows and block scales, routing to int64 ids and fp32 weights; one launch.

Contract: DeepGEMM MegaMoE of `sgl-deep-gemm` 0.1.7, `mega_moe_pre_dispatch` and `mega_moe_pre_dispatch_sm90`, bit for
bit, NaN and Inf included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.numerics import (
    e2m1_code_ties_to_zero,
    e4m3_to_f32,
    f32_to_e4m3,
    ue8m0_ceil,
    ue8m0_inverse,
)

E4M3_MAX = tl.constexpr(448.0)
E2M1_MAX = tl.constexpr(6.0)
NVFP4_RANGE = tl.constexpr(2688.0)  # 448 · 6: the largest UE4M3 scale times the largest E2M1 magnitude


@dataclass(frozen=True)
class Kind:
    """One quantization: bytes per row and group sizes. `columns_per_byte` is 2 for packed E2M1."""

    columns_per_byte: int
    groups: tuple[int, ...]
    scale_dtype: torch.dtype
    amax_floor: float
    token_scale: bool = False


KINDS = {
    "mxfp8": Kind(1, (32, 64, 128), torch.uint8, 1e-4),
    "mxfp4": Kind(2, (32, 64, 128), torch.uint8, 1e-4),
    "nvfp4": Kind(2, (16,), torch.uint8, 1e-4, token_scale=True),
    "fp8_block128": Kind(1, (128,), torch.float32, 1e-10),
}
MAX_HIDDEN = 16384
_ROUTING_BLOCK = 1024  # ids per program that copies routing
_TILE = 4096  # elements per program where rows are cut freely


@triton.jit
def _pack_e2m1(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes [ROWS, COLUMNS] → bytes [ROWS, COLUMNS / 2], low nibble = even column."""
    even, odd = tl.split(tl.reshape(codes, (ROWS, COLUMNS // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def _copy_routing(
    topk_ids, topk_weights, expert_scales, ids_out, weights_out, first, num_tokens, num_rows, num_experts, factor,
    TOP_K: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries [first, first + BLOCK) of the flat [P, K] ids and weights; −1 and +0.0 in rows beyond the tokens."""
    entry = first.to(tl.int64) + tl.arange(0, BLOCK)
    live = entry < num_tokens.to(tl.int64) * TOP_K
    expert = tl.load(topk_ids + entry, mask=live, other=-1).to(tl.int64)
    weight = tl.load(topk_weights + entry, mask=live, other=0.0)
    if HAS_SCALES:
        known = live & (expert >= 0) & (expert < num_experts)
        scale = tl.load(expert_scales + expert, mask=known, other=0.0)
        weight = tl.where(known, weight * scale, weight)
    if HAS_FACTOR:
        weight = tl.where(live, weight * factor, 0.0)
    inside = entry < num_rows.to(tl.int64) * TOP_K
    tl.store(ids_out + entry, expert, mask=inside)
    tl.store(weights_out + entry, weight, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_experts"])
def pre_dispatch_kernel(
    x, topk_ids, topk_weights, expert_scales, q, sf, token_scale, ids_out, weights_out,
    num_tokens, num_rows, num_experts, amax_floor, factor,
    H: tl.constexpr, X_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, SF_STRIDE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr,
    TOP_K: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_FACTOR: tl.constexpr, ROUTING_BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantizing programs first, then programs that copy ids and weights and fill their pad rows.

    A quantizing program takes GROUPS_PER_PROGRAM consecutive scale groups of the flat (token, group) order, so that no
    lane idles whatever H is; NVFP4's outer scale needs the whole row, so there a program is a row, padded to a power
    of two. Safe: programs write disjoint ranges and read only inputs.
    """
    GROUPS: tl.constexpr = H // GROUP
    PACKED: tl.constexpr = 2 if KIND == "mxfp4" or KIND == "nvfp4" else 1
    pid = tl.program_id(0)
    if KIND == "nvfp4":
        programs = num_tokens
    else:
        programs = tl.cdiv(num_tokens * GROUPS, GROUPS_PER_PROGRAM)
    if pid >= programs:
        if TOP_K > 0:
            _copy_routing(
                topk_ids, topk_weights, expert_scales, ids_out, weights_out, (pid - programs) * ROUTING_BLOCK,
                num_tokens, num_rows, num_experts, factor, TOP_K, HAS_SCALES, HAS_FACTOR, ROUTING_BLOCK,
            )  # fmt: skip
    else:
        lane = tl.arange(0, GROUPS_PER_PROGRAM)
        column = tl.arange(0, GROUP)
        byte = tl.arange(0, GROUP // PACKED)
        if KIND == "nvfp4":
            row = pid.to(tl.int64)
            live = lane < GROUPS
            x_at = x + row * X_STRIDE + lane * GROUP
            q_at = q + row * Q_STRIDE + lane * (GROUP // PACKED)
            sf_at = sf + row * SF_STRIDE + lane
        else:
            index = pid * GROUPS_PER_PROGRAM + lane
            live = index < num_tokens * GROUPS
            rows = (index // GROUPS).to(tl.int64)
            group = index % GROUPS
            x_at = x + (rows * X_STRIDE + group * GROUP)
            q_at = q + (rows * Q_STRIDE + group * (GROUP // PACKED))
            sf_at = sf + (rows * SF_STRIDE + group)
        v = tl.load(x_at[:, None] + column[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        amax = tl.max(tl.abs(v), axis=1)
        if KIND == "nvfp4":
            outer = tl.div_rn(tl.maximum(tl.max(amax, axis=0), amax_floor), NVFP4_RANGE)
            tl.store(token_scale + row, outer)
            scale = f32_to_e4m3(tl.div_rn(amax, 6.0 * outer + tl.zeros_like(amax)))
            decoded = e4m3_to_f32(scale)
            inverse = tl.where(decoded > 0, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), decoded * outer), 0.0)
            tl.store(sf_at, scale.to(tl.uint8, bitcast=True), mask=live)
        elif KIND == "fp8_block128":
            scale = tl.div_rn(tl.maximum(amax, amax_floor), E4M3_MAX)
            inverse = tl.div_rn(1.0, scale)
            tl.store(sf_at, scale, mask=live)
        else:
            limit: tl.constexpr = E2M1_MAX if KIND == "mxfp4" else E4M3_MAX
            scale = ue8m0_ceil(tl.div_rn(tl.maximum(amax, amax_floor), limit), 1, 254)
            inverse = ue8m0_inverse(scale)
            tl.store(sf_at, scale.to(tl.uint8), mask=live)
        scaled = v * inverse[:, None]
        if PACKED == 2:
            out = _pack_e2m1(e2m1_code_ties_to_zero(scaled), GROUPS_PER_PROGRAM, GROUP)
        else:
            out = f32_to_e4m3(scaled)
        tl.store(q_at[:, None] + byte[None, :], out, mask=live[:, None])


def pre_dispatch(
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
    group: int | None = None,
    amax_floor: float | None = None,
    expert_scales: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
) -> None:
    """Quantize x and copy the routing of n tokens into buffers of P ≥ n rows. One launch; none when P = 0.

    x             BF16 [n, H], rows may be strided; H a multiple of the group, at most 16384
    topk_ids      int32 or int64 [n, K], contiguous, copied verbatim; topk_weights fp32 [n, K], contiguous
    q             float8_e4m3fn [P, H], or uint8/int8 [P, H/2] (low nibble = even column) for the E2M1 kinds
    sf            uint8 [P, ≥ H/group], or fp32 for "fp8_block128"; columns beyond H/group are not written
    ids_out       int64 [P, K], weights_out fp32 [P, K], contiguous; rows n … P−1 become −1 and +0.0
    token_scale   fp32 [≥ n], contiguous; for "nvfp4" only
    kind          "mxfp8", "mxfp4" (group 32, the default, 64 or 128), "nvfp4" (16), "fp8_block128" (128)
    amax_floor    least amax of a group (of a row under "nvfp4"), ≥ 0; None: 1e-4, and 1e-10 for "fp8_block128"
    expert_scales fp32 [E], contiguous: a weight becomes weight · expert_scales[id], ids outside [0, E) keep theirs
    routed_scaling_factor: multiplies every weight, after expert_scales

    Rows n … P−1 of q, sf and token_scale are not touched. Offending arguments raise `TypeError` (dtype) or `ValueError`
    before anything is written. Contract: `sgl-deep-gemm` 0.1.7; there only "fp8_block128" has the factor and only the
    other kinds have expert_scales.
    """
    spec, group, floor = _check_quantization(x, q, sf, token_scale, kind, group, amax_floor)
    tokens, rows, top_k = x.shape[0], q.shape[0], _check_routing(x, topk_ids, topk_weights, q, ids_out, weights_out)
    if expert_scales is not None:
        _check("expert_scales", expert_scales, x.device, (torch.float32,), rank=1, contiguous=True)
    factor = 1.0
    if routed_scaling_factor is not None:
        factor = _finite("routed_scaling_factor", routed_scaling_factor)
    _launch(
        x, q, sf, token_scale, kind, group, floor, tokens, rows,
        routing=(topk_ids, topk_weights, ids_out, weights_out), top_k=top_k,
        expert_scales=expert_scales, factor=factor, has_factor=routed_scaling_factor is not None,
    )  # fmt: skip


def quantize(
    x: torch.Tensor,
    *,
    q: torch.Tensor,
    sf: torch.Tensor,
    token_scale: torch.Tensor | None = None,
    kind: str,
    group: int | None = None,
    amax_floor: float | None = None,
) -> None:
    """The same kernel without routing: rows 0 … n−1 of q, sf and token_scale. None launched when n = 0."""
    spec, group, floor = _check_quantization(x, q, sf, token_scale, kind, group, amax_floor)
    _launch(
        x, q, sf, token_scale, kind, group, floor, x.shape[0], 0,
        routing=None, top_k=0, expert_scales=None, factor=1.0, has_factor=False,
    )  # fmt: skip


def _launch(
    x: torch.Tensor, q: torch.Tensor, sf: torch.Tensor, token_scale: torch.Tensor | None,
    kind: str, group: int, floor: float, tokens: int, rows: int, *,
    routing: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None, top_k: int,
    expert_scales: torch.Tensor | None, factor: float, has_factor: bool,
) -> None:  # fmt: skip
    hidden = x.shape[1]
    groups_per_program, num_warps = _tile(kind, hidden, group)
    programs = tokens if kind == "nvfp4" else triton.cdiv(tokens * (hidden // group), groups_per_program)
    programs += triton.cdiv(rows * top_k, _ROUTING_BLOCK)
    if programs == 0:
        return
    # Without routing the kernel has no code that reads these.
    ids, weights, ids_out, weights_out = routing or (sf, sf, sf, sf)
    with torch.cuda.device_of(x):
        pre_dispatch_kernel[(programs,)](
            x, ids, weights, sf if expert_scales is None else expert_scales,
            q if kind in ("mxfp8", "fp8_block128") else q.view(torch.uint8), sf,
            sf if token_scale is None else token_scale, ids_out, weights_out,
            tokens, rows, 0 if expert_scales is None else expert_scales.numel(), floor, factor,
            H=hidden, X_STRIDE=x.stride(0), Q_STRIDE=q.stride(0), SF_STRIDE=sf.stride(0),
            KIND=kind, GROUP=group, GROUPS_PER_PROGRAM=groups_per_program,
            TOP_K=top_k, HAS_SCALES=expert_scales is not None, HAS_FACTOR=has_factor, ROUTING_BLOCK=_ROUTING_BLOCK,
            num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip


def _tile(kind: str, hidden: int, group: int) -> tuple[int, int]:
    """Scale groups per program, and warps: 32 elements a thread, which is four 16-byte loads in flight."""
    if kind != "nvfp4":
        return _TILE // group, 4
    width = triton.next_power_of_2(hidden)
    return width // group, max(1, min(16, width // 1024))


def _check_quantization(
    x: torch.Tensor,
    q: torch.Tensor,
    sf: torch.Tensor,
    token_scale: torch.Tensor | None,
    kind: str,
    group: int | None,
    amax_floor: float | None,
) -> tuple[Kind, int, float]:
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(map(repr, KINDS))}")
    spec = KINDS[kind]
    group = spec.groups[0] if group is None else group
    if group not in spec.groups:
        raise ValueError(f"group is {group!r}; {kind} allows {', '.join(map(str, spec.groups))}")
    _check("x", x, x.device, (torch.bfloat16,), rank=2)
    tokens, hidden = x.shape
    if hidden == 0 or hidden % group or hidden > MAX_HIDDEN:
        raise ValueError(f"x has {hidden} columns; allowed: multiples of the group {group} up to {MAX_HIDDEN}")
    elements = (torch.float8_e4m3fn,) if spec.columns_per_byte == 1 else (torch.uint8, torch.int8)
    _check("q", q, x.device, elements, rank=2)
    if q.shape[0] < tokens or q.shape[1] != hidden // spec.columns_per_byte:
        raise ValueError(
            f"q has shape {list(q.shape)}; expected [at least {tokens}, {hidden // spec.columns_per_byte}]"
        )
    _check("sf", sf, x.device, (spec.scale_dtype,), rank=2)
    if sf.shape[0] < tokens or sf.shape[1] < hidden // group:
        raise ValueError(f"sf has shape {list(sf.shape)}; expected at least [{tokens}, {hidden // group}]")
    for name, written in (("q", q), ("sf", sf)):
        if written.shape[0] > 1 and written.stride(0) < written.shape[1]:
            raise ValueError(f"{name} has row stride {written.stride(0)}; rows must not overlap")
    if (token_scale is not None) != spec.token_scale:
        need = "required" if spec.token_scale else "not allowed"
        raise ValueError(f"token_scale is {'None' if token_scale is None else 'given'}; for {kind} it is {need}")
    if token_scale is not None:
        _check("token_scale", token_scale, x.device, (torch.float32,), rank=1, contiguous=True)
        if token_scale.numel() < tokens:
            raise ValueError(f"token_scale has {token_scale.numel()} elements; expected at least {tokens}")
    floor = spec.amax_floor
    if amax_floor is not None:
        floor = _finite("amax_floor", amax_floor)
        if floor < 0:
            raise ValueError(f"amax_floor is {amax_floor!r}; allowed: None or a finite number >= 0")
    return spec, group, floor


def _check_routing(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    q: torch.Tensor,
    ids_out: torch.Tensor,
    weights_out: torch.Tensor,
) -> int:
    _check("topk_ids", topk_ids, x.device, (torch.int32, torch.int64), rank=2, contiguous=True)
    tokens, top_k = x.shape[0], topk_ids.shape[1]
    if topk_ids.shape[0] != tokens or top_k == 0:
        raise ValueError(f"topk_ids has shape {list(topk_ids.shape)}; expected [{tokens}, at least 1]")
    expected = {
        "topk_weights": (topk_weights, torch.float32, tokens),
        "ids_out": (ids_out, torch.int64, q.shape[0]),
        "weights_out": (weights_out, torch.float32, q.shape[0]),
    }
    for name, (tensor, dtype, rows) in expected.items():
        _check(name, tensor, x.device, (dtype,), rank=2, contiguous=True)
        if tuple(tensor.shape) != (rows, top_k):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{rows}, {top_k}]")
    return top_k


def _check(
    name: str,
    tensor: torch.Tensor,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    *,
    rank: int,
    contiguous: bool = False,
) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {' or '.join(map(str, dtypes))}")
    if tensor.ndim != rank:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {rank} dimensions")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; x is on {device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has column stride {tensor.stride(-1)}; it must be 1")


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; allowed: None or a finite number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; allowed: None or a finite number")
    return float(value)


def compile_jobs(arch: int) -> list[CompileJob]:
    """Launches for DeepSeek-V4-Flash and -Pro rows, one per kind, with everything the routing can ask for."""
    return [_compile_job(kind, hidden) for kind in KINDS for hidden in (4096, 7168)]


def _compile_job(kind: str, hidden: int) -> CompileJob:
    spec = KINDS[kind]
    group = spec.groups[0]
    groups_per_program, num_warps = _tile(kind, hidden, group)
    scale = "*fp32" if spec.scale_dtype == torch.float32 else "*u8"
    signature = {
        "x": "*bf16", "topk_ids": "*i32", "topk_weights": "*fp32", "expert_scales": "*fp32",
        "q": "*u8" if spec.columns_per_byte == 2 else "*fp8e4nv", "sf": scale,
        "token_scale": "*fp32" if spec.token_scale else scale, "ids_out": "*i64", "weights_out": "*fp32",
        "num_tokens": "i32", "num_rows": "i32", "num_experts": "i32", "amax_floor": "fp32", "factor": "fp32",
    }  # fmt: skip
    return CompileJob(
        name=f"pre_dispatch/{kind}/{hidden}",
        kernel="pre_dispatch",
        recipe=kind,
        fn=pre_dispatch_kernel,
        signature=signature,
        constexprs=dict(
            H=hidden, X_STRIDE=hidden, Q_STRIDE=hidden // spec.columns_per_byte, SF_STRIDE=hidden // group,
            KIND=kind, GROUP=group, GROUPS_PER_PROGRAM=groups_per_program,
            TOP_K=8, HAS_SCALES=True, HAS_FACTOR=True, ROUTING_BLOCK=_ROUTING_BLOCK,
        ),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
        divisible_by_16=frozenset(name for name, kind in signature.items() if kind.startswith("*")),
    )  # fmt: skip
