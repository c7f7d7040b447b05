"""The log: records appended to segments, found by position, scanned in order."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._layout cimport kalos_change, kalos_extent, kalos_record, kalos_roots, kalos_row
from kalos_ctx._segment cimport SegmentSet

cdef extern from "_records.h" nogil:
    ctypedef struct kalos_sections:
        const kalos_change* change
        const kalos_roots* roots
        const kalos_extent* extents
        const char* name
        const char* tenant
        const char* key
        const char* group
        const char* text
        const char* metadata
        const char* table
        const char* tokens
        const char* live
        const char* vector
    uint32_t kalos_record_crc(uint64_t salt, const kalos_record* rec)
    uint64_t kalos_round_up(uint64_t n, uint64_t to)
    int kalos_header_valid(uint64_t salt, const kalos_record* rec, uint64_t lsn, uint64_t room)
    int kalos_body_holds(const kalos_record* rec)
    int kalos_body_valid(const kalos_record* rec)
    int kalos_sections_of(const kalos_record* rec, kalos_sections* out)
    void kalos_row_write(kalos_row* r, uint64_t row, uint32_t crc, float factor, uint64_t entry,
                         int dead)
    int kalos_row_holds(const kalos_row* r, uint64_t row, uint64_t* entry, int* dead)

cdef class Log:
    cdef readonly SegmentSet files
    cdef uint64_t salt
    cdef bytes uuid
    cdef uint32_t generation
    cdef readonly uint64_t end          # position behind the last whole batch
    cdef bint ahead                     # write zeros ahead, so that a sync changes no file size
    cdef const kalos_record* record(self, uint64_t lsn) except NULL
    cdef int sections(self, uint64_t lsn, kalos_sections* out) except -1
    cdef int change_at(self, uint64_t lsn, kalos_change* out) except -1
    cdef int append(self, const void* data, uint64_t size, uint64_t lsn) except -1
    cdef int rewrite(self, uint64_t lsn, const void* data, size_t n) except -1
