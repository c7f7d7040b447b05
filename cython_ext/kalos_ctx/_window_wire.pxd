"""A window as the body of a message, both ways."""

from libc.stdint cimport int32_t, uint8_t, uint32_t

from kalos_ctx._channel_layout cimport kalos_window_result
from kalos_ctx._context_window cimport ContextWindow
from kalos_ctx._window_parts cimport WindowParts
from kalos_ctx._windows cimport WindowPool


# Bytes that a window's answer takes; finds its fates.
cdef size_t window_nbytes(WindowParts parts, uint32_t num_tokens, bytes extras) except 0
# Where its tokens stand.
cdef int32_t* window_tokens(uint8_t* out) noexcept
# Write that many bytes; `tokens` is NULL where they stand there already.
cdef int write_window(WindowParts parts, uint32_t num_tokens, const int32_t* tokens, bytes extras,
                      uint8_t* out) except -1
# What the extras of such a window say, as an object for msgpack.
cdef dict extras_of(WindowParts parts)


cdef class WindowReader:
    cdef readonly WindowPool pool
    cdef object unpack             # bytes to object
    cdef dict heads                # what plain extras say, by their bytes
    cdef ContextWindow read(self, const uint8_t* body, size_t nbytes, bytes session, bytes tenant,
                            double timeout_s)
    cdef ContextWindow new_window(self, WindowParts parts, bytes session, bytes tenant,
                                  uint32_t num_tokens, double timeout_s)
    cdef WindowParts read_parts(self, const kalos_window_result* head, const uint8_t* spans,
                                const uint8_t* fates, bytes extras)
    cdef int read_hits(self, WindowParts parts, dict said) except -1
    cdef int read_spans(self, WindowParts parts, const uint8_t* source, uint32_t count,
                        uint32_t num_tokens) except -1
    cdef int read_fates(self, WindowParts parts, const uint8_t* source, uint32_t count) except -1
