"""MXFP4 weights in the order in which SM90's tensor cores take them from registers.

A tile is 128 rows × 256 columns, 16 KiB of codes, read by two warpgroups of 64 rows each. Within a tile, codes lie in
the order (k128, warpgroup, row bit 3, row bits 5…4, row bits 2…0, scale group, k bits 4…3): what one thread of an m64
FP8 MMA needs is two runs of 16 bytes, and no code ever moves to another thread.

* A 32-bit word holds eight codes of one row and one scale group of 32 columns: columns 4·h + i (i < 4, h one bit) of
  its k octets j and j + 2. Magnitudes come first, four bits apart, so that a byte permutation can look four of them up
  at a time; the signs sit where the E4M3 numbers have theirs.
* Lane c of a quad meets scale group c of every 128 columns only. That orders the contraction axis: position
  32·j + 16·h + 4·c + i of a block of 128 is column 32·c + 8·j + 4·h + i (`k_order`). Activations are stored in that
  order by the kernels that quantize them; a contraction does not care.
* A group's UE8M0 byte becomes a 4-bit distance from the smallest of its row; the row's smallest is an fp32 factor of
  the result. Distances up to 11 keep every decoded number a normal E4M3 number; a row that spans more can't be held
  exactly and the layer takes the portable path (`spans`).

Source of the contract: the MXFP4 format (E2M1 with UE8M0 scales per 32 columns); the order is ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe.kernels.layouts.gate_up import interleave_gate_up

TILE_ROWS = 128
TILE_COLUMNS = 256
MAX_SPAN = 11
_NAN = 255
_MAX_SMALLEST = 249  # above it a row's factor, 2^(byte − 122), is no fp32 number
_BIAS = 5  # a code's table entry at distance 0 is the value · 2^-5


class HopperMatrix(NamedTuple):
    """codes uint8 [E, N/128, K/256, 16384]; spans uint8 [E, N/128, K/256, 512], two 4-bit distances per byte;
    row_scale fp32 [E, N]."""

    codes: torch.Tensor
    spans: torch.Tensor
    row_scale: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self)


def k_order(device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [128]: the column at each stored position of a block of 128."""
    position = torch.arange(128, device=device)
    j, h, c, i = position // 32, position // 16 % 2, position // 4 % 4, position % 4
    return 32 * c + 8 * j + 4 * h + i


def bf16_k_order(device: torch.device | str = "cpu") -> torch.Tensor:
    """As `k_order`, where the codes become BF16: an MMA takes 16 columns, of which a thread has two and two."""
    position = torch.arange(128, device=device)
    octet, high, c, low = position // 16, position // 8 % 2, position // 2 % 4, position % 2
    return 32 * c + 4 * octet + 2 * high + low


def scales_unsupported_reason(scales: torch.Tensor) -> str | None:
    """What keeps UE8M0 bytes [.., N, K/32] from being held exactly, to be read behind their name; None where nothing
    does. Waits for the GPU, once."""
    smallest, largest = scales.amin(-1).int(), scales.amax(-1).int()
    widest, most, last = torch.stack([(largest - smallest).max(), smallest.max(), largest.max()]).tolist()
    if last == _NAN:
        return f"have NaN, byte {_NAN}"
    if widest > MAX_SPAN:
        return f"span {widest} binades in one row; allowed: {MAX_SPAN}"
    if most > _MAX_SMALLEST:
        return f"are bytes of {most} and more in a whole row; a row's smallest may be {_MAX_SMALLEST}"
    return None


