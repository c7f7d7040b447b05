"""The one writer of a store: every call that adds to it."""

from libc.stdint cimport uint32_t

from kalos_ctx._batch cimport Draft, Parts
from kalos_ctx._erasing cimport ErasingStore
from kalos_ctx._layout cimport kalos_change
from kalos_ctx._staging cimport Stage

cdef class StoreWriter(ErasingStore):
    cdef long seq_of_key(self, Stage* s, Draft d) except -2
    cdef int keep_entries(self, Stage* s, uint32_t to, kalos_change* c, Parts* p) except -1
    cdef int recount_expiry(self, Stage* s, uint32_t to) except -1
    cdef int trim_summaries(self, Stage* s, uint32_t to) except -1
    cdef int stage_fork(self, Stage* parent, Stage* child, uint32_t n) except -1
    cdef int fork_table(self, Stage* child, uint32_t kind, bytes table) except -1
    cdef bytes copy_table(self, bytes table)
