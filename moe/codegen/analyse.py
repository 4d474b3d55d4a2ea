"""What a compiled kernel is made of, read from its PTX, LLVM IR and SASS. Text in, numbers out; no Triton.

PTX names the MMA and the arithmetic exactly: ptxas expands `div.rn` into reciprocals and FFMAs, so that SASS
cannot tell an IEEE division from an approximate one. Spills and stack exist only in SASS.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_PTX_TYPE = re.compile(r"(?:(?:f|bf|tf|s|u|b)\d+|u?e\d+m\d+)$")
_FP32 = re.compile(r"\.(f32|f32x2|f64)$")
_LLVM_FMA = re.compile(r"call [^@\n]*@llvm\.fma\.(?:v(\d+))?f(?:32|64)\(")
_SASS_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<operands>[^;]*);")
_SASS_LABEL = re.compile(r"(\.L\S*):")
_SASS_TARGET = re.compile(r"`\((\.L[^)]*)\)")
_SASS_MMA = re.compile(r"(?:UTC[A-Z]|[A-Z]G?)MMA$")


@dataclass(frozen=True)
class Report:
    """One kernel on one architecture. `smem`: dynamic bytes, `tmem`: columns, `stack`: bytes per thread.

    spills_in_mma_loops: STL and LDL in the worst main loop, as `spills_in_mma_loops` finds it.
    """

    mma: list[str]
    sass_mma: list[str]
    smem: int
    tmem: int
    registers: int
    stack: int
    stl: int
    ldl: int
    stl_in_loops: int
    ldl_in_loops: int
    spills_in_mma_loops: int = 0
    inexact: dict[str, int] = field(default_factory=dict)


def analyse(*, ptx: str, llir: str, sass: str, resources: str, smem: int, tmem: int) -> Report:
    """Read one kernel: `sass` is `nvdisasm -c`, `resources` `cuobjdump -res-usage`, the rest Triton's."""
    opcodes = ptx_opcodes(ptx)
    instructions = sass_instructions(sass)
    looped = [ins for ins, inside in zip(instructions, loop_mask(instructions)) if inside]
    registers, stack = resource_usage(resources)
    return Report(
        mma=mma_kinds(opcodes),
        sass_mma=sorted({ins.op for ins in instructions if _SASS_MMA.match(ins.op.split(".")[0])}),
        smem=smem,
        tmem=tmem,
        registers=registers,
        stack=stack,
        stl=_count(instructions, "STL"),
        ldl=_count(instructions, "LDL"),
        stl_in_loops=_count(looped, "STL"),
        ldl_in_loops=_count(looped, "LDL"),
        spills_in_mma_loops=spills_in_mma_loops(instructions),
        inexact=inexact_arithmetic(opcodes, llir),
    )


def ptx_opcodes(ptx: str) -> Counter[str]:
    """Full opcode (`mul.rn.f32`) → occurrences, also where inline PTX puts several instructions on a line."""
    text = re.sub(r'//[^\n]*|"[^"\n]*"', "", ptx)
    found: Counter[str] = Counter()
    for statement in re.split(r"[;{}\n]", text):
        words = re.sub(r"^\s*(?:[\w$]+:\s*)?(?:@!?\S+\s+)?", "", statement).split(None, 1)
        if words and re.match(r"[a-z_]\w*\.", words[0]):
            found[words[0]] += 1
    return found


def mma_kinds(opcodes: Iterable[str]) -> list[str]:
    """Tensor core instructions, named alike for every Triton: instruction, kind, block_scale, operand types.

    tcgen05 carries operand types in descriptors that exist only at run time; there the kind is all PTX says.
    """
    kinds = set()
    for opcode in opcodes:
        parts = opcode.split(".")
        if opcode.startswith(("tcgen05.mma.", "mma.sync.")):
            name = ".".join(parts[:2])
        elif opcode.startswith("wgmma.mma_async."):
            name = "wgmma"
        else:
            continue
        types = [part for part in parts if _PTX_TYPE.match(part)]
        operands = types[1:3] + types[4:]  # without the accumulators; block-scaled ones end with the scale type
        details = [part for part in parts if part.startswith("kind::") or part == "block_scale"]
        kinds.add(" ".join([name, *details, *([".".join(operands)] if operands else [])]))
    return sorted(kinds)


