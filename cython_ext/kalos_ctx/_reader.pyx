"""Reading a store.

A reader maps what the writer wrote and follows three things: the generation word (compaction moved
to new files), the slots' versions, and sizes. It takes no lock. Everything it hands out was checked
against a checksum in the call that hands it out.
"""

import fcntl
import os
import struct
import threading
import time

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from kalos_ctx._control cimport (
    WORD_COMMITTED, WORD_GENERATION, WORD_INDEX, WORD_ROWS, Control,
)
from kalos_ctx._index cimport EntryTable, Index, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_DTYPE_FLOAT16, KALOS_ENTRY_DEAD, KALOS_ENTRY_FRAMED, KALOS_ENTRY_ORPHAN, KALOS_ENTRY_TEXT,
    KALOS_ENTRY_TTL, KALOS_ENTRY_ZERO, KALOS_HAS_GROUP, KALOS_HAS_METADATA, KALOS_HAS_TEXT,
    KALOS_IMAGE_DEAD, KALOS_IMAGE_LASTING, KALOS_IMAGE_TTL, KALOS_KIND_SEGMENTS,
    KALOS_KIND_SUMMARIES,
    KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, KALOS_RECORD_SCRUBBED, KALOS_SLOT_COLLECTION,
    KALOS_SLOT_SESSION,
    KALOS_SLOT_TENANT, kalos_crc32c, kalos_cursor, kalos_entry, kalos_image, kalos_item, kalos_row,
    kalos_state,
)
from kalos_ctx._log cimport Log, kalos_sections
from kalos_ctx._posix cimport close as c_close
from kalos_ctx._segment cimport SegmentSet
from kalos_ctx._turns cimport Passage, Stored, TokenView, Turn, ids_of

from kalos_ctx import _control
from kalos_ctx.errors import NotAStore, StoreClosed, StoreCorrupt, StoreIOError

# The numbers of cuda/kalos_layout.h that Python code needs.
SESSION, COLLECTION, TENANT = KALOS_SLOT_SESSION, KALOS_SLOT_COLLECTION, KALOS_SLOT_TENANT
KIND_SEGMENTS, KIND_SUMMARIES = KALOS_KIND_SEGMENTS, KALOS_KIND_SUMMARIES
ENTRY_DEAD, ENTRY_TTL, ENTRY_FRAMED = KALOS_ENTRY_DEAD, KALOS_ENTRY_TTL, KALOS_ENTRY_FRAMED
ENTRY_TEXT, ENTRY_ORPHAN, ENTRY_ZERO = KALOS_ENTRY_TEXT, KALOS_ENTRY_ORPHAN, KALOS_ENTRY_ZERO
ITEM_BYTES = sizeof(kalos_item)

F_OFD_GETLK = 36                    # not in the module fcntl before Python 3.13
# A reader waits so long for a writer that is opening the store.
WRITER_WAIT_S = 60.0

# Held by the one thread that follows a writer to other files.
MOVING = threading.Lock()


cdef uint64_t id_at(Index index, const EntryTable* table, uint32_t place) except? 0:
    """Passage ID of a checked entry."""
    cdef const kalos_entry* entry = table_entry(table, place)
    index.check_entry(entry, place)
    return entry.sum


cdef int64_t first_from_id(Index index, const EntryTable* table, uint64_t id, uint32_t first,
                           uint64_t step) except -1:
    """First place from `first` whose ID is not below `id`; the number of entries where all are.

    Looks `step` entries ahead, then twice as far each time, and bisects the last of these steps.
    """
    cdef uint64_t lo = first, hi = table.image.num_entries, at
    while lo < hi:
        at = min(lo + step, hi) - 1
        if id_at(index, table, <uint32_t>at) >= id:
            hi = at
            break
        lo = at + 1
        step *= 2
    while lo < hi:
        at = (lo + hi) >> 1
        if id_at(index, table, <uint32_t>at) < id:
            lo = at + 1
        else:
            hi = at
    return <int64_t>lo


