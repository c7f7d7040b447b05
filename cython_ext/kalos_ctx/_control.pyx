"""The control file of a store, 4,096 bytes written in full when the store is made.

A header that never changes; two copies of the state, written in turn, of which the valid one with
the larger version counts; and five words, each 48 bits of value under 16 bits of check, which
readers load with acquire.
"""

import os
import time

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from kalos_ctx._layout cimport (
    KALOS_CONTROL_BYTES, KALOS_CONTROL_STATE_A, KALOS_CONTROL_STATE_B, KALOS_CONTROL_WORDS,
    KALOS_ENDIAN_MARK, KALOS_FORMAT_MAJOR, KALOS_FORMAT_MINOR, KALOS_POSITION_MASK, kalos_crc32c,
    kalos_seal, kalos_state, kalos_store_header, kalos_unseal, kalos_words,
)
from kalos_ctx._segment cimport MappedFile

from kalos_ctx.errors import FormatVersionError, NotAStore, StoreCorrupt

cdef extern from *:
    """
    #define KALOS_LOAD_ACQUIRE(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define KALOS_STORE_RELEASE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    """
    uint64_t KALOS_LOAD_ACQUIRE(uint64_t* p) nogil
    void KALOS_STORE_RELEASE(uint64_t* p, uint64_t v) nogil

NAME = "control"


