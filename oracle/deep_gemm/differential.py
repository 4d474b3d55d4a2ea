"""Our kernels against DeepGEMM's, case by case: `cases` lists what can be compared and why the rest cannot."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megamoe.backends.triton import device_unsupported_reason
from megamoe.kernels.epilogue import requantize_accumulators
from megamoe.kernels.layouts.gate_up import interleave_gate_up
from megamoe.kernels.pre_dispatch import KINDS, pre_dispatch
from megamoe.oracle import reference
from megamoe.oracle.comparison import Case, Outcome, compare_bytes, total
from megamoe.oracle.deep_gemm import device_code, fused_differential
from megamoe.oracle.deep_gemm.device_source import INSTANTIATIONS, REQUANTIZE_GROUPS
from megamoe.oracle.deep_gemm.inputs import awkward_routing, awkward_rows, bit_patterns, random_rows
from megamoe.recipe import ALL_RECIPES, Recipe, traits

DEVICE_CODE = "device code of 0.1.7"
NUM_EXPERTS, TOP_K = 37, 6
VOLUME_ROWS, VOLUME_HIDDEN = 8192, 7168
VOLUME_BYTES = 160_000_000
"""Output bytes of random rows per kind and group: 1.28e9 over the eight of them."""
POISON = 0xA5
_MULTIPLES = (1, 2, 3, 5, 8)
_MODEL_HIDDEN = (4096, 7168, 8192)
_FACTOR = 2.5


def cases(device: torch.device) -> list[Case]:
    """Every comparison with DeepGEMM, in order of cost; pre-dispatch and requantizer also against the reference alone,
    which needs no GPU."""
    ours = device_unsupported_reason(device)
    upstream = partial(
        Case, backend="deep_gemm", judge=DEVICE_CODE, unavailable=ours or device_code.unsupported_reason()
    )
    by_reference = partial(Case, backend="reference", judge="reference", unavailable=ours)
    found = []
    for kind, group in INSTANTIATIONS:
        case = dict(kernel="pre_dispatch", recipe=kind)
        found.append(
            by_reference(**case, name=f"group {group} awkward", run=partial(_awkward, kind, group, device, "reference"))
        )
        for name, compare in (("awkward", _awkward), ("bit patterns", _bit_patterns), ("volume", _volume)):
            run = partial(compare, kind, group, device, "deep_gemm")
            found.append(upstream(**case, name=f"group {group} {name}", run=run))
    for recipe in ALL_RECIPES:
        if recipe.numerics.startswith("deep_gemm") and traits(recipe).mid_kind in REQUANTIZE_GROUPS:
            case = dict(kernel="requantize", recipe=str(recipe), name="awkward")
            found.append(by_reference(**case, run=partial(compare_requantized, recipe, device, "reference")))
            found.append(upstream(**case, run=partial(compare_requantized, recipe, device, "deep_gemm")))
    return [*found, *fused_differential.cases(device)]


def accepted_hidden_sizes(kind: str, group: int, device: torch.device) -> list[int]:
    """Small multiples of the smallest row that upstream accepts, and on a GPU the models' rows."""
    unit = group if kind == "fp8_block128" else 4 * group
    if device.type != "cuda":
        return [unit, 3 * unit]
    return [multiple * unit for multiple in _MULTIPLES] + [hidden for hidden in _MODEL_HIDDEN if hidden % unit == 0]


def _awkward(kind: str, group: int, device: torch.device, judge: str) -> Outcome:
    return total(_awkward_sizes(kind, group, device, judge))


def _awkward_sizes(kind: str, group: int, device: torch.device, judge: str) -> Iterator[Outcome]:
    for hidden in accepted_hidden_sizes(kind, group, device):
        x = awkward_rows(hidden, group).to(device)
        for rows in (len(x), len(x) + 37):
            yield compare_pre_dispatch(x, kind, group, rows, judge)
        yield compare_pre_dispatch(x[:0], kind, group, 5, judge)


def _bit_patterns(kind: str, group: int, device: torch.device, judge: str) -> Outcome:
    rows = (bit_patterns(hidden).to(device) for hidden in (1024, 4096))
    return total(compare_pre_dispatch(x, kind, group, len(x) + 3, judge) for x in rows)


def _volume(kind: str, group: int, device: torch.device, judge: str) -> Outcome:
    return total(_volume_launches(kind, group, device, judge))


def _volume_launches(kind: str, group: int, device: torch.device, judge: str) -> Iterator[Outcome]:
    generator = torch.Generator(device).manual_seed(17)
    compared = 0
    while compared < VOLUME_BYTES:
        x = random_rows(VOLUME_ROWS - 5, VOLUME_HIDDEN, generator)
        outcome = compare_pre_dispatch(x, kind, group, VOLUME_ROWS, judge, with_reference=False)
        compared += outcome.bytes_compared
        yield outcome


