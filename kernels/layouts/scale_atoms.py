"""Scale factors of block-scaled operands: four one-byte scales per word, words in tensor-memory copy order.

Source of the contract: the scale layout of DeepGEMM MegaMoE's SM100 kinds (`sgl-deep-gemm` 0.1.7), for UE8M0
and UE4M3 alike.

* Words: byte b of int32 word j of a row is the scale of K-group 4j + b.
* MN-major: the word of (row, j) lies at j·N + row, N the row count rounded up to 4 (16-byte columns for TMA).
* Atom order: inside each block of 128 rows, row 32a + b (a < 4, b < 32) moves to row 4b + a. It is what the
  128-lane scale copy into tensor memory expects.

Row counts that are no multiple of 128 and group counts that are no multiple of 4 are padded with zero bytes;
upstream refuses them, so its own shapes give its own bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ATOM_ROWS = 128
GROUPS_PER_WORD = 4


def padded_shape(rows: int, groups: int) -> tuple[int, int]:
    """(rows, words) that `to_atom_order` gives a scale matrix of `rows` rows and `groups` K-groups."""
    return -(-rows // ATOM_ROWS) * ATOM_ROWS, -(-groups // GROUPS_PER_WORD)


def pack_scale_words(scales: torch.Tensor) -> torch.Tensor:
    """Scale bytes [.., MN, Kg] uint8 -> MN-major words [.., MN, ceil(Kg/4)] int32, in plain row order.

    The words have strides (.., 1, N) with N = MN rounded up to 4; padding bytes are zero.
    """
    _require(scales, torch.uint8, "scales")
    *lead, rows, groups = scales.shape
    num_words = padded_shape(rows, groups)[1]
    words = torch.zeros(*lead, num_words, -(-rows // 4) * 4, dtype=torch.int32, device=scales.device)
    target = words.view(torch.uint8).unflatten(-1, (-1, 4))[..., :rows, :].transpose(-3, -2)
    whole = groups // GROUPS_PER_WORD
    target[..., :whole, :].copy_(scales[..., : whole * 4].unflatten(-1, (whole, 4)))
    if whole < num_words:
        target[..., whole, : groups % 4].copy_(scales[..., whole * 4 :])
    return words.transpose(-2, -1)[..., :rows, :]


def unpack_scale_words(words: torch.Tensor, groups: int | None = None) -> torch.Tensor:
    """Words [.., MN, Kw] int32 of any strides -> scale bytes [.., MN, groups] uint8, row-major.

    `groups` None means all 4·Kw of them.
    """
    _require(words, torch.int32, "words")
    groups = words.shape[-1] * GROUPS_PER_WORD if groups is None else groups
    if not 0 <= groups <= words.shape[-1] * GROUPS_PER_WORD:
        raise ValueError(f"groups={groups} does not fit in {words.shape[-1]} words of {GROUPS_PER_WORD} bytes")
    rows = torch.empty(words.shape, dtype=torch.int32, device=words.device)  # one word per row has any stride
    return rows.copy_(words).view(torch.uint8)[..., :groups].contiguous()


def to_atom_order(scales: torch.Tensor) -> torch.Tensor:
    """Scales [.., MN, Kg] uint8 bytes, or their words [.., MN, Kw] int32, -> words in atom order.

    Returns int32 [.., *padded_shape(MN, Kg)], MN-major (strides (N·Kw, 1, N), N the padded row count).
    """
    words = pack_scale_words(scales) if scales.dtype == torch.uint8 else scales
    _require(words, torch.int32, "scales")
    *lead, rows, num_words = words.shape
    padded_rows = padded_shape(rows, 1)[0]
    out = torch.empty(*lead, num_words, padded_rows, dtype=torch.int32, device=words.device)
    if rows < padded_rows:
        words = torch.nn.functional.pad(words, (0, 0, 0, padded_rows - rows))
    # Row 32a + b -> 4b + a is a transposition of each block seen as 4 × 32.
    out.unflatten(-1, (-1, 32, 4)).copy_(words.transpose(-2, -1).unflatten(-1, (-1, 4, 32)).transpose(-2, -1))
    return out.transpose(-2, -1)


def from_atom_order(words: torch.Tensor, *, rows: int | None = None, groups: int | None = None) -> torch.Tensor:
    """The inverse of `to_atom_order`: words [.., MN, Kw] int32 -> row-major bytes [.., rows, groups] uint8.

    `rows` and `groups` are the sizes before padding (`padded_shape` must give the words' shape for them);
    None keeps everything.
    """
    _require(words, torch.int32, "words")
    padded_rows, num_words = words.shape[-2:]
    rows = padded_rows if rows is None else rows
    groups = num_words * GROUPS_PER_WORD if groups is None else groups
    if padded_shape(rows, groups) != (padded_rows, num_words):
        raise ValueError(
            f"words has {padded_rows} rows of {num_words} words; {rows} rows of {groups} groups have "
            f"{padded_shape(rows, groups)} in atom order"
        )
    plain = words.transpose(-2, -1).unflatten(-1, (-1, 32, 4)).transpose(-2, -1).flatten(-3).transpose(-2, -1)
    return unpack_scale_words(plain[..., :rows, :], groups)


def _require(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {dtype}")
    if tensor.dim() < 2:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it needs at least a row and a K axis")


@triton.jit
def load_scale_atoms(
    sf, first_row, first_group, n_rows: tl.constexpr, n_groups: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Scale bytes [ROWS, GROUPS] of a weight tile, uint8, from words in atom order.

    `sf` points to the bytes of one expert's words; the tile starts at `first_row` (a multiple of 128) and
    `first_group` (a multiple of 4, or of GROUPS); ROWS is a multiple of 128, GROUPS one of 1, 2 and the
    multiples of 4. An atom of 128 rows × 4 groups is 512 contiguous bytes; seen as 32 × 4 × 4 its
    transposition to rows is the one SM100's compiler knows how to feed to tensor memory. Words beyond the
    matrix read as zero.
    """
    PADDED_ROWS: tl.constexpr = (n_rows + 127) // 128 * 128
    WORDS: tl.constexpr = (n_groups + 3) // 4
    atom = first_row // 128 + tl.arange(0, ROWS // 128)[:, None, None, None, None]
    BYTES: tl.constexpr = 4 if GROUPS >= 4 else GROUPS
    word = first_group // 4 + tl.arange(0, GROUPS // BYTES)[None, :, None, None, None]
    b = tl.arange(0, 32)[None, None, :, None, None]
    a = tl.arange(0, 4)[None, None, None, :, None]
    byte = first_group % 4 + tl.arange(0, BYTES)[None, None, None, None, :]
    ptr = sf + word * (PADDED_ROWS * 4) + atom * 512 + b * 16 + a * 4 + byte
    if PADDED_ROWS % ROWS == 0 and WORDS % (GROUPS // BYTES) == 0:
        atoms = tl.load(ptr)
    else:
        atoms = tl.load(ptr, mask=(atom * 128 < PADDED_ROWS) & (word < WORDS), other=0)
    return tl.trans(atoms, 0, 3, 2, 1, 4).reshape(ROWS, GROUPS)
