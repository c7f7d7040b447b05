"""Mapped files of a store.

Writing goes through ``pwrite``, so that a full disk is an error code and never a SIGBUS; mappings
are for reading. The one exception is a growing file mapped for writing (the index): its bytes are
written as zeros before they are stored to.

A mapping may be longer than its file. Nothing behind the file's end is ever touched: every pointer
is taken through `at`, which knows the size, and `check` asks the system for the size again where
another process could have cut the file.
"""

import os

cimport cython
from libc.stdlib cimport calloc, free, realloc
from libc.stdint cimport uint32_t
from libc.string cimport memset

from kalos_ctx._posix cimport (
    EDQUOT, EFBIG, EINTR, ENOSPC, MAP_FAILED, MAP_PRIVATE, MAP_SHARED, O_CLOEXEC, O_CREAT,
    O_NOFOLLOW, O_NONBLOCK, O_RDONLY, O_RDWR, PROT_READ, PROT_WRITE, S_ISREG, c_stat, close, errno,
    fdatasync, fstat, ftruncate, mmap, munmap, openat, pread, pwrite, strerror,
)

from kalos_ctx.errors import StoreCorrupt, StoreFull, StoreIOError

cdef extern from "_sigbus.h":
    void kalos_guard_add(void* base, size_t n)
    void kalos_guard_remove(void* base)
    uint32_t kalos_guard_hits()

cdef size_t GROW_STEP_MAX = 4 << 20
cdef size_t ZEROS_BYTES = 256 << 10
cdef char* ZEROS = <char*>calloc(1, ZEROS_BYTES)


cdef object raise_os(int code, str doing, str name):
    """Raise the error of an errno: no room becomes StoreFull, everything else StoreIOError."""
    text = strerror(code).decode("utf-8", "replace")
    if code in (ENOSPC, EDQUOT, EFBIG):
        raise StoreFull(f"cannot {doing} {name}: {text}; nothing of the call was kept")
    raise StoreIOError(code, f"cannot {doing} {name}: {text}")


cdef int write_all(int fd, const void* data, size_t n, size_t off) noexcept nogil:
    """Write n bytes at off, through short writes and interruptions; 0 or the errno."""
    cdef const char* p = <const char*>data
    cdef ssize_t done
    while n:
        done = pwrite(fd, p, n, off)
        if done < 0:
            if errno == EINTR:
                continue
            return errno
        if done == 0:
            return ENOSPC
        p += done
        off += done
        n -= done
    return 0


cdef int write_zeros(int fd, size_t start, size_t stop) noexcept nogil:
    cdef size_t step
    cdef int code
    while start < stop:
        step = stop - start
        if step > ZEROS_BYTES:
            step = ZEROS_BYTES
        code = write_all(fd, ZEROS, step, start)
        if code:
            return code
        start += step
    return 0


cdef int read_flaw(int fd, size_t off, size_t n) noexcept nogil:
    """The errno with which a range cannot be read, 0 where it can (or the file is shorter)."""
    cdef char buffer[4096]
    cdef ssize_t done
    while n:
        done = pread(fd, buffer, min(n, sizeof(buffer)), off)
        if done < 0:
            if errno == EINTR:
                continue
            return errno
        if done == 0:
            return 0
        off += done
        n -= done
    return 0


def pages_lost():
    """How many pages of mapped files were not there when this process touched them, so far."""
    return kalos_guard_hits()


