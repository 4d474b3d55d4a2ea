"""The public API on the kernels: it is the reference's layer, on every recipe, whatever way it is called."""

import copy
import inspect
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megamoe
from megamoe import debug
from megamoe.kernels.epilogue import requantize_accumulators
from megamoe.kernels.layouts.gate_up import interleave_gate_up
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.public_arguments import call_arguments, layer_arguments, weight_arguments
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import activate, moe_layer, requantize
from megamoe.recipe import ALL_RECIPES, Recipe, traits
from megamoe.validation import size_multiples

T, H, E, K = 9, 128, 3, 2
BACKENDS = ("triton", "reference")
ROUTED = ("w13", "w13_scale", "w2", "w2_scale")
DEEP_GEMM = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
TRTLLM = Recipe("fp8xfp4", "mx32", "trtllm_gen")
SM90 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
NVFP4 = Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100")
NV16 = Recipe("nvfp4xnvfp4", "nv16", "trtllm_gen")
MXF4 = Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100")
EXPERT_PARALLEL = [
    {"num_experts": 8, "local_experts": E, "local_expert_offset": 2},
    {"num_experts": 8, "local_experts": E, "expert_map": True},
]


def _layer(recipe: Recipe, device: str, *, shared: int = 1, **options: object) -> Layer:
    """Top-2, and under `trtllm_gen` one slot more for each shared expert."""
    arguments = {
        "tokens": T,
        "hidden": H,
        "intermediate": math.lcm(64, size_multiples(recipe)[1]),
        "num_experts": E,
        "top_k": K + (shared if recipe.numerics == "trtllm_gen" else 0),
        **options,
    }
    return random_layer(recipe, num_shared_experts=shared, device=device, **{"seed": 7, **arguments})  # type: ignore[arg-type]


def _call(layer: Layer, backend: str = "triton", **options: object) -> torch.Tensor:
    """`mega_moe` on a layer, into a poisoned output unless `options` brings one."""
    output = {"output": torch.full_like(layer.x, torch.nan)}
    return megamoe.mega_moe(**{**call_arguments(layer), **output, "moe_backend": backend, **options})


def _prepared(layer: Layer, **options: bool) -> megamoe.MoEWeights:
    return megamoe.prepare_weights(**weight_arguments(layer), **options)


def _moe(layer: Layer, max_tokens: int = T, backend: str = "triton", **options: object) -> megamoe.MegaMoE:
    arguments = {**layer_arguments(layer), "moe_backend": backend, **options}
    return megamoe.MegaMoE(_prepared(layer), max_tokens, layer.spec.top_k, **arguments)


def _run(moe: megamoe.MegaMoE, layer: Layer, tokens: int = T) -> torch.Tensor:
    return moe(layer.x[:tokens], layer.topk_ids[:tokens], layer.topk_weights[:tokens])


def _reference(layer: Layer) -> torch.Tensor:
    return moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec, parameters=layer.parameters,
        full_trace=False,
    ).y  # fmt: skip


def _agrees(result: torch.Tensor, layer: Layer) -> None:
    problem = check(compare(result, _reference(layer)), LIMITS[layer.spec.recipe])
    assert problem is None, problem


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
        "moe_backend": None,
    }  # fmt: skip


