"""Windows: leased from a pool, read by numpy and DLPack, given back once.

`_window_buffer.h` says who holds which memory. The two rules that callers rely on: a window's
memory is never written again while an array made from it lives, or work that was given to a device
may read it; and a slot comes back at `release()` or when the window object dies, whichever is
first, whatever exports still live.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport ETIMEDOUT
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from kalos_ctx._device cimport (
    KALOS_CU_STREAM_LEGACY, Device, kalos_gpu, kalos_gpu_enter, kalos_gpu_leave,
    kalos_gpu_to_device,
)
from kalos_ctx._driver cimport cu_check, kalos_cu_handle, kalos_cu_ptr, kalos_cu_result
from kalos_ctx._exports cimport (
    KALOS_DL_CPU, KALOS_DL_CUDA, check_status, export_dlpack, export_interface, kalos_dl_view,
)
from kalos_ctx._window_buffer cimport (
    KALOS_WINDOW_MAX_TOKENS, KALOS_WINDOW_SPARES, kalos_buffer, kalos_buffer_done,
    kalos_buffer_lend, kalos_buffer_mark, kalos_buffer_order, kalos_buffer_pending,
    kalos_buffer_ref, kalos_buffer_settle, kalos_buffer_settle_host, kalos_buffer_unref,
    kalos_lease, kalos_lease_begin, kalos_lease_end, kalos_pool_close, kalos_pool_fence,
    kalos_pool_new, kalos_pool_num_free,
)

import numpy as np

from kalos_ctx.errors import InvalidArgument, InvalidType, PoolExhausted, WindowReleased

cdef const char* FORMAT = b"i"
# Waits are cut into slices so that a signal handler (Ctrl-C) runs in time.
cdef double SIGNAL_SLICE_S = 0.05
cdef uint64_t MAX_SLOTS = 1 << 20


cdef uint64_t c_tenant_key(const unsigned char *name, size_t nbytes) noexcept nogil:
    """FNV-1a, 64 bits: http://www.isthe.com/chongo/tech/comp/fnv/"""
    cdef uint64_t key = 0xCBF29CE484222325
    cdef size_t i
    for i in range(nbytes):
        key = (key ^ name[i]) * <uint64_t> 0x100000001B3
    return key if key != 0 else 1


cdef timespec _after(double seconds) noexcept nogil:
    cdef timespec when
    cdef long long whole = <long long> seconds
    clock_gettime(CLOCK_MONOTONIC, &when)
    when.tv_sec += whole
    when.tv_nsec += <long> ((seconds - whole) * 1e9)
    if when.tv_nsec >= 1000000000:
        when.tv_nsec -= 1000000000
        when.tv_sec += 1
    return when


cdef double _seconds(str argument, object value) except -1:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidType(f"{argument} must be seconds (got {type(value).__name__})")
    if not 0 <= value <= 1e9:
        raise InvalidArgument(f"{argument} must be between 0 and 1e9 seconds (got {value})")
    return value


cdef uint64_t _whole(str argument, object value, uint64_t least, uint64_t most) except? 0:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidType(f"{argument} must be an int (got {type(value).__name__})")
    if not least <= value <= most:
        raise InvalidArgument(f"{argument} must be between {least} and {most} (got {value})")
    return value


