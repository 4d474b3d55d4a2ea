"""Whole layers of sizes, strides and dtypes that are no multiples of anything convenient, through every K loop.

Sizes that a recipe's scale groups do not allow must be refused, with the number and the multiple. Padding must not
leak: a padded layer is the layer without padding, byte for byte. Workspace and output are poisoned first.
"""

import dataclasses

import pytest
import torch

import megamoe
from megamoe.kernels.layer import run_layer
from megamoe.oracle.dispatch_paths import PATHS, DispatchPath, configuration, poisoned_workspace, run_path
from megamoe.oracle.exact_sum import exact_sum_layer
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.public_arguments import call_arguments, weight_arguments
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import ALL_RECIPES, Recipe, traits
from megamoe.validation import size_multiples
from megamoe.weights import prepare

# One path for each K loop and each numerics' epilogue and combine.
LOOPS = (
    "fp8xfp4, E4M3 shared",
    "fp8xfp4 decoded, E4M3 shared",
    "nvfp4xnvfp4, shared",
    "fp8xfp8, shared",
    "fp8xfp4 token, E4M3 shared",
    "bf16xbf16, shared",
    "trtllm fp8xfp4, E4M3 shared",
    "trtllm fp8xfp8, shared",
    "bf16xfp4, shared",
)
SIZES = (2880, 2304, 2176, 768, 360)
"""gpt-oss's, and others that are no multiple of 512 or of 1024; 360 is an eighth of 2880."""


def _layer(path: DispatchPath, device: str, *, shared: bool = True, **options: object) -> Layer:
    """The smallest layer of the path; `options` change it. Top-2, plus a slot for a shared one under `trtllm_gen`."""
    multiple_of_h, multiple_of_i = size_multiples(path.recipe)
    count = 1 if shared and path.shared_weight else 0
    merged: dict = {
        "tokens": 4,
        "hidden": max(128, multiple_of_h),
        "intermediate": max(64, multiple_of_i),
        "num_experts": 3,
        "top_k": 2 + (count if path.recipe.numerics == "trtllm_gen" else 0),
        "num_shared_experts": count,
        "shared_weight": path.shared_weight if count else None,
        **options,
    }
    return random_layer(path.recipe, device=device, **merged)


def _with(layer: Layer, **changes: object) -> Layer:
    return dataclasses.replace(layer, **changes)  # type: ignore[arg-type]


def _with_weights(layer: Layer, **changes: torch.Tensor | None) -> Layer:
    return _with(layer, weights=dataclasses.replace(layer.weights, **changes))  # type: ignore[arg-type]


def _reference(layer: Layer) -> torch.Tensor:
    return moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec,
        parameters=layer.parameters, full_trace=False,
    ).y  # fmt: skip


def _agree(output: torch.Tensor, layer: Layer) -> None:
    problem = check(compare(output, _reference(layer)), LIMITS[layer.spec.recipe])
    assert problem is None, problem


def _allowed(names: tuple[str, ...], sizes: tuple[tuple[int, int], ...], *marks: pytest.MarkDecorator) -> list:
    """Parameters (name, H, I) for the sizes that the path's recipe allows; 0: the smallest there is, within reason."""
    found = []
    for name in names:
        multiple_of_h, multiple_of_i = size_multiples(PATHS[name].recipe)
        for hidden, intermediate in sizes:
            h, i = hidden or max(128, multiple_of_h), intermediate or max(64, multiple_of_i)
            if h % multiple_of_h == 0 and i % multiple_of_i == 0:
                found.append(pytest.param(name, h, i, id=f"{name}-{h}x{i}", marks=marks))
    return found


