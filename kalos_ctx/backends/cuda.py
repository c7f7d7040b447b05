"""Recall and windows on a GPU: what `ContextAssembler` uses for device="cuda"."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kalos_ctx._device import Device
from kalos_ctx._device_gathering import DeviceGatherer
from kalos_ctx._device_recall import DeviceScan
from kalos_ctx._registered import RegisteredSegments
from kalos_ctx.backends import cuda_device
from kalos_ctx.backends.cpu import CpuBackend, Recalled
from kalos_ctx.errors import DeviceError

if TYPE_CHECKING:
    from kalos_ctx.store import SessionStore

log = logging.getLogger(__name__)

REGISTERED_NBYTES_MAX = 16 << 30

_opened: dict[tuple[int, int], tuple[Device, cuda_device.OpenedDevice]] = {}
_first: dict[int, int | None] = {}  # by process: what "auto" found
_readable: dict[tuple[int, int, int], str] = {}  # by process, GPU and file system: the self-test
_lock = threading.Lock()


def shared_device(ordinal: int) -> tuple[Device, cuda_device.OpenedDevice]:
    """Return a GPU, opened once a process: its kernels stay loaded.

    Raises
    ------
    DeviceUnavailable, DeviceError, MemoryError
    """
    with _lock:
        found = _opened.get((os.getpid(), ordinal))  # a parent's is of no use behind a fork
        return _kept(cuda_device.open_device(ordinal)) if found is None else found


def _kept(opened: cuda_device.OpenedDevice) -> tuple[Device, cuda_device.OpenedDevice]:
    log.info("%s: kernels: %s", opened.name, opened.kernels)
    device = Device.open(opened.ordinal, opened.cubins, opened.num_multiprocessors)
    _opened[os.getpid(), opened.ordinal] = (device, opened)
    return device, opened


def first_device() -> int | None:
    """Return the ordinal of the GPU that `device="auto"` takes, None for the CPU.

    Looked for once a process. A GPU that does not work is a warning in the log, with the reason.
    """
    pid = os.getpid()
    with _lock:
        if pid not in _first:
            found = cuda_device.find_device()
            try:
                _first[pid] = None if found is None else _kept(found)[1].ordinal
            except (DeviceError, MemoryError) as error:
                log.warning("the GPU is not used, windows are built on the CPU: %s", error)
                _first[pid] = None
        return _first[pid]


def registered_budget() -> int:
    """Bytes of token segments that may be registered at a time: a quarter of the memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(memory // 4, REGISTERED_NBYTES_MAX)


def make_gatherer(store: SessionStore, ordinal: int) -> DeviceGatherer:
    """Return what fills windows of a device; it reads the store's files where that works.

    A self-test with a file beside the store decides, once for a file system: a GPU that does not
    see what another mapping of the file wrote gets windows by copies alone, and the log says why.
    """
    device, opened = shared_device(ordinal)
    key = (os.getpid(), ordinal, os.stat(store.path).st_dev)
    if key not in _readable:
        beside = os.path.dirname(os.path.abspath(store.path))
        _readable[key] = cuda_device.page_cache_self_test(opened, beside)
    why = _readable[key]
    segments = None
    if why == cuda_device.ZERO_COPY:
        segments = RegisteredSegments(device, registered_budget())
    else:
        log.info("windows pass through pinned memory: %s", why)
    return DeviceGatherer(device, segments)


class CudaBackend(CpuBackend):
    """Exact recall from a store on a GPU, with the CPU backend's results to the bit.

    Parameters
    ----------
    store : SessionStore
        Reader or writer.
    device : Device
    progress : callable, optional
        Called as ``progress(rows_done, num_rows)`` while the store's vectors are loaded.

    Notes
    -----
    Thread-safe. Rows are brought to the device at the first recall, and later ones before the
    recall that may return them.
    """

    name = "cuda"
    _scan: DeviceScan

    def __init__(
        self,
        store: SessionStore,
        device: Device,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._device = device
        self._progress = progress
        super().__init__(store)

    def _new_scan(self) -> DeviceScan:
        return DeviceScan(self._core, self._device, self._progress)

    def recall(self, query: Any, **options: Any) -> Recalled:
        """Find the rows that score best; as `CpuBackend.recall`."""
        before = self._scan.cpu_scans
        found = super().recall(query, **options)
        if self._scan.cpu_scans != before:
            return replace(found, path="cpu_recall")
        return found

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Bring the store's vectors onto the device; later ones follow in the background."""
        self._scan.load(progress)

    def close(self) -> None:
        """Give the rows' memory on the device back."""
        self._scan.close()
