"""The system calls the store uses, declared with only the fields it reads."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from "<fcntl.h>" nogil:
    int openat(int dirfd, const char* path, int flags, ...)
    int fcntl(int fd, int cmd, ...)
    const int O_RDONLY, O_RDWR, O_CREAT, O_EXCL, O_CLOEXEC, O_NOFOLLOW, O_DIRECTORY, O_NONBLOCK
    const int O_TRUNC

cdef extern from "<unistd.h>" nogil:
    ssize_t pwrite(int fd, const void* buf, size_t n, int64_t off)
    ssize_t pread(int fd, void* buf, size_t n, int64_t off)
    int ftruncate(int fd, int64_t n)
    int fdatasync(int fd)
    int fsync(int fd)
    int close(int fd)

cdef extern from "<sys/stat.h>" nogil:
    cdef struct c_stat "stat":
        uint64_t st_ino
        uint64_t st_dev
        int64_t st_size
        unsigned int st_mode
    int fstat(int fd, c_stat* st)
    bint S_ISREG(unsigned int mode)

cdef extern from "<sys/mman.h>" nogil:
    void* mmap(void* addr, size_t n, int prot, int flags, int fd, int64_t off)
    int munmap(void* addr, size_t n)
    int msync(void* addr, size_t n, int flags)
    const int PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE, MS_SYNC
    void* MAP_FAILED

cdef extern from "<errno.h>" nogil:
    int errno
    const int EINTR, ENOSPC, EDQUOT, EFBIG, EMFILE, ENFILE, ENOMEM, EIO, ENOENT, ELOOP, EEXIST
    const int EACCES, EROFS, EAGAIN

cdef extern from "<string.h>" nogil:
    char* strerror(int code)
