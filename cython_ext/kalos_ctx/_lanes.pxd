"""What one call at a time works with on a device: a stream and the memory beside it."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._device cimport Device, kalos_gpu
from kalos_ctx._driver cimport kalos_cu_handle, kalos_cu_ptr

cdef extern from "kalos_launch.h" nogil:
    ctypedef struct kalos_done:
        uint32_t ticket
        uint32_t bad


# Pinned host memory that grows; its contents do not survive that.
cdef class PinnedBuffer:
    cdef kalos_gpu* h_gpu
    cdef char* data
    cdef kalos_cu_ptr mapped
    cdef size_t nbytes
    cdef int reserve(self, size_t nbytes) except -1


# Device memory that grows, zeroed where it is new; its contents do not survive that.
cdef class DeviceBuffer:
    cdef Device device
    cdef kalos_gpu* h_gpu
    cdef kalos_cu_ptr data
    cdef size_t nbytes
    cdef int reserve(self, size_t nbytes) except -1


cdef class Lane:
    cdef Device device
    cdef kalos_gpu* h_gpu
    cdef kalos_cu_handle stream
    cdef kalos_done* done           # pinned: what a kernel says last
    cdef kalos_cu_ptr done_mapped
    cdef uint32_t ticket            # of the launch that was made last
    cdef readonly PinnedBuffer host
    cdef readonly DeviceBuffer scratch
    cdef readonly DeviceBuffer counters
    # The next launch's number; then wait for it, without the GIL. DeviceError where the GPU failed;
    # nothing of the lane is in use then.
    cdef uint32_t next_ticket(self) noexcept
    cdef int wait(self) except -1
    # Wait for all that the stream holds, after a failure between two launches.
    cdef void drain(self) noexcept


cdef class Lanes:
    cdef Device device
    cdef list free                  # taken and given back under the GIL
    cdef Lane take(self)
    cdef void give(self, Lane lane) noexcept
