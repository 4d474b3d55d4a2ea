"""The K loops of the expert GEMMs. Each returns an fp32 accumulator [BLOCK_M, BLOCK_N] of A · Bᵀ.

Common to all: A rows are given by index (`a_rows`, int64), so that GEMM 1 gathers tokens and GEMM 2 reads a
contiguous range with the same code; B is one expert's matrix, K contiguous, and the tile's rows of it are
`b_origin + b_rows`, which need not be consecutive (`kernels.layouts.gate_up.row_in_memory`). Its scales are in tile
order, from row `b_first` of `n_rows` on. Rows beyond the live ones are masked, never read: scratch may hold NaN. A K
tail is masked with zeros in the elements *and* in the activation scales, since a poisoned scale byte times zero would
still be NaN.
"""

import triton
import triton.language as tl

from megamoe.kernels.layouts.scale_atoms import load_scale_atoms
from megamoe.kernels.numerics import e2m1_to_e4m3, e2m1_to_f32


@triton.jit
def _scale_operand(scale, SCALE_FORMAT: tl.constexpr):
    """Scale bytes as `tl.dot_scaled` wants them: uint8 means UE8M0, a float8 type means UE4M3."""
    if SCALE_FORMAT == "ue4m3":
        return scale.to(tl.float8e4nv, bitcast=True)
    else:  # not a plain return: both would be compiled, and their types differ
        return scale


