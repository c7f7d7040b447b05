"""Windows on the host: leased from a pool, read by numpy and DLPack, given back once.

`_window_buffer.h` says who holds which memory. The two rules that callers rely on: a window's
memory is never written again while an array made from it lives, and a slot comes back at
`release()` or when the window object dies, whichever is first, whatever exports still live.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetName, PyCapsule_GetPointer, PyCapsule_New
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy, strcmp
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import numpy as np

from kalos_ctx.errors import InvalidArgument, InvalidType, PoolExhausted, WindowReleased


cdef extern from "_window_buffer.h" nogil:
    kalos_pool *kalos_pool_new(uint32_t num_slots)
    void kalos_pool_unref(kalos_pool *pool)
    uint32_t kalos_pool_num_free(kalos_pool *pool)
    int kalos_lease_begin(
        kalos_lease *lease, kalos_pool *pool, uint64_t num_tokens, uint64_t tenant,
        const timespec *deadline)
    void kalos_lease_end(kalos_lease *lease)
    kalos_buffer *kalos_buffer_new(uint64_t num_tokens)
    void kalos_buffer_ref(kalos_buffer *buffer)
    void kalos_buffer_unref(kalos_buffer *buffer)


cdef extern from "_dlpack.h" nogil:
    enum:
        KALOS_DL_CPU
        KALOS_DL_READ_ONLY
        KALOS_DL_COPIED
    void *kalos_dl_new(kalos_buffer *buffer, uint64_t num_tokens, int versioned, uint64_t flags)
    void kalos_dl_free(void *self)


cdef const char *LEGACY = b"dltensor"
cdef const char *VERSIONED = b"dltensor_versioned"
cdef const char *FORMAT = b"i"
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


cdef void _capsule_end(object capsule) noexcept:
    """A capsule that nobody took (whoever takes it renames it) frees its export."""
    cdef const char *name = PyCapsule_GetName(capsule)
    if name != NULL and (strcmp(name, LEGACY) == 0 or strcmp(name, VERSIONED) == 0):
        kalos_dl_free(PyCapsule_GetPointer(capsule, name))


cdef class WindowPool:
    """A fixed number of window slots; memory comes with use and stays warm.

    Parameters
    ----------
    slots : int
        Windows that may be alive at a time, 1 to 1,048,576.
    timeout : float
        Seconds that `acquire` waits for a slot unless told otherwise.

    Raises
    ------
    InvalidArgument, InvalidType

    Notes
    -----
    Thread-safe. Waiting releases the GIL.
    """

    def __cinit__(self, slots=64, timeout=1.0):
        self.h_pool = NULL
        self.slots = <uint32_t> _whole("slots", slots, 1, MAX_SLOTS)
        self.timeout = _seconds("timeout", timeout)
        self.h_pool = kalos_pool_new(self.slots)
        if self.h_pool == NULL:
            raise MemoryError()

    def __dealloc__(self):
        kalos_pool_unref(self.h_pool)

    @property
    def free(self):
        """Slots that are not leased."""
        return kalos_pool_num_free(self.h_pool)

    cdef int c_lease(
        self, kalos_lease *lease, uint64_t num_tokens, uint64_t tenant_key, double timeout_s
    ) except -1:
        cdef timespec deadline
        cdef double left = timeout_s, slice_s
        # The lock is held for moments, never by one who waits for the GIL: try without letting go.
        cdef int status = kalos_lease_begin(lease, self.h_pool, num_tokens, tenant_key, NULL)
        while status != 0 and status != ENOMEM and left > 0:
            slice_s = min(left, SIGNAL_SLICE_S)
            deadline = _after(slice_s)
            with nogil:
                status = kalos_lease_begin(lease, self.h_pool, num_tokens, tenant_key, &deadline)
            left -= slice_s
            if status != 0:
                PyErr_CheckSignals()
        if status == 0:
            return 0
        if status == ENOMEM:
            raise MemoryError(f"no memory for a window of {num_tokens} tokens")
        raise PoolExhausted(
            f"all {self.slots} window slots stayed in use for {timeout_s} s: release windows, or "
            f"give the pool more slots")

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
    """Token IDs of one window in host memory: int32 of shape (L,), 64-byte aligned.

    Made by `WindowPool.acquire`. Owns its slot until `release()`, the end of a `with` block, or its
    own end: a window that is dropped without a release gives its slot back silently, since the
    collector decides when that happens. Arrays made from it (`token_ids`, DLPack) keep their memory
    alive, also after the release.

    Notes
    -----
    After the release everything but `release()`, `released` and `repr()` raises `WindowReleased`.
    """

    def __cinit__(self):
        self.lease.pool = NULL
        self.lease.buffer = NULL
        self.num_tokens = 0
        self._view = None

    def __init__(self):
        raise TypeError("windows are made by WindowPool.acquire")

    def __dealloc__(self):
        self._view = None  # as in release(), so that the slot keeps its warm memory
        kalos_lease_end(&self.lease)

    cdef int c_attach(
        self, WindowPool pool, uint64_t capacity, uint64_t tenant_key, double timeout_s
    ) except -1:
        if self.lease.pool != NULL:
            raise InvalidArgument("the window has a slot already")
        return pool.c_lease(&self.lease, capacity, tenant_key, timeout_s)

    cdef int32_t *c_data(self) noexcept:
        return self.lease.buffer.data

    cdef void c_set_length(self, uint64_t num_tokens) noexcept:
        self.num_tokens = <Py_ssize_t> num_tokens

    cdef int c_check(self) except -1:
        if self.lease.buffer == NULL:
            raise WindowReleased("the window was released; use its arrays, or build it again")
        return 0

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
        WindowReleased, InvalidArgument, InvalidType
        """
        self.c_check()
        if not isinstance(token_ids, np.ndarray) or token_ids.dtype != np.int32:
            raise InvalidType("token_ids must be an int32 array")
        cdef const int32_t[::1] ids = token_ids
        cdef uint64_t count = ids.shape[0], off = _whole("start", start, 0, self.num_tokens)
        if off + count > <uint64_t> self.num_tokens:
            raise InvalidArgument(
                f"token_ids must end within the window ({off} + {count} > {self.num_tokens})")
        if count:
            memcpy(self.lease.buffer.data + off, &ids[0], count * sizeof(int32_t))

    @property
    def token_ids(self):
        """The IDs, int32 of shape (L,): a read-only view that keeps the memory alive."""
        self.c_check()
        cdef _View view
        if self._view is None:
            view = _View.__new__(_View)
            kalos_buffer_ref(self.lease.buffer)
            view.buffer = self.lease.buffer
            view.shape[0] = self.num_tokens
            view.strides[0] = 4
            self._view = np.asarray(view)
        return self._view

    def tolist(self):
        """Copy the IDs into a list of int."""
        return self.token_ids.tolist()

    def __array__(self, dtype=None, copy=None):
        if copy is None and dtype is None:
            return self.token_ids
        return np.array(self.token_ids, dtype=dtype, copy=copy)

    def __dlpack_device__(self):
        """Say where the memory is: (1, 0), the CPU."""
        self.c_check()
        return (KALOS_DL_CPU, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Export the IDs without a copy, as the array API's `__dlpack__` says.

        Parameters
        ----------
        stream : None
            The CPU has none.
        max_version : tuple of (int, int), optional
            From (1, 0) on the capsule is a `dltensor_versioned` whose read-only flag is set; else a
            `dltensor`, which cannot say so: do not write through it while others hold the window.
        dl_device : tuple of (int, int), optional
            Only the window's own device.
        copy : bool, optional
            True gives memory of its own, writable.

        Raises
        ------
        WindowReleased
        BufferError
            The device is another one, or there is a stream.
        """
        self.c_check()
        if stream is not None:
            raise BufferError("stream must be None for a window in host memory")
        if dl_device is not None and tuple(dl_device) != (KALOS_DL_CPU, 0):
            raise BufferError(f"dl_device must be (1, 0), where the window is (got {dl_device})")
        cdef int versioned = max_version is not None and tuple(max_version) >= (1, 0)
        cdef uint64_t flags = KALOS_DL_READ_ONLY
        cdef kalos_buffer *buffer = self.lease.buffer
        if copy is not None and copy:
            flags = KALOS_DL_COPIED
            buffer = kalos_buffer_new(self.num_tokens)
            if buffer == NULL:
                raise MemoryError()
            memcpy(buffer.data, self.lease.buffer.data, self.num_tokens * sizeof(int32_t))
        else:
            kalos_buffer_ref(buffer)
        cdef void *exported = kalos_dl_new(buffer, self.num_tokens, versioned, flags)
        if exported == NULL:
            raise MemoryError()
        try:
            return PyCapsule_New(exported, VERSIONED if versioned else LEGACY, _capsule_end)
        except BaseException:
            kalos_dl_free(exported)
            raise
