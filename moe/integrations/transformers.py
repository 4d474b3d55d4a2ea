"""transformers: megamoe as an experts implementation.

    import megamoe.integrations.transformers
    megamoe.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(…, dtype="bfloat16", experts_implementation="megamoe")

Source of the contract: `ExpertsInterface` of transformers 5.12: a function of the experts module, tokens [T, H], expert
ids and weights [T, K] that returns [T, H] and reads the weights off the module. Nothing of transformers is imported
before `register`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

import megamoe
from megamoe.backends.base import UnsupportedError
from megamoe.spec import ACTIVATION_DEFAULTS
from megamoe.validation import BLOCK

NAME = "megamoe"
_REGISTRIES = {"moe": "ALL_EXPERTS_FUNCTIONS", "finegrained_fp8": "ALL_FP8_EXPERTS_FUNCTIONS"}
_LEAST_TOKENS = 16
_PROBE_ROWS = 8
_PROBE_SIZE = 8.0
_PROBE_TOLERANCE = 1e-4


def register(name: str = NAME) -> None:
    """Make `experts_forward` selectable as `experts_implementation=name`, for plain and for FP8 experts.

    May be called again. Needs transformers with an experts registry (5.x); `ImportError` otherwise.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name is {name!r}; allowed: a string that is not empty")
    for home, registry in _REGISTRIES.items():
        module = importlib.import_module(f"transformers.integrations.{home}")
        getattr(module, registry).register(name, experts_forward)


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of module `self`: BF16 [T, H] of hidden_states BF16 [T, H], top_k_index int [T, K], top_k_weights
    [T, K]. Ids from num_experts on (another rank's, under transformers' expert parallelism) are skipped.

    Served: gate_up_proj and down_proj in BF16; in E4M3 with 128×128 scales; in packed E2M1 with scales of 32 columns
    (gate_up_proj_scale_inv, down_proj_scale_inv). Weights are prepared at the first call and again when their tensors
    are other ones or were written to; they are forgotten with the module. FP8 and MXFP4 experts stay the module's own
    tensors, of BF16 ones gate_up_proj is copied, and down_proj too where the module keeps it transposed. The workspace
    grows to the next power of two of the tokens of a call, so warm up with the most before a CUDA graph is captured.

    Raises `UnsupportedError` for modules that compute something else, `TypeError`/`ValueError` as `megamoe.MegaMoE`,
    and `RuntimeError` where a gradient would be lost.
    """
    _refuse_gradients(self, hidden_states, top_k_weights)
    prepared = _PREPARED.get(self)
    if prepared is None or prepared.version != _version(self):
        prepared = _PREPARED[self] = _prepare(self)
    tokens, top_k = top_k_index.shape
    layer = prepared.layer_for(tokens, top_k)
    weights = top_k_weights.detach().float().contiguous()
    return layer(hidden_states.detach(), top_k_index.contiguous(), weights)


@dataclass
class _Prepared:
    """What a module's weights became, and the layer that runs them, for `capacity` tokens of `top_k` experts."""

    version: tuple[object, ...]
    weights: megamoe.MoEWeights
    options: dict[str, Any]
    layer: megamoe.MegaMoE | None = None

    def layer_for(self, tokens: int, top_k: int) -> megamoe.MegaMoE:
        if self.layer is None or self.layer.max_tokens < tokens or self.layer.spec.top_k != top_k:
            capacity = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
            self.layer = None  # its workspace goes before the larger one comes
            self.layer = megamoe.MegaMoE(self.weights, capacity, top_k, **self.options)
        return self.layer


_PREPARED: WeakKeyDictionary[torch.nn.Module, _Prepared] = WeakKeyDictionary()


def _refuse_gradients(module: torch.nn.Module, *inputs: torch.Tensor) -> None:
    """Parameters want gradients by default; what counts is whether this call would be recorded."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *module.parameters())):
        raise RuntimeError("megamoe computes no gradients: call the model under torch.inference_mode() or no_grad()")


def _version(module: torch.nn.Module) -> tuple[object, ...]:
    """Changes when a weight is another tensor or was written to in place (inference tensors do not count writes)."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return tuple((t.data_ptr(), t.shape, t.dtype, None if t.is_inference() else t._version) for t in tensors)


def _prepare(module: torch.nn.Module) -> _Prepared:
    name = type(module).__name__
    if getattr(module, "has_gate", True) is not True:
        raise UnsupportedError(f"{name} has no gate: megamoe's experts are gated")
    for attribute in ("gate_up_proj", "down_proj"):
        if not isinstance(getattr(module, attribute, None), torch.Tensor):
            raise UnsupportedError(f"{name} has no tensor {attribute}; expected [E, 2I, H] and down_proj [E, H, I]")
    interleaved = not getattr(module, "is_concatenated", True)
    options = _activation(module, interleaved)
    weights = megamoe.prepare_weights(
        **_weights(module, name), w13_layout="interleaved" if interleaved else "gate_up",
        w13_bias=_tensor(module, "gate_up_proj_bias"), w2_bias=_tensor(module, "down_proj_bias"),
    )  # fmt: skip
    return _Prepared(_version(module), weights, options)


