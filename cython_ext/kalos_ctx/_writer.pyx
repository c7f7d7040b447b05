"""Changing a store: turns, forks, rollbacks, segments, summaries, passages, erasure.

Each call stages one batch (see _batch), commits it with the mutex held, and waits for its durability without.
A `Stage` is the slot as it will be behind the batch; nothing of the store changes before the commit.
"""

import hashlib
import struct

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

from kalos_ctx._batch cimport Draft, Parts
from kalos_ctx._control cimport WORD_ERASURES
from kalos_ctx._index cimport EntryTable, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_ENTRY_DEAD, KALOS_ENTRY_GROUPED, KALOS_ENTRY_ORPHAN, KALOS_ENTRY_TTL, KALOS_HAS_GROUP,
    KALOS_HAS_KEY, KALOS_HAS_METADATA, KALOS_HAS_TEXT, KALOS_HAS_VECTOR, KALOS_IMAGE_COMPLEX,
    KALOS_IMAGE_DEAD, KALOS_IMAGE_FORKED, KALOS_IMAGE_LASTING, KALOS_IMAGE_TTL, KALOS_IMAGE_VECTORS,
    KALOS_KIND_DROP, KALOS_KIND_ERASE, KALOS_KIND_FORK, KALOS_KIND_IMAGE, KALOS_KIND_PASSAGE,
    KALOS_KIND_ROLLBACK, KALOS_KIND_SEGMENTS, KALOS_KIND_SLOT, KALOS_KIND_SUMMARIES, KALOS_KIND_TABLES,
    KALOS_KIND_TURN, KALOS_RECORD_SCRUBBED, KALOS_ROLE_ASSISTANT, KALOS_ROLE_FUNCTION, KALOS_ROLE_TOOL,
    KALOS_ROLE_USER,
    KALOS_SLOT_BLOCK_SHIFT, KALOS_SLOT_COLLECTION, KALOS_SLOT_SESSION, KALOS_SLOT_TENANT, kalos_bucket,
    kalos_change, kalos_crc32c, kalos_entry, kalos_extent, kalos_hash_name, kalos_image, kalos_item, kalos_record,
    kalos_roots, kalos_seal, kalos_slot,
)
from kalos_ctx._log cimport kalos_round_up, kalos_sections
from kalos_ctx._opening cimport WritableStore

from kalos_ctx.errors import Conflict, IdempotencyConflict, SessionExpired, StoreCorrupt

cdef uint32_t FIRST_RUN = 4         # entries of a slot's first run; each further one doubles
cdef uint32_t LARGEST_RUN = 1 << 16


