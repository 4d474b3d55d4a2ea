"""Every kernel on small inputs, one case after another: what compute-sanitizer is pointed at.

    compute-sanitizer --tool memcheck python3 -m megamoe.bench.sanitizer_sweep [--only TEXT] [--part I/N] [--list]
        [--under TOOL]
    python3 -m megamoe.bench.sanitizer_sweep --run [--tool TOOL …] [--jobs N] [--limit SECONDS] [--out FILE]

The first runs the cases once. The second first runs them without a tool, which fills Triton's cache and shows that they
work, then each tool in N processes that share the cases, and writes a JSON summary (default:
bench/results/sanitizer_h200.json). Its exit status is 1 unless every case that a tool can judge ran under it without a
finding and every planted fault was found. Set PYTHONPATH=src in a checkout. compute-sanitizer needs a machine that
gives it the device; where it gets none it says "Device not supported". Tools may run one by one (`--tool`): they share
the file.

What the tools see
------------------
PyTorch's caching allocator carves tensors out of large blocks, in which a read past a tensor's end is legal and memory
of a freed tensor counts as written. The driver sets PYTORCH_NO_CUDA_MEMORY_CACHING=1: each tensor is one cudaMalloc of
its own size, which memcheck surrounds with 256 bytes (`--padding`) that belong to nobody.

initcheck reports reads of memory that nothing wrote since its allocation. The workspace and every output are left as
`torch.empty` makes them, never filled: rows of slots that no expert serves, rows beyond the tokens, bytes that round a
row of scales up to whole words and holes of the permuted order are all unwritten, and the kernels promise not to read
them. A masked load does not execute for masked lanes, in registers or as an asynchronous copy (which then reads no
bytes and writes zeros to shared memory), so it is no finding; Triton widens an access only as far as the mask is known
to be constant. A finding is therefore a fault, and nothing has to be filtered out. Scale atoms of weights are the one
thing loaded whole, padding included: `to_atom_order` writes zeros there. Weights and inputs are made on the CPU and
arrive by copies, which count as writes, so that no kernel but ours runs; results are looked at on the CPU.

racecheck watches shared memory within a block. Programs share no global memory but what one launch hands to the next.
It follows neither mbarriers nor TMA, so that what they order is a hazard to it. The cases of the Hopper tier's layers
are left out of racecheck therefore (`why_left_out`) and named with the reason in the summary; the other tools run them.

Sizes are odd on purpose: tails in K, N and rows, scale counts that fill no word, skipped and invalid ids, an expert
without tokens, rows of x that start off 16 bytes; `few` and `many` tokens choose different tiles.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

import megamoe
from megamoe.id_map import IdMap
from megamoe.kernels.combine import combine
from megamoe.kernels.epilogue import requantize_accumulators
from megamoe.kernels.hopper.config import ROW_ALIGN
from megamoe.kernels.hopper.gather import gather
from megamoe.kernels.layer import run_layer
from megamoe.kernels.mxfp4_requant import mxfp4_requant
from megamoe.kernels.pre_dispatch import KINDS, pre_dispatch
from megamoe.kernels.routing import allocate_plan, build_plan, max_rows, max_tiles
from megamoe.oracle.dispatch_paths import PATHS, DispatchPath, configuration
from megamoe.oracle.public_arguments import layer_arguments, weight_arguments
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.recipe import ALL_RECIPES, Recipe, traits
from megamoe.validation import size_multiples
from megamoe.weights import prepare
from megamoe.workspace import Workspace

TOOLS = ("memcheck", "racecheck", "initcheck")
KERNELS = ("pre_dispatch", "routing", "gate_up", "down", "combine", "requantize", "mxfp4_requant", "gather", "hopper")
HOPPER_RECIPES = tuple(r for r in ALL_RECIPES if r.numerics == "deep_gemm_sm90" or r.mma_type == "bf16xfp4")
HOPPER_TOKENS = (9, 60, 150, 400)  # of 2 among 5 experts: a tile for decoding, two between, one for prefill
UNORDERED = (
    "racecheck follows neither mbarriers nor TMA, which order the shared memory of the SM90 tier's GEMMs: it reports "
    "false hazards at the maxima that warpgroups exchange between mbarriers and in the prologue that Triton generates "
    "for warp specialization. Scatter and copy_rows, launched by the same case, go without racecheck for it"
)
RESULTS = Path(__file__).resolve().parent / "results" / "sanitizer_h200.json"
_MODULE = "megamoe.bench.sanitizer_sweep"
_T = TypeVar("_T")


def _moved(value: _T, device: str) -> _T:
    """A dataclass of tensors (and of such dataclasses) on `device`, strides kept."""
    changes: dict[str, Any] = {}
    for field in fields(value):  # type: ignore[arg-type]
        member = getattr(value, field.name)
        if isinstance(member, torch.Tensor):
            changes[field.name] = member.to(device)
        elif hasattr(member, "__dataclass_fields__") and field.name != "spec":
            changes[field.name] = _moved(member, device)
    return replace(value, **changes)  # type: ignore[type-var]


def _off_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same rows inside wider ones, three columns in."""
    wide = torch.zeros(x.shape[0], x.shape[1] + 5, dtype=x.dtype)
    wide[:, 3:-2] = x
    return wide


