"""Arrays over a buffer for other libraries: DLPack and the CUDA array interface."""

from libc.stdint cimport int32_t, int64_t

from kalos_ctx._driver cimport kalos_cu_handle, kalos_cu_ptr, kalos_cu_result
from kalos_ctx._window_buffer cimport kalos_buffer

cdef extern from "_dlpack.h" nogil:
    enum:
        KALOS_DL_CPU
        KALOS_DL_CUDA

    ctypedef struct kalos_dl_view:
        void* data
        int32_t device_type
        int32_t device_id
        int32_t ndim
        int32_t bits
        int64_t* shape


# A DLPack capsule. `view` says what of the buffer is exported and may be changed; `host` is the
# same in host memory, NULL where it is not there. Raises BufferError, DeviceError, MemoryError.
cdef object export_dlpack(
    kalos_buffer* buffer, kalos_dl_view* view, void* host, bint read_only,
    object stream, object max_version, object dl_device, object copy)

# `__cuda_array_interface__` of device memory whose last work was given to the stream `work`.
cdef dict export_interface(
    kalos_buffer* buffer, const kalos_dl_view* view, bint read_only, kalos_cu_handle work)

# Copy device memory of a buffer to the host, once work on it is done, and wait for the copy.
cdef kalos_cu_result read_back(
    kalos_buffer* source, kalos_cu_ptr place, void* target, size_t nbytes) noexcept nogil

# MemoryError, DeviceError or nothing for a status of `_window_buffer.h`.
cdef int check_status(int status, str doing) except -1