def boot_id():
    """16 bytes that change with every boot of the machine; zeros where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return bytes.fromhex(f.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def create(int dirfd, *, uint64_t segment_bytes, uint32_t vector_dtype, uint32_t metric,
           uint32_t vector_dim, uint32_t vocab_size, bytes fingerprint):
    """Write the control file of a new store aside and rename it: a store without one is none."""
    cdef kalos_store_header head
    cdef kalos_state state
    cdef kalos_words words
    memset(&head, 0, sizeof(head))
    memset(&state, 0, sizeof(state))
    memcpy(head.magic, b"KALOSCTX", 8)
    head.endian = KALOS_ENDIAN_MARK
    head.format = KALOS_FORMAT_MAJOR << 16 | KALOS_FORMAT_MINOR
    uuid = os.urandom(16)
    memcpy(head.uuid, <const char*><bytes>uuid, 16)
    head.salt = int.from_bytes(os.urandom(8), "little")
    head.segment_bytes = segment_bytes
    head.created_at = time.time()
    head.vector_dtype = vector_dtype
    head.metric = metric
    head.crc = kalos_crc32c(0, &head, sizeof(head) - 4)
    state.version = 1
    state.vector_dim = vector_dim
    state.vocab_size = vocab_size
    memcpy(state.fingerprint, <const char*>fingerprint, 32)
    state.crc = kalos_crc32c(0, &state, sizeof(state) - 4)
    words.committed = kalos_seal(0, WORD_COMMITTED)
    words.generation = kalos_seal(0, WORD_GENERATION)
    words.erasures = kalos_seal(0, WORD_ERASURES)
    words.vector_rows = kalos_seal(0, WORD_ROWS)
    words.index = kalos_seal(0, WORD_INDEX)
    page = bytearray(KALOS_CONTROL_BYTES)
    page[:sizeof(head)] = (<char*>&head)[:sizeof(head)]
    stop = KALOS_CONTROL_STATE_A + sizeof(state)
    page[KALOS_CONTROL_STATE_A:stop] = (<char*>&state)[:sizeof(state)]
    page[KALOS_CONTROL_WORDS:KALOS_CONTROL_WORDS + sizeof(words)] = (<char*>&words)[:sizeof(words)]
    aside = f"{NAME}.new"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=dirfd)
    try:
        written = os.write(fd, page)
        if written != len(page):
            raise OSError(28, "no space for the control file")
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(aside, NAME, src_dir_fd=dirfd, dst_dir_fd=dirfd)
    os.fsync(dirfd)


cdef class Control:
    """The mapped control file."""

    def __init__(self, int dirfd, bint writable):
        self.file = MappedFile.open_file(dirfd, NAME, writable=writable)
        if self.file.size < 8:
            raise NotAStore(
                f"{NAME} has {self.file.size} bytes, a store's has {KALOS_CONTROL_BYTES}",
                NAME, 0)
        self.file.map_at_least(KALOS_CONTROL_BYTES)
        self.check_header(writable)
        self.read_state()

    def close(self):
        """Close the file."""
        self.file.close()

    def check_header(self, bint writable):
        """Raise where this is no store, or one that this version cannot read.

        A newer minor format can be read and not written: it may only have added what readers may
        ignore.
        """
        cdef const kalos_store_header* head = <const kalos_store_header*>self.file.base
        if memcmp(head.magic, b"KALOSCTX", 8) != 0:
            raise NotAStore(f"{NAME} does not begin with the mark of a store", NAME, 0)
        if self.file.size < KALOS_CONTROL_BYTES:
            raise StoreCorrupt(f"{NAME} has {self.file.size} bytes, a store's has "
                               f"{KALOS_CONTROL_BYTES}", NAME, self.file.size)
        if head.endian != KALOS_ENDIAN_MARK:
            if head.endian == 0x04030201:
                raise FormatVersionError("the store was written on another byte order")
            raise StoreCorrupt(f"{NAME} at byte 8: the byte order mark does not hold", NAME, 8)
        if head.crc != kalos_crc32c(0, head, sizeof(kalos_store_header) - 4):
            if head.format >> 16 > KALOS_FORMAT_MAJOR and head.format >> 16 < 256:
                raise FormatVersionError(
                    f"the store's format is {head.format >> 16}.{head.format & 0xffff}, "
                    f"this version reads up to {KALOS_FORMAT_MAJOR}.{KALOS_FORMAT_MINOR}")
            raise StoreCorrupt(f"{NAME} at byte 0: the header's checksum does not hold", NAME, 0)
        if head.format >> 16 != KALOS_FORMAT_MAJOR \
                or (writable and head.format & 0xffff > KALOS_FORMAT_MINOR):
            raise FormatVersionError(
                f"the store's format is {head.format >> 16}.{head.format & 0xffff}, "
                f"this version reads up to {KALOS_FORMAT_MAJOR}.{KALOS_FORMAT_MINOR}")
        self.head = head[0]

    cdef int read_state(self) except -1:
        """Load the newest valid copy of the state."""
        cdef kalos_state copy
        cdef uint64_t best = 0
        for off in (KALOS_CONTROL_STATE_A, KALOS_CONTROL_STATE_B):
            # Copied first: a writer may be replacing it.
            memcpy(&copy, self.file.base + <size_t>off, sizeof(kalos_state))
            if copy.version > best and copy.crc == kalos_crc32c(0, &copy, sizeof(kalos_state) - 4):
                best = copy.version
                self.state = copy
        if best == 0:
            raise StoreCorrupt(
                f"{NAME} at byte {KALOS_CONTROL_STATE_A}: no copy of the state holds",
                NAME, KALOS_CONTROL_STATE_A)
        return 0

    cdef int write_state(self, bint durable) except -1:
        """Write `state` over the older copy, its version one up."""
        cdef char* to
        self.state.version += 1
        self.state.crc = kalos_crc32c(0, &self.state, sizeof(kalos_state) - 4)
        to = self.file.base + (KALOS_CONTROL_STATE_B if self.state.version % 2 == 0
                               else KALOS_CONTROL_STATE_A)
        memcpy(to, &self.state, sizeof(kalos_state))
        if durable:
            self.file.sync()
        return 0

    cdef uint64_t word(self, Word which) except? 0:
        cdef uint64_t* at = <uint64_t*>(self.file.base + KALOS_CONTROL_WORDS) + <int>which
        cdef uint64_t value
        if not kalos_unseal(KALOS_LOAD_ACQUIRE(at), which, &value):
            off = KALOS_CONTROL_WORDS + 8 * <int>which
            raise StoreCorrupt(f"{NAME} at byte {off}: the word's check does not hold", NAME, off)
        return value

    cdef uint64_t raw_word(self, Word which) noexcept:
        """The word with its check, to see whether it changed."""
        return KALOS_LOAD_ACQUIRE(<uint64_t*>(self.file.base + KALOS_CONTROL_WORDS) + <int>which)

    def holds(self, Word which):
        """Whether a word proves itself."""
        cdef uint64_t value
        return bool(kalos_unseal(self.raw_word(which), which, &value))

    def count_up(self, Word which):
        """Advance a word that only has to change; one that is damaged begins at the clock."""
        value = self.word(which) + 1 if self.holds(which) else time.time_ns() >> 10
        self.set_word(which, value & KALOS_POSITION_MASK)

    cdef int set_word(self, Word which, uint64_t value) except -1:
        cdef uint64_t* at = <uint64_t*>(self.file.base + KALOS_CONTROL_WORDS) + <int>which
        KALOS_STORE_RELEASE(at, kalos_seal(value, which))
        return 0

    @property
    def config(self):
        """What was chosen when the store was made, as a dict."""
        return {
            "uuid": (<char*>self.head.uuid)[:16].hex(),
            "format": f"{self.head.format >> 16}.{self.head.format & 0xffff}",
            "segment_bytes": self.head.segment_bytes,
            "created_at": self.head.created_at,
            "vector_dtype": ("float32", "float16")[self.head.vector_dtype],
            "metric": ("cosine", "ip", "l2")[self.head.metric],
            "vector_dim": self.state.vector_dim or None,
            "vocab_size": self.state.vocab_size or None,
            "fingerprint": (<char*>self.state.fingerprint)[:32],
        }
