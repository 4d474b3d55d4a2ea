"""FlashInfer's trtllm-gen MoE as a backend: MXFP4 weights, MXFP8 activations, where an installed FlashInfer can run."""

from __future__ import annotations

import torch

from megamoe.backends.base import LayerRequest, layer_unsupported_reason, named_tensors, write_output
from megamoe.backends.upstream import UpstreamLayer, ranks_unsupported_reason, refuse_options
from megamoe.oracle.reference import Quantized
from megamoe.oracle.trtllm_gen import routed_moe
from megamoe.oracle.trtllm_gen.guards import kernel_unsupported_reason
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.weights import MoEWeights, prepare, to_plain


class FlashInferBackend:
    name = "flashinfer_trtllm"

    def unsupported_reason(self, request: LayerRequest) -> str | None:
        spec = request.spec
        if request.device.type != "cuda":
            return f"device type {request.device.type!r}; served: cuda"
        return (
            layer_unsupported_reason(request)
            or ranks_unsupported_reason(spec)
            or kernel_unsupported_reason()
            or routed_moe.layer_unsupported_reason(spec)
        )

    def open(
        self, request: LayerRequest, weights: PlainWeights | MoEWeights, parameters: LayerParameters
    ) -> FlashInferLayer:
        if isinstance(weights, PlainWeights):
            weights = prepare(weights, request.spec.recipe)
        refuse_options(self.name, weights, parameters)
        return FlashInferLayer(request, weights, parameters)


class FlashInferLayer(UpstreamLayer):
    """Weights shuffled as trtllm-gen wants them, a second copy."""

    workspace_bytes = 0

    def __init__(self, request: LayerRequest, weights: MoEWeights, parameters: LayerParameters) -> None:
        self.weights = to_plain(weights)
        super().__init__(request, parameters)
        self._arguments = routed_moe.layer_arguments(request.spec, self.weights)

    @property
    def weight_bytes(self) -> int:
        tensors = [*named_tensors(self.weights).values(), *self._arguments.values()]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        from megamoe.kernels.pre_dispatch import quantize

        ids, weights = self._routing(topk_ids, topk_weights)
        tokens, hidden = hidden_states.shape
        q = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device=hidden_states.device)
        sf = torch.empty(tokens, hidden // 32, dtype=torch.uint8, device=hidden_states.device)
        quantize(hidden_states, q=q, sf=sf, kind="mxfp8_trtllm")  # our own: FlashInfer's quantizer pads and swizzles
        call = routed_moe.call_arguments(Quantized(q, sf, None), ids, weights)
        write_output(output, routed_moe.run(self._arguments | call))


BACKEND = FlashInferBackend()
