"""CUDA C++ to machine code by NVRTC, through cuda.core; needs neither a GPU nor a driver."""

from __future__ import annotations

import io
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kalos_ctx.errors import DeviceUnavailable

# Scores are defined operation by operation, so nothing is fused that is not written as fused;
# subnormals are kept by default.
OPTIONS: dict[str, Any] = {"std": "c++17", "fma": False}
INSTALL = "pip install 'kalos-ctx[cuda]'"

# Two threads that import cuda.core at once may find it half made.
_importing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Compiler:
    """The NVRTC that is installed.

    Attributes
    ----------
    version : (int, int)
    architectures : tuple of int
        What it compiles for, ascending: 90 is sm_90.
    identity : str
        Tells this build of NVRTC from another.
    """

    version: tuple[int, int]
    architectures: tuple[int, ...]
    identity: str


def compiler() -> Compiler:
    """Load NVRTC and say what it is.

    Raises
    ------
    DeviceUnavailable
        It, or cuda-python, is not installed.
    """
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        raise DeviceUnavailable(f"the CUDA backend needs cuda-python: {INSTALL}") from error
    try:
        library = load_nvidia_dynamic_lib("nvrtc").abs_path
        _, major, minor = nvrtc.nvrtcVersion()
        _, architectures = nvrtc.nvrtcGetSupportedArchs()
    except Exception as error:  # the loader's own type, which older versions do not have
        raise DeviceUnavailable(
            f"NVRTC, which compiles the kernels, cannot be loaded: {INSTALL} ({_line(error)})"
        ) from error
    # NVRTC tells no patch version; the file's size does.
    size = os.stat(library).st_size if library else 0
    return Compiler(
        (major, minor), tuple(sorted(architectures)), f"NVRTC {major}.{minor} of {size} bytes"
    )


def compile_cubin(
    source: str, name: str, arch: str, folder: Path, *, verbose: bool = False
) -> tuple[bytes, str]:
    """Compile one source for one architecture.

    Parameters
    ----------
    source, name : str
        Text, and what the compiler's messages call it.
    arch : str
        Such as "sm_90".
    folder : path
        Where its headers are.
    verbose : bool
        The log says registers, stack and spills of each kernel.

    Returns
    -------
    (bytes, str)
        Machine code, and the compiler's log.

    Raises
    ------
    DeviceUnavailable
        NVRTC refused the source or the architecture; its log is in the message.
    """
    core = cuda_core()
    log = io.StringIO()
    chosen = {**OPTIONS, "ptxas_options": "-v"} if verbose else OPTIONS
    try:
        options = core.ProgramOptions(name=name, arch=arch, include_path=str(folder), **chosen)
        code = core.Program(source, "c++", options).compile("cubin", logs=log).code
    except Exception as error:  # cuda-core's own type, which is not public
        text = str(error).replace("\0", "").strip()
        raise DeviceUnavailable(f"NVRTC does not compile {name} for {arch}: {text}") from error
    return bytes(code), log.getvalue().replace("\0", "").strip()


def cuda_core() -> Any:
    """Return the module `cuda.core`.

    Raises
    ------
    DeviceUnavailable
        It is not installed, or the cuda-bindings that is installed does not fit it.
    """
    try:
        with _importing:
            import cuda.core
    except ImportError as error:
        raise DeviceUnavailable(
            f"the CUDA backend needs cuda-core and cuda-bindings that fit each other: {INSTALL} "
            f"({_line(error)})"
        ) from error
    return cuda.core


def _line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
