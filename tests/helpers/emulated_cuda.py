"""A stand-in for the CUDA driver that runs the kernels on the CPU: build it, load it.

`build` compiles `cuda/*.cu` and the emulator in `simt/` with the system's g++ into a
``libcuda.so.1``. A process loads it instead of NVIDIA's by `environment` (a new process) or
`install` (this one, before anything asked for the driver). `Launcher` runs single kernels without
taking the driver's place. ``simt/fake_cuda.cpp`` lists the variables that let it misbehave.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIMT = Path(__file__).resolve().parent / "simt"
CUDA = ROOT / "cuda"
DRIVER_TYPES = ROOT / "cython_ext" / "kalos_ctx" / "_driver.h"

DRIVER = "libcuda.so.1"
NO_DRIVER = "libkalos-simt.so"  # found by nobody who looks for a driver

KERNEL = re.compile(
    r'extern "C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\((.*?)\)\s*)?(\w+)\s*\(', re.DOTALL
)
DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w:]+)\s+(\w+)\s*\[\s*\]\s*;"
)
# No contraction: the kernels are compiled without fused multiply-add.
FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
FLAGS += ["-fwrapv", "-fno-strict-aliasing", "-fno-gnu-unique", "-pthread"]
FLAGS += ["-Wall", "-Wextra", "-Wno-unknown-pragmas"]
SANITIZE = ["-fsanitize=address,alignment,bounds", "-fno-sanitize-recover=all"]
SANITIZE += ["-fsanitize-sections=kalos_shared_*"]
# Beside the kernels: what must know of it.
SANITIZED = ("fiber.cpp", "fake_memory.cpp")
KEPT_S = 7 * 86400  # what a build has not used for so long is removed


class BuildError(Exception):
    """g++ refused a source, or is not there; the message is what it wrote."""


def kernel_files() -> tuple[Path, ...]:
    """Return the ``.cu`` files of the package."""
    return tuple(sorted(CUDA.glob("*.cu")))


def _gxx(arguments: list[str]) -> str:
    try:
        done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError("the emulated GPU needs g++ on the PATH") from error
    if done.returncode:
        raise BuildError(done.stderr)
    return done.stdout


def kernels_of(source: Path) -> list[tuple[str, str]]:
    """Names of a file's kernels with their most threads (0: not said), macros expanded."""
    defined = ["-DKALOS_EMULATED", "-D__CUDACC__", "-D__CUDA_ARCH__=900"]
    text = _gxx(["-E", "-P", "-x", "c++", *defined, f"-I{CUDA}", str(source)])
    return [(name, (bounds or "0").split(",")[0]) for bounds, name in KERNEL.findall(text)]


def unit_of(source: Path) -> str:
    """Return the C++ that holds one ``.cu`` file and registers its kernels."""
    section = f"kalos_shared_{source.stem}"
    dynamic = r"\1* const \2 = (\1*)kalos_simt::dynamic_shared();"
    lines = [
        f'#define KALOS_SIMT_SECTION "{section}"',
        '#include "simt_cuda.h"',
        f'extern char __start_{section}[] __attribute__((weak, visibility("hidden")));',
        f'extern char __stop_{section}[] __attribute__((weak, visibility("hidden")));',
        "namespace {",
        '#include "simt_device.h"',
        f'#line 1 "{source}"',
        DYNAMIC_SHARED.sub(dynamic, source.read_text()),
    ]
    lines += [
        f'kalos_simt::registered<{name}> registered_{name}("{name}", __start_{section}, '
        f"__stop_{section}, (int)({threads}));"
        for name, threads in kernels_of(source)
    ]
    return "\n".join([*lines, "}  // namespace", ""])


def _object(
    folder: Path, source: Path, text: Callable[[], str], headers: list[Path], flags: list[str]
) -> Path:
    """Compile `text`, made of `source`, unless its object is there already."""
    digest = hashlib.sha256(repr([flags, source]).encode())
    for file in (source, Path(__file__), *headers):
        digest.update(file.read_bytes())
    target = folder / f"{source.stem}-{digest.hexdigest()[:20]}.o"
    if target.exists():
        os.utime(target)
        return target
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        unit, made = Path(aside, f"{source.stem}.cpp"), Path(aside, "made.o")
        unit.write_text(text())
        folders = dict.fromkeys([SIMT, source.parent, CUDA, DRIVER_TYPES.parent])
        includes = [f"-I{place}" for place in folders]
        _gxx([*flags, *includes, "-c", str(unit), "-o", str(made)])
        os.replace(made, target)
    return target


def _objects(folder: Path, kernels: Iterable[Path], sanitize: list[str]) -> list[Path]:
    own = [*sorted(SIMT.glob("*.h")), DRIVER_TYPES]
    shared = [*own, *sorted(CUDA.glob("*.h")), *sorted(CUDA.glob("*.cuh"))]
    works = [
        (source, source.read_text, own, FLAGS + (sanitize if source.name in SANITIZED else []))
        for source in sorted(SIMT.glob("*.cpp"))
    ]
    works += [
        (source, lambda source=source: unit_of(source), shared, FLAGS + sanitize)
        for source in kernels
    ]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(_object, folder, *work) for work in works]
        return [job.result() for job in jobs]


