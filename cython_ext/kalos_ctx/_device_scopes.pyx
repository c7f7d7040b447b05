"""Scopes of recall as a device takes them: extents as a parameter, or a bitmap that is kept."""

from libc.stdint cimport uint32_t
from libc.string cimport memcpy

import numpy as np

from kalos_ctx._device cimport Device, kalos_gpu_to_device
from kalos_ctx._driver cimport cu_check
from kalos_ctx._lanes cimport DeviceBuffer, Lane
from kalos_ctx._vectors cimport Runs

cdef extern from "kalos_launch.h" nogil:
    enum:
        KALOS_RECALL_EXTENTS

cdef enum:
    BITMAPS_KEPT = 256


cdef class DeviceScope:
    """The rows of a scope on a device."""


cdef class DeviceScopes:
    """The scopes that one store's recalls asked for.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, Device device not None):
        self.device = device
        self.kept = {}

    cdef void clear(self) noexcept:
        self.kept, self.last = {}, None

    cdef DeviceScope of(self, Runs runs, Lane lane):
        cdef DeviceScope scope = self.last
        cdef Py_ssize_t i, n = runs.c_spans.shape[0]
        if scope is not None and scope.runs is runs:
            return scope
        scope = self.kept.get(id(runs))
        if scope is not None and scope.runs is runs:
            self.last = scope
            return scope
        scope = DeviceScope.__new__(DeviceScope)
        scope.runs = runs
        scope.begin = <uint32_t>runs.c_spans[0, 0]
        scope.end = <uint32_t>(runs.c_spans[n - 1, 0] + runs.c_spans[n - 1, 1])
        if n <= <Py_ssize_t>KALOS_RECALL_EXTENTS:
            scope.scope.num_extents = <uint32_t>n
            for i in range(n):
                scope.scope.extents[i].begin = <uint32_t>runs.c_spans[i, 0]
                scope.scope.extents[i].end = <uint32_t>(runs.c_spans[i, 0] + runs.c_spans[i, 1])
        else:
            scope.scope.num_extents = 1
            scope.scope.extents[0].begin, scope.scope.extents[0].end = scope.begin, scope.end
            self.fill_bitmap(scope, lane)
            scope.scope.allowed = scope.bitmap.data
            while len(self.kept) >= BITMAPS_KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[id(runs)] = scope
        self.last = scope
        return scope

    def fill_bitmap(self, DeviceScope scope not None, Lane lane not None):
        """Bring the rows of a scope's runs to the device, one bit a row."""
        runs = scope.runs
        marks = np.zeros((scope.end + 63) // 32 * 32, np.int8)
        np.add.at(marks, runs.spans[:, 0].astype(np.int64), 1)
        np.add.at(marks, (runs.spans[:, 0] + runs.spans[:, 1]).astype(np.int64), -1)
        bits = np.packbits(np.cumsum(marks, dtype=np.int8).view(np.bool_), bitorder="little")
        scope.bitmap = DeviceBuffer(self.device)
        scope.bitmap.reserve(len(bits))
        lane.host.reserve(len(bits))
        memcpy(lane.host.data, <const char*><size_t>bits.ctypes.data, len(bits))
        self.device.enter()
        code = kalos_gpu_to_device(
            self.device.h_gpu, scope.bitmap.data, lane.host.data, len(bits), lane.stream)
        self.device.leave()
        cu_check(code, "copy a scope")
        self.device.synchronize(lane.stream)
