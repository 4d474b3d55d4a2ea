"""DeepGEMM on Hopper: its fused MegaMoE kernel, and a pipeline of its grouped GEMMs with our small kernels between."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.bench.layers import FP8_BLOCK, LayerStore, spec_of
from megamoe.bench.peers.base import Peer, PeerLayer, multiple_reason
from megamoe.bench.peers.glue import combine_rows, scatter_quantized, swiglu_quantized
from megamoe.bench.peers.plan import padded_plan
from megamoe.bench.registry import Point
from megamoe.bench.timing import Call
from megamoe.oracle.deep_gemm import package, sm90_fused
from megamoe.oracle.random_layers import Inputs

_DISTRIBUTION = "sgl-deep-gemm"


def _fused_reason(point: Point) -> str | None:
    return sm90_fused.unsupported_reason() or sm90_fused.layer_unsupported_reason(spec_of(point.shape, FP8_BLOCK))


class _Fused(sm90_fused.Sm90Fused):
    """The oracle's two launches, into a given output: the oracle allocates and poisons one, which takes time."""

    def launch(self, i: Inputs, output: torch.Tensor) -> None:
        spec, views = self._spec, self.views
        self._module.mega_moe_pre_dispatch_sm90(
            i.x, i.topk_ids, i.topk_weights, views["x"].view(torch.float8_e4m3fn), views["x_sf"], views["topk_idx"],
            views["topk_weights"], len(i.x), 128, 1.0,
        )  # fmt: skip
        self._module.fp8_mega_moe(
            output, *self._weights.routed, None, self._buffer, [self._buffer.data_ptr()], 0, self._rows,
            spec.num_experts, spec.top_k, (128, 128, 128), spec.activation, spec.activation_clamp, True,
        )  # fmt: skip


def _open_fused(store: LayerStore, point: Point, inputs: Sequence[Inputs]) -> PeerLayer:
    layer = _Fused(spec_of(point.shape, FP8_BLOCK), store.prepared(FP8_BLOCK), point.tokens)

    def bind(index: int, output: torch.Tensor) -> Call:
        return lambda: layer.launch(inputs[index], output)

    return PeerLayer(inputs, bind, note="its kernel makes the routing plan itself")


def _unfused_reason(point: Point) -> str | None:
    return package.unsupported_reason(package.SM90_VERSIONS) or multiple_reason(point, 128)


def _open_unfused(store: LayerStore, point: Point, inputs: Sequence[Inputs]) -> PeerLayer:
    """Quantize and scatter, grouped GEMM 1, SwiGLU and quantize, grouped GEMM 2, weighted combine."""
    deep_gemm = package.load(package.SM90_VERSIONS)
    shape, weights = point.shape, store.plain(FP8_BLOCK)
    alignment = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
    plans = [padded_plan(i.topk_ids, shape.num_experts, alignment) for i in inputs]
    device = inputs[0].x.device
    most_rows = max(plan.num_rows for plan in plans)
    gate_up = torch.empty(most_rows, 2 * shape.intermediate, dtype=torch.bfloat16, device=device)
    rows = torch.empty(most_rows, shape.hidden, dtype=torch.bfloat16, device=device)
    x_q = torch.zeros(most_rows, shape.hidden, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    act_q = torch.zeros(most_rows, shape.intermediate, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    # TMA reads the scales column by column; a column starts at a multiple of 16 bytes.
    x_sf = torch.ones(shape.hidden // 128, most_rows, device=device)
    act_sf = torch.ones(shape.intermediate // 128, most_rows, device=device)

    def bind(index: int, output: torch.Tensor) -> Call:
        i, plan = inputs[index], plans[index]
        m = plan.num_rows
        # Every input set has its own M, and a column of scales is M long: cut from the front of one buffer.
        xs = x_sf.flatten()[: m * x_sf.shape[0]].view(-1, m).t()
        acts = act_sf.flatten()[: m * act_sf.shape[0]].view(-1, m).t()

        def call() -> None:
            scatter_quantized(i.x, plan.row_of_slot, x_q[:m], xs)
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                (x_q[:m], xs), (weights.w13, weights.w13_scale), gate_up[:m], plan.expert_of_row
            )
            swiglu_quantized(gate_up[:m], plan.slot_of_row, act_q[:m], acts, shape.activation_clamp)
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                (act_q[:m], acts), (weights.w2, weights.w2_scale), rows[:m], plan.expert_of_row
            )
            combine_rows(rows[:m], plan.row_of_slot, i.topk_weights, output)

        return call

    note = f"contiguous layout, rows per expert padded to {alignment}, their number known to the host"
    return PeerLayer(inputs, bind, note)


BACKENDS = {
    peer.name: peer
    for peer in (
        Peer("deep_gemm_fused", _DISTRIBUTION, FP8_BLOCK, FP8_BLOCK, (9,), _fused_reason, _open_fused),
        Peer("deep_gemm_unfused", _DISTRIBUTION, FP8_BLOCK, FP8_BLOCK, (9,), _unfused_reason, _open_unfused),
    )
}
