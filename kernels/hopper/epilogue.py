"""What becomes of a warpgroup's accumulators: gate/up to quantized intermediate, or rows of the down projection.

A tile's accumulators are transposed: weight rows × tokens. Rows g and g + 8 of 16 belong to one thread, and are gate
and up in GEMM 1, output columns 2g and 2g + 1 in GEMM 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def row_factors(row_scale, expert, n0, N: gl.constexpr, WIDTH: gl.constexpr):
    """Factors of 64 weight rows of WIDTH, from n0 on, as accumulators of N tokens want them."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32]))
    return gl.load(row_scale + expert.to(gl.int64) * WIDTH + n0 + gl.arange(0, 64, LAYOUT))


@gluon.jit
def _scaled(acc, row_scale, token_scale, row0, m0, rows, BM: gl.constexpr, PER_TOKEN: gl.constexpr):
    """Accumulators [64, BM] times the weight rows' factors and, where they have not met it yet, the tokens' scales."""
    LAYOUT: gl.constexpr = acc.type.layout
    acc = acc * gl.convert_layout(row_scale, gl.SliceLayout(1, LAYOUT)).expand_dims(1)
    if PER_TOKEN:
        m = m0 + gl.arange(0, BM, gl.SliceLayout(0, LAYOUT))
        acc = acc * gl.load(token_scale + row0 + m, mask=m < rows, other=0.0).expand_dims(0)
    return acc


@gluon.jit
def gated(gate, up, clamp, alpha, beta, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr):
    """The activation of gate and up, elementwise in fp32: SM90's rules."""
    if HAS_CLAMP:
        lowest = clamp * -1.0
        gate = gl.where(gate <= clamp, gate, clamp)
        up = gl.where(up < lowest, lowest, up)
        up = gl.where(up <= clamp, up, clamp)
    if ACTIVATION == "swigluoai":
        sigmoid = 1.0 / (1.0 + gl.exp(-(alpha * gate)))
        up = up + beta
    else:
        sigmoid = 1.0 / (1.0 + gl.exp(-gate))
    return gate * sigmoid * up


@gluon.jit
def activated_sums(
    acc, row_scale, clamp, alpha, beta, BM: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr
):  # fmt: skip
    """fp32 [32, BM]: the activation of 32 gate and 32 up rows, which have no scales but the weights'."""
    acc = _scaled(acc, row_scale, row_scale, 0, 0, 0, BM, False)
    gate, up = acc.reshape([4, 2, 8, BM]).permute([0, 2, 3, 1]).split()
    return gated(gate, up, clamp, alpha, beta, ACTIVATION, HAS_CLAMP).reshape([32, BM])


@gluon.jit
def activated_rows(
    acc, row_weight, row0, m0, rows, clamp, alpha, beta,
    BM: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    """fp32 [32, BM]: the activation of scaled sums, 32 gate and 32 up rows, times the top-k weights."""
    gate, up = acc.reshape([4, 2, 8, BM]).permute([0, 2, 3, 1]).split()
    act = gated(gate, up, clamp, alpha, beta, ACTIVATION, HAS_CLAMP).reshape([32, BM])
    m = m0 + gl.arange(0, BM, gl.SliceLayout(0, act.type.layout))
    return act * gl.load(row_weight + row0 + m, mask=m < rows, other=0.0).expand_dims(0)


@gluon.jit
def activated(
    acc, row_scale, token_scale, row_weight, row0, m0, rows, clamp, alpha, beta,
    BM: gl.constexpr, PER_TOKEN: gl.constexpr, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr,
):  # fmt: skip
    """fp32 [32, BM]: the activation of 32 gate and 32 up rows times the top-k weights; SM90's rules, fp32
    throughout."""
    acc = _scaled(acc, row_scale, token_scale, row0, m0, rows, BM, PER_TOKEN)
    return activated_rows(acc, row_weight, row0, m0, rows, clamp, alpha, beta, BM, ACTIVATION, HAS_CLAMP)


@gluon.jit
def column_amax(act):
    """Largest magnitude per token of [32, BM]."""
    return gl.max(gl.abs(act), axis=0)


@gluon.jit
def block_scale(amax):
    """A group's fp32 scale: floor 1e-10, times fl(1/448)."""
    return gl.maximum(amax, 1e-10) * (1.0 / 448.0)


@gluon.jit
def quantized(act, scale, AXIS: gl.constexpr):
    """E4M3 bytes of `act` under the scales of its columns (AXIS 0) or rows (1), by their IEEE reciprocals."""
    inverse = gl.div_rn(gl.full(scale.shape, 1.0, gl.float32, scale.type.layout), scale)
    return (act * inverse.expand_dims(AXIS)).to(gl.float8e4nv).to(gl.uint8, bitcast=True)


# Four neighbouring bytes of a row per thread: one store instead of four (4 % of GEMM 1 at 1024 tokens).
_BYTES_OUT = gl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1]))


