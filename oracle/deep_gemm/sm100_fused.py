"""Upstream's fused SM100 kernels, live on Blackwell, one rank: pre-dispatch, `fp8_fp4_mega_moe`, `bf16_mega_moe`.

As `sm90_fused`: no process group, a zeroed buffer, nothing else on the GPU. Not run yet, for want of a Blackwell
machine; a test holds the arguments to the contract.
"""

from __future__ import annotations

import torch

from megamoe.formats import round_to_fp32
from megamoe.kernels.layouts.buffers import SM100_VIEWS, align_tokens, sm100_unsupported_reason
from megamoe.kernels.layouts.scale_atoms import ATOM_ROWS
from megamoe.oracle.deep_gemm import package
from megamoe.oracle.deep_gemm.device_code import find_nvcc
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.spec import ACTIVATION_DEFAULTS, LayerSpec
from megamoe.weights import ExpertMatrices, MoEWeights

NUMERICS = "deep_gemm_sm100"


def unsupported_reason() -> str | None:
    """Why the live kernels cannot run on this machine, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != 10:
        return f"the GPU has compute capability {major}.{minor}; the SM100 kernels need 10.x"
    try:
        find_nvcc()
    except OracleUnavailable as error:
        return str(error)
    return package.unsupported_reason()


def layer_unsupported_reason(spec: LayerSpec) -> str | None:
    """Why upstream has no kernel for such a layer, or None."""
    mma_type = spec.recipe.mma_type
    if spec.recipe.numerics != NUMERICS:
        return f"recipe {spec.recipe}; the SM100 kernels serve {NUMERICS}"
    activations = {"fp8xfp4": ("swiglu", "swigluoai", "situ"), "bf16xbf16": ("swiglu",)}
    allowed = activations.get(mma_type, ("swiglu", "swigluoai"))
    if spec.activation not in allowed:
        return f"activation={spec.activation!r}; {mma_type} has {', '.join(allowed)}"
    built_in = ACTIVATION_DEFAULTS[spec.activation]
    for name, value, own in zip(("alpha", "beta"), (spec.alpha, spec.beta), built_in):
        if round_to_fp32(value) != round_to_fp32(own):
            return f"activation_{name}={value:g}; {spec.activation} has {own:g} built in"
    if spec.activation == "situ" and spec.activation_clamp is not None:
        return f"activation_clamp={spec.activation_clamp}; situ has none"
    if spec.num_shared_experts and spec.shared_weight != spec.traits.act:
        return f"shared weights of {spec.shared_weight}; {mma_type} has {spec.traits.act}"
    return sm100_unsupported_reason(
        mma_type,
        num_experts=spec.num_experts,
        max_tokens=1,
        top_k=spec.top_k,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        num_shared_experts=spec.num_shared_experts,
    )


def shared_scale_rows(tokens: int, block_m: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [tokens]: the row of `shared_l1_acts_sf` that each token's scales belong in, for tiles of `block_m`."""
    token = torch.arange(tokens, device=device)
    block, i = token // block_m, token % block_m
    padded = -(-block_m // ATOM_ROWS) * ATOM_ROWS
    return block * padded + i // ATOM_ROWS * ATOM_ROWS + i % 32 * 4 + i % ATOM_ROWS // 32


class Sm100Fused:
    """Upstream's layer of one shape: its buffer, and calls on the current stream.

    `weights` are ours: their matrices have upstream's bytes. Raises `OracleUnavailable` on another machine and
    `ValueError` for a layer that upstream does not serve.
    """

    def __init__(self, spec: LayerSpec, weights: MoEWeights, max_tokens: int) -> None:
        reason = unsupported_reason()
        if reason is not None:
            raise OracleUnavailable(reason)
        reason = layer_unsupported_reason(spec)
        if reason is not None:
            raise ValueError(reason)
        self._module = package.load()._C
        self._spec, self._weights, self._rows = spec, weights, align_tokens(max_tokens)
        nbytes, cut = self._module.get_symm_buffer_size_for_mega_moe(
            1, spec.num_experts, self._rows, spec.top_k, spec.hidden, spec.intermediate,
            spec.recipe.mma_type, spec.activation, spec.num_shared_experts,
        )  # fmt: skip
        self._buffer = torch.zeros(int(nbytes), dtype=torch.int8, device=weights.device)
        views = [t if isinstance(t, torch.Tensor) else torch.from_dlpack(t) for t in cut(self._buffer)]
        self.views = dict(zip(SM100_VIEWS, views, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of upstream's buffer."""
        return self._buffer.numel()

    def __call__(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        output: torch.Tensor | None = None,
        fast_math: bool = True,
    ) -> torch.Tensor:
        """x BF16 [n, H], topk_ids int32 [n, K], topk_weights fp32 [n, K] to y BF16 [n, H], `output` or a new tensor."""
        self._dispatch(x, topk_ids, topk_weights)
        spec, weights = self._spec, self._weights
        if output is None:
            output = torch.full_like(x, torch.nan)
        rank = (self._buffer, [self._buffer.data_ptr()], 0, self._rows, spec.num_experts, spec.top_k)
        if spec.traits.act == "bf16":
            shared = (None, None) if weights.shared is None else (weights.shared.w13, weights.shared.w2)
            self._module.bf16_mega_moe(
                output, weights.routed.w13, weights.routed.w2, *shared, None, *rank,
                spec.activation, spec.activation_clamp, fast_math,
            )  # fmt: skip
            return output
        shared_matrices = (None,) * 4 if weights.shared is None else _as_upstream(weights.shared)
        self._module.fp8_fp4_mega_moe(
            output, *_as_upstream(weights.routed), *shared_matrices, None, *rank,
            (1, 1, spec.traits.act_group), spec.recipe.mma_type, spec.activation, spec.activation_clamp, fast_math,
            spec.traits.token_scale, weights.l1_alphas, weights.l2_alphas, weights.l2_act_scales,
        )  # fmt: skip
        return output

    def _dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        spec, views, tokens = self._spec, self.views, len(x)
        if spec.traits.act == "bf16":  # upstream's pre-dispatch has no such kind
            for name, tensor in (("x", x), ("topk_idx", topk_ids), ("topk_weights", topk_weights)):
                views[name][:tokens].copy_(tensor)
            return
        row, mma_type = spec.traits, spec.recipe.mma_type
        acts = views["x"].view(torch.float8_e4m3fn) if row.act == "e4m3" else views["x"]
        self._module.mega_moe_pre_dispatch(
            x, topk_ids, topk_weights, acts, views["x_sf"], views["topk_idx"], views["topk_weights"], tokens,
            row.act_group, mma_type, views["x_scales"] if row.token_scale else None, None,
        )  # fmt: skip
        if spec.num_shared_experts:  # upstream leaves it to the caller, at every call
            block_m = int(
                self._module.get_block_m_for_mega_moe(1, spec.num_experts, self._rows, tokens, spec.top_k, mma_type)
            )
            views["shared_l1_acts_sf"][shared_scale_rows(tokens, block_m, x.device)] = views["x_sf"][:tokens]


def _as_upstream(matrices: ExpertMatrices) -> tuple[torch.Tensor | None, ...]:
    """Upstream types packed E2M1 as int8."""
    return tuple(t.view(torch.int8) if t is not None and t.dtype == torch.uint8 else t for t in matrices)
