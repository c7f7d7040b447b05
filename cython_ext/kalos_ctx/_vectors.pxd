"""Vector rows: checked at the door of the store, mapped for scans, found by their entries."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._index cimport EntryTable, Index
from kalos_ctx._layout cimport kalos_entry, kalos_row
from kalos_ctx._log cimport Log
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._segment cimport SegmentSet

# A C-contiguous float32 array with `ndim` axes; wider floats are rounded once.
cdef object floats_of(str argument, object values, int ndim)

# The first `num_rows` rows of one generation, mapped. Never changes: scans without the GIL hold it.
cdef class RowMap:
    cdef Index index                # keeps `infos` and `dead` mapped
    cdef Log log
    cdef SegmentSet vectors
    cdef list kept                  # the segments' files: keeps `segments` mapped
    cdef const void** segments
    cdef const float** factors      # of each segment's first row; the next is `FACTOR_STRIDE` on
    cdef const kalos_row* infos
    cdef const uint64_t* dead       # bit r: row r is deleted
    cdef readonly uint64_t num_rows
    cdef readonly uint64_t rows_per_segment
    cdef readonly uint64_t stride_nbytes
    cdef readonly uint32_t dim
    cdef readonly bint half
    cdef bint check_factors         # cosine: a row's factor is recomputed when the row is checked
    cdef bint is_dead(self, uint64_t row) noexcept nogil
    cdef int take(self, StoreReader reader, uint64_t num_rows) except -1
    cdef int verify(self, uint64_t start, uint64_t count) except -1
    cdef bint entry_gone(self, uint64_t row) except -1

# Copy a checked entry out of a slot's table.
cdef int read_entry(Index index, const EntryTable* table, uint32_t seq, kalos_entry* out) except -1

cdef enum:
    FACTOR_STRIDE = 16              # sizeof(kalos_row)

# Rows of one or several slots as a scan takes them. Never changes.
cdef class Runs:
    cdef readonly tuple slots       # slot offsets
    cdef readonly object spans      # uint64 (E, 2): first row, rows; ascending, disjoint
    cdef readonly object seqs       # uint32 (E,): seq of the run's first row
    cdef readonly object owners     # uint32 (E,): which of `slots`
    cdef readonly object edges      # uint64 (E, 2): ID of the run's first and last entry
    cdef readonly object ids        # uint64 by row where IDs do not ascend with rows, else None
    cdef const uint64_t[:, ::1] c_spans
    cdef const uint32_t[::1] c_seqs
    cdef const uint32_t[::1] c_owners
    cdef readonly uint64_t num_rows
    cdef bint locate(self, uint64_t row, uint32_t* owner, uint32_t* seq) noexcept

# The vectors of one slot's living entries, extended as the slot grows.
cdef class EntryRows:
    cdef Index index                # the generation that the slot offset is of
    cdef Log log
    cdef readonly uint64_t slot_off
    cdef readonly bint turns        # a session's: IDs are seqs
    cdef readonly uint32_t count    # entries that were looked at
    cdef readonly uint32_t epoch
    cdef readonly object expiries   # {seq: expires_at} of entries with a time to live
    cdef readonly Runs runs
    cdef int follow(self, RowFiles files) except -1
    cdef int extend(self, RowFiles files, uint32_t count) except -1

cdef class RowFiles:
    cdef readonly StoreReader reader
    cdef object lock
    cdef RowMap map                 # newest
    cdef dict slots                 # slot offset -> EntryRows, oldest use first
    cdef RowMap at_least(self, Index index, uint64_t num_rows)
    cdef EntryRows rows_of(self, Index index, Log log, uint64_t slot_off, bint turns)
