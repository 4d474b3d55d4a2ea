"""The public API on the kernels: it is the reference's layer, on every recipe, whatever way it is called."""

import inspect
import math
from dataclasses import dataclass, replace

import pytest
import torch

import megamoe
from megamoe import debug
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.recipe import SERVED, Recipe

RECIPES = {recipe.mma_type: recipe for recipe in SERVED}
T, H, E, K = 9, 128, 3, 2
BACKENDS = ("triton", "reference")


def _layer(mma_type: str, device: str, *, shared: int = 1, **options: object) -> Layer:
    arguments = {
        "tokens": T,
        "hidden": H,
        "intermediate": H if mma_type == "fp8xfp8" else 64,
        "num_experts": E,
        "top_k": K,
        **options,
    }
    return random_layer(RECIPES[mma_type], num_shared_experts=shared, seed=7, device=device, **arguments)  # type: ignore[arg-type]


def _recipe_arguments(recipe: Recipe) -> dict[str, str]:
    return {"mma_type": recipe.mma_type, "act_scale": recipe.act_scale, "numerics": recipe.numerics}


def _call(layer: Layer, backend: str = "triton", **options: object) -> torch.Tensor:
    """`mega_moe` on a layer, into a poisoned output unless `options` brings one."""
    arguments = {"output": torch.full_like(layer.x, torch.nan), **options}
    return megamoe.mega_moe(
        layer.x, layer.topk_ids, layer.topk_weights, **vars(layer.weights),
        **_recipe_arguments(layer.spec.recipe), moe_backend=backend, **arguments,
    )  # type: ignore[arg-type]  # fmt: skip


def _prepared(layer: Layer) -> megamoe.MoEWeights:
    return megamoe.prepare_weights(**vars(layer.weights), **_recipe_arguments(layer.spec.recipe))


def _reference(layer: Layer, **options: object) -> torch.Tensor:
    return moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec, full_trace=False, **options
    ).y  # type: ignore[arg-type]


