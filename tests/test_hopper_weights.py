"""The SM90 tier's weight tiles: a round trip byte for byte, and what the decoder reads from them."""

import pytest
import torch

import megamoe
from megamoe import formats
from megamoe.kernels.hopper.layer import plain_weights, prepare_hopper
from megamoe.kernels.hopper.weights import (
    MAX_SPAN,
    bf16_k_order,
    from_hopper,
    k_order,
    scales_unsupported_reason,
    to_hopper,
)
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.public_arguments import weight_arguments
from megamoe.oracle.random_layers import random_layer
from megamoe.oracle.reference.quantizers import BlockFormat, dequantize_weight
from megamoe.recipe import Recipe

W4A16 = Recipe("bf16xfp4", "none", "trtllm_gen")
MXFP4 = BlockFormat("e2m1", "ue8m0", 1, 32)
SHAPES = [(1, 128, 256), (3, 256, 512), (2, 384, 768)]


def _random(experts: int, rows: int, columns: int, *, span: int = MAX_SPAN) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, span + 1, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return codes, scales + torch.randint(0, 240, (experts, rows, 1), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("pair_columns", [False, True], ids=["rows as they are", "columns paired"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(shape: tuple[int, int, int], pair_columns: bool) -> None:
    codes, scales = _random(*shape)
    back = from_hopper(to_hopper(codes, scales, pair_columns=pair_columns), pair_columns=pair_columns)
    assert_bytes_equal(back[0], codes, "codes")
    assert_bytes_equal(back[1], scales, "scales")


def test_gate_before_up_as_checkpoints_have_them() -> None:
    """Under trtllm-gen's numerics the rows of w13 stay where they are, and its scales do not."""
    layer = random_layer(W4A16, tokens=1, hidden=256, intermediate=256, num_experts=2, top_k=1)
    weights = megamoe.prepare_weights(**weight_arguments(layer))
    assert weights.w13_rows == "gate_up"
    plain = plain_weights(prepare_hopper(weights))
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        assert_bytes_equal(getattr(plain, name), getattr(layer.weights, name), name)


def test_as_many_bytes_of_codes_and_half_of_the_scales() -> None:
    codes, scales = _random(2, 256, 512)
    tiles = to_hopper(codes, scales)
    assert tiles.codes.numel() == codes.numel()
    assert tiles.spans.numel() == scales.numel() // 2


def test_the_k_order_is_a_permutation_that_gives_each_lane_one_scale_group() -> None:
    order = k_order()
    assert sorted(order.tolist()) == list(range(128))
    position = torch.arange(128)
    assert torch.equal(order // 32, position // 4 % 4)


def _as_the_kernel_reads(codes: torch.Tensor, spans_: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
    """One expert's tiles → fp32 [N, K], written from the decoder's side: thread by thread, word by word."""
    tiles, blocks = codes.shape[:2]
    words = codes.reshape(tiles, blocks, 2, 2, 2, 4, 8, 4, 4, 4).long()  # .., k128, wg, r3, r54, r20, lane, word, byte
    words = (words << (8 * torch.arange(4))).sum(-1)
    out = torch.zeros(tiles * 128, blocks * 256)
    tile, block, half, wg, r3, r54, r20, lane, word = torch.meshgrid(
        *(torch.arange(n) for n in words.shape), indexing="ij"
    )
    row = tile * 128 + wg * 64 + r54 * 16 + r3 * 8 + r20
    span = spans_.reshape(tiles, blocks, 2, 2, 4, 8, 4).long()[tile, block, wg, r3, r54, r20, lane]
    exponent = torch.where(half == 0, span & 0xF, span >> 4)
    for i in range(4):
        for high in range(2):
            magnitude = (words >> (16 * high + 4 * i)) & 7
            sign = (words >> (8 * i + (3 if high else 7))) & 1
            value = formats.decode_e2m1((magnitude | sign << 3).to(torch.uint8)) * torch.exp2(exponent - 5.0)
            position = 64 * high + 16 * word + 4 * lane + i
            out[row, block * 256 + half * 128 + position] = value * row_scale[row]
    return out


def test_the_bf16_order_gives_each_lane_the_same_codes() -> None:
    """A lane's codes of a word are those of the FP8 order: columns 4·octet + i of its scale group, two by two."""
    order = bf16_k_order()
    assert torch.equal(order.sort().values, torch.arange(128))
    for octet in range(8):
        for c in range(4):
            lane = torch.cat([order[16 * octet + 8 * high + 2 * c :][:2] for high in (0, 1)])
            assert lane.tolist() == [32 * c + 4 * octet + i for i in range(4)]


def test_the_decoder_reads_the_weights_in_k_order() -> None:
    codes, scales = _random(1, 256, 512)
    scales = scales.clamp(100, 150)
    tiles = to_hopper(codes, scales)
    expected = dequantize_weight(codes[0], scales[0], MXFP4).unflatten(1, (-1, 128))[:, :, k_order()].flatten(1)
    read = _as_the_kernel_reads(tiles.codes[0], tiles.spans[0], tiles.row_scale[0])
    assert_bytes_equal(read, expected, "weights")


def test_every_folded_exponent_is_exact_in_e4m3() -> None:
    """All magnitudes at all distances: a byte table plus 8 per binade is the E4M3 number itself."""
    for magnitudes, table, step in (((0, 0.5, 1, 1.5), 0x14100800, 0x08080800), ((2, 3, 4, 6), 0x24201C18, 0x08080808)):
        for distance in range(MAX_SPAN + 1):
            word = table + distance * step
            for i, magnitude in enumerate(magnitudes):
                byte = torch.tensor([word >> (8 * i) & 0xFF], dtype=torch.uint8)
                value = formats.decode_e4m3(byte.view(torch.float8_e4m3fn)).item()
                assert value == magnitude * 2.0 ** (distance - 5)


def test_a_row_of_more_binades_is_refused() -> None:
    codes, scales = _random(2, 128, 256, span=0)
    scales[1, 5, 3] += MAX_SPAN + 1
    assert scales_unsupported_reason(scales) == "span 12 binades in one row; allowed: 11"
    with pytest.raises(ValueError, match="scales of expert 1 span 12 binades"):
        to_hopper(codes, scales)


@pytest.mark.parametrize(
    ("bytes_", "reason"),
    [
        ((250, 255), "have NaN, byte 255"),
        ((250, 254), "are bytes of 250 and more in a whole row; a row's smallest may be 249"),
        ((249, 254), None),
        ((0, 11), None),
    ],
)
def test_the_ends_of_the_range(bytes_: tuple[int, int], reason: str | None) -> None:
    codes, scales = _random(1, 128, 256, span=0)
    scales[0, 5] = bytes_[0]
    scales[0, 5, 3] = bytes_[1]
    assert scales_unsupported_reason(scales) == reason
    if reason is None:
        assert bool(to_hopper(codes, scales).row_scale.isfinite().all())
    else:
        with pytest.raises(ValueError, match=f"^scales of expert 0 {reason.split(';')[0]}"):
            to_hopper(codes, scales)
