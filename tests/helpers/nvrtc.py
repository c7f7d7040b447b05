"""Compile CUDA sources with NVRTC from the ``nvidia-cuda-nvrtc`` wheel: no GPU, no driver."""

import ctypes
import importlib.util
from functools import cache
from pathlib import Path


class CompileError(Exception):
    """NVRTC refused a source; the message is its log."""


def wheel_files(pattern):
    """Files of the installed ``nvidia`` wheels, which share one namespace package."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    return sorted(path for root in roots for path in Path(root).rglob(pattern))


@cache
def nvrtc():
    libraries = wheel_files("libnvrtc.so.*")
    if not libraries:
        raise FileNotFoundError(
            "libnvrtc.so: pip install 'kalos-ctx[test]' brings nvidia-cuda-nvrtc"
        )
    return ctypes.CDLL(str(libraries[-1]))


def _log(library, program):
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace").strip()


def compile_cubin(source, name, arch, include_dirs):
    """Return (cubin bytes, log) of one source for ``sm_XX``.

    Raises
    ------
    CompileError
        With NVRTC's log.
    """
    library = nvrtc()
    headers = {path.parent for path in wheel_files("cuda_fp16.h")}
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--fmad=false"]
    options += [f"--include-path={folder}" for folder in [*include_dirs, *sorted(headers)]]
    argv = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    program = ctypes.c_void_p()
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), name.encode(), 0, None, None
    )
    if status:
        raise CompileError(f"nvrtcCreateProgram: {status}")
    try:
        if library.nvrtcCompileProgram(program, len(options), argv):
            raise CompileError(_log(library, program))
        size = ctypes.c_size_t()
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw, _log(library, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
