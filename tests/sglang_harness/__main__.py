"""Run SGLang 0.5.19's MegaMoE code on this package, as its plugin sets it up, and print what came out.

    python tests/sglang_harness                          # in Triton's interpreter
    python tests/sglang_harness --device cuda            # on a GPU, with CUDA graphs
    python tests/sglang_harness --stage DIR              # copy SGLang's files; elsewhere: --sglang-root DIR

Exit status 0 when every output is within the reference's limits. Needs `megamoe` importable (`PYTHONPATH=src`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from thin_sglang import VERSION, load, stage

from megamoe.oracle.downloads import OracleUnavailable, unpacked_wheel


def main() -> int:
    parser = argparse.ArgumentParser(prog="sglang_harness", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sglang-root", type=Path, default=os.environ.get("MEGAMOE_SGLANG"),
        help="folder of an unpacked wheel; default: the variable MEGAMOE_SGLANG, else pip downloads it",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stage", type=Path, metavar="DIR", help="only copy the files that are loaded to DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args()
    root = arguments.sglang_root
    if root is None:
        try:
            root = unpacked_wheel(f"sglang=={VERSION}", None, download=True)
        except OracleUnavailable as error:
            print(f"unavailable: {error}", file=sys.stderr)
            return 77
    if arguments.stage is not None:
        stage(root, arguments.stage)
        return 0
    report = run(root, arguments.device)
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)
    routes = [*report["routes"].values(), {"ok": True, **report["hopper order"]}]
    return 0 if all(route["ok"] and route.get("graph", route)["ok"] for route in routes) else 1


def run(root: Path, device: str) -> dict[str, Any]:
    """Load SGLang's files from `root`, set the plugin up, take every route."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is first imported
        from megamoe.oracle import interpreter

        interpreter.install()
    import torch
    from calls import record
    from scenarios import ROUTES, Server, run_api_checks, run_hopper_order, run_route

    torch.set_num_threads(1)
    sglang = load(root)
    os.environ["MEGAMOE_BACKEND"] = "triton"
    from megamoe.integrations import sglang as plugin

    plugin.register()
    plugin.register()  # every process may be asked more than once
    sglang.hook_registry.HookRegistry.apply_hooks()
    import deep_gemm  # ours, or the installed one with our functions

    calls = record(deep_gemm)
    server = Server(sglang, deep_gemm)
    return {
        "deep_gemm": deep_gemm.__name__,
        "SGLANG_ENABLE_JIT_DEEPGEMM": os.environ.get("SGLANG_ENABLE_JIT_DEEPGEMM"),
        "routes": {name: run_route(server, name, device) for name in ROUTES},
        "hopper order": run_hopper_order(server, device),
        "api": run_api_checks(server, device),
        "calls": [call._asdict() for call in calls],
    }


def _print(report: dict[str, Any]) -> None:
    print(f"deep_gemm is {report['deep_gemm']}")
    routes = dict(report["routes"])
    if "ok" in report["hopper order"]:
        routes["SM90 FP8 tokens, MXFP4 experts, Hopper's order"] = report["hopper order"]
    for name, route in routes.items():
        for suffix, result in (("", route), (", CUDA graph", route.get("graph"))):
            if result is not None:
                errors = f"rel. RMS {result['rel_rms']:.1e}  worst row {result['worst_row']:.1e}"
                print(f"{name + suffix:48} {errors}  {'ok' if result['ok'] else 'FAIL'}")


if __name__ == "__main__":
    sys.exit(main())
