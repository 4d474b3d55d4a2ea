"""`pytest -m differential`: every comparison of `megamoe check` as a test of its own, for `-k`, `-x` and debuggers.

Without that marker expression they are left out: the command has its own tests, and CI judges each kernel in the file
of that kernel.
"""

import pytest
import torch

from megamoe.oracle.comparison import Case
from megamoe.oracle.downloads import OracleUnavailable


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "differential" not in metafunc.config.option.markexpr:
        metafunc.parametrize("case", [None])  # left out by conftest; listing the cases probes what is installed
        return
    from megamoe.oracle import suites

    cases = suites.cases(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    metafunc.parametrize("case", [pytest.param(case, id=f"{case.judge}-{case.path}") for case in cases])


@pytest.mark.whole_suite
@pytest.mark.differential
def test_ours_agrees_with_the_judge(case: Case) -> None:
    if case.unavailable is not None:
        pytest.skip(case.unavailable)
    try:
        outcome = case.run()
    except OracleUnavailable as reason:
        pytest.skip(str(reason))
    assert outcome.problem is None, outcome.problem
    assert outcome.bytes_mismatched == 0
    assert outcome.bytes_compared or outcome.details, "something was compared"
