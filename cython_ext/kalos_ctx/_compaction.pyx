"""Compaction: the living data written into a new generation of files, the old ones dropped.

The new generation is built aside, synced, and taken over by one write of the state in the control
file. A crash before that leaves the old files serving, a crash behind it the new ones; either way
the other folder is removed at the next opening. Readers notice the generation word and follow.

Sessions keep their sequence numbers (a turn that expired leaves an empty place), passages their
IDs, forks what they share. Sessions that expired as a whole, deleted passages and everything rolled
back stay behind.
"""

import os
import shutil

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kalos_ctx._batch cimport Batch, Parts
from kalos_ctx._control cimport WORD_COMMITTED, WORD_GENERATION, WORD_ROWS
from kalos_ctx._index cimport EntryTable, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_ENTRY_DEAD, KALOS_ENTRY_ORPHAN, KALOS_IMAGE_COMPLEX, KALOS_IMAGE_FORKED, KALOS_IMAGE_TTL,
    KALOS_KIND_IMAGE, KALOS_KIND_PASSAGE, KALOS_KIND_SEGMENTS,
    KALOS_KIND_SHARE, KALOS_KIND_SUMMARIES, KALOS_KIND_TURN,
    KALOS_SLOT_COLLECTION, KALOS_SLOT_SESSION, KALOS_SLOT_TENANT, kalos_change, kalos_entry,
    kalos_image,
)
from kalos_ctx._log cimport kalos_round_up, kalos_sections
from kalos_ctx._writer cimport Stage, StoreWriter

# Entries a batch: bounds the memory that compaction takes.
cdef uint32_t ENTRIES_PER_BATCH = 4096


cdef class Target(StoreWriter):
    """The generation being written: a writer that publishes nothing."""

    def __init__(self, StoreWriter source, uint32_t generation):
        self.lock_fd = -1
        self.writable = True
        self.durability = "process"
        self.forks = source.forks
        self.path = source.path
        self.dirfd = os.dup(source.dirfd)
        self.control = source.control
        self.make_folder(generation)

    def make_folder(self, uint32_t generation):
        """Empty files of the generation."""
        folder = os.path.join(self.path, f"gen-{generation:06d}")
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder, 0o700)
        self.open_generation(generation, True)
        self.log.begin_segment(0, 0)
        self.index.format_files((<char*>self.control.head.uuid)[:16], generation)
        self.index.start_writing()
        self.batch = Batch(self.log, self.index, self.tokens, self.vectors)
        self.set_vector_layout()

    cdef int commit(self) except -1:
        before = self.log.end
        self.batch.write()
        self.index.applied = before
        self.batch.apply()
        return 0

    cdef int finish(self) except -1:
        return 0


