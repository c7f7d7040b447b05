"""Mapped files of a store: single growing ones and sets of segments of one size."""

from libc.stdint cimport uint32_t, uint64_t

cdef object raise_os(int code, str doing, str name)

cdef class MappedFile:
    cdef int fd
    cdef readonly str name          # relative to the store, for messages
    cdef readonly bint writable
    cdef bint private               # changes stay in this process
    cdef char* base                 # newest mapping; longer than the file, used below `size`
    cdef size_t mapped              # bytes of that mapping
    cdef size_t size                # file size when last looked at
    cdef list old                   # earlier mappings, kept: pointers into them stay valid
    cdef void release(self)
    cdef int map_at_least(self, size_t n) except -1
    cdef int grow(self, size_t n) except -1
    cdef int check(self, size_t end) except -1
    cdef int write(self, const void* data, size_t n, size_t off) except -1
    cdef int sync(self) except -1

cdef class SegmentSet:
    cdef int dirfd
    cdef readonly str folder
    cdef readonly str prefix
    cdef readonly size_t segment_bytes
    cdef readonly bint writable
    cdef list files                 # MappedFile or None, by segment number
    cdef char** bases               # by segment number, NULL where not mapped yet
    cdef size_t* sizes              # bytes of each file that may be touched
    cdef readonly uint32_t count    # segments known
    cdef uint32_t room              # length of the two arrays
    cdef readonly uint32_t dirty_from   # first segment that may hold unsynced bytes
    cdef MappedFile open(self, uint32_t segment, bint create)
    cdef object damaged(self, uint32_t segment, size_t off, size_t n, str what)
    cdef const char* at(self, uint32_t segment, size_t off, size_t n) except NULL
    cdef int verify_size(self, uint32_t segment, size_t end) except -1
    cdef int write(self, uint32_t segment, const void* data, size_t n, size_t off) except -1
    cdef int sync(self) except -1
