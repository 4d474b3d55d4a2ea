"""The patched CPU interpreter against torch: conversions, `tl.dot` and `tl.dot_scaled` of narrow formats.

Tiny kernels, each run as one program. Where an exhaustive sweep meets a matrix product, one operand is a unit
matrix or one column wide, so that every product stands alone in the result and must be exact.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from megamoe import formats
from megamoe.oracle import interpreter

pytestmark = pytest.mark.skipif(
    not interpreter.is_active(), reason="kernels run on the GPU here, not in the interpreter"
)

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
ONE_E2M1 = 2  # code of 1.0
ONE_UE8M0 = 127
ONE_UE4M3 = 0x38
MINUS_ONE_BYTE = 0xFF  # poison of every output


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output no element of which may survive: all bits set, NaN in the float formats."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * size), MINUS_ONE_BYTE, dtype=torch.uint8).view(dtype)


def bits(x: torch.Tensor) -> np.ndarray:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[x.element_size()]
    return x.contiguous().view(torch.uint8).numpy().view(unsigned)


def same_bits(actual: torch.Tensor, expected: torch.Tensor, inputs: torch.Tensor) -> None:
    a, e = bits(actual), bits(expected)
    wrong = np.flatnonzero(a != e)
    if wrong.size:
        i = wrong[0]
        raise AssertionError(
            f"{wrong.size} of {a.size} differ; first at [{i}]: input {inputs[i].item()!r} "
            f"gave {actual[i].item()!r} (0x{a[i]:X}), expected {expected[i].item()!r} (0x{e[i]:X})"
        )


def same_values(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bitwise but for NaN, whose payload is nobody's contract, and for the sign of a zero sum."""
    np.testing.assert_array_equal(actual.numpy(), expected.float().numpy())


# ---- conversions -----------------------------------------------------------------------------------------


@triton.jit
def _convert_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, x.to(out_ptr.dtype.element_ty), mask=i < n)


def convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = poisoned(x.numel(), dtype=dtype)
    _convert_kernel[(1,)](x, out, x.numel(), triton.next_power_of_2(x.numel()))
    return out


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a format of 8 or 16 bits."""
    width = 8 * torch.empty(0, dtype=dtype).element_size()
    codes = np.arange(1 << width).astype(np.uint8 if width == 8 else np.uint16)
    return torch.from_numpy(codes.view(np.uint8)).view(dtype)


def fp32_around_bf16() -> torch.Tensor:
    """Every BF16 pattern with the low halves that decide rounding: all ties and both sides of each."""
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    low = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return torch.from_numpy((high | low).reshape(-1).view(np.float32))


def fp32_around(dtype: torch.dtype) -> torch.Tensor:
    """Finite values of an FP8 format and midpoints, each with its fp32 neighbours; ±0, ±Inf, NaNs."""
    grid = every_value(dtype).float()
    grid = grid[grid.isfinite()].unique().numpy()
    exact = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [464.0, 480.0, 61440.0, 65536.0]]).astype(np.float32)
    around = [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan], dtype=np.float32)
    return torch.from_numpy(np.concatenate([*around, special]))


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Torch's cast, but as the GPU's `cvt.rn.satfinite`: magnitudes beyond the largest number stop there."""
    x = x.float()
    code = x.to(dtype).view(torch.uint8)
    largest = torch.full_like(x, FP8_MAX[dtype]).copysign(x).to(dtype).view(torch.uint8)
    code = torch.where(x.abs() > FP8_MAX[dtype], largest, code)
    return torch.where(x.isnan(), 0x7F, code).view(dtype)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_widening_to_fp32_is_exact_for_every_value(source: torch.dtype) -> None:
    x = every_value(source)
    widened = convert(x, torch.float32)
    number = ~x.float().isnan()
    same_bits(widened[number], x.float()[number], x[number])
    assert widened[~number].isnan().all()


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_widening_fp8_is_exact_for_every_value(source: torch.dtype, target: torch.dtype) -> None:
    x = every_value(source)
    widened = convert(x, target)
    number = ~x.float().isnan()
    same_bits(widened[number], x.float().to(target)[number], x[number])
    assert widened[~number].isnan().all()


