"""Checks of the routing, computed or to be computed; see `megamoe.flashinfer.arguments`."""

from __future__ import annotations

import math

import torch

from megamoe.flashinfer.arguments import Sizes
from megamoe.flashinfer.enums import RoutingMethodType
from megamoe.flashinfer.routing import DEEPSEEK_V4, HASH, Router
from megamoe.validation import check_choice, check_count, check_flag, check_number, check_tensor


def check_topk(
    topk_ids: object, num_tokens: int, sizes: Sizes, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(ids int32 [T, K], weights fp32 or BF16 [T, K]) of a tuple, or (words int32 [T, K], None)."""
    shape, axes = (num_tokens, sizes.top_k), "[T, K]"
    weights = None
    name = "topk_ids"
    if isinstance(topk_ids, (tuple, list)):
        if len(topk_ids) != 2:
            raise ValueError(
                f"topk_ids has {len(topk_ids)} parts; allowed: (ids, weights), or one tensor of packed words"
            )
        topk_ids, given = topk_ids
        name = "topk_ids[0]"
        weights = check_tensor(
            "topk_ids[1]", given, dtypes=(torch.float32, torch.bfloat16), shape=shape, axes=axes, device=device,
            layout="contiguous",
        )  # fmt: skip
    ids = check_tensor(
        name, topk_ids, dtypes=(torch.int32,), shape=shape, axes=axes, device=device, layout="contiguous"
    )  # fmt: skip
    return ids, weights


def check_router(
    routing_logits: object, routing_bias: object, n_group: object, topk_group: object, routed_scaling_factor: object,
    routing_method_type: object, norm_topk_prob: object, input_ids: object, tid2eid: object, num_tokens: int,
    sizes: Sizes, device: torch.device,
) -> tuple[torch.Tensor, Router]:  # fmt: skip
    logits = check_tensor(
        "routing_logits", routing_logits, dtypes=(torch.float32, torch.bfloat16),
        shape=(num_tokens, sizes.num_experts), axes="[T, num_experts]", device=device,
    )  # fmt: skip
    method = _method(routing_method_type)
    bias = None
    if routing_bias is not None:
        bias = check_tensor(
            "routing_bias", routing_bias, dtypes=(torch.float32, torch.bfloat16), shape=(sizes.num_experts,),
            axes="[num_experts]", device=device,
        )  # fmt: skip
    check_flag("norm_topk_prob", norm_topk_prob)
    factor = 1.0 if routed_scaling_factor is None else _factor(routed_scaling_factor)
    groups, chosen_groups = _groups(n_group, topk_group, method, sizes)
    if method == RoutingMethodType.Llama4 and sizes.top_k != 1:
        raise ValueError(f"top_k is {sizes.top_k}; allowed with Llama4 routing: 1")
    if sizes.shared and method not in (RoutingMethodType.DeepSeekV3, *DEEPSEEK_V4):
        raise ValueError(
            f"num_fused_shared_experts is {sizes.shared}; allowed with routing method {method!r}: 0 (DeepSeekV3, "
            "'sqrt_softplus' and 'hash' have shared experts)"
        )
    table = ids = None
    if method == HASH:
        ids, table = _check_hash(input_ids, tid2eid, num_tokens, sizes.top_k, device)
    elif input_ids is not None or tid2eid is not None:
        raise ValueError("input_ids and tid2eid are given; allowed: None unless routing_method_type is 'hash'")
    return logits, Router(
        method, sizes.top_k, bias, groups, chosen_groups, factor, bool(norm_topk_prob), sizes.shared, ids, table
    )


def check_replay(
    routing_replay_out: object, num_tokens: int, sizes: Sizes, device: torch.device
) -> torch.Tensor | None:
    if routing_replay_out is None:
        return None
    if sizes.shared:
        raise ValueError("routing_replay_out is given; allowed with num_fused_shared_experts above 0: None")
    replay = check_tensor(
        "routing_replay_out", routing_replay_out, dtypes=(torch.int16,), rank=2, axes="[at least T, K]", device=device,
        layout="contiguous",
    )  # fmt: skip
    if len(replay) < num_tokens or replay.shape[1] != sizes.top_k:
        raise ValueError(
            f"routing_replay_out has shape {tuple(replay.shape)}; expected [at least {num_tokens}, {sizes.top_k}]"
        )
    return replay


def check_hash_topk(
    router_logits: object, input_ids: object, tid2eid: object, num_fused_shared_experts: object,
    routed_scaling_factor: object,
) -> float:  # fmt: skip
    """The factor."""
    logits = check_tensor("router_logits", router_logits, dtypes=(torch.float32,), rank=2, axes="[T, E]")
    _check_hash(input_ids, tid2eid, len(logits), None, logits.device)
    check_count("num_fused_shared_experts", num_fused_shared_experts, 0, 1)
    factor = _factor(routed_scaling_factor)
    if factor == 0:
        raise ValueError("routed_scaling_factor is 0; allowed: a finite number other than 0")
    return factor


def _method(value: object) -> RoutingMethodType | str:
    if isinstance(value, str):
        check_choice("routing_method_type", value, DEEPSEEK_V4)
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value not in tuple(RoutingMethodType):
        names = ", ".join(f"{int(method)} ({method.name})" for method in RoutingMethodType)
        raise ValueError(f"routing_method_type is {value!r}; allowed: {names}, {', '.join(map(repr, DEEPSEEK_V4))}")
    return RoutingMethodType(value)


def _factor(value: object) -> float:
    factor = check_number("routed_scaling_factor", value, "None or a finite number")
    if not math.isfinite(factor):
        raise ValueError(f"routed_scaling_factor is {factor}; allowed: None or a finite number")
    return factor


def _groups(n_group: object, topk_group: object, method: RoutingMethodType | str, sizes: Sizes) -> tuple[int, int]:
    groups = 1 if n_group is None else check_count("n_group", n_group, 0)
    chosen = 1 if topk_group is None else check_count("topk_group", topk_group, 0)
    if groups <= 1:
        return 1, 1
    if method != RoutingMethodType.DeepSeekV3:
        raise ValueError(f"n_group is {groups}; allowed with routing method {method!r}: None, 0 or 1")
    if sizes.num_experts % groups or sizes.num_experts // groups < 2:
        raise ValueError(
            f"n_group is {groups}; expected a divisor of num_experts={sizes.num_experts} that leaves 2 experts or more"
        )
    if not 1 <= chosen <= groups:
        raise ValueError(f"topk_group is {chosen}; allowed: 1..n_group = {groups}")
    if sizes.top_k > chosen * (sizes.num_experts // groups):
        raise ValueError(
            f"top_k is {sizes.top_k}; topk_group={chosen} of n_group={groups} leaves fewer experts to choose from"
        )
    return groups, chosen


def _check_hash(
    input_ids: object, tid2eid: object, num_tokens: int, top_k: int | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    dtypes = (torch.int64, torch.int32)
    ids = check_tensor("input_ids", input_ids, dtypes=dtypes, shape=(num_tokens,), axes="[T]", device=device)
    table = check_tensor("tid2eid", tid2eid, dtypes=dtypes, rank=2, axes="[vocabulary, K]", device=device)
    if top_k is not None and table.shape[1] != top_k:
        raise ValueError(f"tid2eid has {table.shape[1]} columns; expected top_k = {top_k}")
    return ids, table
