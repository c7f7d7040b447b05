"""Zeroing what erased records hold and point at."""

from libc.stdint cimport uint64_t

from kalos_ctx._reader cimport StoreReader

cdef int scrub_listed(StoreReader store, uint64_t lsn) except -1
