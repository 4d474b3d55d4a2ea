"""Both expert GEMMs on SM90 with E4M3 weights, for many tokens per expert: persistent and warp-specialised.

Not transposed: tokens are the MMA's 64 rows, weight rows its columns, and both operands come from shared memory. Then a
thread has two token scales and the weights' scales are scalars, so that a promotion is one fused multiply-add per sum;
transposed it takes a product more. A work item is (tile of up to 256 tokens of one expert, 128 weight rows): most
experts are one tile, so that their weights are fetched once.

A tile is one to four chunks of 64 tokens; those beyond its live rows are neither fetched nor multiplied. Two warpgroups
have equal work: of two or four chunks, warpgroup w takes w and w + 2, one after the other, so that the sums of both and
the product of one fit into registers; of one or three they share the last, a half of the weight rows each. One
promotes while the other multiplies.

One warp fetches stages of as many columns as an activation scale covers: 128 in GEMM 1, 64 in GEMM 2. The weight rows
of a GEMM 1 item, 64 gate and 64 up rows interleaved, are one scale group of the intermediate, whose 64 columns lie in
the four threads of a quad; of a chunk that they share the warpgroups exchange the tokens' maxima. Weight scales, one
per 128 × 128 block, are read a turn ahead.

Why it cannot deadlock: producer and consumers walk the same items and stages; the producer waits only for a stage that
consumers free in the same order, a consumer only for a stage that the producer fills before any later one. A warpgroup
waits for the other's maxima when it has freed all stages of the item, so that the other gets there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.hopper.epilogue import (
    activated_columns,
    row_amax,
    store_64_columns,
    store_group_rows,
    store_token_rows,
)
from megamoe.kernels.hopper.tma import fetch_box, stage_barriers

_WHOLE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))


@gluon.jit
def _fetch_weights(
    w, first, step, rows, it, w_s, full, empty, STAGES: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    """The weights of a stage, once it is empty. Announces its tokens' bytes and their scales' too."""
    WEIGHTS: gl.constexpr = 128 * K
    CHUNK: gl.constexpr = 64 * K + 64 * 4
    stage = it % STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), (it // STAGES) & 1 ^ 1)
    mbarrier.expect(bar, WEIGHTS + CHUNK, pred=rows <= 64)
    mbarrier.expect(bar, WEIGHTS + 2 * CHUNK, pred=(rows > 64) & (rows <= 128))
    mbarrier.expect(bar, WEIGHTS + 3 * CHUNK, pred=(rows > 128) & (rows <= 192))
    mbarrier.expect(bar, WEIGHTS + 4 * CHUNK, pred=rows > 192)
    fetch_box(w, [first, step * K], bar, w_s.index(stage))


@gluon.jit
def _fetch(
    x, w, scales, tiles, tile_count, x_s, w_s, scale_s, full, empty,
    BLOCKS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    it = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        rows = gl.load(tile + 2)
        first = (expert * BLOCKS + item % BLOCKS) * 128
        for step in range(STEPS):
            _fetch_weights(w, first, step, rows, it, w_s, full, empty, STAGES, K)
            stage = it % STAGES
            bar = full.index(stage)
            for chunk in gl.static_range(4):
                live = (chunk == 0) | (rows > chunk * 64)
                fetch_box(x, [row0 + chunk * 64, step * K], bar, x_s.index(stage * 4 + chunk), pred=live)
                fetch_box(scales, [step, row0 + chunk * 64], bar, scale_s.index(stage * 4 + chunk), pred=live)
            it += 1


@gluon.jit
def _promoted(acc, p, token_scale, first, second, PAIRED: gl.constexpr):
    """acc + p · (token scale · weight scale) [64, N]; PAIRED: columns 8…15 of each 16 have the second one.

    Fused by name: two branches that multiply by the same share the product, and each has an addition left.
    """
    if PAIRED:
        is_first = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout)) // 8 % 2 == 0
        one = (token_scale * first).expand_dims(1)
        other = (token_scale * second).expand_dims(1)
        return gl.fma(p, gl.where(is_first.expand_dims(0), one, other), acc)
    else:
        return gl.fma(p, (token_scale * first).expand_dims(1), acc)


@gluon.jit
def _token_scale(scale_s, place, LAYOUT: gl.constexpr):
    """Scales of a chunk's 64 tokens."""
    return scale_s.index(place).reshape([64]).load(gl.SliceLayout(1, LAYOUT))


