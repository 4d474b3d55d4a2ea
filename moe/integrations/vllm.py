"""vLLM: its DeepGEMM MegaMoE experts on these kernels, as a general plugin.

    MEGAMOE_BACKEND=triton vllm serve MODEL --moe-backend deep_gemm_mega_moe --enable-expert-parallel

vLLM loads the entry point `vllm.general_plugins` in every process; without that variable `register` does nothing.
Source of the contract: vLLM as of 0.33, which has no registry for MoE backends of others. So the plugin gives it
another DeepGEMM: `vllm.utils.deep_gemm._import_deep_gemm`, by which vLLM finds its functions, returns the one it found
with MegaMoE's names replaced; that module itself is left as it is. And the experts classes, which ask for SM100, ask
for what these kernels need instead. Nothing of vLLM is imported before `register`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megamoe.backend_choice import ENVIRONMENT_VARIABLE
from megamoe.backends.base import UnsupportedError

OPT_IN = "triton"
RESOLVER = "_import_deep_gemm"
EXPERTS_MODULES = ("vllm.models.common.deep_gemm_mega_moe", "vllm.models.deepseek_v4.nvidia.model")
EXPERTS_CLASSES = ("DeepGemmMegaMoEExperts", "DeepseekV4MegaMoEExperts")
_SM100 = 10
_OURS = "_megamoe"  # marks what this plugin put in place

_logger = logging.getLogger("megamoe")


def register() -> bool:
    """Serve vLLM's MegaMoE calls where MEGAMOE_BACKEND=triton asks for it; whether it did. May be called again. Another
    value is logged as a warning.

    Raises `ImportError` without vLLM and `UnsupportedError` for a vLLM without the function this replaces.
    """
    asked = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if asked != OPT_IN:
        text = "vLLM plugin: %s=%s leaves vLLM's MegaMoE as it is; the plugin serves %s alone"
        _logger.log(logging.WARNING if asked else logging.DEBUG, text, ENVIRONMENT_VARIABLE, asked, OPT_IN)
        return False
    wrappers = importlib.import_module("vllm.utils.deep_gemm")
    resolve = getattr(wrappers, RESOLVER, None)
    if resolve is None:
        raise UnsupportedError(
            f"this vLLM has no vllm.utils.deep_gemm.{RESOLVER}, by which megamoe is put in; served: 0.33"
        )
    if not hasattr(resolve, _OURS):
        _replace_resolver(wrappers, resolve)
        for name in EXPERTS_MODULES:
            _when_imported(name, _admit_other_gpus)
        _logger.info("vLLM plugin: MegaMoE runs on megamoe's kernels (%s=%s)", ENVIRONMENT_VARIABLE, OPT_IN)
    return True


def _replace_resolver(wrappers: ModuleType, resolve: Callable[[], ModuleType | None]) -> None:
    @functools.cache
    def import_deep_gemm() -> ModuleType:
        return _Overlay(resolve())

    setattr(import_deep_gemm, _OURS, True)
    setattr(wrappers, RESOLVER, import_deep_gemm)
    # What vLLM's lazy initialisation has taken from upstream already.
    for name in list(vars(wrappers)):
        taken = name.removeprefix("_").removesuffix("_impl")
        if name == f"_{taken}_impl" and vars(wrappers)[name] is not None and taken in _patched_names():
            setattr(wrappers, name, getattr(import_deep_gemm(), taken))


class _Overlay(ModuleType):
    """DeepGEMM with MegaMoE's names replaced; all others are `base`'s, or this package's where vLLM found none."""

    def __init__(self, base: ModuleType | None) -> None:
        from megamoe import deep_gemm
        from megamoe.deep_gemm.patching import replacement

        super().__init__("deep_gemm", "DeepGEMM, MegaMoE by megamoe")
        self._base = deep_gemm if base is None else base
        for name in _patched_names():
            setattr(self, name, replacement(name, getattr(base, name, None)))
        self.get_symm_buffer_for_mega_moe = _mx_buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def _patched_names() -> tuple[str, ...]:
    from megamoe.deep_gemm.patching import PATCHED_NAMES

    return PATCHED_NAMES


def _mx_buffer(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
) -> Any:
    """The buffer of the SM100 kinds on every GPU: vLLM stages tokens with UE8M0 scales itself, on Hopper too."""
    from megamoe.deep_gemm.buffers import SymmBuffer, check_fp8_dispatch

    check_fp8_dispatch(use_fp8_dispatch, mma_type)
    sizes = (num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
    return SymmBuffer(group, *sizes, num_shared_experts, mma_type, activation)


def _admit_other_gpus(module: ModuleType) -> None:
    """Where an experts class refuses every GPU but SM100, ask for those that the kernels run on."""
    for name in EXPERTS_CLASSES:
        cls = getattr(module, name, None)
        original = vars(cls).get("_check_runtime_supported") if isinstance(cls, type) else None
        if original is not None and not hasattr(original, _OURS):
            cls._check_runtime_supported = _admission(original)  # type: ignore[union-attr]


def _admission(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _check_runtime_supported(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        from megamoe.backends.triton import device_unsupported_reason
        from megamoe.kernels.layouts.buffers import align_tokens, sm100_unsupported_reason

        device = next(self.parameters()).device
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _SM100:
            return original(self, *args, **kwargs)
        reason = device_unsupported_reason(device)
        if reason is not None:
            raise UnsupportedError(f"megamoe cannot run vLLM's MegaMoE: {reason}")
        reason = sm100_unsupported_reason(
            getattr(self, "mma_type", "fp8xfp4"),
            num_experts=self.num_experts,
            max_tokens=align_tokens(self.max_num_tokens),
            top_k=self.top_k,
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            num_shared_experts=getattr(self, "num_shared_experts", 0),
        )
        if reason is not None:
            raise UnsupportedError(f"megamoe cannot run vLLM's MegaMoE: {reason}")

    setattr(_check_runtime_supported, _OURS, True)
    return _check_runtime_supported


def _when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """`action(module)` now, or once `name` is imported: importing models here would slow every process down."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _ImportHook(name, action))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Finds `name` as the other finders do, and has `action` follow its execution."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        finders = [finder for finder in sys.meta_path if not isinstance(finder, _ImportHook)]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute, action = spec.loader.exec_module, self._action

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
