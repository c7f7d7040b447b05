"""The index: slots, their entries, and the tables that find them.

Derived from the log, never trusted over a checksum.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kalos_ctx._layout cimport kalos_change, kalos_cursor, kalos_image, kalos_record, kalos_roots
# Whoever has an index reads through these; they are cimported from here.
from kalos_ctx._lookup cimport EntryRun, EntryTable, Lookup, table_clear, table_entry

cdef class Index(Lookup):
    cdef kalos_cursor cursor        # writer: what is allocated
    cdef set erased                 # in a replay: slots whose buckets go at its end; None otherwise
    cdef uint32_t pages_lost        # of the process, when the files were opened
    cdef kalos_roots roots          # writer: the current tables

    cdef int apply(self, const kalos_record** records, uint32_t n) except -1
    cdef int apply_content(self, const kalos_record* rec) except -1
    cdef int apply_found(self, const kalos_record* rec) except -1
    cdef int set_dead(self, uint32_t row) except -1
    cdef int write_key(self, const kalos_change* c, uint32_t bucket, uint8_t what, bytes key,
                       uint64_t lsn) except -1
    cdef int write_bucket(self, uint64_t table, uint32_t log2, uint64_t i, uint64_t hash,
                          uint64_t value) except -1
    cdef int write_gone(self, uint64_t table, uint64_t i) except -1
    cdef int write_image(self, uint64_t slot_off, const kalos_image* image) except -1
    cdef int write_row(self, const kalos_change* c) except -1
    cdef int write_roots(self, const kalos_roots* roots) except -1
    cdef int move_tables(self, const kalos_roots* roots) except -1
    cdef int rehash(self, uint64_t old, uint32_t old_log2, uint64_t new,
                    uint32_t new_log2) except -1
