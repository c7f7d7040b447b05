"""Recall of several queries at a time through the tensor cores."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._device cimport Device
from kalos_ctx._device_memory cimport GrowingArray
from kalos_ctx._device_rows cimport DeviceRows
from kalos_ctx._device_scopes cimport DeviceScope
from kalos_ctx._driver cimport kalos_cu_handle, kalos_cu_ptr
from kalos_ctx._lanes cimport Lane


cdef class BatchScan:
    cdef Device device
    cdef DeviceRows rows            # whose kernels and norms these are
    cdef uint32_t metric
    cdef kalos_cu_handle kernels[2]     # for groups of few and of many queries
    cdef size_t room                # dynamic shared memory that a block may have, bytes; 0: none
    cdef object lock                # guards norms
    cdef GrowingArray norms         # float32 by row, at least the norm; not for cosine
    cdef uint64_t num_norms
    # Whether the kernels take a call.
    cdef bint takes(self, uint32_t n, uint32_t k) noexcept
    # Scan and wait: keys of hits [n][k] stand at the beginning of the lane's pinned memory. False
    # where a hit may be missing: ask the other kernels then.
    cdef bint scan(self, Lane lane, DeviceScope scope, const float* queries, uint32_t n, uint32_t k,
                   float min_score) except -1
    cdef kalos_cu_ptr lengths(self, Lane lane) except 0
    cdef uint32_t warps(self, uint32_t queries, uint32_t most) noexcept
