"""The memory of windows, as `_window_buffer.h` describes it: declarations alone."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from posix.time cimport timespec

from kalos_ctx._device cimport kalos_gpu
from kalos_ctx._driver cimport kalos_cu_handle, kalos_cu_ptr, kalos_cu_result

cdef extern from "_window_buffer.h" nogil:
    enum:
        KALOS_WINDOW_MAX_TOKENS
        KALOS_WINDOW_SPARES

    ctypedef struct kalos_buffer:
        int32_t* data
        kalos_cu_ptr device_data
        kalos_cu_ptr mapped
        uint64_t capacity
        kalos_gpu* gpu
        kalos_pool* home

    ctypedef struct kalos_pool:
        kalos_gpu* gpu

    ctypedef struct kalos_lease:
        kalos_pool* pool
        kalos_buffer* buffer

    int kalos_buffer_new(
        kalos_gpu* gpu, bint device_alone, uint64_t num_tokens, kalos_buffer** made)
    void kalos_buffer_ref(kalos_buffer* buffer)
    void kalos_buffer_unref(kalos_buffer* buffer)
    bint kalos_buffer_pending(const kalos_buffer* buffer)
    void kalos_buffer_done(kalos_buffer* buffer)
    kalos_cu_result kalos_buffer_mark(kalos_buffer* buffer, kalos_cu_handle stream)
    kalos_cu_result kalos_buffer_order(kalos_buffer* buffer, kalos_cu_handle stream)
    kalos_cu_result kalos_buffer_settle(kalos_buffer* buffer)
    kalos_cu_result kalos_buffer_settle_host(kalos_buffer* buffer)
    void kalos_buffer_lend(kalos_buffer* buffer, kalos_cu_handle stream)
    kalos_pool* kalos_pool_new(
        uint32_t num_slots, kalos_gpu* gpu, bint device_alone, uint32_t max_idle, uint32_t spares)
    void kalos_pool_close(kalos_pool* pool)
    uint32_t kalos_pool_num_free(kalos_pool* pool)
    void kalos_pool_fence(kalos_pool* pool, kalos_cu_handle stream)
    int kalos_lease_begin(
        kalos_lease* lease, kalos_pool* pool, uint64_t num_tokens, uint64_t tenant,
        const timespec* deadline)
    void kalos_lease_end(kalos_lease* lease)
