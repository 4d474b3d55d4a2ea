"""The Triton kernels: on GPUs of compute capability 9.x, 10.x and 12.x, and in Triton's CPU interpreter."""

from __future__ import annotations

import os

import torch

from megamoe.backends.base import LayerRequest, layer_unsupported_reason
from megamoe.debug import Stage, quantized_stage, row_stages
from megamoe.kernels.config import INTERPRETER, choose_config, illegal_reason
from megamoe.oracle import interpreter
from megamoe.plain_weights import PlainWeights
from megamoe.weights import MoEWeights, prepare

CAPABILITIES = (9, 10, 12)


class TritonBackend:
    name = "triton"

    def unsupported_reason(self, request: LayerRequest) -> str | None:
        reason = layer_unsupported_reason(request) or device_unsupported_reason(request.device)
        if reason is not None:
            return reason
        from megamoe.kernels.pre_dispatch import MAX_HIDDEN

        if request.spec.hidden > MAX_HIDDEN:
            return f"hidden={request.spec.hidden} is more than the pre-dispatch serves, {MAX_HIDDEN}"
        arch = architecture(request.device)
        config = choose_config(request.spec, arch, request.max_tokens)
        return illegal_reason(config, request.spec, arch)

    def open(
        self,
        request: LayerRequest,
        weights: PlainWeights | MoEWeights,
        *,
        expert_scales: torch.Tensor | None = None,
        routed_scaling_factor: float = 1.0,
    ) -> TritonLayer:
        if isinstance(weights, PlainWeights):
            weights = prepare(weights, request.spec.recipe)
        return TritonLayer(request, weights, expert_scales, routed_scaling_factor)


class TritonLayer:
    """Prepared weights and the workspace that every call reuses."""

    def __init__(
        self,
        request: LayerRequest,
        weights: MoEWeights,
        expert_scales: torch.Tensor | None,
        routed_scaling_factor: float,
    ) -> None:
        # Not at the top: `auto` and `doctor` ask about this backend without loading a kernel.
        from megamoe.workspace import Workspace

        self._spec = request.spec
        self._weights = weights
        self._expert_scales = expert_scales
        self._routed_scaling_factor = routed_scaling_factor
        self._arch = architecture(request.device)
        smallest = choose_config(request.spec, self._arch, 1).block_m  # tiles only grow with the tokens
        self._workspace = Workspace.allocate(request.spec, request.max_tokens, request.device, min_block_m=smallest)

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.nbytes

    @property
    def weight_bytes(self) -> int:
        return self._weights.nbytes

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
            weights=self._weights,
            spec=self._spec,
            config=choose_config(self._spec, self._arch, hidden_states.shape[0]),
            expert_scales=self._expert_scales,
            routed_scaling_factor=self._routed_scaling_factor,
        )

    def stages(self, topk_ids: torch.Tensor) -> list[Stage]:
        ws, spec = self._workspace, self._spec
        t, n = spec.traits, topk_ids.shape[0]
        tokens = torch.arange(n, device=topk_ids.device)
        # GEMM 1 writes in permuted order: row r belongs to slot sorted_slots[r].
        slots = ws.plan.sorted_slots[: int(ws.plan.expert_offsets[-1])].long()
        stages = [
            quantized_stage("pre_dispatch", ws.x_q[:n], ws.x_sf[:n], t.act_scale_format, t.act_group, tokens),
            quantized_stage(
                "gate_up",
                ws.act_q[: len(slots)],
                ws.act_sf[: len(slots)],
                t.mid_scale_format,
                t.mid_group,
                slots // spec.top_k,
                topk_ids.flatten()[slots].long(),
            ),
        ]
        if ws.shared_act_q is not None and ws.shared_act_sf is not None:
            shared = ws.shared_act_q[:n], ws.shared_act_sf[:n]
            stages.append(quantized_stage("shared gate_up", *shared, t.mid_scale_format, t.mid_group, tokens))
        return [*stages, *row_stages(ws.rows[:n], topk_ids, spec.num_experts)]


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
