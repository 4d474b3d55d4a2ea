"""What the pre-dispatch becomes on SM90: exact arithmetic, wide memory accesses, few instructions per element.

`test_codegen.py` judges every default launch. Here the routing is compiled out, so that what is left is the path that
moves the bytes. The compiler runs in a process without the interpreter: this file, as a script.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.compile_only

HIDDEN = 4096


@dataclass(frozen=True)
class Expected:
    """Stores a thread may make, and SASS instructions per element, the divisions' slow paths included.

    The budgets are a tenth above what ptxas 12.8 and 12.9 make; an H200 has about 20 issue slots per element in the
    time that the bytes of 8192 × 4096 take.
    """

    stores: frozenset[str]
    instructions: float
    conversion: str | None = None  # in PTX


EXPECTED = {
    # Elements; scale bytes.
    "mxfp8": Expected(frozenset({"STG.E.128", "STG.E.U8"}), 8, "cvt.rn.satfinite.e4m3x2.f32"),
    "mxfp4": Expected(frozenset({"STG.E.64", "STG.E.U8"}), 13),
    # Elements; scale bytes; the token's scale.
    "nvfp4": Expected(frozenset({"STG.E.64", "STG.E.U16", "STG.E.U8", "STG.E"}), 19, "cvt.rn.satfinite.e4m3x2.f32"),
    "fp8_block128": Expected(frozenset({"STG.E.128", "STG.E"}), 13.5, "cvt.rn.satfinite.e4m3x2.f32"),
}


def _compile(kind: str) -> dict[str, object]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megamoe.codegen.analyse import analyse
    from megamoe.codegen.compile import disassemble
    from megamoe.kernels.pre_dispatch import compile_jobs

    job = next(job for job in compile_jobs(90) if job.name == f"pre_dispatch/{kind}/{HIDDEN}")
    job = dataclasses.replace(job, constexprs={**job.constexprs, "TOP_K": 0})
    arguments = job.fn.arg_names
    signature = {name: "constexpr" if name in job.constexprs else job.signature[name] for name in arguments}
    attributes = {(arguments.index(name),): [["tt.divisibility", 16]] for name in job.divisible_by_16}
    kernel = compile(
        ASTSource(job.fn, signature, job.constexprs, attributes),
        target=GPUTarget("cuda", 90, 32),
        options=dict(job.options),
    )
    resources, sass = disassemble(kernel.asm["cubin"])
    report = analyse(ptx=kernel.asm["ptx"], llir=kernel.asm["llir"], sass=sass, resources=resources, smem=0, tmem=0)
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)
    threads = 32 * int(job.options["num_warps"])
    return {
        "elements": job.constexprs["GROUPS"] * job.constexprs["GROUP"] / threads,
        "opcodes": Counter(opcodes),
        "conversions": sorted(set(re.findall(r"cvt\.rn\.satfinite[\w.]*", kernel.asm["ptx"]))),
        "inexact": report.inexact,
        "spills": [report.stack, report.stl, report.ldl],
    }


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", EXPECTED)
def test_arithmetic_is_exact(compiled: dict, kind: str) -> None:
    assert compiled[kind]["inexact"] == {}
    assert compiled[kind]["spills"] == [0, 0, 0]


@pytest.mark.parametrize("kind", EXPECTED)
def test_memory_accesses_are_wide(compiled: dict, kind: str) -> None:
    opcodes = compiled[kind]["opcodes"]
    loads = {name: count for name, count in opcodes.items() if name.startswith("LDG")}
    assert loads == {"LDG.E.128": compiled[kind]["elements"] / 8}
    stores = {name for name in opcodes if name.startswith("STG")}
    assert stores <= EXPECTED[kind].stores, stores
    assert stores & {"STG.E.64", "STG.E.128"}


@pytest.mark.parametrize("kind", EXPECTED)
def test_conversion_to_e4m3_is_the_hardwares(compiled: dict, kind: str) -> None:
    conversion = EXPECTED[kind].conversion
    assert compiled[kind]["conversions"] == ([] if conversion is None else [conversion])


@pytest.mark.parametrize("kind", EXPECTED)
def test_instructions_per_element(compiled: dict, kind: str) -> None:
    opcodes = compiled[kind]["opcodes"]
    total = sum(opcodes.values()) - opcodes.get("NOP", 0)
    assert total / compiled[kind]["elements"] <= EXPECTED[kind].instructions


@pytest.mark.parametrize("kind", ("mxfp4", "nvfp4"))
def test_nan_costs_the_e2m1_encoder_nothing(compiled: dict, kind: str) -> None:
    """The encoder's clamp to [0, 1] is a modifier of its multiplication, one per element."""
    assert compiled[kind]["opcodes"].get("FMUL.SAT") == compiled[kind]["elements"]


if __name__ == "__main__":
    print(json.dumps({kind: _compile(kind) for kind in EXPECTED}))
