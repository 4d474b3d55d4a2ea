"""A layer with a shared expert, two ways: fused into the layer's launches, or an MLP of its own on a second stream.

Both have the same routed experts and the same shared one, which is drawn in E4M3 with a scale per 128×128 block, as
DeepSeek's checkpoints keep it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from megamoe.api import MegaMoE, prepare_weights
from megamoe.backends.base import LayerRequest
from megamoe.backends.triton import architecture
from megamoe.bench.layers import FP8_BLOCK, LayerStore
from megamoe.bench.shapes import ModelShape
from megamoe.oracle.metrics import LIMITS, Limits
from megamoe.oracle.random_layers import Inputs, layer_spec, random_weights
from megamoe.oracle.reference import moe_layer
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe
from megamoe.shared_fusion import quantize_block_fp8_weight_to_mxfp4

LAYERS = 3
"""A layer of DeepSeek-V4-Flash reads 93 MB for one token: between two uses of a shared expert lie some 270 MB."""


class SharedLayer(Protocol):
    """A layer and its shared expert, ready to run. `stream_syncs`: how often its calls have made a stream wait."""

    name: str
    limits: Limits
    stream_syncs: int

    @property
    def note(self) -> str:
        """Which of our kernels run it."""

    def __call__(self, i: Inputs, output: torch.Tensor) -> None:
        """Write y, routed plus shared, to `output` BF16 [T, H]; can be captured in a CUDA graph once it is warm."""

    def expected(self, i: Inputs, tokens: torch.Tensor) -> torch.Tensor:
        """The rows `tokens` of y by the reference, for the weights as this layer has them."""


class Fused:
    """One call. The shared expert is MXFP4 like the routed ones and rides in their launches."""

    name = "fused"
    stream_syncs = 0

    def __init__(
        self, routed: PlainWeights, shared: PlainWeights, recipe: Recipe, shape: ModelShape, max_tokens: int
    ) -> None:
        self.limits = LIMITS[recipe]
        self._layer = _Part(with_mxfp4_shared(routed, shared), recipe, shape, max_tokens, shape.top_k)

    @property
    def note(self) -> str:
        return self._layer.kernels

    def __call__(self, i: Inputs, output: torch.Tensor) -> None:
        self._layer.run(i.x, i.topk_ids, i.topk_weights, output)

    def expected(self, i: Inputs, tokens: torch.Tensor) -> torch.Tensor:
        return self._layer.expected(i, tokens)


class Separate:
    """The routed experts on the current stream, the shared one in E4M3 on a second, then the sum.

    The MLP is a layer of one expert that every token chooses with weight 1. On a CPU, where torch's streams are empty
    shells, the two run one after the other.
    """

    name = "separate"

    def __init__(
        self, routed: PlainWeights, shared: PlainWeights, recipe: Recipe, shape: ModelShape, max_tokens: int
    ) -> None:
        self.limits = max(LIMITS[recipe], LIMITS[FP8_BLOCK], key=lambda limits: limits.rel_rms)
        self.stream_syncs = 0
        self._routed = _Part(routed, recipe, shape, max_tokens, shape.top_k)
        self._shared = _Part(shared, FP8_BLOCK, shape, max_tokens, 1)
        device = routed.w13.device
        self._ids = torch.zeros(max_tokens, 1, dtype=torch.int32, device=device)
        self._ones = torch.ones(max_tokens, 1, dtype=torch.float32, device=device)
        self._shared_y = torch.empty(max_tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        self._streams = torch.get_device_module(device)
        self._side = self._streams.Stream()

    @property
    def note(self) -> str:
        return f"routed: {self._routed.kernels}; shared: {self._shared.kernels}"

    def __call__(self, i: Inputs, output: torch.Tensor) -> None:
        tokens, main = len(i.x), self._streams.current_stream()
        shared_y = self._shared_y[:tokens]
        self._wait(self._side, main)
        with self._streams.stream(self._side):
            self._shared.run(i.x, self._ids[:tokens], self._ones[:tokens], shared_y)
        self._routed.run(i.x, i.topk_ids, i.topk_weights, output)
        self._wait(main, self._side)
        output.add_(shared_y)

    def expected(self, i: Inputs, tokens: torch.Tensor) -> torch.Tensor:
        every_token = replace(i, topk_ids=self._ids[: len(i.x)], topk_weights=self._ones[: len(i.x)])
        return self._routed.expected(i, tokens) + self._shared.expected(every_token, tokens)

    def _wait(self, stream: Any, other: Any) -> None:
        """An event on `other` for which `stream` waits; under capture this is what draws the side stream into the graph
        and back."""
        stream.wait_stream(other)
        self.stream_syncs += 1


def shared_expert(shape: ModelShape, device: torch.device, seed: int) -> PlainWeights:
    """A random one, as the only expert of a layer: E4M3 w13 [1, 2I, H] and w2 [1, H, I], fp32 scales per 128×128."""
    spec = layer_spec(FP8_BLOCK, shape.hidden, shape.intermediate, 1, 1)
    return random_weights(spec, torch.Generator(device).manual_seed(seed))


def with_mxfp4_shared(routed: PlainWeights, shared: PlainWeights) -> PlainWeights:
    """`routed` with the expert of `shared_expert` beside it, requantized to MXFP4 as an engine does at load."""
    assert shared.w13_scale is not None
    assert shared.w2_scale is not None
    w13, w13_scale = quantize_block_fp8_weight_to_mxfp4(shared.w13[0], shared.w13_scale[0])
    w2, w2_scale = quantize_block_fp8_weight_to_mxfp4(shared.w2[0], shared.w2_scale[0])
    return replace(
        routed,
        shared_w13=w13.view(torch.uint8),
        shared_w13_scale=w13_scale.view(torch.uint8),
        shared_w2=w2.view(torch.uint8),
        shared_w2_scale=w2_scale.view(torch.uint8),
    )


def open_layers(store: LayerStore, recipe: Recipe, max_tokens: int, count: int = LAYERS) -> list[list[SharedLayer]]:
    """`count` layers of each contender. The n-th of both has the same weights, up to the shared expert's format; no two
    of one contender share an expert's memory where the kernels copy weights, and none the shared expert's anywhere."""
    routed, shape = store.plain(recipe), store.shape
    fused: list[SharedLayer] = []
    separate: list[SharedLayer] = []
    for seed in range(count):
        shared = shared_expert(shape, store.device, seed)
        fused.append(Fused(routed, shared, recipe, shape, max_tokens))
        separate.append(Separate(routed, shared, recipe, shape, max_tokens))
    return [fused, separate]


class _Part:
    """A `MegaMoE` on our kernels, and the reference of it."""

    def __init__(self, weights: PlainWeights, recipe: Recipe, shape: ModelShape, max_tokens: int, top_k: int) -> None:
        self._plain = weights
        prepared = prepare_weights(**vars(weights), **vars(recipe))
        self.run = MegaMoE(
            prepared,
            max_tokens,
            top_k,
            activation=shape.activation,
            activation_clamp=shape.activation_clamp,
            moe_backend="triton",
        )
        self.kernels = "portable kernels"
        if architecture(self.run.device) == 90:
            # Not at the top: it loads Gluon, which the interpreter has no use for.
            from megamoe.backends.hopper import hopper_unsupported_reason

            request = LayerRequest(self.run.spec, self.run.device, max_tokens)
            reason = hopper_unsupported_reason(request, prepared, LayerParameters())
            self.kernels = "SM90 tier" if reason is None else f"portable kernels: {reason}"

    def expected(self, i: Inputs, tokens: torch.Tensor) -> torch.Tensor:
        spec = self.run.spec
        return moe_layer(i.x, i.topk_ids, i.topk_weights, self._plain, spec, tokens=tokens, full_trace=False).y
