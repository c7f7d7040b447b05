"""Changing a store: turns, forks, rollbacks, segments, summaries, passages.

Each call stages one batch (see _staging and _batch), commits it with the mutex held, and waits for
its durability without.
"""

import struct

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcmp, memcpy, memset

from kalos_ctx._batch cimport Draft, Parts
from kalos_ctx._control cimport WORD_ERASURES
from kalos_ctx._erasing cimport ErasingStore
from kalos_ctx._layout cimport (
    KALOS_ENTRY_DEAD, KALOS_ENTRY_TTL, KALOS_IMAGE_FORKED, KALOS_IMAGE_LASTING, KALOS_IMAGE_TTL,
    KALOS_KIND_FORK, KALOS_KIND_IMAGE, KALOS_KIND_PASSAGE, KALOS_KIND_ROLLBACK,
    KALOS_KIND_SEGMENTS, KALOS_KIND_SUMMARIES, KALOS_KIND_TURN, KALOS_ROLE_ASSISTANT,
    KALOS_ROLE_USER, KALOS_SLOT_COLLECTION, KALOS_SLOT_SESSION, KALOS_SLOT_TENANT, kalos_change,
    kalos_entry, kalos_extent, kalos_image, kalos_item, kalos_seal,
)
from kalos_ctx._log cimport kalos_sections
from kalos_ctx._staging cimport Stage

from kalos_ctx._erasing import items_of
from kalos_ctx.errors import Conflict, IdempotencyConflict, SessionExpired


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


cdef bytes kept_items(bytes table, uint32_t to):
    """The summaries of a table that end at or before a turn."""
    cdef const char* p = table
    return b"".join(table[at:at + size] for at, size in items_of(table)
                    if (<const kalos_item*>(p + <Py_ssize_t>at)).stop <= to)


cdef class StoreWriter(ErasingStore):
    """The one writer of a store. `SessionStore` is the public face."""

    # ---- Turns -----------------------------------------------------------------------------------

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
                    raise SessionExpired(
                        "every turn of the session has expired; delete it to start anew")
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
        """Cut the stage's entries to those below `to`; what is shared is never written over."""
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

    def put_table(self, uint32_t slot_kind, bytes tenant, bytes name, uint32_t kind, compose):
        """Replace a slot's table of segments (kind 4) or summaries (5).

        ``compose(old_table, count, stage)`` returns the new table; ``stage(ids)`` places IDs and
        gives (position, checksum). It runs with the mutex held and may raise to change nothing.
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

    def fork(self, bytes tenant, bytes name, bytes new_name, object at):
        """Make `new_name` share the turns before `at`. False for an unknown session."""
        cdef Stage parent, child
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
        child.extents = <kalos_extent*>realloc(NULL,
                                               max(1, child.extent_room) * sizeof(kalos_extent))
        if child.extents == NULL:
            raise MemoryError
        if child.extent_room:
            memcpy(child.extents, parent.extents, child.extent_room * sizeof(kalos_extent))
        self.change_of(child, &c)
        memset(&p, 0, sizeof(p))
        # Above n, so that keep_entries clips the last run: nobody appends behind shared entries in
        # it.
        child.image.shared_below = n + 1
        child.table = parent.table
        if parent.table.runs == &parent.table.inline[0]:
            child.table.runs = &child.table.inline[0]
        self.keep_entries(child, n, &c, &p)
        child.table.runs = NULL  # the parent's stage frees them
        c.image = child.image
        child.image.last_lsn = self.batch.stage_record(KALOS_KIND_FORK, 0, &c, &p)
        if parent.image.segments_lsn:
            self.fork_table(child, KALOS_KIND_SEGMENTS,
                            self.table_bytes(parent.image.segments_lsn)[0])
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
        """A table whose items' IDs have places of their own: a fork outlives its parent."""
        cdef kalos_item item
        cdef bytes ids
        out = []
        for at, size in items_of(table):
            one = table[at:at + size]
            memcpy(&item, <const char*>one, sizeof(item))
            ids = one[sizeof(item) + item.name_len + item.text_len:][:item.num_tokens * 4]
            item.tokens_pos = self.batch.stage_tokens(<const int32_t*><const char*>ids,
                                                      item.num_tokens, NULL, 0)
            out.append((<char*>&item)[:sizeof(item)] + one[sizeof(item):])
        return b"".join(out)

    # ---- Passages --------------------------------------------------------------------------------

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
        """Append passages, all or none; their IDs. `ids` ascend strictly, None: the next ones."""
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
