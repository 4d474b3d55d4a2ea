"""`megamoe.flashinfer`: weights as FlashInfer's own functions prepare them give the bytes of plain ones; given
activations are used as they are; every option against the reference; signatures against the wheel."""

import ast
import gc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe import flashinfer as drop_in
from megamoe.backends.base import LayerRequest, UnsupportedError
from megamoe.flashinfer import Fp8QuantizationType as Fp8
from megamoe.flashinfer import RoutingMethodType, pack_topk_ids, prepared_bytes
from megamoe.flashinfer import layer as flashinfer_layer
from megamoe.flashinfer.routing import Router, route
from megamoe.kernels.layouts import trtllm
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.oracle.metrics import LIMITS, assert_bytes_equal, check, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import Quantized, kind_of, quantize
from megamoe.oracle.reference.experts import slot_expert
from megamoe.oracle.reference.layer import combine, expert_mlp, slots_by_expert
from megamoe.oracle.reference.summation import matmul_fp64
from megamoe.oracle.trtllm_gen import flashinfer_layouts
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe
from megamoe.spec import LayerSpec
from megamoe.workspace import Workspace

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 4, 128, 128, 4, 2
MXFP4_MXFP8 = Recipe("fp8xfp4", "mx32", "trtllm_gen")
MXFP4_BF16 = Recipe("bf16xfp4", "none", "trtllm_gen")
NVFP4 = Recipe("nvfp4xnvfp4", "nv16", "trtllm_gen")
NVFP4_TOKEN = Recipe("nvfp4xnvfp4", "nv16_token", "trtllm_gen")
DEEPSEEK_FP8 = Recipe("fp8xfp8", "block128", "trtllm_gen")
MXFP8 = Recipe("mxfp8xmxfp8", "mx32", "trtllm_gen")
FP4 = (MXFP4_MXFP8, MXFP4_BF16, NVFP4, NVFP4_TOKEN)
ALL = (*FP4, MXFP8, DEEPSEEK_FP8)
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def root() -> Path:
    try:
        return flashinfer_layouts.locate(download=True)
    except OracleUnavailable as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Case:
    """A layer, its tokens as a caller hands them over, and its expected rows and output."""

    layer: Layer
    x: Quantized

    @property
    def recipe(self) -> Recipe:
        return self.layer.spec.recipe

    def expected(self, ids: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> torch.Tensor:
        ids = self.layer.topk_ids if ids is None else ids
        weights = self.layer.topk_weights if weights is None else weights
        return _reference(self.x, ids, weights, self.layer.weights, self.layer.spec, self.layer.parameters)

    def tokens(self) -> dict[str, Any]:
        q, sf, token_scale = self.x
        if self.recipe in (MXFP8, DEEPSEEK_FP8):
            assert sf is not None
            return dict(hidden_states=q, hidden_states_scale=sf.T.contiguous() if sf.dtype == torch.float32 else sf)
        scale = None if sf is None else sf.view(E4M3)
        return dict(hidden_states=q, hidden_states_scale=scale, per_token_scale=token_scale)

    def arguments(self, weights: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Of the routed function; `weights` from one of the makers below."""
        spec, p = self.layer.spec, self.layer.parameters
        routed = dict(
            topk_ids=(self.layer.topk_ids, self.layer.topk_weights), routing_bias=None,
            num_experts=spec.num_experts, top_k=spec.top_k, n_group=None, topk_group=None,
            intermediate_size=spec.intermediate, local_expert_offset=0, local_num_experts=spec.num_experts,
            routed_scaling_factor=None, gemm1_alpha=p.alpha, gemm1_beta=p.beta, gemm1_clamp_limit=p.clamp,
        )  # fmt: skip
        return routed | self.tokens() | weights | options

    def run(self, weights: dict[str, Any], **options: Any) -> Any:
        if self.recipe in FP4:
            return drop_in.trtllm_fp4_block_scale_routed_moe(**self.arguments(weights, **options))
        return drop_in.trtllm_fp8_block_scale_routed_moe(**self.arguments(weights, **options))

    def output(self, weights: dict[str, Any], **options: Any) -> torch.Tensor:
        """Into memory full of NaN."""
        shape = len(self.x.q), self.layer.spec.hidden
        output = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.x.q.device)
        result = self.run(weights, output=output, **options)
        returned = result[0] if self.recipe in FP4 else result
        assert returned is output
        return output


def _reference(
    x: Quantized, ids: torch.Tensor, weights: torch.Tensor, plain: PlainWeights, spec: LayerSpec, p: LayerParameters
) -> torch.Tensor:
    """The reference from the quantized tokens on."""
    ids = ids.long()
    valid = (ids >= 0) & (ids < spec.num_experts)
    rows = torch.full((*ids.shape, spec.hidden), torch.nan, dtype=torch.bfloat16, device=ids.device)
    for index, slots in slots_by_expert(ids, valid):
        token = slots // ids.shape[1]
        taken = Quantized(
            x.q.view(torch.uint8)[token].view(x.q.dtype),
            None if x.sf is None else x.sf[token],
            None if x.token_scale is None else x.token_scale[token],
        )
        expert = slot_expert(plain, p, spec, index)
        rows[token, slots % ids.shape[1]] = expert_mlp(taken, weights.flatten()[slots], expert, spec, matmul_fp64)[1]
    return combine(rows, valid, weights.float())


def _case(recipe: Recipe, device: str, *, tokens: int = TOKENS, hidden: int = HIDDEN, **options: Any) -> Case:
    if recipe in (NVFP4, NVFP4_TOKEN):
        options.setdefault("global_scales", True)
    layer = random_layer(
        recipe, tokens=tokens, hidden=hidden, intermediate=INTERMEDIATE, num_experts=EXPERTS, top_k=TOP_K,
        device=device, **options,
    )  # fmt: skip
    gsf = layer.parameters.x_gsf
    x = quantize(layer.x, kind_of(recipe), x_gsf=gsf)
    if x.sf is not None and x.sf.dtype == torch.uint8 and recipe != NVFP4_TOKEN and recipe != NVFP4:
        # Another scale than our quantizer's: half the elements at twice the scale. Used as given, not made anew.
        x = x._replace(sf=torch.where(torch.arange(len(x.q), device=device)[:, None] % 2 == 0, x.sf + 1, x.sf))
    return Case(layer, x)


def _options(case: Case, order: Any) -> dict[str, Any]:
    """What is there besides weights and scales: biases through `order(tensor [E, M, 1], which)`, global factors."""
    w = case.layer.weights
    if case.recipe not in FP4:
        return {}

    def bias(value: torch.Tensor | None, which: str) -> torch.Tensor | None:
        return None if value is None else order(value[..., None], which).squeeze(-1).contiguous()

    gate = up = None
    if w.l1_alphas is not None:
        assert w.l2_act_scales is not None
        gate, up = w.l1_alphas[:, 0].contiguous(), w.l1_alphas[:, 1] * w.l2_act_scales
    return dict(
        gemm1_bias=bias(w.w13_bias, "w13"), gemm2_bias=bias(w.w2_bias, "w2"), output1_scale_scalar=up,
        output1_scale_gate_scalar=gate, output2_scale_scalar=w.l2_alphas,
    )  # fmt: skip


def _plain(case: Case, halves: str = "gate_up") -> dict[str, Any]:
    def order(tensor: torch.Tensor, which: str) -> torch.Tensor:
        if halves == "gate_up" or which == "w2":
            return tensor
        gate, up = tensor.chunk(2, dim=1)
        return torch.cat([up, gate], dim=1)

    w = case.layer.weights
    assert w.w13_scale is not None
    assert w.w2_scale is not None
    layout: dict[str, Any] = dict(weight_layout=halves)
    if case.recipe not in FP4:
        kind = Fp8.MxFp8 if case.recipe == MXFP8 else Fp8.DeepSeekFp8
        layout = dict(weight_layout=halves if halves == "gate_up" else 0, fp8_quantization_type=kind)
    return layout | _options(case, order) | dict(
        gemm1_weights=order(w.w13, "w13"), gemm1_weights_scale=order(w.w13_scale, "w13"),
        gemm2_weights=w.w2, gemm2_weights_scale=w.w2_scale,
    )  # fmt: skip


def _from_flashinfer(case: Case) -> dict[str, Any]:
    """Prepared by FlashInfer's own functions from [up; gate] rows: its permutations in Python, its tiles in C++."""
    functions = flashinfer_layouts.load(download=True)
    offsets = flashinfer_layouts.load_scale_offsets(download=True)
    plain = _plain(case, "up_gate")
    deepseek = case.recipe == DEEPSEEK_FP8

    def rows(matrix: torch.Tensor, which: str, per_scale: int | None = None) -> torch.Tensor:
        matrix = matrix.view(torch.uint8) if matrix.element_size() == 1 else matrix
        if which == "w13":
            order = functions.core._maybe_get_cached_w3_w1_permute_indices({}, matrix, 128, per_scale)
        else:
            order = functions.core.get_w2_permute_indices_with_cache({}, matrix, 128, per_scale)
        return matrix[order.to(matrix.device)]

    def tiles(scale: torch.Tensor) -> torch.Tensor:
        at = offsets(*scale.shape).flatten().to(scale.device)
        out = torch.zeros(int(at.max()) + 1, dtype=torch.uint8, device=scale.device)
        out[at] = scale.flatten()
        return out.view(scale.shape)

    def blocks(matrix: torch.Tensor) -> torch.Tensor:
        shuffled = functions.quantization.shuffle_matrix_a(matrix.view(torch.uint8), 64)
        return shuffled.view(len(shuffled), -1, 128).transpose(0, 1).contiguous().view(E4M3)

    made = dict(plain)
    for gemm, which in (("gemm1", "w13"), ("gemm2", "w2")):
        weight, scale, bias = (plain.get(f"{gemm}_{part}") for part in ("weights", "weights_scale", "bias"))
        assert weight is not None
        assert scale is not None
        if deepseek:
            made[f"{gemm}_weights"] = torch.stack([blocks(matrix) for matrix in weight])
            continue
        made[f"{gemm}_weights"] = torch.stack([rows(m, which) for m in weight]).view(weight.dtype)
        made[f"{gemm}_weights_scale"] = torch.stack([tiles(rows(m, which, 16)) for m in scale])
        if bias is not None:
            made[f"{gemm}_bias"] = torch.stack([rows(b[:, None], which)[:, 0] for b in bias])
    if case.recipe in FP4:
        for name in ("gemm1_weights_scale", "gemm2_weights_scale"):
            made[name] = made[name].view(E4M3)  # the label that the function asks for
        return made | dict(weight_layout="shuffled")
    return made | dict(use_shuffled_weight=True, weight_layout=2 if deepseek else 0)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, recipe: Recipe) -> None:
    assert check(compare(actual, expected), LIMITS[recipe]) is None


@pytest.mark.parametrize("recipe", ALL, ids=str)
def test_flashinfers_weights_give_the_bytes_of_plain_ones(root: Path, recipe: Recipe, device: str) -> None:
    case = _case(recipe, device, hidden=256, bias=recipe in FP4, per_expert=("clamp",))
    plain = case.output(_plain(case))
    _assert_close(plain, case.expected(), recipe)
    assert_bytes_equal(case.output(_from_flashinfer(case)), plain, "FlashInfer-prepared")
    assert_bytes_equal(case.output(_plain(case, "up_gate")), plain, "plain [up; gate]")


def test_shuffled_deepseek_rows_in_k_order(device: str) -> None:
    case = _case(DEEPSEEK_FP8, device)
    plain = _plain(case, "up_gate")
    shuffled = plain | {
        name: trtllm.shuffle_rows(plain[name], block=16) for name in ("gemm1_weights", "gemm2_weights")
    }  # fmt: skip
    assert_bytes_equal(case.output(shuffled, use_shuffled_weight=True), case.output(plain))


@pytest.mark.parametrize(
    "recipe, options",
    [
        (MXFP4_BF16, dict(activation="swigluoai", per_expert=("clamp", "alpha", "beta"), bias=True)),
        (MXFP4_MXFP8, dict(activation="situ", per_expert=("alpha", "beta"))),
        (MXFP8, dict(activation="swigluoai", per_expert=("alpha",))),
        (MXFP4_MXFP8, dict(global_scales=True)),
    ],
    ids=["swigluoai", "situ", "alpha alone", "factors"],
)
def test_activations_and_factors(recipe: Recipe, options: dict[str, Any], device: str) -> None:
    case = _case(recipe, device, **options)
    extra = {}
    spec, parameters = case.layer.spec, case.layer.parameters
    if options.get("activation") == "situ":
        extra["activation_type"] = 10
        limit = torch.full((EXPERTS,), 0.75, device=device)  # FlashInfer clamps here too, which `mega_moe` refuses
        case = replace(case, layer=replace(case.layer, parameters=replace(parameters, clamp=limit)))
    if recipe == MXFP8:  # FlashInfer's beta is 0 where none is given
        case = replace(case, layer=replace(case.layer, spec=replace(spec, activation_beta=0.0)))
    _assert_close(case.output(_plain(case), **extra), case.expected(), recipe)


def test_packed_words_are_their_bf16_weights(device: str) -> None:
    case = _case(MXFP4_MXFP8, device, masked=0.3)
    plain, ids = _plain(case), case.layer.topk_ids
    rounded = case.layer.topk_weights.bfloat16()
    from_words = case.output(plain, topk_ids=pack_topk_ids(ids, rounded))
    assert_bytes_equal(from_words, case.output(plain, topk_ids=(ids, rounded.float())))
    _assert_close(from_words, case.expected(weights=rounded.float()), case.recipe)


def test_a_rank_serves_its_own_experts(device: str) -> None:
    """Offset 3 of 9 experts: the ids of others add nothing, and a token with none of ours is +0."""
    case = _case(MXFP4_MXFP8, device)
    ids = case.layer.topk_ids + 3
    ids[0] = torch.tensor([2, 7])
    ids[1, 0] = -1
    local = torch.where((ids >= 3) & (ids < 7), ids - 3, -1)
    actual = case.output(
        _plain(case), topk_ids=(ids, case.layer.topk_weights), num_experts=9, local_expert_offset=3, local_num_experts=4
    )
    _assert_close(actual, case.expected(ids=local), case.recipe)
    assert not actual[0].view(torch.int16).any()


def test_narrow_output_and_unfinished_rows(device: str) -> None:
    case = _case(MXFP4_MXFP8, device, masked=0.4)
    plain = _plain(case)
    whole = case.output(plain)
    wide = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16, device=device)
    narrow = case.run(plain, output=wide[:, :100])[0]
    assert_bytes_equal(narrow, whole[:, :100])
    assert wide[:, 100:].isnan().all(), "columns beyond the output"

    rows, weights, row_of_slot = case.run(plain, do_finalize=False)
    assert weights is case.layer.topk_weights
    assert (rows.dtype, row_of_slot.dtype) == (torch.bfloat16, torch.int32)
    valid = case.layer.topk_ids >= 0
    assert not valid.all()
    assert torch.equal(row_of_slot.view(TOKENS, TOP_K) >= 0, valid)
    slots = rows[row_of_slot.long().clamp_min(0)].view(TOKENS, TOP_K, HIDDEN)
    assert_bytes_equal(combine(slots, valid, weights), whole)


