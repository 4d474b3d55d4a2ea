"""Single definitions of a published module, executed without the rest of it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megamoe.oracle.downloads import OracleUnavailable


def execute_definitions(path: Path, names: Sequence[str], namespace: dict[str, Any]) -> ModuleType:
    """A module of the functions, classes and constants called `names` at the top level of `path`, as they stand there
    but for decorators, over `namespace`.

    For modules whose imports need a GPU, a compiler or the network. Raises `OracleUnavailable` when one is not there.
    """
    try:
        tree = ast.parse(path.read_text())
    except OSError as error:
        raise OracleUnavailable(f"{path} cannot be read: {error}") from error
    found = [node for node in tree.body if _name(node) in names]
    missing = set(names) - {_name(node) for node in found}
    if missing:
        raise OracleUnavailable(f"{path} does not define {', '.join(sorted(missing))}")
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    module = ModuleType(path.stem)
    module.__dict__.update(namespace)
    exec(compile(ast.Module(found, []), str(path), "exec"), module.__dict__)
    return module


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", None)
