"""A caller's request (`LayerRequest`), what runs it (`Backend`), how that declines (`unsupported_reason`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megamoe.debug import Routing, Stage
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights


class UnsupportedError(NotImplementedError):
    """A legal request that the chosen backend does not serve; the message is its `unsupported_reason`."""


@dataclass(frozen=True)
class LayerRequest:
    """A layer without its numbers: everything a backend needs in order to accept or decline it.

    `max_tokens` bounds the tokens of one call.
    """

    spec: LayerSpec
    device: torch.device
    max_tokens: int


class Layer(Protocol):
    """A layer that a backend has set up for one request; its memory is its own."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes held besides the weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in the form this backend reads them."""

    @property
    def skipped_ids(self) -> int:
        """Ids that the last call skipped because they name no expert of any rank; 0 before it. Waits for the GPU."""

    @property
    def weights(self) -> PlainWeights | MoEWeights:
        """The weights in the form this backend reads them."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write the result of validated inputs, 1 <= T <= max_tokens rows, into `output` BF16 [T, H]."""

    def stages(self, routing: Routing) -> list[Stage]:
        """NaN flags of the steps of the last call, in order; `routing` is that call's."""


class Backend(Protocol):
    """One way to run a layer."""

    name: str

    def unsupported_reason(self, request: LayerRequest) -> str | None:
        """Why this backend cannot run `request` here, or None. The only way a backend declines."""

    def open(
        self,
        request: LayerRequest,
        weights: PlainWeights | MoEWeights,
        parameters: LayerParameters,
    ) -> Layer:
        """Set up a layer for a request it supports: weights in its own form, workspace allocated."""


def write_output(output: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value` into `output`, which may have been made in inference mode: torch writes such a tensor only there,
    kernels write it anywhere."""
    with torch.inference_mode():
        output.copy_(value)


def layer_unsupported_reason(request: LayerRequest) -> str | None:
    """What no backend serves yet."""
    spec = request.spec
    if spec.ep_size != 1:
        return f"ep_size={spec.ep_size} is not served yet: every rank must hold all experts"
    return None


def named_tensors(weights: PlainWeights | MoEWeights) -> dict[str, torch.Tensor]:
    """A layer's weights by the names of the public arguments, scales as the backend holds them."""
    found: dict[str, torch.Tensor | None] = {}
    if isinstance(weights, PlainWeights):
        found.update((name, value) for name, value in vars(weights).items() if name != "w13_layout")
    else:
        parts = ("w13", "w13_scale", "w2", "w2_scale")
        found.update(zip(parts, weights.routed))
        found.update(zip((f"shared_{part}" for part in parts), weights.shared or ()))
        names = ("l1_alphas", "l2_alphas", "l2_act_scales", "w13_bias", "w2_bias")
        found.update((name, getattr(weights, name)) for name in names)
    return {name: tensor for name, tensor in found.items() if tensor is not None}
