"""The analyser and the checks on hand-written PTX, IR and SASS: proof that they can fail."""

from dataclasses import replace
from typing import NamedTuple

import pytest

from megamoe.codegen import analyse, checks


class Case(NamedTuple):
    id: str
    text: str
    expected: object


def table(*cases: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("text", "expected"), [pytest.param(*case[1:], id=case.id) for case in cases])


@table(
    Case("triton36-mxf8f6f4",
         "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [%r1], %rd1;",
         "tcgen05.mma kind::mxf8f6f4 block_scale"),
    Case("triton39-mxf4", "@%p1 tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [%r1], %rd1;",
         "tcgen05.mma kind::mxf4 block_scale"),
    Case("triton39-nvfp4", "@%p1 tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [%r1];",
         "tcgen05.mma kind::mxf4nvf4 block_scale"),
    Case("plain-fp8", "tcgen05.mma.cta_group::1.kind::f8f6f4 [ %r9 + 0 ], %rd1;", "tcgen05.mma kind::f8f6f4"),
    Case("wgmma", "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%f1,%f2}, %rd1, %rd2, p, 1, 1;",
         "wgmma e4m3.e4m3"),
    Case("sm120-block-scaled",
         "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0;",
         "mma.sync kind::mxf4nvf4 block_scale e2m1.e2m1.ue8m0"),
    Case("mma-sync", "$L__BB0_1: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f1 }, { %r1 };",
         "mma.sync bf16.bf16"),
)  # fmt: skip
def test_mma_kind(text: str, expected: str) -> None:
    assert analyse.mma_kinds(analyse.ptx_opcodes(text)) == [expected]


def test_no_mma_in_comments_strings_and_other_tcgen05() -> None:
    text = """
    // tcgen05.mma.cta_group::1.kind::mxf4.block_scale
    .file 1 "mma.sync.aligned.py"
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 128;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd1];
    """
    assert analyse.mma_kinds(analyse.ptx_opcodes(text)) == []


FMA_CALL = "%3 = tail call float @llvm.fma.f32(float %0, float %1, float %2)\n"


