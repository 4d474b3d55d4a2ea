"""`megamoe.deep_gemm`'s calls: pre-dispatch into a buffer, then the fused call, against the reference."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import megamoe.deep_gemm as dg
from megamoe.backends.base import UnsupportedError
from megamoe.kernels.layouts.scale_atoms import pack_scale_words
from megamoe.oracle import interpreter
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.recipe import Recipe

MX = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
W4A4 = Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100")
NV = Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100")
BF16 = Recipe("bf16xbf16", "none", "deep_gemm_sm100")
SM90_FP4 = Recipe("fp8xfp4", "block128", "deep_gemm_sm90")
SM90_FP8 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
E, K = 3, 2
TOKENS = {"cpu": 4, "cuda": 40}  # Hopper's FP8 adder has heavy tails in smaller layers, the interpreter no time


@dataclass(frozen=True)
class Case:
    """A layer of `recipe` and how it is called; `sm` picks the buffer."""

    recipe: Recipe
    hidden: int
    intermediate: int
    sm: int = 100
    options: dict[str, Any] = field(default_factory=dict)

    def layer(self, device: str, tokens: int | None = None) -> Layer:
        return random_layer(
            self.recipe, tokens=TOKENS[device] if tokens is None else tokens, hidden=self.hidden,
            intermediate=self.intermediate, num_experts=E, top_k=K, masked=0.2, device=device, **self.options,
        )  # fmt: skip


CASES = {
    "shared": Case(MX, 512, 512, options=dict(num_shared_experts=1, activation_clamp=1.5)),
    "mxf4xmxf4": Case(W4A4, 512, 512, options=dict(activation="swigluoai", activation_clamp=2.0)),
    "nvfp4xnvfp4": Case(NV, 256, 256, options=dict(global_scales=True, num_shared_experts=1)),
    "bf16xbf16": Case(BF16, 256, 128, options=dict(num_shared_experts=1)),
    "sm90 fp8": Case(SM90_FP8, 512, 256, 90, dict(activation_clamp=1.5)),
    "sm90 fp4": Case(SM90_FP4, 512, 256, 90, dict(activation_clamp=1.5)),
    "sm90 fp4, mx scales": Case(MX, 512, 256, 90),
}
ROUTED = Case(MX, 512, 512)
IN_TORCH = CASES | {
    "2 shared": Case(MX, 512, 512, options=dict(num_shared_experts=2)),
    "situ": Case(MX, 512, 512, options=dict(activation="situ")),
    "shared mxfp4": Case(MX, 512, 512, options=dict(num_shared_experts=1, shared_weight="e2m1")),
    "sm90 w4a4": Case(W4A4, 512, 512, 90),
}


def transformed(layer: Layer) -> tuple[list[Any], list[Any] | None]:
    """([l1, l2], the shared ones or None) as `transform_weights_*` returns them."""
    w, recipe = layer.weights, layer.spec.recipe
    if recipe == SM90_FP8:
        assert w.w13_scale is not None and w.w2_scale is not None  # noqa: PT018
        return list(dg.transform_weights_for_mega_moe_sm90((w.w13, w.w13_scale), (w.w2, w.w2_scale))), None

    def one(weight: Any, scale: Any) -> Any:
        if scale is None:
            return weight
        return weight.view(torch.int8) if weight.dtype == torch.uint8 else weight, pack_scale_words(scale)

    def both(*tensors: Any) -> list[Any]:
        l1, l2 = one(*tensors[:2]), one(*tensors[2:])
        return list(dg.transform_weights_for_mega_moe(l1, l2, mma_type=recipe.mma_type))

    shared = None
    if w.shared_w13 is not None:
        shared = both(w.shared_w13, w.shared_w13_scale, w.shared_w2, w.shared_w2_scale)
    return both(w.w13, w.w13_scale, w.w2, w.w2_scale), shared


def make_buffer(case: Case, layer: Layer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A buffer of 0xFF bytes, NaN as any number, with room for 384 tokens."""
    monkeypatch.setattr(dg, "_pretend_sm", case.sm)
    spec = layer.spec
    mma_type = "fp8xfp4" if case.sm == 90 and spec.recipe != W4A4 else spec.recipe.mma_type
    buffer = dg.get_symm_buffer_for_mega_moe(
        None, E, 8, K, spec.hidden, spec.intermediate, spec.num_shared_experts, mma_type=mma_type
    )
    if spec.recipe == MX and case.sm == 90:
        assert isinstance(buffer, dg.SM90SymmBuffer)
        buffer.x_sf = buffer.x_sf_ue8m0
    buffer.buffer.fill_(-1)
    return buffer


