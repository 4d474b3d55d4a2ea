"""The plugin against a stand-in for vLLM 0.33: its names and signatures, and what its experts do in their order."""

import inspect
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import megamoe
from megamoe import deep_gemm
from megamoe.integrations import vllm as plugin
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.public_arguments import weight_arguments
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.recipe import Recipe

RECIPE = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
T, H, I, E, K = 2, 512, 512, 2, 1

FILES = {
    "deep_gemm/__init__.py": """
        def fp8_gemm_nt(a, b): return "upstream's"
        def transform_sf_into_required_layout(
            sf, mn, k, recipe, num_groups=None, is_sfa=None, disable_ue8m0_cast=False
        ):
            return "upstream's"
        def transform_weights_for_mega_moe(l1, l2): raise AssertionError("upstream's")
        def get_num_sms(): return 77
    """,
    # What it resolves by name, lazily, and whether it was asked before the plugin came, is the test's to say.
    "vllm/utils/deep_gemm.py": """
        import functools, importlib
        _transform_weights_for_mega_moe_impl = None
        @functools.cache
        def _import_deep_gemm():
            try:
                return importlib.import_module("deep_gemm")
            except ImportError:
                return None
        def _lazy_init():
            global _transform_weights_for_mega_moe_impl
            _transform_weights_for_mega_moe_impl = _import_deep_gemm().transform_weights_for_mega_moe
        def transform_weights_for_mega_moe(*args, **kwargs):
            if _transform_weights_for_mega_moe_impl is None:
                _lazy_init()
            return _transform_weights_for_mega_moe_impl(*args, **kwargs)
    """,
    "vllm/models/deepseek_v4/nvidia/model.py": """
        import torch
        from vllm.utils import deep_gemm
        class DeepseekV4MegaMoEExperts(torch.nn.Module):
            hidden_size, intermediate_size = 512, 512
            def __init__(self, w13, w13_scale, w2, w2_scale, max_num_tokens, top_k):
                super().__init__()
                for name, tensor in (("w13_weight", w13), ("w13_weight_scale", w13_scale), ("w2_weight", w2),
                                     ("w2_weight_scale", w2_scale)):
                    setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
                self.num_experts, self.max_num_tokens, self.top_k = len(w2), max_num_tokens, top_k
                self.shape = (len(w2), max_num_tokens, top_k, self.hidden_size, self.intermediate_size)
            def _check_runtime_supported(self):
                raise NotImplementedError("DeepGEMM MegaMoE requires SM100 GPUs.")
            def finalize_weights(self):
                self._check_runtime_supported()
                E, _, _, H, I = self.shape
                dg = deep_gemm._import_deep_gemm()
                sf = [(s.data.to(torch.int32) << 23).view(torch.float32)
                      for s in (self.w13_weight_scale, self.w2_weight_scale)]
                w13_scale = dg.transform_sf_into_required_layout(sf[0], 2 * I, H, (1, 32), E)
                w2_scale = dg.transform_sf_into_required_layout(sf[1], H, I, (1, 32), E)
                self.l1, self.l2 = deep_gemm.transform_weights_for_mega_moe(
                    (self.w13_weight.data.view(torch.int8), w13_scale),
                    (self.w2_weight.data.view(torch.int8), w2_scale))
                self.buffer = dg.get_symm_buffer_for_mega_moe(None, *self.shape)
            def forward(self, x, x_sf, topk_weights, topk_ids, activation_clamp):
                n, b = len(x), self.buffer
                # The tail is never filled, and y has exactly n rows.
                b.x[:n].copy_(x); b.x_sf[:n].copy_(x_sf); b.topk_idx[:n].copy_(topk_ids)
                b.topk_weights[:n].copy_(topk_weights)
                y = torch.full((n, self.hidden_size), torch.nan, dtype=torch.bfloat16, device=x.device)
                deep_gemm._import_deep_gemm().fp8_fp4_mega_moe(
                    y, self.l1, self.l2, b, activation_clamp=activation_clamp, fast_math=True)
                return y
        class Other: pass
    """,
    **{f"{folder}/__init__.py": "" for folder in (
        "vllm", "vllm/utils", "vllm/models", "vllm/models/deepseek_v4", "vllm/models/deepseek_v4/nvidia"
    )},
}  # fmt: skip
MODEL = "vllm.models.deepseek_v4.nvidia.model"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in on the path, and all that an import or the plugin leaves behind taken away again."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("MEGAMOE_BACKEND", "triton")
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("vllm", "deep_gemm")}
    for name in before:
        del sys.modules[name]
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "deep_gemm")]:
        del sys.modules[name]
    sys.modules.update(before)


