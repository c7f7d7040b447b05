"""Windows in device memory: how their tokens come there."""

from libc.stdint cimport int64_t, uint64_t

from kalos_ctx._device cimport Device
from kalos_ctx._driver cimport kalos_cu_handle
from kalos_ctx._gathering cimport Gatherer
from kalos_ctx._lanes cimport DeviceBuffer, Lane, Lanes
from kalos_ctx._registered cimport RegisteredSegments
from kalos_ctx._window_parts cimport WindowParts
from kalos_ctx._windows cimport Window


cdef class DeviceGatherer(Gatherer):
    cdef readonly Device device
    cdef Lanes lanes
    cdef kalos_cu_handle kernel
    cdef DeviceBuffer powers        # kalos_crc_powers
    cdef readonly RegisteredSegments segments   # None: the GPU does not read the store
    cdef public uint64_t zero_copy_from     # tokens from which the GPU gathers by itself
    cdef int copy_staged(self, WindowParts parts, Window window, kalos_cu_handle stream) except -1
    cdef bint gather_mapped(self, WindowParts parts, Window window) except -1
    cdef int64_t list_pieces(self, WindowParts parts, Lane lane, void* args) except -2
