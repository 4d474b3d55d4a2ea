"""The SM90 tier on a Hopper GPU: every tile, every option it serves, against the reference; and when it steps aside."""

import dataclasses

import pytest
import torch

import megamoe
from megamoe.cli.measure import count_launches
from megamoe.kernels.layer import LAUNCHES
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.public_arguments import layer_arguments, weight_arguments
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.recipe import Recipe

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.x")]

RECIPES = {
    "block128": Recipe("fp8xfp4", "block128", "deep_gemm_sm90"),
    "token": Recipe("fp8xfp4", "token", "deep_gemm_sm90"),
    "e4m3": Recipe("fp8xfp8", "block128", "deep_gemm_sm90"),
    "bf16": Recipe("bf16xfp4", "none", "trtllm_gen"),
}
SHAPE = dict(hidden=768, intermediate=512, num_experts=7, top_k=3, activation_clamp=2.0)
SHARED: dict[str, object] = dict(num_shared_experts=1, shared_weight="e2m1")


def _layer(recipe: str, tokens: int, **options: object) -> Layer:
    return random_layer(RECIPES[recipe], tokens=tokens, device="cuda", **{**SHAPE, **options})  # type: ignore[arg-type]


def _open(layer: Layer, max_tokens: int | None = None) -> megamoe.MegaMoE:
    weights = megamoe.prepare_weights(**weight_arguments(layer))
    return megamoe.MegaMoE(weights, max_tokens or len(layer.x), layer.spec.top_k, **layer_arguments(layer))


def _tier(moe: megamoe.MegaMoE) -> str:
    return type(moe._layer).__name__


def _reference(layer: Layer) -> torch.Tensor:
    inputs = (layer.x, layer.topk_ids, layer.topk_weights)
    return moe_layer(*inputs, layer.weights, layer.spec, parameters=layer.parameters, full_trace=False).y


def _agree(layer: Layer, output: torch.Tensor) -> None:
    problem = check(compare(output, _reference(layer)), LIMITS[layer.spec.recipe])
    assert problem is None, problem


@pytest.mark.parametrize("tokens", (1, 5, 18, 19, 60, 75, 200, 262, 700))
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_tile_of_the_heuristic(recipe: str, tokens: int) -> None:
    """7 experts, 3 slots per token: from a fraction of a row per expert to several prefill tiles."""
    layer = _layer(recipe, tokens, masked=0.1)
    moe = _open(layer)
    assert _tier(moe) == "HopperLayer"
    output = torch.full_like(layer.x, torch.nan)
    _agree(layer, moe(layer.x, layer.topk_ids, layer.topk_weights, output))