cdef class WindowPool:
    """A fixed number of window slots; memory comes with use and stays warm.

    Parameters
    ----------
    slots : int
        Windows that may be alive at a time, 1 to 1,048,576.
    timeout : float
        Seconds that `acquire` waits for a slot unless told otherwise.
    device : Device, optional
        Where windows lie, each with the same tokens in pinned host memory; None: on the host.

    Raises
    ------
    InvalidArgument, InvalidType

    Notes
    -----
    Thread-safe. Waiting releases the GIL.
    """

    def __cinit__(self, slots=64, timeout=1.0, device=None):
        cdef kalos_gpu* gpu = NULL
        cdef uint32_t spares
        self.h_pool = NULL
        self.slots = <uint32_t> _whole("slots", slots, 1, MAX_SLOTS)
        self.timeout = _seconds("timeout", timeout)
        if device is not None:
            if not isinstance(device, Device):
                raise InvalidType(f"device must be a Device (got {type(device).__name__})")
            self.device = device
            gpu = self.device.h_gpu
        spares = 0 if gpu == NULL else KALOS_WINDOW_SPARES
        self.h_pool = kalos_pool_new(self.slots, gpu, False, self.slots + spares, spares)
        if self.h_pool == NULL:
            raise MemoryError()

    def __dealloc__(self):
        kalos_pool_close(self.h_pool)

    @property
    def free(self):
        """Slots that are not leased."""
        return kalos_pool_num_free(self.h_pool)

    cdef int c_lease(
        self, kalos_lease *lease, uint64_t num_tokens, uint64_t tenant_key, double timeout_s
    ) except -1:
        cdef timespec deadline
        cdef double left = timeout_s, slice_s
        cdef int status
        if self.device is None:
            # The lock is held for moments, never by one who waits for the GIL: try without
            # letting go.
            status = kalos_lease_begin(lease, self.h_pool, num_tokens, tenant_key, NULL)
        else:
            self.device.check()
            with nogil:
                status = kalos_lease_begin(lease, self.h_pool, num_tokens, tenant_key, NULL)
        while status == ETIMEDOUT and left > 0:
            slice_s = min(left, SIGNAL_SLICE_S)
            deadline = _after(slice_s)
            with nogil:
                status = kalos_lease_begin(lease, self.h_pool, num_tokens, tenant_key, &deadline)
            left -= slice_s
            if status == ETIMEDOUT:
                PyErr_CheckSignals()
        if status == ETIMEDOUT:
            raise PoolExhausted(
                f"all {self.slots} window slots stayed in use for {timeout_s} s: release windows, "
                f"or give the pool more slots")
        return check_status(status, f"make a window of {num_tokens} tokens")

    cdef void c_fence(self, kalos_cu_handle stream) noexcept:
        if self.device is not None:
            kalos_pool_fence(self.h_pool, stream)

    def acquire(self, num_tokens, *, tenant=b"", timeout=None):
        """Lease a window of zeros or of what this tenant left, to be filled by `write`.

        Parameters
        ----------
        num_tokens : int
            Its length.
        tenant : bytes
            Whose tokens it will hold; memory that changes hands is zeroed.
        timeout : float, optional
            Seconds; 0 does not wait, None takes the pool's.

        Returns
        -------
        Window

        Raises
        ------
        PoolExhausted, InvalidArgument, InvalidType, MemoryError
        """
        cdef uint64_t count = _whole("num_tokens", num_tokens, 0, KALOS_WINDOW_MAX_TOKENS)
        cdef double wait = self.timeout if timeout is None else _seconds("timeout", timeout)
        if not isinstance(tenant, bytes):
            raise InvalidType(f"tenant must be bytes (got {type(tenant).__name__})")
        cdef uint64_t key = c_tenant_key(<const unsigned char *> <char *> tenant, len(tenant))
        cdef Window window = Window.__new__(Window)
        window.c_attach(self, count, key, wait)
        window.num_tokens = <Py_ssize_t> count
        return window


cdef int _settle(kalos_buffer* buffer, bint host) except -1:
    """Wait until nothing uses the memory, or the pinned memory alone."""
    cdef kalos_cu_result code
    if not kalos_buffer_pending(buffer):
        return 0
    kalos_buffer_ref(buffer)  # another thread may release the window meanwhile
    with nogil:
        code = kalos_buffer_settle_host(buffer) if host else kalos_buffer_settle(buffer)
        kalos_buffer_unref(buffer)
    return cu_check(code, "finish a window")


cdef kalos_cu_result _send(kalos_buffer* buffer, uint64_t off, uint64_t count) noexcept:
    """Copy tokens of the pinned memory to the device, and wait for it."""
    cdef kalos_gpu* gpu = buffer.gpu
    cdef kalos_cu_result code = kalos_gpu_enter(gpu)
    if code:
        return code
    code = kalos_buffer_order(buffer, gpu.stream)
    if code == 0:
        code = kalos_gpu_to_device(
            gpu, buffer.device_data + off * 4, buffer.data + off, count * 4, gpu.stream)
    if code == 0:
        with nogil:
            code = gpu.driver.stream_synchronize(gpu.stream)
    kalos_gpu_leave(gpu)
    if code == 0:
        kalos_buffer_done(buffer)
    return code


