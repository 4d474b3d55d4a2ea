"""Which layers this tier serves, and the tile for a number of tokens: pure, no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.spec import LayerSpec

ROW_ALIGN = 8
"""Every expert's rows start at a multiple of it: TMA reads their scales by 16 bytes and more."""


@dataclass(frozen=True)
class HopperTile:
    """Chunks of token columns that one decoded operand meets, pipeline stages of 256 K columns, CTAs per SM."""

    chunks: tuple[int, int, int]
    stages: int
    ctas_per_sm: int

    @property
    def block_m(self) -> int:
        return sum(self.chunks)

    @property
    def scale_box(self) -> int:
        """Columns of the scales that a stage fetches: TMA wants 128 bytes at least, Triton a power of two."""
        box = 32
        while box < self.block_m:
            box *= 2
        return box


# Mean rows per expert up to which each tile is the fastest of those measured on an H200.
_DECODE = HopperTile((16, 0, 0), 5, 2)
_MIDDLE = HopperTile((32, 0, 0), 4, 2)
_MANY = HopperTile((64, 32, 16), 3, 1)
_PREFILL = HopperTile((64, 64, 0), 3, 1)
TILES = ((8, _DECODE), (32, _MIDDLE), (112, _MANY), (None, _PREFILL))


def choose_tile(spec: LayerSpec, num_tokens: int) -> HopperTile:
    """The tile for `num_tokens` tokens, by the mean of rows per expert."""
    rows = num_tokens * spec.top_k / spec.num_local_experts
    return next(tile for limit, tile in TILES if limit is None or rows <= limit)


def unsupported_reason(spec: LayerSpec, *, has_bias: bool, has_id_map: bool) -> str | None:
    """Why this tier can't serve `spec`, or None; such layers run on the portable kernels, with the same numbers."""
    recipe = spec.recipe
    if recipe.mma_type != "fp8xfp4" or recipe.numerics != "deep_gemm_sm90":
        return f"{recipe} is not MXFP4 × FP8 with fp32 activation scales"
    for name, value in (("hidden", spec.hidden), ("intermediate", spec.intermediate)):
        if value % 256:
            return f"{name}={value} is not a multiple of 256, a pipeline stage"
    if spec.num_shared_experts:
        return f"num_shared_experts={spec.num_shared_experts}; allowed: 0"
    if spec.activation == "situ":
        return "activation='situ'; allowed: 'swiglu', 'swigluoai'"
    if has_bias:
        return "biases"
    if has_id_map:
        return "experts of other ranks (an expert map, an offset)"
    return None
