"""Recall on a device."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._cpu_ops cimport kalos_hit
from kalos_ctx._device cimport Device
from kalos_ctx._device_rows cimport DeviceRows
from kalos_ctx._driver cimport kalos_cu_handle, kalos_cu_ptr
from kalos_ctx._lanes cimport DeviceBuffer, Lane, Lanes
from kalos_ctx._store_scan cimport Scope, StoreScan
from kalos_ctx._vectors cimport RowMap, Runs


# The rows of a scope as the device takes them: few extents, or a bitmap of its rows.
cdef class DeviceScope:
    cdef Runs runs                  # whose it is: compared by identity
    cdef DeviceBuffer bitmap        # None: the extents say it all
    cdef uint32_t begin, end


cdef class DeviceScan(StoreScan):
    cdef readonly Device device
    cdef Lanes lanes
    cdef DeviceRows resident        # rows of the generation that was scanned last
    cdef object progress            # called as progress(rows done, rows) while a store is loaded
    cdef dict scopes                # id(Runs) -> DeviceScope, oldest first
    cdef readonly dict scans        # counts by kernel, and "cpu"
    cdef DeviceRows rows_for(self, RowMap rows)
    cdef DeviceScope scope_for(self, Runs runs, Lane lane)
    cdef kalos_cu_handle kernel(self, str kind, size_t shared) except NULL
    cdef list scan_on_cpu(self, Scope scope, Runs runs, object queries, uint32_t k,
                          float min_score, list gone)
    cdef int launch(self, Lane lane, DeviceRows rows, DeviceScope scope, Runs runs, object queries,
                    uint32_t k, float min_score) except -1
