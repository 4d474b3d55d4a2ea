"""Debug mode: names the token behind an illegal expert id, and the first stage, token and expert with a NaN.

On with `MEGAMOE_DEBUG=1`, read at every call; `check_ids=True` asks for the id check alone. Both read results
back from the GPU, which a CUDA graph cannot record, so both refuse to run under capture.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

ENVIRONMENT_VARIABLE = "MEGAMOE_DEBUG"
NO_EXPERT = -1


@dataclass(frozen=True)
class Stage:
    """Which rows of one step of the layer hold a NaN.

    `nan` bool [n] flags them, `token` int64 [n] names each row's token and `expert` int64 [n] the expert that
    made it (`NO_EXPERT` where none did: before routing, and in the shared experts, as `name` says).
    """

    name: str
    nan: torch.Tensor
    token: torch.Tensor
    expert: torch.Tensor


def enabled() -> bool:
    """Whether `MEGAMOE_DEBUG` is set to something other than the empty string or 0."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "") not in ("", "0")


def refuse_capture(device: torch.device) -> None:
    """Raise `RuntimeError` when the current stream of `device` is recording a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "check_ids=True and MEGAMOE_DEBUG=1 wait for the GPU, which a CUDA graph cannot record: "
            "turn them off for the capture"
        )


def check_ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """Raise `ValueError` naming token, slot and id of the first id [T, K] neither -1 nor in [0, E)."""
    illegal = (topk_ids < -1) | (topk_ids >= num_experts)
    where = illegal.nonzero()
    if len(where):
        token, slot = where[0].tolist()
        raise ValueError(
            f"topk_ids[{token}, {slot}] is {topk_ids[token, slot].item()} (token {token}, slot {slot}); "
            f"allowed: -1 (skip) and 0..{num_experts - 1}; {len(where)} illegal ids in all"
        )


def input_stages(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
) -> list[Stage]:
    """The caller's tensors as stages: a NaN that came in is not blamed on the layer."""
    token = torch.arange(len(hidden_states), device=hidden_states.device)
    ids = topk_ids.long()
    routed = (ids >= 0) & (ids < num_experts)
    return [
        Stage("hidden_states", hidden_states.isnan().any(-1), token, torch.full_like(token, NO_EXPERT)),
        Stage(
            "topk_weights",
            (topk_weights.isnan() & routed).flatten(),
            token[:, None].expand_as(ids).flatten(),
            ids.flatten(),
        ),
    ]


def output_stage(output: torch.Tensor) -> Stage:
    token = torch.arange(len(output), device=output.device)
    return Stage("output", output.isnan().any(-1), token, torch.full_like(token, NO_EXPERT))


def raise_on_nan(stages: Iterable[Stage]) -> None:
    """Raise `FloatingPointError` for the first stage, in the order given, that holds a NaN."""
    for stage in stages:
        rows = stage.nan.nonzero().flatten()
        if len(rows):
            # The lowest token, not the lowest row: rows may be in permuted order.
            row = rows[stage.token[rows].argmin()]
            expert = int(stage.expert[row])
            by = "" if expert == NO_EXPERT else f", expert {expert}"
            raise FloatingPointError(
                f"first NaN in stage {stage.name}: token {int(stage.token[row])}{by}; {len(rows)} rows in all"
            )


def quantized_stage(
    name: str,
    q: torch.Tensor,
    sf: torch.Tensor,
    scale_format: str | None,
    group: int,
    token: torch.Tensor,
    expert: torch.Tensor | None = None,
) -> Stage:
    """The rows of a quantized tensor that dequantize to a NaN.

    q: E4M3 [n, C] or packed E2M1 [n, C/2]; sf: one scale per `group` columns in its first columns, padding
    after them. E2M1 has no NaN; E4M3 and UE4M3 have 0x7F, UE8M0 has 0xFF.
    """
    if q.dtype == torch.float8_e4m3fn:
        columns = q.shape[1]
        nan = ((q.view(torch.uint8) & 0x7F) == 0x7F).any(-1)
    else:
        columns = 2 * q.shape[1]
        nan = torch.zeros(len(q), dtype=torch.bool, device=q.device)
    sf = sf[:, : -(-columns // group)]
    if scale_format == "fp32":
        nan |= sf.isnan().any(-1)
    else:
        nan |= (sf == 0xFF if scale_format == "ue8m0" else (sf & 0x7F) == 0x7F).any(-1)
    return Stage(name, nan, token, torch.full_like(token, NO_EXPERT) if expert is None else expert)


def row_stages(rows: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> list[Stage]:
    """GEMM 2's rows BF16 [T, K (+1), H], the shared one last; what no expert serves holds anything."""
    num_tokens, top_k = topk_ids.shape
    ids = topk_ids.long()
    routed = (ids >= 0) & (ids < num_experts)
    nan = rows.isnan().any(-1)
    token = torch.arange(num_tokens, device=rows.device)
    stages = [Stage("down", (nan[:, :top_k] & routed).flatten(), token.repeat_interleave(top_k), ids.flatten())]
    if rows.shape[1] > top_k:
        stages.append(Stage("shared down", nan[:, top_k], token, torch.full_like(token, NO_EXPERT)))
    return stages
