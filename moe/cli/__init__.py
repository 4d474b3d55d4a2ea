"""`megamoe`: the command line. Each command's module is imported when the command is used."""

from __future__ import annotations

from importlib import import_module

import click

import megamoe

_COMMANDS = {
    "bench": "megamoe.cli.bench:bench",
    "check": "megamoe.cli.check:check",
    "codegen": "megamoe.cli.codegen:codegen",
    "compare": "megamoe.cli.compare:compare",
    "demo": "megamoe.cli.demo:demo",
    "doctor": "megamoe.cli.doctor:doctor",
    "report": "megamoe.cli.report:report",
}


class _LazyGroup(click.Group):
    """Commands by name from `_COMMANDS`, so that `doctor` works where another command cannot be imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        return getattr(import_module(module), attribute)


@click.group(cls=_LazyGroup)
@click.version_option(megamoe.__version__, prog_name="megamoe")
def main() -> None:
    """Mixture-of-Experts layers in FP8, MXFP4 and NVFP4, as Triton kernels."""
