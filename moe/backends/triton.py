"""The Triton kernels: on GPUs of compute capability 9.x, 10.x and 12.x, and in Triton's CPU interpreter."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from megamoe.backends.base import Layer, LayerRequest, layer_unsupported_reason
from megamoe.debug import Routing, Stage, quantized_stage, row_stages
from megamoe.kernels.config import INTERPRETER, LayerConfig, choose_config, illegal_reason
from megamoe.oracle import interpreter
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights, prepare

if TYPE_CHECKING:
    from megamoe.workspace import Workspace

CAPABILITIES = (9, 10, 12)


class TritonBackend:
    name = "triton"

    def unsupported_reason(self, request: LayerRequest) -> str | None:
        reason = layer_unsupported_reason(request) or device_unsupported_reason(request.device)
        if reason is not None:
            return reason
        return kernels_unsupported_reason(request.spec, architecture(request.device), request.max_tokens) or (
            memory_unsupported_reason(request)
        )

    def open(self, request: LayerRequest, weights: PlainWeights | MoEWeights, parameters: LayerParameters) -> Layer:
        if isinstance(weights, PlainWeights):
            weights = prepare(weights, request.spec.recipe)
        if architecture(request.device) == 90:
            # Not at the top: it loads Gluon, which the interpreter has no use for.
            from megamoe.backends.hopper import HopperLayer, hopper_unsupported_reason

            if hopper_unsupported_reason(request, weights, parameters) is None:
                return HopperLayer(request, weights, parameters)
        return TritonLayer(request, weights, parameters)


class TritonLayer:
    """Prepared weights and the workspace that every call reuses."""

    def __init__(self, request: LayerRequest, weights: MoEWeights, parameters: LayerParameters) -> None:
        self.weights = weights
        self._spec = request.spec
        self._parameters = parameters
        self._arch = architecture(request.device)
        self._workspace = allocate_workspace(request, request.device)
        self._workspace.plan.skipped.zero_()  # no call yet

    @property
    def skipped_ids(self) -> int:
        return int(self._workspace.plan.skipped)

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.nbytes

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        from megamoe.kernels.layer import run_layer

        run_layer(
            hidden_states,
            topk_ids,
            topk_weights,
            output,
            ws=self._workspace,
            weights=self.weights,
            spec=self._spec,
            config=choose_config(self._spec, self._arch, hidden_states.shape[0]),
            parameters=self._parameters,
        )

    def stages(self, routing: Routing) -> list[Stage]:
        ws, spec = self._workspace, self._spec
        t, n = spec.traits, len(routing.ids)
        tokens = torch.arange(n, device=routing.ids.device)
        # GEMM 1 writes in permuted order: row r belongs to slot sorted_slots[r].
        slots = ws.plan.sorted_slots[: int(ws.plan.expert_offsets[-1])].long()
        x_sf = None if ws.x_sf is None else ws.x_sf[:n]
        act_sf = None if ws.act_sf is None else ws.act_sf[: len(slots)]
        stages = [
            quantized_stage("pre_dispatch", ws.x_q[:n], x_sf, t.act_scale_format, t.act_group, tokens),
            quantized_stage(
                "gate_up",
                ws.act_q[: len(slots)],
                act_sf,
                t.mid_scale_format,
                t.mid_group,
                slots // spec.top_k,
                routing.ids.flatten()[slots],
            ),
        ]
        if ws.shared_act_q is not None:
            shared_sf = None if ws.shared_act_sf is None else ws.shared_act_sf[:n]
            shared = ws.shared_act_q[:n], shared_sf
            stages.append(quantized_stage("shared gate_up", *shared, t.mid_scale_format, t.mid_group, tokens))
        return [*stages, *row_stages(ws.rows[:n], routing)]


def kernels_unsupported_reason(spec: LayerSpec, arch: int, max_tokens: int) -> str | None:
    """Why no kernel runs `spec` on `arch` with up to `max_tokens` tokens, or None; asks for no device."""
    # Not at the top: `auto` and `doctor` ask about this backend without loading a kernel.
    from megamoe.kernels.pre_dispatch import MAX_HIDDEN
    from megamoe.kernels.routing import MAX_SLOTS

    if spec.hidden > MAX_HIDDEN:
        return f"hidden={spec.hidden} is more than the pre-dispatch serves, {MAX_HIDDEN}"
    if max_tokens * spec.top_k > MAX_SLOTS:
        return f"max_tokens={max_tokens} with top_k={spec.top_k} makes more slots than routing numbers, {MAX_SLOTS}"
    for config in configs(spec, arch, max_tokens):
        reason = illegal_reason(config, spec, arch)
        if reason is not None:
            return reason
    return None


def configs(spec: LayerSpec, arch: int, max_tokens: int) -> list[LayerConfig]:
    """Every configuration that `choose_config` picks for 1…`max_tokens` tokens.

    The choice only moves one way as tokens grow, so that equal ends mean one choice in between.
    """

    def between(low: int, first: LayerConfig, high: int, last: LayerConfig) -> list[LayerConfig]:
        if first == last or high - low == 1:
            return []
        middle = (low + high) // 2
        chosen = choose_config(spec, arch, middle)
        return [*between(low, first, middle, chosen), chosen, *between(middle, chosen, high, last)]

    first, last = choose_config(spec, arch, 1), choose_config(spec, arch, max_tokens)
    return list(dict.fromkeys([first, *between(1, first, max_tokens, last), last]))


def allocate_workspace(request: LayerRequest, device: torch.device) -> Workspace:
    """The workspace of a layer of `request`, on `device`; on "meta" it takes no memory."""
    from megamoe.workspace import Workspace

    smallest = min(c.block_m for c in configs(request.spec, architecture(request.device), request.max_tokens))
    return Workspace.allocate(request.spec, request.max_tokens, device, min_block_m=smallest)


def device_memory(device: torch.device) -> int:
    """Bytes of memory that `device` has, free or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_unsupported_reason(request: LayerRequest) -> str | None:
    """Why the device can't hold the workspace of `request`, whatever else is on it, or None."""
    needed = allocate_workspace(request, torch.device("meta")).nbytes
    present = device_memory(request.device)
    if needed <= present:
        return None
    return (
        f"max_tokens={request.max_tokens} needs a workspace of {needed / 2**30:.1f} GiB; {request.device} has "
        f"{present / 2**30:.1f} GiB in all"
    )


def device_unsupported_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on tensors of `device` in this process, or None."""
    if device.type not in ("cpu", "cuda"):
        return f"device type {device.type!r}; served: cuda, and cpu in Triton's interpreter"
    if interpreter.is_active():
        return None
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 without megamoe.oracle.interpreter.install(): its roundings would be wrong"
    if device.type == "cpu":
        return (
            "CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before triton is first imported, "
            "then call megamoe.oracle.interpreter.install()"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major not in CAPABILITIES:
        served = ", ".join(f"{capability}.x" for capability in CAPABILITIES)
        return f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; served: {served}"
    return None


def architecture(device: torch.device) -> int:
    """The `arch` of `megamoe.kernels.config` for a device the kernels can run on."""
    return INTERPRETER if interpreter.is_active() else 10 * torch.cuda.get_device_capability(device)[0]


BACKEND = TritonBackend()