@pytest.mark.parametrize("recipe", ALL, ids=str)
def test_no_tokens(recipe: Recipe, device: str) -> None:
    case = _case(recipe, device, tokens=1)
    x = Quantized(*(None if t is None else t[:0] for t in case.x))
    layer = replace(case.layer, topk_ids=case.layer.topk_ids[:0], topk_weights=case.layer.topk_weights[:0])
    empty = replace(case, x=x, layer=layer)
    assert empty.output(_plain(case)).shape == (0, HIDDEN)
    rows, weights, row_of_slot = empty.run(_plain(case), do_finalize=False)
    assert (rows.shape, weights.shape, row_of_slot.shape) == ((0, HIDDEN), (0, TOP_K), (0,))


@pytest.mark.parametrize(
    "method, shared",
    [(RoutingMethodType.Renormalize, 0), (RoutingMethodType.DeepSeekV3, 1), ("sqrt_softplus", 1), ("hash", 0)],
)
def test_from_logits_is_routing_and_the_routed_function(method: Any, shared: int, device: str) -> None:
    experts, top_k = EXPERTS - shared, TOP_K
    case = _case(MXFP4_MXFP8, device)
    plain, generator = _plain(case), torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, experts, generator=generator).to(device)
    bias = torch.randn(experts, generator=generator).to(device)
    tables: dict[str, Any] = {}
    if method == "hash":
        tables = dict(input_ids=torch.arange(TOKENS, device=device) % 3, tid2eid=torch.tensor([[0, 1], [2, 0], [3, 1]]))
        tables["tid2eid"] = tables["tid2eid"].int().to(device)
    router = Router(method, top_k, bias, factor=1.5, num_shared=shared, **tables)
    ids, weights = route(logits, router)
    replay = None if shared else torch.full((TOKENS + 1, TOP_K), -7, dtype=torch.int16, device=device)
    arguments = case.arguments(plain, num_experts=experts, local_num_experts=experts)
    del arguments["topk_ids"]
    arguments |= tables | dict(
        routing_logits=logits, routing_bias=bias, routed_scaling_factor=1.5, routing_method_type=method,
        routing_replay_out=replay, num_fused_shared_experts=shared,
    )  # fmt: skip
    actual = drop_in.trtllm_fp4_block_scale_moe(**arguments)
    assert len(actual) == 1
    slots = top_k + shared
    expected = case.output(plain, topk_ids=(ids, weights), top_k=slots)
    assert_bytes_equal(actual[0], expected)
    if replay is not None:
        assert torch.equal(replay[:TOKENS].int(), ids)
        assert (replay[TOKENS:] == -7).all()
    if method == RoutingMethodType.DeepSeekV3:
        unfinished = drop_in.trtllm_fp4_block_scale_moe(**arguments, do_finalize=False)
        assert_bytes_equal(unfinished[1], weights)
        assert unfinished[2].shape == (TOKENS * slots,)


