"""Tiny checkpoints with the names, types and layouts of published ones, random numbers inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megamoe import formats
from megamoe.checkpoints.files import CONFIG, INDEX

KINDS = ("deepseek_v4_fp8", "deepseek_v4_mxfp4", "gpt_oss")


def write_tiny_checkpoint(
    folder: Path | str,
    kind: str,
    *,
    layer: int = 3,
    hidden: int = 256,
    intermediate: int = 128,
    num_experts: int = 4,
    top_k: int = 2,
    num_shared_experts: int = 1,
    seed: int = 0,
) -> None:
    """Write one MoE layer of `kind` into `folder` (made if missing): config.json and one safetensors file; DeepSeek's
    kinds in two shards with an index. hidden and intermediate are multiples of 32, under FP8 of 128."""
    from safetensors.torch import save_file

    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(map(repr, KINDS))}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    if kind == "gpt_oss":
        config: dict[str, Any] = {
            "model_type": "gpt_oss", "num_local_experts": num_experts, "num_experts_per_tok": top_k,
            "hidden_size": hidden, "intermediate_size": intermediate, "swiglu_limit": 7.0,
        }  # fmt: skip
        save_file(_gpt_oss(layer, hidden, intermediate, num_experts, generator), folder / "model.safetensors")
    else:
        config = {
            "model_type": "deepseek_v4", "n_routed_experts": num_experts, "n_shared_experts": num_shared_experts,
            "num_experts_per_tok": top_k, "hidden_size": hidden, "moe_intermediate_size": intermediate,
            "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        }  # fmt: skip
        packed = kind == "deepseek_v4_mxfp4"
        prefix = f"layers.{layer}.ffn."
        experts: dict[str, torch.Tensor] = {}
        for expert in range(num_experts):
            experts |= _expert(f"{prefix}experts.{expert}.", hidden, intermediate, packed, generator)
        width = intermediate * num_shared_experts
        shared = _expert(f"{prefix}shared_experts.", hidden, width, False, generator) if width else {}
        shared[f"layers.{layer}.ffn_norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        weight_map: dict[str, str] = {}
        for number, tensors in enumerate((experts, shared), 1):
            file = f"model-{number:05}-of-00002.safetensors"
            save_file(tensors, folder / file)
            weight_map |= dict.fromkeys(tensors, file)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / CONFIG).write_text(json.dumps(config))


def _expert(
    prefix: str, hidden: int, intermediate: int, packed: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for matrix, shape in {
        "w1": (intermediate, hidden),
        "w2": (hidden, intermediate),
        "w3": (intermediate, hidden),
    }.items():
        weight, scale = (_mxfp4 if packed else _fp8)(*shape, generator)
        tensors |= {f"{prefix}{matrix}.weight": weight, f"{prefix}{matrix}.scale": scale}
    return tensors


def _gpt_oss(
    layer: int, hidden: int, intermediate: int, num_experts: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for matrix, (rows, columns) in {
        "gate_up_proj": (2 * intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }.items():
        weight, scale = _mxfp4(num_experts * rows, columns, generator)
        name = f"model.layers.{layer}.mlp.experts.{matrix}"
        bias = 0.3 * torch.randn(num_experts, rows, generator=generator)
        tensors |= {
            f"{name}_blocks": weight.view(torch.uint8).reshape(num_experts, rows, columns // 32, 16),
            f"{name}_scales": scale.view(torch.uint8).reshape(num_experts, rows, columns // 32),
            f"{name}_bias": bias.bfloat16(),
        }
    return tensors


def _fp8(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal rows of size about columns^-½ as E4M3 and UE8M0 block scales."""
    blocks = -(-rows // 128), -(-columns // 128)
    scale = torch.exp2(torch.randint(-12, -9, blocks, generator=generator).float())
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    w = torch.randn(rows, columns, generator=generator) * columns**-0.5
    return formats.encode_e4m3(w / wide), scale.to(torch.float8_e8m0fnu)


def _mxfp4(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, scales around columns^-½ / 4."""
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    around = 127 - 2 - int(torch.tensor(float(columns)).log2()) // 2
    scale = around + torch.randint(-1, 2, (rows, columns // 32), generator=generator)
    return codes.view(torch.int8), scale.to(torch.uint8).view(torch.float8_e8m0fnu)
