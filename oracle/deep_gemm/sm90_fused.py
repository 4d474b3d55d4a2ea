"""Upstream's fused SM90 kernel, live on a Hopper GPU: pre-dispatch and `fp8_mega_moe` on one rank.

No process group: the compiled module takes any zeroed buffer and the list of the ranks' addresses, here one. The kernel
has a grid barrier in software, so nothing else may run on the GPU.
"""

from __future__ import annotations

import torch

from megamoe.kernels.layouts.buffers import SM90_VIEWS, align_tokens, sm90_unsupported_reason
from megamoe.oracle.deep_gemm import package
from megamoe.oracle.deep_gemm.device_code import find_nvcc
from megamoe.oracle.downloads import OracleUnavailable
from megamoe.recipe import Recipe
from megamoe.spec import LayerSpec
from megamoe.weights import MoEWeights

RECIPE = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
_RECIPE_ARGUMENT = (128, 128, 128)


def unsupported_reason() -> str | None:
    """Why the live kernel cannot run on this machine, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"the GPU has compute capability {major}.{minor}; the SM90 kernel needs 9.0"
    try:
        find_nvcc()
    except OracleUnavailable as error:
        return str(error)
    return package.unsupported_reason(package.SM90_VERSIONS)


def layer_unsupported_reason(spec: LayerSpec) -> str | None:
    """Why upstream has no kernel for such a layer, or None."""
    if spec.recipe != RECIPE:
        return f"recipe {spec.recipe}; the SM90 kernel serves {RECIPE}"
    if spec.num_shared_experts:
        return f"num_shared_experts={spec.num_shared_experts}; the SM90 kernel has none"
    if spec.activation != "swiglu":
        return f"activation={spec.activation!r}; the SM90 kernel has swiglu"
    return sm90_unsupported_reason(
        num_experts=spec.num_experts,
        max_tokens=1,
        top_k=spec.top_k,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
    )


def expected_tile(spec: LayerSpec, tokens: int) -> str:
    """The tile that upstream's rules give, tokens × weight rows ("128x256"); "swapAB" keeps weights on the M side."""
    per_expert = tokens * spec.top_k / spec.num_experts
    if per_expert >= 64:
        return "128x256"
    if tokens <= 128:
        return "64x128 swapAB"
    return "64x256" if spec.intermediate >= 3072 else "64x128"


class Sm90Fused:
    """Upstream's layer of one shape: its buffer, and calls on the current stream.

    `weights` are ours: their routed matrices have upstream's bytes. Raises `OracleUnavailable` on another machine and
    `ValueError` for a layer that upstream does not serve.
    """

    def __init__(self, spec: LayerSpec, weights: MoEWeights, max_tokens: int) -> None:
        reason = unsupported_reason()
        if reason is not None:
            raise OracleUnavailable(reason)
        reason = layer_unsupported_reason(spec)
        if reason is not None:
            raise ValueError(reason)
        self._module = package.load(package.SM90_VERSIONS)._C
        self._spec, self._weights, self._rows = spec, weights, align_tokens(max_tokens)
        nbytes, cut = self._module.get_symm_buffer_size_for_sm90_mega_moe(
            1, spec.num_experts, self._rows, spec.top_k, spec.hidden, spec.intermediate, True, spec.activation
        )
        self._buffer = torch.zeros(int(nbytes), dtype=torch.int8, device=weights.device)
        views = [t if isinstance(t, torch.Tensor) else torch.from_dlpack(t) for t in cut(self._buffer)]
        self.views = dict(zip(SM90_VIEWS, views, strict=True))
        """By our names, as upstream's compiled module cuts them: E4M3 may be typed int8."""

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
        spec, views, tokens = self._spec, self.views, len(x)
        if output is None:
            output = torch.full_like(x, torch.nan)
        self._module.mega_moe_pre_dispatch_sm90(
            x, topk_ids, topk_weights, views["x"].view(torch.float8_e4m3fn), views["x_sf"], views["topk_idx"],
            views["topk_weights"], tokens, 128, 1.0,
        )  # fmt: skip
        w13, w13_scale, w2, w2_scale = self._weights.routed
        self._module.fp8_mega_moe(
            output, w13, w13_scale, w2, w2_scale, None, self._buffer, [self._buffer.data_ptr()], 0, self._rows,
            spec.num_experts, spec.top_k, _RECIPE_ARGUMENT, spec.activation, spec.activation_clamp, fast_math,
        )  # fmt: skip
        return output
