"""Reading a store.

A reader maps what the writer wrote and follows three things: the generation word (compaction moved to new
files), the slots' versions, and sizes. It takes no lock. Everything it hands out was checked against a
checksum in the call that hands it out.
"""

import json
import os
import threading

import numpy as np

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_WRITABLE
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from kalos_ctx._control cimport WORD_COMMITTED, WORD_GENERATION, Control
from kalos_ctx._index cimport EntryTable, Index, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_DTYPE_FLOAT16, KALOS_ENTRY_DEAD, KALOS_ENTRY_FRAMED, KALOS_ENTRY_ORPHAN, KALOS_ENTRY_TEXT,
    KALOS_ENTRY_TTL, KALOS_ENTRY_ZERO, KALOS_HAS_GROUP, KALOS_HAS_METADATA, KALOS_HAS_TEXT,
    KALOS_IMAGE_DEAD, KALOS_IMAGE_LASTING, KALOS_IMAGE_TTL, KALOS_KIND_SEGMENTS, KALOS_KIND_SUMMARIES,
    KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, KALOS_SLOT_COLLECTION, KALOS_SLOT_SESSION,
    KALOS_SLOT_TENANT, kalos_crc32c, kalos_entry, kalos_image, kalos_item, kalos_row,
)
from kalos_ctx._log cimport Log, kalos_sections, kalos_sections_of
from kalos_ctx._segment cimport MappedFile, SegmentSet

from kalos_ctx.errors import StoreClosed, StoreCorrupt

# The numbers of cuda/kalos_layout.h that Python code needs.
SESSION, COLLECTION, TENANT = KALOS_SLOT_SESSION, KALOS_SLOT_COLLECTION, KALOS_SLOT_TENANT
KIND_SEGMENTS, KIND_SUMMARIES = KALOS_KIND_SEGMENTS, KALOS_KIND_SUMMARIES
ENTRY_DEAD, ENTRY_TTL, ENTRY_FRAMED = KALOS_ENTRY_DEAD, KALOS_ENTRY_TTL, KALOS_ENTRY_FRAMED
ENTRY_TEXT, ENTRY_ORPHAN, ENTRY_ZERO = KALOS_ENTRY_TEXT, KALOS_ENTRY_ORPHAN, KALOS_ENTRY_ZERO
ITEM_BYTES = sizeof(kalos_item)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
cdef tuple ROLE_NAMES = ROLES
cdef char* INT32_FORMAT = b"i"
# Held by the one thread that follows a writer to another generation.
MOVING = threading.Lock()


cdef class TokenView:
    """Read-only int32 buffer over a mapped file, which it keeps mapped."""

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if flags & PyBUF_WRITABLE:
            raise BufferError("stored token IDs are read-only")
        buffer.buf = <void*>self.data
        buffer.obj = self
        buffer.len = self.length * 4
        buffer.readonly = 1
        buffer.itemsize = 4
        buffer.format = NULL
        if flags & PyBUF_FORMAT:
            buffer.format = INT32_FORMAT
        buffer.ndim = 1
        buffer.shape = &self.length
        buffer.strides = &self.stride
        buffer.suboffsets = NULL
        buffer.internal = NULL


cdef object ids_of(TokenView view):
    if view.length == 0:
        empty = np.empty(0, np.int32)
        empty.flags.writeable = False
        return empty
    return np.frombuffer(view, np.int32)


cdef class Turn:
    """One stored turn.

    Attributes
    ----------
    seq : int
        Sequence number in its session, from 0.
    role : str
    token_ids : int32 array of shape (num_tokens,)
        Read-only and zero-copy: it lies in the store's file. Framing included.
    text : str or None
        The original content, where it was given as text.
    group : str, int or None
    created_at : float
        Seconds as `time.time()`.
    metadata : dict or None
    num_tokens : int
    """

    @property
    def role(self):
        """Role of the turn."""
        return ROLE_NAMES[self.role_code]

    @property
    def token_ids(self):
        """int32 IDs of shape (num_tokens,), read-only, framing included."""
        if self.ids is None:
            self.ids = ids_of(self.view)
        return self.ids

    @property
    def num_tokens(self):
        """Length in tokens, framing included."""
        return self.view.length

    @property
    def text(self):
        """The original content, or None."""
        return None if self.raw_text is None else self.raw_text.decode()

    @property
    def metadata(self):
        """The metadata as it was given, or None."""
        return None if self.raw_metadata is None else json.loads(self.raw_metadata)

    @property
    def group(self):
        """The group as it was given, or None."""
        if self.raw_group is None:
            return None
        return int(self.raw_group[1:]) if self.raw_group[0] == c"i" else self.raw_group[1:].decode()

    def __repr__(self):
        return f"Turn(seq={self.seq}, role={self.role!r}, num_tokens={self.view.length})"


