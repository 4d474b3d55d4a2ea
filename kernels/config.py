"""Launch configurations: one frozen dataclass, one predicate that says whether it is legal, one pure choice.

Nothing here touches a GPU: the choice is a function of the layer, the architecture and the token count, so that
it can be tested anywhere and never tunes inside a serving call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megamoe.spec import LayerSpec

INTERPRETER = 0  # the "architecture" of Triton's CPU interpreter
ARCHITECTURES = (90, 100, 120)

# Dynamic shared memory one CTA may use, bytes.
SHARED_MEMORY = {90: 232448, 100: 232448, 120: 101376}

SCALE_ATOM_ROWS = 128  # weight scales come in atoms of 128 rows: a tile of N is a whole number of them


@dataclass(frozen=True)
class GemmConfig:
    """Tile of one expert GEMM.

    `block_m` permuted rows × `block_n` weight rows × `block_k` elements of the contraction axis per pipeline stage.
    `mma` is how the numbers meet: `scaled` (`tl.dot_scaled`, native on Blackwell), `widened` (the same after E2M1
    weights became E4M3, for SM120, whose MMA does not mix the two), `decoded` (operands decoded to BF16: block-scaled
    ones on SM90, whose MMA knows no block scales, and E2M1 beside BF16 or fp32-scaled activations everywhere), `block`
    (FP8 MMA per K block, promoted to fp32 with fp32 scales) or `bf16`.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    mma: str


@dataclass(frozen=True)
class LayerConfig:
    """Configurations of both GEMMs; they share `block_m`, since one tile list serves both."""

    gate_up: GemmConfig
    down: GemmConfig

    @property
    def block_m(self) -> int:
        return self.gate_up.block_m


def illegal_reason(config: LayerConfig, spec: LayerSpec, arch: int) -> str | None:
    """Why `config` cannot run `spec` on `arch`, or None. The single definition of a legal configuration."""
    if config.gate_up.block_m != config.down.block_m:
        return f"block_m differs: gate_up {config.gate_up.block_m}, down {config.down.block_m}"
    for name, gemm in (("gate_up", config.gate_up), ("down", config.down)):
        reason = _gemm_illegal_reason(gemm, spec, arch, is_down=name == "down")
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _gemm_illegal_reason(gemm: GemmConfig, spec: LayerSpec, arch: int, *, is_down: bool) -> str | None:
    for field in ("block_m", "block_n", "block_k"):
        value = getattr(gemm, field)
        if value < 16 or value & (value - 1):
            return f"{field}={value} is not a power of two of at least 16"
    if gemm.block_n % SCALE_ATOM_ROWS:
        return f"block_n={gemm.block_n} is not a multiple of {SCALE_ATOM_ROWS}"
    traits = spec.traits
    if not is_down and gemm.block_n % (2 * (traits.mid_group or 1)):
        return f"block_n={gemm.block_n} is not a multiple of {2 * traits.mid_group}: tiles make whole scale groups"
    allowed = _mma_choices(spec) if arch == INTERPRETER else (mma_of(spec, arch),)
    if gemm.mma not in allowed:
        return f"mma={gemm.mma!r} does not serve {spec.recipe} on {arch_name(arch)}; allowed: {', '.join(allowed)}"
    if traits.act_scale_format == "fp32":
        group = promotion_group(spec, is_down=is_down)
        if group % gemm.block_k:
            return f"block_k={gemm.block_k} does not divide {group}, the columns that one promotion sums"
        if gemm.mma == "decoded" and gemm.block_k % traits.weight_group[1]:
            return f"block_k={gemm.block_k} is not a multiple of the weight scale group {traits.weight_group[1]}"
    elif gemm.mma in ("scaled", "widened") and gemm.block_k % (4 * traits.act_group):
        return f"block_k={gemm.block_k} is not a multiple of {4 * traits.act_group}: scales come four to a word"
    elif gemm.mma == "decoded" and gemm.block_k % traits.weight_group[1]:
        return f"block_k={gemm.block_k} is not a multiple of the weight scale group {traits.weight_group[1]}"
    if arch == 100 and gemm.mma == "scaled" and gemm.block_m != 128:
        return f"block_m={gemm.block_m}: block-scaled tcgen05.mma has 128 rows"
    if arch == 90 and gemm.block_m < 64:
        return f"block_m={gemm.block_m}: wgmma has at least 64 rows"
    if arch in SHARED_MEMORY:
        needed = shared_memory_bytes(gemm, spec)
        if needed > SHARED_MEMORY[arch]:
            return f"needs about {needed} bytes of shared memory, {arch_name(arch)} has {SHARED_MEMORY[arch]}"
    return None


