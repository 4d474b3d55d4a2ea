"""Device functions of `megamoe.kernels.numerics` against `megamoe.formats`, densely around every rounding boundary."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from megamoe import formats
from megamoe.kernels import numerics
from megamoe.oracle.metrics import assert_bytes_equal

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
BLOCK = 4096


@triton.jit
def _code_rne(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, numerics.e2m1_code_rne(tl.load(x + at)).to(tl.uint8))


@triton.jit
def _pack(x, inverse, out, SHORT: tl.constexpr, BLOCK: tl.constexpr):
    """x [8, n]: code i of a word comes from row i."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.num_programs(0) * BLOCK
    v = (
        tl.load(x + at), tl.load(x + n + at), tl.load(x + 2 * n + at), tl.load(x + 3 * n + at),
        tl.load(x + 4 * n + at), tl.load(x + 5 * n + at), tl.load(x + 6 * n + at), tl.load(x + 7 * n + at),
    )  # fmt: skip
    words = numerics.e2m1_pack_ties_to_zero(v, tl.load(inverse + at), SHORT)
    tl.store(out + at, words.to(tl.int32, bitcast=True))


@triton.jit
def _pack_rne(x, inverse, out, BLOCK: tl.constexpr):
    """x [8, n]: code i of a word comes from row i."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.num_programs(0) * BLOCK
    v = (
        tl.load(x + at), tl.load(x + n + at), tl.load(x + 2 * n + at), tl.load(x + 3 * n + at),
        tl.load(x + 4 * n + at), tl.load(x + 5 * n + at), tl.load(x + 6 * n + at), tl.load(x + 7 * n + at),
    )  # fmt: skip
    tl.store(out + at, numerics.e2m1_pack_rne(v, tl.load(inverse + at)).to(tl.int32, bitcast=True))


@triton.jit
def _e4m3(x, out, back, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = numerics.f32_to_e4m3(tl.load(x + at))
    tl.store(out + at, codes)
    tl.store(back + at, numerics.e4m3_to_f32(codes))


@triton.jit
def _ue8m0(x, byte, inverse, LO: tl.constexpr, HI: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = numerics.ue8m0_ceil(tl.load(x + at), LO, HI)
    tl.store(byte + at, code.to(tl.uint8))
    tl.store(inverse + at, numerics.ue8m0_inverse(code))


@triton.jit
def _e2m1_to_f32(code, out):
    at = tl.arange(0, 16)
    tl.store(out + at, numerics.e2m1_to_f32(tl.load(code + at)))


@triton.jit
def _e2m1_to_e4m3(code, out):
    at = tl.arange(0, 16)
    tl.store(out + at, numerics.e2m1_to_e4m3(tl.load(code + at)))


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Padded with ones to whole blocks."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK), value=1.0)


def _around(points: tuple[float, ...], steps: int) -> torch.Tensor:
    """Every fp32 number within `steps` places of each positive point."""
    bits = torch.tensor(points).view(torch.int32)[:, None] + torch.arange(-steps, steps + 1, dtype=torch.int32)
    return bits.flatten().view(torch.float32)


def _awkward(generator: torch.Generator) -> torch.Tensor:
    """Boundaries of E2M1 and E4M3, all exponents, zeros, NaN and Inf; both signs."""
    e4m3 = formats.decode_e4m3(torch.arange(0x7F, dtype=torch.uint8))
    midpoints = (e4m3[1:] + e4m3[:-1]) / 2
    exponents = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    values = torch.cat(
        (
            _around(E2M1_TIES, 600),
            _around((0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 448.0, 464.0), 20),
            _around(tuple(midpoints.tolist()), 3),
            (exponents[:, None] * torch.tensor((1.0, 1.0 + 2.0**-23, 1.5, 2.0 - 2.0**-23))).flatten().float(),
            torch.rand(3000, generator=generator) * 8,
            torch.tensor((0.0, math.inf, math.nan)),
        )
    )
    return torch.cat((values, -values))


def test_e2m1_code_rne(device: str) -> None:
    x = _blocks(_awkward(torch.Generator().manual_seed(1)))
    out = torch.full(x.shape, 0xFF, dtype=torch.uint8, device=device)
    _code_rne[(x.numel() // BLOCK,)](x.to(device), out, BLOCK)
    assert_bytes_equal(out, formats.encode_e2m1(x, "even"), "e2m1_code_rne")


def _check_pack(x: torch.Tensor, inverse: torch.Tensor, short: bool, device: str) -> None:
    out = torch.full(inverse.shape, -1, dtype=torch.int32, device=device)
    grid = (inverse.numel() // BLOCK,)
    _pack[grid](x.to(device), inverse.to(device), out, short, BLOCK, enable_fp_fusion=False)
    expected = formats.pack_e2m1(formats.encode_e2m1(x * inverse, "toward_zero").T.contiguous())
    assert_bytes_equal(out.view(torch.uint8).view(-1, 4), expected, f"e2m1_pack_ties_to_zero, SHORT={short}")


def test_e2m1_pack_of_long_products(device: str) -> None:
    """The factor is 1, so that the products are any fp32 numbers below 10, and each position gets each of them."""
    values = _awkward(torch.Generator().manual_seed(2))
    values = _blocks(values[~(values.abs() >= 10)])
    x = torch.stack([values.roll(17 * i) for i in range(8)])
    _check_pack(x, torch.ones(values.numel()), False, device)


def _near_ties() -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 [8, n] and fp32 factors [n] that put the rounded product on, just above and just below each threshold."""
    generator = torch.Generator().manual_seed(3)
    n = 2 * BLOCK
    v = (torch.rand(8, n, generator=generator) + 1).bfloat16().float()
    ties = torch.tensor(E2M1_TIES)[torch.arange(n) % 7]
    inverse = ties / v[torch.arange(n) // 7 % 8, torch.arange(n)]
    inverse = (inverse.view(torch.int32) + torch.randint(-2, 3, (n,), generator=generator).int()).view(torch.float32)
    inverse[inverse * 2 >= 10] = 1.0
    v[:, 5], inverse[7], v[3, 9] = math.inf, math.nan, math.nan
    inverse[5] = 0.0
    return v, inverse


def test_e2m1_pack_rounds_the_product_once(device: str) -> None:
    _check_pack(*_near_ties(), False, device)


def test_e2m1_pack_of_everything_near_a_quarter_and_three_quarters(device: str) -> None:
    """Where a magnitude is aligned to coarser steps than its own, a threshold must not swallow its neighbours."""
    values = _blocks(_around((0.25, 0.75), 4000))
    _check_pack(torch.stack([values, -values] * 4), torch.ones(values.numel()), False, device)


def _check_pack_rne(x: torch.Tensor, inverse: torch.Tensor, device: str) -> None:
    out = torch.full(inverse.shape, -1, dtype=torch.int32, device=device)
    grid = (inverse.numel() // BLOCK,)
    _pack_rne[grid](x.to(device), inverse.to(device), out, BLOCK, enable_fp_fusion=False)
    expected = formats.pack_e2m1(formats.encode_e2m1(x * inverse, "even").T.contiguous())
    assert_bytes_equal(out.view(torch.uint8).view(-1, 4), expected, "e2m1_pack_rne")


def test_e2m1_pack_rne(device: str) -> None:
    """Any fp32 product, in each position, and products that round onto a threshold and beside it."""
    values = _blocks(_awkward(torch.Generator().manual_seed(7)))
    _check_pack_rne(torch.stack([values.roll(17 * i) for i in range(8)]), torch.ones(values.numel()), device)
    v, inverse = _near_ties()
    _check_pack_rne(v * (1 - 2 * (torch.arange(8) % 2))[:, None], inverse, device)


def test_e2m1_pack_of_short_products(device: str) -> None:
    """Every BF16 magnitude up to 6 under power-of-two factors, among them the smallest and the largest."""
    bits = torch.arange(0x40C1, dtype=torch.int16)
    values = bits.view(torch.bfloat16).float()
    values = torch.cat((values, -values, torch.tensor((math.nan, -math.nan))))
    values = _blocks(values)
    for exponent in (-120, 0, 100):
        x = torch.stack([values.roll(i) for i in range(8)]) * 2.0**exponent
        short = torch.where(x.bfloat16().float() == x, x, 1.0 * 2.0**exponent)  # denormals that lost bits
        short = torch.where(x.isnan(), x, short)
        _check_pack(short, torch.full((values.numel(),), 2.0**-exponent), True, device)


def test_e4m3(device: str) -> None:
    x = _blocks(_awkward(torch.Generator().manual_seed(4)))
    out = torch.zeros(x.shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    back = torch.full(x.shape, -1.0, device=device)
    _e4m3[(x.numel() // BLOCK,)](x.to(device), out, back, BLOCK)
    expected = formats.encode_e4m3(x)
    assert_bytes_equal(out, expected, "f32_to_e4m3")
    decoded = formats.decode_e4m3(expected)
    assert_bytes_equal(back.nan_to_num(nan=999.0), decoded.nan_to_num(nan=999.0), "e4m3_to_f32")


@pytest.mark.parametrize("lo, hi", ((0, 254), (1, 254)), ids=("requantizer", "pre-dispatch"))
def test_ue8m0(lo: int, hi: int, device: str) -> None:
    exponents = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    near = exponents.float().view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    values = near.flatten().clamp_min(0).view(torch.float32)
    x = _blocks(torch.cat((values, torch.tensor((0.0, math.inf, math.nan)))))
    byte = torch.full(x.shape, 0xFF, dtype=torch.uint8, device=device)
    inverse = torch.full(x.shape, math.nan, device=device)
    _ue8m0[(x.numel() // BLOCK,)](x.to(device), byte, inverse, lo, hi, BLOCK)
    expected = formats.ue8m0_ceil(x, lo, hi)
    assert_bytes_equal(byte, expected, "ue8m0_ceil")
    assert_bytes_equal(inverse, formats.ue8m0_inverse(expected), "ue8m0_inverse")


@pytest.mark.parametrize("largest", (448.0, 6.0), ids=("E4M3", "E2M1"))
def test_ue8m0_by_product_is_ue8m0_by_division(largest: float) -> None:
    """The pre-dispatch multiplies by fl(1/448) and fl(1/6) where the contract divides: same byte for every BF16 amax
    and for fp32 numbers around all those where the quotient meets a power of two."""
    every_bf16 = torch.arange(0x7F81, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    turning = (2.0 ** torch.arange(-140, 119, dtype=torch.float64) * largest).float()
    near = (turning.view(torch.int32)[:, None] + torch.arange(-5, 6, dtype=torch.int32)).flatten().view(torch.float32)
    amax = torch.cat((every_bf16, near))
    divided = torch.div(amax, torch.tensor(largest))
    product = amax * torch.tensor(1 / largest, dtype=torch.float32)
    assert_bytes_equal(
        formats.ue8m0_ceil(product, 1, 254), formats.ue8m0_ceil(divided, 1, 254), f"UE8M0 of amax/{largest}"
    )


def test_e2m1_to_f32(device: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    out = torch.full((16,), math.nan, device=device)
    _e2m1_to_f32[(1,)](codes.to(device), out)
    assert_bytes_equal(out, formats.decode_e2m1(codes), "e2m1_to_f32")


def test_e2m1_to_e4m3_keeps_every_number(device: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    out = torch.full((16,), math.nan, device=device).to(torch.float8_e4m3fn)
    _e2m1_to_e4m3[(1,)](codes, out)
    assert_bytes_equal(formats.decode_e4m3(out), formats.decode_e2m1(codes), "numbers")
