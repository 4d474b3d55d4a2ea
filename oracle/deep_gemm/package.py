"""An installed `deep_gemm`: its version, and whether its compiled module survives being imported under this torch.

The module is built for one torch (0.1.7: 2.13) and dies of a signal under others, so the import is tried in a process
of its own before this one imports anything.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from types import ModuleType

from megamoe.oracle.deep_gemm.upstream import DISTRIBUTION, VERSION
from megamoe.oracle.downloads import OracleUnavailable

SM90_VERSIONS = ("0.1.5.post1", VERSION)
"""Whose SM90 kernel is the contract's: in the older one only the name of a scheduler class differs."""

_PROBE = "import deep_gemm; deep_gemm._C.get_num_sms; print(deep_gemm.__version__)"
_TIMEOUT_SECONDS = 180


def unsupported_reason(versions: tuple[str, ...] = (VERSION,)) -> str | None:
    """Why the installed package is no judge here, or None. `versions`: those whose contract is ours."""
    try:
        installed = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"{DISTRIBUTION} is not installed"
    if installed not in versions:
        side = "older" if _release(installed) < _release(VERSION) else "newer"
        return f"{DISTRIBUTION} {installed} is installed, {side} than the contract; allowed: {', '.join(versions)}"
    return _probe(installed)


def load(versions: tuple[str, ...] = (VERSION,)) -> ModuleType:
    """The module `deep_gemm`. Raises `OracleUnavailable`."""
    reason = unsupported_reason(versions)
    if reason is not None:
        raise OracleUnavailable(reason)
    return importlib.import_module("deep_gemm")


def probe_import(code: str) -> str | None:
    """Run `code` in a fresh interpreter with this one's path; why it did not end well, in one line, or None."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {_TIMEOUT_SECONDS} s"
    if result.returncode < 0:
        return f"died of {signal.Signals(-result.returncode).name}"
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        return lines[-1]
    return None


@lru_cache(maxsize=4)
def _probe(version: str) -> str | None:
    failure = probe_import(_PROBE)
    if failure is None:
        return None
    torch = metadata.version("torch")
    hint = f"; its compiled module is built for another torch than {torch}" if "died of SIG" in failure else ""
    return f"importing {DISTRIBUTION} {version} in a subprocess: {failure}{hint}"


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
