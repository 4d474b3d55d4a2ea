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
    its columns, in three chunks, of which some may be 0; otherwise chunks are four of 64 token rows. `wide`: with one
    scale per token, a work item of GEMM 1 is 256 rows of E2M1 weights at once; with BF16 tokens of both GEMMs, and a
    stage 128 columns. `overlap`: launched before the kernel before has ended (`pdl`), which is for few tokens: programs
    that start as others end are not where their neighbours are, and large layers took 1 to 30 % more.
    """

    chunks: tuple[int, ...]
    stages: int
    ctas_per_sm: int
    swapped: bool = True
    wide: bool = False
    overlap: bool = False

    @property
    def block_m(self) -> int:
        return sum(self.chunks)

    @property
    def scale_box(self) -> int:
        """Columns of the scales that a stage fetches where `swapped`: TMA wants 128 bytes at least, Triton a power of
        two."""
        box = 32
        while box < self.block_m:
            box *= 2
        return box

    def __str__(self) -> str:
        chunks = "+".join(str(chunk) for chunk in self.chunks if chunk)
        return f"{chunks}{'' if self.swapped else ' rows'}{' wide' if self.wide else ''}x{self.stages}"


# Mean rows per expert up to which each tile is the fastest of those measured on an H200.
_DECODE = HopperTile((16, 0, 0), 5, 2, overlap=True)
_MIDDLE = HopperTile((32, 0, 0), 4, 2)
_MANY = HopperTile((64, 32, 16), 3, 1)
_PREFILL = HopperTile((64, 64, 0), 3, 1, wide=True)
_E4M3_DECODE = HopperTile((16, 0, 0), 5, 2, overlap=True)
_E4M3_MIDDLE = HopperTile((32, 0, 0), 5, 2)
_E4M3_PREFILL = HopperTile((64, 64, 64, 64), 4, 1, swapped=False)
_BF16_DECODE = HopperTile((16, 0, 0), 4, 2, overlap=True)
_BF16_MIDDLE = HopperTile((32, 0, 0), 3, 2)
_BF16_PREFILL = HopperTile((64, 64, 0), 4, 1, wide=True)
TILES = {
    "bf16": ((8, _BF16_DECODE), (32, _BF16_MIDDLE), (None, _BF16_PREFILL)),
    "e2m1": ((8, _DECODE), (32, _MIDDLE), (72, _MANY), (None, _PREFILL)),
    "e4m3": ((8, _E4M3_DECODE), (32, _E4M3_MIDDLE), (None, _E4M3_PREFILL)),
}
"""By the weights' element format; `bf16`: MXFP4 weights that meet BF16 tokens."""


def _tiles(spec: LayerSpec) -> tuple[tuple[int | None, HopperTile], ...]:
    return TILES["bf16" if spec.traits.act == "bf16" else spec.traits.weight]


def choose_tile(spec: LayerSpec, num_tokens: int) -> HopperTile:
    """The tile for `num_tokens` tokens, by the mean of rows per expert."""
    rows = num_tokens * spec.top_k / spec.num_local_experts
    return next(tile for limit, tile in _tiles(spec) if limit is None or rows <= limit)


def smallest_block_m(spec: LayerSpec) -> int:
    """Tokens of the smallest tile that `choose_tile` may pick."""
    return min(tile.block_m for _, tile in _tiles(spec))


# Multiples of (hidden, intermediate): whole pipeline stages and work items.
_MULTIPLES = {
    "fp8xfp4": (256, 256),
    "fp8xfp8": (256, 128),
    "bf16xfp4": (256, 256),
}


def unsupported_reason(spec: LayerSpec, *, has_bias: bool, has_id_map: bool) -> str | None:
    """Why this tier can't serve `spec`, or None; such layers run on the portable kernels, with the same numbers."""
    if not _serves(spec.recipe):
        return f"{spec.recipe} is neither FP8 × MXFP4 or E4M3 under deep_gemm_sm90 numerics nor BF16 × MXFP4"
    multiples = _MULTIPLES[spec.recipe.mma_type]
    for name, value, multiple in zip(("hidden", "intermediate"), (spec.hidden, spec.intermediate), multiples):
        if value % multiple:
            return f"{name}={value} is not a multiple of {multiple}, what a work item or pipeline stage takes"
    reason = _shared_unsupported_reason(spec)
    if reason is not None:
        return reason
    if spec.activation == "situ":
        return "activation='situ'; allowed: 'swiglu', 'swigluoai'"
    if has_bias:
        return "biases"
    if has_id_map:
        return "experts of other ranks (an expert map, an offset)"
    return None


def _shared_unsupported_reason(spec: LayerSpec) -> str | None:
    """A shared expert is one more expert here: of a routed one's format and width, behind them in the same memory."""
    if spec.num_shared_experts == 0:
        return None
    found = f"num_shared_experts={spec.num_shared_experts}"
    if spec.traits.weight != "e2m1":
        return f"{found}; allowed beside E4M3 experts, whose weights are read where they are: 0"
    if spec.shared_weight != "e2m1":
        return f"{found} in {spec.shared_weight}; allowed beside MXFP4 experts: e2m1"
    if spec.shared_slots:
        return f"{found}, named by the router; allowed under {spec.recipe.numerics}: 0"
    if spec.num_shared_experts > 1:
        return f"{found}; allowed: 0, 1; more are one MLP, wider than the experts and rounded once"
    return None


def _serves(recipe: Recipe) -> bool:
    if recipe.mma_type == "bf16xfp4":
        return True
    return recipe.mma_type in _MULTIPLES and recipe.numerics == "deep_gemm_sm90"
