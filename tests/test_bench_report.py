"""The HTML report, alone and in a real browser, and the pictures."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from megamoe import cli
from megamoe.bench.records import Record, Results, save, with_ratios
from megamoe.bench.report.html import render

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ROOFLINE = {"read_gbps": 4460.0, "copy_gbps": 4300.0, "bf16_tflops": 700.0, "fp8_tflops": 1290.0}


def _results(roofline: dict[str, float] | None = ROOFLINE) -> Results:
    """Two models, three contenders, two stages; one row is wrong."""
    first = Record(
        model="deepseek-v4-flash", tokens=1, mma_type="fp8xfp4", act_scale="mx32", numerics="deep_gemm_sm100",
        backend="triton", stage="layer", n_shared=0, routing="uniform", median_us=40.0, p20_us=39.0, p80_us=42.0,
        samples=50, method="cuda_graph", launches=4, touched_experts=6.0, flops=3e8, bytes=8e7, useful_tflops=7.5,
        weight_gbps=2000.0, roofline_pct=45.0, rel_rms=1e-4, note="64×128×128",
    )  # fmt: skip
    fp8 = replace(first, mma_type="fp8xfp8", act_scale="block128", numerics="deep_gemm_sm90", median_us=60.0)
    combine = replace(first, stage="combine", flops=0.0, useful_tflops=None, weight_gbps=None, median_us=2.0)
    rows = [first, fp8, replace(fp8, backend="deep_gemm_fused", median_us=80.0), combine]
    rows += [
        replace(row, tokens=n, median_us=row.median_us * n**0.5, p20_us=row.p20_us * n**0.5, p80_us=row.p80_us * n**0.5)
        for row in rows
        for n in (64, 4096)
    ]
    rows.append(replace(first, numerics="trtllm_gen", median_us=50.0))
    rows.append(replace(first, model="deepseek-v4-pro", problem="rel_rms 0.3 > 0.1"))
    meta = {"device": "a GPU", "megamoe": "0", "roofline": roofline, "skipped": ["x: needs </script>"]}
    return Results(meta, with_ratios(rows))


def test_the_page_needs_nothing_else() -> None:
    page = render(_results())
    assert not re.findall(r"""(?:src|href)\s*=\s*["']""", page)
    assert "fetch(" not in page
    assert "import(" not in page
    addresses = set(re.findall(r"https?://[^\s\"'`<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name of a namespace, not a request"
    assert page.count("</script>") == 2, "data must not end its element"


def test_the_page_holds_the_data() -> None:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', render(_results()), re.DOTALL)
    assert data is not None
    assert len(json.loads(data[1])["records"]) == len(_results().records)


def _dom(tmp_path: Path, results: Results, script: str = "") -> str:
    """The page's DOM after its script, and then `script`, have run."""
    assert BROWSER is not None
    page = tmp_path / "page.html"
    page.write_text(render(results).replace("</body>", f"<script>{{ {script} }}</script></body>"))
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=3000")
    command = [BROWSER, *options, f"--user-data-dir={tmp_path}/profile", page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'data-ready="yes"' in result.stdout, result.stderr
    return result.stdout


needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium (apt-get install chromium)")


@needs_browser
def test_a_browser_draws_it(tmp_path: Path) -> None:
    dom = _dom(tmp_path, _results())
    assert len(re.findall(r'<polyline[^>]*class="series"', dom)) == 4
    assert len(re.findall('class="bar-mark"', dom)) == 7, "two others at three token counts, one at one"
    assert len(re.findall('class="roof"', dom)) == 3, "read, BF16, FP8"
    table = re.search(r'<table id="rows">(.*?)</table>', dom, re.DOTALL)
    assert table is not None
    assert table[1].count("<tr") == 1 + 10
    assert "NaN" not in dom
    assert ">undefined<" not in dom
    assert "needs &lt;/script&gt;" in dom


@needs_browser
def test_controls_work_in_a_browser(tmp_path: Path) -> None:
    dom = _dom(
        tmp_path,
        _results(),
        """
        document.querySelector("#legend button").click();
        const sort = [...document.querySelectorAll("#rows th button")].find((b) => b.textContent === "µs");
        sort.click();
        const again = [...document.querySelectorAll("#rows th button")].find((b) => b.textContent === "µs");
        again.click();
        document.body.dataset.first = document.querySelector("#rows tbody tr").textContent;
        document.body.dataset.count = document.querySelector("#count").textContent;
        const select = document.querySelector("#model");
        select.value = "deepseek-v4-pro";
        select.dispatchEvent(new Event("change"));
        """,
    )
    assert len(re.findall(r'<button aria-pressed="false"', dom)) == 1
    first = re.search(r'data-first="([^"]*)"', dom)
    assert first is not None
    assert first[1].startswith("4096deep_gemm_fused"), "descending by time"
    assert 'data-count="7 rows"' in dom, "a hidden contender's rows are hidden"
    assert "every contender is hidden" in dom, "the other model has only the contender that was hidden"


@needs_browser
def test_a_run_without_a_roofline_in_a_browser(tmp_path: Path) -> None:
    dom = _dom(tmp_path, _results(None))
    assert "No roofline was measured in this run." in dom
    assert "NaN" not in dom


def test_report_writes_the_page_and_the_pictures(tmp_path: Path) -> None:
    save(_results(), tmp_path / "r.json")
    result = CliRunner().invoke(cli.main, ["report", str(tmp_path / "r.json")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "r.html").read_text() == render(_results())
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra `bench`)")
    result = CliRunner().invoke(cli.main, ["report", str(tmp_path / "r.json"), "--png", str(tmp_path / "png")])
    assert result.exit_code == 0, result.output
    written = sorted(path.name for path in (tmp_path / "png").iterdir())
    assert written == [f"{plot}-deepseek-v4-flash.png" for plot in ("latency", "roofline", "speedup")]


def test_pictures_without_matplotlib_are_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    save(_results(), tmp_path / "r.json")
    result = CliRunner().invoke(cli.main, ["report", str(tmp_path / "r.json"), "--png", str(tmp_path / "png")])
    assert result.exit_code == 1
    assert "Error: the pictures need matplotlib: pip install '.[bench]'" in result.output


def test_the_table_of_a_model(tmp_path: Path) -> None:
    """Peers stand below the recipe that judges them; the fastest of a group is bold; what is wrong is left out."""
    results = _results()
    ours = [replace(row, judged_by=row.recipe) for row in results.records]
    peer = replace(ours[1], backend="humming_token", numerics="humming", median_us=20.04)
    save(Results(results.meta, [*ours, peer]), tmp_path / "r.json")
    printed = CliRunner().invoke(cli.main, ["report", str(tmp_path / "r.json"), "--table", "deepseek-v4-flash"])
    assert printed.exit_code == 0, printed.output
    lines = printed.output.splitlines()
    assert lines[0] == "| µs | 1 | 64 | 4,096 |"
    assert lines[2] == "| **ours**, `fp8xfp4` `mx32` | **40.0** | **320** | **2,560** |"
    at = lines.index("| **ours**, `fp8xfp8` `block128` | 60.0 | **480** | **3,840** |")
    assert set(lines[at + 1 : at + 3]) == {
        "| `deep_gemm_fused` | 80.0 | 640 | 5,120 |",
        "| `humming_token` | **20.0** |  |  |",
    }
    missing = CliRunner().invoke(cli.main, ["report", str(tmp_path / "r.json"), "--table", "deepseek-v4-pro"])
    assert missing.exit_code == 2
    assert "no rows of deepseek-v4-pro" in missing.output
