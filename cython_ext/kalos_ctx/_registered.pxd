"""Token segments that a GPU reads where they lie."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._device cimport Device, kalos_gpu
from kalos_ctx._driver cimport kalos_cu_ptr
from kalos_ctx._segment cimport SegmentSet


cdef class RegisteredSegments:
    cdef Device device
    cdef kalos_gpu* h_gpu
    cdef readonly uint64_t budget   # bytes that may be registered at a time
    cdef readonly uint64_t nbytes   # bytes that are
    cdef readonly str refused       # why no more is registered; empty where nothing is wrong
    cdef SegmentSet tokens          # whose segments they are
    cdef list entries               # _Segment by number, or None
    cdef uint64_t clock             # counts uses
    cdef readonly uint32_t users    # calls that may read registered memory now
    cdef object wanted              # (segment, end in bytes), noted by lookups, served by `serve`

    # Address on the device of n bytes of a segment; 0 where they are not registered, and noted.
    cdef kalos_cu_ptr address(self, SegmentSet tokens, uint32_t segment, size_t off, size_t n)
    # Between the two nothing is taken back. `begin` first, then `address`.
    cdef void begin(self) noexcept
    cdef void end(self) noexcept
    cdef int take_back(self, uint32_t segment) except -1
    cdef bint make_room(self, size_t n, uint32_t but) except -1
    cdef int extend(self, uint32_t segment, size_t stop) except -1
