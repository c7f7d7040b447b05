"""Vector rows of a store in the form in which a device takes them; host memory alone."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._vectors cimport RowMap

cdef extern from *:
    """
    #ifndef KALOS_ROW_TOKENS
    #define KALOS_ROW_TOKENS
    #include <stdint.h>
    // Where the tokens of a row's entry lie; zeros where the row has no readable entry.
    typedef struct kalos_row_tokens {
      uint64_t tokens_pos;
      uint32_t num_tokens;
      uint32_t token_crc;
    } kalos_row_tokens;
    #endif
    """
    ctypedef struct kalos_row_tokens:
        uint64_t tokens_pos
        uint32_t num_tokens
        uint32_t token_crc

# The entries of an index as far as they are mapped; valid as long as a RowMap of it.
ctypedef struct kalos_arena:
    const char* base
    size_t nbytes

# With the GIL: map the entries that are there by now.
cdef int map_arena(RowMap rows, kalos_arena* out) except -1

cdef size_t row_nbytes(RowMap rows) noexcept nogil
cdef const char* row_at(RowMap rows, uint64_t row) noexcept nogil
cdef void fill_rows(
    RowMap rows, uint64_t row, uint64_t count, char* out, size_t stride) noexcept nogil
cdef void fill_places(
    RowMap rows, const kalos_arena* arena, uint64_t row, uint64_t count, kalos_row_tokens* places,
    float* factors) noexcept nogil
cdef kalos_row_tokens tokens_of(
    RowMap rows, const kalos_arena* arena, uint64_t row) noexcept nogil
cdef void add_dead(
    RowMap rows, uint64_t num_rows, uint64_t first, uint64_t* bits) noexcept nogil
cdef uint64_t add_new_dead(
    RowMap rows, uint64_t num_rows, uint64_t* bits, uint64_t* first) noexcept nogil
