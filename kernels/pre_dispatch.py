"""The pre-dispatch: BF16 tokens to quantized rows and scales, routing to int64 local ids and fp32 weights.

Contract of the kinds "mxfp8", "mxfp4", "nvfp4" and "fp8_block128": DeepGEMM MegaMoE of `sgl-deep-gemm` 0.1.7,
`mega_moe_pre_dispatch` and `mega_moe_pre_dispatch_sm90`, bit for bit, NaN and Inf included. The other kinds are defined
by `oracle.reference.quantize`. One launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob
from megamoe.id_map import IdMap
from megamoe.kernels.block_quantizers import copy_bf16, quantize_e4m3, quantize_mxfp4, quantize_nvfp4_gsf
from megamoe.kernels.pre_dispatch_arguments import (
    E2M1,
    KINDS,
    MAX_HIDDEN,
    Quantization,
    check_id_map,
    check_quantization,
    check_routing,
    check_tensor,
    finite,
)
from megamoe.kernels.row_quantizers import quantize_fp8_token, quantize_nvfp4
from megamoe.profile import pre_dispatch_work

__all__ = ["KINDS", "MAX_HIDDEN", "IdMap", "compile_jobs", "pre_dispatch", "quantize", "tile"]

_ROUTING_BLOCK = 1024  # entries per program that copies routing: 8 per thread
_TILE = 4096  # elements per program where rows are cut freely: 32 per thread, four 16-byte loads in flight
_ROW_UNIT = 16  # columns a thread takes at once where a program is a row
_MOST_PIECES = 8  # of a row: 128 elements per thread
_INVALID_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _local_id(
    expert, expert_map, num_experts, expert_offset, num_local_experts, shared_slots,
    HAS_EXPERT_MAP: tl.constexpr,
):  # fmt: skip
    """`IdMap`'s table, for int64 ids."""
    routed = (expert >= 0) & (expert < num_experts)
    if HAS_EXPERT_MAP:
        local = tl.load(expert_map + expert, mask=routed, other=-1).to(tl.int64)
        local = tl.where((local >= -1) & (local < num_local_experts), local, _INVALID_ID)
    else:
        local = expert - expert_offset
        local = tl.where((local >= 0) & (local < num_local_experts), local, -1)
    shared = (expert >= num_experts) & (expert < num_experts + shared_slots)
    beyond = tl.where(shared, expert - num_experts + num_local_experts, _INVALID_ID)
    return tl.where(expert < 0, expert, tl.where(routed, local, beyond))