def compare_pre_dispatch(
    x: torch.Tensor, kind: str, group: int, rows: int, judge: str, *, with_reference: bool = True
) -> Outcome:
    """Our kernel and the judge's (`deep_gemm` or `reference`) on the same rows and routing, over poisoned outputs of
    `rows` rows.

    Bytes counted: those the kernel must write. Pad rows of the quantized tensors must keep the poison.
    `with_reference` adds the reference as second judge. Under NVFP4 it is the only one where H is no multiple of 256:
    upstream's reduction of a row then reads lanes that do not exist.
    """
    tokens, hidden = x.shape
    rows = max(rows, tokens)
    ids, weights = awkward_routing(tokens, TOP_K, NUM_EXPERTS, torch.Generator(x.device).manual_seed(tokens))
    generator = torch.Generator(x.device).manual_seed(1)
    scales = None
    factor = _FACTOR if kind == "fp8_block128" else None
    if factor is None:
        scales = 0.5 + torch.rand(NUM_EXPERTS, generator=generator, device=x.device)
    ours = _Outputs(kind, group, hidden, rows, x.device)
    pre_dispatch(x, ids, weights, **ours.named, kind=kind, group=group, expert_scales=scales,
                 routed_scaling_factor=factor)  # fmt: skip
    judges = []
    if judge == "deep_gemm" and (kind != "nvfp4" or hidden % 256 == 0):
        theirs = _Outputs(kind, group, hidden, rows, x.device)
        device_code.load().pre_dispatch(
            x, ids, weights, **theirs.named, kind=kind, group=group, expert_scales=scales,
            routed_scaling_factor=factor or 1.0,
        )  # fmt: skip
        judges.append(theirs.written(tokens))
    if with_reference or not judges:
        expected = reference.pre_dispatch_reference(
            x, ids, weights, kind=kind, rows=rows, group=group, expert_scales=scales, routed_scaling_factor=factor
        )
        quantized = {"q": expected.x.q, "sf": expected.x.sf, "token_scale": expected.x.token_scale}
        judges.append({**quantized, "ids_out": expected.ids, "weights_out": expected.weights})
    outcomes = [compare_bytes(_zip(ours.written(tokens), judged)) for judged in judges]
    # One judge's count: the same bytes against the second are no new ones.
    mismatched = max(outcome.bytes_mismatched for outcome in outcomes)
    where = f"{kind} group {group}, {tokens} of {rows} rows of {hidden}"
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    problems += [f"{name} is written beyond row {tokens}" for name in ours.written_beyond(tokens)]
    return Outcome(outcomes[0].bytes_compared, mismatched, problem=f"{where}: {problems[0]}" if problems else None)


class _Outputs:
    """Poisoned outputs of one pre-dispatch."""

    def __init__(self, kind: str, group: int, hidden: int, rows: int, device: torch.device) -> None:
        spec = KINDS[kind]
        assert spec.scale_dtype is not None  # of every kind that upstream has

        def poisoned(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows, columns * dtype.itemsize), POISON, dtype=torch.uint8, device=device).view(dtype)

        self.named: dict[str, Any] = {
            "q": poisoned(hidden // spec.elements_per_byte, spec.element_dtypes[0]),
            "sf": poisoned(hidden // group, spec.scale_dtype),
            "token_scale": poisoned(1, torch.float32)[:, 0].contiguous() if spec.token_scale else None,
            "ids_out": poisoned(TOP_K, torch.int64),
            "weights_out": poisoned(TOP_K, torch.float32),
        }

    def written(self, tokens: int) -> dict[str, torch.Tensor | None]:
        return self._rows(slice(0, tokens)) | {name: self.named[name] for name in ("ids_out", "weights_out")}

    def written_beyond(self, tokens: int) -> list[str]:
        """Which of the quantized tensors have lost their poison behind the tokens."""
        pads = self._rows(slice(tokens, None)).items()
        return [name for name, t in pads if t is not None and bool((t.contiguous().view(torch.uint8) != POISON).any())]

    def _rows(self, rows: slice) -> dict[str, torch.Tensor | None]:
        tensors = {name: self.named[name] for name in ("q", "sf", "token_scale")}
        return {name: None if tensor is None else tensor[rows] for name, tensor in tensors.items()}


def _zip(
    actual: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for name, tensor in actual.items():
        other = expected[name]
        if tensor is not None and other is not None:
            yield name, tensor, other


def exact_activations(recipe: Recipe, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accumulators fp32 [R, 2I] in the recipe's tile order, top-k weights fp32 [R], and the activation they must give.

    Gates are 32, whose sigmoid is 1 in fp32, so that act = (32 · up) · weight whatever computes it: finite awkward
    values, with weights that keep ties and weights that do not.
    """
    row = traits(recipe)
    x = awkward_rows(768, row.mid_group, finite=True).to(device)
    up = torch.cat([x, x, random_rows(512, 768, torch.Generator(device).manual_seed(3))]).float() / 32
    weight = torch.ones(len(up), device=device)
    weight[len(x) : 2 * len(x)] = 0.7
    weight[2 * len(x) :] = torch.rand(512, generator=torch.Generator(device).manual_seed(4), device=device) - 0.5
    up = torch.where(((32 * up) * weight[:, None]).isfinite() & up.isfinite(), up.bfloat16().float(), 1.0)
    gate = torch.full_like(up, 32.0)
    return interleave_gate_up(torch.cat([gate, up], -1), row.tile_order, dim=-1), weight, (32 * up) * weight[:, None]


def compare_requantized(recipe: Recipe, device: torch.device, judge: str) -> Outcome:
    """Our requantizer and the judge's (`deep_gemm` or `reference`) on `exact_activations`; upstream's judges what the
    reference has passed."""
    acc, weight, act = exact_activations(recipe, device)
    q, sf = requantize_accumulators(acc, weight, recipe)
    expected_q, expected_sf = reference.requantize(act, recipe)
    assert sf is not None  # of every kind that upstream has
    assert expected_sf is not None
    outcome = compare_bytes([("q", q, expected_q), ("sf", sf, expected_sf)])
    if judge == "reference" or outcome.problem is not None:
        return outcome
    expected_q, expected_sf = device_code.load().requantize(act, traits(recipe).mid_kind)
    return compare_bytes([("q", q, expected_q), ("sf", sf, expected_sf)])
