"""One GPU, held open: its primary context, kernels, streams and memory.

The context is the device's primary one, which other libraries share; each use makes it current and
puts back what was current before. What is hot calls the driver's table through `h_gpu`, without
the GIL.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from kalos_ctx._driver cimport (
    KALOS_CU_EVENT_DISABLE_TIMING, KALOS_CU_STREAM_NON_BLOCKING, c_driver, cu_check,
    kalos_cu_handle, kalos_cu_ptr, kalos_cu_result, kalos_driver,
)

from kalos_ctx.errors import DeviceError, ForkedHandle


cdef extern from "_gpu.h" nogil:
    enum:
        KALOS_GPU_DEVICE_ALLOCATIONS
        KALOS_GPU_DEVICE_NBYTES
        KALOS_GPU_PINNED_ALLOCATIONS
        KALOS_GPU_PINNED_NBYTES
        KALOS_GPU_LAUNCHES
        KALOS_GPU_COPIES

    kalos_gpu* kalos_gpu_new(const kalos_driver* driver, int32_t ordinal, uint32_t max_modules)
    kalos_cu_result kalos_gpu_start(kalos_gpu* gpu)


@cython.final
@cython.no_gc
cdef class Device:
    """One GPU with its kernels loaded.

    Made by `Device.open`. Whatever holds memory or a stream of it keeps the context alive, also
    when this object is gone.

    Attributes
    ----------
    ordinal : int
        The driver's number of the device.
    num_multiprocessors : int

    Notes
    -----
    Thread-safe. Works in the process that opened it alone: after a fork the child gets
    `ForkedHandle`, and its copies end without a call to the driver.
    """

    def __cinit__(self):
        self.h_gpu = NULL
        self.driver = NULL
        self.stream = NULL

    def __init__(self):
        raise TypeError("devices are made by Device.open")

    def __dealloc__(self):
        kalos_gpu_unref(self.h_gpu)

    @staticmethod
    def open(int ordinal, dict cubins not None, int num_multiprocessors):
        """Retain a device's primary context and load kernels into it.

        Parameters
        ----------
        ordinal : int
        cubins : dict of str to bytes
            Compiled kernel files by name.
        num_multiprocessors : int

        Returns
        -------
        Device

        Raises
        ------
        DeviceUnavailable, DeviceError, MemoryError
        """
        cdef Device device = Device.__new__(Device)
        cdef bytes cubin
        cdef kalos_cu_result code
        cdef const char* image
        device.driver = c_driver()
        device.ordinal = ordinal
        device.num_multiprocessors = num_multiprocessors
        device.functions, device.images = {}, list(cubins.values())
        device.h_gpu = kalos_gpu_new(device.driver, ordinal, <uint32_t>len(cubins))
        if device.h_gpu == NULL:
            raise MemoryError()
        with nogil:  # the first context of a process takes a while
            code = kalos_gpu_start(device.h_gpu)
        cu_check(code, f"open device {ordinal}")
        device.stream = device.h_gpu.stream
        cdef kalos_gpu* gpu = device.h_gpu
        device.enter()
        try:
            for name, cubin in cubins.items():
                image = cubin
                code = device.driver.module_load(&gpu.modules[gpu.num_modules], image)
                cu_check(code, f"load the kernels of {name}")
                gpu.num_modules += 1
        finally:
            device.leave()
        return device

    def __repr__(self):
        return f"<Device cuda:{self.ordinal}>"

    def counts(self):
        """Count what was asked of the driver: a dict of name to number.

        `device_allocations`, `pinned_allocations`, `launches` and `copies` so far;
        `device_nbytes` and `pinned_nbytes` that are allocated now.
        """
        cdef uint64_t* counts = self.h_gpu.counts
        return {
            "device_allocations": counts[KALOS_GPU_DEVICE_ALLOCATIONS],
            "device_nbytes": counts[KALOS_GPU_DEVICE_NBYTES],
            "pinned_allocations": counts[KALOS_GPU_PINNED_ALLOCATIONS],
            "pinned_nbytes": counts[KALOS_GPU_PINNED_NBYTES],
            "launches": counts[KALOS_GPU_LAUNCHES],
            "copies": counts[KALOS_GPU_COPIES],
        }

    cdef int check(self) except -1:
        if not kalos_gpu_is_here(self.h_gpu):
            raise ForkedHandle(
                "the device was opened before this process was forked; open it again in a "
                "process that is spawned")
        return 0

    cdef int enter(self) except -1:
        self.check()
        return cu_check(kalos_gpu_enter(self.h_gpu), "make its context current")

    cdef void leave(self) noexcept:
        kalos_gpu_leave(self.h_gpu)

    cdef kalos_cu_handle function(self, name) except NULL:
        cdef kalos_cu_handle found = NULL
        cdef uint32_t i
        cdef bytes symbol
        address = self.functions.get(name)
        if address is not None:
            return <kalos_cu_handle><uintptr_t>address
        symbol = name.encode()
        self.enter()
        try:
            for i in range(self.h_gpu.num_modules):
                # Asking for what is not there is an error that tools report.
                if symbol + b"\0" in self.images[i] and self.driver.module_function(
                        &found, self.h_gpu.modules[i], symbol) == 0:
                    self.functions[name] = <uintptr_t>found
                    return found
        finally:
            self.leave()
        raise DeviceError(f"no kernel file that was loaded has {name}")

    cdef kalos_cu_handle new_stream(self, bint high) except NULL:
        cdef kalos_cu_handle stream = NULL
        cdef int least = 0, greatest = 0
        cdef kalos_cu_result code
        self.enter()
        code = self.driver.ctx_priorities(&least, &greatest)
        if code == 0:
            code = self.driver.stream_create(
                &stream, KALOS_CU_STREAM_NON_BLOCKING, greatest if high else least)
        self.leave()
        cu_check(code, "make a stream")
        return stream

    cdef void end_stream(self, kalos_cu_handle stream) noexcept:
        if stream == NULL or kalos_gpu_enter(self.h_gpu) != 0:
            return
        with nogil:
            self.driver.stream_synchronize(stream)
            self.driver.stream_destroy(stream)
        self.leave()

    cdef kalos_cu_handle new_event(self) except NULL:
        cdef kalos_cu_handle event = NULL
        cdef kalos_cu_result code
        self.enter()
        code = self.driver.event_create(&event, KALOS_CU_EVENT_DISABLE_TIMING)
        self.leave()
        cu_check(code, "make an event")
        return event

    cdef void end_event(self, kalos_cu_handle event) noexcept:
        if event != NULL and kalos_gpu_enter(self.h_gpu) == 0:
            self.driver.event_destroy(event)
            self.leave()

    cdef void* pinned(self, size_t nbytes) except NULL:
        cdef void* memory = NULL
        cdef kalos_cu_ptr mapped = 0
        cdef kalos_cu_result code
        self.check()
        with nogil:
            code = kalos_gpu_pin(self.h_gpu, &memory, &mapped, nbytes)
            if code == 0:
                memset(memory, 0, nbytes)
        cu_check(code, f"pin {nbytes} bytes of host memory")
        return memory

    cdef kalos_cu_ptr mapped(self, void* memory) except? 0:
        cdef kalos_cu_ptr address = 0
        cdef kalos_cu_result code
        self.enter()
        code = self.driver.host_pointer(&address, memory, 0)
        self.leave()
        cu_check(code, "give the address of pinned memory")
        return address

    cdef void free_pinned(self, void* memory, size_t nbytes) noexcept:
        kalos_gpu_free_pinned(self.h_gpu, memory, nbytes)

    cdef kalos_cu_ptr alloc(self, size_t nbytes) except 0:
        cdef kalos_cu_ptr address = 0
        cdef kalos_cu_result code
        self.check()
        with nogil:
            code = kalos_gpu_alloc(self.h_gpu, &address, nbytes)
        cu_check(code, f"allocate {nbytes} bytes")
        try:
            self.zero(address, nbytes, self.stream)
            self.synchronize(self.stream)
        except BaseException:
            self.free(address, nbytes)
            raise
        return address

    cdef void free(self, kalos_cu_ptr address, size_t nbytes) noexcept:
        kalos_gpu_free(self.h_gpu, address, nbytes)

    cdef int zero(self, kalos_cu_ptr address, size_t nbytes, kalos_cu_handle stream) except -1:
        cdef kalos_cu_result code
        self.enter()
        code = self.driver.fill_bytes(address, 0, nbytes, stream)
        self.leave()
        return cu_check(code, "zero memory")

    cdef int synchronize(self, kalos_cu_handle stream) except -1:
        cdef kalos_cu_result code
        self.enter()
        with nogil:
            code = self.driver.stream_synchronize(stream)
        self.leave()
        return cu_check(code, "finish its work")
