"""Both expert GEMMs on SM90 with MXFP4 weights, for many tokens per expert: persistent and warp-specialised.

As `expert_gemm`: transposed, weight rows decoded in registers as the MMA's 64-row operand, tokens its columns. What
differs is the work item: 256 weight rows at once instead of 128 after 128, for a tile of up to 128 tokens. The tokens
are most of what a wide tile fetches, from L2, which is what bounds it: meeting twice the rows, they are fetched half as
often, and a third of all bytes goes. GEMM 1 has both halves of a scale group of the intermediate at the same time, so
that nothing waits in shared memory.

Each of the two warpgroups has 64 of the first 128 rows and 64 of the second: four sums of 64 × 64. A stage of 256
columns is four operands (two K blocks × two row blocks), two products each. Products are promoted to fp32 with the
tokens' scales per 128 columns, two of them in flight: as one is promoted, its successor is issued. PER_TOKEN
activations have one scale, applied at the end, and no promotion.

Why it cannot deadlock: as `expert_gemm`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.hopper.decode import decode, decode_block, load_spans
from megamoe.kernels.hopper.epilogue import activated, column_amax, store_quantized, store_rows
from megamoe.kernels.hopper.tma import fetch_box, stage_barriers

N = gl.constexpr(64)  # tokens of a chunk; a tile is one or two
_C = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
_A = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), 4))


@gluon.jit
def _fetch(
    x, codes, spans, scales, tiles, tile_count, code_s, span_s, x_s, scale_s, full, empty,
    BLOCKS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, PER_TOKEN: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    BYTES: gl.constexpr = 2 * (16384 + 512) + N * 256 + (0 if PER_TOKEN else 2 * 128 * 4)
    it = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        rows = gl.load(tile + 2)
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        first = (expert * BLOCKS + item % BLOCKS) * (2 * STEPS)
        for step in range(STEPS):
            stage = it % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (it // STAGES) & 1 ^ 1)
            mbarrier.expect(bar, BYTES + N * 256, pred=rows > N)
            mbarrier.expect(bar, BYTES, pred=rows <= N)
            for sub in gl.static_range(2):
                at = first + sub * STEPS + step
                fetch_box(codes, [at * 128, 0], bar, code_s.index(stage * 4 + sub * 2))
                fetch_box(codes, [at * 128 + 64, 0], bar, code_s.index(stage * 4 + sub * 2 + 1))
                fetch_box(spans, [at * 16, 0], bar, span_s.index(stage * 2 + sub))
            for half in gl.static_range(2):
                column = step * 256 + half * 128
                fetch_box(x, [row0, column], bar, x_s.index(stage * 4 + half * 2))
                fetch_box(x, [row0 + N, column], bar, x_s.index(stage * 4 + half * 2 + 1), pred=rows > N)
                if not PER_TOKEN:
                    fetch_box(scales, [step * 2 + half, row0], bar, scale_s.index(stage * 2 + half))
            it += 1


@gluon.jit
def _operand(WG: gl.constexpr, code_s, stage, distances, HALF: gl.constexpr, SUB: gl.constexpr):
    return decode(code_s.index(stage * 4 + SUB * 2 + HALF).slice(32 * WG, 32), distances, HALF == 1, _A)


@gluon.jit
def _multiply_per_token(
    WG: gl.constexpr, it, code_s, span_s, x_s, full, empty,
    STEPS: gl.constexpr, STAGES: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """Sums over the whole of K in the tensor cores' accumulators. TWO: both chunks of tokens."""
    acc00 = gl.zeros([64, N], gl.float32, _C)
    acc01 = gl.zeros([64, N], gl.float32, _C)
    acc10 = gl.zeros([64, N], gl.float32, _C)
    acc11 = gl.zeros([64, N], gl.float32, _C)
    for _ in range(STEPS):
        stage = it % STAGES
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        near = load_spans(span_s.index(stage * 2).slice(8 * WG, 8))
        far = load_spans(span_s.index(stage * 2 + 1).slice(8 * WG, 8))
        for half in gl.static_range(2):
            x0 = x_s.index(stage * 4 + half * 2).permute((1, 0))
            x1 = x_s.index(stage * 4 + half * 2 + 1).permute((1, 0))
            a = _operand(WG, code_s, stage, near, half, 0)
            acc00 = warpgroup_mma(a, x0, acc00, is_async=True)
            if TWO:
                acc01 = warpgroup_mma(a, x1, acc01, is_async=True)
            b = _operand(WG, code_s, stage, far, half, 1)
            acc10 = warpgroup_mma(b, x0, acc10, is_async=True)
            if TWO:
                acc11 = warpgroup_mma(b, x1, acc11, is_async=True)
        if TWO:
            acc00, acc01, acc10, acc11 = warpgroup_mma_wait(0, deps=[acc00, acc01, acc10, acc11])
        else:
            acc00, acc10 = warpgroup_mma_wait(0, deps=[acc00, acc10])
        mbarrier.arrive(empty.index(stage), count=1)
        it += 1
    return it, acc00, acc01, acc10, acc11


