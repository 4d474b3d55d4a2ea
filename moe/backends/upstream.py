"""What the adapters to upstream's kernels have in common: they serve a layer as it is, without our options."""

from __future__ import annotations

import torch

from megamoe.backends.base import LayerRequest, UnsupportedError
from megamoe.debug import Routing, Stage
from megamoe.parameters import LayerParameters
from megamoe.weights import MoEWeights


def refuse_options(
    backend: str, weights: MoEWeights, parameters: LayerParameters, allowed: tuple[str, ...] = ()
) -> None:
    """Raise `UnsupportedError` for a tensor that upstream's kernel has no argument for."""
    names = ("w13_bias", "w2_bias", "l1_alphas", "l2_alphas", "l2_act_scales")
    given = [name for name in names if getattr(weights, name) is not None and name not in allowed]
    tensors = {
        "expert_map": parameters.expert_map, "x_gsf": parameters.x_gsf, "activation_clamp": parameters.clamp,
        "activation_alpha": parameters.alpha, "activation_beta": parameters.beta,
    }  # fmt: skip
    given += [name for name, value in tensors.items() if value is not None]
    if weights.w13_rows == "interleaved":
        given.append("w13_layout='interleaved'")
    if given:
        raise UnsupportedError(f"moe_backend={backend!r}: its kernel takes no {given[0]}")


def scaled_weights(topk_ids: torch.Tensor, topk_weights: torch.Tensor, parameters: LayerParameters) -> torch.Tensor:
    """Top-k weights times expert_scales and the routed scaling factor, one product each."""
    scales = parameters.expert_scales
    if scales is not None:
        known = (topk_ids >= 0) & (topk_ids < len(scales))
        topk_weights = torch.where(known, topk_weights * scales[torch.where(known, topk_ids, 0).long()], topk_weights)
    if parameters.routed_scaling_factor != 1:
        topk_weights = topk_weights * parameters.routed_scaling_factor
    return topk_weights


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

    def _weigh(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        self._skipped = ((topk_ids < -1) | (topk_ids >= self._spec.num_experts)).sum()
        return scaled_weights(topk_ids, topk_weights, self._parameters)