cdef class _View:
    """The buffer that a numpy view stands on: one reference to the memory, read-only."""

    cdef kalos_buffer *buffer
    cdef Py_ssize_t shape[1]
    cdef Py_ssize_t strides[1]

    def __cinit__(self):
        self.buffer = NULL

    def __dealloc__(self):
        kalos_buffer_unref(self.buffer)

    def __getbuffer__(self, Py_buffer *view, int flags):
        if flags & PyBUF_WRITABLE:
            raise BufferError("a window's token IDs are read-only")
        view.buf = self.buffer.data
        view.obj = self
        view.len = self.shape[0] * 4
        view.itemsize = 4
        view.readonly = 1
        view.ndim = 1
        view.format = <char *> FORMAT if flags & PyBUF_FORMAT else NULL
        view.shape = self.shape if flags & PyBUF_ND else NULL
        view.strides = self.strides if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL


cdef class Window:
    """Token IDs of one window: int32 of shape (L,), 64-byte aligned, on the host or a device.

    Made by `WindowPool.acquire`. Owns its slot until `release()`, the end of a `with` block, or its
    own end: a window that is dropped without a release gives its slot back silently, since the
    collector decides when that happens. Arrays made from it (`token_ids`, DLPack) keep their memory
    alive, also after the release. A window on a device holds the same tokens in pinned host memory,
    which `token_ids`, `tolist` and numpy read without a copy from the device.

    Notes
    -----
    After the release everything but `release()`, `released`, `device` and `repr()` raises
    `WindowReleased`. What copies asynchronously from the host memory of a device's window, on a
    stream of its own, must be done before the array that it copies from is dropped.
    """

    def __cinit__(self):
        self.lease.pool = NULL
        self.lease.buffer = NULL
        self.num_tokens = 0
        self._view = None
        self.held = NULL
        self.work = NULL
        self.ordinal = -1

    def __init__(self):
        raise TypeError("windows are made by WindowPool.acquire")

    def __dealloc__(self):
        self._view = None  # as in release(), so that the slot keeps its warm memory
        kalos_buffer_unref(self.held)
        kalos_lease_end(&self.lease)

    cdef int c_attach(
        self, WindowPool pool, uint64_t capacity, uint64_t tenant_key, double timeout_s
    ) except -1:
        if self.lease.pool != NULL:
            raise InvalidArgument("the window has a slot already")
        if pool.device is not None:
            self.ordinal = pool.device.ordinal
            self.work = pool.device.stream
        return pool.c_lease(&self.lease, capacity, tenant_key, timeout_s)

    cdef int32_t* c_data(self) noexcept:
        return self.lease.buffer.data

    cdef kalos_cu_ptr c_device_data(self) noexcept:
        return self.lease.buffer.device_data

    cdef kalos_cu_ptr c_mapped(self) noexcept:
        return self.lease.buffer.mapped

    cdef void c_set_length(self, uint64_t num_tokens) noexcept:
        self.num_tokens = <Py_ssize_t> num_tokens

    cdef int c_check(self) except -1:
        if self.lease.buffer == NULL:
            raise WindowReleased("the window was released; use its arrays, or build it again")
        return 0

    cdef kalos_cu_result c_order(self, kalos_cu_handle stream) noexcept nogil:
        return kalos_buffer_order(self.lease.buffer, stream)

    cdef kalos_cu_result c_mark(self, kalos_cu_handle stream) noexcept nogil:
        self.work = stream
        return kalos_buffer_mark(self.lease.buffer, stream)

    cdef void c_done(self) noexcept nogil:
        kalos_buffer_done(self.lease.buffer)

    cdef void c_abandon(self) noexcept nogil:
        kalos_buffer_lend(self.lease.buffer, NULL)

    cdef int settle(self) except -1:
        return _settle(self.lease.buffer, False)

    cdef int settle_host(self) except -1:
        return _settle(self.lease.buffer, True)

    def __len__(self):
        self.c_check()
        return self.num_tokens

    def __repr__(self):
        if self.lease.buffer == NULL:
            return f"<{type(self).__name__}, released>"
        return f"<{type(self).__name__} of {self.num_tokens} tokens>"

    def __enter__(self):
        self.c_check()
        return self

    def __exit__(self, *exc_info):
        self.release()

    @property
    def released(self):
        """Whether the slot was given back."""
        return self.lease.buffer == NULL

    @property
    def device(self):
        """Where the token IDs lie: "cpu" or "cuda:N"."""
        return "cpu" if self.ordinal < 0 else f"cuda:{self.ordinal}"

    cpdef release(self):
        """Give the slot back; arrays made from the window stay valid. Idempotent."""
        self._view = None  # our own cache must not look like an export
        kalos_lease_end(&self.lease)

    def write(self, token_ids not None, start=0):
        """Copy token IDs into the window at `start`.

        Parameters
        ----------
        token_ids : int32 buffer of shape (N,), C-contiguous
        start : int

        Raises
        ------
        WindowReleased, InvalidArgument, InvalidType, DeviceError
        """
        self.c_check()
        if not isinstance(token_ids, np.ndarray) or token_ids.dtype != np.int32:
            raise InvalidType("token_ids must be an int32 array")
        cdef const int32_t[::1] ids = token_ids
        cdef uint64_t count = ids.shape[0], off = _whole("start", start, 0, self.num_tokens)
        if off + count > <uint64_t> self.num_tokens:
            raise InvalidArgument(
                f"token_ids must end within the window ({off} + {count} > {self.num_tokens})")
        self.settle_host()
        if count:
            memcpy(self.lease.buffer.data + off, &ids[0], count * sizeof(int32_t))
            if self.ordinal >= 0:
                cu_check(_send(self.lease.buffer, off, count), "fill a window")

    cdef object ids(self):
        """The IDs in host memory, complete; the view is made once."""
        cdef _View view
        self.c_check()
        self.settle_host()
        if self._view is None:
            view = _View.__new__(_View)
            kalos_buffer_ref(self.lease.buffer)
            view.buffer = self.lease.buffer
            view.shape[0] = self.num_tokens
            view.strides[0] = 4
            self._view = np.asarray(view)
        return self._view

    @property
    def token_ids(self):
        """The IDs, int32 of shape (L,): a read-only view that keeps the memory alive."""
        ids = self.ids()
        kalos_buffer_lend(self.lease.buffer, KALOS_CU_STREAM_LEGACY)
        return ids

    def tolist(self):
        """Copy the IDs into a list of int."""
        return self.ids().tolist()

    def __array__(self, dtype=None, copy=None):
        if copy is None and dtype is None:
            return self.token_ids
        return np.array(self.token_ids, dtype=dtype, copy=copy)

    cdef int view_of(self, kalos_dl_view* view) except -1:
        """What an export shows."""
        self.c_check()
        view.ndim = 1
        view.bits = 32
        view.shape[0] = self.num_tokens
        if self.ordinal < 0:
            view.data = self.lease.buffer.data
            view.device_type, view.device_id = KALOS_DL_CPU, 0
        else:
            view.data = <void*>self.lease.buffer.device_data
            view.device_type, view.device_id = KALOS_DL_CUDA, self.ordinal
        return 0

    def __dlpack_device__(self):
        """Say where the memory is: (1, 0), the CPU, or (2, N), CUDA device N."""
        cdef kalos_dl_view view
        self.view_of(&view)
        return (view.device_type, view.device_id)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Export the IDs without a copy, as the array API's `__dlpack__` says.

        Parameters
        ----------
        stream : int, optional
            Of the consumer, which waits for the window on it. On a CUDA device: None or 1, the
            legacy default stream; 2, the per-thread one; -1, no wait; else a stream's address. The
            CPU has none.
        max_version : tuple of (int, int), optional
            From (1, 0) on the capsule is a `dltensor_versioned` whose read-only flag is set; else a
            `dltensor`, which cannot say so: do not write through it while others hold the window.
        dl_device : tuple of (int, int), optional
            The window's own device, or (1, 0): host memory, once the window is complete.
        copy : bool, optional
            True gives memory of its own, writable.

        Raises
        ------
        WindowReleased, DeviceError, MemoryError
        BufferError
            The device is another one, or the stream is none that the device has.
        """
        cdef kalos_dl_view view
        self.view_of(&view)
        return export_dlpack(
            self.lease.buffer, &view, self.lease.buffer.data, True, stream, max_version, dl_device,
            copy)

    @property
    def __cuda_array_interface__(self):
        """The IDs on the device, read-only, for Numba, CuPy and others; no attribute on the host.

        The memory stays as it is as long as this object lives, also after the release.
        """
        cdef kalos_dl_view view
        if self.ordinal < 0:
            raise AttributeError("a window in host memory has no __cuda_array_interface__")
        self.view_of(&view)
        if self.held == NULL:
            kalos_buffer_ref(self.lease.buffer)
            self.held = self.lease.buffer
        return export_interface(self.lease.buffer, &view, True, self.work)
