"""An array in device memory that other libraries read without a copy."""

from libc.stdint cimport int64_t, uint64_t

from kalos_ctx._driver cimport kalos_cu_ptr
from kalos_ctx._exports cimport kalos_dl_view
from kalos_ctx._window_buffer cimport kalos_buffer


cdef class DeviceArray:
    cdef kalos_buffer* buffer       # one reference
    cdef kalos_cu_ptr place         # of the first element
    cdef int64_t sizes[2]
    cdef readonly int ndim
    cdef int bits
    cdef int view_of(self, kalos_dl_view* view) except -1
    cdef uint64_t count(self) noexcept


# Of `ndim` dimensions, at `place` in a buffer's device memory, complete. Takes a reference.
cdef DeviceArray device_array(
    kalos_buffer* buffer, kalos_cu_ptr place, int ndim, int64_t rows, int64_t columns, int bits)