def _wrappers() -> Any:
    import importlib

    return importlib.import_module("vllm.utils.deep_gemm")


def _model() -> Any:
    import importlib

    return importlib.import_module(MODEL)


@pytest.fixture(scope="module")
def layer(device: str) -> Layer:
    return random_layer(
        RECIPE, tokens=T, hidden=H, intermediate=I, num_experts=E, top_k=K, activation_clamp=1.5, device=device
    )  # fmt: skip


def _run(layer: Layer, experts_class: type) -> torch.Tensor:
    w = layer.weights
    experts = experts_class(w.w13, w.w13_scale, w.w2, w.w2_scale, 16, K)
    experts.finalize_weights()
    x, sf = megamoe.quantize_mxfp8(layer.x)
    return experts(x.view(torch.int8), sf.view(torch.int32), layer.topk_weights, layer.topk_ids, 1.5)


def test_vllms_experts_run_on_these_kernels(engine: Path, layer: Layer) -> None:
    assert plugin.register() is True
    assert MODEL not in sys.modules, "the plugin imports no model"
    y = _run(layer, _model().DeepseekV4MegaMoEExperts)
    inputs = (layer.x, layer.topk_ids, layer.topk_weights)
    expected = megamoe.mega_moe(
        *inputs, **weight_arguments(layer), activation_clamp=1.5, moe_backend="reference"
    )  # fmt: skip
    assert check(compare(y, expected), LIMITS[RECIPE]) is None


def test_what_came_before_the_plugin_is_replaced_too(engine: Path, layer: Layer) -> None:
    cls = _model().DeepseekV4MegaMoEExperts
    _wrappers()._lazy_init()  # upstream's functions are taken already
    plugin.register()
    w = layer.weights
    experts = cls(w.w13, w.w13_scale, w.w2, w.w2_scale, 16, K)
    experts.finalize_weights()  # neither its own refusal nor upstream's transform
    prepared = megamoe.prepare_weights(**weight_arguments(layer)).routed
    for ours, expected in zip((*experts.l1, *experts.l2), prepared):
        assert expected is not None
        assert_bytes_equal(ours.view(expected.dtype), expected)


def test_other_functions_stay_upstreams(engine: Path) -> None:
    plugin.register()
    overlay, upstream = _wrappers()._import_deep_gemm(), __import__("deep_gemm")
    assert isinstance(overlay, ModuleType)
    assert _wrappers()._import_deep_gemm() is overlay
    assert overlay.fp8_gemm_nt is upstream.fp8_gemm_nt
    assert overlay.get_num_sms() == 77, "the budget of upstream's GEMMs"
    assert overlay.transform_sf_into_required_layout(None, 1, 1, (1, 128)) == "upstream's"
    assert upstream.transform_sf_into_required_layout(None, 1, 1, (1, 32)) == "upstream's", "left as it was"
    assert overlay.fp8_fp4_mega_moe is deep_gemm.fp8_fp4_mega_moe
    assert not hasattr(overlay, "no_such_name")


