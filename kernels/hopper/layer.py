"""A layer of FP8 or BF16 tokens and MXFP4 or E4M3 weights on SM90: plan, scatter, two GEMMs, combine.

Five launches, with few tokens each behind the plan starting before the last one ends (`pdl`), no host sync, no
allocation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe import profile
from megamoe.kernels.combine import combine
from megamoe.kernels.hopper.bf16 import bf16_down, bf16_gate_up
from megamoe.kernels.hopper.config import ROW_ALIGN, HopperTile, choose_tile, smallest_block_m
from megamoe.kernels.hopper.copy_rows import copy_rows
from megamoe.kernels.hopper.e2m1_many import e2m1_many_gate_up_kernel
from megamoe.kernels.hopper.e4m3 import E4m3Matrix, e4m3_down, e4m3_gate_up
from megamoe.kernels.hopper.expert_gemm import hopper_down_kernel, hopper_gate_up_kernel
from megamoe.kernels.hopper.layouts import PLAIN_FP32, SWIZZLED_32, SWIZZLED_128
from megamoe.kernels.hopper.options import constexprs, launch_options, overlap, wide_constexprs
from megamoe.kernels.hopper.scatter import SharedRows, scatter
from megamoe.kernels.hopper.weights import HopperMatrix, from_hopper, to_hopper
from megamoe.kernels.layouts.gate_up import deinterleave_gate_up
from megamoe.kernels.operands import weight_bytes
from megamoe.kernels.routing import RoutingPlan, allocate_plan, build_plan, max_rows, max_tiles
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.spec import LayerSpec
from megamoe.weights import ExpertMatrices, MoEWeights, plain_scales

_CAPACITY_ALIGN = 256  # the widest box of scales; no tensor is narrower than a box


@dataclass(frozen=True)
class HopperWeights:
    """w13 with gate and up interleaved by eights; w2 with rows 2g and 2g + 1 of each 16 at g and g + 8; the last expert
    of both is the shared one where `has_shared`."""

    w13: HopperMatrix
    w2: HopperMatrix
    has_shared: bool = field(default=False, kw_only=True)

    @property
    def nbytes(self) -> int:
        return self.w13.nbytes + self.w2.nbytes


@dataclass(frozen=True)
class E4m3Weights:
    """Prepared weights as they are: w13 with gate and up interleaved by eights, w2 untouched; no copies."""

    w13: E4m3Matrix
    w2: E4m3Matrix

    @property
    def nbytes(self) -> int:
        return self.w13.nbytes + self.w2.nbytes


Weights = HopperWeights | E4m3Weights


def prepare_hopper(weights: MoEWeights) -> Weights:
    """Prepared weights (`MoEWeights`, rows in tile order; MXFP4: or gate before up) as this tier reads them: E4M3 as it
    is, MXFP4 in tiles.

    A shared expert of MXFP4 becomes one more expert. `ValueError` where the scales of a row of MXFP4 span too much
    (`to_hopper`).
    """
    if weights.routed.format == "e4m3":
        return e4m3_weights(weights.routed)
    w13, w2 = _codes_and_scales(weights)
    shared = only_shared(weights)
    shared_w13, shared_w2 = (None, None) if shared is None else _codes_and_scales(shared)
    return HopperWeights(
        to_hopper(*w13, shared=shared_w13, gate_up=weights.w13_rows == "gate_up"),
        to_hopper(*w2, shared=shared_w2, pair_columns=True),
        has_shared=shared is not None,
    )


def only_shared(weights: MoEWeights) -> MoEWeights | None:
    """The shared experts' matrices [N, ..] in the place of the routed ones; None where there are none."""
    return None if weights.shared is None else replace(weights, routed=weights.shared, shared=None)


