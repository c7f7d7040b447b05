"""Opening a store for writing: lock, recovery, durability, and the scrubbing of erased bytes.

One process writes, by an open-file-description lock on the file ``lock`` (a lock by process ID would be lost
when any other descriptor of the file is closed). Opening brings the index
to the end of the log: nothing to do after a close in order, the last batch after a kill, everything behind
the last checkpoint after a power loss, and the whole log where the index is missing or not this store's.

Every change is: stage a batch, write it, apply it to the index, publish, and sync where the durability asks
for it. After one failed sync nothing more is written.
"""

import errno as errno_codes
import fcntl
import os
import shutil
import socket
import struct
import threading

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from kalos_ctx._batch cimport Batch
from kalos_ctx._control cimport WORD_COMMITTED, WORD_GENERATION, WORD_ROWS, Control
from kalos_ctx._layout cimport (
    KALOS_KIND_DROP, KALOS_KIND_ERASE, KALOS_KIND_SEGMENTS, KALOS_KIND_SHARE, KALOS_KIND_SUMMARIES,
    KALOS_POSITION, KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, KALOS_RECORD_SCRUBBED, KALOS_SEGMENT_FIRST,
    kalos_change, kalos_crc32c, kalos_entry, kalos_item, kalos_record, kalos_roots,
)
from kalos_ctx._log cimport kalos_record_crc, kalos_round_up, kalos_sections, kalos_sections_of
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._segment cimport SegmentSet

from kalos_ctx import _control
from kalos_ctx.errors import (
    ForkedHandle, NotAStore, StoreCorrupt, StoreIOError, StoreLocked, StoreReadOnly,
)

cdef extern from *:
    """
    #include <pthread.h>
    static volatile uint32_t kalos_forks;
    static void kalos_count_fork(void) { kalos_forks++; }
    __attribute__((constructor)) static void kalos_watch_forks(void) {
      pthread_atfork(NULL, NULL, kalos_count_fork);
    }
    """
    uint32_t kalos_forks

DURABILITIES = ("process", "group", "each")
# Log bytes between two checkpoints: what a recovery after a power loss applies again at most.
cdef uint64_t CHECKPOINT_BYTES = 64 << 20


