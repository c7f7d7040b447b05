"""Arrays over a buffer for other libraries: DLPack and the CUDA array interface.

DLPack: the array API standard, `array.__dlpack__`, https://data-apis.org/array-api/latest/
CUDA array interface, version 3: https://numba.readthedocs.io/en/stable/cuda/
"""

from cpython.pycapsule cimport PyCapsule_GetName, PyCapsule_GetPointer, PyCapsule_New
from libc.errno cimport ENOMEM
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy, strcmp

from kalos_ctx._device cimport (
    KALOS_CU_STREAM_LEGACY, KALOS_CU_STREAM_PER_THREAD, kalos_gpu, kalos_gpu_copy, kalos_gpu_enter,
    kalos_gpu_leave, kalos_gpu_to_host,
)
from kalos_ctx._driver cimport cu_check, kalos_cu_handle, kalos_cu_ptr, kalos_cu_result
from kalos_ctx._window_buffer cimport (
    kalos_buffer, kalos_buffer_done, kalos_buffer_lend, kalos_buffer_new, kalos_buffer_order,
    kalos_buffer_pending, kalos_buffer_ref, kalos_buffer_settle_host, kalos_buffer_unref,
    kalos_pool_fence,
)

import operator

cdef extern from "_dlpack.h" nogil:
    enum:
        KALOS_DL_READ_ONLY
        KALOS_DL_COPIED
    void* kalos_dl_new(
        kalos_buffer* buffer, const kalos_dl_view* view, bint versioned, uint64_t flags)
    void kalos_dl_free(void* self)


cdef const char* LEGACY = b"dltensor"
cdef const char* VERSIONED = b"dltensor_versioned"


cdef int check_status(int status, str doing) except -1:
    if status == ENOMEM:
        raise MemoryError(f"no memory to {doing}")
    return cu_check(-status, doing)


cdef void capsule_end(object capsule) noexcept:
    """A capsule that nobody took (whoever takes it renames it) frees its export."""
    cdef const char* name = PyCapsule_GetName(capsule)
    if name != NULL and (strcmp(name, LEGACY) == 0 or strcmp(name, VERSIONED) == 0):
        kalos_dl_free(PyCapsule_GetPointer(capsule, name))


cdef uint64_t num_elements(const kalos_dl_view* view) noexcept:
    cdef uint64_t count = 1
    cdef int i
    for i in range(view.ndim):
        count *= <uint64_t>view.shape[i]
    return count


cdef int consumer_stream(object stream, kalos_cu_handle* handle) except -1:
    """The handle that a consumer's `stream` means; NULL: it does not want to be waited for."""
    if stream is None:
        handle[0] = KALOS_CU_STREAM_LEGACY
        return 0
    if isinstance(stream, bool):
        raise BufferError("stream must be an int or None (got bool)")
    try:
        number = operator.index(stream)
    except TypeError:
        raise BufferError(
            f"stream must be an int or None (got {type(stream).__name__})") from None
    if number == 0:
        raise BufferError(
            "stream 0 is ambiguous: 1 is the legacy default stream, 2 the per-thread one")
    if not -1 <= number < 1 << 64:
        raise BufferError(f"stream must be -1, 1, 2 or a stream's address (got {number})")
    handle[0] = NULL if number == -1 else <kalos_cu_handle><uintptr_t>number
    return 0


cdef int lend_device(kalos_buffer* buffer, kalos_cu_handle stream) except -1:
    """Order a consumer's stream behind work on the memory, and note that it reads there."""
    cdef kalos_cu_result code
    if stream != NULL:
        code = kalos_gpu_enter(buffer.gpu)
        if code == 0:
            code = kalos_buffer_order(buffer, stream)
            kalos_gpu_leave(buffer.gpu)
        cu_check(code, "let a stream wait for a window")
        if stream != KALOS_CU_STREAM_LEGACY and stream != KALOS_CU_STREAM_PER_THREAD \
                and buffer.home != NULL:
            kalos_pool_fence(buffer.home, stream)
    kalos_buffer_lend(buffer, stream)
    return 0


cdef kalos_cu_result finish(kalos_gpu* gpu, kalos_cu_result code) noexcept nogil:
    """Wait for the GPU's own stream and leave the context."""
    if code == 0:
        code = gpu.driver.stream_synchronize(gpu.stream)
    kalos_gpu_leave(gpu)
    return code


cdef kalos_cu_result read_back(kalos_buffer* source, kalos_cu_ptr place, void* target,
                               size_t nbytes) noexcept nogil:
    cdef kalos_gpu* gpu = source.gpu
    cdef kalos_cu_result code = kalos_gpu_enter(gpu)
    if code:
        return code
    code = kalos_buffer_order(source, gpu.stream)
    if code == 0:
        code = kalos_gpu_to_host(gpu, target, place, nbytes, gpu.stream)
    return finish(gpu, code)


