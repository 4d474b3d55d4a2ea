"""SGLang's MegaMoE path on layers of every kind, against the reference."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

import megamoe.deep_gemm
from megamoe.oracle.metrics import LIMITS, compare
from megamoe.oracle.random_layers import Layer, random_layer
from megamoe.oracle.reference import moe_layer
from megamoe.parameters import LayerParameters
from megamoe.recipe import Recipe

MX = Recipe("fp8xfp4", "mx32", "deep_gemm_sm100")
W4A4 = Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100")
FACTOR, CLAMP, CAP = 2.5, 1.5, 64


@dataclass(frozen=True)
class Route:
    """One route through SGLang: the capability it is told, the flag for MXFP4 activations, whose numbers come out."""

    sm: int
    w4a4: bool
    recipe: Recipe

    @property
    def fp8_experts(self) -> bool:
        return self.recipe.mma_type == "fp8xfp8"

    @property
    def factor_in_weights(self) -> bool:
        """SM90's pre-dispatch scales the weights; the SM100 kinds' y is scaled afterwards."""
        return self.recipe.numerics == "deep_gemm_sm90"


ROUTES = {
    "SM100 FP8 tokens, MXFP4 experts": Route(100, False, MX),
    "SM100 MXFP4 tokens, MXFP4 experts": Route(100, True, W4A4),
    "SM90 FP8 experts": Route(90, False, Recipe("fp8xfp8", "block128", "deep_gemm_sm90")),
    "SM90 FP8 tokens, MXFP4 experts": Route(90, False, Recipe("fp8xfp4", "block128", "deep_gemm_sm90")),
    "SM90 MXFP4 tokens, MXFP4 experts": Route(90, True, W4A4),
}


class Server:
    """What a server's process state tells the MegaMoE code, in one place."""

    def __init__(self, sglang: SimpleNamespace, deep_gemm: Any) -> None:
        self.sglang, self.deep_gemm = sglang, deep_gemm
        self.capturing = False
        self.w4a4 = False
        mega_moe = sglang.mega_moe
        mega_moe.get_is_capture_mode = lambda: self.capturing
        mega_moe.get_dp_global_num_tokens = lambda: None
        mega_moe.is_dsa_enable_prefill_cp = lambda: False
        mega_moe.get_exec = lambda: SimpleNamespace(moe=SimpleNamespace(enable_w4a4_mxfp4_megamoe=self.w4a4))
        mega_moe.ExpertLocationDispatchInfo = SimpleNamespace(init_new=lambda layer_id: None)
        mega_moe._mega_moe_max_num_sms = lambda: None if mega_moe._device_sm < 100 else 130
        group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        sglang.parallel_state.get_moe_ep_group = lambda: SimpleNamespace(device_group=group)
        sglang.runtime_context.get_flags().moe.a2a_backend = sglang.utils.MoeA2ABackend.MEGAMOE
        os.environ["SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK"] = str(CAP)

    def take(self, route: Route) -> None:
        self.w4a4 = route.w4a4
        self.sglang.mega_moe._device_sm = self.sglang.mega_moe_sm90._device_sm = route.sm
        megamoe.deep_gemm._pretend_sm = route.sm


def layer_of(route: Route, device: str) -> Layer:
    """Small on the CPU; the last token is so quiet that the floor of its scales decides what is left of it."""
    small = device == "cpu"
    layer = random_layer(
        route.recipe,
        tokens=4 if small else 64,
        hidden=512 if small else 2048,
        intermediate=512 if route.sm == 100 or route.w4a4 else 256,
        num_experts=3 if small else 16,
        top_k=2,
        activation_clamp=CLAMP,
        device=device,
    )
    layer.x[-1] *= 1e-9
    return layer


