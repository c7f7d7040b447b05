"""The log is the truth: every change is one record, and everything else can be built again from it.

A record is valid if and only if its header's checksum holds (begun with the store's salt and its
own position, so that a stale or moved record is none) and its body's does, unless it was scrubbed
by an erasure. A batch is valid if and only if all its records are. Segments begin with a header
that says where the records of the segment before end, so that a hole between two segments is seen.
"""

import os

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from kalos_ctx._layout cimport (
    KALOS_ALIGN, KALOS_ENDIAN_MARK, KALOS_FORMAT_MAJOR, KALOS_FORMAT_MINOR, KALOS_POSITION,
    KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, KALOS_RECORD_MAGIC, KALOS_RECORD_MORE,
    KALOS_RECORD_SCRUBBED, KALOS_RECORD_SYNCED, KALOS_SEGMENT_FIRST, kalos_change, kalos_crc32c,
    kalos_log_header, kalos_record,
)
from kalos_ctx._segment cimport SegmentSet

# Bytes written ahead as zeros where the durability syncs every call: a sync into written blocks is
# cheaper than one that also changes the file's size (docs/durability.md).
cdef size_t AHEAD_BYTES = 4 << 20
# A large batch costs more to write twice than its sync saves.
cdef size_t AHEAD_BATCH_MAX = 32 << 10


