"""Both expert GEMMs on SM90: MXFP4 weights × FP8 activations, persistent and warp-specialised.

Transposed ("swap-AB"): weight rows are the MMA's 64-row operand, decoded in registers (`decode`), tokens its columns,
so that an expert with few tokens wastes few. A work item is (tile of one expert's tokens, block of weight rows): two
warpgroups take 64 rows each of 128, one warp fetches their codes, exponents and the tokens through TMA, in stages of
256 columns.

A token tile is up to three chunks of N0, N1 and N2 columns; one decoded operand serves them all, and chunks beyond the
tile's live rows are neither fetched nor multiplied, nor the second half of the second of two.

Per 128 columns of K the products are summed by the tensor cores (which keep about 14 bits) and promoted to fp32 with
the activations' scale, acc += s · p; PER_TOKEN activations have one scale, applied at the end, and no promotion.

GEMM 1 (SUBTILES = 2) makes 256 interleaved gate/up rows into 128 intermediate columns, one scale group: each warpgroup
keeps its first 32 activated columns in registers while it computes the next 32, then both exchange their maxima.

Why it cannot deadlock: items are a fixed sequence that producer and consumers walk alike; the tile list has no holes.
The producer waits only for a stage that consumers free in the same order; a consumer waits only for a stage that the
producer fills before any later one; the warpgroups wait for each other once per item, after their last stage of it. An
item's maxima lie in one of two buffers in turn, and a warpgroup can enter item i + 2 only after the other has read
those of item i. The kernel before this one, for which `gdc_wait` waits, needs nothing of it: all of its programs run
or have ended (`pdl`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.hopper.decode import decode, load_spans
from megamoe.kernels.hopper.epilogue import activated, column_amax, row_factors, store_quantized, store_rows
from megamoe.kernels.hopper.tma import fetch_box, stage_barriers
from megamoe.kernels.pdl import gdc_launch_dependents, gdc_wait

CODE_BYTES = gl.constexpr(16384)  # of a stage: 128 rows × 256 columns
SPAN_BYTES = gl.constexpr(512)


@gluon.jit
def _fetch_weights(
    codes, spans, block, rows, it, code_s, span_s, full, empty,
    BYTES: gl.constexpr, STAGES: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr,
):  # fmt: skip
    """The weights of a stage, once it is empty. Announces what `rows` tokens add to BYTES too."""
    stage = it % STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), (it // STAGES) & 1 ^ 1)
    if N2 > 0:
        mbarrier.expect(bar, BYTES + (N1 + N2) * 256, pred=rows > N0 + N1)
        mbarrier.expect(bar, BYTES + N1 * 256, pred=(rows > N0) & (rows <= N0 + N1))
        mbarrier.expect(bar, BYTES, pred=rows <= N0)
    elif N1 > 0:
        mbarrier.expect(bar, BYTES + N1 * 256, pred=rows > N0)
        mbarrier.expect(bar, BYTES, pred=rows <= N0)
    else:
        mbarrier.expect(bar, BYTES)
    fetch_box(codes, [block * 128, 0], bar, code_s.index(stage))
    fetch_box(spans, [block * 16, 0], bar, span_s.index(stage))


@gluon.jit
def _fetch_tokens(
    x0, x1, x2, scales, k, row0, rows, it, x0_s, x1_s, x2_s, scale_s, full,
    STAGES: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, PER_TOKEN: gl.constexpr,
):  # fmt: skip
    """A stage's tokens and their scales."""
    stage = it % STAGES
    bar = full.index(stage)
    for half in gl.static_range(2):
        column = k * 256 + half * 128
        fetch_box(x0, [row0, column], bar, x0_s.index(stage * 2 + half))
        if N1 > 0:
            fetch_box(x1, [row0 + N0, column], bar, x1_s.index(stage * 2 + half), pred=rows > N0)
        if N2 > 0:
            fetch_box(x2, [row0 + N0 + N1, column], bar, x2_s.index(stage * 2 + half), pred=rows > N0 + N1)
    if not PER_TOKEN:
        fetch_box(scales, [k * 2, row0], bar, scale_s.index(stage))