OPTIONS: dict[str, dict[str, object]] = {
    "no clamp": {"activation_clamp": None},
    "clamp 0": {"activation_clamp": 0.0},
    "swigluoai": {"activation": "swigluoai", "activation_clamp": 0.7, "activation_alpha": 1.2, "activation_beta": 0.5},
    "expert scales, factor": {"expert_scales": True, "routed_scaling_factor": 2.5},
    "one expert": {"num_experts": 1, "top_k": 1},
    "256 experts": {"num_experts": 256, "top_k": 8},
    "V4-Flash's width": {"hidden": 4096, "intermediate": 2048},
    "wide experts": {"hidden": 256, "intermediate": 1024, "num_experts": 2, "top_k": 2},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_options(recipe: str, option: str) -> None:
    layer = _layer(recipe, 33, **OPTIONS[option])
    moe = _open(layer)
    assert _tier(moe) == "HopperLayer"
    _agree(layer, moe(layer.x, layer.topk_ids, layer.topk_weights))


@pytest.mark.parametrize("tokens", (1, 5, 18, 19, 64, 75, 200, 262, 300, 700))
@pytest.mark.parametrize("recipe", ("block128", "token"))
def test_a_shared_expert_in_every_tile(recipe: str, tokens: int) -> None:
    """It meets neither the routed experts' factors nor their masks, and costs no launch."""
    layer = _layer(recipe, tokens, masked=0.1, expert_scales=True, routed_scaling_factor=2.5, **SHARED)
    moe = _open(layer)
    assert _tier(moe) == "HopperLayer"
    output = torch.full_like(layer.x, torch.nan)
    call = (layer.x, layer.topk_ids, layer.topk_weights, output)
    _agree(layer, moe(*call))
    assert count_launches(lambda: moe(*call), layer.x.device)[1] == len(LAUNCHES)


SHARED_OPTIONS: dict[str, dict[str, object]] = {
    "swigluoai": OPTIONS["swigluoai"],
    "one expert": OPTIONS["one expert"],
    "256 experts": OPTIONS["256 experts"],
    "V4-Flash's width": OPTIONS["V4-Flash's width"],
    "every slot skipped": {"masked": 1.0},
}


@pytest.mark.parametrize("option", SHARED_OPTIONS)
@pytest.mark.parametrize("recipe", ("block128", "token"))
def test_a_shared_expert_with_options(recipe: str, option: str) -> None:
    layer = _layer(recipe, 33, **SHARED_OPTIONS[option], **SHARED)
    moe = _open(layer, max_tokens=100)
    assert _tier(moe) == "HopperLayer"
    _agree(layer, moe(layer.x, layer.topk_ids, layer.topk_weights))


@pytest.mark.parametrize("recipe", ("block128", "token"))
def test_a_shared_expert_alone_is_the_routed_one_with_weight_one(recipe: str) -> None:
    """The same weights named by a slot of weight 1 give the same bits: it is one more expert, no other arithmetic."""
    for tokens in (5, 30, 100, 300):
        layer = _layer(recipe, tokens, num_experts=1, top_k=1, **SHARED)
        names = ("w13", "w13_scale", "w2", "w2_scale")
        weights = {name: getattr(layer.weights, f"shared_{name}")[None] for name in names}
        plain = dict.fromkeys(f"shared_{name}" for name in names)
        spec = dataclasses.replace(layer.spec, num_shared_experts=0, shared_weight=None)
        ones = torch.ones_like(layer.topk_weights)
        as_slot = dataclasses.replace(
            layer, spec=spec, topk_weights=ones, weights=dataclasses.replace(layer.weights, **weights, **plain)
        )
        zeros = torch.zeros_like(layer.topk_ids)
        by_slot = _open(as_slot)(layer.x, zeros, ones)
        skipped = torch.full_like(layer.topk_ids, -1)
        assert_bytes_equal(_open(layer)(layer.x, skipped, ones), by_slot, f"{tokens} tokens")


ROUTINGS = {
    "all to one expert": lambda ids: torch.full_like(ids, 3),
    "every slot skipped": lambda ids: torch.full_like(ids, -1),
    "out of range": lambda ids: torch.where(ids % 2 == 0, ids, 7 + ids * 1000),
    "int64": lambda ids: ids.long(),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", (6, 150))
@pytest.mark.parametrize("recipe", RECIPES)
def test_routings(recipe: str, tokens: int, routing: str) -> None:
    layer = _layer(recipe, tokens)
    layer = dataclasses.replace(layer, topk_ids=ROUTINGS[routing](layer.topk_ids))
    _agree(layer, _open(layer)(layer.x, layer.topk_ids, layer.topk_weights))


@pytest.mark.parametrize(
    "recipe, options",
    [*((recipe, {}) for recipe in RECIPES), ("block128", SHARED), ("token", SHARED)],
    ids=[*RECIPES, "block128, shared", "token, shared"],
)
def test_runs_batches_and_graphs_give_the_same_bits(recipe: str, options: dict[str, object]) -> None:
    """A token's bits may depend on the tile its batch size picks, never on the run, the graph or what came before."""
    layer = _layer(recipe, 300, **options)
    moe = _open(layer)
    call = (layer.x, layer.topk_ids, layer.topk_weights)
    first = moe(*call)
    for _ in range(20):
        assert_bytes_equal(moe(*call), first, "another run")
    few = tuple(tensor[:5] for tensor in call)
    alone = moe(*few)
    output = torch.full_like(first, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe(*call, output)
    assert_bytes_equal(moe(*few), alone, "five tokens after three hundred")
    graph.replay()
    assert_bytes_equal(output, first, "the graph's output")


def test_e4m3_weights_are_read_as_they_are() -> None:
    """No second copy of a layer's weights: the tier holds the tensors that `prepare_weights` made."""
    layer = _layer("e4m3", 20)
    weights = megamoe.prepare_weights(**weight_arguments(layer))
    moe = megamoe.MegaMoE(weights, 20, layer.spec.top_k, **layer_arguments(layer))
    held = moe._layer._weights  # type: ignore[attr-defined]
    assert held.w13.weight.data_ptr() == weights.routed.w13.data_ptr()
    assert held.w2.weight.data_ptr() == weights.routed.w2.data_ptr()
    plain = moe._layer.weights  # type: ignore[attr-defined]
    assert_bytes_equal(plain.w13, layer.weights.w13, "w13")
    assert_bytes_equal(plain.w2, layer.weights.w2, "w2")


def test_e4m3_scales_of_every_size() -> None:
    """Each weight scale, token scale and group at a place of its own: blocks differ by orders of magnitude."""
    layer = _layer("e4m3", 150, num_experts=3, top_k=2)
    generator = torch.Generator().manual_seed(0)
    for scale in (layer.weights.w13_scale, layer.weights.w2_scale):
        assert scale is not None
        scale *= torch.exp2(torch.randint(-4, 5, scale.shape, generator=generator).float()).to(scale.device)
    factors = torch.exp2(torch.randint(-3, 4, (150, 6), generator=generator).float()).repeat_interleave(128, 1)
    layer.x.mul_(factors.to("cuda"))
    for tokens in (7, 40, 90, 150):
        few = dataclasses.replace(
            layer, x=layer.x[:tokens], topk_ids=layer.topk_ids[:tokens], topk_weights=layer.topk_weights[:tokens]
        )
        _agree(few, _open(few)(few.x, few.topk_ids, few.topk_weights))


ROWS = (0, 1, 63, 64, 65, 96, 97, 128, 129, 190, 192, 193, 0, 256, 257, 400)
"""Of each expert: tiles of one to four chunks of 64, full, half full and not, two tiles, no rows."""
SHAPES: dict[str, tuple[dict[str, int], ...]] = {
    "e4m3": ({}, {"hidden": 256, "intermediate": 128}, {"hidden": 1280, "intermediate": 896}),
    **dict.fromkeys(("block128", "token", "bf16"), ({}, {"hidden": 256, "intermediate": 256})),
}


@pytest.mark.parametrize(("recipe", "shape"), [(r, shape) for r in SHAPES for shape in SHAPES[r]], ids=str)
def test_prefill_tiles_of_every_number_of_rows(recipe: str, shape: dict[str, int]) -> None:
    layer = _layer_of_rows(recipe, ROWS, shape)
    _agree(layer, _open(layer)(layer.x, layer.topk_ids, layer.topk_weights, torch.full_like(layer.x, torch.nan)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_do_not_depend_on_the_place_in_a_tile(recipe: str) -> None:
    """A token of experts with equal weights is in another chunk of each, multiplied with more or fewer others."""
    layer = _layer_of_rows(recipe, ROWS, {})
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        tensor = getattr(layer.weights, name)
        tensor.copy_(tensor[:1].clone().expand_as(tensor))
    output = _open(layer)(layer.x, layer.topk_ids, layer.topk_weights, torch.full_like(layer.x, torch.nan))
    _agree(layer, output)
    by_expert = output.split(ROWS)
    for rows, found in zip(ROWS, by_expert):
        if rows:
            assert_bytes_equal(found, by_expert[-1][-rows:], f"{rows} rows")


def _layer_of_rows(recipe: str, rows: tuple[int, ...], shape: dict[str, int]) -> Layer:
    """So many tokens for each expert, each the last of the same list."""
    layer = _layer(recipe, max(rows), num_experts=len(rows), top_k=1, **shape)
    token = torch.cat([torch.arange(max(rows) - count, max(rows)) for count in rows]).to("cuda")
    expert = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).to(layer.topk_ids)
    return dataclasses.replace(
        layer, x=layer.x[token], topk_ids=expert[:, None], topk_weights=layer.topk_weights[token]
    )


@pytest.mark.parametrize("recipe", ("block128", "token", "bf16"))
def test_weights_of_too_many_binades_keep_the_portable_kernels(recipe: str) -> None:
    layer = _layer(recipe, 20)
    assert layer.weights.w2_scale is not None
    layer.weights.w2_scale[2, 5, 1] = layer.weights.w2_scale[2, 5].min() - 12
    moe = _open(layer)
    assert _tier(moe) == "TritonLayer"
    _agree(layer, moe(layer.x, layer.topk_ids, layer.topk_weights))


@pytest.mark.parametrize(
    "options", [{"hidden": 384}, {"num_shared_experts": 1}, {"bias": True}, {"w13_layout": "interleaved"}], ids=str
)
@pytest.mark.parametrize("recipe", ("block128", "e4m3", "bf16"))
def test_what_the_tier_does_not_serve_runs_on_the_portable_kernels(recipe: str, options: dict[str, object]) -> None:
    layer = _layer(recipe, 20, **options)
    moe = _open(layer)
    assert _tier(moe) == "TritonLayer"
    _agree(layer, moe(layer.x, layer.topk_ids, layer.topk_weights))


@pytest.mark.parametrize("recipe", ("block128", "token"))
def test_two_shared_experts_run_on_the_portable_kernels(recipe: str) -> None:
    """They are one MLP of twice the width, whose row is rounded once."""
    layer = _layer(recipe, 20, num_shared_experts=2, shared_weight="e2m1")
    moe = _open(layer)
    assert _tier(moe) == "TritonLayer"
    _agree(layer, moe(layer.x, layer.topk_ids, layer.topk_weights))


def test_a_nan_of_the_shared_expert_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer("block128", 20, **SHARED)
    moe = _open(layer)
    monkeypatch.setenv("MEGAMOE_DEBUG", "1")
    moe(layer.x, layer.topk_ids, layer.topk_weights)
    moe._layer._weights.w2.row_scale[-1, 7] = torch.nan  # type: ignore[attr-defined]
    with pytest.raises(FloatingPointError, match="shared"):
        moe(layer.x, layer.topk_ids, layer.topk_weights)


@pytest.mark.parametrize("recipe", ("block128", "e4m3", "bf16"))
def test_the_first_nan_is_named(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(recipe, 20)
    moe = _open(layer)
    monkeypatch.setenv("MEGAMOE_DEBUG", "1")
    moe(layer.x, layer.topk_ids, layer.topk_weights)
    layer.x[7, 3] = torch.nan
    with pytest.raises(FloatingPointError, match="hidden_states: token 7"):
        moe(layer.x, layer.topk_ids, layer.topk_weights)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_another_gpu_than_the_current_one() -> None:
    layer = random_layer(RECIPES["block128"], tokens=20, device="cuda:1", **SHAPE)  # type: ignore[arg-type]
    with torch.cuda.device(0):
        moe = _open(layer)
        assert _tier(moe) == "HopperLayer"
        output = moe(layer.x, layer.topk_ids, layer.topk_weights)
        assert torch.cuda.current_device() == 0
    _agree(layer, output)
