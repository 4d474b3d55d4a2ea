"""The process that compiles: JSON lines in, JSON lines out. Started by `pool`, never with TRITON_INTERPRET.

`{"arch": 100}` is answered by the list of jobs, `{"arch": 100, "name": …}` by the report and violations of a
job or by its error. The first line out names the versions.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from megamoe.codegen.checks import violations
from megamoe.codegen.compile import compile_job, versions
from megamoe.codegen.registry import collect


def main(source: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Triton or LLVM prints must not end up among the answers

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer(versions())
    jobs: dict[int, dict] = {}
    for line in sys.stdin:
        request = json.loads(line)
        arch = request["arch"]
        if arch not in jobs:
            jobs[arch] = collect(arch, source)
        if "name" not in request:
            answer([{"name": job.name, "kernel": job.kernel, "recipe": job.recipe} for job in jobs[arch].values()])
            continue
        job = jobs[arch][request["name"]]
        try:
            report = compile_job(job, arch)
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
        else:
            broken = violations(report, arch=arch, kernel=job.kernel, recipe=job.recipe, contract=job.contract)
            answer({"report": asdict(report), "violations": broken})


if __name__ == "__main__":
    main(sys.argv[1])
