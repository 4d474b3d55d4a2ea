"""The console every command prints to."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPED_WIDTH = 120  # a file or a pipe has no width, and rich would fold tables to 80 columns


def open_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
