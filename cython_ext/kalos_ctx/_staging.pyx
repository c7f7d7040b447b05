"""Staging what a call changes: slots, entries, units, keys and tables of one batch.

A `Stage` is a slot as it will be behind the batch; nothing of the store changes before the commit.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

from kalos_ctx._batch cimport Draft, Parts
from kalos_ctx._index cimport table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_ENTRY_GROUPED, KALOS_ENTRY_ORPHAN, KALOS_ENTRY_TTL, KALOS_HAS_GROUP, KALOS_HAS_KEY,
    KALOS_HAS_METADATA, KALOS_HAS_TEXT, KALOS_HAS_VECTOR, KALOS_IMAGE_COMPLEX, KALOS_IMAGE_FORKED,
    KALOS_IMAGE_LASTING, KALOS_IMAGE_TTL, KALOS_IMAGE_VECTORS, KALOS_KIND_SEGMENTS,
    KALOS_KIND_SLOT, KALOS_KIND_TABLES, KALOS_KIND_TURN, KALOS_ROLE_ASSISTANT,
    KALOS_ROLE_FUNCTION, KALOS_ROLE_TOOL, KALOS_ROLE_USER, KALOS_SLOT_BLOCK_SHIFT, kalos_bucket,
    kalos_change, kalos_crc32c, kalos_entry, kalos_extent, kalos_hash_name, kalos_image,
    kalos_record, kalos_roots, kalos_seal, kalos_slot,
)
from kalos_ctx._log cimport kalos_round_up, kalos_sections
from kalos_ctx._opening cimport WritableStore

cdef uint32_t FIRST_RUN = 4         # entries of a slot's first run; each further one doubles
cdef uint32_t LARGEST_RUN = 1 << 16


cdef uint64_t hash_of(StagingStore self, uint32_t kind, bytes tenant, bytes name) noexcept:
    return kalos_hash_name(self.control.head.salt, kind, <const char*>tenant, len(tenant),
                           <const char*>name, len(name))


cdef int fill_texts(Draft d, kalos_change* c, Parts* p) noexcept:
    """The draft's variable parts, and which of them there are."""
    if d.text is not None:
        c.present |= KALOS_HAS_TEXT
        c.text_len, p.text = <uint32_t>len(d.text), d.text
    if d.metadata is not None:
        c.present |= KALOS_HAS_METADATA
        c.metadata_len, p.metadata = <uint32_t>len(d.metadata), d.metadata
    if d.group is not None:
        c.present |= KALOS_HAS_GROUP
        c.group_len, p.group = <uint32_t>len(d.group), d.group
    if d.key is not None:
        c.present |= KALOS_HAS_KEY
        c.key_len, p.key = <uint32_t>len(d.key), d.key
        memcpy(c.digest, <const char*>d.digest, 16)
    if d.vector is not None:
        c.present |= KALOS_HAS_VECTOR
    return 0