@gluon.jit
def _multiply_per_block(
    WG: gl.constexpr, it, code_s, span_s, x_s, scale_s, full, empty,
    STEPS: gl.constexpr, STAGES: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """One MMA chain per 128 columns, promoted with the tokens' scales.

    A turn is one operand: a K block (turn // 2) of a row block (turn % 2). Its products are promoted in the next turn,
    behind the decoding of that one's operand, and a stage is free once its last products are. One turn per iteration:
    the products of an unrolled body would get registers of their own, and spill. Loops of one turn or none choose the
    sum: of a branch, Triton 3.9 makes selections between both sums, which spill too.
    """
    acc00 = gl.zeros([64, N], gl.float32, _C)
    acc01 = gl.zeros([64, N], gl.float32, _C)
    acc10 = gl.zeros([64, N], gl.float32, _C)
    acc11 = gl.zeros([64, N], gl.float32, _C)
    zero = gl.zeros([64, N], gl.float32, _C)
    stage = it % STAGES
    mbarrier.wait(full.index(stage), (it // STAGES) & 1)
    a = _operand(WG, code_s, stage, load_spans(span_s.index(stage * 2).slice(8 * WG, 8)), 0, 0)
    p = warpgroup_mma(a, x_s.index(stage * 4).permute((1, 0)), zero, use_acc=False, is_async=True)
    q = p
    if TWO:
        q = warpgroup_mma(a, x_s.index(stage * 4 + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    for turn in range(1, STEPS * 4):
        before = (it + (turn - 1) // 4) % STAGES
        scale = scale_s.index(before * 2 + (turn - 1) // 2 % 2).reshape([128])
        first = turn % 2  # whether the products in flight are the first row block's
        step = it + turn // 4
        stage = step % STAGES
        half = turn // 2 % 2
        sub = turn % 2
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        distances = load_spans(span_s.index(stage * 2 + sub).slice(8 * WG, 8)) >> (half * 4) & 0xF
        a = decode_block(code_s.index(stage * 4 + sub * 2 + half).slice(32 * WG, 32), distances, _A)
        p = warpgroup_mma_wait(1 if TWO else 0, deps=[p])
        s = scale.slice(0, N).load(gl.SliceLayout(0, _C)).expand_dims(0)
        for _ in range(first):
            acc00 += p * s
        for _ in range(1 - first):
            acc10 += p * s
        p = warpgroup_mma(a, x_s.index(stage * 4 + half * 2).permute((1, 0)), zero, use_acc=False, is_async=True)
        if TWO:
            q = warpgroup_mma_wait(1, deps=[q])
            s = scale.slice(N, N).load(gl.SliceLayout(0, _C)).expand_dims(0)
            for _ in range(first):
                acc01 += q * s
            for _ in range(1 - first):
                acc11 += q * s
            q = warpgroup_mma(
                a, x_s.index(stage * 4 + half * 2 + 1).permute((1, 0)), zero, use_acc=False, is_async=True
            )
        if turn % 4 == 0:
            mbarrier.arrive(empty.index(before), count=1)
    it += STEPS
    stage = (it - 1) % STAGES
    scale = scale_s.index(stage * 2 + 1).reshape([128])
    p = warpgroup_mma_wait(1 if TWO else 0, deps=[p])
    acc10 += p * scale.slice(0, N).load(gl.SliceLayout(0, _C)).expand_dims(0)
    if TWO:
        q = warpgroup_mma_wait(0, deps=[q])
        acc11 += q * scale.slice(N, N).load(gl.SliceLayout(0, _C)).expand_dims(0)
    mbarrier.arrive(empty.index(stage), count=1)
    return it, acc00, acc01, acc10, acc11


@gluon.jit
def _multiply(
    WG: gl.constexpr, it, code_s, span_s, x_s, scale_s, full, empty,
    STEPS: gl.constexpr, STAGES: gl.constexpr, TWO: gl.constexpr, PER_TOKEN: gl.constexpr,
):  # fmt: skip
    if PER_TOKEN:
        it, acc00, acc01, acc10, acc11 = _multiply_per_token(
            WG, it, code_s, span_s, x_s, full, empty, STEPS, STAGES, TWO
        )
    else:
        it, acc00, acc01, acc10, acc11 = _multiply_per_block(
            WG, it, code_s, span_s, x_s, scale_s, full, empty, STEPS, STAGES, TWO
        )
    return it, acc00, acc01, acc10, acc11


@gluon.jit
def _row_scale(row_scale, expert, n0, WIDTH: gl.constexpr):
    return gl.load(row_scale + expert.to(gl.int64) * WIDTH + n0 + gl.arange(0, 64, gl.SliceLayout(1, _C)))


@gluon.jit
def _gate_up_item(
    WG: gl.constexpr, it, turn, expert, row0, rows, block, code_s, span_s, x_s, scale_s, full, empty, amax_s, exchanged,
    row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, TWO: gl.constexpr,
    PER_TOKEN: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    """256 gate/up rows of one token tile: 128 columns of the intermediate, quantized."""
    it, acc00, acc01, acc10, acc11 = _multiply(
        WG, it, code_s, span_s, x_s, scale_s, full, empty, STEPS, STAGES, TWO, PER_TOKEN
    )
    near = _row_scale(row_scale, expert, block * 256 + WG * 64, 2 * I)
    far = _row_scale(row_scale, expert, block * 256 + 128 + WG * 64, 2 * I)
    act00 = activated(
        acc00, near, token_scale, row_weight, row0, 0, rows, clamp, alpha, beta, N, PER_TOKEN, ACTIVATION, HAS_CLAMP
    )
    act10 = activated(
        acc10, far, token_scale, row_weight, row0, 0, rows, clamp, alpha, beta, N, PER_TOKEN, ACTIVATION, HAS_CLAMP
    )
    mine = amax_s.index((turn & 1) * 2 + WG)
    other = amax_s.index((turn & 1) * 2 + 1 - WG)
    amax0 = gl.maximum(column_amax(act00), column_amax(act10))
    mine.slice(0, N).store(amax0)
    if TWO:
        act01 = activated(
            acc01, near, token_scale, row_weight, row0, N, rows, clamp, alpha, beta,
            N, PER_TOKEN, ACTIVATION, HAS_CLAMP,
        )  # fmt: skip
        act11 = activated(
            acc11, far, token_scale, row_weight, row0, N, rows, clamp, alpha, beta,
            N, PER_TOKEN, ACTIVATION, HAS_CLAMP,
        )  # fmt: skip
        amax1 = gl.maximum(column_amax(act01), column_amax(act11))
        mine.slice(N, N).store(amax1)
    mbarrier.arrive(exchanged, count=1)
    mbarrier.wait(exchanged, turn & 1)
    amax0 = gl.maximum(amax0, other.slice(0, N).load(amax0.type.layout))
    store_quantized(act00, amax0, out, out_scale, row0, 0, rows, block, capacity, WG, I, N, WG == 0)
    store_quantized(act10, amax0, out, out_scale, row0, 0, rows, block, capacity, 2 + WG, I, N, False)
    if TWO:
        amax1 = gl.maximum(amax1, other.slice(N, N).load(amax1.type.layout))
        store_quantized(act01, amax1, out, out_scale, row0, N, rows, block, capacity, WG, I, N, WG == 0)
        store_quantized(act11, amax1, out, out_scale, row0, N, rows, block, capacity, 2 + WG, I, N, False)
    return it


@gluon.jit
def _down_item(
    WG: gl.constexpr, it, expert, row0, rows, block, code_s, span_s, x_s, scale_s, full, empty,
    row_scale, row_slots, out, H: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """256 output columns of one token tile."""
    it, acc00, acc01, acc10, acc11 = _multiply(
        WG, it, code_s, span_s, x_s, scale_s, full, empty, STEPS, STAGES, TWO, False
    )
    n0 = block * 256 + WG * 64
    near = _row_scale(row_scale, expert, n0, H)
    far = _row_scale(row_scale, expert, n0 + 128, H)
    store_rows(acc00, near, row_slots, out, row0, 0, rows, n0, H, N)
    store_rows(acc10, far, row_slots, out, row0, 0, rows, n0 + 128, H, N)
    if TWO:
        store_rows(acc01, near, row_slots, out, row0, N, rows, n0, H, N)
        store_rows(acc11, far, row_slots, out, row0, N, rows, n0 + 128, H, N)
    return it


@gluon.jit
def _consume_gate_up(
    WG: gl.constexpr, tiles, tile_count, code_s, span_s, x_s, scale_s, full, empty, amax_s, exchanged,
    row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    BLOCKS: gl.constexpr, I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    PER_TOKEN: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    it = 0
    turn = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        rows = gl.load(tile + 2)
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        if rows > N:
            it = _gate_up_item(
                WG, it, turn, expert, row0, rows, item % BLOCKS,
                code_s, span_s, x_s, scale_s, full, empty, amax_s, exchanged,
                row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                I, STEPS, STAGES, True, PER_TOKEN, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        else:
            it = _gate_up_item(
                WG, it, turn, expert, row0, rows, item % BLOCKS,
                code_s, span_s, x_s, scale_s, full, empty, amax_s, exchanged,
                row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                I, STEPS, STAGES, False, PER_TOKEN, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        turn += 1  # noqa: SIM113 (Gluon has no enumerate)


@gluon.jit
def _consume_down(
    WG: gl.constexpr, tiles, tile_count, code_s, span_s, x_s, scale_s, full, empty, row_scale, row_slots, out,
    BLOCKS: gl.constexpr, H: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    it = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        rows = gl.load(tile + 2)
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        if rows > N:
            it = _down_item(
                WG, it, expert, row0, rows, item % BLOCKS, code_s, span_s, x_s, scale_s, full, empty,
                row_scale, row_slots, out, H, STEPS, STAGES, True,
            )  # fmt: skip
        else:
            it = _down_item(
                WG, it, expert, row0, rows, item % BLOCKS, code_s, span_s, x_s, scale_s, full, empty,
                row_scale, row_slots, out, H, STEPS, STAGES, False,
            )  # fmt: skip


@gluon.jit
def _stage_buffers(x, codes, spans, scales, STAGES: gl.constexpr):
    code_s = gl.allocate_shared_memory(gl.uint8, [STAGES * 4, 64, 128], codes.layout)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 4, N, 128], x.layout)
    span_s = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 16, 32], spans.layout)
    scale_s = gl.allocate_shared_memory(gl.float32, [STAGES * 2, 1, 128], scales.layout)
    return code_s, span_s, x_s, scale_s


@gluon.jit(do_not_specialize=["capacity"])
def e2m1_many_gate_up_kernel(
    x, codes, spans, scales, tiles, tile_count, row_scale, token_scale, row_weight, out, out_scale,
    capacity, clamp, alpha, beta,
    H: gl.constexpr, I: gl.constexpr, STAGES: gl.constexpr,
    PER_TOKEN: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 1: `out` E4M3 [capacity, I] in `k_order`, `out_scale` fp32 [I/128, capacity], rows in permuted order."""
    BLOCKS: gl.constexpr = I // 128
    STEPS: gl.constexpr = H // 256
    code_s, span_s, x_s, scale_s = _stage_buffers(x, codes, spans, scales, STAGES)
    amax_s = gl.allocate_shared_memory(gl.float32, [4, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    exchanged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(exchanged, count=2)
    full, empty = stage_barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume_gate_up,
                (0, tiles, tile_count, code_s, span_s, x_s, scale_s, full, empty, amax_s, exchanged,
                 row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, PER_TOKEN, ACTIVATION, HAS_CLAMP),
            ),
            (
                _consume_gate_up,
                (1, tiles, tile_count, code_s, span_s, x_s, scale_s, full, empty, amax_s, exchanged,
                 row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, PER_TOKEN, ACTIVATION, HAS_CLAMP),
            ),
            (
                _fetch,
                (x, codes, spans, scales, tiles, tile_count, code_s, span_s, x_s, scale_s, full, empty,
                 BLOCKS, STEPS, STAGES, PER_TOKEN),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def e2m1_many_down_kernel(
    x, codes, spans, scales, tiles, tile_count, row_scale, row_slots, out,
    H: gl.constexpr, I: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 2: `out` int32 [slots, H/2], pairs of BF16; the row of slot `row_slots[r]` from permuted row r."""
    BLOCKS: gl.constexpr = H // 256
    STEPS: gl.constexpr = I // 256
    code_s, span_s, x_s, scale_s = _stage_buffers(x, codes, spans, scales, STAGES)
    full, empty = stage_barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume_down,
                (0, tiles, tile_count, code_s, span_s, x_s, scale_s, full, empty, row_scale, row_slots, out,
                 BLOCKS, H, STEPS, STAGES),
            ),
            (
                _consume_down,
                (1, tiles, tile_count, code_s, span_s, x_s, scale_s, full, empty, row_scale, row_slots, out,
                 BLOCKS, H, STEPS, STAGES),
            ),
            (
                _fetch,
                (x, codes, spans, scales, tiles, tile_count, code_s, span_s, x_s, scale_s, full, empty,
                 BLOCKS, STEPS, STAGES, False),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
