"""A caller's request (`LayerRequest`), what runs it (`Backend`), how that declines (`unsupported_reason`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megamoe.debug import Stage
from megamoe.plain_weights import PlainWeights
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights


class UnsupportedError(NotImplementedError):
    """A legal request that the chosen backend does not serve; the message is its `unsupported_reason`."""


@dataclass(frozen=True)
class LayerRequest:
    """A layer without its numbers: everything a backend needs in order to accept or decline it.

    `max_tokens` bounds the tokens of one call. `options` names the optional arguments in use that go beyond a
    SwiGLU layer on one rank, as the caller wrote them ("w13_bias", "num_experts=9").
    """

    spec: LayerSpec
    device: torch.device
    max_tokens: int
    options: tuple[str, ...] = ()


class Layer(Protocol):
    """A layer that a backend has set up for one request; its memory is its own."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes held besides the weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in the form this backend reads them."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write the result of validated inputs, 1 <= T <= max_tokens rows, into `output` BF16 [T, H]."""

    def stages(self, topk_ids: torch.Tensor) -> list[Stage]:
        """NaN flags of the steps of the last call, in order; `topk_ids` [T, K] are that call's."""


class Backend(Protocol):
    """One way to run a layer."""

    name: str

    def unsupported_reason(self, request: LayerRequest) -> str | None:
        """Why this backend cannot run `request` here, or None. The only way a backend declines."""

    def open(
        self,
        request: LayerRequest,
        weights: PlainWeights | MoEWeights,
        *,
        expert_scales: torch.Tensor | None = None,
        routed_scaling_factor: float = 1.0,
    ) -> Layer:
        """Set up a layer for a request it supports: weights in its own form, workspace allocated."""


def layer_unsupported_reason(request: LayerRequest) -> str | None:
    """What no backend serves yet, recipe by recipe and option by option."""
    spec = request.spec
    if spec.traits.missing is not None:
        return f"recipe {spec.recipe} {spec.traits.missing}"
    if request.options:
        option = request.options[0]
        return f"{option} is not served yet: it comes with the issue “Every recipe and every option”"
    if spec.ep_size != 1:
        return f"ep_size={spec.ep_size} is not served yet: every rank must hold all experts"
    return None
