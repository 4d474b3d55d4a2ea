"""Upstream's device code as judge: it compiles without a GPU, says why it cannot run, and on a GPU judges our bytes."""

import ctypes
from pathlib import Path

import pytest
import torch

from megamoe.kernels.pre_dispatch import KINDS
from megamoe.oracle.comparison import Outcome
from megamoe.oracle.deep_gemm import device_code, differential, upstream
from megamoe.oracle.deep_gemm.device_source import INSTANTIATIONS, REQUANTIZE_GROUPS, SM100_KINDS, kind_number, source
from megamoe.oracle.deep_gemm.inputs import awkward_rows, bit_patterns
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.recipe import ALL_RECIPES, traits

pytestmark = pytest.mark.differential

SM100_TEMPLATE = "mega_moe_pre_dispatch_kernelILj{group}ELNS_7MmaKindE{number}ELb0E"
SM90_TEMPLATE = "sm90_mega_moe_pre_dispatch_kernelILj{group}ELb0E"
MMA_KIND_NUMBERS = {"mxfp8": 1, "mxfp4": 2, "nvfp4": 3}  # upstream's enum


@pytest.fixture(scope="module")
def found() -> tuple[upstream.Upstream, Path]:
    try:
        return upstream.locate(download=True), device_code.find_nvcc()
    except OracleUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_every_instantiation_compiles_and_the_library_loads(
    found: tuple[upstream.Upstream, Path], capability: int
) -> None:
    path = device_code.build(capability, *found)
    assert f"sm_{capability}a" in path.name
    machine_code = path.read_bytes()
    for kind, group in INSTANTIATIONS:
        template = SM100_TEMPLATE if kind in SM100_KINDS else SM90_TEMPLATE
        assert template.format(group=group, number=MMA_KIND_NUMBERS.get(kind)).encode() in machine_code, (kind, group)
    device_code.DeviceCode(path)
    library = ctypes.CDLL(str(path))
    library.pre_dispatch.argtypes = [ctypes.c_int, ctypes.c_uint32, *[ctypes.c_void_p] * 9, *[ctypes.c_uint32] * 4]
    assert library.pre_dispatch(kind_number("mxfp8"), 16, *[None] * 9, 1, 1, 128, 1) == -1, "no such instantiation"
    assert library.pre_dispatch(kind_number("mxfp8"), 32, *[None] * 9, 0, 0, 128, 1) == 0, "nothing to launch"


