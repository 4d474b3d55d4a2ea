"""FlashInfer's trtllm-gen MoE functions (0.6.18) on this package's kernels, on Hopper and the CPU interpreter too.

    from megamoe.flashinfer import trtllm_fp4_block_scale_routed_moe

Same names, arguments, order, defaults and returns; `docs/flashinfer.md` says what is served and what is refused.
"""

from megamoe.backends.base import UnsupportedError
from megamoe.flashinfer.enums import ActivationType, Fp8QuantizationType, RoutingMethodType, WeightLayout
from megamoe.flashinfer.fp4 import trtllm_fp4_block_scale_moe, trtllm_fp4_block_scale_routed_moe
from megamoe.flashinfer.fp8 import trtllm_fp8_block_scale_moe, trtllm_fp8_block_scale_routed_moe
from megamoe.flashinfer.packing import pack_topk_ids, unpack_topk_ids
from megamoe.flashinfer.prepared import forget_prepared_weights, prepared_bytes
from megamoe.flashinfer.routing import hash_topk
from megamoe.flashinfer.unshuffle import unshuffle_

__all__ = [
    "ActivationType",
    "Fp8QuantizationType",
    "RoutingMethodType",
    "UnsupportedError",
    "WeightLayout",
    "forget_prepared_weights",
    "hash_topk",
    "pack_topk_ids",
    "prepared_bytes",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "unpack_topk_ids",
    "unshuffle_",
]
