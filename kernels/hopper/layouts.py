"""Shared-memory layouts of what TMA brings."""

from triton.experimental.gluon import language as gl

SWIZZLED_128 = gl.NVMMASharedLayout(128, 8, 2)
SWIZZLED_64 = gl.NVMMASharedLayout(64, 8, 2)
SWIZZLED_32 = gl.NVMMASharedLayout(32, 8, 2)
PLAIN_FP32 = gl.NVMMASharedLayout(0, 32, 2)
BF16_SWIZZLED_128 = gl.NVMMASharedLayout(128, 16, 2)
