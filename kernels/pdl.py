"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

A launch with the option `launch_pdl` may start as soon as every program of the kernel before it has executed
`gdc_launch_dependents` or ended; `gdc_wait` then holds it until that kernel has completed and all it wrote is visible.
Without the option both do nothing. They are inline assembly: GPUs only, compute capability 9.0 and up.

The rule of a chain of such launches:
- Every program executes `gdc_wait` before it ends, and `gdc_launch_dependents`, if at all, after it. A kernel that has
  completed then means that all before it in the chain have, and one may start only when the last but one has completed.
- Before its wait a kernel writes nothing to global memory, and of what the chain writes it reads only what kernels at
  least two launches back wrote, past L1 (".cg"), which nothing has emptied of older lines.
- The first launch of the chain has no `launch_pdl`, so that what the caller's kernels wrote is complete for all of it.
  The last lets no other start early: a caller's kernel finds it completed.
"""

from __future__ import annotations

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["PDL", "gdc_launch_dependents", "gdc_wait", "overlaps"]

PDL = True
"""Whether launches overlap where they can; read at every launch, so that both can be measured in one process."""


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether launches of a chain on `tensor`'s device can overlap: on a GPU, not in Triton's interpreter."""
    return PDL and tensor.is_cuda and not triton.knobs.runtime.interpret
