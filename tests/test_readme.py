"""The README says what is true: its example runs as it stands and its recipe table is the code's."""

import json
import re
from pathlib import Path

import pytest
import torch

from megamoe.bench.records import load
from megamoe.bench.report.markdown import layer_table
from megamoe.recipe import TABLE, Traits

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
SCALES = {"ue8m0": "UE8M0", "ue4m3": "UE4M3", "fp32": "fp32"}


def _between(start: str, end: str) -> str:
    found = re.search(f"{re.escape(start)}\n(.*?){re.escape(end)}", README.read_text(), re.DOTALL)
    assert found is not None, f"README.md has nothing between {start!r} and {end!r}"
    return found[1]


def _activations(row: Traits) -> str:
    if row.act_scale_format is None:
        return row.act.upper()
    group = f"/{row.act_group}" if row.act_group else "/token"
    outer = " + fp32/token" if row.token_scale else ""
    return f"{row.act.upper()} + {SCALES[row.act_scale_format]}{group}{outer}"


def _weights(row: Traits) -> str:
    if row.weight_scale_format is None:
        return row.weight.upper()
    rows, columns = row.weight_group
    group = f"{rows}×{columns}" if rows > 1 else str(columns)
    return f"{row.weight.upper()} + {SCALES[row.weight_scale_format]}/{group}"


def _recipe_table() -> str:
    lines = ["| `mma_type` | `act_scale` | `numerics` | activations | weights |", "|---|---|---|---|---|"]
    for recipe, row in TABLE.items():
        key = f"`{recipe.mma_type}` | `{recipe.act_scale}` | `{recipe.numerics}`"
        lines.append(f"| {key} | {_activations(row)} | {_weights(row)} |")
    return "\n".join(lines) + "\n"


def _layer_table() -> str:
    rows = json.loads((RESULTS / "layer_h200.json").read_text())["rows"]
    tokens = sorted({row["tokens"] for row in rows})
    titles = [f"{count} token{'s' if count > 1 else ''}" for count in tokens]
    lines = [f"| layer, µs | {' | '.join(titles)} |", f"|---|{'---|' * len(tokens)}"]
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        times = {row["tokens"]: row["layer_us"] for row in rows if row["recipe"] == recipe}
        lines.append(f"| `{recipe.split('/')[0]}` | {' | '.join(f'{times[count]:,.0f}' for count in tokens)} |")
    return "\n".join(lines) + "\n"


def test_peers_table_is_the_measured_one() -> None:
    expected = layer_table(load(RESULTS / "h200_layer.json"), "deepseek-v4-flash")
    assert _between("<!-- peers -->", "<!-- /peers -->") == expected


def test_layer_table_is_the_measured_one() -> None:
    assert _between("<!-- layer -->", "<!-- /layer -->") == _layer_table()


def test_pre_dispatch_figures_are_the_measured_ones() -> None:
    rows = json.loads((RESULTS / "pre_dispatch_h200.json").read_text())["timings"]
    times = [row["us"] for row in rows if (row["tokens"], row["hidden"]) == (8192, 4096)]
    ratios = [row["floor_ratio"] for row in rows if row["floor_ratio"] is not None]
    text = " ".join(README.read_text().split())
    assert f"takes {min(times):.0f} to {max(times):.0f} µs, {min(ratios):.1f} to {max(ratios):.1f} times" in text


def test_recipe_table_is_the_codes() -> None:
    assert _between("<!-- recipes -->", "<!-- /recipes -->") == _recipe_table()


def test_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(_between("```python", "```"), str(README), "exec"), names)
    y = names["y"]
    assert isinstance(y, torch.Tensor)
    assert y.shape == (16, 256)
    assert y.isfinite().all()
    assert y.float().std() > 0.1, "a layer of random weights gives values of about unit size"
    assert capsys.readouterr().out == "torch.Size([16, 256]) torch.bfloat16 triton\n"
