"""How the tokens of a window come into its memory."""

from kalos_ctx._driver cimport kalos_cu_handle
from kalos_ctx._window_parts cimport WindowParts
from kalos_ctx._windows cimport Window


cdef class Gatherer:
    # Copy the spans' tokens into a window with room for them, each run checked against its
    # checksum in the form in which it was copied; says in parts.path which way was taken.
    # `stream`: only enqueue there, and leave the window in flight; NULL: wait.
    cdef int fill(self, WindowParts parts, Window window, kalos_cu_handle stream) except -1