@gluon.jit
def _fetch(
    x0, x1, x2, codes, spans, scales, tiles, tile_count, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
    BLOCKS: gl.constexpr, SUBTILES: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, PER_TOKEN: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The producer warp. It asks for the weights of the first EARLY stages before it waits for the kernel that writes
    their tokens (`pdl`); EARLY = 0: that one has completed."""
    BYTES: gl.constexpr = CODE_BYTES + SPAN_BYTES + N0 * 256 + (0 if PER_TOKEN else scale_s.shape[2] * 8)
    program = gl.program_id(0)
    items = gl.load(tile_count, cache_modifier=".cg") * BLOCKS
    if EARLY > 0:
        if program < items:
            tile = tiles + program // BLOCKS * 4
            expert = gl.load(tile, cache_modifier=".cg")
            rows = gl.load(tile + 2, cache_modifier=".cg")
            first = (expert * BLOCKS + program % BLOCKS) * STEPS
            for step in range(EARLY):
                _fetch_weights(
                    codes, spans, first + step, rows, step, code_s, span_s, full, empty, BYTES, STAGES, N0, N1, N2
                )
        gdc_wait()
        gdc_launch_dependents()
    it = 0
    for item in range(program, items, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        rows = gl.load(tile + 2)
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        first = (expert * BLOCKS + item % BLOCKS) * (SUBTILES * STEPS)
        for step in range(SUBTILES * STEPS):
            if (EARLY == 0) | (it >= EARLY):  # else they are under way
                _fetch_weights(
                    codes, spans, first + step, rows, it, code_s, span_s, full, empty, BYTES, STAGES, N0, N1, N2
                )
            _fetch_tokens(
                x0, x1, x2, scales, step % STEPS, row0, rows, it, x0_s, x1_s, x2_s, scale_s, full,
                STAGES, N0, N1, N2, PER_TOKEN,
            )  # fmt: skip
            it += 1


@gluon.jit
def _multiply_per_token(
    WG: gl.constexpr, it, code_s, span_s, x0_s, x1_s, x2_s, full, empty, STEPS: gl.constexpr, STAGES: gl.constexpr,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, C0: gl.constexpr, C1: gl.constexpr, C2: gl.constexpr,
):  # fmt: skip
    """Sums over the whole of K in the tensor cores' accumulators; two blocks of 128 columns at a time."""
    A0: gl.constexpr = gl.DotOperandLayout(0, C0, 4)
    A1: gl.constexpr = gl.DotOperandLayout(0, C1, 4)
    A2: gl.constexpr = gl.DotOperandLayout(0, C2, 4)
    acc0 = gl.zeros([64, N0], gl.float32, C0)
    acc1 = gl.zeros([64, N1 if N1 > 0 else N0], gl.float32, C1)
    acc2 = gl.zeros([64, N2 if N2 > 0 else N0], gl.float32, C2)
    for _ in range(STEPS):
        stage = it % STAGES
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        distances = load_spans(span_s.index(stage).slice(8 * WG, 8))
        for half in gl.static_range(2):
            a = decode(code_s.index(stage).slice(64 * half + 32 * WG, 32), distances, half == 1, A0)
            acc0 = warpgroup_mma(a, x0_s.index(stage * 2 + half).permute((1, 0)), acc0, is_async=True)
            if N1 > 0:
                x1 = x1_s.index(stage * 2 + half).slice(0, N1).permute((1, 0))
                acc1 = warpgroup_mma(gl.convert_layout(a, A1), x1, acc1, is_async=True)
            if N2 > 0:
                x2 = x2_s.index(stage * 2 + half).slice(0, N2).permute((1, 0))
                acc2 = warpgroup_mma(gl.convert_layout(a, A2), x2, acc2, is_async=True)
        if N2 > 0:
            acc0, acc1, acc2 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2])
        elif N1 > 0:
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        else:
            acc0 = warpgroup_mma_wait(0, deps=[acc0])
        mbarrier.arrive(empty.index(stage), count=1)
        it += 1
    return it, acc0, acc1, acc2


