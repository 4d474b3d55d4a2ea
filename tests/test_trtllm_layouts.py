"""Layouts of trtllm-gen's MoE: FlashInfer 0.6.18's own functions as judge, known samples, inverses, bad arguments."""

from collections.abc import Callable

import pytest
import torch

from megamoe.kernels.layouts import trtllm
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.trtllm_gen import flashinfer_layouts

pytestmark = pytest.mark.differential

SHAPES = [(128, 128), (256, 512), (384, 1024)]
"""(intermediate, hidden)."""
SCALE_SHAPES = [(128, 4), (256, 8), (130, 5), (512, 128), (1, 1), (127, 3)]


@pytest.fixture(scope="module")
def flashinfer() -> flashinfer_layouts.Layouts:
    try:
        return flashinfer_layouts.load(download=True)
    except OracleUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def offsets() -> Callable[[int, int], torch.Tensor]:
    try:
        return flashinfer_layouts.load_scale_offsets(download=True)
    except OracleUnavailable as error:
        pytest.skip(str(error))


def _bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _numbered(rows: int) -> torch.Tensor:
    return torch.arange(rows, dtype=torch.int32)[:, None]


@pytest.mark.parametrize("per_scale", [None, 16, 32])
@pytest.mark.parametrize("intermediate, hidden", SHAPES)
def test_rows_are_flashinfers(
    flashinfer: flashinfer_layouts.Layouts, intermediate: int, hidden: int, per_scale: int | None
) -> None:
    columns = hidden // (per_scale or 2)
    w13, w2 = _bytes(2 * intermediate, columns), _bytes(hidden, columns, seed=1)
    rows = flashinfer.core._maybe_get_cached_w3_w1_permute_indices({}, w13, 128, per_scale)
    assert_bytes_equal(trtllm.shuffle_w13(w13, halves="up_gate"), w13[rows], "w13")
    assert_bytes_equal(trtllm.unshuffle_w13(w13[rows], halves="up_gate"), w13, "w13 from FlashInfer's")
    rows = flashinfer.core.get_w2_permute_indices_with_cache({}, w2, 128, per_scale)
    assert_bytes_equal(trtllm.shuffle_rows(w2), w2[rows], "w2")
    assert_bytes_equal(trtllm.unshuffle_rows(w2[rows]), w2, "w2 from FlashInfer's")


@pytest.mark.parametrize("tile, block", [(128, 32), (256, 32), (64, 16), (192, 16), (8, 16)])
def test_both_shuffle_blocks_are_flashinfers(flashinfer: flashinfer_layouts.Layouts, tile: int, block: int) -> None:
    w = _bytes(384, 6)
    assert flashinfer.utils.get_shuffle_block_size(tile) == block
    assert_bytes_equal(trtllm.shuffle_rows(w, block=block), flashinfer.quantization.shuffle_matrix_a(w, tile))
    assert_bytes_equal(trtllm.unshuffle_rows(trtllm.shuffle_rows(w, block=block), block=block), w)


def test_gate_interleave_is_flashinfers(flashinfer: flashinfer_layouts.Layouts) -> None:
    w13 = _bytes(256, 4)
    shuffled = flashinfer.quantization.shuffle_matrix_a(flashinfer.core.reorder_rows_for_gated_act_gemm(w13), 128)
    assert_bytes_equal(trtllm.shuffle_w13(w13, halves="up_gate"), shuffled)


def test_our_half_order_is_flashinfers_swapped() -> None:
    gate, up = _bytes(3, 128, 8), _bytes(3, 128, 8, seed=1)
    ours = trtllm.shuffle_w13(torch.cat([gate, up], 1))
    assert_bytes_equal(ours, trtllm.shuffle_w13(torch.cat([up, gate], 1), halves="up_gate"))
    assert not torch.equal(ours, trtllm.shuffle_w13(torch.cat([up, gate], 1))), "swapped halves must show"
    assert_bytes_equal(trtllm.unshuffle_w13(ours), torch.cat([gate, up], 1))