def inexact_arithmetic(opcodes: Counter[str], llir: str) -> dict[str, int]:
    """Arithmetic that is not IEEE fp32 as written: "<op>.approx", "<op>.full", "fusion", "ftz" → count.

    Fusion is judged twice. An `fma` beyond LLVM IR's `llvm.fma` calls (what `tl.fma` becomes) was contracted
    by LLVM; an add, sub or mul without a rounding mode is one that ptxas may contract, which `.rn` forbids.
    """
    found: Counter[str] = Counter()
    fused = -sum(int(lanes or 1) for lanes in _LLVM_FMA.findall(llir))
    for opcode, count in opcodes.items():
        operation = opcode.split(".")[0]
        if approximate := re.search(r"\.(approx|full)\b", opcode):
            found[f"{operation}.{approximate[1]}"] += count
        elif width := _FP32.search(opcode):
            lanes = count * (2 if width[1] == "f32x2" else 1)
            if operation == "fma":
                fused += lanes
            elif operation in ("add", "sub", "mul", "mad") and not re.search(r"\.r[nzmp]\.", opcode):
                found["fusion"] += lanes
            if ".ftz" in opcode:
                found["ftz"] += lanes
    found["fusion"] += max(fused, 0)
    return {name: count for name, count in sorted(found.items()) if count}


def resource_usage(text: str) -> tuple[int, int]:
    """(registers per thread, stack bytes) of `cuobjdump -res-usage`, the largest among its functions."""
    functions = re.findall(r"\bREG:(\d+) STACK:(\d+)", text)
    if not functions:
        raise ValueError(f"no REG/STACK line in the output of cuobjdump -res-usage: {text!r}")
    return max(int(reg) for reg, _ in functions), max(int(stack) for _, stack in functions)


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction; `labels` stand in front of it, `target` is the label it may jump to."""

    op: str
    labels: tuple[str, ...]
    target: str | None
    falls_through: bool


def sass_instructions(sass: str) -> list[Instruction]:
    """The instructions of `nvdisasm -c`, in order of address."""
    instructions: list[Instruction] = []
    labels: list[str] = []
    for line in sass.splitlines():
        if label := _SASS_LABEL.match(line):
            labels.append(label[1])
        elif match := _SASS_LINE.match(line):
            op, operands = match["op"], match["operands"]
            target = _SASS_TARGET.search(operands)
            jumps = op.split(".")[0] in ("BRA", "EXIT", "RET", "BRX", "JMP")
            # `BRA.U UP0, label` and `BRA !P2, label` are conditional without a guard.
            conditional = bool(match["guard"]) or "," in operands
            instructions.append(Instruction(op, tuple(labels), target and target[1], conditional or not jumps))
            labels = []
    if not instructions:
        raise ValueError("no instruction found in the output of nvdisasm -c")
    return instructions


def loop_mask(instructions: list[Instruction]) -> list[bool]:
    """Which instructions can be reached again from themselves.

    Not simply those between a backward branch and its target: the compiler moves the spinning half of a
    barrier wait behind the epilogue, and its way back into the main loop would make a loop of the epilogue.
    """
    position = {label: i for i, ins in enumerate(instructions) for label in ins.labels}
    after: list[list[int]] = [[] for _ in instructions]
    before: list[list[int]] = [[] for _ in instructions]
    backward = []
    for i, ins in enumerate(instructions):
        successors = [i + 1] if ins.falls_through and i + 1 < len(instructions) else []
        if ins.target in position:
            successors.append(position[ins.target])
        for j in successors:
            after[i].append(j)
            before[j].append(i)
            if j <= i:
                backward.append((i, j))
    mask = [False] * len(instructions)
    for source, target in backward:  # every cycle has a backward edge
        for i in _reachable(target, after) & _reachable(source, before):
            mask[i] = True
    return mask


def spills_in_mma_loops(instructions: list[Instruction]) -> int:
    """The most STL and LDL in one innermost loop around an MMA: between a backward branch and its target."""
    position = {label: i for i, ins in enumerate(instructions) for label in ins.labels}
    loops = sorted(
        (
            (position[ins.target], i)
            for i, ins in enumerate(instructions)
            if ins.target in position and position[ins.target] <= i
        ),
        key=lambda loop: loop[1] - loop[0],
    )
    innermost = {
        next((loop for loop in loops if loop[0] <= i <= loop[1]), (i, i))
        for i, ins in enumerate(instructions)
        if _SASS_MMA.match(ins.op.split(".")[0])
    }
    bodies = [instructions[first : last + 1] for first, last in innermost]
    return max((_count(body, "STL") + _count(body, "LDL") for body in bodies), default=0)


def _reachable(start: int, edges: list[list[int]]) -> set[int]:
    seen, todo = {start}, [start]
    while todo:
        for node in edges[todo.pop()]:
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return seen


def _count(instructions: list[Instruction], op: str) -> int:
    return sum(ins.op.split(".")[0] == op for ins in instructions)
