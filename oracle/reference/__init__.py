"""The reference: a MoE layer in plain torch that reads as the specification and judges the kernels.

`quantizers` holds every step that makes bytes, `layer` the arithmetic between them, `summation` the sums that
kernels may form. Runs on CPU and CUDA.
"""

from megamoe.oracle.reference.layer import (
    LayerTrace,
    Stages,
    activate,
    combine,
    moe_layer,
    shared_tensors,
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
    "BlockFormat",
    "LayerTrace",
    "Matmul",
    "PreDispatched",
    "Quantized",
    "Stages",
    "act_format",
    "activate",
    "combine",
    "dequantize_act",
    "dequantize_weight",
    "expand_scales",
    "kind_of",
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
    "slots_by_expert",
    "weight_format",
]
