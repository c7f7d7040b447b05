"""Committing batches and making them durable.

Every change is: stage a batch, write it, apply it to the index, publish, and sync where the
durability asks for it. After one failed sync nothing more is written.
"""

import os
import threading

from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from kalos_ctx._control cimport WORD_COMMITTED, WORD_ROWS
from kalos_ctx._layout cimport KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, kalos_roots
from kalos_ctx._locking cimport LockedStore
from kalos_ctx._reader cimport StoreReader

from kalos_ctx.errors import ForkedHandle, StoreIOError, StoreReadOnly

DURABILITIES = ("process", "group", "each")
# Log bytes between two checkpoints: what a recovery after a power loss applies again at most.
cdef uint64_t CHECKPOINT_BYTES = 64 << 20


cdef class DurableStore(LockedStore):
    """A store that commits batches as durably as it was asked to."""

    cdef int writing(self) except -1:
        """Called first by every call that changes something, with the mutex held."""
        if self.in_child():
            raise ForkedHandle(
                "this store was opened before a fork; open it again in the child, for reading")
        self.enter()
        if self.failed is not None:
            raise StoreReadOnly(f"the store takes no more writes: {self.failed}; open it again")
        return 0

    cdef int commit(self) except -1:
        """Write, apply and publish the batch. Call with the mutex held, then `finish` without."""
        cdef uint64_t before = self.log.end
        if self.batch.new_segments is not None:
            self.check_lock()
        try:
            self.batch.write()
        except BaseException as e:
            self.log.end = before
            if isinstance(e, OSError) and not isinstance(e, StoreIOError):
                raise StoreIOError(e.errno, f"cannot write the log: {e.strerror}") from None
            raise
        self.index.applied = before
        try:
            self.batch.apply()
        except BaseException:
            # The log has the batch and the index does not: only the next opening brings them
            # together.
            self.failed = "its index could not follow its log"
            raise
        self.control.set_word(WORD_ROWS, self.index.cursor.vector_rows)
        self.control.set_word(WORD_COMMITTED, self.log.end)
        return 0

    cdef int finish(self) except -1:
        """Wait until what was committed is as durable as the store promises."""
        cdef uint64_t mine = self.log.end
        if self.payload_in_log:
            with self.sync_mutex:
                # Whoever waited here while another call synced finds its batch durable already.
                if self.synced < mine:
                    self.sync_log()
        if self.log_bytes() - self.checkpoint_at >= CHECKPOINT_BYTES and self.checkpointer is None:
            self.checkpointer = threading.Thread(target=self.checkpoint_aside, daemon=True)
            self.checkpointer.start()
        return 0

    def sync_log(self):
        """fdatasync the log; after a failure the store takes no more writes."""
        cdef uint64_t target = self.log.end
        if self.failed is not None:
            raise StoreReadOnly(f"the store takes no more writes: {self.failed}; open it again")
        try:
            self.log.files.sync()
        except OSError as e:
            self.failed = "a sync failed"
            raise StoreIOError(e.errno, f"{e.strerror}; the store takes no more writes") from None
        self.synced = target

    cdef uint64_t log_bytes(self) noexcept:
        """Bytes written to the log so far, for spacing checkpoints."""
        return (KALOS_POSITION_SEGMENT(self.log.end) * self.control.head.segment_bytes
                + KALOS_POSITION_OFFSET(self.log.end))

    def sync_files(self):
        """Make log, tokens, vectors and index durable as they stand."""
        try:
            self.log.files.sync()
            self.tokens.sync()
            self.vectors.sync()
            self.index.sync()
            os.fsync(self.genfd)
        except OSError as e:
            self.failed = "a sync failed"
            raise StoreIOError(e.errno, f"{e.strerror}; the store takes no more writes") from None

    def mark_checkpoint(self, uint64_t lsn):
        """Record that the index is durable up to a position; the caller has synced it."""
        self.control.state.checkpoint = lsn
        self.control.state.cursor = self.index.cursor
        self.control.state.roots = self.index.roots
        self.control.write_state(True)

    def checkpoint(self):
        """Sync everything and move the checkpoint to the log's end.

        The position is taken first: records that are written while the files sync are simply
        applied again by a recovery.
        """
        cdef uint64_t lsn = 0
        with self.mutex:
            self.writing()
            lsn = self.log.end
            cursor = self.index.cursor_bytes()
            roots = (<char*>&self.index.roots)[:sizeof(kalos_roots)]
            self.checkpoint_at = self.log_bytes()
        self.sync_files()
        with self.mutex:
            self.control.state.checkpoint = lsn
            memcpy(&self.control.state.cursor, <const char*><bytes>cursor, 32)
            memcpy(&self.control.state.roots, <const char*><bytes>roots, sizeof(kalos_roots))
            self.control.write_state(True)
            self.synced = max(self.synced, lsn)

    def checkpoint_aside(self):
        """The checkpoint thread's body. A failure stops writes, as a failed sync of a call does."""
        try:
            self.checkpoint()
        except Exception as e:
            self.failed = self.failed or f"a checkpoint failed ({type(e).__name__})"
        finally:
            self.checkpointer = None

    def close(self):
        """Write everything down and close in order. In a forked child it only lets go."""
        if self.closed:
            return
        if self.in_child():
            self.lock_fd = self.control_lock_fd = -1
            StoreReader.close(self)
            return
        thread = self.checkpointer
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        try:
            with self.mutex:
                if self.failed is None:
                    self.checkpoint()
                    if not self.index.suspect:
                        self.index.epoch = self.control.state.epoch
                        self.index.arena.sync()
                    self.control.state.clean = 1
                    self.control.write_state(True)
        finally:
            StoreReader.close(self)
            self.release_lock()
