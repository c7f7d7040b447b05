"""The index of a store: a mapped arena that readers share.

Everything in it follows from the log. `apply` is the only place that writes: the writer builds a record,
appends it, and applies it; recovery applies the records behind the last checkpoint again, which is safe
because a record says where everything goes and what it becomes (a redo reads nothing that it repairs). So the
index needs no log of its own, whatever order its pages reached the disk in.

Single words are published with release and read with acquire; a slot and the roots are kept twice and
switched by their version, so that a writer that dies between leaves the older state readable.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from kalos_ctx._layout cimport (
    KALOS_ARENA_FIRST, KALOS_BUCKET_GONE, KALOS_ENDIAN_MARK, KALOS_ENTRY_DEAD, KALOS_FORMAT_MAJOR,
    KALOS_FORMAT_MINOR, KALOS_IMAGE_DEAD, KALOS_KIND_ERASE, KALOS_RECORD_ROOTS, KALOS_RECORD_SCRUBBED,
    KALOS_SLOT_BLOCKS, KALOS_SLOT_BLOCK_SHIFT, kalos_bucket, kalos_change, kalos_crc32c, kalos_cursor,
    kalos_entry, kalos_extent, kalos_hash_bytes, kalos_hash_name, kalos_image, kalos_index_header,
    kalos_record, kalos_roots, kalos_row, kalos_seal, kalos_slot, kalos_unseal,
)
from kalos_ctx._log cimport Log, kalos_sections, kalos_sections_of
from kalos_ctx._segment cimport MappedFile

from kalos_ctx.errors import StoreCorrupt

cdef extern from *:
    """
    #define KALOS_LOAD_ACQUIRE(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define KALOS_STORE_RELEASE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    #define KALOS_OR_RELEASE(p, v) __atomic_fetch_or((p), (v), __ATOMIC_RELEASE)
    #define KALOS_FENCE_ACQUIRE() __atomic_thread_fence(__ATOMIC_ACQUIRE)
    """
    uint64_t KALOS_LOAD_ACQUIRE(uint64_t* p) nogil
    void KALOS_STORE_RELEASE(uint64_t* p, uint64_t v) nogil
    void KALOS_OR_RELEASE(uint8_t* p, uint8_t v) nogil
    void KALOS_FENCE_ACQUIRE() nogil

INDEX_NAMES = ("index", "rows", "dead")
cdef uint32_t FIRST_LOG2 = 8        # buckets of a new table: 4 KiB
cdef uint32_t HEADER_BYTES = sizeof(kalos_index_header)


cdef int table_clear(EntryTable* table) noexcept nogil:
    """Free what `open_table` allocated."""
    if table.runs != NULL and table.runs != &table.inline[0]:
        free(table.runs)
    table.runs = NULL
    return 0


cdef const kalos_entry* table_entry(const EntryTable* table, uint32_t seq) noexcept nogil:
    """The entry of a seq, unchecked, or NULL. Runs double in length, so the newest is tried first."""
    cdef uint32_t lo = 0, hi = table.num_runs, mid
    cdef const EntryRun* run
    if hi == 0:
        return NULL
    run = &table.runs[hi - 1]
    if seq < run.first:
        while hi - lo > 1:
            mid = (lo + hi) >> 1
            if table.runs[mid].first <= seq:
                lo = mid
            else:
                hi = mid
        run = &table.runs[lo]
    if seq - run.first >= run.count:
        return NULL
    return run.entries + (seq - run.first)


cdef class Index:
    """Slots, entries and tables of one generation of a store."""

    def __init__(self, int dirfd, str folder, uint64_t salt, bint writable, bint create, bint private=False):
        self.folder = folder
        self.salt = salt
        self.writable = writable
        cdef list files = [
            MappedFile.open_file(dirfd, name, writable=writable, create=create, private=private,
                                 label=f"{folder}/{name}")
            for name in INDEX_NAMES]
        self.arena, self.rows, self.dead = files

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

    # ---- Header ---------------------------------------------------------------------------------

    cdef kalos_index_header* header(self):
        return <kalos_index_header*>self.arena.base

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
        memcpy(head.magic, b"KALOSIDX", 8)
        head.endian = KALOS_ENDIAN_MARK
        head.format = KALOS_FORMAT_MAJOR << 16 | KALOS_FORMAT_MINOR
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
        """Whether the header is whole and of this store; a copied file does not pass `is_original`."""
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
                and head.format == KALOS_FORMAT_MAJOR << 16 | KALOS_FORMAT_MINOR
                and memcmp(head.uuid, <const char*>uuid, 16) == 0 and head.generation == generation)

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
        """End of the last batch that was applied."""
        return self.header().applied

    @applied.setter
    def applied(self, uint64_t lsn):
        KALOS_STORE_RELEASE(&self.header().applied, lsn)

    @property
    def num_slots(self):
        """Slots that readers may look at."""
        return KALOS_LOAD_ACQUIRE(&self.header().num_slots)

    def start_writing(self):
        """Load the roots for `apply`."""
        self.read_roots(&self.roots)

    # ---- Reading --------------------------------------------------------------------------------

    cdef object damage(self, uint64_t off, str what):
        raise StoreCorrupt(f"{self.folder}/index at byte {off}: {what}", f"{self.folder}/index", off)

    cdef char* at(self, uint64_t off, size_t n) except NULL:
        """Pointer to n bytes of the arena."""
        if off + n > self.arena.size or off + n < off:
            self.arena.check(0)
            if off + n > self.arena.size or off + n < off:
                self.damage(off, "a place outside of the file")
        if off + n > self.arena.mapped:
            self.arena.map_at_least(off + n)
        return self.arena.base + off

    cdef int read_roots(self, kalos_roots* out) except -1:
        cdef kalos_index_header* head = self.header()
        cdef uint64_t version
        while True:
            version = KALOS_LOAD_ACQUIRE(&head.roots_version)
            memcpy(out, &head.roots[version & 1], sizeof(kalos_roots))
            KALOS_FENCE_ACQUIRE()
            if KALOS_LOAD_ACQUIRE(&head.roots_version) - version < 2:
                break
        if out.crc != kalos_crc32c(0, out, sizeof(kalos_roots) - 4) or out.slot_log2 > 40 \
                or out.key_log2 > 40:
            self.damage(512, "the roots' checksum does not hold")
        return 0

    cdef uint64_t read_image(self, uint64_t slot_off, kalos_image* out) except? 0:
        """Copy the valid image of a slot; its version."""
        cdef kalos_slot* slot = <kalos_slot*>self.at(slot_off, sizeof(kalos_slot))
        cdef uint64_t version
        while True:
            version = KALOS_LOAD_ACQUIRE(&slot.version)
            memcpy(out, &slot.image[version & 1], sizeof(kalos_image))
            KALOS_FENCE_ACQUIRE()
            # One switch in between wrote the other image; two may have written this one.
            if KALOS_LOAD_ACQUIRE(&slot.version) - version < 2:
                break
        if out.crc != kalos_crc32c(0, out, sizeof(kalos_image) - 4):
            self.damage(slot_off, "a slot's checksum does not hold")
        return version

    cdef uint64_t slot_of(self, uint32_t slot_id) except? 0:
        """Arena offset of a slot by its ID."""
        cdef kalos_roots roots
        cdef uint32_t block = 0, first = 0
        self.read_roots(&roots)
        while slot_id - first >= (<uint32_t>1 << (KALOS_SLOT_BLOCK_SHIFT + block)):
            first += <uint32_t>1 << (KALOS_SLOT_BLOCK_SHIFT + block)
            block += 1
        if block >= KALOS_SLOT_BLOCKS or roots.slot_blocks[block] == 0:
            self.damage(512, "a slot outside of the blocks")
        return roots.slot_blocks[block] + (slot_id - first) * sizeof(kalos_slot)

    cdef uint64_t find_slot(self, Log log, uint32_t kind, bytes tenant, bytes name,
                            kalos_image* out, uint32_t* bucket) except? 0:
        """Arena offset of the slot with this identity, 0 for none; `bucket` is where it stands or would."""
        cdef kalos_roots roots
        cdef kalos_bucket* table
        cdef uint64_t hash = kalos_hash_name(self.salt, kind, <const char*>tenant, len(tenant),
                                             <const char*>name, len(name))
        cdef uint64_t mask, i, probes = 0, place, word
        cdef kalos_sections sections
        self.read_roots(&roots)
        mask = (<uint64_t>1 << roots.slot_log2) - 1
        table = <kalos_bucket*>self.at(roots.slot_table, (mask + 1) * sizeof(kalos_bucket))
        i = hash & mask
        while probes <= mask:
            word = KALOS_LOAD_ACQUIRE(&table[i].value)
            if word == 0:
                bucket[0] = <uint32_t>i
                return 0
            if word != KALOS_BUCKET_GONE:
                if not kalos_unseal(word, table[i].hash, &place):
                    self.damage(roots.slot_table + i * sizeof(kalos_bucket),
                                "a bucket's check does not hold")
                if table[i].hash == hash:
                    self.read_image(place, out)
                    if out.kind == kind and not out.flags & KALOS_IMAGE_DEAD:
                        log.sections(out.name_lsn, &sections)
                        if (sections.change.tenant_len == <uint32_t>len(tenant)
                                and sections.change.name_len == <uint32_t>len(name)
                                and memcmp(sections.tenant, <const char*>tenant, len(tenant)) == 0
                                and memcmp(sections.name, <const char*>name, len(name)) == 0):
                            bucket[0] = <uint32_t>i
                            return place
            i = (i + 1) & mask
            probes += 1
        return self.damage(roots.slot_table, "the slot table has no empty bucket")

    cdef uint64_t key_hash(self, uint64_t slot_off, uint8_t what, bytes key) noexcept:
        cdef uint64_t hash = kalos_hash_bytes(self.salt ^ slot_off ^ (<uint64_t>what << 56),
                                              <const char*>key, len(key))
        return hash if hash else 1

    cdef uint64_t find_key(self, Log log, uint64_t hash, uint64_t slot_off, uint8_t what, bytes key,
                           kalos_sections* out, uint32_t* bucket) except? 0:
        """Position of the newest record of the slot with this key or group; 0 for none.

        `what` is ord("k") for an idempotency key, ord("g") for a group's first turn, ord("c") for its first
        assistant turn. A record that was rolled back or erased does not count.
        """
        cdef kalos_roots roots
        cdef kalos_bucket* table
        cdef uint64_t mask, i, probes = 0, lsn, word, found = 0
        cdef kalos_sections sections
        cdef const kalos_record* rec
        cdef EntryTable entries
        cdef const kalos_entry* entry
        self.read_roots(&roots)
        mask = (<uint64_t>1 << roots.key_log2) - 1
        table = <kalos_bucket*>self.at(roots.key_table, (mask + 1) * sizeof(kalos_bucket))
        i = hash & mask
        while probes <= mask:
            word = KALOS_LOAD_ACQUIRE(&table[i].value)
            if word == 0:
                bucket[0] = <uint32_t>i
                return found
            if word != KALOS_BUCKET_GONE:
                if not kalos_unseal(word, table[i].hash, &lsn):
                    self.damage(roots.key_table + i * sizeof(kalos_bucket),
                                "a bucket's check does not hold")
                if table[i].hash == hash:
                    rec = log.record(lsn)
                    if not rec.flags & KALOS_RECORD_SCRUBBED and kalos_sections_of(rec, &sections) \
                            and sections.change.slot_off == slot_off \
                            and self.has_key(&sections, what, key):
                        self.open_table(slot_off, &entries)
                        entry = table_entry(&entries, sections.change.entry.seq)
                        if entry != NULL and entry.lsn == lsn and (found == 0 or what == c"k"):
                            found = lsn
                            out[0] = sections
                        table_clear(&entries)
            i = (i + 1) & mask
            probes += 1
        return self.damage(roots.key_table, "the key table has no empty bucket")

    cdef bint has_key(self, const kalos_sections* s, uint8_t what, bytes key):
        if what == c"k":
            return (s.change.key_len == <uint32_t>len(key)
                    and memcmp(s.key, <const char*>key, len(key)) == 0)
        return (s.change.group_len == <uint32_t>len(key)
                and memcmp(s.group, <const char*>key, len(key)) == 0)

    cdef int open_table(self, uint64_t slot_off, EntryTable* out) except -1:
        """Image and entry runs of a slot. Pair with `table_clear`."""
        cdef const kalos_extent* extents
        cdef uint64_t place
        cdef uint32_t i, stop
        out.runs = NULL
        out.slot_off = slot_off
        out.version = self.read_image(slot_off, &out.image)
        out.num_runs = out.image.num_extents
        if out.num_runs == 0:
            if out.image.num_entries:
                self.damage(slot_off, "a slot with entries has no place for them")
            return 0
        extents = <const kalos_extent*>self.at(out.image.extents_off,
                                               out.num_runs * sizeof(kalos_extent))
        if out.num_runs <= RUNS_INLINE:
            out.runs = &out.inline[0]
        else:
            out.runs = <EntryRun*>malloc(out.num_runs * sizeof(EntryRun))
            if out.runs == NULL:
                raise MemoryError
        try:
            for i in range(out.num_runs):
                stop = extents[i + 1].first_seq if i + 1 < out.num_runs else out.image.num_entries
                if not kalos_unseal(extents[i].place, <uint64_t>extents[i].first_seq << 32
                                    | extents[i].capacity, &place) \
                        or stop < extents[i].first_seq \
                        or stop - extents[i].first_seq > extents[i].capacity \
                        or (i == 0 and extents[0].first_seq != 0):
                    self.damage(out.image.extents_off + i * sizeof(kalos_extent),
                                "an extent's check does not hold")
                out.runs[i].first = extents[i].first_seq
                out.runs[i].count = stop - extents[i].first_seq
                out.runs[i].entries = <const kalos_entry*>self.at(
                    place, out.runs[i].count * sizeof(kalos_entry))
        except BaseException:
            table_clear(out)
            raise
        return 0

    cdef int check_entry(self, const kalos_entry* entry, uint32_t seq) except -1:
        """Raise where an entry's checksum or place does not hold."""
        if entry == NULL or entry.crc != kalos_crc32c(0, entry, sizeof(kalos_entry) - 4) \
                or entry.seq != seq:
            self.damage(<char*>entry - self.arena.base if entry != NULL else 0,
                        "an entry's checksum does not hold")
        return 0

    # ---- Writing: redo of one record ---------------------------------------------------------------

    cdef int apply(self, const kalos_record* rec) except -1:
        """Bring the index to the state behind a valid record. Idempotent, and reads only the record."""
        cdef kalos_sections s
        cdef const kalos_change* c
        if not kalos_sections_of(rec, &s):
            raise StoreCorrupt("a record's sections do not fit it")
        c = s.change
        self.arena.grow(rec.cursor.arena_used)
        self.cursor = rec.cursor
        if rec.flags & KALOS_RECORD_ROOTS and s.roots != NULL:
            self.move_tables(s.roots)
        if rec.flags & KALOS_RECORD_SCRUBBED:
            self.fill_gone(c)
            return 0
        if c.num_extents:
            memcpy(self.at(c.extents_off, c.num_extents * sizeof(kalos_extent)), s.extents,
                   c.num_extents * sizeof(kalos_extent))
        if c.entry_off:
            memcpy(self.at(c.entry_off, sizeof(kalos_entry)), &c.entry, sizeof(kalos_entry))
            if c.entry.vector_row:
                self.write_row(c)
        if c.slot_off:
            self.write_image(c.slot_off, &c.image)
            if rec.kind == KALOS_KIND_ERASE:
                self.write_image(c.slot_off, &c.image)  # over the other copy too
        if c.slot_bucket:
            self.write_bucket(self.roots.slot_table, c.slot_bucket - 1, c.image.hash,
                              KALOS_BUCKET_GONE if rec.kind == KALOS_KIND_ERASE else
                              kalos_seal(c.slot_off, c.image.hash))
        if c.key_bucket:
            self.write_key(c, c.key_bucket, c"k", s.key[:c.key_len], rec.lsn)
        if c.group_bucket:
            self.write_key(c, c.group_bucket, c"g", s.group[:c.group_len], rec.lsn)
        if c.call_bucket:
            self.write_key(c, c.call_bucket, c"c", s.group[:c.group_len], rec.lsn)
        if c.slot_off and c.image.slot_id + 1 > self.header().num_slots:
            KALOS_STORE_RELEASE(&self.header().num_slots, c.image.slot_id + 1)
        return 0

    cdef int fill_gone(self, const kalos_change* c) except -1:
        """A scrubbed record's buckets stay taken, so that probes walk on behind them."""
        if c.slot_bucket:
            self.write_bucket(self.roots.slot_table, c.slot_bucket - 1, 0, KALOS_BUCKET_GONE)
        for bucket in (c.key_bucket, c.group_bucket, c.call_bucket):
            if bucket:
                self.write_bucket(self.roots.key_table, bucket - 1, 0, KALOS_BUCKET_GONE)
        if c.entry_off and c.entry.vector_row:
            self.set_dead(c.entry.vector_row - 1)
        return 0

    cdef int write_key(self, const kalos_change* c, uint32_t bucket, uint8_t what, bytes key,
                       uint64_t lsn) except -1:
        cdef uint64_t hash = self.key_hash(c.slot_off, what, key)
        return self.write_bucket(self.roots.key_table, bucket - 1, hash, kalos_seal(lsn, hash))

    cdef int write_bucket(self, uint64_t table, uint32_t bucket, uint64_t hash, uint64_t value) except -1:
        cdef kalos_bucket* b = <kalos_bucket*>self.at(table + bucket * sizeof(kalos_bucket),
                                                      sizeof(kalos_bucket))
        if value != KALOS_BUCKET_GONE:
            b.hash = hash
            KALOS_STORE_RELEASE(&b.value, value)
        else:
            KALOS_STORE_RELEASE(&b.value, value)
            b.hash = 0
        return 0

    cdef int write_image(self, uint64_t slot_off, const kalos_image* image) except -1:
        cdef kalos_slot* slot = <kalos_slot*>self.at(slot_off, sizeof(kalos_slot))
        cdef uint64_t version = slot.version + 1
        memcpy(&slot.image[version & 1], image, sizeof(kalos_image))
        KALOS_STORE_RELEASE(&slot.version, version)
        return 0

    cdef int write_row(self, const kalos_change* c) except -1:
        """What is known of a vector row, and its bit where the entry is dead."""
        cdef uint32_t row = c.entry.vector_row - 1
        cdef kalos_row* r
        self.rows.grow((<size_t>row + 1) * sizeof(kalos_row))
        self.dead.grow(row // 8 + 8)
        r = <kalos_row*>self.rows.base + row
        r.crc = c.vector_crc
        r.factor = c.vector_factor
        r.entry = c.entry_off
        if c.entry.flags & KALOS_ENTRY_DEAD:
            self.set_dead(row)
        return 0

    cdef int set_dead(self, uint32_t row) except -1:
        self.dead.grow(row // 8 + 8)
        KALOS_OR_RELEASE(<uint8_t*>self.dead.base + row // 8, <uint8_t>(1 << (row & 7)))
        return 0

    cdef int write_roots(self, const kalos_roots* roots) except -1:
        cdef kalos_index_header* head = self.header()
        cdef uint64_t version = head.roots_version + 1
        cdef kalos_roots* to = &head.roots[version & 1]
        memcpy(to, roots, sizeof(kalos_roots))
        to.crc = kalos_crc32c(0, to, sizeof(kalos_roots) - 4)
        self.roots = to[0]
        KALOS_STORE_RELEASE(&head.roots_version, version)
        return 0

    cdef int move_tables(self, const kalos_roots* roots) except -1:
        """Take over new roots; a table with a new place is filled from the old one first."""
        if roots.slot_table != self.roots.slot_table:
            self.rehash(self.roots.slot_table, self.roots.slot_log2, roots.slot_table, roots.slot_log2)
        if roots.key_table != self.roots.key_table:
            self.rehash(self.roots.key_table, self.roots.key_log2, roots.key_table, roots.key_log2)
        return self.write_roots(roots)

    cdef int rehash(self, uint64_t old, uint32_t old_log2, uint64_t new, uint32_t new_log2) except -1:
        cdef uint64_t n = <uint64_t>1 << old_log2, mask = (<uint64_t>1 << new_log2) - 1, i, j
        cdef kalos_bucket* to = <kalos_bucket*>self.at(new, (mask + 1) * sizeof(kalos_bucket))
        cdef kalos_bucket* table = <kalos_bucket*>self.at(old, n * sizeof(kalos_bucket))
        memset(to, 0, (mask + 1) * sizeof(kalos_bucket))
        for i in range(n):
            if table[i].value == 0 or table[i].value == KALOS_BUCKET_GONE:
                continue
            j = table[i].hash & mask
            while to[j].value != 0:
                j = (j + 1) & mask
            to[j] = table[i]
        return 0

    # ---- What recovery and verification ask --------------------------------------------------------

    def cursor_bytes(self):
        """The cursor as bytes, for the checkpoint."""
        return (<char*>&self.cursor)[:sizeof(kalos_cursor)]

    def set_cursor(self, bytes value):
        """Continue from a checkpoint's cursor."""
        memcpy(&self.cursor, <const char*>value, sizeof(kalos_cursor))
