"""A store that is brought up to its log."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._durability cimport DurableStore
from kalos_ctx._segment cimport SegmentSet

cdef class RecoveringStore(DurableStore):
    cdef readonly dict recovery     # what opening had to do
    cdef bint aside                 # the index was built anew and is not in place yet

    cdef object put_back(self, SegmentSet files, uint32_t segment, uint64_t off, bytes data)
    cdef int apply_again(self, list batch) except -1
