"""What a read hands out."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from kalos_ctx._segment cimport MappedFile

cdef class TokenView:
    cdef MappedFile file            # keeps the mapping alive
    cdef const int32_t* data
    cdef Py_ssize_t length
    cdef Py_ssize_t stride

cdef class Stored:                  # what turns and passages share
    cdef readonly double created_at
    cdef TokenView view
    cdef object ids                 # numpy array, made at first use
    cdef bytes raw_text
    cdef bytes raw_metadata

cdef class Turn(Stored):
    cdef readonly uint32_t seq
    cdef uint8_t role_code
    cdef bytes raw_group            # its first byte tells str (s) from int (i)

cdef class Passage(Stored):
    cdef readonly uint64_t id
    cdef bytes raw_vector           # as stored
    cdef bint half

cdef object ids_of(TokenView view)
