"""The index: slots, their entries, and the tables that find them. Derived from the log, never trusted over a
checksum."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kalos_ctx._layout cimport (
    kalos_bucket, kalos_change, kalos_cursor, kalos_entry, kalos_extent, kalos_image,
    kalos_index_header, kalos_record, kalos_roots, kalos_row,
)
from kalos_ctx._log cimport Log, kalos_sections
from kalos_ctx._segment cimport MappedFile

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

cdef class Index:
    cdef MappedFile arena           # slots, entries, extents, hash tables
    cdef MappedFile rows            # kalos_row for each vector row
    cdef MappedFile dead            # one bit for each vector row: deleted
    cdef readonly str folder
    cdef uint64_t salt
    cdef readonly bint writable
    cdef kalos_cursor cursor        # writer: what is allocated
    cdef set erased                 # in a replay: slots whose buckets go at its end; None otherwise
    cdef uint32_t pages_lost        # of the process, when the files were opened
    cdef kalos_roots roots          # writer: the current tables
    cdef kalos_index_header* header(self)
    cdef char* at(self, uint64_t off, size_t n) except NULL
    cdef int read_roots(self, kalos_roots* out) except -1
    cdef uint64_t read_image(self, uint64_t slot_off, kalos_image* out) except? 0
    cdef uint64_t slot_of(self, uint32_t slot_id) except? 0
    cdef uint64_t find_slot(self, Log log, uint32_t kind, bytes tenant, bytes name,
                            kalos_image* out, uint32_t* bucket) except? 0
    cdef uint64_t find_key(self, Log log, uint64_t hash, uint64_t slot_off, uint8_t what, bytes key,
                           kalos_sections* out, uint32_t* bucket) except? 0
    cdef uint64_t key_hash(self, uint64_t slot_off, uint8_t what, bytes key) noexcept
    cdef int open_table(self, uint64_t slot_off, EntryTable* out) except -1
    cdef int check_entry(self, const kalos_entry* entry, uint32_t seq) except -1
    cdef object damage(self, uint64_t off, str what, str file=*)
    cdef bint has_key(self, const kalos_sections* s, uint8_t what, bytes key)
    cdef int check_row(self, uint32_t row, kalos_row* out) except -1
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
    cdef int rehash(self, uint64_t old, uint32_t old_log2, uint64_t new, uint32_t new_log2) except -1
