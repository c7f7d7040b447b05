"""Opening a GPU: whether there is one, whether it works, and the kernels for it.

Whatever is in the way raises `DeviceUnavailable` with what to do; `NoGpu`, one of its kinds, says
that nothing is wrong and there is no GPU here.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kalos_ctx import _nvrtc
from kalos_ctx.backends import cuda_system, kernel_cache
from kalos_ctx.errors import DeviceUnavailable

log = logging.getLogger(__name__)

DRIVER_VERSION_MIN = (12, 0)
CAPABILITY_MIN = (7, 5)

# CUdevice_attribute, cuda.h
CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91
HOST_REGISTER_SUPPORTED = 99
VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
READ_ONLY_HOST_REGISTER_SUPPORTED = 113
# cuMemHostRegister, cuda.h
REGISTER_PORTABLE = 1
REGISTER_DEVICEMAP = 2
REGISTER_READ_ONLY = 8

ZERO_COPY = "zero_copy"
# Large enough that the driver lets the GPU fetch it; small copies it may read on the CPU.
TEST_NBYTES = 1 << 20


class NoGpu(DeviceUnavailable):
    """There is no GPU here, or none was given to this process; nothing is wrong."""


@dataclass(frozen=True, slots=True)
class OpenedDevice:
    """A GPU that works, and the kernels for it.

    Attributes
    ----------
    ordinal : int
        As the driver counts, with CUDA_VISIBLE_DEVICES applied.
    name, uuid : str
    arch : str
        What the kernels were compiled for, such as "sm_90".
    capability, driver_version, nvrtc_version : (int, int)
        Compute capability; CUDA versions of the driver and of NVRTC.
    bindings_version, core_version : str
        Of cuda-bindings and cuda-core.
    num_multiprocessors, total_nbytes, l2_nbytes : int
    can_use_host_pointers : bool
        The GPU reaches registered memory by its host address.
    host_register_supported, read_only_host_register_supported : bool
    vm_supported : bool
        Virtual memory management.
    kernels : Kernels
    """

    ordinal: int
    name: str
    uuid: str
    arch: str
    capability: tuple[int, int]
    driver_version: tuple[int, int]
    nvrtc_version: tuple[int, int]
    bindings_version: str
    core_version: str
    num_multiprocessors: int
    total_nbytes: int
    l2_nbytes: int
    can_use_host_pointers: bool
    host_register_supported: bool
    read_only_host_register_supported: bool
    vm_supported: bool
    kernels: kernel_cache.Kernels

    @property
    def cubins(self) -> dict[str, bytes]:
        """Machine code of every kernel file, by the file's name without suffix."""
        return self.kernels.cubins


# ---- Opening ------------------------------------------------------------------------------------


def available_devices() -> list[str]:
    """Return the names of the GPUs that the driver shows, by ordinal; compiles nothing.

    Raises
    ------
    DeviceUnavailable
        Why there is none; `NoGpu` where nothing is wrong.
    """
    driver = start_driver()
    names = []
    for ordinal in range(_count(driver)):
        device = _asked(driver.cuDeviceGet(ordinal), "be found")
        names.append(_asked(driver.cuDeviceGetName(256, device), "tell its name"))
    return [name.split(b"\0")[0].decode(errors="replace") for name in names]


def find_device() -> OpenedDevice | None:
    """Open the first GPU where there is one that works, for `device="auto"`.

    Returns
    -------
    OpenedDevice or None
        None where there is no GPU, and where there is one that does not work: the log has a
        warning then, with the reason.
    """
    try:
        return open_device(0)
    except NoGpu as error:
        log.debug("no GPU: %s", error)
    except DeviceUnavailable as error:
        log.warning("the GPU is not used, windows are built on the CPU: %s", error)
    return None


