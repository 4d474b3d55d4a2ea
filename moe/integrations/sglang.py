"""SGLang 0.5.19: its MegaMoE path (`--moe-a2a-backend megamoe`) on this package's kernels.

Entry point `sglang.srt.plugins`: SGLang calls `register` in every process before it parses arguments. It does nothing
unless `MEGAMOE_BACKEND=triton`. `docs/sglang.md` says how to use it, and what it serves.

What is hooked:

| target | why |
|---|---|
| MegaMoE's functions of `deep_gemm` 0.1.7 | the kernels; its GEMMs and attention stay upstream's |
| `dsv4.mega_moe_pre_dispatch` | FP8 tokens are quantized by SGLang's own CUDA kernel, with another floor |
| `mega_moe_sm90.is_sm90_fp8_mega_moe_available`, `run_sm90_mega_routed` | opens Hopper's route to MXFP4 experts |
| `mega_moe.build_mega_moe_experts_weights`, `should_use_mega_moe` | `MEGAMOE_HOPPER_ORDER=1`: its fast kernels |

Where no `deep_gemm` is installed, `megamoe.deep_gemm` stands in for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from megamoe import deep_gemm
from megamoe.backend_choice import ENVIRONMENT_VARIABLE
from megamoe.backends.base import UnsupportedError
from megamoe.deep_gemm.device import capability_major
from megamoe.deep_gemm.hopper_order import is_tiled
from megamoe.deep_gemm.patching import PATCHED_NAMES, replacement, version_unsupported_reason
from megamoe.deep_gemm.pre_dispatch import stage

VERSION = "0.5.19"
OPT_IN = "triton"
"""The value of `MEGAMOE_BACKEND` that opts in; any other leaves SGLang as it is."""

ORDER_VARIABLE = "MEGAMOE_HOPPER_ORDER"
"""`1`: MXFP4 experts on Hopper are re-laid for the fast kernels, which closes SGLang's fallback: it reads them too."""

JIT_AMAX_FLOOR = 1e-10
"""Of SGLang's FP8 pre-dispatch; DeepGEMM's own has 1e-4."""

_MEGA_MOE = "sglang.srt.layers.moe.mega_moe"
_JIT = "sglang.kernels.ops.attention.dsv4.mega_moe_pre_dispatch"
_SM90 = "sglang.srt.layers.moe.mega_moe_sm90"
_CAP = "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK"
_JIT_DEEP_GEMM = "SGLANG_ENABLE_JIT_DEEPGEMM"

_logger = logging.getLogger(__name__)
_registered = False


def register() -> None:
    """Register the hooks, once per process, where `MEGAMOE_BACKEND=triton`; SGLang applies them. Another value is
    logged as a warning, and nothing is hooked.

    Raises `UnsupportedError` for another SGLang than 0.5.19 or another `deep_gemm` than 0.1.7, before any hook is
    registered (SGLang logs it and goes on without this plugin).
    """
    global _registered
    asked = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if asked not in ("", OPT_IN):
        text = "megamoe: %s=%s leaves SGLang's MegaMoE as it is; the plugin serves %s alone"
        _logger.warning(text, ENVIRONMENT_VARIABLE, asked, OPT_IN)
    if _registered or asked != OPT_IN:
        return
    _check_version()
    hooks = _deep_gemm_hooks()
    plugins = importlib.import_module("sglang.srt.plugins.hook_registry")
    hook_type = plugins.HookType
    for target, hook in hooks.items():
        plugins.HookRegistry.register(target, hook, hook_type.REPLACE)
    plugins.HookRegistry.register(_JIT, mega_moe_pre_dispatch, hook_type.REPLACE)
    plugins.HookRegistry.register(f"{_SM90}.is_sm90_fp8_mega_moe_available", sm90_available, hook_type.AROUND)
    plugins.HookRegistry.register(f"{_SM90}.run_sm90_mega_routed", run_sm90_routed, hook_type.AROUND)
    plugins.HookRegistry.register(f"{_MEGA_MOE}.build_mega_moe_experts_weights", build_weights, hook_type.AROUND)
    plugins.HookRegistry.register(f"{_MEGA_MOE}.should_use_mega_moe", should_use, hook_type.AROUND)
    _registered = True
    _logger.info("megamoe: %s=%s; SGLang's MegaMoE path runs on megamoe's kernels", ENVIRONMENT_VARIABLE, OPT_IN)


def mega_moe_pre_dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buf_x: torch.Tensor,
    buf_x_sf: torch.Tensor,
    buf_topk_idx: torch.Tensor,
    buf_topk_weights: torch.Tensor,
    quant_group_size: int = 32,
) -> None:
    """In the place of SGLang's CUDA kernel: `megamoe.deep_gemm.mega_moe_pre_dispatch` of `fp8xfp4`, with its floor."""
    stage(
        x, topk_idx, topk_weights, buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights, len(x),
        kind="mxfp8", group=quant_group_size, amax_floor=JIT_AMAX_FLOOR,
    )  # fmt: skip


def sm90_available(original: Callable[[Any], bool], experts: Any) -> bool:
    """Around `is_sm90_fp8_mega_moe_available`, which SGLang asks on Hopper alone: MXFP4 experts too."""
    return original(experts) or _has_fp4_weights(experts)


