"""gpt-oss's names: all experts of a layer in one tensor, MXFP4 in blocks of 16 bytes, gate and up rows interleaved.

    model.layers.N.mlp.experts.{gate_up_proj,down_proj}_{blocks,scales,bias}

blocks U8 [E, n, k/32, 16] (32 values each, low nibble = even column), scales U8 [E, n, k/32], bias BF16 or F32 [E, n];
n = 2I (gate 0, up 0, gate 1, …) and k = H, or n = H and k = I. The activation is swigluoai: alpha 1.702, beta 1.
"""

from __future__ import annotations

import re

import torch

from megamoe.checkpoints.files import Checkpoint, CheckpointError
from megamoe.checkpoints.layer import CheckpointLayer
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe
from megamoe.spec import SWIGLUOAI_ALPHA, SWIGLUOAI_BETA

EXPECTED = "model.layers.N.mlp.experts.{gate_up_proj,down_proj}_{blocks,scales,bias} (gpt-oss)"
LAYER_NAMES = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.gate_up_proj_blocks")
LIMIT = 7.0
"""The clamp of published models, whose config may leave it out."""

RECIPES = (Recipe("bf16xfp4", "none", "trtllm_gen"), Recipe("fp8xfp4", "mx32", "trtllm_gen"))
_GROUP_BYTES = 16


def read(checkpoint: Checkpoint, number: int, device: torch.device) -> CheckpointLayer:
    """Layer `number`, whose names `LAYER_NAMES` finds. Raises `CheckpointError` for other tensors than expected."""
    prefix = f"model.layers.{number}.mlp.experts."
    dtype, shape = checkpoint.describe(f"{prefix}gate_up_proj_blocks")
    if dtype != "U8" or len(shape) != 4 or shape[1] % 2 or shape[3] != _GROUP_BYTES:
        raise CheckpointError(
            f"{prefix}gate_up_proj_blocks is {dtype} {list(shape)}; expected U8 [E, 2I, H/32, {_GROUP_BYTES}]"
        )
    experts, rows, groups, _ = shape
    hidden, intermediate = 32 * groups, rows // 2
    w13 = _matrix(checkpoint, f"{prefix}gate_up_proj", (experts, rows, hidden), "2I, H", device)
    w2 = _matrix(checkpoint, f"{prefix}down_proj", (experts, hidden, intermediate), "H, I", device)
    return CheckpointLayer(
        "gpt-oss, MXFP4 experts",
        number,
        PlainWeights(*w13[:2], *w2[:2], w13_bias=w13[2], w2_bias=w2[2], w13_layout="interleaved"),
        None,
        RECIPES,
        top_k=checkpoint.setting("num_experts_per_tok", "experts_per_token"),
        options={
            "activation": "swigluoai",
            "activation_alpha": SWIGLUOAI_ALPHA,
            "activation_beta": SWIGLUOAI_BETA,
            "activation_clamp": checkpoint.setting("swiglu_limit", default=LIMIT),
        },
    )


def _matrix(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int, int], axes: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed E2M1 [E, n, k/2], UE8M0 [E, n, k/32] and the bias [E, n]."""
    experts, rows, columns = shape
    groups = columns // 32
    n = axes.split(",")[0]
    checkpoint.expect(f"{name}_blocks", ("U8",), (experts, rows, groups, _GROUP_BYTES), f"[E, {axes}/32, 16]")
    checkpoint.expect(f"{name}_scales", ("U8",), (experts, rows, groups), f"[E, {axes}/32]")
    checkpoint.expect(f"{name}_bias", ("BF16", "F32"), (experts, rows), f"[E, {n}]")
    blocks, scales, bias = (checkpoint.tensor(f"{name}_{part}").to(device) for part in ("blocks", "scales", "bias"))
    return blocks.flatten(2), scales, bias
