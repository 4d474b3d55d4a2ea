"""Model shapes: the layers that are measured, by name, from the command line or from a TOML file."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megamoe.file_errors import why_unreadable
from megamoe.spec import MAX_EXPERTS, MAX_TOP_K


@dataclass(frozen=True)
class ModelShape:
    """One MoE layer: H, I, routed experts E, top-k K, shared experts, activation, biases."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    activation: str = "swiglu"
    activation_clamp: float | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        for field, least, most in (
            ("hidden", 128, 2**15),
            ("intermediate", 64, 2**15),
            ("num_experts", 1, MAX_EXPERTS),
            ("top_k", 1, min(MAX_TOP_K, self.num_experts)),
            ("num_shared_experts", 0, 8),
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"model {self.name!r}: {field} is {value!r}; allowed: {least} … {most}")

    def __str__(self) -> str:
        shared = f" + {self.num_shared_experts} shared" if self.num_shared_experts else ""
        return f"{self.name}: H {self.hidden}, I {self.intermediate}, E {self.num_experts}{shared}, top-{self.top_k}"


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("deepseek-v4-flash", 4096, 2048, 256, 6, 1, activation_clamp=10.0),
        ModelShape("deepseek-v4-pro", 7168, 3072, 384, 6, 1, activation_clamp=10.0),
        ModelShape("gpt-oss-120b", 2880, 2880, 128, 4, activation="swigluoai", activation_clamp=7.0, bias=True),
        ModelShape("qwen3-30b", 2048, 768, 128, 8),
        ModelShape("kimi-k2", 7168, 2048, 384, 8, 1),
        ModelShape("tiny", 256, 128, 8, 2, 1),
    )
}

_LETTERS = {"H": "hidden", "I": "intermediate", "E": "num_experts", "K": "top_k", "S": "num_shared_experts"}
_FIELDS = tuple(field.name for field in fields(ModelShape))
_REQUIRED = ("hidden", "intermediate", "num_experts", "top_k")


def parse_shape(text: str) -> ModelShape:
    """`H=4096,I=2048,E=64,K=6` with an optional `S=1` and `name=…`; `ValueError` says what is wrong."""
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = part.partition("=")
        key = _LETTERS.get(key.strip(), key.strip())
        if not separator:
            raise ValueError(f"shape {text!r}: {part!r} is not of the form NAME=VALUE")
        try:
            values[key] = value.strip() if key in ("name", "activation") else _number(value)
        except ValueError:
            raise ValueError(f"shape {text!r}: {part!r} is not a number") from None
    values.setdefault("name", text.replace(" ", ""))
    return _checked(values, f"shape {text!r}", [*_LETTERS, *_FIELDS])


def load_shapes(path: Path) -> list[ModelShape]:
    """The tables of a TOML file, `[name]` with the fields of `ModelShape`; a table may start from a known model.

        [flash-ep8]
        like = "deepseek-v4-flash"
        num_experts = 32

    `ValueError` names the file, the table and the field.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise ValueError(f"{path}: reading TOML below Python 3.11 needs the package tomli") from None
    try:
        tables = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML ({why_unreadable(path, error)})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {why_unreadable(path, error)}") from None
    shapes = []
    for name, table in tables.items():
        where = f"{path}: [{name}]"
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name!r} is not a table; write one table [name] per shape")
        values = dict(table)
        like = values.pop("like", None)
        if like is not None and like not in MODELS:
            raise ValueError(f"{where}: like is {like!r}; known models: {', '.join(MODELS)}")
        base = {} if like is None else dict(vars(MODELS[like]))
        unnamed = [field for field in _FIELDS if field != "name"]  # the table's own
        shapes.append(_checked({**base, **values, "name": name}, where, ["like", *unnamed]))
    return shapes


def _checked(values: dict[str, Any], where: str, allowed: list[str]) -> ModelShape:
    unknown = [key for key in values if key not in _FIELDS]
    if unknown:
        raise ValueError(f"{where}: unknown {unknown[0]!r}; allowed: {', '.join(allowed)}")
    missing = [key for key in _REQUIRED if key not in values]
    if missing:
        raise ValueError(f"{where}: {missing[0]} is missing")
    if values.get("activation_clamp") is not None:  # 7 is as good as 7.0
        values = {**values, "activation_clamp": float(values["activation_clamp"])}
    return ModelShape(**{**values, "bias": bool(values.get("bias", False))})


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def with_shared(shape: ModelShape, num_shared_experts: int) -> ModelShape:
    return replace(shape, num_shared_experts=num_shared_experts)