@triton.jit
def _copy_routing(
    topk_ids, topk_weights, expert_scales, expert_map, ids_out, weights_out,
    block, num_tokens, num_rows, num_experts, expert_offset, num_local_experts, shared_slots, factor,
    TOP_K: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_ID_MAP: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, BLOCK: tl.constexpr,
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
        scaled = live  # the pads' +0 stays +0 under a negative factor
        if HAS_ID_MAP:
            scaled &= (expert < num_experts) | (expert >= num_experts + shared_slots)
        weight = tl.where(scaled, weight * factor, weight)
    if HAS_ID_MAP:
        expert = _local_id(
            expert, expert_map, num_experts, expert_offset, num_local_experts, shared_slots, HAS_EXPERT_MAP
        )
    inside = entry < num_rows * TOP_K
    tl.store(ids_out + entry, expert, mask=inside)
    tl.store(weights_out + entry, weight, mask=inside)


_TENSORS = (
    "x", "topk_ids", "topk_weights", "expert_scales", "expert_map", "x_gsf",
    "q", "sf", "token_scale", "ids_out", "weights_out",
)  # fmt: skip
_INTEGERS = (
    "num_tokens", "num_rows", "num_experts", "expert_offset", "num_local_experts", "shared_slots",
    "x_stride", "q_stride", "sf_stride",
)  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_TENSORS, launch_metadata=pre_dispatch_work)
def pre_dispatch_kernel(
    x, topk_ids, topk_weights, expert_scales, expert_map, x_gsf, q, sf, token_scale, ids_out, weights_out,
    num_tokens, num_rows, num_experts, expert_offset, num_local_experts, shared_slots,
    x_stride, q_stride, sf_stride, amax_floor, factor,
    H: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr, ALIGNED: tl.constexpr,
    TOP_K: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_ID_MAP: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, ROUTING_BLOCK: tl.constexpr,
):  # fmt: skip
    """Contract: `pre_dispatch`. Grid: programs that quantize, then (TOP_K > 0) programs that copy routing.

    Schedule. A quantizing program takes UNITS scale groups or, where a scale covers the row, a row (`tile`); a copying
    one ROUTING_BLOCK entries of the flat [P, K] ids and weights, so that thousands of pad rows cost a few programs.
    Safe: programs write disjoint ranges and read only inputs.

    Specialisation. Token counts, strides and addresses are the caller's and change from call to call; Triton would
    compile a kernel for each combination of their divisibilities. Nothing is specialised on them but ALIGNED, which the
    host decides for x and q together: all rows start at multiples of 16 bytes (8 for packed E2M1), so that accesses are
    as wide as can be. Routing and scales are a few bytes per token and as fast without. So a layer has two kernels.
    """
    pid = tl.program_id(0)
    if KIND == "nvfp4" or KIND == "fp8_token":
        programs = num_tokens
    elif KIND == "bf16":
        programs = tl.cdiv(num_tokens * (H // 8), UNITS)
    else:
        programs = tl.cdiv(num_tokens * (H // GROUP), UNITS)
    if pid >= programs:
        if TOP_K > 0:
            _copy_routing(
                topk_ids, topk_weights, expert_scales, expert_map, ids_out, weights_out,
                pid - programs, num_tokens, num_rows,
                num_experts, expert_offset, num_local_experts, shared_slots, factor,
                TOP_K, HAS_SCALES, HAS_FACTOR, HAS_ID_MAP, HAS_EXPERT_MAP, ROUTING_BLOCK,
            )  # fmt: skip
    elif KIND == "mxfp8" or KIND == "mxfp8_trtllm" or KIND == "fp8_block128":
        quantize_e4m3(
            x, q, sf, x_stride, q_stride, sf_stride, pid, num_tokens, amax_floor,
            H, GROUP, UNITS, KIND != "fp8_block128", KIND != "mxfp8_trtllm", ALIGNED,
        )  # fmt: skip
    elif KIND == "mxfp4":
        quantize_mxfp4(
            x, q.to(tl.pointer_type(tl.int32)), sf, x_stride, q_stride // 4, sf_stride, pid, num_tokens, amax_floor,
            H, GROUP, UNITS, ALIGNED,
        )  # fmt: skip
    elif KIND == "nvfp4_gsf":
        quantize_nvfp4_gsf(
            x, q.to(tl.pointer_type(tl.int32)), sf, tl.load(x_gsf), x_stride, q_stride // 4, sf_stride, pid, num_tokens,
            H, UNITS, ALIGNED,
        )  # fmt: skip
    elif KIND == "nvfp4":
        quantize_nvfp4(
            x, q.to(tl.pointer_type(tl.int32)), sf, token_scale, pid, amax_floor, x_stride, q_stride // 4, sf_stride,
            H, UNITS, ALIGNED,
        )  # fmt: skip
    elif KIND == "fp8_token":
        quantize_fp8_token(x, q, sf, pid, amax_floor, x_stride, q_stride, sf_stride, H, UNITS, ALIGNED)
    else:
        copy_bf16(x, q, x_stride, q_stride, pid, num_tokens, H, UNITS, ALIGNED)


def pre_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    q: torch.Tensor,
    sf: torch.Tensor | None,
    ids_out: torch.Tensor,
    weights_out: torch.Tensor,
    token_scale: torch.Tensor | None = None,
    kind: str,
    group: int | None = None,
    amax_floor: float | None = None,
    expert_scales: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    x_gsf: torch.Tensor | None = None,
    id_map: IdMap | None = None,
) -> None:
    """Quantize x and copy the routing of n tokens into buffers of P ≥ n rows. One launch; none when P = 0.

    x             BF16 [n, H], rows may be strided and lie anywhere; H a multiple of the group, at most 16384
    topk_ids      int32 or int64 [n, K], contiguous; topk_weights fp32 [n, K], contiguous
    q             float8_e4m3fn [P, H], BF16 [P, H] for "bf16", or uint8/int8 [P, H/2] (low nibble = even column) for
                  the E2M1 kinds, whose rows start at multiples of 4 bytes
    sf            uint8 [P, ≥ H/group], fp32 for "fp8_block128" and, [P, ≥ 1], "fp8_token"; columns beyond are not
                  written; None for "bf16"
    ids_out       int64 [P, K], weights_out fp32 [P, K], contiguous; rows n … P−1 become −1 and +0.0
    token_scale   fp32 [≥ n], contiguous; for "nvfp4" and no other kind
    kind          a key of `KINDS`, whose `groups` are allowed as `group`; None: the first of them
    amax_floor    least amax of a group, of a row under "nvfp4" and "fp8_token"; None: 1e-4, and 1e-10 for
                  "fp8_block128" and "fp8_token". At least 0 for "mxfp8" and "mxfp4", 1e-30 where there are fp32
                  scales (zeros alone need one); "mxfp8_trtllm", "nvfp4_gsf" and "bf16" have no floor: None alone
    expert_scales fp32 [E], contiguous: a weight becomes weight · expert_scales[id]; ids outside [0, E) keep
                  theirs. By global id: E is num_experts where there is an id_map
    routed_scaling_factor: multiplies every weight, after expert_scales; not those of id_map's shared slots
    x_gsf         fp32, one element, positive: the global factor of "nvfp4_gsf" and no other kind
    id_map        global to local ids; None, or an identity: ids are copied verbatim

    Rows n … P−1 of q, sf and token_scale are not touched. Offending arguments raise `TypeError` (type, dtype) or
    `ValueError` before anything is written. In `sgl-deep-gemm` 0.1.7 only "fp8_block128" has the factor, only the other
    kinds have expert_scales, and none has an id_map.
    """
    quantization = check_quantization(x, q, sf, token_scale, x_gsf, kind, group, amax_floor)
    check_routing(x, topk_ids, topk_weights, q, ids_out, weights_out)
    if expert_scales is not None:
        check_tensor("expert_scales", expert_scales, x.device, (torch.float32,), rank=1, contiguous=True)
    if id_map is not None:
        check_id_map(id_map, expert_scales, x.device)
        id_map = None if id_map.is_identity else id_map
    factor = None
    if routed_scaling_factor is not None:
        factor = finite("routed_scaling_factor", routed_scaling_factor)
    routing = _Routing(topk_ids, topk_weights, ids_out, weights_out, expert_scales, factor, id_map)
    _launch(x, q, sf, token_scale, x_gsf, quantization, routing)


def quantize(
    x: torch.Tensor,
    *,
    q: torch.Tensor,
    sf: torch.Tensor | None,
    token_scale: torch.Tensor | None = None,
    kind: str,
    group: int | None = None,
    amax_floor: float | None = None,
    x_gsf: torch.Tensor | None = None,
) -> None:
    """`pre_dispatch` without the routing: rows 0 … n−1 of q, sf and token_scale. No launch when n = 0."""
    quantization = check_quantization(x, q, sf, token_scale, x_gsf, kind, group, amax_floor)
    _launch(x, q, sf, token_scale, x_gsf, quantization, None)


class _Routing(NamedTuple):
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    ids_out: torch.Tensor
    weights_out: torch.Tensor
    expert_scales: torch.Tensor | None = None
    factor: float | None = None
    id_map: IdMap | None = None


def _launch(
    x: torch.Tensor,
    q: torch.Tensor,
    sf: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    x_gsf: torch.Tensor | None,
    quantization: Quantization,
    routing: _Routing | None,
) -> None:
    kind, group, amax_floor = quantization
    (tokens, hidden), rows = x.shape, q.shape[0]
    units, num_warps = tile(kind, hidden, group)
    programs = tokens if KINDS[kind].by_row else triton.cdiv(tokens * (hidden // (group or KINDS[kind].unit)), units)
    absent = q if sf is None else sf  # what the kernel has no code to read
    if routing is None:
        routing, top_k = _Routing(absent, absent, absent, absent), 0
    else:
        top_k = routing.topk_ids.shape[1]
        programs += triton.cdiv(rows * top_k, _ROUTING_BLOCK)
    if programs == 0:
        return
    scales, factor, id_map = routing.expert_scales, routing.factor, routing.id_map
    ids = IdMap(0 if scales is None else scales.numel(), 0, 0, 0) if id_map is None else id_map

    def given(tensor: torch.Tensor | None) -> torch.Tensor:
        return absent if tensor is None else tensor

    with torch.cuda.device_of(x):
        pre_dispatch_kernel[(programs,)](
            x, routing.topk_ids, routing.topk_weights, given(scales), given(ids.expert_map), given(x_gsf),
            q.view(torch.uint8) if q.dtype == torch.int8 else q, absent, given(token_scale),
            routing.ids_out, routing.weights_out,
            tokens, rows, ids.num_experts, ids.expert_offset, ids.num_local_experts, ids.shared_slots,
            x.stride(0), q.stride(0), absent.stride(0), amax_floor, 1.0 if factor is None else factor,
            H=hidden, KIND=kind, GROUP=group, UNITS=units, ALIGNED=_is_aligned(x, q),
            TOP_K=top_k, HAS_SCALES=scales is not None, HAS_FACTOR=factor is not None,
            HAS_ID_MAP=id_map is not None, HAS_EXPERT_MAP=ids.expert_map is not None,
            ROUTING_BLOCK=_ROUTING_BLOCK, num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip


def _is_aligned(x: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether every row of x and q starts where the widest access may: the two classes of launches."""
    q_bytes = 8 if q.dtype in E2M1 else 16
    return all(
        t.data_ptr() % bytes == 0 and (t.shape[0] <= 1 or t.stride(0) * t.element_size() % bytes == 0)
        for t, bytes in ((x, 16), (q, q_bytes))
    )


def tile(kind: str, hidden: int, group: int) -> tuple[int, int]:
    """UNITS and warps of a program.

    Scale groups (units of 16 bytes for "bf16") where rows are cut freely. Where a program is a row: how many units of
    16 columns are taken at once, one per thread, as few as the pieces of a row that registers hold allow.
    """
    spec = KINDS[kind]
    if not spec.by_row:
        return _TILE // (group or spec.unit), 4
    warps = 1
    while 32 * warps * _MOST_PIECES * _ROW_UNIT < hidden:
        warps *= 2
    return 32 * warps, warps


def compile_jobs(arch: int) -> list[CompileJob]:
    """Launches for DeepSeek-V4-Flash rows, one per kind, with everything the routing can ask for: -Pro rows too where a
    row is a program; ids that are mapped for the kinds outside DeepGEMM's contract; and one x that is not aligned."""
    jobs = [_compile_job(kind, 4096) for kind in KINDS]
    jobs += [_compile_job(kind, 7168) for kind, spec in KINDS.items() if spec.by_row]
    return [*jobs, _compile_job("mxfp8", 4096, aligned=False)]


def _compile_job(kind: str, hidden: int, aligned: bool = True) -> CompileJob:
    spec = KINDS[kind]
    group = spec.groups[0]
    units, num_warps = tile(kind, hidden, group)
    q = {torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv", torch.bfloat16: "*bf16"}[spec.element_dtypes[0]]
    sf = {torch.float32: "*fp32", torch.uint8: "*u8", None: q}[spec.scale_dtype]
    has_id_map = kind not in ("mxfp8", "mxfp4", "nvfp4", "fp8_block128")
    signature = {
        "x": "*bf16", "topk_ids": "*i32", "topk_weights": "*fp32", "expert_scales": "*fp32",
        "expert_map": "*i32" if has_id_map else sf, "x_gsf": "*fp32" if spec.x_gsf else sf,
        "q": q, "sf": sf, "token_scale": "*fp32" if spec.token_scale else sf, "ids_out": "*i64", "weights_out": "*fp32",
        **dict.fromkeys(_INTEGERS, "i32"), "amax_floor": "fp32", "factor": "fp32",
    }  # fmt: skip
    return CompileJob(
        name=f"pre_dispatch/{kind}/{hidden}" + ("" if aligned else "/unaligned"),
        kernel="pre_dispatch",
        recipe=kind,
        fn=pre_dispatch_kernel,
        signature=signature,
        constexprs=dict(
            H=hidden, KIND=kind, GROUP=group, UNITS=units, ALIGNED=aligned,
            TOP_K=8, HAS_SCALES=True, HAS_FACTOR=True, HAS_ID_MAP=has_id_map, HAS_EXPERT_MAP=has_id_map,
            ROUTING_BLOCK=_ROUTING_BLOCK,
        ),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
    )  # fmt: skip
