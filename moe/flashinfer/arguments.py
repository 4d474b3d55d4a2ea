"""Checks of the sizes, the tokens and the output, under FlashInfer's names; the tokens decide the recipe.

All checks are made before anything is launched or written, and none reads a tensor's contents. `TypeError` for a wrong
type or dtype, `ValueError` for the rest. A recipe follows from dtypes, never from a number of elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.flashinfer.enums import Fp8QuantizationType as Fp8
from megamoe.recipe import Recipe, traits
from megamoe.spec import MAX_EXPERTS, MAX_TOP_K
from megamoe.validation import check_count, check_tensor

MXFP4_MXFP8 = Recipe("fp8xfp4", "mx32", "trtllm_gen")
MXFP4_BF16 = Recipe("bf16xfp4", "none", "trtllm_gen")
NVFP4 = Recipe("nvfp4xnvfp4", "nv16", "trtllm_gen")
NVFP4_TOKEN = Recipe("nvfp4xnvfp4", "nv16_token", "trtllm_gen")
DEEPSEEK_FP8 = Recipe("fp8xfp8", "block128", "trtllm_gen")
MXFP8 = Recipe("mxfp8xmxfp8", "mx32", "trtllm_gen")

_MAX_ID = 2**15 - 1
"""Of a packed word's id; FlashInfer stores ids in 16 bits on every route."""
_POINTER_ALIGNMENT = 4
SCALE_BYTES = {
    "ue8m0": (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    "ue4m3": (torch.uint8, torch.float8_e4m3fn),
}
"""FlashInfer labels all scale bytes float8_e4m3fn or uint8; UE8M0 may carry its own name."""


@dataclass(frozen=True)
class Sizes:
    """Counts: E experts of all ranks, L of this one from `offset` on, S shared ones after them, K chosen, width I."""

    num_experts: int
    top_k: int
    intermediate: int
    offset: int
    local: int
    shared: int = 0

    @property
    def rows(self) -> int:
        """Experts in the weights and in every per-expert tensor."""
        return self.local + self.shared

    @property
    def slots(self) -> int:
        return self.top_k + self.shared


@dataclass(frozen=True)
class Activations:
    """The tokens as given: q contiguous; its scales, bytes [T, H/g] or fp32 [H/128, T], None for BF16; token_scale fp32
    [T] or None."""

    q: torch.Tensor
    scale: torch.Tensor | None
    token_scale: torch.Tensor | None
    hidden: int
    recipe: Recipe


def check_sizes(
    num_experts: object, top_k: object, intermediate_size: object, local_expert_offset: object,
    local_num_experts: object, num_fused_shared_experts: object = None,
) -> Sizes:  # fmt: skip
    shared = 0
    if num_fused_shared_experts is not None:
        shared = check_count("num_fused_shared_experts", num_fused_shared_experts, 0, MAX_EXPERTS)
    experts = check_count("num_experts", num_experts, 1, _MAX_ID + 1 - shared)
    sizes = Sizes(
        experts,
        check_count("top_k", top_k, 1, min(experts, MAX_TOP_K - shared)),
        check_count("intermediate_size", intermediate_size, 1),
        check_count("local_expert_offset", local_expert_offset, 0, experts - 1),
        check_count("local_num_experts", local_num_experts, 1, min(experts, MAX_EXPERTS - shared)),
        shared,
    )
    if sizes.offset + sizes.local > experts:
        raise ValueError(
            f"local_expert_offset is {sizes.offset} with local_num_experts={sizes.local}; allowed: at most "
            f"{experts - sizes.local}, so that all experts lie in num_experts={experts}"
        )
    if shared and sizes.local != experts:
        raise ValueError(
            f"num_fused_shared_experts is {shared} with {sizes.local} of {experts} experts here; allowed: 0, since a "
            "shared expert's id would name another rank's expert"
        )
    return sizes


def check_fp4_activations(hidden_states: object, hidden_states_scale: object, per_token_scale: object) -> Activations:
    """BF16 [T, H]; float8_e4m3fn [T, H] with scales [T, H/32]; packed E2M1 uint8 [T, H/2] with scales [T, H/16]."""
    q = _check_tokens(hidden_states, (torch.bfloat16, torch.float8_e4m3fn, torch.uint8))
    hidden = q.shape[1] * (2 if q.dtype == torch.uint8 else 1)
    recipe = {torch.bfloat16: MXFP4_BF16, torch.float8_e4m3fn: MXFP4_MXFP8, torch.uint8: NVFP4}[q.dtype]
    if recipe == NVFP4 and per_token_scale is not None:
        recipe = NVFP4_TOKEN
    token_scale = None
    if per_token_scale is not None:
        if recipe != NVFP4_TOKEN:
            raise ValueError(
                f"per_token_scale is given; allowed with {q.dtype} hidden_states: None (NVFP4 alone has it)"
            )
        token_scale = check_tensor(
            "per_token_scale", per_token_scale, dtypes=(torch.float32,), shape=(len(q),), axes="[T]", device=q.device,
            layout="contiguous",
        )  # fmt: skip
    if recipe == MXFP4_BF16:
        if hidden_states_scale is not None:
            raise ValueError("hidden_states_scale is given; allowed with bfloat16 hidden_states: None")
        return Activations(q, None, None, hidden, recipe)
    return Activations(q, _check_byte_scale(q, hidden_states_scale, hidden, recipe), token_scale, hidden, recipe)


def check_fp8_activations(hidden_states: object, hidden_states_scale: object, kind: Fp8) -> Activations:
    """float8_e4m3fn [T, H] with fp32 scales [H/128, T] (`DeepSeekFp8`) or bytes [T, H/32] (`MxFp8`)."""
    q = _check_tokens(hidden_states, (torch.float8_e4m3fn,))
    hidden = q.shape[1]
    if kind == Fp8.MxFp8:
        return Activations(q, _check_byte_scale(q, hidden_states_scale, hidden, MXFP8), None, hidden, MXFP8)
    if hidden % 128:
        raise ValueError(f"hidden_states has {hidden} columns; DeepSeekFp8 allows multiples of 128")
    scale = check_tensor(
        "hidden_states_scale", hidden_states_scale, dtypes=(torch.float32,), shape=(hidden // 128, len(q)),
        axes="[H/128, T]", device=q.device, layout="any",
    )  # fmt: skip
    return Activations(q, scale, None, hidden, DEEPSEEK_FP8)


def _check_tokens(value: object, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    q = check_tensor("hidden_states", value, dtypes=dtypes, rank=2, axes="[T, H]", layout="contiguous")
    if q.shape[1] == 0:
        raise ValueError(f"hidden_states has shape {tuple(q.shape)}; expected [T, H]")
    if q.data_ptr() % _POINTER_ALIGNMENT:
        raise ValueError(f"hidden_states starts at {q.data_ptr():#x}; allowed: multiples of {_POINTER_ALIGNMENT} bytes")
    return q


def _check_byte_scale(q: torch.Tensor, value: object, hidden: int, recipe: Recipe) -> torch.Tensor:
    """Row-major, one row per token: tiles of padded rows can have as many bytes, and would be read wrongly."""
    group, scale_format = traits(recipe).act_group, traits(recipe).act_scale_format
    if value is None:
        raise ValueError(
            f"hidden_states_scale is None; expected [T, H/{group}] with {q.dtype} hidden_states (one scale per tensor "
            "is not served)"
        )
    if hidden % group:
        raise ValueError(f"hidden_states has {hidden} columns; {recipe} allows multiples of {group}")
    return check_tensor(
        "hidden_states_scale", value, dtypes=SCALE_BYTES[str(scale_format)], shape=(len(q), hidden // group),
        axes=f"[T, H/{group}], row-major and not in tiles,", device=q.device,
    )  # fmt: skip


def fp8_kind(fp8_quantization_type: object) -> Fp8:
    allowed = "1 (DeepSeekFp8), 2 (MxFp8)"
    if isinstance(fp8_quantization_type, bool) or not isinstance(fp8_quantization_type, int):
        raise TypeError(f"fp8_quantization_type is {fp8_quantization_type!r}; allowed: {allowed}")
    if fp8_quantization_type not in tuple(Fp8):
        raise ValueError(f"fp8_quantization_type is {fp8_quantization_type!r}; allowed: {allowed}")
    return Fp8(fp8_quantization_type)


def check_output(value: object, num_tokens: int, hidden: int, device: torch.device) -> torch.Tensor | None:
    """BF16 [T, at most H]."""
    if value is None:
        return None
    output = check_tensor("output", value, dtypes=(torch.bfloat16,), rank=2, axes="[T, at most H]", device=device)
    if len(output) != num_tokens or not 1 <= output.shape[1] <= hidden:
        raise ValueError(f"output has shape {tuple(output.shape)}; expected [{num_tokens}, 1..{hidden}]")
    if num_tokens > 1 and output.stride(0) < output.shape[1]:
        raise ValueError(f"output has strides {output.stride()}; its rows must not overlap")
    return output


def refuse_lora(gemm1_lora_delta: object) -> None:
    if gemm1_lora_delta is not None:
        raise ValueError("gemm1_lora_delta is given; allowed: None (LoRA deltas are not served)")
