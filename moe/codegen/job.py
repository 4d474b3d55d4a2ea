"""`CompileJob`: one kernel, fully specialised, ready to be compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ARCHS = (90, 100, 120)


@dataclass(frozen=True)
class CompileJob:
    """A launch as the launcher would make it, described instead of made.

    name: unique per architecture, e.g. "gate_up/fp8xfp4/128x128x128".
    kernel: the family, e.g. "gate_up", "down", "pre_dispatch", "requantize", "combine", "routing".
    recipe: `str(Recipe)`, or what distinguishes the job in a kernel without one (a kind, an id type).
    fn: the `@triton.jit` function.
    signature: every argument of `fn` → "*fp32", "i32", …; arguments in `constexprs` may be left out.
    constexprs: argument → compile-time value.
    options: the launch options, e.g. num_warps, num_stages, enable_fp_fusion.
    divisible_by_16: arguments (pointers, strides) that the launcher guarantees to be multiples of 16.
    contract: the inexact arithmetic this kernel MAY contain; empty for kernels whose bytes are a contract.
        "<op>.approx" and "<op>.full" as in PTX (div.full, div.approx, rcp.approx, ex2.approx, …), "fusion" (a
        multiply-add that no `tl.fma` asked for), "ftz" (subnormals flushed by otherwise exact arithmetic).
    """

    name: str
    kernel: str
    recipe: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    options: dict[str, object] = field(default_factory=dict)
    divisible_by_16: frozenset[str] = frozenset()
    contract: frozenset[str] = frozenset()