def dispatch(layer: Layer, buffer: Any) -> None:
    x, ids, weights, recipe = layer.x, layer.topk_ids, layer.topk_weights, layer.spec.recipe
    views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    if recipe in (SM90_FP8, SM90_FP4):
        dg.mega_moe_pre_dispatch_sm90(x, ids, weights, *views, num_tokens=len(x))
    elif recipe == BF16:
        for view, tensor in zip((buffer.x, buffer.topk_idx, buffer.topk_weights), (x, ids, weights)):
            view[: len(x)].copy_(tensor)
    elif recipe == NV:
        dg.mega_moe_pre_dispatch(
            x, ids, weights, *views, num_tokens=len(x), group_size=16, mma_type=recipe.mma_type,
            buf_x_scales=buffer.x_scales,
        )  # fmt: skip
    else:
        dg.mega_moe_pre_dispatch(x, ids, weights, *views, num_tokens=len(x), mma_type=recipe.mma_type)


def call(layer: Layer, buffer: Any, y: torch.Tensor, ready: Any = None, **more: Any) -> None:
    """`ready`: what `transformed` returned, where it must not run again."""
    (l1, l2), shared = ready or transformed(layer)
    spec, w = layer.spec, layer.weights
    options: dict[str, Any] = dict(activation=spec.activation, activation_clamp=spec.activation_clamp) | more
    if shared is not None:
        options.update(shared_l1_weights=shared[0], shared_l2_weights=shared[1])
    if spec.recipe == SM90_FP8:
        dg.fp8_mega_moe(y, l1, l2, buffer, **options)
    elif spec.recipe == BF16:
        dg.bf16_mega_moe(y, l1, l2, buffer, **options)
    elif spec.recipe == NV:
        options.setdefault("use_x_scales", True)
        scales = dict(l1_alphas=w.l1_alphas, l2_alphas=w.l2_alphas, l2_act_scales=w.l2_act_scales)
        dg.nvfp4_mega_moe(y, l1, l2, buffer, **scales, **options)
    else:
        dg.fp8_fp4_mega_moe(y, l1, l2, buffer, **options)


