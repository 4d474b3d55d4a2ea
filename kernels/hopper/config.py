"""Which layers this tier serves, and the tile for a number of tokens: pure, no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.recipe import Recipe
from megamoe.spec import LayerSpec

ROW_ALIGN = 8
"""Every expert's rows start at a multiple of it: TMA reads their scales by 16 bytes and more."""


@dataclass(frozen=True)
class HopperTile:
    """Chunks of tokens that one weight operand meets, pipeline stages, CTAs per SM.

    A stage is 256 columns of E2M1 weights, 128 of E4M3. `swapped`: weight rows are the MMA's 64-row operand and tokens
    its columns; otherwise chunks are 64 token rows each. `wide`: with one scale per token, a
    work item of GEMM 1 is 256 rows of E2M1 weights at once.
    """

    chunks: tuple[int, int, int]
    stages: int
    ctas_per_sm: int
    swapped: bool = True
    wide: bool = False

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

    def __str__(self) -> str:
        chunks = "+".join(str(chunk) for chunk in self.chunks if chunk)
        return f"{chunks}{'' if self.swapped else ' rows'}{' wide' if self.wide else ''}x{self.stages}"


# Mean rows per expert up to which each tile is the fastest of those measured on an H200.
_DECODE = HopperTile((16, 0, 0), 5, 2)
_MIDDLE = HopperTile((32, 0, 0), 4, 2)
_MANY = HopperTile((64, 32, 16), 3, 1)
_PREFILL = HopperTile((64, 64, 0), 3, 1, wide=True)
_E4M3_DECODE = HopperTile((16, 0, 0), 5, 2)
_E4M3_MIDDLE = HopperTile((32, 0, 0), 5, 2)
_E4M3_PREFILL = HopperTile((64, 64, 0), 4, 1, swapped=False)
TILES = {
    "e2m1": ((8, _DECODE), (32, _MIDDLE), (112, _MANY), (None, _PREFILL)),
    "e4m3": ((8, _E4M3_DECODE), (32, _E4M3_MIDDLE), (None, _E4M3_PREFILL)),
}
"""By the weights' element format."""


def choose_tile(spec: LayerSpec, num_tokens: int) -> HopperTile:
    """The tile for `num_tokens` tokens, by the mean of rows per expert."""
    rows = num_tokens * spec.top_k / spec.num_local_experts
    return next(tile for limit, tile in TILES[spec.traits.weight] if limit is None or rows <= limit)


def smallest_block_m(spec: LayerSpec) -> int:
    """Tokens of the smallest tile that `choose_tile` may pick."""
    return min(tile.block_m for _, tile in TILES[spec.traits.weight])


# Multiples of (hidden, intermediate): whole pipeline stages and work items.
_MULTIPLES = {
    "fp8xfp4": (256, 256),
    "fp8xfp8": (256, 128),
}


def unsupported_reason(spec: LayerSpec, *, has_bias: bool, has_id_map: bool) -> str | None:
    """Why this tier can't serve `spec`, or None; such layers run on the portable kernels, with the same numbers."""
    if not _serves(spec.recipe):
        return f"{spec.recipe} is not MXFP4 or E4M3 × FP8 with fp32 activation scales and deep_gemm_sm90 numerics"
    multiples = _MULTIPLES[spec.recipe.mma_type]
    for name, value, multiple in zip(("hidden", "intermediate"), (spec.hidden, spec.intermediate), multiples):
        if value % multiple:
            return f"{name}={value} is not a multiple of {multiple}, what a work item or pipeline stage takes"
    if spec.num_shared_experts:
        return f"num_shared_experts={spec.num_shared_experts}; allowed: 0"
    if spec.activation == "situ":
        return "activation='situ'; allowed: 'swiglu', 'swigluoai'"
    if has_bias:
        return "biases"
    if has_id_map:
        return "experts of other ranks (an expert map, an offset)"
    return None


def _serves(recipe: Recipe) -> bool:
    return recipe.mma_type in _MULTIPLES and recipe.numerics == "deep_gemm_sm90"
