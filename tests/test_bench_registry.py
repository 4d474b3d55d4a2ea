"""What can be asked of the bench, and what it counts: shapes, tokens, routings, work."""

from pathlib import Path

import pytest
import torch

from megamoe.bench import registry
from megamoe.bench.backends import NAMES, find_backend
from megamoe.bench.layers import LayerStore, spec_of
from megamoe.bench.routings import ROUTINGS, expert_ids
from megamoe.bench.shapes import MODELS, ModelShape, load_shapes, parse_shape, with_shared
from megamoe.bench.work import LAYER_STAGES, STAGES, count_work, matrix_bytes
from megamoe.kernels.hopper.config import unsupported_reason
from megamoe.recipe import ALL_RECIPES, resolve_recipe, traits


def test_shape_from_the_command_line() -> None:
    assert parse_shape("H=512, I=256,E=4,K=2,S=1") == ModelShape("H=512,I=256,E=4,K=2,S=1", 512, 256, 4, 2, 1)
    shape = parse_shape("H=512,I=256,E=4,K=2,name=mine,activation_clamp=7,bias=1")
    assert isinstance(shape.activation_clamp, float)
    assert shape.bias is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H=512,I=256,E=4", "top_k is missing"),
        ("H=512,I=256,E=4,K=5", "top_k is 5; allowed: 1 … 4"),
        ("H=512,I=256,E=4,Q=2", "unknown 'Q'; allowed: H, I, E, K, S"),
        ("H=512,I", "'I' is not of the form NAME=VALUE"),
        ("H=big,I=256,E=4,K=2", "'H=big' is not a number"),
        ("H=64,I=256,E=4,K=2", "hidden is 64; allowed: 128"),
    ],
)
def test_a_bad_shape_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_shape(text)


def test_shapes_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "shapes.toml"
    file.write_text('[slice]\nlike = "deepseek-v4-flash"\nnum_experts = 32\n\n[own]\nhidden=256\nintermediate=128\n'
                    "num_experts=4\ntop_k=2\n")  # fmt: skip
    slice_, own = load_shapes(file)
    assert (slice_.name, slice_.hidden, slice_.num_experts, slice_.activation_clamp) == ("slice", 4096, 32, 10.0)
    assert own == ModelShape("own", 256, 128, 4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nlike='nobody'", r"\[a\]: like is 'nobody'; known models"),
        ("[a]\nhidden=256", "intermediate is missing"),
        ("a = 3", "'a' is not a table"),
        ("[a]\nH=256", r"\[a\]: unknown 'H'; allowed: like, hidden, intermediate, num_experts"),
        ("[a", "shapes.toml: not TOML"),
    ],
)
def test_a_bad_toml_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "shapes.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_shapes(file)


def test_token_counts() -> None:
    assert registry.find_tokens(["1,16", "64"]) == ([1, 16, 64], [])
    assert registry.find_tokens(["5-40", "8"]) == ([8, 16, 32], [])
    assert registry.find_tokens(["1-16384"])[0] == list(registry.TOKENS)
    tokens, problems = registry.find_tokens(["0", "x", "7", "3-1", "99999"])
    assert tokens == [7]
    assert [problem.split()[1] for problem in problems] == ["'0'", "'x'", "'3-1'", "'99999'"]


def test_names_are_found_or_named() -> None:
    models, problems = registry.find_models(["tiny", "llama", "tiny"])
    assert [model.name for model in models] == ["tiny"]
    assert problems == ["model 'llama' is unknown; known: " + ", ".join(MODELS)]
    recipes, problems = registry.find_recipes(["fp8xfp4", "fp8xfp8/block128", "fp9"])
    assert recipes == [resolve_recipe("fp8xfp4"), resolve_recipe("fp8xfp8")]
    assert problems[0].startswith("recipe 'fp9': mma_type='fp9' is unknown")
    assert registry.find_recipes(["served"])[0] == list(ALL_RECIPES)


def test_points_ascend_within_a_model() -> None:
    plan = registry.Plan((MODELS["tiny"], MODELS["qwen3-30b"]), (1, 4), (), (), (), shared=(0, 1))
    points = [(p.shape.name, p.shape.num_shared_experts, p.tokens) for p in plan.points()]
    assert points[:4] == [("tiny", 0, 1), ("tiny", 0, 4), ("tiny", 1, 1), ("tiny", 1, 4)]
    assert len(points) == 8


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings_choose_distinct_experts(routing: str) -> None:
    ids = expert_ids(routing, 512, 64, 6, torch.Generator().manual_seed(0))
    assert ids.dtype == torch.int32
    assert ids.shape == (512, 6)
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 64
    counts = ids.flatten().bincount(minlength=64)
    touched, largest = int((counts > 0).sum()), int(counts.max())
    if routing == "uniform":
        assert touched == 64
        assert largest < 100  # 48 expected
    elif routing == "zipf":
        assert largest > 300
        assert touched > 40
    else:
        assert touched == 6
        assert largest == 512


