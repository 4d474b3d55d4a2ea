"""Both expert GEMMs on SM90: MXFP4 weights × BF16 activations, persistent and warp-specialised.

As `expert_gemm`: transposed ("swap-AB"), weight rows decoded in registers as the MMA's 64-row operand, here to BF16,
tokens its columns. Nothing has a scale but the weights: sums stay in the tensor cores over the whole of K, GEMM 1
stores its activations as BF16, and the warpgroups have nothing to exchange. A work item is (tile of one expert's
tokens, SUBS blocks of 128 weight rows): one for few tokens; two for many, so that the tokens, two bytes per column, are
fetched half as often. A tile has one or two chunks of N tokens; a second one without live rows costs nothing, one of
half a chunk's is multiplied as half a chunk. A stage
is HALVES blocks of 128 columns: two where latency counts, one where a stage of two would fill half of the memory.

Exact: E2M1 times a power of two from 2^-5 to 2^6 is a BF16 number, products of two BF16 numbers are fp32 numbers, and
the row's own power of two meets the sum.

Why it cannot deadlock: producer and consumers walk the same items and stages; the producer waits only for a stage that
consumers free in the same order, a consumer only for a stage that the producer fills before any later one, and the
warpgroups never wait for each other. For `gdc_wait` see `expert_gemm`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.hopper.decode import bf16_tables, decode_bf16, load_spans
from megamoe.kernels.hopper.epilogue import activated_sums, row_factors, store_bf16, store_rows
from megamoe.kernels.hopper.tma import fetch_box, stage_barriers
from megamoe.kernels.pdl import gdc_launch_dependents, gdc_wait


@gluon.jit
def _fetch_weights(
    codes, spans, first, step, rows, it, code_s, span_s, full, empty,
    K: gl.constexpr, STAGES: gl.constexpr, SUBS: gl.constexpr, HALVES: gl.constexpr,
    N: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """The weights of a stage, once it is empty. Announces its tokens' bytes too."""
    BYTES: gl.constexpr = SUBS * (HALVES * 8192 + 512) + HALVES * N * 256
    stage = it % STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), (it // STAGES) & 1 ^ 1)
    if CHUNKS == 2:
        mbarrier.expect(bar, BYTES + HALVES * N * 256, pred=rows > N)
        mbarrier.expect(bar, BYTES, pred=rows <= N)
    else:
        mbarrier.expect(bar, BYTES)
    for sub in gl.static_range(SUBS):
        tile = first + sub * (K // 256)
        fetch_box(codes, [tile * 128 + step * (64 * HALVES), 0], bar, code_s.index(stage * SUBS + sub))
        fetch_box(spans, [(tile + step * HALVES // 2) * 16, 0], bar, span_s.index(stage * SUBS + sub))


@gluon.jit
def _fetch(
    x, codes, spans, tiles, tile_count, x_s, code_s, span_s, full, empty,
    BLOCKS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, SUBS: gl.constexpr, HALVES: gl.constexpr,
    N: gl.constexpr, CHUNKS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The producer warp; EARLY as in `expert_gemm`."""
    TILES: gl.constexpr = SUBS * (K // 256)  # of weights, to an item
    program = gl.program_id(0)
    items = gl.load(tile_count, cache_modifier=".cg") * BLOCKS
    if EARLY > 0:
        if program < items:
            tile = tiles + program // BLOCKS * 4
            expert = gl.load(tile, cache_modifier=".cg")
            rows = gl.load(tile + 2, cache_modifier=".cg")
            first = (expert * BLOCKS + program % BLOCKS) * TILES
            for step in range(EARLY):
                _fetch_weights(
                    codes, spans, first, step, rows, step, code_s, span_s, full, empty,
                    K, STAGES, SUBS, HALVES, N, CHUNKS,
                )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
    it = 0
    for item in range(program, items, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        rows = gl.load(tile + 2)
        first = (expert * BLOCKS + item % BLOCKS) * TILES
        for step in range(K // (128 * HALVES)):
            if (EARLY == 0) | (it >= EARLY):
                _fetch_weights(
                    codes, spans, first, step, rows, it, code_s, span_s, full, empty,
                    K, STAGES, SUBS, HALVES, N, CHUNKS,
                )  # fmt: skip
            stage = it % STAGES
            bar = full.index(stage)
            for part in gl.static_range(2 * HALVES):
                column = step * (128 * HALVES) + part * 64
                at = (stage * (2 * HALVES) + part) * CHUNKS
                fetch_box(x, [row0, column], bar, x_s.index(at))
                if CHUNKS == 2:
                    fetch_box(x, [row0 + N, column], bar, x_s.index(at + 1), pred=rows > N)
            it += 1


@gluon.jit
def _meet(acc, low, high, x_s, at, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """acc (layout C) + the two operands of a block of 128 columns × N tokens of a chunk: two MMAs in flight."""
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    x = x_s.index(at * CHUNKS + CHUNK).slice(0, N).permute((1, 0))
    acc = warpgroup_mma(gl.convert_layout(low, A), x, acc, is_async=True)
    x = x_s.index((at + 1) * CHUNKS + CHUNK).slice(0, N).permute((1, 0))
    return warpgroup_mma(gl.convert_layout(high, A), x, acc, is_async=True)


@gluon.jit
def _operands(WG: gl.constexpr, code_s, span_s, at, WITHIN: gl.constexpr, ODD: gl.constexpr, tables, A: gl.constexpr):
    """A warpgroup's rows of the WITHIN-th block of a stage."""
    spans = load_spans(span_s.index(at).slice(8 * WG, 8))
    return decode_bf16(code_s.index(at).slice(64 * WITHIN + 32 * WG, 32), spans, ODD, tables, A)


@gluon.jit
def _multiply(
    WG: gl.constexpr, it, rows, x_s, code_s, span_s, full, empty,
    K: gl.constexpr, STAGES: gl.constexpr, SUBS: gl.constexpr, HALVES: gl.constexpr,
    N: gl.constexpr, N1: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Sums over the whole of K of (row block, chunk of tokens); of the second chunk N1 tokens, which may be 0.

    A turn of the loop is 256 columns; the products of a turn are waited for at its end: carried over it, ptxas would
    wait for each at once. Within it a block of 128 columns is decoded while the one before is multiplied.
    """
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    tables = bf16_tables(rows >> 24)
    WIDTH: gl.constexpr = N1 if N1 > 0 else N
    C1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc00 = gl.zeros([64, N], gl.float32, C)
    acc01 = gl.zeros([64, WIDTH], gl.float32, C1)
    acc10 = gl.zeros([64, N], gl.float32, C)
    acc11 = gl.zeros([64, WIDTH], gl.float32, C1)
    for _ in range(K // 256):
        for half in gl.static_range(2):
            stage = it % STAGES
            if half == 0 or HALVES == 1:
                mbarrier.wait(full.index(stage), (it // STAGES) & 1)
            at = (stage * HALVES + half * (HALVES - 1)) * 2
            low, high = _operands(WG, code_s, span_s, stage * SUBS, half * (HALVES - 1), half, tables, A)
            acc00 = _meet(acc00, low, high, x_s, at, 0, CHUNKS, N, C)
            if N1 > 0:
                acc01 = _meet(acc01, low, high, x_s, at, 1, CHUNKS, N1, C1)
            if SUBS == 2:
                if half == 1:
                    if N1 > 0:
                        acc10, acc11 = warpgroup_mma_wait(4, deps=[acc10, acc11])
                    else:
                        acc10 = warpgroup_mma_wait(2, deps=[acc10])
                    if HALVES == 1:
                        mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
                low, high = _operands(
                    WG, code_s, span_s, stage * SUBS + 1, half * (HALVES - 1), half, tables, A
                )  # fmt: skip
                acc10 = _meet(acc10, low, high, x_s, at, 0, CHUNKS, N, C)
                if N1 > 0:
                    acc11 = _meet(acc11, low, high, x_s, at, 1, CHUNKS, N1, C1)
                if half == 0:
                    if N1 > 0:
                        acc00, acc01 = warpgroup_mma_wait(4, deps=[acc00, acc01])
                    else:
                        acc00 = warpgroup_mma_wait(2, deps=[acc00])
            if half == 1 or HALVES == 1:
                it += 1
        if SUBS == 2:
            if N1 > 0:
                acc00, acc01, acc10, acc11 = warpgroup_mma_wait(0, deps=[acc00, acc01, acc10, acc11])
            else:
                acc00, acc10 = warpgroup_mma_wait(0, deps=[acc00, acc10])
        else:
            acc00 = warpgroup_mma_wait(0, deps=[acc00])
        mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
    return it, acc00, acc01, acc10, acc11


@gluon.jit
def _store_intermediate(
    WG: gl.constexpr, acc, row_scale, out, expert, row0, m0, rows, row_block, clamp, alpha, beta,
    I: gl.constexpr, N: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    """32 columns of the intermediate from 64 gate/up rows."""
    factors = row_factors(row_scale, expert, row_block * 128 + WG * 64, N, 2 * I)
    act = activated_sums(acc, factors, clamp, alpha, beta, N, ACTIVATION, HAS_CLAMP)
    store_bf16(act, out, row0, m0, rows, row_block // 2, row_block % 2 * 2 + WG, I, N)


@gluon.jit
def _gate_up_item(
    WG: gl.constexpr, it, expert, row0, rows, block, x_s, code_s, span_s, full, empty, row_scale, out,
    clamp, alpha, beta,
    I: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, SUBS: gl.constexpr, HALVES: gl.constexpr,
    N: gl.constexpr,
    N1: gl.constexpr, CHUNKS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    it, acc00, acc01, acc10, acc11 = _multiply(
        WG, it, rows, x_s, code_s, span_s, full, empty, K, STAGES, SUBS, HALVES, N, N1, CHUNKS
    )
    _store_intermediate(
        WG, acc00, row_scale, out, expert, row0, 0, rows, block * SUBS, clamp, alpha, beta, I, N, ACTIVATION, HAS_CLAMP
    )
    if N1 > 0:
        _store_intermediate(
            WG, acc01, row_scale, out, expert, row0, N, rows, block * SUBS, clamp, alpha, beta,
            I, N1, ACTIVATION, HAS_CLAMP,
        )  # fmt: skip
    if SUBS == 2:
        _store_intermediate(
            WG, acc10, row_scale, out, expert, row0, 0, rows, block * SUBS + 1, clamp, alpha, beta,
            I, N, ACTIVATION, HAS_CLAMP,
        )  # fmt: skip
        if N1 > 0:
            _store_intermediate(
                WG, acc11, row_scale, out, expert, row0, N, rows, block * SUBS + 1, clamp, alpha, beta,
                I, N1, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
    return it


@gluon.jit
def _down_item(
    WG: gl.constexpr, it, expert, row0, rows, block, x_s, code_s, span_s, full, empty, row_scale, row_slots, out,
    H: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, SUBS: gl.constexpr, HALVES: gl.constexpr,
    N: gl.constexpr,
    N1: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    it, acc00, acc01, acc10, acc11 = _multiply(
        WG, it, rows, x_s, code_s, span_s, full, empty, K, STAGES, SUBS, HALVES, N, N1, CHUNKS
    )
    n0 = block * (SUBS * 128) + WG * 64
    near = row_factors(row_scale, expert, n0, N, H)
    store_rows(acc00, near, row_slots, out, row0, 0, rows, n0, H, N)
    if N1 > 0:
        store_rows(acc01, near, row_slots, out, row0, N, rows, n0, H, N1)
    if SUBS == 2:
        far = row_factors(row_scale, expert, n0 + 128, N, H)
        store_rows(acc10, far, row_slots, out, row0, 0, rows, n0 + 128, H, N)
        if N1 > 0:
            store_rows(acc11, far, row_slots, out, row0, N, rows, n0 + 128, H, N1)
    return it


@gluon.jit
def _consume_gate_up(
    WG: gl.constexpr, tiles, tile_count, x_s, code_s, span_s, full, empty, row_scale, out, clamp, alpha, beta,
    BLOCKS: gl.constexpr, I: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, SUBS: gl.constexpr,
    HALVES: gl.constexpr, N: gl.constexpr, CHUNKS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    it = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        rows = gl.load(tile + 2)
        block = item % BLOCKS
        if CHUNKS == 1:
            it = _gate_up_item(
                WG, it, expert, row0, rows, block, x_s, code_s, span_s, full, empty, row_scale, out,
                clamp, alpha, beta, I, K, STAGES, SUBS, HALVES, N, 0, CHUNKS, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        else:
            if rows <= N:
                it = _gate_up_item(
                    WG, it, expert, row0, rows, block, x_s, code_s, span_s, full, empty, row_scale, out,
                    clamp, alpha, beta, I, K, STAGES, SUBS, HALVES, N, 0, CHUNKS, ACTIVATION, HAS_CLAMP,
                )  # fmt: skip
            elif rows <= N + N // 2:
                it = _gate_up_item(
                    WG, it, expert, row0, rows, block, x_s, code_s, span_s, full, empty, row_scale, out,
                    clamp, alpha, beta, I, K, STAGES, SUBS, HALVES, N, N // 2, CHUNKS, ACTIVATION, HAS_CLAMP,
                )  # fmt: skip
            else:
                it = _gate_up_item(
                    WG, it, expert, row0, rows, block, x_s, code_s, span_s, full, empty, row_scale, out,
                    clamp, alpha, beta, I, K, STAGES, SUBS, HALVES, N, N, CHUNKS, ACTIVATION, HAS_CLAMP,
                )  # fmt: skip


@gluon.jit
def _consume_down(
    WG: gl.constexpr, tiles, tile_count, x_s, code_s, span_s, full, empty, row_scale, row_slots, out,
    BLOCKS: gl.constexpr, H: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, SUBS: gl.constexpr,
    HALVES: gl.constexpr, N: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    gdc_wait()  # the tile list, and `out`, come behind it
    it = 0
    for item in range(gl.program_id(0), gl.load(tile_count) * BLOCKS, gl.num_programs(0)):
        tile = tiles + item // BLOCKS * 4
        expert = gl.load(tile)
        row0 = gl.load(tile + 1)
        rows = gl.load(tile + 2)
        block = item % BLOCKS
        if CHUNKS == 1:
            it = _down_item(
                WG, it, expert, row0, rows, block, x_s, code_s, span_s, full, empty, row_scale, row_slots, out,
                H, K, STAGES, SUBS, HALVES, N, 0, CHUNKS,
            )  # fmt: skip
        else:
            if rows <= N:
                it = _down_item(
                    WG, it, expert, row0, rows, block, x_s, code_s, span_s, full, empty, row_scale, row_slots, out,
                    H, K, STAGES, SUBS, HALVES, N, 0, CHUNKS,
                )  # fmt: skip
            elif rows <= N + N // 2:
                it = _down_item(
                    WG, it, expert, row0, rows, block, x_s, code_s, span_s, full, empty, row_scale, row_slots, out,
                    H, K, STAGES, SUBS, HALVES, N, N // 2, CHUNKS,
                )  # fmt: skip
            else:
                it = _down_item(
                    WG, it, expert, row0, rows, block, x_s, code_s, span_s, full, empty, row_scale, row_slots, out,
                    H, K, STAGES, SUBS, HALVES, N, N, CHUNKS,
                )  # fmt: skip


@gluon.jit
def _stage_buffers(
    x, codes, spans,
    STAGES: gl.constexpr, SUBS: gl.constexpr, HALVES: gl.constexpr, N: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2 * HALVES * CHUNKS, N, 64], x.layout)
    code_s = gl.allocate_shared_memory(gl.uint8, [STAGES * SUBS, 64 * HALVES, 128], codes.layout)
    span_s = gl.allocate_shared_memory(gl.uint8, [STAGES * SUBS, 16, 32], spans.layout)
    return x_s, code_s, span_s


@gluon.jit
def e2m1_bf16_gate_up_kernel(
    x, codes, spans, tiles, tile_count, row_scale, out, clamp, alpha, beta,
    H: gl.constexpr, I: gl.constexpr, N: gl.constexpr, CHUNKS: gl.constexpr, SUBS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 1: `out` int32 [capacity, I/2], pairs of BF16 in `bf16_k_order`, rows in permuted order."""
    BLOCKS: gl.constexpr = 2 * I // (128 * SUBS)
    x_s, code_s, span_s = _stage_buffers(x, codes, spans, STAGES, SUBS, HALVES, N, CHUNKS)
    full, empty = stage_barriers(STAGES)
    fence_async_shared()
    gdc_wait()  # the other warps start behind it
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _consume_gate_up,
                (0, tiles, tile_count, x_s, code_s, span_s, full, empty, row_scale, out, clamp, alpha, beta,
                 BLOCKS, I, H, STAGES, SUBS, HALVES, N, CHUNKS, ACTIVATION, HAS_CLAMP),
            ),
            (
                _consume_gate_up,
                (1, tiles, tile_count, x_s, code_s, span_s, full, empty, row_scale, out, clamp, alpha, beta,
                 BLOCKS, I, H, STAGES, SUBS, HALVES, N, CHUNKS, ACTIVATION, HAS_CLAMP),
            ),
            (
                _fetch,
                (x, codes, spans, tiles, tile_count, x_s, code_s, span_s, full, empty,
                 BLOCKS, H, STAGES, SUBS, HALVES, N, CHUNKS, 0),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def e2m1_bf16_down_kernel(
    x, codes, spans, tiles, tile_count, row_scale, row_slots, out,
    H: gl.constexpr, I: gl.constexpr, N: gl.constexpr, CHUNKS: gl.constexpr, SUBS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 2: `out` int32 [slots, H/2], pairs of BF16; the row of slot `row_slots[r]` from permuted row r."""
    BLOCKS: gl.constexpr = H // (128 * SUBS)
    x_s, code_s, span_s = _stage_buffers(x, codes, spans, STAGES, SUBS, HALVES, N, CHUNKS)
    full, empty = stage_barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume_down,
                (0, tiles, tile_count, x_s, code_s, span_s, full, empty, row_scale, row_slots, out,
                 BLOCKS, H, I, STAGES, SUBS, HALVES, N, CHUNKS),
            ),
            (
                _consume_down,
                (1, tiles, tile_count, x_s, code_s, span_s, full, empty, row_scale, row_slots, out,
                 BLOCKS, H, I, STAGES, SUBS, HALVES, N, CHUNKS),
            ),
            (
                _fetch,
                (x, codes, spans, tiles, tile_count, x_s, code_s, span_s, full, empty,
                 BLOCKS, I, STAGES, SUBS, HALVES, N, CHUNKS, min(STAGES, I // (128 * HALVES))),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