cdef class Compactor:
    """Copies one store's living data into a target."""
    cdef StoreWriter source
    cdef Target target
    cdef double now
    cdef dict families              # old family -> new
    cdef dict copies                # old record of a shared turn -> its new entry, as bytes

    def __init__(self, StoreWriter source, Target target, double now):
        self.source = source
        self.target = target
        self.now = now
        self.families = {}
        self.copies = {}

    def copy_all(self):
        """Copy every living slot, in the order of their IDs."""
        cdef uint32_t kind
        for kind in (KALOS_SLOT_TENANT, KALOS_SLOT_COLLECTION, KALOS_SLOT_SESSION):
            for _, slot_off, tenant, name, _, expires in self.source.slots(0, kind):
                if expires is None or expires > self.now:
                    self.copy_slot(kind, slot_off, tenant, name)

    cdef int copy_slot(self, uint32_t kind, uint64_t slot_off, bytes tenant, bytes name) except -1:
        cdef EntryTable table
        cdef Stage s
        cdef uint32_t seq = 0, stop
        self.source.index.open_table(slot_off, &table)
        try:
            self.target.make_room(1, 0)
            self.target.begin()
            self.target.open_stage(kind, tenant, name, True, &s)
            try:
                self.finish_image(kind, &table.image, &s)
                self.target.commit()
            finally:
                self.target.close_stage(&s)
            while seq < table.image.num_entries:
                stop = min(seq + ENTRIES_PER_BATCH, table.image.num_entries)
                self.copy_entries(kind, tenant, name, &table, seq, stop)
                seq = stop
        finally:
            table_clear(&table)
        return 0

    cdef int finish_image(self, uint32_t kind, const kalos_image* old, Stage* s) except -1:
        """What a slot has besides its entries: the next ID, its family, segments and summaries."""
        cdef kalos_change c
        cdef Parts p
        s.image.next_id = old.next_id if kind == KALOS_SLOT_TENANT else 0
        if old.flags & KALOS_IMAGE_FORKED:
            s.image.flags |= KALOS_IMAGE_FORKED
            s.image.family = self.families.setdefault(old.family, s.image.slot_id)
        if s.image.next_id or s.image.flags:
            self.target.change_of(s, &c)
            memset(&p, 0, sizeof(p))
            c.image = s.image
            s.image.last_lsn = self.target.batch.stage_record(KALOS_KIND_IMAGE, 0, &c, &p)
        if old.segments_lsn:
            self.copy_items(s, KALOS_KIND_SEGMENTS, self.source.table_bytes(old.segments_lsn)[0])
        if old.summaries_lsn:
            self.copy_items(s, KALOS_KIND_SUMMARIES, self.source.table_bytes(old.summaries_lsn)[0])
        return 0

    cdef int copy_items(self, Stage* s, uint32_t kind, bytes table) except -1:
        return self.target.fork_table(s, kind, table)

    cdef int copy_entries(self, uint32_t kind, bytes tenant, bytes name, EntryTable* table,
                          uint32_t start, uint32_t stop) except -1:
        """One batch of a slot's entries."""
        cdef Stage s
        cdef const kalos_entry* e
        cdef uint32_t seq
        self.target.make_room(0, 3 * (stop - start))
        self.target.begin()
        self.target.open_stage(kind, tenant, name, False, &s)
        try:
            for seq in range(start, stop):
                e = table_entry(table, seq)
                self.source.index.check_entry(e, seq)
                if kind == KALOS_SLOT_COLLECTION and e.flags & KALOS_ENTRY_DEAD:
                    continue
                self.copy_entry(kind, table, &s, e)
            if self.target.batch.num_records:
                self.target.commit()
        finally:
            self.target.close_stage(&s)
        return 0

    cdef int copy_entry(self, uint32_t kind, EntryTable* table, Stage* s,
                        const kalos_entry* e) except -1:
        """Stage one entry: record and tokens copied, shared with an earlier copy, or left empty."""
        cdef kalos_change c
        cdef Parts p
        cdef kalos_sections old
        cdef kalos_entry shared
        cdef uint32_t record_kind = KALOS_KIND_PASSAGE
        cdef bint gone = e.flags & KALOS_ENTRY_DEAD or self.source.is_expired(e, self.now)
        if kind == KALOS_SLOT_SESSION:
            record_kind = KALOS_KIND_TURN
        self.target.change_of(s, &c)
        memset(&p, 0, sizeof(p))
        c.entry = e[0]
        c.entry.seq = s.image.num_entries
        self.source.log.sections(e.lsn, &old)
        c.created_at = old.change.created_at
        c.expires_at = old.change.expires_at
        if gone:
            self.empty_place(&c)
        elif table.image.flags & KALOS_IMAGE_FORKED and e.lsn in self.copies:
            record_kind = KALOS_KIND_SHARE
            memcpy(&shared, <const char*><bytes>self.copies[e.lsn], sizeof(shared))
            c.entry.tokens_pos, c.entry.lsn = shared.tokens_pos, shared.lsn
            c.entry.vector_row = shared.vector_row
            c.vector_crc = old.change.vector_crc
            c.vector_factor = old.change.vector_factor
        else:
            self.copy_payload(s, e, &old, &c, &p)
        if kind == KALOS_SLOT_SESSION:
            c.entry.sum = s.image.sum
            if not gone and not e.flags & KALOS_ENTRY_ORPHAN:
                c.entry.sum = s.image.sum - e.trim_prev + e.num_tokens
        self.target.place_entry(s, &c, &p)
        self.advance(s, kind, &c, gone)
        c.image = s.image
        s.image.last_lsn = self.target.batch.stage_record(record_kind, 0, &c, &p)
        if record_kind == KALOS_KIND_TURN and table.image.flags & KALOS_IMAGE_FORKED:
            self.copies[e.lsn] = (<char*>&c.entry)[:sizeof(kalos_entry)]
        return 0

    cdef int empty_place(self, kalos_change* c) except -1:
        """A turn that is gone keeps its number and nothing else."""
        cdef uint32_t seq = c.entry.seq, unit = c.entry.unit_first
        cdef uint8_t role = c.entry.role
        memset(&c.entry, 0, sizeof(kalos_entry))
        c.entry.seq, c.entry.unit_first, c.entry.role = seq, unit, role
        c.entry.flags = KALOS_ENTRY_DEAD
        c.created_at = c.expires_at = 0
        return 0

    cdef int copy_payload(self, Stage* s, const kalos_entry* e, const kalos_sections* old,
                          kalos_change* c, Parts* p) except -1:
        """Stage tokens, row and sections of an entry that moves."""
        cdef const kalos_change* from_ = old.change
        cdef const int32_t* ids = self.source.token_run(e.tokens_pos, e.num_tokens, e.token_crc)
        cdef const int32_t* live = NULL
        cdef bytes row
        if e.live_tokens:
            live = self.source.token_run(e.tokens_pos + kalos_round_up(e.num_tokens, 16),
                                         e.live_tokens, e.live_crc)
        c.entry.tokens_pos = self.target.batch.stage_tokens(ids, e.num_tokens, live, e.live_tokens)
        if e.vector_row:
            row = self.source.row_bytes(e.vector_row - 1).ljust(self.target.row_stride, b"\0")
            c.entry.vector_row = self.target.batch.stage_row(<const uint8_t*><const char*>row) + 1
            c.vector_crc = from_.vector_crc
            c.vector_factor = from_.vector_factor
        c.present = from_.present
        memcpy(c.digest, from_.digest, 16)
        c.text_len, p.text = from_.text_len, old.text
        c.metadata_len, p.metadata = from_.metadata_len, old.metadata
        c.group_len, p.group = from_.group_len, old.group
        c.key_len, p.key = from_.key_len, old.key
        if from_.key_bucket:
            c.key_bucket = self.target.claim_key(s, c"k", old.key[:from_.key_len], c.entry.seq)
        if from_.group_bucket:
            c.group_bucket = self.target.claim_key(s, c"g", old.group[:from_.group_len],
                                                   c.entry.seq)
        if from_.call_bucket:
            c.call_bucket = self.target.claim_key(s, c"c", old.group[:from_.group_len], c.entry.seq)
        return 0

    cdef int advance(self, Stage* s, uint32_t kind, const kalos_change* c, bint gone) except -1:
        """The slot's image behind the entry."""
        cdef kalos_image* image = &s.image
        if gone:
            image.num_entries += 1
            # As a session with expired turns, so that its turns are counted one by one.
            image.flags |= KALOS_IMAGE_COMPLEX | KALOS_IMAGE_TTL
            return 0
        self.target.advance(
            s, KALOS_KIND_TURN if kind == KALOS_SLOT_SESSION else KALOS_KIND_PASSAGE, c)
        if image.flags & KALOS_IMAGE_FORKED:
            image.shared_below = image.num_entries
        return 0


