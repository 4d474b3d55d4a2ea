"""An installed `deep_gemm` that cannot judge says why and hurts nobody; the live SM90 kernel and how it is called."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.kernels.layouts import buffers
from megamoe.kernels.layouts.scale_atoms import to_atom_order
from megamoe.oracle.deep_gemm import fused_differential, package, sm90_fused, sm100_fused
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.oracle.exact_sum import exact_sum_layer
from megamoe.oracle.random_layers import layer_spec
from megamoe.oracle.reference_differential import prepared_layer
from megamoe.recipe import ALL_RECIPES, Recipe, resolve_recipe

pytestmark = pytest.mark.differential

SEGFAULT = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a package of a version with some code in front of this process's path."""

    def install(version: str, code: str) -> None:
        (tmp_path / "deep_gemm").mkdir()
        (tmp_path / "deep_gemm" / "__init__.py").write_text(code)
        info = tmp_path / f"sgl_deep_gemm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sgl-deep-gemm\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        package._probe.cache_clear()

    yield install
    package._probe.cache_clear()


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise package.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(package.metadata, "version", missing)
    assert package.unsupported_reason() == "sgl-deep-gemm is not installed"
    with pytest.raises(OracleUnavailable, match="is not installed"):
        package.load()


@pytest.mark.parametrize(
    "version, side", [("0.1.6", "older"), ("0.1.5.post1", "older"), ("0.2.5", "newer"), ("1", "newer")]
)
def test_another_version(installed: Any, version: str, side: str) -> None:
    installed(version, SEGFAULT)  # must not even be tried
    expected = f"sgl-deep-gemm {version} is installed, {side} than the contract; allowed: 0.1.7"
    assert package.unsupported_reason() == expected


def test_a_crash_of_the_compiled_module_is_survived(installed: Any) -> None:
    installed("0.1.7", SEGFAULT)
    reason = package.unsupported_reason()
    assert reason is not None
    assert reason.startswith("importing sgl-deep-gemm 0.1.7 in a subprocess: died of SIGSEGV; its compiled module is")
    assert torch.__version__.split("+")[0] in reason
    with pytest.raises(OracleUnavailable, match="died of SIGSEGV"):
        package.load()


def test_an_exception_of_the_import_is_the_reason(installed: Any) -> None:
    installed("0.1.7", "raise OSError('libcudart.so.13: cannot open')\n")
    reason = package.unsupported_reason()
    assert reason == "importing sgl-deep-gemm 0.1.7 in a subprocess: OSError: libcudart.so.13: cannot open"


