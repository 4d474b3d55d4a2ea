"""What the adapters to upstream's kernels have in common: they serve a layer as it is, without our options."""

from __future__ import annotations

import torch

from megamoe.backends.base import LayerRequest, UnsupportedError
from megamoe.debug import Routing, Stage
from megamoe.oracle.reference import known_ids, slot_weights
from megamoe.parameters import LayerParameters
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights


def ranks_unsupported_reason(spec: LayerSpec) -> str | None:
    """Why the experts of `spec` are not all here under their own ids, or None."""
    if spec.num_local_experts != spec.num_experts or spec.expert_offset:
        return "experts of other ranks: upstream's adapters run on one rank"
    if spec.has_expert_map:
        return "an expert_map: upstream's adapters take the experts in the order of their ids"
    return None


def refuse_options(
    backend: str, weights: MoEWeights, parameters: LayerParameters, allowed: tuple[str, ...] = ()
) -> None:
    """Raise `UnsupportedError` for what the adapter would leave out: tensors that it does not pass to upstream's
    kernel."""
    names = ("w13_bias", "w2_bias", "l1_alphas", "l2_alphas", "l2_act_scales")
    given = [name for name in names if getattr(weights, name) is not None and name not in allowed]
    tensors = {
        "expert_map": parameters.expert_map, "x_gsf": parameters.x_gsf,
        "activation_clamp per expert": parameters.clamp, "activation_alpha per expert": parameters.alpha,
        "activation_beta per expert": parameters.beta,
    }  # fmt: skip
    given += [name for name, value in tensors.items() if value is not None]
    if weights.w13_rows == "interleaved":
        given.append("w13_layout='interleaved'")
    if given:
        raise UnsupportedError(f"moe_backend={backend!r}: its adapter passes on no {given[0]}")


def refuse_strides(backend: str, weights: MoEWeights) -> None:
    """Raise `UnsupportedError` where experts do not lie one after the other, as upstream's kernels read them."""
    for prefix, matrices in (("", weights.routed), ("shared_", weights.shared)):
        if matrices is None:
            continue
        for name in ("w13", "w2"):
            tensor = getattr(matrices, name)
            if not tensor.is_contiguous():
                raise UnsupportedError(
                    f"moe_backend={backend!r}: {prefix}{name} has strides {tensor.stride()}; its kernel needs them "
                    "contiguous, neither expanded nor a slice of something larger"
                )


class UpstreamLayer:
    """What every layer of upstream's does around its one call: weigh the slots, count the ids that it skips."""

    def __init__(self, request: LayerRequest, parameters: LayerParameters) -> None:
        self._spec, self._parameters = request.spec, parameters
        self._skipped = torch.zeros((), dtype=torch.int64, device=request.device)

    @property
    def skipped_ids(self) -> int:
        return int(self._skipped)

    def stages(self, routing: Routing) -> list[Stage]:
        return []  # one call: nothing between input and output can be looked at

    def _routing(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int32 that are −1 or an expert's, weights) [T, K] for upstream's kernel."""
        num_experts, parameters = self._spec.num_experts, self._parameters
        self._skipped = ((topk_ids < -1) | (topk_ids >= num_experts)).sum()
        if parameters.expert_scales is not None or parameters.routed_scaling_factor != 1:
            topk_weights = slot_weights(
                topk_ids, topk_weights, num_experts=num_experts, expert_scales=parameters.expert_scales,
                routed_scaling_factor=parameters.routed_scaling_factor,
            )  # fmt: skip
        return known_ids(topk_ids, num_experts), topk_weights
