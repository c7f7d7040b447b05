"""The tokens of a window in device memory, by one of two ways.

staged      the CPU gathers into the window's pinned memory, checking as it goes, and one copy
            brings it over
zero_copy   the GPU gathers out of the page cache, checks by itself, and writes device memory and
            pinned memory at once

A small window is faster staged: a copy of 32 KiB is done in 8 us where a kernel takes 13; a large
one is faster by the kernel, since the CPU's checksums are no longer in the way
(docs/performance.md has the crossing). `mixed` is zero_copy with a few runs, mostly the newest,
that are not registered yet and pass through pinned memory.
"""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kalos_ctx._device cimport (
    Device, kalos_gpu_enter, kalos_gpu_launch, kalos_gpu_leave, kalos_gpu_to_device,
)
from kalos_ctx._driver cimport cu_check, kalos_cu_handle, kalos_cu_ptr, kalos_cu_result
from kalos_ctx._lanes cimport DeviceBuffer, Lane, Lanes
from kalos_ctx._layout cimport KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT
from kalos_ctx._segment cimport SegmentSet
from kalos_ctx._session_view cimport KALOS_SPAN_MEMORY, kalos_span
from kalos_ctx._window_parts cimport WindowParts
from kalos_ctx._windows cimport Window

from kalos_ctx.errors import StoreCorrupt

cdef extern from "kalos_launch.h" nogil:
    enum:
        KALOS_GATHER_BLOCK
        KALOS_GATHER_INLINE
        KALOS_PIECE_TOKENS

    ctypedef struct kalos_piece:
        uint64_t source
        uint32_t start
        uint32_t crc
        uint16_t length
        uint16_t skip
        uint16_t copied
        uint16_t run
        uint32_t behind
        uint32_t total

    ctypedef struct kalos_run_sum:
        pass

    ctypedef struct kalos_gather_args:
        uint64_t pieces
        uint64_t out
        uint64_t host_out
        uint64_t sums
        uint64_t powers
        uint64_t counters
        uint64_t done
        uint32_t num_pieces
        uint32_t ticket
        kalos_piece* first

    ctypedef struct kalos_crc_powers:
        pass

    ctypedef struct kalos_counters:
        pass

cdef extern from "_crc_powers.h" nogil:
    void kalos_crc_powers_fill(kalos_crc_powers* powers)

cdef enum:
    LINE = 64                       # bytes; a run in pinned memory begins on one
    RUNS_MAX = 1 << 16              # runs of several pieces in one launch
    ZERO_COPY_FROM = 24576          # tokens


