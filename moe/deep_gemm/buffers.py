"""`SymmBuffer` and `SM90SymmBuffer`: one allocation with upstream's views and the workspace of a call.

Source of the contract: the classes of `sgl-deep-gemm` 0.1.7; `kernels.layouts.buffers` has the layouts and says which
regions are upstream's and which ours. Buffers lie on the current GPU, on the CPU where there is none.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch

from megamoe.deep_gemm.arguments import SM100_KINDS, Group, check_environment, check_group
from megamoe.deep_gemm.device import buffer_device, capability_major
from megamoe.kernels.layouts.buffers import (
    BufferLayout,
    align_tokens,
    slice_buffer,
    sm90_layout,
    sm90_unsupported_reason,
    sm100_layout,
    sm100_unsupported_reason,
)
from megamoe.spec import ACTIVATIONS
from megamoe.validation import check_choice, check_count

_UPSTREAM_NAMES = {
    "max_tokens": "num_max_tokens_per_rank",
    "top_k": "num_topk",
    "intermediate": "intermediate_hidden",
}


class _Buffer:
    """What both classes have: the allocation, its layout, and what calls have prepared for it.

    prepared: by a call's options. scratch: memory beside the allocation, which calls of all options share.
    """

    buffer: Any
    handle: Any
    group: Any
    x: Any
    x_sf: Any
    layout: BufferLayout
    prepared: dict[Any, Any]
    scratch: dict[Any, Any]

    def _allocate(self, group: Group | None, layout: BufferLayout) -> None:
        self.group = group
        self.layout = layout
        self.prepared = {}
        self.scratch = {}
        # Zero, as upstream's: what a caller does not write names expert 0 with weight 0.
        self.buffer = torch.zeros(layout.nbytes, dtype=torch.int8, device=buffer_device())
        self.handle = SimpleNamespace(buffer_ptrs=[self.buffer.data_ptr()])
        for name, view in slice_buffer(layout, self.buffer).items():
            setattr(self, name, view)

    def destroy(self) -> None:
        """Let the memory go; the buffer is of no use afterwards."""
        self.handle = None
        self.buffer = None
        self.group = None
        self.x = None
        self.x_sf = None
        self.prepared.clear()
        self.scratch.clear()


class SymmBuffer(_Buffer):
    """Buffer of the SM100 kinds for up to `num_max_tokens_per_rank` tokens (T; rounded up to 384 here already).

    Views, with E4M3 activations typed int8 as upstream's (`.view(torch.float8_e4m3fn)` reinterprets them):

    | view | shape, dtype |
    |---|---|
    | `x` = `shared_l1_acts` | [T, H] int8, E2M1 [T, H/2] int8, BF16 [T, H] |
    | `x_sf` | int32 [T, H/4g], four scale bytes per word; g = 32, NVFP4 16 |
    | `topk_idx`, `topk_weights` | int64 and fp32 [T, K] |
    | `x_scales` | fp32 [T], NVFP4's factor per token |
    | `shared_l1_acts_sf`, `shared_l2_acts`, `shared_l2_acts_sf` | of shared experts; nothing reads the first |
    | `l1_*`, `l2_*` | scratch; upstream's dtypes, our row counts |

    Raises `ValueError`/`TypeError` naming the argument, `UnsupportedError` for more ranks than one and `RuntimeError`
    for environment variables of older versions that select FP4.
    """

    def __init__(
        self,
        group: Group | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        mma_type: str = "fp8xfp4",
        activation: str = "swiglu",
    ) -> None:
        check_environment()
        check_group(group)
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("mma_type", mma_type, SM100_KINDS)
        if activation == "situ" and mma_type != "fp8xfp4":
            raise ValueError(f"activation is 'situ'; under {mma_type} allowed: 'swiglu', 'swigluoai'")
        shape = _shape(num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
        shape["num_shared_experts"] = check_count("num_shared_experts", num_shared_experts, 0)
        _raise(sm100_unsupported_reason(mma_type, **shape))
        layout = sm100_layout(mma_type, **shape)
        self.num_experts = num_experts
        self.num_max_tokens_per_rank = layout.num_tokens
        self.num_topk = num_topk
        self.hidden = hidden
        self.intermediate_hidden = intermediate_hidden
        self.num_shared_experts = num_shared_experts
        self.mma_type = mma_type
        self.activation = activation
        self._allocate(group, layout)


class SM90SymmBuffer(_Buffer):
    """Buffer of SM90 for up to `num_max_tokens_per_rank` tokens (T; rounded up to 384 here already).

    `x` float8_e4m3fn [T, H], `x_sf` fp32 [T, H/128], `topk_idx` int64 and `topk_weights` fp32 [T, K]; `l1_*` and `l2_*`
    are scratch. Serves FP8 experts (`fp8_mega_moe`) and MXFP4 ones (`fp8_fp4_mega_moe`, which upstream has no SM90
    kernel for). `x_sf_ue8m0` is the memory of `x_sf` as int32 [T, H/128], four UE8M0 bytes per 128 columns: with it as
    `x_sf` the calls read MX scales (`buffer.x_sf = buffer.x_sf_ue8m0`). Raises as `SymmBuffer` does.
    """

    def __init__(
        self,
        group: Group | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        use_fp8_dispatch: bool = True,
        activation: str = "swiglu",
    ) -> None:
        check_environment()
        check_group(group)
        check_choice("activation", activation, ("swiglu",))
        if use_fp8_dispatch is not True:
            raise ValueError(f"use_fp8_dispatch is {use_fp8_dispatch!r}; allowed for an SM90 buffer: True")
        shape = _shape(num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
        _raise(sm90_unsupported_reason(**shape))
        layout = sm90_layout(**shape)
        self.num_experts = num_experts
        self.num_max_tokens_per_rank = layout.num_tokens
        self.num_topk = num_topk
        self.hidden = hidden
        self.intermediate_hidden = intermediate_hidden
        self._allocate(group, layout)
        self.x_sf_ue8m0 = self.x_sf.view(torch.int32)


def get_symm_buffer_for_sm90_mega_moe(
    group: Group | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: str = "swiglu",
) -> SM90SymmBuffer:
    """A new `SM90SymmBuffer` for `num_max_tokens_per_rank` tokens, rounded up to 384."""
    return SM90SymmBuffer(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, use_fp8_dispatch, activation
    )


def get_symm_buffer_for_mega_moe(
    group: Group | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
) -> SymmBuffer | SM90SymmBuffer:
    """A new buffer for `num_max_tokens_per_rank` tokens, rounded up to 384; SM90's on Hopper for `fp8xfp4`.

    SM90's buffer has no shared experts, which upstream drops there in silence: `ValueError`. `SymmBuffer` itself serves
    them on Hopper. `use_fp8_dispatch` is superseded by `mma_type`: accepted with a `DeprecationWarning` where both say
    the same, else `ValueError`.
    """
    check_fp8_dispatch(use_fp8_dispatch, mma_type)
    sizes = (num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
    if capability_major() == 9 and mma_type == "fp8xfp4":
        if num_shared_experts != 0:
            raise ValueError(
                f"num_shared_experts is {num_shared_experts}; allowed on compute capability 9.x with 'fp8xfp4': 0 "
                "(megamoe.deep_gemm.SymmBuffer has them there, with UE8M0 activation scales)"
            )
        return get_symm_buffer_for_sm90_mega_moe(group, *sizes, True, activation)
    return SymmBuffer(group, *sizes, num_shared_experts, mma_type, activation)


def check_fp8_dispatch(use_fp8_dispatch: bool | None, mma_type: str) -> None:
    """`mma_type`, and the older argument beside it: None, or the same with a `DeprecationWarning` to the caller's
    caller. `ValueError` for anything else."""
    check_choice("mma_type", mma_type, SM100_KINDS)
    if use_fp8_dispatch is None:
        return
    consistent = mma_type.startswith("fp8x")
    if use_fp8_dispatch is not consistent:
        raise ValueError(
            f"use_fp8_dispatch is {use_fp8_dispatch!r}; with mma_type={mma_type!r} allowed: None, {consistent}"
        )
    warnings.warn("use_fp8_dispatch is superseded by mma_type", DeprecationWarning, stacklevel=3)


def _shape(num_experts: int, tokens: int, top_k: int, hidden: int, intermediate: int) -> dict[str, int]:
    """Counts under the names of `kernels.layouts.buffers`."""
    return {
        "num_experts": check_count("num_experts", num_experts, 1),
        "max_tokens": align_tokens(check_count("num_max_tokens_per_rank", tokens, 1)),
        "top_k": check_count("num_topk", top_k, 1),
        "hidden": check_count("hidden", hidden, 1),
        "intermediate": check_count("intermediate_hidden", intermediate, 1),
    }


def _raise(reason: str | None) -> None:
    """`ValueError` for a layout's reason, which begins with `name=`, under upstream's name."""
    if reason is not None:
        name, _, rest = reason.partition("=")
        raise ValueError(f"{_UPSTREAM_NAMES.get(name, name)}={rest}")
