"""Every way a layer can be dispatched, and the kernels run on one of them with poisoned scratch.

What holds for a layer must hold on every path: a test of an option is a table over these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megamoe.kernels.config import INTERPRETER, LayerConfig, choose_config
from megamoe.kernels.layer import run_layer
from megamoe.oracle.random_layers import Layer
from megamoe.recipe import Recipe, traits
from megamoe.weights import prepare
from megamoe.workspace import Workspace


@dataclass(frozen=True)
class DispatchPath:
    """A recipe, how its shared experts are stored, and which K loop serves it where that is not the default."""

    recipe: Recipe
    shared_weight: str | None = None
    mma: str | None = None


FP8XFP4 = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
MXF4 = Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100")
NVFP4 = Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100")
FP8 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
HOPPER = Recipe("fp8xfp4", "block128", "deep_gemm_sm90")
TOKEN = Recipe("fp8xfp4", "token", "deep_gemm_sm90")
BF16 = Recipe("bf16xbf16", "none", "deep_gemm_sm100")
TRTLLM = Recipe("fp8xfp4", "mx32", "trtllm_gen")
TRTLLM_NVFP4 = Recipe("nvfp4xnvfp4", "nv16", "trtllm_gen")
TRTLLM_NVFP4_TOKEN = Recipe("nvfp4xnvfp4", "nv16_token", "trtllm_gen")
TRTLLM_FP8 = Recipe("fp8xfp8", "block128", "trtllm_gen")
MXFP8 = Recipe("mxfp8xmxfp8", "mx32", "trtllm_gen")
W4A16 = Recipe("bf16xfp4", "none", "trtllm_gen")

PATHS = {
    "fp8xfp4": DispatchPath(FP8XFP4),
    "fp8xfp4, E4M3 shared": DispatchPath(FP8XFP4, "e4m3"),
    "fp8xfp4, MXFP4 shared": DispatchPath(FP8XFP4, "e2m1"),
    "mxf4xmxf4, shared": DispatchPath(MXF4, "e2m1"),
    "nvfp4xnvfp4, shared": DispatchPath(NVFP4, "e2m1"),
    "nvfp4xnvfp4 decoded, shared": DispatchPath(NVFP4, "e2m1", mma="decoded"),
    "fp8xfp4 decoded, E4M3 shared": DispatchPath(FP8XFP4, "e4m3", mma="decoded"),
    "fp8xfp4 widened, E4M3 shared": DispatchPath(FP8XFP4, "e4m3", mma="widened"),
    "mxf4xmxf4 decoded": DispatchPath(MXF4, mma="decoded"),
    "fp8xfp8, shared": DispatchPath(FP8, "e4m3"),
    "fp8xfp4 block128, E4M3 shared": DispatchPath(HOPPER, "e4m3"),
    "fp8xfp4 block128, MXFP4 shared": DispatchPath(HOPPER, "e2m1"),
    "fp8xfp4 token, E4M3 shared": DispatchPath(TOKEN, "e4m3"),
    "fp8xfp4 token, MXFP4 shared": DispatchPath(TOKEN, "e2m1"),
    "bf16xbf16, shared": DispatchPath(BF16, "bf16"),
    "trtllm fp8xfp4": DispatchPath(TRTLLM),
    "trtllm fp8xfp4, E4M3 shared": DispatchPath(TRTLLM, "e4m3"),
    "trtllm fp8xfp4 decoded, MXFP4 shared": DispatchPath(TRTLLM, "e2m1", mma="decoded"),
    "trtllm fp8xfp4 widened, E4M3 shared": DispatchPath(TRTLLM, "e4m3", mma="widened"),
    "trtllm nvfp4xnvfp4 nv16, shared": DispatchPath(TRTLLM_NVFP4, "e2m1"),
    "trtllm nvfp4xnvfp4 nv16_token decoded": DispatchPath(TRTLLM_NVFP4_TOKEN, mma="decoded"),
    "trtllm fp8xfp8, shared": DispatchPath(TRTLLM_FP8, "e4m3"),
    "mxfp8xmxfp8, shared": DispatchPath(MXFP8, "e4m3"),
    "mxfp8xmxfp8 decoded": DispatchPath(MXFP8, mma="decoded"),
    "bf16xfp4, shared": DispatchPath(W4A16, "e2m1"),
}


def _one_per_epilogue() -> frozenset[str]:
    seen: dict[tuple[str, str, bool], str] = {}
    for name, path in sorted(PATHS.items(), key=lambda entry: entry[1].shared_weight is None):
        t = traits(path.recipe)
        seen.setdefault((path.recipe.numerics, t.mid_kind, t.token_scale), name)
    return frozenset(seen.values())


REPRESENTATIVE = _one_per_epilogue()
"""Names of one path per arithmetic and kind of intermediate: options live in the epilogues, not in the K loops."""


def architecture(device: str) -> int:
    """The `arch` of `kernels.config` for "cpu" (the interpreter) or "cuda"."""
    return INTERPRETER if device == "cpu" else 10 * torch.cuda.get_device_capability()[0]


def configuration(layer: Layer, path: DispatchPath, device: str, num_tokens: int) -> LayerConfig:
    """The heuristic's choice with the path's K loop."""
    config = choose_config(layer.spec, architecture(device), num_tokens)
    if path.mma is None:
        return config
    return LayerConfig(replace(config.gate_up, mma=path.mma), replace(config.down, mma=path.mma))


def poisoned_workspace(layer: Layer, max_tokens: int, config: LayerConfig, device: str) -> Workspace:
    """A workspace full of 0xFF: NaN in every format that has one, ids that name no expert."""
    ws = Workspace.allocate(layer.spec, max_tokens, device, min_block_m=config.block_m)
    for tensor in ws.tensors().values():
        tensor.view(torch.uint8).fill_(0xFF)
    return ws


def run_path(layer: Layer, path: DispatchPath, device: str, *, ws: Workspace | None = None) -> torch.Tensor:
    """The kernels' output BF16 [T, H] for `layer`, which must be on `device`."""
    num_tokens = layer.x.shape[0]
    config = configuration(layer, path, device, num_tokens)
    output = torch.full_like(layer.x, torch.nan)
    run_layer(
        layer.x,
        layer.topk_ids,
        layer.topk_weights,
        output,
        ws=ws or poisoned_workspace(layer, num_tokens, config, device),
        weights=prepare(layer.weights, layer.spec.recipe),
        spec=layer.spec,
        config=config,
        parameters=layer.parameters,
    )
    return output