def _layer_case(path: DispatchPath, many: bool, device: str) -> None:
    """The five launches of a layer: plain with many tokens, with every option its recipe has with few."""
    recipe = path.recipe
    h, i = size_multiples(recipe)
    trtllm = recipe.numerics == "trtllm_gen"
    shared = 1 if path.shared_weight else 0
    options: dict[str, Any] = {"tokens": 70, "num_experts": 2, "top_k": 2 + (shared if trtllm else 0)}
    if not many:
        options = {
            "tokens": 5, "num_experts": 7, "local_experts": 4, "top_k": 3 + (shared if trtllm else 0),
            "expert_map": True, "bias": True, "global_scales": recipe.mma_type == "nvfp4xnvfp4",
            "activation": "swigluoai", "activation_clamp": 2.0, "expert_scales": True, "routed_scaling_factor": 2.5,
            "per_expert": ("clamp", "alpha", "beta") if trtllm else (),
            "w13_layout": "interleaved" if path.mma is None else "gate_up",
        }  # fmt: skip
    layer: Layer = random_layer(
        recipe, hidden=h * -(-340 // h), intermediate=3 * i, num_shared_experts=shared,
        shared_weight=path.shared_weight, masked=0.2, **options,
    )  # fmt: skip
    layer.topk_ids[1, 0] = 1 << 20
    tokens = layer.x.shape[0]
    config = configuration(layer, path, device, tokens)
    prepared = _moved(prepare(layer.weights, recipe), device)
    x = layer.x.to(device) if many else _off_16_bytes(layer.x).to(device)[:, 3:-2]
    output = torch.empty(tokens, layer.spec.hidden, dtype=torch.bfloat16, device=device)
    run_layer(
        x, layer.topk_ids.to(device), layer.topk_weights.to(device), output,
        ws=Workspace.allocate(layer.spec, tokens, device, min_block_m=config.block_m),
        weights=prepared, spec=layer.spec, config=config, parameters=_moved(layer.parameters, device),
    )  # fmt: skip
    if not output.cpu().isfinite().all():
        raise RuntimeError("the layer's output is not finite")


def _hopper_case(recipe: Recipe, tokens: int, device: str) -> None:
    """The SM90 tier's launches, in the tile that it picks for so many rows per expert; an expert without tokens."""
    layer = random_layer(
        recipe, tokens=tokens, hidden=512, intermediate=512, num_experts=5, top_k=2, masked=0.2, activation_clamp=2.0
    )
    layer.topk_ids[layer.topk_ids == 3] = -1
    layer = _moved(layer, device)
    weights = megamoe.prepare_weights(**weight_arguments(layer))
    moe = megamoe.MegaMoE(weights, tokens, layer.spec.top_k, moe_backend="triton", **layer_arguments(layer))
    if type(moe._layer).__name__ != "HopperLayer":
        raise RuntimeError("the layer runs on the portable kernels")
    output = torch.empty(tokens, layer.spec.hidden, dtype=torch.bfloat16, device=device)
    moe(layer.x, layer.topk_ids, layer.topk_weights, output)
    if not output.cpu().isfinite().all():
        raise RuntimeError("the layer's output is not finite")


def _pre_dispatch_case(kind: str, device: str) -> None:
    """Five tokens into buffers of nine rows, with scale rows wider than needed and mapped ids."""
    row, hidden, tokens, rows, top_k = KINDS[kind], 384, 5, 9, 3
    group = row.groups[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids = torch.randint(-1, 9, (tokens, top_k), generator=generator, dtype=torch.int32)

    def new(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device)

    pre_dispatch(
        _off_16_bytes(x).to(device)[:, 3:-2],
        ids.to(device),
        torch.rand(tokens, top_k, generator=generator).to(device),
        q=new(hidden // row.elements_per_byte, row.element_dtypes[0]),
        sf=None if row.scale_dtype is None else new((hidden // group if group else 1) + 4, row.scale_dtype),
        ids_out=new(top_k, torch.int64),
        weights_out=new(top_k, torch.float32),
        token_scale=new(1, torch.float32)[:, 0] if row.token_scale else None,
        kind=kind,
        expert_scales=torch.rand(8, generator=generator).to(device),
        routed_scaling_factor=2.5,
        x_gsf=torch.tensor([2.0]).to(device) if row.x_gsf else None,
        id_map=IdMap(8, 2, 4, 1),
    )


def _routing_case(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens, experts in ((1, 1), (37, 5), (400, 257)):
        ids = torch.randint(-2, experts + 2, (tokens, 3), generator=generator, dtype=dtype)
        plan = allocate_plan(tokens, 3, experts, 16, device)
        build_plan(ids.to(device), plan, num_experts=experts, block_m=16)


def _combine_case(weighted: bool, device: str) -> None:
    """Rows of skipped slots stay unwritten."""
    generator = torch.Generator().manual_seed(0)
    tokens, top_k, hidden = 7, 3, 2888
    ids = torch.randint(-1, 4, (tokens, top_k), generator=generator)
    slots = top_k + (not weighted)
    rows = torch.empty(tokens, slots, hidden, dtype=torch.bfloat16, device=device)
    for token in range(tokens):
        for slot in range(slots):
            if slot == top_k or ids[token, slot] >= 0:
                rows[token, slot].copy_(torch.randn(hidden, generator=generator).bfloat16())
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
    weights = torch.rand(tokens, top_k, generator=generator).to(device) if weighted else None
    combine(rows, ids.to(device), out, num_experts=4, shared=not weighted, topk_weights=weights)
    if not out.cpu().isfinite().all():
        raise RuntimeError("the combine read a row that nothing wrote")


def _requantize_case(recipe: Recipe, device: str) -> None:
    width = 3 * size_multiples(recipe)[1]
    acc = torch.randn(21, 2 * width, generator=torch.Generator().manual_seed(0)).to(device)
    weight = None if recipe.numerics == "trtllm_gen" else torch.full((21,), 0.5).to(device)
    requantize_accumulators(acc, weight, recipe, clamp=2.0)


def _mxfp4_requant_case(exact: bool, device: str) -> None:
    """Rows inside wider ones, groups that fill no program, the last blocks cut in rows and columns."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = 131, 224
    weight = torch.randn(rows, columns + 5, generator=generator).to(torch.float8_e4m3fn).to(device)[:, 3:-2]
    scale = torch.rand(2, 3, generator=generator).to(device)[:, :2]
    _, sf = mxfp4_requant(weight, scale, (128, 128), exact=exact)
    if not bool((sf.cpu() < 255).all()):
        raise RuntimeError("a group of finite numbers has a scale of NaN")


def _gather_case(k_order: bool, device: str) -> None:
    """Rows of a wider buffer, skipped slots; rows that pad an expert's stay unwritten."""
    generator = torch.Generator().manual_seed(0)
    tokens, top_k, experts, block_m, hidden = 7, 3, 5, 16, 2304
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator).to(device)
    plan = allocate_plan(tokens, top_k, experts, block_m, device, row_align=ROW_ALIGN)
    build_plan(ids, plan, num_experts=experts, block_m=block_m)
    capacity = max_rows(tokens * top_k, experts, ROW_ALIGN)
    row_weight = torch.empty(capacity, device=device)
    gather(
        torch.randn(tokens, hidden + 4, generator=generator).to(torch.float8_e4m3fn).to(device)[:, :hidden],
        torch.rand(tokens, hidden // 128 + 1, generator=generator).to(device)[:, :-1],
        torch.rand(tokens, top_k, generator=generator).to(device),
        plan,
        num_tiles=max_tiles(tokens * top_k, experts, block_m),
        q=torch.empty(capacity, hidden, dtype=torch.float8_e4m3fn, device=device),
        scale=torch.empty(hidden // 128, capacity, device=device),
        row_weight=row_weight,
        packed_tiles=torch.empty_like(plan.tiles),
        tile_count=torch.empty(1, dtype=torch.int32, device=device),
        k_order=k_order,
    )
    assert plan.slot_rows is not None
    served = plan.slot_rows[plan.slot_rows >= 0].long()
    if not bool((row_weight[served] < 1).all()):
        raise RuntimeError("a served row has no weight")


def cases() -> dict[str, Callable[[str], None]]:
    """Name to what runs it on a device."""
    found: dict[str, Callable[[str], None]] = {}
    for name, path in PATHS.items():
        for many in (False, True):
            found[f"layer/{name}/{'many' if many else 'few'}"] = partial(_layer_case, path, many)
    for kind in KINDS:
        found[f"pre_dispatch/{kind}"] = partial(_pre_dispatch_case, kind)
    for dtype in (torch.int32, torch.int64):
        found[f"routing/{dtype}".replace("torch.", "")] = partial(_routing_case, dtype)
    for weighted in (False, True):
        found[f"combine/{'weighted' if weighted else 'plain'}"] = partial(_combine_case, weighted)
    for recipe in ALL_RECIPES:
        arithmetic = "trtllm" if recipe.numerics == "trtllm_gen" else "deep_gemm"
        found.setdefault(f"requantize/{traits(recipe).mid_kind}/{arithmetic}", partial(_requantize_case, recipe))
    for exact in (False, True):
        found[f"mxfp4_requant/{'exact' if exact else 'sglang'}"] = partial(_mxfp4_requant_case, exact)
    for k_order in (False, True):
        found[f"gather/{'k_order' if k_order else 'natural'}"] = partial(_gather_case, k_order)
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        for recipe in HOPPER_RECIPES:
            for tokens in HOPPER_TOKENS:
                found[f"hopper/{recipe}/{tokens} tokens"] = partial(_hopper_case, recipe, tokens)
    return found


def why_left_out(tool: str, name: str) -> str | None:
    """Why `tool` cannot judge a case, or None."""
    return UNORDERED if tool == "racecheck" and name.startswith("hopper/") else None


def chosen_cases(only: str, under: str | None) -> tuple[list[str], dict[str, str]]:
    """Names that contain `only`: those to run, and those left out of the tool `under` with the reason."""
    names = [name for name in cases() if only in name]
    reasons = {name: why_left_out(under, name) for name in names} if under else {}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    return [name for name in names if name not in left_out], left_out


@triton.jit
def _planted_kernel(src, dst, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at))


def planted(tool: str) -> None:
    """A fault that memcheck (64 numbers past the end) or initcheck (64 that nothing wrote) must find."""
    src = torch.zeros(64) if tool == "memcheck" else torch.empty(128, device="cuda")
    dst = torch.empty(128, device="cuda")
    _planted_kernel[(1,)](src.to("cuda"), dst, BLOCK=128)
    torch.cuda.synchronize()


def run_cases(only: str, part: tuple[int, int], device: str, under: str | None = None) -> int:
    """Run the matching cases of a part, without those left out of the tool `under`, a line each; returns how many."""
    index, parts = part
    chosen = chosen_cases(only, under)[0][index::parts]
    for name in chosen:
        cases()[name](device)
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"ran {name}", flush=True)
    return len(chosen)


@dataclass(frozen=True)
class Finding:
    """One tool over all cases. errors: what it reported, racecheck's warnings apart; problems: why a part is not a
    clean run, with the tool's first lines; planted_found: None where no fault can be planted; left_out: cases that it
    cannot judge, each with the reason."""

    tool: str
    cases: int
    errors: int
    warnings: int
    planted_found: bool | None
    seconds: float
    problems: list[str]
    left_out: dict[str, str]

    @property
    def clean(self) -> bool:
        return not (self.errors or self.warnings or self.problems) and self.planted_found is not False


_RACE_SUMMARY = re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?")


def read_summary(tool: str, output: str) -> tuple[int, int] | None:
    """(errors, warnings) of a tool's output, or None where it has no summary."""
    if tool == "racecheck":
        found = _RACE_SUMMARY.findall(output)
        return (int(found[-1][0]), int(found[-1][1])) if found else None
    found = _SUMMARY.findall(output)
    return (int(found[-1]), 0) if found else None


def _command(tool: str | None, sanitizer: str, arguments: list[str]) -> list[str]:
    prefix = []
    if tool is not None:
        prefix = [sanitizer, "--tool", tool, "--print-limit", "20"]
        prefix += ["--padding", "256"] if tool == "memcheck" else []
    return [*prefix, sys.executable, "-m", _MODULE, *arguments]


def _output(command: list[str], limit: float) -> tuple[int, str]:
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return 124, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout


def _first_lines(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("=========")] or output.splitlines()[-30:]
    return "\n".join(lines[:30])


def run_tool(tool: str, only: str, jobs: int, limit: float, sanitizer: str) -> Finding:
    """`tool` over the cases in `jobs` processes at once, each within `limit` seconds."""
    started = time.monotonic()
    arguments = ["--only", only, "--under", tool]
    commands = [_command(tool, sanitizer, [*arguments, "--part", f"{job}/{jobs}"]) for job in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(partial(_output, limit=limit), commands))
    ran = errors = warnings = 0
    problems = []
    for job, (status, output) in enumerate(results):
        ran += len(re.findall(r"^ran ", output, re.MULTILINE))
        summary = read_summary(tool, output)
        errors += summary[0] if summary else 0
        warnings += summary[1] if summary else 0
        if summary is None or status != 0 or any(summary):
            problems.append(f"part {job}/{jobs}, exit status {status}, summary {summary}:\n{_first_lines(output)}")
    expected, left_out = chosen_cases(only, tool)
    if ran != len(expected):
        problems.append(f"{ran} of {len(expected)} cases ran")
    planted_found = None
    if tool != "racecheck":
        _, output = _output(_command(tool, sanitizer, ["--planted", tool]), limit)
        planted_found = bool((read_summary(tool, output) or (0, 0))[0])
    seconds = round(time.monotonic() - started, 1)
    return Finding(tool, ran, errors, warnings, planted_found, seconds, problems, left_out)


def _version(command: list[str]) -> str | None:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip().splitlines()[-1] if said.strip() else None


def run_all(tools: list[str], only: str, jobs: int, limit: float, sanitizer: str, out: Path) -> bool:
    """The sweep without a tool, then under each. `out` is written after every tool and keeps what it had of others."""
    commands = [_command(None, sanitizer, ["--only", only, "--part", f"{job}/{jobs}"]) for job in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        for status, output in pool.map(partial(_output, limit=limit), commands):
            if status:
                print(output, file=sys.stderr)
                return False
    report: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(),
        "driver": _version(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "compute-sanitizer": _version([sanitizer, "--version"]),
        },
        "kernels": list(KERNELS),
        "cases": chosen_cases(only, None)[0],
        "tools": [],
    }
    if out.exists():
        earlier = json.loads(out.read_text(encoding="utf-8"))
        same = all(earlier.get(name) == report[name] for name in ("device", "versions", "cases"))
        report["tools"] = [entry for entry in earlier["tools"] if same and entry["tool"] not in tools]
    clean = True
    for tool in tools:
        finding = run_tool(tool, only, jobs, limit, sanitizer)
        clean &= finding.clean
        report["tools"].append({**asdict(finding), "clean": finding.clean})
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{tool}: {finding.cases} cases, {len(finding.left_out)} left out, {finding.errors} errors, "
              f"{finding.warnings} warnings, planted fault found: {finding.planted_found}, "
              f"{finding.seconds} s")  # fmt: skip
        for problem in finding.problems:
            print(problem)
    return clean


def _part(text: str) -> tuple[int, int]:
    index, parts = (int(number) for number in text.split("/"))
    if not 0 <= index < parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 0 <= I < N")
    return index, parts


def main() -> int:
    parser = argparse.ArgumentParser(description="Every kernel on small inputs, for compute-sanitizer")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--part", type=_part, default=(0, 1), help="I/N: every N-th case from the I-th on")
    parser.add_argument("--under", choices=TOOLS, help="without the cases that this tool cannot judge")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    parser.add_argument("--planted", choices=("memcheck", "initcheck"), help="run a kernel with a fault instead")
    parser.add_argument("--run", action="store_true", help="run the tools over the cases")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="with --run: only these tools")
    parser.add_argument("--jobs", type=int, default=8, help="with --run: processes at once")
    parser.add_argument("--limit", type=float, default=540, help="with --run: seconds for each process")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="with --run: the executable")
    parser.add_argument("--out", type=Path, default=RESULTS, help="with --run: the summary")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(chosen_cases(arguments.only, arguments.under)[0]))
        return 0
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU (torch.cuda.is_available() is False)")
    if arguments.planted:
        planted(arguments.planted)
        return 0
    if arguments.run:
        tools = arguments.tool or list(TOOLS)
        clean = run_all(tools, arguments.only, arguments.jobs, arguments.limit, arguments.sanitizer, arguments.out)
        return 0 if clean else 1
    print(f"{run_cases(arguments.only, arguments.part, 'cuda', arguments.under)} cases ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
