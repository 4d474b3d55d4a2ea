"""Weight and scale layouts: rows against the maps of the contract written as loops, then round trips."""

from dataclasses import dataclass

import pytest
import torch

from megamoe.kernels.layouts.gate_up import deinterleave_gate_up, interleave_gate_up
from megamoe.kernels.layouts.scale_atoms import (
    from_atom_order,
    pack_scale_words,
    padded_shape,
    to_atom_order,
    unpack_scale_words,
)
from megamoe.kernels.layouts.weights import (
    restore_weights_sm90,
    restore_weights_sm100,
    transform_weights_sm90,
    transform_weights_sm100,
)
from megamoe.oracle.metrics import assert_bytes_equal


def random_bytes(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    """Every bit pattern of `dtype`, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).squeeze(-1)


def source_row(kind: str, row: int, intermediate: int) -> int:
    """Row of [gate; up] that `kind` puts at `row`, read off the contract's tables."""
    if kind == "gran8":
        period, r = divmod(row, 16)
        return 8 * period + r if r < 8 else intermediate + 8 * period + r - 8
    period, r = divmod(row, 32)
    block, i = divmod(r, 8)  # gate even, up even, gate odd, up odd
    return (intermediate if block % 2 else 0) + 16 * period + 2 * i + block // 2


KINDS = ("gran8", "gran16_even_odd")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("intermediate", [16, 48, 128, 2880])
def test_interleave_follows_the_row_map(kind: str, intermediate: int) -> None:
    rows = torch.arange(2 * intermediate)[:, None].repeat(1, 3)
    out = interleave_gate_up(rows, kind)
    assert out[:, 0].tolist() == [source_row(kind, r, intermediate) for r in range(2 * intermediate)]
    assert_bytes_equal(out[:, 1], out[:, 0], "every column moves alike")


DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.int64,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in_place"])
@pytest.mark.parametrize(("shape", "dim"), [((64, 5), 0), ((3, 64, 5), -2), ((2, 3, 5, 64), -1)], ids=str)
def test_interleave_round_trip(kind: str, dtype: torch.dtype, in_place: bool, shape: tuple, dim: int) -> None:
    plain = random_bytes(*shape, dtype=dtype)
    working = plain.clone()
    mixed = interleave_gate_up(working, kind, dim, in_place=in_place)
    expected = plain.index_select(dim, torch.tensor([source_row(kind, r, 32) for r in range(64)]))
    assert_bytes_equal(mixed, expected, "interleaved")
    assert (mixed.data_ptr() == working.data_ptr()) == in_place
    assert_bytes_equal(working, expected if in_place else plain, "argument after the call")
    assert_bytes_equal(deinterleave_gate_up(mixed, kind, dim, in_place=in_place), plain, "round trip")


def test_interleave_keeps_mn_major_strides() -> None:
    words = pack_scale_words(random_bytes(3, 64, 8))
    assert interleave_gate_up(words, "gran8").stride() == words.stride() == (128, 1, 64)


@pytest.mark.parametrize("leading", [(), (0,), (2, 3)], ids=str)
def test_interleave_leading_axes(leading: tuple[int, ...]) -> None:
    plain = random_bytes(*leading, 32, 4)
    assert_bytes_equal(deinterleave_gate_up(interleave_gate_up(plain, "gran16_even_odd"), "gran16_even_odd"), plain)


@pytest.mark.parametrize(
    ("kind", "rows", "dim", "message"),
    [
        ("gran8", 24, -2, "24 gate and up rows"),
        ("gran16_even_odd", 48, -2, "multiple of 16"),
        ("gran9", 32, -2, "kind='gran9'"),
        ("gran8", 32, 2, "dim=2"),
    ],
)
def test_interleave_refuses(kind: str, rows: int, dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interleave_gate_up(torch.zeros(rows, 4), kind, dim)


def test_words_hold_four_groups_little_endian_and_mn_major() -> None:
    scales = random_bytes(3, 20, 8)
    words = pack_scale_words(scales)
    assert words.shape == (3, 20, 2)
    assert words.stride() == (40, 1, 20)
    for e, row, j in ((0, 0, 0), (1, 13, 1), (2, 19, 1)):
        expected = sum(int(scales[e, row, 4 * j + b]) << (8 * b) for b in range(4))
        assert int(words[e, row, j]) & 0xFFFFFFFF == expected


def test_word_columns_are_padded_to_sixteen_bytes() -> None:
    words = pack_scale_words(random_bytes(2, 18, 5))
    assert words.shape == (2, 18, 2)
    assert words.stride() == (40, 1, 20)


def test_atom_order_row_by_row() -> None:
    scales = random_bytes(2, 384, 12)
    plain, atoms = pack_scale_words(scales), to_atom_order(scales)
    assert atoms.shape == (2, 384, 3)
    assert atoms.stride() == (384 * 3, 1, 384)
    for row in range(384):
        block, r = divmod(row, 128)
        a, b = divmod(r, 32)
        assert_bytes_equal(atoms[:, 128 * block + 4 * b + a], plain[:, row], f"row {row}")


SHAPES = [
    (128, 4),
    (256, 16),
    (1, 128, 8),
    (3, 256, 12),
    (2, 200, 9),
    (2, 2880, 90),
    (1, 1),
    (0, 128, 4),
    (2, 0, 4),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_atom_order_round_trip(shape: tuple[int, ...]) -> None:
    scales = random_bytes(*shape)
    *lead, rows, groups = shape
    atoms = to_atom_order(scales)
    padded_rows, words = padded_shape(rows, groups)
    assert atoms.shape == (*lead, padded_rows, words)
    assert_bytes_equal(from_atom_order(atoms, rows=rows, groups=groups), scales, "round trip")
    assert_bytes_equal(to_atom_order(pack_scale_words(scales)), atoms, "from words of any padding")
    assert_bytes_equal(unpack_scale_words(pack_scale_words(scales), groups), scales, "words")
    everything = from_atom_order(atoms)
    assert not everything[..., rows:, :].any()
    assert not everything[..., groups:].any()


def test_scale_errors() -> None:
    with pytest.raises(TypeError, match=r"float32; allowed: torch\.int32"):
        to_atom_order(torch.zeros(128, 4))
    with pytest.raises(ValueError, match="row and a K axis"):
        pack_scale_words(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="have \\(256, 1\\) in atom order"):
        from_atom_order(torch.zeros(128, 1, dtype=torch.int32), rows=200)
    with pytest.raises(ValueError, match="groups=5 does not fit"):
        unpack_scale_words(torch.zeros(128, 1, dtype=torch.int32), groups=5)


@dataclass(frozen=True)
class Weights:
    """One SM100 layer's weights: `lead` axes, element dtype, packed columns per byte and scale group."""

    mma_type: str
    lead: tuple[int, ...]
    dtype: torch.dtype = torch.int8
    per_byte: int = 2
    group: int = 32
    interleave: str = "gran8"
    hidden: int = 256
    intermediate: int = 384

    def make(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        return tuple(
            (
                random_bytes(*self.lead, rows, columns // self.per_byte, dtype=self.dtype, seed=seed),
                random_bytes(*self.lead, rows, columns // self.group, seed=seed + 1),
            )
            for seed, rows, columns in (
                (1, 2 * self.intermediate, self.hidden),
                (3, self.hidden, self.intermediate),
            )
        )  # type: ignore[return-value]


E4M3 = torch.float8_e4m3fn
WEIGHTS = {
    "fp8xfp4 experts": Weights("fp8xfp4", (3,)),
    "fp8xfp4 uint8": Weights("fp8xfp4", (2,), dtype=torch.uint8),
    "fp8xfp4 shared": Weights("fp8xfp4", (), dtype=E4M3, per_byte=1),
    "mxf4xmxf4 experts": Weights("mxf4xmxf4", (3,), interleave="gran16_even_odd"),
    "mxf4xmxf4 shared": Weights("mxf4xmxf4", (), interleave="gran16_even_odd"),
    "nvfp4xnvfp4 experts": Weights("nvfp4xnvfp4", (3,), group=16, interleave="gran16_even_odd"),
    "gpt-oss shape": Weights("fp8xfp4", (1,), hidden=2880, intermediate=2880),
}


@pytest.mark.parametrize("case", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in_place"])
def test_sm100_weights(case: Weights, in_place: bool) -> None:
    plain, (l1, l2) = case.make(), case.make()
    new_l1, new_l2 = transform_weights_sm100(l1, l2, case.mma_type, in_place=in_place)

    order = torch.tensor([source_row(case.interleave, r, case.intermediate) for r in range(2 * case.intermediate)])
    assert_bytes_equal(new_l1[0], plain[0][0].view(torch.uint8).index_select(-2, order).view(case.dtype), "L1 weight")
    assert_bytes_equal(new_l1[1], to_atom_order(plain[0][1].index_select(-2, order)), "L1 scale")
    assert new_l2[0] is l2[0]
    assert_bytes_equal(new_l2[0], plain[1][0], "L2 weight")
    assert_bytes_equal(new_l2[1], to_atom_order(plain[1][1]), "L2 scale")
    assert (new_l1[0].data_ptr() == l1[0].data_ptr()) == in_place
    for scale in (new_l1[1], new_l2[1]):
        assert scale.stride(-2) == 1
        assert scale.stride(-1) == scale.shape[-2]

    back = restore_weights_sm100(new_l1, new_l2, case.mma_type, in_place=in_place)
    for layer, pair, expected in zip(("L1", "L2"), back, plain):
        assert_bytes_equal(pair[0], expected[0], f"{layer} weight, round trip")
        assert_bytes_equal(pair[1], expected[1], f"{layer} scale, round trip")


@pytest.mark.parametrize("name", ["fp8xfp4 experts", "nvfp4xnvfp4 experts", "fp8xfp4 shared"])
def test_sm100_scales_may_come_as_words(name: str) -> None:
    case = WEIGHTS[name]
    (w1, s1), (w2, s2) = case.make()
    from_bytes = transform_weights_sm100((w1, s1), (w2, s2), case.mma_type)
    words = transform_weights_sm100((w1, pack_scale_words(s1)), (w2, pack_scale_words(s2)), case.mma_type)
    for layer in (0, 1):
        assert_bytes_equal(words[layer][1], from_bytes[layer][1], f"L{layer + 1} scale")


def test_sm100_weight_errors() -> None:
    l1, l2 = WEIGHTS["fp8xfp4 experts"].make()
    with pytest.raises(ValueError, match="numerics='deep_gemm_sm100' is not legal"):
        transform_weights_sm100(l1, l2, "fp8xfp8")
    with pytest.raises(ValueError, match="l2 scale has shape"):
        transform_weights_sm100(l1, (l2[0], l2[1][:, :-1]), "fp8xfp4")
    with pytest.raises(TypeError, match="l1 scale has dtype torch.float32"):
        transform_weights_sm100((l1[0], l1[1].float()), l2, "fp8xfp4")
    with pytest.raises(TypeError, match="weight has dtype torch.float32"):
        transform_weights_sm100((l1[0].float(), l1[1]), l2, "fp8xfp4")


@pytest.mark.parametrize("lead", [(3,), ()], ids=["experts", "shared"])
@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in_place"])
def test_sm90_weights(lead: tuple[int, ...], in_place: bool) -> None:
    hidden, intermediate = 256, 384
    w1 = random_bytes(*lead, 2 * intermediate, hidden, dtype=E4M3)
    s1 = random_bytes(*lead, 2 * intermediate // 128, hidden // 128, dtype=torch.float32)
    w2 = random_bytes(*lead, hidden, intermediate, dtype=E4M3)
    s2 = random_bytes(*lead, hidden // 128, intermediate // 128, dtype=torch.float32)
    plain = w1.clone()
    (new_w1, new_s1), (new_w2, new_s2) = transform_weights_sm90((w1, s1), (w2, s2), in_place=in_place)
    order = torch.tensor([source_row("gran8", r, intermediate) for r in range(2 * intermediate)])
    assert_bytes_equal(new_w1, plain.view(torch.uint8).index_select(-2, order).view(E4M3), "L1 weight")
    assert new_s1 is s1
    assert new_w2 is w2
    assert new_s2 is s2
    (back, _), _ = restore_weights_sm90((new_w1, s1), (w2, s2), in_place=in_place)
    assert_bytes_equal(back, plain, "round trip")


def test_sm90_refuses_scales_that_would_be_misread() -> None:
    w1, w2 = (torch.zeros(2, 512, 256, dtype=torch.uint8).view(E4M3) for _ in range(2))
    s = torch.ones(2, 4, 2)
    mn_major = s.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="l2 scale has strides"):
        transform_weights_sm90((w1, s), (w2, mn_major))
    with pytest.raises(ValueError, match="l1 scale has shape"):
        transform_weights_sm90((w1, s[:, :2]), (w2, s))
    with pytest.raises(TypeError, match="l1 weight has dtype torch.int8"):
        transform_weights_sm90((w1.view(torch.int8), s), (w2, s))