cdef class DeviceGatherer(Gatherer):
    """Fills windows of one device.

    Parameters
    ----------
    device : Device
    segments : RegisteredSegments or None
        None where the GPU cannot read the store's files.
    """

    def __init__(self, Device device not None, RegisteredSegments segments=None):
        cdef Lane lane
        self.device = device
        self.segments = segments
        self.lanes = Lanes(device)
        self.kernel = device.function("kalos_gather")
        self.zero_copy_from = ZERO_COPY_FROM
        self.powers = DeviceBuffer(device)
        self.powers.reserve(sizeof(kalos_crc_powers))
        lane = self.lanes.take()
        lane.host.reserve(sizeof(kalos_crc_powers))
        kalos_crc_powers_fill(<kalos_crc_powers*>lane.host.data)
        device.enter()
        code = kalos_gpu_to_device(device.h_gpu, self.powers.data, lane.host.data,
                                   sizeof(kalos_crc_powers), lane.stream)
        device.leave()
        cu_check(code, "copy constants")
        device.synchronize(lane.stream)
        self.lanes.give(lane)

    cdef int fill(self, WindowParts parts, Window window, kalos_cu_handle stream) except -1:
        cdef bint done
        self.device.check()
        if stream == NULL and self.segments is not None \
                and parts.spans.tokens >= self.zero_copy_from:
            done = self.gather_mapped(parts, window)
            if self.segments.wants():
                self.segments.serve(parts.tokens)
            if done:
                return 0
        return self.copy_staged(parts, window, stream)

    # ---- Staged ---------------------------------------------------------------------------------

    cdef int copy_staged(self, WindowParts parts, Window window, kalos_cu_handle stream) except -1:
        cdef Lane lane = None
        cdef kalos_cu_handle on = stream
        cdef kalos_cu_result code
        cdef size_t nbytes = parts.spans.tokens * 4
        window.settle_host()
        parts.gather(&parts.spans, window.c_data())
        parts.path = "staged"
        if stream == NULL:
            lane = self.lanes.take()
            on = lane.stream
        code = kalos_gpu_enter(self.device.h_gpu)
        if code == 0:
            code = window.c_order(on)
            if code == 0:
                code = kalos_gpu_to_device(
                    self.device.h_gpu, window.c_device_data(), window.c_data(), nbytes, on)
            if code == 0 and stream != NULL:
                code = window.c_mark(on)
            if code == 0 and stream == NULL:
                # A word behind the copy is seen sooner than the stream's end.
                code = self.device.h_gpu.driver.stream_write(
                    on, lane.done_mapped, lane.next_ticket(), 0)
            kalos_gpu_leave(self.device.h_gpu)
        if lane is None:
            return cu_check(code, "copy a window")
        try:
            if code:
                lane.drain()
            cu_check(code, "copy a window")
            lane.wait()
        finally:
            self.lanes.give(lane)
        window.c_done()
        return 0

    # ---- By the GPU -----------------------------------------------------------------------------

    cdef bint gather_mapped(self, WindowParts parts, Window window) except -1:
        """False where too little of the window is registered."""
        cdef kalos_gather_args args
        cdef kalos_cu_result code
        cdef int64_t staged
        cdef uint32_t bad
        cdef Lane lane = self.lanes.take()
        self.segments.begin()
        try:
            memset(&args, 0, sizeof(args))
            staged = self.list_pieces(parts, lane, &args)
            if staged < 0 or <uint64_t>staged * 2 > parts.spans.tokens:
                return False
            args.out, args.host_out = window.c_device_data(), window.c_mapped()
            args.powers, args.done = self.powers.data, lane.done_mapped
            args.counters = lane.counters.data
            args.ticket = lane.next_ticket()
            self.device.enter()
            code = window.c_order(lane.stream)
            if code == 0:
                code = kalos_gpu_launch(self.device.h_gpu, self.kernel, max(args.num_pieces, 1),
                                        KALOS_GATHER_BLOCK, 0, lane.stream, &args)
            self.device.leave()
            cu_check(code, "gather a window")
            lane.wait()
            window.c_done()
            bad = lane.done.bad
            if bad:
                raise self.damage(parts, bad - 1)
            parts.path = "mixed" if staged else "zero_copy"
            return True
        finally:
            self.segments.end()
            self.lanes.give(lane)

    cdef int64_t list_pieces(self, WindowParts parts, Lane lane, void* where) except -2:
        """Cut the spans' runs into pieces. Gives the tokens that pass through pinned memory.

        -1 where the window has too many runs of several pieces for one launch.
        """
        cdef kalos_gather_args* args = <kalos_gather_args*>where
        cdef SegmentSet tokens = parts.tokens
        cdef kalos_span* span
        cdef kalos_piece* piece
        cdef kalos_cu_ptr source
        cdef uint64_t pieces = 0, aside = 0, staged = 0
        cdef uint32_t i, at, run, skip, length, total, stop, segment, runs = 0
        cdef size_t off, place
        cdef const char* from_host
        for i in range(parts.spans.count):
            span = &parts.spans.items[i]
            run = span.length if span.flags & KALOS_SPAN_MEMORY else span.run
            pieces += (run + KALOS_PIECE_TOKENS - 1) // KALOS_PIECE_TOKENS
            aside += (<uint64_t>run * 4 + LINE - 1) // LINE * LINE
        place = 0
        if pieces > <uint64_t>KALOS_GATHER_INLINE:
            place = (pieces - KALOS_GATHER_INLINE) * sizeof(kalos_piece)
        place = (place + LINE - 1) // LINE * LINE
        lane.host.reserve(place + aside)
        args.pieces = lane.host.mapped
        pieces = 0
        for i in range(parts.spans.count):
            span = &parts.spans.items[i]
            if span.flags & KALOS_SPAN_MEMORY:
                run, skip, total, source = span.length, 0, 0, 0
                from_host = <const char*>parts.tokens_at(span)
            else:
                run, skip, total = span.run, span.skip, span.run
                if <uint64_t>skip + span.length > run:
                    raise StoreCorrupt("a turn is shorter than what stands of it in a window")
                segment = KALOS_POSITION_SEGMENT(span.pos)
                off = <size_t>KALOS_POSITION_OFFSET(span.pos) * 4
                source = self.segments.address(tokens, segment, off, <size_t>run * 4)
                if source == 0:
                    from_host = tokens.at(segment, off, <size_t>run * 4)
                    staged += run
            if source == 0:
                memcpy(lane.host.data + place, from_host, <size_t>run * 4)
                source = lane.host.mapped + place
                place += (<size_t>run * 4 + LINE - 1) // LINE * LINE
            if total > KALOS_PIECE_TOKENS and runs == RUNS_MAX:
                return -1
            stop = skip + span.length
            at = 0
            while at < run:
                length = min(run - at, <uint32_t>KALOS_PIECE_TOKENS)
                if total or at + length > skip:
                    piece = &args.first[pieces] if pieces < <uint64_t>KALOS_GATHER_INLINE \
                        else <kalos_piece*>lane.host.data + (pieces - KALOS_GATHER_INLINE)
                    piece.source = source + <uint64_t>at * 4
                    piece.crc, piece.total = span.crc, total
                    piece.length, piece.run = <uint16_t>length, <uint16_t>runs
                    piece.behind = run - at - length
                    piece.skip = <uint16_t>(min(max(skip, at) - at, length))
                    piece.copied = <uint16_t>(max(min(stop, at + length), at + piece.skip)
                                              - at - piece.skip)
                    piece.start = span.start + (max(skip, at) - skip)
                    pieces += 1
                at += length
            if total > KALOS_PIECE_TOKENS:
                runs += 1
        args.num_pieces = <uint32_t>pieces
        lane.scratch.reserve(runs * sizeof(kalos_run_sum))
        args.sums = lane.scratch.data
        return <int64_t>staged

    def damage(self, WindowParts parts, uint32_t bad):
        """The error for a piece whose run does not hold its checksum; the CPU names it better."""
        cdef uint32_t i, run, pieces = 0
        cdef kalos_span* span
        for i in range(parts.spans.count):
            span = &parts.spans.items[i]
            run = span.length if span.flags & KALOS_SPAN_MEMORY else span.run
            pieces += (run + KALOS_PIECE_TOKENS - 1) // KALOS_PIECE_TOKENS
            if bad < pieces:
                segment = KALOS_POSITION_SEGMENT(span.pos)
                off = <size_t>KALOS_POSITION_OFFSET(span.pos) * 4
                return StoreCorrupt(
                    f"{parts.tokens.label(segment)} at byte {off}: {span.run} token IDs do not "
                    "hold their checksum", parts.tokens.label(segment), off)
        raise AssertionError("a gather named a piece that it was not given")
