"""A store with the writer's lock."""

from libc.stdint cimport uint32_t

from kalos_ctx._reader cimport StoreReader

cdef class LockedStore(StoreReader):
    cdef int lock_fd
    cdef int control_lock_fd
    cdef object lock_identity
    cdef readonly object failed     # why writes are refused, None while they are not
    cdef uint32_t forks             # what the process's fork counter was at open

    cdef bint in_child(self) noexcept
