"""The plain-tensor API: `mega_moe` per call, `prepare_weights` + `MegaMoE` for serving.

Contract: y[t] = Σ_k down(w[t,k] · swiglu(gate_up(x[t]))) over the chosen experts, plus the shared experts
with weight 1, in the numbers that the recipe fixes (`megamoe.recipe`), rounded where its numerics say. The
backend decides where that runs, never what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch

from megamoe import debug, validation
from megamoe.backends import select
from megamoe.backends.base import Layer, LayerRequest, UnsupportedError
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import Recipe, resolve_recipe, traits
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights, prepare


def mega_moe(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    mma_type: str,
    act_scale: str | None = None,
    numerics: str | None = None,
    w13_layout: str = "gate_up",
    shared_w13: torch.Tensor | None = None,
    shared_w13_scale: torch.Tensor | None = None,
    shared_w2: torch.Tensor | None = None,
    shared_w2_scale: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    l1_alphas: torch.Tensor | None = None,
    l2_alphas: torch.Tensor | None = None,
    l2_act_scales: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    x_gsf: torch.Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    activation_alpha: float | torch.Tensor | None = None,
    activation_beta: float | torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    local_expert_offset: int = 0,
    num_experts: int | None = None,
    expert_map: torch.Tensor | None = None,
    check_ids: bool = False,
    output: torch.Tensor | None = None,
    moe_backend: str = "triton",
) -> torch.Tensor:
    """One MoE layer on plain tensors. Prepares the weights anew at every call: use `MegaMoE` for serving.

    hidden_states BF16 [T, H], rows may be strided; topk_ids int32 or int64 [T, K], −1 skips a slot and any
    other id outside [0, E) is skipped too (`check_ids=True` raises instead); topk_weights float32 [T, K].

    Weights, contiguous, all on one device with the tokens:

    | `mma_type` | w13, gate rows then up rows | w13_scale | w2 | w2_scale |
    |---|---|---|---|---|
    | `fp8xfp4`, `mxf4xmxf4` | uint8/int8 [E, 2I, H/2] | UE8M0 [E, 2I, H/32] | [E, H, I/2] | [E, H, I/32] |
    | `nvfp4xnvfp4` | uint8/int8 [E, 2I, H/2] | UE4M3 [E, 2I, H/16] | [E, H, I/2] | [E, H, I/16] |
    | `fp8xfp8` | float8_e4m3fn [E, 2I, H] | float32 [E, 2I/128, H/128] | [E, H, I] | [E, H/128, I/128] |

    UE8M0 scales are uint8 or float8_e8m0fnu, UE4M3 scales uint8 or float8_e4m3fn. `act_scale=None` and
    `numerics=None` mean the first legal row of the recipe table for `mma_type`; `numerics="deep_gemm"` its
    DeepGEMM row.

    shared_*: S shared experts as one dense MLP, [2·I·S, H] and [H, I·S], all four or none; their dtype
    decides their format (beside `fp8xfp4` E4M3 with UE8M0/32 scales or MXFP4, elsewhere the routed format).
    l1_alphas, l2_alphas, l2_act_scales: NVFP4's global scales of the routed experts, float32 [E, 2] (gate, up), [E] and
    [E]; they multiply the accumulators of GEMM 1, those of GEMM 2, and the activated values before requantization.
    expert_scales: float32 [E], multiplied into the top-k weights of each expert's slots.
    routed_scaling_factor: multiplied into every top-k weight; shared experts keep weight 1.
    activation: "swiglu" gate·sigmoid(gate)·up; "swigluoai" gate·sigmoid(alpha·gate)·(up + beta); "situ" (`fp8xfp4`, no
    clamp) 4·tanh(gate/4)·sigmoid(gate)·25·tanh(up/25).
    activation_clamp: c in gate = min(gate, c), up = clamp(up, −c, c); None or inf: no clamp.
    activation_alpha, activation_beta: those of "swigluoai"; None: 1.702 and 1.
    output: BF16 [T, H] to write into; allocated when None. T = 0 is allowed.
    moe_backend: "triton", "reference" or "auto" (triton where it can run, else reference).

    Raises `TypeError`/`ValueError` naming the argument, or `UnsupportedError` (a `NotImplementedError`) with
    the backend's reason for what is legal but not served; nothing is launched or written then.
    """
    recipe = resolve_recipe(mma_type, act_scale, numerics)
    per_expert = {
        name: value
        for name, value in (("activation_alpha", activation_alpha), ("activation_beta", activation_beta))
        if isinstance(value, torch.Tensor)
    }
    checked_activation = validation.check_activation(
        recipe,
        activation,
        activation_clamp,
        None if "activation_alpha" in per_expert else activation_alpha,
        None if "activation_beta" in per_expert else activation_beta,
    )
    factor = validation.check_routed_scaling_factor(routed_scaling_factor)
    validation.check_choice("w13_layout", w13_layout, validation.W13_LAYOUTS)
    validation.check_flag("check_ids", check_ids)
    weights = PlainWeights(
        w13, w13_scale, w2, w2_scale, shared_w13, shared_w13_scale, shared_w2, shared_w2_scale,
        l1_alphas, l2_alphas, l2_act_scales,
    )  # fmt: skip
    dims = validation.read_dims(weights, recipe)
    options = _options_in_use(
        dims.num_experts,
        arguments={
            "w13_bias": w13_bias, "w2_bias": w2_bias, "x_gsf": x_gsf, "expert_map": expert_map,
            **per_expert,
        },
        w13_layout=w13_layout,
        local_expert_offset=local_expert_offset,
        num_experts=num_experts,
    )  # fmt: skip
    num_tokens, top_k = validation.read_token_dims(hidden_states, topk_ids)
    spec = _layer_spec(recipe, dims, top_k, checked_activation)
    request = LayerRequest(spec, w13.device, max(num_tokens, 1), options)
    backend = select(moe_backend, request)

    validation.check_weights(weights, recipe)
    call = _Call(spec, w13.device, check_ids)
    output = call.checked_output(hidden_states, topk_ids, topk_weights, output)
    if expert_scales is not None:
        validation.check_expert_scales(expert_scales, dims.num_experts, w13.device)
    layer = backend.open(request, _as_bytes(weights, recipe), expert_scales=expert_scales, routed_scaling_factor=factor)
    return call.run(layer, hidden_states, topk_ids, topk_weights, output)


def prepare_weights(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    mma_type: str,
    act_scale: str | None = None,
    numerics: str | None = None,
    shared_w13: torch.Tensor | None = None,
    shared_w13_scale: torch.Tensor | None = None,
    shared_w2: torch.Tensor | None = None,
    shared_w2_scale: torch.Tensor | None = None,
    l1_alphas: torch.Tensor | None = None,
    l2_alphas: torch.Tensor | None = None,
    l2_act_scales: torch.Tensor | None = None,
) -> MoEWeights:
    """Bring plain weights (see `mega_moe`) into the byte order the kernels read, once at load.

    w13 and the scales are copied; w2, which needs no reordering, is kept as it is and shared with the caller.
    Works on every device, the CPU included. Raises as `mega_moe` does.
    """
    recipe = resolve_recipe(mma_type, act_scale, numerics)
    missing = traits(recipe).missing
    if missing is not None:
        raise UnsupportedError(f"recipe {recipe} {missing}")
    weights = PlainWeights(
        w13, w13_scale, w2, w2_scale, shared_w13, shared_w13_scale, shared_w2, shared_w2_scale,
        l1_alphas, l2_alphas, l2_act_scales,
    )  # fmt: skip
    validation.check_weights(weights, recipe)
    return prepare(_as_bytes(weights, recipe), recipe)


class MegaMoE:
    """A layer ready to serve: prepared weights and every buffer of a call, allocated once.

    weights: what `prepare_weights` returned; it fixes the device. max_tokens: most tokens of one call. top_k:
    K, 1…32. The other arguments are `mega_moe`'s.

    Calls launch on the current stream, wait for nothing and, after `warmup`, allocate nothing but an output
    that was not given, so they can be captured in a CUDA graph. `warmup` compiles for contiguous tensors that start on
    16 bytes; strided rows or other starts compile once more at their first call. One object serves one stream at a
    time: its calls share one workspace.
    """

    def __init__(
        self,
        weights: MoEWeights,
        max_tokens: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        activation_clamp: float | None = None,
        activation_alpha: float | None = None,
        activation_beta: float | None = None,
        expert_scales: torch.Tensor | None = None,
        routed_scaling_factor: float = 1.0,
        check_ids: bool = False,
        moe_backend: str = "triton",
    ) -> None:
        if not isinstance(weights, MoEWeights):
            raise TypeError(f"weights is a {type(weights).__name__}; expected what megamoe.prepare_weights returns")
        validation.check_count("max_tokens", max_tokens, 1)
        validation.check_count("top_k", top_k, 1, validation.MAX_TOP_K)
        validation.check_flag("check_ids", check_ids)
        checked_activation = validation.check_activation(
            weights.recipe, activation, activation_clamp, activation_alpha, activation_beta
        )
        factor = validation.check_routed_scaling_factor(routed_scaling_factor)
        dims = validation.WeightDims(
            weights.num_experts,
            weights.hidden,
            weights.intermediate,
            weights.num_shared_experts,
            None if weights.shared is None else weights.shared.format,
        )
        if expert_scales is not None:
            validation.check_expert_scales(expert_scales, dims.num_experts, weights.device)
        self.spec = _layer_spec(weights.recipe, dims, top_k, checked_activation)
        self.max_tokens = max_tokens
        self.device = weights.device
        self._call = _Call(self.spec, self.device, check_ids)
        request = LayerRequest(self.spec, self.device, max_tokens)
        backend = select(moe_backend, request)
        self.backend = backend.name
        self._layer = backend.open(request, weights, expert_scales=expert_scales, routed_scaling_factor=factor)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's BF16 [T, H] for T <= max_tokens tokens; arguments as in `mega_moe`."""
        output = self._call.checked_output(hidden_states, topk_ids, topk_weights, output, max_tokens=self.max_tokens)
        return self._call.run(self._layer, hidden_states, topk_ids, topk_weights, output)

    def warmup(self, token_counts: Iterable[int]) -> None:
        """Run once per token count (1…max_tokens) on made-up inputs, so that later calls compile nothing."""
        counts = [validation.check_count("token_counts", n, 1, self.max_tokens) for n in token_counts]
        spec = self.spec
        for n in counts:
            x = torch.ones(n, spec.hidden, dtype=torch.bfloat16, device=self.device)
            slots = torch.arange(n * spec.top_k, device=self.device).reshape(n, spec.top_k)
            weights = torch.ones(n, spec.top_k, dtype=torch.float32, device=self.device)
            for dtype in (torch.int32, torch.int64):
                self._layer(x, (slots % spec.num_experts).to(dtype), weights, torch.empty_like(x))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the preallocated workspace."""
        return self._layer.workspace_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as the backend holds them."""
        return self._layer.weight_bytes


