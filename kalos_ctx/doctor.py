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

from kalos_ctx import _nvrtc
from kalos_ctx.backends import cuda_device, cuda_system
from kalos_ctx.errors import DeviceUnavailable

OK, NOTE, BROKEN = "ok", "note", "broken"
PACKAGES = ("kalos-ctx", "numpy", "tokenizers", "jinja2", "typer", "rich", "xxhash")
OPTIONAL = ("cuda-core", "cuda-bindings")
MIN_FREE_NBYTES = 256 << 20
MIN_FILES = 256
ON_CPU = "windows and recall run on the CPU"


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
    for check in (_python, _packages, _compiled, _cpu, _shared_memory, _limits):
        found.extend(check())
    found.extend(_cuda(existing(Path(path))))
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


def _cuda(folder: Path) -> Iterator[Finding]:
    python = _cuda_python()
    yield python
    gpu = cuda_devices(ctypes.CDLL, cuda_system.hardware())
    yield gpu
    if gpu.state != OK or python.state != OK:
        return
    try:
        names = cuda_device.available_devices()
        compiler = _nvrtc.compiler()
    except DeviceUnavailable as error:
        yield Finding(BROKEN, "cuda", str(error), f"until then {ON_CPU}")
        return
    yield _versions(compiler)
    for ordinal, name in enumerate(names):
        try:
            device = cuda_device.open_device(ordinal)
            yield _device(device)
            if ordinal == 0:
                yield _kernels(device)
                yield _pinned(device)
                yield _page_cache(device, folder)
        except DeviceUnavailable as error:
            yield Finding(BROKEN, f"cuda:{ordinal}", f"{name}: {error}", f"until then {ON_CPU}")
    yield sharing(cuda_system.mps(), _other_processes())


def _cuda_python() -> Finding:
    versions = []
    for name in OPTIONAL:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            advice = f"{_nvrtc.INSTALL} for the CUDA backend; the CPU backend needs nothing"
            return Finding(NOTE, "cuda-python", f"{name} is not installed", advice)
    return Finding(OK, "cuda-python", ", ".join(versions))


def cuda_devices(
    load: Callable[[str], ctypes.CDLL], seen: cuda_system.Hardware | None = None
) -> Finding:
    """Ask the driver alone, so that a broken cuda-python does not look like a missing device.

    Parameters
    ----------
    load : callable
        Gives the driver's library by its name, or raises OSError.
    seen : Hardware, optional
        What the operating system shows; nothing when left out.
    """
    seen = seen or cuda_system.Hardware()
    try:
        driver = load(cuda_system.DRIVER_LIBRARY)
    except OSError:
        return _no_device(seen, None)
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code == 0 and count.value:
        return Finding(OK, "gpu", f"{count.value} CUDA devices")
    if code in (cuda_system.SUCCESS, cuda_system.NO_DEVICE, cuda_system.STUB_LIBRARY):
        return _no_device(seen, code)
    found = f"the CUDA driver answers with error {code}"
    if seen.module:
        library = cuda_system.library_version() or "unknown"
        found += f"; its kernel module is {seen.module}, its library {library}"
    return Finding(BROKEN, "gpu", found, cuda_system.remedy(code))


