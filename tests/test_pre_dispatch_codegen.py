"""What the pre-dispatch becomes: exact arithmetic, wide memory accesses, few instructions per element, few kernels.

`test_codegen.py` judges every default launch. Here the routing is compiled out, so that what is left is the path that
moves the bytes. No launch is specialised on token counts, strides and addresses (`pre_dispatch_kernel`): one kernel per
alignment class, which must be as wide as if it were. The compiler runs in a process without the interpreter: this file,
as a script.
"""

from __future__ import annotations

import dataclasses
import json
import math
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


_E4M3 = "cvt.rn.satfinite.e4m3x2.f32"
EXPECTED = {
    # Elements; scale bytes.
    "mxfp8": Expected(frozenset({"STG.E.128", "STG.E.U8"}), 8.3, _E4M3),
    "mxfp8_trtllm": Expected(frozenset({"STG.E.128", "STG.E.U8"}), 8.3, _E4M3),
    "mxfp4": Expected(frozenset({"STG.E.64", "STG.E.U8"}), 13),
    "nvfp4_gsf": Expected(frozenset({"STG.E.64", "STG.E.U8"}), 23, _E4M3),
    # Elements; scale bytes; the token's scale.
    "nvfp4": Expected(frozenset({"STG.E.64", "STG.E.U8", "STG.E"}), 15, _E4M3),
    "fp8_block128": Expected(frozenset({"STG.E.128", "STG.E"}), 13.5, _E4M3),
    "fp8_token": Expected(frozenset({"STG.E.128", "STG.E"}), 6.7, _E4M3),
    "bf16": Expected(frozenset({"STG.E.128"}), 2),
}


def _compile(kind: str, arch: int, aligned: bool = True) -> dict[str, object]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megamoe.codegen.analyse import analyse
    from megamoe.codegen.compile import disassemble
    from megamoe.kernels.pre_dispatch import KINDS, compile_jobs

    job = next(job for job in compile_jobs(arch) if job.name == f"pre_dispatch/{kind}/{HIDDEN}")
    assert not job.divisible_by_16, "nothing is promised but by ALIGNED"
    job = dataclasses.replace(job, constexprs={**job.constexprs, "TOP_K": 0, "ALIGNED": aligned})
    arguments = job.fn.arg_names
    signature = {name: "constexpr" if name in job.constexprs else job.signature[name] for name in arguments}
    kernel = compile(
        ASTSource(job.fn, signature, job.constexprs, {}),
        target=GPUTarget("cuda", arch, 32),
        options=dict(job.options),
    )
    resources, sass = disassemble(kernel.asm["cubin"])
    report = analyse(ptx=kernel.asm["ptx"], llir=kernel.asm["llir"], sass=sass, resources=resources, smem=0, tmem=0)
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)
    threads = 32 * int(job.options["num_warps"])
    spec = KINDS[kind]
    elements = HIDDEN if spec.by_row else job.constexprs["UNITS"] * (job.constexprs["GROUP"] or spec.unit)
    return {
        "elements": elements / threads,
        "opcodes": Counter(opcodes),
        "conversions": sorted(set(re.findall(r"cvt\.rn\.satfinite[\w.]*", kernel.asm["ptx"]))),
        "inexact": report.inexact,
        "spills": [report.stack, report.stl, report.ldl],
    }


