"""Reading a whole store against its checksums, and copying it.

`verify` walks the log, which is the truth, and everything that follows from it: the token runs and
vector rows that records refer to, and the index (every slot, entry and bucket must be what the
records say).
"""

import os

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kalos_ctx._control cimport WORD_COMMITTED, Control
from kalos_ctx._index cimport EntryTable, Index, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_ALIGN, KALOS_ENTRY_DEAD, KALOS_IMAGE_DEAD, KALOS_KIND_SEGMENTS,
    KALOS_KIND_SUMMARIES, KALOS_POSITION,
    KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, KALOS_RECORD_SCRUBBED, KALOS_SEGMENT_FIRST,
    kalos_entry, kalos_image, kalos_item, kalos_record,
)
from kalos_ctx._log cimport (
    kalos_body_valid, kalos_header_valid, kalos_round_up, kalos_sections, kalos_sections_of,
)
from kalos_ctx._opening cimport WritableStore
from kalos_ctx._reader cimport StoreReader

from kalos_ctx.errors import KalosError, NotAStore, StoreCorrupt, StoreIOError
from kalos_ctx.types import Flaw, VerifyReport

# Beyond this many flaws the report would only grow.
cdef uint32_t FLAWS_MAX = 1000


cdef class Verifier:
    """One walk over a store."""
    cdef StoreReader store
    cdef object progress
    cdef list flaws
    cdef dict checked
    cdef uint64_t total

    def __init__(self, StoreReader store, progress):
        self.store = store
        self.progress = progress
        self.flaws = []
        self.checked = {"records": 0, "turns": 0, "passages": 0, "vectors": 0, "sessions": 0,
                        "bytes": 0}

    def run(self):
        """The report."""
        self.store.enter()
        end = self.store.control.word(WORD_COMMITTED)
        self.total = KALOS_POSITION_SEGMENT(end) * self.store.control.head.segment_bytes \
            + KALOS_POSITION_OFFSET(end)
        self.walk_log(end)
        self.walk_index()
        return VerifyReport(self.flaws, self.checked)

    cdef int note(self, str file, uint64_t offset, str what) except -1:
        if len(self.flaws) < FLAWS_MAX:
            self.flaws.append(Flaw(file, offset, what))
        return 0

    cdef int note_error(self, error) except -1:
        if isinstance(error, StoreCorrupt):
            return self.note(error.file, max(error.offset, 0), str(error))
        return self.note(getattr(error, "filename", None) or "", 0, str(error))

    # ---- Log -------------------------------------------------------------------------------------

    cdef int walk_log(self, uint64_t end) except -1:
        """Every record up to the published end; behind a damaged one, the next that holds."""
        cdef uint64_t lsn = KALOS_POSITION(0, KALOS_SEGMENT_FIRST), following
        while lsn < end:
            try:
                following = self.one_record(lsn)
            except (StoreCorrupt, StoreIOError) as e:
                self.note_error(e)
                following = 0
            if following == 0:
                following = self.resync(lsn + KALOS_ALIGN, end)
            lsn = following
            if self.progress is not None:
                self.progress(min(self.checked["bytes"], self.total), self.total)
        return 0

    cdef uint64_t one_record(self, uint64_t lsn) except? 0:
        """Check one record; where the next is, 0 where this is none."""
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(lsn), off = KALOS_POSITION_OFFSET(lsn)
        cdef uint64_t size = self.store.log.files.size_of(segment)
        cdef const kalos_record* rec
        cdef kalos_sections s
        if segment + 1 < self.store.log.num_segments():
            prev_end = self.store.log.check_header(segment + 1)
            if prev_end is None:
                self.note(self.store.log.files.label(segment + 1), 0,
                          "the segment's header does not hold")
            elif prev_end == off:
                return KALOS_POSITION(segment + 1, KALOS_SEGMENT_FIRST)
        if off + sizeof(kalos_record) > size:
            self.note(self.store.log.files.label(segment), off,
                      "the file ends before its records do")
            return 0
        rec = <const kalos_record*>self.store.log.files.at(segment, off, sizeof(kalos_record))
        if not kalos_header_valid(self.store.log.salt, rec, lsn, size - off):
            self.note(self.store.log.files.label(segment), off, "the record's header does not hold")
            return 0
        self.checked["records"] += 1
        self.checked["bytes"] += rec.size
        if not kalos_body_valid(rec) or not kalos_sections_of(rec, &s):
            self.note(self.store.log.files.label(segment), off,
                      "the record's checksum does not hold")
        elif not rec.flags & KALOS_RECORD_SCRUBBED and (
                rec.kind == KALOS_KIND_SEGMENTS or rec.kind == KALOS_KIND_SUMMARIES):
            self.check_items(s.table[:s.change.table_len])
        return KALOS_POSITION(segment, off + rec.size)

    cdef int check_items(self, bytes table) except -1:
        cdef const char* p = table
        cdef const kalos_item* item
        cdef Py_ssize_t at = 0
        while at + <Py_ssize_t>sizeof(kalos_item) <= len(table):
            item = <const kalos_item*>(p + at)
            try:
                self.store.token_run(item.tokens_pos, item.num_tokens, item.token_crc)
            except (StoreCorrupt, StoreIOError) as e:
                self.note_error(e)
            at += max(item.size, <uint32_t>sizeof(kalos_item))
        return 0

    cdef uint64_t resync(self, uint64_t lsn, uint64_t end) except? 0:
        """The next place with a valid record header, or the end."""
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(lsn)
        cdef uint64_t off = KALOS_POSITION_OFFSET(lsn), size
        cdef const kalos_record* rec
        while segment < self.store.log.num_segments():
            size = self.store.log.files.size_of(segment)
            while off + sizeof(kalos_record) <= size and KALOS_POSITION(segment, off) < end:
                rec = <const kalos_record*>self.store.log.files.at(segment, off,
                                                                   sizeof(kalos_record))
                if kalos_header_valid(self.store.log.salt, rec, KALOS_POSITION(segment, off),
                                      size - off):
                    return KALOS_POSITION(segment, off)
                off += KALOS_ALIGN
            segment += 1
            off = KALOS_SEGMENT_FIRST
        return end

    # ---- Index -----------------------------------------------------------------------------------

    cdef int walk_index(self) except -1:
        """Every slot and entry, with the tokens and rows they refer to."""
        cdef kalos_image image
        cdef uint32_t slot_id
        cdef uint64_t slot_off, found
        for slot_id in range(self.store.index.num_slots):
            try:
                slot_off = self.store.index.slot_of(slot_id)
                self.store.index.read_image(slot_off, &image)
                if image.flags & KALOS_IMAGE_DEAD:
                    continue
                tenant, name = self.store.name_of(image.name_lsn)
                found = self.store.find(image.kind, tenant, name, &image)
                if found != slot_off:
                    self.note(f"{self.store.index.folder}/index", slot_off,
                              "a slot is not found by its name")
                self.walk_entries(slot_off)
                self.checked["sessions"] += image.kind == 1
            except (StoreCorrupt, StoreIOError) as e:
                self.note_error(e)
        return 0

    cdef int walk_entries(self, uint64_t slot_off) except -1:
        cdef EntryTable table
        cdef const kalos_entry* e
        cdef uint32_t seq
        self.store.index.open_table(slot_off, &table)
        try:
            for seq in range(table.image.num_entries):
                try:
                    e = table_entry(&table, seq)
                    self.store.index.check_entry(e, seq)
                    self.check_entry(&table, e)
                except (StoreCorrupt, StoreIOError) as error:
                    self.note_error(error)
        finally:
            table_clear(&table)
        return 0

    cdef int check_entry(self, const EntryTable* table, const kalos_entry* e) except -1:
        """An entry's tokens and row, and that its record says the same."""
        cdef const kalos_record* rec = self.store.log.record(e.lsn)
        cdef kalos_sections s
        cdef uint32_t row
        cdef bint dead
        kalos_sections_of(rec, &s)
        if e.vector_row:
            row = e.vector_row - 1
            self.store.index.dead.check(row // 8 + 1)
            dead = (<uint8_t*>self.store.index.dead.base)[row // 8] >> (row & 7) & 1
            if dead != bool(e.flags & KALOS_ENTRY_DEAD):
                self.note(f"{self.store.index.folder}/dead", row // 8,
                          "a row's bit is not what its entry says")
        if e.flags & KALOS_ENTRY_DEAD:
            return 0
        if rec.flags & KALOS_RECORD_SCRUBBED or s.change.entry.token_crc != e.token_crc \
                or s.change.entry.num_tokens != e.num_tokens:
            self.note(f"{self.store.index.folder}/index", table.slot_off,
                      f"entry {e.seq} is not what its record says")
        self.store.token_run(e.tokens_pos, e.num_tokens, e.token_crc)
        if e.live_tokens:
            self.store.token_run(e.tokens_pos + kalos_round_up(e.num_tokens, 16), e.live_tokens,
                                 e.live_crc)
        if e.vector_row:
            self.store.row_bytes(e.vector_row - 1)
            self.checked["vectors"] += 1
        self.checked["passages" if table.image.kind == 2 else "turns"] += 1
        return 0


def verify(StoreReader store not None, progress):
    """Check everything; see SessionStore.verify."""
    return Verifier(store, progress).run()


def snapshot(WritableStore store not None, str path not None):
    """Copy a store, in order and durable, to a new folder.

    Raises
    ------
    NotAStore
        The path exists and is not an empty folder.
    StoreFull, StoreIOError
    """
    cdef Control control
    cdef Index index
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        if os.listdir(path):
            raise NotAStore("the snapshot's folder must be empty or new")
        with store.mutex:
            store.checkpoint()
            folder = f"gen-{store.generation:06d}"
            os.mkdir(os.path.join(path, folder), 0o700)
            for name in os.listdir(store.genfd):
                copy_file(os.path.join(store.path, folder, name), os.path.join(path, folder, name))
            copy_file(os.path.join(store.path, "control"), os.path.join(path, "control.new"))
        os.rename(os.path.join(path, "control.new"), os.path.join(path, "control"))
    except OSError as e:
        if isinstance(e, KalosError):
            raise
        raise StoreIOError(e.errno, f"cannot write the snapshot: {e.strerror}") from None
    # The copy was taken at a checkpoint, so it is a store that was closed in order: say so in it.
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    genfd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    try:
        control = Control(fd, True)
        index = Index(genfd, folder, store.control.head.salt, True, False)
        index.matches((<char*>control.head.uuid)[:16], store.generation)
        index.epoch = control.state.epoch
        index.adopt()
        index.sync()
        control.state.clean = 1
        control.write_state(True)
        os.fsync(genfd)
        os.fsync(fd)
        index.close()
        control.close()
    finally:
        os.close(genfd)
        os.close(fd)


def copy_file(source, target):
    """Copy one file and sync it; blocks are shared where the file system can."""
    with open(source, "rb") as a, open(target, "xb") as b:
        size = os.fstat(a.fileno()).st_size
        try:
            done = 0
            while done < size:
                step = os.copy_file_range(a.fileno(), b.fileno(), size - done)
                if step == 0:
                    break
                done += step
        except OSError:
            a.seek(0)
            b.seek(0)
            b.truncate()
            while chunk := a.read(1 << 20):
                b.write(chunk)
            b.flush()
        os.fsync(b.fileno())