def _codes_and_scales(weights: MoEWeights) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of the routed w13 and w2, MXFP4: codes uint8 [.., N, K/2] and scales uint8 [.., N, K/32]."""
    codes = weight_bytes(weights.routed.w13), weight_bytes(weights.routed.w2)
    return list(zip(codes, plain_scales(weights)))


def e4m3_unsupported_reason(matrices: ExpertMatrices) -> str | None:
    """Why TMA can't read E4M3 matrices where they are, or None: it wants rows and experts one after the other, from
    multiples of 16 bytes on."""
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        tensor = getattr(matrices, name)
        if not tensor.is_contiguous():
            return f"{name} has strides {tensor.stride()}; allowed: contiguous"
        if tensor.data_ptr() % 16:
            return f"{name} starts at {tensor.data_ptr() % 16} bytes past a multiple of 16"
    return None


def e4m3_weights(matrices: ExpertMatrices) -> E4m3Weights:
    """E4M3 matrices in tile order, contiguous, with fp32 scales per 128×128: the same tensors."""
    w13, w13_scale, w2, w2_scale = matrices
    assert w13 is not None
    assert w13_scale is not None
    assert w2 is not None
    assert w2_scale is not None
    return E4m3Weights(E4m3Matrix(w13, w13_scale), E4m3Matrix(w2, w2_scale))


def plain_weights(weights: Weights) -> PlainWeights:
    """The inverse: [gate; up] rows and row-major scales."""
    if isinstance(weights, E4m3Weights):
        return PlainWeights(deinterleave_gate_up(weights.w13.weight, "gran8"), weights.w13.scale, *weights.w2)
    w13, w13_scale = (deinterleave_gate_up(t, "gran8") for t in from_hopper(weights.w13))
    w2, w2_scale = from_hopper(weights.w2, pair_columns=True)
    if not weights.has_shared:
        return PlainWeights(w13, w13_scale, w2, w2_scale)
    return PlainWeights(
        w13[:-1], w13_scale[:-1], w2[:-1], w2_scale[:-1],
        shared_w13=w13[-1], shared_w13_scale=w13_scale[-1], shared_w2=w2[-1], shared_w2_scale=w2_scale[-1],
    )  # fmt: skip


@dataclass(frozen=True)
class HopperWorkspace:
    """Buffers for up to `max_tokens` tokens; rows that hold no slot hold anything.

    q E4M3 [C, H] and act E4M3 [C, I], permuted rows, for MXFP4 weights in `weights.k_order`; scale fp32 [C] or
    [H/128, C]; act_scale fp32 [I/mid_group, C]; row_weight fp32 [C]; packed_tiles int32 as the plan's tiles, without
    holes, and their number; rows BF16 [T, K, H].

    BF16 tokens: q and act BF16, in `weights.bf16_k_order`; slot_weights fp32 [T, K], for the combine; scale, row_weight
    and act_scale are empty.

    With a shared expert token t is also in row `first_shared_row` + t, behind all rows of the plan; rows BF16
    [T, K + 1, H], its own last, and row_targets int32 [C] says which of the T·(K + 1) each of the C rows becomes. None
    without: the plan's sorted_slots says it.
    """

    plan: RoutingPlan
    packed_tiles: torch.Tensor
    tile_count: torch.Tensor
    q: torch.Tensor
    scale: torch.Tensor
    row_weight: torch.Tensor
    act: torch.Tensor
    act_scale: torch.Tensor
    rows: torch.Tensor
    slot_weights: torch.Tensor | None
    row_targets: torch.Tensor | None

    @classmethod
    def allocate(
        cls, spec: LayerSpec, max_tokens: int, device: torch.device | str, *, rows: torch.Tensor | None = None
    ) -> HopperWorkspace:
        """`rows`: the caller's, where it has such a buffer already."""
        slots, experts = max_tokens * spec.top_k, spec.num_local_experts
        plan = allocate_plan(max_tokens, spec.top_k, experts, smallest_block_m(spec), device, row_align=ROW_ALIGN)
        has_shared = spec.shared_intermediate > 0
        num_rows = max_rows(slots, experts, ROW_ALIGN) + (max_tokens if has_shared else 0)
        capacity = -(-num_rows // _CAPACITY_ALIGN) * _CAPACITY_ALIGN
        num_tiles = len(plan.tiles) + _shared_tiles(spec, max_tokens, smallest_block_m(spec))

        def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        blocks = () if spec.recipe.act_scale == "token" else (spec.hidden // 128,)
        is_bf16 = spec.traits.act == "bf16"
        element = torch.bfloat16 if is_bf16 else torch.float8_e4m3fn
        act_scale = (0,) if is_bf16 else (spec.intermediate // spec.traits.mid_group, capacity)
        return cls(
            plan=plan,
            packed_tiles=new(torch.int32, num_tiles, 4),
            tile_count=new(torch.int32, 1),
            q=new(element, capacity, spec.hidden),
            scale=new(torch.float32, 0) if is_bf16 else new(torch.float32, *blocks, capacity),
            row_weight=new(torch.float32, 0 if is_bf16 else capacity),
            act=new(element, capacity, spec.intermediate),
            act_scale=new(torch.float32, *act_scale),
            rows=new(torch.bfloat16, max_tokens, spec.combine_slots, spec.hidden) if rows is None else rows,
            slot_weights=new(torch.float32, max_tokens, spec.top_k) if is_bf16 else None,
            row_targets=new(torch.int32, capacity) if has_shared else None,
        )

    @property
    def first_shared_row(self) -> int:
        """A multiple of ROW_ALIGN, as the plan's number of rows is."""
        return self.plan.sorted_slots.numel()

    def shared_rows(self, spec: LayerSpec, tile: HopperTile) -> SharedRows | None:
        """Where scatter puts the shared expert's rows; None without one."""
        if self.row_targets is None:
            return None
        return SharedRows(self.row_targets, self.first_shared_row, spec.num_local_experts, tile.block_m)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, the plan's under `plan.<name>`."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found |= {f"plan.{f.name}": getattr(self.plan, f.name) for f in fields(self.plan)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


def run_hopper_layer(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    output: torch.Tensor,
    *,
    ws: HopperWorkspace,
    weights: Weights,
    spec: LayerSpec,
    parameters: LayerParameters,
    tile: HopperTile | None = None,
) -> None:
    """output [T, H] BF16 = the layer of `hidden_states`; arguments must be validated and `config.unsupported_reason`
    None. `tile` None: the heuristic's."""
    num_tokens = hidden_states.shape[0]
    if num_tokens == 0:
        return
    tile = tile or choose_tile(spec, num_tokens)
    plan_routing(topk_ids, ws, spec, tile)
    run_planned(
        hidden_states, topk_ids, topk_weights, output,
        ws=ws, weights=weights, spec=spec, parameters=parameters, tile=tile,
    )  # fmt: skip


def plan_routing(topk_ids: torch.Tensor, ws: HopperWorkspace, spec: LayerSpec, tile: HopperTile) -> None:
    """The first launch: where each slot's row goes, and the tiles of `tile`'s size."""
    with profile.stage("routing"):
        build_plan(topk_ids, ws.plan, num_experts=spec.num_local_experts, block_m=tile.block_m)


def run_planned(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    output: torch.Tensor,
    *,
    ws: HopperWorkspace,
    weights: Weights,
    spec: LayerSpec,
    parameters: LayerParameters,
    tile: HopperTile,
) -> None:
    """The four launches behind `plan_routing`."""
    num_tokens = hidden_states.shape[0]
    with profile.stage("pre_dispatch"):
        lay_out(hidden_states, topk_ids, topk_weights, ws, spec, parameters, tile)
    with profile.stage("gate_up"):
        gate_up(ws, weights.w13, spec, tile, num_tokens)
    with profile.stage("down"):
        down(ws, weights.w2, spec, tile, num_tokens)
    with profile.stage("combine"):
        add_rows(ws, topk_ids, output, spec, tile)


def lay_out(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    ws: HopperWorkspace,
    spec: LayerSpec,
    parameters: LayerParameters,
    tile: HopperTile,
) -> None:
    """The tokens in the rows of their slots, quantized where the recipe says so, and the packed tile list."""
    common: dict[str, Any] = dict(
        num_tiles=max_tiles(topk_ids.numel(), spec.num_local_experts, tile.block_m),
        packed_tiles=ws.packed_tiles, tile_count=ws.tile_count,
        expert_scales=parameters.expert_scales, routed_scaling_factor=parameters.routed_scaling_factor,
        pdl=overlap(tile, hidden_states),
    )  # fmt: skip
    if ws.slot_weights is not None:
        copy_rows(hidden_states, topk_ids, topk_weights, ws.plan, rows=ws.q, slot_weights=ws.slot_weights, **common)
        return
    scatter(
        hidden_states, topk_ids, topk_weights, ws.plan, q=ws.q, scale=ws.scale, row_weight=ws.row_weight,
        k_order=spec.traits.weight == "e2m1", shared=ws.shared_rows(spec, tile), **common,
    )  # fmt: skip


def add_rows(
    ws: HopperWorkspace, topk_ids: torch.Tensor, output: torch.Tensor, spec: LayerSpec, tile: HopperTile
) -> None:
    """The combine."""
    num_tokens = len(topk_ids)
    combine(
        ws.rows[:num_tokens], topk_ids, output,
        num_experts=spec.num_local_experts, shared=spec.shared_intermediate > 0,
        topk_weights=None if ws.slot_weights is None else ws.slot_weights[:num_tokens],
        pdl=overlap(tile, output),
    )  # fmt: skip


def gate_up(
    ws: HopperWorkspace, matrix: HopperMatrix | E4m3Matrix, spec: LayerSpec, tile: HopperTile, num_tokens: int
) -> None:
    """GEMM 1 of the scattered tokens into `ws.act` and `ws.act_scale`."""
    if isinstance(matrix, E4m3Matrix):
        e4m3_gate_up(ws, matrix, spec, tile, _programs(ws.q, spec, tile, num_tokens, 2 * spec.intermediate))
        return
    if spec.traits.act == "bf16":
        width = 2 * spec.intermediate // (2 if tile.wide else 1)
        bf16_gate_up(ws, matrix, spec, tile, _programs(ws.q, spec, tile, num_tokens, width))
        return
    per_token = spec.recipe.act_scale == "token"
    clamp = spec.activation_clamp
    programs = _programs(ws.q, spec, tile, num_tokens, spec.intermediate)
    shared = (
        ws.packed_tiles, ws.tile_count, matrix.row_scale, ws.scale, ws.row_weight,
        ws.act.view(torch.uint8), ws.act_scale, ws.q.shape[0], 0.0 if clamp is None else clamp, spec.alpha, spec.beta,
    )  # fmt: skip
    options = dict(
        H=spec.hidden, I=spec.intermediate, ACTIVATION=spec.activation, HAS_CLAMP=clamp is not None,
        **launch_options(tile),
    )  # fmt: skip
    with torch.cuda.device_of(ws.q):
        if per_token and tile.wide:
            e2m1_many_gate_up_kernel[(programs,)](
                *_wide_descriptors(ws.q, matrix, tile), *shared, **wide_constexprs(tile), **options
            )
        else:
            hopper_gate_up_kernel[(programs,)](
                *_descriptors(ws.q, matrix, ws.act_scale if per_token else ws.scale, tile), *shared,
                **constexprs(tile), PER_TOKEN=per_token, **options,
            )  # fmt: skip


def down(
    ws: HopperWorkspace, matrix: HopperMatrix | E4m3Matrix, spec: LayerSpec, tile: HopperTile, num_tokens: int
) -> None:
    """GEMM 2 of `ws.act` into the rows that the combine adds."""
    programs = _programs(ws.q, spec, tile, num_tokens, spec.hidden)
    if isinstance(matrix, E4m3Matrix):
        e4m3_down(ws, matrix, spec, tile, programs)
        return
    if spec.traits.act == "bf16":
        bf16_down(ws, matrix, spec, tile, programs)
        return
    with torch.cuda.device_of(ws.q):
        hopper_down_kernel[(programs,)](
            *_descriptors(ws.act, matrix, ws.act_scale, tile),
            ws.packed_tiles, ws.tile_count, matrix.row_scale,
            ws.plan.sorted_slots if ws.row_targets is None else ws.row_targets, ws.rows.view(torch.int32),
            H=spec.hidden, I=spec.intermediate, **constexprs(tile), **launch_options(tile),
        )  # fmt: skip


def _programs(tensor: torch.Tensor, spec: LayerSpec, tile: HopperTile, num_tokens: int, width: int) -> int:
    """Persistent programs: as many as the device holds, or fewer where there can't be so many work items, of which
    `width` makes one per 128 for each token tile."""
    sms = torch.cuda.get_device_properties(tensor.device).multi_processor_count
    tiles = max_tiles(num_tokens * spec.top_k, spec.num_local_experts, tile.block_m)
    tiles += _shared_tiles(spec, num_tokens, tile.block_m)
    return min(sms * tile.ctas_per_sm, tiles * (width // 128))


def _shared_tiles(spec: LayerSpec, num_tokens: int, block_m: int) -> int:
    """Tiles of the shared expert, which has every token."""
    return -(-num_tokens // block_m) if spec.shared_intermediate else 0


def _descriptors(x: torch.Tensor, matrix: HopperMatrix, scale: torch.Tensor, tile: HopperTile) -> list[object]:
    boxes = [[chunk or tile.chunks[0], 128] for chunk in tile.chunks]
    return [
        *(TensorDescriptor.from_tensor(x, box, SWIZZLED_128) for box in boxes),
        *_weight_descriptors(matrix, 128),
        TensorDescriptor.from_tensor(scale, [2, tile.scale_box], PLAIN_FP32),
    ]


def _wide_descriptors(x: torch.Tensor, matrix: HopperMatrix, tile: HopperTile) -> list[object]:
    return [TensorDescriptor.from_tensor(x, [tile.chunks[0], 128], SWIZZLED_128), *_weight_descriptors(matrix, 64)]


def _weight_descriptors(matrix: HopperMatrix, code_rows: int) -> list[object]:
    return [
        TensorDescriptor.from_tensor(matrix.codes.view(-1, 128), [code_rows, 128], SWIZZLED_128),
        TensorDescriptor.from_tensor(matrix.spans.view(-1, 32), [16, 32], SWIZZLED_32),
    ]
