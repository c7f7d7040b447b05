"""Compile CUDA sources as the package does, and read what the compiler says of each kernel."""

import re
from dataclasses import dataclass
from pathlib import Path

from kalos_ctx import _nvrtc
from kalos_ctx.errors import DeviceUnavailable

CompileError = DeviceUnavailable

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
# Lines of a verbose log that are no warning.
FIGURES = re.compile(r"(ptxas\s+(info\s+:|\.)\s|\s*\d+ bytes stack frame)")


@dataclass
class Usage:
    """What one kernel takes: registers of a thread, bytes of its stack and of its spills."""

    registers: int = 0
    stack: int = 0
    spilled: int = 0


def compile_cubin(source, name, arch, include_dirs):
    """Return (cubin bytes, warnings) of one source for ``sm_XX``.

    Raises
    ------
    CompileError
        With NVRTC's log.
    """
    cubin, log = _nvrtc.compile_cubin(source, name, arch, Path(*include_dirs[:1]))
    return cubin, log


def compile_measured(path, arch):
    """Return (cubin bytes, warnings, Usage by kernel) of a ``.cu`` file."""
    cubin, log = _nvrtc.compile_cubin(path.read_text(), path.name, arch, path.parent, verbose=True)
    usage = {}
    current = None
    for line in log.splitlines():
        if found := ENTRY.search(line):
            current = usage[found[1]] = Usage()
        elif found := MEMORY.search(line):
            current.stack, current.spilled = int(found[1]), int(found[2]) + int(found[3])
        elif found := REGISTERS.search(line):
            current.registers = int(found[1])
    warnings = [line for line in log.splitlines() if line.strip() and not FIGURES.match(line)]
    return cubin, "\n".join(warnings), usage