# Outside of the cycle collector, which would clear `old` before `__dealloc__` unmaps what it lists.
# A mapping holds numbers and strings, so it is part of no cycle.
@cython.no_gc
cdef class MappedFile:
    """One file, mapped. `open_file` makes it."""

    def __cinit__(self):
        self.fd = -1
        self.base = NULL
        self.old = []

    @staticmethod
    def open_file(int dirfd, str name, *, bint writable=False, bint create=False,
                  bint private=False, str label=None):
        """Open `name` in the folder `dirfd`; links, FIFOs and devices are refused.

        Raises
        ------
        StoreIOError, StoreCorrupt
        """
        cdef MappedFile self = MappedFile.__new__(MappedFile)
        cdef c_stat st
        cdef bytes path = name.encode()
        # Not blocking: opening a FIFO would wait for its other end.
        cdef int flags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (O_RDWR if writable else O_RDONLY)
        if create:
            flags |= O_CREAT
        self.name = label or name
        self.writable = writable
        self.private = private
        self.fd = openat(dirfd, path, flags, 0o600)
        if self.fd < 0:
            raise_os(errno, "open", self.name)
        if fstat(self.fd, &st) != 0:
            raise_os(errno, "read", self.name)
        if not S_ISREG(st.st_mode):
            raise StoreCorrupt(f"{self.name} is not a regular file", self.name, 0)
        self.size = st.st_size
        return self

    def __dealloc__(self):
        self.release()

    cdef void release(self):
        self.close()
        if self.base != NULL:
            kalos_guard_remove(self.base)
            munmap(self.base, self.mapped)
            self.base = NULL
        for address, n in self.old:
            kalos_guard_remove(<void*><size_t>address)
            munmap(<void*><size_t>address, <size_t>n)
        self.old = []

    def close(self):
        """Close the descriptor. The mapping stays while anybody refers to the object."""
        if self.fd >= 0:
            close(self.fd)
            self.fd = -1

    def identity(self):
        """(inode, device) of the open file."""
        cdef c_stat st
        if fstat(self.fd, &st) != 0:
            raise_os(errno, "read", self.name)
        return st.st_ino, st.st_dev

    cdef int map_at_least(self, size_t n) except -1:
        """Make `base` cover n bytes of address space; earlier mappings stay valid."""
        cdef size_t want = 1 << 16
        cdef void* base
        cdef bint write = self.writable or self.private
        if n <= self.mapped:
            return 0
        while want < n:
            want *= 2
        base = mmap(NULL, want, PROT_READ | (PROT_WRITE if write else 0),
                    MAP_PRIVATE if self.private else MAP_SHARED, self.fd, 0)
        if base == MAP_FAILED:
            raise_os(errno, "map", self.name)
        if self.base != NULL:
            self.old.append((<size_t>self.base, self.mapped))
        kalos_guard_add(base, want)
        self.base = <char*>base
        self.mapped = want
        return 0

    cdef int grow(self, size_t n) except -1:
        """Make the file at least n bytes long, the new ones written as zeros, and map it.

        Steps double up to 4 MiB, so that a store of one turn stays small.
        """
        cdef size_t want
        cdef int code
        if n > self.size:
            want = self.size * 2 if self.size < GROW_STEP_MAX else self.size + GROW_STEP_MAX
            want = max(want, <size_t>(16 << 10))
            want = max(want, (n + 4095) & ~<size_t>4095)
            code = write_zeros(self.fd, self.size, want)
            if code:
                raise_os(code, "extend", self.name)
            self.size = want
        return self.map_at_least(self.size)

    cdef int check(self, size_t end) except -1:
        """Ask the system whether the file still has `end` bytes.

        Raises StoreCorrupt where it was cut from outside.
        """
        cdef c_stat st
        if fstat(self.fd, &st) != 0:
            raise_os(errno, "read", self.name)
        self.size = st.st_size
        if self.size < end:
            raise StoreCorrupt(
                f"{self.name} ends at byte {self.size}, {end} were written", self.name, self.size)
        return self.map_at_least(end)

    cdef int write(self, const void* data, size_t n, size_t off) except -1:
        cdef int code = write_all(self.fd, data, n, off)
        if code:
            raise_os(code, "write", self.name)
        if off + n > self.size:
            self.size = off + n
        return 0

    cdef int sync(self) except -1:
        cdef int code = 0
        with nogil:
            if fdatasync(self.fd) != 0:
                code = errno
        if code:
            raise_os(code, "sync", self.name)
        return 0


