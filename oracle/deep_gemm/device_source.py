"""CUDA source that gives upstream's device code a C interface: kernel launches, and the requantization scales.

The pre-dispatch kernels are upstream's as they are. The requantizer is a loop of ours around upstream's scale
functions and CUDA's conversions, one thread per scale group: what the SM100 epilogue does between its registers.
"""

from __future__ import annotations

SM100_KINDS = {"mxfp8": "MXFP8FP4", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}
"""Our kinds and upstream's names of them."""
INSTANTIATIONS = (
    ("mxfp8", 32), ("mxfp8", 64), ("mxfp8", 128),
    ("mxfp4", 32), ("mxfp4", 64), ("mxfp4", 128),
    ("nvfp4", 16), ("fp8_block128", 128),
)  # fmt: skip
"""(kind, group) of every pre-dispatch kernel; BF16 has none."""
REQUANTIZE_GROUPS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "fp8_block64": 64}
"""Columns per scale of every requantizer; `fp8_block64` is the SM90 kernel's."""

_HEAD = r"""
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1000
// sm_100 multiplies pairs; elsewhere the same two products, each rounded to nearest.
static __device__ __forceinline__ float2 multiply_pair(float2 a, float2 b) {
    return make_float2(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y));
}
#define __fmul2_rn multiply_pair
#endif

#include <cuda_fp4.h>
#include <deep_gemm/impls/sm100_mega_moe_pre_dispatch.cuh>
#include <deep_gemm/impls/sm90_mega_moe_pre_dispatch.cuh>
#include <deep_gemm/impls/sm90_fp8_mega_moe.cuh>

using namespace deep_gemm;

template <MmaKind kKind, uint32_t kGroup>
__global__ void requantize_kernel(const float* act, uint8_t* q, uint8_t* sf, uint64_t num_groups) {
    const uint64_t group = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x;
    if (group >= num_groups) return;
    act += group * kGroup;
    float amax = 0.0f;
    for (uint32_t i = 0; i < kGroup; ++i)
        amax = math::ReduceMax<float>{}(fabsf(act[i]), amax);
    const float2 pair = make_float2(amax, amax);
    float2 scale, inverse;
    if constexpr (kKind == MmaKind::NVFP4) {
        uint2 bytes;
        math::get_nvfp4_sf_and_sf_inv(pair, scale, inverse, bytes);
        sf[group] = static_cast<uint8_t>(bytes.x);
    } else {
        if constexpr (kKind == MmaKind::MXFP4) math::get_e2m1_sf_and_sf_inv(pair, scale, inverse);
        else math::get_e4m3_sf_and_sf_inv(pair, scale, inverse);
        sf[group] = static_cast<uint8_t>(__float_as_uint(scale.x) >> 23);
    }
    for (uint32_t i = 0; i < kGroup; i += 2) {
        const float2 v = __fmul2_rn(make_float2(act[i], act[i + 1]), inverse);
        if constexpr (kKind == MmaKind::MXFP8FP4) {
            const auto bits = __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, __NV_E4M3);
            reinterpret_cast<__nv_fp8x2_storage_t*>(q + group * kGroup)[i / 2] = bits;
        } else {
            q[group * (kGroup / 2) + i / 2] = __nv_cvt_float2_to_fp4x2(v, __NV_E2M1, cudaRoundNearest);
        }
    }
}

__global__ void requantize_sm90_kernel(const float* act, uint8_t* q, float* sf, uint64_t num_groups) {
    const uint64_t group = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x;
    if (group >= num_groups) return;
    float amax = 0.0f;
    for (uint32_t i = 0; i < 64; ++i)
        amax = math::ReduceMax<float>{}(fabsf(act[group * 64 + i]), amax);
    float2 scale, inverse;
    sm90_fp8_mega_moe_get_e4m3_sf_and_sf_inv(make_float2(amax, amax), scale, inverse);
    sf[group] = scale.x;
    for (uint32_t i = 0; i < 64; ++i) {
        const float v = __fmul_rn(act[group * 64 + i], inverse.x);
        q[group * 64 + i] = __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
    }
}

extern "C" {

// -1 for a kind and group that has no kernel, else the cudaError_t of the launch.
int pre_dispatch(int kind, uint32_t group, const void* x, const int32_t* ids, const float* weights,
                 const float* expert_scales, void* q, void* sf, float* token_scale, int64_t* ids_out,
                 float* weights_out, uint32_t tokens, uint32_t rows, uint32_t hidden, uint32_t top_k,
                 float factor, cudaStream_t stream) {
    const uint32_t block = hidden / 8;
    const uint32_t grid = tokens + (static_cast<uint64_t>(rows - tokens) * top_k + block - 1) / block;
    if (grid == 0) return 0;
    const auto* bf16 = static_cast<const __nv_bfloat16*>(x);
"""

_SM100_LAUNCH = """
    if (kind == {number} && group == {group}) {{
        mega_moe_pre_dispatch_kernel<{group}, MmaKind::{name}, false><<<grid, block, 0, stream>>>(
            bf16, ids, weights, expert_scales, q, static_cast<int32_t*>(sf), token_scale, ids_out, weights_out,
            tokens, rows, hidden, hidden / {group}, top_k);
        return cudaGetLastError();
    }}
"""

_SM90_LAUNCH = """
    if (kind == {number} && group == {group}) {{
        sm90_mega_moe_pre_dispatch_kernel<{group}, false><<<grid, block, 0, stream>>>(
            bf16, ids, weights, static_cast<__nv_fp8_e4m3*>(q), static_cast<float*>(sf), ids_out, weights_out,
            tokens, rows, hidden, hidden / {group}, top_k, factor);
        return cudaGetLastError();
    }}
"""

_MIDDLE = """
    return -1;
}

int requantize(int kind, const float* act, uint8_t* q, void* sf, uint64_t elements, cudaStream_t stream) {
    const uint32_t block = 128;
"""

_REQUANTIZE_LAUNCH = """
    if (kind == {number}) {{
        const uint64_t groups = elements / {group};
        {kernel}<<<static_cast<uint32_t>((groups + block - 1) / block), block, 0, stream>>>(
            act, q, static_cast<{scale}*>(sf), groups);
        return cudaGetLastError();
    }}
"""

_TAIL = """
    return -1;
}

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}
"""


def kind_number(kind: str) -> int:
    """What the C interface calls a kind."""
    return ("mxfp8", "mxfp4", "nvfp4", "fp8_block128", "fp8_block64").index(kind)


def source() -> str:
    """The whole translation unit."""
    launches = []
    for kind, group in INSTANTIATIONS:
        template = _SM100_LAUNCH if kind in SM100_KINDS else _SM90_LAUNCH
        launches.append(template.format(number=kind_number(kind), group=group, name=SM100_KINDS.get(kind)))
    requantize = []
    for kind, group in REQUANTIZE_GROUPS.items():
        name = SM100_KINDS.get(kind)
        kernel = f"requantize_kernel<MmaKind::{name}, {group}>" if name else "requantize_sm90_kernel"
        scale = "uint8_t" if name else "float"
        requantize.append(_REQUANTIZE_LAUNCH.format(number=kind_number(kind), group=group, kernel=kernel, scale=scale))
    return "".join([_HEAD, *launches, _MIDDLE, *requantize, _TAIL])
