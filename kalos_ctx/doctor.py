"""Whether this machine can run Kalos: one finding a subject, each with what to do."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

OK, NOTE, BROKEN = "ok", "note", "broken"
PACKAGES = ("kalos-ctx", "numpy", "tokenizers", "jinja2", "typer", "rich", "xxhash")
OPTIONAL = ("cuda-core", "cuda-bindings")
MIN_FREE_NBYTES = 256 << 20
MIN_FILES = 256
CUDA_ERROR_NO_DEVICE = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one subject.

    Attributes
    ----------
    state : {"ok", "note", "broken"}
        `note`: Kalos works, but not all of it or not as well as it could.
    what, found, advice : str
        `advice` is empty where there is nothing to do.
    """

    state: str
    what: str
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the finding as JSON takes it."""
        return asdict(self)


def examine(path: str | os.PathLike[str] = ".") -> list[Finding]:
    """Return what is found about Python, the CPU, the place for stores, limits and CUDA.

    Parameters
    ----------
    path : path
        Where stores are to be; need not exist.
    """
    found: list[Finding] = []
    for check in (_python, _packages, _compiled, _cpu, _shared_memory, _limits, _cuda):
        found.extend(check())
    found.extend(_place(Path(path)))
    return found


def _python() -> Iterator[Finding]:
    have = f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    if sys.platform != "linux":
        yield Finding(BROKEN, "platform", have, "use Linux")
    elif sys.byteorder != "little":
        yield Finding(BROKEN, "platform", have, "use a little-endian machine")
    else:
        yield Finding(OK, "platform", have)


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(OK, name, metadata.version(name))
        except metadata.PackageNotFoundError:
            # A source tree on the path runs without being installed.
            state = NOTE if name == "kalos-ctx" else BROKEN
            yield Finding(state, name, "not installed", "pip install kalos-ctx")


def _compiled() -> Iterator[Finding]:
    try:
        from kalos_ctx import _planner, _writer  # noqa: F401
    except ImportError as error:
        advice = "install a wheel for this Python, or build one with pip install ."
        yield Finding(BROKEN, "compiled modules", str(error), advice)
    else:
        yield Finding(OK, "compiled modules", "load")


def _cpu() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding(OK, "cpu", f"{cpu_name()}, {cores} cores for this process")
    try:
        from kalos_ctx._cpu_ops import levels
    except ImportError as error:
        yield Finding(BROKEN, "recall", str(error), "install kalos-ctx again")
        return
    usable = levels()
    best = usable[-1]
    if len(usable) == 1:
        advice = "recall is several times faster on a CPU with AVX2"
        yield Finding(NOTE, "recall", f"uses {best} code", advice)
    else:
        yield Finding(OK, "recall", f"uses {best} code (of {', '.join(usable)})")


def cpu_name() -> str:
    """Return the CPU's name as the kernel tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _shared_memory() -> Iterator[Finding]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        advice = "mount a tmpfs at /dev/shm"
        yield Finding(NOTE, "/dev/shm", error.strerror or "not there", advice)
        return
    small = free < 64 << 20
    advice = "give the container more, such as docker run --shm-size=1g" if small else ""
    yield Finding(NOTE if small else OK, "/dev/shm", f"{free >> 20:,} MiB free", advice)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < MIN_FILES
    yield Finding(
        BROKEN if few else OK,
        "open files",
        f"{_limit(soft)} (at most {_limit(hard)})",
        f"ulimit -n {MIN_FILES} or more: each segment of a store is one open file" if few else "",
    )
    for what, which, advice in (
        ("file size", resource.RLIMIT_FSIZE, "ulimit -f unlimited: segments are 64 MiB"),
        ("address space", resource.RLIMIT_AS, "ulimit -v unlimited: a store is mapped in full"),
    ):
        soft, _ = resource.getrlimit(which)
        bounded = soft != resource.RLIM_INFINITY
        found = _limit(soft) if not bounded else f"{soft >> 20:,} MiB"
        yield Finding(NOTE if bounded else OK, what, found, advice if bounded else "")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _cuda() -> Iterator[Finding]:
    install = "pip install 'kalos-ctx[cuda]' for the CUDA backend; the CPU backend needs nothing"
    versions = []
    for name in OPTIONAL:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield Finding(NOTE, "cuda-python", f"{name} is not installed", install)
            break
    else:
        yield Finding(OK, "cuda-python", ", ".join(versions))
    yield cuda_devices(ctypes.CDLL)


def cuda_devices(load: Callable[[str], ctypes.CDLL]) -> Finding:
    """Ask the driver alone, so that a broken cuda-python does not look like a missing device."""
    advice = "windows and recall run on the CPU"
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return Finding(NOTE, "gpu", "there is no CUDA driver", advice)
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code == CUDA_ERROR_NO_DEVICE or (code == 0 and not count.value):
        return Finding(NOTE, "gpu", "the CUDA driver finds no device", advice)
    if code:
        repair = "see nvidia-smi; driver and kernel module may differ"
        return Finding(BROKEN, "gpu", f"the CUDA driver answers with error {code}", repair)
    return Finding(OK, "gpu", f"{count.value} CUDA devices")


def _place(path: Path) -> Iterator[Finding]:
    from kalos_ctx.store_path import NETWORK_FILE_SYSTEMS, file_system

    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield Finding(BROKEN, "path", f"{path} is no folder", "give a folder")
        return
    kind = file_system(os.path.realpath(folder)) or "unknown"
    if kind in NETWORK_FILE_SYSTEMS:
        advice = "put stores on a local disk: mappings of network files are not coherent"
        yield Finding(BROKEN, "file system", f"{kind} at {folder}", advice)
    elif kind in ("tmpfs", "ramfs"):
        advice = "stores here are gone after a restart of the machine"
        yield Finding(NOTE, "file system", f"{kind} at {folder}", advice)
    else:
        yield Finding(OK, "file system", f"{kind} at {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(BROKEN, "permission", f"{folder} cannot be written", "change its mode")
    free = shutil.disk_usage(folder).free
    few = free < MIN_FREE_NBYTES
    advice = f"free at least {MIN_FREE_NBYTES >> 20} MiB" if few else ""
    yield Finding(BROKEN if few else OK, "free space", f"{free >> 20:,} MiB", advice)
