"""GEMM 1 on SM90 with MXFP4 weights and one scale per token, for many tokens per expert: persistent, warp-specialised.

As `expert_gemm`: transposed, weight rows decoded in registers as the MMA's 64-row operand, tokens its columns. What
differs is the work item: 256 weight rows at once instead of 128 after 128, for a tile of up to 128 tokens, so that the
tokens, two thirds of what a wide tile fetches, are fetched half as often. Each of the two warpgroups has 64 of the
first 128 rows and 64 of the second: four sums of 64 × 64, which tensor cores keep over the whole of K. Both halves of a
scale group of the intermediate are there at the same time; nothing waits in shared memory.

Scales per 128 columns would need registers for products beside those sums (`docs/hopper.md`): they keep `expert_gemm`.

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

from megamoe.kernels.hopper.decode import decode, load_spans
from megamoe.kernels.hopper.epilogue import activated, column_amax, row_factors, store_quantized
from megamoe.kernels.hopper.tma import fetch_box, stage_barriers

N = gl.constexpr(64)  # tokens of a chunk; a tile is one or two
_C = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
_A = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), 4))


@gluon.jit
def _fetch(
    x, codes, spans, tiles, tile_count, code_s, span_s, x_s, full, empty,
    BLOCKS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    BYTES: gl.constexpr = 2 * (16384 + 512) + N * 256
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
            it += 1


@gluon.jit
def _operand(WG: gl.constexpr, code_s, stage, distances, HALF: gl.constexpr, SUB: gl.constexpr):
    return decode(code_s.index(stage * 4 + SUB * 2 + HALF).slice(32 * WG, 32), distances, HALF == 1, _A)


@gluon.jit
def _multiply(
    WG: gl.constexpr, it, code_s, span_s, x_s, full, empty,
    STEPS: gl.constexpr, STAGES: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """Sums over the whole of K in the tensor cores' accumulators, of (row block, chunk of tokens). TWO: both chunks."""
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
def _gate_up_item(
    WG: gl.constexpr, it, turn, expert, row0, rows, block, code_s, span_s, x_s, full, empty, amax_s, exchanged,
    row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, TWO: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    """256 gate/up rows of one token tile: 128 columns of the intermediate, quantized."""
    it, acc00, acc01, acc10, acc11 = _multiply(WG, it, code_s, span_s, x_s, full, empty, STEPS, STAGES, TWO)
    near = row_factors(row_scale, expert, block * 256 + WG * 64, N, 2 * I)
    far = row_factors(row_scale, expert, block * 256 + 128 + WG * 64, N, 2 * I)
    act00 = activated(
        acc00, near, token_scale, row_weight, row0, 0, rows, clamp, alpha, beta, N, True, ACTIVATION, HAS_CLAMP
    )
    act10 = activated(
        acc10, far, token_scale, row_weight, row0, 0, rows, clamp, alpha, beta, N, True, ACTIVATION, HAS_CLAMP
    )
    mine = amax_s.index((turn & 1) * 2 + WG)
    other = amax_s.index((turn & 1) * 2 + 1 - WG)
    amax0 = gl.maximum(column_amax(act00), column_amax(act10))
    mine.slice(0, N).store(amax0)
    if TWO:
        act01 = activated(
            acc01, near, token_scale, row_weight, row0, N, rows, clamp, alpha, beta,
            N, True, ACTIVATION, HAS_CLAMP,
        )  # fmt: skip
        act11 = activated(
            acc11, far, token_scale, row_weight, row0, N, rows, clamp, alpha, beta,
            N, True, ACTIVATION, HAS_CLAMP,
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
def _consume_gate_up(
    WG: gl.constexpr, tiles, tile_count, code_s, span_s, x_s, full, empty, amax_s, exchanged,
    row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
    BLOCKS: gl.constexpr, I: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
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
                code_s, span_s, x_s, full, empty, amax_s, exchanged,
                row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                I, STEPS, STAGES, True, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        else:
            it = _gate_up_item(
                WG, it, turn, expert, row0, rows, item % BLOCKS,
                code_s, span_s, x_s, full, empty, amax_s, exchanged,
                row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                I, STEPS, STAGES, False, ACTIVATION, HAS_CLAMP,
            )  # fmt: skip
        turn += 1  # noqa: SIM113 (Gluon has no enumerate)


@gluon.jit
def _stage_buffers(x, codes, spans, STAGES: gl.constexpr):
    code_s = gl.allocate_shared_memory(gl.uint8, [STAGES * 4, 64, 128], codes.layout)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 4, N, 128], x.layout)
    span_s = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 16, 32], spans.layout)
    return code_s, span_s, x_s


@gluon.jit(do_not_specialize=["capacity"])
def e2m1_many_gate_up_kernel(
    x, codes, spans, tiles, tile_count, row_scale, token_scale, row_weight, out, out_scale,
    capacity, clamp, alpha, beta,
    H: gl.constexpr, I: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GEMM 1: `out` E4M3 [capacity, I] in `k_order`, `out_scale` fp32 [I/128, capacity], rows in permuted order."""
    BLOCKS: gl.constexpr = I // 128
    STEPS: gl.constexpr = H // 256
    code_s, span_s, x_s = _stage_buffers(x, codes, spans, STAGES)
    amax_s = gl.allocate_shared_memory(gl.float32, [4, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    exchanged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(exchanged, count=2)
    full, empty = stage_barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume_gate_up,
                (0, tiles, tile_count, code_s, span_s, x_s, full, empty, amax_s, exchanged,
                 row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, ACTIVATION, HAS_CLAMP),
            ),
            (
                _consume_gate_up,
                (1, tiles, tile_count, code_s, span_s, x_s, full, empty, amax_s, exchanged,
                 row_scale, token_scale, row_weight, out, out_scale, capacity, clamp, alpha, beta,
                 BLOCKS, I, STEPS, STAGES, ACTIVATION, HAS_CLAMP),
            ),
            (
                _fetch,
                (x, codes, spans, tiles, tile_count, code_s, span_s, x_s, full, empty,
                 BLOCKS, STEPS, STAGES),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
