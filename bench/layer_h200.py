"""A whole layer on one GPU: checked against the reference, replayed from a CUDA graph with changed inputs, timed.

    PYTHONPATH=src python3 -m megamoe.bench.layer_h200 results.json

DeepSeek-V4-Flash by default: H 4096, I 2048, 256 routed experts and a shared one, top-6, SwiGLU clamp 10.
Method: random weights and inputs. The reference judges up to 64 tokens spread over the batch (rows never meet
before the combine). Times are CUDA-graph replays over eight routings with their own inputs, so that decode reads
experts that are not in L2; the median of seven windows of about 0.2 s. Stage times are the profiler's kernel
durations over the same calls.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

import megamoe
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.random_layers import Inputs, layer_spec, random_inputs, random_weights
from megamoe.oracle.reference import moe_layer
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import SERVED
from megamoe.spec import LayerSpec

SHAPE = dict(hidden=4096, intermediate=2048, num_experts=256, top_k=6, num_shared_experts=1, activation_clamp=10.0)
TOKENS = (1, 64, 1024, 8192)
ROUTINGS = 8
JUDGED_TOKENS = 64
WINDOWS = 7
WINDOW_SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="where the results go")
    parser.add_argument("--mma-type", nargs="+", default=[recipe.mma_type for recipe in SERVED])
    arguments = parser.parse_args()
    rows = [row for mma_type in arguments.mma_type for row in measure_recipe(mma_type)]
    report = {
        "method": " ".join((__doc__ or "").split("Method: ")[1].split()),
        **environment(),
        "shape": SHAPE,
    }
    arguments.json.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


def environment() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "megamoe": megamoe.__version__,
    }


def measure_recipe(mma_type: str) -> list[dict[str, object]]:
    """One row per token count."""
    recipe = megamoe.resolve_recipe(mma_type)
    spec = layer_spec(recipe, **SHAPE)  # type: ignore[arg-type]
    plain = random_weights(spec, torch.Generator("cuda").manual_seed(0))
    parts = vars(plain)
    weights = megamoe.prepare_weights(**parts, mma_type=mma_type)
    layer = megamoe.MegaMoE(weights, max(TOKENS), spec.top_k, activation_clamp=spec.activation_clamp)
    return [_measure(layer, plain, spec, num_tokens) for num_tokens in TOKENS]


def _measure(layer: megamoe.MegaMoE, plain: PlainWeights, spec: LayerSpec, num_tokens: int) -> dict[str, object]:
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    inputs = [random_inputs(spec, num_tokens, generator) for _ in range(ROUTINGS)]
    layer.warmup([num_tokens])
    outputs = [_poisoned(i) for i in inputs]
    for i, output in zip(inputs, outputs):
        layer(i.x, i.topk_ids, i.topk_weights, output)
    again = _poisoned(inputs[0])
    layer(inputs[0].x, inputs[0].topk_ids, inputs[0].topk_weights, again)
    assert_bytes_equal(again, outputs[0], "the second of two runs")
    _check_replay(layer, inputs, outputs)
    errors = compare(*_judged(plain, spec, inputs[0], outputs[0]))
    calls = [lambda i=i, y=y: layer(i.x, i.topk_ids, i.topk_weights, y) for i, y in zip(inputs, outputs)]
    median, best, worst = _graph_microseconds(calls)
    stages = _stage_microseconds(calls)
    flops = 6 * num_tokens * (spec.top_k + spec.num_shared_experts) * spec.hidden * spec.intermediate
    row: dict[str, object] = {
        "recipe": str(spec.recipe),
        "shared_weight": spec.shared_weight,
        "tokens": num_tokens,
        "layer_us": round(median, 1),
        "layer_us_best": round(best, 1),
        "layer_us_worst": round(worst, 1),
        "useful_tflops": round(flops / median / 1e6, 1),
        "stage_us": stages,
        "launches": len(stages),
        "rel_rms": float(f"{errors.rel_rms:.3g}"),
        "worst_row": float(f"{errors.worst_row:.3g}"),
        "fitted_scale": float(f"{errors.fitted_scale:.6g}"),
        "beyond_limits": check(errors, LIMITS[spec.recipe]),
        "bitwise_equal_runs": True,
        "replay_with_changed_inputs": True,
    }
    print(json.dumps(row), flush=True)
    return row


def _poisoned(inputs: Inputs) -> torch.Tensor:
    return torch.full_like(inputs.x, torch.nan)


def _check_replay(layer: megamoe.MegaMoE, inputs: list[Inputs], expected: list[torch.Tensor]) -> None:
    """One captured graph, replayed with other inputs in its buffers, gives every eager result byte for byte."""
    x, ids, weights = (t.clone() for t in (inputs[0].x, inputs[0].topk_ids, inputs[0].topk_weights))
    output = torch.full_like(x, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, ids, weights, output)
    for number in (1, 2, 0):
        x.copy_(inputs[number].x)
        ids.copy_(inputs[number].topk_ids)
        weights.copy_(inputs[number].topk_weights)
        output.fill_(torch.nan)
        graph.replay()
        assert_bytes_equal(output, expected[number], f"replay with inputs {number}")


def _judged(
    plain: PlainWeights, spec: LayerSpec, inputs: Inputs, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(kernel rows, reference rows) of tokens spread over the batch, the first and the last among them."""
    num_tokens = output.shape[0]
    tokens = torch.linspace(0, num_tokens - 1, min(num_tokens, JUDGED_TOKENS), device="cuda").long()
    trace = moe_layer(
        inputs.x, inputs.topk_ids, inputs.topk_weights, plain, spec, tokens=tokens, full_trace=False
    )  # fmt: skip
    return output[tokens], trace.y


def _graph_microseconds(calls: Sequence[Callable[[], object]]) -> tuple[float, float, float]:
    """(median, best, worst) time of one call over windows of back-to-back replays of all of them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def window(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end) / replays / len(calls)

    window(1)
    replays = max(1, round(WINDOW_SECONDS * 1e6 / (window(1) * len(calls))))
    times = [window(replays) for _ in range(WINDOWS)]
    return statistics.median(times), min(times), max(times)


def _stage_microseconds(calls: Sequence[Callable[[], object]]) -> dict[str, float]:
    """Mean duration per call of every kernel, by name, in launch order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls:
            call()
        torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name] = totals.get(event.name, 0.0) + event.device_time_total
    return {name: round(total / len(calls), 1) for name, total in totals.items()}


if __name__ == "__main__":
    main()