@pytest.mark.slow
def test_the_library_is_kept_by_content(found: tuple[upstream.Upstream, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = device_code.build(90, *found)
    changed = path.stat().st_mtime_ns
    assert device_code.build(90, *found) == path
    assert path.stat().st_mtime_ns == changed
    monkeypatch.setattr(device_code, "source", lambda: source() + "\n#error on purpose\n")
    with pytest.raises(OracleUnavailable, match="refused upstream's headers for sm_90a: .*on purpose"):
        device_code.build(90, *found)


def test_kinds_are_ours() -> None:
    for kind, group in INSTANTIATIONS:
        assert group in KINDS[kind].groups
    assert set(SM100_KINDS) | {"fp8_block128"} == {kind for kind, _ in INSTANTIATIONS}


def test_bad_surroundings_have_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_code.unsupported_reason() == "no CUDA GPU"
    with pytest.raises(OracleUnavailable, match="no CUDA GPU"):
        device_code.load()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert device_code.unsupported_reason() == "the GPU has compute capability 8.0; FP8 conversions need 8.9"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(device_code.shutil, "which", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(device_code, "DEFAULT_NVCC", tmp_path / "nvcc")
    assert device_code.unsupported_reason() == f"no nvcc in CUDA_HOME, CUDA_PATH, PATH or at {tmp_path / 'nvcc'}"
    (tmp_path / "nvcc").touch()
    monkeypatch.setenv(upstream.VARIABLE, str(tmp_path))
    assert device_code.unsupported_reason() == f"{upstream.VARIABLE}={tmp_path} holds no deep_gemm/VERSION"
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "VERSION").write_text("0.1.6\n")
    reason = device_code.unsupported_reason()
    assert reason is not None
    assert "is sgl-deep-gemm 0.1.6; the contract is that of 0.1.7" in reason


@pytest.mark.parametrize(
    "kind, group, hidden, top_k, reason",
    [
        ("mxfp8", 32, 128, 2, None),
        ("mxfp8", 16, 128, 2, "has no kernel"),
        ("bf16", 32, 128, 2, "has no kernel"),
        ("mxfp4", 64, 128, 2, "hidden=128 is no multiple of 256"),
        ("nvfp4", 16, 96, 2, "hidden=96 is no multiple of 64"),
        ("fp8_block128", 128, 1152, 2, None),
        ("fp8_block128", 128, 1100, 2, "hidden=1100 is no multiple of 128"),
        ("mxfp8", 32, 8320, 2, "hidden=8320 is more than 8192"),
        ("mxfp8", 32, 128, 17, "top_k=17 is more than hidden / 8 = 16"),
    ],
)
def test_shapes_that_upstream_refuses(kind: str, group: int, hidden: int, top_k: int, reason: str | None) -> None:
    found = device_code.shape_unsupported_reason(kind, group, hidden, top_k)
    assert (found is None) if reason is None else reason in str(found)


def test_awkward_rows_hold_what_they_promise() -> None:
    x = awkward_rows(128, 32)
    groups = x.unflatten(-1, (-1, 32))
    amax = groups.abs().float().nan_to_num(0.0, 0.0, 0.0).amax(-1)
    for top in (448.0, 6.0):
        exact = torch.tensor(top).bfloat16().view(torch.int16)
        for ulp in (-1, 0, 1):
            assert (amax == (exact + ulp).view(torch.bfloat16).float()).any(), (top, ulp)
    assert (x.view(torch.int16) == -(2**15)).any(), "−0"
    assert ((x.float().abs() > 0) & (x.float().abs() < 2.0**-126)).any(), "denormals"
    assert x.isnan().any()
    assert x.isinf().any()
    assert awkward_rows(128, 32, finite=True).isfinite().all()
    patterns = bit_patterns(1024).view(torch.int16)
    assert torch.bincount(patterns.flatten().int() + 2**15, minlength=2**16).min() >= 2


@pytest.mark.parametrize("kind, group", [("mxfp4", 32), ("fp8_block128", 128)])
def test_a_wrong_byte_is_a_problem(kind: str, group: int, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """One wrong row, swapped nibbles, a write into a pad row: each comparison must notice."""
    x = awkward_rows(4 * group, group)[:9].to(device)

    def compare() -> Outcome:
        return differential.compare_pre_dispatch(x, kind, group, 12, "reference")

    assert compare().problem is None
    honest = differential.pre_dispatch
    for name, row, change in (("q", 4, 1), ("sf", 8, 1), ("q", 10, 1), ("weights_out", 11, 1)):

        def broken(*arguments: object, name: str = name, row: int = row, change: int = change, **named: object) -> None:
            honest(*arguments, **named)  # type: ignore[arg-type]
            tensor = named[name]
            assert isinstance(tensor, torch.Tensor)
            tensor[row].view(torch.uint8)[0] ^= change

        monkeypatch.setattr(differential, "pre_dispatch", broken)
        outcome = compare()
        assert outcome.problem is not None, (name, row)
        assert (outcome.bytes_mismatched == 1) == (row < 9 or name == "weights_out"), (name, row)


@pytest.fixture(scope="module")
def live() -> device_code.DeviceCode:
    try:
        return device_code.load(download=True)
    except OracleUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("kind, group", INSTANTIATIONS)
def test_pre_dispatch_bytes(live: device_code.DeviceCode, kind: str, group: int) -> None:
    hidden = 1024
    x = torch.cat([awkward_rows(hidden, group), bit_patterns(hidden)]).cuda()
    outcome = differential.compare_pre_dispatch(x, kind, group, len(x) + 9, "deep_gemm")
    assert outcome.problem is None, outcome
    assert outcome.bytes_compared > 60_000


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe",
    [r for r in ALL_RECIPES if r.numerics.startswith("deep_gemm") and traits(r).mid_kind in REQUANTIZE_GROUPS],
    ids=str,
)
def test_requantizer_bytes(live: device_code.DeviceCode, recipe: differential.Recipe) -> None:
    outcome = differential.compare_requantized(recipe, torch.device("cuda"), "deep_gemm")
    assert outcome.problem is None, outcome
    assert outcome.bytes_compared > 100_000


@pytest.mark.gpu
def test_a_refused_launch_names_the_argument(live: device_code.DeviceCode) -> None:
    x = torch.ones(2, 128, dtype=torch.bfloat16, device="cuda")
    ids, weights = torch.zeros(2, 1, dtype=torch.int32, device="cuda"), torch.ones(2, 1, device="cuda")
    outputs = differential._Outputs("mxfp8", 32, 128, 2, x.device).named | {
        "ids_out": torch.zeros(2, 1, dtype=torch.int64, device="cuda"),
        "weights_out": torch.ones(2, 1, device="cuda"),
    }
    with pytest.raises(ValueError, match="topk_ids has dtype torch.int64"):
        live.pre_dispatch(x, ids.long(), weights, **outputs, kind="mxfp8", group=32)
    with pytest.raises(ValueError, match="contiguous and on a GPU"):
        live.pre_dispatch(x.cpu(), ids, weights, **outputs, kind="mxfp8", group=32)
    with pytest.raises(ValueError, match="only the SM90 kernel has one"):
        live.pre_dispatch(x, ids, weights, **outputs, kind="mxfp8", group=32, routed_scaling_factor=2.0)
