"""Device memory that grows in place.

An array is a range of reserved addresses, filled from its beginning with chunks of physical memory
as it grows. Pointers into it stay valid, nothing is copied, and the most that lies unused is one
chunk. Every chunk can be handed to another process as a file descriptor.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

import os

from kalos_ctx._device cimport Device, kalos_gpu, kalos_gpu_enter, kalos_gpu_leave
from kalos_ctx._driver cimport (
    KALOS_CU_MEM_DEVICE, KALOS_CU_MEM_FILE_DESCRIPTOR, KALOS_CU_MEM_PINNED,
    KALOS_CU_MEM_READ_WRITE, cu_check, kalos_cu_handle, kalos_cu_mem_access, kalos_cu_ptr,
    kalos_cu_result, kalos_driver,
)

from kalos_ctx.errors import DeviceUnavailable

cdef extern from "_gpu.h" nogil:
    enum:
        KALOS_GPU_DEVICE_ALLOCATIONS
        KALOS_GPU_DEVICE_NBYTES
    void kalos_gpu_count(kalos_gpu* gpu, int what, uint64_t by)

cdef enum:
    # CUdevice_attribute
    VIRTUAL_MEMORY_SUPPORTED = 102
    FILE_DESCRIPTOR_SUPPORTED = 103


cdef size_t round_up(size_t n, size_t to) noexcept nogil:
    return (n + to - 1) // to * to


cdef kalos_cu_result map_chunk(
    GrowingArray array, kalos_chunk* chunk, kalos_cu_handle stream,
) noexcept nogil:
    """Put a chunk of zeros behind what is there. On an error nothing is left of it."""
    cdef const kalos_driver* driver = array.driver
    cdef kalos_cu_ptr end = array.base + array.nbytes
    cdef kalos_cu_mem_access access
    cdef kalos_cu_result code
    access.location = array.kind.location
    access.flags = KALOS_CU_MEM_READ_WRITE
    code = driver.vm_create(&chunk.allocation, chunk.nbytes, &array.kind, 0)
    if code:
        return code
    code = driver.vm_map(end, chunk.nbytes, 0, chunk.allocation, 0)
    if code == 0:
        code = driver.vm_access(end, chunk.nbytes, &access, 1)
        # What another process left in the memory must be gone before anybody can know of it.
        if code == 0:
            code = driver.fill_bytes(end, 0, chunk.nbytes, stream)
        if code == 0:
            code = driver.stream_synchronize(stream)
        if code:
            driver.vm_unmap(end, chunk.nbytes)
    if code:
        driver.vm_release(chunk.allocation)
    return code


# Outside of the cycle collector, which would clear `device` before `__dealloc__` needs it. A device
# is part of no cycle.
@cython.final
@cython.no_gc
cdef class GrowingArray:
    """Device memory whose address never changes. `DeviceRows` makes and locks it.

    Attributes
    ----------
    base : int
        Device address of the first byte.
    nbytes : int
        Bytes that are there; zeros where nobody wrote.
    num_chunks : int
    range_nbytes : int
        Bytes that addresses are reserved for.
    """

    def __cinit__(self):
        self.base = 0
        self.chunks = NULL

    def __init__(self):
        raise TypeError("a GrowingArray is made by DeviceRows")

    def __dealloc__(self):
        if self.base and kalos_gpu_enter(self.device.h_gpu) == 0:
            self.cut(0)
            self.driver.vm_free(self.base, self.range_nbytes)
            kalos_gpu_leave(self.device.h_gpu)
        free(self.chunks)

    cdef int grow(self, size_t nbytes, kalos_cu_handle stream) except -1:
        """Make at least `nbytes` be there, the new ones zero; waits for `stream`.

        A chunk is as long as what is there already, up to `chunk_nbytes`, so that a small array
        stays small; what one call asks for is one chunk. On an error the array stays as it was.

        Raises
        ------
        MemoryError, DeviceError
        """
        cdef size_t step
        cdef kalos_chunk* chunk
        cdef kalos_cu_result code
        cdef void* moved
        if nbytes <= self.nbytes:
            return 0
        if nbytes > self.range_nbytes:
            raise MemoryError(
                f"the GPU's array may have {self.range_nbytes} bytes ({nbytes} are needed)")
        step = max(nbytes - self.nbytes, min(self.chunk_nbytes, self.nbytes))
        step = min(round_up(step, self.granularity), self.range_nbytes - self.nbytes)
        if self.num_chunks == self.room:
            moved = realloc(self.chunks, (self.room * 2 + 8) * sizeof(kalos_chunk))
            if moved == NULL:
                raise MemoryError()
            self.chunks = <kalos_chunk*>moved
            self.room = self.room * 2 + 8
        chunk = &self.chunks[self.num_chunks]
        chunk.nbytes = step
        self.device.enter()
        try:
            with nogil:
                code = map_chunk(self, chunk, stream)
        finally:
            self.device.leave()
        if code:
            cu_check(code, f"hold {step} more bytes of vectors")
        self.num_chunks += 1
        self.nbytes += step
        kalos_gpu_count(self.device.h_gpu, KALOS_GPU_DEVICE_ALLOCATIONS, 1)
        kalos_gpu_count(self.device.h_gpu, KALOS_GPU_DEVICE_NBYTES, step)
        return 0

    cdef void cut(self, uint32_t num_chunks) noexcept:
        """Give all but the first chunks back; nothing may read them. Call in the context."""
        cdef kalos_chunk* chunk
        while self.num_chunks > num_chunks:
            self.num_chunks -= 1
            chunk = &self.chunks[self.num_chunks]
            self.nbytes -= chunk.nbytes
            self.driver.vm_unmap(self.base + self.nbytes, chunk.nbytes)
            self.driver.vm_release(chunk.allocation)
            kalos_gpu_count(self.device.h_gpu, KALOS_GPU_DEVICE_NBYTES, 0 - <uint64_t>chunk.nbytes)

    def descriptors(self, uint32_t first=0):
        """Hand the chunks from number `first` on to another process.

        Returns
        -------
        list of (int, int)
            Of each chunk a POSIX file descriptor, which the caller closes, and its bytes; together
            they follow the first `first` chunks without gaps.

        Raises
        ------
        DeviceUnavailable
            The device cannot hand memory to another process.
        DeviceError
        """
        cdef uint32_t i
        cdef int fd
        if not self.kind.handle_types:
            raise DeviceUnavailable("the GPU cannot hand its memory to another process")
        out = []
        self.device.enter()
        try:
            for i in range(first, self.num_chunks):
                cu_check(self.driver.vm_export(
                    &fd, self.chunks[i].allocation, KALOS_CU_MEM_FILE_DESCRIPTOR, 0),
                    "hand memory to another process")
                out.append((fd, self.chunks[i].nbytes))
        except BaseException:
            for opened, _ in out:
                os.close(opened)
            raise
        finally:
            self.device.leave()
        return out


cdef GrowingArray growing_array(Device device, size_t range_nbytes, size_t chunk_nbytes):
    """An array of 0 bytes that may grow to `range_nbytes`, rounded up to the granularity.

    Raises
    ------
    DeviceUnavailable
        The device has no virtual memory management.
    MemoryError, DeviceError
    """
    cdef GrowingArray self = GrowingArray.__new__(GrowingArray)
    cdef kalos_cu_ptr base = 0
    self.device = device
    self.driver = device.driver
    memset(&self.kind, 0, sizeof(self.kind))
    self.kind.type = KALOS_CU_MEM_PINNED
    self.kind.location.type = KALOS_CU_MEM_DEVICE
    self.kind.location.id = device.ordinal
    if not attribute(self, VIRTUAL_MEMORY_SUPPORTED):
        raise DeviceUnavailable(
            "the GPU has no virtual memory management, which vectors on it need "
            "(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0)")
    if attribute(self, FILE_DESCRIPTOR_SUPPORTED):
        self.kind.handle_types = KALOS_CU_MEM_FILE_DESCRIPTOR
    device.enter()
    try:
        cu_check(self.driver.vm_granularity(&self.granularity, &self.kind, 0),
                 "tell how it divides memory")
        self.chunk_nbytes = round_up(max(chunk_nbytes, <size_t>1), self.granularity)
        self.range_nbytes = round_up(max(range_nbytes, <size_t>1), self.granularity)
        cu_check(self.driver.vm_reserve(&base, self.range_nbytes, 0, 0, 0),
                 f"reserve {self.range_nbytes} bytes of addresses")
    finally:
        device.leave()
    self.base = base
    return self


cdef int attribute(GrowingArray self, int which) except -1:
    cdef int value = 0, handle = 0
    cu_check(self.driver.device_get(&handle, self.device.ordinal), "be opened")
    cu_check(self.driver.device_attribute(&value, which, handle), "tell its attributes")
    return value