def test_a_prepared_layer_takes_every_argument_that_is_no_weight() -> None:
    """And `prepare_weights` every one that is: together they are `mega_moe`'s."""
    names = [set(inspect.signature(f).parameters) for f in (megamoe.mega_moe, megamoe.prepare_weights, megamoe.MegaMoE)]
    mega_moe, prepare_weights, layer = names
    call = {"hidden_states", "topk_ids", "topk_weights", "output"}
    assert mega_moe - call == (prepare_weights - {"donate"}) | (layer - {"weights", "max_tokens", "top_k"})
    assert not prepare_weights & layer


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_one_call_and_a_prepared_layer_are_the_reference(recipe: Recipe, device: str) -> None:
    """Also: a prepared layer with room for more tokens, called twice, gives the bytes of the single call."""
    layer = _layer(recipe, device, activation_clamp=1.5)
    result = _call(layer)
    _agrees(result, layer)

    moe = _moe(layer, 2 * T)
    assert moe.backend == "triton"
    workspace = moe.workspace_bytes
    assert workspace > 2 * T * H // 2, "at least the quantized tokens"
    for _ in range(2):
        assert_bytes_equal(_run(moe, layer), result, "MegaMoE")
    assert_bytes_equal(_run(moe, layer, 4), result[:4], "the first tokens alone")
    assert moe.workspace_bytes == workspace


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_every_option_at_once_is_the_reference(recipe: Recipe, device: str) -> None:
    """Biases, global scales, per-expert numbers, interleaved rows, an expert map, factors: no argument is dropped."""
    is_trtllm = recipe.numerics == "trtllm_gen"
    layer = _layer(
        recipe, device, shared=2, tokens=5, num_experts=6, local_experts=E, expert_map=True, bias=True,
        global_scales=recipe.mma_type == "nvfp4xnvfp4", w13_layout="interleaved", activation="swigluoai",
        activation_alpha=1.3, activation_beta=0.7, activation_clamp=1.25, expert_scales=True, routed_scaling_factor=2.5,
        per_expert=("clamp", "alpha", "beta") if is_trtllm else (), masked=0.2,
    )  # fmt: skip
    result = _call(layer)
    _agrees(result, layer)
    assert_bytes_equal(_run(_moe(layer), layer, 5), result, "MegaMoE")
    for name in call_arguments(layer).keys() & {"expert_scales", "w13_bias", "w2_bias", "l1_alphas", "l2_act_scales"}:
        if call_arguments(layer)[name] is not None:
            assert not torch.equal(_call(layer, "reference", **{name: None}), _call(layer, "reference")), name


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_a_prepared_layer_on_the_reference_backend(recipe: Recipe, device: str) -> None:
    """The prepared byte order holds everything the plain weights held."""
    layer = _layer(recipe, device, bias=True)
    moe = _moe(layer, backend="reference")
    assert_bytes_equal(_run(moe, layer), _reference(layer), "output")
    plain = sum(t.numel() * t.element_size() for t in vars(layer.weights).values() if isinstance(t, torch.Tensor))
    assert moe.weight_bytes == plain
    assert moe.workspace_bytes == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", [DEEP_GEMM, SM90, TRTLLM], ids=str)
def test_routed_scaling_factor_leaves_shared_experts_at_one(recipe: Recipe, backend: str, device: str) -> None:
    layer = _layer(recipe, device, tokens=4)
    shared = layer.topk_ids >= E
    doubled = replace(layer, topk_weights=torch.where(shared, 1, 2) * layer.topk_weights)
    scaled = _call(layer, backend, routed_scaling_factor=2.0)
    assert_bytes_equal(scaled, _call(doubled, backend), "factor 2 and weights × 2")
    skipped = replace(layer, topk_ids=torch.where(shared, layer.topk_ids, -1))
    alone = _call(skipped, backend)
    assert alone.float().std() > 1e-3
    assert_bytes_equal(_call(skipped, backend, routed_scaling_factor=2.5), alone, "shared experts alone")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", [DEEP_GEMM, SM90], ids=str)
def test_expert_scales_multiply_the_top_k_weights(recipe: Recipe, backend: str, device: str) -> None:
    """By the expert's id; with the factor after them; ids beyond E read nothing."""
    layer = _layer(recipe, device, shared=0)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", EXPERT_PARALLEL, ids=["offset", "map"])
@pytest.mark.parametrize("recipe", [DEEP_GEMM, TRTLLM], ids=str)
def test_a_rank_computes_its_own_experts(recipe: Recipe, options: dict, backend: str, device: str) -> None:
    """Its result is that of a layer whose ids were made local by hand; expert_scales stay indexed by global id."""
    layer = _layer(recipe, device, expert_scales=True, **options)
    ids, local_ids = layer.topk_ids, torch.full_like(layer.topk_ids, -1)
    expert_map, scales = layer.parameters.expert_map, layer.parameters.expert_scales
    placed = torch.arange(8) - 2 if expert_map is None else expert_map
    for expert, local in enumerate(placed.tolist()):
        if 0 <= local < E:
            local_ids[ids == expert] = local
    local_ids[ids == 8] = E  # the shared slot
    assert (local_ids >= 0).any()
    assert (local_ids < 0).any()
    routed = ids < 8
    weights = torch.where(routed, layer.topk_weights * scales[torch.where(routed, ids, 0).long()], layer.topk_weights)  # type: ignore[index]
    by_hand = replace(layer, topk_ids=local_ids, topk_weights=weights)
    here = {"num_experts": None, "local_expert_offset": 0, "expert_map": None, "expert_scales": None}
    assert_bytes_equal(_call(layer, backend, check_ids=True), _call(by_hand, backend, **here), "output")


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_add_up_to_the_whole_layer(backend: str, device: str) -> None:
    """With one slot per token, each token is some rank's alone: the sum of the ranks' outputs is exact."""
    whole = _layer(DEEP_GEMM, device, shared=0, num_experts=6, top_k=1)
    total = torch.zeros_like(whole.x)
    for start in (0, 2, 4):
        mine = {name: getattr(whole.weights, name)[start : start + 2] for name in ROUTED}
        total += _call(whole, backend, **mine, local_expert_offset=start, num_experts=6)
    assert_bytes_equal(total, _call(whole, backend), "sum over ranks")


