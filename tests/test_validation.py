"""Every argument of the public API: what is refused, with which words, and that nothing has happened by then."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

import megamoe
from megamoe.backends.reference import ReferenceBackend
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.recipe import SERVED, Recipe

T, H, I, E, K = 5, 256, 128, 3, 2
RECIPES = {recipe.mma_type: recipe for recipe in SERVED}
Arguments = dict[str, object]


@cache
def _layer(recipe: Recipe) -> Layer:
    return random_layer(
        recipe, tokens=T, hidden=H, intermediate=I, num_experts=E, top_k=K, num_shared_experts=2, seed=3
    )


def _arguments(recipe: Recipe) -> Arguments:
    """A valid call with everything given that can be, on the CPU."""
    layer = _layer(recipe)
    return {
        "hidden_states": layer.x,
        "topk_ids": layer.topk_ids,
        "topk_weights": layer.topk_weights,
        **vars(layer.weights),
        "mma_type": recipe.mma_type,
        "expert_scales": torch.tensor([0.5, 1.0, 2.0]),
        "output": torch.full((T, H), torch.nan, dtype=torch.bfloat16),
        "moe_backend": "reference",
    }


@dataclass(frozen=True)
class Bad:
    """One argument made wrong: `change` gets the valid value."""

    name: str
    change: Callable[[object], object]
    error: type[Exception]
    words: str  # in the message, besides the argument's name

    def __str__(self) -> str:
        return f"{self.name}: {self.words}"


def _set(value: object) -> Callable[[object], object]:
    return lambda _: value


def _to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.to(dtype)


def _rows(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t[:count]


def _columns(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t[..., :count].contiguous()


def _transposed(t: torch.Tensor) -> torch.Tensor:
    """The same values with the last axis strided."""
    return t.mT.contiguous().mT


def _padded_rows(t: torch.Tensor) -> torch.Tensor:
    """The same values in a wider buffer."""
    wide = torch.zeros((*t.shape[:-1], t.shape[-1] + 16), dtype=t.dtype)
    return wide[..., : t.shape[-1]]


def _with_grad(t: torch.Tensor) -> torch.Tensor:
    return t.clone().requires_grad_()


TENSORS = (
    "hidden_states", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale",
    "shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale", "expert_scales", "output",
)  # fmt: skip
WEIGHTS = tuple(name for name in TENSORS if name.startswith(("w", "shared_")))
CONTIGUOUS = (*WEIGHTS, "topk_ids", "topk_weights", "output")

EVERY_TENSOR = [
    *(Bad(name, _set([1.0]), TypeError, "is a list; expected a torch.Tensor") for name in TENSORS),
    *(Bad(name, lambda t: t.to("meta"), ValueError, "is on meta") for name in TENSORS if name != "w13"),
    *(Bad(name, _to(torch.float64), TypeError, "has dtype torch.float64; allowed: ") for name in TENSORS),
    *(Bad(name, lambda t: t[None], ValueError, "has shape (1, ") for name in TENSORS),
    *(Bad(name, _padded_rows, ValueError, "it must be contiguous") for name in CONTIGUOUS),
    Bad("w13", lambda t: t.to_sparse(), TypeError, "has layout torch.sparse_coo; allowed: torch.strided"),
]

BY_HAND = [
    Bad("hidden_states", _to(torch.float16), TypeError, "has dtype torch.float16; allowed: torch.bfloat16"),
    Bad("hidden_states", _columns(H - 32), ValueError, f"has {H - 32} columns; expected H = {H}"),
    Bad("hidden_states", _transposed, ValueError, "its last axis must be contiguous"),
    Bad("hidden_states", _with_grad, ValueError, "requires_grad=True"),
    Bad("topk_ids", _to(torch.int16), TypeError, "has dtype torch.int16; allowed: torch.int32, torch.int64"),
    Bad("topk_ids", _rows(T - 1), ValueError, f"has shape ({T - 1}, {K}); expected [T, K] = ({T}, {K})"),
    Bad("topk_ids", _columns(0), ValueError, "shape[1] (K) is 0; allowed: an int in 1..32"),
    Bad("topk_ids", lambda t: t.repeat(1, 17), ValueError, "shape[1] (K) is 34; allowed: an int in 1..32"),
    Bad("topk_weights", _to(torch.bfloat16), TypeError, "has dtype torch.bfloat16; allowed: torch.float32"),
    Bad("topk_weights", _columns(1), ValueError, f"has shape ({T}, 1); expected [T, K] = ({T}, {K})"),
    Bad("topk_weights", _with_grad, ValueError, "requires_grad=True"),
    Bad("w13", _rows(0), ValueError, "shape[0] (E experts) is 0; allowed: an int in 1..1024"),
    Bad("w13", lambda t: t[:, :-1], ValueError, f"has {2 * I - 1} rows per expert"),
    Bad("w13", lambda t: t[:, :0], ValueError, "has 0 rows per expert"),
    Bad("w13", _columns(0), ValueError, "has no columns"),
    Bad("w2", _rows(E - 1), ValueError, f"expected [E, H, I/2] = ({E}, {H}, {I // 2})"),
    Bad("w13_scale", _columns(H // 32 - 1), ValueError, f"expected [E, 2I, H/32] = ({E}, {2 * I}, {H // 32})"),
    Bad("w2_scale", _columns(1), ValueError, f"expected [E, H, I/32] = ({E}, {H}, {I // 32})"),
    Bad("w13_scale", _to(torch.float32), TypeError, "allowed: torch.uint8, torch.float8_e8m0fnu"),
    Bad("w13_scale", lambda t: t.view(torch.float8_e4m3fn), TypeError, "has dtype torch.float8_e4m3fn"),
    Bad("shared_w13", _rows(2 * I + 2), ValueError, f"has {2 * I + 2} rows; expected 2*I*S, a multiple of 2I"),
    Bad("shared_w13", _set(None), ValueError, "is None; the four shared_* arguments come together"),
    Bad("shared_w2_scale", _set(None), ValueError, "is None; the four shared_* arguments come together"),
    Bad("shared_w13_scale", _rows(I), ValueError, "expected [2*I*S, H/32]"),
    Bad("shared_w2", _columns(I), ValueError, "expected [H, I*S]"),
    Bad("expert_scales", _rows(E - 1), ValueError, f"has shape ({E - 1},); expected [E] = ({E},)"),
    Bad("expert_scales", lambda t: t.repeat_interleave(2)[::2], ValueError, "must be contiguous"),
    Bad("output", _to(torch.float32), TypeError, "has dtype torch.float32; allowed: torch.bfloat16"),
    Bad("output", lambda t: t[:1].expand(T, H), ValueError, "it must be contiguous"),
    Bad("mma_type", _set("fp4xfp4"), ValueError, "='fp4xfp4' is unknown; allowed: fp8xfp4, "),
    Bad("mma_type", _set(None), ValueError, "=None is unknown; allowed: "),
    Bad("act_scale", _set("nv16"), ValueError, "='nv16' is not legal for mma_type='fp8xfp4'; allowed: mx32"),
    Bad("numerics", _set("trtllm"), ValueError, "='trtllm' is not legal for mma_type='fp8xfp4'"),
    Bad("w13_layout", _set("up_gate"), ValueError, "is 'up_gate'; allowed: 'gate_up', 'interleaved'"),
    Bad("activation", _set("gelu"), ValueError, "is 'gelu'; allowed: 'swiglu', 'swigluoai', 'situ'"),
    Bad("l1_alphas", _set(torch.ones(E, 2)), ValueError, "only nvfp4xnvfp4 has global scales"),
    Bad("l2_alphas", _set(torch.ones(E)), ValueError, "only nvfp4xnvfp4 has global scales"),
    Bad("l2_act_scales", _set(torch.ones(E)), ValueError, "only nvfp4xnvfp4 has global scales"),
    Bad("activation_alpha", _set(1.702), ValueError, "allowed with activation='swiglu': None"),
    Bad("activation_beta", _set(1.0), ValueError, "allowed with activation='swiglu': None"),
    Bad("activation_clamp", _set(1e-40), ValueError, "at least 2^-126 in magnitude"),
    Bad("routed_scaling_factor", _set(1e39), ValueError, "is inf; allowed: a finite number"),
    Bad("routed_scaling_factor", _set(10**400), ValueError, "is inf; allowed: a finite number"),
    Bad("activation_clamp", _set(-1.0), ValueError, "is -1.0; allowed: None or a number of at least 0"),
    Bad("activation_clamp", _set(math.nan), ValueError, "is nan; allowed: None or a number of at least 0"),
    Bad("activation_clamp", _set("7"), TypeError, "is '7' (str); allowed: None or a number"),
    Bad("activation_clamp", _set(True), TypeError, "is True (bool)"),
    Bad("activation_clamp", lambda _: torch.ones(1), TypeError, "(Tensor); allowed: None or a number"),
    Bad("routed_scaling_factor", _set(math.inf), ValueError, "is inf; allowed: a finite number"),
    Bad("routed_scaling_factor", _set(math.nan), ValueError, "is nan; allowed: a finite number"),
    Bad("routed_scaling_factor", _set(None), TypeError, "is None (NoneType); allowed: a finite number"),
    Bad("local_expert_offset", _set(-1), ValueError, "is -1; allowed: an int of at least 0"),
    Bad("local_expert_offset", _set(1.0), TypeError, "is 1.0 (float); allowed: an int of at least 0"),
    Bad("num_experts", _set(0), ValueError, "is 0; allowed: an int of at least 1"),
    Bad("check_ids", _set(1), TypeError, "is 1 (int); allowed: True, False"),
    Bad("moe_backend", _set("cutlass"), ValueError, "is 'cutlass'; allowed: 'triton', 'reference', "),
]  # fmt: skip

UNSERVED = {
    "w13_bias": torch.ones(E, 2 * I),
    "w2_bias": torch.ones(E, H),
    "x_gsf": torch.ones(1),
    "expert_map": torch.arange(E),
    "activation_alpha": torch.full((E,), 1.702),
    "activation_beta": torch.ones(E),
    "w13_layout": "interleaved",
    "local_expert_offset": 1,
    "num_experts": E + 1,
}


def _refused(arguments: Arguments, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of the error that `mega_moe` raises, after checking that it did nothing else."""

    def opened(*_: object, **__: object) -> None:
        pytest.fail("a backend was opened with invalid arguments")

    monkeypatch.setattr(ReferenceBackend, "open", opened)
    output = arguments["output"]
    before = output.clone() if isinstance(output, torch.Tensor) and not output.is_meta else None
    with pytest.raises(error) as caught:
        megamoe.mega_moe(**arguments)  # type: ignore[arg-type]
    if before is not None:
        assert_bytes_equal(output, before, "output")
    return str(caught.value)