@gluon.jit
def store_quantized(
    act, amax, out, out_scale, row0, m0, rows, block, capacity,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, BM: gl.constexpr, WRITE_SCALE: gl.constexpr,
):  # fmt: skip
    """E4M3 with one fp32 scale per 128 columns.

    `act` [32, BM] are the columns of scale group GROUP of `block`; they go where `weights.k_order` puts them. `out`
    [capacity, WIDTH], `out_scale` [WIDTH/128, capacity].
    """
    scale = block_scale(amax)
    values = quantized(act, scale, 0)
    values = gl.convert_layout(values, _BYTES_OUT)
    column = gl.arange(0, 32, gl.SliceLayout(1, _BYTES_OUT))
    position = block * 128 + column // 8 * 32 + column // 4 % 2 * 16 + GROUP * 4 + column % 4
    m = m0 + gl.arange(0, BM, gl.SliceLayout(0, _BYTES_OUT))
    offset = (row0 + m).to(gl.int64).expand_dims(0) * WIDTH + position.expand_dims(1)
    gl.store(out + offset, values, mask=(m < rows).expand_dims(0))
    if WRITE_SCALE:
        m = m0 + gl.arange(0, BM, scale.type.layout)
        gl.store(out_scale + block * capacity + row0 + m, scale, mask=m < rows)


