"""The SM90 tier behind the Triton backend: the same recipe, numbers and limits, other kernels (`kernels.hopper`)."""

from __future__ import annotations

import torch

from megamoe.backends.base import LayerRequest
from megamoe.debug import Routing, Stage, quantized_stage, row_stages
from megamoe.kernels.hopper.config import unsupported_reason
from megamoe.kernels.hopper.layer import (
    HopperWorkspace,
    e4m3_unsupported_reason,
    only_shared,
    plain_weights,
    prepare_hopper,
    run_hopper_layer,
)
from megamoe.kernels.hopper.weights import scales_unsupported_reason
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.weights import MoEWeights, plain_scales


def hopper_unsupported_reason(request: LayerRequest, weights: MoEWeights, parameters: LayerParameters) -> str | None:
    """Why these weights run on the portable kernels instead, or None. Waits for the GPU: it looks at the scales."""
    reason = unsupported_reason(
        request.spec,
        has_bias=weights.w13_bias is not None or weights.w2_bias is not None,
        has_id_map=parameters.expert_map is not None or request.spec.num_local_experts != request.spec.num_experts,
    )
    if reason is not None:
        return reason
    per_expert = [name for name in ("clamp", "alpha", "beta") if getattr(parameters, name) is not None]
    if per_expert:
        return f"activation_{per_expert[0]} per expert"
    factors = [name for name in ("l1_alphas", "l2_alphas", "l2_act_scales") if getattr(weights, name) is not None]
    if factors:
        return factors[0]
    if weights.w13_rows == "interleaved":
        return "w13_layout='interleaved'"
    if request.spec.traits.weight == "e4m3":
        return e4m3_unsupported_reason(weights.routed)
    for prefix, matrices in (("", weights), ("shared_", only_shared(weights))):
        scales = () if matrices is None else plain_scales(matrices)
        for name, scale in zip(("w13_scale", "w2_scale"), scales):
            reason = scales_unsupported_reason(scale)
            if reason is not None:
                return f"the scales in {prefix}{name} {reason}"
    return None


class HopperLayer:
    """Weights as this tier reads them and the workspace that every call reuses."""

    def __init__(self, request: LayerRequest, weights: MoEWeights, parameters: LayerParameters) -> None:
        self._spec = request.spec
        self._parameters = parameters
        self._weights = prepare_hopper(weights)
        self._workspace = HopperWorkspace.allocate(request.spec, request.max_tokens, request.device)
        self._workspace.plan.skipped.zero_()  # no call yet

    @property
    def skipped_ids(self) -> int:
        return int(self._workspace.plan.skipped)

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.nbytes

    @property
    def weight_bytes(self) -> int:
        return self._weights.nbytes

    @property
    def weights(self) -> PlainWeights:
        """Unpacked at every use: only debugging asks."""
        return plain_weights(self._weights)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        run_hopper_layer(
            hidden_states,
            topk_ids,
            topk_weights,
            output,
            ws=self._workspace,
            weights=self._weights,
            spec=self._spec,
            parameters=self._parameters,
        )

    def stages(self, routing: Routing) -> list[Stage]:
        ws, t = self._workspace, self._spec.traits
        assert ws.plan.slot_rows is not None
        slots = routing.here.flatten().nonzero().flatten()
        rows = ws.plan.slot_rows[slots].long()
        is_bf16 = t.act == "bf16"
        scale = None if is_bf16 else ws.scale[..., rows].reshape(-1, len(rows)).T
        act_scale = None if is_bf16 else ws.act_scale[:, rows].T
        by = slots // self._spec.top_k, routing.ids.flatten()[slots]
        stages = [
            quantized_stage("pre_dispatch", _rows(ws.q, rows), scale, t.act_scale_format, t.act_group, by[0]),
            quantized_stage("gate_up", _rows(ws.act, rows), act_scale, t.mid_scale_format, t.mid_group, *by),
        ]
        if ws.row_targets is not None:
            tokens = torch.arange(len(routing.ids), device=ws.q.device)
            rows = ws.first_shared_row + tokens
            shared = _rows(ws.act, rows), ws.act_scale[:, rows].T
            stages.append(quantized_stage("shared gate_up", *shared, "fp32", t.mid_group, tokens))
        return [*stages, *row_stages(ws.rows[: len(routing.ids)], routing)]


def _rows(codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)[rows].view(codes.dtype)  # indexing float8 is not implemented everywhere
