"""Token segments registered with the driver, so that a GPU reads them out of the page cache.

A segment is registered in pieces of 1 MiB from its beginning, and only as far as turns were asked
for: what lies before the end of a stored turn is never truncated. Registered pages are pinned, so
there is a budget, and the segment that was used longest ago goes first. Nothing is registered in
the call that needs it, which takes another way that once: `serve` does it behind the call.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._device cimport Device, kalos_gpu_enter, kalos_gpu_leave, kalos_gpu_ref, \
    kalos_gpu_unref
from kalos_ctx._driver cimport (
    KALOS_CU_REGISTER_DEVICEMAP, KALOS_CU_REGISTER_PORTABLE, KALOS_CU_REGISTER_READ_ONLY,
    kalos_cu_ptr, kalos_cu_result,
)
from kalos_ctx._segment cimport MappedFile, SegmentSet

cdef enum:
    PIECE = 1 << 20


@cython.no_gc
cdef class _Segment:
    """What is registered of one segment."""
    cdef MappedFile file            # keeps it mapped
    cdef char* base
    cdef kalos_cu_ptr mapped        # of the beginning
    cdef size_t nbytes              # registered, from the beginning
    cdef list pieces                # (offset, bytes) as they were registered
    cdef uint64_t used              # when, in calls


@cython.no_gc_clear
cdef class RegisteredSegments:
    """The registered segments of one store on one device.

    Parameters
    ----------
    device : Device
    budget : int
        Bytes that may be registered at a time.

    Notes
    -----
    Called with the GIL, which guards all fields; registering lets go of it.
    """

    def __cinit__(self, Device device not None, budget):
        self.device = device
        self.h_gpu = device.h_gpu
        kalos_gpu_ref(self.h_gpu)
        self.budget = budget
        self.refused = ""
        self.entries = []
        self.wanted = {}

    def __dealloc__(self):
        cdef _Segment entry
        if kalos_gpu_enter(self.h_gpu) == 0:
            for entry in self.entries:
                if entry is not None:
                    for off, _ in entry.pieces:
                        self.h_gpu.driver.host_unregister(entry.base + <size_t>off)
            kalos_gpu_leave(self.h_gpu)
        kalos_gpu_unref(self.h_gpu)

    cdef void begin(self) noexcept:
        self.users += 1
        self.clock += 1

    cdef void end(self) noexcept:
        self.users -= 1

    cdef kalos_cu_ptr address(self, SegmentSet tokens, uint32_t segment, size_t off, size_t n):
        cdef _Segment entry
        cdef size_t known = 0
        if tokens is self.tokens:
            if segment < <uint32_t>len(self.entries):
                entry = self.entries[segment]
                if entry is not None:
                    entry.used = self.clock
                    known = entry.nbytes
                    if off + n <= known:
                        return entry.mapped + off
        if not self.refused:
            known = max(known, <size_t>self.wanted.get(segment, 0))
            if (off + n) // PIECE * PIECE > known:
                self.wanted[segment] = (off + n) // PIECE * PIECE
        return 0

    def wants(self):
        """Whether a call asked for what is not registered."""
        return bool(self.wanted) and not self.refused

    def serve(self, SegmentSet tokens not None):
        """Register what was asked for, of the store's present segments.

        What the driver refuses is remembered in `refused`, and not tried again.
        """
        cdef uint32_t segment
        if self.users:
            return
        if tokens is not self.tokens:
            # The store went on in other files: the former ones are let go.
            for segment in range(<uint32_t>len(self.entries)):
                self.take_back(segment)
            self.entries = []
            self.tokens = tokens
        wanted, self.wanted = self.wanted, {}
        for segment, stop in wanted.items():
            if self.refused:
                return
            self.extend(segment, <size_t>stop)

    cdef int extend(self, uint32_t segment, size_t stop) except -1:
        """Register a segment as far as whole pieces before `stop` go, or all of a sealed one."""
        cdef _Segment entry
        cdef MappedFile file
        cdef size_t begin, nbytes
        cdef kalos_cu_result code
        cdef kalos_cu_ptr mapped = 0
        if segment >= self.tokens.count:
            return 0
        file = self.tokens.open(segment, False)
        if segment + 1 < self.tokens.count and file.size == self.tokens.segment_bytes:
            stop = file.size
        while <uint32_t>len(self.entries) <= segment:
            self.entries.append(None)
        entry = self.entries[segment]
        if entry is None:
            entry = _Segment.__new__(_Segment)
            entry.file, entry.base, entry.pieces = file, file.base, []
        begin = entry.nbytes
        stop = min(stop, file.size) // PIECE * PIECE
        if stop <= begin:
            return 0
        nbytes = stop - begin
        if not self.make_room(nbytes, segment):
            return 0
        self.device.check()
        code = kalos_gpu_enter(self.h_gpu)
        if code == 0:
            with nogil:
                code = self.h_gpu.driver.host_register(
                    entry.base + begin, nbytes,
                    KALOS_CU_REGISTER_PORTABLE | KALOS_CU_REGISTER_DEVICEMAP
                    | KALOS_CU_REGISTER_READ_ONLY)
            if code == 0:
                code = self.h_gpu.driver.host_pointer(&mapped, entry.base + begin, 0)
                if code == 0 and begin and mapped != entry.mapped + begin:
                    code = -1  # the pieces are not neighbours on the device: only the first serves
                if code:
                    self.h_gpu.driver.host_unregister(entry.base + begin)
            kalos_gpu_leave(self.h_gpu)
        if code:
            self.refused = f"the driver does not register token segments (error {code})"
            return 0
        if begin == 0:
            entry.mapped = mapped
        entry.pieces.append((begin, nbytes))
        entry.nbytes = stop
        entry.used = self.clock
        self.entries[segment] = entry
        self.nbytes += nbytes
        return 0

    cdef bint make_room(self, size_t n, uint32_t but) except -1:
        """Take segments back until n more bytes fit the budget; False where they cannot."""
        cdef _Segment entry
        cdef uint32_t segment, oldest = 0
        cdef bint found
        while self.nbytes + n > self.budget:
            found = False
            for segment in range(<uint32_t>len(self.entries)):
                entry = self.entries[segment]
                if entry is not None and segment != but and (
                        not found or entry.used < (<_Segment>self.entries[oldest]).used):
                    oldest, found = segment, True
            if not found:
                return False
            self.take_back(oldest)
        return True

    cdef int take_back(self, uint32_t segment) except -1:
        cdef _Segment entry = self.entries[segment]
        if entry is None:
            return 0
        self.entries[segment] = None
        self.nbytes -= entry.nbytes
        if kalos_gpu_enter(self.h_gpu) == 0:
            for off, _ in entry.pieces:
                self.h_gpu.driver.host_unregister(entry.base + <size_t>off)
            kalos_gpu_leave(self.h_gpu)
        return 0

    def registered(self):
        """{segment: bytes} of what is registered."""
        return {i: (<_Segment>entry).nbytes
                for i, entry in enumerate(self.entries) if entry is not None}
