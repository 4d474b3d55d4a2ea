"""The pre-dispatch, byte for byte against the reference, and what it must leave alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

import megamoe
from megamoe.kernels.layer import pre_dispatch_kind
from megamoe.kernels.pre_dispatch import KINDS, MAX_HIDDEN, IdMap, pre_dispatch, quantize
from megamoe.oracle import reference
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.recipe import TABLE, Recipe

# The interpreter computes NaN and overflow as the GPU does; NumPy announces it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

POISON = 0xFF
E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
LARGEST = dict.fromkeys(KINDS, 448.0) | {"mxfp4": 6.0, "nvfp4": 2688.0, "nvfp4_gsf": 6.0}
GSF = 2.75
MX = ("mxfp8", "mxfp4")
PUBLIC = ("mxfp8", "mxfp4", "nvfp4", "fp8_block128")
FP32_SCALES = ("nvfp4", "fp8_block128", "fp8_token")
E2M1 = ("mxfp4", "nvfp4", "nvfp4_gsf")


@dataclass
class Outputs:
    """Outputs of `rows` rows, every byte of them poisoned; scale rows are `sf_pad` bytes longer than needed."""

    kind: str
    group: int
    rows: int
    hidden: int
    top_k: int
    device: str
    sf_pad: int = 0
    q: torch.Tensor = field(init=False)
    sf: torch.Tensor | None = field(init=False)
    token_scale: torch.Tensor | None = field(init=False)
    ids: torch.Tensor = field(init=False)
    weights: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        spec = KINDS[self.kind]
        dtype = spec.element_dtypes[0]
        self.q = self._poisoned(self.hidden * dtype.itemsize // spec.elements_per_byte, dtype)
        self.sf = None
        if spec.scale_dtype is not None:
            self.sf = self._poisoned(self.groups * spec.scale_dtype.itemsize + self.sf_pad, spec.scale_dtype)
        self.token_scale = self._poisoned(4, torch.float32)[:, 0] if spec.token_scale else None
        self.ids = self._poisoned(8 * self.top_k, torch.int64)
        self.weights = self._poisoned(4 * self.top_k, torch.float32)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.hidden // self.group if self.group else 1

    def _poisoned(self, row_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((self.rows, row_bytes), POISON, dtype=torch.uint8, device=self.device).view(dtype)

    def check(self, expected: reference.PreDispatched | reference.Quantized, tokens: int) -> None:
        """Rows below `tokens` hold what is expected; all other bytes of q, sf and token_scale are still poison."""
        x = expected if isinstance(expected, reference.Quantized) else expected.x
        if self.sf is not None:
            assert_bytes_equal(self.sf[:tokens, : self.groups], x.sf, f"{self.kind} sf")
            assert_untouched(self.sf[tokens:], "sf of the pad rows")
            assert_untouched(self.sf[:tokens, self.groups :], "bytes between the scale rows")
        if self.token_scale is not None:
            assert_bytes_equal(self.token_scale[:tokens], x.token_scale, f"{self.kind} token_scale")
            assert_untouched(self.token_scale[tokens:], "token_scale of the pad rows")
        assert_bytes_equal(self.q[:tokens], x.q, f"{self.kind} q")
        assert_untouched(self.q[tokens:], "q of the pad rows")
        if isinstance(expected, reference.Quantized):
            assert_untouched(self.ids, "ids_out")
            assert_untouched(self.weights, "weights_out")
        else:
            assert_bytes_equal(self.ids, expected.ids, "ids_out")
            assert_bytes_equal(self.weights, expected.weights, "weights_out")


def assert_untouched(tensor: torch.Tensor, name: str) -> None:
    poison = torch.full_like(tensor.contiguous().view(torch.uint8), POISON)
    assert_bytes_equal(tensor.contiguous().view(torch.uint8), poison, name)


def gsf_of(kind: str, value: float = GSF) -> torch.Tensor | None:
    return torch.tensor([value]) if KINDS[kind].x_gsf else None


def _on(device: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def check_quantize(
    x: torch.Tensor,
    kind: str,
    device: str,
    group: int | None = None,
    floor: float | None = None,
    gsf: float = GSF,
) -> None:
    out = Outputs(kind, group or KINDS[kind].groups[0], x.shape[0], x.shape[1], 1, device)
    x_gsf = gsf_of(kind, gsf)
    quantize(
        x.to(device), q=out.q, sf=out.sf, token_scale=out.token_scale, kind=kind, group=group, amax_floor=floor,
        x_gsf=_on(device, x_gsf),
    )  # fmt: skip
    out.check(reference.quantize(x, kind, group, floor, x_gsf), x.shape[0])


def _bf16_step(values: torch.Tensor, steps: int) -> torch.Tensor:
    """The BF16 number `steps` places above each positive BF16 value."""
    return (values.bfloat16().view(torch.int16) + steps).view(torch.bfloat16)


def _every_bf16(kind: str) -> torch.Tensor:
    """All finite BF16 numbers, one exponent a row so that most of them survive quantization; both signs."""
    bits = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16)
    rows = bits.view(torch.bfloat16).reshape(-1, 128)
    return torch.cat((rows, -rows), dim=0)[torch.randperm(510, generator=torch.Generator().manual_seed(1))[:192]]


def _normal(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(33, 256, generator=generator) * 2.0 ** torch.randint(-20, 20, (33, 1), generator=generator)
    ).bfloat16()


def _wide_range(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-130, 120, (24, 256), generator=generator)
    return (torch.randn(24, 256, generator=generator).double() * 2.0**exponents).bfloat16()


def _scale_boundaries(kind: str) -> torch.Tensor:
    """amax at largest·2^k, one BF16 step below and above, at each position of 128 columns in turn."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.rand(128, 128, generator=generator)
    for row in range(128):
        top = torch.tensor(LARGEST[kind] * 2.0 ** (row // 3 - 20))
        amax = _bf16_step(top, row % 3 - 1).float()
        rows[row] *= amax / 2
        rows[row, row] = -amax if row % 5 == 0 else amax
    return rows.bfloat16()


def _ties(kind: str) -> torch.Tensor:
    """Every E2M1 tie and its BF16 neighbours, both signs, under scales that are powers of two; amax 6, 2688 a row."""
    ties = torch.tensor(E2M1_TIES)
    values = torch.cat([_bf16_step(ties, step).float() for step in (-1, 0, 1)])
    generator = torch.Generator().manual_seed(5)
    picks = values[torch.randint(len(values), (64, 128), generator=generator)]
    rows = picks * (1 - 2 * torch.randint(0, 2, (64, 128), generator=generator))
    rows[:, ::16] = 6.0
    rows *= 2.0 ** torch.arange(-12, 20).repeat(2)[:, None]
    rows[32:, 16:] *= 2.0 ** torch.randint(-5, 1, (32, 7), generator=generator).repeat_interleave(16, dim=1)
    rows[:, 0] *= 448 if kind == "nvfp4" else 1  # token scale 2^k
    return rows.bfloat16()


def _zeros_and_denormals(kind: str) -> torch.Tensor:
    """Zero rows and groups of both signs, BF16 denormals, groups around the floors 1e-4 and 1e-10."""
    rows = torch.zeros(20, 256)
    rows[1] = -0.0
    rows[2, 5] = 2.0**-126
    rows[3, ::7] = -(2.0**-130)
    rows[4, 128:] = 1.0
    rows[5, :128] = -0.0
    rows[5, 200] = -3.0
    for row, floor in enumerate((1e-4, 1e-10), start=6):
        rows[row] = floor / 3
        rows[row + 2, ::16] = _bf16_step(torch.tensor(floor), 1).float()
        rows[row + 4, ::32] = -_bf16_step(torch.tensor(floor), -1).float()
        rows[row + 6, 3::16] = floor * 1.5
    rows[14] = torch.linspace(-1e-38, 1e-38, 256)
    generator = torch.Generator().manual_seed(6)
    rows[15:] = torch.randn(5, 256, generator=generator) * (torch.rand(5, 256, generator=generator) < 0.1)
    return rows.bfloat16()


def _inf_and_nan(kind: str) -> torch.Tensor:
    """Inf, −Inf and NaN of both signs alone, together, and in every position of a group; the largest BF16 numbers."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(40, 128, generator=generator)
    for row in range(16):
        rows[row, row::32] = (math.inf, -math.inf, math.nan)[row % 3]
    rows[16] = math.nan
    rows[17] = math.inf
    rows[18, :64] = math.nan
    rows[19, 3], rows[19, 4] = math.inf, math.nan
    rows[20, 7] = 3.38e38
    rows[21] = -3.38e38
    rows[22] = rows[22] * 1e38
    rows[23] = rows[23] * 2.0**-120
    rows[23, 64] = 3.38e38
    result = rows.bfloat16()
    result.view(torch.int16)[24, 5] = -1  # NaN with the sign bit and every mantissa bit
    result.view(torch.int16)[25] = -0x0040  # 0xFFC0, a whole row
    return result


@dataclass(frozen=True)
class Case:
    """Rows [n, H] for a kind."""

    rows: Callable[[str], torch.Tensor]


CASES = {
    "every BF16 number": Case(_every_bf16),
    "normal": Case(_normal),
    "wide range": Case(_wide_range),
    "scale boundaries": Case(_scale_boundaries),
    "E2M1 ties": Case(_ties),
    "zeros and denormals": Case(_zeros_and_denormals),
    "Inf and NaN": Case(_inf_and_nan),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes(kind: str, case: Case, device: str) -> None:
    check_quantize(case.rows(kind), kind, device)


@pytest.mark.parametrize("gsf", (1.0, 2.0**-9, 1e-30, 448 * 6 / 3.7, 1e30), ids=lambda gsf: f"x_gsf={gsf:g}")
@pytest.mark.parametrize("case", ("scale boundaries", "E2M1 ties", "zeros and denormals", "Inf and NaN"))
def test_global_factors(case: str, gsf: float, device: str) -> None:
    """Powers of two make ties; small and large factors underflow and saturate the scales and the elements."""
    check_quantize(CASES[case].rows("nvfp4_gsf"), "nvfp4_gsf", device, gsf=gsf)


@pytest.mark.parametrize("case", ("scale boundaries", "E2M1 ties", "Inf and NaN"))
@pytest.mark.parametrize("group", (64, 128))
@pytest.mark.parametrize("kind", MX)
def test_groups(kind: str, group: int, case: str, device: str) -> None:
    check_quantize(CASES[case].rows(kind), kind, device, group)


@pytest.mark.parametrize("hidden", (128, 512, 576, 1152, 2880, 4096, 7168))
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_sizes(kind: str, hidden: int, device: str) -> None:
    unit = KINDS[kind].groups[0] or KINDS[kind].unit
    hidden = hidden // unit * unit  # 576 and 2880 are no multiples of 128
    generator = torch.Generator().manual_seed(hidden)
    rows = 3 if KINDS[kind].by_row else 5
    check_quantize(torch.randn(rows, hidden, generator=generator).bfloat16(), kind, device)


@pytest.mark.parametrize("hidden", (16, 48, 80, 16384), ids=lambda hidden: f"H={hidden}")
@pytest.mark.parametrize("kind", ("nvfp4", "nvfp4_gsf", "fp8_token", "bf16"))
def test_any_multiple_of_16_columns(kind: str, hidden: int, device: str) -> None:
    check_quantize(torch.randn(3, hidden, generator=torch.Generator().manual_seed(8)).bfloat16(), kind, device)


@dataclass(frozen=True)
class Vector:
    """A row [128], what its first scale and first element become; from the contract's own examples."""

    kind: str
    amax: float
    scale_bits: int
    first_byte: int


VECTORS = {
    "mxfp8 amax 1": Vector("mxfp8", 1.0, 119, 0x78),
    "mxfp8 amax 448": Vector("mxfp8", 448.0, 127, 0x7E),
    "mxfp8 zeros": Vector("mxfp8", 0.0, 105, 0),
    "mxfp4 amax 1": Vector("mxfp4", 1.0, 125, 0x06),
    "mxfp4 amax 6": Vector("mxfp4", 6.0, 127, 0x07),
    "mxfp4 zeros": Vector("mxfp4", 0.0, 112, 0),
    "nvfp4 zeros": Vector("nvfp4", 0.0, 0, 0),
    "nvfp4 row maximum": Vector("nvfp4", 1.0, 0x7E, 0x07),
    "fp8_block128 amax 1": Vector("fp8_block128", 1.0, 0x3B124925, 0x7E),
    "fp8_block128 zeros": Vector("fp8_block128", 0.0, 0x2A7B5123, 0),
    "fp8_token amax 1": Vector("fp8_token", 1.0, 0x3B124925, 0x7E),
    "fp8_token zeros": Vector("fp8_token", 0.0, 0x2A7B5123, 0),
    "mxfp8_trtllm amax 1": Vector("mxfp8_trtllm", 1.0, 119, 0x78),
    "mxfp8_trtllm amax 448": Vector("mxfp8_trtllm", 448.0, 127, 0x7E),
    "mxfp8_trtllm zeros": Vector("mxfp8_trtllm", 0.0, 0, 0),
    "mxfp8_trtllm below a floor": Vector("mxfp8_trtllm", 2.0**-40, 79, 0x78),
    "mxfp8_trtllm NaN alone": Vector("mxfp8_trtllm", math.nan, 119, 0x7F),  # beside it 1.0
    "nvfp4_gsf amax 6": Vector("nvfp4_gsf", 6.0, 0x38, 0x07),  # under x_gsf 1
    "nvfp4_gsf −0": Vector("nvfp4_gsf", -0.0, 0x00, 0x08),
}


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_contract_vectors(vector: Vector, device: str) -> None:
    x = torch.zeros(1, 128)
    x[0, 0] = vector.amax
    if math.isnan(vector.amax):
        x[0, 1] = 1.0
    out = Outputs(vector.kind, KINDS[vector.kind].groups[0], 1, 128, 1, device)
    x_gsf = _on(device, gsf_of(vector.kind, 1.0))
    quantize(x.bfloat16().to(device), q=out.q, sf=out.sf, token_scale=out.token_scale, kind=vector.kind, x_gsf=x_gsf)
    scale = out.sf.view(torch.int32) if out.sf.dtype == torch.float32 else out.sf
    assert (int(scale[0, 0]), int(out.q.view(torch.uint8)[0, 0])) == (vector.scale_bits, vector.first_byte)
    if vector.kind == "nvfp4" and vector.amax == 0:
        assert float(out.token_scale[0]) == pytest.approx(3.72023798e-08, rel=1e-8)


def test_mxfp8_trtllm_vector(device: str) -> None:
    """FlashInfer's published example: exponent and bytes of a block, and of the same with its maximum one step up."""
    block = torch.zeros(2, 32)
    block[:, :9] = torch.tensor([57, -3.3, 0.01, 28, -56, 1, 0.4375, -0.0, 0])
    block[1, 0] = 56
    out = Outputs("mxfp8_trtllm", 32, 2, 32, 1, device)
    quantize(block.bfloat16().to(device), q=out.q, sf=out.sf, kind="mxfp8_trtllm")
    assert out.sf.tolist() == [[125], [124]]
    assert out.q.view(torch.uint8)[0, :8].tolist() == [118, 213, 18, 110, 246, 72, 62, 128]
    assert out.q.view(torch.uint8)[1, :8].tolist() == [126, 221, 26, 118, 254, 80, 70, 128]


@pytest.mark.parametrize("recipe", TABLE, ids=str)
def test_kind_of_a_recipe(recipe: Recipe) -> None:
    kind = reference.kind_of(recipe)
    assert kind == pre_dispatch_kind(recipe)
    spec, fmt = KINDS[kind], reference.act_format(TABLE[recipe])
    assert (spec.groups[0], spec.token_scale) == (fmt.cols, TABLE[recipe].token_scale)
    assert spec.x_gsf == (recipe.act_scale == "nv16")
    assert (spec.scale_dtype == torch.float32) == (fmt.scale == "fp32")
    assert (spec.scale_dtype is None) == (fmt.scale == "none")


@pytest.mark.parametrize("floor", (0.0, 1e-20, 0.5))
@pytest.mark.parametrize("kind", MX)
def test_floor_of_ue8m0(kind: str, floor: float, device: str) -> None:
    check_quantize(_zeros_and_denormals(kind), kind, device, floor=floor)


@pytest.mark.parametrize("floor", (1e-30, 0.5))
@pytest.mark.parametrize("kind", FP32_SCALES)
def test_floor_of_other_scales(kind: str, floor: float, device: str) -> None:
    check_quantize(_zeros_and_denormals(kind), kind, device, floor=floor)


@dataclass(frozen=True)
class Routing:
    tokens: int
    rows: int
    top_k: int = 6
    ids: torch.dtype = torch.int64
    expert_scales: bool = False
    factor: float | None = None


ROUTINGS = {
    "no pad": Routing(5, 5),
    "int32": Routing(5, 9, ids=torch.int32),
    "one token of many rows": Routing(1, 400, top_k=8),
    "no token": Routing(0, 7, expert_scales=True, factor=2.5),
    "no row": Routing(0, 0),
    "top-1": Routing(4, 6, top_k=1),
    "top-32": Routing(3, 5, top_k=32),
    "expert scales": Routing(6, 8, expert_scales=True),
    "expert scales, int32": Routing(6, 8, ids=torch.int32, expert_scales=True),
    "factor": Routing(5, 8, factor=2.5),
    "factor 1": Routing(5, 8, factor=1.0),
    "negative factor": Routing(5, 8, factor=-1.0),
    "scales and factor": Routing(5, 8, expert_scales=True, factor=0.3),
}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_routing_and_pad_rows(kind: str, routing: Routing, device: str) -> None:
    hidden, num_experts = 256, 20
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(routing.tokens, hidden, generator=generator).bfloat16()
    shape = (routing.tokens, routing.top_k)
    # Beyond what is legal on both sides: copied verbatim, and outside the scales' reach.
    ids = torch.randint(-2, num_experts + 3, shape, generator=generator).to(routing.ids)
    if routing.tokens:
        ids[0, 0] = -1
        ids[-1, -1] = torch.iinfo(routing.ids).max
    weights = torch.rand(shape, generator=generator)
    scales = torch.rand(num_experts, generator=generator) + 0.5 if routing.expert_scales else None
    out = Outputs(kind, KINDS[kind].groups[0], routing.rows, hidden, routing.top_k, device, sf_pad=4)
    pre_dispatch(
        x.to(device), ids.to(device), weights.to(device),
        q=out.q, sf=out.sf, ids_out=out.ids, weights_out=out.weights, token_scale=out.token_scale, kind=kind,
        expert_scales=_on(device, scales), routed_scaling_factor=routing.factor, x_gsf=_on(device, gsf_of(kind)),
    )  # fmt: skip
    expected = reference.pre_dispatch_reference(
        x, ids, weights, kind=kind, rows=routing.rows, expert_scales=scales, routed_scaling_factor=routing.factor,
        x_gsf=gsf_of(kind),
    )  # fmt: skip
    out.check(expected, routing.tokens)


@dataclass(frozen=True)
class Mapped:
    """A map, one row of global ids, what they become locally, and which of their weights the factor multiplies."""

    id_map: IdMap
    ids: tuple[int, ...]
    local: tuple[int, ...]
    factor_spares: tuple[int, ...] = ()  # positions


BEYOND = 2**31 - 1
# Global ids 0 … 5; a value of −1 is another rank's, −2 and 3 are no local expert of three.
MAP = torch.tensor([2, -1, 0, 3, -2, BEYOND], dtype=torch.int32)
MAPS = {
    "a rank's share": Mapped(
        IdMap(6, 2, 2, 0), (0, 1, 2, 3, 4, 5, 6, -1, -7, BEYOND), (-1, -1, 0, 1, -1, -1, BEYOND, -1, -7, BEYOND)
    ),
    "the first share": Mapped(IdMap(6, 0, 3, 0), (0, 2, 3, 5, 6, -1), (0, 2, -1, -1, BEYOND, -1)),
    "a share that ends early": Mapped(IdMap(6, 4, 4, 0), (3, 4, 5, 6, 7), (-1, 0, 1, BEYOND, BEYOND)),
    "all experts, verbatim": Mapped(IdMap(6, 0, 6, 0), (0, 5, 6, -1, -2), (0, 5, 6, -1, -2)),
    "a map": Mapped(
        IdMap(6, 0, 3, 0, MAP), (0, 1, 2, 3, 4, 5, 6, -1, -2), (2, -1, 0, BEYOND, BEYOND, BEYOND, BEYOND, -1, -2)
    ),
    "a map outranks an offset": Mapped(IdMap(6, 5, 3, 0, MAP), (0, 1, 2, 5), (2, -1, 0, BEYOND)),
    "one shared slot": Mapped(IdMap(6, 0, 6, 1), (5, 6, 7, -1, 0), (5, 6, BEYOND, -1, 0), factor_spares=(1,)),
    "two shared slots on a rank": Mapped(
        IdMap(6, 2, 2, 2), (6, 2, 7, 8, 5, -6), (2, 0, 3, BEYOND, -1, -6), factor_spares=(0, 2)
    ),
    "shared slots beside a map": Mapped(
        IdMap(6, 0, 3, 2, MAP), (7, 0, 6, 3, 8, 1), (4, 2, 3, BEYOND, BEYOND, -1), factor_spares=(0, 2)
    ),
}


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("scaled", (False, True), ids=("weights as they are", "scales and factor"))
@pytest.mark.parametrize("case", MAPS.values(), ids=MAPS)
def test_ids_are_mapped(case: Mapped, scaled: bool, dtype: torch.dtype, device: str) -> None:
    ids, local = list(case.ids), list(case.local)
    if dtype == torch.int64:
        huge = [2**31, 2**32 + 1, 2**63 - 1, -(2**31) - 1, -(2**63)]
        ids += huge
        local += huge if case.id_map.is_identity else [BEYOND, BEYOND, BEYOND, *huge[3:]]
    top_k = len(ids)
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(1, 128, generator=generator).bfloat16()
    weights = torch.rand(1, top_k, generator=generator) + 0.5
    scales = torch.rand(case.id_map.num_experts, generator=generator) + 0.5 if scaled else None
    factor = 2.5 if scaled else None
    out = Outputs("bf16", 0, 3, 128, top_k, device)
    pre_dispatch(
        x.to(device), torch.tensor([ids], dtype=dtype, device=device), weights.to(device),
        q=out.q, sf=None, ids_out=out.ids, weights_out=out.weights, kind="bf16",
        expert_scales=_on(device, scales), routed_scaling_factor=factor,
        id_map=case.id_map._replace(expert_map=_on(device, case.id_map.expert_map)),
    )  # fmt: skip
    expected = reference.pre_dispatch_reference(
        x, torch.tensor([ids], dtype=dtype), weights, kind="bf16", rows=3, expert_scales=scales,
        routed_scaling_factor=factor, id_map=case.id_map,
    )  # fmt: skip
    out.check(expected, 1)
    assert out.ids.tolist() == [local, [-1] * top_k, [-1] * top_k]
    if scales is not None:
        for slot, expert in enumerate(ids):
            weight = weights[0, slot] * (scales[expert] if 0 <= expert < len(scales) else 1.0)
            wanted = weight if slot in case.factor_spares else weight * 2.5
            assert float(out.weights[0, slot]) == float(wanted), f"slot {slot}, id {expert}"


@dataclass(frozen=True)
class Placed:
    """Where x and q lie: elements of x (bytes of q) before each row, and row strides beyond a row's length."""

    x_before: int
    x_beyond: int
    q_before: int
    q_beyond: int


PLACES = {
    "aligned rows": Placed(8, 40, 16, 48),
    "x at an odd element": Placed(1, 8, 0, 0),
    "x with an odd stride": Placed(0, 33, 0, 16),
    "x in any place, q at words": Placed(3, 7, 4, 4),
    "q at half of what is widest": Placed(0, 8, 8, 8),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_strided_rows(kind: str, place: Placed, device: str) -> None:
    """x is a slice of a wider tensor, q of a wider buffer: neighbours are neither read nor written."""
    hidden, rows = 256, 7
    wide = torch.full((rows, place.x_before + hidden + place.x_beyond), math.nan).bfloat16()
    x = wide[:, place.x_before : place.x_before + hidden]
    x[:] = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(10))
    on_device = wide.to(device)[:, place.x_before : place.x_before + hidden]
    spec = KINDS[kind]
    dtype = spec.element_dtypes[0]
    width = hidden // spec.elements_per_byte * dtype.itemsize
    before = place.q_before
    whole = torch.full((rows, before + width + place.q_beyond), POISON, dtype=torch.uint8, device=device)
    out = Outputs(kind, spec.groups[0], rows, hidden, 1, device, sf_pad=12)
    out.q = whole.view(dtype)[:, before // dtype.itemsize : (before + width) // dtype.itemsize]
    x_gsf = gsf_of(kind)
    quantize(on_device, q=out.q, sf=out.sf, token_scale=out.token_scale, kind=kind, x_gsf=_on(device, x_gsf))
    out.check(reference.quantize(x, kind, x_gsf=x_gsf), rows)
    assert_untouched(whole[:, :before], "bytes before q's rows")
    assert_untouched(whole[:, before + width :], "bytes behind q's rows")


@pytest.mark.parametrize("kind", E2M1)
def test_int8_elements(kind: str, device: str) -> None:
    x, x_gsf = _normal(kind), gsf_of(kind)
    out = Outputs(kind, KINDS[kind].groups[0], *x.shape, 1, device)
    quantize(
        x.to(device), q=out.q.view(torch.int8), sf=out.sf, token_scale=out.token_scale, kind=kind,
        x_gsf=_on(device, x_gsf),
    )  # fmt: skip
    out.check(reference.quantize(x, kind, x_gsf=x_gsf), x.shape[0])


@pytest.mark.parametrize("bits", (0x7F81, -0x007F, 0x7FFF, -1), ids=hex)
def test_bf16_rows_are_copied_verbatim(bits: int, device: str) -> None:
    """NaN of every payload too."""
    x = _normal("bf16")
    x.view(torch.int16)[:, ::5] = bits
    out = Outputs("bf16", 0, *x.shape, 1, device)
    quantize(x.to(device), q=out.q, sf=None, kind="bf16")
    assert_bytes_equal(out.q, x, "bf16 q")


@pytest.mark.gpu
def test_signalling_nan_is_ignored_by_the_maximum(device: str) -> None:
    """NumPy's maximum lets a signalling NaN win, the GPU's does not; so this one needs the GPU."""
    x = _normal("mxfp8")
    x.view(torch.int16)[:, ::16] = 0x7F81
    for kind in KINDS:
        check_quantize(x, kind, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_beyond_32_bits(kind: str, device: str) -> None:
    """The last rows of more than 2^31 elements."""
    hidden = 8192
    rows = 2**31 // hidden + 8
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
    x[-8:] = torch.randn(8, hidden, generator=torch.Generator().manual_seed(11)).to(device)
    out = Outputs(kind, KINDS[kind].groups[0], rows, hidden, 1, device)
    x_gsf = gsf_of(kind)
    quantize(x, q=out.q, sf=out.sf, token_scale=out.token_scale, kind=kind, x_gsf=_on(device, x_gsf))
    expected = reference.quantize(x[-8:].cpu(), kind, x_gsf=x_gsf)
    assert_bytes_equal(out.q[-8:], expected.q, f"{kind} q")
    if out.sf is not None:
        assert_bytes_equal(out.sf[-8:], expected.sf, f"{kind} sf")


@pytest.mark.parametrize("kind", PUBLIC)
def test_public_quantizers(kind: str, device: str) -> None:
    x = _normal(kind)
    groups = KINDS[kind].groups if kind.startswith("mx") else (None,)
    for group in groups:
        made = getattr(megamoe, f"quantize_{kind}")(x.to(device), **({} if group is None else {"group": group}))
        expected = [part for part in reference.quantize(x, kind, group) if part is not None]
        assert len(made) == len(expected)
        for name, got, wanted in zip(("q", "sf", "token_scale"), made, expected):
            assert_bytes_equal(got, wanted, f"quantize_{kind}, group {group}: {name}")


def _arguments(kind: str, device: str) -> tuple[dict[str, object], Outputs]:
    out = Outputs(kind, KINDS[kind].groups[0], 6, 256, 4, device)
    generator = torch.Generator().manual_seed(12)
    return {
        "x": torch.randn(4, 256, generator=generator).bfloat16().to(device),
        "topk_ids": torch.zeros(4, 4, dtype=torch.int32, device=device),
        "topk_weights": torch.ones(4, 4, device=device),
        "q": out.q, "sf": out.sf, "ids_out": out.ids, "weights_out": out.weights,
        "token_scale": out.token_scale, "kind": kind, "x_gsf": _on(device, gsf_of(kind)),
    }, out  # fmt: skip


@dataclass(frozen=True)
class Refused:
    """One argument changed; the exception's type and what its message must name."""

    kind: str
    argument: str
    value: Callable[[dict], object]
    error: type[Exception]
    message: str


def _columns(count: int) -> Callable[[dict], torch.Tensor]:
    return lambda given: torch.zeros(4, count, dtype=torch.bfloat16, device=given["x"].device)


REFUSED = {
    "kind": Refused("mxfp8", "kind", lambda given: "fp8", ValueError, "kind is 'fp8'"),
    "group": Refused("mxfp4", "group", lambda given: 48, ValueError, "group is 48"),
    "group of no integer": Refused("mxfp4", "group", lambda given: 32.0, TypeError, "group is 32.0"),
    "group of a row": Refused("fp8_token", "group", lambda given: 128, ValueError, "fp8_token allows 0"),
    "group of nvfp4": Refused("nvfp4", "group", lambda given: 32, ValueError, "nvfp4 allows 16"),
    "group of fp8_block128": Refused("fp8_block128", "group", lambda given: 32, ValueError, "allows 128"),
    "negative floor": Refused("mxfp8", "amax_floor", lambda given: -1e-4, ValueError, "amax_floor is -0.0001"),
    "no floor for an fp32 scale": Refused("fp8_block128", "amax_floor", lambda given: 0, ValueError, ">= 1e-30"),
    "no floor for a token scale": Refused("nvfp4", "amax_floor", lambda given: 0.0, ValueError, ">= 1e-30"),
    "no floor for a row's scale": Refused("fp8_token", "amax_floor", lambda given: 0.0, ValueError, ">= 1e-30"),
    "a floor for trtllm": Refused("mxfp8_trtllm", "amax_floor", lambda given: 1e-4, ValueError, "has no floor"),
    "a floor for a global factor": Refused("nvfp4_gsf", "amax_floor", lambda given: 0.0, ValueError, "has no floor"),
    "floor beyond fp32": Refused("mxfp8", "amax_floor", lambda given: 1e39, ValueError, "amax_floor is 1e+39"),
    "subnormal floor": Refused("mxfp8", "amax_floor", lambda given: 1e-40, ValueError, "amax_floor is 1e-40"),
    "NaN floor": Refused("mxfp4", "amax_floor", lambda given: math.nan, ValueError, "amax_floor is nan"),
    "floor of no number": Refused("mxfp4", "amax_floor", lambda given: "1e-4", TypeError, "amax_floor is '1e-4'"),
    "x fp32": Refused("mxfp8", "x", lambda given: given["x"].float(), TypeError, "x has dtype torch.float32"),
    "x 1-D": Refused("mxfp8", "x", lambda given: given["x"][0], ValueError, "x has shape"),
    "x column-major": Refused("mxfp8", "x", lambda given: given["x"].t().contiguous().t(), ValueError, "x has column"),
    "H no multiple": Refused("mxfp8", "x", _columns(240), ValueError, "mxfp8 allows multiples of 32"),
    "H too large": Refused("mxfp8", "x", _columns(MAX_HIDDEN + 128), ValueError, str(MAX_HIDDEN)),
    "H 0": Refused("mxfp8", "x", _columns(0), ValueError, "x has 0 columns"),
    "H no multiple of 16": Refused("fp8_token", "x", _columns(136), ValueError, "multiples of 16"),
    "q of bytes": Refused("mxfp8", "q", lambda given: given["q"].view(torch.int8), TypeError, "q has dtype"),
    "q fp8": Refused("mxfp4", "q", lambda given: given["q"].view(torch.float8_e4m3fn), TypeError, "q has dtype"),
    "q too short": Refused("mxfp8", "q", lambda given: given["q"][:3], ValueError, "q has shape"),
    "q too narrow": Refused("mxfp8", "q", lambda given: given["q"][:, :128], ValueError, "q has shape"),
    "q rows overlap": Refused(
        "mxfp8", "q", lambda given: given["q"][:1].expand(6, 256), ValueError, "q has row stride 0"
    ),
    "q misaligned": Refused(
        "mxfp4", "q", lambda given: given["q"].new_empty(6 * 130)[2:].view(-1)[:774].unfold(0, 128, 129), ValueError,
        "multiples of 4 bytes",
    ),
    "q of another width": Refused("bf16", "q", lambda given: given["q"][:, :128], ValueError, "q has shape"),
    "q BF16": Refused("mxfp8", "q", lambda given: given["x"], TypeError, "q has dtype"),
    "sf absent": Refused("mxfp8", "sf", lambda given: None, ValueError, "sf is None"),
    "sf of BF16": Refused("bf16", "sf", lambda given: given["topk_weights"], ValueError, "sf is given"),
    "sf of no column": Refused("fp8_token", "sf", lambda given: given["sf"][:, :0], ValueError, "sf has shape"),
    "x_gsf absent": Refused("nvfp4_gsf", "x_gsf", lambda given: None, ValueError, "x_gsf is None"),
    "x_gsf given": Refused("nvfp4", "x_gsf", lambda given: given["topk_weights"][0, :1], ValueError, "x_gsf is given"),
    "x_gsf a number": Refused("nvfp4_gsf", "x_gsf", lambda given: 2.0, TypeError, "x_gsf is a float"),
    "x_gsf of many": Refused("nvfp4_gsf", "x_gsf", lambda given: given["topk_weights"], ValueError, "x_gsf has shape"),
    "id_map a tuple": Refused("mxfp8", "id_map", lambda given: (6, 0, 6, 0, None), TypeError, "id_map is a tuple"),
    "id_map of no expert": Refused("mxfp8", "id_map", lambda given: IdMap(6, 0, 0, 1), ValueError, "id_map is IdMap"),
    "id_map far away": Refused("mxfp8", "id_map", lambda given: IdMap(6, 6, 1, 1), ValueError, "id_map is IdMap"),
    "expert_map too short": Refused(
        "mxfp8", "id_map", lambda given: IdMap(6, 0, 6, 0, given["topk_ids"][0]), ValueError, "id_map.expert_map has 4"
    ),
    "expert_map int64": Refused(
        "mxfp8", "id_map", lambda given: IdMap(4, 0, 4, 0, given["topk_ids"][0].long()), TypeError, "id_map.expert_map"
    ),
    "sf fp32": Refused("mxfp8", "sf", lambda given: given["sf"].float(), TypeError, "sf has dtype"),
    "sf too narrow": Refused("mxfp8", "sf", lambda given: given["sf"][:, :7], ValueError, "sf has shape"),
    "sf too short": Refused("mxfp8", "sf", lambda given: given["sf"][:3], ValueError, "sf has shape"),
    "token_scale absent": Refused("nvfp4", "token_scale", lambda given: None, ValueError, "token_scale is None"),
    "token_scale given": Refused(
        "mxfp8", "token_scale", lambda given: given["topk_weights"][0], ValueError, "token_scale is given"
    ),
    "token_scale too short": Refused(
        "nvfp4", "token_scale", lambda given: given["token_scale"][:3].contiguous(), ValueError, "token_scale has shape"
    ),
    "ids of floats": Refused("mxfp8", "topk_ids", lambda given: given["topk_weights"], TypeError, "topk_ids has dtype"),
    "ids of another batch": Refused(
        "mxfp8", "topk_ids", lambda given: given["topk_ids"][:3], ValueError, "topk_ids has shape"
    ),
    "ids strided": Refused(
        "mxfp8", "topk_ids", lambda given: given["topk_ids"].repeat(1, 2)[:, :4], ValueError, "topk_ids has strides"
    ),
    "weights of another K": Refused(
        "mxfp8", "topk_weights", lambda given: given["topk_weights"][:, :3].contiguous(), ValueError, "topk_weights has"
    ),
    "ids_out int32": Refused("mxfp8", "ids_out", lambda given: given["ids_out"].int(), TypeError, "ids_out has dtype"),
    "ids_out too short": Refused("mxfp8", "ids_out", lambda given: given["ids_out"][:5], ValueError, "ids_out has"),
    "weights_out BF16": Refused(
        "mxfp8", "weights_out", lambda given: given["weights_out"].bfloat16(), TypeError, "weights_out has dtype"
    ),
    "expert_scales 2-D": Refused(
        "mxfp8", "expert_scales", lambda given: given["topk_weights"], ValueError, "expert_scales has shape"
    ),
    "expert_scales int": Refused(
        "mxfp8", "expert_scales", lambda given: given["topk_ids"][0], TypeError, "expert_scales has dtype"
    ),
    "factor Inf": Refused(
        "mxfp8", "routed_scaling_factor", lambda given: math.inf, ValueError, "routed_scaling_factor is inf"
    ),
    "factor of no number": Refused(
        "mxfp8", "routed_scaling_factor", lambda given: True, TypeError, "routed_scaling_factor is True"
    ),
    "x elsewhere": Refused("mxfp8", "x", lambda given: given["x"].to("meta"), ValueError, "x is on meta"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_is_written(case: Refused, device: str) -> None:
    arguments, out = _arguments(case.kind, device)
    arguments[case.argument] = case.value(arguments)
    with pytest.raises(case.error, match=re.escape(case.message)):
        pre_dispatch(**arguments)  # type: ignore[arg-type]
    for name in ("q", "sf", "ids", "weights", "token_scale"):
        if getattr(out, name) is not None:
            assert_untouched(getattr(out, name), name)


def test_expert_scales_must_be_the_maps(device: str) -> None:
    arguments, out = _arguments("mxfp8", device)
    arguments |= {"id_map": IdMap(6, 0, 6, 0), "expert_scales": torch.ones(7, device=device)}
    with pytest.raises(ValueError, match="expert_scales has 7 elements; expected num_experts = 6"):
        pre_dispatch(**arguments)  # type: ignore[arg-type]
    assert_untouched(out.ids, "ids")


@pytest.mark.parametrize(
    "kind, arguments, error",
    (
        ("nvfp4", {"amax_floor": 0}, ValueError),
        ("nvfp4", {"amax_floor": "1"}, TypeError),
        ("mxfp8", {"amax_floor": 1e39}, ValueError),
        ("mxfp8", {"amax_floor": 10**400}, ValueError),
        ("mxfp8", {"amax_floor": 1e-45}, ValueError),
        ("mxfp8", {"group": 32.0}, TypeError),
        ("mxfp4", {"group": True}, TypeError),
        ("mxfp4", {"group": 16}, ValueError),
    ),
    ids=lambda value: str(value)[:24],
)
def test_public_quantizer_refuses(kind: str, arguments: dict, error: type[Exception], device: str) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        getattr(megamoe, f"quantize_{kind}")(torch.ones(2, 128, dtype=torch.bfloat16, device=device), **arguments)