def test_fp8_from_logits(device: str) -> None:
    case = _case(MXFP8, device)
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3)).to(device)
    arguments = case.arguments(_plain(case), routing_logits=logits, routing_method_type=1)
    del arguments["topk_ids"]
    actual = drop_in.trtllm_fp8_block_scale_moe(**arguments)
    assert isinstance(actual, torch.Tensor)
    routed = route(logits, Router(RoutingMethodType.Renormalize, TOP_K))
    assert_bytes_equal(actual, case.output(_plain(case), topk_ids=routed))


@pytest.mark.parametrize(
    "name",
    [
        "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe", "trtllm_fp8_block_scale_moe",
        "trtllm_fp8_block_scale_routed_moe",
    ],
)  # fmt: skip
def test_signatures_are_flashinfers(root: Path, name: str) -> None:
    """Names, order and defaults; ours have keywords after them."""
    import megamoe.flashinfer.fp4
    import megamoe.flashinfer.fp8

    def parameters(path: str) -> list[tuple[str, str | None]]:
        body = ast.parse(Path(path).read_text()).body
        (function,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == name)
        arguments = function.args.args
        defaults = [None] * (len(arguments) - len(function.args.defaults)) + [*map(ast.unparse, function.args.defaults)]
        return [(argument.arg, default) for argument, default in zip(arguments, defaults)]

    ours = megamoe.flashinfer.fp4 if "fp4" in name else megamoe.flashinfer.fp8
    assert parameters(str(ours.__file__)) == parameters(str(root / "fused_moe" / "core.py"))


