"""One layer on activations as they are given: quantized by the caller, or BF16.

Four launches: routing plan, GEMM 1, GEMM 2, combine; three where the rows are left unfinished. Torch adds small ones
for what lies otherwise than the kernels read it: ids of another rank's experts, BF16 weights, scales, output columns.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch

from megamoe import profile
from megamoe.api import device_guard
from megamoe.backend_choice import requested_backend
from megamoe.backends import AUTO, select
from megamoe.backends.base import LayerRequest, UnsupportedError
from megamoe.backends.triton import architecture
from megamoe.flashinfer.arguments import Activations, Sizes
from megamoe.flashinfer.weight_arguments import Gate
from megamoe.flashinfer.weights import Weights, kernel_weights
from megamoe.parameters import LayerParameters
from megamoe.spec import LayerSpec


class Routed(NamedTuple):
    """Global ids int32 [T, K+S], weights fp32 or BF16 [T, K+S]; both contiguous."""

    ids: torch.Tensor
    weights: torch.Tensor


class Unfinished(NamedTuple):
    """Rows BF16 [T·K, H] of all slots, unweighted, a skipped slot's undefined; int32 [T·K]: each slot's row, −1 where
    it is skipped."""

    rows: torch.Tensor
    row_of_slot: torch.Tensor


def layer_spec(x: Activations, sizes: Sizes, gate: Gate) -> LayerSpec:
    """Of this rank's experts alone: `run` makes ids local."""
    numbers = gate.name != "swiglu"
    return LayerSpec(
        x.recipe, x.hidden, sizes.intermediate, sizes.rows, sizes.slots,
        activation=gate.name,
        activation_alpha=1.0 if numbers else None,
        activation_beta=gate.beta_number if numbers else None,
    )  # fmt: skip


def require_served(spec: LayerSpec, device: torch.device, num_tokens: int) -> None:
    """Raises `UnsupportedError` with the Triton backend's reason, or where another backend is asked for by default."""
    name, source = requested_backend()
    if name not in ("triton", AUTO):
        raise UnsupportedError(f"backend {name!r} (asked for by {source}); megamoe.flashinfer runs on 'triton' alone")
    num_tokens = max(num_tokens, 1)
    # What serves the next power of two serves fewer, and is asked once for all of them.
    with suppress(UnsupportedError):
        return _require_triton(spec, device, 1 << (num_tokens - 1).bit_length())
    return _require_triton(spec, device, num_tokens)


@lru_cache(maxsize=4096)
def _require_triton(spec: LayerSpec, device: torch.device, max_tokens: int) -> None:
    select("triton", LayerRequest(spec, device, max_tokens))


def finish(
    spec: LayerSpec, x: Activations, routed: Routed, weights: Weights, sizes: Sizes, gate: Gate,
    output: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The layer's BF16 [T, H], or `output`, whose columns may be fewer: the last ones are dropped."""
    with device_guard(x.q.device):
        if output is None:
            output = torch.empty(len(x.q), x.hidden, dtype=torch.bfloat16, device=x.q.device)
        if len(x.q):
            _run(spec, x, routed, weights, sizes, gate, output)
        return output


def leave_unfinished(
    spec: LayerSpec, x: Activations, routed: Routed, weights: Weights, sizes: Sizes, gate: Gate
) -> Unfinished:
    """The layer up to its combine."""
    device, slots = x.q.device, routed.ids.numel()
    with device_guard(device):
        if not slots:
            return Unfinished(x.q.new_empty((0, x.hidden), dtype=torch.bfloat16), routed.ids.new_empty(0))
        rows = _run(spec, x, routed, weights, sizes, gate, None)
        local = _local(routed.ids, sizes)
        served = (local >= 0) & (local < sizes.rows)
        number = torch.arange(slots, dtype=torch.int32, device=device)
        return Unfinished(rows.flatten(0, 1), torch.where(served.flatten(), number, -1))


def _run(
    spec: LayerSpec, x: Activations, routed: Routed, weights: Weights, sizes: Sizes, gate: Gate,
    output: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """GEMM 2's rows BF16 [T, K, H]; combined into `output` where one is given."""
    from megamoe.kernels.combine import combine
    from megamoe.kernels.config import choose_config
    from megamoe.kernels.down import down
    from megamoe.kernels.gate_up import gate_up
    from megamoe.kernels.routing import build_plan, max_tiles
    from megamoe.workspace import Tokens, Workspace

    num_tokens, device = len(x.q), x.q.device
    prepared = kernel_weights(weights)
    parameters = LayerParameters(clamp=gate.clamp, alpha=gate.alpha, beta=gate.beta)
    config = choose_config(spec, architecture(device), num_tokens)
    ids, topk_weights = _local(routed.ids, sizes), routed.weights.float()
    tokens = Tokens(x.q, _scales(x), x.token_scale, ids, topk_weights)
    ws = Workspace.allocate(spec, num_tokens, device, min_block_m=config.block_m, tokens=tokens)
    num_tiles = max_tiles(ids.numel(), sizes.rows, config.block_m)
    with profile.stage("routing"):
        build_plan(ids, ws.plan, num_experts=sizes.rows, block_m=config.block_m)
    with profile.stage("gate_up"):
        gate_up(ws, prepared, spec, config, parameters, num_tokens, num_tiles)
    with profile.stage("down"):
        down(ws, prepared, spec, config, num_tokens, num_tiles)
    if output is not None:
        whole = (
            output
            if output.shape[1] == x.hidden
            else torch.empty(num_tokens, x.hidden, dtype=torch.bfloat16, device=device)
        )
        with profile.stage("combine"):
            combine(ws.rows, ids, whole, num_experts=sizes.rows, shared=False, topk_weights=topk_weights)
        if whole is not output:
            output.copy_(whole[:, : output.shape[1]])
    return ws.rows


def _local(ids: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Ids of this rank's experts, from 0 on; the kernels skip what is no expert, other ranks' become −1."""
    if sizes.local == sizes.num_experts:
        return ids
    local = ids - sizes.offset
    return torch.where((local >= 0) & (local < sizes.local), local, -1)


def _scales(x: Activations) -> torch.Tensor | None:
    """Activation scales as the kernels read them, rows of whole words: the caller's where they lie so, else a copy."""
    from megamoe.kernels.layouts.scale_atoms import GROUPS_PER_WORD

    if x.scale is None:
        return None
    if x.scale.dtype == torch.float32:
        return x.scale.T.contiguous()
    scale = x.scale.view(torch.uint8)
    missing = -scale.shape[1] % GROUPS_PER_WORD
    return torch.nn.functional.pad(scale, (0, missing)) if missing else scale.contiguous()
