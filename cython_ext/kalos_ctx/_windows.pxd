"""Windows: a pool of slots, and the object that owns one until it is released."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from kalos_ctx._device cimport Device
from kalos_ctx._driver cimport kalos_cu_handle, kalos_cu_ptr, kalos_cu_result
from kalos_ctx._exports cimport kalos_dl_view
from kalos_ctx._window_buffer cimport (
    KALOS_WINDOW_MAX_TOKENS, kalos_buffer, kalos_lease, kalos_pool,
)

# 64-bit key of a tenant's bytes; 0 is nobody's.
cdef uint64_t c_tenant_key(const unsigned char* name, size_t nbytes) noexcept nogil


cdef class WindowPool:
    cdef kalos_pool* h_pool         # shared with the leases, which may outlive this object
    cdef readonly Device device     # None: windows in host memory
    cdef readonly double timeout
    cdef readonly uint32_t slots
    cdef public object arranger     # lays windows into batches on the device; made by the first one

    # Lease room for num_tokens; waits up to timeout_s without the GIL. Raises PoolExhausted.
    cdef int c_lease(
        self, kalos_lease* lease, uint64_t num_tokens, uint64_t tenant_key, double timeout_s
    ) except -1
    # A caller names a stream of its own that exists now: what it read on it comes back sooner.
    cdef void c_fence(self, kalos_cu_handle stream) noexcept


cdef class Window:
    cdef kalos_lease lease          # .buffer.data is written by whoever fills the window
    cdef Py_ssize_t num_tokens
    cdef object _view               # the numpy array that token_ids gave; dropped at release
    cdef kalos_buffer* held         # kept until the object ends: its address was given away
    cdef kalos_cu_handle work       # the stream of c_mark, before that the zero fill's
    cdef int ordinal                # of the device, -1 for the host

    # Lease room for `capacity` tokens in a window that holds nothing yet; len is 0 until
    # c_set_length. For subclasses: `W.__new__(W)`, c_attach, fill, c_set_length.
    cdef int c_attach(
        self, WindowPool pool, uint64_t capacity, uint64_t tenant_key, double timeout_s
    ) except -1
    cdef void c_set_length(self, uint64_t num_tokens) noexcept  # before the first export
    cdef int c_check(self) except -1  # raises WindowReleased
    cpdef release(self)

    # Host memory: malloc's, or pinned. On a device both places must get the tokens.
    cdef int32_t* c_data(self) noexcept
    # The device memory, and the pinned memory's address on the device; 0 on the host.
    cdef kalos_cu_ptr c_device_data(self) noexcept
    cdef kalos_cu_ptr c_mapped(self) noexcept

    # Who fills a device window: c_order(stream) before the first launch or copy that writes it (it
    # may still be zeroed or read); then either wait for the work and c_done(), or c_mark(stream)
    # after the last launch and leave it in flight. c_order and c_mark stand between the device's
    # enter and leave. To read or write the pinned memory on the host, settle_host() first. After a
    # failure with work perhaps under way, c_abandon(): the memory is lent again after a wait for
    # all work.
    cdef kalos_cu_result c_order(self, kalos_cu_handle stream) noexcept nogil
    cdef kalos_cu_result c_mark(self, kalos_cu_handle stream) noexcept nogil
    cdef void c_done(self) noexcept nogil
    cdef void c_abandon(self) noexcept nogil
    cdef int settle(self) except -1  # wait until it is not in flight, without the GIL
    cdef int settle_host(self) except -1  # the same for the pinned memory alone

    cdef object ids(self)
    cdef int view_of(self, kalos_dl_view* view) except -1
