"""How results are judged: byte for byte where bytes are the contract, else by relative errors within limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megamoe.recipe import Recipe

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ROWS = 4096  # rows judged at a time, so that fp64 copies of a big result never exist whole


@dataclass(frozen=True)
class ErrorReport:
    """Distance of a result a from the expected e, in fp64, without unit; 0, 0, 1 and 0 for a perfect one.

    rel_rms: ‖a − e‖ / ‖e‖. worst_row: the largest such ratio of one row (last dimension). fitted_scale:
    ⟨a, e⟩ / ⟨e, e⟩, the factor that a is off by. calc_diff: 1 − 2⟨a, e⟩ / (⟨a, a⟩ + ⟨e, e⟩), upstream's measure.
    """

    rel_rms: float
    worst_row: float
    fitted_scale: float
    calc_diff: float


@dataclass(frozen=True)
class Limits:
    """The largest acceptable rel_rms, worst_row, |fitted_scale − 1| and calc_diff, and why these."""

    rel_rms: float
    worst_row: float
    scale_error: float
    calc_diff: float
    reason: str


# For y of a kernel against the reference's y, whose sums are fp64. Only sums and sigmoids may differ, by parts in 2²²,
# which shows where they push a value over a rounding boundary: BF16 of gate and up, an element of the intermediate,
# rarely one of its scales. The figures are the largest errors of 13 layers a recipe (H 256 … 4096, I 128 … 2048,
# 8 … 64 tokens, with clamps, biases and shared experts) under fp32 sums in another order, fp32 sums cut after each MMA
# (BF16 emulation on Hopper) and sigmoids off by up to 2⁻²², all emulated in torch; tests/test_metrics.py repeats a
# part. calc_diff is rel_rms² / 2.
_E4M3 = Limits(
    rel_rms=2e-3,
    worst_row=0.02,
    scale_error=1e-3,
    calc_diff=2e-6,
    reason="an E4M3 element that flips moves by up to 1/8, 1 % of a row where it is a narrow layer's largest; "
    "seen: rel_rms 1.1e-4 and worst row 1e-3, with sigmoids 2⁻¹⁷ off 3.6e-3 and 0.013",
)
_E2M1 = Limits(
    rel_rms=5e-3,
    worst_row=0.05,
    scale_error=1e-3,
    calc_diff=1.25e-5,
    reason="fp32 holds sums of E2M1 products almost always exactly: no difference was seen; one E2M1 element that "
    "flips moves by up to 2 of 6, 5 % of a row of 128, a UE4M3 scale 16 elements by up to 1/8, no more than that; seen "
    "with sigmoids 2⁻¹⁷ off: 1.7e-3 and 0.027",
)
_FP8_BLOCKS = Limits(
    rel_rms=0.01,
    worst_row=0.04,
    scale_error=2e-3,
    calc_diff=5e-5,
    reason="Hopper's FP8 WGMMA cuts addends 13 bits below the largest (fp32 from block to block): emulated, "
    "rel_rms 7.7e-3, worst row 0.030, scale 8e-4 in 120 layers of 40 tokens (of 5 tokens, 5 in 100 go beyond); other "
    "fp32 sums: 6e-4 and 8e-3",
)
_BF16 = Limits(
    rel_rms=4e-3,
    worst_row=0.01,
    scale_error=5e-4,
    calc_diff=8e-6,
    reason="a BF16 element of the intermediate, a row or y that flips moves by up to 2⁻⁸, and BF16 products are long "
    "enough for every fp32 sum to be inexact; seen: rel_rms 1.5e-3, worst row 3.3e-3, scale 1e-4",
)
LIMITS: dict[Recipe, Limits] = {
    Recipe("fp8xfp4", "mx32", "deep_gemm_sm100"): _E4M3,
    Recipe("fp8xfp4", "mx32", "trtllm_gen"): _E4M3,
    Recipe("fp8xfp4", "block128", "deep_gemm_sm90"): _FP8_BLOCKS,
    Recipe("fp8xfp4", "token", "deep_gemm_sm90"): Limits(
        rel_rms=0.016,
        worst_row=0.05,
        scale_error=3e-3,
        calc_diff=1.3e-4,
        reason="as blocks of 128, but one scale per token leaves less of an FP8 WGMMA's 13 bits to the small values of "
        "a row: emulated, with a promotion every 128 columns, rel_rms 0.011, worst row 0.021, scale 1.4e-3; other "
        "fp32 sums: 1.1e-4 and 4e-4",
    ),
    Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100"): _E2M1,
    Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100"): _E2M1,
    Recipe("nvfp4xnvfp4", "nv16_token", "trtllm_gen"): _E2M1,
    Recipe("nvfp4xnvfp4", "nv16", "trtllm_gen"): _E2M1,
    Recipe("fp8xfp8", "block128", "deep_gemm_sm90"): _FP8_BLOCKS,
    Recipe("fp8xfp8", "block128", "trtllm_gen"): _FP8_BLOCKS,
    Recipe("mxfp8xmxfp8", "mx32", "trtllm_gen"): _E4M3,
    Recipe("bf16xbf16", "none", "deep_gemm_sm100"): _BF16,
    Recipe("bf16xfp4", "none", "trtllm_gen"): _BF16,
}


def assert_bytes_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Both tensors hold the same bytes: NaN equals the same NaN, +0 differs from −0. The devices may differ.

    `AssertionError` with the name, the first differing coordinate, both values and their bits, and how many
    elements differ; also for another dtype or shape. `TypeError` for a dtype not of 1, 2, 4 or 8 bytes.
    """
    title = f"{name}: " if name else ""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{title}actual is {actual.dtype} {tuple(actual.shape)}, "
            f"expected is {expected.dtype} {tuple(expected.shape)}"
        )
    got, wanted = _bits(actual), _bits(expected).to(actual.device)
    different = got != wanted
    count = int(different.sum())
    if not count:
        return
    flat = int(different.flatten().int().argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape))
    raise AssertionError(
        f"{title}first difference at {list(where)}: actual {_describe(got[where], actual.dtype)}, "
        f"expected {_describe(wanted[where], actual.dtype)}; {count} of {actual.numel()} elements differ"
    )