cdef kalos_cu_result duplicate(kalos_buffer* source, kalos_cu_ptr place, kalos_buffer* target,
                               size_t nbytes) noexcept nogil:
    cdef kalos_gpu* gpu = source.gpu
    cdef kalos_cu_result code = kalos_gpu_enter(gpu)
    if code:
        return code
    code = kalos_buffer_order(source, gpu.stream)
    if code == 0:
        code = kalos_gpu_copy(gpu, target.device_data, place, nbytes, gpu.stream)
    code = finish(gpu, code)
    if code == 0:
        kalos_buffer_done(target)
    return code


cdef kalos_buffer* copy_of(kalos_buffer* buffer, kalos_dl_view* view, void* host,
                           bint on_host) except NULL:
    """A buffer of its own with the view's elements; the view then shows it."""
    cdef kalos_buffer* made = NULL
    cdef size_t nbytes = num_elements(view) * (view.bits // 8)
    cdef kalos_gpu* gpu = NULL if on_host else buffer.gpu
    cdef kalos_cu_result code = 0
    check_status(kalos_buffer_new(gpu, True, (nbytes + 3) // 4, &made), "copy a window")
    with nogil:
        if on_host and host != NULL:
            code = kalos_buffer_settle_host(buffer)
            if code == 0:
                memcpy(made.data, host, nbytes)
        elif on_host:
            code = read_back(buffer, <kalos_cu_ptr>view.data, made.data, nbytes)
        else:
            code = duplicate(buffer, <kalos_cu_ptr>view.data, made, nbytes)
    if code:
        kalos_buffer_unref(made)
        cu_check(code, "copy a window")
    kalos_buffer_lend(made, NULL)
    view.data = <void*>made.data if on_host else <void*>made.device_data
    return made


cdef object export_dlpack(
    kalos_buffer* buffer, kalos_dl_view* view, void* host, bint read_only,
    object stream, object max_version, object dl_device, object copy
):
    cdef bint versioned = max_version is not None and tuple(max_version) >= (1, 0)
    cdef bint copies = copy is not None and bool(copy)
    cdef uint64_t flags = KALOS_DL_READ_ONLY if read_only else 0
    cdef kalos_buffer* exported = buffer
    cdef kalos_cu_handle handle = NULL
    cdef kalos_cu_result code
    device = (view.device_type, view.device_id)
    wanted = device if dl_device is None else tuple(dl_device)
    if buffer.gpu != NULL:
        consumer_stream(stream, &handle)
    elif stream is not None:
        raise BufferError("stream must be None for an array in host memory")
    if wanted not in (device, (KALOS_DL_CPU, 0)):
        places = " or (1, 0), the host" if buffer.gpu != NULL else ""
        raise BufferError(f"dl_device must be {device}, where the array is{places} "
                          f"(got {dl_device})")
    cdef bint on_host = wanted == (KALOS_DL_CPU, 0)
    if on_host and host == NULL:
        if copy is not None and not copies:
            raise BufferError("copy must not be False for dl_device (1, 0): the array is on "
                              "the device alone")
        copies = True
    if copies:
        flags = KALOS_DL_COPIED
        exported = copy_of(buffer, view, host, on_host)
    elif on_host:
        if buffer.gpu != NULL:
            with nogil:
                code = kalos_buffer_settle_host(buffer)
            cu_check(code, "finish a window")
            kalos_buffer_lend(buffer, KALOS_CU_STREAM_LEGACY)
        view.data = host
        kalos_buffer_ref(buffer)
    else:
        lend_device(buffer, handle)
        kalos_buffer_ref(buffer)
    if on_host:
        view.device_type, view.device_id = KALOS_DL_CPU, 0
    cdef void* capsule = kalos_dl_new(exported, view, versioned, flags)
    if capsule == NULL:
        raise MemoryError()
    try:
        return PyCapsule_New(capsule, VERSIONED if versioned else LEGACY, capsule_end)
    except BaseException:
        kalos_dl_free(capsule)
        raise


cdef dict export_interface(
    kalos_buffer* buffer, const kalos_dl_view* view, bint read_only, kalos_cu_handle work
):
    cdef uintptr_t address = <uintptr_t>view.data if num_elements(view) else 0
    kalos_buffer_lend(buffer, NULL)
    stream = None
    if kalos_buffer_pending(buffer):
        # The stream 0 of the driver is the legacy default stream, which the interface calls 1.
        stream = <uintptr_t>work or 1
    return {
        "shape": tuple([view.shape[i] for i in range(view.ndim)]),
        "typestr": f"<i{view.bits // 8}",
        "data": (address, bool(read_only)),
        "strides": None,
        "stream": stream,
        "version": 3,
    }