def _prepared(case: Case) -> dict[str, Any]:
    """Shuffled weights that nothing else holds, by our own functions."""
    w = case.layer.weights
    assert w.w13_scale is not None
    assert w.w2_scale is not None
    return dict(
        gemm1_bias=None, gemm2_bias=None, output1_scale_scalar=None, output1_scale_gate_scalar=None,
        output2_scale_scalar=None,
        gemm1_weights=trtllm.shuffle_w13(w.w13), gemm2_weights=trtllm.shuffle_rows(w.w2),
        gemm1_weights_scale=trtllm.swizzle_scales(trtllm.shuffle_w13(w.w13_scale)),
        gemm2_weights_scale=trtllm.swizzle_scales(trtllm.shuffle_rows(w.w2_scale)),
    )  # fmt: skip


def test_weights_are_made_once_and_die_with_the_callers(device: str) -> None:
    case = _case(MXFP4_MXFP8, device)
    gc.collect()
    before = prepared_bytes()
    weights = _prepared(case)
    expected = case.output(_plain(case) | dict(gemm2_weights_scale=case.layer.weights.w2_scale.clone()))
    gc.collect()
    case.output(weights)
    made = prepared_bytes() - before
    sizes = sum(t.numel() for t in weights.values() if t is not None)
    assert made >= sizes
    views = {name: None if t is None else t.view(t.shape) for name, t in weights.items()}
    labelled = {name: t.view(t.shape) for name, t in weights.items() if t is not None and "scale" in name}
    assert_bytes_equal(case.output(views | labelled), expected)
    assert prepared_bytes() - before == made, "fresh views are the same weights"
    del weights, views, labelled
    gc.collect()
    assert prepared_bytes() - before < made - sizes // 2, "what was made of weights that died is freed"


