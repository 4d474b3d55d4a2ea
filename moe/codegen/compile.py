"""Compile one job for a GPU that need not be here, and analyse it. Needs Triton without its interpreter.

Results are cached by content in Triton's own cache: an unchanged kernel is only disassembled again.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from megamoe.codegen.analyse import Report, analyse
from megamoe.codegen.job import CompileJob


def compile_job(job: CompileJob, arch: int) -> Report:
    """Compile `job` for compute capability `arch` (90, 100, 120). Whatever Triton raises passes through."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: the compiler is not available in this process")
    arguments = job.fn.arg_names
    if missing := [name for name in arguments if name not in job.signature and name not in job.constexprs]:
        raise ValueError(f"job {job.name!r}: neither signature nor constexprs has {', '.join(missing)}")
    if unknown := [name for name in (*job.signature, *job.constexprs) if name not in arguments]:
        raise ValueError(f"job {job.name!r}: {job.fn.__name__} has no argument {', '.join(unknown)}")
    signature = {name: "constexpr" if name in job.constexprs else job.signature[name] for name in arguments}
    attributes = {(arguments.index(name),): [["tt.divisibility", 16]] for name in sorted(job.divisible_by_16)}
    if isinstance(job.fn, GluonJITFunction):
        by_position = {(arguments.index(name),): value for name, value in job.constexprs.items()}
        source = GluonASTSource(job.fn, signature, by_position, attributes)
    else:
        source = ASTSource(job.fn, signature, job.constexprs, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(job.options))
    resources, sass = disassemble(kernel.asm["cubin"])
    return analyse(
        ptx=kernel.asm["ptx"],
        llir=kernel.asm["llir"],
        sass=sass,
        resources=resources,
        smem=kernel.metadata.shared,
        tmem=kernel.metadata.tmem_size or 0,
    )


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(`cuobjdump -res-usage`, `nvdisasm -c`) of a cubin, by the tools that Triton ships."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        commands = [knobs.nvidia.cuobjdump.path, "-res-usage"], [knobs.nvidia.nvdisasm.path, "-c"]
        outputs = [subprocess.run([*command, path], capture_output=True, text=True, check=True) for command in commands]
    return outputs[0].stdout, outputs[1].stdout


def versions() -> dict[str, str]:
    """Triton, and the ptxas release that Triton uses for each architecture family."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    return {
        "triton": triton.__version__,
        "ptxas_sm90": get_ptxas(90).version,
        "ptxas_sm100": get_ptxas(100).version,
    }