def _cache_keys() -> dict[str, list[str]]:
    """Kernels that calls differing in token counts, strides and addresses alone would compile, per kind and class."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from megamoe.kernels import pre_dispatch as family

    kernel = family.pre_dispatch_kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    keys: set[str] = set()

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(*args: object, **options: object) -> None:
                _, specialization, rest = bind(*args, debug=False, **options)
                keys.add(f"{specialization} {rest}")

            return launch

    family.pre_dispatch_kernel = Recorder()
    hidden, top_k, result = 256, 3, {}

    def at(before: int, shape: tuple[int, ...], dtype: torch.dtype, beyond: int = 0) -> torch.Tensor:
        """A tensor `before` elements behind an aligned address, its rows `beyond` elements apart."""
        *rows, width = shape
        whole = torch.zeros(before + math.prod(rows) * (width + beyond), dtype=dtype)
        return whole[before:].view(*rows, width + beyond)[..., :width]

    for kind, spec in family.KINDS.items():
        for aligned in (True, False):
            keys.clear()
            for tokens in (1, 2, 15, 16, 17, 128, 1000):
                for step in range(4):
                    unit = step * 16 if aligned else 1 + 2 * step  # of x: elements
                    rows = tokens + 16 * step
                    q_dtype = spec.element_dtypes[step % len(spec.element_dtypes)]
                    sf = None
                    if spec.scale_dtype is not None:
                        sf = at(step, (rows, hidden // (spec.groups[0] or hidden)), spec.scale_dtype, step)
                    family.pre_dispatch(
                        at(unit, (tokens, hidden), torch.bfloat16, unit),
                        at(step, (tokens * top_k,), torch.int32).view(tokens, top_k),
                        at(step, (tokens * top_k,), torch.float32).view(tokens, top_k),
                        q=at(16 * step, (rows, hidden // spec.elements_per_byte), q_dtype, 16 * step),
                        sf=sf, kind=kind,
                        ids_out=at(step, (rows * top_k,), torch.int64).view(rows, top_k),
                        weights_out=at(step, (rows * top_k,), torch.float32).view(rows, top_k),
                        token_scale=at(step, (rows,), torch.float32) if spec.token_scale else None,
                        expert_scales=at(step, (7 + 9 * step,), torch.float32),
                        x_gsf=at(step, (1,), torch.float32) if spec.x_gsf else None,
                        routed_scaling_factor=2.5 + step,
                        id_map=family.IdMap(
                            7 + 9 * step, step, 1 + 15 * step, step, at(step, (7 + 9 * step,), torch.int32)
                        ),
                    )  # fmt: skip
            result[f"{kind}, {'aligned' if aligned else 'unaligned'}"] = sorted(keys)
    return result


# Blackwell's code and that of unaligned rows: two kinds stand for the others here, `make codegen` compiles them all.
CASES = [("90", kind) for kind in EXPECTED] + [
    (target, kind) for target in ("100", "120", "90 unaligned") for kind in ("mxfp8", "nvfp4")
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize(("target", "kind"), CASES)
def test_arithmetic_is_exact(compiled: dict, target: str, kind: str) -> None:
    assert compiled[target][kind]["inexact"] == {}
    assert compiled[target][kind]["spills"] == [0, 0, 0]


def test_one_kernel_for_all_token_counts_strides_and_addresses(compiled: dict) -> None:
    """One for aligned rows, one for all others."""
    keys = compiled["cache keys"]
    assert len(keys) == 2 * len(EXPECTED)
    for name, found in keys.items():
        assert len(found) == 1, f"{name}: {found}"
    for kind in EXPECTED:
        assert keys[f"{kind}, aligned"] != keys[f"{kind}, unaligned"], "the classes are told apart"


@pytest.mark.parametrize(("target", "kind"), [case for case in CASES if "unaligned" not in case[0]])
def test_rows_are_read_16_bytes_at_a_time(compiled: dict, target: str, kind: str) -> None:
    opcodes = compiled[target][kind]["opcodes"]
    loads = {name: count for name, count in opcodes.items() if name.startswith("LDG")}
    assert loads.pop("LDG.E.128") == compiled[target][kind]["elements"] / 8
    assert loads == ({"LDG.E": 1} if kind == "nvfp4_gsf" else {}), "the global factor alone is not x's"


@pytest.mark.parametrize("kind", EXPECTED)
def test_stores_are_wide(compiled: dict, kind: str) -> None:
    opcodes = compiled["90"][kind]["opcodes"]
    stores = {name for name in opcodes if name.startswith("STG")}
    assert stores <= EXPECTED[kind].stores, stores
    assert stores & {"STG.E.64", "STG.E.128"}


@pytest.mark.parametrize("kind", EXPECTED)
def test_conversion_to_e4m3_is_the_hardwares(compiled: dict, kind: str) -> None:
    conversion = EXPECTED[kind].conversion
    assert compiled["90"][kind]["conversions"] == ([] if conversion is None else [conversion])


@pytest.mark.parametrize("kind", EXPECTED)
def test_instructions_per_element(compiled: dict, kind: str) -> None:
    opcodes = compiled["90"][kind]["opcodes"]
    total = sum(opcodes.values()) - opcodes.get("NOP", 0)
    assert total / compiled["90"][kind]["elements"] <= EXPECTED[kind].instructions


@pytest.mark.parametrize("kind", ("mxfp4", "nvfp4"))
def test_nan_costs_the_e2m1_encoder_nothing(compiled: dict, kind: str) -> None:
    """The encoder's clamp to [0, 1] is a modifier of its multiplication, one per element."""
    assert compiled["90"][kind]["opcodes"].get("FMUL.SAT") == compiled["90"][kind]["elements"]


if __name__ == "__main__":
    targets = {"90": (90,), "100": (100,), "120": (120,), "90 unaligned": (90, False)}
    result: dict[str, object] = {
        name: {kind: _compile(kind, *of) for target, kind in CASES if target == name} for name, of in targets.items()
    }
    print(json.dumps(result | {"cache keys": _cache_keys()}))
