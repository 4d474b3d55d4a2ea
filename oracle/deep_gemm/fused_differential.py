"""Whole layers: ours, upstream's live fused kernel and the fp64 reference on the same weights and inputs."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from megamoe.kernels.layouts import buffers
from megamoe.oracle.comparison import Case, Outcome, compare_bytes, error_ratio
from megamoe.oracle.deep_gemm import sm90_fused, sm100_fused
from megamoe.oracle.deep_gemm.sm90_fused import Sm90Fused
from megamoe.oracle.deep_gemm.sm100_fused import Sm100Fused
from megamoe.oracle.deep_gemm.views import View, view_differences
from megamoe.oracle.exact_sum import exact_sum_layer
from megamoe.oracle.metrics import compare
from megamoe.oracle.random_layers import Inputs, layer_spec, random_inputs, random_weights
from megamoe.oracle.reference import moe_layer
from megamoe.oracle.reference_differential import MODELS, TOKENS, held_layer, prepared_layer, run_ours
from megamoe.recipe import ALL_RECIPES, Recipe
from megamoe.spec import LayerSpec

SM90, SM100 = "live SM90 kernel", "live SM100 kernel"
POOLED_OUTPUTS = 1_000_000
MAX_RATIO = 1.02
"""Our error against upstream's, both against the reference."""

# Every tile that upstream's SM90 kernel chooses between; each costs a compilation of some 15 s.
EXACT_SHAPES = (
    dict(tokens=1, hidden=1024, intermediate=512, num_experts=8, top_k=2),
    dict(tokens=100, hidden=1024, intermediate=512, num_experts=32, top_k=4),
    dict(tokens=129, hidden=1024, intermediate=512, num_experts=64, top_k=4),
    dict(tokens=300, hidden=2048, intermediate=3072, num_experts=64, top_k=6),
    dict(tokens=1000, hidden=1024, intermediate=512, num_experts=8, top_k=2),
)


class Upstream(NamedTuple):
    """A live kernel: how to set one up, the shared experts it is given, and the tile it must choose."""

    judge: str
    fused: type[Sm90Fused] | type[Sm100Fused]
    num_shared_experts: int
    tile: Callable[[LayerSpec, int], str | None]


_SM90 = Upstream(SM90, Sm90Fused, 0, sm90_fused.expected_tile)
_SM100 = Upstream(SM100, Sm100Fused, 1, lambda spec, tokens: None)


def cases(device: torch.device) -> list[Case]:
    """FP8 layers for Hopper, every SM100 recipe that we serve for Blackwell."""
    found = [
        Case(
            "buffer", str(sm90_fused.RECIPE), "deep_gemm", SM90, "views",
            run=partial(compare_buffer_views, device), unavailable=sm90_fused.unsupported_reason(),
        )
    ]  # fmt: skip
    judged = [(sm90_fused.RECIPE, _SM90, sm90_fused.unsupported_reason())] if sm90_fused.RECIPE in ALL_RECIPES else []
    reason = sm100_fused.unsupported_reason()
    judged += [(recipe, _SM100, reason) for recipe in ALL_RECIPES if recipe.numerics == sm100_fused.NUMERICS]
    for recipe, upstream, reason in judged:
        live = partial(Case, "layer", str(recipe), "deep_gemm", upstream.judge, unavailable=reason)
        for shape in EXACT_SHAPES:
            name = f"exact sums, {shape['tokens']} tokens, {shape['num_experts']} experts"
            found.append(live(name=name, run=partial(compare_exact_sums, recipe, upstream, shape, device)))
        for model in MODELS:
            for tokens in TOKENS:
                run = partial(compare_random, recipe, upstream, model, tokens, device)
                found.append(live(name=f"{model}, {tokens} tokens", run=run))
    return found


