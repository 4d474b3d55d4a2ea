"""Every argument of the public API: what is refused, with which words, and that nothing has happened by then."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

import megamoe
from megamoe.backends.reference import ReferenceBackend
from megamoe.formats import round_to_bf16, round_to_fp32
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.recipe import ALL_RECIPES, Recipe, traits
from megamoe.validation import SCALE_DTYPES, WEIGHT_DTYPES, shared_formats

T, H, I, E, K, S = 5, 256, 128, 3, 3, 2
DEEP_GEMM = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
TRTLLM = Recipe("fp8xfp4", "mx32", "trtllm_gen")
NVFP4 = Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100")
NV16 = Recipe("nvfp4xnvfp4", "nv16", "trtllm_gen")
BF16 = Recipe("bf16xbf16", "none", "deep_gemm_sm100")
Arguments = dict[str, object]


@cache
def _layer(recipe: Recipe) -> Layer:
    return random_layer(
        recipe, tokens=T, hidden=H, intermediate=I, num_experts=E, top_k=K, num_shared_experts=S, bias=True, seed=3
    )


def _arguments(recipe: Recipe) -> Arguments:
    """A valid call with everything given that can be, on the CPU."""
    layer = _layer(recipe)
    return {
        "hidden_states": layer.x,
        "topk_ids": layer.topk_ids,
        "topk_weights": layer.topk_weights,
        **vars(layer.weights),
        **vars(recipe),
        "expert_scales": torch.tensor([0.5, 1.0, 2.0]),
        "x_gsf": layer.parameters.x_gsf,
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
    "shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale", "w13_bias", "w2_bias", "expert_scales", "output",
)  # fmt: skip
MATRICES = ("w13", "w2", "shared_w13", "shared_w2")
WEIGHTS = (*MATRICES, "w13_layout", *(name for name in TENSORS if name.endswith(("_scale", "_bias"))))

EVERY_TENSOR = [
    *(Bad(name, _set([1.0]), TypeError, "is a list; expected a torch.Tensor") for name in TENSORS),
    *(Bad(name, lambda t: t.to("meta"), ValueError, "is on meta") for name in TENSORS if name != "w13"),
    *(Bad(name, _to(torch.float64), TypeError, "has dtype torch.float64; allowed: ") for name in TENSORS),
    *(Bad(name, lambda t: t[None], ValueError, "has shape (1, ") for name in TENSORS),
    *(Bad(name, _padded_rows, ValueError, "its last two axes must be contiguous") for name in MATRICES),
    *(Bad(name, _padded_rows, ValueError, "it must be contiguous") for name in ("topk_ids", "topk_weights")),
    *(Bad(name, _transposed, ValueError, "its last axis must be contiguous") for name in (*MATRICES, "output")),
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
    Bad("topk_ids", lambda t: t.repeat(1, 11), ValueError, "shape[1] (K) is 33; allowed: an int in 1..32"),
    Bad("topk_weights", _to(torch.bfloat16), TypeError, "has dtype torch.bfloat16; allowed: torch.float32"),
    Bad("topk_weights", _columns(1), ValueError, f"has shape ({T}, 1); expected [T, K] = ({T}, {K})"),
    Bad("topk_weights", _with_grad, ValueError, "requires_grad=True"),
    Bad("w13", _rows(0), ValueError, "shape[0] (E experts) is 0; allowed: an int in 1..1024"),
    Bad("w13", lambda t: t[:, :-1], ValueError, f"has {2 * I - 1} rows per expert"),
    Bad("w13", lambda t: t[:, :0], ValueError, "has 0 rows per expert"),
    Bad("w13", _columns(0), ValueError, "has no columns"),
    Bad("w2", _rows(E - 1), ValueError, f"expected [E, H, I/2] = ({E}, {H}, {I // 2})"),
    Bad("w2", lambda t: t.mT.contiguous(), ValueError, f"expected [E, H, I/2] = ({E}, {H}, {I // 2})"),
    Bad("w13_scale", _columns(H // 32 - 1), ValueError, f"expected [E, 2I, H/32] = ({E}, {2 * I}, {H // 32})"),
    Bad("w2_scale", _columns(1), ValueError, f"expected [E, H, I/32] = ({E}, {H}, {I // 32})"),
    Bad("w13_scale", _to(torch.float32), TypeError, "allowed: torch.uint8, torch.float8_e8m0fnu"),
    Bad("w13_scale", lambda t: t.view(torch.float8_e4m3fn), TypeError, "has dtype torch.float8_e4m3fn"),
    Bad("shared_w13", _rows(2 * I + 2), ValueError, f"has {2 * I + 2} rows; expected 2*I*S, a multiple of 2I"),
    Bad("shared_w13", _set(None), ValueError, "is None; the 4 shared_* arguments come together"),
    Bad("shared_w2_scale", _set(None), ValueError, "is None; the 4 shared_* arguments come together"),
    Bad("shared_w13_scale", _rows(I), ValueError, "expected [2*I*S, H/32]"),
    Bad("shared_w2", _columns(I), ValueError, "expected [H, I*S]"),
    Bad("expert_scales", _rows(E - 1), ValueError, f"has shape ({E - 1},); expected [num_experts] = ({E},)"),
    Bad("expert_scales", lambda t: t.repeat_interleave(2)[::2], ValueError, "must be contiguous"),
    Bad("output", _to(torch.float32), TypeError, "has dtype torch.float32; allowed: torch.bfloat16"),
    Bad("output", lambda t: t[:1].expand(T, H), ValueError, "its rows must not overlap"),
    Bad("output", lambda t: t.flatten().as_strided((T, H), (H - 1, 1)), ValueError, "its rows must not overlap"),
    Bad("w13_bias", lambda t: t[:, :-1], ValueError, f"expected [E, 2I] = ({E}, {2 * I})"),
    Bad("w2_bias", _rows(E - 1), ValueError, f"expected [E, H] = ({E}, {H})"),
    Bad("w2_bias", _with_grad, ValueError, "requires_grad=True"),
    Bad("x_gsf", _set(torch.ones(1)), ValueError, "allowed under fp8xfp4/mx32/deep_gemm_sm100: None"),
    Bad("expert_map", _set([0, 1, 2]), TypeError, "is a list; expected a torch.Tensor [num_experts]"),
    Bad("expert_map", _set(torch.arange(E)), TypeError, "has dtype torch.int64; allowed: torch.int32"),
    Bad("expert_map", _set(torch.zeros(0, dtype=torch.int32)), ValueError, "has 0 entries; expected one for every"),
    Bad("expert_map", _set(torch.zeros(2, E, dtype=torch.int32)), ValueError, "expected 1 axes [num_experts]"),
    Bad("local_expert_offset", _set(2**31), ValueError, "is 2147483648; allowed: an int in 0..1073741821"),
    Bad("num_experts", _set(2**30 + 1), ValueError, "is 1073741825; allowed: an int in 1..1073741824"),
    Bad("mma_type", _set("fp4xfp4"), ValueError, "='fp4xfp4' is unknown; allowed: fp8xfp4, "),
    Bad("mma_type", _set(None), ValueError, "=None is unknown; allowed: "),
    Bad("act_scale", _set("nv16"), ValueError, "='nv16' is not legal for mma_type='fp8xfp4'; allowed: mx32, block128"),
    Bad("act_scale", _set(["mx32"]), TypeError, "is ['mx32'] (list); allowed: None or a string"),
    Bad("activation", _set(torch.ones(2)), ValueError, "allowed: 'swiglu', 'swigluoai', 'situ'"),
    Bad("numerics", _set("trtllm"), ValueError, "='trtllm' is not legal for mma_type='fp8xfp4'"),
    Bad("w13_layout", _set("up_gate"), ValueError, "is 'up_gate'; allowed: 'gate_up', 'interleaved'"),
    Bad("activation", _set("gelu"), ValueError, "is 'gelu'; allowed: 'swiglu', 'swigluoai', 'situ'"),
    Bad("l1_alphas", _set(torch.ones(E, 2)), ValueError, "nvfp4xnvfp4 and trtllm_gen have it"),
    Bad("l2_alphas", _set(torch.ones(E)), ValueError, "nvfp4xnvfp4 and trtllm_gen have it"),
    Bad("l2_act_scales", _set(torch.ones(E)), ValueError, "nvfp4xnvfp4 and trtllm_gen have it"),
    Bad("activation_alpha", _set(1.702), ValueError, "allowed with activation='swiglu': None"),
    Bad("activation_beta", _set(1.0), ValueError, "allowed with activation='swiglu': None"),
    Bad("activation_clamp", _set(1e-40), ValueError, "at least 2^-126 in magnitude"),
    Bad("routed_scaling_factor", _set(1e39), ValueError, "is inf; allowed: a finite number"),
    Bad("routed_scaling_factor", _set(10**400), ValueError, "is inf; allowed: a finite number"),
    Bad("activation_clamp", _set(-1.0), ValueError, "is -1.0; allowed: None or a number of at least 0"),
    Bad("activation_clamp", _set(math.nan), ValueError, "is nan; allowed: None or a number of at least 0"),
    Bad("activation_clamp", _set("7"), TypeError, "is '7' (str); allowed: None or a number"),
    Bad("activation_clamp", _set(True), TypeError, "is True (bool)"),
    Bad("activation_clamp", lambda _: torch.ones(1), TypeError, "is a torch.Tensor; allowed: None or a number"),
    Bad("routed_scaling_factor", _set(math.inf), ValueError, "is inf; allowed: a finite number"),
    Bad("routed_scaling_factor", _set(math.nan), ValueError, "is nan; allowed: a finite number"),
    Bad("routed_scaling_factor", _set(None), TypeError, "is None (NoneType); allowed: a finite number"),
    Bad("activation_clamp", lambda _: torch.ones(E), TypeError, "one number per expert is served under trtllm_gen"),
    Bad("local_expert_offset", _set(-1), ValueError, "is -1; allowed: an int in 0.."),
    Bad("local_expert_offset", _set(1.0), TypeError, "is 1.0 (float); allowed: an int in 0.."),
    Bad("num_experts", _set(0), ValueError, "is 0; allowed: an int in 1.."),
    Bad("num_experts", _set(E - 1), ValueError, f"is {E - 1}; expected at least {E}: w13 holds the experts 0..{E - 1}"),
    Bad("check_ids", _set(1), TypeError, "is 1 (int); allowed: True, False"),
    Bad("moe_backend", _set("cutlass"), ValueError, "is 'cutlass'; allowed: 'triton', 'reference', "),
]  # fmt: skip


@dataclass(frozen=True)
class BadSet:
    """Arguments that are wrong under `recipe` or together; the message starts with `name`."""

    recipe: Recipe
    changes: Arguments
    error: type[Exception]
    words: str

    @property
    def name(self) -> str:
        return self.words.split(maxsplit=1)[0]

    def __str__(self) -> str:
        return f"{self.recipe}: {self.words}"


ONES = torch.ones(E + S)
MAP = torch.tensor([-1, 0, 1, 2, -1], dtype=torch.int32)

TOGETHER = [
    BadSet(
        DEEP_GEMM, {"local_expert_offset": 1}, ValueError, "num_experts is None; with local_expert_offset=1 it must"
    ),
    BadSet(
        DEEP_GEMM, {"local_expert_offset": 2, "num_experts": E + 1}, ValueError, "num_experts is 4; expected at least 5"
    ),
    BadSet(
        DEEP_GEMM,
        {"expert_map": MAP, "num_experts": 6},
        ValueError,
        "expert_map has 5 entries; expected num_experts = 6",
    ),
    BadSet(
        DEEP_GEMM,
        {"expert_map": MAP, "local_expert_offset": 1},
        ValueError,
        "local_expert_offset is 1; allowed with expert_map",
    ),
    BadSet(DEEP_GEMM, {"expert_map": MAP}, ValueError, "expert_scales has shape (3,); expected [num_experts] = (5,)"),
    BadSet(
        DEEP_GEMM,
        {"activation": "situ", "activation_clamp": 7},
        ValueError,
        "activation_clamp is 7; allowed with activation='situ'",
    ),
    BadSet(
        DEEP_GEMM,
        {"activation": "situ", "activation_alpha": 4.0},
        ValueError,
        "activation_alpha is 4.0; allowed with 'situ'",
    ),
    BadSet(
        NVFP4, {"activation": "situ"}, ValueError, "activation is 'situ'; under nvfp4xnvfp4/nv16_token/deep_gemm_sm100"
    ),
    BadSet(
        Recipe("fp8xfp4", "token", "deep_gemm_sm90"), {"activation": "situ"}, ValueError, "activation is 'situ'; under"
    ),
    BadSet(
        TRTLLM,
        {"activation": "situ", "activation_alpha": 0.0},
        ValueError,
        "activation_alpha is 0.0; allowed: None or a finite number above 0",
    ),
    BadSet(
        TRTLLM,
        {"activation": "situ", "activation_clamp": ONES},
        ValueError,
        "activation_clamp is a torch.Tensor; allowed with activation='situ'",
    ),
    BadSet(
        TRTLLM,
        {"activation_alpha": ONES},
        ValueError,
        "activation_alpha is a torch.Tensor; allowed with activation='swiglu': None",
    ),
    BadSet(
        TRTLLM,
        {"activation_clamp": torch.ones(E)},
        ValueError,
        "activation_clamp has shape (3,); expected [E] (with shared experts [E+S]) = (5,)",
    ),
    BadSet(
        TRTLLM,
        {"activation_clamp": ONES.double()},
        TypeError,
        "activation_clamp has dtype torch.float64; allowed: torch.float32",
    ),
    BadSet(
        TRTLLM,
        {"activation": "swigluoai", "activation_beta": ONES.repeat(2)[::2]},
        ValueError,
        "activation_beta has strides (2,); it must be contiguous",
    ),
    BadSet(
        TRTLLM,
        {"w13_bias": torch.ones(E, 2 * I)},
        ValueError,
        "w13_bias has shape (3, 256); expected [E+S, 2I] = (5, 256)",
    ),
    BadSet(
        TRTLLM,
        {"shared_w13": torch.ones(2 * I * S, H).to(torch.float8_e4m3fn)},
        ValueError,
        "shared_w13 has shape (512, 256); expected 3 axes [S, 2I, H] under",
    ),
    BadSet(
        TRTLLM,
        {"shared_w13": torch.ones(0, 2 * I, H).to(torch.float8_e4m3fn)},
        ValueError,
        "shared_w13.shape[0] (S experts) is 0",
    ),
    BadSet(
        TRTLLM,
        {"shared_w2": torch.ones(1, H, I).to(torch.float8_e4m3fn)},
        ValueError,
        "shared_w2 has shape (1, 256, 128); expected [S, H, I] = (2, 256, 128)",
    ),
    BadSet(
        TRTLLM, {"num_experts": 2**30 - 1}, ValueError, "num_experts is 1073741823; allowed: an int in 1..1073741822"
    ),
    BadSet(
        NV16,
        {"x_gsf": None},
        ValueError,
        "x_gsf is None; under nvfp4xnvfp4/nv16/trtllm_gen expected a float32 tensor [1]",
    ),
    BadSet(NV16, {"x_gsf": torch.ones(2)}, ValueError, "x_gsf has shape (2,); expected [1] = (1,)"),
    BadSet(
        NV16,
        {"x_gsf": torch.ones(1, dtype=torch.float16)},
        TypeError,
        "x_gsf has dtype torch.float16; allowed: torch.float32",
    ),
    BadSet(NV16, {"l1_alphas": torch.ones(E, 2)}, ValueError, "l1_alphas has shape (3, 2); expected [E+S, 2] = (5, 2)"),
    BadSet(NVFP4, {"l2_alphas": ONES}, ValueError, "l2_alphas has shape (5,); expected [E] = (3,)"),
    BadSet(
        BF16,
        {"w13_scale": torch.ones(E, 2 * I, 8).byte()},
        ValueError,
        "w13_scale is given; allowed under bf16xbf16/none/deep_gemm_sm100: None",
    ),
    BadSet(BF16, {"shared_w2_scale": ONES}, ValueError, "shared_w2_scale is given; allowed under bf16xbf16"),
    BadSet(BF16, {"shared_w2": None}, ValueError, "shared_w2 is None; the 2 shared_* arguments come together"),
    BadSet(DEEP_GEMM, {"w13_scale": None}, TypeError, "w13_scale is a NoneType; expected a torch.Tensor [E, 2I, H/32]"),
    BadSet(
        DEEP_GEMM,
        {"shared_w13": None, "shared_w2": None, "shared_w13_scale": None},
        ValueError,
        "shared_w13 is None; the 4",
    ),
]


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
    arguments = _arguments(DEEP_GEMM)
    arguments[bad.name] = bad.change(arguments.get(bad.name))
    message = _refused(arguments, bad.error, monkeypatch)
    assert message.startswith(bad.name)
    assert bad.words in message


@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_arguments_that_do_not_go_together(case: BadSet, monkeypatch: pytest.MonkeyPatch) -> None:
    message = _refused({**_arguments(case.recipe), **case.changes}, case.error, monkeypatch)
    assert message.startswith(case.words)


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_the_valid_call_is_valid(recipe: Recipe) -> None:
    arguments = _arguments(recipe)
    result = megamoe.mega_moe(**arguments)  # type: ignore[arg-type]
    assert result is arguments["output"]
    assert result.isfinite().all()


@pytest.mark.parametrize(
    ("recipe", "multiples"),
    [
        ("fp8xfp4/mx32/deep_gemm_sm100", (32, 32)),
        ("fp8xfp4/mx32/trtllm_gen", (32, 32)),
        ("fp8xfp4/block128/deep_gemm_sm90", (128, 128)),
        ("fp8xfp4/token/deep_gemm_sm90", (32, 128)),
        ("mxf4xmxf4/mx32/deep_gemm_sm100", (32, 32)),
        ("nvfp4xnvfp4/nv16_token/deep_gemm_sm100", (16, 16)),
        ("nvfp4xnvfp4/nv16_token/trtllm_gen", (16, 16)),
        ("nvfp4xnvfp4/nv16/trtllm_gen", (16, 16)),
        ("fp8xfp8/block128/deep_gemm_sm90", (128, 128)),
        ("fp8xfp8/block128/trtllm_gen", (128, 128)),
        ("mxfp8xmxfp8/mx32/trtllm_gen", (32, 32)),
        ("bf16xbf16/none/deep_gemm_sm100", (32, 32)),
        ("bf16xfp4/none/trtllm_gen", (32, 32)),
    ],
)
def test_sizes_are_multiples_of_what_the_scale_groups_ask_for(recipe: str, multiples: tuple[int, int]) -> None:
    """The next size is served, a size between two is refused by name."""
    key = Recipe(*recipe.split("/"))
    row = traits(key)
    packing = 2 if row.weight == "e2m1" else 1
    dtype = WEIGHT_DTYPES[row.weight][0]
    least_h, least_i = multiples
    for h, i, wrong in (
        (3 * least_h, 5 * least_i, None),
        (3 * least_h + 8, 5 * least_i, f"H (hidden) = {3 * least_h + 8}; {recipe} needs a multiple of {least_h}"),
        (3 * least_h, 5 * least_i + 8, f"I (intermediate) = {5 * least_i + 8}; {recipe} needs a multiple of {least_i}"),
    ):
        scales: list[torch.Tensor | None] = [None, None]
        if row.weight_scale_format is not None:
            rows, columns = row.weight_group
            shapes = (2 * i // rows, h // columns), (h // rows, i // columns)
            scales = [torch.ones(E, *shape).to(SCALE_DTYPES[row.weight_scale_format][0]) for shape in shapes]
        w13, w2 = torch.ones(E, 2 * i, h // packing).to(dtype), torch.ones(E, h, i // packing).to(dtype)
        arguments = (w13, scales[0], w2, scales[1])
        if wrong is None:
            assert megamoe.prepare_weights(*arguments, **vars(key)).hidden == h
            continue
        with pytest.raises(ValueError, match="^w13 has ") as caught:
            megamoe.prepare_weights(*arguments, **vars(key))
        assert str(caught.value) == f"w13 has {wrong}"


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_only_fp8xfp4_takes_shared_experts_of_either_format(recipe: Recipe) -> None:
    allowed = shared_formats(recipe)
    assert set(allowed) == ({"e4m3", "e2m1"} if recipe.mma_type == "fp8xfp4" else {traits(recipe).weight})
    for fmt in ("e4m3", "e2m1", "bf16"):
        shared = WEIGHT_DTYPES[fmt][0]
        arguments = _arguments(recipe)
        if fmt in allowed:
            layer = random_layer(
                recipe, tokens=T, hidden=H, intermediate=I, num_experts=E, top_k=K, num_shared_experts=S, bias=True,
                shared_weight=fmt, seed=3,
            )  # fmt: skip
            assert layer.weights.shared_w13.dtype == shared  # type: ignore[union-attr]
            arguments.update(vars(layer.weights))
            assert megamoe.mega_moe(**arguments).isfinite().all()  # type: ignore[arg-type]
            continue
        for name in ("shared_w13", "shared_w2"):
            arguments[name] = torch.empty_like(arguments[name], dtype=shared)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="^shared_w13 has dtype "):
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
    BadCall({"activation": "situ", "activation_clamp": 7}, ValueError, "activation_clamp is 7; allowed with"),
    BadCall({"num_experts": 2}, ValueError, "num_experts is 2; expected at least 3"),
    BadCall({"x_gsf": torch.ones(1)}, ValueError, "x_gsf is given; allowed under"),
    BadCall({"expert_map": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, "expert_map has shape"),
    BadCall({"activation_beta": torch.ones(E), "activation": "swigluoai"}, TypeError, "is a torch.Tensor"),
    BadCall({"activation_beta": 1.0}, ValueError, "activation_beta is 1.0; allowed with activation='swiglu': None"),
    BadCall({"moe_backend": "flashinfer_trtllm"}, megamoe.UnsupportedError, "moe_backend='flashinfer_trtllm': "),
]  # fmt: skip


@pytest.mark.parametrize("case", CONSTRUCTOR, ids=lambda case: case.words)
def test_constructor(case: BadCall) -> None:
    with pytest.raises(case.error) as caught:
        megamoe.MegaMoE(**{"weights": _prepared(), "max_tokens": 4, "top_k": K, "moe_backend": "reference", **case.arguments})  # type: ignore[arg-type]  # fmt: skip  # noqa: E501
    assert case.words in str(caught.value)


def test_a_call_beyond_what_the_object_was_made_for() -> None:
    arguments = _arguments(DEEP_GEMM)
    x, ids, weights, output = (arguments[n] for n in ("hidden_states", "topk_ids", "topk_weights", "output"))
    moe = megamoe.MegaMoE(_prepared(), max_tokens=T - 1, top_k=K, moe_backend="reference")
    before = output.clone()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"hidden_states has {T} tokens; allowed: at most max_tokens = {T - 1}"):
        moe(x, ids, weights, output)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"topk_ids has shape \(3, 1\); expected \[T, K\] = \(3, 3\)"):
        moe(x[:3], ids[:3, :1].contiguous(), weights[:3], output[:3])  # type: ignore[index]
    with pytest.raises(ValueError, match=f"token_counts is {T}; allowed: an int in 1..{T - 1}"):
        moe.warmup([1, T])
    with pytest.raises(TypeError, match=r"token_counts is 5 \(int\); allowed: several token counts, such as"):
        moe.warmup(5)  # type: ignore[arg-type]
    assert_bytes_equal(output, before, "output")  # type: ignore[arg-type]


def _prepared() -> megamoe.MoEWeights:
    arguments = _arguments(DEEP_GEMM)
    names = (*WEIGHTS, "mma_type", "act_scale", "numerics")
    return megamoe.prepare_weights(**{name: arguments[name] for name in names})  # type: ignore[arg-type]


def test_donated_weights_must_be_distinct() -> None:
    arguments = {**vars(_layer(DEEP_GEMM).weights), "mma_type": "fp8xfp4"}
    arguments["w13"] = arguments["w13"][:1].expand(E, -1, -1)
    with pytest.raises(ValueError, match=r"^w13 has strides \(0, .*with donate=True its experts must not overlap"):
        megamoe.prepare_weights(**arguments, donate=True)
    with pytest.raises(TypeError, match="^donate is 1 "):
        megamoe.prepare_weights(**arguments, donate=1)  # type: ignore[arg-type]
    assert megamoe.prepare_weights(**arguments).num_experts == E


@pytest.mark.parametrize("changes", [dict(numerics="trtllm_gen"), dict(w13_layout="interleaved")], ids=str)
def test_donated_weights_may_overlap_where_their_rows_stay(changes: Arguments) -> None:
    layer = random_layer(DEEP_GEMM, tokens=1, hidden=H, intermediate=I, num_experts=E, top_k=1)
    arguments = {**vars(layer.weights), "mma_type": "fp8xfp4", **changes}
    w13 = arguments["w13"][:1].expand(E, -1, -1)
    before = w13.clone()
    prepared = megamoe.prepare_weights(**{**arguments, "w13": w13}, donate=True)
    assert prepared.routed.w13.data_ptr() == w13.data_ptr()
    assert_bytes_equal(w13, before, "w13")


def test_a_recipe_is_named_by_strings() -> None:
    with pytest.raises(TypeError, match=r"^act_scale is \['mx32'\] \(list\); allowed: None or a string"):
        megamoe.resolve_recipe("fp8xfp4", ["mx32"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^mma_type is 3 \(int\); allowed: a string"):
        megamoe.resolve_recipe(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^numerics is True \(bool\)"):
        megamoe.resolve_recipe("fp8xfp4", numerics=True)  # type: ignore[arg-type]


def test_numbers_round_as_tensors_do() -> None:
    """`round_to_fp32` and `round_to_bf16` without a tensor: ties, subnormals, what overflows, NaN."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-150, 129, (2000,), generator=generator).double()
    numbers = (torch.rand(2000, generator=generator, dtype=torch.float64) - 0.5) * torch.exp2(exponents)
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-24, 1 + 3 * 2.0**-24, 2.0**-150], dtype=torch.float64)
    large = torch.tensor(
        [3.3962e38, 3.3961e38, 3.4028235677973366e38, 3.4028235e38, 1e39, math.inf, math.nan, 0.0]
    ).double()
    for number in torch.cat((numbers, ties, -ties, large, -large)).tolist():
        single = torch.tensor(number, dtype=torch.float64).float()
        for rounded, expected in ((round_to_fp32(number), single), (round_to_bf16(number), single.bfloat16().float())):
            got = torch.tensor(rounded, dtype=torch.float64).float()
            assert torch.equal(got.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), number
            assert got.isnan() == expected.isnan(), number


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