def experts_of(layer: Layer) -> SimpleNamespace:
    """SGLang's layer of experts as its checkpoint loader leaves it."""
    w = layer.weights
    assert w.w13_scale is not None
    assert w.w2_scale is not None
    tensors = {"w13_weight": w.w13, "w2_weight": w.w2, "w13_weight_scale_inv": w.w13_scale,
               "w2_weight_scale_inv": w.w2_scale}  # fmt: skip
    experts = SimpleNamespace(num_experts=layer.spec.num_experts, should_fuse_routed_scaling_factor_in_topk=False)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.uint8:
            tensor = tensor.view(torch.float8_e8m0fnu).float() if "scale" in name else tensor.view(torch.int8)
        setattr(experts, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return experts


def moe_of(layer: Layer, experts: Any) -> SimpleNamespace:
    """SGLang's MoE block; its gate and its top-k answer with the layer's routing."""
    spec = layer.spec
    return SimpleNamespace(
        config=SimpleNamespace(
            hidden_size=spec.hidden,
            num_experts_per_tok=spec.top_k,
            moe_intermediate_size=spec.intermediate,
            swiglu_limit=spec.activation_clamp,
        ),
        experts=experts,
        gate=lambda hidden_states, forward_batch=None: hidden_states,
        topk=lambda *_, **__: SimpleNamespace(topk_ids=layer.topk_ids, topk_weights=layer.topk_weights),
        is_hash=False,
        num_fused_shared_experts=0,
        layer_id=0,
        routed_scaling_factor=FACTOR,
        alt_stream=None,
        _forward_shared_experts=lambda hidden_states: None,
    )


def expected(route: Route, layer: Layer) -> torch.Tensor:
    """The reference's y, scaled where SGLang does it."""
    parameters = LayerParameters(routed_scaling_factor=FACTOR if route.factor_in_weights else 1.0)
    # SGLang's own pre-dispatch of FP8 has another floor than DeepGEMM's; on Hopper both have it.
    floor = 1e-10 if route.recipe == MX else None
    y = moe_layer(
        layer.x, layer.topk_ids, layer.topk_weights, layer.weights, layer.spec,
        parameters=parameters, amax_floor=floor, full_trace=False,
    ).y  # fmt: skip
    return y if route.factor_in_weights else y * FACTOR


def judged(route: Route, y: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    report, limits = compare(y, wanted), LIMITS[route.recipe]
    return {
        "rel_rms": report.rel_rms,
        "worst_row": report.worst_row,
        "ok": report.rel_rms <= limits.rel_rms and report.worst_row <= limits.worst_row,
    }


def run_route(server: Server, name: str, device: str) -> dict[str, Any]:
    """Weights loaded and a forward pass by SGLang's functions; then as an idle rank; on a GPU also from a graph."""
    route, mega_moe, sm90 = ROUTES[name], server.sglang.mega_moe, server.sglang.mega_moe_sm90
    server.take(route)
    layer = layer_of(route, device)
    experts = experts_of(layer)
    build = sm90.build_sm90_mega_moe_experts_weights if route.fp8_experts else mega_moe.build_mega_moe_experts_weights
    build(experts)
    moe = moe_of(layer, experts)
    budget = server.deep_gemm.get_num_sms()
    y = mega_moe.forward_mega_moe(moe, layer.x)
    report = {
        **judged(route, y, expected(route, layer)),
        "chosen": mega_moe.should_use_mega_moe(moe, layer.x),
        "chosen without hooks": route.sm != 90 or sm90.is_sm90_fp8_mega_moe_available.__wrapped__(experts),
        "idle rank": list(mega_moe.forward_mega_moe(moe, layer.x[:0]).shape),
        "hidden": layer.spec.hidden,
        "SM budget kept": server.deep_gemm.get_num_sms() == budget,
    }
    if device == "cuda":
        report["graph"] = _from_graph(server, route, layer, moe)
    return report


def _from_graph(server: Server, route: Route, layer: Layer, moe: Any) -> dict[str, Any]:
    """Captured with the shared experts on the main stream and the routed ones beside it; replayed with other tokens."""
    shared = torch.randn_like(layer.x)
    moe._forward_shared_experts = lambda hidden_states: shared
    moe.alt_stream = torch.cuda.Stream()
    server.capturing = True
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = server.sglang.mega_moe.forward_mega_moe(moe, layer.x)
    server.capturing = False
    layer.x.copy_(layer.x.flip(0) * 0.5)
    layer.topk_ids.copy_(layer.topk_ids.flip(0))
    y.fill_(torch.nan)
    graph.replay()
    return judged(route, y, expected(route, layer) + shared)


def run_hopper_order(server: Server, device: str) -> dict[str, Any]:
    """MXFP4 experts re-laid for Hopper's fast kernels; one call above the cap, where SGLang would take its fallback."""
    name = "SM90 FP8 tokens, MXFP4 experts"
    route, mega_moe = ROUTES[name], server.sglang.mega_moe
    server.take(route)
    layer = layer_of(route, device)
    experts = experts_of(layer)
    os.environ["MEGAMOE_HOPPER_ORDER"] = "1"
    try:
        mega_moe.build_mega_moe_experts_weights(experts)
    finally:
        del os.environ["MEGAMOE_HOPPER_ORDER"]
    moe = moe_of(layer, experts)
    report: dict[str, Any] = {
        "codes' dimensions": experts.mega_l1_weights[0].dim(),
        "in place": experts.mega_l1_weights[0].data_ptr() == experts.w13_weight.data.data_ptr(),
        "chosen": mega_moe.should_use_mega_moe(moe, layer.x),
        "above the cap": _error(lambda: mega_moe.should_use_mega_moe(moe, layer.x.new_empty(CAP + 1, 1))),
    }
    if device == "cuda":
        report |= judged(route, mega_moe.forward_mega_moe(moe, layer.x), expected(route, layer))
        report["graph"] = _from_graph(server, route, layer, moe)
    else:
        report["forward"] = _error(lambda: mega_moe.forward_mega_moe(moe, layer.x))
    return report


def _error(call: Any) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_api_checks(server: Server, device: str) -> dict[str, Any]:
    """What SGLang's test of its DeepGEMM API asks of mocks, asked of our module: buffers, weights, interleave."""
    mega_moe, report = server.sglang.mega_moe, {}
    for name in ("SM100 FP8 tokens, MXFP4 experts", "SM100 MXFP4 tokens, MXFP4 experts"):
        route = ROUTES[name]
        server.take(route)
        mma_type = mega_moe._mega_moe_mma_type()
        layer = layer_of(route, device)
        experts = experts_of(layer)
        method = object.__new__(server.sglang.mxfp4.Mxfp4MoEMethod)
        method.use_marlin = method.use_deep_gemm = False
        method.use_mega_moe = True
        # A layer of Mxfp4MoEMethod, with the checkpoint's scale bytes; w13 is replaced, not overwritten.
        other = SimpleNamespace(
            w13_weight=_parameter(experts.w13_weight.data.view(torch.uint8)),
            w2_weight=_parameter(experts.w2_weight.data.view(torch.uint8)),
            w13_weight_scale=_parameter(layer.weights.w13_scale),
            w2_weight_scale=_parameter(layer.weights.w2_scale),
        )
        method.process_weights_after_loading(other)
        mega_moe.build_mega_moe_experts_weights(experts)
        ours = (*other.mega_l1_weights, *other.mega_l2_weights)
        theirs = (*experts.mega_l1_weights, *experts.mega_l2_weights)
        group = server.sglang.parallel_state.get_moe_ep_group().device_group
        sizes = (group, layer.spec.num_experts, CAP, layer.spec.top_k, layer.spec.hidden, layer.spec.intermediate)
        buffer = mega_moe._get_mega_moe_symm_buffer(*sizes)
        report[mma_type] = {
            "weights as SGLang's": all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs)),
            "buffer's mma_type": buffer.mma_type,
            "buffer cached": mega_moe._get_mega_moe_symm_buffer(*sizes) is buffer,
            "buffer": id(buffer),
        }
    return report


def _parameter(tensor: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.clone(), requires_grad=False)
