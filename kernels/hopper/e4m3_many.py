"""Both expert GEMMs on SM90 with E4M3 weights, for many tokens per expert: persistent and warp-specialised.

Not transposed: tokens are the MMA's 64 rows, weight rows its 128 columns, and both operands come from shared memory.
Then a thread has two token scales and the weights' scales are scalars, so that a promotion is one fused multiply-add
per sum; transposed it takes a product more. A work item is (tile of up to 128 tokens of one expert, 256 weight rows).
Two warpgroups take 64 tokens each and both halves of the weight rows, one after the other: the sums of both and the
product of one fit into registers, and one warpgroup promotes while the other multiplies. In a tile of up to 64 tokens
both take the same tokens and a half each.

One warp fetches stages of as many columns as an activation scale covers: 128 in GEMM 1, 64 in GEMM 2. A half of a GEMM
1 item, 128 interleaved gate/up rows, is one scale group of the intermediate, whose 64 columns lie in the four threads
of a quad: the warpgroups have nothing to exchange. Weight scales, one per 128 × 128 block, are read a turn ahead.

Why it cannot deadlock: producer and consumers walk the same items and stages; the producer waits only for a stage that
consumers free in the same order, a consumer only for a stage that the producer fills before any later one, and the
warpgroups never wait for each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.hopper.epilogue import activated_columns, store_group_rows, store_token_rows
from megamoe.kernels.hopper.tma import fetch_box, stage_barriers
from megamoe.kernels.pdl import gdc_launch_dependents, gdc_wait

_C = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))


@gluon.jit
def _fetch_weights(
    w, first, step, rows, it, w_s, full, empty, STAGES: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    """The weights of a stage, once it is empty. Announces its tokens' bytes too."""
    BYTES: gl.constexpr = (256 + 64) * K + 128 * 4
    stage = it % STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), (it // STAGES) & 1 ^ 1)
    mbarrier.expect(bar, BYTES + 64 * K, pred=rows > 64)
    mbarrier.expect(bar, BYTES, pred=rows <= 64)
    fetch_box(w, [first, step * K], bar, w_s.index(stage * 2))
    fetch_box(w, [first + 128, step * K], bar, w_s.index(stage * 2 + 1))


@gluon.jit
def _fetch(
    x, w, scales, tiles, tile_count, x_s, w_s, scale_s, full, empty,
    BLOCKS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, K: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The producer warp; EARLY as in `expert_gemm`."""
    program = gl.program_id(0)
    items = gl.load(tile_count, cache_modifier=".cg") * BLOCKS
    if EARLY > 0:
        if program < items:
            tile = tiles + program // BLOCKS * 4
            expert = gl.load(tile, cache_modifier=".cg")
            rows = gl.load(tile + 2, cache_modifier=".cg")
            first = (expert * BLOCKS + program % BLOCKS) * 256
            for step in range(EARLY):
                _fetch_weights(w, first, step, rows, step, w_s, full, empty, STAGES, K)
        gdc_wait()
        gdc_launch_dependents()
    it = 0
    for item in range(program, items, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        rows = gl.load(tile + 2)
        first = (expert * BLOCKS + item % BLOCKS) * 256
        for step in range(STEPS):
            if (EARLY == 0) | (it >= EARLY):
                _fetch_weights(w, first, step, rows, it, w_s, full, empty, STAGES, K)
            stage = it % STAGES
            bar = full.index(stage)
            fetch_box(x, [row0, step * K], bar, x_s.index(stage * 2))
            fetch_box(x, [row0 + 64, step * K], bar, x_s.index(stage * 2 + 1), pred=rows > 64)
            fetch_box(scales, [step, row0], bar, scale_s.index(stage))
            it += 1


@gluon.jit
def _promoted(acc, p, token_scale, first, second, PAIRED: gl.constexpr):
    """acc + p · (token scale · weight scale) [64, 128]; PAIRED: columns 8…15 of each 16 have the second one."""
    if PAIRED:
        is_first = gl.arange(0, 128, gl.SliceLayout(0, _C)) // 8 % 2 == 0
        one = (token_scale * first).expand_dims(1)
        other = (token_scale * second).expand_dims(1)
        return acc + p * gl.where(is_first.expand_dims(0), one, other)
    else:
        return acc + p * (token_scale * first).expand_dims(1)


@gluon.jit
def _multiply(
    TOKENS: gl.constexpr, HALF: gl.constexpr, HALVES: gl.constexpr,
    it, x_s, w_s, scale_s, full, empty, scale_a, scale_b,
    STEPS: gl.constexpr, STAGES: gl.constexpr, PER_BLOCK: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """fp32 [64, 128], twice: scaled sums of 64 tokens (the TOKENS-th) × HALVES halves of the weight rows from HALF on.

    PAIRED: halves have the weight scales a (gate) and b (up). Otherwise a is the first result's, b the second's; a
    scale serves PER_BLOCK steps.

    One product per turn of the loop: those of an unrolled body get registers of their own, and spill.
    """
    acc0 = gl.zeros([64, 128], gl.float32, _C)
    acc1 = gl.zeros([64, 128], gl.float32, _C)
    zero = gl.zeros([64, 128], gl.float32, _C)
    next_a = gl.load(scale_a)
    next_b = gl.load(scale_b)
    for turn in range(STEPS * HALVES):
        half = turn % HALVES
        stage = it % STAGES
        a = next_a
        b = next_b
        ahead = gl.minimum((turn + 1) // HALVES, STEPS - 1) // PER_BLOCK
        next_a = gl.load(scale_a + ahead)
        next_b = gl.load(scale_b + ahead)
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        p = warpgroup_mma(
            x_s.index(stage * 2 + TOKENS), w_s.index(stage * 2 + HALF + half).permute((1, 0)), zero,
            use_acc=False, is_async=True,
        )  # fmt: skip
        token_scale = scale_s.index(stage).reshape([128]).slice(TOKENS * 64, 64).load(gl.SliceLayout(1, _C))
        p = warpgroup_mma_wait(0, deps=[p])
        if half == 0:
            acc0 = _promoted(acc0, p, token_scale, a, b, PAIRED)
        else:
            acc1 = _promoted(acc1, p, token_scale, a if PAIRED else b, b, PAIRED)
        if half == HALVES - 1:
            mbarrier.arrive(empty.index(stage), count=1)
            it += 1
    return it, acc0, acc1


@gluon.jit
def _store_intermediate(
    acc, row_weight, out, out_scale, row0, rows, group, capacity, clamp, alpha, beta,
    I: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    """A scale group of the intermediate from a half of gate/up rows."""
    act = activated_columns(acc, row_weight, row0, rows, clamp, alpha, beta, ACTIVATION, HAS_CLAMP)
    store_group_rows(act, out, out_scale, row0, rows, group, capacity, I)


@gluon.jit
def _consume_gate_up(
    WG: gl.constexpr, tiles, tile_count, x_s, w_s, scale_s, full, empty,
    weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    BLOCKS: gl.constexpr, I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    it = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        expert = gl.load(tile).to(gl.int64)
        row0 = gl.load(tile + 1)
        rows = gl.load(tile + 2)
        block = item % BLOCKS
        gate_scale = weight_scale + (expert * (2 * BLOCKS) + block) * STEPS
        up_scale = gate_scale + BLOCKS * STEPS
        if rows > 64:
            it, acc0, acc1 = _multiply(
                WG, 0, 2, it, x_s, w_s, scale_s, full, empty, gate_scale, up_scale, STEPS, STAGES, 1, True
            )  # fmt: skip
            _store_intermediate(
                acc0, row_weight, out, out_scale, row0 + WG * 64, rows - WG * 64, block * 2,
                capacity, clamp, alpha, beta, I, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
            _store_intermediate(
                acc1, row_weight, out, out_scale, row0 + WG * 64, rows - WG * 64, block * 2 + 1,
                capacity, clamp, alpha, beta, I, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        else:
            it, acc0, _ = _multiply(
                0, WG, 1, it, x_s, w_s, scale_s, full, empty, gate_scale, up_scale, STEPS, STAGES, 1, True
            )  # fmt: skip
            _store_intermediate(
                acc0, row_weight, out, out_scale, row0, rows, block * 2 + WG,
                capacity, clamp, alpha, beta, I, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip


@gluon.jit
def _consume_down(
    WG: gl.constexpr, tiles, tile_count, x_s, w_s, scale_s, full, empty, weight_scale, row_slots, out,
    BLOCKS: gl.constexpr, H: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
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
        if rows > 64:
            it, acc0, acc1 = _multiply(
                WG, 0, 2, it, x_s, w_s, scale_s, full, empty, scale, scale + STEPS // 2, STEPS, STAGES, 2, False
            )  # fmt: skip
            store_token_rows(acc0, row_slots, out, row0 + WG * 64, rows - WG * 64, block * 256, H)
            store_token_rows(acc1, row_slots, out, row0 + WG * 64, rows - WG * 64, block * 256 + 128, H)
        else:
            own = scale + WG * (STEPS // 2)
            it, acc0, _ = _multiply(
                0, WG, 1, it, x_s, w_s, scale_s, full, empty, own, own, STEPS, STAGES, 2, False
            )  # fmt: skip
            store_token_rows(acc0, row_slots, out, row0, rows, block * 256 + WG * 128, H)


@gluon.jit
def _stage_buffers(x, w, scales, STAGES: gl.constexpr, K: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 64, K], x.layout)
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 128, K], w.layout)
    scale_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], scales.layout)
    return x_s, w_s, scale_s


@gluon.jit(do_not_specialize=["capacity"])
def e4m3_many_gate_up_kernel(
    x, w, scales, tiles, tile_count, weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    H: gl.constexpr, I: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 1: `out` E4M3 bytes [capacity, I], `out_scale` fp32 [I/64, capacity], rows in permuted order; `weight_scale`
    fp32 [E, 2I/128, H/128], gate's blocks first."""
    BLOCKS: gl.constexpr = I // 128
    K: gl.constexpr = 128
    STEPS: gl.constexpr = H // K
    x_s, w_s, scale_s = _stage_buffers(x, w, scales, STAGES, K)
    full, empty = stage_barriers(STAGES)
    fence_async_shared()
    gdc_wait()  # the other warps start behind it
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _consume_gate_up,
                (0, tiles, tile_count, x_s, w_s, scale_s, full, empty,
                 weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, ACTIVATION, HAS_CLAMP),
            ),
            (
                _consume_gate_up,
                (1, tiles, tile_count, x_s, w_s, scale_s, full, empty,
                 weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, ACTIVATION, HAS_CLAMP),
            ),
            (
                _fetch,
                (x, w, scales, tiles, tile_count, x_s, w_s, scale_s, full, empty, BLOCKS, STEPS, STAGES, K, 0),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def e4m3_many_down_kernel(
    x, w, scales, tiles, tile_count, weight_scale, row_slots, out,
    H: gl.constexpr, I: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 2: `out` BF16 [slots, H]; the row of slot `row_slots[r]` from permuted row r; `weight_scale` fp32
    [E, H/128, I/128]."""
    BLOCKS: gl.constexpr = H // 256
    K: gl.constexpr = 64
    STEPS: gl.constexpr = I // K
    RING: gl.constexpr = STAGES * 2
    x_s, w_s, scale_s = _stage_buffers(x, w, scales, RING, K)
    full, empty = stage_barriers(RING)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume_down,
                (0, tiles, tile_count, x_s, w_s, scale_s, full, empty, weight_scale, row_slots, out,
                 BLOCKS, H, STEPS, RING),
            ),
            (
                _consume_down,
                (1, tiles, tile_count, x_s, w_s, scale_s, full, empty, weight_scale, row_slots, out,
                 BLOCKS, H, STEPS, RING),
            ),
            (
                _fetch,
                (x, w, scales, tiles, tile_count, x_s, w_s, scale_s, full, empty,
                 BLOCKS, STEPS, RING, K, min(RING, STEPS)),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