cdef class WritableStore(StoreReader):
    """A store opened for writing; StoreWriter adds the calls that change it."""

    def __init__(self, str path, *, str durability="process", dict config):
        self.lock_fd = -1
        self.writable = True
        self.durability = durability
        self.payload_in_log = durability != "process"
        self.mutex = threading.RLock()
        self.sync_mutex = threading.Lock()
        self.forks = kalos_forks
        self.recovery = {"replayed": 0, "dropped_bytes": 0, "rebuilt": False, "flaw": None}
        self.path = path
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            self.dirfd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as e:
            raise StoreIOError(e.errno, f"cannot open the store's folder: {e.strerror}") from None
        self.take_lock()
        try:
            self.open_or_create(config)
            self.recover()
        except BaseException:
            self.release_lock()
            raise

    # ---- Lock -----------------------------------------------------------------------------------

    def take_lock(self):
        """Take the writer's lock or raise StoreLocked with its holder."""
        try:
            self.lock_fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600,
                                   dir_fd=self.dirfd)
        except OSError as e:
            raise StoreIOError(e.errno, f"cannot open the store's lock: {e.strerror}") from None
        flock = struct.pack("hhlli4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(self.lock_fd, 37, flock)  # F_OFD_SETLK, not in the module before Python 3.13
        except OSError as e:
            holder = os.pread(self.lock_fd, 200, 0).decode("utf-8", "replace").strip() or "unknown"
            os.close(self.lock_fd)
            self.lock_fd = -1
            if e.errno in (errno_codes.EAGAIN, errno_codes.EACCES):
                raise StoreLocked(f"the store is open for writing elsewhere ({holder})") from None
            raise StoreIOError(e.errno, f"cannot lock the store: {e.strerror}") from None
        text = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        try:
            os.ftruncate(self.lock_fd, 0)
            os.pwrite(self.lock_fd, text, 0)
        except OSError:
            pass  # the holder's name is for messages only; a full disk must not stop the lock
        st = os.fstat(self.lock_fd)
        self.lock_identity = (st.st_dev, st.st_ino)

    def release_lock(self):
        """Give the lock back; it goes with its last descriptor."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1

    def check_lock(self):
        """Raise where the lock file was replaced: another writer could hold the new one."""
        try:
            st = os.stat("lock", dir_fd=self.dirfd, follow_symlinks=False)
        except OSError:
            st = None
        if st is None or (st.st_dev, st.st_ino) != self.lock_identity:
            self.failed = "its lock file was removed or replaced"
            raise StoreLocked("the store's lock file was removed or replaced; open the store again")

    def __dealloc__(self):
        if self.lock_fd >= 0 and self.forks == kalos_forks:
            os.close(self.lock_fd)

    # ---- Open -----------------------------------------------------------------------------------

    def open_or_create(self, dict config):
        """Control file and generation, made where the folder is empty."""
        names = set(os.listdir(self.dirfd))
        if "control" not in names:
            strange = sorted(names - {"lock", "control.new", "gen-000000"})
            if strange:
                raise NotAStore(f"the folder has no control file and is not empty ({len(strange)} other "
                                "files); give an empty folder or a store", "control", 0)
            _control.create(self.dirfd, **config)
        self.control = Control(self.dirfd, True)
        if self.control.state.checkpoint == 0:
            self.make_generation(0)
        generation = self.control.state.generation
        self.open_generation(generation, self.index_can_be_made(generation))
        self.log.ahead = self.payload_in_log
        self.batch = Batch(self.log, self.index, self.tokens, self.vectors)
        self.set_vector_layout()

    def index_can_be_made(self, generation):
        """The index's files may be missing: they are built again. The log's may not."""
        folder = f"gen-{generation:06d}"
        try:
            os.stat(f"{folder}/log-000000", dir_fd=self.dirfd, follow_symlinks=False)
        except FileNotFoundError:
            raise StoreCorrupt(f"{folder}/log-000000 is missing", f"{folder}/log-000000", 0) from None
        return True

    def make_generation(self, uint32_t generation):
        """The files of an empty generation, durable, and the state that points at them."""
        folder = f"gen-{generation:06d}"
        os.makedirs(os.path.join(self.path, folder), mode=0o700, exist_ok=True)
        self.open_generation(generation, True)
        self.log.begin_segment(0, 0)
        self.index.format_files((<char*>self.control.head.uuid)[:16], generation)
        self.log.files.sync()
        self.index.sync()
        os.fsync(self.genfd)
        os.fsync(self.dirfd)
        self.control.state.generation = generation
        self.control.state.checkpoint = KALOS_SEGMENT_FIRST
        self.control.state.cursor = self.index.cursor
        self.control.state.roots = self.index.roots
        self.control.state.clean = 1
        self.control.write_state(True)
        self.control.set_word(WORD_GENERATION, generation)
        self.control.set_word(WORD_COMMITTED, KALOS_SEGMENT_FIRST)

    cdef int set_vector_layout(self) except -1:
        StoreReader.set_vector_layout(self)
        if self.batch is not None:
            self.batch.row_stride = self.row_stride
            self.batch.rows_per_segment = self.rows_per_segment
        return 0

    def recover(self):
        """Bring the index to the log's end, drop a torn tail, and start a writer epoch."""
        cdef bytes boot = _control.boot_id()
        same_boot = any(boot) and memcmp(self.control.state.boot_id, <const char*>boot, 16) == 0
        start = self.recovery_start(same_boot)
        stop, flaw, dropped = self.replay(start, same_boot)
        if flaw is not None or dropped:
            self.judge_tail(stop, flaw, same_boot)
            self.recovery["flaw"] = flaw or "unfinished batch"
            self.recovery["dropped_bytes"] = self.tail_bytes(stop)
            self.log.drop_tail(stop)
        self.log.end = stop
        self.synced = stop
        self.checkpoint_at = stop
        self.control.state.epoch += 2
        self.control.state.clean = 0
        memcpy(self.control.state.boot_id, <const char*>boot, 16)
        self.control.state.durability = DURABILITIES.index(self.durability)
        if self.recovery["rebuilt"] or self.recovery["flaw"] or not same_boot:
            self.sync_files()
            self.mark_checkpoint(stop)
        # From here on the index is being written: its epoch is odd until the writer closes in order.
        self.index.epoch = self.control.state.epoch | 1
        self.index.arena.sync()
        self.control.write_state(True)
        self.control.set_word(WORD_GENERATION, self.generation)
        self.control.set_word(WORD_COMMITTED, stop)
        self.control.set_word(WORD_ROWS, self.index.cursor.vector_rows)
        self.remove_other_generations()

    def recovery_start(self, bint same_boot):
        """Where to begin applying records: nothing, the last batch, the last checkpoint, or all."""
        uuid = (<char*>self.control.head.uuid)[:16]
        cdef uint64_t checkpoint = self.control.state.checkpoint
        cdef uint64_t epoch = self.control.state.epoch
        known = self.index.matches(uuid, self.generation) and self.log_reaches(checkpoint)
        if known and self.control.state.clean and self.index.epoch == epoch:
            if not self.index.is_original():
                self.index.adopt()
            self.index.set_cursor((<char*>&self.control.state.cursor)[:32])
            self.index.start_writing()
            self.index.applied = checkpoint
            return checkpoint
        if known and self.index.is_original() and self.index.epoch == epoch | 1:
            self.index.set_cursor((<char*>&self.control.state.cursor)[:32])
            if same_boot and self.log_reaches(self.index.applied):
                self.index.start_writing()
                return self.index.applied
            self.index.write_roots(&self.control.state.roots)
            return checkpoint
        self.index.format_files(uuid, self.generation)
        # An empty store's first opening builds nothing again.
        self.recovery["rebuilt"] = epoch > 0
        return KALOS_SEGMENT_FIRST

    def log_reaches(self, uint64_t lsn):
        """Whether the log still has the bytes before a position."""
        segment = KALOS_POSITION_SEGMENT(lsn)
        return (segment < self.log.num_segments()
                and self.log.files.size_of(segment) >= KALOS_POSITION_OFFSET(lsn))

    def replay(self, uint64_t start, bint same_boot):
        """Apply the whole batches from `start`; (end of the last, flaw or None, whether a part is left)."""
        cdef uint64_t stop = start
        batch = []
        for lsn, size, more, flaw in self.log.scan(start):
            if flaw is not None:
                return stop, None if flaw == "end" else flaw, bool(batch)
            batch.append(lsn)
            if more:
                continue
            for one in batch:
                if not self.payload_whole(one):
                    return stop, "payload", True
            for one in batch:
                self.index.apply(self.log.record(one))
            for one in batch:
                if self.log.record(one).kind in (KALOS_KIND_ERASE, KALOS_KIND_DROP):
                    self.scrub_listed(one)
            self.index.applied = batch[0]
            self.recovery["replayed"] += len(batch)
            stop = KALOS_POSITION(KALOS_POSITION_SEGMENT(lsn), KALOS_POSITION_OFFSET(lsn) + size)
            batch = []
        return stop, None, False

    def payload_whole(self, uint64_t lsn):
        """Whether a record's token IDs are in place; puts them there where the record carries them."""
        cdef kalos_sections s
        cdef const kalos_record* rec = self.log.record(lsn)
        cdef const kalos_entry* e
        if rec.flags & KALOS_RECORD_SCRUBBED or not kalos_sections_of(rec, &s):
            return True
        e = &s.change.entry
        if s.change.vector_len and e.vector_row:
            self.put_back(self.vectors, (e.vector_row - 1) // self.rows_per_segment,
                          <uint64_t>((e.vector_row - 1) % self.rows_per_segment) * self.row_stride,
                          s.vector[:s.change.vector_len])
        if s.change.entry_off == 0 or rec.kind == KALOS_KIND_DROP:
            return True
        if s.change.tokens_len or s.change.live_len:
            at = <uint64_t>KALOS_POSITION_OFFSET(e.tokens_pos) * 4
            segment = KALOS_POSITION_SEGMENT(e.tokens_pos)
            self.put_back(self.tokens, segment, at, s.tokens[:s.change.tokens_len])
            self.put_back(self.tokens, segment, at + kalos_round_up(e.num_tokens, 16) * 4,
                          s.live[:s.change.live_len])
            return True
        try:
            self.token_run(e.tokens_pos, e.num_tokens, e.token_crc)
        except (StoreCorrupt, StoreIOError):
            return False
        return True

    cdef object put_back(self, SegmentSet files, uint32_t segment, uint64_t off, bytes data):
        """Write bytes that the log carries to where they belong, unless they are there."""
        if not data:
            return
        try:
            if memcmp(files.at(segment, off, len(data)), <const char*>data, len(data)) == 0:
                return
        except (StoreCorrupt, StoreIOError):
            pass
        files.write(segment, <const char*>data, len(data), off)

    def judge_tail(self, uint64_t stop, flaw, bint same_boot):
        """Tell a torn tail, which is dropped, from damage to what was acknowledged, which raises.

        A record that is there in full but does not hold its checksum is damage where the writer had
        published it and no power was lost since, and where valid records lie behind it although every
        call was synced. A file that ends early is a tail.
        """
        if flaw is None or flaw == "cut":
            return
        damaged = False
        if same_boot or self.control.state.clean:
            try:
                damaged = stop < self.control.word(WORD_COMMITTED)
            except StoreCorrupt:
                damaged = True
        if not damaged and (same_boot or self.control.state.durability):
            damaged = self.log.any_record_behind(stop)
        if damaged:
            segment, off = KALOS_POSITION_SEGMENT(stop), KALOS_POSITION_OFFSET(stop)
            raise StoreCorrupt(
                f"{self.log.files.label(segment)} at byte {off}: a record that was acknowledged does not "
                f"hold ({flaw}); open for reading, or restore the file", self.log.files.label(segment), off)

    def tail_bytes(self, uint64_t stop):
        """Bytes of the log behind a position, up to the last that is not zero."""
        total = 0
        for segment in range(KALOS_POSITION_SEGMENT(stop), self.log.num_segments()):
            size = self.log.files.size_of(segment)
            off = KALOS_POSITION_OFFSET(stop) if segment == KALOS_POSITION_SEGMENT(stop) else 0
            if size > off:
                total += len((<const char*>self.log.files.at(segment, off, size - off))[
                    :size - off].rstrip(b"\0"))
        return total

    def remove_other_generations(self):
        """Take away what an interrupted or finished compaction left."""
        for name in os.listdir(self.dirfd):
            if name.startswith("gen-") and name != f"gen-{self.generation:06d}":
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    cdef int adopt(self, WritableStore other) except -1:
        """Go on in the files of another generation, which `other` wrote."""
        cdef int old = self.genfd
        self.log, self.index, self.tokens, self.vectors = other.log, other.index, other.tokens, other.vectors
        self.batch = other.batch
        self.genfd, other.genfd = other.genfd, -1
        if old >= 0:
            os.close(old)
        self.generation = self.seen_generation = other.generation
        self.log.ahead = self.payload_in_log
        self.synced = self.log.end
        self.checkpoint_at = self.log_bytes()
        return self.set_vector_layout()

    # ---- Durability -----------------------------------------------------------------------------

    cdef int writing(self) except -1:
        """Called first by every call that changes something, with the mutex held."""
        if self.forks != kalos_forks:
            raise ForkedHandle("this store was opened before a fork; open it again in the child, for reading")
        self.enter()
        if self.failed is not None:
            raise StoreReadOnly(f"the store takes no more writes: {self.failed}; open it again")
        return 0

    cdef int begin(self) except -1:
        self.writing()
        self.batch.begin()
        self.roots = self.index.roots
        self.staged_entries = []
        self.staged_keys = {}
        self.staged_digests = {}
        return 0

    cdef int commit(self) except -1:
        """Write, apply and publish the staged batch. Call with the mutex held, then `finish` without."""
        cdef uint64_t before = self.log.end
        if self.batch.new_segments is not None:
            self.check_lock()
        try:
            self.batch.write()
        except BaseException:
            self.log.end = before
            raise
        self.index.applied = before
        self.batch.apply()
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

        The position is taken first: records that are written while the files sync are simply applied
        again by a recovery.
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
        if self.forks != kalos_forks:
            self.lock_fd = -1
            StoreReader.close(self)
            return
        thread = self.checkpointer
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        try:
            with self.mutex:
                if self.failed is None:
                    self.checkpoint()
                    self.index.epoch = self.control.state.epoch
                    self.index.arena.sync()
                    self.control.state.clean = 1
                    self.control.write_state(True)
        finally:
            StoreReader.close(self)
            self.release_lock()

    # ---- Erasure of bytes -------------------------------------------------------------------------

    def scrub_listed(self, uint64_t lsn):
        """Zero the content of every record that the record at `lsn` lists. Safe to repeat."""
        cdef kalos_sections s
        cdef const kalos_record* rec = self.log.record(lsn)
        if rec.flags & KALOS_RECORD_SCRUBBED or not kalos_sections_of(rec, &s):
            return
        for (victim,) in struct.iter_unpack("<Q", s.table[:s.change.table_len]):
            self.scrub(victim)

    cdef int scrub(self, uint64_t lsn) except -1:
        """Zero what a record holds and points at; the record itself stays, so that the log can be walked.

        Tokens and row go first, then the header says that the record is scrubbed (one sector, so it is
        whole or not there), then the sections. A crash between leaves a record that this call finishes.
        """
        cdef const kalos_record* rec = self.log.record(lsn)
        cdef kalos_sections s
        cdef kalos_change c
        cdef kalos_record head
        cdef bytes body
        kalos_sections_of(rec, &s)
        c = s.change[0]
        if c.entry_off and rec.kind != KALOS_KIND_DROP and rec.kind != KALOS_KIND_SHARE:
            self.scrub_entry(&c.entry)
        if (rec.kind == KALOS_KIND_SEGMENTS or rec.kind == KALOS_KIND_SUMMARIES) and s.table != NULL:
            for pos, n in item_runs(s.table[:c.table_len]):
                self.zero_tokens(pos, n)
        head = rec[0]
        c.image.hash = 0
        c.created_at = c.expires_at = 0
        c.vector_crc = 0
        c.vector_factor = 0
        c.entry.token_crc = c.entry.live_crc = 0
        memset(c.digest, 0, 16)
        body = (<char*>&c)[:sizeof(c)] + b"\0" * (head.body_len - sizeof(c))
        head.flags |= KALOS_RECORD_SCRUBBED
        head.body_crc = kalos_crc32c(0, <const char*>body, head.body_len)
        head.header_crc = kalos_record_crc(self.log.salt, &head)
        self.log.rewrite(lsn, &head, sizeof(head))
        self.log.rewrite(lsn + sizeof(head), <const char*>body, head.body_len)
        return 0

    cdef int scrub_entry(self, const kalos_entry* e) except -1:
        """Zero the IDs and the vector row of an entry."""
        cdef uint64_t lines = kalos_round_up(e.num_tokens, 16) + kalos_round_up(e.live_tokens, 16)
        cdef uint32_t row
        self.zero_tokens(e.tokens_pos, lines)
        if e.vector_row:
            row = e.vector_row - 1
            off = <uint64_t>(row % self.rows_per_segment) * self.row_stride
            self.vectors.zero_range(row // self.rows_per_segment, off, off + self.row_stride)
            self.index.set_dead(row)
        return 0

    cdef int zero_tokens(self, uint64_t pos, uint64_t n) except -1:
        cdef uint64_t off = <uint64_t>KALOS_POSITION_OFFSET(pos) * 4
        if n:
            self.tokens.zero_range(KALOS_POSITION_SEGMENT(pos), off, off + n * 4)
        return 0


def item_runs(bytes table):
    """(position, IDs in whole lines) of the token runs that a table's items refer to."""
    cdef const char* p = table
    cdef Py_ssize_t at = 0
    cdef const kalos_item* item
    out = []
    while at + <Py_ssize_t>sizeof(kalos_item) <= len(table):
        item = <const kalos_item*>(p + at)
        if item.size < sizeof(kalos_item):
            break
        out.append((item.tokens_pos, kalos_round_up(item.num_tokens, 16)))
        at += item.size
    return out
