"""The package as it is built, laid out and imported."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import megamoe

ROOT = Path(__file__).parent.parent
FOLDERS = ("kernels", "oracle", "bench")
SOURCES = ("moe", *FOLDERS, "src", "pyproject.toml", "README.md", "LICENSE")


def _python(script: str, *, path: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with `path` in front of this one's packages."""
    parts = ([path] if path else []) + [part for part in sys.path if part]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(parts), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_importing_the_package_loads_nothing() -> None:
    result = _python(
        "import sys, megamoe, megamoe.cli\n"
        "heavy = {'torch', 'triton', 'numpy', 'megamoe.api', 'megamoe.kernels'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(megamoe.__all__) <= set(dir(megamoe))\n"
        "megamoe.resolve_recipe('fp8xfp4')\n"
        "assert 'torch' not in sys.modules"
    )
    assert result.returncode == 0, result.stderr


def test_every_public_name_exists_and_no_other() -> None:
    assert sorted(megamoe._HOME) == sorted(megamoe.__all__)
    for name in megamoe.__all__:
        assert getattr(megamoe, name).__module__.startswith("megamoe.")
    with pytest.raises(AttributeError, match="module 'megamoe' has no attribute 'fused_moe'"):
        megamoe.fused_moe  # noqa: B018


def test_the_root_is_not_on_the_path() -> None:
    """Its folder `kernels` would answer for another project's package of that name."""
    entries = [Path(entry or ".").resolve() for entry in sys.path]
    assert ROOT.resolve() not in entries
    assert "kernels" not in sys.modules


def test_the_source_folders_are_linked_into_the_package() -> None:
    links = {"src/megamoe": "../moe", **{f"moe/{name}": f"../{name}" for name in FOLDERS}}
    for link, target in links.items():
        assert (ROOT / link).is_symlink(), link
        assert os.readlink(ROOT / link) == target


def test_versions_agree() -> None:
    assert f'version = "{megamoe.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\n## {megamoe.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_makefile_installs_the_pinned_torch() -> None:
    torch_pin = next(
        line.split("torch==")[1].split('"')[0]
        for line in (ROOT / "pyproject.toml").read_text().splitlines()
        if line.startswith("cpu = ")
    )
    assert f"\nTORCH := {torch_pin}\n" in (ROOT / "Makefile").read_text()


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built offline from a copy, which keeps build/ out of the sources."""
    pytest.importorskip("build", reason="needs the package `build`")
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(source, copy / name)
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "out", "."],
        cwd=copy, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return copy / "out"


def _modules() -> list[str]:
    """Every module of the sources, as megamoe.…"""
    paths = [path.relative_to(ROOT) for folder in ("moe", *FOLDERS) for path in (ROOT / folder).rglob("*.py")]
    names = {".".join(path.with_suffix("").parts) for path in paths if "__pycache__" not in path.parts}
    packaged = {f"megamoe.{name.removeprefix('moe.')}" for name in names}
    return sorted(name.removesuffix(".__init__").replace("megamoe.moe", "megamoe") for name in packaged)


def test_every_module_imports_from_the_wheel(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    installed = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", tmp_path, wheel],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert installed.returncode == 0, installed.stderr
    modules = _modules()
    assert {"megamoe", "megamoe.api", "megamoe.kernels.layer", "megamoe.oracle.reference"} <= set(modules)
    result = _python(
        "import importlib\n"
        f"for name in {modules!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__\n",
        path=str(tmp_path),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr


def test_the_wheel_holds_what_it_should(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "megamoe/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"megamoe", f"megamoe-{megamoe.__version__}.dist-info"}
    assert "megamoe = megamoe.cli:main" in entry_points
    assert "License-Expression: Apache-2.0" in metadata
    assert {"cpu", "dev", "oracle", "bench"} == {
        line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra: ")
    }


def test_the_sdist_builds_the_same_modules(distributions: Path) -> None:
    """`build` made the wheel from the sdist, so the sdist has every source; here: without the links' copies twice."""
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    assert sum(name.endswith("kernels/layer.py") for name in names) == 1
