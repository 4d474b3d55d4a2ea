"""What is wrong with a file that cannot be read, in words that do not repeat its name."""

from __future__ import annotations

from pathlib import Path

_LFS = b"version https://git-lfs.github.com/spec/"


def why_unreadable(path: Path, error: Exception) -> str:
    """One clause for a message that starts with the file's name. `error` came of reading or parsing `path`."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "a folder, not a file"
    if _is_lfs_pointer(path):
        return "a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        return "not a text file"
    return str(error)


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS
    except OSError:
        return False
