"""Windows on the host: a pool of slots, and the object that owns one until it is released."""

from libc.stdint cimport int32_t, uint32_t, uint64_t


cdef extern from "_window_buffer.h" nogil:
    enum:
        KALOS_WINDOW_MAX_TOKENS

    ctypedef struct kalos_buffer:
        int32_t *data
        uint64_t capacity

    ctypedef struct kalos_pool:
        pass

    ctypedef struct kalos_lease:
        kalos_pool *pool
        kalos_buffer *buffer


# 64-bit key of a tenant's bytes; 0 is nobody's.
cdef uint64_t c_tenant_key(const unsigned char *name, size_t nbytes) noexcept nogil


cdef class WindowPool:
    cdef kalos_pool *h_pool  # shared with the leases, which may outlive this object
    cdef readonly double timeout
    cdef readonly uint32_t slots

    # Lease room for num_tokens; waits up to timeout_s without the GIL. Raises PoolExhausted.
    cdef int c_lease(
        self, kalos_lease *lease, uint64_t num_tokens, uint64_t tenant_key, double timeout_s
    ) except -1


cdef class Window:
    cdef kalos_lease lease  # .buffer.data is written by whoever fills the window
    cdef Py_ssize_t num_tokens
    cdef object _view  # the numpy array that token_ids gave, NULL-able cache: dropped at release

    # Lease room for `capacity` tokens in a window that holds nothing yet; len is 0 until
    # c_set_length. For subclasses: `W.__new__(W)`, c_attach, fill c_data(), c_set_length.
    cdef int c_attach(
        self, WindowPool pool, uint64_t capacity, uint64_t tenant_key, double timeout_s
    ) except -1
    cdef int32_t *c_data(self) noexcept
    cdef void c_set_length(self, uint64_t num_tokens) noexcept  # before the first export
    cdef int c_check(self) except -1  # raises WindowReleased
    cpdef release(self)
