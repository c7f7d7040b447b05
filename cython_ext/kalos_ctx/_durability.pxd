"""A store that commits batches: mutex, log position that is durable, checkpoints."""

from libc.stdint cimport uint64_t

from kalos_ctx._batch cimport Batch
from kalos_ctx._locking cimport LockedStore

cdef class DurableStore(LockedStore):
    cdef readonly object mutex
    cdef object sync_mutex
    cdef readonly str durability
    cdef bint payload_in_log        # records carry tokens and vectors, so that one sync covers them
    cdef uint64_t synced            # log position that is durable
    cdef uint64_t checkpoint_at     # log bytes at the last checkpoint
    cdef object checkpointer        # thread, while one runs
    cdef Batch batch

    cdef int writing(self) except -1
    cdef int commit(self) except -1
    cdef int finish(self) except -1
    cdef uint64_t log_bytes(self) noexcept
