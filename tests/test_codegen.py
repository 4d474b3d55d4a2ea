"""Default launches, compiled for GPUs that are not here, in processes without the interpreter.

Compiling all of them takes a quarter of an hour of two cores: CI compiles those that stand for the others, `make
codegen` all, under both Tritons, and its committed results must be of the jobs there are.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from megamoe.cli.codegen import codegen
from megamoe.codegen import checks
from megamoe.codegen.job import ARCHS, CompileJob
from megamoe.codegen.pool import Entry, Pool, Result
from megamoe.codegen.registry import collect
from megamoe.recipe import ALL_RECIPES, Recipe

pytestmark = pytest.mark.compile_only

TOYS = str(Path(__file__).with_name("codegen_kernels.py"))
RESULTS = Path(__file__).parent.parent / "bench" / "results"
# Of the GEMMs: Hopper's two K loops and Blackwell's, among them the launch that is shortest of registers.
IN_CI = {
    90: {"fp8xfp4/mx32/deep_gemm_sm100", "fp8xfp4/block128/deep_gemm_sm90"},
    100: {"fp8xfp4/mx32/deep_gemm_sm100", "nvfp4xnvfp4/nv16/trtllm_gen"},
    120: {"fp8xfp4/mx32/deep_gemm_sm100"},
}


def in_ci(arch: int, job: CompileJob | Entry) -> bool:
    if job.kernel in checks.PERSISTENT:
        return job.name.endswith("/16x5")  # the others take ten seconds each
    return job.recipe in IN_CI[arch] if job.kernel in checks.GEMMS else arch == 90


# Collected here for the test ids; compiled from the workers' own lists.
JOBS = [
    pytest.param(arch, name, id=f"sm_{arch}-{name}")
    for arch in ARCHS
    for name, job in collect(arch).items()
    if in_ci(arch, job)
]
# No inexact arithmetic at all, and the two that share the SwiGLU epilogue: the sigmoid's.
CONTRACTS = {
    "pre_dispatch": frozenset(),
    "combine": frozenset(),
    "mxfp4_requant": frozenset(),
    "down": frozenset(),
    "requantize": frozenset({"div.full", "ex2.approx"}),
    "gate_up": frozenset({"div.full", "ex2.approx"}),
}


def compile_all(source: str | None = None) -> dict[tuple[int, str], Result]:
    with Pool(source) if source else Pool() as pool:
        entries = [entry for arch in ARCHS for entry in pool.list_jobs(arch) if source or in_ci(arch, entry)]
        return {(result.entry.arch, result.entry.name): result for result in pool.run(entries)}


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, str], Result]:
    return compile_all()


@pytest.fixture(scope="module")
def toys() -> dict[tuple[int, str], Result]:
    return compile_all(TOYS)


@pytest.mark.parametrize(("arch", "name"), JOBS)
def test_default_job_keeps_its_contract(compiled: dict, arch: int, name: str) -> None:
    """No stack, no STL/LDL, the arithmetic its contract allows, the MMA of its recipe."""
    result = compiled[arch, name]
    assert result.error is None, result.error
    assert result.violations == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", CONTRACTS)
def test_contracts_are_as_strict_as_the_design_says(arch: int, kernel: str) -> None:
    """A kernel may not buy itself out of a check by widening its own contract, nor by having no job."""
    jobs = [job for job in collect(arch).values() if job.kernel == kernel]
    assert jobs, f"{kernel} has no compile job for sm_{arch}"
    assert {job.contract for job in jobs} == {CONTRACTS[kernel]}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", checks.GEMMS)
@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_every_recipe_has_jobs_and_an_mma(recipe: Recipe, kernel: str, arch: int) -> None:
    recipes = [job.recipe for job in collect(arch).values() if job.kernel == kernel]
    assert str(recipe) in recipes, f"{kernel} has no compile job for {recipe}"
    assert checks.expected_mma(str(recipe), arch)


def test_the_committed_results_are_of_every_job() -> None:
    results = json.loads((RESULTS / "codegen_triton39.json").read_text())["jobs"]
    committed = {(job["arch"], job["name"]) for job in results}
    assert committed == {(arch, name) for arch in ARCHS for name in collect(arch)}, "run make codegen"
    assert [job["name"] for job in results if job["error"] or job["violations"]] == []


@pytest.mark.parametrize(
    ("arch", "name", "mma"),
    [
        (90, "mxf8f6f4", "wgmma bf16.bf16"),
        (90, "f8f6f4", "wgmma e4m3.e4m3"),
        (100, "mxf8f6f4", "tcgen05.mma kind::mxf8f6f4 block_scale"),
        (100, "mxf4", "tcgen05.mma kind::mxf4 block_scale"),
        (100, "mxf4nvf4", "tcgen05.mma kind::mxf4nvf4 block_scale"),
        (100, "f8f6f4", "tcgen05.mma kind::f8f6f4"),
        (120, "mxf8f6f4", "mma.sync bf16.bf16"),
        (120, "mxf4", "mma.sync kind::mxf4nvf4 block_scale e2m1.e2m1.ue8m0"),
        (120, "mxf4nvf4", "mma.sync kind::mxf4nvf4 block_scale e2m1.e2m1.ue4m3"),
        (120, "f8f6f4", "mma.sync e4m3.e4m3"),
    ],
)
def test_toy_mma(toys: dict, arch: int, name: str, mma: str) -> None:
    report = toys[arch, name].report
    assert report.mma == [mma]
    assert report.sass_mma
    assert report.smem > 0
    assert (report.tmem > 0) == (arch == 100)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "inexact"), [("exact", set()), ("fused", {"fusion"}), ("sloppy", {"div.full", "ex2.approx"})]
)
def test_toy_arithmetic(toys: dict, arch: int, name: str, inexact: set[str]) -> None:
    result = toys[arch, name]
    assert set(result.report.inexact) == inexact
    assert result.ok == (not inexact)


@pytest.mark.parametrize("arch", ARCHS)
def test_toy_spills_are_seen(toys: dict, arch: int) -> None:
    result = toys[arch, "hungry"]
    assert result.report.stack > 0
    assert 0 < result.report.stl_in_loops < result.report.stl
    assert 0 < result.report.ldl_in_loops < result.report.ldl
    assert [violation.split(":")[0] for violation in result.violations] == ["STACK", "spills"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "said"),
    [("incomplete", "neither signature nor constexprs has y, out"), ("aborting", "Assertion `toy' failed")],
)
def test_failing_job_is_reported_and_the_others_go_on(toys: dict, arch: int, name: str, said: str) -> None:
    result = toys[arch, name]
    assert result.report is None
    assert said in result.error
    assert not result.ok


def test_two_jobs_of_one_name_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "twins.py"
    source.write_text(
        "from megamoe.codegen.job import CompileJob\n"
        "def compile_jobs(arch):\n    return [CompileJob('twin', 'toy', '', None, {}, {})] * 2\n"
    )
    with pytest.raises(ValueError, match="two compile jobs for arch 90 are named 'twin'"):
        collect(90, str(source))


def test_cli_writes_the_same_file_twice(tmp_path: Path) -> None:
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for path in paths:
        outcome = CliRunner().invoke(codegen, ["--arch", "90", "--kernel", "combine", "--json", str(path)])
        assert outcome.exit_code == 0, outcome.output
    content = json.loads(paths[0].read_text())
    assert {job["kernel"] for job in content["jobs"]} == {"combine"}
    assert set(content["versions"]) == {"megamoe", "triton", "ptxas_sm90", "ptxas_sm100"}
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_cli_fails_when_a_job_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamoe.cli.codegen.Pool", lambda: Pool(TOYS))
    assert CliRunner().invoke(codegen, ["--arch", "90", "--recipe", "exact"]).exit_code == 0
    outcome = CliRunner().invoke(codegen, ["--arch", "90", "--recipe", "fused"], env={"COLUMNS": "200"})
    assert outcome.exit_code == 1
    assert "sm_90 fused: 8 × fusion (allowed: none)" in outcome.output


def test_cli_names_what_there_is() -> None:
    outcome = CliRunner().invoke(codegen, ["--arch", "90", "--kernel", "nonesuch"], env={"COLUMNS": "200"})
    assert outcome.exit_code == 2
    assert "--kernel 'nonesuch' is unknown; allowed: combine, " in outcome.output