def nan_like(x: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    return torch.full((len(x) if rows is None else rows, x.shape[1]), torch.nan, dtype=torch.bfloat16, device=x.device)


def expected(layer: Layer) -> torch.Tensor:
    return moe_layer(layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec).y


@pytest.mark.parametrize("name", CASES)
def test_layers_of_every_kind(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    layer = case.layer(device)
    buffer = make_buffer(case, layer, monkeypatch)
    dispatch(layer, buffer)
    y = nan_like(layer.x)
    stats = torch.full((E,), 7, dtype=torch.int32, device=device)
    call(layer, buffer, y, cumulative_local_expert_recv_stats=stats)
    report, limits = compare(y, expected(layer)), LIMITS[layer.spec.recipe]
    assert report.rel_rms <= limits.rel_rms, report
    assert report.worst_row <= limits.worst_row, report
    received = torch.bincount(layer.topk_ids[layer.topk_ids >= 0].cpu(), minlength=E)
    assert (stats.cpu() - 7).tolist() == received.tolist()


@pytest.mark.parametrize("name", IN_TORCH)
def test_without_an_interpreter_the_reference_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU: elsewhere buffers lie on it")
    monkeypatch.setattr(interpreter, "is_active", lambda: False)
    case = IN_TORCH[name]
    layer = case.layer("cpu")
    buffer = make_buffer(case, layer, monkeypatch)
    dispatch(layer, buffer)
    y, stats = nan_like(layer.x), torch.zeros(E, dtype=torch.int32)
    call(layer, buffer, y, cumulative_local_expert_recv_stats=stats)
    assert_bytes_equal(y, expected(layer))
    assert int(stats.sum()) == int((layer.topk_ids >= 0).sum())


def test_the_weights_are_read_where_they_are(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's tensors reach the kernels as they are, and no call changes them."""
    seen: list[Any] = []
    monkeypatch.setattr("megamoe.kernels.layer.run_dispatched", lambda *_, weights, **__: seen.append(weights))
    case = ROUTED
    layer = case.layer(device)
    buffer = make_buffer(case, layer, monkeypatch)
    (l1, l2), _ = transformed(layer)
    dg.fp8_fp4_mega_moe(nan_like(layer.x), l1, l2, buffer)
    pointers = [tensor.data_ptr() for tensor in (*l1, *l2)]
    assert [tensor.data_ptr() for tensor in seen[0].routed] == pointers


def test_an_idle_rank_has_no_token_and_one_row(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["sm90 fp4"]
    layer = case.layer(device, tokens=0)
    buffer = make_buffer(case, layer, monkeypatch)
    dispatch(layer, buffer)
    assert bool((buffer.topk_idx == -1).all())
    assert bool((buffer.topk_weights == 0).all())
    y = nan_like(layer.x, rows=1)
    call(layer, buffer, y)
    assert_bytes_equal(y, torch.zeros_like(y))
    call(layer, buffer, nan_like(layer.x, rows=0))


def test_as_many_tokens_as_y_has_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged as vLLM does it: no padding behind the tokens. What lies there is not read."""
    case = CASES["sm90 fp4"]
    layer = case.layer(device)
    buffer = make_buffer(case, layer, monkeypatch)
    n = len(layer.x)
    views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    dg.mega_moe_pre_dispatch_sm90(layer.x, layer.topk_ids, layer.topk_weights, *(view[:n] for view in views), n)
    buffer.topk_idx[n:] = 1  # experts of tokens that are not there
    whole, part = nan_like(layer.x), nan_like(layer.x, rows=2)
    call(layer, buffer, whole)
    call(layer, buffer, part)
    assert_bytes_equal(part, whole[:2])


def test_without_x_scales_tokens_have_the_factor_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(interpreter, "is_active", lambda: False)
    case = CASES["nvfp4xnvfp4"]
    layer = case.layer(device)
    buffer = make_buffer(case, layer, monkeypatch)
    dispatch(layer, buffer)
    without, ones = nan_like(layer.x), nan_like(layer.x)
    call(layer, buffer, without, use_x_scales=False)
    call(layer, buffer, nan_like(layer.x), use_x_scales=False, activation_clamp=1.5)
    factors = [p.workspace.x_scale for p in buffer.prepared.values()]
    assert factors[0] is factors[1], "one tensor of ones for both"
    buffer.x_scales.fill_(1.0)
    call(layer, buffer, ones)
    assert bool(without.isfinite().all())
    assert_bytes_equal(without, ones)


def test_the_pre_dispatch_scales_weights(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By expert_scales under SM100 rules, by the factor under SM90's; −1 keeps its weight or gets the factor."""
    sm100, sm90 = CASES["mxf4xmxf4"], CASES["sm90 fp8"]
    layer = sm100.layer(device)
    buffer = make_buffer(sm100, layer, monkeypatch)
    scales = torch.linspace(0.5, 2.0, E, device=device)
    dg.mega_moe_pre_dispatch(
        layer.x, layer.topk_ids, layer.topk_weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights,
        len(layer.x), mma_type="mxf4xmxf4", expert_scales=scales,
    )  # fmt: skip
    ids = layer.topk_ids.long()
    wanted = torch.where(ids >= 0, layer.topk_weights * scales[ids.clamp_min(0)], layer.topk_weights)
    assert_bytes_equal(buffer.topk_weights[: len(ids)], wanted)

    layer = sm90.layer(device)
    buffer = make_buffer(sm90, layer, monkeypatch)
    dg.mega_moe_pre_dispatch_sm90(
        layer.x, layer.topk_ids, layer.topk_weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights,
        len(layer.x), routed_scaling_factor=2.5,
    )  # fmt: skip
    assert_bytes_equal(buffer.topk_weights[: len(layer.x)], layer.topk_weights * 2.5)


BAD_CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "recipe": ("routed", dict(recipe=(1, 1, 16)), r"recipe is \(1, 1, 16\); allowed with fp8xfp4: \(1, 1, 32\)"),
    "x scales": ("routed", dict(use_x_scales=True), "use_x_scales is given; allowed under fp8xfp4: None"),
    "alphas": ("routed", dict(l2_alphas=torch.ones(E)), "l2_alphas is given; allowed under fp8xfp4: None"),
    "situ": ("mxf4xmxf4", dict(activation="situ"), "activation is 'situ'; under mxf4xmxf4"),
    "situ clamp": ("routed", dict(activation="situ", activation_clamp=1.0), "activation_clamp is 1.0"),
    "clamp": ("routed", dict(activation_clamp=-1.0), "activation_clamp is -1.0"),
    "tensor clamp": ("routed", dict(activation_clamp=torch.ones(E)), "activation_clamp is tensor"),
    "x scales flag": ("nvfp4xnvfp4", dict(use_x_scales=1), "use_x_scales is 1"),
    "one shared": ("routed", dict(shared_l1_weights=(1, 2)), "shared_l1_weights is given; with a buffer of 0 shared"),
    "stats": ("routed", dict(cumulative_local_expert_recv_stats=torch.zeros(E)), "expert_recv_stats has dtype"),
    "SM90 activation": ("sm90 fp8", dict(activation="swigluoai"), "activation is 'swigluoai'; allowed: 'swiglu'"),
    "SM90 recipe": ("sm90 fp8", dict(recipe=(1, 1, 32)), r"recipe is .*\(128, 128, 128\)"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_options_are_refused_before_anything_is_written(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case_name, options, message = BAD_CALLS[name]
    case = CASES.get(case_name, ROUTED)
    layer = case.layer(device, tokens=4)
    buffer = make_buffer(case, layer, monkeypatch)
    y, before = nan_like(layer.x), buffer.buffer.clone()
    with pytest.raises((ValueError, TypeError), match=message):
        call(layer, buffer, y, **options)
    assert_bytes_equal(buffer.buffer, before)
    assert bool(y.isnan().all())


def test_bad_tensors_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ROUTED
    layer = case.layer(device, tokens=4)
    buffer = make_buffer(case, layer, monkeypatch)
    (l1, l2), _ = transformed(layer)
    y = nan_like(layer.x)
    bad: list[tuple[tuple[Any, ...], str]] = [
        ((y.float(), l1, l2, buffer), "y has dtype torch.float32"),
        ((y[:, :-1], l1, l2, buffer), r"y has shape \(4, 511\); expected at most 384 rows of 512"),
        ((nan_like(layer.x, rows=385), l1, l2, buffer), r"y has shape \(385, 512\)"),
        ((y, l1[0], l2, buffer), r"l1_weights is a Tensor; expected a \(weight, scale\) pair"),
        ((y, (l1[0][:2], l1[1]), l2, buffer), r"l1_weights\[0\] has shape \(2, 1024, 256\); expected \(3, 1024, 256\)"),
        ((y, (l1[0].float(), l1[1]), l2, buffer), r"l1_weights\[0\] has dtype torch.float32"),
        ((y, l1, (l2[0], l2[1].contiguous()), buffer), r"l2_weights\[1\] has strides .* MN-major"),
        ((y, l1, l2, object()), "sym_buffer is a object"),
    ]
    for arguments, message in bad:
        with pytest.raises((ValueError, TypeError), match=message):
            dg.fp8_fp4_mega_moe(*arguments)
    with pytest.raises(ValueError, match="sym_buffer is a SymmBuffer with mma_type='fp8xfp4'; allowed: an SM90"):
        dg.fp8_mega_moe(y, l1, l2, buffer)
    with pytest.raises(ValueError, match="allowed: a SymmBuffer with mma_type='bf16xbf16'"):
        dg.bf16_mega_moe(y, l1[0], l2[0], buffer)
    monkeypatch.setattr(dg, "_pretend_sm", 90)
    sm90: Any = dg.get_symm_buffer_for_mega_moe(None, E, 8, K, 512, 512)
    sm90.x_sf = torch.zeros_like(sm90.x_sf)
    with pytest.raises(ValueError, match="x_sf is a tensor of its own; allowed: the one it came with, or x_sf_ue8m0"):
        dg.fp8_fp4_mega_moe(y, l1, l2, sm90)
    buffer.destroy()
    with pytest.raises(ValueError, match="sym_buffer was destroyed"):
        dg.fp8_fp4_mega_moe(y, l1, l2, buffer)
    assert buffer.x is None


def test_situ_on_an_sm90_buffer_says_why_not(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["sm90 fp4"]
    layer = case.layer(device)
    buffer = make_buffer(case, layer, monkeypatch)
    with pytest.raises(ValueError, match="activation is 'situ'; under fp8xfp4/block128/deep_gemm_sm90"):
        call(layer, buffer, nan_like(layer.x), activation="situ", activation_clamp=None)


BAD_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "kind": (dict(mma_type="bf16xbf16"), "mma_type is 'bf16xbf16'"),
    "group": (dict(group_size=16), "group_size is 16; fp8xfp4 allows 32, 64, 128"),
    "count": (dict(num_tokens=3), "num_tokens is 3; x has 4 rows"),
    "x scales": (dict(buf_x_scales=torch.ones(8)), "buf_x_scales is given; under fp8xfp4 it is not allowed"),
    "sf dtype": (dict(buf_x_sf=torch.zeros(384, 4)), "buf_x_sf has dtype torch.float32"),
    "x dtype": (dict(x=torch.zeros(4, 512)), "x has dtype torch.float32"),
    "ids": (dict(topk_idx=torch.zeros(5, K, dtype=torch.int32)), r"topk_idx has shape \(5, 2\); expected \(4,"),
    "weights": (dict(topk_weights=torch.zeros(4, 3)), r"topk_weights has shape \(4, 3\)"),
    "buffer rows": (dict(buf_x=torch.zeros(3, 512, dtype=torch.int8)), r"buf_x has shape \(3, 512\)"),
    "buffer ids": (dict(buf_topk_idx=torch.zeros(384, K, dtype=torch.int32)), "buf_topk_idx has dtype torch.int32"),
}


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_bad_pre_dispatches_are_refused(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = BAD_DISPATCHES[name]
    case = ROUTED
    layer = case.layer(device, tokens=4)
    buffer = make_buffer(case, layer, monkeypatch)
    before = buffer.buffer.clone()
    arguments: dict[str, Any] = dict(
        x=layer.x, topk_idx=layer.topk_ids, topk_weights=layer.topk_weights, buf_x=buffer.x, buf_x_sf=buffer.x_sf,
        buf_topk_idx=buffer.topk_idx, buf_topk_weights=buffer.topk_weights, num_tokens=len(layer.x),
    )  # fmt: skip
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in changes.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        dg.mega_moe_pre_dispatch(**(arguments | moved))
    assert_bytes_equal(buffer.buffer, before)


def test_a_buffer_on_another_device_than_the_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ROUTED.layer(device, tokens=4)
    buffer = make_buffer(ROUTED, layer, monkeypatch)
    tokens = (layer.x, layer.topk_ids, layer.topk_weights)
    views = (buffer.x.to("meta"), buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    with pytest.raises(ValueError, match=f"^buf_x is on meta; allowed: {layer.x.device}, where x is"):
        dg.mega_moe_pre_dispatch(*tokens, *views, num_tokens=4)
    l1, l2 = transformed(layer)[0]
    with pytest.raises(ValueError, match=f"^y is on meta; allowed: {layer.x.device}, where the buffer is"):
        dg.fp8_fp4_mega_moe(nan_like(layer.x).to("meta"), l1, l2, buffer)


class _Ranks:
    def size(self) -> int:
        return 2


def test_more_ranks_than_one_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="group has 2 ranks; expert parallelism is not built yet"):
        dg.get_symm_buffer_for_mega_moe(_Ranks(), E, 8, K, 512, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["shared", "mxf4xmxf4", "nvfp4xnvfp4", "sm90 fp8", "sm90 fp4"])
def test_in_a_cuda_graph(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured behind its pre-dispatch, on another stream, replayed with other tokens in the same memory."""
    case = CASES[name]
    first, second = case.layer(device), case.layer(device)
    buffer = make_buffer(case, first, monkeypatch)
    y = nan_like(first.x)
    dispatch(first, buffer)
    ready = transformed(first)
    call(first, buffer, y, ready)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dispatch(first, buffer)
        call(first, buffer, y, ready)
    first.x.copy_(second.x * 0.5)
    first.topk_ids.copy_(second.topk_ids.flip(0))
    y.fill_(torch.nan)
    graph.replay()
    report = compare(y, expected(first))
    assert report.rel_rms <= LIMITS[first.spec.recipe].rel_rms, report
