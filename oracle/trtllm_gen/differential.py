"""Our trtllm-gen layouts against FlashInfer's functions on any device, our layers against its kernels on Blackwell."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from megamoe.kernels.layouts import trtllm
from megamoe.oracle.comparison import Case, Outcome, compare_bytes, error_ratio, total
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.oracle.metrics import compare
from megamoe.oracle.random_layers import random_layer
from megamoe.oracle.reference import kind_of, moe_layer, quantize
from megamoe.oracle.reference_differential import prepared_layer, run_ours
from megamoe.oracle.trtllm_gen import flashinfer_layouts
from megamoe.oracle.trtllm_gen.guards import kernel_unsupported_reason
from megamoe.oracle.trtllm_gen.routed_moe import RECIPE, routed_moe
from megamoe.recipe import ALL_RECIPES

JUDGE = f"layout functions of {flashinfer_layouts.VERSION}"
KERNELS = "trtllm-gen kernels"
SHAPES = ((128, 128), (256, 512), (384, 1024))
"""(intermediate, hidden)."""
SCALE_SHAPES = ((128, 4), (256, 8), (130, 5), (512, 128), (1, 1))
TOKENS = (1, 7, 64, 129, 1024)
MAX_RATIO = 1.02


def cases(device: torch.device) -> list[Case]:
    """Row orders and scale tiles everywhere; whole layers where the kernels run and we serve the recipe."""
    layouts = partial(Case, recipe=RECIPE.mma_type, backend="flashinfer_trtllm")
    located = _reason(flashinfer_layouts.locate)
    found = [
        layouts(
            "layout", judge=JUDGE, name="row shuffle of w13 and w2", run=partial(_rows, device), unavailable=located
        ),
        layouts(
            "layout", judge=JUDGE, name="scale tiles", run=partial(_scale_tiles, device),
            unavailable=located or _reason(flashinfer_layouts.load_scale_offsets),
        ),
    ]  # fmt: skip
    reason = kernel_unsupported_reason()
    if reason is None and RECIPE not in ALL_RECIPES:
        reason = f"{RECIPE} is not served yet"
    for tokens in TOKENS:
        run = partial(_layer, tokens, device)
        found.append(
            Case("layer", str(RECIPE), "flashinfer_trtllm", KERNELS, f"{tokens} tokens", run, unavailable=reason)
        )
    return found


def _reason(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except OracleUnavailable as error:
        return str(error)
    return None


def _rows(device: torch.device) -> Outcome:
    core = flashinfer_layouts.load().core
    outcomes = []
    for intermediate, hidden in SHAPES:
        generator = torch.Generator(device).manual_seed(hidden)
        for columns in (hidden // 2, hidden // 32):
            w13 = torch.randint(
                0, 256, (2 * intermediate, columns), dtype=torch.uint8, generator=generator, device=device
            )
            w2 = torch.randint(0, 256, (hidden, columns), dtype=torch.uint8, generator=generator, device=device)
            w13_rows = core._maybe_get_cached_w3_w1_permute_indices({}, w13, 128)
            w2_rows = core.get_w2_permute_indices_with_cache({}, w2, 128)
            outcomes.append(
                compare_bytes([
                    ("w13", trtllm.shuffle_w13(w13, halves="up_gate"), w13[w13_rows]),
                    ("w2", trtllm.shuffle_rows(w2), w2[w2_rows]),
                    ("w13 back", trtllm.unshuffle_w13(w13[w13_rows], halves="up_gate"), w13),
                    ("w2 back", trtllm.unshuffle_rows(w2[w2_rows]), w2),
                ])
            )  # fmt: skip
    return total(outcomes)


def _scale_tiles(device: torch.device) -> Outcome:
    offsets = flashinfer_layouts.load_scale_offsets()
    outcomes = []
    for rows, cols in SCALE_SHAPES:
        generator = torch.Generator(device).manual_seed(rows)
        scales = torch.randint(1, 256, (rows, cols), dtype=torch.uint8, generator=generator, device=device)
        padded_rows, padded_cols = trtllm.padded_shape(rows, cols)
        expected = torch.zeros(padded_rows * padded_cols, dtype=torch.uint8, device=device)
        expected[offsets(rows, cols).to(device).flatten()] = scales.flatten()
        expected = expected.view(padded_rows, padded_cols)
        back = trtllm.unswizzle_scales(expected, rows, cols)
        outcomes.append(compare_bytes([("tiles", trtllm.swizzle_scales(scales), expected), ("back", back, scales)]))
    return total(outcomes)


def _layer(tokens: int, device: torch.device) -> Outcome:
    layer = random_layer(
        RECIPE, tokens=tokens, hidden=4096, intermediate=2048, num_experts=32, top_k=6, activation_clamp=10.0,
        device=device,
    )  # fmt: skip
    inputs = (layer.x, layer.topk_ids, layer.topk_weights)
    ours = run_ours(layer.spec, prepared_layer(layer.weights, RECIPE), tokens)(*inputs)
    x = quantize(layer.x, kind_of(RECIPE))
    theirs = routed_moe(layer.spec, layer.weights, x, layer.topk_ids, layer.topk_weights)
    expected = moe_layer(*inputs, layer.weights, layer.spec, full_trace=False).y
    our_error, their_error = compare(ours, expected), compare(theirs, expected)
    ratio = error_ratio(our_error, their_error)
    details = {"outputs": expected.numel(), "ours": vars(our_error), "upstream": vars(their_error), "ratio": ratio}
    problem = None if ratio <= MAX_RATIO else f"our rel_rms is {ratio:.3f} times upstream's, allowed {MAX_RATIO}"
    return Outcome(details=details, problem=problem)
