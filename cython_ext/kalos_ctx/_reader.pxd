"""Reading a store: sessions, turns, passages, tables. The writer derives from it."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from kalos_ctx._control cimport Control
from kalos_ctx._index cimport EntryTable, Index
from kalos_ctx._layout cimport kalos_entry, kalos_image
from kalos_ctx._log cimport Log, kalos_sections
from kalos_ctx._segment cimport SegmentSet
from kalos_ctx._turns cimport Passage, Stored, TokenView, Turn

cdef class StoreReader:
    cdef readonly str path
    cdef int dirfd
    cdef int genfd
    cdef readonly uint32_t generation
    cdef readonly Control control
    cdef readonly Log log
    cdef readonly Index index
    cdef readonly SegmentSet tokens
    cdef readonly SegmentSet vectors
    cdef readonly bint writable
    cdef readonly bint closed
    cdef uint64_t seen_generation           # words as last followed, with their checks
    cdef uint64_t seen_index
    cdef readonly uint32_t row_stride       # bytes from one vector row to the next
    cdef readonly uint32_t rows_per_segment

    cdef int open_generation(self, uint32_t generation, bint create) except -1
    cdef bint moved(self) noexcept
    cdef int enter(self) except -1
    cdef int set_vector_layout(self) except -1
    cdef uint64_t find(self, uint32_t kind, bytes tenant, bytes name, kalos_image* out) except? 0
    cdef const int32_t* token_run(self, uint64_t pos, uint32_t n, uint32_t crc) except? NULL
    cdef bint moved_on(self, uint64_t slot_off, const kalos_image* before) except -1
    cdef list turns_of(self, uint64_t slot_off, object start, object stop, double now)
    cdef int compare(self, const kalos_entry* entry, const kalos_sections* s) except -1
    cdef int read_common(self, Stored out, const kalos_entry* entry, kalos_sections* s) except -1
    cdef Turn read_turn(self, const kalos_entry* entry)
    cdef Passage read_passage(self, const kalos_entry* entry)
    cdef TokenView view_of(self, const kalos_entry* entry)
    cdef bint is_expired(self, const kalos_entry* entry, double now) except -1
    cdef int fill_columns(self, EntryTable* table, uint32_t start, uint64_t[::1] ids,
                          uint32_t[::1] rows, uint64_t[::1] lsns, uint8_t[::1] flags) except -1