def test_weights_written_in_place_are_made_again_where_they_were(device: str) -> None:
    from megamoe.flashinfer import prepared as cache

    case, other = _case(MXFP4_MXFP8, device), _case(MXFP4_MXFP8, device, seed=1)
    weights = _prepared(case)
    first = case.output(weights)
    places = {key: entry.value.data_ptr() for key, entry in cache._entries.items()}
    for name, tensor in _prepared(other).items():
        if tensor is not None:
            weights[name].copy_(tensor)
    other = replace(
        other, x=case.x, layer=replace(other.layer, topk_ids=case.layer.topk_ids, topk_weights=case.layer.topk_weights)
    )
    second = case.output(weights)
    assert_bytes_equal(second, other.output(_plain(other)))
    assert not torch.equal(first, second)
    for key, place in places.items():
        assert cache._entries[key].value.data_ptr() == place, "a recorded graph reads that memory"

    weights["gemm1_weights"].data.copy_(_prepared(case)["gemm1_weights"])  # not counted by torch
    assert_bytes_equal(case.output(weights), second)
    drop_in.forget_prepared_weights(weights["gemm1_weights"])
    assert not torch.equal(case.output(weights), second)


def test_unshuffle_in_place_leaves_plain_weights(device: str) -> None:
    case = _case(MXFP4_BF16, device, bias=True)
    w = case.layer.weights
    assert w.w13_bias is not None
    assert w.w2_bias is not None
    weights = _prepared(case) | dict(
        gemm1_bias=trtllm.shuffle_w13(w.w13_bias[..., None]).squeeze(-1).contiguous(),
        gemm2_bias=trtllm.shuffle_rows(w.w2_bias[..., None]).squeeze(-1).contiguous(),
    )
    shuffled = case.output(weights)
    names = ["gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale", "gemm1_bias", "gemm2_bias"]
    drop_in.unshuffle_(*(weights[name] for name in names))
    for name, plain in zip(names, (w.w13, w.w13_scale, w.w2, w.w2_scale, w.w13_bias, w.w2_bias)):
        assert plain is not None
        assert_bytes_equal(weights[name], plain, name)
    gc.collect()
    before = prepared_bytes()
    assert_bytes_equal(case.output(weights, weight_layout="gate_up"), shuffled)
    scales = weights["gemm1_weights_scale"].numel() + weights["gemm2_weights_scale"].numel()
    assert prepared_bytes() - before == scales, "only the scales are kept twice"


