"""The reference in plain torch: the specification itself, on any device, slow and unfit for CUDA graphs."""

from __future__ import annotations

import torch

from megamoe import debug
from megamoe.backends.base import LayerRequest, layer_unsupported_reason, named_tensors, write_output
from megamoe.debug import Routing, Stage, quantized_stage, row_stages
from megamoe.oracle.reference import LayerTrace, moe_layer
from megamoe.parameters import LayerParameters
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
        self, request: LayerRequest, weights: PlainWeights | MoEWeights, parameters: LayerParameters
    ) -> ReferenceLayer:
        if isinstance(weights, MoEWeights):
            weights = to_plain(weights)
        return ReferenceLayer(request.spec, weights, parameters)


class ReferenceLayer:
    """Plain weights; nothing is preallocated."""

    workspace_bytes = 0

    def __init__(self, spec: LayerSpec, weights: PlainWeights, parameters: LayerParameters) -> None:
        self.weights = weights
        self._spec = spec
        self._parameters = parameters
        self._trace: LayerTrace | None = None

    @property
    def skipped_ids(self) -> int:
        return 0 if self._trace is None else self._trace.skipped

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in named_tensors(self.weights).values())

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
            self.weights,
            self._spec,
            parameters=self._parameters,
            full_trace=debug.enabled(),  # large
        )
        write_output(output, self._trace.y)

    def stages(self, routing: Routing) -> list[Stage]:
        if self._trace is None:
            return []
        trace, spec = self._trace, self._spec
        t = spec.traits
        tokens = torch.arange(len(routing.ids), device=routing.ids.device)
        slots = trace.valid.flatten().nonzero().flatten()
        stages = [quantized_stage("pre_dispatch", trace.x.q, trace.x.sf, t.act_scale_format, t.act_group, tokens)]
        if trace.routed is not None:
            routed = trace.routed.take(slots)
            stages.append(
                quantized_stage(
                    "gate_up",
                    routed.act_q,
                    routed.act_sf,
                    t.mid_scale_format,
                    t.mid_group,
                    slots // spec.top_k,
                    routing.ids.flatten()[slots],
                )
            )
        if trace.shared is not None:
            shared = trace.shared.act_q, trace.shared.act_sf
            stages.append(quantized_stage("shared gate_up", *shared, t.mid_scale_format, t.mid_group, tokens))
        return [*stages, *row_stages(trace.rows, routing)]


BACKEND = ReferenceBackend()
