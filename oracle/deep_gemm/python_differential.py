"""Our weight transforms, quantizers and buffer views against upstream's host side: its Python, its compiled module."""

from __future__ import annotations

from functools import partial

import torch

from megamoe import quantize
from megamoe.kernels.layouts import buffers
from megamoe.kernels.layouts.gate_up import interleave_gate_up
from megamoe.kernels.layouts.scale_atoms import pack_scale_words
from megamoe.kernels.layouts.weights import transform_weights_sm90, transform_weights_sm100
from megamoe.oracle.comparison import Case, Outcome, compare_bytes, total
from megamoe.oracle.deep_gemm import host_code, python_helpers
from megamoe.oracle.deep_gemm.inputs import awkward_rows, random_rows
from megamoe.oracle.deep_gemm.upstream import locate
from megamoe.oracle.deep_gemm.views import view_differences
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.recipe import TABLE, Recipe, traits

JUDGE = "Python of 0.1.7"
HOST_CODE = "compiled host code of 0.1.7"
_BUFFERS = ("fp8xfp4", "mxf4xmxf4", "nvfp4xnvfp4", "bf16xbf16", "fp8xfp8")
_EXPERTS, _HIDDEN, _INTERMEDIATE = 3, 1024, 512


def cases(device: torch.device) -> list[Case]:
    """One per recipe with DeepGEMM's weights, and one per kind and group that has a host quantizer."""
    try:
        locate()
        reason = None
    except OracleUnavailable as error:
        reason = str(error)
    judged = partial(Case, backend="deep_gemm", judge=JUDGE, unavailable=reason)
    found = []
    for recipe in TABLE:
        transform = {"DeepGEMM SM100": _sm100_weights, "DeepGEMM SM90": _sm90_weights}.get(traits(recipe).judge)
        if transform is not None:
            found.append(judged("weights", str(recipe), name="transform", run=partial(transform, recipe, device)))
    for kind in ("mxfp8", "mxfp4"):
        for group in quantize.MX_GROUPS:
            run = partial(_mx_rows, kind, group, device)
            found.append(judged("quantize", kind, name=f"group {group} finite rows", run=run))
    compiled = partial(Case, "buffer", backend="deep_gemm", judge=HOST_CODE, unavailable=host_code.unsupported_reason())
    found += [compiled(mma_type, name="views", run=partial(_views, mma_type)) for mma_type in _BUFFERS]
    return found


def _views(mma_type: str) -> Outcome:
    """Without and with a shared expert; `fp8xfp8` are SM90's."""
    shape = dict(num_experts=8, max_tokens=384, top_k=2, hidden=1024, intermediate=512)
    problems: list[str] = []
    options: list[object]
    for num_shared in (0, 1) if mma_type != "fp8xfp8" else (0,):
        if mma_type == "fp8xfp8":
            layout = buffers.sm90_layout(**shape)
            name, options = "get_symm_buffer_size_for_sm90_mega_moe", [True, "swiglu"]
        else:
            layout = buffers.sm100_layout(mma_type, **shape, num_shared_experts=num_shared)
            name, options = "get_symm_buffer_size_for_mega_moe", [mma_type, "swiglu", num_shared]
        upstream = host_code.load(9 if mma_type == "fp8xfp8" else 10)
        ((_, views),) = upstream.call([(name, [1, *shape.values(), *options])])
        problems += [f"{num_shared} shared: {text}" for text in view_differences(layout, views)]
    return Outcome(details={"views": len(layout.view_names)}, problem="; ".join(problems) or None)


def _sm100_weights(recipe: Recipe, device: torch.device) -> Outcome:
    """The routed format, and beside MXFP4 the shared E4M3 one."""
    upstream = python_helpers.load().mega
    row = traits(recipe)
    if row.weight == "bf16":
        w1 = _random_bytes(device, _EXPERTS, 2 * _INTERMEDIATE, 2 * _HIDDEN).view(torch.bfloat16)
        expected, _ = upstream.transform_weights_for_mega_moe(w1, w1, mma_type=recipe.mma_type)
        return compare_bytes([("l1", interleave_gate_up(w1, row.interleave), expected)])
    outcomes = []
    for element in ("e2m1", "e4m3") if recipe.mma_type == "fp8xfp4" else ("e2m1",):
        pairs = []
        for rows, columns in ((2 * _INTERMEDIATE, _HIDDEN), (_HIDDEN, _INTERMEDIATE)):
            dtype, width = (torch.int8, columns // 2) if element == "e2m1" else (torch.float8_e4m3fn, columns)
            weight = _random_bytes(device, _EXPERTS, rows, width).view(dtype)
            pairs.append((weight, _random_bytes(device, _EXPERTS, rows, columns // row.weight_group[1])))
        l1, l2 = pairs
        ours = transform_weights_sm100(l1, l2, recipe.mma_type)
        words = [(weight, pack_scale_words(scale)) for weight, scale in pairs]
        theirs = upstream.transform_weights_for_mega_moe(*words, mma_type=recipe.mma_type)
        for name, mine, other in zip((f"{element} l1", f"{element} l2"), ours, theirs):
            outcomes.append(compare_bytes([(name, mine[0], other[0]), (f"{name} scale", mine[1], other[1])]))
    return total(outcomes)


def _sm90_weights(recipe: Recipe, device: torch.device) -> Outcome:
    generator = torch.Generator(device).manual_seed(1)
    pairs = []
    for rows, columns in ((2 * _INTERMEDIATE, _HIDDEN), (_HIDDEN, _INTERMEDIATE)):
        weight = _random_bytes(device, _EXPERTS, rows, columns).view(torch.float8_e4m3fn)
        scale = torch.rand(_EXPERTS, rows // 128, columns // 128, generator=generator, device=device)
        pairs.append((weight, scale))
    ours = transform_weights_sm90(*pairs)
    theirs = python_helpers.load().sm90.transform_weights_for_mega_moe_sm90(*pairs)
    named = zip(("l1", "l2"), ours, theirs)
    return total(compare_bytes([(n, mine[0], other[0]), (f"{n} scale", mine[1], other[1])]) for n, mine, other in named)


def _mx_rows(kind: str, group: int, device: torch.device) -> Outcome:
    ours, theirs = {
        "mxfp8": (quantize.quantize_mxfp8, "per_token_cast_to_fp8"),
        "mxfp4": (quantize.quantize_mxfp4, "per_token_cast_to_fp4"),
    }[kind]
    x = torch.cat(
        [awkward_rows(4 * group, group, finite=True), random_rows(64, 4 * group, torch.Generator().manual_seed(5))]
    ).to(device)
    x = torch.where(x.isfinite(), x, 1.0)
    q, packed = getattr(python_helpers.load().math, theirs)(x, use_ue8m0=True, gran_k=group, use_packed_ue8m0=True)
    mine, sf = ours(x, group=group)
    return compare_bytes([("elements", mine, q.view(mine.dtype)), ("scales", sf, packed.view(torch.uint8))])


def _random_bytes(device: torch.device, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(len(shape) + shape[-1])
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device)