# The interpreter takes a tenth of a second for each tile and step of K. K / 32 is 3, 45, 90 and 68.
@pytest.mark.parametrize(
    ("name", "hidden", "intermediate"),
    [
        *_allowed(LOOPS, ((96, 96), (1440, 0), (0, 1440), (1152, 0))),
        *_allowed(
            ("fp8xfp4 decoded, E4M3 shared", "nvfp4xnvfp4, shared", "bf16xfp4, shared"), ((2880, 0),), pytest.mark.slow
        ),
        *_allowed(
            ("fp8xfp8, shared", "fp8xfp4 token, E4M3 shared"), ((2176, 0), (0, 2304), (2880, 0)), pytest.mark.slow
        ),
    ],
)
def test_sizes(name: str, hidden: int, intermediate: int, device: str) -> None:
    path = PATHS[name]
    sizes = {"hidden": hidden, "intermediate": intermediate}
    layer = _layer(path, device, shared=False, tokens=2, num_experts=2, top_k=1, **sizes)
    layer = _with(layer, topk_ids=torch.ones_like(layer.topk_ids))
    _agree(run_path(layer, path, device), layer)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "hidden", "intermediate"),
    _allowed(
        tuple(PATHS),
        ((2880, 2880), (2880, 2944), (2176, 768), (768, 2176), (2304, 1408), (2432, 1536), (3584, 384)),
    ),
)
def test_sizes_of_checkpoints(name: str, hidden: int, intermediate: int, device: str) -> None:
    path = PATHS[name]
    sizes = {"hidden": hidden, "intermediate": intermediate}
    layer = _layer(path, device, tokens=70, num_experts=6, masked=0.1, activation_clamp=7.0, **sizes)
    _agree(run_path(layer, path, device), layer)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", (5121, 8192, 16384))
@pytest.mark.parametrize("name", PATHS)
def test_many_tokens(name: str, tokens: int, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device, tokens=tokens, hidden=768, intermediate=384, num_experts=7)
    output = run_path(layer, path, device)
    assert output.isfinite().all()
    last = torch.arange(tokens - 64, tokens, device=device)
    expected = moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec,
        parameters=layer.parameters, tokens=last, full_trace=False,
    ).y  # fmt: skip
    problem = check(compare(output[-64:], expected), LIMITS[path.recipe])
    assert problem is None, problem


@pytest.mark.parametrize("tokens", (1, 8, 16, 63))
@pytest.mark.parametrize("name", ("fp8xfp4 decoded, E4M3 shared", "fp8xfp8, shared", "bf16xfp4, shared"))
def test_fewer_tokens_than_a_tile_has_rows(name: str, tokens: int, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device, tokens=tokens, num_experts=2)
    _agree(run_path(layer, path, device), layer)


