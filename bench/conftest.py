"""`pytest bench --benchmark-only`: collects `bench_*.py` here, on the GPU or in Triton's patched interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamoe.cli.device import open_device


def pytest_configure() -> None:
    open_device()  # before collection imports triton


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if file_path.name.startswith("bench_") and file_path.suffix == ".py":
        return pytest.Module.from_parent(parent, path=file_path)
    return None
