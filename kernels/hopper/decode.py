"""E2M1 codes to E4M3 or BF16 operand registers, and the layouts that keep every code in its thread."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Eight codes of one word: four magnitudes at a time pick their bytes from an eight-entry table, the signs are or'ed in.
# Two table registers hold the eight E4M3 magnitudes of one scale group, its exponent folded in: zero stays zero.
_LOOK_UP = gl.constexpr("""{ .reg .b32 s, t, u;
and.b32 s, $2, 0x77777777;
prmt.b32 t, $3, $7, s;
lop3.b32 $0, $2, 0x80808080, t, 0xEA;
shr.u32 s, s, 16;
prmt.b32 u, $3, $7, s;
shl.b32 t, $2, 4;
lop3.b32 $1, t, 0x80808080, u, 0xEA; }""")
_LOOK_UP_REGISTERS = gl.constexpr("=r,=r,r,r,r,r,r,r,r,r,r")

# As BF16: the magnitudes' high and low bytes come from two tables and are put together; one product per pair of codes
# then gives them their group's power of two, exactly.
_LOOK_UP_BF16 = gl.constexpr("""{ .reg .b32 s, h, l;
and.b32 s, $4, 0x77777777;
prmt.b32 h, $9, 0x40404040, s;
prmt.b32 l, $13, 0xC0804000, s;
lop3.b32 h, $4, 0x80808080, h, 0xEA;
prmt.b32 $0, l, h, 0x5140;
prmt.b32 $1, l, h, 0x7362;
shr.u32 s, s, 16;
prmt.b32 h, $9, 0x40404040, s;
prmt.b32 l, $13, 0xC0804000, s;
shl.b32 s, $4, 4;
lop3.b32 h, s, 0x80808080, h, 0xEA;
prmt.b32 $2, l, h, 0x5140;
prmt.b32 $3, l, h, 0x7362;
mul.bf16x2 $0, $0, $5;
mul.bf16x2 $1, $1, $5;
mul.bf16x2 $2, $2, $5;
mul.bf16x2 $3, $3, $5; }""")
_LOOK_UP_BF16_REGISTERS = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r")

# How one warpgroup reads its half of a tile, 4 KiB: 16 consecutive bytes per thread, twice.
_BYTES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
# The same bytes named by what they are: row (bits 3 | 5…4 | 2…0), scale group, k bit 5, (k bit 4, byte of the word).
_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [32, 0, 0, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[8, 0, 0, 0], [16, 0, 0, 0]],
        [],
        [64, 4, 2, 8],
    )
)
# One byte of exponent distances per (row, scale group), in the thread that decodes the group.
_SPANS = gl.constexpr(
    gl.DistributedLinearLayout([[4, 0]], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[1, 0], [2, 0]], [], [8, 32])
)


@gluon.jit
def load_spans(spans):
    """int32 [64, 4]: the distances of a warpgroup's rows and groups, two blocks of 128 columns in a byte."""
    values = spans.load(_SPANS).reshape([64, 4])
    return gl.convert_layout(values, gl.SliceLayout(2, gl.SliceLayout(3, _CODES))).to(gl.int32)


@gluon.jit
def _to_operand(codes):
    """[row, group, k5, (k4, i)] → [64 rows, 64 columns], columns in stored order: register renaming only."""
    parts = codes.reshape([2, 4, 8, 4, 2, 2, 4])  # row 3 | row 5…4 | row 2…0 | group | k5 | k4 | i
    return parts.permute([1, 0, 2, 4, 5, 3, 6]).reshape([64, 64])


@gluon.jit
def decode(codes, spans, ODD: gl.constexpr, OPERAND: gl.constexpr):
    """E4M3 [64, 128] in registers, an MMA's first operand: a block of 128 columns (the ODD one of the two) of 64
    rows."""
    words = gl.convert_layout(codes.load(_BYTES).reshape([64, 4, 2, 8]), _CODES)
    distance = spans >> 4 if ODD else spans & 0xF
    # Magnitudes 0, ½, 1, 1½ | 2, 3, 4, 6 as E4M3 bytes times 2^-5; a distance adds to the exponents, 8 per binade.
    low = (distance * 0x08080800 + 0x14100800).expand_dims(2).expand_dims(3)
    high = (distance * 0x08080808 + 0x24201C18).expand_dims(2).expand_dims(3)
    like = gl.full([64, 4, 2, 8], 0, gl.int32, _CODES)
    low, _ = gl.broadcast(low, like)
    high, _ = gl.broadcast(high, like)
    first, second = gl.inline_asm_elementwise(
        _LOOK_UP, _LOOK_UP_REGISTERS, [words, low, high], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    halves = gl.join(_to_operand(first), _to_operand(second))
    operand = halves.permute([0, 2, 1]).reshape([64, 128])
    return gl.convert_layout(operand, OPERAND).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _to_bf16_operand(codes):
    """[row, group, k5, (k4, i)] → [64 rows, 64 columns], columns in `weights.bf16_k_order`: register renaming only."""
    parts = codes.reshape([2, 4, 8, 4, 2, 2, 2, 2])  # row 3 | row 5…4 | row 2…0 | group | k5 | k4 | i1 | i0
    return parts.permute([1, 0, 2, 4, 5, 6, 3, 7]).reshape([64, 64])


@gluon.jit
def bf16_tables(zero):
    """The high and the low bytes of magnitudes 0 … 1½, plus `zero`, which must be 0 without the compiler's knowledge:
    from constants it would make a copy for every look-up, a seventh of the main loop."""
    return 0x3F3F3F00 + zero, zero - 0x3F800000


@gluon.jit
def decode_bf16(codes, spans, ODD: gl.constexpr, tables, OPERAND: gl.constexpr):
    """BF16 [64, 64] twice, in registers: the first operands of an MMA for the first and last 64 stored positions of a
    block of 128 columns (the ODD one of the two) of 64 rows."""
    words = gl.convert_layout(codes.load(_BYTES).reshape([64, 4, 2, 8]), _CODES)
    distance = spans >> 4 if ODD else spans & 0xF
    # 2^(distance - 5) as BF16, twice.
    factor = (distance * 0x00800080 + 0x3D003D00).expand_dims(2).expand_dims(3)
    factor, _ = gl.broadcast(factor, gl.full([64, 4, 2, 8], 0, gl.int32, _CODES))
    high, low = tables
    high = gl.full([64, 4, 2, 8], 0, gl.int32, _CODES) + high
    low = gl.full([64, 4, 2, 8], 0, gl.int32, _CODES) + low
    first, second = gl.inline_asm_elementwise(
        _LOOK_UP_BF16,
        _LOOK_UP_BF16_REGISTERS,
        [words, factor, high, low],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return (
        gl.convert_layout(_to_bf16_operand(first), OPERAND),
        gl.convert_layout(_to_bf16_operand(second), OPERAND),
    )
