"""`Checkpoint`: a folder of safetensors files and config.json, opened as they are asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megamoe.file_errors import why_unreadable

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_SHOWN = 12  # names in a message


class CheckpointError(ValueError):
    """A folder, name, type or shape that is not what a reader knows; the message has what was found and expected."""


class Checkpoint:
    """Tensors by name. Files are memory-mapped when one of their tensors is first asked for, never read whole.

    Names come from the index file where there is one, so that a folder with some of the shards serves the layers they
    hold, else from the headers of all *.safetensors files.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{folder} is no folder here; expected a local one with *.safetensors files and {CONFIG}. Models' "
                "names are not looked up: download it first, e.g. `hf download NAME --local-dir FOLDER`"
            )
        self._library = _safetensors()
        self._open: dict[str, Any] = {}
        self._files = self._find()
        self.config = self._read_json(self.folder / CONFIG)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def names_under(self, prefix: str) -> list[str]:
        """Names that start with `prefix`, without it."""
        return [name.removeprefix(prefix) for name in self._files if name.startswith(prefix)]

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(type as safetensors names it: "F8_E4M3", "I8", …; shape), from the header alone."""
        header = self._from_file(name, "get_slice")
        return header.get_dtype(), tuple(header.get_shape())

    def expect(self, name: str, dtypes: Sequence[str], shape: tuple[int, ...], axes: str) -> None:
        """Raise `CheckpointError` unless `name` has one of these types and this shape."""
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no {name}; expected {' or '.join(dtypes)} {axes} = {list(shape)}")
        dtype, found = self.describe(name)
        if dtype not in dtypes or found != shape:
            raise CheckpointError(
                f"{name} is {dtype} {list(found)}; expected {' or '.join(dtypes)} {axes} = {list(shape)}"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, backed by the mapped file."""
        return self._from_file(name, "get_tensor")

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that config.json has, else `default`; without one, `CheckpointError`."""
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        if default is None:
            raise CheckpointError(
                f"{self.folder / CONFIG} has none of {', '.join(names)}; it has {shortened(sorted(self.config))}"
            )
        return default

    def _find(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            weight_map = self._read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index} has no weight_map; expected tensor names and their files")
            return weight_map
        found = {path.name: self._mapped(path.name) for path in sorted(self.folder.glob("*.safetensors"))}
        if not found:
            present = shortened(sorted(path.name for path in self.folder.iterdir()))
            raise CheckpointError(f"{self.folder} has no *.safetensors files; it has {present}")
        return {name: file for file, mapped in found.items() for name in mapped.keys()}  # noqa: SIM118

    def _from_file(self, name: str, method: str) -> Any:
        """`method` of the opened file that has `name`; an index may name a file that has it not."""
        file = self._files[name]
        try:
            return getattr(self._mapped(file), method)(name)
        except self._library.SafetensorError as error:
            raise CheckpointError(f"{self.folder / file} has no readable {name}, expected there: {error}") from error

    def _mapped(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{path} is not there, though the index names it")
            try:
                self._open[file] = self._library.safe_open(str(path), framework="pt", device="cpu")
            except Exception as error:  # the library's own type, which has no common base with others
                raise CheckpointError(f"{path} cannot be read: {why_unreadable(path, error)}") from error
        return self._open[file]

    @staticmethod
    def _read_json(path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            reason = why_unreadable(path, error)
            what = f"is not JSON ({reason})" if isinstance(error, json.JSONDecodeError) else f"cannot be read: {reason}"
            raise CheckpointError(f"{path} {what}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} holds a {type(value).__name__}; expected an object")
        return value


def shortened(names: Sequence[str]) -> str:
    """Names for a message: the first dozen and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "nothing") + more


def _safetensors() -> ModuleType:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("reading checkpoints needs the package safetensors: pip install safetensors") from error
    return safetensors
