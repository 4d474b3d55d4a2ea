"""The layers `megamoe demo` shows: each recipe on each backend, through the public API."""

from __future__ import annotations

from collections.abc import Callable

import torch

import megamoe
from megamoe.backends import NAMES, unsupported_reason
from megamoe.backends.base import LayerRequest
from megamoe.cli.demo import Row, Shape
from megamoe.cli.measure import count_launches, graph_microseconds, timed
from megamoe.oracle.exact_sum import exact_sum_layer
from megamoe.oracle.metrics import LIMITS, check, compare
from megamoe.oracle.public_arguments import layer_arguments, weight_arguments
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.recipe import ALL_RECIPES, Recipe

# Every sum of these inputs is exact, so any order of adding gives the same bits. Small: size adds nothing.
_EXACT = Shape(tokens=6, hidden=128, intermediate=128, num_experts=3, top_k=2)


def run_layers(
    shape: Shape, device: torch.device, progress: Callable[[str], object]
) -> tuple[list[Row], dict[tuple[str, str], list[str]]]:
    """The table's rows, and for every (backend, reason) the recipes it declined."""
    rows: list[Row] = []
    declined: dict[tuple[str, str], list[str]] = {}
    for recipe in ALL_RECIPES:
        progress(f"{recipe}: making a layer")
        layer = random_layer(recipe, activation_clamp=shape.clamp, device=device, **shape.sizes)
        request = LayerRequest(layer.spec, device, shape.tokens)
        for backend in sorted(NAMES, key=lambda name: name != "reference"):  # the judge first
            reason = unsupported_reason(backend, request)
            if reason is not None:
                declined.setdefault((backend, reason), []).append(str(recipe))
                continue
            progress(f"{recipe}: {backend}")
            if backend == "reference":
                expected, row = _judge(layer, device)
                rows.append(row)
            else:
                rows.append(_compare(layer, backend, expected, device))
    return rows, declined


def _judge(layer: Layer, device: torch.device) -> tuple[torch.Tensor, Row]:
    expected, seconds = timed(_prepared_call(layer, "reference"), device)
    cells = ("-", "-", "-", "judge", "judge", f"{1000 * seconds:.0f} ms", "-")
    return expected, Row(str(layer.spec.recipe), "reference", cells)


def _compare(layer: Layer, backend: str, expected: torch.Tensor, device: torch.device) -> Row:
    recipe = layer.spec.recipe
    call = _prepared_call(layer, backend)
    output, seconds = timed(call, device)
    report = compare(output, expected)
    beyond = check(report, LIMITS[recipe])
    repeated, launches = count_launches(call, device)
    exact = _exact_sums_agree(recipe, backend, device)
    time = f"{seconds:.2f} s" if device.type == "cpu" else f"{graph_microseconds(call):.1f} µs"
    problems = [
        beyond,
        None if torch.equal(output, repeated) else "two runs differ",
        None if exact else "exact-sum inputs: the bytes differ from the reference's",
    ]
    cells = (
        f"{report.rel_rms:.1e}", f"{report.worst_row:.1e}", f"{report.fitted_scale:.5f}",
        "within" if beyond is None else "BEYOND", "equal bytes" if exact else "DIFFER", time, str(launches),
    )  # fmt: skip
    return Row(str(recipe), backend, cells, "; ".join(filter(None, problems)) or None)


def _exact_sums_agree(recipe: Recipe, backend: str, device: torch.device) -> bool:
    layer = exact_sum_layer(recipe, device=device, **_EXACT.sizes)
    return torch.equal(_prepared_call(layer, backend)(), _prepared_call(layer, "reference")())


def _prepared_call(layer: Layer, backend: str) -> Callable[[], torch.Tensor]:
    """A call of `layer` on `backend` through the public API, warm where there is something to compile."""
    tokens = len(layer.x)
    prepared = megamoe.prepare_weights(**weight_arguments(layer))
    moe = megamoe.MegaMoE(prepared, tokens, layer.spec.top_k, moe_backend=backend, **layer_arguments(layer))
    if layer.x.is_cuda:
        moe.warmup([tokens])
    return lambda: moe(layer.x, layer.topk_ids, layer.topk_weights)
