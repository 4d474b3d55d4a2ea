"""The reference: a MoE layer in plain torch that reads as the specification and judges the kernels.

`quantizers` holds every step that makes bytes, `ids` what becomes of the routing, `gemm`, `activation` and `layer` the
arithmetic between them, `experts` where an expert's tensors lie, `summation` the sums that kernels may form. Runs on
CPU and CUDA.
"""

from megamoe.oracle.reference.activation import activate
from megamoe.oracle.reference.experts import Expert, dense_shared_expert, shared_tensors, slot_expert
from megamoe.oracle.reference.gemm import Matrix, gemm
from megamoe.oracle.reference.ids import INVALID_ID, known_ids, local_ids, slot_weights
from megamoe.oracle.reference.layer import (
    LayerTrace,
    Stages,
    combine,
    moe_layer,
    slots_by_expert,
)
from megamoe.oracle.reference.quantizers import (
    BlockFormat,
    PreDispatched,
    Quantized,
    act_format,
    dequantize_act,
    dequantize_weight,
    expand_scales,
    kind_of,
    mid_format,
    pre_dispatch_reference,
    quantize,
    requantize,
    shared_weight_format,
    weight_format,
)
from megamoe.oracle.reference.summation import (
    Matmul,
    matmul_fp8_wgmma,
    matmul_fp32,
    matmul_fp64,
    matmul_truncated,
)

__all__ = [
    "INVALID_ID",
    "BlockFormat",
    "Expert",
    "LayerTrace",
    "Matmul",
    "Matrix",
    "PreDispatched",
    "Quantized",
    "Stages",
    "act_format",
    "activate",
    "combine",
    "dense_shared_expert",
    "dequantize_act",
    "dequantize_weight",
    "expand_scales",
    "gemm",
    "kind_of",
    "known_ids",
    "local_ids",
    "matmul_fp8_wgmma",
    "matmul_fp32",
    "matmul_fp64",
    "matmul_truncated",
    "mid_format",
    "moe_layer",
    "pre_dispatch_reference",
    "quantize",
    "requantize",
    "shared_tensors",
    "shared_weight_format",
    "slot_expert",
    "slot_weights",
    "slots_by_expert",
    "weight_format",
]
