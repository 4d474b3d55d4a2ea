"""SGLang 0.5.19's own MegaMoE code on our module, as its plugin sets it up; `tests/sglang_harness` runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import megamoe.deep_gemm
from megamoe.backends.base import UnsupportedError
from megamoe.integrations import sglang as plugin

HARNESS = Path(__file__).with_name("sglang_harness")
ROUTES = (
    "SM100 FP8 tokens, MXFP4 experts",
    "SM100 MXFP4 tokens, MXFP4 experts",
    "SM90 FP8 experts",
    "SM90 FP8 tokens, MXFP4 experts",
    "SM90 MXFP4 tokens, MXFP4 experts",
)


@pytest.fixture(scope="module")
def report(device: str) -> dict[str, Any]:
    """What the harness saw, in a process of its own: it fills `sys.modules` with placeholders."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, str(HARNESS), "--json", "--device", device],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if result.returncode == 77:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.stdout, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def _calls(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [call for call in report["calls"] if call["name"] == name]


@pytest.mark.parametrize("route", ROUTES)
def test_forward_mega_moe(route: str, report: dict[str, Any]) -> None:
    found = report["routes"][route]
    assert found["ok"], found
    assert found["chosen"] is True
    assert found["chosen without hooks"] is (route not in ROUTES[3:])
    assert found["idle rank"] == [0, found["hidden"]]
    assert found["SM budget kept"]
    if "graph" in found:
        assert found["graph"]["ok"], found


def test_experts_in_hoppers_order_close_the_fallback(report: dict[str, Any], device: str) -> None:
    found = report["hopper order"]
    assert found["codes' dimensions"] == 4
    assert found["in place"]
    assert found["chosen"]
    assert found["above the cap"].startswith("UnsupportedError: a batch of 65 tokens is beyond SGLANG_OPT_DEEPGEMM_")
    if device == "cpu":
        assert found["forward"].startswith("UnsupportedError: l1_weights are in Hopper's order: the SM90 tier needs")
    else:
        assert found["ok"], found
        assert found["graph"]["ok"], found


