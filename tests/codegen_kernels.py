"""Toy kernels with known outcomes, for the tests of `megamoe.codegen`: what it must see and must survive."""

import os

import triton
import triton.language as tl

from megamoe.codegen.job import CompileJob


@triton.jit
def scaled_dot(
    a, b, a_sf, b_sf, out, K,
    FORMAT_A: tl.constexpr, FORMAT_B: tl.constexpr, PACK_A: tl.constexpr, PACK_B: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        cols_a = k // PACK_A + tl.arange(0, BLOCK // PACK_A)
        cols_b = k // PACK_B + tl.arange(0, BLOCK // PACK_B)
        groups = k // GROUP + tl.arange(0, BLOCK // GROUP)
        tile_a = tl.load(a + rows[:, None] * (K // PACK_A) + cols_a[None, :])
        tile_b = tl.load(b + rows[:, None] * (K // PACK_B) + cols_b[None, :])
        scale_a = tl.load(a_sf + rows[:, None] * (K // GROUP) + groups[None, :])
        scale_b = tl.load(b_sf + rows[:, None] * (K // GROUP) + groups[None, :])
        acc = tl.dot_scaled(tile_a, scale_a, FORMAT_A, tile_b.T, scale_b, FORMAT_B, acc)
    tl.store(out + rows[:, None] * BLOCK + rows[None, :], acc)


@triton.jit
def plain_dot(a, b, out, K, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        tile_a = tl.load(a + rows[:, None] * K + k + rows[None, :])
        tile_b = tl.load(b + rows[:, None] * K + k + rows[None, :])
        acc = tl.dot(tile_a, tile_b.T, acc)
    tl.store(out + rows[:, None] * BLOCK + rows[None, :], acc)


@triton.jit
def exact(x, y, out, BLOCK: tl.constexpr):
    """Everything a contract kernel may do: a product and a sum apart, a written fma, an IEEE division."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + offsets), tl.load(y + offsets)
    c = a * b + 1.5
    tl.store(out + offsets, tl.div_rn(c, tl.fma(a, b, c)) * b + a)


@triton.jit
def sloppy(x, y, out, BLOCK: tl.constexpr):
    """What NumPy in the interpreter hides: `/`, `exp`."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + offsets), tl.load(y + offsets)
    tl.store(out + offsets, a / b + tl.exp(a))


@triton.jit
def hungry(x, out, rounds, BLOCK: tl.constexpr):
    """A scan over more values than the job leaves it registers for: spills, and in its loop."""
    offsets = tl.arange(0, BLOCK)
    value = tl.load(x + offsets)
    for _ in range(rounds):
        value = tl.cumsum(value, 0) + tl.load(x + offsets)
    tl.store(out + offsets, value)


class Aborting:
    """Stands for a compiler bug: looking at this kernel ends the process."""

    @property
    def arg_names(self) -> list[str]:
        os.write(2, b"Assertion `toy' failed.\n")
        os.abort()


DOTS = {  # name: formats of A and B, scale group, element type of the scales
    "mxf8f6f4": ("e4m3", "e2m1", 32, "*u8"),
    "mxf4": ("e2m1", "e2m1", 32, "*u8"),
    "mxf4nvf4": ("e2m1", "e2m1", 16, "*fp8e4nv"),
}
POINTER = {"e4m3": "*fp8e4nv", "e2m1": "*u8"}


def compile_jobs(arch: int) -> list[CompileJob]:
    jobs = []
    for name, (a, b, group, scale) in DOTS.items():
        if (arch, name) == (90, "mxf4nvf4"):
            continue  # Triton 3.6 cannot
        signature = {
            "a": POINTER[a], "b": POINTER[b], "a_sf": scale, "b_sf": scale, "out": "*fp32", "K": "i32",
        }  # fmt: skip
        constexprs = {
            "FORMAT_A": a, "FORMAT_B": b, "GROUP": group, "BLOCK": 128,
            "PACK_A": 2 if a == "e2m1" else 1, "PACK_B": 2 if b == "e2m1" else 1,
        }  # fmt: skip
        jobs.append(_job(name, scaled_dot, signature, constexprs, num_warps=8))
    signature = {"a": "*fp8e4nv", "b": "*fp8e4nv", "out": "*fp32", "K": "i32"}
    jobs.append(_job("f8f6f4", plain_dot, signature, {"BLOCK": 128}, num_warps=8))
    signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32"}
    jobs.append(_job("exact", exact, signature, {"BLOCK": 512}))
    jobs.append(_job("fused", exact, signature, {"BLOCK": 512}, enable_fp_fusion=True))
    jobs.append(_job("sloppy", sloppy, signature, {"BLOCK": 512}))
    signature = {"x": "*fp32", "out": "*fp32", "rounds": "i32"}
    jobs.append(_job("hungry", hungry, signature, {"BLOCK": 1024}, num_warps=1, maxnreg=24))
    jobs.append(_job("incomplete", exact, {"x": "*fp32"}, {"BLOCK": 512}))
    jobs.append(_job("aborting", Aborting(), {}, {}))
    return jobs


def _job(name, fn, signature, constexprs, **options) -> CompileJob:
    divisible = frozenset(argument for argument, kind in signature.items() if kind.startswith("*") or argument == "K")
    return CompileJob(name, "toy", name, fn, signature, constexprs, {"enable_fp_fusion": False, **options}, divisible)