def _bad(case: Case) -> list[tuple[type[Exception], dict[str, Any], str]]:
    ids, weights = case.layer.topk_ids, case.layer.topk_weights
    sf = case.tokens()["hidden_states_scale"]
    ones = torch.ones(EXPERTS)
    plain = _plain(case)
    return [
        (ValueError, dict(hidden_states_scale=sf.flatten()), "hidden_states_scale has shape .*; expected 2 axes"),
        (ValueError, dict(hidden_states_scale=trtllm.swizzle_scales(sf.view(torch.uint8))),
         r"hidden_states_scale has shape \(128, 4\); expected \[T, H/32\]"),
        (ValueError, dict(hidden_states_scale=None), "hidden_states_scale is None; expected"),
        (TypeError, dict(hidden_states=case.layer.x.float()), "hidden_states has dtype torch.float32"),
        (ValueError, dict(hidden_states=case.layer.x), "hidden_states_scale is given; allowed with bfloat16"),
        (ValueError, dict(per_token_scale=torch.ones(TOKENS)), "per_token_scale is given; allowed with"),
        (TypeError, dict(topk_ids=ids.long()), r"topk_ids has dtype torch.int64; allowed: torch.int32"),
        (TypeError, dict(topk_ids=(ids.long(), weights)), r"topk_ids\[0\] has dtype"),
        (TypeError, dict(topk_ids=(ids, weights.half())), r"topk_ids\[1\] has dtype torch.float16"),
        (ValueError, dict(topk_ids=(ids, weights, ids)), "topk_ids has 3 parts"),
        (ValueError, dict(top_k=3), r"topk_ids\[1\] has shape"),
        (ValueError, dict(top_k=33, num_experts=64), "top_k is 33; allowed: an int in 1..32"),
        (ValueError, dict(gemm1_lora_delta=weights), "gemm1_lora_delta is given; allowed: None"),
        (ValueError, dict(activation_type=4), r"activation_type is 4; allowed under .*: 3 \(Swiglu\), 10 \(Situ\)"),
        (ValueError, dict(weight_layout="shuffle"), "weight_layout is 'shuffle'; allowed: 'shuffled', 'up_gate', "),
        (ValueError, dict(gemm1_clamp_limit=ones[:2]), "gemm1_clamp_limit has shape"),
        (TypeError, dict(gemm1_alpha=1.0), "gemm1_alpha is a float"),
        (ValueError, dict(gemm1_weights=plain["gemm2_weights"]), "gemm1_weights has shape"),
        (TypeError, dict(gemm1_weights_scale=plain["gemm1_weights_scale"].float()), "gemm1_weights_scale has dtype"),
        (ValueError, dict(gemm1_weights_scale=plain["gemm1_weights_scale"].repeat(1, 1, 2), weight_layout="shuffled"),
         "gemm1_weights_scale has 8192 elements; expected 4096: .* which hidden_states asks for"),
        (ValueError, dict(intermediate_size=96), "gemm1_weights has shape"),
        (ValueError, dict(intermediate_size=100), "intermediate_size is 100 wide; .* multiples of 32"),
        (ValueError, dict(local_num_experts=2), "gemm1_weights has shape"),
        (ValueError, dict(local_expert_offset=1), "local_expert_offset is 1 with local_num_experts=4"),
        (ValueError, dict(output=torch.empty(TOKENS, HIDDEN + 1).bfloat16()),
         r"output has shape .*; expected \[4, 1..128\]"),
        (TypeError, dict(do_finalize=1), "do_finalize is 1"),
    ]  # fmt: skip


