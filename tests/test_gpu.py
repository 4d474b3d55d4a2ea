"""What only a GPU shows: graph capture, allocation, concurrency of sizes, offsets beyond 2^31 elements."""

import pytest
import torch

import megamoe
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.public_arguments import layer_arguments, weight_arguments
from megamoe.oracle.random_layers import Layer, random_inputs, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.recipe import ALL_RECIPES, Recipe

pytestmark = pytest.mark.gpu

RECIPES = {str(recipe): recipe for recipe in ALL_RECIPES}
FP8XFP4 = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
FP8 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
SHAPE = dict(hidden=1024, intermediate=512, num_experts=9, top_k=3, num_shared_experts=1, activation_clamp=5.0)


def _layer(recipe: Recipe, tokens: int, **changes: int) -> tuple[Layer, megamoe.MegaMoE]:
    layer = random_layer(recipe, tokens=tokens, device="cuda", **{**SHAPE, **changes})  # type: ignore[arg-type]
    weights = megamoe.prepare_weights(**weight_arguments(layer))
    return layer, megamoe.MegaMoE(weights, tokens, layer.spec.top_k, **layer_arguments(layer))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_one_graph_serves_changed_inputs(recipe: Recipe) -> None:
    layer, serve = _layer(recipe, 200)
    generator = torch.Generator("cuda").manual_seed(3)
    others = [random_inputs(layer.spec, 200, generator, masked=share) for share in (0.0, 0.5, 1.0)]
    expected = [serve(i.x, i.topk_ids, i.topk_weights) for i in others]
    output = torch.full_like(layer.x, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        serve(layer.x, layer.topk_ids, layer.topk_weights, output)
    for i, wanted in zip(others, expected):
        layer.x.copy_(i.x)
        layer.topk_ids.copy_(i.topk_ids)
        layer.topk_weights.copy_(i.topk_weights)
        output.fill_(torch.nan)
        graph.replay()
        assert_bytes_equal(output, wanted, "replayed output")


def test_graphs_of_two_sizes_share_one_workspace() -> None:
    layer, serve = _layer(FP8XFP4, 130)
    serve.warmup([7, 130])
    graphs = {}
    for n in (130, 7):
        output = torch.full_like(layer.x[:n], torch.nan)
        graphs[n] = torch.cuda.CUDAGraph(), output
        with torch.cuda.graph(graphs[n][0]):
            serve(layer.x[:n], layer.topk_ids[:n], layer.topk_weights[:n], output)
    expected = serve(layer.x, layer.topk_ids, layer.topk_weights)
    for n in (7, 130, 130, 7):
        graph, output = graphs[n]
        output.fill_(torch.nan)
        graph.replay()
        assert_bytes_equal(output, expected[:n], f"{n} tokens")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_warm_call_allocates_nothing_and_does_not_synchronize(recipe: Recipe) -> None:
    layer, serve = _layer(recipe, 64)
    output = torch.empty_like(layer.x)
    serve.warmup([64])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        serve(layer.x, layer.topk_ids, layer.topk_weights, output)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_hundred_runs_are_bitwise_equal(recipe: Recipe) -> None:
    for tokens in (127, 128, 129):
        layer, serve = _layer(recipe, tokens)
        first = serve(layer.x, layer.topk_ids, layer.topk_weights)
        for _ in range(100):
            assert torch.equal(serve(layer.x, layer.topk_ids, layer.topk_weights), first)


def test_last_expert_of_more_than_2_to_the_31_weights() -> None:
    recipe = FP8
    layer, serve = _layer(recipe, 5, hidden=4096, intermediate=1024, num_experts=260, top_k=1, num_shared_experts=0)
    assert layer.weights.w13.numel() > 2**31
    ids = torch.full_like(layer.topk_ids, 259)
    expected = moe_layer(layer.x, ids, layer.topk_weights, layer.weights, layer.spec, full_trace=False).y
    problem = check(compare(serve(layer.x, ids, layer.topk_weights), expected), LIMITS[recipe])
    assert problem is None, problem


def test_last_rows_of_one_matrix_of_more_than_2_to_the_31_bytes() -> None:
    """A dense shared MLP is one matrix: E4M3 [2·I·S, H] beside MXFP4 experts."""
    recipe = FP8XFP4
    layer, serve = _layer(recipe, 3, hidden=16384, intermediate=4096, num_experts=1, top_k=1, num_shared_experts=17)
    assert layer.weights.shared_w13 is not None
    assert layer.weights.shared_w13.numel() > 2**31
    output = serve(layer.x, layer.topk_ids, layer.topk_weights)
    inputs = (layer.x, layer.topk_ids, layer.topk_weights)
    expected = moe_layer(*inputs, layer.weights, layer.spec, full_trace=False).y
    problem = check(compare(output, expected), LIMITS[recipe])
    assert problem is None, problem


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_last_tokens_of_more_than_2_to_the_31_elements(recipe: Recipe) -> None:
    tokens, judged = 540_000, 32
    top_k = 2 if recipe.numerics == "trtllm_gen" else 1  # there one slot is the shared expert's
    layer, serve = _layer(recipe, tokens, hidden=4096, intermediate=128, num_experts=2, top_k=top_k)
    assert layer.x.numel() > 2**31
    output = torch.full_like(layer.x, torch.nan)
    serve(layer.x, layer.topk_ids, layer.topk_weights, output)
    last = torch.arange(tokens - judged, tokens, device="cuda")
    inputs = (layer.x, layer.topk_ids, layer.topk_weights)
    expected = moe_layer(
        *inputs, layer.weights, layer.spec, parameters=layer.parameters, tokens=last, full_trace=False
    ).y
    problem = check(compare(output[-judged:], expected), LIMITS[recipe])
    assert problem is None, problem
    assert not output.isnan().any()
