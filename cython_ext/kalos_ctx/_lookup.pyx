"""Finding slots, keys, entries and vector rows in an index's mapped files.

Readers do this while the writer writes. Single words are published with release and read with
acquire; a slot and the roots are kept twice and switched by their version, so that a writer that
dies between leaves the older state readable. Every word on the way to an entry proves itself;
damage that the writer meets makes the next opening build the index anew.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from kalos_ctx._layout cimport (
    KALOS_BUCKET_EMPTY, KALOS_BUCKET_GONE, KALOS_IMAGE_DEAD, KALOS_RECORD_SCRUBBED,
    KALOS_SLOT_BLOCKS, KALOS_SLOT_BLOCK_SHIFT, kalos_bucket, kalos_crc32c, kalos_entry,
    kalos_extent, kalos_hash_bytes, kalos_hash_name, kalos_image, kalos_index_header,
    kalos_record, kalos_roots, kalos_row, kalos_slot, kalos_unseal,
)
from kalos_ctx._log cimport Log, kalos_row_holds, kalos_sections, kalos_sections_of

from kalos_ctx.errors import StoreCorrupt

cdef extern from *:
    """
    #define KALOS_LOAD_ACQUIRE(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define KALOS_FENCE_ACQUIRE() __atomic_thread_fence(__ATOMIC_ACQUIRE)
    """
    uint64_t KALOS_LOAD_ACQUIRE(uint64_t* p) nogil
    void KALOS_FENCE_ACQUIRE() nogil


cdef int table_clear(EntryTable* table) noexcept nogil:
    """Free what `open_table` allocated."""
    if table.runs != NULL and table.runs != &table.inline[0]:
        free(table.runs)
    table.runs = NULL
    return 0


cdef const kalos_entry* table_entry(const EntryTable* table, uint32_t seq) noexcept nogil:
    """The entry of a seq, unchecked, or NULL. Runs double in length: the newest comes first."""
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


cdef class Lookup:
    """What an index's files say."""

    cdef kalos_index_header* header(self):
        return <kalos_index_header*>self.arena.base

    @property
    def num_slots(self):
        """Slots that readers may look at."""
        cdef uint64_t n
        if not kalos_unseal(KALOS_LOAD_ACQUIRE(&self.header().num_slots), SEALED_SLOTS, &n):
            self.damage(72, "the number of slots does not hold its check")
        return n

    cdef object damage(self, uint64_t off, str what, str file="index"):
        """Raise StoreCorrupt. A writer leaves word: the next opening builds the index anew."""
        if self.writable and self.arena.base != NULL:
            self.header().suspect = 1
        raise StoreCorrupt(f"{self.folder}/{file} at byte {off}: {what}", f"{self.folder}/{file}",
                           off)

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
        cdef uint64_t word, version, later
        while True:
            word = KALOS_LOAD_ACQUIRE(&head.roots_version)
            if not kalos_unseal(word, SEALED_ROOTS, &version):
                self.damage(64, "the roots' version does not hold its check")
            memcpy(out, &head.roots[version & 1], sizeof(kalos_roots))
            KALOS_FENCE_ACQUIRE()
            kalos_unseal(KALOS_LOAD_ACQUIRE(&head.roots_version), SEALED_ROOTS, &later)
            if later - version < 2:
                break
        if out.crc != kalos_crc32c(0, out, sizeof(kalos_roots) - 4) or out.slot_log2 > 40 \
                or out.key_log2 > 40:
            self.damage(512, "the roots' checksum does not hold")
        return 0

    cdef uint64_t read_image(self, uint64_t slot_off, kalos_image* out) except? 0:
        """Copy the valid image of a slot; its version."""
        cdef kalos_slot* slot = <kalos_slot*>self.at(slot_off, sizeof(kalos_slot))
        cdef uint64_t version, later
        while True:
            if not kalos_unseal(KALOS_LOAD_ACQUIRE(&slot.version), slot_off, &version):
                self.damage(slot_off, "a slot's version does not hold its check")
            memcpy(out, &slot.image[version & 1], sizeof(kalos_image))
            KALOS_FENCE_ACQUIRE()
            # One switch in between wrote the other image; two may have written this one.
            kalos_unseal(KALOS_LOAD_ACQUIRE(&slot.version), slot_off, &later)
            if later - version < 2:
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
        """Arena offset of the slot of a name, 0 for none; `bucket`: where it stands or would."""
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
            if word == KALOS_BUCKET_EMPTY:
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

        `what` is ord("k") for an idempotency key, ord("g") for a group's first turn, ord("c") for
        its first assistant turn. A record that was rolled back or erased does not count.
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
            if word == KALOS_BUCKET_EMPTY:
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

    cdef int check_row(self, uint32_t row, kalos_row* out) except -1:
        """Copy what is known of a row; 1 where it is dead.

        Raises StoreCorrupt where row or bit do not hold.
        """
        cdef uint64_t entry = 0
        cdef int dead = 0
        self.rows.check((<size_t>row + 1) * sizeof(kalos_row))
        self.dead.check(row // 8 + 1)
        out[0] = (<kalos_row*>self.rows.base)[row]
        if not kalos_row_holds(out, row, &entry, &dead):
            self.damage(<uint64_t>row * sizeof(kalos_row), "a row's check does not hold", "rows")
        if dead != ((<const uint8_t*>self.dead.base)[row // 8] >> (row & 7) & 1):
            self.damage(row // 8, "a row's bit is not what is known of the row", "dead")
        out.entry = entry
        return dead
