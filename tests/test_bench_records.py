"""Result files: ratios, round trip, and what `megamoe compare` makes of two of them."""

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from megamoe import cli
from megamoe.bench.compare import compare_results
from megamoe.bench.records import Record, Results, load, save, with_ratios
from megamoe.bench.registry import Point
from megamoe.bench.shapes import MODELS

RECORD = Record(
    model="m", tokens=64, mma_type="fp8xfp4", act_scale="mx32", numerics="deep_gemm_sm100", backend="triton",
    stage="layer", n_shared=0, routing="uniform", median_us=100.0, p20_us=99.0, p80_us=101.0, samples=50,
    method="cuda_graph", launches=4, touched_experts=200.0, flops=1e9, bytes=1e6, useful_tflops=10.0,
    weight_gbps=1000.0, roofline_pct=50.0,
)  # fmt: skip
FP8 = replace(RECORD, mma_type="fp8xfp8", act_scale="block128", numerics="deep_gemm_sm90", median_us=120.0)
PEER = replace(FP8, backend="deep_gemm_fused", median_us=150.0)
META = {"device": "gpu", "driver": "1", "roofline": {"read_gbps": 4400.0}}


def _moved(record: Record, factor: float) -> Record:
    return replace(
        record, median_us=record.median_us * factor, p20_us=record.p20_us * factor, p80_us=record.p80_us * factor
    )


def test_ratios_are_their_time_over_ours() -> None:
    portable = replace(RECORD, backend="triton_portable", median_us=200.0)
    ours, ours_fp8, peer, _ = with_ratios([RECORD, FP8, PEER, portable])
    assert ours.ratio_to == {"deep_gemm_fused": 1.5, "triton_portable": 2.0}
    assert ours_fp8.ratio_to["deep_gemm_fused"] == 1.25
    assert peer.ratio_to["triton"] == 0.8, "of two recipes the row's own is the one to compare with"


def test_only_rows_of_one_point_are_compared() -> None:
    others = [
        replace(PEER, tokens=65),
        replace(PEER, n_shared=1),
        replace(PEER, stage="down"),
        replace(PEER, routing="zipf"),
    ]
    assert with_ratios([RECORD, *others])[0].ratio_to == {}


def test_round_trip(tmp_path: Path) -> None:
    results = Results(META, with_ratios([RECORD, FP8, PEER]))
    save(results, tmp_path / "deep" / "a.json")
    assert load(tmp_path / "deep" / "a.json") == results


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"meta": {}}', '{"meta": {}, "records": [{"model": "m"}]}', '{"meta": {}, "records": [3]}',
        '{"meta": {"roofline": 3}, "records": []}', '{"records": [], "meta": null}',
    ],
)  # fmt: skip
def test_another_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json: not a bench result: .*; expected \{\"meta\""):
        load(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("median_us", "fast"), ("median_us", 0.0), ("samples", 1.5), ("ratio_to", []), ("tokens", True), ("model", None)],
)
def test_a_record_of_other_types_is_no_result(tmp_path: Path, field: str, value: Any) -> None:
    save(Results(META, [replace(RECORD, **{field: value})]), tmp_path / "a.json")
    with pytest.raises(
        ValueError, match=rf"a\.json: not a bench result: record 0 has {field} {re.escape(repr(value))}"
    ):
        load(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (RECORD, "same"),
        (_moved(RECORD, 1.04), "same"),
        (_moved(RECORD, 1.2), "slower"),
        (_moved(RECORD, 0.8), "faster"),
        (replace(_moved(RECORD, 1.2), p20_us=100.0), "noise"),
        (replace(_moved(RECORD, 0.8), p80_us=100.0), "noise"),
        (replace(_moved(RECORD, 2.0), samples=2), "noise"),
        (replace(_moved(RECORD, 0.5), samples=1), "noise"),
        (replace(RECORD, problem="rel_rms 1 > 0.1"), "wrong"),
    ],
)
def test_verdicts(after: Record, verdict: str) -> None:
    comparison = compare_results(Results(META, [RECORD]), Results(META, [after]), 0.05)
    assert comparison.changes[0].verdict == verdict
    assert comparison.failed == (verdict in ("slower", "wrong"))


@pytest.mark.parametrize(("samples", "spread"), [(2, "–"), (3, "1.0 %")])
def test_few_samples_have_no_spread(samples: int, spread: str) -> None:
    table = import_module("megamoe.cli.bench")._table(
        Point(MODELS["tiny"], 64, "uniform"), [replace(RECORD, samples=samples)]
    )
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["±"] == [spread]


def test_another_machine_is_a_warning() -> None:
    other = {"device": "gpu", "driver": "2", "roofline": {"read_gbps": 4000.0}}
    warnings = compare_results(Results(META, [RECORD, FP8]), Results(other, [RECORD, PEER]), 0.05).warnings
    assert warnings == [
        "driver differs: 1 before, 2 after",
        "the machine itself differs: read_gbps 4,400 before, 4,000 after",
        "1 rows are only in the first file",
        "1 rows are only in the second file",
    ]


def _compare(tmp_path: Path, before: list[Record], after: list[Record], *options: str) -> tuple[int, str]:
    for name, records in (("a", before), ("b", after)):
        save(Results(META, records), tmp_path / f"{name}.json")
    result = CliRunner().invoke(cli.main, ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *options])
    return result.exit_code, result.output


def test_compare_fails_past_the_threshold(tmp_path: Path) -> None:
    code, output = _compare(tmp_path, [RECORD, FP8], [_moved(RECORD, 1.1), FP8])
    assert code == 1
    assert "+10.0 %" in output
    assert "2 rows: 1 slower, 0 faster, 0 wrong, 0 noise, 1 same" in output
    assert _compare(tmp_path, [RECORD, FP8], [_moved(RECORD, 1.1), FP8], "--threshold", "15")[0] == 0


def test_compare_of_chosen_backends(tmp_path: Path) -> None:
    code, output = _compare(tmp_path, [RECORD, PEER], [_moved(RECORD, 2), PEER], "--backend", "deep_gemm_fused")
    assert code == 0
    assert output.startswith("1 rows: 0 slower")


def test_compare_needs_rows_in_common(tmp_path: Path) -> None:
    code, output = _compare(tmp_path, [RECORD], [PEER])
    assert code == 2
    assert "have no row in common" in output
    assert "Traceback" not in output
    missing = CliRunner().invoke(cli.main, ["compare", str(tmp_path / "no.json"), str(tmp_path / "b.json")])
    assert missing.exit_code == 2
    assert "no.json" in missing.output
