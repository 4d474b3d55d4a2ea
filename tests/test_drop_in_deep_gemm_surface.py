"""`megamoe.deep_gemm` beside the files of `sgl-deep-gemm` 0.1.7: signatures, attributes, bytes, buffers."""

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import megamoe.deep_gemm as dg
from megamoe.backends.base import UnsupportedError
from megamoe.deep_gemm import patching
from megamoe.kernels.layouts.buffers import SM90_VIEWS, SM100_VIEWS
from megamoe.kernels.layouts.scale_atoms import pack_scale_words
from megamoe.oracle.deep_gemm import host_code, python_helpers
from megamoe.oracle.deep_gemm.upstream import locate
from megamoe.oracle.deep_gemm.views import view_differences
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.oracle.metrics import assert_bytes_equal

E, H, I = 3, 512, 256
SHAPE = (8, 384, 2, 1024, 512)
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""E, tokens, top-k, H, I."""

FUNCTIONS = {
    "__init__.py": (
        "fp8_mega_moe",
        "get_symm_buffer_for_mega_moe",
        "get_symm_buffer_for_sm90_mega_moe",
        "mega_moe_pre_dispatch_sm90",
        "transform_sf_into_required_layout",
        "transform_weights_for_mega_moe_sm90",
    ),
    "mega/__init__.py": (
        "bf16_mega_moe",
        "fp8_fp4_mega_moe",
        "get_block_m_for_mega_moe",
        "mega_moe_pre_dispatch",
        "nvfp4_mega_moe",
        "transform_weights_for_mega_moe",
    ),
    "utils/math.py": (
        "align",
        "ceil_div",
        "pack_ue8m0_to_int",
        "per_block_cast_to_fp8",
        "per_token_cast_to_fp4",
        "per_token_cast_to_fp8",
        "per_token_cast_to_nvfp4",
        "transform_ue4m3_sf_into_required_layout",
    ),
    "utils/layout.py": ("get_tma_aligned_size",),
    "testing/numeric.py": ("calc_diff",),
}
CLASSES = {"__init__.py": "SM90SymmBuffer", "mega/__init__.py": "SymmBuffer"}


@pytest.fixture(scope="module")
def root() -> Path:
    try:
        return locate(download=True).root
    except OracleUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def upstream(root: Path) -> python_helpers.PythonHelpers:
    try:
        return python_helpers.load()
    except OracleUnavailable as error:
        pytest.skip(str(error))


def _definition(path: Path, name: str) -> Any:
    """The function or class called `name`, at whatever depth (upstream guards some with `try`)."""
    tree = ast.parse(path.read_text())
    return next(
        node for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
    )  # fmt: skip


def _parameters(function: ast.FunctionDef) -> list[tuple[str, object]]:
    """Names in order with their defaults."""
    arguments = function.args
    assert [arguments.posonlyargs, arguments.kwonlyargs, arguments.vararg, arguments.kwarg] == [[], [], None, None]
    missing = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults))
    defaults = [*missing, *map(ast.literal_eval, arguments.defaults)]
    return [(argument.arg, default) for argument, default in zip(arguments.args, defaults)]


def _ours(function: Any) -> list[tuple[str, object]]:
    assert inspect.isfunction(function)
    parameters = inspect.signature(function).parameters.values()
    assert all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    return [(parameter.name, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("file", FUNCTIONS)
def test_functions_have_upstreams_parameters(file: str, root: Path) -> None:
    home = {"utils/math.py": dg.utils, "utils/layout.py": dg.utils, "testing/numeric.py": dg.testing}.get(file, dg)
    for name in FUNCTIONS[file]:
        assert _ours(getattr(home, name)) == _parameters(_definition(root / file, name)), name


@pytest.mark.parametrize("file", CLASSES)
def test_buffers_have_upstreams_parameters_and_attributes(file: str, root: Path) -> None:
    theirs = _definition(root / file, CLASSES[file])
    ours = getattr(dg, CLASSES[file])
    init = next(node for node in theirs.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert _ours(ours.__init__) == _parameters(init)
    buffer = ours(None, *SHAPE)
    attributes = {
        node.attr for node in ast.walk(theirs)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }  # fmt: skip
    assert len(attributes) > 12
    assert [name for name in attributes if not hasattr(buffer, name)] == []
    assert buffer.handle.buffer_ptrs == [buffer.buffer.data_ptr()]
    buffer.destroy()
    assert (buffer.x, buffer.x_sf, buffer.buffer, buffer.group, buffer.handle) == (None,) * 5


def test_every_exported_name_is_there() -> None:
    assert dg.__version__ == patching.VERSION == "0.1.7"
    assert [name for name in dg.__all__ if not hasattr(dg, name)] == []
    assert set(patching.PATCHED_NAMES) <= set(dg.__all__)


@pytest.mark.parametrize(
    "kind", ["fp8xfp4 routed", "fp8xfp4 shared", "mxf4xmxf4 routed", "nvfp4xnvfp4 routed", "bf16xbf16 routed"]
)
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai"])
def test_weights_have_upstreams_bytes(kind: str, activation: str, upstream: Any) -> None:
    mma_type, experts = kind.split()
    shared = experts == "shared"
    lead = () if shared else (E,)
    pairs: list[Any] = []
    for seed, (rows, columns) in enumerate(((2 * I, H), (H, I))):
        if mma_type == "bf16xbf16":
            pairs.append(_random_bytes(*lead, rows, 2 * columns, seed=seed).view(torch.bfloat16))
            continue
        group = 16 if mma_type == "nvfp4xnvfp4" else 32
        scale = pack_scale_words(_random_bytes(*lead, rows, columns // group, seed=seed + 2))
        width, dtype = (columns, torch.float8_e4m3fn) if shared else (columns // 2, torch.int8)
        pairs.append((_random_bytes(*lead, rows, width, seed=seed).view(dtype), scale))
    ours = dg.transform_weights_for_mega_moe(*pairs, activation=activation, mma_type=mma_type)
    theirs = upstream.mega.transform_weights_for_mega_moe(*pairs, activation=activation, mma_type=mma_type)
    for name, mine, other in zip(("l1", "l2"), ours, theirs):
        assert isinstance(mine, tuple) == isinstance(other, tuple)
        for part, a, b in zip(("weight", "scale"), *((p if isinstance(p, tuple) else (p,)) for p in (mine, other))):
            assert_bytes_equal(a, b, f"{name} {part}")
            assert a.stride() == b.stride()


def test_sm90_weights_have_upstreams_bytes(upstream: Any) -> None:
    pairs = [
        (_random_bytes(E, rows, columns).view(torch.float8_e4m3fn), torch.rand(E, rows // 128, columns // 128))
        for rows, columns in ((2 * I, H), (H, I))
    ]
    ours = dg.transform_weights_for_mega_moe_sm90(*pairs)
    theirs = upstream.sm90.transform_weights_for_mega_moe_sm90(*pairs)
    for mine, other in zip(ours, theirs):
        assert_bytes_equal(mine[0], other[0])
        assert mine[1] is other[1]


@pytest.mark.parametrize("lead", [(), (E,)])
@pytest.mark.parametrize("rows", [256, 6])
def test_scales_have_upstreams_bytes(lead: tuple[int, ...], rows: int, upstream: Any) -> None:
    """Per row; per 128 rows upstream repeats them first. Byte 0, a subnormal, and 255, NaN, included."""
    exponents = _random_bytes(*lead, rows, H // 32)
    exponents.view(-1)[:2] = torch.tensor([0, 255], dtype=torch.uint8)
    sf = exponents.view(torch.float8_e8m0fnu).float()
    groups = lead[0] if lead else None
    theirs = upstream.layout._pack_fp32_into_ue8m0_fallback(sf)
    for recipe, is_sfa in (((1, 32), None), ((128, 1, 32), False), ((1, 128, 32), True)):
        ours = dg.transform_sf_into_required_layout(sf, rows, H, recipe, groups, is_sfa)
        assert_bytes_equal(ours, theirs, str(recipe))
        assert ours.stride() == theirs.stride()
        assert dg.transform_sf_into_required_layout(ours, mn=rows, k=H, recipe=(1, 32), num_groups=groups) is ours
    blocks = sf[..., : -(-rows // 128), :]
    repeated = blocks.repeat_interleave(128, -2)[..., :rows, :].contiguous()
    ours = dg.transform_sf_into_required_layout(blocks, rows, H, (128, 32), groups)
    assert_bytes_equal(ours, upstream.layout._pack_fp32_into_ue8m0_fallback(repeated))


def test_other_scales_are_refused() -> None:
    sf = torch.ones(E, I, H // 32)
    bad: list[tuple[dict[str, Any], str]] = [
        (dict(recipe=(1, 128)), r"recipe is \(1, 128\); allowed"),
        (dict(recipe=(1, 1, 32)), "is_sfa is None"),
        (dict(recipe=(7, 32)), "recipe has 7 rows per scale"),
        (dict(disable_ue8m0_cast=True), "disable_ue8m0_cast is True"),
        (dict(mn=I + 1), "sf has shape .* ask for"),
        (dict(k=H + 1), "k is 513; allowed: multiples of 32"),
        (dict(num_groups=None), r"sf has shape .*\[mn, k\]"),
        (dict(sf=sf.to(torch.float16)), "sf has dtype torch.float16"),
        (dict(sf=torch.zeros(E, I, H // 128, dtype=torch.int32)), "sf has strides"),
    ]
    for changes, message in bad:
        arguments = dict(sf=sf, mn=I, k=H, recipe=(1, 32), num_groups=E) | changes
        with pytest.raises((ValueError, TypeError), match=message):
            dg.transform_sf_into_required_layout(**arguments)


def test_quantizers_have_upstreams_bytes(upstream: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    scale = torch.exp2(torch.randint(-20, 12, (96, 1), generator=generator).float())
    x = torch.randn(96, 160, generator=generator) * scale
    x[0] = 0
    x[1, ::3] = -0.0
    calls: list[tuple[str, dict[str, Any]]] = [
        (name, dict(use_ue8m0=ue8m0, gran_k=gran_k, **packed))
        for name in ("per_token_cast_to_fp8", "per_token_cast_to_fp4")
        for gran_k in (32, 128)
        for ue8m0, packed in ((False, {}), (True, {}), (True, dict(use_packed_ue8m0=True)))
    ]
    calls += [("per_block_cast_to_fp8", dict(use_ue8m0=ue8m0)) for ue8m0 in (False, True)]
    if TORCH >= (2, 13):  # older ones make other integers of the NaN in a row of zeros
        calls += [("per_token_cast_to_nvfp4", dict(use_packed_ue4m3=packed)) for packed in (False, True)]
    for name, options in calls:
        if options.get("use_packed_ue4m3"):
            x = x[:, :128].contiguous()
        for tensor in (x, x.bfloat16()):
            ours, theirs = (getattr(module, name)(tensor, **options) for module in (dg, upstream.math))
            for part, a, b in zip(("elements", "scales"), ours, theirs):
                assert_bytes_equal(a, b, f"{name} {options} {part}")
                assert a.shape == b.shape
    powers = torch.exp2(torch.randint(-60, 60, (4, 8), generator=generator).float())
    assert_bytes_equal(dg.pack_ue8m0_to_int(powers), upstream.math.pack_ue8m0_to_int(powers))
    with pytest.raises(ValueError, match="no positive powers of two"):
        dg.pack_ue8m0_to_int(powers * 3)
    sf = torch.rand(E, 8, 8, generator=generator)
    ours, theirs = (m.transform_ue4m3_sf_into_required_layout(sf, 8) for m in (dg, upstream.math))
    assert_bytes_equal(ours, theirs)
    assert ours.stride() == theirs.stride()
    assert float(dg.calc_diff(x, x)) == pytest.approx(0, abs=1e-12)
    assert dg.calc_diff(x[:0], x[:0]) == 0.0


@pytest.mark.differential
def test_against_the_compiled_host_code() -> None:
    """Views of every buffer, and BLOCK_M on both sides of every step."""
    try:
        hosts = {major: host_code.load(major, download=True) for major in (9, 10)}
    except OracleUnavailable as error:
        pytest.skip(str(error))
    e, _, k, *_ = SHAPE
    counts = [0, 1, *(most * e // (2 * k) + d for most in (17, 33, 65, 129, 193) for d in (-1, 0, 1)), 384]
    calls: list[tuple[str, list[Any]]] = [
        ("get_block_m_for_mega_moe", [1, e, 384, n, k, mma_type])
        for n in counts
        for mma_type in ("fp8xfp4", "mxf4xmxf4")
    ]
    shared_experts = {"fp8xfp4": 1, "mxf4xmxf4": 0, "nvfp4xnvfp4": 2, "bf16xbf16": 0}
    sizes: list[tuple[str, list[Any]]] = [
        ("get_symm_buffer_size_for_mega_moe", [1, *SHAPE, mma_type, "swiglu", shared])
        for mma_type, shared in shared_experts.items()
    ]
    answers = hosts[10].call(calls + sizes)
    assert [dg.get_block_m_for_mega_moe(*arguments) for _, arguments in calls] == answers[: len(calls)]
    for (mma_type, shared), (_, views) in zip(shared_experts.items(), answers[len(calls) :]):
        buffer = dg.SymmBuffer(None, *SHAPE, shared, mma_type)
        assert view_differences(buffer.layout, views) == []
        assert [name for name in SM100_VIEWS if not isinstance(getattr(buffer, name), torch.Tensor)] == []
    ((_, views),) = hosts[9].call([("get_symm_buffer_size_for_sm90_mega_moe", [1, *SHAPE, True, "swiglu"])])
    sm90 = dg.SM90SymmBuffer(None, *SHAPE)
    assert view_differences(sm90.layout, views) == []
    assert [name for name in SM90_VIEWS if not isinstance(getattr(sm90, name), torch.Tensor)] == []


def test_the_architecture_picks_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dg, "_pretend_sm", 90)
    buffer: Any = dg.get_symm_buffer_for_mega_moe(None, 8, 100, 2, 1024, 512)
    assert isinstance(buffer, dg.SM90SymmBuffer)
    assert buffer.num_max_tokens_per_rank == buffer.x.shape[0] == 384
    assert (buffer.x.dtype, buffer.x_sf.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert buffer.x_sf_ue8m0.data_ptr() == buffer.x_sf.data_ptr()
    assert (buffer.x_sf_ue8m0.dtype, buffer.x_sf_ue8m0.shape) == (torch.int32, buffer.x_sf.shape)
    assert isinstance(dg.get_symm_buffer_for_mega_moe(None, *SHAPE, mma_type="mxf4xmxf4"), dg.SymmBuffer)
    with pytest.raises(ValueError, match="num_shared_experts is 1; allowed on compute capability 9.x"):
        dg.get_symm_buffer_for_mega_moe(None, *SHAPE, num_shared_experts=1)
    monkeypatch.setattr(dg, "_pretend_sm", 100)
    buffer = dg.get_symm_buffer_for_mega_moe(None, 8, 385, 2, 1024, 512, activation="swigluoai")
    assert isinstance(buffer, dg.SymmBuffer)
    assert buffer.num_max_tokens_per_rank == 768
    assert (buffer.mma_type, buffer.activation, buffer.num_shared_experts) == ("fp8xfp4", "swigluoai", 0)
    assert bool((buffer.buffer == 0).all())


def test_use_fp8_dispatch_must_agree() -> None:
    with pytest.warns(DeprecationWarning, match="superseded by mma_type"):
        dg.get_symm_buffer_for_mega_moe(None, *SHAPE, use_fp8_dispatch=False, mma_type="mxf4xmxf4")
    with pytest.raises(ValueError, match="use_fp8_dispatch is False; with mma_type='fp8xfp4' allowed: None, True"):
        dg.get_symm_buffer_for_mega_moe(None, *SHAPE, use_fp8_dispatch=False)
    with pytest.raises(ValueError, match="use_fp8_dispatch is False; allowed for an SM90 buffer: True"):
        dg.get_symm_buffer_for_sm90_mega_moe(None, *SHAPE, use_fp8_dispatch=False)


@pytest.mark.parametrize("variable", ["DG_USE_FP4_ACTS", "DG_USE_MXF4_KIND", "DG_USE_FP8_COMBINE"])
@pytest.mark.parametrize("buffer", [dg.SymmBuffer, dg.SM90SymmBuffer])
def test_legacy_variables_are_refused(variable: str, buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(RuntimeError, match=f"{variable}=1 is not served"):
        buffer(None, *SHAPE)
    monkeypatch.setenv(variable, "0")
    buffer(None, *SHAPE)


def test_impossible_buffers_name_upstreams_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dg, "_pretend_sm", 100)
    bad: list[tuple[dict[str, Any], str]] = [
        (dict(num_topk=33), "num_topk=33 and the shared"),
        (dict(intermediate_hidden=500), "intermediate_hidden=500; a fp8xfp4 buffer allows multiples of 512"),
        (dict(hidden=1000), "hidden=1000; a fp8xfp4 buffer"),
        (dict(num_experts=0), "num_experts is 0"),
        (dict(num_max_tokens_per_rank=0), "num_max_tokens_per_rank is 0"),
        (dict(num_shared_experts=-1), "num_shared_experts is -1"),
        (dict(mma_type="fp8xfp8"), "mma_type is 'fp8xfp8'"),
        (dict(activation="gelu"), "activation is 'gelu'"),
        (dict(activation="situ", mma_type="mxf4xmxf4"), "activation is 'situ'; under mxf4xmxf4"),
    ]
    names = ("num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden")
    for changes, message in bad:
        with pytest.raises(ValueError, match=message):
            dg.get_symm_buffer_for_mega_moe(None, **(dict(zip(names, SHAPE)) | changes))


def test_the_sm_budget_is_kept() -> None:
    everything = dg.get_num_sms()
    try:
        dg.set_num_sms(everything - 2)
        assert dg.get_num_sms() == everything - 2
        for bad in (0, everything + 1):
            with pytest.raises(ValueError, match=f"num_sms is {bad}"):
                dg.set_num_sms(bad)
    finally:
        dg.set_num_sms(everything)


@pytest.fixture
def installed() -> Iterator[ModuleType]:
    """Something that says it is `deep_gemm` 0.1.7."""
    module = ModuleType("deep_gemm")
    module.__version__ = "0.1.7"  # type: ignore[attr-defined]
    module.mega = ModuleType("deep_gemm.mega")  # type: ignore[attr-defined]
    for name in ("fp8_fp4_mega_moe", "transform_sf_into_required_layout", "get_num_sms", "fp8_gemm_nt"):
        setattr(module, name, lambda *arguments, name=name: (name, arguments))
    module.mega.fp8_fp4_mega_moe = module.fp8_fp4_mega_moe
    yield module
    dg.unpatch()


def test_patch_replaces_megamoe_and_nothing_else(installed: Any) -> None:
    before = dict(vars(installed))
    dg.patch(installed)
    dg.patch(installed)
    assert installed.fp8_fp4_mega_moe is installed.mega.fp8_fp4_mega_moe is dg.fp8_fp4_mega_moe
    assert (installed.get_num_sms, installed.fp8_gemm_nt) == (before["get_num_sms"], before["fp8_gemm_nt"])
    assert not hasattr(installed, "nvfp4_mega_moe")
    sf = torch.ones(4, 16)
    assert_bytes_equal(
        installed.transform_sf_into_required_layout(sf, mn=4, k=512, recipe=(1, 32)),
        dg.transform_sf_into_required_layout(sf, 4, 512, (1, 32)),
    )
    name, arguments = installed.transform_sf_into_required_layout(sf, 4, 2048, (1, 128))
    assert name == "transform_sf_into_required_layout"
    assert arguments[1:] == (4, 2048, (1, 128), None, None, False)
    dg.unpatch()
    assert dict(vars(installed)) == before
    assert installed.mega.fp8_fp4_mega_moe is before["fp8_fp4_mega_moe"]


def test_patch_takes_some_names(installed: Any) -> None:
    before = installed.transform_sf_into_required_layout
    dg.patch(installed, ["fp8_fp4_mega_moe"])
    assert installed.transform_sf_into_required_layout is before
    with pytest.raises(ValueError, match="names has 'fp8_gemm_nt'; allowed"):
        dg.patch(installed, ["fp8_gemm_nt"])


def test_patch_reaches_a_module_that_was_loaded_again(installed: Any) -> None:
    """Another module of the same name, and the same one whose code ran once more."""
    names = ("fp8_fp4_mega_moe", "transform_sf_into_required_layout")
    second = ModuleType("deep_gemm")
    vars(second).update({name: value for name, value in vars(installed).items() if name in (*names, "__version__")})
    before = [getattr(second, name) for name in names]
    dg.patch(installed)
    dg.patch(second)
    assert second.fp8_fp4_mega_moe is installed.fp8_fp4_mega_moe is dg.fp8_fp4_mega_moe
    loaded_again = [lambda *_: "fused", lambda *_: "scales"]
    for name, function in zip(names, loaded_again):
        setattr(installed, name, function)
    dg.patch(installed)
    assert installed.fp8_fp4_mega_moe is dg.fp8_fp4_mega_moe
    wrapper = installed.transform_sf_into_required_layout
    assert wrapper(torch.ones(4, 4), 4, 512, (1, 128)) == "scales"
    dg.patch(installed)
    assert installed.transform_sf_into_required_layout is wrapper
    second.fp8_fp4_mega_moe = loaded_again[0]  # and not patched since
    dg.unpatch()
    assert [getattr(installed, name) for name in names] == loaded_again
    assert [getattr(second, name) for name in names] == [loaded_again[0], before[1]]


@pytest.mark.parametrize("version", ["0.1.5.post1", "0.2.3", None])
def test_patch_refuses_other_versions(version: str | None, installed: Any) -> None:
    installed.__version__ = version
    with pytest.raises(UnsupportedError, match=f"deep_gemm {version or 'of unknown version'} is installed; allowed: 0"):
        dg.patch(installed)
    assert installed.fp8_fp4_mega_moe is not dg.fp8_fp4_mega_moe


def test_patch_of_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(
        ImportError, match=r"no deep_gemm to patch: none is installed\. megamoe\.deep_gemm\.stand_in\(\)"
    ):
        dg.patch()


def test_a_name_that_is_upstreams_alone(installed: ModuleType) -> None:
    with pytest.raises(
        AttributeError, match=r"megamoe\.deep_gemm has no 'fp8_gemm_nt': .*megamoe\.deep_gemm\.patch\(\)"
    ):
        _ = dg.fp8_gemm_nt
    assert getattr(dg, "fp8_gemm_nt", None) is None
    with pytest.raises(AttributeError, match="^module 'megamoe.deep_gemm' has no attribute '__path_of__'$"):
        _ = dg.__path_of__


def test_standing_in_where_none_is_installed(installed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", installed)
    assert not dg.stand_in()
    assert sys.modules["deep_gemm"] is installed
    for name in [name for name in sys.modules if name.partition(".")[0] == "deep_gemm"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("deep_gemm", *(f"deep_gemm.{part}" for part in ("testing", "utils", "utils.layout", "utils.math"))):
        monkeypatch.setitem(sys.modules, name, None)  # undone afterwards
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert dg.stand_in()
    assert dg.stand_in()
    import deep_gemm
    import deep_gemm.utils.layout

    assert deep_gemm is dg
    assert deep_gemm.utils.layout is dg.utils.layout


def _random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
