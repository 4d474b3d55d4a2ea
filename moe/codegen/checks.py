"""What a compiled job must be: no spills, only arithmetic its contract allows, the MMA of its recipe."""

from __future__ import annotations

from megamoe.codegen.analyse import Report
from megamoe.kernels.config import SHARED_MEMORY

TMEM_COLUMNS = 512
GEMMS = ("gate_up", "down")
# Persistent kernels that fill the register file: what their epilogues need may wait in local memory. Of a main loop's
# 200 to 400 instructions Triton 3.6, which the H200 runs, spills none, and 3.9 up to three words.
PERSISTENT = ("hopper_gate_up", "hopper_down")
MAIN_LOOP_SPILLS = 6  # stores and loads
BF16 = {90: "wgmma bf16.bf16", 100: "tcgen05.mma kind::f16", 120: "mma.sync bf16.bf16"}
FP8 = {90: "wgmma e4m3.e4m3", 100: "tcgen05.mma kind::f8f6f4", 120: "mma.sync e4m3.e4m3"}
MXFP8 = {
    90: BF16[90],
    100: "tcgen05.mma kind::mxf8f6f4 block_scale",
    120: "mma.sync kind::mxf8f6f4 block_scale e4m3.e4m3.ue8m0",
}
MXFP4 = {
    90: BF16[90],
    100: "tcgen05.mma kind::mxf4 block_scale",
    120: "mma.sync kind::mxf4nvf4 block_scale e2m1.e2m1.ue8m0",
}
NVFP4 = {
    90: BF16[90],
    100: "tcgen05.mma kind::mxf4nvf4 block_scale",
    120: "mma.sync kind::mxf4nvf4 block_scale e2m1.e2m1.ue4m3",
}
# The MMAs that each recipe must reach, and no others: Blackwell's own block scales, SM90's exact BF16 and its FP8.
# Beside fp32-scaled activations MXFP4 experts decode to BF16 and a dense shared expert, E4M3, does not.
MMA = {
    "fp8xfp4": (MXFP8,),
    "fp8xfp4/block128": (BF16, FP8),
    "fp8xfp4/token": (BF16, FP8),
    "mxf4xmxf4": (MXFP4,),
    "nvfp4xnvfp4": (NVFP4,),
    "fp8xfp8": (FP8,),
    "mxfp8xmxfp8": (MXFP8,),
    "bf16xbf16": (BF16,),
    "bf16xfp4": (BF16,),
}


def expected_mma(recipe: str, arch: int) -> list[str]:
    """The MMAs of a `mma_type/act_scale/numerics`, sorted; none for what is no recipe."""
    mma_type, _, rest = recipe.partition("/")
    kinds = MMA.get(f"{mma_type}/{rest.partition('/')[0]}") or MMA.get(mma_type, ())
    return sorted(kind[arch] for kind in kinds)


def violations(report: Report, *, arch: int, kernel: str, recipe: str, contract: frozenset[str]) -> list[str]:
    """What is wrong with a compiled job, one sentence each; empty when it keeps its contract."""
    found = []
    if kernel in PERSISTENT and report.spills_in_mma_loops > MAIN_LOOP_SPILLS:
        found.append(f"{report.spills_in_mma_loops} × STL or LDL in main loops; allowed: {MAIN_LOOP_SPILLS}")
    if report.stack and kernel not in PERSISTENT:
        found.append(f"STACK:{report.stack} (must be 0)")
    if (report.stl or report.ldl) and kernel not in PERSISTENT:
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
    expected = expected_mma(recipe, arch)
    if kernel in GEMMS and expected and sorted(report.mma) != expected:
        found.append(f"MMA is {', '.join(report.mma) or 'none'}; {recipe} needs {', '.join(expected)}")
    return found
