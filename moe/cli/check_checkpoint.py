"""`megamoe check --checkpoint`: one layer of a real checkpoint on every backend that can run, against the reference."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import megamoe
from megamoe.backends.base import UnsupportedError
from megamoe.checkpoints import CheckpointError, CheckpointLayer, read_layer
from megamoe.cli.device import describe
from megamoe.oracle.metrics import LIMITS, check, compare
from megamoe.recipe import Recipe
from megamoe.shared_fusion import append_shared_slots
from megamoe.validation import has_shared_slots

UPSTREAM = ("deep_gemm", "flashinfer_trtllm")
_SEED = 0


def check_checkpoint(
    console: Console,
    device: torch.device,
    folder: Path,
    layer: int,
    tokens: int,
    backends: tuple[str, ...],
    mma_types: tuple[str, ...],
    path: Path | None,
) -> None:
    """Read the layer, run it under each recipe that its weights have, print and write errors.

    backends: upstream's that run beside triton; mma_types: only these recipes; empty: all. Random tokens and routing.
    Exits with status 1 when an error is beyond its limit or when nothing was compared; `click.ClickException` for a
    checkpoint that cannot be read.
    """
    start = time.perf_counter()
    try:
        read = read_layer(folder, layer, device)
    except (CheckpointError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    console.print(f"{read}; read in {time.perf_counter() - start:.1f} s", markup=False)
    recipes = [recipe for recipe in read.recipes if not mma_types or recipe.mma_type in mma_types]
    if not recipes:
        allowed = ", ".join(dict.fromkeys(recipe.mma_type for recipe in read.recipes))
        raise click.UsageError(f"no recipe of this layer has such an mma_type; it has {allowed}")
    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        rows += _run(read, recipe, tokens, backends, device)
        if path is not None:  # after every recipe: a run that is cut short leaves what it has
            path.write_text(json.dumps(_report(read, folder, tokens, device, rows), indent=1) + "\n")
    _print(console, rows)
    ran = [row for row in rows if "unavailable" not in row]
    failed = [row for row in ran if row["problem"] is not None]
    console.print(f"{len(ran) - len(failed)} of {len(ran)} comparisons hold; {len(rows) - len(ran)} could not run")
    if failed or not ran:
        raise SystemExit(1)


def _run(
    layer: CheckpointLayer, recipe: Recipe, tokens: int, backends: tuple[str, ...], device: torch.device
) -> list[dict[str, Any]]:
    """A row per backend: errors against the reference, or why it did not run."""
    try:
        weights = megamoe.prepare_weights(**layer.weight_arguments(recipe))
    except ValueError as error:  # sizes or scales that this recipe cannot have
        return [dict(recipe=str(recipe), backend="every backend", unavailable=str(error))]
    inputs = _inputs(layer, recipe, tokens, device)

    def run(backend: str) -> tuple[torch.Tensor, float]:
        moe = megamoe.MegaMoE(weights, tokens, inputs[1].shape[1], moe_backend=backend, **layer.options)
        output = torch.full_like(inputs[0], torch.nan)
        start = time.perf_counter()
        moe(*inputs, output)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return output, time.perf_counter() - start

    expected, _ = run("reference")
    rows = []
    for backend in ("triton", *(backends or UPSTREAM)):
        row: dict[str, Any] = dict(recipe=str(recipe), backend=backend)
        try:
            output, seconds = run(backend)
        except UnsupportedError as error:
            rows.append(row | dict(unavailable=str(error)))
            continue
        report = compare(output, expected)
        rows.append(
            row | dict(errors=vars(report), problem=check(report, LIMITS[recipe]), first_call_seconds=round(seconds, 3))
        )
    return rows


def _inputs(
    layer: CheckpointLayer, recipe: Recipe, tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normal tokens, distinct experts with weights that sum to 1, and slots for shared experts where ids name them."""
    generator = torch.Generator(device).manual_seed(_SEED)
    x = torch.randn(tokens, layer.hidden, generator=generator, device=device).bfloat16()
    scores = torch.rand(tokens, layer.num_experts, generator=generator, device=device)
    weights, ids = scores.topk(layer.top_k)
    weights = weights / weights.sum(1, keepdim=True)
    if layer.shared is not None and has_shared_slots(recipe):
        # The layer itself multiplies the routed weights by its routed_scaling_factor: shared ones are 1.
        ids, weights = append_shared_slots(
            ids, weights, num_experts=layer.num_experts, num_shared_experts=layer.shared.count, scaled="topk"
        )
    return x, ids, weights


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table("recipe", "backend", "rel. RMS", "worst row", "fitted scale", "")
    for row in rows:
        if "unavailable" not in row:
            errors, bad = row["errors"], row["problem"] is not None
            numbers = f"{errors['rel_rms']:.1e}", f"{errors['worst_row']:.1e}", f"{errors['fitted_scale']:.5f}"
            table.add_row(
                row["recipe"].replace("/", " "), row["backend"], *numbers, "beyond" if bad else "ok",
                style="red" if bad else None,
            )  # fmt: skip
    console.print(table)
    declined: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "unavailable" in row:
            declined.setdefault((row["backend"], row["unavailable"]), []).append(row["recipe"])
    for (backend, reason), recipes in declined.items():
        console.print(f"{backend} did not run {', '.join(recipes)}: {reason}", markup=False)
    for row in rows:
        if row.get("problem") is not None:
            console.print(f"FAILED {row['recipe']} {row['backend']}: {row['problem']}", style="red", markup=False)


def _report(
    layer: CheckpointLayer, folder: Path, tokens: int, device: torch.device, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    from megamoe.cli.check import strict  # which imports this module when it is asked

    return {
        "method": "random tokens and routing; errors of BF16 outputs against the reference on the same weights",
        "megamoe": megamoe.__version__,
        "device": describe(device),
        "torch": torch.__version__,
        "checkpoint": str(folder),
        "layer": layer.number,
        "kind": layer.kind,
        "tokens": tokens,
        "rows": strict(rows),
    }