@pytest.mark.parametrize("bad", [*EVERY_TENSOR, *BY_HAND], ids=str)
def test_a_wrong_argument_is_named_and_nothing_is_written(bad: Bad, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments(RECIPES["fp8xfp4"])
    arguments[bad.name] = bad.change(arguments.get(bad.name))
    message = _refused(arguments, bad.error, monkeypatch)
    assert message.startswith(bad.name)
    assert bad.words in message


@pytest.mark.parametrize("name", UNSERVED)
def test_an_option_without_kernels_is_refused_with_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {**_arguments(RECIPES["fp8xfp4"]), name: UNSERVED[name]}
    message = _refused(arguments, megamoe.UnsupportedError, monkeypatch)
    assert message.startswith(f"moe_backend='reference': {name}")
    assert "is not served yet" in message


@pytest.mark.parametrize("mma_type", RECIPES)
def test_the_valid_call_is_valid(mma_type: str) -> None:
    arguments = _arguments(RECIPES[mma_type])
    result = megamoe.mega_moe(**arguments)  # type: ignore[arg-type]
    assert result is arguments["output"]
    assert result.isfinite().all()


@dataclass(frozen=True)
class BadSize:
    """A layer whose H or I the recipe cannot scale."""

    mma_type: str
    hidden: int
    intermediate: int
    words: str


SIZES = [
    BadSize("fp8xfp4", 48, 64, "H (hidden) = 48; fp8xfp4/mx32/deep_gemm_sm100 needs a multiple of 32"),
    BadSize("fp8xfp4", 64, 48, "I (intermediate) = 48; fp8xfp4/mx32/deep_gemm_sm100 needs a multiple of 32"),
    BadSize("mxf4xmxf4", 64, 16, "I (intermediate) = 16; mxf4xmxf4/mx32/deep_gemm_sm100 needs a multiple of 32"),
    BadSize("nvfp4xnvfp4", 40, 32, "H (hidden) = 40; nvfp4xnvfp4/nv16_token/deep_gemm_sm100 needs a multiple of 16"),
    BadSize("fp8xfp8", 192, 128, "H (hidden) = 192; fp8xfp8/block128/deep_gemm_sm90 needs a multiple of 128"),
    BadSize("fp8xfp8", 128, 64, "I (intermediate) = 64; fp8xfp8/block128/deep_gemm_sm90 needs a multiple of 128"),
]  # fmt: skip


@pytest.mark.parametrize("case", SIZES, ids=lambda case: case.words)
def test_sizes_that_the_scale_groups_do_not_divide(case: BadSize) -> None:
    columns = (2, torch.uint8) if case.mma_type != "fp8xfp8" else (1, torch.float8_e4m3fn)

    def elements(*shape: int) -> torch.Tensor:
        return torch.ones(*shape[:-1], shape[-1] // columns[0]).to(columns[1])

    scale = torch.ones(1)
    with pytest.raises(ValueError, match="^w13 has ") as caught:
        megamoe.prepare_weights(
            elements(E, 2 * case.intermediate, case.hidden), scale,
            elements(E, case.hidden, case.intermediate), scale, mma_type=case.mma_type,
        )  # fmt: skip
    assert case.words in str(caught.value)


def test_fp4_recipes_take_no_e4m3_shared_experts_but_fp8xfp4_does() -> None:
    for mma_type, recipe in RECIPES.items():
        arguments = _arguments(recipe)
        e4m3 = _arguments(RECIPES["fp8xfp4"])
        arguments.update({name: e4m3[name] for name in e4m3 if name.startswith("shared_")})
        if mma_type == "fp8xfp4":
            assert megamoe.mega_moe(**arguments).isfinite().all()  # type: ignore[arg-type]
            continue
        with pytest.raises(TypeError, match="^shared_w13"):
            megamoe.mega_moe(**arguments)  # type: ignore[arg-type]


@dataclass(frozen=True)
class BadCall:
    """What `MegaMoE` refuses beyond `mega_moe`'s checks; `arguments` of its constructor."""

    arguments: Arguments
    error: type[Exception]
    words: str


CONSTRUCTOR = [
    BadCall({"weights": (1, 2)}, TypeError, "weights is a tuple; expected what megamoe.prepare_weights returns"),
    BadCall({"max_tokens": 0}, ValueError, "max_tokens is 0; allowed: an int of at least 1"),
    BadCall({"max_tokens": 4.0}, TypeError, "max_tokens is 4.0 (float)"),
    BadCall({"top_k": 33}, ValueError, "top_k is 33; allowed: an int in 1..32"),
    BadCall({"activation_clamp": -0.5}, ValueError, "activation_clamp is -0.5"),
    BadCall({"routed_scaling_factor": math.inf}, ValueError, "routed_scaling_factor is inf"),
    BadCall({"expert_scales": torch.ones(E + 1)}, ValueError, "expert_scales has shape"),
    BadCall({"check_ids": None}, TypeError, "check_ids is None"),
    BadCall({"activation": "relu"}, ValueError, "activation is 'relu'"),
    BadCall({"activation": "situ", "activation_clamp": 7}, ValueError, "activation_clamp is 7.0; allowed with"),
    BadCall({"activation_beta": 1.0}, ValueError, "activation_beta is 1.0; allowed with activation='swiglu': None"),
    BadCall({"moe_backend": "flashinfer_trtllm"}, megamoe.UnsupportedError, "no adapter to an installed flashinfer"),
]  # fmt: skip


@pytest.mark.parametrize("case", CONSTRUCTOR, ids=lambda case: case.words)
def test_constructor(case: BadCall) -> None:
    with pytest.raises(case.error) as caught:
        megamoe.MegaMoE(**{"weights": _prepared(), "max_tokens": 4, "top_k": K, "moe_backend": "reference", **case.arguments})  # type: ignore[arg-type]  # fmt: skip  # noqa: E501
    assert case.words in str(caught.value)


def test_a_call_beyond_what_the_object_was_made_for() -> None:
    arguments = _arguments(RECIPES["fp8xfp4"])
    x, ids, weights, output = (arguments[n] for n in ("hidden_states", "topk_ids", "topk_weights", "output"))
    moe = megamoe.MegaMoE(_prepared(), max_tokens=T - 1, top_k=K, moe_backend="reference")
    before = output.clone()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"hidden_states has {T} tokens; allowed: at most max_tokens = {T - 1}"):
        moe(x, ids, weights, output)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"topk_ids has shape \(3, 1\); expected \[T, K\] = \(3, 2\)"):
        moe(x[:3], ids[:3, :1].contiguous(), weights[:3], output[:3])  # type: ignore[index]
    with pytest.raises(ValueError, match=f"token_counts is {T}; allowed: an int in 1..{T - 1}"):
        moe.warmup([1, T])
    assert_bytes_equal(output, before, "output")  # type: ignore[arg-type]


