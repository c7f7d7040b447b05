"""Build the compiled modules: one extension for each ``cython_ext/kalos_ctx/*.pyx``.

The folder mirrors the import path, since Cython looks a module's own ``.pxd`` up by its full
name. ``cuda/`` is shipped as ``kalos_ctx/_kernels`` so that NVRTC finds the sources at run time.
"""

import glob
import multiprocessing
import os

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("KALOS_DEBUG") == "1"
HEADERS = sorted(glob.glob("cuda/*.h") + glob.glob("cython_ext/kalos_ctx/*.h"))
# Modules that include the C++ planner; the others are plain C.
CXX_MODULES = {
    "_planner",
    "_session_view",
    "_window_parts",
    "_session_table",
    "_context_window",
    "_assembler",
    "_gathering",
    "_device_gathering",
    "_window_wire",
    "_serving",
    "_asking",
}
JOBS = os.cpu_count() or 1
# Cython's worker processes would run this file again under any other start method.
CYTHON_JOBS = JOBS if multiprocessing.get_start_method() == "fork" else 0


def extension(path: str) -> Extension:
    name = os.path.splitext(os.path.basename(path))[0]
    cxx = name in CXX_MODULES
    flags = ["-O0", "-g"] if DEBUG else ["-O3"]
    # -ffp-contract=off: a score is defined operation by operation; fused steps are written out.
    flags += ["-ffp-contract=off", "-fno-math-errno", "-Wno-unused-function"]
    flags += ["-std=c++17", "-fno-exceptions", "-fno-rtti"] if cxx else ["-std=gnu11"]
    return Extension(
        f"kalos_ctx.{name}",
        [path],
        include_dirs=["cuda", "cython_ext/kalos_ctx"],
        depends=HEADERS,
        extra_compile_args=flags,
        extra_link_args=["-pthread"],
        language="c++" if cxx else "c",
    )


setup(
    ext_modules=cythonize(
        [extension(path) for path in sorted(glob.glob("cython_ext/kalos_ctx/*.pyx"))],
        include_path=["cython_ext"],
        build_dir="build",
        nthreads=CYTHON_JOBS,
        compiler_directives={
            "language_level": 3,
            "binding": True,
            "embedsignature": True,
            "embedsignature.format": "python",
            "boundscheck": DEBUG,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": DEBUG,
            "freethreading_compatible": False,
        },
    ),
    options={"build_ext": {"parallel": JOBS}},
    package_dir={"kalos_ctx._kernels": "cuda"},
    packages=[
        "kalos_ctx",
        "kalos_ctx.adapters",
        "kalos_ctx.backends",
        "kalos_ctx.conformance",
        "kalos_ctx.demo_data",
        "kalos_ctx.inspecting",
        "kalos_ctx.sidecar",
        "kalos_ctx._kernels",
    ],
    package_data={
        "kalos_ctx": ["*.pyi", "py.typed"],
        "kalos_ctx._kernels": ["*.h", "*.cuh", "*.cu"],
        "kalos_ctx.inspecting": ["page/*"],
        "kalos_ctx.demo_data": ["*.*", "qwen3/*", "licences/*"],
    },
)
