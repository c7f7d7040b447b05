"""Erasing sessions, collections and passages: one record says what goes, then its bytes go.

What forks share stays until the last of them goes.
"""

import hashlib
import struct

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from kalos_ctx._batch cimport Parts
from kalos_ctx._control cimport WORD_ERASURES
from kalos_ctx._index cimport EntryTable, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_ENTRY_DEAD, KALOS_IMAGE_DEAD, KALOS_IMAGE_FORKED, KALOS_KIND_DROP, KALOS_KIND_ERASE,
    KALOS_KIND_ROLLBACK, KALOS_RECORD_SCRUBBED, KALOS_SLOT_COLLECTION, KALOS_SLOT_SESSION,
    kalos_change, kalos_entry, kalos_image, kalos_item, kalos_record,
)
from kalos_ctx._log cimport kalos_sections
from kalos_ctx._scrubbing cimport scrub_listed
from kalos_ctx._staging cimport Stage, StagingStore

from kalos_ctx.errors import StoreCorrupt


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


cdef class ErasingStore(StagingStore):
    """A store with the calls that take data out of it."""

    def drop_passages(self, bytes tenant, bytes collection, list seqs):
        """Delete passages by their places in the collection: gone at once, their bytes zeroed."""
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
        told = repr(sorted(counts.items())).encode()
        digest = hashlib.sha256((<char*>self.control.head.uuid)[:16] + struct.pack("<Q", lsn)
                                + listed + told).hexdigest()
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

    def erase_listed(self, list lsns):
        """Make the committed records at `lsns` durable, then zero what they list. Call with the
        mutex held.

        They must be durable first, or a power loss could leave the zeros and not the reason for
        them.
        """
        self.checkpoint()
        try:
            for lsn in lsns:
                scrub_listed(self, lsn)
            self.control.count_up(WORD_ERASURES)
            self.sync_files()
        except BaseException:
            self.failed = self.failed or "an erasure could not be finished"
            raise
