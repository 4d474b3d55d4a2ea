"""The fused calls under upstream's names: what a buffer holds, through the experts, into `y`.

Source of the contract: `sgl-deep-gemm` 0.1.7. The weights are read as they are: in upstream's bytes or, MXFP4 on
Hopper, in the order that `to_hopper_` gave them. A call makes the routing plan, GEMM 1, GEMM 2 and the combine in four
launches on the current stream; the SM90 tier takes five, since it moves tokens to the rows of their experts first, and
the statistics two more. It waits for nothing and allocates nothing, so that it can be captured in a CUDA graph after
one call of its shape and options; that first call compiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megamoe.api import device_guard
from megamoe.backends import select
from megamoe.backends.base import LayerRequest, UnsupportedError
from megamoe.backends.triton import architecture
from megamoe.deep_gemm.arguments import on_device
from megamoe.deep_gemm.buffers import SM90SymmBuffer, SymmBuffer
from megamoe.deep_gemm.hopper_order import is_tiled, read_tiled
from megamoe.deep_gemm.reference import run_dispatched_reference
from megamoe.deep_gemm.tier import allocate_tier, run_tier, tier_reads, tier_unsupported_reason
from megamoe.deep_gemm.weight_arguments import NO_SCALES, GlobalScales, read_matrices, read_shared
from megamoe.deep_gemm.workspace import workspace_of
from megamoe.options import LayerOptions, resolve
from megamoe.parameters import LayerParameters
from megamoe.recipe import Recipe, traits
from megamoe.spec import ACTIVATIONS, LayerSpec
from megamoe.validation import WeightDims, check_choice, check_flag, check_number
from megamoe.weights import ExpertMatrices, MoEWeights
from megamoe.workspace import Workspace

if TYPE_CHECKING:
    from megamoe.kernels.hopper.layer import HopperWorkspace

WeightPair = tuple[torch.Tensor, torch.Tensor]

_FP8 = Recipe("fp8xfp8", "block128", "deep_gemm_sm90")
_SM90_FP4 = Recipe("fp8xfp4", "block128", "deep_gemm_sm90")
_SM100 = {
    "fp8xfp4": Recipe("fp8xfp4", "mx32", "deep_gemm_sm100"),
    "mxf4xmxf4": Recipe("mxf4xmxf4", "mx32", "deep_gemm_sm100"),
    "nvfp4xnvfp4": Recipe("nvfp4xnvfp4", "nv16_token", "deep_gemm_sm100"),
    "bf16xbf16": Recipe("bf16xbf16", "none", "deep_gemm_sm100"),
}


def fp8_fp4_mega_moe(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    sym_buffer: SymmBuffer | SM90SymmBuffer,
    shared_l1_weights: WeightPair | None = None,
    shared_l2_weights: WeightPair | None = None,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 32),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    use_x_scales: bool = False,
    l1_alphas: torch.Tensor | None = None,
    l2_alphas: torch.Tensor | None = None,
    l2_act_scales: torch.Tensor | None = None,
) -> None:
    """y BF16 [n, H] = the layer of the first n tokens in `sym_buffer`, whose kind decides the numbers.

    y             n = y.size(0) says how many tokens there are, 0 … T; rows may be strided
    l1_weights, l2_weights: what `transform_weights_for_mega_moe` returned: int8 [E, 2I, H/2] and [E, H, I/2], scales
                  int32 MN-major [E, 2I, H/4g] and [E, H, I/4g]; or what `to_hopper_` made of them, for an
                  `SM90SymmBuffer` with its fp32 `x_sf`
    sym_buffer    a `SymmBuffer`; or an `SM90SymmBuffer`, whose `x_sf` decides: fp32 as it comes (E4M3 with a scale per
                  128 columns, fp32 arithmetic), int32 (`x_sf_ue8m0`: what `SymmBuffer` computes)
    shared_l1_weights, shared_l2_weights: the S shared experts of the buffer as one MLP, transformed: [2·I·S, H] and
                  [H, I·S], float8_e4m3fn or int8 beside `fp8xfp4`, else int8. Both, or neither where S is 0
    cumulative_local_expert_recv_stats: int32 [E], to which the number of slots of every expert is added
    recipe        (1, 1, 32), NVFP4 (1, 1, 16)
    activation    "swiglu"; "swigluoai" (alpha 1.702, beta 1); "situ" (4 and 25), `fp8xfp4` alone and without clamp
    activation_clamp: c in gate = min(gate, c), up = clamp(up, −c, c); None: none
    use_x_scales  NVFP4: multiply by `x_scales` (needed behind the pre-dispatch)
    l1_alphas     NVFP4: fp32 [E, 2], factors of gate and up; l2_alphas fp32 [E], of GEMM 2; l2_act_scales fp32 [E], of
                  the activated values before they are requantized

    Slots with a negative id are skipped; a token without any other gets zeros (and the shared experts' row).
    Raises `ValueError`/`TypeError` naming the argument, `UnsupportedError` with the reason for what no kernel serves.
    """
    buffer = _live(sym_buffer)
    mma_type = buffer.mma_type if isinstance(buffer, SymmBuffer) else "fp8xfp4"
    if mma_type == "bf16xbf16":
        raise ValueError("sym_buffer is one of 'bf16xbf16'; allowed: another mma_type (bf16_mega_moe serves it)")
    layer_recipe = _SM100[mma_type]
    if isinstance(buffer, SM90SymmBuffer) and buffer.x_sf.dtype == torch.float32:
        layer_recipe = _SM90_FP4
    expected = (1, 1, 16 if mma_type == "nvfp4xnvfp4" else 32)
    _check_recipe(recipe, expected, f"with {mma_type}")
    scales = GlobalScales(l1_alphas, l2_alphas, l2_act_scales)
    if mma_type != "nvfp4xnvfp4":
        given = [name for name, value in scales._asdict().items() if value is not None]
        if use_x_scales:
            given.insert(0, "use_x_scales")
        if given:
            raise ValueError(f"{given[0]} is given; allowed under {mma_type}: None (nvfp4xnvfp4 has it)")
    _run(
        y, l1_weights, l2_weights, buffer, layer_recipe, activation, activation_clamp,
        shared=(shared_l1_weights, shared_l2_weights), stats=cumulative_local_expert_recv_stats,
        use_x_scales=use_x_scales, scales=scales,
    )  # fmt: skip


def nvfp4_mega_moe(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    sym_buffer: SymmBuffer,
    shared_l1_weights: WeightPair | None = None,
    shared_l2_weights: WeightPair | None = None,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    use_x_scales: bool = False,
    l1_alphas: torch.Tensor | None = None,
    l2_alphas: torch.Tensor | None = None,
    l2_act_scales: torch.Tensor | None = None,
) -> None:
    """`fp8_fp4_mega_moe` with recipe (1, 1, 16): a buffer of `nvfp4xnvfp4`."""
    fp8_fp4_mega_moe(
        y, l1_weights, l2_weights, sym_buffer, shared_l1_weights, shared_l2_weights, cumulative_local_expert_recv_stats,
        (1, 1, 16), activation, activation_clamp, fast_math, use_x_scales, l1_alphas, l2_alphas, l2_act_scales,
    )  # fmt: skip


def bf16_mega_moe(
    y: torch.Tensor,
    l1_weights: torch.Tensor,
    l2_weights: torch.Tensor,
    sym_buffer: SymmBuffer,
    shared_l1_weights: torch.Tensor | None = None,
    shared_l2_weights: torch.Tensor | None = None,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """`fp8_fp4_mega_moe` for BF16: l1_weights [E, 2I, H] transformed, l2_weights [E, H, I], a buffer of `bf16xbf16`.

    No pre-dispatch writes such a buffer: callers copy tokens and routing into `x`, `topk_idx` and `topk_weights`.
    """
    buffer = _live(sym_buffer)
    if not isinstance(buffer, SymmBuffer) or buffer.mma_type != "bf16xbf16":
        raise ValueError(f"sym_buffer is {_described(buffer)}; allowed: a SymmBuffer with mma_type='bf16xbf16'")
    check_choice("activation", activation, ("swiglu",))
    _run(
        y, l1_weights, l2_weights, buffer, _SM100["bf16xbf16"], activation, activation_clamp,
        shared=(shared_l1_weights, shared_l2_weights), stats=cumulative_local_expert_recv_stats,
    )  # fmt: skip


def fp8_mega_moe(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    sym_buffer: SM90SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = (128, 128, 128),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """`fp8_fp4_mega_moe` for FP8 experts with fp32 scales per 128 × 128 block, as `transform_weights_for_mega_moe_sm90`
    returns them: float8_e4m3fn [E, 2I, H] and [E, H, I], fp32 [E, 2I/128, H/128] and [E, H/128, I/128] row-major."""
    buffer = _live(sym_buffer)
    if not isinstance(buffer, SM90SymmBuffer) or buffer.x_sf.dtype != torch.float32:
        raise ValueError(f"sym_buffer is {_described(buffer)}; allowed: an SM90SymmBuffer with its fp32 x_sf")
    _check_recipe(recipe, (128, 128, 128), "for FP8 experts")
    check_choice("activation", activation, ("swiglu",))
    _run(
        y, l1_weights, l2_weights, buffer, _FP8, activation, activation_clamp,
        stats=cumulative_local_expert_recv_stats,
    )  # fmt: skip


@dataclass(frozen=True)
class _Prepared:
    """What calls of one kind on one buffer have in common. `tier`: the SM90 tier's buffers, where it serves them."""

    spec: LayerSpec
    parameters: LayerParameters
    workspace: Workspace
    backend: str
    arch: int
    tier: HopperWorkspace | None


def _run(
    y: torch.Tensor,
    l1_weights: Any,
    l2_weights: Any,
    buffer: SymmBuffer | SM90SymmBuffer,
    recipe: Recipe,
    activation: str,
    clamp: float | None,
    *,
    shared: tuple[Any, Any] = (None, None),
    stats: torch.Tensor | None = None,
    use_x_scales: bool = False,
    scales: GlobalScales = NO_SCALES,
) -> None:
    """Check everything, then run the layer."""
    check_choice("activation", activation, ACTIVATIONS)
    check_flag("use_x_scales", use_x_scales)
    if clamp is not None:
        clamp = check_number("activation_clamp", clamp, "None or a number of at least 0 (0 and inf included)")
    device = buffer.buffer.device
    experts, hidden, intermediate = buffer.num_experts, buffer.hidden, buffer.intermediate_hidden
    num_shared = getattr(buffer, "num_shared_experts", 0)
    tiled = is_tiled(l1_weights) or is_tiled(l2_weights)
    if tiled:
        if recipe != _SM90_FP4:
            raise ValueError("l1_weights are in Hopper's order; allowed for them: an SM90SymmBuffer with its fp32 x_sf")
        routed = read_tiled((l1_weights, l2_weights), device, experts=experts, hidden=hidden, intermediate=intermediate)
    else:
        routed = read_matrices(("l1_weights", "l2_weights"), (l1_weights, l2_weights), recipe, device,
                               lead=(experts,), hidden=hidden, intermediate=intermediate)  # fmt: skip
    shared_matrices = read_shared(shared, num_shared, recipe, device, hidden=hidden, intermediate=intermediate)
    scales.check(experts, device)
    if stats is not None:
        on_device("cumulative_local_expert_recv_stats", stats, device, (torch.int32,), "[E]", shape=(experts,))
    prepared = _prepare(buffer, recipe, activation, clamp, num_shared, shared_matrices, use_x_scales, tiled)
    num_tokens = _check_y(y, buffer, device)
    if num_tokens == 0:
        return
    ws, spec = prepared.workspace, prepared.spec
    if tiled and prepared.tier is None:
        raise UnsupportedError(f"l1_weights are in Hopper's order: {tier_unsupported_reason(spec, prepared.arch)}")
    with device_guard(device):
        if prepared.tier is not None and (tiled or tier_reads(routed)):
            run_tier(prepared.tier, ws, y, routed, spec)
            plan = prepared.tier.plan
        else:
            weights = MoEWeights(recipe, experts, hidden, intermediate, num_shared, routed, shared_matrices, *scales)
            if prepared.backend == "reference":
                run_dispatched_reference(ws, y, num_tokens, weights=weights, spec=spec)
                if stats is not None:
                    ids = ws.topk_ids[:num_tokens].flatten()
                    stats += torch.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts).int()
                return
            # Not at the top: the kernels load on first use.
            from megamoe.kernels.config import choose_config
            from megamoe.kernels.layer import run_dispatched

            config = choose_config(spec, prepared.arch, num_tokens)
            run_dispatched(ws, y, num_tokens, weights=weights, spec=spec, config=config, parameters=prepared.parameters)
            plan = ws.plan
        if stats is not None:
            stats.add_(plan.expert_offsets[1:]).sub_(plan.expert_offsets[:-1])