cdef class Log:
    """Records by position (segment << 32 | byte offset)."""

    def __init__(self, SegmentSet files, uint64_t salt, bytes uuid, uint32_t generation,
                 bint ahead):
        self.files = files
        self.salt = salt
        self.uuid = uuid
        self.generation = generation
        self.ahead = ahead
        self.end = KALOS_POSITION(0, KALOS_SEGMENT_FIRST)

    cdef const kalos_record* record(self, uint64_t lsn) except NULL:
        """The valid record at `lsn`; StoreCorrupt names file and offset otherwise."""
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(lsn)
        cdef size_t off = KALOS_POSITION_OFFSET(lsn)
        cdef const kalos_record* rec = <const kalos_record*>self.files.at(
            segment, off, sizeof(kalos_record))
        if not kalos_header_valid(self.salt, rec, lsn, ~<uint64_t>0):
            self.files.damaged(segment, off, sizeof(kalos_record),
                               "the record's header does not hold")
        rec = <const kalos_record*>self.files.at(segment, off, rec.size)
        if not kalos_body_valid(rec):
            self.files.damaged(segment, off, rec.size, "the record's checksum does not hold")
        return rec

    cdef int sections(self, uint64_t lsn, kalos_sections* out) except -1:
        """The sections of the record at `lsn`, checked. One that was erased has none and raises."""
        cdef const kalos_record* rec = self.record(lsn)
        if rec.flags & KALOS_RECORD_SCRUBBED:
            self.files.damaged(KALOS_POSITION_SEGMENT(lsn), KALOS_POSITION_OFFSET(lsn), rec.size,
                               "the record was erased")
        if not kalos_sections_of(rec, out):
            self.files.damaged(KALOS_POSITION_SEGMENT(lsn), KALOS_POSITION_OFFSET(lsn), rec.size,
                               "the record's sections do not fit it")
        return 0

    cdef int change_at(self, uint64_t lsn, kalos_change* out) except -1:
        """Copy the fixed part of the record at `lsn`, an erased one's too."""
        cdef const kalos_record* rec = self.record(lsn)
        memcpy(out, <const char*>rec + sizeof(kalos_record), sizeof(kalos_change))
        return 0

    def begin_segment(self, uint32_t segment, uint32_t prev_end):
        """Write a new segment's header; the one before is sealed, and synced where calls are."""
        cdef kalos_log_header head
        cdef bytes uuid = self.uuid
        memset(&head, 0, sizeof(head))
        memcpy(head.magic, b"KALOSLOG", 8)
        head.endian = KALOS_ENDIAN_MARK
        head.format = KALOS_FORMAT_MAJOR << 16 | KALOS_FORMAT_MINOR
        memcpy(head.uuid, <const char*>uuid, 16)
        head.salt = self.salt
        head.generation = self.generation
        head.segment = segment
        head.prev_end = prev_end
        head.crc = kalos_crc32c(0, &head, sizeof(head) - 4)
        if segment > 0:
            self.files.zero_until(segment - 1, self.files.segment_bytes)
            if self.ahead:
                self.files.sync()
        self.files.write(segment, &head, sizeof(head), 0)
        os.fsync(self.files.dirfd)

    cdef int append(self, const void* data, uint64_t size, uint64_t lsn) except -1:
        """Write a batch that was placed at `lsn`; `end` moves behind it."""
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(lsn)
        cdef size_t off = KALOS_POSITION_OFFSET(lsn)
        if self.ahead and size <= AHEAD_BATCH_MAX and off + size > self.files.size_of(segment):
            self.files.zero_until(segment, min(max(off + size, self.files.size_of(segment)
                                                   + AHEAD_BYTES),
                                               max(off + size, self.files.segment_bytes)))
        try:
            self.files.write(segment, data, size, off)
        except BaseException:
            # No fragment stays: a later, shorter batch would end in front of its rest.
            self.files.take_back(segment, off, off + size)
            raise
        self.end = KALOS_POSITION(segment, off + size)
        return 0

    cdef int rewrite(self, uint64_t lsn, const void* data, size_t n) except -1:
        """Overwrite bytes of a record that lies in the log (erasure)."""
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(lsn)
        self.files.write(segment, data, n, KALOS_POSITION_OFFSET(lsn))
        self.files.dirty_from = min(self.files.dirty_from, segment)
        return 0

    def check_header(self, uint32_t segment):
        """prev_end of a segment's header, or None where the header does not hold."""
        cdef const kalos_log_header* head
        if self.files.size_of(segment) < KALOS_SEGMENT_FIRST:
            return None
        head = <const kalos_log_header*>self.files.at(segment, 0, sizeof(kalos_log_header))
        if (head.crc != kalos_crc32c(0, head, sizeof(kalos_log_header) - 4)
                or memcmp(head.magic, b"KALOSLOG", 8) != 0 or head.salt != self.salt
                or head.generation != self.generation or head.segment != segment):
            return None
        return head.prev_end

    def scan(self, uint64_t start):
        """Walk the records from `start`.

        Yields ``(lsn, size, more, flaw)``. ``flaw`` is None for a valid record. Otherwise the walk
        ends there: ``"end"`` (zeros, or nothing), ``"cut"`` (the file ends inside the record),
        ``"gap"`` (the next segment does not join) or ``"damage"`` (bytes that are no record).
        """
        cdef uint64_t lsn = start
        cdef uint32_t segment, off
        cdef size_t room
        cdef const kalos_record* rec
        cdef uint32_t last = self.num_segments()
        # A hole among the segments ends the walk at the hole (flaw_at says "gap").
        while True:
            segment = KALOS_POSITION_SEGMENT(lsn)
            off = KALOS_POSITION_OFFSET(lsn)
            if segment >= last:
                yield lsn, 0, False, "end"
                return
            room = self.files.size_of(segment)
            room = room - off if room > off else 0
            if room >= sizeof(kalos_record):
                rec = <const kalos_record*>self.files.at(segment, off, sizeof(kalos_record))
            else:
                rec = NULL
            if rec != NULL and kalos_header_valid(self.salt, rec, lsn, room):
                rec = <const kalos_record*>self.files.at(segment, off, rec.size)
                if not kalos_body_valid(rec):
                    yield lsn, rec.size, False, "damage"
                    return
                yield lsn, rec.size, bool(rec.flags & KALOS_RECORD_MORE), None
                lsn = KALOS_POSITION(segment, off + rec.size)
                continue
            if segment + 1 < last:
                if self.check_header(segment + 1) == off:
                    lsn = KALOS_POSITION(segment + 1, KALOS_SEGMENT_FIRST)
                    continue
            yield lsn, 0, False, self.flaw_at(segment, off, room)
            return

    def flaw_at(self, uint32_t segment, uint32_t off, size_t room):
        """Why no record stands at a place: "end", "cut", "gap" or "damage"."""
        cdef const kalos_record* rec
        cdef const char* p
        cdef size_t i, n = min(room, <size_t>sizeof(kalos_record))
        if n:
            p = self.files.at(segment, off, n)
            for i in range(n):
                if p[i] != 0:
                    break
            else:
                n = 0
        if n == 0:
            return "gap" if self.files.last_present() > <long>segment else "end"
        if n < sizeof(kalos_record):
            return "cut"
        rec = <const kalos_record*>self.files.at(segment, off, n)
        if rec.magic == KALOS_RECORD_MAGIC and rec.header_crc == kalos_record_crc(self.salt, rec) \
                and rec.size > room:
            return "cut"
        return "damage"

    def num_segments(self):
        """Segments that lie in the folder, counted without a hole."""
        cdef uint32_t n = self.files.count
        while True:
            try:
                os.stat(self.files.name(n), dir_fd=self.files.dirfd, follow_symlinks=False)
            except FileNotFoundError:
                return n
            n += 1

    def any_synced_behind(self, uint64_t lsn):
        """Whether a record behind a place proves that what lies there was durable once.

        Other records may lie there too: a power loss may keep a later one of several unsynced
        writes.
        """
        cdef uint32_t first = KALOS_POSITION_SEGMENT(lsn), segment
        cdef size_t off, size
        cdef const kalos_record* rec
        for segment in self.files.present():
            if segment < first:
                continue
            off = KALOS_SEGMENT_FIRST
            if segment == first:
                off = KALOS_POSITION_OFFSET(lsn) + KALOS_ALIGN
            size = self.files.size_of(segment)
            while off + sizeof(kalos_record) <= size:
                rec = <const kalos_record*>self.files.at(segment, off, sizeof(kalos_record))
                if rec.magic == KALOS_RECORD_MAGIC and rec.flags & KALOS_RECORD_SYNCED \
                        and kalos_header_valid(self.salt, rec, KALOS_POSITION(segment, off),
                                               size - off):
                    return True
                off += KALOS_ALIGN
        return False

    def drop_tail(self, uint64_t lsn):
        """Take everything behind `lsn` out of the files, so that the next open ends there too."""
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(lsn), i
        self.end = lsn
        present = self.files.present()
        # The newest first: a crash between leaves no hole that later segments would close again.
        for i in reversed(present):
            if i <= segment:
                break
            self.forget(i)
            os.unlink(self.files.name(i), dir_fd=self.files.dirfd)
        if segment in present:
            self.files.zero_range(segment, KALOS_POSITION_OFFSET(lsn), ~<size_t>0)
        os.fsync(self.files.dirfd)

    def forget(self, uint32_t segment):
        """Close the newest segment, whose file is about to go."""
        if segment + 1 == self.files.count:
            f = self.files.files[segment]
            if f is not None:
                f.close()
            self.files.bases[segment] = NULL
            self.files.sizes[segment] = 0
            self.files.files[segment] = None
            # Numbers that were skipped, because there was a hole, are not known either.
            while self.files.files and self.files.files[self.files.count - 1] is None:
                self.files.files.pop()
                self.files.count -= 1
