"""Both expert GEMMs on SM90 with E4M3 weights, for few tokens per expert: persistent and warp-specialised.

Transposed like `expert_gemm`: weight rows are the MMA's 64-row operand, tokens its N columns. Nothing is decoded: both
operands come from shared memory, the weights as the checkpoint's bytes in `gran8` order. A work item is (tile of one
expert's tokens, 128 weight rows); two warpgroups take 64 rows each, one warp fetches stages of 128 columns.

One MMA chain per activation scale group, promoted as acc += p · (token scale · weight scale): a group is a stage in
GEMM 1 (GROUPS = 1), half of one in GEMM 2 (GROUPS = 2), whose input has scales per 64 columns. Weight scales, one per
128 × 128 block, are read a stage ahead. 128 interleaved rows are 64 gate and 64 up rows of one block each, so that a
GEMM 1 item has two weight scales per stage and makes one scale group of the intermediate; the warpgroups exchange their
maxima for it.

Why it cannot deadlock: as in `expert_gemm`, whose item sequence, stages and exchange these are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.hopper.epilogue import activated_rows, column_amax, store_columns, store_group
from megamoe.kernels.hopper.tma import fetch_box, stage_barriers
from megamoe.kernels.pdl import gdc_launch_dependents, gdc_wait


@gluon.jit
def _fetch_weights(
    w, first, step, it, w_s, full, empty, BYTES: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The weights of a stage, once it is empty. Announces BYTES, its tokens' too."""
    stage = it % STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), (it // STAGES) & 1 ^ 1)
    mbarrier.expect(bar, BYTES)
    fetch_box(w, [first, step * 128], bar, w_s.index(stage))


@gluon.jit
def _fetch(
    x, w, scales, tiles, tile_count, x_s, w_s, scale_s, full, empty,
    BLOCKS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """The producer warp; EARLY as in `expert_gemm`."""
    BYTES: gl.constexpr = 128 * 128 + N * 128 + GROUPS * scale_s.shape[2] * 4
    program = gl.program_id(0)
    items = gl.load(tile_count, cache_modifier=".cg") * BLOCKS
    if EARLY > 0:
        if program < items:
            expert = gl.load(tiles + program // BLOCKS * 4, cache_modifier=".cg")
            first = (expert * BLOCKS + program % BLOCKS) * 128
            for step in range(EARLY):
                _fetch_weights(w, first, step, step, w_s, full, empty, BYTES, STAGES)
        gdc_wait()
        gdc_launch_dependents()
    it = 0
    for item in range(program, items, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        first = (expert * BLOCKS + item % BLOCKS) * 128
        for step in range(STEPS):
            if (EARLY == 0) | (it >= EARLY):
                _fetch_weights(w, first, step, it, w_s, full, empty, BYTES, STAGES)
            stage = it % STAGES
            fetch_box(x, [row0, step * 128], full.index(stage), x_s.index(stage))
            fetch_box(scales, [step * GROUPS, row0], full.index(stage), scale_s.index(stage))
            it += 1


@gluon.jit
def _multiply(
    WG: gl.constexpr, it, x_s, w_s, scale_s, full, empty, first_scale, second_scale,
    STEPS: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """fp32 [64, N]: scaled sums over K. PAIRED: rows 8…15 of each 16 have the second weight scale."""
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    S: gl.constexpr = scale_s.shape[2]
    K: gl.constexpr = 128 // GROUPS
    is_first = gl.arange(0, 64, gl.SliceLayout(1, C)) // 8 % 2 == 0
    acc = gl.zeros([64, N], gl.float32, C)
    zero = gl.zeros([64, N], gl.float32, C)
    next_first = gl.load(first_scale)
    next_second = gl.load(second_scale)
    for step in range(STEPS):
        stage = it % STAGES
        first = next_first
        second = next_second
        ahead = gl.minimum(step + 1, STEPS - 1)
        next_first = gl.load(first_scale + ahead)
        if PAIRED:
            next_second = gl.load(second_scale + ahead)
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        token_scale = scale_s.index(stage).reshape([GROUPS * S])
        for group in gl.static_range(GROUPS):
            p = warpgroup_mma(
                w_s.index(stage).slice(64 * WG, 64).slice(group * K, K, dim=1),
                x_s.index(stage).slice(group * K, K, dim=1).permute((1, 0)),
                zero, use_acc=False, is_async=True,
            )  # fmt: skip
            factor = token_scale.slice(group * S, N).load(gl.SliceLayout(0, C)).expand_dims(0)
            if PAIRED:
                factor = factor * gl.where(is_first, first, second).expand_dims(1)
            else:
                factor = factor * first
            p = warpgroup_mma_wait(0, deps=[p])
            acc += p * factor
        mbarrier.arrive(empty.index(stage), count=1)
        it += 1
    return it, acc


@gluon.jit
def _consume_gate_up(
    WG: gl.constexpr, tiles, tile_count, x_s, w_s, scale_s, full, empty, amax_s, exchanged,
    weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    BLOCKS: gl.constexpr, I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    it = 0
    turn = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        expert = gl.load(tile).to(gl.int64)
        row0 = gl.load(tile + 1)
        rows = gl.load(tile + 2)
        block = item % BLOCKS
        gate_scale = weight_scale + (expert * (2 * I // 128) + block // 2) * STEPS
        it, acc = _multiply(
            WG, it, x_s, w_s, scale_s, full, empty, gate_scale, gate_scale + I // 128 * STEPS, STEPS, STAGES, N, 1, True
        )
        act = activated_rows(acc, row_weight, row0, 0, rows, clamp, alpha, beta, N, ACTIVATION, HAS_CLAMP)
        amax = column_amax(act)
        amax_s.index((turn & 1) * 2 + WG).store(amax)
        mbarrier.arrive(exchanged, count=1)
        mbarrier.wait(exchanged, turn & 1)
        amax = gl.maximum(amax, amax_s.index((turn & 1) * 2 + 1 - WG).load(amax.type.layout))
        store_group(act, amax, out, out_scale, row0, rows, block, capacity, 32 * WG, I, N, WG == 0)
        turn += 1  # noqa: SIM113 (Gluon has no enumerate)


@gluon.jit
def _consume_down(
    WG: gl.constexpr, tiles, tile_count, x_s, w_s, scale_s, full, empty, weight_scale, row_slots, out,
    BLOCKS: gl.constexpr, H: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    gdc_wait()  # the tile list, and `out`, come behind it
    it = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        expert = gl.load(tile).to(gl.int64)
        row0 = gl.load(tile + 1)
        rows = gl.load(tile + 2)
        block = item % BLOCKS
        scale = weight_scale + (expert * BLOCKS + block) * STEPS
        it, acc = _multiply(
            WG, it, x_s, w_s, scale_s, full, empty, scale, scale, STEPS, STAGES, N, 2, False
        )  # fmt: skip
        store_columns(acc, row_slots, out, row0, rows, block * 128 + WG * 64, H, N)


@gluon.jit
def _stage_buffers(x, w, scales, STAGES: gl.constexpr, N: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, N, 128], x.layout)
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], w.layout)
    scale_s = gl.allocate_shared_memory(
        gl.float32, [STAGES, scales.block_shape[0], scales.block_shape[1]], scales.layout
    )
    return x_s, w_s, scale_s


@gluon.jit(do_not_specialize=["capacity"])
def e4m3_few_gate_up_kernel(
    x, w, scales, tiles, tile_count, weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    H: gl.constexpr, I: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 1: `out` E4M3 bytes [capacity, I], `out_scale` fp32 [I/64, capacity], rows in permuted order; `weight_scale`
    fp32 [E, 2I/128, H/128], gate's blocks first."""
    BLOCKS: gl.constexpr = I // 64
    STEPS: gl.constexpr = H // 128
    x_s, w_s, scale_s = _stage_buffers(x, w, scales, STAGES, N)
    amax_s = gl.allocate_shared_memory(gl.float32, [4, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    exchanged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(exchanged, count=2)
    full, empty = stage_barriers(STAGES)
    fence_async_shared()
    gdc_wait()  # the other warps start behind it
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _consume_gate_up,
                (0, tiles, tile_count, x_s, w_s, scale_s, full, empty, amax_s, exchanged,
                 weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, N, ACTIVATION, HAS_CLAMP),
            ),
            (
                _consume_gate_up,
                (1, tiles, tile_count, x_s, w_s, scale_s, full, empty, amax_s, exchanged,
                 weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, N, ACTIVATION, HAS_CLAMP),
            ),
            (
                _fetch,
                (x, w, scales, tiles, tile_count, x_s, w_s, scale_s, full, empty, BLOCKS, STEPS, STAGES, N, 1, 0),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def e4m3_few_down_kernel(
    x, w, scales, tiles, tile_count, weight_scale, row_slots, out,
    H: gl.constexpr, I: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 2: `out` BF16 [slots, H]; the row of slot `row_slots[r]` from permuted row r; `weight_scale` fp32
    [E, H/128, I/128]."""
    BLOCKS: gl.constexpr = H // 128
    STEPS: gl.constexpr = I // 128
    x_s, w_s, scale_s = _stage_buffers(x, w, scales, STAGES, N)
    full, empty = stage_barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume_down,
                (0, tiles, tile_count, x_s, w_s, scale_s, full, empty, weight_scale, row_slots, out,
                 BLOCKS, H, STEPS, STAGES, N),
            ),
            (
                _consume_down,
                (1, tiles, tile_count, x_s, w_s, scale_s, full, empty, weight_scale, row_slots, out,
                 BLOCKS, H, STEPS, STAGES, N),
            ),
            (
                _fetch,
                (x, w, scales, tiles, tile_count, x_s, w_s, scale_s, full, empty,
                 BLOCKS, STEPS, STAGES, N, 2, min(STAGES, STEPS)),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
