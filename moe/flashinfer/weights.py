"""FlashInfer's weights, shuffled or plain, to what the kernels read: [gate; up] rows, scales in atom order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megamoe.flashinfer.prepared import prepared, say_second_copy
from megamoe.kernels.layouts import trtllm
from megamoe.kernels.layouts.gate_up import interleave_gate_up
from megamoe.kernels.layouts.scale_atoms import to_atom_order
from megamoe.recipe import Recipe, traits
from megamoe.weights import ExpertMatrices, MoEWeights

_BLOCK_COLUMNS = 128  # of BlockMajorK: 128 bytes, and E4M3 has one per column


@dataclass(frozen=True)
class Layout:
    """How the caller's weights lie.

    shuffle: rows per block of the row shuffle (`kernels.layouts.trtllm`), 0 for plain rows. halves: "pairs", up 0,
    gate 0, up 1, … before the shuffle; else "up_gate" or "gate_up". tiled: scales in 128×4 tiles, else row-major.
    block_major: [K/128, M, 128] instead of [M, K].
    """

    shuffle: int = 0
    halves: str = "gate_up"
    tiled: bool = False
    block_major: bool = False

    @property
    def copies_w2(self) -> bool:
        """Whether the kernels need w2 in another order; they need w13 so, too, if its halves are not [gate; up]."""
        return bool(self.shuffle) or self.block_major


SHUFFLED = Layout(32, "pairs", tiled=True)
UP_GATE = Layout(halves="up_gate")
GATE_UP = Layout()


@dataclass(frozen=True)
class Weights:
    """A layer's weights, checked, in the caller's order: E experts, hidden H, intermediate I.

    w13 [E, 2I, H], w2 [E, H, I], packed E2M1 as uint8; block_major: [E, H/128, 2I, 128] and [E, I/128, H, 128]. Scales:
    bytes of any dtype, [E, M, K/g] or tiles, or fp32 [E, M/128, K/128]. Biases fp32 [E, 2I] and [E, H]. The factors
    fp32 [E] multiply the activated value, the gate before it is activated, and GEMM 2's rows.
    """

    recipe: Recipe
    layout: Layout
    num_experts: int
    hidden: int
    intermediate: int
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    out_factor: torch.Tensor | None = None
    gate_factor: torch.Tensor | None = None
    down_factor: torch.Tensor | None = None


def kernel_weights(weights: Weights) -> MoEWeights:
    """In the kernels' order. What has another one is made once and kept (`prepared`); the rest is the caller's memory.

    Copied: w13 unless its rows are plain [gate; up], w2 unless its rows are plain, and block scales other than fp32,
    1/32 (MXFP8) to 1/8 (NVFP4) of the elements' bytes.
    """
    w, layout = weights, weights.layout
    group = traits(w.recipe).weight_group[1]

    def keep(source: torch.Tensor, what: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return prepared((source,), (what, layout, w.recipe, w.intermediate, w.hidden), make)

    w13, w2 = w.w13, w.w2
    if layout.copies_w2 or layout.halves != "gate_up":
        w13 = keep(w13, "w13", lambda: _copied("gemm1_weights", w.w13, lambda m: w13_rows(_major_k(m, layout), layout)))
    if layout.copies_w2:
        w2 = keep(w2, "w2", lambda: _copied("gemm2_weights", w.w2, lambda m: w2_rows(_major_k(m, layout), layout)))
    if w.w13_scale.dtype == torch.float32:
        w13_scale, w2_scale = w.w13_scale, w.w2_scale
        if layout.halves != "gate_up":
            w13_scale = keep(w13_scale, "w13 scale", lambda: _swapped(w.w13_scale))
    else:
        order = traits(w.recipe).tile_order

        def w13_atoms() -> torch.Tensor:
            plain = w13_rows(_linear(w.w13_scale, w, 2 * w.intermediate, w.hidden // group), layout)
            return to_atom_order(interleave_gate_up(plain, order))

        def w2_atoms() -> torch.Tensor:
            return to_atom_order(w2_rows(_linear(w.w2_scale, w, w.hidden, w.intermediate // group), layout))

        w13_scale, w2_scale = keep(w.w13_scale, "w13 scale", w13_atoms), keep(w.w2_scale, "w2 scale", w2_atoms)
    w13_bias, w2_bias = w.w13_bias, w.w2_bias
    if w13_bias is not None and layout != GATE_UP:
        bias = w13_bias
        w13_bias = keep(bias, "w13 bias", lambda: w13_rows(bias[..., None], layout).squeeze(-1).contiguous())
    if w2_bias is not None and layout.shuffle:
        down_bias = w2_bias
        w2_bias = keep(down_bias, "w2 bias", lambda: w2_rows(down_bias[..., None], layout).squeeze(-1).contiguous())
    return MoEWeights(
        w.recipe, w.num_experts, w.hidden, w.intermediate, 0,
        ExpertMatrices(w13, w13_scale, w2, w2_scale),
        l1_alphas=_l1_alphas(w), l2_alphas=w.down_factor, w13_bias=w13_bias, w2_bias=w2_bias, w13_rows="gate_up",
    )  # fmt: skip


def _l1_alphas(weights: Weights) -> torch.Tensor | None:
    """fp32 [E, 2]: the gate's factor and the activated value's; 1 where one of them is absent."""
    given = tuple(t for t in (weights.gate_factor, weights.out_factor) if t is not None)
    if not given:
        return None
    what = ("l1_alphas", weights.gate_factor is None, weights.out_factor is None)

    def make() -> torch.Tensor:
        columns = (weights.gate_factor, weights.out_factor)
        return torch.stack([torch.ones_like(given[0]) if t is None else t for t in columns], dim=-1)

    return prepared(given, what, make)


def _copied(name: str, weight: torch.Tensor, reorder: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`reorder` of every expert, one at a time: at no moment is there more than one copy and one expert."""
    first = reorder(weight[0])
    copy = torch.empty((len(weight), *first.shape), dtype=weight.dtype, device=weight.device)
    for index, expert in enumerate(weight):
        copy[index] = first if index == 0 else reorder(expert)
    say_second_copy(name, copy)
    return copy


def _major_k(matrix: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[K/128, M, 128] to [M, K]."""
    return matrix.transpose(0, 1).flatten(1) if layout.block_major else matrix


def w13_rows(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[.., 2I, X] in the caller's order to [gate; up]."""
    if layout.halves == "pairs":
        return trtllm.unshuffle_w13(rows, block=layout.shuffle)
    rows = w2_rows(rows, layout)
    return rows if layout.halves == "gate_up" else _swapped(rows)


def w2_rows(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[.., H, X] in the caller's order to plain rows."""
    return trtllm.unshuffle_rows(rows, block=layout.shuffle) if layout.shuffle else rows


def _swapped(rows: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, dim=-2)
    return torch.cat([second, first], dim=-2)


def _linear(scale: torch.Tensor, weights: Weights, rows: int, columns: int) -> torch.Tensor:
    """Scale bytes [E, rows, columns], uint8, rows still in the caller's order."""
    scale = scale.view(torch.uint8)
    if not weights.layout.tiled:
        return scale
    tiles = scale.reshape(weights.num_experts, *trtllm.padded_shape(rows, columns))
    return trtllm.unswizzle_scales(tiles, rows, columns)