def compact(StoreWriter store not None, double now):
    """Compact a store in place. Call from one thread; other calls wait.

    Parameters
    ----------
    store : StoreWriter
    now : float
        Seconds as `time.time()`: what has expired by then stays behind.

    Raises
    ------
    StoreFull, StoreIOError, StoreCorrupt
        The old files go on serving.
    """
    cdef Target target
    cdef uint32_t generation
    with store.mutex:
        store.writing()
        generation = store.generation + 1
        try:
            target = Target(store, generation)
            Compactor(store, target, now).copy_all()
            target.sync_files()
            os.fsync(store.dirfd)
        except BaseException:
            store.remove_other_generations()
            raise
        take_over(store, target, generation)


cdef int take_over(StoreWriter store, Target target, uint32_t generation) except -1:
    """Point the control file at the new generation and go on in it."""
    target.index.epoch = store.control.state.epoch | 1
    target.index.mark_whole(target.log.end)
    target.index.arena.sync()
    store.control.state.generation = generation
    store.control.state.checkpoint = target.log.end
    store.control.state.cursor = target.index.cursor
    store.control.state.roots = target.index.roots
    # Both copies: the older one names a folder that is about to go.
    store.control.write_state(True)
    store.control.write_state(True)
    store.control.set_word(WORD_COMMITTED, target.log.end)
    store.control.set_word(WORD_ROWS, target.index.cursor.vector_rows)
    store.adopt(target)
    store.control.set_word(WORD_GENERATION, generation)
    store.remove_other_generations()
    return 0