cdef class Passage:
    """One stored passage.

    Attributes
    ----------
    id : int
    vector : float array of shape (dim,)
        As stored: float16 rows come back as float16.
    text : str or None
    token_ids : int32 array, read-only
    metadata : dict or None
    created_at : float
    """

    @property
    def vector(self):
        """The row as stored, a copy."""
        return np.frombuffer(self.raw_vector, np.float16 if self.half else np.float32)

    @property
    def token_ids(self):
        """int32 IDs, read-only; empty where the passage has none."""
        if self.ids is None:
            self.ids = ids_of(self.view)
        return self.ids

    @property
    def num_tokens(self):
        """Length in tokens."""
        return self.view.length

    @property
    def text(self):
        """The passage's text, or None."""
        return None if self.raw_text is None else self.raw_text.decode()

    @property
    def metadata(self):
        """The metadata as it was given, or None."""
        return None if self.raw_metadata is None else json.loads(self.raw_metadata)

    def __repr__(self):
        return f"Passage(id={self.id}, num_tokens={self.view.length})"


cdef class StoreReader:
    """What both sides of a store share. `SessionStore` is the public face."""

    def __cinit__(self):
        self.dirfd = -1
        self.genfd = -1

    def __init__(self, str path):
        self.path = path
        self.dirfd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.start()

    def start(self):
        """Open control file and generation."""
        self.control = Control(self.dirfd, False)
        self.open_generation(self.control.word(WORD_GENERATION), False)

    def __dealloc__(self):
        for fd in (self.dirfd, self.genfd):
            if fd >= 0:
                os.close(fd)

    cdef int open_generation(self, uint32_t generation, bint create) except -1:
        """Open the files of one generation in place of those open now."""
        cdef str folder = f"gen-{generation:06d}"
        cdef bytes uuid = (<char*>self.control.head.uuid)[:16]
        cdef uint64_t salt = self.control.head.salt
        cdef size_t segment_bytes = self.control.head.segment_bytes
        cdef int old, fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW,
                                   dir_fd=self.dirfd)
        cdef Log log
        cdef Index index
        try:
            log = Log(SegmentSet(fd, folder, "log", segment_bytes, self.writable), salt, uuid,
                      generation, False)
            tokens = SegmentSet(fd, folder, "tok", segment_bytes, self.writable)
            vectors = SegmentSet(fd, folder, "vec", segment_bytes, self.writable)
            index = Index(fd, folder, salt, self.writable, create)
            if not self.writable and not index.matches(uuid, generation):
                raise StoreCorrupt(
                    f"{folder}/index does not belong to this store; open it for writing once, which "
                    "builds it again", f"{folder}/index", 0)
        except BaseException:
            os.close(fd)
            raise
        # All at once: no other thread runs before the last of these, and each sees one generation.
        old, self.genfd, self.generation = self.genfd, fd, generation
        self.log, self.tokens, self.vectors, self.index = log, tokens, vectors, index
        self.seen_generation = generation
        self.seen_epoch = self.control.state.epoch
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
                raise StoreCorrupt(f"the control file's vector_dim, {dim}, does not fit its segments",
                                   "control", 0)
        return 0

    def close(self):
        """Close all files. Arrays that lie in them stay valid."""
        if self.closed:
            return
        self.closed = True
        for part in (self.log.files, self.tokens, self.vectors, self.index, self.control):
            part.close()

    cdef int enter(self) except -1:
        """Called first by every public call: closed? moved to another generation?"""
        cdef uint64_t generation
        if self.closed:
            raise StoreClosed("the store is closed")
        if not self.writable:
            generation = self.control.word(WORD_GENERATION)
            if generation != self.seen_generation:
                self.reopen()
            elif self.row_stride == 0:
                self.control.read_state()
                self.set_vector_layout()
        return 0

    def reopen(self):
        """Follow the writer to the generation it moved to."""
        with MOVING:
            while True:
                generation = self.control.word(WORD_GENERATION)
                if generation == self.seen_generation:
                    return
                try:
                    self.control.read_state()
                    self.open_generation(generation, False)
                except (OSError, StoreCorrupt):
                    # The writer may have moved once more and taken the files away.
                    if generation == self.control.word(WORD_GENERATION):
                        raise

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
            raise StoreCorrupt(
                f"{self.tokens.label(segment)} at byte {off}: {n} token IDs do not hold their checksum",
                self.tokens.label(segment), off)
        return <const int32_t*>p

    cdef TokenView view_of(self, const kalos_entry* entry):
        cdef TokenView view = TokenView.__new__(TokenView)
        view.stride = 4
        view.length = entry.num_tokens
        view.data = self.token_run(entry.tokens_pos, entry.num_tokens, entry.token_crc)
        if entry.num_tokens:
            view.file = self.tokens.open(KALOS_POSITION_SEGMENT(entry.tokens_pos), False)
        return view

    cdef Turn read_turn(self, const kalos_entry* entry):
        """The turn of a checked entry."""
        cdef kalos_sections s
        cdef Turn turn = Turn.__new__(Turn)
        self.log.sections(entry.lsn, &s)
        turn.seq = entry.seq
        turn.role_code = entry.role
        turn.created_at = s.change.created_at
        turn.view = self.view_of(entry)
        if s.change.present & KALOS_HAS_TEXT:
            turn.raw_text = s.text[:s.change.text_len]
        if s.change.present & KALOS_HAS_METADATA:
            turn.raw_metadata = s.metadata[:s.change.metadata_len]
        if s.change.present & KALOS_HAS_GROUP:
            turn.raw_group = s.group[:s.change.group_len]
        return turn

    cdef Passage read_passage(self, const kalos_entry* entry):
        """The passage of a checked entry, its vector checked too."""
        cdef kalos_sections s
        cdef Passage p = Passage.__new__(Passage)
        self.log.sections(entry.lsn, &s)
        p.id = entry.sum
        p.created_at = s.change.created_at
        p.view = self.view_of(entry)
        p.half = self.control.head.vector_dtype == KALOS_DTYPE_FLOAT16
        p.raw_vector = self.row_bytes(entry.vector_row - 1)
        if s.change.present & KALOS_HAS_TEXT:
            p.raw_text = s.text[:s.change.text_len]
        if s.change.present & KALOS_HAS_METADATA:
            p.raw_metadata = s.metadata[:s.change.metadata_len]
        return p

    def row_bytes(self, uint32_t row):
        """The stored bytes of a vector row, checked."""
        cdef uint32_t segment = row // self.rows_per_segment
        cdef size_t off = <size_t>(row % self.rows_per_segment) * self.row_stride
        cdef uint32_t n = self.control.state.vector_dim * (
            2 if self.control.head.vector_dtype == KALOS_DTYPE_FLOAT16 else 4)
        cdef const char* p = self.vectors.at(segment, off, n)
        cdef const kalos_row* info
        self.index.rows.check((<size_t>row + 1) * sizeof(kalos_row))
        info = <const kalos_row*>self.index.rows.base + row
        if kalos_crc32c(0, p, n) != info.crc:
            raise StoreCorrupt(
                f"{self.vectors.label(segment)} at byte {off}: a vector does not hold its checksum",
                self.vectors.label(segment), off)
        return p[:n]

    # ---- What SessionStore asks ---------------------------------------------------------------------

    def check_open(self):
        """Raise StoreClosed after `close`; a reader follows the writer to another generation."""
        self.enter()

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

    def turns(self, bytes tenant, bytes name, object start, object stop, double now, uint32_t kind=1):
        """Living turns with start <= seq < stop (Python's slice rules), or None for an unknown session."""
        cdef kalos_image image
        cdef EntryTable table
        cdef const kalos_entry* entry
        cdef uint32_t seq
        cdef uint64_t slot_off
        cdef list out = []
        self.enter()
        slot_off = self.find(kind, tenant, name, &image)
        if slot_off == 0:
            return None
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

        Returns (ids uint64, rows uint32 (row + 1), lsns uint64, flags uint8, seqs uint32, epoch). For a
        collection `ids` are passage IDs.
        """
        cdef EntryTable table
        cdef const kalos_entry* entry
        cdef uint32_t seq, n
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

    cdef int fill_columns(self, EntryTable* table, uint32_t start, uint64_t[::1] ids, uint32_t[::1] rows,
                          uint64_t[::1] lsns, uint8_t[::1] flags) except -1:
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
        self.log.sections(lsn, &s)
        if s.metadata == NULL or not s.change.present & KALOS_HAS_METADATA:
            return None
        return s.metadata[:s.change.metadata_len]

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
