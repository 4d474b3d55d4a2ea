"""A module shaped like `deep_gemm`: the MegaMoE part of `sgl-deep-gemm` 0.1.7, run by this package's kernels.

Names, parameters, their order, defaults and returns are upstream's. Callers written for upstream are served by
`import megamoe.deep_gemm as deep_gemm`, by this module in the place of `deep_gemm` (`stand_in`) and by an installed
`deep_gemm` that got these functions (`patch`). Buffers have upstream's views, transformed weights upstream's bytes, and
the kernels read both as they are. Upstream's dense GEMMs and attention kernels are not here.

What differs, on purpose:

* It runs wherever the kernels do, also on Hopper with MXFP4 or NVFP4 experts, on sm_120 and, on CPU tensors, in
  Triton's interpreter or in the reference. On Hopper `get_symm_buffer_for_mega_moe` gives the SM90 buffer for `fp8xfp4`
  alone.
* `group` may be None and needs no torch.distributed; more than one rank raises `UnsupportedError`.
* What upstream asserts raises `ValueError` or `TypeError` that names the argument, before anything is launched or
  written; so do illegal values that upstream's kernels would misread.
* `shared_l1_acts_sf` need not be written: shared experts read the scales in `x_sf`.
* Expert ids of `num_experts` and more are skipped, not followed out of bounds.
* On Hopper the FP8 kernels are the fast tier's (`kernels.hopper`). MXFP4 experts reach it once their owner has re-laid
  them in place (`to_hopper_`, `from_hopper_`: ours); as they come they run on the portable kernels.
* `fast_math` changes nothing: sigmoids are of the fast kind either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from megamoe.deep_gemm import testing, utils
from megamoe.deep_gemm.block_m import get_block_m_for_mega_moe
from megamoe.deep_gemm.buffers import (
    SM90SymmBuffer,
    SymmBuffer,
    get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe,
)
from megamoe.deep_gemm.device import get_num_sms, set_num_sms
from megamoe.deep_gemm.fused import bf16_mega_moe, fp8_fp4_mega_moe, fp8_mega_moe, nvfp4_mega_moe
from megamoe.deep_gemm.hopper_order import from_hopper_, to_hopper_
from megamoe.deep_gemm.patching import VERSION, patch, stand_in, unpatch
from megamoe.deep_gemm.pre_dispatch import mega_moe_pre_dispatch, mega_moe_pre_dispatch_sm90
from megamoe.deep_gemm.scale_layout import transform_sf_into_required_layout
from megamoe.deep_gemm.testing import calc_diff
from megamoe.deep_gemm.utils import (
    pack_ue8m0_to_int,
    per_block_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
    per_token_cast_to_nvfp4,
    transform_ue4m3_sf_into_required_layout,
)
from megamoe.deep_gemm.weights import transform_weights_for_mega_moe, transform_weights_for_mega_moe_sm90

__version__ = VERSION
"""Of the contract, which callers ask about; this package's own is `megamoe.__version__`."""

_pretend_sm: int | None = None
"""For tests: the compute capability, times ten, by which buffers are chosen; None: that of the GPU present."""

__all__ = [
    "SM90SymmBuffer",
    "SymmBuffer",
    "bf16_mega_moe",
    "calc_diff",
    "fp8_fp4_mega_moe",
    "fp8_mega_moe",
    "from_hopper_",
    "get_block_m_for_mega_moe",
    "get_num_sms",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "mega_moe_pre_dispatch",
    "mega_moe_pre_dispatch_sm90",
    "nvfp4_mega_moe",
    "pack_ue8m0_to_int",
    "patch",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "per_token_cast_to_nvfp4",
    "set_num_sms",
    "stand_in",
    "testing",
    "to_hopper_",
    "transform_sf_into_required_layout",
    "transform_ue4m3_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "unpatch",
    "utils",
]


if not TYPE_CHECKING:  # a checker would take every name for one that is here

    def __getattr__(name: str) -> NoReturn:
        """For upstream's names that are not here: where they are."""
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise AttributeError(
            f"megamoe.deep_gemm has no {name!r}: it is the MegaMoE part of DeepGEMM {__version__}. Where deep_gemm is "
            "installed, megamoe.deep_gemm.patch() puts that part into it and leaves all others to it"
        )
