"""Erasing sessions, collections and passages."""

from libc.stdint cimport uint32_t

from kalos_ctx._staging cimport Stage, StagingStore

cdef class ErasingStore(StagingStore):
    cdef tuple holdings(self, Stage* s)
    cdef set held_by_family(self, uint32_t family, uint32_t but)
