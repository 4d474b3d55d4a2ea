"""Weights re-laid where they are: the tiles of `to_hopper`, no other memory, and every byte back again."""

import pytest
import torch

from megamoe.kernels.hopper import in_place
from megamoe.kernels.hopper.weights import to_hopper
from megamoe.kernels.layouts.scale_atoms import to_atom_order
from megamoe.oracle.metrics import assert_bytes_equal


def _matrix(experts: int, rows: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 112, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return codes.to(device), scales.to(device)


@pytest.mark.parametrize("pair_columns", (False, True))
@pytest.mark.parametrize(("experts", "rows", "columns"), [(1, 128, 256), (2, 256, 512), (5, 128, 768)])
def test_there_and_back(experts: int, rows: int, columns: int, pair_columns: bool, device: str) -> None:
    codes, scales = _matrix(experts, rows, columns, device)
    words = to_atom_order(scales)
    expected = to_hopper(codes, scales, pair_columns=pair_columns)
    before = codes.clone(), words.clone()
    assert in_place.unsupported_reason(codes, words) is None
    matrix, store = in_place.to_hopper_in_place(codes, words, pair_columns=pair_columns)
    for name, tensor, wanted in zip(matrix._fields, matrix, expected, strict=True):
        assert_bytes_equal(tensor, wanted, name)
    assert matrix.codes.data_ptr() == codes.data_ptr()
    assert matrix.spans.data_ptr() == words.data_ptr()
    assert (store.dtype, store.shape) == (torch.uint8, (scales.numel(),))
    assert store.data_ptr() == words.data_ptr()
    assert matrix.row_scale.data_ptr() + 4 * matrix.row_scale.numel() <= store.data_ptr() + store.numel()

    back_codes, back_words = in_place.from_hopper_in_place(matrix.codes, store, pair_columns=pair_columns)
    assert_bytes_equal(back_codes, before[0], "codes")
    assert_bytes_equal(back_words, before[1], "words")
    assert back_words.stride() == before[1].stride()


def test_what_cannot_be_held_exactly_is_told_before_anything_is_written(device: str) -> None:
    codes, scales = _matrix(3, 128, 256, device)
    scales[2, 7, 0], scales[2, 7, 1] = 90, 102
    reason = in_place.unsupported_reason(codes, to_atom_order(scales))
    assert reason is not None
    assert reason.startswith("scales of expert 2 span ")
    scales[2, 7] = 250
    assert in_place.unsupported_reason(codes, to_atom_order(scales)) == (
        "scales of expert 2 are bytes of 250 and more in a whole row; a row's smallest may be 249"
    )
    assert in_place.unsupported_reason(codes[:, :64], to_atom_order(scales[:, :64])) == (
        "64 rows × 256 columns are not whole tiles of 128 × 256"
    )


def test_the_widest_scales_that_can_be_held_come_back(device: str) -> None:
    codes, scales = _matrix(1, 128, 256, device)
    scales[0, 0], scales[0, 1] = 249, 0
    scales[0, 2, 1:] = 255 - 1
    scales[0, 2, 0] = 249
    words = to_atom_order(scales)
    before = codes.clone(), words.clone()
    assert in_place.unsupported_reason(codes, words) is None
    matrix, store = in_place.to_hopper_in_place(codes, words, pair_columns=False)
    assert bool(matrix.row_scale.isfinite().all())
    back_codes, back_words = in_place.from_hopper_in_place(matrix.codes, store, pair_columns=False)
    assert_bytes_equal(back_codes, before[0], "codes")
    assert_bytes_equal(back_words, before[1], "words")


def test_addresses_that_tma_cannot_read(device: str) -> None:
    codes, scales = _matrix(1, 128, 256, device)
    words = to_atom_order(scales)
    apart = torch.empty(codes.numel() + 8, dtype=torch.uint8, device=device)[8:].view(codes.shape)
    reason = in_place.unsupported_reason(apart, words)
    assert reason == "the weights begin at an address that is no multiple of 16 bytes, as TMA wants it"
    memory = torch.empty(words.numel() + 1, dtype=torch.int32, device=device)[1:]
    reason = in_place.unsupported_reason(codes, memory.view(words.mT.shape).mT)
    assert reason == "the scales begin at an address that is no multiple of 16 bytes, as TMA wants it"
