"""Zeroing what erased records hold and point at, in place.

An erasure calls this for its own record, a recovery for each one that it replays: every step may
be repeated.
"""

import struct

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from kalos_ctx._layout cimport (
    KALOS_KIND_DROP, KALOS_KIND_SEGMENTS, KALOS_KIND_SHARE, KALOS_KIND_SUMMARIES,
    KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, KALOS_RECORD_SCRUBBED, kalos_change,
    kalos_crc32c, kalos_entry, kalos_item, kalos_record, kalos_roots,
)
from kalos_ctx._log cimport (
    kalos_body_holds, kalos_record_crc, kalos_round_up, kalos_sections, kalos_sections_of,
)
from kalos_ctx._reader cimport StoreReader


cdef list item_runs(bytes table):
    """(position, IDs in whole lines) of the token runs that a table's items refer to."""
    cdef const char* p = table
    cdef Py_ssize_t at = 0
    cdef const kalos_item* item
    cdef list out = []
    while at + <Py_ssize_t>sizeof(kalos_item) <= len(table):
        item = <const kalos_item*>(p + at)
        if item.size < sizeof(kalos_item):
            break
        out.append((item.tokens_pos, kalos_round_up(item.num_tokens, 16)))
        at += item.size
    return out


cdef int zero_tokens(StoreReader store, uint64_t pos, uint64_t n) except -1:
    cdef uint64_t off = <uint64_t>KALOS_POSITION_OFFSET(pos) * 4
    if n:
        store.tokens.zero_range(KALOS_POSITION_SEGMENT(pos), off, off + n * 4)
    return 0


cdef int scrub_entry(StoreReader store, const kalos_entry* e) except -1:
    """Zero the IDs and the vector row of an entry."""
    cdef uint64_t lines = kalos_round_up(e.num_tokens, 16) + kalos_round_up(e.live_tokens, 16)
    cdef uint32_t row
    zero_tokens(store, e.tokens_pos, lines)
    if e.vector_row:
        row = e.vector_row - 1
        off = <uint64_t>(row % store.rows_per_segment) * store.row_stride
        store.vectors.zero_range(row // store.rows_per_segment, off, off + store.row_stride)
        store.index.set_dead(row)
    return 0


cdef int scrub_payload(StoreReader store, uint64_t lsn) except -1:
    """Zero the tokens and the row that a record points at; 1 unless that was done before."""
    cdef const kalos_record* rec = store.log.record(lsn)
    cdef kalos_sections s
    if rec.flags & KALOS_RECORD_SCRUBBED or not kalos_sections_of(rec, &s):
        return 0
    if s.change.entry_off and rec.kind != KALOS_KIND_DROP and rec.kind != KALOS_KIND_SHARE:
        scrub_entry(store, &s.change.entry)
    if rec.kind == KALOS_KIND_SEGMENTS or rec.kind == KALOS_KIND_SUMMARIES:
        for pos, n in item_runs(s.table[:s.change.table_len]):
            zero_tokens(store, pos, n)
    return 1


cdef int scrub(StoreReader store, uint64_t lsn) except -1:
    """Zero what a record holds; the record itself stays, so that the log can be walked.

    The header goes first and says that the record is scrubbed (one sector, so it is whole or not
    there), then the sections. A crash between leaves a record that this call finishes. Places,
    lengths and roots stay.
    """
    cdef const kalos_record* rec = store.log.record(lsn)
    cdef kalos_sections s
    cdef kalos_change c
    cdef kalos_record head
    cdef bytes body, roots = b""
    if rec.flags & KALOS_RECORD_SCRUBBED and kalos_body_holds(rec):
        return 0
    kalos_sections_of(rec, &s)
    c = s.change[0]
    if s.roots != NULL:
        roots = (<const char*>s.roots)[:sizeof(kalos_roots)]
    head = rec[0]
    c.image.hash = 0
    c.created_at = c.expires_at = 0
    c.vector_crc = 0
    c.vector_factor = 0
    c.entry.token_crc = c.entry.live_crc = 0
    memset(c.digest, 0, 16)
    body = ((<char*>&c)[:sizeof(c)] + roots).ljust(head.body_len, b"\0")
    head.flags |= KALOS_RECORD_SCRUBBED
    head.body_crc = kalos_crc32c(0, <const char*>body, head.body_len)
    head.header_crc = kalos_record_crc(store.log.salt, &head)
    store.log.rewrite(lsn, &head, sizeof(head))
    store.log.rewrite(lsn + sizeof(head), <const char*>body, head.body_len)
    return 0


cdef int scrub_listed(StoreReader store, uint64_t lsn) except -1:
    """Zero the content of every record that the record at `lsn` lists. Safe to repeat.

    What the records point at is zeroed and durable before the records say so: a record that says
    it was scrubbed needs nothing more than its own sections zeroed.
    """
    cdef kalos_sections s
    cdef const kalos_record* rec = store.log.record(lsn)
    if rec.flags & KALOS_RECORD_SCRUBBED or not kalos_sections_of(rec, &s):
        return 0
    victims = [victim for (victim,) in struct.iter_unpack("<Q", s.table[:s.change.table_len])]
    touched = [scrub_payload(store, victim) for victim in victims]
    if any(touched):
        store.tokens.sync()
        store.vectors.sync()
    for victim in victims:
        scrub(store, victim)
    return 0
