"""Device memory that grows without moving."""

from libc.stdint cimport uint32_t

from kalos_ctx._device cimport Device
from kalos_ctx._driver cimport (
    kalos_cu_allocation, kalos_cu_handle, kalos_cu_mem_prop, kalos_cu_ptr, kalos_driver,
)

ctypedef struct kalos_chunk:
    kalos_cu_allocation allocation
    size_t nbytes

cdef class GrowingArray:
    cdef Device device              # keeps the context
    cdef const kalos_driver* driver
    cdef kalos_cu_mem_prop kind     # what chunks are made of
    cdef size_t granularity
    cdef size_t chunk_nbytes        # most that a chunk is longer than asked for
    cdef kalos_chunk* chunks        # in the order of their addresses, without gaps
    cdef uint32_t room              # chunks that fit
    cdef readonly uint32_t num_chunks
    cdef readonly kalos_cu_ptr base     # never changes
    cdef readonly size_t range_nbytes   # addresses reserved
    cdef readonly size_t nbytes         # bytes that are there
    cdef int grow(self, size_t nbytes, kalos_cu_handle stream) except -1
    cdef void cut(self, uint32_t num_chunks) noexcept

# Reserve addresses for `range_nbytes`; no memory yet.
cdef GrowingArray growing_array(Device device, size_t range_nbytes, size_t chunk_nbytes)
