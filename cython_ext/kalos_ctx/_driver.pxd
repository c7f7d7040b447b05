"""The CUDA driver's C entry points, and how their errors are raised."""

from libc.stdint cimport uint32_t, uint64_t

cdef extern from "_driver.h" nogil:
    ctypedef int kalos_cu_result
    ctypedef int kalos_cu_device
    ctypedef uint64_t kalos_cu_ptr
    ctypedef void* kalos_cu_handle
    ctypedef unsigned long long kalos_cu_allocation

    enum:
        KALOS_CU_NOT_READY
        KALOS_CU_OUT_OF_MEMORY
        KALOS_CU_STREAM_NON_BLOCKING
        KALOS_CU_EVENT_DISABLE_TIMING
        KALOS_CU_HOST_PORTABLE
        KALOS_CU_HOST_DEVICEMAP
        KALOS_CU_REGISTER_PORTABLE
        KALOS_CU_REGISTER_DEVICEMAP
        KALOS_CU_REGISTER_READ_ONLY
        KALOS_CU_MEM_PINNED
        KALOS_CU_MEM_DEVICE
        KALOS_CU_MEM_FILE_DESCRIPTOR
        KALOS_CU_MEM_READ_WRITE

    ctypedef struct kalos_cu_location:
        int type
        int id

    ctypedef struct kalos_cu_mem_prop:
        int type
        int handle_types
        kalos_cu_location location

    ctypedef struct kalos_cu_mem_access:
        kalos_cu_location location
        int flags

    ctypedef struct kalos_driver:
        kalos_cu_result (*ctx_push)(kalos_cu_handle) noexcept nogil
        kalos_cu_result (*ctx_pop)(kalos_cu_handle*) noexcept nogil
        kalos_cu_result (*ctx_retain)(kalos_cu_handle*, kalos_cu_device) noexcept nogil
        kalos_cu_result (*ctx_release)(kalos_cu_device) noexcept nogil
        kalos_cu_result (*ctx_synchronize)() noexcept nogil
        kalos_cu_result (*ctx_priorities)(int*, int*) noexcept nogil
        kalos_cu_result (*device_get)(kalos_cu_device*, int) noexcept nogil
        kalos_cu_result (*device_attribute)(int*, int, kalos_cu_device) noexcept nogil
        kalos_cu_result (*mem_info)(size_t*, size_t*) noexcept nogil
        kalos_cu_result (*mem_alloc)(kalos_cu_ptr*, size_t) noexcept nogil
        kalos_cu_result (*mem_free)(kalos_cu_ptr) noexcept nogil
        kalos_cu_result (*host_alloc)(void**, size_t, unsigned int) noexcept nogil
        kalos_cu_result (*host_free)(void*) noexcept nogil
        kalos_cu_result (*host_register)(void*, size_t, unsigned int) noexcept nogil
        kalos_cu_result (*host_unregister)(void*) noexcept nogil
        kalos_cu_result (*host_pointer)(kalos_cu_ptr*, void*, unsigned int) noexcept nogil
        kalos_cu_result (*copy_to_device)(
            kalos_cu_ptr, const void*, size_t, kalos_cu_handle) noexcept nogil
        kalos_cu_result (*copy_to_host)(void*, kalos_cu_ptr, size_t, kalos_cu_handle) noexcept nogil
        kalos_cu_result (*copy_on_device)(
            kalos_cu_ptr, kalos_cu_ptr, size_t, kalos_cu_handle) noexcept nogil
        kalos_cu_result (*fill_bytes)(
            kalos_cu_ptr, unsigned char, size_t, kalos_cu_handle) noexcept nogil
        kalos_cu_result (*stream_create)(kalos_cu_handle*, unsigned int, int) noexcept nogil
        kalos_cu_result (*stream_destroy)(kalos_cu_handle) noexcept nogil
        kalos_cu_result (*stream_synchronize)(kalos_cu_handle) noexcept nogil
        kalos_cu_result (*stream_query)(kalos_cu_handle) noexcept nogil
        kalos_cu_result (*stream_wait)(
            kalos_cu_handle, kalos_cu_handle, unsigned int) noexcept nogil
        kalos_cu_result (*stream_write)(
            kalos_cu_handle, kalos_cu_ptr, uint32_t, unsigned int) noexcept nogil
        kalos_cu_result (*event_create)(kalos_cu_handle*, unsigned int) noexcept nogil
        kalos_cu_result (*event_destroy)(kalos_cu_handle) noexcept nogil
        kalos_cu_result (*event_record)(kalos_cu_handle, kalos_cu_handle) noexcept nogil
        kalos_cu_result (*event_query)(kalos_cu_handle) noexcept nogil
        kalos_cu_result (*event_synchronize)(kalos_cu_handle) noexcept nogil
        kalos_cu_result (*module_load)(kalos_cu_handle*, const void*) noexcept nogil
        kalos_cu_result (*module_unload)(kalos_cu_handle) noexcept nogil
        kalos_cu_result (*module_function)(
            kalos_cu_handle*, kalos_cu_handle, const char*) noexcept nogil
        kalos_cu_result (*function_set)(kalos_cu_handle, int, int) noexcept nogil
        kalos_cu_result (*launch)(
            kalos_cu_handle, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
            unsigned int, unsigned int, kalos_cu_handle, void**, void**) noexcept nogil
        kalos_cu_result (*vm_granularity)(size_t*, const kalos_cu_mem_prop*, int) noexcept nogil
        kalos_cu_result (*vm_reserve)(
            kalos_cu_ptr*, size_t, size_t, kalos_cu_ptr, uint64_t) noexcept nogil
        kalos_cu_result (*vm_free)(kalos_cu_ptr, size_t) noexcept nogil
        kalos_cu_result (*vm_create)(
            kalos_cu_allocation*, size_t, const kalos_cu_mem_prop*, uint64_t) noexcept nogil
        kalos_cu_result (*vm_release)(kalos_cu_allocation) noexcept nogil
        kalos_cu_result (*vm_map)(
            kalos_cu_ptr, size_t, size_t, kalos_cu_allocation, uint64_t) noexcept nogil
        kalos_cu_result (*vm_unmap)(kalos_cu_ptr, size_t) noexcept nogil
        kalos_cu_result (*vm_access)(
            kalos_cu_ptr, size_t, const kalos_cu_mem_access*, size_t) noexcept nogil
        kalos_cu_result (*vm_export)(void*, kalos_cu_allocation, int, uint64_t) noexcept nogil
        kalos_cu_result (*error_name)(kalos_cu_result, const char**) noexcept nogil


# The driver's table, filled at the first call; DeviceUnavailable where there is no driver.
cdef kalos_driver* c_driver() except NULL

# 0 where a driver call succeeded; else MemoryError for memory, DeviceError for the rest.
cdef int cu_check(kalos_cu_result code, str doing) except -1
