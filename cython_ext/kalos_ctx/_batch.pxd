"""One all-or-nothing batch of changes, staged in memory before anything is written."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from kalos_ctx._index cimport Index
from kalos_ctx._layout cimport kalos_change, kalos_cursor, kalos_extent, kalos_image, kalos_roots
from kalos_ctx._log cimport Log
from kalos_ctx._segment cimport SegmentSet

# A growing byte buffer and the places its pieces go to.
ctypedef struct Piece:
    uint32_t segment
    uint64_t off                    # bytes, in the segment
    uint64_t start                  # bytes, in the buffer
    uint64_t size

ctypedef struct Staging:
    char* data
    uint64_t size
    uint64_t room
    Piece* pieces
    uint32_t num_pieces
    uint32_t piece_room

# The variable parts of a record; lengths stand in its kalos_change.
ctypedef struct Parts:
    const kalos_roots* roots
    const kalos_extent* extents
    const char* name
    const char* tenant
    const char* key
    const char* group
    const char* text
    const char* metadata
    const char* table
    const void* tokens
    const void* live
    const void* vector

cdef class Draft:
    """A turn or passage as the caller's layer prepared it; bytes and numbers only."""
    cdef readonly uint8_t role
    cdef readonly uint8_t flags
    cdef const int32_t[::1] ids
    cdef const int32_t[::1] live
    cdef readonly uint32_t prefix_len
    cdef readonly uint32_t suffix_len
    cdef readonly uint32_t trim_prev
    cdef bytes text
    cdef bytes metadata
    cdef bytes group                # its first byte tells str (s) from int (i)
    cdef bytes key
    cdef bytes digest               # 16 bytes where there is a key
    cdef double created_at
    cdef double expires_at
    cdef const uint8_t[::1] vector  # stored bytes, padded to the row stride
    cdef uint32_t vector_nbytes     # without the padding
    cdef float factor
    cdef readonly uint64_t passage_id

cdef class Batch:
    cdef Log log
    cdef Index index
    cdef SegmentSet tokens
    cdef SegmentSet vectors
    cdef uint32_t row_stride
    cdef uint32_t rows_per_segment
    cdef kalos_cursor next          # what is allocated once the batch is applied
    cdef uint64_t log_at            # where the next record goes
    cdef uint64_t last_off          # buffer offset of the newest record
    cdef uint32_t num_records
    cdef bint synced                # all of the log before the batch is durable
    cdef Staging records
    cdef Staging token_bytes
    cdef Staging row_bytes
    cdef set claimed                # buckets that records of this batch fill
    cdef list new_segments          # (segment, end of the one before)

    cdef int begin(self) except -1
    cdef uint64_t alloc_arena(self, uint64_t n)
    cdef uint64_t stage_tokens(self, const int32_t* ids, uint64_t n, const int32_t* live,
                               uint64_t num_live) except? 0
    cdef uint32_t stage_row(self, const uint8_t* data) except? 0
    cdef uint64_t place(self, uint64_t size) except 0
    cdef uint64_t stage_record(self, uint32_t kind, uint32_t flags, kalos_change* change,
                               const Parts* parts) except 0
    cdef uint32_t claim(self, uint64_t table, uint32_t log2, uint64_t hash) except? 0
    cdef int write(self) except -1
    cdef int apply(self) except -1