cdef class StoreWriter(WritableStore):
    """The one writer of a store. `SessionStore` is the public face."""

    # ---- Staging ----------------------------------------------------------------------------------

    cdef int make_room(self, uint32_t slots, uint32_t keys) except -1:
        """Move a hash table to a larger place, as a batch of its own, before it is more than 60 % full."""
        cdef kalos_change c
        cdef Parts p
        cdef kalos_roots roots = self.index.roots
        while (self.index.cursor.session_keys + slots) * 10 > (<uint64_t>6 << roots.slot_log2):
            roots.slot_log2 += 1
        while (self.index.cursor.idempotency_keys + keys) * 10 > (<uint64_t>6 << roots.key_log2):
            roots.key_log2 += 1
        if roots.slot_log2 == self.index.roots.slot_log2 and roots.key_log2 == self.index.roots.key_log2:
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

    cdef int open_stage(self, uint32_t kind, bytes tenant, bytes name, bint create, Stage* s) except -1:
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
            memcpy(s.extents, self.index.at(s.image.extents_off, s.extent_room * sizeof(kalos_extent)),
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
            self.batch.next.arena_used = place + (sizeof(kalos_slot) << (KALOS_SLOT_BLOCK_SHIFT + block))
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
        """Which unit a new turn closes (CONTRACT.md: group, tool results), and the group's buckets."""
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
        """As group_member among the entries that a fork shares: its parent's keys are not its own."""
        cdef kalos_sections found
        cdef const kalos_entry* e
        cdef uint32_t seq
        if not s.image.flags & KALOS_IMAGE_FORKED:
            return -1
        for seq in range(min(s.image.shared_below, s.base)):
            e = self.entry_at(s, seq)
            if e.flags & KALOS_ENTRY_GROUPED and not e.flags & KALOS_ENTRY_ORPHAN and (what == c"g" or e.role == KALOS_ROLE_ASSISTANT):
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

    # ---- Turns ------------------------------------------------------------------------------------

    def append_turns(self, bytes tenant, bytes name, list drafts, double now):
        """Append turns, all or none; their seqs. A key that was used gives its seq again."""
        cdef Stage s
        cdef Draft d
        cdef uint32_t keys = 0
        cdef list seqs = []
        cdef long known
        for d in drafts:
            keys += (d.key is not None) + 2 * (d.group is not None)
        with self.mutex:
            self.make_room(1, keys)
            self.begin()
            self.open_stage(KALOS_SLOT_SESSION, tenant, name, True, &s)
            try:
                if s.image.flags & KALOS_IMAGE_TTL and not s.image.flags & KALOS_IMAGE_LASTING \
                        and s.image.expires_at <= now:
                    raise SessionExpired("every turn of the session has expired; delete it to start anew")
                for d in drafts:
                    known = -1 if d.key is None else self.seq_of_key(&s, d)
                    if known < 0:
                        known = s.image.num_entries
                        self.add_entry(KALOS_KIND_TURN, &s, d)
                    seqs.append(known)
                if self.batch.num_records:
                    self.commit()
            finally:
                self.close_stage(&s)
        self.finish()
        return seqs

    def has_key(self, bytes tenant, bytes name, bytes key):
        """Whether a turn of the session has an idempotency key."""
        cdef kalos_image image
        cdef kalos_sections found
        cdef uint32_t bucket
        cdef uint64_t slot_off
        with self.mutex:
            self.enter()
            slot_off = self.find(KALOS_SLOT_SESSION, tenant, name, &image)
            return slot_off != 0 and self.index.find_key(
                self.log, self.index.key_hash(slot_off, c"k", key), slot_off, c"k", key, &found,
                &bucket) != 0

    cdef long seq_of_key(self, Stage* s, Draft d) except -2:
        """seq of the turn that has the draft's key, -1 for none; another payload raises."""
        cdef kalos_sections found
        cdef uint32_t bucket
        cdef long seq
        if (c"k", d.key) in self.staged_keys:
            seq = self.staged_keys[(c"k", d.key)]
            same = self.staged_digests[d.key] == d.digest
        elif s.base and self.index.find_key(
                self.log, self.index.key_hash(s.slot_off, c"k", d.key), s.slot_off, c"k", d.key,
                &found, &bucket):
            seq = found.change.entry.seq
            same = memcmp(found.change.digest, <const char*>d.digest, 16) == 0
        else:
            self.staged_digests[d.key] = d.digest
            return -1
        if not same:
            raise IdempotencyConflict(f"the key was used for turn {seq} with another payload")
        return seq

    def rollback(self, bytes tenant, bytes name, uint32_t to, object expect_last):
        """Keep the turns with seq < to; how many went, or None for an unknown session."""
        cdef Stage s
        cdef kalos_change c
        cdef Parts p
        cdef uint32_t gone = 0
        with self.mutex:
            self.begin()
            if not self.open_stage(KALOS_SLOT_SESSION, tenant, name, False, &s):
                self.close_stage(&s)
                return None
            try:
                last = <long>s.image.num_entries - 1
                if expect_last is not None and expect_last != last:
                    raise Conflict(f"the session's last turn is {last}, expected {expect_last}")
                if to >= s.image.num_entries:
                    return 0
                gone = s.image.num_entries - to
                self.change_of(&s, &c)
                memset(&p, 0, sizeof(p))
                shared = shared_lsns(self, &s, to)
                c.table_len = <uint32_t>len(shared)
                p.table = shared
                self.keep_entries(&s, to, &c, &p)
                s.image.epoch += 1
                c.image = s.image
                s.image.last_lsn = self.batch.stage_record(KALOS_KIND_ROLLBACK, 0, &c, &p)
                self.trim_summaries(&s, to)
                self.commit()
                self.control.count_up(WORD_ERASURES)
            finally:
                self.close_stage(&s)
        self.finish()
        return gone

    cdef int keep_entries(self, Stage* s, uint32_t to, kalos_change* c, Parts* p) except -1:
        """Cut the stage's entries to those below `to`; what is shared is never written over again."""
        cdef kalos_extent* last
        cdef const kalos_entry* e
        cdef uint32_t n = s.image.num_extents, seq
        while n and s.extents[n - 1].first_seq >= to:
            n -= 1
        if n and to < s.image.shared_below:
            last = &s.extents[n - 1]
            place = last.place & ((<uint64_t>1 << 48) - 1)
            last.capacity = min(last.capacity, to - last.first_seq)
            last.place = kalos_seal(place, <uint64_t>last.first_seq << 32 | last.capacity)
        s.image.shared_below = min(s.image.shared_below, to)
        s.image.num_extents = n
        if n:
            s.image.extents_capacity = max(<uint32_t>4, n * 2)
            s.image.extents_off = self.batch.alloc_arena(
                <uint64_t>s.image.extents_capacity * sizeof(kalos_extent))
            c.extents_off = s.image.extents_off
            c.num_extents = n
            p.extents = s.extents
        else:
            s.image.extents_capacity = 0
        s.image.num_entries = to
        s.image.sum = self.entry_at(s, to - 1).sum if to else 0
        s.image.last_assistant = s.image.last_user = 0
        seq = to
        while seq and not (s.image.last_assistant and s.image.last_user):
            e = self.entry_at(s, seq - 1)
            if e.role == KALOS_ROLE_ASSISTANT and not s.image.last_assistant:
                s.image.last_assistant = seq
            elif e.role == KALOS_ROLE_USER and not s.image.last_user:
                s.image.last_user = seq
            seq -= 1
        if s.image.flags & KALOS_IMAGE_TTL:
            self.recount_expiry(s, to)
        return 0

    cdef int recount_expiry(self, Stage* s, uint32_t to) except -1:
        """The image's expiry from the turns that stay."""
        cdef kalos_sections found
        cdef const kalos_entry* e
        cdef uint32_t seq
        s.image.flags &= ~(KALOS_IMAGE_TTL | KALOS_IMAGE_LASTING)
        s.image.expires_at = 0
        for seq in range(to):
            e = self.entry_at(s, seq)
            if e.flags & KALOS_ENTRY_DEAD:
                # An empty place of a turn that had expired when the store was compacted.
                s.image.flags |= KALOS_IMAGE_TTL
            elif e.flags & KALOS_ENTRY_TTL:
                self.log.sections(e.lsn, &found)
                s.image.flags |= KALOS_IMAGE_TTL
                s.image.expires_at = max(s.image.expires_at, found.change.expires_at)
            else:
                s.image.flags |= KALOS_IMAGE_LASTING
        return 0

    cdef int trim_summaries(self, Stage* s, uint32_t to) except -1:
        """Drop the summaries that stand for turns that go."""
        cdef kalos_change c
        cdef Parts p
        if s.image.summaries_lsn == 0:
            return 0
        table = kept_items(self.table_bytes(s.image.summaries_lsn)[0], to)
        self.change_of(s, &c)
        memset(&p, 0, sizeof(p))
        self.stage_table(s, KALOS_KIND_SUMMARIES, table, &c, &p)
        return 0

    cdef int stage_table(self, Stage* s, uint32_t kind, bytes table, kalos_change* c, Parts* p) except -1:
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

    def put_table(self, uint32_t slot_kind, bytes tenant, bytes name, uint32_t kind, compose):
        """Replace a slot's table of segments (kind 4) or summaries (5).

        ``compose(old_table, count, stage)`` returns the new table; ``stage(ids)`` places IDs and gives
        (position, checksum). It runs with the mutex held and may raise to change nothing.
        """
        cdef Stage s
        cdef kalos_change c
        cdef Parts p
        with self.mutex:
            self.make_room(1, 0)
            self.begin()
            self.open_stage(slot_kind, tenant, name, True, &s)
            try:
                lsn = s.image.segments_lsn if kind == KALOS_KIND_SEGMENTS else s.image.summaries_lsn
                old = self.table_bytes(lsn)[0] if lsn else b""
                self.change_of(&s, &c)
                memset(&p, 0, sizeof(p))
                table = compose(old, s.image.num_entries, self.stage_ids)
                if s.image.segments_lsn == 0 and not table and kind == KALOS_KIND_SEGMENTS:
                    return
                self.stage_table(&s, kind, table, &c, &p)
                self.commit()
            finally:
                self.close_stage(&s)
        self.finish()

    def stage_ids(self, const int32_t[::1] ids not None):
        """Place IDs that a table refers to; (position, checksum)."""
        cdef uint64_t n = ids.shape[0]
        if n == 0:
            return self.batch.next.tokens_end, kalos_crc32c(0, NULL, 0)
        return (self.batch.stage_tokens(&ids[0], n, NULL, 0), kalos_crc32c(0, &ids[0], n * 4))

    def fork(self, bytes tenant, bytes name, bytes new_name, object at):
        """Make `new_name` share the turns before `at`. False for an unknown session."""
        cdef Stage parent, child
        cdef kalos_change c
        cdef Parts p
        cdef uint32_t n
        with self.mutex:
            self.make_room(1, 0)
            self.begin()
            if not self.open_stage(KALOS_SLOT_SESSION, tenant, name, False, &parent):
                self.close_stage(&parent)
                return False
            try:
                count = parent.image.num_entries
                n = count if at is None else at
                if n > count:
                    raise Conflict(f"at must be at most the number of turns, {count} (got {n})")
                if self.open_stage(KALOS_SLOT_SESSION, tenant, new_name, True, &child):
                    self.close_stage(&child)
                    raise Conflict("there is a session of the new name already")
                try:
                    self.stage_fork(&parent, &child, n)
                    self.commit()
                finally:
                    self.close_stage(&child)
            finally:
                self.close_stage(&parent)
        self.finish()
        return True

    cdef int stage_fork(self, Stage* parent, Stage* child, uint32_t n) except -1:
        """Stage the child as the parent cut to n turns, with extents and tables of its own."""
        cdef kalos_change c
        cdef Parts p
        cdef kalos_image fresh = child.image
        child.image = parent.image
        child.image.hash = fresh.hash
        child.image.name_lsn = fresh.name_lsn
        child.image.last_lsn = fresh.last_lsn
        child.image.slot_id = fresh.slot_id
        child.image.segments_lsn = child.image.summaries_lsn = 0
        child.image.flags |= KALOS_IMAGE_FORKED
        child.base = parent.base
        child.extent_room = parent.image.num_extents
        child.extents = <kalos_extent*>realloc(NULL, max(1, child.extent_room) * sizeof(kalos_extent))
        if child.extents == NULL:
            raise MemoryError
        if child.extent_room:
            memcpy(child.extents, parent.extents, child.extent_room * sizeof(kalos_extent))
        self.change_of(child, &c)
        memset(&p, 0, sizeof(p))
        # Above n, so that keep_entries clips the last run: nobody appends behind shared entries in it.
        child.image.shared_below = n + 1
        child.table = parent.table
        if parent.table.runs == &parent.table.inline[0]:
            child.table.runs = &child.table.inline[0]
        self.keep_entries(child, n, &c, &p)
        child.table.runs = NULL  # the parent's stage frees them
        c.image = child.image
        child.image.last_lsn = self.batch.stage_record(KALOS_KIND_FORK, 0, &c, &p)
        if parent.image.segments_lsn:
            self.fork_table(child, KALOS_KIND_SEGMENTS, self.table_bytes(parent.image.segments_lsn)[0])
        if parent.image.summaries_lsn:
            self.fork_table(child, KALOS_KIND_SUMMARIES,
                            kept_items(self.table_bytes(parent.image.summaries_lsn)[0], n))
        self.change_of(parent, &c)
        memset(&p, 0, sizeof(p))
        parent.image.flags |= KALOS_IMAGE_FORKED
        parent.image.shared_below = max(parent.image.shared_below, n)
        c.image = parent.image
        parent.image.last_lsn = self.batch.stage_record(KALOS_KIND_IMAGE, 0, &c, &p)
        return 0

    cdef int fork_table(self, Stage* child, uint32_t kind, bytes table) except -1:
        cdef kalos_change c
        cdef Parts p
        self.change_of(child, &c)
        memset(&p, 0, sizeof(p))
        copied = self.copy_table(table)
        return self.stage_table(child, kind, copied, &c, &p)

    cdef bytes copy_table(self, bytes table):
        """A table whose items' IDs stand in places of their own (a fork survives its parent's erasure)."""
        cdef kalos_item item
        cdef bytes ids
        out = []
        for at, size in items_of(table):
            one = table[at:at + size]
            memcpy(&item, <const char*>one, sizeof(item))
            ids = one[sizeof(item) + item.name_len + item.text_len:][:item.num_tokens * 4]
            item.tokens_pos = self.batch.stage_tokens(<const int32_t*><const char*>ids, item.num_tokens,
                                                      NULL, 0)
            out.append((<char*>&item)[:sizeof(item)] + one[sizeof(item):])
        return b"".join(out)

    # ---- Passages ---------------------------------------------------------------------------------

    def set_vector_dim(self, uint32_t dim):
        """Fix the dimension with the first vector."""
        with self.mutex:
            self.writing()
            self.control.state.vector_dim = dim
            self.control.write_state(False)
            self.control.write_state(True)
            self.set_vector_layout()

    def forget_vector_dim(self):
        """Leave the dimension open again where the first vector's call was refused."""
        with self.mutex:
            if self.index.cursor.vector_rows == 0:
                self.set_vector_dim(0)

    def set_fingerprint(self, bytes fingerprint, uint32_t vocab_size):
        """Bind a store that has none to a tokenizer and template."""
        with self.mutex:
            self.writing()
            memcpy(self.control.state.fingerprint, <const char*>fingerprint, 32)
            self.control.state.vocab_size = vocab_size
            self.control.write_state(False)
            self.control.write_state(True)

    def add_passages(self, bytes tenant, bytes collection, list drafts, object ids):
        """Append passages, all or none; their IDs. `ids` ascend strictly, None takes the next ones."""
        cdef Stage owner, s
        cdef Draft d
        cdef kalos_change c
        cdef Parts p
        cdef uint64_t following
        with self.mutex:
            self.make_room(2, 0)
            self.begin()
            self.open_stage(KALOS_SLOT_TENANT, tenant, b"", True, &owner)
            try:
                following = owner.image.next_id
                if ids is None:
                    ids = range(following, following + len(drafts))
                elif len(ids) and ids[0] < following:
                    raise Conflict(f"passage IDs ascend over all collections of the tenant: "
                                   f"the next is at least {following} (got {ids[0]})")
                self.open_stage(KALOS_SLOT_COLLECTION, tenant, collection, True, &s)
                try:
                    for d, passage_id in zip(drafts, ids):
                        d.passage_id = passage_id
                        self.add_entry(KALOS_KIND_PASSAGE, &s, d)
                finally:
                    self.close_stage(&s)
                if drafts:
                    owner.image.next_id = <uint64_t>ids[len(drafts) - 1] + 1
                    self.change_of(&owner, &c)
                    memset(&p, 0, sizeof(p))
                    c.image = owner.image
                    self.batch.stage_record(KALOS_KIND_IMAGE, 0, &c, &p)
                    self.commit()
            finally:
                self.close_stage(&owner)
        self.finish()
        return list(ids)

    def drop_passages(self, bytes tenant, bytes collection, list seqs):
        """Delete passages by their places in the collection: invisible at once, their bytes zeroed."""
        cdef Stage s
        cdef kalos_change c
        cdef Parts p
        cdef const kalos_entry* e
        with self.mutex:
            self.begin()
            if not self.open_stage(KALOS_SLOT_COLLECTION, tenant, collection, False, &s):
                self.close_stage(&s)
                return 0
            lsns = []
            try:
                for seq in seqs:
                    e = self.entry_at(&s, seq)
                    if e.flags & KALOS_ENTRY_DEAD:
                        continue
                    self.change_of(&s, &c)
                    memset(&p, 0, sizeof(p))
                    c.entry = e[0]
                    c.entry.flags |= KALOS_ENTRY_DEAD
                    c.entry_off = <uint64_t>(<const char*>e - self.index.arena.base)
                    listed = struct.pack("<Q", e.lsn)
                    c.table_len = 8
                    p.table = listed
                    s.image.next_id += 1
                    s.image.epoch += 1
                    c.image = s.image
                    s.image.last_lsn = self.batch.stage_record(KALOS_KIND_DROP, 0, &c, &p)
                    lsns.append(s.image.last_lsn)
                if lsns:
                    self.commit()
            finally:
                self.close_stage(&s)
            if lsns:
                self.erase_listed(lsns)
        return len(lsns)

    # ---- Erasure ----------------------------------------------------------------------------------

    def erase(self, uint32_t kind, bytes tenant, bytes name):
        """Remove a slot and zero every byte of it; (counts, digest), or None for an unknown one.

        What forks share stays until the last of them goes. The log keeps one record that says so.
        """
        cdef Stage s
        cdef kalos_change c
        cdef Parts p
        cdef kalos_image image
        cdef uint32_t bucket
        with self.mutex:
            self.begin()
            if not self.open_stage(kind, tenant, name, False, &s):
                self.close_stage(&s)
                return None
            try:
                self.index.find_slot(self.log, kind, tenant, name, &image, &bucket)
                counts, lsns = self.holdings(&s)
                listed = struct.pack(f"<{len(lsns)}Q", *lsns)
                self.change_of(&s, &c)
                memset(&p, 0, sizeof(p))
                c.slot_bucket = bucket + 1
                c.table_len = <uint32_t>len(listed)
                p.table = listed
                memset(&image, 0, sizeof(image))
                image.flags = KALOS_IMAGE_DEAD
                image.kind = kind
                image.slot_id = s.image.slot_id
                image.epoch = s.image.epoch + 1
                c.image = image
                lsn = self.batch.stage_record(KALOS_KIND_ERASE, 0, &c, &p)
                self.commit()
            finally:
                self.close_stage(&s)
            self.erase_listed([lsn])
        digest = hashlib.sha256((<char*>self.control.head.uuid)[:16] + struct.pack("<Q", lsn) + listed
                                + repr(sorted(counts.items())).encode()).hexdigest()
        return counts, digest

    cdef tuple holdings(self, Stage* s):
        """What an erasure of the slot takes: counts per kind, and the records to scrub."""
        cdef const kalos_entry* e
        cdef uint32_t seq
        cdef uint64_t lsn
        cdef kalos_change past
        cdef kalos_sections found
        cdef const kalos_record* rec
        cdef bint passages = s.image.kind == KALOS_SLOT_COLLECTION
        counts = {"turns": 0, "vectors": 0, "summaries": 0, "segments": 0, "passages": 0}
        lsns = set()
        for seq in range(s.base):
            e = self.entry_at(s, seq)
            lsns.add(e.lsn)
            if not e.flags & KALOS_ENTRY_DEAD:
                counts["passages" if passages else "turns"] += 1
                counts["vectors"] += e.vector_row != 0
        if s.image.segments_lsn:
            counts["segments"] = len(items_of(self.table_bytes(s.image.segments_lsn)[0]))
        if s.image.summaries_lsn:
            counts["summaries"] = len(items_of(self.table_bytes(s.image.summaries_lsn)[0]))
        # Every record of the slot, the rolled back and replaced ones included, by the chain.
        lsn = s.image.last_lsn
        while lsn:
            lsns.add(lsn)
            self.log.change_at(lsn, &past)
            # Some of the records were scrubbed before; they say no more than what was before them.
            rec = self.log.record(lsn)
            if rec.kind == KALOS_KIND_ROLLBACK and not rec.flags & KALOS_RECORD_SCRUBBED:
                self.log.sections(lsn, &found)
                lsns.update(struct.unpack(f"<{past.table_len // 8}Q", found.table[:past.table_len]))
            lsn = past.prev_lsn
        if s.image.flags & KALOS_IMAGE_FORKED:
            lsns -= self.held_by_family(s.image.family, s.image.slot_id)
        return counts, sorted(lsns)

    cdef set held_by_family(self, uint32_t family, uint32_t but):
        """Records of the entries that other living sessions of a fork family refer to."""
        cdef kalos_image image
        cdef EntryTable table
        cdef const kalos_entry* e
        cdef uint32_t slot_id, seq
        cdef uint64_t slot_off
        held = set()
        for slot_id in range(self.index.num_slots):
            slot_off = self.index.slot_of(slot_id)
            self.index.read_image(slot_off, &image)
            if image.family != family or slot_id == but or image.kind != KALOS_SLOT_SESSION \
                    or image.flags & KALOS_IMAGE_DEAD:
                continue
            self.index.open_table(slot_off, &table)
            try:
                for seq in range(image.num_entries):
                    e = table_entry(&table, seq)
                    self.index.check_entry(e, seq)
                    held.add(e.lsn)
            finally:
                table_clear(&table)
        return held


cdef uint64_t hash_of(StoreWriter self, uint32_t kind, bytes tenant, bytes name) noexcept:
    return kalos_hash_name(self.control.head.salt, kind, <const char*>tenant, len(tenant),
                           <const char*>name, len(name))


cdef bytes shared_lsns(StoreWriter self, Stage* s, uint32_t to):
    """Positions of the shared entries from `to` on, for the record of a rollback.

    They lie in no record of this slot, and once the rollback is done no entry of it names them; its
    erasure has to know them all the same where it comes after the parent's.
    """
    cdef uint32_t seq
    if not s.image.flags & KALOS_IMAGE_FORKED:
        return b""
    lsns = [self.entry_at(s, seq).lsn for seq in range(to, min(s.image.shared_below, s.base))]
    return struct.pack(f"<{len(lsns)}Q", *lsns)


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


def items_of(bytes table):
    """Offsets and sizes of the items in a table section."""
    cdef const char* p = table
    cdef Py_ssize_t at = 0
    out = []
    while at + <Py_ssize_t>sizeof(kalos_item) <= len(table):
        size = (<const kalos_item*>(p + at)).size
        if size < sizeof(kalos_item):
            raise StoreCorrupt("an item of a table is shorter than its header")
        out.append((at, size))
        at += size
    return out


cdef bytes kept_items(bytes table, uint32_t to):
    """The summaries of a table that end at or before a turn."""
    cdef const char* p = table
    return b"".join(table[at:at + size] for at, size in items_of(table)
                    if (<const kalos_item*>(p + <Py_ssize_t>at)).stop <= to)
