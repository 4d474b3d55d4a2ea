"""Published wheels that judge the kernels: fetched once with pip, unpacked into the user's cache, never installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

_TIMEOUT_SECONDS = 180


class OracleUnavailable(RuntimeError):
    """A judge that cannot run here; the message is the reason, one line."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/megamoe`, by default `~/.cache/megamoe`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megamoe"


def unpacked_wheel(requirement: str, sha256: str | None, pip_options: Sequence[str] = (), *, download: bool) -> Path:
    """The folder that holds the wheel of `requirement` ("name==version"), unpacked in the cache.

    `sha256` None: a wheel that every Python has its own of, kept by this one's name. `download` allows fetching it,
    without dependencies. Raises `OracleUnavailable` when it is neither there nor to be
    had, or when what came has another SHA-256.
    """
    name = requirement.replace("==", "-")
    target = cache_folder() / (name if sha256 is not None else f"{name}-{sys.implementation.cache_tag}")
    if target.is_dir():
        return target
    if not download:
        raise OracleUnavailable(f"{requirement} is not in {target}; `pip download` was not asked for")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download(requirement, pip_options, Path(scratch))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if sha256 not in (None, found):
            raise OracleUnavailable(f"{wheel.name} has SHA-256 {found}, expected {sha256}")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        try:
            os.replace(unpacked, target)
        except OSError:  # another process was first
            shutil.rmtree(unpacked)
    return target


def _download(requirement: str, pip_options: Sequence[str], folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", *pip_options, "-d", str(folder), requirement]  # fmt: skip
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OracleUnavailable(f"`pip download {requirement}` failed: {error}") from error
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or ["no wheel came"]
        raise OracleUnavailable(f"`pip download {requirement}` failed: {lines[-1]}")
    return wheels[0]
