"""FlashInfer's integers that the functions here take, by its names (0.6.18); its own enums compare equal to them."""

from __future__ import annotations

from enum import IntEnum


class RoutingMethodType(IntEnum):
    """How a function that is given logits chooses and weighs experts (`megamoe.flashinfer.routing`)."""

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    TopKSigmoid = 9


class ActivationType(IntEnum):
    """The activations that are served; FlashInfer has more numbers."""

    Swiglu = 3
    Situ = 10


class WeightLayout(IntEnum):
    """How the FP8 functions' weights lie: [M, K], or [K/128, M, 128]."""

    MajorK = 0
    BlockMajorK = 2


class Fp8QuantizationType(IntEnum):
    """What the FP8 functions multiply: fp32 scales (128 columns; 128×128 weights) or UE8M0 scales of 32 columns."""

    DeepSeekFp8 = 1
    MxFp8 = 2
