"""Tensors made once from the caller's weights and kept for as long as those live.

An engine passes the same weights at every call, often through fresh views of them. A tensor is therefore known by its
storage, and by where and how it lies in it: address, shape, strides, dtype. When the storage dies, what was made of it
is freed. When the weights are written in place, as their version counter tells, the tensor is made again *into the same
memory*, so that CUDA graphs which read it stay valid; for that moment it exists twice. Writes that torch does not count
(`param.data.copy_`, other libraries, weights made under `torch.inference_mode()`) need `forget_prepared_weights`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import RLock

import torch

_logger = logging.getLogger("megamoe")
_lock = RLock()  # a finalizer may run in the thread that holds it
_entries: dict[Hashable, _Entry] = {}
_watched: set[int] = set()
"""Storages, by identity, whose death is waited for."""
_said = False


@dataclass
class _Entry:
    versions: tuple[int | None, ...]
    value: torch.Tensor
    storages: tuple[int, ...]


def prepared(sources: tuple[torch.Tensor, ...], what: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`make()`, which depends on `sources` and `what` alone: kept, made again where a source was written.

    Making it waits once for the GPU, so that every stream may read it; `RuntimeError` when the current stream records a
    CUDA graph, which would make it at every replay and not before.
    """
    key = (what, *map(_place, sources))
    versions = tuple(None if source.is_inference() else source._version for source in sources)
    with _lock:
        entry = _entries.get(key)
        if entry is not None and entry.versions == versions:
            return entry.value
        device = sources[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "these weights are new or were written since the last call: prepare them by a call before the capture"
            )
        value = make()
        if entry is None:
            storages = tuple(id(source.untyped_storage()) for source in sources)
            _entries[key] = entry = _Entry(versions, value, storages)
            for source in sources:
                _watch(source.untyped_storage())
        else:
            entry.value.copy_(value)
            entry.versions = versions
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return entry.value


def prepared_bytes() -> int:
    """Bytes of everything that is kept, besides the callers' own weights."""
    with _lock:
        return sum(entry.value.numel() * entry.value.element_size() for entry in _entries.copy().values())


def forget_prepared_weights(*tensors: torch.Tensor) -> None:
    """Make anew, at the next call, what was made of `tensors` (any views of them); of all weights when none is given.

    CUDA graphs recorded with them must be recorded again.
    """
    storages = {id(tensor.untyped_storage()) for tensor in tensors}
    with _lock:
        for key, entry in _entries.copy().items():
            if not tensors or storages & set(entry.storages):
                _entries.pop(key, None)


def say_second_copy(name: str, copy: torch.Tensor) -> None:
    """Log, once per process, that weights are kept twice."""
    global _said
    if _said:
        return
    _said = True
    _logger.warning(
        "megamoe.flashinfer keeps reordered copies of weights beside the caller's, here %.1f MiB of %s; "
        "megamoe.flashinfer.unshuffle_ reorders them in place instead",
        copy.numel() * copy.element_size() / 2**20,
        name,
    )


def _place(tensor: torch.Tensor) -> Hashable:
    storage = id(tensor.untyped_storage())
    return storage, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _watch(storage: torch.UntypedStorage) -> None:
    if id(storage) not in _watched:
        _watched.add(id(storage))
        # Torch keeps one Python object per storage for as long as the storage lives.
        weakref.finalize(storage, _drop, id(storage)).atexit = False


def _drop(storage: int) -> None:
    with _lock:
        _watched.discard(storage)
        for key, entry in _entries.copy().items():
            if storage in entry.storages:
                _entries.pop(key, None)