@gluon.jit
def store_bf16(act, out, row0, m0, rows, block, group, WIDTH: gl.constexpr, BM: gl.constexpr):
    """BF16 in pairs: `act` [32, BM] are the columns of scale group `group` of 128-column block `block`; they go where
    `weights.bf16_k_order` puts them. `out` int32 [capacity, WIDTH/2]."""
    values = gl.convert_layout(act, _BYTES_OUT)
    even, odd = values.reshape([16, 2, BM]).permute([0, 2, 1]).split()
    pairs = _bf16_pairs(even, odd)
    LAYOUT: gl.constexpr = pairs.type.layout
    pair = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    position = block * 64 + pair // 2 * 8 + pair % 2 * 4 + group
    m = m0 + gl.arange(0, BM, gl.SliceLayout(0, LAYOUT))
    offset = (row0 + m).to(gl.int64).expand_dims(0) * (WIDTH // 2) + position.expand_dims(1)
    gl.store(out + offset, pairs, mask=(m < rows).expand_dims(0))


@gluon.jit
def _bf16_pairs(low, high):
    """int32: two fp32 each as BF16, rounded to nearest even."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def store_rows(acc, row_scale, row_slots, out, row0, m0, rows, n0, WIDTH: gl.constexpr, BM: gl.constexpr):
    """BF16 rows of the slots, two neighbouring columns at a time; `out` int32 [slots, WIDTH/2]."""
    acc = _scaled(acc, row_scale, row_scale, row0, m0, rows, BM, False)
    even, odd = acc.reshape([4, 2, 8, BM]).permute([0, 2, 3, 1]).split()
    pairs = _bf16_pairs(even, odd)
    LAYOUT: gl.constexpr = pairs.type.layout
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))).expand_dims(1).expand_dims(2)
    lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))).expand_dims(0).expand_dims(2)
    m = m0 + gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    slot = gl.load(row_slots + row0 + m, mask=m < rows, other=0).to(gl.int64)
    offset = slot.expand_dims(0).expand_dims(1) * (WIDTH // 2) + n0 // 2 + warp * 8 + lane
    gl.store(out + offset, pairs, mask=(m < rows).expand_dims(0).expand_dims(1))


@gluon.jit
def store_group(
    act, amax, out, out_scale, row0, rows, block, capacity, COLUMN: gl.constexpr,
    WIDTH: gl.constexpr, BM: gl.constexpr, WRITE_SCALE: gl.constexpr,
):  # fmt: skip
    """E4M3 with one fp32 scale per 64 columns, in the natural order: `act` [32, BM] are columns COLUMN … of group
    `block`. `out` [capacity, WIDTH], `out_scale` [WIDTH/64, capacity]."""
    scale = block_scale(amax)
    values = gl.convert_layout(quantized(act, scale, 0), _BYTES_OUT)
    column = block * 64 + COLUMN + gl.arange(0, 32, gl.SliceLayout(1, _BYTES_OUT))
    m = gl.arange(0, BM, gl.SliceLayout(0, _BYTES_OUT))
    offset = (row0 + m).to(gl.int64).expand_dims(0) * WIDTH + column.expand_dims(1)
    gl.store(out + offset, values, mask=(m < rows).expand_dims(0))
    if WRITE_SCALE:
        m = gl.arange(0, BM, scale.type.layout)
        gl.store(out_scale + block * capacity + row0 + m, scale, mask=m < rows)


# Eight neighbouring columns of a token per thread; a warp's 16 weight rows stay with it.
_COLUMNS_OUT = gl.constexpr(gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1]))


@gluon.jit
def store_columns(acc, row_slots, out, row0, rows, n0, WIDTH: gl.constexpr, BM: gl.constexpr):
    """Scaled sums [64, BM] as columns n0 … of the slots' BF16 rows; `out` [slots, WIDTH]."""
    values = gl.convert_layout(acc.to(gl.bfloat16), _COLUMNS_OUT)
    column = n0 + gl.arange(0, 64, gl.SliceLayout(1, _COLUMNS_OUT))
    m = gl.arange(0, BM, gl.SliceLayout(0, _COLUMNS_OUT))
    slot = gl.load(row_slots + row0 + m, mask=m < rows, other=0).to(gl.int64)
    gl.store(out + slot.expand_dims(0) * WIDTH + column.expand_dims(1), values, mask=(m < rows).expand_dims(0))


@gluon.jit
def activated_columns(
    acc, row_weight, row0, rows, clamp, alpha, beta, ACTIVATION: gl.constexpr, HAS_CLAMP: gl.constexpr
):  # fmt: skip
    """fp32 [64, N/2]: the activation of scaled sums, 64 tokens × N gate and up columns interleaved by eights, times the
    top-k weights."""
    PAIRS: gl.constexpr = acc.shape[1] // 16
    gate, up = acc.reshape([64, PAIRS, 2, 8]).permute([0, 1, 3, 2]).split()
    act = gated(gate, up, clamp, alpha, beta, ACTIVATION, HAS_CLAMP).reshape([64, PAIRS * 8])
    m = gl.arange(0, 64, gl.SliceLayout(1, act.type.layout))
    return act * gl.load(row_weight + row0 + m, mask=m < rows, other=0.0).expand_dims(1)


@gluon.jit
def row_amax(act):
    """Largest magnitude per token of [64, N]."""
    return gl.max(gl.abs(act), axis=1)


@gluon.jit
def store_group_rows(
    act, amax, out, out_scale, row0, rows, group, capacity, COLUMN: gl.constexpr,
    WIDTH: gl.constexpr, WRITE_SCALE: gl.constexpr,
):  # fmt: skip
    """E4M3 with one fp32 scale per 64 columns: `act` [64, 64 or 32] are 64 tokens' columns COLUMN … of a scale group.
    `out` [capacity, WIDTH], `out_scale` [WIDTH/64, capacity]."""
    # 16 bytes of a row per thread, and a warp's 16 tokens stay with it.
    COLUMNS: gl.constexpr = act.shape[1]
    LANES: gl.constexpr = COLUMNS // 16
    OUT: gl.constexpr = gl.BlockedLayout([LANES // 2, 16], [32 // LANES, LANES], [4, 1], [1, 0])
    scale = block_scale(amax)
    values = gl.convert_layout(quantized(act, scale, 1), OUT)
    column = group * 64 + COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    m = gl.arange(0, 64, gl.SliceLayout(1, OUT))
    offset = (row0 + m).to(gl.int64).expand_dims(1) * WIDTH + column.expand_dims(0)
    gl.store(out + offset, values, mask=(m < rows).expand_dims(1))
    if WRITE_SCALE:
        m = gl.arange(0, 64, scale.type.layout)
        gl.store(out_scale + group * capacity + row0 + m, scale, mask=m < rows)


# 16 bytes of a row per thread, 128 neighbouring ones per eight threads.
_TOKEN_ROWS = gl.constexpr(gl.BlockedLayout([4, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def store_token_rows(acc, row_slots, out, row0, rows, n0, WIDTH: gl.constexpr):
    """Scaled sums [64, 128] of 64 tokens as columns n0 … of their slots' BF16 rows; `out` [slots, WIDTH]."""
    left, right = acc.to(gl.bfloat16).reshape([64, 2, 64]).permute([0, 2, 1]).split()
    store_64_columns(left, row_slots, out, row0, rows, n0, WIDTH)
    store_64_columns(right, row_slots, out, row0, rows, n0 + 64, WIDTH)


@gluon.jit
def store_64_columns(values, row_slots, out, row0, rows, n0, WIDTH: gl.constexpr):
    """BF16 [64, 64] of 64 tokens as columns n0 … of their slots' rows; `out` [slots, WIDTH]."""
    values = gl.convert_layout(values, _TOKEN_ROWS)
    column = n0 + gl.arange(0, 64, gl.SliceLayout(0, _TOKEN_ROWS))
    m = gl.arange(0, 64, gl.SliceLayout(1, _TOKEN_ROWS))
    slot = gl.load(row_slots + row0 + m, mask=m < rows, other=0).to(gl.int64)
    gl.store(out + slot.expand_dims(1) * WIDTH + column.expand_dims(0), values, mask=(m < rows).expand_dims(1))
