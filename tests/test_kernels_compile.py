"""Every kernel compiles for every supported architecture, with no GPU and no driver."""

import re

import pytest
from helpers.nvrtc import CompileError, compile_cubin

from kalos_ctx._kernel_source import kernel_dir

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
KERNEL = re.compile(r'extern "C"[^;{(]*?__global__.*?\b(kalos_\w+)\s*\(', re.DOTALL)


def sources():
    return sorted(path.name for path in kernel_dir().glob("*.cu"))


def test_kernel_dir_holds_sources_and_headers():
    assert "plan.cu" in sources()
    assert {"kalos_layout.h", "kalos_turns.h", "kalos_plan.h"} <= {
        path.name for path in kernel_dir().glob("*.h")
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", sources())
def test_kernel_compiles_without_a_warning(name, arch):
    text = (kernel_dir() / name).read_text()
    kernels = KERNEL.findall(text)
    assert kernels, f"{name} defines no kernel"
    cubin, log = compile_cubin(text, name, arch, [kernel_dir()])
    assert cubin.startswith(b"\x7fELF")
    assert [kernel for kernel in kernels if kernel.encode() + b"\0" not in cubin] == []
    assert log == ""


def test_broken_kernel_is_refused_with_the_compilers_log():
    with pytest.raises(CompileError, match="undefined"):
        compile_cubin('extern "C" __global__ void f() { missing(); }', "f.cu", "sm_90", [])


def test_each_kernel_file_says_its_launch_bounds():
    for name in sources():
        text = (kernel_dir() / name).read_text()
        assert text.count("__global__") == text.count("__launch_bounds__"), name