@gluon.jit
def _multiply_whole(
    WG: gl.constexpr, CHUNKS: gl.constexpr, it, x_s, w_s, scale_s, full, empty, scale_a, scale_b,
    STEPS: gl.constexpr, STAGES: gl.constexpr, PER_BLOCK: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """fp32 [64, 128], twice: scaled sums of chunks WG and, of four, WG + 2.

    Weight scales: a; PAIRED: a (gate) and b (up). One serves PER_BLOCK steps.

    One product per turn of the loop: those of an unrolled body get registers of their own, and spill.
    """
    HALVES: gl.constexpr = CHUNKS // 2
    acc0 = gl.zeros([64, 128], gl.float32, _WHOLE)
    acc1 = gl.zeros([64, 128], gl.float32, _WHOLE)
    zero = gl.zeros([64, 128], gl.float32, _WHOLE)
    next_a = gl.load(scale_a)
    next_b = gl.load(scale_b)
    for turn in range(STEPS * HALVES):
        half = turn % HALVES
        stage = it % STAGES
        place = stage * 4 + WG + half * 2
        a = next_a
        b = next_b
        ahead = gl.minimum((turn + 1) // HALVES, STEPS - 1) // PER_BLOCK
        next_a = gl.load(scale_a + ahead)
        if PAIRED:
            next_b = gl.load(scale_b + ahead)
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        p = warpgroup_mma(x_s.index(place), w_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        token_scale = _token_scale(scale_s, place, _WHOLE)
        p = warpgroup_mma_wait(0, deps=[p])
        if half == 0:
            acc0 = _promoted(acc0, p, token_scale, a, b, PAIRED)
        else:
            acc1 = _promoted(acc1, p, token_scale, a, b, PAIRED)
        if half == HALVES - 1:
            mbarrier.arrive(empty.index(stage), count=1)
            it += 1
    return it, acc0, acc1


@gluon.jit
def _multiply_shared(
    WG: gl.constexpr, CHUNKS: gl.constexpr, it, x_s, w_s, scale_s, full, empty, scale_a, scale_b,
    STEPS: gl.constexpr, STAGES: gl.constexpr, PER_BLOCK: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """fp32 [64, 128] and [64, 64]: scaled sums of chunk WG of three, and of the last of one or three with the WG-th
    half of the weight rows. Scales as in `_multiply_whole`."""
    whole = gl.zeros([64, 128], gl.float32, _WHOLE)
    shared = gl.zeros([64, 64], gl.float32, _HALF)
    no_whole = gl.zeros([64, 128], gl.float32, _WHOLE)
    no_half = gl.zeros([64, 64], gl.float32, _HALF)
    next_a = gl.load(scale_a)
    next_b = gl.load(scale_b)
    for step in range(STEPS):
        stage = it % STAGES
        a = next_a
        b = next_b
        ahead = gl.minimum(step + 1, STEPS - 1) // PER_BLOCK
        next_a = gl.load(scale_a + ahead)
        if PAIRED:
            next_b = gl.load(scale_b + ahead)
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        last = stage * 4 + CHUNKS - 1
        q = warpgroup_mma(
            x_s.index(last), w_s.index(stage).slice(WG * 64, 64).permute((1, 0)), no_half,
            use_acc=False, is_async=True,
        )  # fmt: skip
        q_scale = _token_scale(scale_s, last, _HALF)
        if CHUNKS == 3:
            p = warpgroup_mma(
                x_s.index(stage * 4 + WG), w_s.index(stage).permute((1, 0)), no_whole, use_acc=False, is_async=True
            )
            p_scale = _token_scale(scale_s, stage * 4 + WG, _WHOLE)
            q, p = warpgroup_mma_wait(0, deps=[q, p])
            whole = _promoted(whole, p, p_scale, a, b, PAIRED)
        else:
            q = warpgroup_mma_wait(0, deps=[q])
        shared = _promoted(shared, q, q_scale, a, b, PAIRED)
        mbarrier.arrive(empty.index(stage), count=1)
        it += 1
    return it, whole, shared


@gluon.jit
def _store_whole(
    acc, row_weight, out, out_scale, row0, rows, block, capacity, clamp, alpha, beta,
    I: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    """A scale group of a chunk's intermediate from all its gate/up rows."""
    act = activated_columns(acc, row_weight, row0, rows, clamp, alpha, beta, ACTIVATION, HAS_CLAMP)
    store_group_rows(act, row_amax(act), out, out_scale, row0, rows, block, capacity, 0, I, True)


@gluon.jit
def _gate_up_whole(
    WG: gl.constexpr, CHUNKS: gl.constexpr, it, row0, rows, block, x_s, w_s, scale_s, full, empty, gate_scale, up_scale,
    row_weight, out, out_scale, capacity, clamp, alpha, beta,
    I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    """A GEMM 1 item of two or four chunks."""
    it, acc0, acc1 = _multiply_whole(
        WG, CHUNKS, it, x_s, w_s, scale_s, full, empty, gate_scale, up_scale, STEPS, STAGES, 1, True
    )
    row0 += WG * 64
    rows -= WG * 64
    _store_whole(
        acc0, row_weight, out, out_scale, row0, rows, block, capacity, clamp, alpha, beta, I, ACTIVATION, HAS_CLAMP
    )
    if CHUNKS == 4:
        _store_whole(
            acc1, row_weight, out, out_scale, row0 + 128, rows - 128, block, capacity, clamp, alpha, beta,
            I, ACTIVATION, HAS_CLAMP,
        )  # fmt: skip
    return it


@gluon.jit
def _gate_up_shared(
    WG: gl.constexpr, CHUNKS: gl.constexpr, it, turn, row0, rows, block,
    x_s, w_s, scale_s, full, empty, amax_s, exchanged, gate_scale, up_scale,
    row_weight, out, out_scale, capacity, clamp, alpha, beta,
    I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    """A GEMM 1 item of one or three chunks; `turn` counts them. While the other warpgroup gets to its maxima there is a
    whole chunk to store."""
    it, whole, shared = _multiply_shared(
        WG, CHUNKS, it, x_s, w_s, scale_s, full, empty, gate_scale, up_scale, STEPS, STAGES, 1, True
    )
    LAST: gl.constexpr = (CHUNKS - 1) * 64
    act = activated_columns(
        shared, row_weight, row0 + LAST, rows - LAST, clamp, alpha, beta, ACTIVATION, HAS_CLAMP
    )  # fmt: skip
    amax = row_amax(act)
    amax_s.index((turn & 1) * 2 + WG).store(amax)
    mbarrier.arrive(exchanged, count=1)
    if CHUNKS == 3:
        _store_whole(
            whole, row_weight, out, out_scale, row0 + WG * 64, rows - WG * 64, block, capacity, clamp, alpha, beta,
            I, ACTIVATION, HAS_CLAMP,
        )  # fmt: skip
    mbarrier.wait(exchanged, turn & 1)
    amax = gl.maximum(amax, amax_s.index((turn & 1) * 2 + 1 - WG).load(amax.type.layout))
    store_group_rows(act, amax, out, out_scale, row0 + LAST, rows - LAST, block, capacity, WG * 32, I, WG == 0)
    return it


@gluon.jit
def _consume_gate_up(
    WG: gl.constexpr, tiles, tile_count, x_s, w_s, scale_s, full, empty, amax_s, exchanged,
    weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    BLOCKS: gl.constexpr, I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
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
        gate_scale = weight_scale + (expert * BLOCKS + block // 2) * STEPS
        up_scale = gate_scale + BLOCKS // 2 * STEPS
        if rows > 192:
            it = _gate_up_whole(
                WG, 4, it, row0, rows, block, x_s, w_s, scale_s, full, empty, gate_scale, up_scale,
                row_weight, out, out_scale, capacity, clamp, alpha, beta, I, STEPS, STAGES, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        elif rows > 128:
            it = _gate_up_shared(
                WG, 3, it, turn, row0, rows, block,
                x_s, w_s, scale_s, full, empty, amax_s, exchanged, gate_scale, up_scale,
                row_weight, out, out_scale, capacity, clamp, alpha, beta, I, STEPS, STAGES, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
            turn += 1
        elif rows > 64:
            it = _gate_up_whole(
                WG, 2, it, row0, rows, block, x_s, w_s, scale_s, full, empty, gate_scale, up_scale,
                row_weight, out, out_scale, capacity, clamp, alpha, beta, I, STEPS, STAGES, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        else:
            it = _gate_up_shared(
                WG, 1, it, turn, row0, rows, block,
                x_s, w_s, scale_s, full, empty, amax_s, exchanged, gate_scale, up_scale,
                row_weight, out, out_scale, capacity, clamp, alpha, beta, I, STEPS, STAGES, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
            turn += 1


@gluon.jit
def _down_whole(
    WG: gl.constexpr, CHUNKS: gl.constexpr, it, row0, rows, block, x_s, w_s, scale_s, full, empty, scale,
    row_slots, out, H: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A GEMM 2 item of two or four chunks."""
    it, acc0, acc1 = _multiply_whole(
        WG, CHUNKS, it, x_s, w_s, scale_s, full, empty, scale, scale, STEPS, STAGES, 2, False
    )
    store_token_rows(acc0, row_slots, out, row0 + WG * 64, rows - WG * 64, block * 128, H)
    if CHUNKS == 4:
        store_token_rows(acc1, row_slots, out, row0 + WG * 64 + 128, rows - WG * 64 - 128, block * 128, H)
    return it


@gluon.jit
def _down_shared(
    WG: gl.constexpr, CHUNKS: gl.constexpr, it, row0, rows, block, x_s, w_s, scale_s, full, empty, scale,
    row_slots, out, H: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A GEMM 2 item of one or three chunks."""
    it, whole, shared = _multiply_shared(
        WG, CHUNKS, it, x_s, w_s, scale_s, full, empty, scale, scale, STEPS, STAGES, 2, False
    )
    LAST: gl.constexpr = (CHUNKS - 1) * 64
    if CHUNKS == 3:
        store_token_rows(whole, row_slots, out, row0 + WG * 64, rows - WG * 64, block * 128, H)
    store_64_columns(
        shared.to(gl.bfloat16), row_slots, out, row0 + LAST, rows - LAST, block * 128 + WG * 64, H
    )  # fmt: skip
    return it


@gluon.jit
def _consume_down(
    WG: gl.constexpr, tiles, tile_count, x_s, w_s, scale_s, full, empty, weight_scale, row_slots, out,
    BLOCKS: gl.constexpr, H: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    it = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        expert = gl.load(tile).to(gl.int64)
        row0 = gl.load(tile + 1)
        rows = gl.load(tile + 2)
        block = item % BLOCKS
        scale = weight_scale + (expert * BLOCKS + block) * (STEPS // 2)
        if rows > 192:
            it = _down_whole(
                WG, 4, it, row0, rows, block, x_s, w_s, scale_s, full, empty, scale, row_slots, out, H, STEPS, STAGES
            )
        elif rows > 128:
            it = _down_shared(
                WG, 3, it, row0, rows, block, x_s, w_s, scale_s, full, empty, scale, row_slots, out, H, STEPS, STAGES
            )
        elif rows > 64:
            it = _down_whole(
                WG, 2, it, row0, rows, block, x_s, w_s, scale_s, full, empty, scale, row_slots, out, H, STEPS, STAGES
            )
        else:
            it = _down_shared(
                WG, 1, it, row0, rows, block, x_s, w_s, scale_s, full, empty, scale, row_slots, out, H, STEPS, STAGES
            )


@gluon.jit
def _stage_buffers(x, w, scales, STAGES: gl.constexpr, K: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 4, 64, K], x.layout)
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, K], w.layout)
    scale_s = gl.allocate_shared_memory(gl.float32, [STAGES * 4, 1, 64], scales.layout)
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
    BLOCKS: gl.constexpr = I // 64
    K: gl.constexpr = 128
    STEPS: gl.constexpr = H // K
    x_s, w_s, scale_s = _stage_buffers(x, w, scales, STAGES, K)
    amax_s = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    exchanged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(exchanged, count=2)
    full, empty = stage_barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume_gate_up,
                (0, tiles, tile_count, x_s, w_s, scale_s, full, empty, amax_s, exchanged,
                 weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, ACTIVATION, HAS_CLAMP),
            ),
            (
                _consume_gate_up,
                (1, tiles, tile_count, x_s, w_s, scale_s, full, empty, amax_s, exchanged,
                 weight_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, ACTIVATION, HAS_CLAMP),
            ),
            (
                _fetch,
                (x, w, scales, tiles, tile_count, x_s, w_s, scale_s, full, empty, BLOCKS, STEPS, STAGES, K),
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
    BLOCKS: gl.constexpr = H // 128
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
                 BLOCKS, STEPS, RING, K),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
