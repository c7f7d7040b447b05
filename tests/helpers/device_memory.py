"""A device's memory as tests look at it: read, written, counted, used up; without Kalos."""

import ctypes
import gc
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from helpers import emulated_cuda
from helpers.gpu import NoGpuError, require_gpu

from kalos_ctx._device import Device

# Kept between runs: what still fits is used again.
FOLDER = Path(tempfile.gettempdir()) / f"kalos-emulated-cuda-{os.getuid()}"


def stand_in() -> ctypes.CDLL | None:
    """Load the stand-in driver, once a process; None where a GPU's driver is there."""
    try:
        require_gpu()
    except NoGpuError:
        pass
    else:
        return None
    try:  # a second copy, of sources that changed since, would know nothing of the first
        loaded = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return emulated_cuda.install(FOLDER)
    loaded.kalos_fake_problems.restype = ctypes.c_uint64
    loaded.kalos_fake_live_memory.restype = ctypes.c_uint64
    return loaded


def open_memory() -> "Memory":
    """Open the machine's GPU, or the stand-in where there is none."""
    emulated = stand_in()
    return Memory(Device.open(0, {}, 4), emulated)


class Memory:
    """The memory of a device that is open.

    Attributes
    ----------
    device : Device
    emulated : ctypes.CDLL or None
        The stand-in driver, None with a GPU.
    """

    def __init__(self, device: Device, emulated: ctypes.CDLL | None) -> None:
        from cuda.bindings import driver

        self.device, self.emulated = device, emulated
        self._driver = driver
        self._context = self._call("cuDevicePrimaryCtxRetain", device.ordinal)

    def _call(self, name, *args):
        """Call the driver in the device's context."""
        inside = hasattr(self, "_context")
        if inside:
            self._driver.cuCtxPushCurrent(self._context)
        code, *out = getattr(self._driver, name)(*args)
        if inside:
            self._driver.cuCtxPopCurrent()
        assert int(code) == 0, f"{name}: {code}"
        return out[0] if len(out) == 1 else out

    def problems(self) -> int:
        """Return how often the stand-in had to complain of something that hardware breaks on."""
        return int(self.emulated.kalos_fake_problems()) if self.emulated else 0

    def used(self) -> int:
        """Return the bytes of device memory that are taken."""
        gc.collect()  # what other tests left in cycles would go at any time
        free, total = self._call("cuMemGetInfo")
        return int(total) - int(free)

    def read(self, address: int, dtype, count: int) -> np.ndarray:
        """Copy `count` elements out."""
        out = np.empty(count, dtype)
        if out.nbytes:
            self._call("cuMemcpyDtoH", out.ctypes.data, address, out.nbytes)
        return out

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes in."""
        held = ctypes.create_string_buffer(data, len(data))
        self._call("cuMemcpyHtoD", address, ctypes.addressof(held), len(data))

    @contextmanager
    def all_but(self, nbytes: int):
        """Take the device's free memory but for so many bytes."""
        free, _ = self._call("cuMemGetInfo")
        taken = self._call("cuMemAlloc", int(free) - nbytes)
        try:
            yield
        finally:
            self._call("cuMemFree", taken)

    @contextmanager
    def failing(self, spec: str):
        """Let calls of the stand-in driver fail, as its KALOS_FAKE_FAIL says."""
        self.emulated.kalos_fake_fail(spec.encode())
        try:
            yield
        finally:
            self.emulated.kalos_fake_fail(b"")
