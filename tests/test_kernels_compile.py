"""Every kernel compiles for every supported architecture, with no GPU and no driver."""

import re
from functools import cache

import pytest
from helpers.nvrtc import CompileError, compile_cubin, compile_measured

from kalos_ctx import _nvrtc
from kalos_ctx._kernel_source import kernel_dir

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
KERNEL = re.compile(r'extern "C"[^;{(]*?__global__.*?\b(kalos_\w+)\s*\(', re.DOTALL)
# Bytes that a thread spills all the same: a search that waits for its loads does not feel them.
SPILLED = {("kalos_plan_history", "sm_100"): 32}

measured = cache(compile_measured)  # minutes of compiling that several tests look at


def sources():
    return sorted(path.name for path in kernel_dir().glob("*.cu"))


@pytest.fixture(params=[f"{name}-{arch}" for name in sources() for arch in ARCHITECTURES])
def built(request):
    """Compile one file for one architecture: (source, architecture, code, warnings, usage)."""
    name, _, arch = request.param.rpartition("-")
    path = kernel_dir() / name
    return path, arch, *measured(path, arch)


def test_kernel_dir_holds_sources_and_headers():
    assert "plan.cu" in sources()
    assert {"kalos_layout.h", "kalos_turns.h", "kalos_plan.h"} <= {
        path.name for path in kernel_dir().glob("*.h")
    }


def test_kernel_compiles_without_a_warning(built):
    path, _, cubin, warnings, usage = built
    assert cubin.startswith(b"\x7fELF")
    assert usage, "it defines no kernel"
    assert set(KERNEL.findall(path.read_text())) <= set(usage)
    assert warnings == ""


def test_kernel_keeps_everything_in_registers(built):
    _, arch, _, _, usage = built
    assert all(one.registers for one in usage.values())
    allowed = {name: SPILLED.get((name, arch), 0) for name in usage}
    assert {name: one for name, one in usage.items() if one.spilled > allowed[name]} == {}
    assert {name: one for name, one in usage.items() if one.stack and not allowed[name]} == {}


def test_kernels_are_compiled_without_fused_steps_that_are_not_written():
    """A score is defined operation by operation: `a * b + c` rounds twice."""
    text = 'extern "C" __global__ void f(float* p) {{ p[0] = {}; }}'
    plain, fused = "p[1] * p[2] + p[3]", "__fmaf_rn(p[1], p[2], p[3])"
    code = [compile_cubin(text.format(one), "f.cu", "sm_90", [])[0] for one in (plain, fused)]
    assert code[0] != code[1]


def test_compiler_is_of_a_version_and_knows_every_architecture():
    compiler = _nvrtc.compiler()
    assert compiler.version >= (12, 8)
    assert {int(arch.removeprefix("sm_")) for arch in ARCHITECTURES} <= set(compiler.architectures)


def test_broken_kernel_is_refused_with_the_compilers_log():
    with pytest.raises(CompileError, match=r"f\.cu for sm_90: (.|\n)*undefined"):
        compile_cubin('extern "C" __global__ void f() { missing(); }', "f.cu", "sm_90", [])


def test_unknown_architecture_is_refused():
    with pytest.raises(CompileError, match="gpu-architecture"):
        compile_cubin('extern "C" __global__ void f() {}', "f.cu", "sm_10", [])


def test_each_kernel_file_says_its_launch_bounds():
    for name in sources():
        text = (kernel_dir() / name).read_text()
        assert text.count("__global__") == text.count("__launch_bounds__"), name