cdef class SegmentSet:
    """The files ``<prefix>-000000``, ``<prefix>-000001``, ... of a folder, each of `segment_bytes`.

    The last may be shorter; a sealed one has its full length, the unused end written as zeros.
    """

    def __cinit__(self):
        self.bases = NULL
        self.sizes = NULL

    def __init__(self, int dirfd, str folder, str prefix, size_t segment_bytes, bint writable):
        self.dirfd = dirfd
        self.folder = folder
        self.prefix = prefix
        self.segment_bytes = segment_bytes
        self.writable = writable
        self.files = []

    def __dealloc__(self):
        free(self.bases)
        free(self.sizes)

    def name(self, uint32_t segment):
        """File name of a segment inside the folder."""
        return f"{self.prefix}-{segment:06d}"

    def label(self, uint32_t segment):
        """Name for messages: folder and file."""
        return f"{self.folder}/{self.name(segment)}"

    def close(self):
        """Close all segments."""
        for f in self.files:
            if f is not None:
                (<MappedFile>f).close()
        self.files = []
        self.count = 0

    cdef MappedFile open(self, uint32_t segment, bint create):
        """The segment's file, opened and mapped once. Called with the GIL."""
        cdef MappedFile f
        cdef uint32_t room
        cdef void* grown
        if segment < self.count and self.files[segment] is not None:
            return self.files[segment]
        f = MappedFile.open_file(self.dirfd, self.name(segment), writable=self.writable,
                                 create=create, label=self.label(segment))
        # Writers write through pwrite; their mapping, like a reader's, is for reading.
        f.writable = False
        f.map_at_least(max(self.segment_bytes, f.size))
        f.writable = self.writable
        if segment >= self.room:
            room = max(<uint32_t>16, (segment + 1) * 2)
            grown = realloc(self.bases, room * sizeof(char*))
            if grown == NULL:
                raise MemoryError
            self.bases = <char**>grown
            grown = realloc(self.sizes, room * sizeof(size_t))
            if grown == NULL:
                raise MemoryError
            self.sizes = <size_t*>grown
            memset(self.bases + self.room, 0, (room - self.room) * sizeof(char*))
            memset(self.sizes + self.room, 0, (room - self.room) * sizeof(size_t))
            self.room = room
        while self.count <= segment:
            self.files.append(None)
            self.count += 1
        self.files[segment] = f
        self.bases[segment] = f.base
        self.sizes[segment] = f.size
        return f

    cdef object damaged(self, uint32_t segment, size_t off, size_t n, str what):
        """Raise for n bytes that do not hold.

        StoreIOError where the device cannot read them (a mapping shows zeros then), else
        StoreCorrupt.
        """
        cdef MappedFile f = self.open(segment, False)
        cdef int code = read_flaw(f.fd, off, n)
        if code:
            raise_os(code, "read", self.label(segment))
        raise StoreCorrupt(f"{self.label(segment)} at byte {off}: {what}", self.label(segment), off)

    cdef const char* at(self, uint32_t segment, size_t off, size_t n) except NULL:
        """Pointer to n readable bytes; StoreCorrupt where the file does not have them."""
        cdef MappedFile f
        if segment < self.count and self.bases[segment] != NULL and off + n <= self.sizes[segment]:
            return self.bases[segment] + off
        f = self.open(segment, False)
        f.check(off + n)
        self.bases[segment] = f.base
        self.sizes[segment] = f.size
        return f.base + off

    cdef int verify_size(self, uint32_t segment, size_t end) except -1:
        """As MappedFile.check, for a segment."""
        cdef MappedFile f = self.open(segment, False)
        f.check(end)
        self.bases[segment] = f.base
        self.sizes[segment] = f.size
        return 0

    cdef int write(self, uint32_t segment, const void* data, size_t n, size_t off) except -1:
        """Write into a segment, creating it where it is new."""
        cdef MappedFile f
        if segment < self.count and self.files[segment] is not None:
            f = <MappedFile>self.files[segment]
        else:
            f = self.open(segment, True)
        f.write(data, n, off)
        if f.size > f.mapped:  # an oversized log segment
            f.writable = False
            f.map_at_least(f.size)
            f.writable = True
            self.bases[segment] = f.base
        self.sizes[segment] = f.size
        return 0

    def zero_until(self, uint32_t segment, size_t stop):
        """Write zeros from the file's end to `stop`: seals it, or makes blocks to sync into."""
        cdef MappedFile f = self.open(segment, True)
        cdef int code
        if f.size < stop:
            code = write_zeros(f.fd, f.size, stop)
            if code:
                raise_os(code, "extend", f.name)
            f.size = stop
            self.sizes[segment] = stop

    def take_back(self, uint32_t segment, size_t off, size_t stop):
        """Undo a write that failed half way: the file ends where it did, zeros from `off` on."""
        cdef MappedFile f
        cdef int code
        if segment >= self.count or self.files[segment] is None:
            return
        f = self.files[segment]
        # What the failed write added lies behind the size that is remembered.
        code = write_zeros(f.fd, off, min(stop, f.size))
        if code == 0 and ftruncate(f.fd, f.size) != 0:
            code = errno
        if code:
            raise_os(code, "restore", f.name)

    def present(self):
        """Numbers of the segments that lie in the folder, ascending."""
        begin = self.prefix + "-"
        return sorted(int(name[len(begin):]) for name in os.listdir(self.dirfd)
                      if name.startswith(begin) and name[len(begin):].isdigit())

    def last_present(self):
        """The largest of `present`, -1 for none."""
        return max(self.present(), default=-1)

    def expect_dirty(self, uint32_t first, uint32_t last):
        """Let the next sync cover segments `first` to `last`: another process may have written."""
        cdef uint32_t i
        for i in range(first, last + 1):
            self.open(i, False)
        self.dirty_from = min(self.dirty_from, first)

    def zero_range(self, uint32_t segment, size_t start, size_t stop):
        """Overwrite a range with zeros (erasure, a dropped tail)."""
        cdef MappedFile f = self.open(segment, False)
        cdef int code = write_zeros(f.fd, start, min(stop, f.size))
        if code:
            raise_os(code, "write", f.name)
        self.dirty_from = min(self.dirty_from, segment)

    def size_of(self, uint32_t segment):
        """Bytes the segment's file has."""
        return (<MappedFile>self.open(segment, False)).size

    cdef int sync(self) except -1:
        """fdatasync every segment that may hold unsynced bytes."""
        cdef uint32_t i
        for i in range(self.dirty_from, self.count):
            if self.files[i] is not None:
                (<MappedFile>self.files[i]).sync()
        if self.count:
            self.dirty_from = self.count - 1
        return 0
