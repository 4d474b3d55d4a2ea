"""`read_layer`: a layer of a checkpoint whose naming is one of the known ones, told by the names themselves."""

from __future__ import annotations

from pathlib import Path

import torch

from megamoe import validation
from megamoe.checkpoints import deepseek_v4, gpt_oss
from megamoe.checkpoints.files import Checkpoint, CheckpointError, shortened
from megamoe.checkpoints.layer import CheckpointLayer

FAMILIES = (deepseek_v4, gpt_oss)


def read_layer(folder: Path | str, layer: int, device: torch.device | str = "cpu") -> CheckpointLayer:
    """MoE layer `layer` (counted as the names count) of the checkpoint in `folder`, its weights on `device`.

    Only this layer's tensors are read, from memory-mapped files: on the device is one copy of them, on the host nothing
    but the pages in use. Raises `CheckpointError` (a `ValueError`) with what was found and what was expected,
    `ImportError` without the package safetensors.
    """
    validation.check_count("layer", layer, 0)
    checkpoint = Checkpoint(folder)
    layers: set[int] = set()
    for family in FAMILIES:
        for match in filter(None, map(family.LAYER_NAMES.fullmatch, checkpoint.names)):
            if int(match[1]) == layer:
                return family.read(checkpoint, layer, torch.device(device))
            layers.add(int(match[1]))
    if layers:
        raise CheckpointError(
            f"layer {layer} of {folder} has no experts; MoE layers there: {shortened([str(n) for n in sorted(layers)])}"
        )
    expected = " or ".join(family.EXPECTED for family in FAMILIES)
    raise CheckpointError(
        f"{folder} has no MoE layer of a known naming: expected {expected}; found {shortened(checkpoint.names)}"
    )