def test_a_hanging_import(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_TIMEOUT_SECONDS", 1)
    installed("0.1.7", "import time\ntime.sleep(60)\n")
    assert str(package.unsupported_reason()).endswith("did not answer within 1 s")


def test_a_package_that_loads(installed: Any) -> None:
    code = "from types import SimpleNamespace\n_C = SimpleNamespace(get_num_sms=len)\n__version__ = '0.1.5.post1'\n"
    installed("0.1.5.post1", code)
    assert package.unsupported_reason(package.SM90_VERSIONS) is None
    assert package.unsupported_reason() is not None


@pytest.mark.parametrize(
    "tokens, shape, tile",
    [
        (1, "V4-Flash", "64x128 swapAB"),
        (128, "V4-Flash", "64x128 swapAB"),
        (129, "V4-Flash", "64x128"),
        (129, "V4-Pro", "64x256"),
        (1024, "V4-Pro", "64x256"),
        (8192, "V4-Flash", "128x256"),
        (8192, "V4-Pro", "128x256"),
    ],
)
def test_expected_tile(tokens: int, shape: str, tile: str) -> None:
    spec = layer_spec(sm90_fused.RECIPE, **fused_differential.MODELS[shape])  # type: ignore[arg-type]
    assert sm90_fused.layer_unsupported_reason(spec) is None
    assert sm90_fused.expected_tile(spec, tokens) == tile


def test_the_exact_sum_shapes_reach_every_tile() -> None:
    tiles = set()
    for shape in fused_differential.EXACT_SHAPES:
        spec = layer_spec(sm90_fused.RECIPE, **{name: size for name, size in shape.items() if name != "tokens"})  # type: ignore[arg-type]
        assert sm90_fused.layer_unsupported_reason(spec) is None
        tiles.add(sm90_fused.expected_tile(spec, shape["tokens"]))
    assert tiles == {"64x128 swapAB", "64x128", "64x256", "128x256"}


def test_layers_that_upstream_does_not_serve() -> None:
    shape: Any = dict(hidden=512, intermediate=256, num_experts=4, top_k=2)
    reasons = [
        sm90_fused.layer_unsupported_reason(layer_spec(recipe, **{**shape, **changes}))
        for recipe, changes in (
            (resolve_recipe("fp8xfp4"), {}),
            (sm90_fused.RECIPE, dict(num_shared_experts=1)),
            (sm90_fused.RECIPE, dict(activation="swigluoai")),
            (sm90_fused.RECIPE, dict(hidden=768)),
            (sm90_fused.RECIPE, dict(intermediate=4352)),
        )
    ]
    expected = ("recipe fp8xfp4", "num_shared_experts=1", "activation='swigluoai'", "hidden=768", "intermediate=4352")
    for reason, text in zip(reasons, expected):
        assert text in str(reason)


def test_calls_have_the_arguments_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = exact_sum_layer(sm90_fused.RECIPE, tokens=3, hidden=512, intermediate=256, num_experts=4, top_k=2)
    weights = prepared_layer(layer.weights, sm90_fused.RECIPE)
    layout = buffers.sm90_layout(num_experts=4, max_tokens=5, top_k=2, hidden=512, intermediate=256)
    calls: list[tuple[Any, ...]] = []

    def size(*arguments: Any) -> Any:
        calls.append(arguments)
        views = buffers.slice_buffer(layout, torch.zeros(layout.nbytes, dtype=torch.int8))
        views["x"] = views["x"].view(torch.int8)  # as upstream's compiled module types it
        return layout.nbytes, lambda buffer: list(views.values())

    fake = SimpleNamespace(
        get_symm_buffer_size_for_sm90_mega_moe=size,
        mega_moe_pre_dispatch_sm90=lambda *arguments: calls.append(arguments),
        fp8_mega_moe=lambda *arguments: calls.append(arguments),
    )
    monkeypatch.setattr(sm90_fused, "unsupported_reason", lambda: None)
    monkeypatch.setattr(package, "load", lambda versions: SimpleNamespace(_C=fake))
    fused = sm90_fused.Sm90Fused(layer.spec, weights, max_tokens=5)
    output = fused(layer.x, layer.topk_ids, layer.topk_weights)
    assert output.isnan().all(), "poisoned, and the fake writes nothing"
    sizing, pre_dispatch, call = calls
    assert sizing == (1, 4, 384, 2, 512, 256, True, "swiglu")
    assert len(pre_dispatch) == 10
    assert pre_dispatch[3].dtype == torch.float8_e4m3fn
    assert pre_dispatch[3].shape == (384, 512)
    assert pre_dispatch[7:] == (3, 128, 1.0)
    assert len(call) == 16
    assert call[0] is output
    assert call[1] is weights.routed.w13
    assert call[4] is weights.routed.w2_scale
    assert call[5] is None
    assert call[7] == [call[6].data_ptr()]
    assert call[8:] == (0, 384, 4, 2, (128, 128, 128), "swiglu", None, True)


SM100_SERVED = [recipe for recipe in ALL_RECIPES if recipe.numerics == sm100_fused.NUMERICS]


@pytest.mark.parametrize("num_shared_experts", [0, 1])
@pytest.mark.parametrize("recipe", SM100_SERVED, ids=str)
def test_sm100_calls_have_the_arguments_of_the_contract(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, num_shared_experts: int
) -> None:
    layer = exact_sum_layer(
        recipe, tokens=3, hidden=512, intermediate=512, num_experts=4, top_k=2, num_shared_experts=num_shared_experts
    )
    spec, row = layer.spec, layer.spec.traits
    weights = prepared_layer(layer.weights, recipe)
    layout = buffers.sm100_layout(
        recipe.mma_type, num_experts=4, max_tokens=5, top_k=2, hidden=512, intermediate=512,
        num_shared_experts=num_shared_experts,
    )  # fmt: skip
    views = buffers.slice_buffer(layout, torch.zeros(layout.nbytes, dtype=torch.int8))
    calls: list[tuple[Any, ...]] = []

    def size(*arguments: Any) -> Any:
        calls.append(arguments)
        return layout.nbytes, lambda buffer: list(views.values())

    def pre_dispatch(*arguments: Any) -> None:
        calls.append(arguments)
        arguments[4][:3] = torch.arange(1, 1 + 3 * arguments[4].shape[1], dtype=torch.int32).view(3, -1)

    fake = SimpleNamespace(
        get_symm_buffer_size_for_mega_moe=size,
        get_block_m_for_mega_moe=lambda *arguments: 16,
        mega_moe_pre_dispatch=pre_dispatch,
        fp8_fp4_mega_moe=lambda *arguments: calls.append(arguments),
        bf16_mega_moe=lambda *arguments: calls.append(arguments),
    )
    monkeypatch.setattr(sm100_fused, "unsupported_reason", lambda: None)
    monkeypatch.setattr(package, "load", lambda: SimpleNamespace(_C=fake))
    fused = sm100_fused.Sm100Fused(spec, weights, max_tokens=5)
    fused(layer.x, layer.topk_ids, layer.topk_weights)
    assert calls[0] == (1, 4, 384, 2, 512, 512, recipe.mma_type, "swiglu", num_shared_experts)
    call = calls[-1]
    if row.act == "bf16":
        assert len(calls) == 2
        assert len(call) == 15
        assert torch.equal(views["topk_idx"][:3], layer.topk_ids.long())
        assert torch.equal(views["x"][:3], layer.x)
        assert (call[3] is None) == (num_shared_experts == 0)
        assert call[8:] == (0, 384, 4, 2, "swiglu", None, True)
        return
    assert len(calls[1]) == 12
    assert calls[1][3].dtype == (torch.float8_e4m3fn if row.act == "e4m3" else torch.int8)
    assert calls[1][7:10] == (3, row.act_group, recipe.mma_type)
    assert (calls[1][10] is not None) == (recipe.mma_type == "nvfp4xnvfp4")
    assert len(call) == 25
    assert call[1].dtype == torch.int8
    assert call[1].data_ptr() == weights.routed.w13.data_ptr()
    for scale in (call[2], call[4]):
        assert scale.dtype == torch.int32
        assert scale.stride(-3) == scale.stride(-1) * scale.size(-1)
    assert (call[5] is None) == (call[8] is None) == (num_shared_experts == 0)
    assert call[11] == [call[10].data_ptr()]
    assert call[12:16] == (0, 384, 4, 2)
    assert call[16:19] == ((1, 1, row.act_group), recipe.mma_type, "swiglu")
    assert call[19:22] == (None, True, recipe.mma_type == "nvfp4xnvfp4")
    if num_shared_experts:
        shared = views["shared_l1_acts_sf"]
        assert torch.equal(shared[[0, 4, 8]], views["x_sf"][:3]), "three tokens of one block, in atom order"


@pytest.mark.parametrize("block_m", [16, 32, 64, 96, 128, 192])
def test_rows_of_shared_scales_are_atom_order(block_m: int) -> None:
    rows = sm100_fused.shared_scale_rows(block_m * 2, block_m)
    padded = -(-block_m // 128) * 128
    bytes_ = torch.randint(1, 256, (block_m, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = to_atom_order(bytes_)
    for block in range(2):
        mine = rows[block * block_m : (block + 1) * block_m]
        assert ((mine >= block * padded) & (mine < (block + 1) * padded)).all()
        assert torch.equal(words[mine - block * padded], bytes_.view(torch.int32))


def test_sm100_layers_that_upstream_does_not_serve() -> None:
    shape: Any = dict(hidden=512, intermediate=512, num_experts=4, top_k=2)
    for mma_type, changes, text in (
        ("fp8xfp8", {}, "recipe fp8xfp8/block128/deep_gemm_sm90"),
        ("mxf4xmxf4", dict(activation="situ"), "activation='situ'"),
        ("fp8xfp4", dict(activation="situ", activation_clamp=5.0), "situ has none"),
        ("fp8xfp4", dict(num_shared_experts=1, shared_weight="e2m1"), "shared weights of e2m1; fp8xfp4 has e4m3"),
        ("fp8xfp4", dict(hidden=768), "hidden=768"),
        ("fp8xfp4", dict(top_k=32, num_experts=64, num_shared_experts=1), "top_k=32"),
    ):
        spec = layer_spec(resolve_recipe(mma_type), **{**shape, **changes})
        assert text in str(sm100_fused.layer_unsupported_reason(spec))
    assert sm100_fused.layer_unsupported_reason(layer_spec(resolve_recipe("fp8xfp4"), **shape)) is None


def test_elsewhere_the_live_kernel_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sm90_fused.unsupported_reason() == "no CUDA GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert sm90_fused.unsupported_reason() == "the GPU has compute capability 10.0; the SM90 kernel needs 9.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert sm100_fused.unsupported_reason() == "the GPU has compute capability 9.0; the SM100 kernels need 10.x"


def test_what_compiled_code_prints_is_captured(capfd: pytest.CaptureFixture[str]) -> None:
    with fused_differential.captured_stdout() as printed:
        assert os.environ["DG_PRINT_CONFIGS"] == "1"
        os.write(1, b"other\nMegaMoESM90Config(num_ranks=1): block_m=64\n")
    os.write(1, b"after")
    assert fused_differential.config_of(printed()) == "MegaMoESM90Config(num_ranks=1): block_m=64"
    assert fused_differential.config_of("other") is None
    assert capfd.readouterr().out == "after"
    assert "DG_PRINT_CONFIGS" not in os.environ


@pytest.mark.gpu
@pytest.mark.skipif(sm90_fused.RECIPE not in ALL_RECIPES, reason=f"{sm90_fused.RECIPE} is not served")
@pytest.mark.parametrize("shape", fused_differential.EXACT_SHAPES, ids=lambda shape: f"{shape['tokens']} tokens")
def test_exact_sums_equal_the_live_kernel(shape: dict[str, int]) -> None:
    reason = sm90_fused.unsupported_reason()
    if reason is not None:
        pytest.skip(reason)
    outcome = fused_differential.compare_exact_sums(
        sm90_fused.RECIPE, fused_differential._SM90, shape, torch.device("cuda")
    )
    assert outcome.problem is None, outcome
    assert outcome.bytes_compared == 2 * shape["tokens"] * shape["hidden"]


@pytest.mark.gpu
def test_buffer_views_equal_the_live_ones() -> None:
    reason = sm90_fused.unsupported_reason()
    if reason is not None:
        pytest.skip(reason)
    assert fused_differential.compare_buffer_views(torch.device("cuda")).problem is None