def _prune(folder: Path) -> None:
    """Remove objects and libraries that nobody asked for lately; call with the lock held."""
    for entry in folder.iterdir():
        if time.time() - entry.stat().st_mtime > KEPT_S:
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def cache_folder() -> Path:
    """Return a folder for `build` that lasts from one run of the tests to the next.

    Raises
    ------
    PermissionError
        It belongs to somebody else, whose code this process must not load.
    """
    folder = Path(tempfile.gettempdir(), f"kalos-emulated-cuda-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    return folder


def build(
    folder: Path,
    *,
    kernels: Iterable[Path] | None = None,
    sanitize: bool = False,
    name: str = DRIVER,
) -> Path:
    """Compile the stand-in driver and return its path.

    Parameters
    ----------
    folder : Path
        Where objects and libraries are kept; what is there already and still fits is used. Several
        processes may build in it.
    kernels : iterable of Path, optional
        The ``.cu`` files to compile; those of the package when not given.
    sanitize : bool
        End the process at an access out of bounds in a kernel (AddressSanitizer).
    name : str
        File name and SONAME; `NO_DRIVER` makes a library that is nobody's driver.

    Raises
    ------
    BuildError
        With the compiler's messages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checks = SANITIZE if sanitize else []
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _prune(folder)
        objects = _objects(folder, kernel_files() if kernels is None else kernels, checks)
        digest = hashlib.sha256(repr([name, *objects]).encode()).hexdigest()[:20]
        library = folder / digest / name
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            made = library.with_suffix(".made")
            link = ["-shared", f"-Wl,-soname,{name},-Bsymbolic", "-o", str(made)]
            _gxx([*FLAGS, *checks, *map(str, objects), *link])
            os.replace(made, library)
        os.utime(library.parent)
    return library


def environment(folder: Path, **options) -> dict[str, str]:
    """Return the variables with which a new process loads the stand-in driver.

    Options are those of `build`.
    """
    library = build(folder, **options)
    before = os.environ.get("LD_LIBRARY_PATH")
    variables = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(library.parent), before]))}
    if options.get("sanitize"):
        variables["LD_PRELOAD"] = _gxx(["-print-file-name=libasan.so"]).strip()
        variables["ASAN_OPTIONS"] = "detect_leaks=0"  # the interpreter's own
    return variables


def _load(library: Path, mode: int) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library), mode=mode)
    for name in ("count", "problems", "live_memory", "live_objects"):
        getattr(loaded, f"kalos_fake_{name}").restype = ctypes.c_uint64
    return loaded


def install(folder: Path, **options) -> ctypes.CDLL:
    """Let this process use the stand-in driver, and return it for its ``kalos_fake_*`` functions.

    A library that is loaded under its name satisfies whoever asks for that name, so this works as
    long as no driver was loaded before. Processes that are started later need `environment`.
    """
    return _load(build(folder, **options), ctypes.RTLD_GLOBAL)


class Launcher:
    """Kernels that run on memory of this process, beside whatever driver it may use.

    Parameters
    ----------
    folder : Path
    options
        Those of `build`, without `name`.
    """

    def __init__(self, folder: Path, **options) -> None:
        self.library = _load(build(folder, name=NO_DRIVER, **options), ctypes.RTLD_LOCAL)
        self._context, self._module = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self.call("cuCtxPushCurrent_v2", self._context)
        self.call("cuModuleLoadData", ctypes.byref(self._module), b"any")

    def call(self, name: str, *arguments) -> None:
        """Call an entry point by its exported name; RuntimeError with the code if it fails."""
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {code}")

    def launch(self, kernel: str, grid, block, *arguments, shared_nbytes: int = 0) -> int:
        """Run a kernel and return the driver's code.

        Arguments are numpy arrays, of which the kernel gets the address, ctypes values and
        structures. `grid` and `block` are numbers or tuples of up to three.
        """
        function = ctypes.c_void_p()
        name = kernel.encode()
        self.call("cuModuleGetFunction", ctypes.byref(function), self._module, name)
        values = [
            ctypes.c_void_p(one.ctypes.data) if hasattr(one, "ctypes") else one for one in arguments
        ]
        addresses = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        shape = []
        for extent in (grid, block):
            axes = extent if isinstance(extent, tuple) else (extent,)
            shape += [*axes, *[1] * (3 - len(axes))]
        return self.library.cuLaunchKernel(function, *shape, shared_nbytes, None, addresses, None)


if __name__ == "__main__":
    names = [Path(name).resolve() for name in sys.argv[2:]]
    print(build(Path(sys.argv[1]), kernels=names or None))