def _prepared() -> megamoe.MoEWeights:
    arguments = _arguments(RECIPES["fp8xfp4"])
    names = (*WEIGHTS, "mma_type")
    return megamoe.prepare_weights(**{name: arguments[name] for name in names})  # type: ignore[arg-type]


QUANTIZE = [
    (megamoe.quantize_mxfp8, {}, 96, None),
    (megamoe.quantize_mxfp4, {"group": 16}, 96, "group is 16; allowed: 32, 64, 128"),
    (megamoe.quantize_mxfp8, {"group": 64}, 96, "x has 96 columns; expected a positive multiple of the scale group 64"),
    (megamoe.quantize_nvfp4, {}, 24, "x has 24 columns; expected a positive multiple of the scale group 16"),
    (megamoe.quantize_fp8_block128, {}, 0, "x has 0 columns"),
    (megamoe.quantize_mxfp8, {"amax_floor": -1.0}, 96, "amax_floor is -1.0; allowed: "),
    (megamoe.quantize_nvfp4, {"amax_floor": math.nan}, 96, "amax_floor is nan"),
]  # fmt: skip


@pytest.mark.parametrize(("quantize", "options", "columns", "words"), QUANTIZE)
def test_quantize(quantize: Callable, options: Arguments, columns: int, words: str | None) -> None:
    x = torch.randn(3, columns).bfloat16()
    if words is None:
        assert quantize(x, **options)[0].shape == (3, columns)
        return
    with pytest.raises(ValueError, match=f"^{words.split(' is ')[0].split(' has ')[0]}") as caught:
        quantize(x, **options)
    assert words in str(caught.value)
    with pytest.raises(TypeError, match="^x has dtype torch.float32; allowed: torch.bfloat16"):
        quantize(x.float(), **options)
