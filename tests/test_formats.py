"""Formats: every code, every rounding boundary, and `ml_dtypes` wherever its rule is the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megamoe import formats

hypothesis = pytest.importorskip("hypothesis")
ml_dtypes = pytest.importorskip("ml_dtypes")
st = hypothesis.strategies

E2M1_GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Written out from the definition of the format: 4 exponent bits of bias 7, 3 mantissa bits, 0x7F is NaN.
E4M3_GRID = np.array([math.ldexp(c & 7, -9) if c < 8 else math.ldexp(8 | (c & 7), (c >> 3) - 10) for c in range(127)])
NAN_BITS = (0x7FC00000, 0x7F800001, 0xFFC00000, 0xFFFFFFFF)


def fp32_bits(bits: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def all_bf16() -> torch.Tensor:
    """Every BF16 value, NaNs included, as fp32."""
    return fp32_bits(np.arange(1 << 16, dtype=np.uint32) << 16)


def random_fp32(count: int) -> torch.Tensor:
    """Uniform over bit patterns: every exponent, subnormals, Inf and NaN alike."""
    return fp32_bits(np.random.default_rng(7).integers(0, 1 << 32, count, dtype=np.uint32))


def boundaries(grid: np.ndarray) -> torch.Tensor:
    """Values and midpoints of `grid`, their fp32 neighbours, the extremes of fp32; of both signs, no NaN."""
    middle = (grid[1:] + grid[:-1]) / 2
    extremes = [0.0, 2.0**-149, 2.0**-126, 3.4028234663852886e38, math.inf, 464.0, 480.0, 1e4]
    exact = np.concatenate([grid, middle, extremes]).astype(np.float32)
    with np.errstate(over="ignore"):  # the neighbour above the largest number is Inf, and wanted
        below, above = np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))
    magnitude = np.unique(np.concatenate([exact, below, above]))
    return torch.from_numpy(np.concatenate([magnitude, -magnitude]))


def nearest_code(x: torch.Tensor, grid: np.ndarray, ties: str) -> np.ndarray:
    """Index of the value of `grid` nearest to |x|, by comparing distances (exact in fp64 at midpoints)."""
    magnitude = np.minimum(np.abs(x.numpy().astype(np.float64)), grid[-1])
    distance = np.abs(magnitude[:, None] - grid)
    lower = np.argmin(distance, axis=1)  # the smaller of two equally near ones
    upper = len(grid) - 1 - np.argmin(distance[:, ::-1], axis=1)
    return np.where((ties == "even") & (lower % 2 == 1), upper, lower)


def sign_bit(x: torch.Tensor) -> np.ndarray:
    return np.signbit(x.numpy())


def same_bytes(actual: torch.Tensor, expected: Any, inputs: torch.Tensor) -> None:
    actual_codes = actual.cpu().view(torch.uint8).numpy()
    expected_codes = np.asarray(expected).astype(np.uint8)
    wrong = np.flatnonzero(actual_codes != expected_codes)
    if wrong.size:
        i = wrong[0]
        raise AssertionError(
            f"{wrong.size} of {actual_codes.size} codes differ; first at [{i}]: input {inputs[i].item()!r} "
            f"gave 0x{actual_codes[i]:02X}, expected 0x{expected_codes[i]:02X}"
        )


def same_values(actual: torch.Tensor, expected: Any) -> None:
    np.testing.assert_array_equal(actual.cpu().numpy(), np.asarray(expected, dtype=np.float32))
    # assert_array_equal takes −0 for 0.
    number = ~np.isnan(np.asarray(expected))
    np.testing.assert_array_equal(np.signbit(actual.cpu().numpy())[number], np.signbit(expected)[number])


# ---- E2M1 ------------------------------------------------------------------------------------------------


def test_e2m1_decodes_every_code(device: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    expected = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    same_values(formats.decode_e2m1(codes.to(device)), expected)
    same_values(formats.decode_e2m1(codes.to(device)), codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(float))


def test_e2m1_decode_reads_the_low_nibble_only(device: str) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8, device=device)
    assert torch.equal(formats.decode_e2m1(every_byte), formats.decode_e2m1(every_byte % 16))


@pytest.mark.parametrize("ties", ["even", "toward_zero"])
def test_e2m1_encode_inverts_decode(ties: formats.Ties, device: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    values = formats.decode_e2m1(codes)
    expected = codes.tolist() if ties == "even" else [0 if code == 8 else code for code in range(16)]
    same_bytes(formats.encode_e2m1(values, ties), expected, values)


@pytest.mark.parametrize("ties", ["even", "toward_zero"])
@pytest.mark.parametrize("inputs", ["boundaries", "all_bf16", "random_fp32"])
def test_e2m1_encodes_to_the_nearest_code(inputs: str, ties: formats.Ties, device: str) -> None:
    x = {"boundaries": boundaries(E2M1_GRID), "all_bf16": all_bf16(), "random_fp32": random_fp32(100_000)}[inputs]
    x = x[~x.isnan()]
    code = nearest_code(x, E2M1_GRID, ties)
    negative = sign_bit(x) & ((code != 0) | (ties == "even"))
    same_bytes(formats.encode_e2m1(x.to(device), ties), code + 8 * negative, x)


def test_e2m1_even_is_ml_dtypes(device: str) -> None:
    x = torch.cat([boundaries(E2M1_GRID), all_bf16(), random_fp32(1_000_000)])
    x = x[~x.isnan()]  # ml_dtypes has no NaN rule to share: it writes −0, the hardware +6
    expected = x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    same_bytes(formats.encode_e2m1(x.to(device), "even"), expected, x)


def test_e2m1_tie_rules_differ_exactly_where_documented(device: str) -> None:
    x = torch.arange(-512, 513, device=device) / 64  # −8 … 8, every midpoint among them
    differ = formats.encode_e2m1(x, "even") != formats.encode_e2m1(x, "toward_zero")
    odd_midpoints = [0.75, 1.75, 3.5]
    negative_underflow = [-i / 64 for i in range(16, 0, -1)]
    expected = sorted([-m for m in odd_midpoints] + negative_underflow + odd_midpoints)
    assert x[differ].tolist() == expected


@dataclass(frozen=True)
class Special:
    name: str
    value: float
    even: int
    toward_zero: int

    def __str__(self) -> str:
        return self.name


@pytest.mark.parametrize(
    "case",
    [
        Special("zero", 0.0, 0, 0),
        Special("minus_zero", -0.0, 8, 0),
        Special("tie_0.25", 0.25, 0, 0),
        Special("tie_-0.25", -0.25, 8, 0),
        Special("tie_0.75", 0.75, 2, 1),
        Special("tie_-1.75", -1.75, 12, 11),
        Special("tie_3.5", 3.5, 6, 5),
        Special("tie_5", 5.0, 6, 6),
        Special("above_max", 6.5, 7, 7),
        Special("far_below_min", -1e30, 15, 15),
        Special("inf", math.inf, 7, 7),
        Special("minus_inf", -math.inf, 15, 15),
    ],
    ids=str,
)
def test_e2m1_special(case: Special, device: str) -> None:
    x = torch.tensor([case.value], device=device)
    assert formats.encode_e2m1(x, "even").item() == case.even
    assert formats.encode_e2m1(x, "toward_zero").item() == case.toward_zero


@pytest.mark.parametrize("bits", NAN_BITS, ids=hex)
def test_e2m1_nan(bits: int, device: str) -> None:
    x = fp32_bits([bits]).to(device)
    assert formats.encode_e2m1(x, "even").item() == 7
    assert formats.encode_e2m1(x, "toward_zero").item() == 0


def test_e2m1_packs_the_even_column_low(device: str) -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8, device=device)
    assert formats.pack_e2m1(codes).tolist() == [[0x21, 0x0F]]
    assert formats.unpack_e2m1(torch.tensor([[0x21, 0x0F]], dtype=torch.uint8)).tolist() == [[1, 2, 15, 0]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_e2m1_pack_inverts_unpack_for_every_byte(dtype: torch.dtype, device: str) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8, device=device).view(4, 64)
    codes = formats.unpack_e2m1(every_byte.view(dtype))
    assert codes.shape == (4, 128)
    assert torch.equal(formats.pack_e2m1(codes), every_byte)


@hypothesis.given(st.lists(st.integers(1, 5), min_size=0, max_size=3), st.integers(0, 6), st.integers(0, 2**32 - 1))
@hypothesis.settings(deadline=None, max_examples=50)
def test_e2m1_unpack_inverts_pack(leading: list[int], pairs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (*leading, 2 * pairs), dtype=torch.uint8, generator=generator)
    packed = formats.pack_e2m1(codes)
    assert packed.shape == (*leading, pairs)
    assert torch.equal(formats.unpack_e2m1(packed), codes)


# ---- E4M3 and UE4M3 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8], ids=str)
def test_e4m3_decodes_every_code(dtype: torch.dtype, device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    half = np.append(E4M3_GRID, np.nan)
    decoded = formats.decode_e4m3(codes.to(device).view(dtype))
    same_values(decoded, np.concatenate([half, -half]))
    same_values(decoded, codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_e4m3_encode_inverts_decode(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    values = formats.decode_e4m3(codes)
    expected = codes.tolist()
    expected[0xFF] = 0x7F  # NaN has one encoding
    same_bytes(formats.encode_e4m3(values), expected, values)


@pytest.mark.parametrize("inputs", ["boundaries", "all_bf16", "random_fp32"])
def test_e4m3_encodes_to_the_nearest_code(inputs: str, device: str) -> None:
    x = {"boundaries": boundaries(E4M3_GRID), "all_bf16": all_bf16(), "random_fp32": random_fp32(50_000)}[inputs]
    code = nearest_code(x.nan_to_num(), E4M3_GRID, "even") + 128 * sign_bit(x)
    same_bytes(formats.encode_e4m3(x.to(device)), np.where(x.isnan(), 0x7F, code), x)


def test_e4m3_is_ml_dtypes_up_to_saturation_and_nan(device: str) -> None:
    x = torch.cat([boundaries(E4M3_GRID), all_bf16(), random_fp32(1_000_000)])
    with np.errstate(invalid="ignore"):  # NaNs are among the inputs
        code = x.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    # ml_dtypes overflows to NaN of the input's sign; the tie 464 is the last to round down to 448 by itself.
    overflow = (x.abs() > 464).numpy()
    assert set(code[overflow]) == {0x7F, 0xFF}
    code = np.where(overflow, 0x7E + 128 * sign_bit(x), code)
    same_bytes(formats.encode_e4m3(x.to(device)), np.where(x.isnan(), 0x7F, code), x)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        pytest.param(1.0, 0x38, id="one"),
        pytest.param(256.0, 0x78, id="256"),
        pytest.param(448.0, 0x7E, id="max"),
        pytest.param(464.0, 0x7E, id="tie_above_max"),
        pytest.param(465.0, 0x7E, id="nearer_to_480"),
        pytest.param(-math.inf, 0xFE, id="minus_inf"),
        pytest.param(math.inf, 0x7E, id="inf"),
        pytest.param(-0.0, 0x80, id="minus_zero"),
        pytest.param(2.0**-9, 0x01, id="smallest"),
        pytest.param(2.0**-10, 0x00, id="tie_to_zero"),
        pytest.param(-(2.0**-10), 0x80, id="tie_to_minus_zero"),
        pytest.param(3 * 2.0**-10, 0x02, id="tie_between_subnormals"),
        pytest.param(-1e-30, 0x80, id="negative_underflow"),
    ],
)
def test_e4m3_special(value: float, code: int, device: str) -> None:
    assert formats.encode_e4m3(torch.tensor([value], device=device)).view(torch.uint8).item() == code


@pytest.mark.parametrize("bits", NAN_BITS, ids=hex)
def test_e4m3_nan_is_0x7f(bits: int, device: str) -> None:
    x = fp32_bits([bits]).to(device)
    assert formats.encode_e4m3(x).view(torch.uint8).item() == 0x7F
    assert formats.encode_ue4m3(x).item() == 0x7F


def test_ue4m3_decodes_every_code_and_ignores_bit_7(device: str) -> None:
    codes = torch.arange(128, dtype=torch.uint8, device=device)
    same_values(formats.decode_ue4m3(codes), np.append(E4M3_GRID, np.nan))
    same_values(formats.decode_ue4m3(codes + 128), np.append(E4M3_GRID, np.nan))


def test_ue4m3_encode_inverts_decode(device: str) -> None:
    codes = torch.arange(128, dtype=torch.uint8, device=device)
    values = formats.decode_ue4m3(codes)
    same_bytes(formats.encode_ue4m3(values), codes.tolist(), values)


def test_ue4m3_encodes_non_negative_to_the_nearest_code(device: str) -> None:
    x = boundaries(E4M3_GRID)
    x = x[x >= 0]  # holds −0 as well: its sign must not reach the byte
    assert sign_bit(x).any()
    same_bytes(formats.encode_ue4m3(x.to(device)), nearest_code(x, E4M3_GRID, "even"), x)


# ---- UE8M0 -----------------------------------------------------------------------------------------------


def test_ue8m0_decodes_every_code(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = formats.decode_ue8m0(codes.to(device))
    same_values(decoded, np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan))
    same_values(decoded, codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def test_ue8m0_inverse_of_every_code(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = np.ldexp(1.0, 127 - np.arange(256))
    expected[254:] = 0.0, -np.inf  # what the contract's shift leaves: 2^−127 is not formed, 255 is no scale
    same_values(formats.ue8m0_inverse(codes.to(device)), expected)


@pytest.mark.parametrize("exponent", [1, 2, 64, 126, 127, 128, 253, 254])
def test_ue8m0_ceil_around_a_power_of_two(exponent: int, device: str) -> None:
    first, last = exponent << 23, ((exponent + 1) << 23) - 1
    raw = fp32_bits([first - 1, first, first + 1, last]).to(device)
    expected = [max(exponent, 1), exponent, exponent + 1, exponent + 1]
    assert formats.ue8m0_ceil(raw, 0, 255).tolist() == expected


def test_ue8m0_ceil_is_the_smallest_power_of_two_not_below(device: str) -> None:
    raw = torch.cat([all_bf16(), random_fp32(200_000)]).abs()
    raw = raw[raw < 2.0**127]  # the largest byte below NaN
    byte = formats.ue8m0_ceil(raw.to(device), 0, 255).cpu()
    scale = np.ldexp(1.0, byte.numpy().astype(int) - 127)
    assert (scale >= raw.numpy()).all()
    normal = (raw >= 2.0**-126).numpy()
    assert (scale / 2 < raw.numpy())[normal].all()


@pytest.mark.parametrize(
    ("bits", "free", "clamped"),
    [
        pytest.param(0x00000000, 0, 1, id="zero"),
        pytest.param(0x00000001, 1, 1, id="smallest_subnormal"),
        pytest.param(0x00400000, 1, 1, id="2^-127"),
        pytest.param(0x007FFFFF, 1, 1, id="largest_subnormal"),
        pytest.param(0x7F000000, 254, 254, id="2^127"),
        pytest.param(0x7F000001, 255, 254, id="above_2^127"),
        pytest.param(0x7F7FFFFF, 255, 254, id="largest_finite"),
        pytest.param(0x7F800000, 255, 254, id="inf"),
        pytest.param(0x7FC00000, 255, 254, id="nan"),
    ],
)
def test_ue8m0_ceil_special(bits: int, free: int, clamped: int, device: str) -> None:
    raw = fp32_bits([bits]).to(device)
    assert formats.ue8m0_ceil(raw, 0, 255).item() == free
    assert formats.ue8m0_ceil(raw, 1, 254).item() == clamped


def test_ue8m0_ceil_is_ml_dtypes_on_exact_powers_and_above_it_elsewhere(device: str) -> None:
    powers = torch.from_numpy(np.ldexp(1.0, np.arange(-126, 128)).astype(np.float32))
    expected = powers.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    same_bytes(formats.ue8m0_ceil(powers.to(device), 0, 255), expected, powers)
    # ml_dtypes rounds to nearest (1.25 → 2^0); a scale must not be below its group's maximum (1.25 → 2^1).
    between = torch.tensor([1.25, 1.5, 1.75])
    assert between.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist() == [127, 128, 128]
    assert formats.ue8m0_ceil(between.to(device), 0, 255).tolist() == [128, 128, 128]


@pytest.mark.parametrize("largest", [formats.E4M3_MAX, formats.E2M1_MAX], ids=["e4m3", "e2m1"])
def test_ue8m0_byte_is_the_same_by_division_and_by_reciprocal(largest: float, device: str) -> None:
    amax = torch.cat([all_bf16(), random_fp32(1_000_000)]).abs()
    amax = amax[~amax.isnan()].to(device)
    reciprocal = torch.tensor(1.0, device=device) / largest
    divided = formats.ue8m0_ceil(amax / largest, 0, 255)
    same_bytes(divided, formats.ue8m0_ceil(amax * reciprocal, 0, 255).cpu(), amax)


@dataclass(frozen=True)
class Group:
    """A group maximum, and what a quantizer that floors it at 1e-4 makes of it."""

    name: str
    amax: float
    fp8_scale: int
    fp8_code: int
    fp4_scale: int
    fp4_code: int

    def __str__(self) -> str:
        return self.name


@pytest.mark.parametrize(
    "case",
    [
        Group("one", 1.0, 119, 0x78, 125, 6),
        Group("448", 448.0, 127, 0x7E, 134, 5),
        Group("6", 6.0, 121, 0x7C, 127, 7),
        Group("all_zero", 0.0, 105, 0x00, 112, 0),
    ],
    ids=str,
)
def test_ue8m0_group_scaling(case: Group, device: str) -> None:
    amax = torch.tensor([case.amax], device=device)
    floored = amax.clamp_min(1e-4)
    fp8_scale = formats.ue8m0_ceil(floored / formats.E4M3_MAX, 1, 254)
    fp4_scale = formats.ue8m0_ceil(floored / formats.E2M1_MAX, 1, 254)
    assert (fp8_scale.item(), fp4_scale.item()) == (case.fp8_scale, case.fp4_scale)
    fp8 = formats.encode_e4m3(amax * formats.ue8m0_inverse(fp8_scale))
    fp4 = formats.encode_e2m1(amax * formats.ue8m0_inverse(fp4_scale), "toward_zero")
    assert (fp8.view(torch.uint8).item(), fp4.item()) == (case.fp8_code, case.fp4_code)


# ---- what all of them share ------------------------------------------------------------------------------

ENCODERS = {
    "e2m1_even": lambda x: formats.encode_e2m1(x, "even"),
    "e2m1_toward_zero": lambda x: formats.encode_e2m1(x, "toward_zero"),
    "e4m3": lambda x: formats.encode_e4m3(x).view(torch.uint8),
    "ue4m3": formats.encode_ue4m3,
    "ue8m0": lambda x: formats.ue8m0_ceil(x, 0, 255),
}
DECODERS = {
    "e2m1": formats.decode_e2m1,
    "e4m3": formats.decode_e4m3,
    "ue4m3": formats.decode_ue4m3,
    "ue8m0": formats.decode_ue8m0,
    "ue8m0_inverse": formats.ue8m0_inverse,
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoding_keeps_shape_and_strided_inputs(name: str, device: str) -> None:
    encode = ENCODERS[name]
    x = (torch.randn(6, 10, generator=torch.Generator().manual_seed(1)) * 4).to(device)
    assert torch.equal(encode(x.T), encode(x).T)
    assert torch.equal(encode(x[::2, 1::3]), encode(x)[::2, 1::3])
    assert torch.equal(encode(x[0, 0]), encode(x)[0, 0])
    assert encode(x[:0]).shape == (0, 10)


@pytest.mark.parametrize("name", DECODERS)
def test_decoding_keeps_shape_and_strided_inputs(name: str, device: str) -> None:
    decode = DECODERS[name]
    codes = torch.arange(1, 61, dtype=torch.uint8, device=device).view(6, 10)
    assert decode(codes).dtype == torch.float32
    assert torch.equal(decode(codes.T), decode(codes).T)
    assert torch.equal(decode(codes[::2, 1::3]), decode(codes)[::2, 1::3])
    assert torch.equal(decode(codes[0, 0]), decode(codes)[0, 0])
    assert decode(codes[:0]).shape == (0, 10)


@pytest.mark.parametrize("name", ENCODERS)
@hypothesis.given(st.lists(st.floats(0, width=32, allow_infinity=True, allow_nan=False), min_size=2, max_size=20))
@hypothesis.settings(deadline=None, max_examples=50)
def test_encoding_is_monotone_in_the_magnitude(name: str, magnitudes: list[float]) -> None:
    # The codes of non-negative numbers are ordered like the numbers. −0 would add a sign bit.
    codes = ENCODERS[name](torch.tensor(magnitudes).abs().sort().values).tolist()
    assert codes == sorted(codes)


@pytest.mark.parametrize("name", ["e2m1_even", "e2m1_toward_zero", "e4m3"])
@hypothesis.given(st.floats(width=32, allow_nan=False, allow_infinity=True).filter(lambda value: value != 0))
@hypothesis.settings(deadline=None, max_examples=100)
def test_encoding_mirrors_the_sign(name: str, value: float) -> None:
    sign = 0x80 if name == "e4m3" else 8
    positive, negative = ENCODERS[name](torch.tensor([abs(value), -abs(value)])).tolist()
    rounds_to_plain_zero = name == "e2m1_toward_zero" and positive == 0
    assert negative == (0 if rounds_to_plain_zero else positive | sign)


@dataclass(frozen=True)
class Refused:
    name: str
    call: Any
    error: type[Exception]
    message: str

    def __str__(self) -> str:
        return self.name


def _refused() -> list[Refused]:
    half, wide = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int32)
    odd = torch.ones(4, 3, dtype=torch.uint8)
    scalar = torch.ones((), dtype=torch.uint8)
    x = torch.ones(2)
    wrong_input = [
        Refused(f"{name}_of_bf16", lambda f=f: f(half), TypeError, r"(x|raw) has dtype torch\.bfloat16")
        for name, f in ENCODERS.items()
    ]
    wrong_codes = [
        Refused(f"{name}_of_int32", lambda f=f: f(wide), TypeError, r"codes has dtype torch\.int32")
        for name, f in {**DECODERS, "pack": formats.pack_e2m1}.items()
    ]
    return [
        *wrong_input,
        *wrong_codes,
        Refused("unpack_of_int32", lambda: formats.unpack_e2m1(wide), TypeError, r"packed has dtype torch\.int32"),
        Refused("ties", lambda: formats.encode_e2m1(x, "up"), ValueError, "ties='up'.*'even', 'toward_zero'"),  # type: ignore[arg-type]
        Refused("pack_odd", lambda: formats.pack_e2m1(odd), ValueError, r"codes has shape \(4, 3\)"),
        Refused("pack_scalar", lambda: formats.pack_e2m1(scalar), ValueError, r"codes has shape \(\)"),
        Refused("ceil_order", lambda: formats.ue8m0_ceil(x, 5, 4), ValueError, "lo=5, hi=4"),
        Refused("ceil_low", lambda: formats.ue8m0_ceil(x, -1, 4), ValueError, "lo=-1"),
        Refused("ceil_high", lambda: formats.ue8m0_ceil(x, 0, 256), ValueError, "hi=256"),
    ]


@pytest.mark.parametrize("case", _refused(), ids=str)
def test_refuses(case: Refused) -> None:
    with pytest.raises(case.error, match=case.message):
        case.call()