def _empty_weights(recipe: Recipe, hidden: int, intermediate: int) -> dict[str, torch.Tensor | None]:
    """Weights of one expert with rounded-up scales; nobody gets to read them."""
    row = traits(recipe)
    dtype = {"e2m1": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}[row.weight]
    weights: dict[str, torch.Tensor | None] = {}
    for name, rows, columns in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
        weights[name] = torch.empty(1, rows, columns // (2 if row.weight == "e2m1" else 1), dtype=dtype)
        weights[f"{name}_scale"] = None
        if row.weight_scale_format is not None:
            group_rows, group_columns = row.weight_group
            scale_dtype = torch.float32 if row.weight_scale_format == "fp32" else torch.uint8
            shape = (1, -(-rows // group_rows), -(-columns // group_columns))
            weights[f"{name}_scale"] = torch.empty(shape, dtype=scale_dtype)
    return weights


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_sizes_are_served_or_refused_with_the_multiple(recipe: Recipe, size: int) -> None:
    for index, name in enumerate(("H (hidden)", "I (intermediate)")):
        multiples = size_multiples(recipe)
        sizes = list(multiples)  # the other size is the smallest there is
        sizes[index] = size
        weights = _empty_weights(recipe, *sizes)
        if size % multiples[index] == 0:
            prepared = megamoe.prepare_weights(**weights, **vars(recipe))  # type: ignore[arg-type]
            assert (prepared.hidden, prepared.intermediate) == tuple(sizes)
            continue
        with pytest.raises(ValueError, match=r"multiple") as refusal:
            megamoe.prepare_weights(**weights, **vars(recipe))  # type: ignore[arg-type]
        for part in (name, str(size), str(multiples[index])):
            assert part in str(refusal.value)


REAL, PADDED = 360, 384
"""Columns of the intermediate that a rank of 8 has of gpt-oss's 2880, and the next multiple of every scale group."""


def _one(scale: torch.Tensor, recipe: Recipe) -> float:
    if scale.dtype == torch.float32:
        return 1.0
    return 0x38 if recipe.mma_type == "nvfp4xnvfp4" else 127  # UE4M3, UE8M0


def _blank(name: str, tensor: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The tensor of a padded layer with zero weights, zero bias and scales of 1 where only padding is."""
    tensor = tensor.clone()
    value = _one(tensor, recipe) if name.endswith("_scale") else 0
    if "w13" in name:
        halves = tensor.unflatten(-1 if name.endswith("_bias") else -2, (2, -1))
        rows = halves.shape[-1] if name.endswith("_bias") else halves.shape[-2]
        first = -(-REAL * rows // PADDED)  # blocks of 128 rows hold some real ones, all of them
        (halves[..., first:] if name.endswith("_bias") else halves[..., first:, :]).fill_(value)
    elif not name.endswith("_bias"):
        first = -(-REAL * tensor.shape[-1] // PADDED)
        tensor.view(torch.uint8 if tensor.dtype == torch.float8_e4m3fn else tensor.dtype)[..., first:].fill_(value)
    return tensor


def _cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor of the layer that never was padded."""
    if name.endswith("w13_bias"):
        return tensor.unflatten(-1, (2, -1))[..., :REAL].flatten(-2)
    if "w13" in name:
        halves = tensor.unflatten(-2, (2, -1))
        return halves[..., : -(-REAL * halves.shape[-2] // PADDED), :].flatten(-3, -2)
    return tensor if name.endswith("_bias") else tensor[..., : -(-REAL * tensor.shape[-1] // PADDED)].contiguous()


def _padded_and_cut(layer: Layer) -> tuple[Layer, Layer]:
    """`layer`, 384 columns wide, with the last 24 of each expert blank, and the same with 360 columns."""
    named = {
        field.name: getattr(layer.weights, field.name)
        for field in dataclasses.fields(PlainWeights)
        if "w13" in field.name or "w2" in field.name
    }
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    blank = {name: _blank(name, tensor, layer.spec.recipe) for name, tensor in tensors.items()}
    cut = _with_weights(layer, **{name: _cut(name, tensor) for name, tensor in blank.items()})
    return _with_weights(layer, **blank), _with(cut, spec=dataclasses.replace(layer.spec, intermediate=REAL))


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_padded_intermediate_is_the_layer_without_padding(path: DispatchPath, device: str) -> None:
    """The tail of 24 blank columns shares a scale group with real ones; scratch holds NaN where nothing is written."""
    layer = exact_sum_layer(
        path.recipe,
        tokens=3,
        hidden=128,
        intermediate=PADDED,
        num_experts=2,
        top_k=1 + (path.recipe.numerics == "trtllm_gen" and path.shared_weight is not None),
        num_shared_experts=1 if path.shared_weight else 0,
        shared_weight=path.shared_weight,
        device=device,
    )
    padded, cut = _padded_and_cut(layer)
    output = run_path(padded, path, device)
    assert output.any(dim=1).all()
    assert_bytes_equal(output, _reference(cut), "the padded layer against one of 360 columns")
    assert not torch.equal(output, _reference(layer)), "the columns that were blanked would have been felt"


@pytest.mark.parametrize("name", ("fp8xfp4", "trtllm fp8xfp4", "bf16xfp4, shared"))
def test_padding_stays_zero_under_bias_and_beta(name: str, device: str) -> None:
    """up + beta is not 0 in a blank column: its gate must be."""
    path = PATHS[name]
    layer = _layer(
        path, device, shared=False, tokens=2, num_experts=2, top_k=1, intermediate=PADDED,
        bias=True, activation="swigluoai", activation_clamp=7.0,
    )  # fmt: skip
    padded, cut = _padded_and_cut(layer)
    problem = check(compare(run_path(padded, path, device), _reference(cut)), LIMITS[path.recipe])
    assert problem is None, problem


def _of_many_experts(path: DispatchPath, device: str, num_experts: int, **options: object) -> Layer:
    """Expert e has the weights of pattern e mod 7; ids name the first and the last expert, and some between."""
    few = _layer(path, device, num_experts=min(num_experts, 7), **options)
    pattern = torch.arange(num_experts, device=device) % 7
    weights = {name: getattr(few.weights, name) for name in ("w13", "w13_scale", "w2", "w2_scale")}
    many = {name: None if t is None else t.view(t.dtype)[pattern] for name, t in weights.items()}
    spec = dataclasses.replace(few.spec, num_experts=num_experts)
    routed = spec.top_k - spec.shared_slots
    chosen = torch.linspace(0, num_experts - 1, few.x.shape[0] * routed, device=device).round().int().view(-1, routed)
    shared = num_experts + torch.arange(spec.shared_slots, dtype=torch.int32, device=device).expand(len(chosen), -1)
    return _with_weights(_with(few, spec=spec, topk_ids=torch.cat([chosen, shared], dim=1)), **many)


@pytest.mark.parametrize("num_experts", (1, 3, 6))
@pytest.mark.parametrize("name", LOOPS)
def test_few_experts(name: str, num_experts: int, device: str) -> None:
    path = PATHS[name]
    layer = _of_many_experts(path, device, num_experts, tokens=3, top_k=1 + _shared_slots(path))
    _agree(run_path(layer, path, device), layer)


def _shared_slots(path: DispatchPath) -> int:
    return int(path.recipe.numerics == "trtllm_gen" and path.shared_weight is not None)


MANY = (160, 257, 384, 896)
# The interpreter runs the routing of three experts at a time; test_routing.py does it for 1024.
INTERPRETED = {("fp8xfp4", 160): (), ("bf16xfp4, shared", 257): pytest.mark.slow}


@pytest.mark.parametrize(
    ("name", "num_experts"),
    [
        pytest.param(name, count, id=f"{name}-{count}", marks=INTERPRETED.get((name, count), pytest.mark.gpu))
        for name in ("fp8xfp4", *LOOPS)
        for count in MANY
    ],
)
def test_many_experts(name: str, num_experts: int, device: str) -> None:
    path = PATHS[name]
    tokens = 2 if device == "cpu" else 200
    layer = _of_many_experts(path, device, num_experts, tokens=tokens, top_k=1 + _shared_slots(path))
    _agree(run_path(layer, path, device), layer)


@pytest.mark.parametrize("expert_map", (False, True), ids=("offset", "map"))
@pytest.mark.parametrize("num_experts", MANY)
@pytest.mark.parametrize("name", ("fp8xfp8, shared", "trtllm fp8xfp4, E4M3 shared"))
def test_two_experts_of_many(name: str, num_experts: int, expert_map: bool, device: str) -> None:
    """A rank with the last two of many, or with any two."""
    path = PATHS[name]
    here = {"expert_map": True} if expert_map else {"local_expert_offset": num_experts - 2}
    layer = _layer(path, device, num_experts=num_experts, local_experts=2, **here)
    ids = layer.topk_ids.clone()
    ids[0, 0], ids[1, 0], ids[2, 0] = num_experts - 1, num_experts - 2, 0
    if layer.parameters.expert_map is not None:
        ids[:2, 0] = (layer.parameters.expert_map >= 0).nonzero().flatten().int()
    layer = _with(layer, topk_ids=ids)
    _agree(run_path(layer, path, device), layer)


def _in_wider_rows(x: torch.Tensor, left: int, right: int) -> torch.Tensor:
    wide = torch.full((x.shape[0], left + x.shape[1] + right), torch.nan, dtype=x.dtype, device=x.device)
    view = wide[:, left : left + x.shape[1]]
    view.copy_(x)
    return view


def _every_other_row(x: torch.Tensor) -> torch.Tensor:
    tall = torch.full((2 * x.shape[0], x.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    tall[::2] = x
    return tall[::2]


STRIDED = {
    "wider rows": lambda x: _in_wider_rows(x, 0, 24),
    "a start off 16 bytes": lambda x: _in_wider_rows(x, 3, 2),
    "every other row": _every_other_row,
}


@pytest.mark.parametrize("rows", STRIDED)
@pytest.mark.parametrize("name", ("fp8xfp4, E4M3 shared", "nvfp4xnvfp4, shared", "bf16xfp4, shared"))
def test_strided_hidden_states(name: str, rows: str, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device)
    strided = _with(layer, x=STRIDED[rows](layer.x))
    assert not strided.x.is_contiguous()
    assert_bytes_equal(run_path(strided, path, device), run_path(layer, path, device), rows)


@pytest.mark.parametrize("name", ("fp8xfp4, E4M3 shared", "fp8xfp8, shared"))
def test_one_row_for_every_token(name: str, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device)
    expanded = _with(layer, x=layer.x[1:2].expand_as(layer.x))
    repeated = _with(layer, x=layer.x[1:2].repeat(len(layer.x), 1))
    assert expanded.x.stride(0) == 0
    assert_bytes_equal(run_path(expanded, path, device), run_path(repeated, path, device), "output")


@pytest.mark.parametrize("name", LOOPS)
def test_experts_that_share_one_memory(name: str, device: str) -> None:
    """Stride 0 along the experts, in weights and scales, shared slots too."""
    path = PATHS[name]
    layer = _layer(path, device)
    three_d = [
        field
        for field, tensor in vars(layer.weights).items()
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and tensor.shape[0] == 3
    ]
    first = {field: getattr(layer.weights, field)[1:2] for field in three_d}
    expanded = _with_weights(layer, **{field: t.expand(3, -1, -1) for field, t in first.items()})
    repeated = _with_weights(layer, **{field: t.repeat(3, 1, 1) for field, t in first.items()})
    assert expanded.weights.w2.stride(0) == 0
    assert_bytes_equal(run_path(expanded, path, device), run_path(repeated, path, device), "output")


OUTPUTS = {
    "columns of wider rows": (slice(None), slice(16, -24), (0, 40)),
    "rows of a taller buffer": (slice(2, -3), slice(None), (5, 0)),
    "the middle of a larger buffer": (slice(1, -1), slice(1, -1), (2, 2)),
}


@pytest.mark.parametrize("where", OUTPUTS)
@pytest.mark.parametrize("name", ("fp8xfp8, shared", "bf16xfp4, shared"))
def test_an_output_inside_a_larger_buffer(name: str, where: str, device: str) -> None:
    path = PATHS[name]
    layer = _layer(path, device)
    rows, columns, (more_rows, more_columns) = OUTPUTS[where]
    tokens, hidden = layer.x.shape
    buffer = torch.full((tokens + more_rows, hidden + more_columns), torch.nan, dtype=torch.bfloat16, device=device)
    expected = buffer.clone()
    expected[rows, columns] = run_path(layer, path, device)
    config = configuration(layer, path, device, tokens)
    run_layer(
        layer.x, layer.topk_ids, layer.topk_weights, buffer[rows, columns],
        ws=poisoned_workspace(layer, tokens, config, device), weights=prepare(layer.weights, path.recipe),
        spec=layer.spec, config=config, parameters=layer.parameters,
    )  # fmt: skip
    assert_bytes_equal(buffer, expected, "the buffer")


@pytest.mark.parametrize("mapped", (False, True), ids=("all experts", "a map"))
@pytest.mark.parametrize("name", ("fp8xfp4, E4M3 shared", "trtllm fp8xfp4, E4M3 shared"))
def test_ids_of_either_width(name: str, mapped: bool, device: str) -> None:
    """The upper half of an int64 id counts: 2^32 names no expert."""
    path = PATHS[name]
    layer = _layer(path, device, **({"num_experts": 5, "local_experts": 3, "expert_map": True} if mapped else {}))
    expected = run_path(layer, path, device)
    assert_bytes_equal(run_path(_with(layer, topk_ids=layer.topk_ids.long()), path, device), expected, "int64 ids")
    masked = layer.topk_ids.clone()
    masked[1, 0] = -1
    wide = layer.topk_ids.long()
    wide[1, 0] += 1 << 32
    assert_bytes_equal(
        run_path(_with(layer, topk_ids=wide), path, device),
        run_path(_with(layer, topk_ids=masked), path, device),
        "an id beyond 32 bits and −1",
    )


@pytest.mark.parametrize("tokens", (1, 2))
@pytest.mark.parametrize("recipe", [recipe for recipe in ALL_RECIPES if traits(recipe).weight_scale_format], ids=str)
def test_scales_that_are_transposed_views(recipe: Recipe, tokens: int, device: str) -> None:
    path = DispatchPath(recipe)
    layer = _layer(path, device, tokens=tokens, hidden=384, top_k=1)
    names = ("w13_scale", "w2_scale")
    views = {name: getattr(layer.weights, name).mT.contiguous().mT for name in names}
    assert not views["w13_scale"].is_contiguous()
    output = megamoe.mega_moe(**{**call_arguments(layer), **views})
    assert_bytes_equal(output, megamoe.mega_moe(**call_arguments(layer)), "output")
    _agree(output, layer)
    prepared = megamoe.prepare_weights(**{**weight_arguments(layer), **views})
    for mine, theirs in zip(prepared.routed, megamoe.prepare_weights(**weight_arguments(layer)).routed):
        assert mine is not None
        assert theirs is not None
        assert_bytes_equal(mine.contiguous(), theirs.contiguous(), "prepared weights")
