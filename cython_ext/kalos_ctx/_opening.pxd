"""A store opened for writing."""

from kalos_ctx._recovery cimport RecoveringStore

cdef class WritableStore(RecoveringStore):
    cdef int adopt(self, WritableStore other) except -1