@gluon.jit
def _multiply_per_block(
    WG: gl.constexpr, it, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
    STEPS: gl.constexpr, STAGES: gl.constexpr,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, C0: gl.constexpr, C1: gl.constexpr, C2: gl.constexpr,
):  # fmt: skip
    """One MMA chain per 128 columns, promoted with the tokens' scales; the next operand is decoded meanwhile."""
    A0: gl.constexpr = gl.DotOperandLayout(0, C0, 4)
    A1: gl.constexpr = gl.DotOperandLayout(0, C1, 4)
    A2: gl.constexpr = gl.DotOperandLayout(0, C2, 4)
    S: gl.constexpr = scale_s.shape[2]
    CHUNKS: gl.constexpr = 1 + (N1 > 0) + (N2 > 0)
    acc0 = gl.zeros([64, N0], gl.float32, C0)
    acc1 = gl.zeros([64, N1 if N1 > 0 else N0], gl.float32, C1)
    acc2 = gl.zeros([64, N2 if N2 > 0 else N0], gl.float32, C2)
    zero0 = gl.zeros([64, N0], gl.float32, C0)
    zero1 = gl.zeros([64, N1 if N1 > 0 else N0], gl.float32, C1)
    zero2 = gl.zeros([64, N2 if N2 > 0 else N0], gl.float32, C2)
    # As straight-line code, ptxas 12.8 hands one of two chunks' MMAs another's descriptor: a single turn stays a loop,
    # of `it >> 31` = 0 more turns.
    turns = STEPS if STEPS > 1 else STEPS + (it >> 31)
    for _ in range(turns):
        stage = it % STAGES
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        distances = load_spans(span_s.index(stage).slice(8 * WG, 8))
        a = decode(code_s.index(stage).slice(32 * WG, 32), distances, False, A0)
        scale = scale_s.index(stage).reshape([2 * S])
        for half in gl.static_range(2):
            p0 = warpgroup_mma(a, x0_s.index(stage * 2 + half).permute((1, 0)), zero0, use_acc=False, is_async=True)
            if N1 > 0:
                x1 = x1_s.index(stage * 2 + half).slice(0, N1).permute((1, 0))
                p1 = warpgroup_mma(gl.convert_layout(a, A1), x1, zero1, use_acc=False, is_async=True)
            if half == 0:
                a_next = decode(code_s.index(stage).slice(64 + 32 * WG, 32), distances, True, A0)
            p0 = warpgroup_mma_wait(min(CHUNKS - 1, 1), deps=[p0])
            acc0 += p0 * scale.slice(half * S, N0).load(gl.SliceLayout(0, C0)).expand_dims(0)
            if N2 > 0:  # no more than two products wait for promotion: three would not fit into registers
                x2 = x2_s.index(stage * 2 + half).slice(0, N2).permute((1, 0))
                p2 = warpgroup_mma(gl.convert_layout(a, A2), x2, zero2, use_acc=False, is_async=True)
            if N1 > 0:
                p1 = warpgroup_mma_wait(CHUNKS - 2, deps=[p1])
                acc1 += p1 * scale.slice(half * S + N0, N1).load(gl.SliceLayout(0, C1)).expand_dims(0)
            if N2 > 0:
                p2 = warpgroup_mma_wait(0, deps=[p2])
                acc2 += p2 * scale.slice(half * S + N0 + N1, N2).load(gl.SliceLayout(0, C2)).expand_dims(0)
            if half == 0:
                a = a_next
        mbarrier.arrive(empty.index(stage), count=1)
        it += 1
    return it, acc0, acc1, acc2


@gluon.jit
def _multiply(
    WG: gl.constexpr, it, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
    STEPS: gl.constexpr, STAGES: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr,
    PER_TOKEN: gl.constexpr,
):  # fmt: skip
    C0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N0, 32])
    C1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N1 if N1 > 0 else N0, 32])
    C2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N2 if N2 > 0 else N0, 32])
    if PER_TOKEN:
        it, acc0, acc1, acc2 = _multiply_per_token(
            WG, it, code_s, span_s, x0_s, x1_s, x2_s, full, empty, STEPS, STAGES, N0, N1, N2, C0, C1, C2
        )
    else:
        it, acc0, acc1, acc2 = _multiply_per_block(
            WG, it, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, STEPS, STAGES, N0, N1, N2, C0, C1, C2
        )
    return it, acc0, acc1, acc2