@dataclass(frozen=True)
class _Call:
    """What every call does around the backend: check, allocate the output, debug."""

    spec: LayerSpec
    device: torch.device
    check_ids: bool

    def checked_output(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor | None,
        *,
        max_tokens: int | None = None,
    ) -> torch.Tensor:
        """Check a call's tensors; the output to write, allocated when not given."""
        hidden = self.spec.hidden
        validation.check_hidden_states(hidden_states, hidden, self.device)
        num_tokens = hidden_states.shape[0]
        if max_tokens is not None and num_tokens > max_tokens:
            raise ValueError(f"hidden_states has {num_tokens} tokens; allowed: at most max_tokens = {max_tokens}")
        validation.check_routing(topk_ids, topk_weights, num_tokens, self.spec.top_k, self.device)
        if output is None:
            return torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=self.device)
        return validation.check_output(output, num_tokens, hidden, self.device)

    def run(
        self,
        layer: Layer,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        debugging = debug.enabled()
        if self.check_ids or debugging:
            debug.refuse_capture(self.device)
            debug.check_ids(topk_ids, self.spec.num_experts)
        if len(hidden_states) == 0:
            return output
        if debugging:  # before the run, which may overwrite them: `output` may be `hidden_states`
            debug.raise_on_nan(debug.input_stages(hidden_states, topk_ids, topk_weights, self.spec.num_experts))
        layer(hidden_states, topk_ids, topk_weights, output)
        if debugging:
            debug.raise_on_nan([*layer.stages(topk_ids), debug.output_stage(output)])
        return output


def _layer_spec(
    recipe: Recipe, dims: validation.WeightDims, top_k: int, activation: validation.Activation
) -> LayerSpec:
    return LayerSpec(
        recipe,
        hidden=dims.hidden,
        intermediate=dims.intermediate,
        num_experts=dims.num_experts,
        top_k=top_k,
        num_shared_experts=dims.num_shared_experts,
        shared_weight=dims.shared_weight,
        **activation._asdict(),
    )


def _options_in_use(
    experts_in_w13: int,
    *,
    arguments: dict[str, object],
    w13_layout: str,
    local_expert_offset: int,
    num_experts: int | None,
) -> tuple[str, ...]:
    """The `LayerRequest.options` of a call."""
    options = [name for name, value in arguments.items() if value is not None]
    if w13_layout != "gate_up":
        options.append(f"w13_layout={w13_layout!r}")
    if validation.check_count("local_expert_offset", local_expert_offset, 0):
        options.append(f"local_expert_offset={local_expert_offset}")
    if num_experts is not None and validation.check_count("num_experts", num_experts, 1) != experts_in_w13:
        options.append(f"num_experts={num_experts} (w13 holds {experts_in_w13})")
    return tuple(options)


def _as_bytes(weights: PlainWeights, recipe: Recipe) -> PlainWeights:
    """The same weights with packed elements and scale bytes as uint8, whatever label they came with."""
    labels = {torch.int8, torch.float8_e8m0fnu}
    raw: dict[str, torch.Tensor] = {}
    for field in fields(weights):
        tensor = getattr(weights, field.name)
        is_ue4m3 = field.name.endswith("_scale") and traits(recipe).weight_scale_format == "ue4m3"
        if tensor is not None and (is_ue4m3 or tensor.dtype in labels):
            raw[field.name] = tensor.view(torch.uint8)
    return replace(weights, **raw)
