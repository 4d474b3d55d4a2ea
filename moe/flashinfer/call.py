"""What the four functions do after their checks: route, write the replay, run, and return as FlashInfer returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megamoe.flashinfer.arguments import Activations, Sizes, check_output
from megamoe.flashinfer.layer import Routed, finish, layer_spec, leave_unfinished, require_served
from megamoe.flashinfer.packing import unpack_topk_ids
from megamoe.flashinfer.routing import Router, route
from megamoe.flashinfer.routing_arguments import check_topk
from megamoe.flashinfer.weight_arguments import Gate
from megamoe.flashinfer.weights import Weights
from megamoe.validation import check_flag


class Layer(NamedTuple):
    """A checked call but for its routing."""

    x: Activations
    weights: Weights
    sizes: Sizes
    gate: Gate


def precomputed(layer: Layer, topk_ids: object) -> Callable[[], Routed]:
    """The routing of packed words or of a tuple (ids, weights), checked now."""
    ids, weights = check_topk(topk_ids, len(layer.x.q), layer.sizes, layer.x.q.device)
    if weights is None:
        return lambda: Routed(*unpack_topk_ids(ids))
    given = Routed(ids, weights)
    return lambda: given


def from_logits(logits: torch.Tensor, router: Router, replay: torch.Tensor | None) -> Callable[[], Routed]:
    """The routing of checked logits."""

    def choose() -> Routed:
        routed = Routed(*(tensor.contiguous() for tensor in route(logits, router)))
        if replay is not None:
            replay[: len(logits)].copy_(routed.ids)
        return routed

    return choose


def run(layer: Layer, routing: Callable[[], Routed], do_finalize: object, output: object) -> list[torch.Tensor]:
    """[output], or [rows, expert weights, row of each slot] (`leave_unfinished`)."""
    x, weights, sizes, gate = layer
    check_flag("do_finalize", do_finalize)
    checked = check_output(output, len(x.q), x.hidden, x.q.device)
    spec = layer_spec(x, sizes, gate)
    require_served(spec, x.q.device, len(x.q))
    routed = routing()
    if do_finalize:
        return [finish(spec, x, routed, weights, sizes, gate, checked)]
    rows, row_of_slot = leave_unfinished(spec, x, routed, weights, sizes, gate)
    return [rows, routed.weights, row_of_slot]
