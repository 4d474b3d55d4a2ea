"""Debug mode: names the token behind an illegal expert id, and the first stage, token and expert with a NaN.

On with `MEGAMOE_DEBUG=1`, read at every call; `check_ids=True` asks for the id check alone. Both read results
back from the GPU, which a CUDA graph cannot record, so both refuse to run under capture.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megamoe.oracle.reference.ids import local_ids
from megamoe.plain_weights import element_format
from megamoe.spec import LayerSpec
from megamoe.validation import scale_of

ENVIRONMENT_VARIABLE = "MEGAMOE_DEBUG"
NO_EXPERT = -1


@dataclass(frozen=True)
class Stage:
    """Which rows of one step of the layer hold a NaN.

    `nan` bool [n] flags them, `token` int64 [n] names each row's token and `expert` int64 [n] the expert that made it,
    by the caller's global id (`NO_EXPERT` where none did: before routing, and in a dense shared MLP, as `name` says).
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


@dataclass(frozen=True)
class Routing:
    """Whose slots are whose. ids int64 [T, K]: the caller's; local: this rank's expert of each slot, or what makes it
    invalid; here bool [T, K]: slots that an expert of this rank serves."""

    ids: torch.Tensor
    local: torch.Tensor
    here: torch.Tensor

    @classmethod
    def of(cls, topk_ids: torch.Tensor, spec: LayerSpec, expert_map: torch.Tensor | None) -> Routing:
        local = local_ids(
            topk_ids,
            num_experts=spec.num_experts,
            num_local_experts=spec.num_local_experts,
            expert_offset=spec.expert_offset,
            shared_slots=spec.shared_slots,
            expert_map=expert_map,
        )
        return cls(topk_ids.long(), local, (local >= 0) & (local < spec.num_slot_experts))

    @property
    def token(self) -> torch.Tensor:
        """int64 [T·K], the token of each slot."""
        num_tokens, top_k = self.ids.shape
        return torch.arange(num_tokens, device=self.ids.device).repeat_interleave(top_k)

    def slot_stage(self, name: str, nan: torch.Tensor) -> Stage:
        """A stage with one row per slot; `nan` bool [T, K] counts where this rank serves the slot."""
        return Stage(name, (nan & self.here).flatten(), self.token, self.ids.flatten())


def check_ids(routing: Routing, spec: LayerSpec, expert_map: torch.Tensor | None) -> None:
    """Raise `ValueError` naming token, slot and id of the first id that is neither -1 nor an expert's of any rank."""
    where = ((routing.local < -1) | (routing.local >= spec.num_slot_experts)).nonzero()
    if not len(where):
        return
    token, slot = where[0].tolist()
    illegal = int(routing.ids[token, slot])
    slots = f"topk_ids[{token}, {slot}] is {illegal} (token {token}, slot {slot})"
    if expert_map is not None and 0 <= illegal < spec.num_experts:
        reason = f"expert_map[{illegal}] is {int(expert_map[illegal])}; allowed: -1 and 0..{spec.num_local_experts - 1}"
    else:
        reason = f"allowed: -1 (skip) and 0..{spec.num_experts + spec.shared_slots - 1}"
    raise ValueError(f"{slots}; {reason}; {len(where)} illegal ids in all")


def input_stages(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, routing: Routing, expert_scales: torch.Tensor | None
) -> list[Stage]:
    """The caller's tensors as stages: a NaN that came in is not blamed on the layer."""
    token = torch.arange(len(hidden_states), device=hidden_states.device)
    stages = [
        Stage("hidden_states", hidden_states.isnan().any(-1), token, torch.full_like(token, NO_EXPERT)),
        routing.slot_stage("topk_weights", topk_weights.isnan()),
    ]
    if expert_scales is not None:
        known = (routing.ids >= 0) & (routing.ids < len(expert_scales))
        factor = expert_scales[torch.where(known, routing.ids, 0)]
        stages.append(routing.slot_stage("expert_scales", factor.isnan() & known))
    return stages


