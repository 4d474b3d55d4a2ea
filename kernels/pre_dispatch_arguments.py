"""The kinds of quantization that the pre-dispatch has, and what its arguments must be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megamoe.id_map import MAX_GLOBAL_EXPERTS, IdMap
from megamoe.validation import check_number


@dataclass(frozen=True)
class Kind:
    """One quantization.

    element_dtypes are those of q, the first one ours; two of one byte mean packed E2M1, two elements each. groups are
    the columns per scale that are allowed, the default first, 0 for the whole row; H must be a multiple of the group,
    of `unit` where that is 0. amax_floor is the default, None where there is no floor, and least_floor the smallest
    allowed: zeros alone have a UE8M0 scale without a floor, but an fp32 scale of 0 would have no reciprocal.
    """

    element_dtypes: tuple[torch.dtype, ...]
    groups: tuple[int, ...]
    scale_dtype: torch.dtype | None
    amax_floor: float | None = None
    least_floor: float = 0.0
    token_scale: bool = False
    x_gsf: bool = False
    unit: int = 16

    @property
    def elements_per_byte(self) -> int:
        return 2 if torch.uint8 in self.element_dtypes else 1

    @property
    def by_row(self) -> bool:
        """A program quantizes a row."""
        return self.token_scale or (self.scale_dtype is not None and self.groups == (0,))


_E4M3, E2M1, _BF16 = (torch.float8_e4m3fn,), (torch.uint8, torch.int8), (torch.bfloat16,)
KINDS = {
    "mxfp8": Kind(_E4M3, (32, 64, 128), torch.uint8, 1e-4),
    "mxfp8_trtllm": Kind(_E4M3, (32,), torch.uint8),
    "mxfp4": Kind(E2M1, (32, 64, 128), torch.uint8, 1e-4),
    "nvfp4": Kind(E2M1, (16,), torch.uint8, 1e-4, least_floor=1e-30, token_scale=True),
    "nvfp4_gsf": Kind(E2M1, (16,), torch.uint8, x_gsf=True),
    "fp8_block128": Kind(_E4M3, (128,), torch.float32, 1e-10, least_floor=1e-30),
    "fp8_token": Kind(_E4M3, (0,), torch.float32, 1e-10, least_floor=1e-30),
    "bf16": Kind(_BF16, (0,), None, unit=8),
}
MAX_HIDDEN = 16384
MAX_ELEMENTS = 2**34
"""Of x; scale units are counted in int32, elements are addressed in int64."""
MAX_ROUTES = 2**30


class Quantization(NamedTuple):
    """What `check_quantization` made of its arguments: the defaults filled in."""

    kind: str
    group: int
    amax_floor: float


def check_quantization(
    x: torch.Tensor,
    q: torch.Tensor,
    sf: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    x_gsf: torch.Tensor | None,
    kind: str,
    group: int | None,
    amax_floor: float | None,
) -> Quantization:
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(map(repr, KINDS))}")
    spec = KINDS[kind]
    group = spec.groups[0] if group is None else group
    if isinstance(group, bool) or not isinstance(group, int):
        raise TypeError(f"group is {group!r}; {kind} allows {', '.join(map(str, spec.groups))}")
    if group not in spec.groups:
        raise ValueError(f"group is {group!r}; {kind} allows {', '.join(map(str, spec.groups))}")
    floor = _check_floor(kind, amax_floor)

    check_tensor("x", x, None, (torch.bfloat16,), rank=2)
    tokens, hidden = x.shape
    unit = group or spec.unit
    if hidden == 0 or hidden % unit or hidden > MAX_HIDDEN:
        raise ValueError(f"x has {hidden} columns; {kind} allows multiples of {unit} from {unit} to {MAX_HIDDEN}")
    if x.numel() > MAX_ELEMENTS:
        raise ValueError(f"x has {x.numel()} elements; allowed: up to {MAX_ELEMENTS}")
    check_tensor("q", q, x.device, spec.element_dtypes, rank=2, least_rows=tokens)
    width = hidden // spec.elements_per_byte
    if q.shape[1] != width:
        raise ValueError(f"q has shape {list(q.shape)}; expected [at least {tokens}, {width}]")
    if spec.elements_per_byte == 2 and (q.data_ptr() % 4 or q.stride(0) % 4):
        raise ValueError(f"q starts at {q.data_ptr():#x} with row stride {q.stride(0)}; allowed: multiples of 4 bytes")

    _check_given("sf", sf, spec.scale_dtype is not None, kind)
    if sf is not None and spec.scale_dtype is not None:
        check_tensor("sf", sf, x.device, (spec.scale_dtype,), rank=2, least_rows=tokens)
        scales = hidden // group if group else 1
        if sf.shape[1] < scales:
            raise ValueError(f"sf has shape {list(sf.shape)}; expected at least [{tokens}, {scales}]")
    _check_given("token_scale", token_scale, spec.token_scale, kind)
    if token_scale is not None:
        check_tensor("token_scale", token_scale, x.device, (torch.float32,), rank=1, least_rows=tokens, contiguous=True)
    _check_given("x_gsf", x_gsf, spec.x_gsf, kind)
    if x_gsf is not None:
        check_tensor("x_gsf", x_gsf, x.device, (torch.float32,))
        if x_gsf.numel() != 1:
            raise ValueError(f"x_gsf has shape {list(x_gsf.shape)}; expected one element")
    return Quantization(kind, group, floor)


def _check_floor(kind: str, amax_floor: float | None) -> float:
    spec = KINDS[kind]
    if spec.amax_floor is None:
        if amax_floor is not None:
            raise ValueError(f"amax_floor is {amax_floor!r}; {kind} has no floor and allows None")
        return 0.0
    floor = spec.amax_floor if amax_floor is None else finite("amax_floor", amax_floor)
    if floor < spec.least_floor:
        raise ValueError(f"amax_floor is {amax_floor!r}; {kind} allows None or a finite number >= {spec.least_floor}")
    return floor


def _check_given(name: str, value: object, needed: bool, kind: str) -> None:
    if (value is not None) != needed:
        given, need = ("None", "required") if needed else ("given", "not allowed")
        raise ValueError(f"{name} is {given}; for kind {kind!r} it is {need}")


def check_id_map(id_map: IdMap, expert_scales: torch.Tensor | None, device: torch.device) -> None:
    if not isinstance(id_map, IdMap):
        raise TypeError(f"id_map is a {type(id_map).__name__}; allowed: None or an IdMap")
    experts, offset, local, shared, expert_map = id_map
    if experts < 1 or local < 1 or shared < 0 or not 0 <= offset < experts or experts + shared > MAX_GLOBAL_EXPERTS:
        raise ValueError(
            f"id_map is {id_map}; expected num_experts and num_local_experts >= 1, shared_slots >= 0, an expert_offset "
            f"in [0, num_experts) and at most {MAX_GLOBAL_EXPERTS} experts"
        )
    if expert_map is not None:
        check_tensor("id_map.expert_map", expert_map, device, (torch.int32,), rank=1, contiguous=True)
        if expert_map.numel() != experts:
            raise ValueError(f"id_map.expert_map has {expert_map.numel()} elements; expected num_experts = {experts}")
    if expert_scales is not None and expert_scales.numel() != experts:
        raise ValueError(f"expert_scales has {expert_scales.numel()} elements; expected num_experts = {experts}")


def check_routing(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    q: torch.Tensor,
    ids_out: torch.Tensor,
    weights_out: torch.Tensor,
) -> None:
    check_tensor("topk_ids", topk_ids, x.device, (torch.int32, torch.int64), rank=2, contiguous=True)
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
        check_tensor(name, tensor, x.device, (dtype,), rank=2, contiguous=True)
        if tuple(tensor.shape) != (rows, top_k):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{rows}, {top_k}]")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    device: torch.device | None,
    dtypes: tuple[torch.dtype, ...],
    *,
    rank: int | None = None,
    least_rows: int = 0,
    contiguous: bool = False,
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; allowed: a tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {' or '.join(map(str, dtypes))}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; x is on {device}")
    if rank is None:
        return
    if tensor.ndim != rank or tensor.shape[0] < least_rows:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; expected {rank} dimensions and at least {least_rows} rows"
        )
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has column stride {tensor.stride(-1)}; allowed: 1")
    if rank == 2 and name != "x" and tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise ValueError(f"{name} has row stride {tensor.stride(0)}; rows must not overlap")


def finite(name: str, value: object) -> float:
    """`value` rounded to fp32: Triton would pass a number outside fp32's range as another type."""
    allowed = "None or a finite float32 number"
    number = check_number(name, value, allowed)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
    return number
