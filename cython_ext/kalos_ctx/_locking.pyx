"""The writer's lock, and how a forked child tells that it does not hold it.

One process writes, by open-file-description locks on the file ``lock`` and on the control file (a
lock by process ID would be lost when any other descriptor of the file is closed; ``lock`` alone
could be removed and made anew).
"""

import errno as errno_codes
import fcntl
import os
import socket
import struct

from libc.stdint cimport uint32_t

from kalos_ctx._reader cimport StoreReader

from kalos_ctx.errors import StoreIOError, StoreLocked

cdef extern from *:
    """
    #include <pthread.h>
    #include <unistd.h>
    #define KALOS_LOCKS_MAX 256
    static volatile uint32_t kalos_forks;
    static volatile int kalos_lock_fds[KALOS_LOCKS_MAX];  /* + 1; 0: free */
    /* A child lets go of the locks, which stay with the parent's descriptors: otherwise a child
       that lives on would hold them when the parent is gone. */
    static void kalos_count_fork(void) {
      kalos_forks++;
      for (int i = 0; i < KALOS_LOCKS_MAX; i++)
        if (kalos_lock_fds[i]) { close(kalos_lock_fds[i] - 1); kalos_lock_fds[i] = 0; }
    }
    static void kalos_note_lock(int fd) {
      for (int i = 0; i < KALOS_LOCKS_MAX; i++)
        if (!kalos_lock_fds[i]) { kalos_lock_fds[i] = fd + 1; return; }
    }
    static void kalos_forget_lock(int fd) {
      for (int i = 0; i < KALOS_LOCKS_MAX; i++)
        if (kalos_lock_fds[i] == fd + 1) kalos_lock_fds[i] = 0;
    }
    __attribute__((constructor)) static void kalos_watch_forks(void) {
      pthread_atfork(NULL, NULL, kalos_count_fork);
    }
    """
    uint32_t kalos_forks
    void kalos_note_lock(int fd)
    void kalos_forget_lock(int fd)

F_OFD_SETLK = 37                    # not in the module fcntl before Python 3.13


cdef int set_lock(int fd, int kind) except -1:
    """Lock or unlock a whole file, by its open file description."""
    fcntl.fcntl(fd, F_OFD_SETLK, struct.pack("hhlli4x", kind, os.SEEK_SET, 0, 0, 0))
    return 0


cdef class LockedStore(StoreReader):
    """A store of which this process holds the lock."""

    def __cinit__(self):
        self.lock_fd = self.control_lock_fd = -1

    def take_lock(self):
        """Take the writer's lock or raise StoreLocked with its holder."""
        self.forks = kalos_forks
        try:
            self.lock_fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                                   0o600, dir_fd=self.dirfd)
        except OSError as e:
            raise StoreIOError(e.errno, f"cannot open the store's lock: {e.strerror}") from None
        try:
            set_lock(self.lock_fd, fcntl.F_WRLCK)
        except OSError as e:
            holder = os.pread(self.lock_fd, 200, 0).decode("utf-8", "replace").strip() or "unknown"
            os.close(self.lock_fd)
            self.lock_fd = -1
            if e.errno in (errno_codes.EAGAIN, errno_codes.EACCES):
                raise StoreLocked(f"the store is open for writing elsewhere ({holder})") from None
            raise StoreIOError(e.errno, f"cannot lock the store: {e.strerror}") from None
        kalos_note_lock(self.lock_fd)
        text = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        try:
            os.ftruncate(self.lock_fd, 0)
            os.pwrite(self.lock_fd, text, 0)
        except OSError:
            pass  # the holder's name is for messages only; a full disk must not stop the lock
        st = os.fstat(self.lock_fd)
        self.lock_identity = (st.st_dev, st.st_ino)

    def lock_control(self):
        """Lock the control file too: a lock file removed and made anew locks nobody out."""
        fd = os.open("control", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.dirfd)
        try:
            set_lock(fd, fcntl.F_WRLCK)
        except OSError as e:
            os.close(fd)
            if e.errno in (errno_codes.EAGAIN, errno_codes.EACCES):
                raise StoreLocked(
                    "the store is open for writing elsewhere, and its lock file was replaced"
                ) from None
            raise StoreIOError(e.errno, f"cannot lock the store: {e.strerror}") from None
        self.control_lock_fd = fd
        kalos_note_lock(fd)

    def release_lock(self):
        """Give the locks back, also where a child process inherited their descriptors."""
        for fd in (self.lock_fd, self.control_lock_fd):
            if fd >= 0:
                kalos_forget_lock(fd)
                set_lock(fd, fcntl.F_UNLCK)
                os.close(fd)
        self.lock_fd = self.control_lock_fd = -1

    def check_lock(self):
        """Raise where the lock file was replaced: another writer could hold the new one."""
        try:
            st = os.stat("lock", dir_fd=self.dirfd, follow_symlinks=False)
        except OSError:
            st = None
        if st is None or (st.st_dev, st.st_ino) != self.lock_identity:
            self.failed = "its lock file was removed or replaced"
            raise StoreLocked("the store's lock file was removed or replaced; open the store again")

    cdef bint in_child(self) noexcept:
        """Whether the process was forked after the lock was taken: it is the parent's alone."""
        return self.forks != kalos_forks

    def __dealloc__(self):
        if not self.in_child():
            for fd in (self.lock_fd, self.control_lock_fd):
                if fd >= 0:
                    kalos_forget_lock(fd)
                    os.close(fd)
