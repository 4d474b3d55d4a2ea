"""Rows that a pre-dispatch may get wrong: every BF16 bit pattern, ties, scale boundaries, floors, NaN and infinity."""

from __future__ import annotations

import torch

from megamoe import formats

_FLOORS = (1e-4, 1e-10)
_EXPONENTS = range(-30, 31, 3)


def awkward_rows(hidden: int, group: int, *, finite: bool = False) -> torch.Tensor:
    """BF16 [n, hidden] of scale groups, each one awkward case; `hidden` a multiple of `group`, which is at least 16.

    Groups: zeros; −0; one denormal; amax at 448·2^k and 6·2^k and one BF16 ulp either side; amax around the floors and
    at the range's ends; every tie of E2M1 and E4M3 and its neighbours, under the scale that makes it one. Unless
    `finite`, also NaN and infinities, alone and among numbers. The last rows have a maximum of 2688·2^k, which makes
    NVFP4's token scale 2^k, and every tie of E2M1 under every UE4M3 scale.
    """
    groups = [*_boundary_groups(group), *_tie_groups(group)]
    if not finite:
        groups += _special_groups(group)
    rows = _in_rows(torch.stack(groups), hidden)
    return torch.cat([rows, _nvfp4_tie_rows(hidden)])


def bit_patterns(hidden: int, *, seed: int = 0) -> torch.Tensor:
    """BF16 [n, hidden] that holds every bit pattern at least twice: in order of magnitude, and in a random order."""
    ordered = torch.arange(2**15, dtype=torch.int32)
    ordered = torch.stack([ordered, ordered + 2**15], 1).flatten()
    mixed = ordered[torch.randperm(2**16, generator=torch.Generator().manual_seed(seed))]
    return torch.cat([_in_rows(_bits(part)[:, None], hidden) for part in (ordered, mixed)])


def random_rows(tokens: int, hidden: int, generator: torch.Generator) -> torch.Tensor:
    """BF16 [tokens, hidden] on the generator's device: normal rows, scales 2^−24 … 2^24, every eighth bit noise."""
    device = generator.device
    x = torch.randn(tokens, hidden, generator=generator, device=device)
    x *= torch.exp2(48 * torch.rand(tokens, 1, generator=generator, device=device) - 24)
    x = x.bfloat16()
    noise = torch.randint(-(2**15), 2**15, x[::8].shape, dtype=torch.int16, generator=generator, device=device)
    x[::8] = noise.view(torch.bfloat16)
    return x


def awkward_routing(
    tokens: int, top_k: int, num_experts: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ids and fp32 weights [tokens, top_k]: random ids with −1 and repeats, rows of one expert or of −1 alone;
    weights of both signs, among them 0, −0, a denormal, the largest and the infinite ones."""
    device = generator.device
    ids = torch.randint(-1, num_experts, (tokens, top_k), dtype=torch.int32, generator=generator, device=device)
    ids[1::5] = num_experts - 1
    ids[2::5] = -1
    weights = torch.randn(tokens, top_k, generator=generator, device=device)
    odd = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, torch.inf, -torch.inf, 1.0], device=device)
    weights[:, 0] = odd[torch.arange(tokens, device=device) % len(odd)]
    return ids, weights


def _boundary_groups(group: int) -> list[torch.Tensor]:
    filler = torch.linspace(-0.9, 0.9, group, dtype=torch.float64)
    tops = [448.0 * 2.0**k for k in _EXPONENTS] + [6.0 * 2.0**k for k in _EXPONENTS]
    tops += [floor * factor for floor in _FLOORS for factor in (0.5, 1.0, 2.0, 448.0, 6.0)]
    tops += [torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).tiny, 1.0]
    groups = [torch.zeros(group), torch.full((group,), -0.0), _one(group, 2.0**-133), _one(group, -(2.0**-133))]
    for top in tops:
        amax = torch.tensor(top).bfloat16().view(torch.int16)
        for ulp in (-1, 0, 1):
            exact = (amax + ulp).view(torch.bfloat16).double()
            if not exact.isfinite():
                continue
            numbers = filler * exact
            numbers[(ulp + 1) * 5] = -exact if ulp else exact
            groups.append(numbers)
    return [numbers.float().bfloat16() for numbers in groups]


def _tie_groups(group: int) -> list[torch.Tensor]:
    """Ties and one BF16 ulp either side, of both signs, next to the amax whose scale is 2^k."""
    groups = []
    for top, ties in ((6.0, _e2m1_ties()), (448.0, _e4m3_ties())):
        bits = ties.bfloat16().view(torch.int16)
        near = torch.cat([bits - 1, bits, bits + 1]).view(torch.bfloat16).float()
        near = torch.cat([near, -near])
        for k in (-12, 0, 7):
            for part in near.split(group - 1):
                numbers = torch.zeros(group)
                numbers[0], numbers[1 : 1 + len(part)] = top, part
                groups.append((numbers * 2.0**k).bfloat16())
    return groups


def _nvfp4_tie_rows(hidden: int) -> torch.Tensor:
    """Rows with an outer scale of 2^k: groups whose UE4M3 scale c is exact, with all ties of E2M1 times c."""
    scales = formats.decode_ue4m3(torch.arange(1, 127, dtype=torch.uint8))
    ties = _e2m1_ties()
    groups = torch.zeros(len(scales), 16)
    groups[:, 0] = 6 * scales
    groups[:, 1:8], groups[:, 8:15] = ties * scales[:, None], -ties * scales[:, None]
    first = torch.zeros(1, 16)
    first[0, 0] = 2688.0
    per_row = hidden // 16 - 1
    rows = [torch.cat([first, part, torch.zeros(per_row - len(part), 16)]) for part in groups.split(per_row)]
    one = torch.stack(rows).reshape(-1, hidden)
    return torch.cat([one * 2.0**k for k in (-9, 0, 5)]).bfloat16()


def _special_groups(group: int) -> list[torch.Tensor]:
    inf, nan = torch.inf, torch.nan
    groups = []
    for specials in ((inf,), (-inf,), (nan,), (inf, nan), (-inf, inf, nan)):
        numbers = torch.linspace(-3, 3, group)
        numbers[torch.arange(len(specials)) * 3] = torch.tensor(specials)
        groups += [numbers, torch.tensor(specials).repeat(group)[:group]]
    bits = torch.full((group,), -1, dtype=torch.int16).view(torch.bfloat16)  # negative NaN, every bit set
    return [*(numbers.bfloat16() for numbers in groups), bits]


def _e2m1_ties() -> torch.Tensor:
    values = torch.tensor(formats.E2M1_VALUES)
    return (values[:-1] + values[1:]) / 2


def _e4m3_ties() -> torch.Tensor:
    values = formats.decode_e4m3(torch.arange(127, dtype=torch.uint8))
    return (values[:-1] + values[1:]) / 2


def _one(group: int, value: float) -> torch.Tensor:
    numbers = torch.zeros(group, dtype=torch.float64)
    numbers[group // 2] = value
    return numbers


def _bits(patterns: torch.Tensor) -> torch.Tensor:
    return torch.where(patterns >= 2**15, patterns - 2**16, patterns).to(torch.int16).view(torch.bfloat16)


def _in_rows(pieces: torch.Tensor, hidden: int) -> torch.Tensor:
    """Pieces [n, w] one after the other in rows of `hidden`, the first ones again at the end of the last row."""
    flat = pieces.flatten()
    count = -(-len(flat) // hidden) * hidden
    return flat.repeat(-(-count // len(flat)))[:count].view(-1, hidden)
