"""Counted work of a stage: useful FLOPs and the bytes it cannot avoid. Nothing here is measured.

Bytes: every input read once, every output written once; of the experts only those that a token chose. `layer` counts
what a layer must move whatever it does inside: tokens, routing, touched weights and the result, not the intermediates,
so that launches which go through memory in between pay for it in their percentage.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.oracle.random_layers import DTYPES
from megamoe.oracle.reference import shared_weight_format
from megamoe.recipe import Traits
from megamoe.spec import LayerSpec

STAGES = ("pre_dispatch", "routing", "gate_up", "down", "combine", "layer", "layer_with_plan")
LAYER_STAGES = ("layer", "layer_with_plan")

_ELEMENT_BYTES = {"e4m3": 1.0, "e2m1": 0.5, "bf16": 2.0}
_SCALE_BYTES = {"ue8m0": 1, "ue4m3": 1, "fp32": 4, None: 0}


@dataclass(frozen=True)
class Work:
    """Per call. `weight_bytes` (elements and scales of touched experts) is part of `num_bytes`."""

    flops: float
    num_bytes: float
    weight_bytes: float


def count_work(spec: LayerSpec, stage: str, tokens: int, touched: float, slots: float) -> Work:
    """Work of `stage` for `tokens` tokens whose `slots` valid slots touch `touched` routed experts (means allowed)."""
    hidden, width, shared_width = spec.hidden, spec.intermediate, spec.shared_intermediate
    t = spec.traits
    routing_entries = tokens * spec.top_k
    x_in = 2.0 * tokens * hidden
    x_q = tokens * activation_bytes(hidden, t, mid=False)
    ids_in, routing_out = 8.0 * routing_entries, 12.0 * routing_entries
    act = slots * activation_bytes(width, t, mid=True) + tokens * activation_bytes(shared_width, t, mid=True)
    rows = 2.0 * hidden * (slots + (tokens if shared_width else 0))
    y = 2.0 * tokens * hidden
    gate_up_weights = touched * matrix_bytes(2 * width, hidden, t) + _shared_bytes(2 * shared_width, hidden, spec)
    down_weights = touched * matrix_bytes(hidden, width, t) + _shared_bytes(hidden, shared_width, spec)
    gate_up_flops = 4.0 * hidden * (slots * width + tokens * shared_width)
    down_flops = gate_up_flops / 2
    if stage == "pre_dispatch":
        return Work(0, x_in + ids_in + x_q + routing_out, 0)
    if stage == "routing":
        return Work(0, 8.0 * routing_entries + 4.0 * slots + 4.0 * (spec.num_experts + 1), 0)
    if stage == "gate_up":
        return Work(gate_up_flops, x_q + 4.0 * slots + gate_up_weights + act, gate_up_weights)
    if stage == "down":
        return Work(down_flops, act + 4.0 * slots + down_weights + rows, down_weights)
    if stage == "combine":
        return Work(0, rows + 8.0 * routing_entries + y, 0)
    if stage in LAYER_STAGES:
        weights = gate_up_weights + down_weights
        return Work(gate_up_flops + down_flops, x_in + ids_in + weights + y, weights)
    raise ValueError(f"stage is {stage!r}; allowed: {', '.join(STAGES)}")


def activation_bytes(columns: int, t: Traits, *, mid: bool) -> float:
    """Bytes of one row of quantized activations and its scales; `mid`: between the GEMMs."""
    scale, group = (t.mid_scale_format, t.mid_group) if mid else (t.act_scale_format, t.act_group)
    groups = 0 if not columns else -(-columns // group) if group else 1
    token_factor = 4 if t.token_scale and not mid else 0
    return columns * _ELEMENT_BYTES[t.act] + groups * _SCALE_BYTES[scale] + token_factor


def matrix_bytes(rows: int, columns: int, t: Traits) -> float:
    """Bytes of one expert's weight matrix [rows, columns] and its scales."""
    group_rows, group = t.weight_group
    scales = -(-rows // group_rows) * -(-columns // group) if group else 0
    return rows * columns * _ELEMENT_BYTES[t.weight] + scales * _SCALE_BYTES[t.weight_scale_format]


def _shared_bytes(rows: int, columns: int, spec: LayerSpec) -> float:
    if spec.shared_weight is None or not rows * columns:
        return 0.0
    fmt = shared_weight_format(spec.recipe, DTYPES[spec.shared_weight])
    elements = rows * columns * _ELEMENT_BYTES[fmt.element]
    if not fmt.cols:
        return elements
    return elements + -(-rows // fmt.rows) * -(-columns // fmt.cols) * _SCALE_BYTES[fmt.scale]