def weight_stages(tensors: dict[str, torch.Tensor], routing: Routing, spec: LayerSpec) -> list[Stage]:
    """A layer's own tensors as stages, by argument name: which slots met an expert that holds a NaN.

    Without them a NaN of a weight would go unseen where the intermediate cannot hold it (E2M1 has no NaN), and be
    named after a later stage. Per-expert tensors are [E', ...] or, for w13, w2 and their scales, [E, ...]; [S, ...] of
    shared slots belong to the local experts after those; a dense shared MLP's and x_gsf to every token.
    """
    stages = []
    used = routing.local[routing.here].unique().tolist()
    for name, tensor in tensors.items():
        fmt = _format(name, tensors, spec)
        if name == "x_gsf" or (name.startswith("shared_") and not spec.shared_slots):
            token = torch.arange(len(routing.ids), device=tensor.device)
            nan = torch.full_like(token, _holds_nan(tensor, fmt), dtype=torch.bool)
            stages.append(Stage(name, nan, token, torch.full_like(token, NO_EXPERT)))
            continue
        first = spec.num_local_experts if name.startswith("shared_") else 0
        held = [e for e in used if 0 <= e - first < len(tensor) and _holds_nan(tensor[e - first], fmt)]
        nan = torch.isin(routing.local, torch.tensor(held, dtype=torch.int64, device=tensor.device))
        stages.append(routing.slot_stage(name, nan))
    return stages


def _format(name: str, tensors: dict[str, torch.Tensor], spec: LayerSpec) -> str:
    """How a tensor of `weight_stages` spells NaN: a scale format, an element format or fp32."""
    if name.endswith("_scale"):
        return scale_of(spec.recipe, element_format(tensors[name.removesuffix("_scale")]))[0] or "fp32"
    return element_format(tensors[name]) if name.removeprefix("shared_") in ("w13", "w2") else "fp32"


def _holds_nan(tensor: torch.Tensor, fmt: str) -> bool:
    if fmt == "e2m1":
        return False
    if fmt in ("fp32", "bf16"):
        return bool(tensor.isnan().any())
    data = tensor.contiguous().reshape(-1).view(torch.uint8)  # scales come as bytes or as words of four
    return bool(((data == 0xFF) if fmt == "ue8m0" else (data & 0x7F) == 0x7F).any())


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
    sf: torch.Tensor | None,
    scale_format: str | None,
    group: int,
    token: torch.Tensor,
    expert: torch.Tensor | None = None,
) -> Stage:
    """The rows of a quantized tensor that dequantize to a NaN.

    q: E4M3 or BF16 [n, C] or packed E2M1 [n, C/2]; sf: one scale per `group` columns (0: one per row) in its first
    columns, padding after them. E2M1 has no NaN; E4M3 and UE4M3 have 0x7F, UE8M0 has 0xFF.
    """
    packed = q.dtype == torch.uint8
    columns = q.shape[1] * (2 if packed else 1)
    if q.dtype == torch.float8_e4m3fn:
        nan = ((q.view(torch.uint8) & 0x7F) == 0x7F).any(-1)
    else:
        nan = torch.zeros(len(q), dtype=torch.bool, device=q.device) if packed else q.isnan().any(-1)
    if sf is not None:
        sf = sf[:, : -(-columns // group) if group else 1]
        if scale_format == "fp32":
            nan |= sf.isnan().any(-1)
        else:
            nan |= (sf == 0xFF if scale_format == "ue8m0" else (sf & 0x7F) == 0x7F).any(-1)
    return Stage(name, nan, token, torch.full_like(token, NO_EXPERT) if expert is None else expert)


def row_stages(rows: torch.Tensor, routing: Routing) -> list[Stage]:
    """GEMM 2's rows BF16 [T, K (+1), H], that of a dense shared MLP last; what no expert serves holds anything."""
    top_k = routing.ids.shape[1]
    nan = rows.isnan().any(-1)
    stages = [routing.slot_stage("down", nan[:, :top_k])]
    if rows.shape[1] > top_k:
        token = torch.arange(len(rows), device=rows.device)
        stages.append(Stage("shared down", nan[:, top_k], token, torch.full_like(token, NO_EXPERT)))
    return stages
