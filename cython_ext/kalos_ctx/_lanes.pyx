"""Lanes: streams with their pinned and device memory, lent to one call at a time.

A kernel that is done writes its ticket into a word of pinned memory, and the caller polls that:
2 to 4 us sooner than waiting for the stream (docs/facts.md).
"""

cimport cython
from libc.stdint cimport uint32_t

from kalos_ctx._device cimport (
    Device, kalos_gpu_enter, kalos_gpu_free, kalos_gpu_free_pinned, kalos_gpu_leave, kalos_gpu_pin,
    kalos_gpu_ref, kalos_gpu_unref,
)
from kalos_ctx._driver cimport KALOS_CU_NOT_READY, cu_check, kalos_cu_result

cdef extern from *:
    """
    #if defined(__x86_64__)
    #define KALOS_PAUSE() __builtin_ia32_pause()
    #else
    #define KALOS_PAUSE() __asm__ volatile("" ::: "memory")
    #endif
    #define KALOS_LOAD_ACQUIRE(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    """
    void KALOS_PAUSE() nogil
    uint32_t KALOS_LOAD_ACQUIRE(const uint32_t* p) nogil

cdef enum:
    ROOM_MIN = 1 << 16
    POLLS = 1 << 14          # between looks at the stream, which a failed kernel never ends


cdef size_t room_for(size_t nbytes) noexcept nogil:
    cdef size_t room = ROOM_MIN
    while room < nbytes:
        room *= 2
    return room


@cython.no_gc_clear
cdef class PinnedBuffer:
    """Pinned host memory that grows."""

    def __cinit__(self, Device device not None):
        self.h_gpu = device.h_gpu
        kalos_gpu_ref(self.h_gpu)

    def __dealloc__(self):
        kalos_gpu_free_pinned(self.h_gpu, self.data, self.nbytes)
        kalos_gpu_unref(self.h_gpu)

    cdef int reserve(self, size_t nbytes) except -1:
        cdef size_t room
        cdef void* data = NULL
        if nbytes <= self.nbytes:
            return 0
        room = room_for(nbytes)
        kalos_gpu_free_pinned(self.h_gpu, self.data, self.nbytes)
        self.data, self.nbytes = NULL, 0
        cu_check(kalos_gpu_pin(self.h_gpu, &data, &self.mapped, room), "pin memory for a call")
        self.data, self.nbytes = <char*>data, room
        return 0


@cython.no_gc_clear
cdef class DeviceBuffer:
    """Device memory that grows, zeroed where it is new."""

    def __cinit__(self, Device device not None):
        self.device = device
        self.h_gpu = device.h_gpu
        kalos_gpu_ref(self.h_gpu)

    def __dealloc__(self):
        kalos_gpu_free(self.h_gpu, self.data, self.nbytes)
        kalos_gpu_unref(self.h_gpu)

    cdef int reserve(self, size_t nbytes) except -1:
        cdef size_t room
        if nbytes <= self.nbytes:
            return 0
        room = room_for(nbytes)
        kalos_gpu_free(self.h_gpu, self.data, self.nbytes)
        self.data, self.nbytes = 0, 0
        self.data = self.device.alloc(room)
        self.nbytes = room
        return 0


@cython.no_gc_clear
cdef class Lane:
    """One stream and what a call needs beside it."""

    def __cinit__(self, Device device not None):
        self.device = device
        self.h_gpu = device.h_gpu
        kalos_gpu_ref(self.h_gpu)
        self.stream = device.new_stream(True)
        self.done = <kalos_done*>device.pinned(sizeof(kalos_done))
        self.done_mapped = device.mapped(self.done)
        self.host = PinnedBuffer(device)
        self.scratch = DeviceBuffer(device)
        self.counters = DeviceBuffer(device)
        self.counters.reserve(1)

    def __dealloc__(self):
        if self.stream != NULL and kalos_gpu_enter(self.h_gpu) == 0:
            self.h_gpu.driver.stream_synchronize(self.stream)
            self.h_gpu.driver.stream_destroy(self.stream)
            kalos_gpu_leave(self.h_gpu)
        kalos_gpu_free_pinned(self.h_gpu, self.done, sizeof(kalos_done))
        kalos_gpu_unref(self.h_gpu)

    cdef uint32_t next_ticket(self) noexcept:
        self.ticket += 1
        return self.ticket

    cdef int wait(self) except -1:
        cdef kalos_cu_result code = 0
        cdef uint32_t polls = 0
        if KALOS_LOAD_ACQUIRE(&self.done.ticket) == self.ticket:
            return 0
        with nogil:
            while KALOS_LOAD_ACQUIRE(&self.done.ticket) != self.ticket:
                KALOS_PAUSE()
                polls += 1
                if polls % POLLS == 0:
                    code = kalos_gpu_enter(self.h_gpu)
                    if code == 0:
                        code = self.h_gpu.driver.stream_query(self.stream)
                        kalos_gpu_leave(self.h_gpu)
                    if code == KALOS_CU_NOT_READY:
                        code = 0
                    if code:
                        break
        if code:
            self.drain()
        return cu_check(code, "finish a call")

    cdef void drain(self) noexcept:
        if kalos_gpu_enter(self.h_gpu) == 0:
            self.h_gpu.driver.stream_synchronize(self.stream)
            kalos_gpu_leave(self.h_gpu)


cdef class Lanes:
    """The lanes of one user of a device; as many as were ever in use at a time.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, Device device not None):
        self.device = device
        self.free = []

    cdef Lane take(self):
        if self.free:
            return self.free.pop()
        return Lane(self.device)

    cdef void give(self, Lane lane) noexcept:
        self.free.append(lane)
