"""The index of a store: a mapped arena that readers share.

Everything in it follows from the log. `apply` is the only place that writes: the writer builds a
batch of records, appends it, and applies it; after a kill, recovery applies the last batch again,
which is safe because a record says where everything goes and what it becomes (a redo reads nothing
that it repairs). After a power loss the index is built anew: its pages may have reached the disk
before the log's, and what they then say of turns that the log lost cannot be undone. How it is read
is in _lookup.
"""

import os

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from kalos_ctx._layout cimport (
    KALOS_APPLIED_WHOLE, KALOS_ARENA_FIRST, KALOS_BUCKET_EMPTY, KALOS_BUCKET_GONE,
    KALOS_ENDIAN_MARK, KALOS_ENTRY_DEAD,
    KALOS_INDEX_FORMAT, KALOS_KIND_ERASE, KALOS_POSITION_MASK,
    KALOS_RECORD_SCRUBBED, kalos_bucket, kalos_change, kalos_crc32c, kalos_cursor, kalos_entry,
    kalos_extent, kalos_image, kalos_index_header, kalos_record, kalos_roots, kalos_row,
    kalos_seal, kalos_slot, kalos_unseal,
)
from kalos_ctx._log cimport (
    kalos_body_holds, kalos_row_holds, kalos_row_write, kalos_sections, kalos_sections_of,
)
from kalos_ctx._lookup cimport SEALED_APPLIED, SEALED_ROOTS, SEALED_SLOTS, Lookup
from kalos_ctx._segment cimport MappedFile

from kalos_ctx._segment import pages_lost
from kalos_ctx.errors import StoreCorrupt

cdef extern from *:
    """
    #define KALOS_STORE_RELEASE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    #define KALOS_OR_RELEASE(p, v) __atomic_fetch_or((p), (v), __ATOMIC_RELEASE)
    #define KALOS_AND_RELEASE(p, v) __atomic_fetch_and((p), (v), __ATOMIC_RELEASE)
    """
    void KALOS_STORE_RELEASE(uint64_t* p, uint64_t v) nogil
    void KALOS_OR_RELEASE(uint8_t* p, uint8_t v) nogil
    void KALOS_AND_RELEASE(uint8_t* p, uint8_t v) nogil

INDEX_NAMES = ("index", "rows", "dead")
cdef uint32_t FIRST_LOG2 = 8        # buckets of a new table: 4 KiB


cdef int clear_table(kalos_bucket* table, uint64_t n) noexcept nogil:
    """Make n buckets empty."""
    cdef uint64_t i
    for i in range(n):
        table[i].hash = 0
        table[i].value = KALOS_BUCKET_EMPTY
    return 0


