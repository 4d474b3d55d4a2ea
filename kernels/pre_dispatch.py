"""The pre-dispatch: BF16 tokens to quantized rows and scales, routing to int64 ids and fp32 weights.

Contract: DeepGEMM MegaMoE of `sgl-deep-gemm` 0.1.7, `mega_moe_pre_dispatch` and `mega_moe_pre_dispatch_sm90`,
bit for bit, NaN and Inf included. One launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.kernels.block_quantizers import quantize_e4m3, quantize_mxfp4, quantize_nvfp4


@dataclass(frozen=True)
class Kind:
    """One quantization.

    elements_per_byte is 2 for packed E2M1; amax_floor is the default, least_floor the smallest allowed: zeros alone
    have a UE8M0 scale without a floor, but an fp32 scale of 0 would have no reciprocal.
    """

    elements_per_byte: int
    groups: tuple[int, ...]
    scale_dtype: torch.dtype
    amax_floor: float
    least_floor: float = 0.0
    token_scale: bool = False

    @property
    def element_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float8_e4m3fn,) if self.elements_per_byte == 1 else (torch.uint8, torch.int8)


KINDS = {
    "mxfp8": Kind(1, (32, 64, 128), torch.uint8, 1e-4),
    "mxfp4": Kind(2, (32, 64, 128), torch.uint8, 1e-4),
    "nvfp4": Kind(2, (16,), torch.uint8, 1e-4, least_floor=1e-30, token_scale=True),
    "fp8_block128": Kind(1, (128,), torch.float32, 1e-10, least_floor=1e-30),
}
MAX_HIDDEN = 16384
MAX_ELEMENTS = 2**34
"""Of x; scale units are counted in int32, elements are addressed in int64."""
MAX_ROUTES = 2**30

_ROUTING_BLOCK = 1024  # entries per program that copies routing: 8 per thread
_TILE = 4096  # elements per program where rows are cut freely: 32 per thread, four 16-byte loads in flight


@triton.jit
def _copy_routing(
    topk_ids, topk_weights, expert_scales, ids_out, weights_out,
    block, num_tokens, num_rows, num_experts, factor,
    TOP_K: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries block·BLOCK … of the flat [P, K] ids and weights; −1 and +0.0 in rows beyond the tokens."""
    entry = block * BLOCK + tl.arange(0, BLOCK)
    live = entry < num_tokens * TOP_K
    expert = tl.load(topk_ids + entry, mask=live, other=-1).to(tl.int64)
    weight = tl.load(topk_weights + entry, mask=live, other=0.0)
    if HAS_SCALES:
        known = (expert >= 0) & (expert < num_experts)
        scale = tl.load(expert_scales + expert, mask=known, other=1.0)
        weight = tl.where(known, weight * scale, weight)
    if HAS_FACTOR:
        weight = tl.where(live, weight * factor, 0.0)  # the pads' +0 stays +0 under a negative factor
    inside = entry < num_rows * TOP_K
    tl.store(ids_out + entry, expert, mask=inside)
    tl.store(weights_out + entry, weight, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_experts"])
def pre_dispatch_kernel(
    x, topk_ids, topk_weights, expert_scales, q, sf, token_scale, ids_out, weights_out,
    num_tokens, num_rows, num_experts, amax_floor, factor,
    H: tl.constexpr, X_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, SF_STRIDE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    TOP_K: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_FACTOR: tl.constexpr, ROUTING_BLOCK: tl.constexpr,
):  # fmt: skip
    """Contract: `pre_dispatch`. Grid: programs that quantize, then (TOP_K > 0) programs that copy routing.

    Schedule. A quantizing program takes GROUPS scale groups (`block_quantizers`), a copying one ROUTING_BLOCK
    entries of the flat [P, K] ids and weights, so that thousands of pad rows cost a few programs. Safe: programs
    write disjoint ranges and read only inputs.
    """
    pid = tl.program_id(0)
    programs = num_tokens if KIND == "nvfp4" else tl.cdiv(num_tokens * (H // GROUP), GROUPS)
    if pid >= programs:
        if TOP_K > 0:
            _copy_routing(
                topk_ids, topk_weights, expert_scales, ids_out, weights_out,
                pid - programs, num_tokens, num_rows, num_experts, factor,
                TOP_K, HAS_SCALES, HAS_FACTOR, ROUTING_BLOCK,
            )  # fmt: skip
    elif KIND == "mxfp8" or KIND == "fp8_block128":
        quantize_e4m3(
            x, q, sf, pid, num_tokens, amax_floor,
            H, X_STRIDE, Q_STRIDE, SF_STRIDE, GROUP, GROUPS, KIND == "mxfp8",
        )  # fmt: skip
    elif KIND == "mxfp4":
        quantize_mxfp4(
            x, q.to(tl.pointer_type(tl.int32)), sf, pid, num_tokens, amax_floor,
            H, X_STRIDE, Q_STRIDE // 4, SF_STRIDE, GROUP, GROUPS,
        )  # fmt: skip
    else:
        quantize_nvfp4(
            x, q.to(tl.pointer_type(tl.int32)), sf, token_scale, pid, amax_floor,
            H, X_STRIDE, Q_STRIDE // 4, SF_STRIDE, GROUPS,
        )  # fmt: skip


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
    q             float8_e4m3fn [P, H], or uint8/int8 [P, H/2] (low nibble = even column) for the E2M1 kinds,
                  whose rows start at multiples of 4 bytes
    sf            uint8 [P, ≥ H/group], or fp32 for "fp8_block128"; columns beyond H/group are not written
    ids_out       int64 [P, K], weights_out fp32 [P, K], contiguous; rows n … P−1 become −1 and +0.0
    token_scale   fp32 [≥ n], contiguous; for "nvfp4" and no other kind
    kind          "mxfp8", "mxfp4" (group 32, the default, 64 or 128), "nvfp4" (16), "fp8_block128" (128)
    amax_floor    least amax of a group (of a row under "nvfp4"); None: 1e-4, and 1e-10 for "fp8_block128".
                  At least 0 for the UE8M0 kinds, 1e-30 for the others: zeros alone need a scale
    expert_scales fp32 [E], contiguous: a weight becomes weight · expert_scales[id]; ids outside [0, E) keep
                  theirs
    routed_scaling_factor: multiplies every weight, after expert_scales

    Rows n … P−1 of q, sf and token_scale are not touched. Offending arguments raise `TypeError` (type, dtype) or
    `ValueError` before anything is written. Contract: `sgl-deep-gemm` 0.1.7, where only "fp8_block128" has the
    factor and only the other kinds have expert_scales.
    """
    quantization = _check_quantization(x, q, sf, token_scale, kind, group, amax_floor)
    _check_routing(x, topk_ids, topk_weights, q, ids_out, weights_out)
    if expert_scales is not None:
        _check("expert_scales", expert_scales, x.device, (torch.float32,), rank=1, contiguous=True)
    factor = None
    if routed_scaling_factor is not None:
        factor = _finite("routed_scaling_factor", routed_scaling_factor)
    routing = _Routing(topk_ids, topk_weights, ids_out, weights_out, expert_scales, factor)
    _launch(x, q, sf, token_scale, quantization, routing)


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
    """`pre_dispatch` without the routing: rows 0 … n−1 of q, sf and token_scale. No launch when n = 0."""
    quantization = _check_quantization(x, q, sf, token_scale, kind, group, amax_floor)
    _launch(x, q, sf, token_scale, quantization, None)


class _Quantization(NamedTuple):
    kind: str
    group: int
    amax_floor: float


class _Routing(NamedTuple):
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    ids_out: torch.Tensor
    weights_out: torch.Tensor
    expert_scales: torch.Tensor | None
    factor: float | None


def _launch(
    x: torch.Tensor,
    q: torch.Tensor,
    sf: torch.Tensor,
    token_scale: torch.Tensor | None,
    quantization: _Quantization,
    routing: _Routing | None,
) -> None:
    kind, group, amax_floor = quantization
    (tokens, hidden), rows = x.shape, q.shape[0]
    groups, num_warps = tile(kind, hidden, group)
    programs = tokens if kind == "nvfp4" else triton.cdiv(tokens * (hidden // group), groups)
    if routing is None:  # the kernel then has no code that reads these
        routing, top_k = _Routing(sf, sf, sf, sf, None, None), 0
    else:
        top_k = routing.topk_ids.shape[1]
        programs += triton.cdiv(rows * top_k, _ROUTING_BLOCK)
    if programs == 0:
        return
    scales, factor = routing.expert_scales, routing.factor
    with torch.cuda.device_of(x):
        pre_dispatch_kernel[(programs,)](
            x, routing.topk_ids, routing.topk_weights, sf if scales is None else scales,
            q, sf, sf if token_scale is None else token_scale, routing.ids_out, routing.weights_out,
            tokens, rows, 0 if scales is None else scales.numel(), amax_floor, 1.0 if factor is None else factor,
            H=hidden, X_STRIDE=x.stride(0), Q_STRIDE=q.stride(0), SF_STRIDE=sf.stride(0),
            KIND=kind, GROUP=group, GROUPS=groups,
            TOP_K=top_k, HAS_SCALES=scales is not None, HAS_FACTOR=factor is not None,
            ROUTING_BLOCK=_ROUTING_BLOCK, num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip


def tile(kind: str, hidden: int, group: int) -> tuple[int, int]:
    """Scale groups per program and warps per program.

    A row of NVFP4 gets one thread per four groups: fewer threads than elsewhere, because each of them repeats the
    division that makes the row's scale.
    """
    if kind != "nvfp4":
        return _TILE // group, 4
    groups = triton.next_power_of_2(hidden // group)
    return groups, max(1, groups // 128)


def _check_quantization(
    x: torch.Tensor,
    q: torch.Tensor,
    sf: torch.Tensor,
    token_scale: torch.Tensor | None,
    kind: str,
    group: int | None,
    amax_floor: float | None,
) -> _Quantization:
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(map(repr, KINDS))}")
    spec = KINDS[kind]
    group = spec.groups[0] if group is None else group
    if group not in spec.groups:
        raise ValueError(f"group is {group!r}; {kind} allows {', '.join(map(str, spec.groups))}")
    floor = spec.amax_floor if amax_floor is None else _finite("amax_floor", amax_floor)
    if floor < spec.least_floor:
        raise ValueError(f"amax_floor is {floor!r}; {kind} allows None or a finite number >= {spec.least_floor}")

    _check("x", x, None, (torch.bfloat16,), rank=2)
    tokens, hidden = x.shape
    if hidden == 0 or hidden % group or hidden > MAX_HIDDEN:
        raise ValueError(
            f"x has {hidden} columns; allowed: multiples of the group {group} from {group} to {MAX_HIDDEN}"
        )
    if x.numel() > MAX_ELEMENTS:
        raise ValueError(f"x has {x.numel()} elements; allowed: up to {MAX_ELEMENTS}")
    _check("q", q, x.device, spec.element_dtypes, rank=2, least_rows=tokens)
    width = hidden // spec.elements_per_byte
    if q.shape[1] != width:
        raise ValueError(f"q has shape {list(q.shape)}; expected [at least {tokens}, {width}]")
    if spec.elements_per_byte == 2 and (q.data_ptr() % 4 or q.stride(0) % 4):
        raise ValueError(f"q starts at {q.data_ptr():#x} with row stride {q.stride(0)}; allowed: multiples of 4 bytes")
    _check("sf", sf, x.device, (spec.scale_dtype,), rank=2, least_rows=tokens)
    if sf.shape[1] < hidden // group:
        raise ValueError(f"sf has shape {list(sf.shape)}; expected at least [{tokens}, {hidden // group}]")
    if (token_scale is not None) != spec.token_scale:
        given, need = ("given", "not allowed") if token_scale is not None else ("None", "required")
        raise ValueError(f"token_scale is {given}; for kind {kind!r} it is {need}")
    if token_scale is not None:
        _check("token_scale", token_scale, x.device, (torch.float32,), rank=1, least_rows=tokens, contiguous=True)
    return _Quantization(kind, group, floor)


def _check_routing(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    q: torch.Tensor,
    ids_out: torch.Tensor,
    weights_out: torch.Tensor,
) -> None:
    _check("topk_ids", topk_ids, x.device, (torch.int32, torch.int64), rank=2, contiguous=True)
    top_k = topk_ids.shape[1]
    if topk_ids.shape[0] != x.shape[0] or top_k == 0:
        raise ValueError(
            f"topk_ids has shape {list(topk_ids.shape)}; expected [{x.shape[0]}, at least 1], a row per row of x"
        )
    if q.shape[0] * top_k > MAX_ROUTES:
        raise ValueError(f"q has {q.shape[0]} rows of {top_k} routes each; allowed: {MAX_ROUTES} routes")
    expected = {
        "topk_weights": (topk_weights, torch.float32, x.shape[0]),
        "ids_out": (ids_out, torch.int64, q.shape[0]),
        "weights_out": (weights_out, torch.float32, q.shape[0]),
    }
    for name, (tensor, dtype, rows) in expected.items():
        _check(name, tensor, x.device, (dtype,), rank=2, contiguous=True)
        if tuple(tensor.shape) != (rows, top_k):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{rows}, {top_k}]")


def _check(
    name: str,
    tensor: torch.Tensor,
    device: torch.device | None,
    dtypes: tuple[torch.dtype, ...],
    *,
    rank: int,
    least_rows: int = 0,
    contiguous: bool = False,
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; allowed: a tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {' or '.join(map(str, dtypes))}")
    if tensor.ndim != rank or tensor.shape[0] < least_rows:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; expected {rank} dimensions and at least {least_rows} rows"
        )
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; x is on {device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has column stride {tensor.stride(-1)}; allowed: 1")
    if rank == 2 and name != "x" and tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise ValueError(f"{name} has row stride {tensor.stride(0)}; rows must not overlap")


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
    groups, num_warps = tile(kind, hidden, group)
    scale = "*fp32" if spec.scale_dtype == torch.float32 else "*u8"
    signature = {
        "x": "*bf16", "topk_ids": "*i32", "topk_weights": "*fp32", "expert_scales": "*fp32",
        "q": "*u8" if spec.elements_per_byte == 2 else "*fp8e4nv", "sf": scale,
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
            H=hidden, X_STRIDE=hidden, Q_STRIDE=hidden // spec.elements_per_byte, SF_STRIDE=hidden // group,
            KIND=kind, GROUP=group, GROUPS=groups,
            TOP_K=8, HAS_SCALES=True, HAS_FACTOR=True, ROUTING_BLOCK=_ROUTING_BLOCK,
        ),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
        divisible_by_16=frozenset(name for name, kind in signature.items() if kind.startswith("*")),
    )  # fmt: skip