def _prepare(
    buffer: SymmBuffer | SM90SymmBuffer,
    recipe: Recipe,
    activation: str,
    clamp: float | None,
    num_shared: int,
    shared: ExpertMatrices | None,
    use_x_scales: bool,
    tiled: bool,
) -> _Prepared:
    """Made at the first call with these options, before any capture."""
    shared_format = None if shared is None else shared.format
    key = (recipe, activation, clamp, shared_format, use_x_scales, tiled)
    found = buffer.prepared.get(key)
    if isinstance(found, _Prepared):
        return found
    dims = WeightDims(buffer.num_experts, buffer.hidden, buffer.intermediate_hidden, num_shared, shared_format)
    device = buffer.buffer.device
    options = LayerOptions(activation=activation, activation_clamp=clamp)
    spec, parameters = resolve(options, recipe, dims, buffer.num_topk, device)
    request = LayerRequest(spec, device, buffer.num_max_tokens_per_rank)
    # On the CPU whatever runs; on a GPU the kernels, or a reason.
    backend = select("auto" if device.type == "cpu" else "triton", request).name
    x_scale = None
    if traits(recipe).token_scale:
        # Tokens that were quantized without an outer scale have the factor 1.
        scales = buffer.layout.region("x_scales").of(buffer.buffer)
        x_scale = scales if use_x_scales else _ones(buffer, scales)
    arch = architecture(device) if backend == "triton" else 0
    workspace = workspace_of(buffer.layout, buffer.buffer, spec, x_scale)
    tier = _tier(buffer, spec, arch, workspace) if tiled or recipe == _FP8 else None
    found = _Prepared(spec, parameters, workspace, backend, arch, tier)
    buffer.prepared[key] = found
    return found