def test_the_signature_is_the_contract() -> None:
    parameters = inspect.signature(megamoe.mega_moe).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert positional == ["hidden_states", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale"]
    assert defaults == {
        "mma_type": inspect.Parameter.empty,
        **dict.fromkeys(["act_scale", "numerics"]),
        "w13_layout": "gate_up",
        **dict.fromkeys(["shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale"]),
        **dict.fromkeys(["w13_bias", "w2_bias", "l1_alphas", "l2_alphas", "l2_act_scales", "expert_scales", "x_gsf"]),
        "activation": "swiglu",
        **dict.fromkeys(["activation_clamp", "activation_alpha", "activation_beta"]),
        "routed_scaling_factor": 1.0,
        "local_expert_offset": 0,
        **dict.fromkeys(["num_experts", "expert_map"]),
        "check_ids": False,
        "output": None,
        "moe_backend": "triton",
    }  # fmt: skip


@pytest.mark.parametrize("mma_type", RECIPES)
def test_one_call_and_a_prepared_layer_are_the_reference(mma_type: str, device: str) -> None:
    """Also: a prepared layer with room for more tokens, called twice, gives the bytes of the single call."""
    layer = _layer(mma_type, device, activation_clamp=1.5)
    result = _call(layer, activation_clamp=1.5)
    problem = check(compare(result, _reference(layer)), LIMITS[layer.spec.recipe])
    assert problem is None, problem

    moe = megamoe.MegaMoE(_prepared(layer), 2 * T, K, activation_clamp=1.5)
    assert moe.backend == "triton"
    workspace = moe.workspace_bytes
    assert workspace > 2 * T * H // 2, "at least the quantized tokens"
    for _ in range(2):
        assert_bytes_equal(moe(layer.x, layer.topk_ids, layer.topk_weights), result, "MegaMoE")
    head = moe(layer.x[:4], layer.topk_ids[:4], layer.topk_weights[:4])
    assert_bytes_equal(head, result[:4], "the first tokens alone")
    assert moe.workspace_bytes == workspace


@pytest.mark.parametrize("mma_type", RECIPES)
def test_a_prepared_layer_on_the_reference_backend(mma_type: str, device: str) -> None:
    """The prepared byte order holds everything the plain weights held."""
    layer = _layer(mma_type, device)
    moe = megamoe.MegaMoE(_prepared(layer), T, K, moe_backend="reference")
    assert_bytes_equal(moe(layer.x, layer.topk_ids, layer.topk_weights), _reference(layer), "output")
    plain = sum(t.numel() * t.element_size() for t in vars(layer.weights).values() if t is not None)
    assert moe.weight_bytes == plain
    assert moe.workspace_bytes == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mma_type", RECIPES)
def test_routed_scaling_factor_leaves_shared_experts_at_one(mma_type: str, backend: str, device: str) -> None:
    layer = _layer(mma_type, device)
    doubled = replace(layer, topk_weights=2 * layer.topk_weights)
    scaled = _call(layer, backend, routed_scaling_factor=2.0)
    assert_bytes_equal(scaled, _call(doubled, backend), "factor 2 and weights × 2")
    skipped = replace(layer, topk_ids=torch.full_like(layer.topk_ids, -1))
    assert_bytes_equal(
        _call(skipped, backend, routed_scaling_factor=2.5), _call(skipped, backend), "shared experts alone"
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mma_type", ["fp8xfp4", "fp8xfp8"])
def test_expert_scales_multiply_the_top_k_weights(mma_type: str, backend: str, device: str) -> None:
    """By the expert's id; with the factor after them; ids beyond E read nothing."""
    layer = _layer(mma_type, device, shared=0)
    ids = layer.topk_ids.clone()
    ids[0, 0] = E + 1_000_000
    layer = replace(layer, topk_ids=ids)
    scales = torch.tensor([0.37, 1.91, 0.83], device=device)
    known = (ids >= 0) & (ids < E)
    by_hand = torch.where(known, layer.topk_weights * scales[torch.where(known, ids, 0).long()], layer.topk_weights)
    factor = torch.tensor(1.7, device=device)
    assert_bytes_equal(
        _call(layer, backend, expert_scales=scales, routed_scaling_factor=1.7),
        _call(replace(layer, topk_weights=by_hand * factor), backend),
        "scales given and scales folded by hand",
    )  # fmt: skip


@dataclass(frozen=True)
class Clamp:
    """Clamps that must give the same bytes."""

    clamp: float | None
    same_as: float | None


@pytest.mark.parametrize("case", [Clamp(math.inf, None), Clamp(7, 7.0)], ids=str)
def test_spellings_of_a_clamp(case: Clamp, device: str) -> None:
    layer = _layer("fp8xfp8", device)
    assert_bytes_equal(_call(layer, activation_clamp=case.clamp), _call(layer, activation_clamp=case.same_as), "output")


@pytest.mark.parametrize("mma_type", ["fp8xfp4", "fp8xfp8"])
def test_a_clamp_of_zero_leaves_nothing(mma_type: str, device: str) -> None:
    """up = clamp(up, 0, 0): every expert's row is zero, and the sum of zeros is +0 or −0 + 0 = +0."""
    result = _call(_layer(mma_type, device), activation_clamp=0)
    assert_bytes_equal(result, torch.zeros_like(result), "output")


def test_labels_of_bytes_do_not_matter(device: str) -> None:
    layer = _layer("fp8xfp4", device, shared_weight="e2m1")
    labels = {"w13": torch.int8, "w2": torch.int8, "w13_scale": torch.float8_e8m0fnu, "shared_w2": torch.int8}
    labelled = {name: getattr(layer.weights, name).view(dtype) for name, dtype in labels.items()}
    relabelled = replace(layer, weights=replace(layer.weights, **labelled))
    assert_bytes_equal(_call(relabelled), _call(layer), "output")

    layer = _layer("nvfp4xnvfp4", device)
    labelled = {
        name: getattr(layer.weights, name).view(torch.float8_e4m3fn)
        for name in ("w13_scale", "w2_scale", "shared_w13_scale", "shared_w2_scale")
    }
    relabelled = replace(layer, weights=replace(layer.weights, **labelled))
    assert_bytes_equal(_call(relabelled), _call(layer), "output")


def test_ids_of_either_width_and_strided_rows(device: str) -> None:
    layer = _layer("fp8xfp8", device)
    expected = _call(layer)
    assert_bytes_equal(_call(replace(layer, topk_ids=layer.topk_ids.long())), expected, "int64 ids")
    wide = torch.full((T, H + 24), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, :H] = layer.x
    assert_bytes_equal(_call(replace(layer, x=wide[:, :H])), expected, "strided rows")


def test_output_is_the_given_tensor_and_may_be_the_input(device: str) -> None:
    layer = _layer("fp8xfp8", device)
    expected = _call(layer)
    x = layer.x.clone()
    assert _call(replace(layer, x=x), output=x) is x
    assert_bytes_equal(x, expected, "in place")
    assert_bytes_equal(_call(layer, output=None), expected, "allocated")


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str, device: str) -> None:
    layer = _layer("fp8xfp4", device)
    empty = replace(layer, x=layer.x[:0], topk_ids=layer.topk_ids[:0], topk_weights=layer.topk_weights[:0])
    assert _call(empty, backend, check_ids=True).shape == (0, H)
    moe = megamoe.MegaMoE(_prepared(layer), T, K, moe_backend=backend)
    assert moe(empty.x, empty.topk_ids, empty.topk_weights).shape == (0, H)


def test_warmup_leaves_no_trace(device: str) -> None:
    layer = _layer("fp8xfp8", device)
    moe = megamoe.MegaMoE(_prepared(layer), T, K)
    moe.warmup([1, T])
    assert_bytes_equal(moe(layer.x, layer.topk_ids, layer.topk_weights), _call(layer), "output after warm-up")


@pytest.mark.parametrize("missing", ["bf16xbf16", "bf16xfp4", "mxfp8xmxfp8"])
def test_preparing_a_recipe_without_kernels(missing: str) -> None:
    with pytest.raises(megamoe.UnsupportedError, match=f"^recipe {missing}/.* is legal but not built yet"):
        megamoe.prepare_weights(torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1), mma_type=missing)


