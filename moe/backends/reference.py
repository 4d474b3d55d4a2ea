"""The reference in plain torch: the specification itself, on any device, slow and unfit for CUDA graphs."""

from __future__ import annotations

import torch

from megamoe import debug
from megamoe.backends.base import LayerRequest, layer_unsupported_reason
from megamoe.debug import Stage, quantized_stage, row_stages
from megamoe.oracle.reference import LayerTrace, moe_layer
from megamoe.plain_weights import PlainWeights
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights, to_plain


class ReferenceBackend:
    name = "reference"

    def unsupported_reason(self, request: LayerRequest) -> str | None:
        if request.device.type not in ("cpu", "cuda"):
            return f"device type {request.device.type!r}; served: cpu, cuda"
        return layer_unsupported_reason(request)

    def open(
        self,
        request: LayerRequest,
        weights: PlainWeights | MoEWeights,
        *,
        expert_scales: torch.Tensor | None = None,
        routed_scaling_factor: float = 1.0,
    ) -> ReferenceLayer:
        if isinstance(weights, MoEWeights):
            weights = to_plain(weights)
        return ReferenceLayer(request.spec, weights, expert_scales, routed_scaling_factor)


class ReferenceLayer:
    """Plain weights; nothing is preallocated."""

    workspace_bytes = 0

    def __init__(
        self,
        spec: LayerSpec,
        weights: PlainWeights,
        expert_scales: torch.Tensor | None,
        routed_scaling_factor: float,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._expert_scales = expert_scales
        self._routed_scaling_factor = routed_scaling_factor
        self._trace: LayerTrace | None = None

    @property
    def weight_bytes(self) -> int:
        tensors = (tensor for tensor in vars(self._weights).values() if tensor is not None)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        self._trace = moe_layer(
            hidden_states,
            topk_ids,
            topk_weights,
            self._weights,
            self._spec,
            expert_scales=self._expert_scales,
            routed_scaling_factor=self._routed_scaling_factor,
            full_trace=debug.enabled(),  # large
        )
        output.copy_(self._trace.y)

    def stages(self, topk_ids: torch.Tensor) -> list[Stage]:
        if self._trace is None:
            return []
        trace, spec = self._trace, self._spec
        t = spec.traits
        tokens = torch.arange(topk_ids.shape[0], device=topk_ids.device)
        slots = trace.valid.flatten().nonzero().flatten()
        stages = [quantized_stage("pre_dispatch", trace.x.q, trace.x.sf, t.act_scale_format, t.act_group, tokens)]
        if trace.routed is not None:
            stages.append(
                quantized_stage(
                    "gate_up",
                    trace.routed.act_q.view(torch.uint8)[slots].view(trace.routed.act_q.dtype),
                    trace.routed.act_sf[slots],
                    t.mid_scale_format,
                    t.mid_group,
                    slots // spec.top_k,
                    trace.ids.flatten()[slots],
                )
            )
        if trace.shared is not None:
            shared = trace.shared.act_q, trace.shared.act_sf
            stages.append(quantized_stage("shared gate_up", *shared, t.mid_scale_format, t.mid_group, tokens))
        return [*stages, *row_stages(trace.rows, topk_ids, spec.num_experts)]


BACKEND = ReferenceBackend()