def _no_device(seen: cuda_system.Hardware, code: int | None) -> Finding:
    """Say why the driver shows no device, or that there is no driver (`code` None)."""
    num = len(seen.nodes)
    missing = "there is no CUDA driver" if code is None else "the CUDA driver finds no device"
    if cuda_system.hidden():
        found = "CUDA_VISIBLE_DEVICES hides every GPU"
        return Finding(NOTE, "gpu", found, f"unset it to use one; {ON_CPU}")
    if not num and not seen.models and not seen.on_bus:
        return Finding(NOTE, "gpu", missing, ON_CPU)
    if not num:
        what = ", ".join(seen.models) or f"{seen.on_bus} NVIDIA GPUs"
        advice = (
            "give it to the container: docker run --gpus all, or a limit for nvidia.com/gpu"
            if seen.models
            else "install NVIDIA's driver; in a container, on the machine around it"
        )
        found = f"the machine has {what}, and this process was given none"
        return Finding(NOTE, "gpu", found, f"{advice}; {ON_CPU}")
    if seen.refused:
        found = f"{missing}; this user may not open {', '.join(seen.refused)}"
        return Finding(BROKEN, "gpu", found, "give the user the group of these files (ls -l)")
    if code is None:
        found = (
            f"{seen.nodes[0]} is here, and the driver's library {cuda_system.DRIVER_LIBRARY} not"
        )
        advice = (
            "install the driver's library of the kernel module's version"
            f" ({seen.module or 'not loaded'}); in a container, let NVIDIA's container toolkit add"
            " it: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
        return Finding(BROKEN, "gpu", found, advice)
    if code == cuda_system.STUB_LIBRARY:
        return Finding(BROKEN, "gpu", missing, cuda_system.remedy(code))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        found = f"CUDA_VISIBLE_DEVICES={chosen} names none of the {num} GPUs here"
        return Finding(BROKEN, "gpu", found, f"give numbers below {num}, or UUIDs of nvidia-smi -L")
    rows = cuda_system.nvidia_smi("query-gpu=name,mig.mode.current")
    if isinstance(rows, str):
        advice = "the driver's library and kernel module may differ: restart after an update"
        return Finding(BROKEN, "gpu", f"{missing}; {rows}", advice)
    if any(row[-1] == "Enabled" for row in rows):
        found = f"{missing}; MIG is on, and has no instance for this process"
        advice = "make one (nvidia-smi mig -cgi PROFILE -C), or switch MIG off (nvidia-smi -mig 0)"
        return Finding(BROKEN, "gpu", found, advice)
    found = f"{missing}, and nvidia-smi shows {len(rows)}"
    return Finding(BROKEN, "gpu", found, cuda_system.remedy(999))


def _versions(compiler: _nvrtc.Compiler) -> Finding:
    version = cuda_device.driver_version(cuda_device.start_driver())
    driver = cuda_system.hardware().module or cuda_system.library_version()
    found = (
        f"driver {driver + ' ' if driver else ''}for CUDA {dotted(version)}, "
        f"NVRTC {dotted(compiler.version)}"
    )
    if cuda_device.code_fits(compiler.version, version):
        return Finding(OK, "cuda", found)
    advice = (
        f"NVIDIA promises that code of NVRTC {compiler.version[0]} loads with drivers for CUDA "
        f"{compiler.version[0]} alone: update the driver, or pip install 'kalos-ctx[cuda12]'"
    )
    return Finding(NOTE, "cuda", found, advice)


def dotted(version: tuple[int, int]) -> str:
    """Return a version as text."""
    return f"{version[0]}.{version[1]}"


def _device(device: cuda_device.OpenedDevice) -> Finding:
    what = f"cuda:{device.ordinal}"
    found = f"{device.name}, compute capability {dotted(device.capability)}"
    free, total = cuda_device.memory(device)
    found += f", {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB free"
    if not device.vm_supported:
        advice = "rows of vectors stay on the CPU: the GPU has no virtual memory management"
        return Finding(NOTE, what, found, advice)
    return Finding(OK, what, found)


def _kernels(device: cuda_device.OpenedDevice) -> Finding:
    kernels = device.kernels
    if kernels.no_cache:
        return Finding(NOTE, "kernels", f"{kernels}, at every start", kernels.no_cache)
    return Finding(OK, "kernels", f"{kernels}; cache in {kernels.folder}")


def _pinned(device: cuda_device.OpenedDevice) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10:,} KiB"
    why = cuda_device.pinned_memory_self_test(device)
    found = f"limit of locked memory {limit}"
    if why:
        advice = "ulimit -l unlimited; docker run --ulimit memlock=-1"
        return Finding(BROKEN, "pinned memory", f"the driver takes none ({why}); {found}", advice)
    return Finding(OK, "pinned memory", f"the driver takes it; {found}")


def _page_cache(device: cuda_device.OpenedDevice, folder: Path) -> Finding:
    way = cuda_device.page_cache_self_test(device, folder)
    if way == cuda_device.ZERO_COPY:
        return Finding(OK, "page cache", f"the GPU reads files at {folder} where they lie ({way})")
    advice = "windows are staged, one copy more; try a local ext4 or xfs"
    return Finding(NOTE, "page cache", way, advice)


def _other_processes() -> int | None:
    """How many other processes use a GPU; None where nvidia-smi does not say."""
    rows = cuda_system.nvidia_smi("query-compute-apps=pid")
    if isinstance(rows, str):
        return None
    return len({row[0] for row in rows} - {str(os.getpid())})


def sharing(mps: cuda_system.Mps, others: int | None) -> Finding:
    """Say what other processes on the GPU mean for the latency of a window.

    The figures are those of docs/facts.md, "A busy GPU".
    """
    shared = "a busy GPU delays a window by about 0.05 ms"
    if mps.runs:
        return Finding(OK, "mps", f"runs; {shared}")
    if mps.has_pipes:
        advice = "check with nvidia-cuda-mps-control: from a container its process is not seen"
        return Finding(NOTE, "mps", f"has pipes in {mps.folder}, and no process here", advice)
    start = "start it (nvidia-cuda-mps-control -d), or build windows in the process that is busy"
    if mps.asked_for:
        found = f"CUDA_MPS_PIPE_DIRECTORY={mps.folder} has no daemon"
        return Finding(NOTE, "mps", found, start)
    if others:
        found = f"off, and {others} other processes use the GPU: windows wait 0.7 to 2 ms for them"
        return Finding(NOTE, "mps", found, start)
    unsure = " (nvidia-smi does not say whether others use the GPU)" if others is None else ""
    return Finding(OK, "mps", f"off; needed when another process is busy on the GPU{unsure}")


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that is there."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _place(path: Path) -> Iterator[Finding]:
    from kalos_ctx.store_path import NETWORK_FILE_SYSTEMS, file_system

    folder = existing(path)
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
