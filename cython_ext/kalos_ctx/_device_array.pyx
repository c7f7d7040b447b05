"""An array in device memory that other libraries read without a copy."""

cimport cython
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from kalos_ctx._driver cimport cu_check, kalos_cu_ptr, kalos_cu_result
from kalos_ctx._exports cimport (
    KALOS_DL_CUDA, export_dlpack, export_interface, kalos_dl_view, read_back,
)
from kalos_ctx._window_buffer cimport kalos_buffer, kalos_buffer_ref, kalos_buffer_unref

import numpy as np


@cython.final
cdef class DeviceArray:
    """Integers in the memory of a CUDA device, C-contiguous, of one or two dimensions.

    A part of a batch. Other libraries take it without a copy, by `__dlpack__` or
    `__cuda_array_interface__`; `numpy()` and `numpy.asarray` copy it to the host. The memory lives
    as long as this object or an array made from it.

    Attributes
    ----------
    ndim : int
    """

    def __cinit__(self):
        self.buffer = NULL

    def __init__(self):
        raise TypeError("device arrays are parts of batches, made by assemble_batch")

    def __dealloc__(self):
        kalos_buffer_unref(self.buffer)

    cdef uint64_t count(self) noexcept:
        return <uint64_t>self.sizes[0] * (<uint64_t>self.sizes[1] if self.ndim == 2 else 1)

    cdef int view_of(self, kalos_dl_view* view) except -1:
        """What an export shows."""
        view.data = <void*><uintptr_t>self.place
        view.device_type, view.device_id = KALOS_DL_CUDA, self.buffer.gpu.ordinal
        view.ndim = self.ndim
        view.bits = self.bits
        view.shape[0], view.shape[1] = self.sizes[0], self.sizes[1]
        return 0

    @property
    def shape(self):
        """Elements along each dimension."""
        return (self.sizes[0], self.sizes[1])[:self.ndim]

    @property
    def dtype(self):
        """int32 or int64, as numpy names it."""
        return np.dtype(np.int32 if self.bits == 32 else np.int64)

    @property
    def size(self):
        """Elements."""
        return self.count()

    @property
    def nbytes(self):
        """Bytes of the elements."""
        return self.count() * (self.bits // 8)

    @property
    def device(self):
        """Where the array lies: "cuda:N"."""
        return f"cuda:{self.buffer.gpu.ordinal}"

    def __len__(self):
        return self.sizes[0]

    def __repr__(self):
        return f"<DeviceArray of shape {self.shape}, {self.dtype}, on {self.device}>"

    def numpy(self):
        """Copy the array to the host: a numpy array of the same shape and dtype.

        Raises
        ------
        DeviceError
        """
        made = np.empty(self.shape, self.dtype)
        cdef uintptr_t target = made.ctypes.data
        cdef size_t nbytes = made.nbytes
        cdef kalos_cu_result code
        with nogil:
            code = read_back(self.buffer, self.place, <void*>target, nbytes)
        cu_check(code, "copy an array to the host")
        return made

    def tolist(self):
        """Copy the array into a list of int, or of lists of int."""
        return self.numpy().tolist()

    def __array__(self, dtype=None, copy=None):
        if copy is not None and not copy:
            raise ValueError("an array on a device cannot be read by numpy without a copy")
        made = self.numpy()
        return made if dtype is None else made.astype(dtype, copy=False)

    def __dlpack_device__(self):
        """Say where the memory is: (2, N), CUDA device N."""
        return (KALOS_DL_CUDA, self.buffer.gpu.ordinal)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Export the array without a copy, writable, as the array API's `__dlpack__` says.

        Parameters
        ----------
        stream : int, optional
            Of the consumer: None or 1, the legacy default stream; 2, the per-thread one; -1; else a
            stream's address.
        max_version : tuple of (int, int), optional
            From (1, 0) on the capsule is a `dltensor_versioned`, else a `dltensor`.
        dl_device : tuple of (int, int), optional
            The array's own device, or (1, 0) for a copy on the host.
        copy : bool, optional
            True gives memory of its own.

        Raises
        ------
        DeviceError, MemoryError
        BufferError
            The device is another one, the stream is none that the device has, or `copy` is False
            for the host.
        """
        cdef kalos_dl_view view
        self.view_of(&view)
        return export_dlpack(
            self.buffer, &view, NULL, False, stream, max_version, dl_device, copy)

    @property
    def __cuda_array_interface__(self):
        """The array for Numba, CuPy and others, which keep this object."""
        cdef kalos_dl_view view
        self.view_of(&view)
        return export_interface(self.buffer, &view, False, NULL)


cdef DeviceArray device_array(
    kalos_buffer* buffer, kalos_cu_ptr place, int ndim, int64_t rows, int64_t columns, int bits
):
    cdef DeviceArray made = DeviceArray.__new__(DeviceArray)
    kalos_buffer_ref(buffer)
    made.buffer = buffer
    made.place = place
    made.ndim = ndim
    made.sizes[0], made.sizes[1] = rows, columns
    made.bits = bits
    return made
