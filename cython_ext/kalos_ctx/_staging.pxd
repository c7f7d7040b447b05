"""Staging one batch: a slot as it will be, and the records that make it so."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kalos_ctx._batch cimport Draft, Parts
from kalos_ctx._index cimport EntryTable
from kalos_ctx._layout cimport (
    kalos_change, kalos_entry, kalos_extent, kalos_image, kalos_roots,
)
from kalos_ctx._opening cimport WritableStore

# A slot while a batch changes it.
ctypedef struct Stage:
    uint64_t slot_off
    kalos_image image
    EntryTable table                # entries before the batch
    uint32_t base                   # how many those are
    kalos_extent* extents           # extents as of the batch
    uint32_t extent_room

cdef class StagingStore(WritableStore):
    cdef kalos_roots roots          # as of the batch
    cdef list staged_entries        # bytes of the entries that the batch added
    cdef dict staged_keys           # (what, key) -> seq, of the batch
    cdef dict staged_digests        # idempotency key -> digest, of the batch

    cdef int begin(self) except -1
    cdef int make_room(self, uint32_t slots, uint32_t keys) except -1
    cdef int new_slot(self, uint32_t kind, bytes tenant, bytes name, Stage* s) except -1
    cdef int open_stage(self, uint32_t kind, bytes tenant, bytes name, bint create,
                        Stage* s) except -1
    cdef void close_stage(self, Stage* s)
    cdef int change_of(self, Stage* s, kalos_change* c) except -1
    cdef int add_entry(self, uint32_t kind, Stage* s, Draft d) except -1
    cdef int advance(self, Stage* s, uint32_t kind, const kalos_change* c) except -1
    cdef int place_entry(self, Stage* s, kalos_change* c, Parts* p) except -1
    cdef const kalos_entry* entry_at(self, Stage* s, uint32_t seq) except NULL
    cdef uint32_t unit_start(self, Stage* s, uint32_t seq) except? 0
    cdef int join_units(self, Stage* s, Draft d, kalos_change* c) except -1
    cdef long group_member(self, Stage* s, uint8_t what, bytes group) except -2
    cdef long inherited_member(self, Stage* s, uint8_t what, bytes group) except -2
    cdef uint32_t claim_key(self, Stage* s, uint8_t what, bytes key, uint32_t seq) except? 0
    cdef int stage_table(self, Stage* s, uint32_t kind, bytes table, kalos_change* c,
                         Parts* p) except -1