@dataclass(frozen=True)
class NanCase:
    """A NaN put into `field` of the layer or of its weights, and where it must be found.

    `chosen` is the expert of token 6's slot 1, `first` the first of `count` tokens of expert 1.
    """

    field: str
    where: tuple[int, ...]
    words: str


NAN_CASES = [
    NanCase("x", (6, 17), "hidden_states: token 6; 1"),
    NanCase("topk_weights", (6, 1), "topk_weights: token 6, expert {chosen}; 1"),
    NanCase("w13_scale", (1, 0, 0), "gate_up: token {first}, expert 1; {count}"),
    NanCase("w2_scale", (1, 0, 0), "down: token {first}, expert 1; {count}"),
    NanCase("shared_w13_scale", (0, 0), "shared gate_up: token 0; {all}"),
    NanCase("shared_w2_scale", (0, 0), "shared down: token 0; {all}"),
]


def _with_nan(layer: Layer, case: NanCase) -> Layer:
    owner = layer if hasattr(layer, case.field) else layer.weights
    tensor = getattr(owner, case.field).clone()
    tensor[case.where] = torch.nan
    changed = replace(owner, **{case.field: tensor})
    return changed if isinstance(changed, Layer) else replace(layer, weights=changed)


class TestDebug:
    """`MEGAMOE_DEBUG=1` and `check_ids`."""

    def test_an_illegal_id_is_named_by_token_and_slot(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = _layer("fp8xfp8", device)
        ids = layer.topk_ids.clone()
        ids[2, 1], ids[4, 0], ids[5, 0] = -1, E, -2
        wild = replace(layer, topk_ids=ids)
        assert _call(wild).isfinite().all(), "skipped without the check"
        output = torch.full_like(layer.x, torch.nan)
        before = output.clone()
        message = (
            rf"topk_ids\[4, 0\] is {E} \(token 4, slot 0\); allowed: -1 \(skip\) and 0..{E - 1}; 2 illegal ids in all"
        )
        with pytest.raises(ValueError, match=message):
            _call(wild, check_ids=True, output=output)
        with pytest.raises(ValueError, match=message):
            megamoe.MegaMoE(_prepared(layer), T, K, check_ids=True)(layer.x, ids, layer.topk_weights, output)
        monkeypatch.setenv("MEGAMOE_DEBUG", "1")
        with pytest.raises(ValueError, match=message):
            _call(wild, output=output)
        assert_bytes_equal(output, before, "output")

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("mma_type", ["nvfp4xnvfp4", "fp8xfp8"])
    def test_a_sound_layer_passes_with_the_same_bytes(
        self, mma_type: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = _layer(mma_type, device)
        ids = layer.topk_ids.clone()
        ids[1, 0] = -1
        layer = replace(layer, topk_ids=ids)
        expected = _call(layer, backend)
        monkeypatch.setenv("MEGAMOE_DEBUG", "1")
        assert_bytes_equal(_call(layer, backend), expected, "output")

    @pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy's, in the interpreter
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("case", NAN_CASES, ids=lambda case: case.field)
    def test_the_first_nan_is_named(
        self, case: NanCase, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = _layer("fp8xfp8", device)
        tokens = (layer.topk_ids == 1).nonzero()[:, 0]
        words = case.words.format(chosen=int(layer.topk_ids[6, 1]), first=int(tokens.min()), count=len(tokens), all=T)
        monkeypatch.setenv("MEGAMOE_DEBUG", "1")
        with pytest.raises(FloatingPointError) as caught:
            _call(_with_nan(layer, case), backend)
        assert str(caught.value) == f"first NaN in stage {words} rows in all"

    @pytest.mark.parametrize("value", ["", "0"])
    def test_off(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MEGAMOE_DEBUG", value)
        assert not debug.enabled()


@pytest.mark.gpu
class TestCapture:
    @pytest.mark.parametrize("mma_type", RECIPES)
    def test_a_graph_replayed_with_changed_inputs(self, mma_type: str, device: str) -> None:
        first, second = (_layer(mma_type, device), _layer(mma_type, device))
        second = replace(second, x=first.x.flip(0), topk_ids=first.topk_ids.flip(0))
        moe = megamoe.MegaMoE(_prepared(first), T, K)
        moe.warmup([T])
        x, ids, weights = first.x.clone(), first.topk_ids.clone(), first.topk_weights.clone()
        output = torch.full_like(x, torch.nan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe(x, ids, weights, output)
        for layer in (first, second, first):
            x.copy_(layer.x)
            ids.copy_(layer.topk_ids)
            weights.copy_(layer.topk_weights)
            output.fill_(torch.nan)
            graph.replay()
            assert_bytes_equal(output, _call(layer), "replayed output")

    def test_a_warm_call_allocates_nothing(self, device: str) -> None:
        layer = _layer("fp8xfp4", device)
        moe = megamoe.MegaMoE(_prepared(layer), T, K)
        moe.warmup([T])
        output = torch.full_like(layer.x, torch.nan)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        moe(layer.x, layer.topk_ids, layer.topk_weights, output)
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert output.isfinite().all()

    def test_debug_refuses_capture(self, device: str) -> None:
        layer = _layer("fp8xfp4", device)
        moe = megamoe.MegaMoE(_prepared(layer), T, K, check_ids=True)
        moe.warmup([T])
        output = torch.empty_like(layer.x)
        with (
            pytest.raises(RuntimeError, match="wait for the GPU, which a CUDA graph cannot record"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            moe(layer.x, layer.topk_ids, layer.topk_weights, output)
