"""One GPU, held open: its primary context, kernels, streams and memory."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from kalos_ctx._driver cimport kalos_cu_handle, kalos_cu_ptr, kalos_cu_result, kalos_driver


cdef extern from "_gpu.h" nogil:
    kalos_cu_handle KALOS_CU_STREAM_LEGACY
    kalos_cu_handle KALOS_CU_STREAM_PER_THREAD

    ctypedef struct kalos_gpu:
        const kalos_driver* driver
        kalos_cu_handle context
        kalos_cu_handle stream
        kalos_cu_handle* modules
        uint32_t num_modules
        int32_t ordinal
        uint64_t* counts

    # A reference of one's own, for memory that may outlive the Device object. An object that frees
    # memory in __dealloc__ holds one: the collector may have taken its Device before.
    void kalos_gpu_ref(kalos_gpu* gpu)
    void kalos_gpu_unref(kalos_gpu* gpu)
    bint kalos_gpu_is_here(const kalos_gpu* gpu)
    kalos_cu_result kalos_gpu_enter(const kalos_gpu* gpu)
    void kalos_gpu_leave(const kalos_gpu* gpu)
    # These enter the context by themselves. nbytes of a free: as it was allocated.
    kalos_cu_result kalos_gpu_alloc(kalos_gpu* gpu, kalos_cu_ptr* address, size_t nbytes)
    void kalos_gpu_free(kalos_gpu* gpu, kalos_cu_ptr address, size_t nbytes)
    kalos_cu_result kalos_gpu_pin(
        kalos_gpu* gpu, void** memory, kalos_cu_ptr* mapped, size_t nbytes)
    void kalos_gpu_free_pinned(kalos_gpu* gpu, void* memory, size_t nbytes)
    # Between enter and leave.
    kalos_cu_result kalos_gpu_launch_2d(
        kalos_gpu* gpu, kalos_cu_handle function, unsigned int blocks_x, unsigned int blocks_y,
        unsigned int threads, unsigned int shared_nbytes, kalos_cu_handle stream, void* args)
    kalos_cu_result kalos_gpu_launch(
        kalos_gpu* gpu, kalos_cu_handle function, unsigned int blocks, unsigned int threads,
        unsigned int shared_nbytes, kalos_cu_handle stream, void* args)
    kalos_cu_result kalos_gpu_to_device(
        kalos_gpu* gpu, kalos_cu_ptr to, const void* src, size_t nbytes, kalos_cu_handle stream)
    kalos_cu_result kalos_gpu_to_host(
        kalos_gpu* gpu, void* to, kalos_cu_ptr src, size_t nbytes, kalos_cu_handle stream)
    kalos_cu_result kalos_gpu_copy(
        kalos_gpu* gpu, kalos_cu_ptr to, kalos_cu_ptr src, size_t nbytes, kalos_cu_handle stream)


cdef class Device:
    cdef kalos_gpu* h_gpu           # shared with the memory that was made through it
    cdef const kalos_driver* driver
    cdef kalos_cu_handle stream     # of set-up, zero fills and batches; ends with the last holder
    cdef readonly int ordinal
    cdef readonly int num_multiprocessors
    cdef dict functions             # address by name
    cdef list images                # what each module was loaded from

    # ForkedHandle in a process that was forked off the one that opened the device.
    cdef int check(self) except -1
    # The context is current between the two; they may be nested.
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
    # A kernel by its name; lives as long as the device.
    cdef kalos_cu_handle function(self, name) except NULL
    # A stream that waits for no other by itself; `end_stream` waits for its work.
    cdef kalos_cu_handle new_stream(self, bint high) except NULL
    cdef void end_stream(self, kalos_cu_handle stream) noexcept
    cdef kalos_cu_handle new_event(self) except NULL
    cdef void end_event(self, kalos_cu_handle event) noexcept
    # Pinned host memory, zeroed; `mapped` gives its address on the device.
    cdef void* pinned(self, size_t nbytes) except NULL
    cdef kalos_cu_ptr mapped(self, void* memory) except? 0
    cdef void free_pinned(self, void* memory, size_t nbytes) noexcept
    # Device memory, zeroed before the call returns.
    cdef kalos_cu_ptr alloc(self, size_t nbytes) except 0
    cdef void free(self, kalos_cu_ptr address, size_t nbytes) noexcept
    # Zero bytes in the order of a stream.
    cdef int zero(self, kalos_cu_ptr address, size_t nbytes, kalos_cu_handle stream) except -1
    # Wait for a stream, without the GIL.
    cdef int synchronize(self, kalos_cu_handle stream) except -1
