"""SGLang without its engine: the files of its MegaMoE path from an unpacked wheel, placeholders for all they import.

A finder in front of `sys.meta_path` answers every `sglang.*` import. Names in `REAL` are loaded from the wheel as they
are, packages in `BARE` are empty (their `__init__` would pull the whole engine in), everything else is a module whose
attributes are placeholders. torch, numpy and triton are all that is needed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "0.5.19"

BARE = {
    "sglang",
    "sglang.kernels",
    "sglang.kernels.ops",
    "sglang.srt",
    "sglang.srt.arg_groups",
    "sglang.srt.layers",
    "sglang.srt.layers.moe",
    "sglang.srt.layers.moe.moe_runner",
    "sglang.srt.layers.moe.token_dispatcher",
    "sglang.srt.layers.quantization",
    "sglang.srt.models",
}
REAL = {
    "sglang.srt.environ",
    "sglang.srt.layers.moe.mega_moe",
    "sglang.srt.layers.moe.mega_moe_sm90",
    "sglang.srt.layers.moe.moe_runner.base",
    "sglang.srt.layers.moe.moe_runner.runner",
    "sglang.srt.layers.moe.token_dispatcher.base",
    "sglang.srt.layers.moe.utils",
    "sglang.srt.layers.quantization.fp8_utils",
    "sglang.srt.layers.quantization.mxfp4",
    "sglang.srt.layers.quantization.mxfp4_tensor",
    "sglang.srt.plugins",
    "sglang.srt.plugins.hook_registry",
    "sglang.srt.runtime_context",
}
JIT_HOME = "sglang.kernels.ops.attention.dsv4"


def _file(root: Path, name: str) -> Path:
    """Of the module `name`: its file, or its package's `__init__`."""
    path = root.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def stage(root: Path, target: Path) -> None:
    """Copy what is loaded to `target` (450 KiB), for machines that have neither the wheel nor a network."""
    for name in REAL:
        source = _file(root, name)
        copy = target / source.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)


def load(root: Path) -> types.SimpleNamespace:
    """The modules that the scenarios drive, by their last name."""
    missing = [str(_file(root, name)) for name in sorted(REAL) if not _file(root, name).is_file()]
    if missing:
        raise FileNotFoundError(f"{missing[0]}: {root} is no unpacked wheel of sglang {VERSION}")
    sys.meta_path.insert(0, _Finder(root))
    names = ("layers.moe.mega_moe", "layers.moe.mega_moe_sm90", "layers.moe.utils", "layers.quantization.mxfp4",
             "runtime_context", "plugins.hook_registry", "distributed.parallel_state")  # fmt: skip
    return types.SimpleNamespace(
        **{name.rpartition(".")[2]: importlib.import_module(f"sglang.srt.{name}") for name in names}
    )


class _PlaceholderMeta(type):
    """Makes the class `Placeholder` itself do for any name that is imported: a base class, a decorator, a type."""

    def __getattr__(cls, name: str) -> Any:
        return _placeholder_attribute(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Placeholder:
            return super().__call__(*args, **kwargs)
        return _decorated(args, kwargs) or object.__new__(Placeholder)

    def __getitem__(cls, _: object) -> Any:
        return Placeholder

    def __or__(cls, _: object) -> Any:
        return Placeholder

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Placeholder(metaclass=_PlaceholderMeta):
    """What any call of a placeholder returns: false, empty, and again callable, iterable and a context manager."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _placeholder_attribute(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _decorated(args, kwargs) or self

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> bool:
        return False

    def _is_not(self, _: object) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _is_not


def _placeholder_attribute(name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return Placeholder


def _decorated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function or class that a bare decorator is given, or None."""
    alone = len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type))
    return args[0] if alone else None


class _PlaceholderModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _placeholder_attribute(name)


def mega_moe_pre_dispatch(*_: Any, **__: Any) -> None:
    """SGLang's CUDA kernel, which cannot be had here: the plugin must have replaced it."""
    raise RuntimeError("SGLang's own pre-dispatch was called")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "sglang":
            return None
        if name in REAL:
            file = _file(self._root, name)
            folders = [str(file.parent)] if file.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if spec.name in BARE:
            return types.ModuleType(spec.name)
        module = _PlaceholderModule(spec.name)
        if spec.name == JIT_HOME:
            module.mega_moe_pre_dispatch = mega_moe_pre_dispatch  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass
