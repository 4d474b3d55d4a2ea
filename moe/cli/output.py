"""Files that a command writes at its end: refused at its start where they cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import click


def prepare_output(option: str, path: Path | None) -> None:
    """Make the folder of `path`, the value of `option`; `click.UsageError` naming both where nothing can be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"{option}: the folder {path.parent} cannot be made: {error.strerror}") from None
    if path.is_dir():
        raise click.UsageError(f"{option}: {path} is a folder; expected a file's name")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.UsageError(f"{option}: {path} cannot be written: permission denied or a read-only file system")
