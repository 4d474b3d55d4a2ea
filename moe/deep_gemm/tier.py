"""The calls on the SM90 tier: FP8 experts in upstream's bytes, MXFP4 experts in Hopper's order.

The buffer's tokens go to the rows of their experts, columns re-ordered where the weights want it, in the launch that
the tier has in the place of a pre-dispatch; the rest of the layer is the tier's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megamoe.spec import LayerSpec
from megamoe.weights import ExpertMatrices
from megamoe.workspace import Workspace

if TYPE_CHECKING:
    from megamoe.kernels.hopper.layer import HopperWeights, HopperWorkspace


def tier_unsupported_reason(spec: LayerSpec, arch: int) -> str | None:
    """Why the tier cannot run `spec` on `arch` (90, …; 0 without the compiled kernels), or None."""
    from megamoe.kernels.hopper.config import unsupported_reason

    if arch != 90:
        return "the SM90 tier needs a GPU of compute capability 9.x"
    if spec.num_shared_experts:
        return f"num_shared_experts={spec.num_shared_experts}; allowed on a buffer's tokens: 0"
    return unsupported_reason(spec, has_bias=False, has_id_map=False)


def tier_reads(matrices: ExpertMatrices) -> bool:
    """Whether the tier can read FP8 experts where they are."""
    from megamoe.kernels.hopper.layer import e4m3_unsupported_reason

    return e4m3_unsupported_reason(matrices) is None


def allocate_tier(spec: LayerSpec, buffer: Workspace) -> HopperWorkspace:
    """What the tier needs beside the buffer, whose rows for the combine it shares, where it can run `spec`."""
    from megamoe.kernels.hopper.layer import HopperWorkspace

    return HopperWorkspace.allocate(spec, len(buffer.rows), buffer.rows.device, rows=buffer.rows)


def run_tier(
    tier: HopperWorkspace, buffer: Workspace, y: torch.Tensor, weights: ExpertMatrices | HopperWeights, spec: LayerSpec
) -> None:
    """y [n, H] = the layer of the buffer's first n tokens; `weights` as the tier reads them."""
    from megamoe.kernels.hopper.layer import e4m3_weights
    from megamoe.kernels.hopper.quantized import run_quantized_layer

    num_tokens = len(y)
    assert buffer.x_sf is not None
    run_quantized_layer(
        buffer.x_q[:num_tokens], buffer.x_sf[:num_tokens], buffer.topk_ids[:num_tokens],
        buffer.topk_weights[:num_tokens], y, ws=tier, spec=spec,
        weights=e4m3_weights(weights) if isinstance(weights, ExpertMatrices) else weights,
    )  # fmt: skip
