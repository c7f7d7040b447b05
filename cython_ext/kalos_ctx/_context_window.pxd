"""The window that a caller holds."""

from kalos_ctx._session_table cimport SessionRef, SessionTable
from kalos_ctx._window_parts cimport WindowParts
from kalos_ctx._windows cimport Window


cdef class ContextWindow(Window):
    cdef SessionTable table
    cdef SessionRef ref
    cdef readonly WindowParts parts
    cdef object _report
    cdef object __weakref__
    cdef void* older               # live windows of the session; not counted as references
    cdef void* newer
    cdef void link(self, SessionTable table)
    cdef void unlink(self) noexcept
    cpdef release(self)


cdef Py_ssize_t out_tokens(object out) except -1
cdef int fill_out(ContextWindow window, object out) except -1