def test_an_unknown_routing_is_named() -> None:
    with pytest.raises(ValueError, match="routing is 'random'; allowed: uniform"):
        expert_ids("random", 4, 8, 2, torch.Generator())


def test_weight_bytes_are_the_formats() -> None:
    assert matrix_bytes(256, 512, traits(resolve_recipe("fp8xfp4"))) == 256 * 512 / 2 + 256 * 512 / 32
    assert matrix_bytes(256, 512, traits(resolve_recipe("fp8xfp8"))) == 256 * 512 + 4 * 2 * 4
    assert matrix_bytes(256, 512, traits(resolve_recipe("nvfp4xnvfp4"))) == 256 * 512 / 2 + 256 * 512 / 16


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_stages_add_up_to_the_layer(recipe: object) -> None:
    spec = spec_of(MODELS["deepseek-v4-flash"], recipe)  # type: ignore[arg-type]
    by_stage = {stage: count_work(spec, stage, 64, 200.0, 384.0) for stage in STAGES}
    layer = by_stage["layer"]
    inner = [work for stage, work in by_stage.items() if stage not in LAYER_STAGES]
    assert layer == by_stage["layer_with_plan"]
    assert layer.flops == sum(work.flops for work in inner) == 6 * 64 * 4096 * (6 * 2048 + spec.shared_intermediate)
    assert layer.weight_bytes == sum(work.weight_bytes for work in inner)
    assert layer.weight_bytes < layer.num_bytes < sum(work.num_bytes for work in inner)


def test_an_unknown_stage_is_named() -> None:
    spec = spec_of(MODELS["tiny"], ALL_RECIPES[0])
    with pytest.raises(ValueError, match="stage is 'gemm'; allowed: pre_dispatch"):
        count_work(spec, "gemm", 1, 1, 1)


@pytest.mark.parametrize(
    ("mma_type", "act_scale", "shared"),
    [
        ("fp8xfp4", "mx32", "e4m3"), ("fp8xfp4", "block128", "e2m1"), ("fp8xfp4", "token", "e2m1"),
        ("fp8xfp8", None, "e4m3"), ("mxf4xmxf4", None, "e2m1"), ("bf16xbf16", None, "bf16"),
    ],
)  # fmt: skip
def test_the_format_of_shared_experts(mma_type: str, act_scale: str | None, shared: str) -> None:
    recipe, shape = resolve_recipe(mma_type, act_scale), parse_shape("H=256,I=256,E=3,K=2,S=1")
    spec = spec_of(shape, recipe)
    assert spec.shared_weight == shared
    assert spec_of(with_shared(shape, 0), recipe).shared_weight is None
    weights = LayerStore(shape, torch.device("cpu")).plain(recipe, 1)
    assert weights.shared_weight == shared
    if act_scale in ("block128", "token"):
        assert unsupported_reason(spec, has_bias=False, has_id_map=False) is None, "the SM90 tier is what is measured"


@pytest.mark.parametrize("name", NAMES)
def test_every_contender_says_what_it_is(name: str) -> None:
    backend = find_backend(name)
    assert backend.name == name
    assert set(backend.stages) <= set(STAGES)
    assert "layer" in backend.stages
    for recipe in backend.recipes(ALL_RECIPES):
        assert backend.judge(recipe) in ALL_RECIPES


@pytest.mark.parametrize("name", NAMES)
def test_a_contender_declines_a_cpu_with_a_reason(name: str) -> None:
    backend = find_backend(name)
    point = registry.Point(MODELS["deepseek-v4-flash"], 8192, "uniform")
    for recipe in backend.recipes(ALL_RECIPES):
        reason = backend.unsupported_reason(point, recipe, torch.device("cpu"))
        assert reason is not None
        assert "\n" not in reason


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_a_shape_that_a_recipe_refuses_is_declined(name: str, device: str) -> None:
    backend = find_backend(name)
    point = registry.Point(ModelShape("odd", 192, 64, 4, 2), 2, "uniform")
    recipe = resolve_recipe("fp8xfp8")
    reason = backend.unsupported_reason(point, recipe, torch.device(device))
    assert reason == f"hidden=192 is not a multiple of 128, which {recipe} needs"
    assert backend.unsupported_reason(point, resolve_recipe("fp8xfp4"), torch.device(device)) is None