@gluon.jit
def _gate_up_item(
    WG: gl.constexpr, it, turn, expert, row0, rows, block,
    code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
    amax_s, exchanged, first_s, row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr,
    PER_TOKEN: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    """256 gate/up rows of one token tile: 128 columns of the intermediate, quantized."""
    HOLD: gl.constexpr = len(first_s.shape) == 2  # no buffer: the columns wait in registers
    CHUNKS: gl.constexpr = first_s.shape[0] // 2
    for sub in gl.static_range(2):
        it, acc0, acc1, acc2 = _multiply(
            WG, it, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, STEPS, STAGES, N0, N1, N2, PER_TOKEN
        )
        scale = row_factors(row_scale, expert, block * 256 + sub * 128 + WG * 64, N0, 2 * I)
        act0 = activated(
            acc0, scale, token_scale, row_weight, row0, 0, rows, clamp, alpha, beta,
            N0, PER_TOKEN, ACTIVATION, HAS_CLAMP,
        )  # fmt: skip
        if N1 > 0:
            act1 = activated(
                acc1, scale, token_scale, row_weight, row0, N0, rows, clamp, alpha, beta,
                N1, PER_TOKEN, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        if N2 > 0:
            act2 = activated(
                acc2, scale, token_scale, row_weight, row0, N0 + N1, rows, clamp, alpha, beta,
                N2, PER_TOKEN, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        if sub == 0:
            if HOLD:
                first0 = act0
            else:
                first_s.index(WG * CHUNKS + 0).slice(0, N0).permute((1, 0)).store(act0)
                if N1 > 0:
                    first_s.index(WG * CHUNKS + 1).slice(0, N1).permute((1, 0)).store(act1)
                if N2 > 0:
                    first_s.index(WG * CHUNKS + 2).slice(0, N2).permute((1, 0)).store(act2)

    if not HOLD:
        first0 = first_s.index(WG * CHUNKS + 0).slice(0, N0).permute((1, 0)).load(act0.type.layout)
        if N1 > 0:
            first1 = first_s.index(WG * CHUNKS + 1).slice(0, N1).permute((1, 0)).load(act1.type.layout)
        if N2 > 0:
            first2 = first_s.index(WG * CHUNKS + 2).slice(0, N2).permute((1, 0)).load(act2.type.layout)
    mine = amax_s.index((turn & 1) * 2 + WG)
    other = amax_s.index((turn & 1) * 2 + 1 - WG)
    amax0 = gl.maximum(column_amax(first0), column_amax(act0))
    mine.slice(0, N0).store(amax0)
    if N1 > 0:
        amax1 = gl.maximum(column_amax(first1), column_amax(act1))
        mine.slice(N0, N1).store(amax1)
    if N2 > 0:
        amax2 = gl.maximum(column_amax(first2), column_amax(act2))
        mine.slice(N0 + N1, N2).store(amax2)
    mbarrier.arrive(exchanged, count=1)
    mbarrier.wait(exchanged, turn & 1)
    amax0 = gl.maximum(amax0, other.slice(0, N0).load(amax0.type.layout))
    store_quantized(first0, amax0, out, out_scale, row0, 0, rows, block, capacity, WG, I, N0, WG == 0)
    store_quantized(act0, amax0, out, out_scale, row0, 0, rows, block, capacity, 2 + WG, I, N0, False)
    if N1 > 0:
        amax1 = gl.maximum(amax1, other.slice(N0, N1).load(amax1.type.layout))
        store_quantized(first1, amax1, out, out_scale, row0, N0, rows, block, capacity, WG, I, N1, WG == 0)
        store_quantized(act1, amax1, out, out_scale, row0, N0, rows, block, capacity, 2 + WG, I, N1, False)
    if N2 > 0:
        amax2 = gl.maximum(amax2, other.slice(N0 + N1, N2).load(amax2.type.layout))
        store_quantized(first2, amax2, out, out_scale, row0, N0 + N1, rows, block, capacity, WG, I, N2, WG == 0)
        store_quantized(act2, amax2, out, out_scale, row0, N0 + N1, rows, block, capacity, 2 + WG, I, N2, False)
    return it


@gluon.jit
def _down_item(
    WG: gl.constexpr, it, expert, row0, rows, block,
    code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, row_scale, row_slots, out,
    H: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr,
):  # fmt: skip
    """128 output columns of one token tile."""
    it, acc0, acc1, acc2 = _multiply(
        WG, it, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, STEPS, STAGES, N0, N1, N2, False
    )
    n0 = block * 128 + WG * 64
    scale = row_factors(row_scale, expert, n0, N0, H)
    store_rows(acc0, scale, row_slots, out, row0, 0, rows, n0, H, N0)
    if N1 > 0:
        store_rows(acc1, scale, row_slots, out, row0, N0, rows, n0, H, N1)
    if N2 > 0:
        store_rows(acc2, scale, row_slots, out, row0, N0 + N1, rows, n0, H, N2)
    return it


@gluon.jit
def _consume_gate_up(
    WG: gl.constexpr, tiles, tile_count, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
    amax_s, exchanged, first_s, row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    BLOCKS: gl.constexpr, I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr,
    PER_TOKEN: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    it = 0
    turn = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        rows = gl.load(tile + 2)
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        block = item % BLOCKS
        if N1 == 0:
            it = _gate_up_item(
                WG, it, turn, expert, row0, rows, block,
                code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, amax_s, exchanged, first_s,
                row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                I, STEPS, STAGES, N0, 0, 0, PER_TOKEN, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        elif N2 == 0:
            if rows <= N0:
                it = _gate_up_item(
                    WG, it, turn, expert, row0, rows, block,
                    code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, amax_s, exchanged, first_s,
                    row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                    I, STEPS, STAGES, N0, 0, 0, PER_TOKEN, ACTIVATION, HAS_CLAMP,
                )  # fmt: skip
            elif rows <= N0 + N1 // 2:
                it = _gate_up_item(
                    WG, it, turn, expert, row0, rows, block,
                    code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, amax_s, exchanged, first_s,
                    row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                    I, STEPS, STAGES, N0, N1 // 2, 0, PER_TOKEN, ACTIVATION, HAS_CLAMP,
                )  # fmt: skip
            else:
                it = _gate_up_item(
                    WG, it, turn, expert, row0, rows, block,
                    code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, amax_s, exchanged, first_s,
                    row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                    I, STEPS, STAGES, N0, N1, 0, PER_TOKEN, ACTIVATION, HAS_CLAMP,
                )  # fmt: skip
        else:
            if rows <= N0:
                it = _gate_up_item(
                    WG, it, turn, expert, row0, rows, block,
                    code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, amax_s, exchanged, first_s,
                    row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                    I, STEPS, STAGES, N0, 0, 0, PER_TOKEN, ACTIVATION, HAS_CLAMP,
                )  # fmt: skip
            elif rows <= N0 + N1:
                it = _gate_up_item(
                    WG, it, turn, expert, row0, rows, block,
                    code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, amax_s, exchanged, first_s,
                    row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                    I, STEPS, STAGES, N0, N1, 0, PER_TOKEN, ACTIVATION, HAS_CLAMP,
                )  # fmt: skip
            else:
                it = _gate_up_item(
                    WG, it, turn, expert, row0, rows, block,
                    code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty, amax_s, exchanged, first_s,
                    row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                    I, STEPS, STAGES, N0, N1, N2, PER_TOKEN, ACTIVATION, HAS_CLAMP,
                )  # fmt: skip
        turn += 1  # noqa: SIM113 (Gluon has no enumerate)


@gluon.jit
def _consume_down(
    WG: gl.constexpr, tiles, tile_count, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
    row_scale, row_slots, out,
    BLOCKS: gl.constexpr, H: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr,
):  # fmt: skip
    gdc_wait()  # the tile list, and `out`, come behind it
    it = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        rows = gl.load(tile + 2)
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        block = item % BLOCKS
        if N1 == 0:
            it = _down_item(
                WG, it, expert, row0, rows, block, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                row_scale, row_slots, out, H, STEPS, STAGES, N0, 0, 0,
            )  # fmt: skip
        elif N2 == 0:
            if rows <= N0:
                it = _down_item(
                    WG, it, expert, row0, rows, block, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                    row_scale, row_slots, out, H, STEPS, STAGES, N0, 0, 0,
                )  # fmt: skip
            elif rows <= N0 + N1 // 2:
                it = _down_item(
                    WG, it, expert, row0, rows, block, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                    row_scale, row_slots, out, H, STEPS, STAGES, N0, N1 // 2, 0,
                )  # fmt: skip
            else:
                it = _down_item(
                    WG, it, expert, row0, rows, block, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                    row_scale, row_slots, out, H, STEPS, STAGES, N0, N1, 0,
                )  # fmt: skip
        else:
            if rows <= N0:
                it = _down_item(
                    WG, it, expert, row0, rows, block, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                    row_scale, row_slots, out, H, STEPS, STAGES, N0, 0, 0,
                )  # fmt: skip
            elif rows <= N0 + N1:
                it = _down_item(
                    WG, it, expert, row0, rows, block, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                    row_scale, row_slots, out, H, STEPS, STAGES, N0, N1, 0,
                )  # fmt: skip
            else:
                it = _down_item(
                    WG, it, expert, row0, rows, block, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                    row_scale, row_slots, out, H, STEPS, STAGES, N0, N1, N2,
                )  # fmt: skip


@gluon.jit
def _stage_buffers(
    x0, x1, x2, codes, spans, scales, STAGES: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr
):  # fmt: skip
    code_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 128, 128], codes.layout)
    x0_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, N0, 128], x0.layout)
    x1_s = x0_s
    x2_s = x0_s
    if N1 > 0:
        x1_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, N1, 128], x1.layout)
    if N2 > 0:
        x2_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, N2, 128], x2.layout)
    span_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 16, 32], spans.layout)
    scale_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2, scales.block_shape[1]], scales.layout)
    return code_s, span_s, x0_s, x1_s, x2_s, scale_s