def compare_exact_sums(recipe: Recipe, upstream: Upstream, shape: dict[str, int], device: torch.device) -> Outcome:
    """Bytes of y, which no order of summation changes: ours against upstream's, then against the reference's."""
    layer = exact_sum_layer(recipe, seed=shape["tokens"], device=device, **shape)  # type: ignore[arg-type]
    spec, weights = layer.spec, prepared_layer(layer.weights, recipe)
    inputs = (layer.x, layer.topk_ids, layer.topk_weights)
    ours = run_ours(spec, weights, len(layer.x))(*inputs)
    live = upstream.fused(spec, weights, len(layer.x))
    with captured_stdout() as printed:
        theirs = live(*inputs)
    expected = moe_layer(*inputs, layer.weights, spec, full_trace=False).y
    outcome = compare_bytes([("y against upstream's", ours, theirs)])
    second = compare_bytes([("y against the reference's", ours, expected)])
    details: dict[str, object] = {
        "tile": upstream.tile(spec, len(layer.x)),
        "upstream_config": config_of(printed()),
    }
    return replace(outcome, details=details, problem=outcome.problem or second.problem)


def compare_random(recipe: Recipe, upstream: Upstream, model: str, tokens: int, device: torch.device) -> Outcome:
    """Errors of ours and of upstream's against the reference, over calls that make POOLED_OUTPUTS outputs or more."""
    shape = (*MODELS[model].items(), ("num_shared_experts", upstream.num_shared_experts))
    held = held_layer(recipe, shape, device)
    spec = held.spec
    calls = -(-POOLED_OUTPUTS // (tokens * spec.hidden))
    ours = run_ours(spec, held.prepared, tokens)
    live = upstream.fused(spec, held.prepared, tokens)
    generator = torch.Generator(device).manual_seed(tokens)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    inputs: list[Inputs] = []
    config = None
    for _ in range(calls):
        call = random_inputs(spec, tokens, generator)
        arguments = (call.x, call.topk_ids, call.topk_weights)
        with captured_stdout() as printed:
            output = live(*arguments)
        config = config or config_of(printed())
        results.append((ours(*arguments), output))
        inputs.append(call)
    mine, theirs = (torch.cat(parts) for parts in zip(*results))
    x, ids, weights = (torch.cat([getattr(call, name) for call in inputs]) for name in vars(inputs[0]))
    expected = moe_layer(x, ids, weights, held.plain, spec, full_trace=False).y
    our_error, their_error = compare(mine, expected), compare(theirs, expected)
    ratio = error_ratio(our_error, their_error)
    details = {
        "outputs": expected.numel(),
        "calls": calls,
        "ours": vars(our_error),
        "upstream": vars(their_error),
        "ratio": ratio,
        "outputs_unlike_upstream": int((mine != theirs).sum()),
        "tile": upstream.tile(spec, tokens),
        "upstream_config": config,
    }
    problem = None if ratio <= MAX_RATIO else f"our rel_rms is {ratio:.3f} times upstream's, allowed {MAX_RATIO}"
    return Outcome(details=details, problem=problem)


def compare_buffer_views(device: torch.device) -> Outcome:
    """SM90's views, as the installed module cuts them."""
    spec = layer_spec(sm90_fused.RECIPE, 1024, 512, 8, 2)
    layout = buffers.sm90_layout(num_experts=8, max_tokens=500, top_k=2, hidden=1024, intermediate=512)
    generator = torch.Generator(device).manual_seed(0)
    weights = prepared_layer(random_weights(spec, generator), sm90_fused.RECIPE)
    theirs = Sm90Fused(spec, weights, 500).views
    differences = view_differences(layout, [View.of(tensor) for tensor in theirs.values()])
    return Outcome(details={"views": list(theirs)}, problem="; ".join(differences) or None)


@contextmanager
def captured_stdout() -> Iterator[Callable[[], str]]:
    """What compiled code prints inside the block, with upstream asked to print its choices."""
    previous = os.environ.get("DG_PRINT_CONFIGS")
    os.environ["DG_PRINT_CONFIGS"] = "1"
    libc = ctypes.CDLL(None)
    text = ""
    with tempfile.TemporaryFile() as file:
        libc.fflush(None)
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: text
        finally:
            libc.fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            text = file.read().decode(errors="replace")
            if previous is None:
                del os.environ["DG_PRINT_CONFIGS"]
            else:
                os.environ["DG_PRINT_CONFIGS"] = previous


def config_of(printed: str) -> str | None:
    """The line with the configuration of the fused kernel; None when upstream printed none (it does once per shape)."""
    lines = [line.strip() for line in printed.splitlines() if "MegaMoE" in line and "Config" in line]
    return lines[-1] if lines else None