def test_known_rows_of_w13_and_w2() -> None:
    """I = 128, rows [up; gate]."""
    rows = trtllm.shuffle_w13(_numbered(256), halves="up_gate").flatten().tolist()
    assert rows[:16] == [0, 2, 4, 6, 8, 10, 12, 14, 128, 130, 132, 134, 136, 138, 140, 142]
    assert rows[16:32] == [1, 3, 5, 7, 9, 11, 13, 15, 129, 131, 133, 135, 137, 139, 141, 143]
    assert rows[32:40] == [16, 18, 20, 22, 24, 26, 28, 30]
    assert rows[252:] == [249, 251, 253, 255]
    assert trtllm.shuffle_rows(_numbered(256)).flatten()[:12].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_row_orders_of_any_dtype_are_bijections(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    w = _bytes(*lead, 192, 4 * dtype.itemsize).view(dtype)
    for block in trtllm.SHUFFLE_BLOCKS:
        for halves in trtllm.HALVES:
            kernel = trtllm.shuffle_w13(w, halves=halves, block=block)
            assert kernel.is_contiguous()
            assert_bytes_equal(trtllm.unshuffle_w13(kernel, halves=halves, block=block), w)
        assert_bytes_equal(trtllm.unshuffle_rows(trtllm.shuffle_rows(w, block=block), block=block), w)
    rows = trtllm.shuffle_w13(_numbered(192)).flatten()
    assert torch.equal(rows.sort().values, torch.arange(192, dtype=torch.int32))


@pytest.mark.parametrize("rows, cols", SCALE_SHAPES)
def test_scale_tiles_are_flashinfers(offsets: Callable[[int, int], torch.Tensor], rows: int, cols: int) -> None:
    scales = _bytes(rows, cols)
    padded_rows, padded_cols = trtllm.padded_shape(rows, cols)
    expected = torch.zeros(padded_rows * padded_cols, dtype=torch.uint8)
    expected[offsets(rows, cols).flatten()] = scales.flatten()
    assert_bytes_equal(trtllm.swizzle_scales(scales), expected.view(padded_rows, padded_cols), "tiles")
    assert_bytes_equal(trtllm.unswizzle_scales(expected.view(padded_rows, padded_cols), rows, cols), scales, "back")


@pytest.mark.parametrize(
    "row, col, offset",
    [
        (0, 3, 3), (0, 4, 512), (1, 0, 16), (32, 0, 4), (33, 1, 21), (96, 3, 15), (127, 7, 1023), (128, 0, 1024),
        (129, 5, 1553),
    ],
)  # fmt: skip
def test_known_scale_offsets(row: int, col: int, offset: int) -> None:
    """Of a matrix with 8 columns."""
    assert trtllm.scale_offset(row, col, 8) == offset
    scales = torch.zeros(256, 8, dtype=torch.uint8)
    scales[row, col] = 0xC5
    assert trtllm.swizzle_scales(scales).flatten().nonzero().tolist() == [[offset]]


@pytest.mark.parametrize("rows, cols", SCALE_SHAPES)
def test_scale_tiles_of_experts(rows: int, cols: int) -> None:
    scales = _bytes(2, 3, rows, cols)
    tiles = trtllm.swizzle_scales(scales)
    assert tiles.shape == (2, 3, *trtllm.padded_shape(rows, cols))
    assert_bytes_equal(trtllm.unswizzle_scales(tiles, rows, cols), scales)
    assert_bytes_equal(tiles[1, 2], trtllm.swizzle_scales(scales[1, 2]), "an expert's tiles are its own")
    flat = tiles[0, 0].flatten()
    for row, col in ((0, 0), (rows - 1, cols - 1), (rows // 2, cols // 2)):
        assert flat[trtllm.scale_offset(row, col, cols)] == scales[0, 0, row, col]
    assert int((flat == 0).sum()) == flat.numel() - rows * cols, "padding is zero"


def test_known_routing_words() -> None:
    ids, weights = torch.tensor([[255, 256, 3, -1]]), torch.tensor([[0.25, 2 / 3, -0.5, 1.0]])
    words = trtllm.pack_topk(ids, weights)
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0x00FF3E80, 0x01003F2B, 0x0003BF00, 0xFFFF3F80]
    back_ids, back_weights = trtllm.unpack_topk(words)
    assert torch.equal(back_ids, ids.int())
    assert_bytes_equal(back_weights, weights.bfloat16())


def test_every_weight_and_the_ids_range_survive_packing() -> None:
    weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ids = torch.arange(-(2**15), 2**15, dtype=torch.int32).roll(777)
    back_ids, back_weights = trtllm.unpack_topk(trtllm.pack_topk(ids, weights))
    assert torch.equal(back_ids, ids)
    assert_bytes_equal(back_weights, weights)


def test_bad_arguments_are_named() -> None:
    w, scales = _bytes(64, 4), _bytes(128, 4)
    for call, text in (
        (lambda: trtllm.shuffle_rows(_bytes(48, 4)), r"tensor has shape \(48, 4\); its rows must be a multiple of 32"),
        (lambda: trtllm.unshuffle_rows(_bytes(40, 4), block=16), "multiple of 16"),
        (lambda: trtllm.shuffle_rows(w, block=8), "block=8; allowed: 16, 32"),
        (lambda: trtllm.shuffle_w13(w, halves="up"), "halves='up'; allowed: 'gate_up', 'up_gate'"),
        (lambda: trtllm.unswizzle_scales(scales, 129, 4), r"tiles has shape \(128, 4\); 129 rows of 4 scales have"),
        (lambda: trtllm.pack_topk(torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 3)), "topk_weights has shape"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for call, text in (
        (lambda: trtllm.swizzle_scales(torch.zeros(4, 4)), "scales have dtype torch.float32; allowed: uint8"),
        (lambda: trtllm.pack_topk(torch.zeros(2, 2), torch.zeros(2, 2)), "topk_ids has dtype torch.float32"),
        (lambda: trtllm.pack_topk(torch.zeros(2, dtype=torch.int32), torch.zeros(2).int()), "topk_weights has dtype"),
        (lambda: trtllm.unpack_topk(torch.zeros(2, dtype=torch.int64)), "words has dtype torch.int64"),
    ):
        with pytest.raises(TypeError, match=text):
            call()