_BITS = {"e2m1": 4, "e4m3": 8, "bf16": 16}


def shared_memory_bytes(gemm: GemmConfig, spec: LayerSpec) -> int:
    """A lower bound of the pipeline's shared memory: operand bytes of every stage, scales aside."""
    traits = spec.traits
    weight_bits = max(_BITS[traits.weight], _BITS[spec.shared_weight or traits.weight])
    bits = gemm.block_m * _BITS[traits.act] + gemm.block_n * weight_bits
    return gemm.num_stages * gemm.block_k * bits // 8


def promotion_group(spec: LayerSpec, *, is_down: bool) -> int:
    """Columns whose products are summed before fp32 activation scales promote them; one scale per row: 128."""
    return spec.traits.mid_group if is_down else spec.traits.act_group or 128


def _mma_choices(spec: LayerSpec) -> tuple[str, ...]:
    """What the interpreter can run: on a GPU `mma_of` leaves one."""
    return tuple(dict.fromkeys(mma_of(spec, arch) for arch in (100, 90, 120)))


def mma_of(spec: LayerSpec, arch: int) -> str:
    """How the recipe's numbers meet on `arch`; see `GemmConfig.mma`. The interpreter's default is SM100's."""
    traits = spec.traits
    if traits.weight_scale_format == "fp32":
        return "block"
    if traits.weight_scale_format is None:
        return "bf16"
    if arch == 90 or traits.act_scale_format in ("fp32", None):
        return "decoded"
    mixes_formats = traits.act == "e4m3" and traits.weight == "e2m1"
    return "widened" if arch == 120 and mixes_formats else "scaled"


def arch_name(arch: int) -> str:
    return "the CPU interpreter" if arch == INTERPRETER else f"sm_{arch}"


def choose_config(spec: LayerSpec, arch: int, num_tokens: int) -> LayerConfig:
    """The configuration for `num_tokens` tokens of `spec` on `arch` (90, 100, 120; 0: interpreter).

    The sm_90 tiles are the fastest of those measured on an H200; see `bench/results/`.
    """
    mma = mma_of(spec, arch)
    traits = spec.traits
    few_rows = num_tokens * spec.top_k <= 48 * spec.num_local_experts
    if traits.act_scale_format == "fp32":
        gate_up_k, down_k = (promotion_group(spec, is_down=is_down) for is_down in (False, True))
    elif mma == "decoded":
        gate_up_k = down_k = 128 if few_rows else 64  # beside 256 columns, more of it spills
    elif mma == "bf16":
        gate_up_k = down_k = 64
    else:
        gate_up_k = down_k = 256 if arch == 100 and traits.act == "e2m1" else 128
    if arch == INTERPRETER:
        tile = down = _Tile(32, 128, num_warps=4, num_stages=1)
    elif arch == 100:
        tile = down = _Tile(128 if mma == "scaled" else 64, 128, num_warps=8, num_stages=4)
    elif arch == 120:
        # Widening takes registers that 64 rows do not leave, and so does decoding beside sums to be promoted.
        narrow = mma == "widened" or (mma == "decoded" and traits.act_scale_format == "fp32")
        tile = down = _Tile(32, 128, 4, 2) if narrow else _Tile(64, 128, num_warps=8, num_stages=2)
    elif mma == "block":
        tile = _Tile(64, 128, num_warps=4, num_stages=4)
        down = _Tile(64, 128, num_warps=8, num_stages=5) if few_rows else tile
    elif few_rows or traits.act_scale_format == "fp32":
        tile = down = _Tile(64, 128, num_warps=4, num_stages=3)
    else:
        # 256 columns leave no register for finding plain weights' rows, nor for BF16 operands.
        narrow = mma == "bf16" or spec.recipe.numerics == "trtllm_gen"
        tile = down = _Tile(128, 128 if narrow else 256, num_warps=8, num_stages=4)
    if traits.mid_group == 128:  # a tile of gate and up makes whole scale groups
        tile = replace(tile, block_n=256, num_warps=8, num_stages=min(tile.num_stages, 3 if arch != 120 else 2))
        if mma == "decoded":
            gate_up_k = 64 if traits.act_group else 32  # beside 256 columns, as above; and beside the tokens' scales
    return LayerConfig(tile.gemm(gate_up_k, mma), down.gemm(down_k, mma))


@dataclass(frozen=True)
class _Tile:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def gemm(self, block_k: int, mma: str) -> GemmConfig:
        return GemmConfig(self.block_m, self.block_n, block_k, self.num_warps, self.num_stages, mma)