def run_sm90_routed(
    original: Callable[..., torch.Tensor],
    moe: Any,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    buf: Any,
    num_tokens: int,
) -> torch.Tensor:
    """Around `run_sm90_mega_routed`: MXFP4 experts with FP8 tokens (fp32 scales per 128 columns) or, with
    `--enable-w4a4-mxfp4-megamoe`, MXFP4 tokens. Returns BF16 [n, H], scaled as SGLang's own routes do."""
    if not _has_fp4_weights(moe.experts):
        return original(moe, hidden_states, topk_ids, topk_weights, buf, num_tokens)
    fused = moe.experts.should_fuse_routed_scaling_factor_in_topk
    factor = 1.0 if fused else float(moe.routed_scaling_factor)
    views = (buf.x, buf.x_sf, buf.topk_idx, buf.topk_weights)
    fp8_tokens = isinstance(buf, deep_gemm.SM90SymmBuffer)
    if fp8_tokens:  # the factor goes into the weights, as on the FP8 route
        deep_gemm.mega_moe_pre_dispatch_sm90(
            hidden_states, topk_ids, topk_weights, *views, num_tokens=num_tokens, routed_scaling_factor=factor
        )
    else:
        deep_gemm.mega_moe_pre_dispatch(
            hidden_states, topk_ids, topk_weights, *views, num_tokens=num_tokens, mma_type=buf.mma_type
        )
    y = torch.empty((num_tokens, moe.config.hidden_size), dtype=torch.bfloat16, device=hidden_states.device)
    deep_gemm.fp8_fp4_mega_moe(
        y,
        moe.experts.mega_l1_weights,
        moe.experts.mega_l2_weights,
        buf,
        activation_clamp=getattr(moe.config, "swiglu_limit", None),
    )
    if not fp8_tokens and factor != 1.0:  # into y, as on the SM100 routes
        y.mul_(factor)
    return y


def build_weights(original: Callable[[Any], None], experts: Any) -> None:
    """Around `build_mega_moe_experts_weights`: on Hopper, where `MEGAMOE_HOPPER_ORDER=1` asks for it, the order of the
    fast kernels, in place. Weights that cannot be held in it stay as they are, and the log says why."""
    original(experts)
    if os.environ.get(ORDER_VARIABLE) != "1" or capability_major() != 9 or _is_reordered(experts):
        return
    if importlib.import_module(_MEGA_MOE)._mega_moe_mma_type() != "fp8xfp4":
        return  # MXFP4 tokens: those kernels read upstream's order
    try:
        tiled = deep_gemm.to_hopper_(experts.mega_l1_weights, experts.mega_l2_weights)
    except ValueError as reason:
        _logger.warning("megamoe: %s=1, but these experts keep their order: %s", ORDER_VARIABLE, reason)
        return
    experts.mega_l1_weights, experts.mega_l2_weights = tiled


def should_use(original: Callable[[Any, torch.Tensor], bool], moe: Any, hidden_states: torch.Tensor) -> bool:
    """Around `should_use_mega_moe`: where the weights lie in Hopper's order there is no other way to run the layer.
    Raises `UnsupportedError` where SGLang would leave MegaMoE, which it does above its cap on tokens."""
    use = original(moe, hidden_states)
    if not use and _is_reordered(moe.experts):
        raise UnsupportedError(
            f"a batch of {len(hidden_states)} tokens is beyond {_CAP}, and {ORDER_VARIABLE}=1 has closed SGLang's "
            "fallback; lower --chunked-prefill-size or raise the limit"
        )
    return use


def _is_reordered(experts: Any) -> bool:
    return getattr(experts, "_mega_moe_weights_built", False) and is_tiled(experts.mega_l1_weights)


def _has_fp4_weights(experts: Any) -> bool:
    built = getattr(experts, "_mega_moe_weights_built", False)
    return built and (experts.mega_l1_weights[0].dtype == torch.int8 or is_tiled(experts.mega_l1_weights))


def _check_version() -> None:
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return
    if installed != VERSION and not installed.startswith(f"{VERSION}."):
        raise UnsupportedError(f"sglang {installed} is installed; allowed: {VERSION}, whose interfaces are hooked")


def _deep_gemm_hooks() -> dict[str, Callable[..., Any]]:
    """Replacements of an installed `deep_gemm`'s functions; none where this package stands in for it."""
    if deep_gemm.stand_in():
        # It has MegaMoE alone: SGLang must not take it for one that has the dense GEMMs too.
        if os.environ.get(_JIT_DEEP_GEMM, "0").lower() not in ("0", "false", "no", "n"):
            _logger.warning("megamoe: no deep_gemm is installed; %s is set to 0", _JIT_DEEP_GEMM)
        os.environ[_JIT_DEEP_GEMM] = "0"
        return {}
    installed = importlib.import_module("deep_gemm")
    reason = version_unsupported_reason(installed)
    if reason is not None:
        raise UnsupportedError(reason)
    functions = [name for name in PATCHED_NAMES if callable(getattr(installed, name, None))]
    return {
        f"deep_gemm.{name}": replacement(name, getattr(installed, name))
        for name in functions
        if not isinstance(getattr(installed, name), type)
    }