@triton.jit
def _widen_columns(packed, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Packed E2M1 [BLOCK_K // 2, BLOCK_N] → the same numbers as E4M3 [BLOCK_K, BLOCK_N]."""
    pairs = tl.join(e2m1_to_e4m3(packed & 0xF), e2m1_to_e4m3(packed >> 4))
    return tl.permute(pairs, 0, 2, 1).reshape(BLOCK_K, BLOCK_N)


@triton.jit
def scaled_loop(
    a, a_rows, a_live, a_sf, a_sf_stride: tl.constexpr,
    b, b_origin, b_rows, b_first, n_rows: tl.constexpr, b_sf,
    K: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SCALE_FORMAT: tl.constexpr, GROUP: tl.constexpr,
    WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Block-scaled MMA: native on SM100 and SM120, NumPy in the interpreter.

    WIDEN turns E2M1 weights into E4M3 in registers: SM120's MMA multiplies E4M3 only by E4M3.
    """
    WIDEN_B: tl.constexpr = WIDEN and B_FORMAT == "e2m1"
    MMA_FORMAT: tl.constexpr = "e4m3" if WIDEN_B else B_FORMAT
    A_PACK: tl.constexpr = 2 if A_FORMAT == "e2m1" else 1
    B_PACK: tl.constexpr = 2 if B_FORMAT == "e2m1" else 1
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    a_k = tl.arange(0, BLOCK_K // A_PACK)
    b_k = tl.arange(0, BLOCK_K // B_PACK)
    sf_k = tl.arange(0, BLOCK_K // GROUP)
    a_ptr = a + a_rows[:, None] * (K // A_PACK) + a_k[None, :]
    a_sf_ptr = a_sf + a_rows[:, None] * a_sf_stride + sf_k[None, :]
    b += b_origin * (K // B_PACK)
    b_offset = b_rows[None, :] * (K // B_PACK) + b_k[:, None]
    b_live = (b_first + tl.arange(0, BLOCK_N) < n_rows)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        if EVEN_K:
            a_tile = tl.load(a_ptr, mask=a_live[:, None], other=0.0)
            a_scale = tl.load(a_sf_ptr, mask=a_live[:, None], other=0)
            b_tile = tl.load(b + b_offset, mask=b_live, other=0.0)
        else:
            a_tile = tl.load(a_ptr, mask=a_live[:, None] & (k0 // A_PACK + a_k < K // A_PACK)[None, :], other=0.0)
            a_scale = tl.load(a_sf_ptr, mask=a_live[:, None] & (k0 // GROUP + sf_k < K // GROUP)[None, :], other=0)
            b_tile = tl.load(b + b_offset, mask=b_live & (k0 // B_PACK + b_k < K // B_PACK)[:, None], other=0.0)
        if WIDEN_B:
            b_tile = _widen_columns(b_tile, BLOCK_K, BLOCK_N)
        b_scale = load_scale_atoms(b_sf, b_first, k0 // GROUP, n_rows, K // GROUP, BLOCK_N, BLOCK_K // GROUP)
        acc = tl.dot_scaled(
            a_tile, _scale_operand(a_scale, SCALE_FORMAT), A_FORMAT,
            b_tile, _scale_operand(b_scale, SCALE_FORMAT), MMA_FORMAT, acc,
        )  # fmt: skip
        a_ptr += BLOCK_K // A_PACK
        a_sf_ptr += BLOCK_K // GROUP
        b += BLOCK_K // B_PACK
    return acc


@triton.jit
def _pairs(ptr, FORMAT: tl.constexpr):
    """Pointer to pairs of neighbouring columns: a byte of two E2M1 codes, 16 bits of two E4M3 numbers, 32 of BF16."""
    if FORMAT == "e4m3":
        return ptr.to(tl.pointer_type(tl.uint16))
    elif FORMAT == "bf16":
        return ptr.to(tl.pointer_type(tl.uint32))
    else:
        return ptr


@triton.jit
def _decode(pairs, ODD: tl.constexpr, FORMAT: tl.constexpr):
    """The even or the odd column of every pair, as fp32 (BF16 stays BF16)."""
    if FORMAT == "e4m3":
        byte = pairs >> 8 if ODD else pairs & 0xFF
        return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif FORMAT == "bf16":
        half = pairs >> 16 if ODD else pairs & 0xFFFF
        return half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return e2m1_to_f32(pairs >> 4 if ODD else pairs & 0xF)


@triton.jit
def _scaled_bf16(values, scale, ROWS: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr):
    """fp32 [ROWS, PAIRS] times the scales [ROWS, GROUPS] of its groups, as BF16.

    Exact between 2^-133 and 2^128: E2M1 has two significant bits, E4M3 and UE4M3 four, UE8M0 one, so that no product
    here needs more than BF16's eight. Beyond, where only scales at the ends of UE8M0's range lead, it rounds.
    """
    scaled = values.reshape(ROWS, GROUPS, PAIRS // GROUPS) * scale[:, :, None]
    return scaled.reshape(ROWS, PAIRS).to(tl.bfloat16)


@triton.jit
def _decode_scale(scale, SCALE_FORMAT: tl.constexpr):
    """Scale bytes → fp32: UE8M0's byte is fp32's exponent field, but for 0, 2^-127; 255, NaN, reads as Inf."""
    if SCALE_FORMAT == "ue4m3":
        return scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        byte = scale.to(tl.int32)
        return tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def decoded_loop(
    a, a_rows, a_live, a_sf, a_sf_stride: tl.constexpr,
    b, b_origin, b_rows, b_first, n_rows: tl.constexpr, b_sf,
    K: tl.constexpr, A_FORMAT: tl.constexpr, A_SCALE: tl.constexpr, A_GROUP: tl.constexpr,
    B_FORMAT: tl.constexpr, B_SCALE: tl.constexpr, B_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Operands decoded to BF16 in registers: the exact route where no MMA takes both as they are.

    Block scales (A_SCALE `ue8m0`, `ue4m3`) are multiplied into the operands. fp32 scales of A stay out of the sums: one
    per A_GROUP columns promotes that group's sum, of one K block or of several, acc = fma(sa, p, acc); one per row
    (A_GROUP 0) multiplies the whole sum at the end. `none`: A is BF16 as it stands.

    Even and odd columns go through two MMAs: the contraction does not care about the order of K, no nibble has to move
    to another thread, and only half a tile is decoded at a time, which is what keeps it out of local memory.
    """
    PAIRS: tl.constexpr = BLOCK_K // 2
    GROUPS: tl.constexpr = BLOCK_K // B_GROUP
    BLOCK_SCALED: tl.constexpr = A_SCALE == "ue8m0" or A_SCALE == "ue4m3"
    PROMOTE: tl.constexpr = A_SCALE == "fp32" and A_GROUP > 0
    STEPS: tl.constexpr = A_GROUP // BLOCK_K if PROMOTE else 1
    EVEN_K: tl.constexpr = K % (STEPS * BLOCK_K) == 0
    a = _pairs(a, A_FORMAT)
    b = _pairs(b, B_FORMAT)
    k = tl.arange(0, PAIRS)
    sf_k = tl.arange(0, GROUPS)
    a_ptr = a + a_rows[:, None] * (K // 2) + k[None, :]
    a_sf_ptr = a_sf + a_rows * a_sf_stride
    b += b_origin * (K // 2)
    b_offset = b_rows[:, None] * (K // 2) + k[None, :]
    b_live = (b_first + tl.arange(0, BLOCK_N) < n_rows)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(0, K, STEPS * BLOCK_K):
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) if PROMOTE else acc
        for step in tl.static_range(STEPS):
            k0 = group + step * BLOCK_K
            a_mask = a_live[:, None]
            b_mask = b_live
            sf_mask = a_live[:, None]
            if not EVEN_K:
                a_mask = a_mask & (k0 // 2 + k < K // 2)[None, :]
                b_mask = b_mask & (k0 // 2 + k < K // 2)[None, :]
                sf_mask = sf_mask & (k0 // B_GROUP + sf_k < K // B_GROUP)[None, :]
            a_tile = tl.load(a_ptr, mask=a_mask, other=0)
            b_tile = tl.load(b + b_offset, mask=b_mask, other=0)
            b_scale = load_scale_atoms(b_sf, b_first, k0 // B_GROUP, n_rows, K // B_GROUP, BLOCK_N, GROUPS)
            b_scale = _decode_scale(b_scale, B_SCALE)
            if BLOCK_SCALED:
                a_scale = tl.load(a_sf_ptr[:, None] + k0 // A_GROUP + sf_k[None, :], mask=sf_mask, other=0)
                a_scale = _decode_scale(a_scale, A_SCALE)
                a_even = _scaled_bf16(_decode(a_tile, False, A_FORMAT), a_scale, BLOCK_M, PAIRS, GROUPS)
            else:
                a_even = _decode(a_tile, False, A_FORMAT).to(tl.bfloat16)
            b_even = _scaled_bf16(_decode(b_tile, False, B_FORMAT), b_scale, BLOCK_N, PAIRS, GROUPS)
            total = tl.dot(a_even, tl.trans(b_even), total)
            if BLOCK_SCALED:
                a_odd = _scaled_bf16(_decode(a_tile, True, A_FORMAT), a_scale, BLOCK_M, PAIRS, GROUPS)
            else:
                a_odd = _decode(a_tile, True, A_FORMAT).to(tl.bfloat16)
            b_odd = _scaled_bf16(_decode(b_tile, True, B_FORMAT), b_scale, BLOCK_N, PAIRS, GROUPS)
            total = tl.dot(a_odd, tl.trans(b_odd), total)
            a_ptr += PAIRS
            b += PAIRS
        if PROMOTE:
            promotion = tl.load(a_sf_ptr + group // A_GROUP, mask=a_live, other=0.0)
            acc = tl.fma(tl.broadcast_to(promotion[:, None], (BLOCK_M, BLOCK_N)), total, acc)
        else:
            acc = total
    if A_SCALE == "fp32" and A_GROUP == 0:
        acc = acc * tl.load(a_sf_ptr, mask=a_live, other=0.0)[:, None]
    return acc


@triton.jit
def block_loop(
    a, a_rows, a_live, a_sf, a_sf_stride: tl.constexpr,
    b, b_origin, b_rows, b_first, n_rows: tl.constexpr, b_sf, b_sf_rows,
    K: tl.constexpr, A_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """E4M3 × E4M3 with fp32 scales: the sum of each activation scale group is promoted as acc = fma(sa·sw, p, acc).

    `b_sf` is the expert's fp32 [ceil(rows/128), ceil(K/128)]; `b_sf_rows` names the scale row of each tile column. A
    group is one K block or several; A_GROUP 0: one scale per row, promoted every 128 columns.
    """
    PROMOTED: tl.constexpr = A_GROUP if A_GROUP > 0 else 128
    STEPS: tl.constexpr = PROMOTED // BLOCK_K
    EVEN_K: tl.constexpr = K % PROMOTED == 0
    SF_COLS: tl.constexpr = (K + 127) // 128
    k = tl.arange(0, BLOCK_K)
    a_ptr = a + a_rows[:, None] * K + k[None, :]
    b_ptr = b + b_origin * K + b_rows[None, :] * K + k[:, None]
    a_sf_ptr = a_sf + a_rows * a_sf_stride
    b_sf_ptr = b_sf + b_sf_rows * SF_COLS
    b_live = b_first + tl.arange(0, BLOCK_N) < n_rows
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(0, K, PROMOTED):
        partial = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.static_range(STEPS):
            k0 = group + step * BLOCK_K
            a_mask = a_live[:, None]
            b_mask = b_live[None, :]
            if not EVEN_K:
                a_mask = a_mask & (k0 + k < K)[None, :]
                b_mask = b_mask & (k0 + k < K)[:, None]
            a_tile = tl.load(a_ptr, mask=a_mask, other=0.0)
            b_tile = tl.load(b_ptr, mask=b_mask, other=0.0)
            partial = tl.dot(a_tile, b_tile, partial, out_dtype=tl.float32)
            a_ptr += BLOCK_K
            b_ptr += BLOCK_K
        a_scale = tl.load(a_sf_ptr + (group // PROMOTED if A_GROUP > 0 else 0), mask=a_live, other=0.0)
        b_scale = tl.load(b_sf_ptr + group // 128, mask=b_live, other=0.0)
        acc = tl.fma(a_scale[:, None] * b_scale[None, :], partial, acc)
    return acc


@triton.jit
def bf16_loop(
    a, a_rows, a_live,
    b, b_origin, b_rows, b_first, n_rows: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BF16 × BF16, unscaled."""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    k = tl.arange(0, BLOCK_K)
    a_ptr = a + a_rows[:, None] * K + k[None, :]
    b += b_origin * K
    b_offset = b_rows[None, :] * K + k[:, None]
    b_live = (b_first + tl.arange(0, BLOCK_N) < n_rows)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        a_mask = a_live[:, None]
        b_mask = b_live
        if not EVEN_K:
            a_mask = a_mask & (k0 + k < K)[None, :]
            b_mask = b_mask & (k0 + k < K)[:, None]
        a_tile = tl.load(a_ptr, mask=a_mask, other=0.0)
        b_tile = tl.load(b + b_offset, mask=b_mask, other=0.0)
        acc = tl.dot(a_tile, b_tile, acc)
        a_ptr += BLOCK_K
        b += BLOCK_K
    return acc


@triton.jit
def expert_tile(
    a, a_rows, a_live, a_sf, a_sf_stride: tl.constexpr,
    b, b_origin, b_rows, b_first, n_rows: tl.constexpr, b_sf, b_sf_rows,
    K: tl.constexpr, MMA: tl.constexpr,
    A_FORMAT: tl.constexpr, A_SCALE: tl.constexpr, A_GROUP: tl.constexpr,
    B_FORMAT: tl.constexpr, B_SCALE: tl.constexpr, B_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One accumulator tile. The weight's scales decide the K loop, and for block scales MMA
    (`kernels.config.GemmConfig.mma`)."""
    if B_SCALE == "fp32":
        acc = block_loop(
            a, a_rows, a_live, a_sf, a_sf_stride, b, b_origin, b_rows, b_first, n_rows, b_sf, b_sf_rows,
            K, A_GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif B_SCALE == "none":
        acc = bf16_loop(
            a, a_rows, a_live, b, b_origin, b_rows, b_first, n_rows, K, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
    elif MMA == "decoded":
        acc = decoded_loop(
            a, a_rows, a_live, a_sf, a_sf_stride, b, b_origin, b_rows, b_first, n_rows, b_sf,
            K, A_FORMAT, A_SCALE, A_GROUP, B_FORMAT, B_SCALE, B_GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        acc = scaled_loop(
            a, a_rows, a_live, a_sf, a_sf_stride, b, b_origin, b_rows, b_first, n_rows, b_sf,
            K, A_FORMAT, B_FORMAT, A_SCALE, A_GROUP, MMA == "widened", BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return acc


@triton.jit
def slot_tile(
    expert, num_experts,
    a, a_rows, a_live, a_sf, a_sf_stride: tl.constexpr,
    b, b_sf, shared, shared_sf,
    b_origin, b_rows, b_first, n_rows: tl.constexpr, b_sf_rows,
    STRIDE: tl.constexpr, SF_STRIDE: tl.constexpr, SHARED_STRIDE: tl.constexpr, SHARED_SF_STRIDE: tl.constexpr,
    SHARED_SLOTS: tl.constexpr, K: tl.constexpr, MMA: tl.constexpr,
    A_FORMAT: tl.constexpr, A_SCALE: tl.constexpr, A_GROUP: tl.constexpr,
    B_FORMAT: tl.constexpr, B_SCALE: tl.constexpr, SHARED_FORMAT: tl.constexpr, SHARED_SCALE: tl.constexpr,
    B_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`expert_tile` for the expert a slot names: a routed one or, from `num_experts` on, one of the SHARED_SLOTS.

    Shared experts of the routed format only swap the pointers; of another, they are a second K loop.
    """
    matrix = b + expert * STRIDE
    scales = b_sf + expert * SF_STRIDE
    if SHARED_SLOTS == 0:
        acc = expert_tile(
            a, a_rows, a_live, a_sf, a_sf_stride, matrix, b_origin, b_rows, b_first, n_rows, scales, b_sf_rows,
            K, MMA, A_FORMAT, A_SCALE, A_GROUP, B_FORMAT, B_SCALE, B_GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        is_shared = expert >= num_experts
        shared_matrix = shared + (expert - num_experts) * SHARED_STRIDE
        shared_scales = shared_sf + (expert - num_experts) * SHARED_SF_STRIDE
        if SHARED_FORMAT == B_FORMAT:
            acc = expert_tile(
                a, a_rows, a_live, a_sf, a_sf_stride, tl.where(is_shared, shared_matrix, matrix),
                b_origin, b_rows, b_first, n_rows, tl.where(is_shared, shared_scales, scales), b_sf_rows,
                K, MMA, A_FORMAT, A_SCALE, A_GROUP, B_FORMAT, B_SCALE, B_GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif is_shared:
            acc = expert_tile(
                a, a_rows, a_live, a_sf, a_sf_stride,
                shared_matrix, b_origin, b_rows, b_first, n_rows, shared_scales, b_sf_rows,
                K, MMA, A_FORMAT, A_SCALE, A_GROUP, SHARED_FORMAT, SHARED_SCALE, B_GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            acc = expert_tile(
                a, a_rows, a_live, a_sf, a_sf_stride, matrix, b_origin, b_rows, b_first, n_rows, scales, b_sf_rows,
                K, MMA, A_FORMAT, A_SCALE, A_GROUP, B_FORMAT, B_SCALE, B_GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    return acc
