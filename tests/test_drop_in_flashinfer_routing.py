"""`megamoe.flashinfer.routing`: every method against its rule restated in fp64 one token at a time, ties, and hash
routing against FlashInfer's own reference."""

import math
from collections.abc import Callable

import pytest
import torch

from megamoe.flashinfer import RoutingMethodType as Method
from megamoe.flashinfer import hash_topk, pack_topk_ids, unpack_topk_ids
from megamoe.flashinfer.routing import HASH, SQRT_SOFTPLUS, Router, route
from megamoe.oracle.definitions import execute_definitions
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.trtllm_gen import flashinfer_layouts

TOKENS, EXPERTS, TOP_K, VOCABULARY = 40, 24, 5, 11
FACTOR = 2.5
Chosen = list[tuple[int, float]]
"""(expert, weight), the best first."""


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _root(x: float) -> float:
    return math.sqrt(math.log1p(math.exp(x)))


def _top(keys: list[float], count: int) -> list[int]:
    return sorted(range(len(keys)), key=lambda e: (-keys[e], e))[:count]


def _softmax(values: list[float]) -> list[float]:
    largest = max(values)
    powers = [math.exp(v - largest) for v in values]
    return [p / sum(powers) for p in powers]


def _share(scores: list[float], chosen: list[int], factor: float = 1.0) -> Chosen:
    return [(e, factor * scores[e] / sum(scores[c] for c in chosen)) for e in chosen]


def _default(x: list[float], bias: list[float]) -> Chosen:
    probabilities = _softmax(x)
    return [(e, probabilities[e]) for e in _top(probabilities, TOP_K)]


def _renormalize(x: list[float], bias: list[float]) -> Chosen:
    chosen = _top(x, TOP_K)
    return list(zip(chosen, _softmax([x[e] for e in chosen])))


def _biased(score: Callable[[float], float], x: list[float], bias: list[float]) -> Chosen:
    scores = [score(v) for v in x]
    return _share(scores, _top([s + b for s, b in zip(scores, bias)], TOP_K), FACTOR)


