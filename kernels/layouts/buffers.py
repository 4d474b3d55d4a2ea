"""MegaMoE buffers: one allocation per layer shape, cut into the views that DeepGEMM's callers know.

Source of the contract: `SymmBuffer` and `SM90SymmBuffer` of `sgl-deep-gemm` 0.1.7. Names, dtypes, shapes and
strides of the views are upstream's, and regions follow each other in upstream's order without padding. Of
its regions, those that callers fill (`x` … `topk_weights`) and those of the shared experts have upstream's
sizes; the rest is ours:

| region | rows here | why |
|---|---|---|
| `plan.*`, upstream's workspace | T·K slots, the tile list | the routing plan; needs no zeroing |
| `l1_*` | 0 | tokens received from other ranks; GEMM 1 reads this rank's from `x` |
| `l2_acts` | T·K | the intermediate in permuted order, without padding between experts |
| `l2_acts_sf` | T·K rounded up to 128 (SM90: T·K) | its scales |
| `combine` | T tokens × (K + [S > 0]) | BF16 rows, token by token (upstream: slot by slot) |

T is the number of tokens rounded up to 384, K top-k, S shared experts. Packed E2M1 and, as upstream, the
E4M3 activations of SM100 are typed int8: reinterpret them with `.view(torch.float8_e4m3fn)`, since `copy_`
would convert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megamoe.kernels.layouts.scale_atoms import ATOM_ROWS, GROUPS_PER_WORD
from megamoe.kernels.routing import MAX_EXPERTS, MAX_TOP_K, max_tiles
from megamoe.recipe import resolve_recipe, traits

TOKEN_ALIGNMENT = 384
"""Least common multiple of the token tiles upstream chooses from: 8, 16, 32, 64, 96, 128, 192."""

SM100_VIEWS = (
    "x", "x_sf", "topk_idx", "topk_weights", "shared_l1_acts", "shared_l1_acts_sf", "shared_l2_acts",
    "shared_l2_acts_sf", "l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf", "x_scales",
)  # fmt: skip
SM90_VIEWS = ("x", "x_sf", "topk_idx", "topk_weights", "l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf")

# (hidden, intermediate) must be multiples: upstream's rows of scales are whole 16-byte units.
_SM100_MULTIPLES = {
    "fp8xfp4": (512, 512),
    "mxf4xmxf4": (512, 512),
    "nvfp4xnvfp4": (256, 256),
    "bf16xbf16": (256, 128),
}
_SM90_MULTIPLES = (512, 256)
_SM90_MAX_INTERMEDIATE = 4096
_SM90_ACT_GROUP, _SM90_MID_GROUP = 128, 64
_MIN_BLOCK_M = 16  # smallest tile of the expert GEMMs: the longest tile list


@dataclass(frozen=True)
class Region:
    """A dense piece of the buffer: `offset` in bytes, `shape` and `strides` in elements of `dtype`."""

    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """This region of `buffer`, a contiguous int8 tensor that holds the whole layout."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class BufferLayout:
    """Where everything lies: `num_tokens` (T, rounded), `regions` in order, `view_names` as upstream returns
    them."""

    num_tokens: int
    regions: tuple[Region, ...]
    view_names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.regions[-1].offset + self.regions[-1].nbytes

    def region(self, name: str) -> Region:
        """The region called `name`; `KeyError` if this layout has none."""
        return {region.name: region for region in self.regions}[name]


