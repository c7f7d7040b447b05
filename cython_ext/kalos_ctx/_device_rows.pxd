"""Vector rows of one generation of a store, resident on a device."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._device cimport Device, kalos_gpu
from kalos_ctx._device_memory cimport GrowingArray
from kalos_ctx._driver cimport kalos_cu_handle, kalos_cu_ptr, kalos_driver
from kalos_ctx._index cimport Index
from kalos_ctx._vectors cimport RowMap

# The addresses are constant. Whoever launches work that reads them keeps the object until that
# work is done, and reads `num_rows` before: rows below it are there for every stream.
cdef class DeviceRows:
    cdef object __weakref__
    cdef Device device
    cdef kalos_gpu* h_gpu           # a reference of its own, for `release`
    cdef const kalos_driver* driver
    cdef Index index                # the generation that the rows are of
    cdef RowMap newest              # what was followed last
    cdef readonly kalos_cu_ptr base     # row i at base + i * stride_nbytes, zeros behind `dim`
    cdef readonly kalos_cu_ptr factors  # float32 by row
    cdef readonly kalos_cu_ptr dead     # uint32 bitmap by row
    cdef readonly kalos_cu_ptr places   # kalos_row_tokens of _row_source by row
    cdef readonly uint64_t num_rows
    cdef readonly uint64_t max_rows     # rows that addresses are reserved for
    cdef readonly uint32_t dim
    cdef readonly uint32_t dim_padded   # a multiple of 32
    cdef readonly uint32_t stride_nbytes
    cdef readonly bint half
    cdef readonly bint closed
    cdef readonly GrowingArray row_memory
    cdef readonly GrowingArray factor_memory
    cdef readonly GrowingArray dead_memory
    cdef readonly GrowingArray place_memory
    cdef object lock                # held while anything is copied
    cdef kalos_cu_handle stream     # of the follower, of deletions, of what names no stream
    cdef char* staging[2]           # pinned; one is filled while the other is copied
    cdef size_t staging_nbytes      # of each
    cdef kalos_cu_handle events[2]  # the copies out of each are done
    cdef uint64_t* bits             # pinned: the dead bitmap as it stands on the device
    cdef size_t bits_nbytes
    cdef bint bits_behind           # a copy of them failed: the device may lack some
    cdef object follower            # RowFollower or None
    cdef int follow(self, RowMap rows, kalos_cu_handle stream) except -1
    cdef int follow_dead(self, RowMap rows, kalos_cu_handle stream) except -1
    cdef int kill(self, uint64_t row) except -1
    cdef int reserve(self) except -1
    cdef int belongs(self, RowMap rows) except -1
    cdef int bring(self, RowMap rows, uint64_t stop, kalos_cu_handle stream) except -1
    cdef int make_room(self, uint64_t num_rows, kalos_cu_handle stream) except -1
    cdef int make_bits(self, uint64_t num_rows) except -1
    cdef int check_rows(self, RowMap rows, list sample) except -1
    cdef void release(self) noexcept

# `DeviceRows.open`; 0 stands for the default of both numbers.
cdef DeviceRows device_rows(Device device, RowMap rows, uint64_t max_rows, size_t staging_nbytes)
