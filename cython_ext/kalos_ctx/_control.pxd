"""The control file: what the store is, where its last checkpoint lies, and the words that readers
follow."""

from libc.stdint cimport uint64_t

from kalos_ctx._layout cimport kalos_state, kalos_store_header, kalos_words
from kalos_ctx._segment cimport MappedFile

cdef enum Word:
    WORD_COMMITTED
    WORD_GENERATION
    WORD_ERASURES
    WORD_ROWS
    WORD_INDEX

cdef class Control:
    cdef MappedFile file
    cdef kalos_store_header head
    cdef kalos_state state          # newest valid copy, as last read or written
    cdef int read_state(self) except -1
    cdef int write_state(self, bint durable) except -1
    cdef uint64_t word(self, Word which) except? 0
    cdef uint64_t raw_word(self, Word which) noexcept
    cdef int set_word(self, Word which, uint64_t value) except -1