def _ones(buffer: SymmBuffer | SM90SymmBuffer, scales: torch.Tensor) -> torch.Tensor:
    """One tensor for all calls without `use_x_scales`."""
    if "ones" not in buffer.scratch:
        buffer.scratch["ones"] = torch.ones_like(scales)
    ones: torch.Tensor = buffer.scratch["ones"]
    return ones


def _tier(
    buffer: SymmBuffer | SM90SymmBuffer, spec: LayerSpec, arch: int, workspace: Workspace
) -> HopperWorkspace | None:
    """The tier's memory: one for all activations and clamps, on which neither its sizes nor its contents depend. None
    where the tier cannot run `spec`."""
    if tier_unsupported_reason(spec, arch) is not None:
        return None
    if spec.recipe not in buffer.scratch:
        buffer.scratch[spec.recipe] = allocate_tier(spec, workspace)
    tier: HopperWorkspace = buffer.scratch[spec.recipe]
    return tier


def _live(buffer: object) -> SymmBuffer | SM90SymmBuffer:
    if not isinstance(buffer, (SymmBuffer, SM90SymmBuffer)):
        raise TypeError(f"sym_buffer is a {type(buffer).__name__}; expected what get_symm_buffer_for_mega_moe returns")
    if buffer.buffer is None:
        raise ValueError("sym_buffer was destroyed; expected a live one")
    if isinstance(buffer, SM90SymmBuffer):
        own = buffer.x_sf_ue8m0
        if buffer.x_sf.data_ptr() != own.data_ptr() or buffer.x_sf.dtype not in (torch.float32, torch.int32):
            raise ValueError("sym_buffer.x_sf is a tensor of its own; allowed: the one it came with, or x_sf_ue8m0")
    return buffer


def _described(buffer: SymmBuffer | SM90SymmBuffer) -> str:
    if isinstance(buffer, SymmBuffer):
        return f"a SymmBuffer with mma_type={buffer.mma_type!r}"
    return f"an SM90SymmBuffer with x_sf of {buffer.x_sf.dtype}"


def _check_recipe(recipe: object, expected: tuple[int, int, int], where: str) -> None:
    if not isinstance(recipe, (tuple, list)) or tuple(recipe) != expected:
        raise ValueError(f"recipe is {recipe!r}; allowed {where}: {expected}")


def _check_y(y: object, buffer: SymmBuffer | SM90SymmBuffer, device: torch.device) -> int:
    tensor = on_device("y", y, device, (torch.bfloat16,), "[n, H]", rank=2, layout="rows")
    rows, most = tensor.shape[0], buffer.num_max_tokens_per_rank
    if tensor.shape[1] != buffer.hidden or rows > most:
        raise ValueError(f"y has shape {tuple(tensor.shape)}; expected at most {most} rows of {buffer.hidden}")
    if rows > 1 and tensor.stride(0) < buffer.hidden:
        raise ValueError(f"y has strides {tensor.stride()}; its rows must not overlap")
    return rows