cdef class StoreReader:
    """What both sides of a store share. `SessionStore` is the public face."""

    def __cinit__(self):
        self.dirfd = -1
        self.genfd = -1

    def __init__(self, str path):
        self.path = path
        try:
            self.dirfd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as e:
            raise StoreIOError(e.errno, f"cannot open the store's folder: {e.strerror}") from None
        self.follow()

    @property
    def num_vector_rows(self):
        """Rows of the vector file that a scan may look at, dead ones included."""
        return self.control.word(WORD_ROWS)

    def follow(self):
        """Open control file and generation, once the writer has them in order.

        A writer that is opening may just be building the index or moving to another generation: as
        long as one holds the lock, wait for it.
        """
        cdef double until = time.monotonic() + WRITER_WAIT_S, pause = 0.0005
        while True:
            try:
                with MOVING:
                    # Another thread may have followed meanwhile.
                    if self.control is None or self.moved():
                        self.open_as_it_is()
                return
            except (StoreCorrupt, StoreIOError) as e:
                if isinstance(e, NotAStore) or time.monotonic() > until or not self.writer_lives():
                    raise
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    cdef bint moved(self) noexcept:
        """Whether the writer went on in other files than those that are open."""
        return (self.index is None or self.control.raw_word(WORD_GENERATION) != self.seen_generation
                or self.control.raw_word(WORD_INDEX) != self.seen_index)

    def open_as_it_is(self):
        """Open control file and generation, or raise."""
        if self.control is None:
            self.control = Control(self.dirfd, False)
        self.control.read_state()
        generation = self.control.raw_word(WORD_GENERATION)
        index = self.control.raw_word(WORD_INDEX)
        self.control.word(WORD_INDEX)
        self.open_generation(self.control.word(WORD_GENERATION), False)
        self.seen_generation, self.seen_index = generation, index

    def writer_lives(self):
        """Whether some process holds the writer's lock."""
        try:
            fd = os.open("lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
                         dir_fd=self.dirfd)
        except OSError:
            return False
        try:
            asked = struct.pack("hhlli4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = fcntl.fcntl(fd, F_OFD_GETLK, asked)
        except OSError:
            return False
        finally:
            os.close(fd)
        return struct.unpack_from("h", found)[0] != fcntl.F_UNLCK

    def __dealloc__(self):
        # At the interpreter's end modules may be gone: no Python here.
        if self.dirfd >= 0:
            c_close(self.dirfd)
        if self.genfd >= 0:
            c_close(self.genfd)

    cdef int open_generation(self, uint32_t generation, bint create) except -1:
        """Open the files of one generation in place of those open now."""
        cdef str folder = f"gen-{generation:06d}"
        cdef bytes uuid = (<char*>self.control.head.uuid)[:16]
        cdef uint64_t salt = self.control.head.salt
        cdef size_t segment_bytes = self.control.head.segment_bytes
        cdef int old, fd
        cdef Log log
        cdef Index index
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW,
                         dir_fd=self.dirfd)
        except OSError as e:
            raise StoreIOError(e.errno, f"cannot open {folder}: {e.strerror}") from None
        try:
            log = Log(SegmentSet(fd, folder, "log", segment_bytes, self.writable), salt, uuid,
                      generation, False)
            tokens = SegmentSet(fd, folder, "tok", segment_bytes, self.writable)
            vectors = SegmentSet(fd, folder, "vec", segment_bytes, self.writable)
            index = Index(fd, folder, salt, self.writable, create)
            if not self.writable:
                self.check_index(index, generation)
        except BaseException:
            os.close(fd)
            raise
        # All at once: no other thread runs before the last of these, and each sees one generation.
        old, self.genfd, self.generation = self.genfd, fd, generation
        self.log, self.tokens, self.vectors, self.index = log, tokens, vectors, index
        self.set_vector_layout()
        if old >= 0:
            os.close(old)
        return 0

    cdef int set_vector_layout(self) except -1:
        """Row stride and rows a segment, from the dimension (0 while no vector was stored)."""
        cdef uint32_t dim = self.control.state.vector_dim
        cdef uint32_t size = 2 if self.control.head.vector_dtype == KALOS_DTYPE_FLOAT16 else 4
        self.row_stride = (dim * size + 15) // 16 * 16
        self.rows_per_segment = 0
        if dim:
            self.rows_per_segment = <uint32_t>(
                self.control.head.segment_bytes // self.row_stride // 64 * 64)
            if self.rows_per_segment == 0:
                raise StoreCorrupt(
                    f"the control file's vector_dim, {dim}, does not fit its segments", "control",
                    0)
        return 0

    def check_index(self, Index index, uint32_t generation):
        """Raise where the index is not this store's, or cannot be trusted without the log.

        It can where its writer closed in order, and where the writer runs or was killed on this
        boot: then all that it wrote is in the page cache. After a power loss, or in a copy of a
        running store, its pages may be of different ages.
        """
        cdef const kalos_state* state = &self.control.state
        cdef bytes boot = _control.boot_id()
        what = "is cut or does not belong to this store"
        if index.matches((<char*>self.control.head.uuid)[:16], generation) \
                and index.reaches((<const char*>&state.cursor)[:sizeof(kalos_cursor)]):
            what = "was not brought up to its log after a crash"
            original = index.is_original()
            if index.epoch == state.epoch and (state.clean or original):
                return
            if original and any(boot) and memcmp(state.boot_id, <const char*>boot, 16) == 0 \
                    and index.epoch in (state.epoch | 1, (state.epoch + 2) | 1):
                return
        raise StoreCorrupt(
            f"{index.folder}/index {what}; open the store for writing once, which builds it again",
            f"{index.folder}/index", 0)

    def close(self):
        """Close all files. Arrays that lie in them stay valid."""
        if self.closed:
            return
        self.closed = True
        for part in (self.log.files, self.tokens, self.vectors, self.index, self.control):
            part.close()

    cdef int enter(self) except -1:
        """Called first by every public call: closed? moved to another generation?"""
        if self.closed:
            raise StoreClosed("the store is closed")
        if not self.writable:
            if self.moved():
                self.follow()
            elif self.row_stride == 0:
                self.control.read_state()
                self.set_vector_layout()
        return 0

    cdef uint64_t find(self, uint32_t kind, bytes tenant, bytes name, kalos_image* out) except? 0:
        """Arena offset of a living slot and its image, 0 for none."""
        cdef uint32_t bucket
        return self.index.find_slot(self.log, kind, tenant, name, out, &bucket)

    cdef const int32_t* token_run(self, uint64_t pos, uint32_t n, uint32_t crc) except? NULL:
        """n token IDs where they lie, checked; NULL for none."""
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(pos)
        cdef size_t off = <size_t>KALOS_POSITION_OFFSET(pos) * 4
        cdef const char* p
        if n == 0:
            return NULL
        p = self.tokens.at(segment, off, <size_t>n * 4)
        if kalos_crc32c(0, p, <size_t>n * 4) != crc:
            self.tokens.damaged(segment, off, <size_t>n * 4,
                                f"{n} token IDs do not hold their checksum")
        return <const int32_t*>p

    cdef TokenView view_of(self, const kalos_entry* entry):
        cdef TokenView view = TokenView.__new__(TokenView)
        view.stride = 4
        view.length = entry.num_tokens
        view.data = self.token_run(entry.tokens_pos, entry.num_tokens, entry.token_crc)
        if entry.num_tokens:
            view.file = self.tokens.open(KALOS_POSITION_SEGMENT(entry.tokens_pos), False)
        return view

    cdef int compare(self, const kalos_entry* entry, const kalos_sections* s) except -1:
        """Raise where an entry's record is not about it."""
        if s.change.entry.num_tokens != entry.num_tokens \
                or s.change.entry.token_crc != entry.token_crc:
            self.index.damage(<const char*>entry - self.index.arena.base,
                              "an entry is not what its record says")
        return 0

    cdef int read_common(self, Stored out, const kalos_entry* entry, kalos_sections* s) except -1:
        """Find a checked entry's record and read what turns and passages share."""
        self.log.sections(entry.lsn, s)
        self.compare(entry, s)
        out.created_at = s.change.created_at
        out.view = self.view_of(entry)
        if s.change.present & KALOS_HAS_TEXT:
            out.raw_text = s.text[:s.change.text_len]
        if s.change.present & KALOS_HAS_METADATA:
            out.raw_metadata = s.metadata[:s.change.metadata_len]
        return 0

    cdef Turn read_turn(self, const kalos_entry* entry):
        """The turn of a checked entry."""
        cdef kalos_sections s
        cdef Turn turn = Turn.__new__(Turn)
        self.read_common(turn, entry, &s)
        turn.seq = entry.seq
        turn.role_code = entry.role
        if s.change.present & KALOS_HAS_GROUP:
            turn.raw_group = s.group[:s.change.group_len]
        return turn

    cdef Passage read_passage(self, const kalos_entry* entry):
        """The passage of a checked entry, its vector checked too."""
        cdef kalos_sections s
        cdef Passage p = Passage.__new__(Passage)
        self.read_common(p, entry, &s)
        p.id = entry.sum
        p.half = self.control.head.vector_dtype == KALOS_DTYPE_FLOAT16
        p.raw_vector = self.row_bytes(entry.vector_row - 1)
        return p

    def row_bytes(self, uint32_t row):
        """The stored bytes of a living vector row, checked."""
        cdef kalos_row info
        if self.index.check_row(row, &info):
            self.index.damage(row // 8, "a living entry's row is dead", "dead")
        return self.row_at(row, info.crc)

    def row_at(self, uint32_t row, uint32_t crc):
        """The stored bytes of a vector row, compared with a checksum."""
        cdef uint32_t segment = row // self.rows_per_segment
        cdef size_t off = <size_t>(row % self.rows_per_segment) * self.row_stride
        cdef uint32_t n = self.control.state.vector_dim * (
            2 if self.control.head.vector_dtype == KALOS_DTYPE_FLOAT16 else 4)
        cdef const char* p = self.vectors.at(segment, off, n)
        if kalos_crc32c(0, p, n) != crc:
            self.vectors.damaged(segment, off, n, "a vector does not hold its checksum")
        return p[:n]

    # ---- What SessionStore asks ------------------------------------------------------------------

    def check_open(self):
        """Raise StoreClosed after `close`; a reader follows the writer to another generation."""
        self.enter()

    def was_left(self):
        """Whether the writer went on in other files than those open here; the next call follows.

        Places in an index hold for its files alone: what several calls read together is then read
        again.
        """
        return not self.writable and self.moved()

    def slot_state(self, uint32_t kind, bytes tenant, bytes name):
        """What the store knows of a slot, as a dict; None for an unknown one."""
        cdef kalos_image image
        cdef uint64_t slot_off
        self.enter()
        slot_off = self.find(kind, tenant, name, &image)
        if slot_off == 0:
            return None
        return {
            "slot_off": slot_off, "count": image.num_entries, "sum": image.sum,
            "expires_at": image.expires_at if image.flags & KALOS_IMAGE_TTL
            and not image.flags & KALOS_IMAGE_LASTING else None,
            "ttl": bool(image.flags & KALOS_IMAGE_TTL), "segments_lsn": image.segments_lsn,
            "summaries_lsn": image.summaries_lsn, "epoch": image.epoch,
            "last_assistant": image.last_assistant, "next_id": image.next_id, "flags": image.flags,
        }

    def turns(self, bytes tenant, bytes name, object start, object stop, double now,
              uint32_t kind=1):
        """Living turns with start <= seq < stop (rules of slices), or None for an unknown session.

        All are of one moment: where a rollback or an erasure came between, they are read again.
        """
        cdef kalos_image before
        cdef uint64_t slot_off
        cdef list out
        while True:
            self.enter()
            slot_off = self.find(kind, tenant, name, &before)
            if slot_off == 0:
                return None
            try:
                out = self.turns_of(slot_off, start, stop, now)
            except (StoreCorrupt, StoreIOError):
                # An erasure or a rollback came between, or a compaction took the files away.
                if self.moved_on(slot_off, &before):
                    continue
                raise
            if not self.moved_on(slot_off, &before):
                return out

    cdef bint moved_on(self, uint64_t slot_off, const kalos_image* before) except -1:
        """Whether entries that could be read when `before` was loaded have changed or gone."""
        cdef kalos_image after
        if not self.writable and self.moved():
            return True
        self.index.read_image(slot_off, &after)
        return after.epoch != before.epoch or after.name_lsn != before.name_lsn

    cdef list turns_of(self, uint64_t slot_off, object start, object stop, double now):
        """The living turns of a slot, as of now."""
        cdef EntryTable table
        cdef const kalos_entry* entry
        cdef uint32_t seq
        cdef list out = []
        self.index.open_table(slot_off, &table)
        try:
            first, last, _ = slice(start, stop).indices(table.image.num_entries)
            for seq in range(first, max(first, last)):
                entry = table_entry(&table, seq)
                self.index.check_entry(entry, seq)
                if entry.flags & KALOS_ENTRY_DEAD:
                    continue
                if table.image.flags & KALOS_IMAGE_TTL and self.is_expired(entry, now):
                    continue
                out.append(self.read_turn(entry))
        finally:
            table_clear(&table)
        return out

    cdef bint is_expired(self, const kalos_entry* entry, double now) except -1:
        """Whether a turn with a time to live has outlived it."""
        cdef kalos_sections s
        if not entry.flags & KALOS_ENTRY_TTL:
            return False
        self.log.sections(entry.lsn, &s)
        return s.change.expires_at <= now

    def table_bytes(self, uint64_t lsn):
        """The table section of the record at a position, and the record before it."""
        cdef kalos_sections s
        self.log.sections(lsn, &s)
        return s.table[:s.change.table_len], s.change.prev_lsn

    def name_of(self, uint64_t lsn):
        """(tenant, name) of the slot whose first record lies at a position."""
        cdef kalos_sections s
        self.log.sections(lsn, &s)
        return s.tenant[:s.change.tenant_len], s.name[:s.change.name_len]

    def slots(self, uint32_t first, uint32_t kind):
        """Yield (slot ID, slot offset, tenant, name, count, expires_at or None) of living slots."""
        cdef kalos_image image
        cdef uint32_t slot_id = first
        cdef uint64_t slot_off
        while slot_id < self.index.num_slots:
            slot_off = self.index.slot_of(slot_id)
            self.index.read_image(slot_off, &image)
            if image.kind == kind and not image.flags & KALOS_IMAGE_DEAD:
                tenant, name = self.name_of(image.name_lsn)
                expires = image.expires_at if image.flags & KALOS_IMAGE_TTL \
                    and not image.flags & KALOS_IMAGE_LASTING else None
                yield slot_id, slot_off, tenant, name, image.num_entries, expires
            slot_id += 1

    def entry_columns(self, uint64_t slot_off, uint32_t start):
        """Columns of a slot's entries from `start`, as numpy arrays of one length.

        Returns (ids uint64, rows uint32 (row + 1), lsns uint64, flags uint8, seqs uint32, epoch).
        For a collection `ids` are passage IDs.
        """
        cdef EntryTable table
        cdef uint32_t n
        self.index.open_table(slot_off, &table)
        try:
            n = table.image.num_entries
            count = max(0, <long>n - <long>start)
            ids = np.empty(count, np.uint64)
            rows = np.empty(count, np.uint32)
            lsns = np.empty(count, np.uint64)
            flags = np.empty(count, np.uint8)
            self.fill_columns(&table, start, ids, rows, lsns, flags)
            return ids, rows, lsns, flags, np.arange(start, start + count, dtype=np.uint32), \
                table.image.epoch
        finally:
            table_clear(&table)

    cdef int fill_columns(self, EntryTable* table, uint32_t start, uint64_t[::1] ids,
                          uint32_t[::1] rows, uint64_t[::1] lsns, uint8_t[::1] flags) except -1:
        cdef const kalos_entry* entry
        cdef uint32_t i
        for i in range(<uint32_t>ids.shape[0]):
            entry = table_entry(table, start + i)
            self.index.check_entry(entry, start + i)
            ids[i] = entry.sum
            rows[i] = entry.vector_row
            lsns[i] = entry.lsn
            flags[i] = entry.flags
        return 0

    def units(self, bytes tenant, bytes name):
        """(first turn of the unit it closed, whether it is an orphan) of each turn of a session."""
        cdef kalos_image image
        cdef EntryTable table
        cdef const kalos_entry* entry
        cdef uint32_t seq
        cdef list out = []
        self.enter()
        slot_off = self.find(KALOS_SLOT_SESSION, tenant, name, &image)
        if slot_off == 0:
            return out
        self.index.open_table(slot_off, &table)
        try:
            for seq in range(table.image.num_entries):
                entry = table_entry(&table, seq)
                self.index.check_entry(entry, seq)
                out.append((entry.unit_first, bool(entry.flags & KALOS_ENTRY_ORPHAN)))
        finally:
            table_clear(&table)
        return out

    def passage_places(self, uint64_t slot_off, const uint64_t[::1] wanted not None):
        """Place in its collection of each passage ID, -1 for none, and whether it was deleted.

        Entries ascend by ID, so each is bisected for; where the IDs asked for ascend too, among the
        entries behind the last one, near ones first.
        """
        cdef EntryTable table
        cdef const kalos_entry* entry
        cdef uint32_t place = 0
        cdef uint64_t step
        cdef Py_ssize_t i
        cdef list places = [], dead = []
        self.index.open_table(slot_off, &table)
        try:
            for i in range(wanted.shape[0]):
                step = 1
                if i == 0 or wanted[i] <= wanted[i - 1]:
                    place, step = 0, table.image.num_entries
                place = <uint32_t>first_from_id(self.index, &table, wanted[i], place, step)
                entry = NULL
                if place < table.image.num_entries:
                    entry = table_entry(&table, place)
                    self.index.check_entry(entry, place)
                if entry == NULL or entry.sum != wanted[i]:
                    places.append(-1)
                    dead.append(False)
                    continue
                places.append(place)
                dead.append(bool(entry.flags & KALOS_ENTRY_DEAD))
                place += 1
            return places, dead
        finally:
            table_clear(&table)

    def passage_at(self, uint64_t slot_off, uint32_t seq):
        """The passage in a place of its collection."""
        cdef EntryTable table
        cdef const kalos_entry* entry
        self.index.open_table(slot_off, &table)
        try:
            entry = table_entry(&table, seq)
            self.index.check_entry(entry, seq)
            return self.read_passage(entry)
        finally:
            table_clear(&table)

    def metadata_at(self, uint64_t lsn):
        """Metadata bytes of the record at a position; None where there are none, or no more."""
        cdef kalos_sections s
        if self.log.record(lsn).flags & KALOS_RECORD_SCRUBBED:
            return None
        self.log.sections(lsn, &s)
        return s.metadata[:s.change.metadata_len] if s.change.present & KALOS_HAS_METADATA else None

    def view_at(self, uint64_t pos, uint32_t n, uint32_t crc):
        """int32 array over n stored IDs, checked, zero-copy."""
        cdef kalos_entry entry
        entry.tokens_pos = pos
        entry.num_tokens = n
        entry.token_crc = crc
        return ids_of(self.view_of(&entry))

    @property
    def committed(self):
        """End of the last whole batch that readers may see."""
        return self.control.word(WORD_COMMITTED)