def test_every_route_ran(report: dict[str, Any]) -> None:
    assert tuple(report["routes"]) == ROUTES
    if report["deep_gemm"] == "megamoe.deep_gemm":
        assert report["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0"


def test_buffers_get_the_mma_type(report: dict[str, Any]) -> None:
    """Checks 1 and 2 of SGLang's test: the flag decides the type, the legacy flag is never passed."""
    calls = _calls(report, "get_symm_buffer_for_mega_moe")
    assert {call["arguments"]["mma_type"] for call in calls} == {"'fp8xfp4'", "'mxf4xmxf4'"}
    assert all("use_fp8_dispatch" not in call["arguments"] and call["positional"] == 6 for call in calls)


def test_buffers_are_cached_by_mma_type(report: dict[str, Any]) -> None:
    """Check 3."""
    fp8, fp4 = report["api"]["fp8xfp4"], report["api"]["mxf4xmxf4"]
    assert (fp8["buffer's mma_type"], fp4["buffer's mma_type"]) == ("fp8xfp4", "mxf4xmxf4")
    assert fp8["buffer"] != fp4["buffer"]
    assert fp8["buffer cached"]
    assert fp4["buffer cached"]


def test_weights_are_transformed_for_the_mma_type(report: dict[str, Any]) -> None:
    """Checks 4 and 6: `Mxfp4MoEMethod` passes it on, and what comes back is what SGLang builds itself."""
    calls = _calls(report, "transform_weights_for_mega_moe")
    assert [call["arguments"]["mma_type"] for call in calls] == ["'fp8xfp4'", "'mxf4xmxf4'"]
    for call in _calls(report, "transform_sf_into_required_layout"):
        assert call["positional"] == 1
        assert set(call["arguments"]) == {"sf", "mn", "k", "recipe", "num_groups", "disable_ue8m0_cast"}
    assert report["api"]["fp8xfp4"]["weights as SGLang's"]
    assert report["api"]["mxf4xmxf4"]["weights as SGLang's"]


def test_the_pre_dispatch_gets_the_mma_type(report: dict[str, Any]) -> None:
    """Check 5."""
    calls = _calls(report, "mega_moe_pre_dispatch")
    assert calls
    for call in calls:
        assert call["arguments"]["mma_type"] == "'mxf4xmxf4'"
        assert "use_fp4_acts" not in call["arguments"]


def test_nothing_happens_unless_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(plugin, "_registered", False)
    for value in (None, "", "auto", "reference"):
        caplog.clear()
        if value is None:
            monkeypatch.delenv("MEGAMOE_BACKEND", raising=False)
        else:
            monkeypatch.setenv("MEGAMOE_BACKEND", value)
        before = set(sys.modules)
        plugin.register()
        assert set(sys.modules) == before
        assert not plugin._registered
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert bool(said) == bool(value)
        assert all(f"MEGAMOE_BACKEND={value} leaves SGLang's MegaMoE as it is" in text for text in said)


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setenv("MEGAMOE_BACKEND", "triton")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.23")
    before = sys.modules.get("deep_gemm")
    with pytest.raises(UnsupportedError, match="sglang 0.5.23 is installed; allowed: 0.5.19"):
        plugin.register()
    assert sys.modules.get("deep_gemm") is before
    assert not plugin._registered


def test_an_installed_deep_gemm_gets_our_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions alone: its classes and its SM budget stay, and another version is refused."""
    installed = ModuleType("deep_gemm")
    for name in ("fp8_fp4_mega_moe", "transform_sf_into_required_layout", "get_num_sms"):
        setattr(installed, name, lambda *_: "upstream's")
    installed.SymmBuffer = type("SymmBuffer", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", installed)
    with pytest.raises(UnsupportedError, match="deep_gemm of unknown version is installed; allowed: 0.1.7"):
        plugin._deep_gemm_hooks()
    installed.__version__ = "0.1.7"  # type: ignore[attr-defined]
    hooks = plugin._deep_gemm_hooks()
    assert set(hooks) == {"deep_gemm.fp8_fp4_mega_moe", "deep_gemm.transform_sf_into_required_layout"}
    assert hooks["deep_gemm.transform_sf_into_required_layout"](torch.ones(4, 4), 4, 512, (1, 128)) == "upstream's"
    assert hooks["deep_gemm.fp8_fp4_mega_moe"] is megamoe.deep_gemm.fp8_fp4_mega_moe


def test_the_floor_is_sglangs(device: str) -> None:
    """Its CUDA kernel's is 1e-10: a token of 1e-9 keeps its digits, which DeepGEMM's floor of 1e-4 would take."""
    from megamoe import quantize_mxfp8

    x = (torch.randn(2, 512, generator=torch.Generator().manual_seed(0)) * 1e-9).bfloat16().to(device)
    ids, weights = torch.zeros(2, 1, dtype=torch.int32, device=device), torch.ones(2, 1, device=device)
    buf_x = torch.full((4, 512), -1, dtype=torch.int8, device=device)
    buf_sf = torch.full((4, 4), -1, dtype=torch.int32, device=device)
    buf_ids, buf_weights = torch.full((4, 1), 9, device=device), torch.full((4, 1), torch.nan, device=device)
    plugin.mega_moe_pre_dispatch(x, ids, weights, buf_x, buf_sf, buf_ids, buf_weights)
    q, sf = quantize_mxfp8(x, amax_floor=1e-10)
    assert torch.equal(buf_x[:2].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(buf_sf[:2].view(torch.uint8), sf)
    assert buf_ids.flatten().tolist() == [0, 0, -1, -1]
    assert buf_weights.flatten().tolist() == [1, 1, 0, 0]
    assert bool((buf_x[2:] == -1).all())


def test_the_entry_point_names_the_plugin() -> None:
    lines = (Path(__file__).parent.parent / "pyproject.toml").read_text().splitlines()
    section = lines.index('[project.entry-points."sglang.srt.plugins"]')
    assert lines[section + 1] == 'megamoe = "megamoe.integrations.sglang:register"'
    assert callable(plugin.register)


def test_the_files_can_be_staged(report: dict[str, Any], tmp_path: Path) -> None:
    """For a GPU machine without a network; `report` has the wheel fetched."""
    result = subprocess.run(
        [sys.executable, str(HARNESS), "--stage", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "sglang/srt/layers/moe/mega_moe.py").is_file()
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.py")) < 2**20
