"""Where the files of `sgl-deep-gemm` 0.1.7 are. Nothing of it is imported here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megamoe.oracle.downloads import OracleUnavailable, unpacked_wheel

DISTRIBUTION = "sgl-deep-gemm"
VERSION = "0.1.7"
VARIABLE = "MEGAMOE_DEEP_GEMM"
"""Environment variable: the folder of an unpacked wheel, for machines without a network."""

_SHA256 = "f4e67086dc685ddcfcbb7833cc9770afd850cab23e173e77b9b18c19de0c2836"
_PLATFORM = ("--platform", "manylinux2014_x86_64", "--python-version", "3.12")  # pure Python but for _C.so


@dataclass(frozen=True)
class Upstream:
    """`root` is the package's folder, `deep_gemm`."""

    root: Path
    version: str

    @property
    def include(self) -> Path:
        return self.root / "include"


def locate(*, download: bool = False) -> Upstream:
    """The files of exactly 0.1.7: those that `VARIABLE` names, else those installed, else those in the cache.

    `download` allows fetching the wheel into the cache. Raises `OracleUnavailable`.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return _of_folder(Path(named), f"{VARIABLE}={named}")
    try:
        installed = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        installed = None
    if installed is not None and installed.version == VERSION:
        return _of_folder(Path(str(installed.locate_file(""))), f"the installed {DISTRIBUTION}")
    folder = unpacked_wheel(f"{DISTRIBUTION}=={VERSION}", _SHA256, _PLATFORM, download=download)
    return _of_folder(folder, str(folder))


def _of_folder(folder: Path, name: str) -> Upstream:
    root = (folder / "deep_gemm" if (folder / "deep_gemm").is_dir() else folder).resolve()
    try:
        version = (root / "VERSION").read_text().strip()
    except OSError:
        raise OracleUnavailable(f"{name} holds no deep_gemm/VERSION") from None
    if version != VERSION:
        raise OracleUnavailable(f"{name} is {DISTRIBUTION} {version}; the contract is that of {VERSION}")
    return Upstream(root, version)