cdef class Index(Lookup):
    """Slots, entries and tables of one generation of a store."""

    def __init__(self, int dirfd, str folder, uint64_t salt, bint writable, bint create,
                 str suffix=""):
        self.folder = folder
        self.salt = salt
        self.writable = writable
        self.pages_lost = pages_lost()
        cdef list files = [
            MappedFile.open_file(dirfd, name + suffix, writable=writable, create=create,
                                 label=f"{folder}/{name}")
            for name in INDEX_NAMES]
        self.arena, self.rows, self.dead = files

    @staticmethod
    def make_aside(int dirfd, str folder, uint64_t salt):
        """Empty files beside those in use, which readers may have open, until `publish`."""
        for name in INDEX_NAMES:
            try:
                os.unlink(name + ".new", dir_fd=dirfd)
            except FileNotFoundError:
                pass
        return Index(dirfd, folder, salt, True, True, ".new")

    def publish(self, int dirfd):
        """Put the files made aside in place; the arena last, since its header decides."""
        for name in reversed(INDEX_NAMES):
            os.rename(name + ".new", name, src_dir_fd=dirfd, dst_dir_fd=dirfd)
        os.fsync(dirfd)

    def close(self):
        """Close the three files."""
        self.arena.close()
        self.rows.close()
        self.dead.close()

    def sync(self):
        """Make the index durable as it stands."""
        self.arena.sync()
        self.rows.sync()
        self.dead.sync()

    # ---- Header ----------------------------------------------------------------------------------

    def format_files(self, bytes uuid, uint32_t generation):
        """Begin an empty index in place of whatever the files hold."""
        cdef kalos_index_header* head
        cdef MappedFile f
        cdef kalos_roots roots
        cdef uint64_t table_bytes = sizeof(kalos_bucket) << FIRST_LOG2
        for f in (self.arena, self.rows, self.dead):
            f.grow(KALOS_ARENA_FIRST)
            memset(f.base, 0, f.size)
        self.arena.grow(KALOS_ARENA_FIRST + 2 * table_bytes)
        head = self.header()
        head.num_slots = kalos_seal(0, SEALED_SLOTS)
        head.applied = kalos_seal(0, SEALED_APPLIED)
        clear_table(<kalos_bucket*>(self.arena.base + KALOS_ARENA_FIRST), 2 << FIRST_LOG2)
        memcpy(head.magic, b"KALOSIDX", 8)
        head.endian = KALOS_ENDIAN_MARK
        head.format = KALOS_INDEX_FORMAT
        memcpy(head.uuid, <const char*>uuid, 16)
        head.inode, head.device = self.arena.identity()
        head.generation = generation
        head.crc = kalos_crc32c(0, head, 52)
        memset(&roots, 0, sizeof(roots))
        roots.slot_table = KALOS_ARENA_FIRST
        roots.key_table = KALOS_ARENA_FIRST + table_bytes
        roots.slot_log2 = roots.key_log2 = FIRST_LOG2
        self.write_roots(&roots)
        memset(&self.cursor, 0, sizeof(self.cursor))
        self.cursor.arena_used = KALOS_ARENA_FIRST + 2 * table_bytes

    def matches(self, bytes uuid, uint32_t generation):
        """Whether the header is whole and of this store. `is_original` tells copies."""
        cdef kalos_index_header* head
        if self.arena.size < KALOS_ARENA_FIRST or self.rows.size < KALOS_ARENA_FIRST \
                or self.dead.size < KALOS_ARENA_FIRST:
            return False
        self.arena.map_at_least(self.arena.size)
        self.rows.map_at_least(self.rows.size)
        self.dead.map_at_least(self.dead.size)
        head = self.header()
        return (head.crc == kalos_crc32c(0, head, 52) and memcmp(head.magic, b"KALOSIDX", 8) == 0
                and head.endian == KALOS_ENDIAN_MARK
                and head.format == KALOS_INDEX_FORMAT
                and memcmp(head.uuid, <const char*>uuid, 16) == 0 and head.generation == generation)

    def reaches(self, bytes cursor_bytes):
        """Whether the files hold what a cursor says is allocated; one that was cut does not."""
        cdef kalos_cursor cursor
        memcpy(&cursor, <const char*>cursor_bytes, sizeof(kalos_cursor))
        return (self.arena.size >= cursor.arena_used
                and self.rows.size >= cursor.vector_rows * sizeof(kalos_row)
                and self.dead.size >= (cursor.vector_rows + 7) // 8)

    @property
    def suspect(self):
        """Whether a read met damage, or a store went into a page that the file lost."""
        return self.header().suspect != 0 or (self.writable and self.pages_lost != pages_lost())

    def is_original(self):
        """Whether this very file was written by the store's writer, and is no copy of it."""
        ino, dev = self.arena.identity()
        return self.header().inode == ino and self.header().device == dev

    def adopt(self):
        """Take a clean copy for the original."""
        cdef kalos_index_header* head = self.header()
        head.inode, head.device = self.arena.identity()
        head.crc = kalos_crc32c(0, head, 52)

    @property
    def epoch(self):
        """Writer epoch in which the index was last written; odd while a writer has it open."""
        return self.header().epoch

    @epoch.setter
    def epoch(self, uint64_t value):
        KALOS_STORE_RELEASE(&self.header().epoch, value)

    @property
    def applied(self):
        """Start of the last batch that was applied; 0 where the word does not prove itself."""
        cdef uint64_t lsn
        if not kalos_unseal(self.header().applied, SEALED_APPLIED, &lsn):
            return 0
        return lsn & ~<uint64_t>KALOS_APPLIED_WHOLE

    @applied.setter
    def applied(self, uint64_t lsn):
        KALOS_STORE_RELEASE(&self.header().applied, kalos_seal(lsn, SEALED_APPLIED))

    @property
    def is_whole(self):
        """Whether all before `applied` is in the index and no batch was applied since."""
        cdef uint64_t lsn
        return kalos_unseal(self.header().applied, SEALED_APPLIED, &lsn) \
            and lsn & KALOS_APPLIED_WHOLE != 0

    def mark_whole(self, uint64_t lsn):
        """All before the position is in the index, and nothing else."""
        self.applied = lsn | KALOS_APPLIED_WHOLE

    def start_writing(self):
        """Load the roots for `apply`."""
        self.read_roots(&self.roots)

    def cursor_bytes(self):
        """The cursor as bytes, for the checkpoint."""
        return (<char*>&self.cursor)[:sizeof(kalos_cursor)]

    def set_cursor(self, bytes value):
        """Continue from a checkpoint's cursor."""
        memcpy(&self.cursor, <const char*>value, sizeof(kalos_cursor))

    # ---- Writing: redo of one record -------------------------------------------------------------

    cdef int apply(self, const kalos_record** records, uint32_t n) except -1:
        """Bring the index to the state behind a batch of valid records. Idempotent.

        Entries come first, then each slot's last image, then what makes slots findable: a reader
        sees the whole batch of a session or nothing of it.
        """
        cdef const kalos_change* c
        cdef uint32_t i
        cdef uint64_t done = 0
        cdef set written = None
        for i in range(n):
            self.apply_content(records[i])
        for i in range(n - 1, -1, -1):
            c = <const kalos_change*>(<const char*>records[i] + sizeof(kalos_record))
            if records[i].flags & KALOS_RECORD_SCRUBBED or c.slot_off == 0 or c.slot_off == done:
                continue
            if n > 1:
                if written is None:
                    written = set()
                if c.slot_off in written:
                    continue
                written.add(c.slot_off)
            done = c.slot_off
            self.write_image(c.slot_off, &c.image)
            if records[i].kind == KALOS_KIND_ERASE:
                self.write_image(c.slot_off, &c.image)  # over the other copy too
        for i in range(n):
            if not records[i].flags & KALOS_RECORD_SCRUBBED:
                self.apply_found(records[i])
        return 0

    cdef int apply_content(self, const kalos_record* rec) except -1:
        """What a record brings that nothing refers to yet: roots, extents, entry, row, keys."""
        cdef kalos_sections s
        cdef const kalos_change* c
        if not kalos_sections_of(rec, &s):
            raise StoreCorrupt("a record's sections do not fit it")
        c = s.change
        self.arena.grow(rec.cursor.arena_used)
        self.cursor = rec.cursor
        if s.roots != NULL and s.roots.crc == kalos_crc32c(0, s.roots, sizeof(kalos_roots) - 4):
            self.move_tables(s.roots)
        if rec.flags & KALOS_RECORD_SCRUBBED:
            # What an interrupted scrubbing left may not hold; the erasure's own record does the
            # rest.
            if kalos_body_holds(rec) and c.entry_off and c.entry.vector_row:
                self.set_dead(c.entry.vector_row - 1)
            return 0
        if c.num_extents:
            memcpy(self.at(c.extents_off, c.num_extents * sizeof(kalos_extent)), s.extents,
                   c.num_extents * sizeof(kalos_extent))
        if c.entry_off:
            memcpy(self.at(c.entry_off, sizeof(kalos_entry)), &c.entry, sizeof(kalos_entry))
            if c.entry.vector_row:
                self.write_row(c)
        if c.key_bucket:
            self.write_key(c, c.key_bucket, c"k", s.key[:c.key_len], rec.lsn)
        if c.group_bucket:
            self.write_key(c, c.group_bucket, c"g", s.group[:c.group_len], rec.lsn)
        if c.call_bucket:
            self.write_key(c, c.call_bucket, c"c", s.group[:c.group_len], rec.lsn)
        return 0

    cdef int apply_found(self, const kalos_record* rec) except -1:
        """What makes a record's slot findable, or no longer."""
        cdef const kalos_change* c = <const kalos_change*>(<const char*>rec + sizeof(kalos_record))
        if c.slot_bucket and rec.kind == KALOS_KIND_ERASE:
            if self.erased is not None:
                self.erased.add(c.slot_off)
            else:
                self.write_gone(self.roots.slot_table, c.slot_bucket - 1)
        elif c.slot_bucket:
            self.write_bucket(self.roots.slot_table, self.roots.slot_log2, c.slot_bucket - 1,
                              c.image.hash, kalos_seal(c.slot_off, c.image.hash))
        if c.slot_off and c.image.slot_id + 1 > self.num_slots:
            KALOS_STORE_RELEASE(&self.header().num_slots,
                                kalos_seal(c.image.slot_id + 1, SEALED_SLOTS))
        return 0

    def start_replay(self):
        """From here on `apply` repeats the past.

        Bucket numbers in records hold for the tables as they were then, with the buckets of
        sessions that were erased since. Those records are scrubbed, so tables that moved come out
        differently now: each bucket is looked for instead, and erasures are done at the end.
        """
        self.erased = set()

    def finish_replay(self):
        """Take the buckets of sessions that were erased out of the slot table."""
        cdef uint64_t i, place, n = <uint64_t>1 << self.roots.slot_log2
        cdef kalos_bucket* table
        if self.erased:
            table = <kalos_bucket*>self.at(self.roots.slot_table, n * sizeof(kalos_bucket))
            for i in range(n):
                if table[i].value != KALOS_BUCKET_EMPTY and table[i].value != KALOS_BUCKET_GONE \
                        and kalos_unseal(table[i].value, table[i].hash, &place) \
                        and place in self.erased:
                    self.write_gone(self.roots.slot_table, i)
        self.erased = None

    cdef int write_key(self, const kalos_change* c, uint32_t bucket, uint8_t what, bytes key,
                       uint64_t lsn) except -1:
        cdef uint64_t hash = self.key_hash(c.slot_off, what, key)
        return self.write_bucket(self.roots.key_table, self.roots.key_log2, bucket - 1, hash,
                                 kalos_seal(lsn, hash))

    cdef int write_bucket(self, uint64_t table, uint32_t log2, uint64_t i, uint64_t hash,
                          uint64_t value) except -1:
        """Fill bucket i; in a replay, the first empty one on the way unless the value is there."""
        cdef uint64_t mask = (<uint64_t>1 << log2) - 1, probes = 0
        cdef kalos_bucket* b = <kalos_bucket*>self.at(table, (mask + 1) * sizeof(kalos_bucket))
        if self.erased is not None:
            i = hash & mask
            while b[i].value != KALOS_BUCKET_EMPTY:
                if b[i].value == value and b[i].hash == hash:
                    return 0
                i = (i + 1) & mask
                probes += 1
                if probes > mask:
                    self.damage(table, "the table has no empty bucket")
        elif i > mask:
            self.damage(table, "a bucket outside of the table")
        b[i].hash = hash
        KALOS_STORE_RELEASE(&b[i].value, value)
        return 0

    cdef int write_gone(self, uint64_t table, uint64_t i) except -1:
        cdef kalos_bucket* b = <kalos_bucket*>self.at(table + i * sizeof(kalos_bucket),
                                                      sizeof(kalos_bucket))
        KALOS_STORE_RELEASE(&b.value, KALOS_BUCKET_GONE)
        b.hash = 0
        return 0

    cdef int write_image(self, uint64_t slot_off, const kalos_image* image) except -1:
        cdef kalos_slot* slot = <kalos_slot*>self.at(slot_off, sizeof(kalos_slot))
        cdef uint64_t version
        # A new slot may lie where a lost batch left bytes; its image is whole, whatever they are.
        if not kalos_unseal(slot.version, slot_off, &version):
            version = 0
        version += 1
        memcpy(&slot.image[version & 1], image, sizeof(kalos_image))
        KALOS_STORE_RELEASE(&slot.version, kalos_seal(version & KALOS_POSITION_MASK, slot_off))
        return 0

    cdef int write_row(self, const kalos_change* c) except -1:
        """What is known of a vector row, and its bit where the entry is dead."""
        cdef uint32_t row = c.entry.vector_row - 1
        cdef kalos_row* r
        self.rows.grow((<size_t>row + 1) * sizeof(kalos_row))
        self.dead.grow(row // 8 + 8)
        r = <kalos_row*>self.rows.base + row
        if c.entry.flags & KALOS_ENTRY_DEAD:
            kalos_row_write(r, row, 0, 0, c.entry_off, 1)
            KALOS_OR_RELEASE(<uint8_t*>self.dead.base + row // 8, <uint8_t>(1 << (row & 7)))
            return 0
        # The bit may be set: the row had another owner in a batch that was lost.
        KALOS_AND_RELEASE(<uint8_t*>self.dead.base + row // 8, <uint8_t>~(1 << (row & 7)))
        kalos_row_write(r, row, c.vector_crc, c.vector_factor, c.entry_off, 0)
        return 0

    cdef int set_dead(self, uint32_t row) except -1:
        """Mark a row as deleted. The row goes first: a bit that is set alone is damage."""
        cdef kalos_row* r
        cdef uint64_t entry = 0
        cdef int dead = 0
        self.rows.grow((<size_t>row + 1) * sizeof(kalos_row))
        self.dead.grow(row // 8 + 8)
        r = <kalos_row*>self.rows.base + row
        if not kalos_row_holds(r, row, &entry, &dead):
            entry = 0
        kalos_row_write(r, row, 0, 0, entry, 1)
        KALOS_OR_RELEASE(<uint8_t*>self.dead.base + row // 8, <uint8_t>(1 << (row & 7)))
        return 0

    cdef int write_roots(self, const kalos_roots* roots) except -1:
        cdef kalos_index_header* head = self.header()
        cdef uint64_t version
        cdef kalos_roots* to
        if not kalos_unseal(head.roots_version, SEALED_ROOTS, &version):
            version = 0
        version += 1
        to = &head.roots[version & 1]
        memcpy(to, roots, sizeof(kalos_roots))
        to.crc = kalos_crc32c(0, to, sizeof(kalos_roots) - 4)
        self.roots = to[0]
        KALOS_STORE_RELEASE(&head.roots_version,
                            kalos_seal(version & KALOS_POSITION_MASK, SEALED_ROOTS))
        return 0

    cdef int move_tables(self, const kalos_roots* roots) except -1:
        """Take over new roots; a table with a new place is filled from the old one first."""
        if roots.slot_table != self.roots.slot_table:
            self.rehash(self.roots.slot_table, self.roots.slot_log2, roots.slot_table,
                        roots.slot_log2)
        if roots.key_table != self.roots.key_table:
            self.rehash(self.roots.key_table, self.roots.key_log2, roots.key_table, roots.key_log2)
        return self.write_roots(roots)

    cdef int rehash(self, uint64_t old, uint32_t old_log2, uint64_t new,
                    uint32_t new_log2) except -1:
        cdef uint64_t n = <uint64_t>1 << old_log2, mask = (<uint64_t>1 << new_log2) - 1, i, j
        cdef kalos_bucket* to = <kalos_bucket*>self.at(new, (mask + 1) * sizeof(kalos_bucket))
        cdef kalos_bucket* table = <kalos_bucket*>self.at(old, n * sizeof(kalos_bucket))
        clear_table(to, mask + 1)
        for i in range(n):
            if table[i].value == KALOS_BUCKET_EMPTY or table[i].value == KALOS_BUCKET_GONE:
                continue
            j = table[i].hash & mask
            while to[j].value != KALOS_BUCKET_EMPTY:
                j = (j + 1) & mask
            to[j] = table[i]
        return 0

    def check_tables(self):
        """Raise where a bucket does not hold, before a table moves: it would be lost."""
        cdef kalos_roots roots
        cdef kalos_bucket* table
        cdef uint64_t i, n, place, value
        self.read_roots(&roots)
        for off, log2 in ((roots.slot_table, roots.slot_log2), (roots.key_table, roots.key_log2)):
            n = <uint64_t>1 << <uint32_t>log2
            table = <kalos_bucket*>self.at(off, n * sizeof(kalos_bucket))
            for i in range(n):
                value = table[i].value
                if value != KALOS_BUCKET_EMPTY and value != KALOS_BUCKET_GONE \
                        and not kalos_unseal(value, table[i].hash, &place):
                    self.damage(off + i * sizeof(kalos_bucket), "a bucket's check does not hold")
