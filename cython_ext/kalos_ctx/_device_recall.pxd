"""Recall on a device."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._cpu_ops cimport kalos_hit
from kalos_ctx._device cimport Device
from kalos_ctx._device_batch cimport BatchScan
from kalos_ctx._device_rows cimport DeviceRows
from kalos_ctx._device_scopes cimport DeviceScope, DeviceScopes
from kalos_ctx._driver cimport kalos_cu_handle
from kalos_ctx._lanes cimport Lane, Lanes
from kalos_ctx._store_scan cimport Scope, StoreScan
from kalos_ctx._vectors cimport RowMap, Runs

cdef enum Kind:
    FEW
    MANY
    KINDS           # those above are kernels of kalos_scan.cuh
    TENSOR          # kernels of kalos_tensor.cuh
    LOST            # scans that TENSOR gave back
    CPU
    COUNTS

cdef class DeviceScan(StoreScan):
    cdef readonly Device device
    cdef Lanes lanes
    cdef DeviceRows resident        # rows of the generation that was scanned last
    cdef object progress            # called as progress(rows done, rows) while a store is loaded
    cdef DeviceScopes scopes
    cdef BatchScan batches          # None until rows are resident
    cdef kalos_cu_handle kernels[KINDS]     # for the store's rows and metric
    cdef uint64_t counts[COUNTS]    # scans by how they ran
    cdef DeviceRows rows_for(self, RowMap rows)
    cdef int launch(self, Lane lane, DeviceRows rows, DeviceScope scope, const float* queries,
                    uint32_t n, uint32_t k, float min_score) except -1
