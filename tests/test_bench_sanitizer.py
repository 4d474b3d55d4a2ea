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


def test_racecheck_leaves_hopper_layers_out_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["gather/natural", "hopper/a/9 tokens", "hopper/b/9 tokens", "combine/plain"]
    monkeypatch.setattr(sanitizer_sweep, "cases", lambda: dict.fromkeys(names, lambda device: None))
    commands = []

    def output(command: list[str], limit: float) -> tuple[int, str]:
        """What the tool says of a process, which runs the cases of its command line."""
        commands.append(command)
        if "--planted" in command:
            return 0, "========= ERROR SUMMARY: 64 errors\n"
        under, part = (command[command.index(option) + 1] for option in ("--under", "--part"))
        index, parts = sanitizer_sweep._part(part)
        ran = [f"ran {name}\n" for name in sanitizer_sweep.chosen_cases("", under)[0][index::parts]]
        summary = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" if under == "racecheck" else ""
        return 0, "".join(ran) + f"========= {summary or 'ERROR SUMMARY: 0 errors'}\n"

    monkeypatch.setattr(sanitizer_sweep, "_output", output)
    for tool in sanitizer_sweep.TOOLS:
        found = sanitizer_sweep.run_tool(tool, "", 3, 1.0, "compute-sanitizer")
        assert found.clean, found.problems
        if tool == "racecheck":
            assert found.cases == 2
            assert list(found.left_out) == ["hopper/a/9 tokens", "hopper/b/9 tokens"]
            assert all("mbarrier" in reason for reason in found.left_out.values())
        else:
            assert (found.cases, found.left_out) == (4, {})
    assert all(command[0] == "compute-sanitizer" for command in commands)


def test_no_other_case_is_left_out() -> None:
    for tool in sanitizer_sweep.TOOLS:
        assert not [n for n in sanitizer_sweep.chosen_cases("", tool)[1] if not n.startswith("hopper/")]
    assert sanitizer_sweep.chosen_cases("gather/", None) == (["gather/natural", "gather/k_order"], {})


@pytest.mark.parametrize("text", ("2/2", "-1/3"))
def test_parts_are_checked(text: str) -> None:
    with pytest.raises(Exception, match="0 <= I < N"):
        sanitizer_sweep._part(text)


def test_a_finding_is_clean_only_if_everything_was_seen() -> None:
    clean = sanitizer_sweep.Finding("memcheck", 5, 0, 0, True, 1.0, [], {})
    assert clean.clean
    for field, value in (("errors", 1), ("warnings", 1), ("planted_found", False), ("problems", ["4 of 5 cases ran"])):
        assert not sanitizer_sweep.Finding(**{**vars(clean), field: value}).clean
