"""Recall on a device."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._cpu_ops cimport kalos_hit
from kalos_ctx._device cimport Device
from kalos_ctx._device_rows cimport DeviceRows
from kalos_ctx._driver cimport kalos_cu_handle, kalos_cu_ptr
from kalos_ctx._lanes cimport DeviceBuffer, Lane, Lanes
from kalos_ctx._store_scan cimport Scope, StoreScan
from kalos_ctx._vectors cimport RowMap, Runs

cdef extern from "kalos_launch.h" nogil:
    ctypedef struct kalos_recall_extent:
        uint32_t begin
        uint32_t end

    ctypedef struct kalos_recall_scope:
        uint64_t allowed
        uint32_t num_extents
        float min_score
        kalos_recall_extent* extents


cdef enum Kind:
    FEW
    MANY
    BATCH
    KINDS

# The rows of a scope as the device takes them: few extents, or a bitmap of its rows.
cdef class DeviceScope:
    cdef Runs runs                  # whose it is: compared by identity
    cdef DeviceBuffer bitmap        # None: the extents say it all
    cdef kalos_recall_scope scope   # min_score is the call's
    cdef uint32_t begin, end


cdef class DeviceScan(StoreScan):
    cdef readonly Device device
    cdef Lanes lanes
    cdef DeviceRows resident        # rows of the generation that was scanned last
    cdef object progress            # called as progress(rows done, rows) while a store is loaded
    cdef dict scopes                # id(Runs) -> DeviceScope, oldest first
    cdef DeviceScope last           # the scope used last: most calls ask for one
    cdef kalos_cu_handle kernels[KINDS]     # for the store's rows and metric
    cdef size_t allowed[KINDS]      # dynamic shared memory that a kernel may have, bytes
    cdef uint64_t counts[KINDS + 1] # scans by kernel, and those that ran on the CPU
    cdef DeviceRows rows_for(self, RowMap rows)
    cdef DeviceScope scope_for(self, Runs runs, Lane lane)
    cdef int launch(self, Lane lane, DeviceRows rows, DeviceScope scope, const float* queries,
                    uint32_t n, uint32_t k, float min_score) except -1