def test_bad_arguments_are_named_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe.flashinfer import call

    def launched(*arguments: object) -> None:
        raise AssertionError("launched")

    case = _case(MXFP4_MXFP8, "cpu")
    for name in ("finish", "leave_unfinished"):
        monkeypatch.setattr(call, name, launched)
    for kind, change, text in _bad(case):
        output = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16)
        with pytest.raises(kind, match=text):
            case.run(_plain(case), **{"output": output, **change})
        assert output.isnan().all()


def test_bad_routing_arguments_are_named() -> None:
    case = _case(MXFP4_MXFP8, "cpu")
    arguments = case.arguments(_plain(case), routing_logits=torch.ones(TOKENS, EXPERTS), routing_method_type=2)
    del arguments["topk_ids"]
    replay = torch.zeros(TOKENS, TOP_K, dtype=torch.int16)
    for kind, change, text in (
        (ValueError, dict(routing_logits=torch.ones(TOKENS, 3)), r"routing_logits has shape"),
        (TypeError, dict(routing_bias=torch.ones(EXPERTS).half()), "routing_bias has dtype"),
        (ValueError, dict(routing_method_type=10), r"routing_method_type is 10; allowed: 0 \(Default\), .*'hash'"),
        (ValueError, dict(routing_method_type="softmax"), "routing_method_type is 'softmax'; allowed: 'sqrt_softplus'"),
        (ValueError, dict(routing_method_type=3), "top_k is 2; allowed with Llama4 routing: 1"),
        (ValueError, dict(routing_method_type=1, n_group=2, topk_group=1), "n_group is 2; allowed with routing method"),
        (ValueError, dict(n_group=3, topk_group=1), "n_group is 3; expected a divisor of num_experts=4"),
        (ValueError, dict(n_group=2, topk_group=3), "topk_group is 3; allowed: 1..n_group = 2"),
        (ValueError, dict(routed_scaling_factor=float("nan")), "routed_scaling_factor is nan"),
        (TypeError, dict(routing_method_type="hash"), "input_ids is a NoneType"),
        (ValueError, dict(input_ids=torch.zeros(TOKENS).long()), "input_ids and tid2eid are given"),
        (ValueError, dict(routing_method_type=1, routing_logits=torch.ones(TOKENS, 3), num_fused_shared_experts=1,
                          num_experts=3, local_num_experts=3), "num_fused_shared_experts is 1; allowed with routing"),
        (ValueError, dict(num_fused_shared_experts=1, num_experts=8), "num_fused_shared_experts is 1 with 4 of 8"),
        (TypeError, dict(routing_replay_out=replay.int()), "routing_replay_out has dtype"),
        (ValueError, dict(routing_replay_out=replay[:2]), "routing_replay_out has shape"),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            drop_in.trtllm_fp4_block_scale_moe(**{**arguments, **change})


def test_bad_fp8_arguments_are_named() -> None:
    case = _case(DEEPSEEK_FP8, "cpu")
    for kind, change, text in (
        (ValueError, dict(fp8_quantization_type=0), r"fp8_quantization_type is 0; allowed: 1 \(DeepSeekFp8\)"),
        (TypeError, dict(fp8_quantization_type="fp8"), "fp8_quantization_type is 'fp8'"),
        (ValueError, dict(weight_layout=1), r"weight_layout is 1 \(MajorMn\)"),
        (ValueError, dict(weight_layout=2), "weight_layout is 2 .*use_shuffled_weight=False"),
        (ValueError, dict(weight_layout=2, fp8_quantization_type=2), "weight_layout is 2; allowed with MxFp8: 0"),
        (ValueError, dict(use_shuffled_weight=True), "use_shuffled_weight is True; allowed with weight_layout='gate"),
        (ValueError, dict(hidden_states_scale=case.x.sf), r"hidden_states_scale has shape .*; expected \[H/128, T\]"),
        (TypeError, dict(hidden_states=case.layer.x), "hidden_states has dtype torch.bfloat16"),
        (ValueError, dict(activation_type=10), r"activation_type is 10; allowed under .*: 3 \(Swiglu\)$"),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            case.run(_plain(case), **change)


@pytest.mark.gpu
def test_a_graph_replays_new_tokens_and_weights_must_be_prepared_before(device: str) -> None:
    case = _case(MXFP4_MXFP8, device)
    weights, logits = _prepared(case), torch.randn(TOKENS, EXPERTS, device=device)
    arguments = case.arguments(weights, routing_logits=logits, routing_method_type=1)
    del arguments["topk_ids"]
    warm, other = torch.empty(2, TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    drop_in.trtllm_fp4_block_scale_moe(**arguments, output=warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drop_in.trtllm_fp4_block_scale_moe(**arguments, output=other)
    for seed in (1, 2):
        logits.copy_(torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)))
        other.fill_(torch.nan)
        graph.replay()
        drop_in.trtllm_fp4_block_scale_moe(**arguments, output=warm)
        assert_bytes_equal(other, warm)
    new = arguments | dict(gemm1_weights=weights["gemm1_weights"].clone())
    with (
        pytest.raises(RuntimeError, match="prepare them by a call before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        drop_in.trtllm_fp4_block_scale_moe(**new, output=other)


@pytest.mark.parametrize("recipe", [MXFP4_MXFP8, NVFP4, MXFP8], ids=str)
def test_rows_of_scales_that_are_no_whole_words(recipe: Recipe, device: str) -> None:
    case = _case(recipe, device, hidden=160)
    assert case.x.sf is not None
    assert case.x.sf.shape[1] % 4
    assert check(compare(case.output(_plain(case)), case.expected()), LIMITS[recipe]) is None


def test_support_is_asked_once_up_to_a_power_of_two_and_told_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def select(name: str, request: LayerRequest) -> None:
        asked.append(request.max_tokens)
        if request.max_tokens > 12:
            raise UnsupportedError(f"{request.max_tokens} tokens are too many")

    monkeypatch.setattr(flashinfer_layer, "select", select)
    spec = LayerSpec(MXFP4_MXFP8, 128, 128, 2, 1)
    flashinfer_layer._require_triton.cache_clear()
    try:
        for tokens in (0, 1, 5, 7, 8, 6):
            flashinfer_layer.require_served(spec, torch.device("cpu"), tokens)
        assert asked == [1, 8]
        flashinfer_layer.require_served(spec, torch.device("cpu"), 12)
        assert asked == [1, 8, 16, 12], "16 are not served, 12 are"
        with pytest.raises(UnsupportedError, match="^13 tokens"):
            flashinfer_layer.require_served(spec, torch.device("cpu"), 13)
    finally:
        flashinfer_layer._require_triton.cache_clear()


def test_nothing_is_allocated_for_what_the_caller_has(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, scales in whole words and ids are read where they lie; scales in other strides are copied."""
    case = _case(MXFP4_MXFP8, device)
    seen: list[Workspace] = []
    allocate = Workspace.allocate.__func__  # type: ignore[attr-defined]

    def watched(*arguments: Any, **options: Any) -> Workspace:
        ws: Workspace = allocate(*arguments, **options)
        if not ws.rows.is_meta:  # one only measured, before anything is served
            seen.append(ws)
        return ws

    monkeypatch.setattr(Workspace, "allocate", classmethod(watched))
    ids, weights = case.layer.topk_ids.int(), case.layer.topk_weights
    scale = case.tokens()["hidden_states_scale"]
    apart = torch.full((TOKENS, 3 * scale.shape[1]), 0xFF, dtype=torch.uint8, device=device).view(E4M3)
    apart[:, : scale.shape[1]] = scale
    outputs = [
        case.output(_plain(case), topk_ids=(ids, weights), hidden_states_scale=given)
        for given in (scale, apart[:, : scale.shape[1]])
    ]
    for name, tensor in (("x_q", case.x.q), ("topk_ids", ids), ("topk_weights", weights)):
        assert getattr(seen[0], name).data_ptr() == tensor.data_ptr(), name
    first, second = (ws.x_sf for ws in seen)
    assert first is not None
    assert first.data_ptr() == scale.data_ptr()
    assert second is not None
    assert second.is_contiguous()
    assert_bytes_equal(second, first, "scales")
    assert_bytes_equal(*outputs)


def test_another_default_backend_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LayerSpec(MXFP4_MXFP8, 128, 128, 2, 1)
    flashinfer_layer.require_served(spec, torch.device(device), 1)
    monkeypatch.setenv("MEGAMOE_BACKEND", "reference")
    with pytest.raises(UnsupportedError, match=r"'reference' \(asked for by MEGAMOE_BACKEND=reference\); megamoe"):
        flashinfer_layer.require_served(spec, torch.device(device), 1)
