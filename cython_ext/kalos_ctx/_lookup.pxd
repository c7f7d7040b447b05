"""What an index's files say: slots, their entries, and the tables that find them."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kalos_ctx._layout cimport (
    kalos_entry, kalos_image, kalos_index_header, kalos_roots, kalos_row,
)
from kalos_ctx._log cimport Log, kalos_sections
from kalos_ctx._segment cimport MappedFile

# What the header's words are sealed with.
cdef enum:
    SEALED_ROOTS = 1
    SEALED_SLOTS = 2
    SEALED_APPLIED = 3

# A run of consecutive entries, checked and resolved to memory.
ctypedef struct EntryRun:
    uint32_t first                  # seq of entries[0]
    uint32_t count
    const kalos_entry* entries

cdef enum:
    RUNS_INLINE = 40

# The entries of one slot as of one image. `runs` is `inline` or allocated.
ctypedef struct EntryTable:
    uint64_t slot_off
    uint64_t version
    kalos_image image
    uint32_t num_runs
    EntryRun* runs
    EntryRun inline[RUNS_INLINE]

cdef int table_clear(EntryTable* table) noexcept nogil
cdef const kalos_entry* table_entry(const EntryTable* table, uint32_t seq) noexcept nogil

cdef class Lookup:
    cdef MappedFile arena           # slots, entries, extents, hash tables
    cdef MappedFile rows            # kalos_row for each vector row
    cdef MappedFile dead            # one bit for each vector row: deleted
    cdef readonly str folder
    cdef uint64_t salt
    cdef readonly bint writable

    cdef kalos_index_header* header(self)
    cdef object damage(self, uint64_t off, str what, str file=*)
    cdef char* at(self, uint64_t off, size_t n) except NULL
    cdef int read_roots(self, kalos_roots* out) except -1
    cdef uint64_t read_image(self, uint64_t slot_off, kalos_image* out) except? 0
    cdef uint64_t slot_of(self, uint32_t slot_id) except? 0
    cdef uint64_t find_slot(self, Log log, uint32_t kind, bytes tenant, bytes name,
                            kalos_image* out, uint32_t* bucket) except? 0
    cdef uint64_t key_hash(self, uint64_t slot_off, uint8_t what, bytes key) noexcept
    cdef uint64_t find_key(self, Log log, uint64_t hash, uint64_t slot_off, uint8_t what, bytes key,
                           kalos_sections* out, uint32_t* bucket) except? 0
    cdef bint has_key(self, const kalos_sections* s, uint8_t what, bytes key)
    cdef int open_table(self, uint64_t slot_off, EntryTable* out) except -1
    cdef int check_entry(self, const kalos_entry* entry, uint32_t seq) except -1
    cdef int check_row(self, uint32_t row, kalos_row* out) except -1