def test_bf16_survives_fp32() -> None:
    x = every_value(torch.bfloat16)
    back = convert(convert(x, torch.float32), torch.bfloat16)
    number = ~x.isnan()
    same_bits(back[number], x[number], x[number])
    assert set(bits(back[~number]).tolist()) == {0x7FFF}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # to Inf, as on the GPU
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_rounds_to_16_bits_as_torch(target: torch.dtype) -> None:
    x = fp32_around_bf16()
    if target == torch.float16:  # its ties lie at other bits
        near = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)[:, None]
        x = torch.from_numpy((near ^ np.array([0, 1, 0xFFF, 0x1000, 0x1001], np.uint32)).reshape(-1).view(np.float32))
    rounded = convert(x, target)
    number = ~x.isnan()
    same_bits(rounded[number], x.to(target)[number], x[number])
    assert rounded[~number].isnan().all()


def test_fp32_nan_becomes_the_canonical_bf16_nan() -> None:
    nan = torch.from_numpy(np.array([0x7FC00000, 0x7F800001, 0xFFC00000, 0xFFFFFFFF], np.uint32).view(np.float32))
    assert set(bits(convert(nan, torch.bfloat16)).tolist()) == {0x7FFF}


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp32_rounds_to_fp8_as_torch_but_saturates(target: torch.dtype) -> None:
    x = torch.cat([fp32_around(target), fp32_around_bf16()])
    same_bits(convert(x, target), saturated(x, target), x)


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_rounds_to_fp8(source: torch.dtype, target: torch.dtype) -> None:
    x = every_value(source)
    same_bits(convert(x, target), saturated(x, target), x)


def test_fp32_to_e4m3_is_the_format_module() -> None:
    x = fp32_around(torch.float8_e4m3fn)
    same_bits(convert(x, torch.float8_e4m3fn), formats.encode_e4m3(x), x)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        pytest.param(448.0, 0x7E, id="max"),
        pytest.param(464.0, 0x7E, id="tie_above_max"),
        pytest.param(464.1, 0x7E, id="nearer_to_480"),
        pytest.param(-1e30, 0xFE, id="far_below"),
        pytest.param(float("inf"), 0x7E, id="inf"),
        pytest.param(float("-inf"), 0xFE, id="minus_inf"),
        pytest.param(float("nan"), 0x7F, id="nan"),
        pytest.param(-0.0, 0x80, id="minus_zero"),
        pytest.param(2.0**-10, 0x00, id="tie_to_zero"),
        pytest.param(3 * 2.0**-10, 0x02, id="tie_between_subnormals"),
    ],
)
def test_fp32_to_e4m3_saturates_to_finite(value: float, code: int) -> None:
    assert bits(convert(torch.tensor([value]), torch.float8_e4m3fn)).item() == code


@triton.jit
def _truncate_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16, fp_downcast_rounding="rtz"))


def test_an_explicit_rounding_mode_is_left_alone() -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(2))
    out = poisoned(1024, dtype=torch.bfloat16)
    _truncate_kernel[(1,)](x, out, 1024)
    np.testing.assert_array_equal(bits(out), bits(x) >> 16)


@triton.jit
def _transposed_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(out_ptr + n[:, None] * M + m[None, :], tl.trans(x).to(out_ptr.dtype.element_ty))


@triton.jit
def _scalar_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    scalar = tl.load(x_ptr).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr, scalar)
    spread = tl.broadcast_to(tl.load(x_ptr), (BLOCK,)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + 1 + tl.arange(0, BLOCK), spread)
    tl.store(out_ptr + 1 + BLOCK + tl.arange(0, BLOCK), tl.full((BLOCK,), 0.3, out_ptr.dtype.element_ty))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_conversion_of_views_scalars_and_constants(target: torch.dtype) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    out = poisoned(16, 8, dtype=target)
    _transposed_kernel[(1,)](x, out, 8, 16)
    same_bits(out.flatten(), x.T.to(target).flatten(), x.T.flatten())
    if target == torch.bfloat16:  # tl.full cannot make an FP8 constant
        out = poisoned(33, dtype=target)
        _scalar_kernel[(1,)](x, out, 16)
        same_bits(out, torch.tensor([x[0, 0]] * 17 + [0.3] * 16).to(target), out)


# ---- tl.dot ----------------------------------------------------------------------------------------------


@triton.jit
def _dot_kernel(a_ptr, b_ptr, acc_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + m * K + tl.arange(0, K)[None, :])
    b = tl.load(b_ptr + tl.arange(0, K)[:, None] * N + n)
    acc = tl.load(acc_ptr + m * N + n)
    tl.store(out_ptr + m * N + n, tl.dot(a, b, acc))


def dot(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor | None = None) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    out = poisoned(m, n)
    acc = torch.zeros(m, n) if acc is None else acc
    _dot_kernel[(1,)](a.contiguous(), b.contiguous(), acc, out, m, n, k)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dot_reads_every_finite_value_of_either_operand(dtype: torch.dtype) -> None:
    x = every_value(dtype)
    x = torch.where(x.isfinite(), x, 1.0).view(-1, 64)
    unit = torch.eye(64, dtype=dtype)
    same_values(dot(x, unit), x)
    same_values(dot(unit, x.T), x.T)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # Inf × 0
