"""The plain-tensor API: `mega_moe` per call, `prepare_weights` + `MegaMoE` for serving.

Contract: y[t] = Σ_k down(w[t,k] · swiglu(gate_up(x[t]))) over the chosen experts, plus the shared experts
with weight 1, in the numbers that the recipe fixes (`megamoe.recipe`), rounded where its numerics say. The
backend decides where that runs, never what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megamoe import debug, ops, validation
from megamoe.backend_choice import choose
from megamoe.backends.base import Layer, LayerRequest, named_tensors
from megamoe.options import LayerOptions, resolve
from megamoe.parameters import LayerParameters
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import resolve_recipe
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights, prepare


def mega_moe(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
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
    activation_clamp: float | torch.Tensor | None = None,
    activation_alpha: float | torch.Tensor | None = None,
    activation_beta: float | torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    local_expert_offset: int = 0,
    num_experts: int | None = None,
    expert_map: torch.Tensor | None = None,
    check_ids: bool = False,
    output: torch.Tensor | None = None,
    moe_backend: str | None = None,
) -> torch.Tensor:
    """One MoE layer on plain tensors. Prepares the weights anew at every call: use `MegaMoE` for serving.

    hidden_states BF16 [T, H], its rows may be strided; topk_ids int32 or int64 [T, K], global; topk_weights float32
    [T, K]; both of these contiguous. An id of −1 and the id of another rank's expert skip the slot; any other id that
    names no expert is skipped too (`check_ids=True` raises instead).

    Weights, all on one device with the tokens; the two last axes of a matrix contiguous, experts may be strided or
    expanded; scales, biases, l1_alphas, l2_alphas and l2_act_scales may have any strides:

    | `mma_type` | w13, gate rows then up rows | w13_scale | w2 | w2_scale |
    |---|---|---|---|---|
    | `fp8xfp4`, `mxf4xmxf4`, `bf16xfp4` | uint8/int8 [E, 2I, H/2] | UE8M0 [E, 2I, H/32] | [E, H, I/2] | [E, H, I/32] |
    | `nvfp4xnvfp4` | uint8/int8 [E, 2I, H/2] | UE4M3 [E, 2I, H/16] | [E, H, I/2] | [E, H, I/16] |
    | `fp8xfp8` | float8_e4m3fn [E, 2I, H] | float32 [E, 2I/128, H/128] | [E, H, I] | [E, H/128, I/128] |
    | `mxfp8xmxfp8` | float8_e4m3fn [E, 2I, H] | UE8M0 [E, 2I, H/32] | [E, H, I] | [E, H, I/32] |
    | `bf16xbf16` | bfloat16 [E, 2I, H] | None | [E, H, I] | None |

    UE8M0 scales are uint8 or float8_e8m0fnu, UE4M3 scales uint8 or float8_e4m3fn with the sign bit clear, which nothing
    checks: not every backend and GPU ignores it. H and I are multiples of 32; more where scale groups ask for it: 128
    for both under `block128`, for I under `token`; less, 16, under `nvfp4xnvfp4`. `act_scale=None` and `numerics=None`
    mean the first legal row of the recipe table for `mma_type`; `numerics="deep_gemm"` its DeepGEMM row.

    w13_layout: "gate_up", or "interleaved" where rows of w13, its scales and bias alternate: gate 0, up 0, gate 1, …
    shared_*: S shared experts, all of the tensors or none; their dtype decides their format (beside `fp8xfp4` E4M3 or
    MXFP4, elsewhere the routed format). Under DeepGEMM numerics one dense MLP with weight 1 on every token,
    [2·I·S, H], gate rows then up rows, and [H, I·S]. Under `trtllm_gen` S experts [S, 2I, H] and [S, H, I], which
    topk_ids name num_experts + s; their top-k weights are taken as they are.
    w13_bias [E, 2I], w2_bias [E, H]: float32 or bfloat16. This and every per-expert tensor of this rank has E rows,
    under `trtllm_gen` E + S, those of the shared experts last.
    l1_alphas, l2_alphas, l2_act_scales: global scales of NVFP4 and of every `trtllm_gen` recipe, float32 [E, 2] (gate,
    up), [E] and [E]; they multiply the accumulators of GEMM 1, those of GEMM 2, and the activated values before
    requantization, which l2_alphas must undo. Under DeepGEMM numerics they come first: biases, clamp and alpha are in
    the units of their products. Under `trtllm_gen`, with every recipe, they come late: w13_bias, the clamp and beta are
    in units of the accumulators, which l1_alphas have not met yet (times the token's scale, under `nv16_token`), alpha
    meets the gate that l1_alphas have multiplied, and l2_alphas multiply the sum of accumulator and w2_bias.
    expert_scales: float32 [num_experts], contiguous, by global id, multiplied into the top-k weights of each expert's
    slots.
    x_gsf: float32 [1], the global factor by which `nv16` activations are quantized; needed there, refused elsewhere.
    The accumulators carry it: where l1_alphas are given they must contain 1/x_gsf, else 1/x_gsf stands for them.
    activation: "swiglu" gate·sigmoid(gate)·up; "swigluoai" gate·sigmoid(alpha·gate)·(up + beta); "situ" (`fp8xfp4` with
    `mx32`, no clamp) alpha·tanh(gate/alpha)·sigmoid(gate)·beta·tanh(up/beta).
    activation_clamp: c in gate = min(gate, c), up = clamp(up, −c, c); None or inf: no clamp.
    activation_alpha, activation_beta: "swigluoai": 1.702 and 1 when None; "situ": 4 and 25, others under `trtllm_gen`
    alone. These and the clamp may be float32 [E], contiguous, under `trtllm_gen`.
    routed_scaling_factor: multiplied into every top-k weight but those of shared experts.
    num_experts, local_expert_offset, expert_map: which experts w13 holds. ids of all ranks are 0…num_experts − 1 (None:
    E, or as many as the map has; at most 2^30, shared slots included); w13's first expert has the id
    local_expert_offset, or expert_map int32 [num_experts], contiguous, gives each id's index into w13, −1 for none. A
    dense shared MLP is added on every rank that is given one.
    output: BF16 [T, H] to write into, its rows may be strided but not overlap; allocated when None. T = 0 is allowed.
    moe_backend: "triton", "reference", "deep_gemm", "flashinfer_trtllm" (upstream itself, where it is installed and can
    run) or "auto" (triton where it can run, else reference). None: what `megamoe.set_default_backend` set, else the
    environment variable MEGAMOE_BACKEND, else "triton". The choice is logged once, to the logger "megamoe".

    Nothing is differentiable: a tensor with requires_grad=True is refused, also under `torch.no_grad()`; pass it
    detached. Under `torch.compile` the call is one op, which raises when it runs. What torch's dispatcher converts or
    refuses never gets there: a bool passes for a number and an int for check_ids, and a value of another kind than the
    argument's (a list, a number for a string, a tensor with requires_grad) raises torch's error while it is traced.

    Raises `TypeError`/`ValueError` naming the argument, or `UnsupportedError` (a `NotImplementedError`) with
    the backend's reason for what is legal but not served; nothing is launched or written then.
    """
    if torch.compiler.is_compiling():
        return ops.traced_mega_moe(
            hidden_states, topk_ids, topk_weights, (w13, w13_scale, w2, w2_scale), output,
            dict(
                mma_type=mma_type, act_scale=act_scale, numerics=numerics, w13_layout=w13_layout,
                shared_w13=shared_w13, shared_w13_scale=shared_w13_scale, shared_w2=shared_w2,
                shared_w2_scale=shared_w2_scale, w13_bias=w13_bias, w2_bias=w2_bias, l1_alphas=l1_alphas,
                l2_alphas=l2_alphas, l2_act_scales=l2_act_scales, expert_scales=expert_scales, x_gsf=x_gsf,
                activation=activation, activation_clamp=activation_clamp, activation_alpha=activation_alpha,
                activation_beta=activation_beta, routed_scaling_factor=routed_scaling_factor,
                local_expert_offset=local_expert_offset, num_experts=num_experts, expert_map=expert_map,
                check_ids=check_ids, moe_backend=moe_backend,
            ),
        )  # fmt: skip
    recipe = resolve_recipe(mma_type, act_scale, numerics)
    weights = PlainWeights(
        w13, w13_scale, w2, w2_scale, shared_w13, shared_w13_scale, shared_w2, shared_w2_scale,
        l1_alphas, l2_alphas, l2_act_scales, w13_bias, w2_bias, w13_layout,
    )  # fmt: skip
    dims = validation.check_weights(weights, recipe)
    num_tokens, top_k = validation.read_token_dims(hidden_states, topk_ids)
    options = LayerOptions(
        activation, activation_clamp, activation_alpha, activation_beta, expert_scales, x_gsf, routed_scaling_factor,
        local_expert_offset, num_experts, expert_map,
    )  # fmt: skip
    spec, parameters = resolve(options, recipe, dims, top_k, w13.device)
    call = _Call(spec, parameters, w13.device, check_ids)
    call.check(hidden_states, topk_ids, topk_weights, output)
    request = LayerRequest(spec, w13.device, max(num_tokens, 1))
    backend = choose(moe_backend, request)
    with device_guard(w13.device):
        layer = backend.open(request, validation.canonical(weights, recipe), parameters)
        return call.run(layer, hidden_states, topk_ids, topk_weights, output)


def prepare_weights(
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
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
    donate: bool = False,
) -> MoEWeights:
    """Bring plain weights (see `mega_moe`) into the byte order the kernels read, once at load.

    What changes its order is copied, or with `donate=True` rewritten where it lies, one expert at a time, so that the
    caller's tensor is the layer's from then on and of no other use:

    - w13, under DeepGEMM numerics with [gate; up] rows; its experts must not overlap then (`expand`).
    - a dense shared_w13 (DeepGEMM numerics), whatever w13_layout says.
    - scales that are bytes, of w13, of w2 and, under `trtllm_gen`, of the shared experts, if they are contiguous, start
      at a multiple of 4 bytes of their storage and need no padding (rows to 128, groups to 4). Others, and those of a
      dense shared MLP, are copied all the same and left as they were.

    Nothing else is written, with either value: w2, shared_w2, any other w13 and shared_w13 and, where they are
    contiguous, fp32 scales, float32 biases and global scales are the caller's own memory, so that later changes are
    felt. BF16 biases and strided small tensors are copied. Works on every device, the CPU included. Raises as
    `mega_moe` does.
    """
    recipe = resolve_recipe(mma_type, act_scale, numerics)
    weights = PlainWeights(
        w13, w13_scale, w2, w2_scale, shared_w13, shared_w13_scale, shared_w2, shared_w2_scale,
        l1_alphas, l2_alphas, l2_act_scales, w13_bias, w2_bias, w13_layout,
    )  # fmt: skip
    validation.check_weights(weights, recipe)
    validation.check_flag("donate", donate)
    if donate:
        validation.check_donated(weights, recipe)
    with device_guard(w13.device):
        return prepare(validation.canonical(weights, recipe), recipe, donate=donate)


class MegaMoE:
    """A layer ready to serve: prepared weights and every buffer of a call, allocated once.

    weights: what `prepare_weights` returned; it fixes the device. max_tokens: most tokens of one call. top_k:
    K, 1…32. The other arguments are `mega_moe`'s.

    Calls launch on the current stream, wait for nothing and, after `warmup`, allocate nothing but an output
    that was not given, so they can be captured in a CUDA graph. `warmup` compiles for contiguous tensors that start on
    16 bytes; strided rows or other starts compile once more at their first call. One object serves one stream at a
    time: its calls share one workspace. Objects share nothing but the weights, so that two can run on two streams.

    Under `torch.compile` a call is one op and needs no graph break. Dynamo takes integers of modules for constants, the
    number by which the op finds its object too: many blocks that are compiled one by one share one graph with
    `torch._dynamo.config.allow_unspec_int_on_nn_module = True`; a model compiled as a whole needs nothing.
    """

    def __init__(
        self,
        weights: MoEWeights,
        max_tokens: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        activation_clamp: float | torch.Tensor | None = None,
        activation_alpha: float | torch.Tensor | None = None,
        activation_beta: float | torch.Tensor | None = None,
        expert_scales: torch.Tensor | None = None,
        x_gsf: torch.Tensor | None = None,
        routed_scaling_factor: float = 1.0,
        local_expert_offset: int = 0,
        num_experts: int | None = None,
        expert_map: torch.Tensor | None = None,
        check_ids: bool = False,
        moe_backend: str | None = None,
    ) -> None:
        if not isinstance(weights, MoEWeights):
            raise TypeError(f"weights is a {type(weights).__name__}; expected what megamoe.prepare_weights returns")
        validation.check_count("max_tokens", max_tokens, 1)
        validation.check_count("top_k", top_k, 1, validation.MAX_TOP_K)
        options = LayerOptions(
            activation, activation_clamp, activation_alpha, activation_beta, expert_scales, x_gsf,
            routed_scaling_factor, local_expert_offset, num_experts, expert_map,
        )  # fmt: skip
        dims = validation.WeightDims(
            weights.num_experts,
            weights.hidden,
            weights.intermediate,
            weights.num_shared_experts,
            None if weights.shared is None else weights.shared.format,
        )
        self.device = weights.device
        self.spec, parameters = resolve(options, weights.recipe, dims, top_k, self.device)
        self.max_tokens = max_tokens
        self._call = _Call(self.spec, parameters, self.device, check_ids)
        request = LayerRequest(self.spec, self.device, max_tokens)
        backend = choose(moe_backend, request)
        self.backend = backend.name
        with device_guard(self.device):
            self._layer = backend.open(request, weights, parameters)
        self._handle = ops.register(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        """A copy gets a handle of its own: graphs must find it, not the original.

        `copy.deepcopy` and `torch.save` copy the weights and the workspace. `copy.copy` shares both with the original,
        so that the two serve one stream. Plain pickle fails in torch 2.13 where a tensor is E4M3.
        """
        self.__dict__.update(state)
        self._handle = ops.register(self)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's BF16 [T, H] for T <= max_tokens tokens; arguments as in `mega_moe`."""
        if torch.compiler.is_compiling():
            return ops.traced_layer(hidden_states, topk_ids, topk_weights, output, self._handle)
        self._call.check(hidden_states, topk_ids, topk_weights, output, max_tokens=self.max_tokens)
        with device_guard(self.device):
            return self._call.run(self._layer, hidden_states, topk_ids, topk_weights, output)

    def warmup(self, token_counts: Iterable[int]) -> None:
        """Run once per token count (1…max_tokens) on made-up inputs, so that later calls compile nothing."""
        if not isinstance(token_counts, Iterable):
            raise TypeError(
                f"token_counts is {token_counts!r} ({type(token_counts).__name__}); allowed: several token counts, "
                "such as [1, 64]"
            )
        counts = [validation.check_count("token_counts", n, 1, self.max_tokens) for n in token_counts]
        spec = self.spec
        with device_guard(self.device):
            for n in counts:
                x = torch.ones(n, spec.hidden, dtype=torch.bfloat16, device=self.device)
                slots = torch.arange(n * spec.top_k, device=self.device).reshape(n, spec.top_k)
                ids = slots % (spec.num_experts + spec.shared_slots)
                weights = torch.ones(n, spec.top_k, dtype=torch.float32, device=self.device)
                for dtype in (torch.int32, torch.int64):
                    self._layer(x, ids.to(dtype), weights, torch.empty_like(x))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the preallocated workspace."""
        return self._layer.workspace_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as the backend holds them."""
        return self._layer.weight_bytes

    @property
    def skipped_ids(self) -> int:
        """Ids that the last call (or graph replay) skipped because they name no expert; 0 before it. Waits for the GPU.

        −1 and experts of other ranks are not counted. A call without tokens leaves it as it was.
        """
        return self._layer.skipped_ids


@dataclass(frozen=True)
class _Call:
    """What every call does around the backend: check, allocate the output, debug."""

    spec: LayerSpec
    parameters: LayerParameters
    device: torch.device
    check_ids: bool

    def __post_init__(self) -> None:
        validation.check_flag("check_ids", self.check_ids)

    def check(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor | None,
        *,
        max_tokens: int | None = None,
    ) -> None:
        """Check a call's tensors."""
        hidden = self.spec.hidden
        validation.check_hidden_states(hidden_states, hidden, self.device)
        num_tokens = hidden_states.shape[0]
        if max_tokens is not None and num_tokens > max_tokens:
            raise ValueError(f"hidden_states has {num_tokens} tokens; allowed: at most max_tokens = {max_tokens}")
        validation.check_routing(topk_ids, topk_weights, num_tokens, self.spec.top_k, self.device)
        if output is not None:
            validation.check_output(output, num_tokens, hidden, self.device)

    def run(
        self,
        layer: Layer,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run checked tensors; the output, allocated when not given."""
        debugging = debug.enabled()
        if self.check_ids or debugging:
            debug.refuse_capture(self.device)
            routing = debug.Routing.of(topk_ids, self.spec, self.parameters.expert_map)
            debug.check_ids(routing, self.spec, self.parameters.expert_map)
        if output is None:
            output = torch.empty(hidden_states.shape, dtype=torch.bfloat16, device=self.device)
        if len(hidden_states) == 0:
            return output
        if debugging:  # before the run, which may overwrite them: `output` may be `hidden_states`
            expert_scales = self.parameters.expert_scales
            debug.raise_on_nan(debug.input_stages(hidden_states, topk_weights, routing, expert_scales))
            debug.raise_on_nan(debug.weight_stages(self._tensors(layer), routing, self.spec))
        layer(hidden_states, topk_ids, topk_weights, output)
        if debugging:
            debug.raise_on_nan([*layer.stages(routing), debug.output_stage(output)])
        return output

    def _tensors(self, layer: Layer) -> dict[str, torch.Tensor]:
        """Everything that holds numbers of the layer, by argument."""
        p = self.parameters
        optional = {
            "x_gsf": p.x_gsf, "activation_clamp": p.clamp, "activation_alpha": p.alpha, "activation_beta": p.beta
        }  # fmt: skip
        return {
            **named_tensors(layer.weights),
            **{name: tensor for name, tensor in optional.items() if tensor is not None},
        }


def device_guard(device: torch.device) -> AbstractContextManager:
    """Makes `device` current: Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
