"""What the SM90 tier serves and which tile it picks: pure, no GPU needed."""

import dataclasses

import pytest

from megamoe.deep_gemm.tier import tier_unsupported_reason
from megamoe.kernels.hopper.config import TILES, choose_tile, smallest_block_m, unsupported_reason
from megamoe.recipe import ALL_RECIPES, Recipe
from megamoe.spec import LayerSpec

E4M3 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
BF16 = Recipe("bf16xfp4", "none", "trtllm_gen")
FP8_MXFP4 = {Recipe("fp8xfp4", "block128", "deep_gemm_sm90"), Recipe("fp8xfp4", "token", "deep_gemm_sm90")}
SERVED = FP8_MXFP4 | {E4M3, BF16}


def _spec(recipe: Recipe, **options: object) -> LayerSpec:
    sizes = dict(hidden=4096, intermediate=2048, num_experts=256, top_k=6)
    return LayerSpec(recipe=recipe, **{**sizes, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_recipes(recipe: Recipe) -> None:
    reason = unsupported_reason(_spec(recipe), has_bias=False, has_id_map=False)
    assert (reason is None) == (recipe in SERVED)
    if reason is not None:
        assert str(recipe) in reason


@pytest.mark.parametrize(
    "mma_type, options, named",
    [
        ("fp8xfp8", {"hidden": 384}, "hidden=384 is not a multiple of 256"),
        ("fp8xfp8", {"intermediate": 192}, "intermediate=192 is not a multiple of 128"),
        ("fp8xfp4", {"intermediate": 384}, "intermediate=384 is not a multiple of 256"),
        ("fp8xfp8", {"num_shared_experts": 1, "shared_weight": "e4m3"}, "num_shared_experts=1; allowed beside E4M3"),
        ("fp8xfp4", {"num_shared_experts": 1, "shared_weight": "e4m3"}, "num_shared_experts=1 in e4m3; allowed"),
        ("fp8xfp4", {"num_shared_experts": 2, "shared_weight": "e2m1"}, "num_shared_experts=2; allowed: 0, 1"),
    ],
)
def test_reasons(mma_type: str, options: dict[str, object], named: str) -> None:
    spec = dataclasses.replace(_spec(Recipe(mma_type, "block128", "deep_gemm_sm90")), **options)
    assert named in str(unsupported_reason(spec, has_bias=False, has_id_map=False))


def test_shared_slots_are_not_served() -> None:
    reason = unsupported_reason(
        _spec(BF16, num_shared_experts=1, shared_weight="e2m1"), has_bias=False, has_id_map=False
    )
    assert "num_shared_experts=1, named by the router; allowed under trtllm_gen: 0" in str(reason)


@pytest.mark.parametrize("recipe", sorted(FP8_MXFP4, key=str), ids=str)
def test_one_shared_expert_in_the_routed_ones_format_is_served(recipe: Recipe) -> None:
    spec = _spec(recipe, num_shared_experts=1, shared_weight="e2m1")
    assert unsupported_reason(spec, has_bias=False, has_id_map=False) is None
    assert "num_shared_experts=1" in str(tier_unsupported_reason(spec, 90)), "gather puts no token into its rows"
    assert tier_unsupported_reason(_spec(recipe), 90) is None


@pytest.mark.parametrize("recipe", sorted(SERVED, key=str), ids=str)
def test_tiles_grow_with_the_rows_per_expert(recipe: Recipe) -> None:
    spec = _spec(recipe)
    chosen = [choose_tile(spec, tokens) for tokens in (1, 64, 256, 1024, 2048, 4096, 8192, 65536)]
    sizes = [tile.block_m for tile in chosen]
    assert sizes == sorted(sizes)
    kind = "bf16" if recipe == BF16 else spec.traits.weight
    assert {tile for _, tile in TILES[kind]} == set(chosen)
    assert min(sizes) == smallest_block_m(spec)
    for tile in chosen:
        assert len(tile.chunks) == 3 if tile.swapped else tile.chunks == (64,) * 4, "what the kernels are written for"
        assert tile.scale_box >= max(32, tile.block_m)