def align_tokens(num_tokens: int) -> int:
    """Rows that a buffer for `num_tokens` tokens has."""
    return -(-num_tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT


def sm100_unsupported_reason(
    mma_type: str,
    *,
    num_experts: int,
    max_tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    num_shared_experts: int = 0,
    num_ranks: int = 1,
) -> str | None:
    """Why there is no such SM100 buffer, naming the argument and what is allowed; None if there is one."""
    if mma_type not in _SM100_MULTIPLES:
        return f"mma_type={mma_type!r} has no SM100 buffer; allowed: {', '.join(_SM100_MULTIPLES)}"
    if num_shared_experts < 0:
        return f"num_shared_experts={num_shared_experts}; allowed: 0 or more"
    slots = top_k + (num_shared_experts > 0)
    if slots > MAX_TOP_K:
        return f"top_k={top_k} and the shared experts' slot make {slots}; allowed: up to {MAX_TOP_K}"
    return _common_reason(
        mma_type, _SM100_MULTIPLES[mma_type], num_experts, max_tokens, top_k, hidden, intermediate, num_ranks
    )


def sm90_unsupported_reason(
    *, num_experts: int, max_tokens: int, top_k: int, hidden: int, intermediate: int, num_ranks: int = 1
) -> str | None:
    """Why there is no such SM90 buffer, naming the argument and what is allowed; None if there is one."""
    if intermediate > _SM90_MAX_INTERMEDIATE:
        return f"intermediate={intermediate}; an SM90 buffer allows up to {_SM90_MAX_INTERMEDIATE}"
    return _common_reason("SM90", _SM90_MULTIPLES, num_experts, max_tokens, top_k, hidden, intermediate, num_ranks)


def sm100_layout(
    mma_type: str,
    *,
    num_experts: int,
    max_tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    num_shared_experts: int = 0,
) -> BufferLayout:
    """Layout of an SM100 buffer for up to `max_tokens` tokens (rounded up to 384) of one rank.

    `ValueError` with `sm100_unsupported_reason`'s text when there is none.
    """
    reason = sm100_unsupported_reason(
        mma_type,
        num_experts=num_experts,
        max_tokens=max_tokens,
        top_k=top_k,
        hidden=hidden,
        intermediate=intermediate,
        num_shared_experts=num_shared_experts,
    )
    if reason is not None:
        raise ValueError(reason)
    kind = traits(resolve_recipe(mma_type, numerics="deep_gemm_sm100"))
    scaled = kind.act_scale_format is not None
    act_dtype = torch.bfloat16 if kind.act == "bf16" else torch.int8
    per_element = 2 if kind.act == "e2m1" else 1
    tokens = align_tokens(max_tokens)
    slots = tokens * top_k
    # Upstream pads every block of at least 8 tokens to a whole scale atom.
    shared_sf_rows = ATOM_ROWS * -(-tokens // 8)
    shared_intermediate = intermediate * num_shared_experts
    pack = _Packer()

    def acts(name: str, rows: int, columns: int) -> None:
        pack.add(name, act_dtype, rows, columns // per_element)

    def scales(name: str, rows: int, columns: int, *, mn_major: bool = True) -> None:
        if scaled:
            pack.add(name, torch.int32, rows, columns // (kind.act_group * GROUPS_PER_WORD), mn_major=mn_major)

    _add_plan(pack, slots, num_experts)
    acts("x", tokens, hidden)
    scales("x_sf", tokens, hidden, mn_major=False)
    pack.add("topk_idx", torch.int64, tokens, top_k)
    pack.add("topk_weights", torch.float32, tokens, top_k)
    if num_shared_experts:
        scales("shared_l1_acts_sf", shared_sf_rows, hidden)
        acts("shared_l2_acts", tokens, shared_intermediate)
        scales("shared_l2_acts_sf", shared_sf_rows, shared_intermediate)
    acts("l1_acts", 0, hidden)
    scales("l1_acts_sf", 0, hidden)
    pack.add("l1_topk_weights", torch.float32, 0)
    acts("l2_acts", slots, intermediate)
    scales("l2_acts_sf", -(-slots // ATOM_ROWS) * ATOM_ROWS, intermediate)
    pack.add("combine", torch.bfloat16, tokens, top_k + (num_shared_experts > 0), hidden)
    pack.add("x_scales", torch.float32, tokens)
    pack.add("l1_x_scales", torch.float32, 0)
    return BufferLayout(tokens, tuple(pack.regions), SM100_VIEWS)


def sm90_layout(*, num_experts: int, max_tokens: int, top_k: int, hidden: int, intermediate: int) -> BufferLayout:
    """Layout of an SM90 (FP8) buffer for up to `max_tokens` tokens (rounded up to 384) of one rank.

    Scales are fp32 per 128 columns of `x` and per 64 of the intermediate. `ValueError` with
    `sm90_unsupported_reason`'s text when there is none.
    """
    reason = sm90_unsupported_reason(
        num_experts=num_experts, max_tokens=max_tokens, top_k=top_k, hidden=hidden, intermediate=intermediate
    )
    if reason is not None:
        raise ValueError(reason)
    tokens = align_tokens(max_tokens)
    slots = tokens * top_k
    pack = _Packer()
    _add_plan(pack, slots, num_experts)
    pack.add("x", torch.float8_e4m3fn, tokens, hidden)
    pack.add("x_sf", torch.float32, tokens, hidden // _SM90_ACT_GROUP)
    pack.add("topk_idx", torch.int64, tokens, top_k)
    pack.add("topk_weights", torch.float32, tokens, top_k)
    pack.add("l1_acts", torch.float8_e4m3fn, 0, hidden)
    pack.add("l1_acts_sf", torch.float32, 0, hidden // _SM90_ACT_GROUP, mn_major=True)
    pack.add("l1_topk_weights", torch.float32, 0)
    pack.add("l2_acts", torch.float8_e4m3fn, slots, intermediate)
    pack.add("l2_acts_sf", torch.float32, slots, intermediate // _SM90_MID_GROUP, mn_major=True)
    pack.add("combine", torch.bfloat16, tokens, top_k, hidden)
    return BufferLayout(tokens, tuple(pack.regions), SM90_VIEWS)


def slice_buffer(layout: BufferLayout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The views of `layout` by name, in upstream's order, over `buffer`: contiguous int8 [>= layout.nbytes].

    `shared_l1_acts` is `x` itself, shared experts or not. Views that a layout lacks (scales of BF16, everything else
    shared where S = 0) are empty int8 tensors on the CPU, as upstream's.
    """
    if buffer.dtype != torch.int8:
        raise TypeError(f"buffer has dtype {buffer.dtype}; allowed: int8")
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"buffer has shape {tuple(buffer.shape)}; it must be one contiguous axis of bytes")
    if buffer.numel() < layout.nbytes:
        raise ValueError(f"buffer has {buffer.numel()} bytes, the layout needs {layout.nbytes}")
    tensors = {region.name: region.of(buffer) for region in layout.regions}
    tensors["shared_l1_acts"] = tensors["x"]
    return {name: tensors.get(name, torch.empty(0, dtype=torch.int8)) for name in layout.view_names}


class _Packer:
    """Lays regions one behind the other."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._end = 0

    def add(self, name: str, dtype: torch.dtype, *shape: int, mn_major: bool = False) -> None:
        if mn_major:
            strides: tuple[int, ...] = (1, shape[0])
        else:
            strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        region = Region(name, self._end, shape, strides, dtype)
        self.regions.append(region)
        self._end += region.nbytes

    def align(self, nbytes: int) -> None:
        self._end = -(-self._end // nbytes) * nbytes


def _add_plan(pack: _Packer, slots: int, num_experts: int) -> None:
    pack.add("plan.tiles", torch.int32, max_tiles(slots, num_experts, _MIN_BLOCK_M), 4)
    pack.add("plan.sorted_slots", torch.int32, slots)
    pack.add("plan.expert_offsets", torch.int32, num_experts + 1)
    pack.add("plan.skipped", torch.int32, 1)
    pack.align(128)  # everything behind has rows of whole 16-byte units


def _common_reason(
    kind: str,
    multiples: tuple[int, int],
    num_experts: int,
    max_tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    num_ranks: int,
) -> str | None:
    if num_ranks != 1:
        return f"num_ranks={num_ranks}: expert parallelism is not built yet; allowed: 1"
    if not 1 <= num_experts <= MAX_EXPERTS:
        return f"num_experts={num_experts}; allowed: 1 … {MAX_EXPERTS}"
    if max_tokens < 1:
        return f"max_tokens={max_tokens}; allowed: 1 or more"
    if not 1 <= top_k <= MAX_TOP_K:
        return f"top_k={top_k}; allowed: 1 … {MAX_TOP_K}"
    for name, value, multiple in (
        ("hidden", hidden, multiples[0]),
        ("intermediate", intermediate, multiples[1]),
    ):
        if value < 1 or value % multiple:
            return f"{name}={value}; a {kind} buffer allows multiples of {multiple}"
    return None