cdef class StagingStore(WritableStore):
    """A store with a batch that is being staged."""

    cdef int begin(self) except -1:
        self.writing()
        self.batch.begin()
        self.batch.synced = self.synced == self.log.end
        self.roots = self.index.roots
        self.staged_entries = []
        self.staged_keys = {}
        self.staged_digests = {}
        return 0

    cdef int make_room(self, uint32_t slots, uint32_t keys) except -1:
        """Move a hash table to a larger place, in a batch of its own, before it is 60 % full."""
        cdef kalos_change c
        cdef Parts p
        cdef kalos_roots roots = self.index.roots
        while (self.index.cursor.session_keys + slots) * 10 > (<uint64_t>6 << roots.slot_log2):
            roots.slot_log2 += 1
        while (self.index.cursor.idempotency_keys + keys) * 10 > (<uint64_t>6 << roots.key_log2):
            roots.key_log2 += 1
        if roots.slot_log2 == self.index.roots.slot_log2 \
                and roots.key_log2 == self.index.roots.key_log2:
            return 0
        self.writing()
        self.index.check_tables()
        self.begin()
        if roots.slot_log2 != self.index.roots.slot_log2:
            roots.slot_table = self.batch.alloc_arena(sizeof(kalos_bucket) << roots.slot_log2)
        if roots.key_log2 != self.index.roots.key_log2:
            roots.key_table = self.batch.alloc_arena(sizeof(kalos_bucket) << roots.key_log2)
        memset(&c, 0, sizeof(c))
        memset(&p, 0, sizeof(p))
        p.roots = &roots
        self.batch.stage_record(KALOS_KIND_TABLES, 0, &c, &p)
        return self.commit()

    cdef int change_of(self, Stage* s, kalos_change* c) except -1:
        """A change of the slot that so far changes nothing; the image is set when it is staged."""
        memset(c, 0, sizeof(kalos_change))
        c.slot_off = s.slot_off
        c.prev_lsn = s.image.last_lsn
        return 0

    cdef int open_stage(self, uint32_t kind, bytes tenant, bytes name, bint create,
                        Stage* s) except -1:
        """Load a slot for changing; a new one is staged where `create`. 1 if it exists, else 0."""
        memset(s, 0, sizeof(Stage))
        s.slot_off = self.find(kind, tenant, name, &s.image)
        if s.slot_off == 0:
            if create:
                self.new_slot(kind, tenant, name, s)
            return 0
        self.index.open_table(s.slot_off, &s.table)
        s.base = s.image.num_entries
        s.extent_room = s.image.num_extents
        if s.extent_room:
            s.extents = <kalos_extent*>realloc(NULL, s.extent_room * sizeof(kalos_extent))
            if s.extents == NULL:
                raise MemoryError
            memcpy(s.extents,
                   self.index.at(s.image.extents_off, s.extent_room * sizeof(kalos_extent)),
                   s.extent_room * sizeof(kalos_extent))
        return 1

    cdef void close_stage(self, Stage* s):
        table_clear(&s.table)
        free(s.extents)
        s.extents = NULL

    cdef int new_slot(self, uint32_t kind, bytes tenant, bytes name, Stage* s) except -1:
        """Stage the record that brings a slot into being."""
        cdef kalos_change c
        cdef Parts p
        cdef uint32_t slot_id = self.batch.next.num_slots, block = 0, first = 0
        cdef uint64_t place
        memset(&p, 0, sizeof(p))
        while slot_id - first >= (<uint32_t>1 << (KALOS_SLOT_BLOCK_SHIFT + block)):
            first += <uint32_t>1 << (KALOS_SLOT_BLOCK_SHIFT + block)
            block += 1
        if self.roots.slot_blocks[block] == 0:
            # 256-byte alignment keeps a slot inside one sector.
            place = kalos_round_up(self.batch.next.arena_used, 256)
            self.batch.next.arena_used = \
                place + (sizeof(kalos_slot) << (KALOS_SLOT_BLOCK_SHIFT + block))
            self.roots.slot_blocks[block] = place
            p.roots = &self.roots
        s.slot_off = self.roots.slot_blocks[block] + (slot_id - first) * sizeof(kalos_slot)
        self.batch.next.num_slots += 1
        self.batch.next.session_keys += 1
        memset(&s.image, 0, sizeof(s.image))
        s.image.hash = hash_of(self, kind, tenant, name)
        s.image.kind = kind
        s.image.slot_id = slot_id
        s.image.family = slot_id
        memset(&c, 0, sizeof(c))
        c.slot_off = s.slot_off
        c.name_len = <uint32_t>len(name)
        c.tenant_len = <uint32_t>len(tenant)
        p.name = name
        p.tenant = tenant
        c.slot_bucket = self.batch.claim(self.roots.slot_table, self.roots.slot_log2, s.image.hash)
        s.image.name_lsn = self.batch.place(
            kalos_round_up(sizeof(kalos_record) + sizeof(kalos_change) + len(name) + len(tenant)
                           + (sizeof(kalos_roots) if p.roots != NULL else 0), 64))
        c.image = s.image
        s.image.last_lsn = self.batch.stage_record(KALOS_KIND_SLOT, 0, &c, &p)
        return 0

    cdef const kalos_entry* entry_at(self, Stage* s, uint32_t seq) except NULL:
        """A checked entry of the slot, staged ones included."""
        cdef const kalos_entry* e
        if seq >= s.base:
            return <const kalos_entry*><const char*><bytes>self.staged_entries[seq - s.base]
        e = table_entry(&s.table, seq)
        self.index.check_entry(e, seq)
        return e

    cdef uint32_t unit_start(self, Stage* s, uint32_t seq) except? 0:
        """First turn of the unit that holds a turn, as of now: walk back from the last unit."""
        cdef uint32_t at = s.image.num_entries - 1, first
        while True:
            first = self.entry_at(s, at).unit_first
            if first <= seq:
                return first
            at = first - 1

    cdef int join_units(self, Stage* s, Draft d, kalos_change* c) except -1:
        """Which unit a new turn closes (CONTRACT.md: group, tool results); the group's buckets."""
        cdef uint32_t seq = s.image.num_entries, first = seq
        cdef bint orphan = False
        cdef bint result = d.role == KALOS_ROLE_TOOL or d.role == KALOS_ROLE_FUNCTION
        cdef bytes group = d.group
        if d.trim_prev and seq:
            first = min(first, self.unit_start(s, seq - 1))
        if group is not None:
            orphan = result and self.group_member(s, c"c", group) < 0
            # An orphan is in no unit, so it begins no group either.
            member = -1 if orphan else self.group_member(s, c"g", group)
            if member >= 0:
                first = min(first, self.unit_start(s, member))
            elif not orphan:
                c.group_bucket = self.claim_key(s, c"g", group, seq)
            if d.role == KALOS_ROLE_ASSISTANT and self.group_member(s, c"c", group) < 0:
                c.call_bucket = self.claim_key(s, c"c", group, seq)
        elif result:
            orphan = s.image.last_assistant == 0
            if not orphan:
                first = min(first, self.unit_start(s, s.image.last_assistant - 1))
        if orphan:
            first = seq
            c.entry.flags |= KALOS_ENTRY_ORPHAN
        if group is not None:
            c.entry.flags |= KALOS_ENTRY_GROUPED
        c.entry.unit_first = first
        return 0

    cdef long group_member(self, Stage* s, uint8_t what, bytes group) except -2:
        """seq of the group's first turn ("g") or first assistant turn ("c"), -1 for none yet."""
        cdef kalos_sections found
        cdef uint32_t bucket
        if (what, group) in self.staged_keys:
            return self.staged_keys[(what, group)]
        if s.base == 0 or not self.index.find_key(
                self.log, self.index.key_hash(s.slot_off, what, group), s.slot_off, what, group,
                &found, &bucket):
            return self.inherited_member(s, what, group)
        return found.change.entry.seq

    cdef long inherited_member(self, Stage* s, uint8_t what, bytes group) except -2:
        """As group_member among the entries that a fork shares: it has not its parent's keys."""
        cdef kalos_sections found
        cdef const kalos_entry* e
        cdef uint32_t seq
        if not s.image.flags & KALOS_IMAGE_FORKED:
            return -1
        for seq in range(min(s.image.shared_below, s.base)):
            e = self.entry_at(s, seq)
            if e.flags & KALOS_ENTRY_GROUPED and not e.flags & KALOS_ENTRY_ORPHAN \
                    and (what == c"g" or e.role == KALOS_ROLE_ASSISTANT):
                self.log.sections(e.lsn, &found)
                if found.change.group_len == <uint32_t>len(group) \
                        and memcmp(found.group, <const char*>group, len(group)) == 0:
                    return seq
        return -1

    cdef uint32_t claim_key(self, Stage* s, uint8_t what, bytes key, uint32_t seq) except? 0:
        """A free bucket of the key table for a key of the slot; + 1."""
        self.staged_keys[(what, key)] = seq
        self.batch.next.idempotency_keys += 1
        return self.batch.claim(self.roots.key_table, self.roots.key_log2,
                                self.index.key_hash(s.slot_off, what, key))

    cdef int add_entry(self, uint32_t kind, Stage* s, Draft d) except -1:
        """Stage one turn or passage behind the slot's entries."""
        cdef kalos_change c
        cdef Parts p
        cdef uint64_t num_live = 0 if d.live is None else d.live.shape[0]
        cdef uint64_t n = 0 if d.ids is None else d.ids.shape[0]
        cdef const int32_t* ids = <const int32_t*>&d.ids[0] if n else NULL
        cdef const int32_t* live = <const int32_t*>&d.live[0] if num_live else NULL
        self.change_of(s, &c)
        memset(&p, 0, sizeof(p))
        c.created_at = d.created_at
        c.expires_at = d.expires_at
        c.entry.seq = s.image.num_entries
        c.entry.role = d.role
        c.entry.flags = d.flags
        c.entry.num_tokens = <uint32_t>n
        c.entry.live_tokens = <uint32_t>num_live
        c.entry.prefix_len = d.prefix_len
        c.entry.suffix_len = d.suffix_len
        c.entry.trim_prev = d.trim_prev
        c.entry.tokens_pos = self.batch.stage_tokens(ids, n, live, num_live)
        # From here on the staged copy counts: another thread may write into the caller's buffer.
        ids = <const int32_t*>(self.batch.token_bytes.data + self.batch.token_bytes.size
                               - 4 * (kalos_round_up(n, 16) + kalos_round_up(num_live, 16)))
        live = ids + kalos_round_up(n, 16)
        c.entry.token_crc = kalos_crc32c(0, ids, n * 4)
        c.entry.live_crc = kalos_crc32c(0, live, num_live * 4)
        fill_texts(d, &c, &p)
        if kind == KALOS_KIND_TURN:
            self.join_units(s, d, &c)
            c.entry.sum = s.image.sum
            if not c.entry.flags & KALOS_ENTRY_ORPHAN:
                c.entry.sum = s.image.sum - d.trim_prev + n
        else:
            c.entry.unit_first = c.entry.seq
            c.entry.sum = d.passage_id
        if d.key is not None:
            c.key_bucket = self.claim_key(s, c"k", d.key, c.entry.seq)
        if d.vector is not None:
            c.entry.vector_row = self.batch.stage_row(&d.vector[0]) + 1
            c.vector_crc = kalos_crc32c(0, &d.vector[0], d.vector_nbytes)
            c.vector_factor = d.factor
        if self.payload_in_log:
            c.tokens_len, c.live_len = <uint32_t>(n * 4), <uint32_t>(num_live * 4)
            p.tokens, p.live = ids, live
            if d.vector is not None:
                c.vector_len = <uint32_t>d.vector.shape[0]
                p.vector = &d.vector[0]
        self.place_entry(s, &c, &p)
        self.advance(s, kind, &c)
        c.image = s.image
        s.image.last_lsn = self.batch.stage_record(kind, 0, &c, &p)
        if self.staged_entries is None:
            self.staged_entries = []
        self.staged_entries.append((<char*>&c.entry)[:sizeof(kalos_entry)])
        return 0

    cdef int advance(self, Stage* s, uint32_t kind, const kalos_change* c) except -1:
        """The slot's image behind one more entry."""
        cdef kalos_image* image = &s.image
        image.num_entries += 1
        if kind != KALOS_KIND_TURN:
            return 0
        image.sum = c.entry.sum
        if c.entry.role == KALOS_ROLE_ASSISTANT:
            image.last_assistant = image.num_entries
        elif c.entry.role == KALOS_ROLE_USER:
            image.last_user = image.num_entries
        if c.entry.flags & KALOS_ENTRY_TTL:
            image.expires_at = max(image.expires_at, c.expires_at)
            image.flags |= KALOS_IMAGE_TTL
        else:
            image.flags |= KALOS_IMAGE_LASTING
        if c.entry.vector_row:
            image.flags |= KALOS_IMAGE_VECTORS
        if c.entry.unit_first != c.entry.seq or c.entry.live_tokens or c.entry.trim_prev \
                or c.entry.flags & (KALOS_ENTRY_ORPHAN | KALOS_ENTRY_TTL):
            image.flags |= KALOS_IMAGE_COMPLEX
        return 0

    cdef int place_entry(self, Stage* s, kalos_change* c, Parts* p) except -1:
        """Where the next entry goes; a full run is followed by one twice as long."""
        cdef uint32_t seq = s.image.num_entries, n = s.image.num_extents, capacity = FIRST_RUN
        cdef kalos_extent* last
        cdef uint64_t place
        cdef void* grown
        if n:
            last = &s.extents[n - 1]
            if seq - last.first_seq < last.capacity:
                place = last.place & ((<uint64_t>1 << 48) - 1)
                c.entry_off = place + <uint64_t>(seq - last.first_seq) * sizeof(kalos_entry)
                return 0
            capacity = min(max(FIRST_RUN, last.capacity * 2), LARGEST_RUN)
        if n == s.extent_room:
            s.extent_room = max(<uint32_t>8, n * 2)
            grown = realloc(s.extents, s.extent_room * sizeof(kalos_extent))
            if grown == NULL:
                raise MemoryError
            s.extents = <kalos_extent*>grown
        place = self.batch.alloc_arena(<uint64_t>capacity * sizeof(kalos_entry))
        s.extents[n].first_seq = seq
        s.extents[n].capacity = capacity
        s.extents[n].place = kalos_seal(place, <uint64_t>seq << 32 | capacity)
        s.image.num_extents = n + 1
        if n + 1 > s.image.extents_capacity:
            # Readers may be in the old array: a longer one goes to a new place.
            s.image.extents_capacity = max(<uint32_t>4, (n + 1) * 2)
            s.image.extents_off = self.batch.alloc_arena(
                <uint64_t>s.image.extents_capacity * sizeof(kalos_extent))
        c.extents_off = s.image.extents_off
        c.num_extents = n + 1
        p.extents = s.extents
        c.entry_off = place
        return 0

    cdef int stage_table(self, Stage* s, uint32_t kind, bytes table, kalos_change* c,
                         Parts* p) except -1:
        """Stage the record that holds a slot's whole table of segments or summaries."""
        cdef uint64_t lsn
        c.table_len = <uint32_t>len(table)
        p.table = table
        lsn = self.batch.place(kalos_round_up(
            sizeof(kalos_record) + sizeof(kalos_change) + len(table), 64))
        if kind == KALOS_KIND_SEGMENTS:
            s.image.segments_lsn = lsn if table else 0
        else:
            s.image.summaries_lsn = lsn
        s.image.epoch += 1
        c.image = s.image
        s.image.last_lsn = self.batch.stage_record(kind, 0, c, p)
        return 0

    def stage_ids(self, const int32_t[::1] ids not None):
        """Place IDs that a table refers to; (position, checksum)."""
        cdef uint64_t n = ids.shape[0]
        if n == 0:
            return self.batch.next.tokens_end, kalos_crc32c(0, NULL, 0)
        return (self.batch.stage_tokens(&ids[0], n, NULL, 0), kalos_crc32c(0, &ids[0], n * 4))