def _grouped(x: list[float], bias: list[float]) -> Chosen:
    """Six groups, the best three."""
    bias = torch.tensor(bias).bfloat16().tolist()
    scores = [_sigmoid(v) for v in x]
    keys = [s + b for s, b in zip(scores, bias)]
    size = EXPERTS // 6
    groups = [sum(sorted(keys[g * size : (g + 1) * size])[-2:]) for g in range(6)]
    alive = _top(groups, 3)
    return _share(scores, _top([k if e // size in alive else -math.inf for e, k in enumerate(keys)], TOP_K), FACTOR)


def _sigmoid_share(x: list[float], bias: list[float]) -> Chosen:
    scores = [_sigmoid(v) for v in x]
    return _share(scores, _top(scores, TOP_K))


def _sigmoid_alone(x: list[float], bias: list[float]) -> Chosen:
    return [(e, _sigmoid(x[e])) for e in _top(x, TOP_K)]


RULES: dict[str, tuple[dict[str, object], Callable[[list[float], list[float]], Chosen]]] = {
    "default": (dict(method=Method.Default), _default),
    "renormalize": (dict(method=Method.Renormalize), _renormalize),
    "renormalize naive": (dict(method=Method.RenormalizeNaive), _renormalize),
    "deepseek v3": (dict(method=Method.DeepSeekV3, factor=FACTOR), lambda x, b: _biased(_sigmoid, x, b)),
    "deepseek v3, groups": (dict(method=Method.DeepSeekV3, factor=FACTOR, n_group=6, topk_group=3), _grouped),
    "llama 4": (dict(method=Method.Llama4, top_k=1), lambda x, b: _sigmoid_alone(x, b)[:1]),
    "top-k": (dict(method=Method.TopK), lambda x, b: [(e, x[e]) for e in _top(x, TOP_K)]),
    "sigmoid, renormalized": (dict(method=Method.SigmoidRenorm), _sigmoid_share),
    "sigmoid, not normalized": (dict(method=Method.SigmoidRenorm, norm_topk_prob=False), _sigmoid_alone),
    "minimax 2": (dict(method=Method.MiniMax2, factor=FACTOR), lambda x, b: _biased(_sigmoid, x, b)),
    "sigmoid": (dict(method=Method.Sigmoid), _sigmoid_alone),
    "top-k sigmoid": (dict(method=Method.TopKSigmoid), _sigmoid_alone),
    "sqrt softplus": (dict(method=SQRT_SOFTPLUS, factor=FACTOR), lambda x, b: _biased(_root, x, b)),
}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_every_method_is_its_rule(name: str, dtype: torch.dtype, generator: torch.Generator, device: str) -> None:
    options, rule = RULES[name]
    # Distinct in BF16, so that no two scores are close enough for fp32 and fp64 to order them differently.
    steps = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(TOKENS)])
    logits = ((steps - EXPERTS // 2) * 0.25).to(dtype)
    bias = torch.randn(EXPERTS, generator=generator) * 0.3
    router = Router(**{"top_k": TOP_K, "bias": bias.to(device), **options})  # type: ignore[arg-type]
    ids, weights = route(logits.to(device), router)
    assert ids.dtype == torch.int32
    assert weights.dtype == (torch.float32 if options["method"] == SQRT_SOFTPLUS else torch.bfloat16)
    tolerance = 1e-5 if weights.dtype == torch.float32 else 2**-8
    for token, row in enumerate(logits.tolist()):
        expected = rule(row, bias.tolist())
        assert ids[token].tolist() == [expert for expert, _ in expected], token
        assert weights[token].tolist() == pytest.approx([w for _, w in expected], rel=tolerance), token


@pytest.mark.parametrize("method", [Method.Renormalize, Method.Sigmoid, Method.DeepSeekV3, SQRT_SOFTPLUS])
def test_the_smaller_id_wins_a_tie(method: Method | str, device: str) -> None:
    logits = torch.zeros(3, 16, device=device)
    logits[1, 9] = 1.0
    logits[2, 4:8] = 2.0
    ids, _ = route(logits, Router(method, 4, n_group=4 if method == Method.DeepSeekV3 else 1, topk_group=2))
    assert ids.tolist() == [[0, 1, 2, 3], [9, 0, 1, 2], [4, 5, 6, 7]]


def test_shared_experts_come_last_with_weight_one(generator: torch.Generator, device: str) -> None:
    logits = torch.randn(TOKENS, EXPERTS, generator=generator).to(device)
    for method, dtype in ((Method.DeepSeekV3, torch.bfloat16), (SQRT_SOFTPLUS, torch.float32)):
        ids, weights = route(logits, Router(method, TOP_K, factor=FACTOR, num_shared=2))
        alone = route(logits, Router(method, TOP_K, factor=FACTOR))
        assert torch.equal(ids[:, :TOP_K], alone[0])
        assert_bytes_equal(weights[:, :TOP_K].contiguous(), alone[1])
        assert ids[:, TOP_K:].tolist() == [[EXPERTS, EXPERTS + 1]] * TOKENS
        assert weights[:, TOP_K:].tolist() == [[1.0, 1.0]] * TOKENS
        assert weights.dtype == dtype


def test_extreme_logits_stay_finite(device: str) -> None:
    logits = torch.tensor([[-100.0, -1e4, -300.0, -200.0], [1e4, 90.0, 0.0, -90.0]], device=device)
    for method in (Method.DeepSeekV3, Method.SigmoidRenorm, Method.Default, Method.Renormalize, Method.MiniMax2):
        weights = route(logits, Router(method, 2))[1]
        assert weights.isfinite().all(), method
    weights = route(logits[1:], Router(SQRT_SOFTPLUS, 2))[1]
    assert weights[0].tolist() == pytest.approx([100 / (100 + 90**0.5), 90**0.5 / (100 + 90**0.5)], rel=1e-6)


def test_hash_routing_is_flashinfers(generator: torch.Generator, device: str) -> None:
    try:
        root = flashinfer_layouts.locate(download=True)
    except OracleUnavailable as error:
        pytest.skip(str(error))
    reference = execute_definitions(
        root / "trace" / "templates" / "moe.py", ("_hash_topk_reference",), {"torch": torch}
    )
    logits = 3 * torch.randn(TOKENS, EXPERTS, generator=generator)
    words = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    table = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(VOCABULARY)]).int()
    for shared in (0, 1):
        expected = reference._hash_topk_reference(logits, words, table, shared, 1.5)
        weights, ids = hash_topk(logits.to(device), words.to(device), table.to(device), shared, 1.5)
        assert torch.equal(ids.cpu(), expected[1])
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.cpu(), expected[0], rtol=1e-5, atol=0)
    router = Router(HASH, TOP_K, factor=1.5, input_ids=words.to(device), tid2eid=table.to(device))
    ids, weights = route(logits.to(device), router)
    assert torch.equal(ids.cpu(), expected[1][:, :TOP_K])
    torch.testing.assert_close(weights.cpu(), 1.5 * expected[0][:, :TOP_K], rtol=1e-5, atol=0)


def test_bad_arguments_of_hash_topk_are_named(device: str) -> None:
    logits, words = torch.ones(3, 8, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    table = torch.zeros(5, 2, dtype=torch.int32, device=device)
    for kind, arguments, text in (
        (TypeError, (logits.bfloat16(), words, table), "router_logits has dtype torch.bfloat16"),
        (ValueError, (logits, words[:2], table), "input_ids has shape"),
        (TypeError, (logits, words, table.float()), "tid2eid has dtype"),
        (ValueError, (logits, words, table, 2), "num_fused_shared_experts is 2; allowed: an int in 0..1"),
        (ValueError, (logits, words, table, 1, 0.0), "routed_scaling_factor is 0"),
    ):
        with pytest.raises(kind, match=text):
            hash_topk(*arguments)  # type: ignore[arg-type]


def test_words_hold_ids_and_weights() -> None:
    ids, weights = torch.tensor([[255, 256, 3, -1]], dtype=torch.int32), torch.tensor([[0.25, 2 / 3, -0.5, 1.0]])
    words = pack_topk_ids(ids, weights)
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0x00FF3E80, 0x01003F2B, 0x0003BF00, 0xFFFF3F80]
    back = unpack_topk_ids(words)
    assert torch.equal(back[0], ids)
    assert_bytes_equal(back[1], weights.bfloat16())
