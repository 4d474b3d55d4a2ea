"""Upstream's DeepGEMM MegaMoE as a backend: its fused kernels on one rank, where an installed `deep_gemm` can run.

The adapters are the oracle's (`oracle.deep_gemm`): SM90's FP8 layer on Hopper, the SM100 kinds on Blackwell.
"""

from __future__ import annotations

from types import ModuleType

import torch

from megamoe.backends.base import LayerRequest, layer_unsupported_reason, write_output
from megamoe.backends.upstream import UpstreamLayer, ranks_unsupported_reason, refuse_options, refuse_strides
from megamoe.oracle.deep_gemm import sm90_fused, sm100_fused
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights, prepare

_GLOBAL_SCALES = ("l1_alphas", "l2_alphas", "l2_act_scales")


class DeepGemmBackend:
    name = "deep_gemm"

    def unsupported_reason(self, request: LayerRequest) -> str | None:
        spec = request.spec
        if request.device.type != "cuda":
            return f"device type {request.device.type!r}; served: cuda"
        if not spec.recipe.numerics.startswith("deep_gemm"):
            return f"recipe {spec.recipe} is not DeepGEMM's"
        adapter = _adapter(spec)
        return (
            layer_unsupported_reason(request)
            or ranks_unsupported_reason(spec)
            or adapter.unsupported_reason()
            or adapter.layer_unsupported_reason(spec)
        )

    def open(
        self, request: LayerRequest, weights: PlainWeights | MoEWeights, parameters: LayerParameters
    ) -> DeepGemmLayer:
        if isinstance(weights, PlainWeights):
            weights = prepare(weights, request.spec.recipe)
        refuse_options(self.name, weights, parameters, _GLOBAL_SCALES if request.spec.traits.token_scale else ())
        refuse_strides(self.name, weights)
        return DeepGemmLayer(request, weights, parameters)


class DeepGemmLayer(UpstreamLayer):
    """Upstream's buffer and our weights, whose bytes are upstream's."""

    def __init__(self, request: LayerRequest, weights: MoEWeights, parameters: LayerParameters) -> None:
        self.weights = weights
        super().__init__(request, parameters)
        make = sm90_fused.Sm90Fused if _adapter(request.spec) is sm90_fused else sm100_fused.Sm100Fused
        self._fused = make(request.spec, weights, request.max_tokens)

    @property
    def workspace_bytes(self) -> int:
        return self._fused.nbytes

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        # Upstream's kernels want dense rows, int32 ids and an output of their own.
        write_output(output, self._fused(hidden_states.contiguous(), *self._routing(topk_ids, topk_weights)))


def _adapter(spec: LayerSpec) -> ModuleType:
    return sm90_fused if spec.recipe.numerics == sm90_fused.RECIPE.numerics else sm100_fused


BACKEND = DeepGemmBackend()