@dataclass(frozen=True)
class Clamp:
    """Clamps that must give the same bytes."""

    clamp: float | None
    same_as: float | None


@pytest.mark.parametrize("case", [Clamp(math.inf, None), Clamp(7, 7.0)], ids=str)
def test_spellings_of_a_clamp(case: Clamp, device: str) -> None:
    layer = _layer(SM90, device)
    assert_bytes_equal(_call(layer, activation_clamp=case.clamp), _call(layer, activation_clamp=case.same_as), "output")


@pytest.mark.parametrize("recipe", [DEEP_GEMM, SM90, TRTLLM], ids=str)
def test_a_clamp_of_zero_leaves_nothing(recipe: Recipe, device: str) -> None:
    """up = clamp(up, 0, 0): every expert's row is zero, and the sum of zeros is +0 or −0 + 0 = +0."""
    result = _call(_layer(recipe, device), activation_clamp=0)
    assert_bytes_equal(result, torch.zeros_like(result), "output")


@pytest.mark.parametrize("clamp", (3.38e38, 3.4e38))
@pytest.mark.parametrize("recipe", [DEEP_GEMM, MXF4, NVFP4, SM90], ids=str)
def test_a_limit_beyond_bf16_meets_nan_and_infinity(recipe: Recipe, clamp: float, device: str) -> None:
    """3.4e38 rounds to infinity in BF16: SM100 rules clamp nothing then, SM90's in fp32 still do. Gates of 32 have a
    sigmoid of 1."""
    up = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    gate = torch.full_like(up, 32.0)
    gate[0, 3], up[1, 5], gate[2, 7], up[3, 9] = math.nan, math.nan, math.inf, math.inf
    acc = interleave_gate_up(torch.cat((gate, up), dim=1), traits(recipe).tile_order, dim=1).to(device)
    q, sf = requantize_accumulators(acc, None, recipe, clamp=clamp)
    act = activate(gate, up, recipe.numerics, clamp)
    assert bool(act.isnan().any()) == (clamp > 3.39e38 and recipe.numerics == "deep_gemm_sm100")
    expected_q, expected_sf = requantize(act, recipe)
    assert sf is not None
    assert expected_sf is not None
    assert_bytes_equal(q.cpu(), expected_q, "elements")
    assert_bytes_equal(sf.cpu(), expected_sf, "scales")


def test_labels_of_bytes_do_not_matter(device: str) -> None:
    layer = _layer(DEEP_GEMM, device, shared_weight="e2m1")
    labels = {"w13": torch.int8, "w2": torch.int8, "w13_scale": torch.float8_e8m0fnu, "shared_w2": torch.int8}
    labelled = {name: getattr(layer.weights, name).view(dtype) for name, dtype in labels.items()}
    relabelled = replace(layer, weights=replace(layer.weights, **labelled))
    assert_bytes_equal(_call(relabelled), _call(layer), "output")

    layer = _layer(NVFP4, device)
    labelled = {
        name: getattr(layer.weights, name).view(torch.float8_e4m3fn)
        for name in ("w13_scale", "w2_scale", "shared_w13_scale", "shared_w2_scale")
    }
    relabelled = replace(layer, weights=replace(layer.weights, **labelled))
    assert_bytes_equal(_call(relabelled), _call(layer), "output")


def test_ids_of_either_width_and_strided_rows(device: str) -> None:
    layer = _layer(SM90, device)
    expected = _call(layer)
    assert_bytes_equal(_call(replace(layer, topk_ids=layer.topk_ids.long())), expected, "int64 ids")
    wide = torch.full((T, H + 24), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, :H] = layer.x
    assert_bytes_equal(_call(replace(layer, x=wide[:, :H])), expected, "strided rows")


def test_scales_of_any_strides_and_experts_that_share_memory(device: str) -> None:
    """A checkpoint may hold scales transposed; a bench may expand one expert to many."""
    layer = _layer(DEEP_GEMM, device, shared=0)
    transposed = replace(layer.weights, w13_scale=layer.weights.w13_scale.mT.contiguous().mT)
    assert not transposed.w13_scale.is_contiguous()
    expected = _call(layer)
    assert_bytes_equal(_call(replace(layer, weights=transposed)), expected, "a transposed view of the scales")

    one = {name: getattr(layer.weights, name)[:1] for name in ROUTED}
    expanded = replace(layer, weights=replace(layer.weights, **{n: t.expand(E, -1, -1) for n, t in one.items()}))
    repeated = replace(layer, weights=replace(layer.weights, **{n: t.repeat(E, 1, 1) for n, t in one.items()}))
    assert_bytes_equal(_call(expanded), _call(repeated), "expanded weights")
    layer = _layer(TRTLLM, device, shared=0)
    one = {name: getattr(layer.weights, name)[1:2] for name in ROUTED}
    expanded = replace(layer, weights=replace(layer.weights, **{n: t.expand(E, -1, -1) for n, t in one.items()}))
    repeated = replace(layer, weights=replace(layer.weights, **{n: t.repeat(E, 1, 1) for n, t in one.items()}))
    assert_bytes_equal(_run(_moe(expanded), layer), _call(repeated), "expanded weights")
    assert _moe(expanded).weight_bytes < _moe(repeated).weight_bytes, "nothing was expanded in memory"


