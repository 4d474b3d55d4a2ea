"""MoE layers of published checkpoints: safetensors, memory-mapped, one layer at a time.

`read_layer` brings a layer into the arguments of `prepare_weights` and `MegaMoE`; DeepSeek-V4's and gpt-oss's names are
known. `write_tiny_checkpoint` makes small folders of the same names for tests.
"""

from megamoe.checkpoints.files import Checkpoint, CheckpointError
from megamoe.checkpoints.layer import CheckpointLayer, SharedExpert
from megamoe.checkpoints.read import read_layer
from megamoe.checkpoints.tiny import KINDS, write_tiny_checkpoint

__all__ = [
    "KINDS",
    "Checkpoint",
    "CheckpointError",
    "CheckpointLayer",
    "SharedExpert",
    "read_layer",
    "write_tiny_checkpoint",
]
