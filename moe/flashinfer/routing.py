"""Routing from logits: FlashInfer 0.6.18's methods, and the two of DeepSeek-V4 that it has no number for.

Plain torch, in fp32, without a wait for the GPU. Experts come in the order of their score, the best first; of equal
scores the smaller id wins. With s = sigmoid(logit), b the bias, f the scaling factor and Σ over the chosen experts:

=====================  =============================  =========================  ================================
method                 chosen by                      weight                     takes
=====================  =============================  =========================  ================================
`Default`              softmax over all               that softmax
`Renormalize`          logit                          softmax over the chosen
`RenormalizeNaive`     as `Renormalize`
`DeepSeekV3`           s + b, in the best groups      f·s / (Σs + 1e-20)         bias, factor, n_group, topk_group
`Llama4`               logit, top-1                   s
`TopK`                 logit                          logit
`SigmoidRenorm`        s                              s / max(Σs, 1e-20)         norm_topk_prob (False: s)
`MiniMax2`             s + b                          f·s / (Σs + 1e-20)         bias, factor
`Sigmoid`              s                              s
`TopKSigmoid`          logit                          s
"sqrt_softplus"        q + b, q = √softplus(logit)    f·q / Σq                   bias, factor
"hash"                 tid2eid[input_ids]             f·q / Σq                   factor, input_ids, tid2eid
=====================  =============================  =========================  ================================

A group's score is the sum of its two best s + b, where b is rounded to BF16 once there is more than one group, as
upstream's grouped kernel does. What a method does not take it ignores, as upstream does, but for `n_group` above 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.flashinfer.enums import RoutingMethodType as Method

SQRT_SOFTPLUS, HASH = "sqrt_softplus", "hash"
DEEPSEEK_V4 = (SQRT_SOFTPLUS, HASH)
_EPSILON = 1e-20


@dataclass(frozen=True)
class Router:
    """Everything but the logits; checked by `megamoe.flashinfer.routing_arguments`.

    bias: fp32 or BF16 [E]. num_shared: shared experts appended to every token's slots, ids E + s with weight 1.
    input_ids: int32 or int64 [T]; tid2eid: int32 or int64 [vocabulary, K].
    """

    method: Method | str
    top_k: int
    bias: torch.Tensor | None = None
    n_group: int = 1
    topk_group: int = 1
    factor: float = 1.0
    norm_topk_prob: bool = True
    num_shared: int = 0
    input_ids: torch.Tensor | None = None
    tid2eid: torch.Tensor | None = None


def route(logits: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """logits fp32 or BF16 [T, E] to ids int32 [T, K+S] and weights [T, K+S].

    Weights are BF16, whatever the logits are, as upstream's kernels write them; fp32 for DeepSeek-V4's two methods.
    """
    logits = logits.float()
    if router.method == HASH:
        assert router.input_ids is not None
        assert router.tid2eid is not None
        ids = router.tid2eid[router.input_ids.long()].long()
        chosen = _scores(logits.gather(1, ids), HASH)
    else:
        scores = _scores(logits, router.method)
        ids = _best(_keys(scores, router), router.top_k)
        chosen = scores.gather(1, ids)
    weights = _weights(chosen, router)
    if router.method not in DEEPSEEK_V4:
        weights = weights.bfloat16()
    if router.num_shared:
        tokens, experts = logits.shape
        shared = torch.arange(experts, experts + router.num_shared, device=ids.device)
        ids = torch.cat([ids, shared.expand(tokens, -1)], dim=1)
        weights = torch.cat([weights, weights.new_ones(tokens, router.num_shared)], dim=1)
    return ids.int(), weights


def hash_topk(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    launch_with_pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V4's hash routing for the pre-routed functions: (weights fp32 [T, K+S], ids int32 [T, K+S]).

    router_logits fp32 [T, E]; input_ids int64 [T], rows of tid2eid int32 [vocabulary, K]. The chosen experts' weights
    √softplus sum to 1, without the factor; a shared expert (S is 0 or 1) has the id E and the weight
    1/routed_scaling_factor, for a caller that multiplies the layer's output. `launch_with_pdl` is ignored. Raises
    `TypeError`/`ValueError` naming the argument. Contract: `flashinfer.hash_topk` of 0.6.18, but for the order of sums.
    """
    from megamoe.flashinfer.routing_arguments import check_hash_topk

    factor = check_hash_topk(router_logits, input_ids, tid2eid, num_fused_shared_experts, routed_scaling_factor)
    router = Router(HASH, tid2eid.shape[1], num_shared=num_fused_shared_experts, input_ids=input_ids, tid2eid=tid2eid)
    ids, weights = route(router_logits, router)
    if num_fused_shared_experts:
        weights[:, -1] = 1.0 / factor
    return weights, ids


def _scores(logits: torch.Tensor, method: Method | str) -> torch.Tensor:
    """fp32, as the logits lie: the softmax, s or q where experts are chosen by it, the logits where by them."""
    if method == Method.Default:
        return torch.softmax(logits, dim=-1)
    if method in (Method.SigmoidRenorm, Method.Sigmoid, Method.DeepSeekV3, Method.MiniMax2):
        return torch.sigmoid(logits)
    return _sqrt_softplus(logits) if method in DEEPSEEK_V4 else logits


def _keys(scores: torch.Tensor, router: Router) -> torch.Tensor:
    """What experts are chosen by, fp32 [T, E]."""
    if router.method not in (Method.DeepSeekV3, Method.MiniMax2, SQRT_SOFTPLUS):
        return scores
    grouped = router.method == Method.DeepSeekV3 and router.n_group > 1
    if router.bias is not None:
        bias = router.bias.bfloat16() if grouped else router.bias
        scores = scores + bias.float()
    if not grouped:
        return scores
    groups = scores.unflatten(-1, (router.n_group, -1))
    group_scores = groups.topk(2, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, _best(group_scores, router.topk_group), True)
    return torch.where(chosen[..., None], groups, -torch.inf).flatten(-2)


def _weights(scores: torch.Tensor, router: Router) -> torch.Tensor:
    """fp32 [T, K], from the `_scores` of the chosen experts."""
    method = router.method
    if method in (Method.Renormalize, Method.RenormalizeNaive):
        return torch.softmax(scores, dim=-1)
    if method in (Method.Llama4, Method.TopKSigmoid):
        return torch.sigmoid(scores)
    if method in DEEPSEEK_V4:
        return _scaled(scores / scores.sum(-1, keepdim=True), router.factor)
    if method in (Method.DeepSeekV3, Method.MiniMax2):
        return _scaled(scores, router.factor) / (scores.sum(-1, keepdim=True) + _EPSILON)
    if method == Method.SigmoidRenorm and router.norm_topk_prob:
        return scores / scores.sum(-1, keepdim=True).clamp_min(_EPSILON)
    return scores


def _scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values if factor == 1 else values * factor


def _sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    """√log(1 + e^x), by the form that neither overflows nor loses small values."""
    return torch.sqrt(logits.clamp_min(0) + torch.log1p(torch.exp(-logits.abs())))


def _best(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest, descending; `torch.topk` promises no order among equals, a stable sort does."""
    return torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, :count]