@pytest.mark.parametrize("right", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("left", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_dot_of_every_pair_of_values(left: torch.dtype, right: torch.dtype) -> None:
    a, b = every_value(left).view(256, 1), every_value(right).view(1, 256)
    same_values(dot(a, b), a.float() * b.float())


def exact_operand(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers, so that fp32 holds every partial sum exactly whatever the order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=generator).float().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_dot_adds_exact_sums_to_the_accumulator(dtype: torch.dtype) -> None:
    a, b = exact_operand((32, 128), dtype, 4), exact_operand((128, 64), dtype, 5)
    acc = exact_operand((32, 64), torch.float32, 6) / 4
    same_values(dot(a, b, acc), a.float() @ b.float() + acc)


def test_bf16_dot_accumulates_in_fp32() -> None:
    generator = torch.Generator().manual_seed(8)
    a = torch.randn(64, 256, generator=generator).bfloat16()
    b = torch.randn(256, 64, generator=generator).bfloat16()
    exact = a.double() @ b.double()
    # Any order of K fp32 additions errs by at most K·2^−24 of the sum of magnitudes.
    bound = 256 * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert ((dot(a, b).double() - exact).abs() <= bound).all()


# ---- tl.dot_scaled ---------------------------------------------------------------------------------------


@triton.jit
def _dot_scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, acc_ptr, out_ptr,
    M: tl.constexpr, N: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, GROUPS: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, A_SCALED: tl.constexpr, UE4M3: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    g = tl.arange(0, GROUPS)[None, :]
    a = tl.load(a_ptr + m * KA + tl.arange(0, KA)[None, :])
    b = tl.load(b_ptr + tl.arange(0, N)[None, :] * KB + tl.arange(0, KB)[:, None])
    b_scale = tl.load(b_scale_ptr + tl.arange(0, N)[:, None] * GROUPS + g)
    if UE4M3:
        b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
    acc = tl.load(acc_ptr + m * N + n)
    if A_SCALED:
        a_scale = tl.load(a_scale_ptr + m * GROUPS + g)
        if UE4M3:
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
        out = tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, acc)
    else:
        out = tl.dot_scaled(a, None, A_FORMAT, b, b_scale, B_FORMAT, acc)
    tl.store(out_ptr + m * N + n, out)


FORMAT = {torch.uint8: "e2m1", torch.float8_e4m3fn: "e4m3", torch.bfloat16: "bf16"}


def dot_scaled(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    ue4m3: bool = False,
    acc: torch.Tensor | None = None,
) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]` (K/2 bytes where packed), scales uint8 `[rows, groups]`: fp32 `[M, N]`."""
    m, n, groups = a.shape[0], b.shape[0], b_scale.shape[1]
    out = poisoned(m, n)
    acc = torch.zeros(m, n) if acc is None else acc
    _dot_scaled_kernel[(1,)](
        a, b_scale if a_scale is None else a_scale, b, b_scale, acc, out,
        m, n, a.shape[1], b.shape[1], groups, FORMAT[a.dtype], FORMAT[b.dtype], a_scale is not None, ue4m3,
    )  # fmt: skip
    return out


def scale_bytes(rows: int, groups: int, byte: int) -> torch.Tensor:
    return torch.full((rows, groups), byte, dtype=torch.uint8)


def in_first_column(codes: torch.Tensor, k: int) -> torch.Tensor:
    """One row per code, `k` wide, the code in column 0 and zeros behind it."""
    rows = torch.zeros(codes.numel(), k, dtype=torch.uint8)
    rows[:, 0] = codes.view(torch.uint8)
    return rows


def e2m1_unit(n: int) -> torch.Tensor:
    return formats.pack_e2m1(torch.eye(n, dtype=torch.uint8) * ONE_E2M1)


E2M1_CODES = torch.arange(16, dtype=torch.uint8)


def test_dot_scaled_of_every_e4m3_and_e2m1_code() -> None:
    e4m3 = every_value(torch.float8_e4m3fn)
    a = in_first_column(e4m3, 32).view(torch.float8_e4m3fn)
    b = formats.pack_e2m1(in_first_column(E2M1_CODES, 32))
    out = dot_scaled(a, scale_bytes(256, 1, ONE_UE8M0), b, scale_bytes(16, 1, ONE_UE8M0))
    same_values(out, e4m3.float()[:, None] * formats.decode_e2m1(E2M1_CODES))


def test_dot_scaled_of_every_pair_of_e2m1_codes() -> None:
    packed = formats.pack_e2m1(in_first_column(E2M1_CODES, 32))
    out = dot_scaled(packed, scale_bytes(16, 1, ONE_UE8M0), packed, scale_bytes(16, 1, ONE_UE8M0))
    value = formats.decode_e2m1(E2M1_CODES)
    same_values(out, value[:, None] * value)


def test_dot_scaled_of_every_pair_of_e4m3_codes() -> None:
    e4m3 = every_value(torch.float8_e4m3fn)
    a = in_first_column(e4m3, 32).view(torch.float8_e4m3fn)
    out = dot_scaled(a, scale_bytes(256, 1, ONE_UE8M0), a, scale_bytes(256, 1, ONE_UE8M0))
    same_values(out, e4m3.float()[:, None] * e4m3.float())


def test_dot_scaled_reads_every_finite_bf16_value() -> None:
    x = every_value(torch.bfloat16)
    x = torch.where(x.isfinite(), x, 1.0).view(-1, 64)
    out = dot_scaled(x, None, e2m1_unit(64), scale_bytes(64, 2, ONE_UE8M0))
    same_values(out, x)


def test_dot_scaled_unpacks_the_even_column_from_the_low_nibble() -> None:
    codes = torch.randint(0, 16, (16, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(9))
    out = dot_scaled(
        formats.pack_e2m1(codes), scale_bytes(16, 2, ONE_UE8M0), e2m1_unit(64), scale_bytes(64, 2, ONE_UE8M0)
    )
    same_values(out, formats.decode_e2m1(codes))


@pytest.mark.parametrize("scaled", ["left", "right"])
def test_dot_scaled_by_every_ue8m0_scale(scaled: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    ones = formats.pack_e2m1(in_first_column(torch.full((256,), ONE_E2M1, dtype=torch.uint8), 32))
    every, one = codes.view(256, 1), scale_bytes(256, 1, ONE_UE8M0)
    left, right = (every, one) if scaled == "left" else (one, every)
    out = dot_scaled(ones, left, ones, right)
    value = formats.decode_ue8m0(codes)  # byte 0 the subnormal 2^−127, byte 255 NaN
    same_values(out, (value[:, None] if scaled == "left" else value).expand(256, 256))


@pytest.mark.parametrize("scaled", ["left", "right"])
def test_dot_scaled_by_every_ue4m3_scale(scaled: str) -> None:
    codes = torch.arange(128, dtype=torch.uint8)
    # 4.5, 4.5, … : a sum of 16 products per group, exact under a scale of four significant bits.
    threes = scale_bytes(128, 16, formats.pack_e2m1(torch.tensor([5, 3], dtype=torch.uint8)).item())
    every, one = codes.view(128, 1).expand(128, 2).contiguous(), scale_bytes(128, 2, ONE_UE4M3)
    left, right = (every, one) if scaled == "left" else (one, every)
    out = dot_scaled(threes, left, threes, right, ue4m3=True)
    value = formats.decode_ue4m3(codes) * (16 * (3.0 * 3.0 + 1.5 * 1.5))
    same_values(out, (value[:, None] if scaled == "left" else value).expand(128, 128))


def test_dot_scaled_of_every_pair_of_ue4m3_scales() -> None:
    codes = torch.arange(128, dtype=torch.uint8)
    ones = formats.pack_e2m1(in_first_column(torch.full((128,), ONE_E2M1, dtype=torch.uint8), 16))
    out = dot_scaled(ones, codes.view(128, 1), ones, codes.view(128, 1), ue4m3=True)
    value = formats.decode_ue4m3(codes)
    same_values(out, value[:, None] * value)


Decode = Callable[[torch.Tensor], torch.Tensor]


def grouped(values: torch.Tensor, scales: torch.Tensor, decode_scale: Decode, group: int) -> torch.Tensor:
    return values.double() * decode_scale(scales).double().repeat_interleave(group, dim=1)


@pytest.mark.parametrize("recipe", ["e4m3xe2m1_ue8m0", "e2m1xe2m1_ue8m0", "e4m3xe4m3_ue8m0", "e2m1xe2m1_ue4m3"])
def test_dot_scaled_applies_each_scale_to_its_group(recipe: str) -> None:
    generator = torch.Generator().manual_seed(10)
    m, n, k = 16, 32, 128
    ue4m3 = recipe.endswith("ue4m3")
    group = 16 if ue4m3 else 32
    decode_scale = formats.decode_ue4m3 if ue4m3 else formats.decode_ue8m0

    def operand(rows: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if name == "e2m1":
            codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8, generator=generator)
            return formats.pack_e2m1(codes), formats.decode_e2m1(codes)
        integers = torch.randint(-8, 9, (rows, k), generator=generator).float()
        return integers.to(torch.float8_e4m3fn), integers

    def scales(rows: int) -> torch.Tensor:
        # Powers of two from 2^−2 to 2^1, so that all sums stay exact; a wrong group shows.
        exponents = torch.randint(-2, 2, (rows, k // group), generator=generator)
        return (ONE_UE4M3 + 8 * exponents if ue4m3 else ONE_UE8M0 + exponents).to(torch.uint8)

    left, right = recipe.split("_")[0].split("x")
    (a, a_value), (b, b_value) = operand(m, left), operand(n, right)
    a_scale, b_scale = scales(m), scales(n)
    acc = torch.randint(-50, 50, (m, n), generator=generator) / 4
    out = dot_scaled(a, a_scale, b, b_scale, ue4m3=ue4m3, acc=acc)
    product = grouped(a_value, a_scale, decode_scale, group) @ grouped(b_value, b_scale, decode_scale, group).T
    same_values(out, product + acc)


# ---- arithmetic that contracts lean on and that comes exact as it is -------------------------------------


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, z_ptr, quotient_ptr, fma_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    tl.store(quotient_ptr + i, tl.div_rn(x, y))
    tl.store(fma_ptr + i, tl.fma(x, y, tl.load(z_ptr + i)))


def rounded_to_fp32(exact: Fraction) -> float:
    """Nearest fp32 number, ties to even, by comparing exact distances to the candidates around it."""
    guess = np.float32(float(exact))
    candidates = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return float(min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.uint32)) & 1)))


def test_division_and_fma_round_once() -> None:
    generator = torch.Generator().manual_seed(11)
    x, y, noise = torch.randn(3, 1024, generator=generator).unbind()
    z = -(x * y) * (1 + noise * 2.0**-20)  # cancels, so that a rounded product would show
    quotient, fma = poisoned(1024), poisoned(1024)
    _arithmetic_kernel[(1,)](x, y, z, quotient, fma, 1024)
    exact = [tuple(map(Fraction, row)) for row in zip(x.tolist(), y.tolist(), z.tolist())]
    assert quotient.tolist() == [rounded_to_fp32(a / b) for a, b, _ in exact]
    assert fma.tolist() == [rounded_to_fp32(a * b + c) for a, b, c in exact]


# ---- installing ------------------------------------------------------------------------------------------


def test_install_is_idempotent() -> None:
    from triton.runtime import interpreter as stock

    before = (stock._convert_float, stock._dot_scaled_scale_to_f32, stock.InterpreterBuilder.create_dot)
    interpreter.install()
    assert interpreter.is_active()
    assert before == (
        stock._convert_float,
        stock._dot_scaled_scale_to_f32,
        stock.InterpreterBuilder.create_dot,
    )


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    from triton.runtime import interpreter as stock

    monkeypatch.delattr(stock, "megamoe_exact_conversions")
    assert not interpreter.is_active()
    return monkeypatch


def test_install_refuses_an_interpreter_without_the_patched_functions(
    uninstalled: pytest.MonkeyPatch,
) -> None:
    from triton.runtime import interpreter as stock

    uninstalled.delattr(stock, "_dot_scaled_scale_to_f32")
    uninstalled.setattr(stock.InterpreterBuilder, "create_dot", lambda self, a, b: None)
    with pytest.raises(RuntimeError, match=r"Triton 3\.9 .*_dot_scaled_scale_to_f32, InterpreterBuilder\.create_dot$"):
        interpreter.install()
    assert not interpreter.is_active()


def test_install_refuses_when_the_interpreter_was_switched_off(uninstalled: pytest.MonkeyPatch) -> None:
    uninstalled.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 must be set before triton is first imported"):
        interpreter.install()
    assert not interpreter.is_active()


TOO_LATE = """
import os, sys
from megamoe.oracle import interpreter
assert "triton" not in sys.modules and not interpreter.is_active()
import triton.language
os.environ["TRITON_INTERPRET"] = "1"
try:
    interpreter.install()
except RuntimeError as error:
    print(error)
assert not interpreter.is_active()
"""


def test_install_refuses_after_triton_was_imported_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    run = subprocess.run([sys.executable, "-c", TOO_LATE], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert "TRITON_INTERPRET=1 must be set before triton is first imported" in run.stdout