def to_hopper(
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    gate_up: bool = False,
    pair_columns: bool = False,
) -> HopperMatrix:
    """Packed E2M1 uint8 [E, N, K/2] and UE8M0 uint8 [E, N, K/32] → tiles; N % 128 = K % 256 = 0.

    `shared`: codes and scales [N, ..] of one more expert, which becomes the last.

    `gate_up`: rows of codes are [gate; up] and get interleaved by eights (scales have tile order already).
    `pair_columns` puts rows 2g and 2g + 1 of each 16 at g and g + 8, whose sums one thread holds, so that GEMM 2 stores
    neighbouring columns together. One expert at a time: that is the extra memory. `ValueError` where scales can't be
    held exactly (`scales_unsupported_reason`): those layers keep the portable path.
    """
    _, rows, half = codes.shape
    matrices = [*zip(codes, scales), *([] if shared is None else [shared])]
    experts, tiles, blocks = len(matrices), rows // TILE_ROWS, 2 * half // TILE_COLUMNS
    out = HopperMatrix(
        codes.new_empty(experts, tiles, blocks, TILE_ROWS * TILE_COLUMNS // 2),
        codes.new_empty(experts, tiles, blocks, TILE_ROWS * TILE_COLUMNS // 64),
        torch.empty(experts, rows, dtype=torch.float32, device=codes.device),
    )
    for expert, (expert_codes, expert_scales) in enumerate(matrices):
        if gate_up:
            expert_codes = interleave_gate_up(expert_codes, "gran8")
        if pair_columns:
            expert_codes, expert_scales = _pair(expert_codes), _pair(expert_scales)
        reason = scales_unsupported_reason(expert_scales)
        if reason is not None:
            name = f"expert {expert}" if expert < len(codes) else "the shared expert"
            raise ValueError(f"scales of {name} {reason}")
        smallest = expert_scales.amin(-1)
        distances = expert_scales - smallest[:, None]
        out.codes[expert] = _tile_codes(expert_codes).view(tiles, blocks, -1)
        out.spans[expert] = _tile_spans(distances).view(tiles, blocks, -1)
        out.row_scale[expert] = torch.exp2(smallest.double() - 127 + _BIAS).float()
    return out


def from_hopper(matrix: HopperMatrix, *, pair_columns: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `to_hopper`, byte for byte."""
    experts, tiles, blocks, _ = matrix.codes.shape
    rows, columns = tiles * TILE_ROWS, blocks * TILE_COLUMNS
    codes = matrix.codes.new_empty(experts, rows, columns // 2)
    scales = matrix.codes.new_empty(experts, rows, columns // 32)
    for expert in range(experts):
        codes[expert] = _untile_codes(matrix.codes[expert], rows, columns)
        smallest = torch.log2(matrix.row_scale[expert].double()).round().int() + 127 - _BIAS
        scales[expert] = (_untile_spans(matrix.spans[expert], rows, columns) + smallest[:, None]).to(torch.uint8)
        if pair_columns:
            codes[expert], scales[expert] = _unpair(codes[expert]), _unpair(scales[expert])
    return codes, scales


def _pair(rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(0, (-1, 8, 2)).transpose(1, 2).flatten(0, 2)


def _unpair(rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2)


# A row's bits below its tile: warpgroup, 5…4, 3, 2…0. A block's columns: scale group c, octet j as two bits (b, a), h,
# i.
_ROWS = (2, 4, 2, 8)
_COLUMNS = (4, 2, 2, 2, 4)
_WORDS = (0, 5, 1, 3, 2, 4, 6, 8, 9, 7, 10)  # tile, block, wg, r3, r54, r20, c, a, h, then b and i inside a word


def _tile_codes(packed: torch.Tensor) -> torch.Tensor:
    """[N, K/2] → bytes in tile order."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2).int()
    low, high = nibbles.view(len(packed) // TILE_ROWS, *_ROWS, -1, *_COLUMNS).permute(_WORDS).unbind(-2)
    words = torch.zeros(low.shape[:-1], dtype=torch.int64, device=packed.device)
    for i in range(4):
        words |= (low[..., i].long() & 7) << (4 * i) | (high[..., i].long() & 7) << (16 + 4 * i)
        words |= (low[..., i].long() >> 3) << (8 * i + 7) | (high[..., i].long() >> 3) << (8 * i + 3)
    return words.view(torch.uint8).view(-1, 8)[:, :4].flatten()  # little-endian: the low four bytes


def _untile_codes(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    shape = (rows // TILE_ROWS, columns // 128, 2, 2, 4, 8, 4, 2, 2)
    words = torch.nn.functional.pad(tiles.reshape(-1, 4), (0, 4)).contiguous().view(torch.int64).view(shape)
    nibbles = torch.empty(*shape, 2, 4, dtype=torch.uint8, device=tiles.device)
    for i in range(4):
        nibbles[..., 0, i] = (words >> (4 * i) & 7 | (words >> (8 * i + 7) & 1) << 3).to(torch.uint8)
        nibbles[..., 1, i] = (words >> (16 + 4 * i) & 7 | (words >> (8 * i + 3) & 1) << 3).to(torch.uint8)
    inverse = sorted(range(len(_WORDS)), key=_WORDS.__getitem__)
    pairs = nibbles.permute(inverse).reshape(rows, columns // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


_SPANS = (0, 5, 1, 3, 2, 4, 7, 6)  # tile, k256, wg, r3, r54, r20, c, then the two blocks inside a byte


def _tile_spans(distances: torch.Tensor) -> torch.Tensor:
    """[N, K/32] distances below 16 → bytes in tile order; the low nibble is the even block of 128 columns."""
    even, odd = distances.view(len(distances) // TILE_ROWS, *_ROWS, -1, 2, 4).permute(_SPANS).unbind(-1)
    return (even | odd << 4).flatten()


def _untile_spans(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    shape = (rows // TILE_ROWS, columns // TILE_COLUMNS, 2, 2, 4, 8, 4)
    parts = torch.stack((tiles.view(shape) & 0xF, tiles.view(shape) >> 4), -1)
    inverse = sorted(range(len(_SPANS)), key=_SPANS.__getitem__)
    return parts.permute(inverse).reshape(rows, columns // 32)