@gluon.jit
def _first_half_buffer(N0: gl.constexpr, CHUNKS: gl.constexpr):
    """Where a wide tile's activated columns wait for the item's second half; a narrow one's stay in registers.

    fp32 [warpgroup × chunk, token, column]; the swizzle gives the 32 lanes of an accumulator's fragment 32 banks.
    """
    return gl.allocate_shared_memory(gl.float32, [2 * CHUNKS, N0, 32], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))


@gluon.jit(do_not_specialize=["capacity"])
def hopper_gate_up_kernel(
    x0, x1, x2, codes, spans, scales, tiles, tile_count, row_scale, token_scale, row_weight, out, out_scale,
    capacity, clamp, alpha, beta,
    H: gl.constexpr, I: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr,
    PER_TOKEN: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 1: `out` E4M3 [capacity, I] in `k_order`, `out_scale` fp32 [I/128, capacity], rows in permuted order."""
    BLOCKS: gl.constexpr = I // 128
    STEPS: gl.constexpr = H // 256
    code_s, span_s, x0_s, x1_s, x2_s, scale_s = _stage_buffers(
        x0, x1, x2, codes, spans, scales, STAGES, N0, N1, N2
    )  # fmt: skip
    amax_s = gl.allocate_shared_memory(gl.float32, [4, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    first_s = amax_s
    if N0 + N1 > 32:
        first_s = _first_half_buffer(N0, 1 + (N1 > 0) + (N2 > 0))
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
                (0, tiles, tile_count, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                 amax_s, exchanged, first_s, row_scale, token_scale, row_weight, out, out_scale,
                 capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, N0, N1, N2, PER_TOKEN, ACTIVATION, HAS_CLAMP),
            ),
            (
                _consume_gate_up,
                (1, tiles, tile_count, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                 amax_s, exchanged, first_s, row_scale, token_scale, row_weight, out, out_scale,
                 capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, N0, N1, N2, PER_TOKEN, ACTIVATION, HAS_CLAMP),
            ),
            (
                _fetch,
                (x0, x1, x2, codes, spans, scales, tiles, tile_count,
                 code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                 BLOCKS, 2, STEPS, STAGES, N0, N1, N2, PER_TOKEN, 0),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def hopper_down_kernel(
    x0, x1, x2, codes, spans, scales, tiles, tile_count, row_scale, row_slots, out,
    H: gl.constexpr, I: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 2: `out` int32 [slots, H/2], pairs of BF16; the row of slot `row_slots[r]` from permuted row r."""
    BLOCKS: gl.constexpr = H // 128
    STEPS: gl.constexpr = I // 256
    code_s, span_s, x0_s, x1_s, x2_s, scale_s = _stage_buffers(
        x0, x1, x2, codes, spans, scales, STAGES, N0, N1, N2
    )  # fmt: skip
    full, empty = stage_barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume_down,
                (0, tiles, tile_count, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                 row_scale, row_slots, out, BLOCKS, H, STEPS, STAGES, N0, N1, N2),
            ),
            (
                _consume_down,
                (1, tiles, tile_count, code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                 row_scale, row_slots, out, BLOCKS, H, STEPS, STAGES, N0, N1, N2),
            ),
            (
                _fetch,
                (x0, x1, x2, codes, spans, scales, tiles, tile_count,
                 code_s, span_s, x0_s, x1_s, x2_s, scale_s, full, empty,
                 BLOCKS, 1, STEPS, STAGES, N0, N1, N2, False, min(STAGES, STEPS)),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
