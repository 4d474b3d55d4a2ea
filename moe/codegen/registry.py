"""Every compile job of the package: what `compile_jobs(arch)` of each kernel module returns."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from megamoe.codegen.job import CompileJob

KERNELS = "megamoe.kernels"


def collect(arch: int, source: str = KERNELS) -> dict[str, CompileJob]:
    """Jobs for `arch` (90, 100, 120) by name, in the modules' order. Imports Triton.

    `source` is a package whose modules are searched, or the path of one Python file. Raises `ValueError` when
    two jobs share a name.
    """
    jobs: dict[str, CompileJob] = {}
    for module in _modules(source):
        for job in getattr(module, "compile_jobs", lambda arch: [])(arch):
            if job.name in jobs:
                raise ValueError(f"two compile jobs for arch {arch} are named {job.name!r}; names must be unique")
            jobs[job.name] = job
    return jobs


def _modules(source: str) -> Iterator[ModuleType]:
    if source.endswith(".py"):
        name = Path(source).stem
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, source)
            if spec is None or spec.loader is None:
                raise ValueError(f"source={source!r} is neither a package nor a Python file")
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        yield sys.modules[name]
        return
    package = importlib.import_module(source)
    for info in pkgutil.walk_packages(package.__path__, f"{source}."):
        yield importlib.import_module(info.name)