def test_biases_may_be_bfloat16(device: str) -> None:
    layer = _layer(DEEP_GEMM, device, bias=True)
    w = layer.weights
    rounded = {name: getattr(w, name).bfloat16() for name in ("w13_bias", "w2_bias")}
    widened = {name: bias.float() for name, bias in rounded.items()}
    assert_bytes_equal(_call(layer, **rounded), _call(layer, **widened), "output")


@pytest.mark.parametrize("backend", BACKENDS)
def test_output_may_be_a_slice_of_something_larger(backend: str, device: str) -> None:
    layer = _layer(DEEP_GEMM, device)
    buffer = torch.full((T + 4, H + 40), torch.nan, dtype=torch.bfloat16, device=device)
    untouched = buffer.clone()
    output = buffer[2 : 2 + T, 16 : 16 + H]
    assert _call(layer, backend, output=output) is output
    expected = _call(layer, backend)
    assert_bytes_equal(output.contiguous(), expected, "the slice")
    buffer[2 : 2 + T, 16 : 16 + H] = torch.nan
    assert_bytes_equal(buffer, untouched, "around the slice")
    every_other = torch.full((2 * T, H), torch.nan, dtype=torch.bfloat16, device=device)
    _run_into = _moe(layer, backend=backend)(layer.x, layer.topk_ids, layer.topk_weights, every_other[::2])
    assert_bytes_equal(_run_into.contiguous(), expected, "every other row")
    assert every_other[1::2].isnan().all()


def test_output_is_the_given_tensor_and_may_be_the_input(device: str) -> None:
    layer = _layer(SM90, device)
    expected = _call(layer)
    x = layer.x.clone()
    assert _call(replace(layer, x=x), output=x) is x
    assert_bytes_equal(x, expected, "in place")
    assert_bytes_equal(_call(layer, output=None), expected, "allocated")


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str, device: str) -> None:
    layer = _layer(DEEP_GEMM, device)
    empty = replace(layer, x=layer.x[:0], topk_ids=layer.topk_ids[:0], topk_weights=layer.topk_weights[:0])
    assert _call(empty, backend, check_ids=True).shape == (0, H)
    moe = _moe(layer, backend=backend)
    assert moe(empty.x, empty.topk_ids, empty.topk_weights).shape == (0, H)


@pytest.mark.parametrize("recipe", [SM90, TRTLLM], ids=str)
def test_warmup_leaves_no_trace(recipe: Recipe, device: str) -> None:
    layer = _layer(recipe, device)
    moe = _moe(layer)
    moe.warmup([1, T])
    assert moe.skipped_ids == 0
    assert_bytes_equal(_run(moe, layer), _call(layer), "output after warm-up")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, *EXPERT_PARALLEL], ids=["all", "offset", "map"])
def test_ids_of_no_expert_are_counted(options: dict, backend: str, device: str) -> None:
    layer = _layer(TRTLLM, device, **options)
    moe = _moe(layer, backend=backend)
    assert moe.skipped_ids == 0, "before any call"
    _run(moe, layer)
    assert moe.skipped_ids == 0
    ids = layer.topk_ids.clone()
    total = layer.spec.num_experts
    ids[0, :3] = torch.tensor([-1, -2, total + 1])  # total is the shared slot
    ids[4, 0] = 2**31 - 1
    moe(layer.x, ids, layer.topk_weights)
    assert moe.skipped_ids == 3
    if options.get("expert_map"):
        layer.parameters.expert_map[ids[5, 0]] = E  # type: ignore[index]
        moe(layer.x, ids, layer.topk_weights)
        assert moe.skipped_ids == 3 + int((ids == ids[5, 0]).sum())


