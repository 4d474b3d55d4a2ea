"""`docs/field_reports.md` names tests that exist, and every test of a field report is named there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "field_reports.md"
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
REPORT = re.compile(r"^[\w.-]+/[\w.-]+#\d+(, ([\w.-]+/[\w.-]+)?#\d+)*$")


def _rows() -> list[list[str]]:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[0] != "Report" and not row[0].startswith("---")]


def _functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_named_test_exists() -> None:
    named = NAMED.findall(TABLE.read_text(encoding="utf-8"))
    assert len(named) > 60
    assert not [f"{file}::{name}" for file, name in named if name not in _functions(file)]


def test_every_report_has_a_test_or_a_reason() -> None:
    rows = _rows()
    assert len(rows) > 50
    for report, *rest in rows:
        assert REPORT.match(report), report
        assert NAMED.search(rest[-1]) or "bench/sanitizer_sweep.py" in rest[-1] or len(rest) == 1, report
        assert len(rest[0]) > 5, report


def test_every_test_of_a_fault_is_named() -> None:
    named = set(NAMED.findall(TABLE.read_text(encoding="utf-8")))
    faults = [(file.name, name) for file in TESTS.glob("test_faults_*.py") for name in _functions(file.name)]
    assert len(faults) > 20
    assert not [f"{file}::{name}" for file, name in faults if (file, name) not in named]
