"""DeepSeek-V4's names: an expert's matrices one by one, FP8 with 128×128 scales or MXFP4, shared experts in FP8.

    [model.]layers.N.ffn.experts.E.{w1,w2,w3}.{weight,scale}
    [model.]layers.N.ffn.shared_experts.{w1,w2,w3}.{weight,scale}

w1 is gate, w3 up, w2 down. FP8: F8_E4M3 [n, k] and scales [n/128, k/128]; MXFP4: I8 [n, k/2] and scales [n, k/32].
Scales are F8_E8M0; those of blocks may be F32.
"""

from __future__ import annotations

import re

import torch

from megamoe.checkpoints.files import Checkpoint, CheckpointError, shortened
from megamoe.checkpoints.layer import CheckpointLayer, SharedExpert
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe

EXPECTED = "[model.]layers.N.ffn.experts.E.{w1,w2,w3}.{weight,scale} (DeepSeek-V4)"
LAYER_NAMES = re.compile(r"(?:model\.)?layers\.(\d+)\.ffn\.experts\.0\.w1\.weight")

FP8_RECIPES = (Recipe("fp8xfp8", "block128", "deep_gemm_sm90"),)
MXFP4_RECIPES = (
    Recipe("fp8xfp4", "mx32", "deep_gemm_sm100"),
    Recipe("fp8xfp4", "block128", "deep_gemm_sm90"),
    Recipe("fp8xfp4", "mx32", "trtllm_gen"),
)
_EXPERT = re.compile(r"experts\.(\d+)\.")
_PACKED = ("I8", "U8")
_BLOCK_SCALES = ("F8_E8M0", "F32")
_BLOCK = 128


def read(checkpoint: Checkpoint, number: int, device: torch.device) -> CheckpointLayer:
    """Layer `number`, whose names `LAYER_NAMES` finds. Raises `CheckpointError` for other tensors than expected."""
    prefixes = (f"layers.{number}.ffn.", f"model.layers.{number}.ffn.")
    prefix = next(prefix for prefix in prefixes if checkpoint.names_under(prefix))
    names = checkpoint.names_under(prefix)
    found = sorted({int(match[1]) for match in map(_EXPERT.match, names) if match is not None})
    count = checkpoint.setting("n_routed_experts", "num_local_experts", default=len(found))
    if found != list(range(count)):
        raise CheckpointError(
            f"{prefix}experts has {len(found)} experts, {shortened([str(e) for e in found])}; expected 0 … {count - 1}"
        )
    first = f"{prefix}experts.0."
    dtype, shape = checkpoint.describe(f"{first}w1.weight")
    if dtype not in ("F8_E4M3", *_PACKED) or len(shape) != 2:
        raise CheckpointError(f"{first}w1.weight is {dtype} {list(shape)}; expected F8_E4M3 [I, H] or I8 [I, H/2]")
    packed = dtype in _PACKED
    intermediate, hidden = shape[0], shape[1] * (2 if packed else 1)
    w13, w13_scale = _stack(checkpoint, prefix, count, ("w1", "w3"), (intermediate, hidden), packed, device)
    w2, w2_scale = _stack(checkpoint, prefix, count, ("w2",), (hidden, intermediate), packed, device)
    shared = _read_shared(checkpoint, prefix, intermediate, hidden, device)
    return CheckpointLayer(
        "DeepSeek-V4, " + ("MXFP4" if packed else "FP8") + " experts",
        number,
        PlainWeights(w13, w13_scale, w2, w2_scale),
        shared,
        MXFP4_RECIPES if packed else FP8_RECIPES,
        top_k=checkpoint.setting("num_experts_per_tok"),
        options={
            "activation": "swiglu",
            "activation_clamp": checkpoint.config.get("swiglu_limit"),
            "routed_scaling_factor": checkpoint.setting("routed_scaling_factor", default=1.0),
        },
    )


def _stack(
    checkpoint: Checkpoint,
    prefix: str,
    count: int,
    matrices: tuple[str, ...],
    shape: tuple[int, int],
    packed: bool,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, n·rows, columns] of the `matrices`, one below the other, and their scales, copied expert by expert."""
    rows, columns = shape
    group = (1, 32) if packed else (_BLOCK, _BLOCK)
    size = rows, columns // 2 if packed else columns
    scale_size = -(-rows // group[0]), -(-columns // group[1])
    dtypes = _PACKED if packed else ("F8_E4M3",)
    scale_dtypes = ("F8_E8M0", "U8") if packed else _BLOCK_SCALES
    n = len(matrices)
    weights = torch.empty(count, n, *size, dtype=torch.uint8 if packed else torch.float8_e4m3fn, device=device)
    scales = torch.empty(count, n, *scale_size, dtype=torch.uint8 if packed else torch.float32, device=device)
    for expert in range(count):
        for index, matrix in enumerate(matrices):
            name = f"{prefix}experts.{expert}.{matrix}"
            checkpoint.expect(f"{name}.weight", dtypes, size, "[n, k/2]" if packed else "[n, k]")
            checkpoint.expect(f"{name}.scale", scale_dtypes, scale_size, "[n, k/32]" if packed else "[n/128, k/128]")
            weight, scale = checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.scale")
            weights.view(torch.uint8)[expert, index].copy_(weight.view(torch.uint8))
            scales[expert, index].copy_(scale.view(torch.uint8) if packed else scale.float())
    return weights.flatten(1, 2), scales.flatten(1, 2)


def _read_shared(
    checkpoint: Checkpoint, prefix: str, intermediate: int, hidden: int, device: torch.device
) -> SharedExpert | None:
    names = checkpoint.names_under(f"{prefix}shared_experts.")
    if not names:
        return None
    count = checkpoint.setting("n_shared_experts", default=1)
    width = intermediate * count
    if width % _BLOCK:
        raise CheckpointError(
            f"{prefix}shared_experts is {count} of intermediate {intermediate}; expected a multiple of {_BLOCK} in "
            "all, since no block of FP8 scales may lie across gate and up"
        )
    parts: dict[str, torch.Tensor] = {}
    for matrix, (rows, columns) in {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}.items():
        name = f"{prefix}shared_experts.{matrix}"
        blocks = -(-rows // _BLOCK), -(-columns // _BLOCK)
        checkpoint.expect(f"{name}.weight", ("F8_E4M3",), (rows, columns), "[n, k]")
        checkpoint.expect(f"{name}.scale", _BLOCK_SCALES, blocks, "[n/128, k/128]")
        parts[matrix] = checkpoint.tensor(f"{name}.weight").to(device)
        parts[f"{matrix}_scale"] = checkpoint.tensor(f"{name}.scale").float().to(device)
    w13 = torch.cat([parts["w1"].view(torch.uint8), parts["w3"].view(torch.uint8)]).view(torch.float8_e4m3fn)
    w13_scale = torch.cat([parts["w1_scale"], parts["w3_scale"]])
    return SharedExpert(w13, w13_scale, parts["w2"], parts["w2_scale"], count)
