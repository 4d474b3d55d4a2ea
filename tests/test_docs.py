"""The pages of docs/ say what is true: their figures are those of bench/results, their examples run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megamoe
from megamoe import deep_gemm
from megamoe.bench.records import load
from megamoe.bench.report.markdown import layer_table
from megamoe.checkpoints import write_tiny_checkpoint
from megamoe.weights import MoEWeights

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"
LIVE = "live SM90 kernel"


def _between(page: str, start: str, end: str) -> str:
    found = re.search(f"{re.escape(start)}\n(.*?){re.escape(end)}", (DOCS / page).read_text(), re.DOTALL)
    assert found is not None, f"docs/{page} has nothing between {start!r} and {end!r}"
    return found[1]


def _differential() -> dict[str, Any]:
    return json.loads((RESULTS / "differential_h200.json").read_text())


def _random_layers() -> list[dict[str, Any]]:
    """Rows of ours and upstream's live kernel on the same random data."""
    return [case for case in _differential()["cases"] if case["judge"] == LIVE and "ratio" in case]


def _error_table() -> str:
    lines = [
        "| model | tokens | upstream's tile | ours | upstream's | outputs | unlike upstream's |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _random_layers():
        model, count = row["case"].removesuffix(" tokens").split(", ")
        errors = " | ".join(f"{1e3 * row[side]['rel_rms']:.2f}·10⁻³" for side in ("ours", "upstream"))
        unlike = row.get("outputs_unlike_upstream")
        counted = "not counted" if unlike is None else f"{unlike:,}"
        tile = row["tile"].replace("x", "×")
        lines.append(f"| {model} | {int(count):,} | {tile} | {errors} | {row['outputs']:,} | {counted} |")
    return "\n".join(lines) + "\n"


def _bytes_table() -> str:
    lines = ["| ours vs DeepGEMM | bytes compared | differ |", "|---|---|---|"]
    for name, total in _differential()["totals"].items():
        if total["bytes_compared"]:
            lines.append(f"| {name} | {total['bytes_compared']:,} | {total['bytes_mismatched']} |")
    return "\n".join(lines) + "\n"


def test_errors_against_the_live_kernel_are_the_measured_ones() -> None:
    assert _between("oracles.md", "<!-- errors -->", "<!-- /errors -->") == _error_table()
    assert _between("oracles.md", "<!-- bytes -->", "<!-- /bytes -->") == _bytes_table()


def test_up_to_1024_tokens_nothing_differs_from_the_live_kernel() -> None:
    rows = _random_layers()
    large = [row for row in rows if ", 8192 tokens" in row["case"]]
    assert {row["case"].split(",")[0] for row in rows} == {"V4-Flash", "V4-Pro"}
    assert len(rows) == 12
    for row in large:
        assert row["tile"] == "128x256"
        assert 2.5 < row["upstream"]["rel_rms"] / row["ours"]["rel_rms"] < 3.5, "three times ours, says the page"
    for row in (row for row in rows if row not in large):
        assert row["ours"] == row["upstream"]
        assert row.get("outputs_unlike_upstream", 0) == 0


def _run(page: str, **given: object) -> dict[str, Any]:
    """The names that a page's Python examples leave, run one after the other."""
    torch.manual_seed(0)
    names: dict[str, Any] = dict(given)
    for example in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        exec(compile(example, page, "exec"), names)
    return names


def test_every_weight_format_is_quantized_as_the_page_says() -> None:
    """A layer of each against one of the BF16 weights: as far apart as its format is coarse."""
    names = _run("weights.md")
    x = torch.randn(6, names["hidden"]).bfloat16()
    topk_weights, topk_ids = torch.rand(6, names["experts"]).topk(2)

    def run(weights: MoEWeights) -> torch.Tensor:
        return megamoe.MegaMoE(weights, 6, 2, moe_backend="reference")(x, topk_ids, topk_weights).double()

    assert repr(names["fp8xfp8"]) == (
        "MoEWeights(fp8xfp8/block128/deep_gemm_sm90, 4 experts, hidden 256, intermediate 256, 786,624 bytes on cpu)"
    )
    exact = run(names["bf16xbf16"])
    limits = {"fp8xfp4": 0.25, "mxf4xmxf4": 0.35, "bf16xfp4": 0.25, "nvfp4xnvfp4": 0.3, "fp8xfp8": 0.08,
              "mxfp8xmxfp8": 0.08}  # fmt: skip
    assert {value.recipe.mma_type for value in names.values() if isinstance(value, MoEWeights)} == {
        *limits,
        "bf16xbf16",
    }
    for name, limit in limits.items():
        error = float((run(names[name]) - exact).norm() / exact.norm())
        assert 0.005 < error < limit, (name, error)


def test_the_deep_gemm_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, or on a CPU in plain torch: the interpreter, as other tests run it, would take 15 seconds."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("megamoe.oracle.interpreter.is_active", lambda: False)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    y = _run("deep_gemm.md")["y"]
    assert y.isfinite().all()
    assert 0.1 < y.float().std() < 1


def test_the_checkpoint_example_runs(tmp_path: Path, device: str) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v4_mxfp4", layer=3)
    y = _run("checkpoints.md", folder=tmp_path, device=device)["y"]
    assert y.shape == (4, 256)
    assert y.isfinite().all()
    assert y.float().std() > 1e-3


def test_no_page_installs_what_is_not_published() -> None:
    pages = [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert [page.name for page in pages if re.search(r"pip install [^#\n]*\bmegamoe\b", page.read_text())] == []


def test_the_deep_gemm_page_names_what_is_there() -> None:
    names = set(re.findall(r"`(?:megamoe\.)?deep_gemm\.(\w+)", (DOCS / "deep_gemm.md").read_text()))
    calls = {"fp8_fp4_mega_moe", "nvfp4_mega_moe", "bf16_mega_moe", "fp8_mega_moe", "to_hopper_", "from_hopper_"}
    assert "stand_in" in names
    for name in names | calls:
        assert hasattr(deep_gemm, name), name


def test_v4_pro_is_the_measured_one() -> None:
    table = layer_table(load(RESULTS / "h200_layer.json"), "deepseek-v4-pro")
    assert _between("bench.md", "<!-- pro -->", "<!-- /pro -->") == table