def _weights(module: torch.nn.Module, name: str) -> dict[str, Any]:
    """Matrices, scales and recipe. trtllm-gen's recipes of quantized weights read them as they lie, without a copy."""
    w13, w2 = _tensor(module, "gate_up_proj"), _tensor(module, "down_proj")
    assert w13 is not None and w2 is not None  # checked by the caller  # noqa: PT018
    if getattr(module, "is_transposed", False):
        w13, w2 = w13.mT.contiguous(), w2.mT.contiguous()
    if w13.dtype == torch.bfloat16:
        return dict(w13=w13, w13_scale=None, w2=w2, w2_scale=None, mma_type="bf16xbf16")
    scales = [_tensor(module, f"{attribute}_scale_inv") for attribute in ("gate_up_proj", "down_proj")]
    if None in scales or getattr(module, "activation_scheme", "dynamic") != "dynamic":
        raise UnsupportedError(
            f"{name} has {w13.dtype} weights with activation_scheme="
            f"{getattr(module, 'activation_scheme', None)!r} and scales {[s is not None for s in scales]}; served: "
            "bfloat16, or quantized weights with *_scale_inv and dynamic activation scales"
        )
    if w13.dtype == torch.float8_e4m3fn:
        block = getattr(module, "block_size", None)
        if block is None or tuple(block) != BLOCK:
            raise UnsupportedError(f"{name} has block_size={block}; served: {BLOCK}")
        fp32 = [scale.float() for scale in scales if scale is not None]
        return dict(w13=w13, w13_scale=fp32[0], w2=w2, w2_scale=fp32[1], mma_type="fp8xfp8", numerics="trtllm_gen")
    if w13.dtype in (torch.int8, torch.uint8):
        ue8m0 = [_powers_of_two(scale, name) for scale in scales if scale is not None]
        return dict(w13=w13, w13_scale=ue8m0[0], w2=w2, w2_scale=ue8m0[1], mma_type="fp8xfp4", numerics="trtllm_gen")
    raise UnsupportedError(f"{name} has {w13.dtype} weights; served: bfloat16, float8_e4m3fn and packed E2M1 (int8)")


def _powers_of_two(scale: torch.Tensor, name: str) -> torch.Tensor:
    """MXFP4's scales as UE8M0, also where the module keeps them as fp32."""
    if scale.dtype != torch.float32:
        return scale
    encoded = scale.to(torch.float8_e8m0fnu)
    if not torch.equal(encoded.float(), scale):
        raise UnsupportedError(f"{name} has E2M1 weights with scales that are no powers of two; served: UE8M0")
    return encoded


def _activation(module: torch.nn.Module, interleaved: bool) -> dict[str, Any]:
    """The activation's arguments, read off the module's attributes and then held against what it computes."""
    name = type(module).__name__
    limit = _first(module, "limit", "swiglu_limit")
    alpha = _first(module, "alpha", "swiglu_alpha")
    apply_gate = getattr(module, "_apply_gate", None)
    if not callable(apply_gate):
        raise UnsupportedError(f"{name} has no method _apply_gate, by which its activation is checked")
    options: dict[str, Any] = dict(activation="swiglu", activation_clamp=limit)
    beta = 0.0
    if alpha is not None:
        beta = ACTIVATION_DEFAULTS["swigluoai"][1]
        options |= dict(activation="swigluoai", activation_alpha=float(alpha), activation_beta=beta)
    # On the CPU whatever torch's default device is: a few numbers, and no wait for a GPU.
    generator = torch.Generator(device="cpu").manual_seed(0)
    gate_up = _PROBE_SIZE * torch.randn(_PROBE_ROWS, 2 * _PROBE_ROWS, generator=generator, device="cpu")
    gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = gate * torch.sigmoid((1.0 if alpha is None else float(alpha)) * gate) * (up + beta)
    with torch.no_grad():
        found = apply_gate(gate_up)
    if not torch.allclose(found, expected, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE):
        raise UnsupportedError(
            f"{name} computes another activation than its attributes say: expected {options['activation']} with "
            f"limit={limit}, alpha={alpha}"
        )
    return options


def _first(module: torch.nn.Module, *names: str) -> Any:
    return next((value for value in (getattr(module, name, None) for name in names) if value is not None), None)


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    value = getattr(module, name, None)
    return value.detach() if isinstance(value, torch.Tensor) else None