def open_device(ordinal: int) -> OpenedDevice:
    """Check a GPU and compile the kernels for it, or read them from the cache.

    Parameters
    ----------
    ordinal : int
        From 0, as the driver counts.

    Raises
    ------
    DeviceUnavailable
        It cannot be used; the message says why and what to do. `NoGpu` where nothing is wrong.
    """
    driver = start_driver()
    num = _count(driver)
    if not 0 <= ordinal < num:
        raise DeviceUnavailable(
            f"device must be between cuda:0 and cuda:{num - 1} here (got cuda:{ordinal}); "
            "CUDA_VISIBLE_DEVICES chooses what a process sees"
        )
    core = _nvrtc.cuda_core()
    try:
        device = core.Device(ordinal)
    except Exception as error:  # cuda-core's own type, which is not public
        raise DeviceUnavailable(f"cuda-core does not open cuda:{ordinal}: {error}") from error
    capability = tuple(device.compute_capability)
    if capability < CAPABILITY_MIN:
        raise DeviceUnavailable(
            f"{device.name} has compute capability {_dotted(capability)}, and Kalos needs "
            f"{_dotted(CAPABILITY_MIN)} (Turing) or newer: use device='cpu'"
        )
    compiler = _nvrtc.compiler()
    arch = code_arch(capability, compiler)
    handle = _asked(driver.cuDeviceGet(ordinal), "be found")

    def has(attribute: int) -> bool:
        known = driver.CUdevice_attribute(attribute)
        return bool(_asked(driver.cuDeviceGetAttribute(known, handle), "tell what it can do"))

    opened = OpenedDevice(
        ordinal=ordinal,
        name=device.name,
        uuid=str(device.uuid),
        arch=arch,
        capability=capability,
        driver_version=driver_version(driver),
        nvrtc_version=compiler.version,
        bindings_version=_bindings_version(),
        core_version=core.__version__,
        num_multiprocessors=device.properties.multiprocessor_count,
        total_nbytes=_asked(driver.cuDeviceTotalMem(handle), "tell its memory"),
        l2_nbytes=device.properties.l2_cache_size,
        can_use_host_pointers=has(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM),
        host_register_supported=has(HOST_REGISTER_SUPPORTED),
        read_only_host_register_supported=has(READ_ONLY_HOST_REGISTER_SUPPORTED),
        vm_supported=has(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
        kernels=kernel_cache.kernels(arch),
    )
    if not code_fits(opened.nvrtc_version, opened.driver_version):
        _check_code_loads(driver, opened)
    return opened


def code_arch(capability: tuple[int, int], compiler: _nvrtc.Compiler) -> str:
    """Return what to compile for: the GPU's own architecture or the next older of its generation.

    Code runs on newer minor versions of its major version, so a GPU that is newer than NVRTC works
    where NVRTC knows its generation.

    Raises
    ------
    DeviceUnavailable
        NVRTC knows none of the generation.
    """
    major, minor = capability
    fits = [sm for sm in compiler.architectures if sm // 10 == major and sm % 10 <= minor]
    if not fits:
        raise DeviceUnavailable(
            f"NVRTC {_dotted(compiler.version)} does not compile for compute capability "
            f"{_dotted(capability)}: install a newer one, pip install -U nvidia-cuda-nvrtc"
        )
    return f"sm_{max(fits)}"


def code_fits(nvrtc_version: tuple[int, int], its_driver: tuple[int, int]) -> bool:
    """Whether NVIDIA promises that the driver loads what NVRTC compiles.

    It does within a major version of CUDA (CUDA Compatibility, minor version compatibility) and
    for older code.
    """
    return nvrtc_version[0] <= its_driver[0]


def _check_code_loads(driver: Any, device: OpenedDevice) -> None:
    """Try what NVIDIA does not promise."""
    with primary_context(driver, device.ordinal):
        for name, code in device.cubins.items():
            result, module = driver.cuModuleLoadData(code)
            if int(result):
                raise DeviceUnavailable(
                    f"the driver, for CUDA {_dotted(device.driver_version)}, does not load "
                    f"{name}.cu as NVRTC {_dotted(device.nvrtc_version)} compiles it "
                    f"({result.name}): update the driver to 580 or newer, or "
                    "pip install 'kalos-ctx[cuda12]'"
                )
            driver.cuModuleUnload(module)


# ---- The driver ---------------------------------------------------------------------------------


def start_driver() -> Any:
    """Return `cuda.bindings.driver`, with the driver started.

    Raises
    ------
    DeviceUnavailable
        It is missing, too old or does not start; `NoGpu` where no GPU is to be seen either.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise _absent(f"the CUDA backend needs cuda-python: {_nvrtc.INSTALL} ({error})") from error
    try:
        (result,) = driver.cuInit(0)
    except Exception as error:  # the loader's own type, which older versions do not have
        raise _absent(
            "the CUDA driver cannot be loaded: install NVIDIA's driver; in a container, let its "
            f"run time add it (NVIDIA_DRIVER_CAPABILITIES=compute,utility) ({error})"
        ) from error
    code = int(result)
    if code in (cuda_system.NO_DEVICE, cuda_system.STUB_LIBRARY):
        raise _absent(
            f"the CUDA driver finds no GPU ({result.name}): {cuda_system.remedy(code)}; kalos "
            "doctor says more"
        )
    if code:
        raise DeviceUnavailable(
            f"the CUDA driver does not start ({result.name}): {cuda_system.remedy(code)}"
        )
    version = driver_version(driver)
    if version < DRIVER_VERSION_MIN:
        raise DeviceUnavailable(
            f"the driver is for CUDA {_dotted(version)}, and Kalos needs one for CUDA "
            f"{_dotted(DRIVER_VERSION_MIN)} or newer: update it to 525 or newer"
        )
    return driver


def driver_version(driver: Any) -> tuple[int, int]:
    """Return the newest CUDA that the driver supports."""
    number = _asked(driver.cuDriverGetVersion(), "tell its driver's version")
    return number // 1000, number % 1000 // 10


@contextlib.contextmanager
def primary_context(driver: Any, ordinal: int) -> Iterator[None]:
    """Make the GPU's primary context current for a while; the caller's is current again after."""
    device = _asked(driver.cuDeviceGet(ordinal), "be found")
    context = _asked(driver.cuDevicePrimaryCtxRetain(device), "be opened")
    try:
        _asked(driver.cuCtxPushCurrent(context), "be opened")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(device)


def _bindings_version() -> str:
    from cuda import bindings

    return str(bindings.__version__)


def _count(driver: Any) -> int:
    num = int(_asked(driver.cuDeviceGetCount(), "be counted"))
    if not num:
        raise _absent("the CUDA driver finds no GPU; kalos doctor says why")
    return num


def _absent(reason: str) -> DeviceUnavailable:
    """Return the error for no GPU: quiet where none was given to this process."""
    given = bool(cuda_system.hardware().nodes) and not cuda_system.hidden()
    return DeviceUnavailable(reason) if given else NoGpu(reason)


def _asked(answer: tuple[Any, ...], doing: str) -> Any:
    """Return what a driver call gave; `doing` ends "the GPU cannot ..."."""
    result, *values = answer
    if int(result):
        raise DeviceUnavailable(
            f"the GPU cannot {doing} ({result.name}): {cuda_system.remedy(int(result))}"
        )
    return values[0] if values else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# ---- Self-tests ---------------------------------------------------------------------------------


def memory(device: OpenedDevice) -> tuple[int, int]:
    """Return the GPU's free memory and all of it, in bytes."""
    driver = start_driver()
    with primary_context(driver, device.ordinal):
        result, free, total = driver.cuMemGetInfo()
        _asked((result,), "tell its memory")
        return free, total


def pinned_memory_self_test(device: OpenedDevice) -> str:
    """Register memory of this process with the driver; return why that fails, or nothing."""
    driver = start_driver()
    page = mmap.mmap(-1, TEST_NBYTES)
    address = np.frombuffer(page, np.uint8).ctypes.data
    with primary_context(driver, device.ordinal):
        (result,) = driver.cuMemHostRegister(address, TEST_NBYTES, REGISTER_DEVICEMAP)
        if int(result):
            return str(result.name)
        driver.cuMemHostUnregister(address)
    return ""


def page_cache_self_test(device: OpenedDevice, folder: str | os.PathLike[str]) -> str:
    """Find out whether the GPU reads files of a folder where they lie in the page cache.

    A scratch file's read-only mapping is registered with the driver, as token segments are. The
    GPU must see what the file holds, and what is written to it later.

    Parameters
    ----------
    folder : path
        Where stores are to be; must exist.

    Returns
    -------
    str
        "zero_copy", or why token segments are staged instead.

    Raises
    ------
    DeviceUnavailable
        The GPU does not work at all.
    """
    if not device.host_register_supported:
        return "the GPU does not take memory of the host"
    driver = start_driver()
    try:
        with tempfile.TemporaryFile(prefix=".kalos-", dir=folder) as file:
            file.write(_pattern(0))
            file.flush()
            mapping = mmap.mmap(file.fileno(), TEST_NBYTES, mmap.MAP_SHARED, mmap.PROT_READ)
            with primary_context(driver, device.ordinal):
                return _seen_through(driver, mapping, file.fileno())
    except OSError as error:
        return f"no scratch file in {os.fspath(folder)}: {error.strerror}"


def _seen_through(driver: Any, mapping: mmap.mmap, fd: int) -> str:
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    flags = REGISTER_PORTABLE | REGISTER_DEVICEMAP | REGISTER_READ_ONLY
    (result,) = driver.cuMemHostRegister(address, TEST_NBYTES, flags)
    if int(result):
        return f"the driver does not register a file's mapping: {result.name}"
    try:
        _asked(driver.cuMemHostGetDevicePointer(address, 0), "map a file")
        scratch = _asked(driver.cuMemAlloc(TEST_NBYTES), "get 1 MiB")
        try:
            if _fetched(driver, address, scratch) != _pattern(0):
                return "the GPU reads something else than the file holds"
            os.pwrite(fd, _pattern(1), 0)
            if _fetched(driver, address, scratch) != _pattern(1):
                return "the GPU does not see what is written to a registered file"
            os.fdatasync(fd)
            os.pwrite(fd, _pattern(2), 0)
            if _fetched(driver, address, scratch) != _pattern(2):
                return "the GPU does not see what is written to a registered file after a sync"
        finally:
            driver.cuMemFree(scratch)
    finally:
        driver.cuMemHostUnregister(address)
    return ZERO_COPY


def _pattern(turn: int) -> bytes:
    return bytes((np.arange(TEST_NBYTES // 4, dtype=np.uint32) * np.uint32(2 * turn + 1)).data)


def _fetched(driver: Any, address: int, scratch: Any) -> bytes:
    """What the GPU's copy engine finds at a registered address, by way of its own memory."""
    back = np.zeros(TEST_NBYTES, np.uint8)
    _asked(driver.cuMemcpyHtoDAsync(scratch, address, TEST_NBYTES, 0), "read a file")
    _asked(driver.cuMemcpyDtoHAsync(back.ctypes.data, scratch, TEST_NBYTES, 0), "copy to the host")
    _asked(driver.cuCtxSynchronize(), "finish a copy")
    return back.tobytes()