@table(
    Case("rounded", ("mul.rn.f32 %f1, %f2, %f3; add.rn.f32 %f1, %f1, %f2; sub.rn.f32 %f1, 0f0;", ""), {}),
    Case("written-fma", ("fma.rn.f32 %f1, %f2, %f3, %f4;", FMA_CALL), {}),
    Case("written-fma-packed", ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", 2 * FMA_CALL), {}),
    Case("written-fma-vector",
         ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", "%2 = call <2 x float> @llvm.fma.v2f32(<2 x float> %0)"),
         {}),
    Case("declared-not-called", ("fma.rn.f32 %f1, %f2, %f3, %f4;", "declare float @llvm.fma.f32(float)"),
         {"fusion": 1}),
    Case("contracted-by-llvm", ("fma.rn.f32 %f1, %f2, %f3, %f4; fma.rn.f32 %f1, %f2, %f3, %f4;", FMA_CALL),
         {"fusion": 1}),
    Case("left-to-ptxas", ("mul.f32 %f1, %f2, %f3; add.f32x2 %rd1, %rd2, %rd3;", ""), {"fusion": 3}),
    Case("integer-and-bf16", ("mul.lo.s32 %r1, %r2, %r3; add.s64 %rd1, 1; fma.rn.bf16x2 %r1, %r2, %r3;", ""),
         {}),
    Case("ieee-division", ("div.rn.f32 %f1, %f2, %f3; sqrt.rn.f32 %f1, %f2;", ""), {}),
    Case("division", ("div.full.f32 %f1, %f2, %f3; @%p1 div.approx.f32 %f1, %f2, %f3;", ""),
         {"div.full": 1, "div.approx": 1}),
    Case("one-line-inline", ("{ .reg .f32 t; rcp.approx.ftz.f32 t, %f1; ex2.approx.f32 %f2, t; }", ""),
         {"rcp.approx": 1, "ex2.approx": 1}),
    Case("flushing", ("mul.rn.ftz.f32 %f1, %f2, %f3;", ""), {"ftz": 1}),
)  # fmt: skip
def test_inexact_arithmetic(text: tuple[str, str], expected: dict[str, int]) -> None:
    ptx, llir = text
    assert analyse.inexact_arithmetic(analyse.ptx_opcodes(ptx), llir) == expected


SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   STL [R1], R0 ;
        /*0020*/               @P1 BRA `(.L_x_9) ;
.L_x_1:
        /*0030*/                   LDL.LU.64 R2, [R1+0x8] ;
        /*0040*/                   UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;
        /*0050*/                   BRA.U !UP0, `(.L_x_5) ;
.L_x_2:
        /*0060*/                   STL.64 [R1+0x8], R2 ;
        /*0070*/              @!P0 BRA `(.L_x_1) ;
        /*0080*/                   LDL R4, [R1] ;
        /*0090*/                   LDL R5, [R1+0x4] ;
.L_x_9:
        /*00a0*/                   HFMA2.MMA R1, -RZ, RZ, 0, 0 ;
        /*00b0*/                   EXIT ;
.L_x_5:
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R0 ;
        /*00d0*/              @!P2 BRA `(.L_x_5) ;
        /*00e0*/                   BRA `(.L_x_2) ;
.L_x_7:
        /*00f0*/                   BRA `(.L_x_7);
"""
RESOURCES = "Resource usage:\n Function kernel:\n  REG:168 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:592\n"


def test_sass_counts_spills_inside_and_outside_of_loops() -> None:
    """The barrier wait behind EXIT jumps back into the loop; the reloads between them are in no loop."""
    report = analyse.analyse(ptx="", llir="", sass=SASS, resources=RESOURCES, smem=1024, tmem=128)
    assert report == analyse.Report(
        mma=[], sass_mma=["UTCQMMA"], smem=1024, tmem=128, registers=168, stack=16,
        stl=2, ldl=3, stl_in_loops=1, ldl_in_loops=1, spills_in_mma_loops=2,
    )  # fmt: skip


@table(
    Case("straight-line", "MOV R1, R2 ;|EXIT ;", [False, False]),
    Case("forward-branch", "@P0 BRA `(.L_1) ;|MOV R1, R2 ;|.L_1:|EXIT ;", [False, False, False]),
    Case("self-loop", ".L_1:|@P0 BRA `(.L_1) ;|EXIT ;", [True, False]),
    Case("unconditional-branch", "BRA `(.L_2) ;|.L_1:|MOV R1, R2 ;|EXIT ;|.L_2:|BRA `(.L_1) ;", [False] * 4),
    Case("condition-as-operand", ".L_1:|MOV R1, R2 ;|BRA.U UP0, `(.L_2) ;|BRA `(.L_1) ;|.L_2:|EXIT ;",
         [True, True, True, False]),
    Case("nested-apart",
         ".L_1:|NOP ;|.L_2:|@P0 BRA `(.L_2) ;|MOV R1, R2 ;|.L_3:|@P1 BRA `(.L_3) ;|@P2 BRA `(.L_1) ;|EXIT ;",
         [True, True, True, True, True, False]),
)  # fmt: skip
def test_loops(text: str, expected: list[bool]) -> None:
    lines = [line if line.startswith(".L") else f"        /*0000*/    {line}" for line in text.split("|")]
    assert analyse.loop_mask(analyse.sass_instructions("\n".join(lines))) == expected


def test_main_loops_are_the_innermost_ones_with_an_mma() -> None:
    text = (
        ".L_1:|STL [R1], R2 ;|.L_2:|LDL R2, [R1] ;|QGMMA R2, R3 ;|@P0 BRA `(.L_2) ;|LDL R2, [R1] ;|@P1 BRA `(.L_1) ;|"
        "STL [R1], R2 ;|.L_3:|STL [R1], R2 ;|LDL R2, [R1] ;|HGMMA R2, R3 ;|@P1 BRA `(.L_3) ;|EXIT ;"
    )
    lines = [line if line.startswith(".L") else f"        /*0000*/    {line}" for line in text.split("|")]
    assert analyse.spills_in_mma_loops(analyse.sass_instructions("\n".join(lines))) == 2
    assert analyse.spills_in_mma_loops(analyse.sass_instructions("        /*0000*/    STL [R1], R2 ;")) == 0


def test_largest_function_counts() -> None:
    assert analyse.resource_usage(RESOURCES + "Function f:\n REG:200 STACK:8 SHARED:0") == (200, 16)


def test_empty_disassembly_is_an_error() -> None:
    with pytest.raises(ValueError, match="cuobjdump"):
        analyse.resource_usage("")
    with pytest.raises(ValueError, match="nvdisasm"):
        analyse.sass_instructions("")


CLEAN = analyse.Report(
    mma=["tcgen05.mma kind::mxf4 block_scale"], sass_mma=["UTCOMMA"], smem=65536, tmem=256, registers=128,
    stack=0, stl=0, ldl=0, stl_in_loops=0, ldl_in_loops=0,
)  # fmt: skip
SIGMOID = frozenset({"div.full", "ex2.approx"})


def violations(report, arch=100, kernel="gate_up", recipe="mxf4xmxf4/mx32/deep_gemm_sm100", contract=SIGMOID):
    return checks.violations(report, arch=arch, kernel=kernel, recipe=recipe, contract=contract)


def test_clean_report_keeps_its_contract() -> None:
    assert violations(CLEAN) == []
    assert violations(replace(CLEAN, inexact={"div.full": 4, "ex2.approx": 4})) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"stack": 8}, "STACK:8", id="stack"),
        pytest.param({"ldl": 3, "ldl_in_loops": 2}, "3 LDL (2 in loops)", id="reload"),
        pytest.param({"stl": 1}, "1 STL", id="spill"),
        pytest.param({"smem": 232449}, "232449 bytes of shared memory", id="smem"),
        pytest.param({"tmem": 1024}, "1024 columns", id="tmem"),
        pytest.param({"inexact": {"rcp.approx": 2}}, "2 × rcp.approx", id="not-allowed"),
        pytest.param({"inexact": {"fusion": 1}}, "1 × fusion", id="fusion"),
        pytest.param({"inexact": {"div.full": 5, "ex2.approx": 4}}, "not every division", id="hidden-division"),
        pytest.param({"mma": ["tcgen05.mma kind::f8f6f4"]}, "needs tcgen05.mma kind::mxf4 block_scale", id="wrong-mma"),
        pytest.param({"mma": []}, "MMA is none", id="no-mma"),
        pytest.param({"mma": [*CLEAN.mma, "mma.sync bf16.bf16"]}, "MMA is tcgen05", id="second-mma"),
    ],
)
def test_violation_is_named(change: dict, said: str) -> None:
    found = violations(replace(CLEAN, **change))
    assert len(found) == 1
    assert said in found[0]


def test_contract_kernel_may_not_even_use_the_sigmoid() -> None:
    found = violations(replace(CLEAN, mma=[], inexact={"ex2.approx": 1}), kernel="combine", contract=frozenset())
    assert found == ["1 × ex2.approx (allowed: none)"]


def test_sm120_has_less_shared_memory_and_another_mma() -> None:
    sm120 = replace(CLEAN, mma=["mma.sync kind::mxf4nvf4 block_scale e2m1.e2m1.ue8m0"])
    assert len(violations(replace(sm120, smem=101377), arch=120)) == 1
    assert violations(replace(sm120, smem=101376), arch=120) == []
    assert len(violations(replace(CLEAN, smem=101376), arch=120)) == 1