def test_probes_by_signature_see_the_real_parameters(engine: Path) -> None:
    plugin.register()
    overlay = _wrappers()._import_deep_gemm()
    for name in ("get_symm_buffer_for_mega_moe", "transform_sf_into_required_layout", "fp8_fp4_mega_moe"):
        found = {n: p.default for n, p in inspect.signature(getattr(overlay, name)).parameters.items()}
        expected = {n: p.default for n, p in inspect.signature(getattr(deep_gemm, name)).parameters.items()}
        assert found == expected, name


def test_without_deep_gemm_this_packages_own_is_found(engine: Path) -> None:
    (engine / "deep_gemm" / "__init__.py").write_text("raise ImportError")
    plugin.register()
    overlay = _wrappers()._import_deep_gemm()
    assert overlay.pack_ue8m0_to_int is deep_gemm.pack_ue8m0_to_int
    with pytest.raises(AttributeError):
        overlay.fp8_gemm_nt  # noqa: B018


@pytest.mark.parametrize("sm", [90, 100])
def test_the_buffer_holds_ue8m0_scales_on_every_gpu(sm: int, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "_pretend_sm", sm)
    plugin.register()
    overlay = _wrappers()._import_deep_gemm()
    buffer = overlay.get_symm_buffer_for_mega_moe(None, E, 16, K, H, I)
    assert (buffer.x_sf.dtype, tuple(buffer.x_sf.shape)) == (torch.int32, (384, H // 128))
    with pytest.raises(ValueError, match="^use_fp8_dispatch is False; with mma_type='fp8xfp4' allowed: None, True"):
        overlay.get_symm_buffer_for_mega_moe(None, E, 16, K, H, I, use_fp8_dispatch=False)
    with pytest.warns(DeprecationWarning, match="use_fp8_dispatch is superseded by mma_type") as warned:
        overlay.get_symm_buffer_for_mega_moe(None, E, 16, K, H, I, use_fp8_dispatch=True)
    assert warned[0].filename == __file__, "told to who passes it"


def test_registering_twice_changes_nothing(engine: Path) -> None:
    plugin.register()
    resolver, hooks = _wrappers()._import_deep_gemm, len(sys.meta_path)
    assert plugin.register() is True
    assert _wrappers()._import_deep_gemm is resolver
    assert len(sys.meta_path) == hooks


@pytest.mark.parametrize("value", [None, "", "reference"])
def test_nothing_happens_unasked(
    value: str | None, engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MEGAMOE_BACKEND")
    if value is not None:
        monkeypatch.setenv("MEGAMOE_BACKEND", value)
    assert plugin.register() is False
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert bool(said) == bool(value)
    assert all("MEGAMOE_BACKEND=reference leaves vLLM's MegaMoE as it is" in text for text in said)
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
    with pytest.raises(NotImplementedError, match="requires SM100"):
        _model().DeepseekV4MegaMoEExperts._check_runtime_supported(None)


def test_another_vllm_is_refused(engine: Path) -> None:
    (engine / "vllm" / "utils" / "deep_gemm.py").write_text("")
    with pytest.raises(megamoe.UnsupportedError, match="has no vllm.utils.deep_gemm._import_deep_gemm"):
        plugin.register()


def test_admission_has_reasons(engine: Path, layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    cls = _model().DeepseekV4MegaMoEExperts
    w = layer.weights
    experts = cls(w.w13, w.w13_scale, w.w2, w.w2_scale, 16, K)
    if not w.w13.is_cuda or torch.cuda.get_device_capability()[0] != 10:
        monkeypatch.setattr(cls, "hidden_size", 200)
        with pytest.raises(megamoe.UnsupportedError, match="hidden=200; a fp8xfp4 buffer allows multiples of 512"):
            experts._check_runtime_supported()
        monkeypatch.setattr("megamoe.backends.triton.device_unsupported_reason", lambda device: "an old GPU")
        with pytest.raises(megamoe.UnsupportedError, match="^megamoe cannot run vLLM's MegaMoE: an old GPU"):
            experts._check_runtime_supported()


def test_the_entry_point_is_declared() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nmegamoe = "megamoe.integrations.vllm:register"\n' in text
