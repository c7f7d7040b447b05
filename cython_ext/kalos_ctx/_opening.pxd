"""A store opened for writing: lock, recovery, durability."""

from libc.stdint cimport uint32_t, uint64_t

from kalos_ctx._batch cimport Batch
from kalos_ctx._layout cimport kalos_entry, kalos_roots
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._segment cimport SegmentSet

cdef class WritableStore(StoreReader):
    cdef readonly object mutex
    cdef object sync_mutex
    cdef int lock_fd
    cdef int control_lock_fd
    cdef bint aside                 # the index was built anew and is not in place yet
    cdef object lock_identity
    cdef readonly str durability
    cdef bint payload_in_log        # records carry tokens and vectors, so that one sync covers them
    cdef readonly object failed     # why writes are refused, None while they are not
    cdef uint64_t synced            # log position that is durable
    cdef uint64_t checkpoint_at     # log bytes at the last checkpoint
    cdef uint32_t forks             # what the process's fork counter was at open
    cdef readonly dict recovery     # what opening had to do
    cdef object checkpointer        # thread, while one runs
    cdef Batch batch
    cdef kalos_roots roots          # as of the batch
    cdef list staged_entries        # bytes of the entries that the batch added
    cdef dict staged_keys           # (what, key) -> seq, of the batch
    cdef dict staged_digests        # idempotency key -> digest, of the batch

    cdef int adopt(self, WritableStore other) except -1
    cdef int writing(self) except -1
    cdef int begin(self) except -1
    cdef int commit(self) except -1
    cdef int finish(self) except -1
    cdef uint64_t log_bytes(self) noexcept
    cdef object put_back(self, SegmentSet files, uint32_t segment, uint64_t off, bytes data)
    cdef int apply_again(self, list batch) except -1
    cdef int scrub_payload(self, uint64_t lsn) except -1
    cdef int scrub(self, uint64_t lsn) except -1
    cdef int scrub_entry(self, const kalos_entry* e) except -1
    cdef int zero_tokens(self, uint64_t pos, uint64_t n) except -1
