"""The sweep that compute-sanitizer runs over: complete, read correctly, and its cases run."""

import pytest

from megamoe.bench import sanitizer_sweep
from megamoe.kernels.pre_dispatch import KINDS
from megamoe.oracle.dispatch_paths import PATHS


def test_every_path_and_kind_is_swept() -> None:
    names = sanitizer_sweep.cases()
    assert {f"layer/{path}/{size}" for path in PATHS for size in ("few", "many")} <= names.keys()
    assert {f"pre_dispatch/{kind}" for kind in KINDS} <= names.keys()
    assert {"routing/int32", "routing/int64", "combine/plain", "combine/weighted"} <= names.keys()
    families = {name.split("/")[0] for name in names} - {"hopper"}  # that one on Hopper alone
    assert families == {"layer", "pre_dispatch", "routing", "combine", "requantize", "mxfp4_requant", "gather"}
    launched = {"gate_up", "down"}  # by every layer
    assert families | launched | {"hopper"} == {*sanitizer_sweep.KERNELS, "layer"}


@pytest.mark.parametrize(
    "name",
    (
        "pre_dispatch/mxfp8", "combine/plain", "combine/weighted", "requantize/nvfp4/trtllm", "mxfp4_requant/sglang",
        "mxfp4_requant/exact", "gather/natural", "gather/k_order",
    ),
)  # fmt: skip
def test_a_case_runs(name: str, device: str) -> None:
    sanitizer_sweep.cases()[name](device)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("layer/fp8xfp4 decoded, E4M3 shared/few", "layer/bf16xfp4, shared/few"))
def test_a_layer_runs(name: str, device: str) -> None:
    sanitizer_sweep.cases()[name](device)


@pytest.mark.parametrize(
    ("tool", "output", "expected"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n", (0, 0)),
        ("memcheck", "========= ERROR SUMMARY: 1 error\n", (1, 0)),
        ("initcheck", "========= ERROR SUMMARY: 64 errors\n", (64, 0)),
        ("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", (0, 0)),
        ("racecheck", "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n", (1, 2)),
        ("memcheck", "Segmentation fault\n", None),
        ("racecheck", "========= ERROR SUMMARY: 0 errors\n", None),
    ],
)
def test_summaries_are_read(tool: str, output: str, expected: tuple[int, int] | None) -> None:
    assert sanitizer_sweep.read_summary(tool, output) == expected


@pytest.mark.parametrize("text", ("2/2", "-1/3"))
def test_parts_are_checked(text: str) -> None:
    with pytest.raises(Exception, match="0 <= I < N"):
        sanitizer_sweep._part(text)


def test_a_finding_is_clean_only_if_everything_was_seen() -> None:
    clean = sanitizer_sweep.Finding("memcheck", 5, 0, 0, True, 1.0, [])
    assert clean.clean
    for field, value in (("errors", 1), ("warnings", 1), ("planted_found", False), ("problems", ["4 of 5 cases ran"])):
        assert not sanitizer_sweep.Finding(**{**vars(clean), field: value}).clean