def test_the_most_experts_that_ids_may_name(device: str) -> None:
    layer = _layer(DEEP_GEMM, device)
    for backend in BACKENDS:
        _agrees(_call(layer, backend, num_experts=2**30), layer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_of_inference_mode(backend: str, device: str) -> None:
    layer = _layer(SM90, device)
    with torch.inference_mode():
        output = torch.full_like(layer.x, torch.nan)
    assert output.is_inference()
    assert_bytes_equal(_call(layer, backend, output=output).clone(), _call(layer, backend), "output")


@dataclass(frozen=True)
class Everywhere:
    """What a program may set for all of torch, as a context."""

    name: str
    dtype: torch.dtype = torch.float32
    device: str | None = None

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def set(self) -> Iterator[None]:
        torch.set_default_dtype(self.dtype)
        try:
            with nullcontext() if self.device is None else torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(torch.float32)


EVERYWHERE = [
    Everywhere("bfloat16", torch.bfloat16),
    Everywhere("float16", torch.float16),
    Everywhere("on meta", device="meta"),
]
ON_KERNELS = (DEEP_GEMM, SM90, NVFP4, NV16)


@pytest.mark.parametrize("backend, recipe", [
    *(("reference", recipe) for recipe in ALL_RECIPES), *(("triton", recipe) for recipe in ON_KERNELS)
], ids=str)  # fmt: skip
def test_torchs_defaults_change_nothing(backend: str, recipe: Recipe, device: str) -> None:
    """Default dtype and default device: no tensor in the path of a call takes them. The layer has numbers whose
    rounding to BF16 or FP16 would be felt."""
    trtllm = recipe.numerics == "trtllm_gen"
    layer = _layer(
        recipe, device, tokens=3, bias=True, activation="swigluoai", activation_alpha=1.3, activation_clamp=0.7,
        activation_beta=0.9, expert_scales=True, routed_scaling_factor=1.7,
        global_scales=trtllm or recipe.mma_type == "nvfp4xnvfp4",
    )  # fmt: skip
    moe = _moe(layer, backend=backend)
    expected = _run(moe, layer)
    for everywhere in EVERYWHERE:
        with everywhere.set():
            result = _run(moe, layer)
        assert_bytes_equal(result, expected, str(everywhere))
    with EVERYWHERE[0].set(), EVERYWHERE[-1].set():
        result = _call(layer, backend)
    assert_bytes_equal(result, expected, "prepared anew")


@pytest.mark.parametrize("everywhere", EVERYWHERE, ids=str)
@pytest.mark.parametrize("on_kernels", [True, False])
def test_torchs_defaults_change_no_quantizer(
    on_kernels: bool, everywhere: Everywhere, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_kernels:
        monkeypatch.setattr("megamoe.quantize.device_unsupported_reason", lambda device: "the reference, please")
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float32).bfloat16().to(device)
    for quantize in (
        megamoe.quantize_mxfp8, megamoe.quantize_mxfp4, megamoe.quantize_nvfp4, megamoe.quantize_fp8_block128
    ):  # fmt: skip
        expected = quantize(x, amax_floor=1.1e-3)
        with everywhere.set():
            result = quantize(x, amax_floor=1.1e-3)
        for got, wanted in zip(result, expected):
            assert_bytes_equal(got, wanted, f"{quantize.__name__}: {everywhere}")


def test_two_layers_share_nothing_but_their_weights(device: str) -> None:
    layer = _layer(DEEP_GEMM, device)
    weights = _prepared(layer)
    first, second = (megamoe.MegaMoE(weights, T, K) for _ in range(2))
    mine, its = (moe._layer._workspace.tensors() for moe in (first, second))  # type: ignore[attr-defined]
    assert {t.data_ptr() for t in mine.values()}.isdisjoint(t.data_ptr() for t in its.values())
    result = _run(first, layer)
    for tensor in its.values():
        tensor.view(torch.uint8).fill_(0xFF)
    assert_bytes_equal(_run(first, layer), result, "with the other's workspace poisoned")


def test_copies_of_a_layer(device: str) -> None:
    """`copy.deepcopy` and `torch.save` copy the workspace too, `copy.copy` shares it; graphs tell all of them apart."""
    layer = _layer(TRTLLM, device)
    moe = _moe(layer)
    expected = _run(moe, layer)
    stored = io.BytesIO()
    torch.save(moe, stored)
    stored.seek(0)
    copies = [copy.copy(moe), copy.deepcopy(moe), torch.load(stored, weights_only=False)]
    rows = [held._layer._workspace.rows.data_ptr() for held in (moe, *copies)]  # type: ignore[attr-defined]
    assert rows[0] == rows[1]
    assert len(set(rows)) == 3
    assert len({held._handle for held in (moe, *copies)}) == 4
    for held in copies:
        assert_bytes_equal(_run(held, layer), expected, "output")


WITH_GLOBAL_SCALES = [recipe for recipe in ALL_RECIPES if recipe.numerics == "trtllm_gen" or recipe == NVFP4]


@pytest.mark.parametrize(
    "recipe, activation", [*((recipe, "swigluoai") for recipe in WITH_GLOBAL_SCALES), (TRTLLM, "situ")], ids=str
)
def test_units_of_biases_clamp_and_beta(recipe: Recipe, activation: str, device: str) -> None:
    """Twice the tokens under half of l1_alphas is the same layer if w13_bias, clamp and beta double under `trtllm_gen`,
    and if they stay under DeepGEMM; half the top-k weights under twice l2_alphas, if w2_bias stays (doubles)."""
    trtllm = recipe.numerics == "trtllm_gen"
    layer = _layer(
        recipe, device, shared=0, bias=True, global_scales=True, activation=activation,
        **({} if activation == "situ" else {"activation_clamp": 0.75}),
    )  # fmt: skip
    beta = 0.5 if trtllm else None
    expected = _call(layer, "reference", activation_beta=beta)
    unit = 2.0 if trtllm else 1.0
    arguments = call_arguments(layer)
    clamp = arguments["activation_clamp"]
    changes = {
        "hidden_states": layer.x * 2,
        "topk_weights": layer.topk_weights / 2,
        "l1_alphas": arguments["l1_alphas"] / 2,
        "l2_alphas": arguments["l2_alphas"] * 2,
        "w13_bias": arguments["w13_bias"] * unit,
        "w2_bias": arguments["w2_bias"] * (1 if trtllm else 2),
        "activation_clamp": None if clamp is None else clamp * unit,
        "activation_beta": None if beta is None else beta * unit,
    }
    if not trtllm:  # the weight meets the activated values, whose scales it would move
        changes["l2_act_scales"] = arguments["l2_act_scales"] * 2
        changes["l2_alphas"] = arguments["l2_alphas"]
    assert_bytes_equal(_call(layer, "reference", **changes), expected, "output")


OVERWRITTEN = {
    DEEP_GEMM: {"w13", "w13_scale", "w2_scale", "shared_w13"},
    SM90: {"w13", "shared_w13"},
    TRTLLM: {"w13_scale", "w2_scale", "shared_w13_scale", "shared_w2_scale"},
}


@pytest.mark.parametrize("w13_layout", ["gate_up", "interleaved"])
@pytest.mark.parametrize("recipe", OVERWRITTEN, ids=str)
def test_what_donating_overwrites(recipe: Recipe, w13_layout: str, device: str) -> None:
    layer = _layer(recipe, device, hidden=256, intermediate=128, num_experts=4, w13_layout=w13_layout, bias=True)
    tensors = {name: t for name, t in vars(layer.weights).items() if isinstance(t, torch.Tensor)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    weights = _prepared(layer, donate=True)
    changed = {
        name for name, t in tensors.items() if not torch.equal(t.view(torch.uint8), before[name].view(torch.uint8))
    }
    assert changed == OVERWRITTEN[recipe] - ({"w13"} if w13_layout == "interleaved" else set())
    for name in ("w13_bias", "w2_bias"):
        assert getattr(weights, name).data_ptr() == tensors[name].data_ptr()


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
@pytest.mark.parametrize("w13_layout", ["gate_up", "interleaved"])
def test_donated_weights_are_reordered_where_they_are(recipe: Recipe, w13_layout: str, device: str) -> None:
    """Within one expert of a single copy; the result does not change. H and I need no padding of their scales."""
    layer = _layer(recipe, device, num_experts=8, w13_layout=w13_layout, tokens=3, intermediate=128)
    expected = _reference(layer)
    kept = {name: getattr(layer.weights, name).data_ptr() for name in ("w13", "w2", "shared_w13", "shared_w2")}
    with _PeakMemory() as peak:
        weights = _prepared(layer, donate=True)
    held = [weights.routed.w13, weights.routed.w2, weights.shared.w13, weights.shared.w2]  # type: ignore[union-attr]
    assert {tensor.data_ptr() for tensor in held} == set(kept.values())
    one_expert = layer.weights.w13[0].nbytes
    dense = 0 if layer.spec.shared_slots else layer.weights.shared_w13.nbytes  # type: ignore[union-attr]
    one_expert += layer.weights.w2[0].nbytes
    assert peak.bytes <= max(one_expert, dense), f"{peak.bytes} bytes, one expert has {one_expert}"
    moe = megamoe.MegaMoE(weights, T, layer.spec.top_k, **layer_arguments(layer), moe_backend="reference")
    assert_bytes_equal(_run(moe, layer), expected, "output")


class _PeakMemory(TorchDispatchMode):
    """Most bytes held at once by tensors made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        old = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in _tensors(result)):
            if storage._cdata not in old:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return result


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class NanCase:
    """A NaN put into `field` of the layer, its weights or its parameters, and where it must be found.

    `chosen` is the expert of token 6's slot 1, `first` the first of `count` tokens of expert 1, `all` how many there
    are.
    """

    recipe: Recipe
    field: str
    where: tuple[int, ...]
    words: str

    def __str__(self) -> str:
        return f"{self.recipe}: {self.field}"


NAN_CASES = [
    NanCase(SM90, "x", (6, 17), "hidden_states: token 6; 1"),
    NanCase(SM90, "topk_weights", (6, 1), "topk_weights: token 6, expert {chosen}; 1"),
    NanCase(SM90, "expert_scales", (1,), "expert_scales: token {first}, expert 1; {count}"),
    NanCase(SM90, "w13", (1, 3, 5), "w13: token {first}, expert 1; {count}"),
    NanCase(SM90, "w13_scale", (1, 0, 0), "w13_scale: token {first}, expert 1; {count}"),
    NanCase(SM90, "w2_scale", (1, 0, 0), "w2_scale: token {first}, expert 1; {count}"),
    NanCase(SM90, "shared_w13_scale", (0, 0), "shared_w13_scale: token 0; {all}"),
    NanCase(SM90, "shared_w2_scale", (0, 0), "shared_w2_scale: token 0; {all}"),
    # An E2M1 intermediate holds no NaN: only the weights tell.
    NanCase(MXF4, "w13_scale", (1, 2, 1), "w13_scale: token {first}, expert 1; {count}"),
    NanCase(MXF4, "shared_w2_scale", (5, 0), "shared_w2_scale: token 0; {all}"),
    NanCase(NVFP4, "w2_scale", (1, 2, 1), "w2_scale: token {first}, expert 1; {count}"),
    NanCase(NVFP4, "l1_alphas", (1, 0), "l1_alphas: token {first}, expert 1; {count}"),
    NanCase(TRTLLM, "w2_bias", (1, 0), "w2_bias: token {first}, expert 1; {count}"),
    NanCase(TRTLLM, "clamp", (1,), "activation_clamp: token {first}, expert 1; {count}"),
    NanCase(TRTLLM, "shared_w13_scale", (0, 3, 2), "shared_w13_scale: token 0, expert 3; {all}"),
]


def _with_nan(layer: Layer, case: NanCase) -> Layer:
    """The layer with that element NaN, in the tensor's own encoding."""
    part = next(part for part in (layer, layer.weights, layer.parameters) if hasattr(part, case.field))
    tensor = getattr(part, case.field).clone()
    if tensor.dtype in (torch.float8_e4m3fn, torch.uint8):
        tensor.view(torch.uint8)[case.where] = 0xFF  # NaN in E4M3, UE8M0 and, its sign bit aside, in UE4M3
    else:
        tensor[case.where] = torch.nan
    changed = replace(part, **{case.field: tensor})
    if part is layer:
        return changed
    return replace(layer, **{"weights" if part is layer.weights else "parameters": changed})


class TestDebug:
    """`MEGAMOE_DEBUG=1` and `check_ids`."""

    def test_an_illegal_id_is_named_by_token_and_slot(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = _layer(SM90, device)
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
            _moe(layer, check_ids=True)(layer.x, ids, layer.topk_weights, output)
        monkeypatch.setenv("MEGAMOE_DEBUG", "1")
        with pytest.raises(ValueError, match=message):
            _call(wild, output=output)
        assert_bytes_equal(output, before, "output")

    def test_legal_ids_are_global(self, device: str) -> None:
        """A shared slot's and another rank's are; one that the map sends nowhere is named with the map's value."""
        layer = _layer(TRTLLM, device, **EXPERT_PARALLEL[1])
        expected = _call(layer)
        assert_bytes_equal(_call(layer, check_ids=True), expected, "output")
        ids = layer.topk_ids.clone()
        ids[3, 0] = 9
        with pytest.raises(ValueError, match=r"topk_ids\[3, 0\] is 9 .*; allowed: -1 \(skip\) and 0..8; 1 illegal"):
            _call(replace(layer, topk_ids=ids), check_ids=True)
        layer.parameters.expert_map[layer.topk_ids[5, 1]] = 77  # type: ignore[index]
        with pytest.raises(ValueError, match=r"expert_map\[\d\] is 77; allowed: -1 and 0..2; \d+ illegal ids in all"):
            _call(layer, check_ids=True)

    @pytest.mark.parametrize(
        ("recipe", "backend"),
        [
            *((recipe, "reference") for recipe in ALL_RECIPES),
            *((recipe, "triton") for recipe in (MXF4, NVFP4, SM90, TRTLLM)),
        ],
        ids=str,
    )
    def test_a_sound_layer_passes_with_the_same_bytes(
        self, recipe: Recipe, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = _layer(recipe, device, bias=True, tokens=4)
        ids = layer.topk_ids.clone()
        ids[1, 0] = -1
        layer = replace(layer, topk_ids=ids)
        expected = _call(layer, backend)
        monkeypatch.setenv("MEGAMOE_DEBUG", "1")
        assert_bytes_equal(_call(layer, backend), expected, "output")

    @pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy's, in the interpreter
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("case", NAN_CASES, ids=str)
    def test_the_first_nan_is_named(
        self, case: NanCase, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = {"bias": True, "per_expert": ("clamp",)} if case.recipe is TRTLLM else {}
        nvfp4 = case.recipe is NVFP4
        layer = _layer(case.recipe, device, expert_scales=case.recipe is SM90, global_scales=nvfp4, **options)
        tokens = (layer.topk_ids == 1).nonzero()[:, 0]
        words = case.words.format(chosen=int(layer.topk_ids[6, 1]), first=int(tokens.min()), count=len(tokens), all=T)
        monkeypatch.setenv("MEGAMOE_DEBUG", "1")
        with pytest.raises(FloatingPointError) as caught:
            _call(_with_nan(layer, case), backend)
        assert str(caught.value) == f"first NaN in stage {words} rows in all"

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("options", EXPERT_PARALLEL, ids=["offset", "map"])
    def test_experts_are_named_by_the_callers_id(
        self, options: dict, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An overflow, which no input tells of: the first stage is GEMM 1's, the expert a global one."""
        layer = _layer(SM90, device, shared=0, **options)
        monkeypatch.setenv("MEGAMOE_DEBUG", "1")
        placed = torch.arange(8) - 2 if layer.parameters.expert_map is None else layer.parameters.expert_map
        expert = next(e for e in layer.topk_ids.flatten().tolist() if 0 <= placed[e] < E)
        layer.weights.w13_scale[placed[expert]] = 1e38
        words = rf"first NaN in stage gate_up: token \d, expert {expert}; \d rows"
        with pytest.raises(FloatingPointError, match=words):
            _call(layer, backend)

    @pytest.mark.parametrize("value", ["", "0"])
    def test_off(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MEGAMOE_DEBUG", value)
        assert not debug.enabled()


@pytest.mark.gpu
class TestCapture:
    @pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
    def test_a_graph_replayed_with_changed_inputs(self, recipe: Recipe, device: str) -> None:
        first = _layer(recipe, device)
        second = replace(first, x=first.x.flip(0), topk_ids=first.topk_ids.flip(0))
        moe = _moe(first)
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
        layer = _layer(DEEP_GEMM, device)
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
        layer = _layer(DEEP_GEMM, device)
        moe = megamoe.MegaMoE(_prepared(layer), T, K, check_ids=True)
        moe.warmup([T])
        output = torch.empty_like(layer.x)
        with (
            pytest.raises(RuntimeError, match="wait for the GPU, which a CUDA graph cannot record"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            moe(layer.x, layer.topk_ids, layer.topk_weights, output)


@pytest.mark.gpu
class TestDevicesAndStreams:
    def test_two_layers_on_two_streams(self, device: str) -> None:
        layers = [_layer(DEEP_GEMM, device, tokens=200, hidden=1024, seed=shift) for shift in (0, 1)]
        moes = [_moe(layer, 200) for layer in layers]
        expected = [moe(layer.x, layer.topk_ids, layer.topk_weights) for moe, layer in zip(moes, layers)]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        outputs: list[list[torch.Tensor]] = [[], []]
        for _ in range(50):
            for index, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    layer = layers[index]
                    outputs[index].append(moes[index](layer.x, layer.topk_ids, layer.topk_weights))
        torch.cuda.synchronize()
        for results, wanted in zip(outputs, expected):
            for result in results:
                assert_bytes_equal(result, wanted, "output")

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
    @pytest.mark.parametrize("recipe", [DEEP_GEMM, SM90], ids=str)
    def test_tensors_on_another_gpu_than_the_current_one(self, recipe: Recipe, device: str) -> None:
        layer = _layer(recipe, "cuda:1", activation_clamp=1.5)
        with torch.cuda.device(0):
            result = _call(layer)
            assert result.device == torch.device("cuda:1")
            moe = _moe(layer)
            moe.warmup([T])
            assert_bytes_equal(_run(moe, layer), result, "MegaMoE")
            assert torch.cuda.current_device() == 0
        _agrees(result, layer)

    def test_donated_weights_leave_no_second_copy(self, device: str) -> None:
        layer = _layer(DEEP_GEMM, device, shared=0, hidden=2048, intermediate=1024, num_experts=64, tokens=1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        weights = _prepared(layer, donate=True)
        peak = torch.cuda.max_memory_allocated() - before
        assert weights.routed.w13.data_ptr() == layer.weights.w13.data_ptr()
        assert peak <= layer.weights.w13[0].nbytes + layer.weights.w2[0].nbytes