def compare(actual: torch.Tensor, expected: torch.Tensor) -> ErrorReport:
    """Error of `actual` [..., N] against `expected`, same shape, any dtype and device; rows: last dimension.

    An element that is NaN or infinite on one side only (or infinite with the other sign) makes every field
    inf. Elements that are so on both sides, such as the rows of slots no expert serves, are left out. Against
    a row of zeros any error is inf. `ValueError` for shapes that differ or have no dimension.
    """
    if actual.shape != expected.shape or actual.ndim == 0:
        raise ValueError(
            f"actual has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}; "
            "they must be equal and have at least one dimension"
        )
    if not actual.numel():
        return ErrorReport(0.0, 0.0, 1.0, 0.0)
    sums = []
    rows = zip(
        actual.reshape(-1, actual.shape[-1]).split(_CHUNK_ROWS),
        expected.reshape(-1, expected.shape[-1]).split(_CHUNK_ROWS),
    )
    for chunk_a, chunk_e in rows:
        a, e = chunk_a.double(), chunk_e.to(chunk_a.device).double()
        finite = a.isfinite() & e.isfinite()
        same = (a == e) | (a.isnan() & e.isnan())
        if not bool((finite | same).all()):
            return ErrorReport(math.inf, math.inf, math.inf, math.inf)
        a, e = torch.where(finite, a, 0.0), torch.where(finite, e, 0.0)
        sums.append(torch.stack([((a - e) ** 2).sum(-1), (a * a).sum(-1), (a * e).sum(-1), (e * e).sum(-1)]))
    by_row = torch.cat(sums, dim=1).cpu()
    error, aa, ae, ee = by_row.sum(1).tolist()
    return ErrorReport(
        rel_rms=math.sqrt(_ratio(error, ee)),
        worst_row=math.sqrt(max(_ratio(row_error, row_ee) for row_error, row_ee in by_row[[0, 3]].T.tolist())),
        fitted_scale=ae / ee if ee else (math.inf if aa else 1.0),
        calc_diff=1 - 2 * ae / (aa + ee) if aa + ee else 0.0,
    )


def check(report: ErrorReport, limits: Limits) -> str | None:
    """The fields of `report` beyond `limits` in one sentence, or None when there are none."""
    fields = (
        ("rel_rms", report.rel_rms, limits.rel_rms),
        ("worst_row", report.worst_row, limits.worst_row),
        ("|fitted_scale - 1|", abs(report.fitted_scale - 1), limits.scale_error),
        ("calc_diff", report.calc_diff, limits.calc_diff),
    )
    # "not <=" rather than ">": a NaN is beyond every limit.
    beyond = [f"{name} {value:.3g} > {limit:.3g}" for name, value, limit in fields if not value <= limit]
    return f"{', '.join(beyond)} ({report})" if beyond else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.itemsize not in _BITS:
        raise TypeError(f"dtype {tensor.dtype} is not of 1, 2, 4 or 8 bytes")
    return tensor.detach().view(_BITS[tensor.dtype.itemsize])


def _describe(bits: torch.Tensor, dtype: torch.dtype) -> str:
    digits = 2 * dtype.itemsize
    value = bits.cpu().view(dtype)
    number = value.double().item() if dtype.is_floating_point else value.item()
    return f"{number} (0x{int(bits) & ((1 << (4 * digits)) - 1):0{digits}X})"


def _ratio(error: float, reference: float) -> float:
    if error == 0:
        return 0.0
    return error / reference if reference else math.inf
