"""How results are judged: byte for byte where bytes are the contract, by relative errors within limits elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megamoe.recipe import Recipe

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ROWS = 4096  # rows judged at a time, so that fp64 copies of a big result never exist whole


@dataclass(frozen=True)
class ErrorReport:
    """Distance of a result a from the expected e, all in fp64 and without unit; 0, 0, 1 and 0 for a perfect one.

    rel_rms: ‖a − e‖ / ‖e‖. worst_row: the largest such ratio of one row (last dimension). fitted_scale: ⟨a, e⟩ / ⟨e, e⟩,
    the factor that a is off by. calc_diff: 1 − 2⟨a, e⟩ / (⟨a, a⟩ + ⟨e, e⟩), DeepGEMM's own measure.
    """

    rel_rms: float
    worst_row: float
    fitted_scale: float
    calc_diff: float


@dataclass(frozen=True)
class Limits:
    """The largest acceptable rel_rms, worst_row, |fitted_scale − 1| and calc_diff, and why they are what they are."""

    rel_rms: float
    worst_row: float
    scale_error: float
    calc_diff: float
    reason: str


# y of the kernels against y of the reference with fp64 sums.
LIMITS: dict[Recipe, Limits] = {
    Recipe("fp8xfp4", "mx32", "deep_gemm_sm100"): Limits(0.01, 0.05, 0.005, 1e-4, "provisional"),
    Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100"): Limits(0.03, 0.20, 0.005, 1e-3, "provisional"),
    Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100"): Limits(0.03, 0.20, 0.005, 1e-3, "provisional"),
    Recipe("fp8xfp8", "block128", "deep_gemm_sm90"): Limits(0.01, 0.05, 0.005, 1e-4, "provisional"),
}


def assert_bytes_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Both tensors hold the same bytes: NaN equals the same NaN, +0 differs from −0. Any dtype of 1, 2, 4 or 8 bytes.

    `AssertionError` with the name, the first differing coordinate, both values and their bits, and how many elements
    differ; also for another dtype or shape. The devices may differ.
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
    """Error of `actual` [..., N] against `expected`, same shape, any dtype and device; rows are the last dimension.

    An element that is NaN or infinite on one side only (or infinite with the other sign) makes every field inf.
    Elements that are so on both sides, such as the rows of slots no expert serves, are left out. Against a row of
    zeros any error is inf. `ValueError` for shapes that differ or have no dimension.
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
        worst_row=math.sqrt(
            max(_ratio(row_error, row_ee) for row_error, row_ee in by_row[[0, 3]].T.tolist())
        ),
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
    width = 2 * dtype.itemsize
    unsigned = int(bits) & ((1 << (4 * width)) - 1)
    return f"{bits.cpu().view(dtype).double().item() if dtype.is_floating_point else bits.cpu().view(dtype).item()} (0x{unsigned:0{width}X})"


def _ratio(error: float, reference: float) -> float:
    if error == 0:
        return 0.0
    return error / reference if reference else math.inf
