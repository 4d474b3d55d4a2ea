"""What a compiled job must be: no spills, only arithmetic its contract allows, the MMA of its recipe."""

from __future__ import annotations

from megamoe.codegen.analyse import Report
from megamoe.kernels.config import SHARED_MEMORY

TMEM_COLUMNS = 512
GEMMS = ("gate_up", "down")
# The MMA that each recipe must reach, and no other: Blackwell's own block scales, SM90's exact BF16 and its FP8.
MMA = {
    90: {
        "fp8xfp4": "wgmma bf16.bf16",
        "mxf4xmxf4": "wgmma bf16.bf16",
        "nvfp4xnvfp4": "wgmma bf16.bf16",
        "fp8xfp8": "wgmma e4m3.e4m3",
    },
    100: {
        "fp8xfp4": "tcgen05.mma kind::mxf8f6f4 block_scale",
        "mxf4xmxf4": "tcgen05.mma kind::mxf4 block_scale",
        "nvfp4xnvfp4": "tcgen05.mma kind::mxf4nvf4 block_scale",
        "fp8xfp8": "tcgen05.mma kind::f8f6f4",
    },
    120: {
        "fp8xfp4": "mma.sync kind::mxf8f6f4 block_scale e4m3.e4m3.ue8m0",
        "mxf4xmxf4": "mma.sync kind::mxf4nvf4 block_scale e2m1.e2m1.ue8m0",
        "nvfp4xnvfp4": "mma.sync kind::mxf4nvf4 block_scale e2m1.e2m1.ue4m3",
        "fp8xfp8": "mma.sync e4m3.e4m3",
    },
}


def violations(report: Report, *, arch: int, kernel: str, recipe: str, contract: frozenset[str]) -> list[str]:
    """What is wrong with a compiled job, one sentence each; empty when it keeps its contract."""
    found = []
    if report.stack:
        found.append(f"STACK:{report.stack} (must be 0)")
    if report.stl or report.ldl:
        stores = f"{report.stl} STL ({report.stl_in_loops} in loops)"
        loads = f"{report.ldl} LDL ({report.ldl_in_loops} in loops)"
        found.append(f"spills: {stores}, {loads}")
    if report.smem > SHARED_MEMORY[arch]:
        found.append(f"{report.smem} bytes of shared memory; sm_{arch} has {SHARED_MEMORY[arch]}")
    if report.tmem > TMEM_COLUMNS:
        found.append(f"{report.tmem} columns of tensor memory; there are {TMEM_COLUMNS}")
    for name, count in report.inexact.items():
        if name not in contract:
            found.append(f"{count} × {name} (allowed: {', '.join(sorted(contract)) or 'none'})")
    # A sigmoid is one exponential and one division: where both are allowed, no other division may hide.
    divisions, exponentials = report.inexact.get("div.full", 0), report.inexact.get("ex2.approx", 0)
    if contract >= {"div.full", "ex2.approx"} and divisions > exponentials:
        found.append(f"{divisions} × div.full for {exponentials} × ex2.approx: not every division is a sigmoid's")
    expected = MMA[arch].get(recipe.split("/")[0])
    if kernel in GEMMS and expected is not None and report.mma != [expected]:
        found.append(f"MMA is {', '.join(report.mma) or 'none'}; {recipe} needs {expected}")
    return found
