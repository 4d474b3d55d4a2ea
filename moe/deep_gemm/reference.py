"""The layer behind the pre-dispatch in plain torch: what CPU tensors get without Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from megamoe.kernels.operands import weight_bytes
from megamoe.oracle.reference import Quantized, combine, dense_shared_expert, matmul_fp64, slot_expert, slots_by_expert
from megamoe.oracle.reference.layer import expert_mlp
from megamoe.parameters import LayerParameters
from megamoe.spec import LayerSpec
from megamoe.weights import ExpertMatrices, MoEWeights, to_plain
from megamoe.workspace import Workspace


def run_dispatched_reference(
    ws: Workspace, output: torch.Tensor, num_tokens: int, *, weights: MoEWeights, spec: LayerSpec
) -> None:
    """`kernels.layer.run_dispatched` by the reference's arithmetic; of `ws` only the pre-dispatch's part is touched."""
    shared = None if weights.shared is None else _packed_as_uint8(weights.shared)
    plain = to_plain(replace(weights, routed=_packed_as_uint8(weights.routed), shared=shared))
    parameters, t = LayerParameters(), spec.traits
    groups = -(-spec.hidden // t.act_group) if t.act_group else 1
    x = Quantized(
        ws.x_q[:num_tokens],
        None if ws.x_sf is None else ws.x_sf[:num_tokens, :groups],
        None if ws.x_scale is None else ws.x_scale[:num_tokens],
    )
    ids, slot_weights = ws.topk_ids[:num_tokens], ws.topk_weights[:num_tokens].flatten()
    valid = (ids >= 0) & (ids < spec.num_local_experts)
    rows = torch.full((num_tokens, spec.combine_slots, spec.hidden), math.nan, dtype=torch.bfloat16, device=ids.device)
    for index, slots in slots_by_expert(ids, valid):
        token = slots // spec.top_k
        expert = slot_expert(plain, parameters, spec, index)
        _, out = expert_mlp(_take(x, token), slot_weights[slots], expert, spec, matmul_fp64)
        rows[token, slots % spec.top_k] = out
    if spec.shared_intermediate:
        ones = torch.ones(num_tokens, device=ids.device)
        _, rows[:, spec.top_k] = expert_mlp(x, ones, dense_shared_expert(plain, spec), spec, matmul_fp64)
    output.copy_(combine(rows, valid))


def _packed_as_uint8(matrices: ExpertMatrices) -> ExpertMatrices:
    return replace(matrices, w13=weight_bytes(matrices.w13), w2=weight_bytes(matrices.w2))


def _take(x: Quantized, token: torch.Tensor) -> Quantized:
    q = x.q.view(torch.uint8)[token].view(x.q.dtype)  # indexing float8 is not implemented everywhere
    return Quantized(q, None if x.sf is None else x.sf[token], None if x.token_scale is None else x.token_scale[token])
