"""Opening a store for writing: lock, recovery, durability, and the scrubbing of erased bytes.

One process writes, by open-file-description locks on the file ``lock`` and on the control file (a lock by
process ID would be lost when any other descriptor of the file is closed; ``lock`` alone could be removed and
made anew). Opening brings the index to the end of the log: nothing to do after a close in order, the last
batch after a kill. After a power loss, in a copy of a store that was being written, and where the index is
missing, damaged or not this store's, it is built anew from the whole log, beside the old one, which readers
may still have open.

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
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from kalos_ctx._batch cimport Batch
from kalos_ctx._control cimport (
    WORD_COMMITTED, WORD_ERASURES, WORD_GENERATION, WORD_INDEX, WORD_ROWS, Control,
)
from kalos_ctx._index cimport Index
from kalos_ctx._layout cimport (
    KALOS_ENTRY_DEAD, KALOS_KIND_DROP, KALOS_KIND_ERASE, KALOS_KIND_SEGMENTS, KALOS_KIND_SHARE, KALOS_KIND_SUMMARIES,
    KALOS_POSITION, KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, KALOS_RECORD_SCRUBBED, KALOS_SEGMENT_FIRST,
    kalos_change, kalos_crc32c, kalos_cursor, kalos_entry, kalos_item, kalos_record, kalos_roots,
)
from kalos_ctx._log cimport kalos_body_holds, kalos_record_crc, kalos_round_up, kalos_sections, kalos_sections_of
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._segment cimport SegmentSet

from kalos_ctx import _control
from kalos_ctx._index import INDEX_NAMES
from kalos_ctx.errors import (
    ForkedHandle, NotAStore, StoreCorrupt, StoreIOError, StoreLocked, StoreReadOnly,
)

cdef extern from *:
    """
    #include <pthread.h>
    #include <unistd.h>
    #define KALOS_LOCKS_MAX 256
    static volatile uint32_t kalos_forks;
    static volatile int kalos_lock_fds[KALOS_LOCKS_MAX];  /* + 1; 0: free */
    /* A child lets go of the locks, which stay with the parent's descriptors: otherwise a child that lives
       on would hold them when the parent is gone. */
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
DURABILITIES = ("process", "group", "each")
# Log bytes between two checkpoints: what a recovery after a power loss applies again at most.
cdef uint64_t CHECKPOINT_BYTES = 64 << 20


cdef int set_lock(int fd, int kind) except -1:
    """Lock or unlock a whole file, by its open file description."""
    fcntl.fcntl(fd, F_OFD_SETLK, struct.pack("hhlli4x", kind, os.SEEK_SET, 0, 0, 0))
    return 0


cdef class WritableStore(StoreReader):
    """A store opened for writing; StoreWriter adds the calls that change it."""

    def __cinit__(self):
        self.lock_fd = self.control_lock_fd = -1

    def __init__(self, str path, *, str durability="process", dict config):
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
        except BaseException as e:
            self.release_lock()
            if isinstance(e, OSError) and not isinstance(e, StoreIOError):
                raise StoreIOError(e.errno, f"cannot open the store: {e.strerror}") from None
            raise

    # ---- Lock -----------------------------------------------------------------------------------

    def take_lock(self):
        """Take the writer's lock or raise StoreLocked with its holder."""
        try:
            self.lock_fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600,
                                   dir_fd=self.dirfd)
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
        """Lock the control file too: a lock file that was removed and made anew locks nobody out."""
        fd = os.open("control", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.dirfd)
        try:
            set_lock(fd, fcntl.F_WRLCK)
        except OSError as e:
            os.close(fd)
            if e.errno in (errno_codes.EAGAIN, errno_codes.EACCES):
                raise StoreLocked(
                    "the store is open for writing elsewhere, and its lock file was replaced") from None
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

    def __dealloc__(self):
        if self.forks == kalos_forks:
            for fd in (self.lock_fd, self.control_lock_fd):
                if fd >= 0:
                    kalos_forget_lock(fd)
                    os.close(fd)

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
        self.lock_control()
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
        # A copy of a store that was being written is whatever its files held when they were read.
        copied = self.is_copied() and not self.control.state.clean
        promised = self.promised_end(same_boot, copied)
        in_order = False
        start = self.recovery_start(same_boot and not copied)
        if start is None:
            start = self.begin_rebuild()
        else:
            in_order = start == self.control.state.checkpoint and self.index.epoch == self.control.state.epoch
        try:
            stop, flaw, partly = self.replay(start, promised)
        except StoreCorrupt as e:
            if self.aside or not e.file.startswith(tuple(f"{self.index.folder}/{n}" for n in INDEX_NAMES)):
                raise
            in_order = False
            stop, flaw, partly = self.replay(self.begin_rebuild(), promised)
        if not in_order and not self.aside and stop == start:
            # The batch that the index took last is not in the log: it says more than the log does.
            stop, flaw, partly = self.replay(self.begin_rebuild(), promised)
        self.settle_tail(stop, flaw or ("unfinished batch" if partly else None), promised, copied)
        self.log.end = stop
        unsure = self.recovery["flaw"] is not None or not same_boot or copied or bool(self.aside)
        self.start_epoch(boot, self.recovery["flaw"] is not None or (unsure and not in_order), in_order)
        self.remove_other_generations()

    def is_copied(self):
        """Whether the control file is a copy of the one that its writer wrote."""
        if self.control.state.inode == 0:
            return False
        ino, dev = self.control.file.identity()
        return self.control.state.inode != ino or self.control.state.device != dev

    def promised_end(self, bint same_boot, bint copied):
        """Log position up to which everything must be there, whatever was lost."""
        cdef uint64_t end = 0
        if not copied:
            end = self.control.state.checkpoint
            if same_boot or self.control.state.clean:
                try:
                    end = max(end, self.control.word(WORD_COMMITTED))
                except StoreCorrupt:
                    pass
        return end

    def start_epoch(self, bytes boot, bint sync, bint in_order):
        """Publish the recovered state and let this writer's epoch begin."""
        cdef uint64_t stop = self.log.end
        self.checkpoint_at = self.log_bytes()
        if not in_order:
            # What a writer before this one wrote and never synced has to be covered by the next sync.
            self.expect_dirty()
        self.control.state.epoch += 2
        self.control.state.clean = 0
        self.control.state.inode, self.control.state.device = self.control.file.identity()
        memcpy(self.control.state.boot_id, <const char*>boot, 16)
        self.control.state.durability = DURABILITIES.index(self.durability)
        if sync:
            self.sync_files()
            if self.aside:
                self.index.publish(self.genfd)
        # From here on the index is being written: its epoch is odd until the writer closes in order.
        self.index.epoch = self.control.state.epoch | 1
        self.index.arena.sync()
        if sync:
            self.mark_checkpoint(stop)
        else:
            self.control.write_state(True)
        self.synced = self.control.state.checkpoint
        self.control.set_word(WORD_COMMITTED, stop)
        self.control.set_word(WORD_ROWS, self.index.cursor.vector_rows)
        self.control.set_word(WORD_GENERATION, self.generation)
        self.control.count_up(WORD_ERASURES)
        if self.aside or not self.control.holds(WORD_INDEX):
            self.control.count_up(WORD_INDEX)
        self.aside = False

    def expect_dirty(self):
        """Open what may hold unsynced bytes: everything behind the last checkpoint."""
        cdef kalos_cursor* before = &self.control.state.cursor
        self.log.files.expect_dirty(KALOS_POSITION_SEGMENT(self.control.state.checkpoint),
                                    KALOS_POSITION_SEGMENT(self.log.end))
        last = self.tokens.last_present()
        if last >= 0:
            self.tokens.expect_dirty(min(KALOS_POSITION_SEGMENT(before.tokens_end), last), last)
        last = self.vectors.last_present()
        if last >= 0 and self.rows_per_segment:
            self.vectors.expect_dirty(min(before.vector_rows // self.rows_per_segment, last), last)

    def recovery_start(self, bint same_boot):
        """Where to begin applying records to the index as it is; None where it cannot be trusted."""
        uuid = (<char*>self.control.head.uuid)[:16]
        cdef uint64_t checkpoint = self.control.state.checkpoint
        cdef uint64_t epoch = self.control.state.epoch
        cursor = (<char*>&self.control.state.cursor)[:sizeof(kalos_cursor)]
        if not self.index.matches(uuid, self.generation) or self.index.suspect \
                or not self.index.reaches(cursor) or not self.log_reaches(checkpoint):
            return None
        if self.index.epoch == epoch and (self.control.state.clean or self.index.is_original()):
            if not self.index.is_original():
                if not self.tail_holds(self.index.applied, checkpoint):
                    return None
                self.index.adopt()
            self.index.set_cursor(cursor)
            self.index.start_writing()
            self.index.applied = checkpoint
            return checkpoint
        # A writer that was killed while it opened may have begun its epoch in the index alone.
        if same_boot and self.index.is_original() and self.index.epoch in (epoch | 1, (epoch + 2) | 1) \
                and self.index.applied >= KALOS_SEGMENT_FIRST and self.log_reaches(self.index.applied):
            self.index.set_cursor(cursor)
            self.index.start_writing()
            return self.index.applied
        return None

    def tail_holds(self, uint64_t start, uint64_t stop):
        """Whether whole records lie between two places: a copy may have been taken too early."""
        if start < KALOS_SEGMENT_FIRST or not self.log_reaches(start):
            return False
        for lsn, size, more, flaw in self.log.scan(start):
            if flaw is not None or lsn >= stop:
                return lsn == stop
        return False

    def begin_rebuild(self):
        """An empty index beside the one in place, and where to begin."""
        uuid = (<char*>self.control.head.uuid)[:16]
        self.index.close()
        self.index = Index.make_aside(self.genfd, self.index.folder, self.control.head.salt)
        self.index.format_files(uuid, self.generation)
        self.batch.index = self.index
        self.aside = True
        self.recovery["replayed"] = 0
        # An empty store's first opening builds nothing again.
        self.recovery["rebuilt"] = self.control.state.epoch > 0
        return KALOS_SEGMENT_FIRST

    def log_reaches(self, uint64_t lsn):
        """Whether the log still has the bytes before a position."""
        segment = KALOS_POSITION_SEGMENT(lsn)
        return (segment < self.log.num_segments()
                and self.log.files.size_of(segment) >= KALOS_POSITION_OFFSET(lsn))

    def replay(self, uint64_t start, uint64_t promised):
        """Apply the whole batches from `start`; (end of the last, flaw or None, whether a part is left).

        Records in front of `promised` are not asked for their tokens: those were durable, and damage to
        them concerns their turn alone.
        """
        cdef uint64_t stop = start
        self.index.start_replay()
        batch = []
        for lsn, size, more, flaw in self.log.scan(start):
            if flaw is not None:
                break
            batch.append(lsn)
            if more:
                continue
            if batch[0] >= promised and not all([self.payload_whole(one) for one in batch]):
                flaw = "payload"
                break
            self.apply_again(batch)
            self.index.applied = batch[0]
            self.recovery["replayed"] += len(batch)
            stop = KALOS_POSITION(KALOS_POSITION_SEGMENT(lsn), KALOS_POSITION_OFFSET(lsn) + size)
            batch = []
        self.index.finish_replay()
        return stop, None if flaw == "end" else flaw, bool(batch)

    cdef int apply_again(self, list batch) except -1:
        """Apply a batch of the log, and finish the erasures that it holds."""
        cdef const kalos_record* one
        cdef const kalos_record** records = &one
        cdef uint32_t i, n = <uint32_t>len(batch)
        if n > 1:
            records = <const kalos_record**>malloc(n * sizeof(kalos_record*))
            if records == NULL:
                raise MemoryError
        try:
            for i in range(n):
                records[i] = self.log.record(batch[i])
            self.index.apply(records, n)
            for i in range(n):
                if records[i].kind == KALOS_KIND_ERASE or records[i].kind == KALOS_KIND_DROP:
                    self.scrub_listed(batch[i])
        finally:
            if records != &one:
                free(records)
        return 0

    def payload_whole(self, uint64_t lsn):
        """Whether what a record points at is in place; puts it there where the record carries it."""
        cdef kalos_sections s
        cdef const kalos_record* rec = self.log.record(lsn)
        cdef const kalos_entry* e
        if rec.flags & KALOS_RECORD_SCRUBBED or not kalos_sections_of(rec, &s):
            return True
        if rec.kind == KALOS_KIND_SEGMENTS or rec.kind == KALOS_KIND_SUMMARIES:
            self.put_back_items(s.table[:s.change.table_len])
        e = &s.change.entry
        if s.change.entry_off == 0 or rec.kind == KALOS_KIND_DROP:
            return True
        try:
            if s.change.vector_len and e.vector_row:
                self.put_back(self.vectors, (e.vector_row - 1) // self.rows_per_segment,
                              <uint64_t>((e.vector_row - 1) % self.rows_per_segment) * self.row_stride,
                              s.vector[:s.change.vector_len])
            elif e.vector_row and not e.flags & KALOS_ENTRY_DEAD:
                self.row_at(e.vector_row - 1, s.change.vector_crc)
            if s.change.tokens_len or s.change.live_len:
                at = <uint64_t>KALOS_POSITION_OFFSET(e.tokens_pos) * 4
                segment = KALOS_POSITION_SEGMENT(e.tokens_pos)
                self.put_back(self.tokens, segment, at, s.tokens[:s.change.tokens_len])
                self.put_back(self.tokens, segment, at + kalos_round_up(e.num_tokens, 16) * 4,
                              s.live[:s.change.live_len])
                return True
            self.token_run(e.tokens_pos, e.num_tokens, e.token_crc)
            self.token_run(e.tokens_pos + kalos_round_up(e.num_tokens, 16), e.live_tokens, e.live_crc)
        except (StoreCorrupt, StoreIOError):
            return False
        return True

    def put_back_items(self, bytes table):
        """Put the IDs of pinned segments or summaries where windows look for them."""
        cdef const char* p = table
        cdef const kalos_item* item
        cdef Py_ssize_t at = 0
        while at + <Py_ssize_t>sizeof(kalos_item) <= len(table):
            item = <const kalos_item*>(p + at)
            if item.size < sizeof(kalos_item):
                break
            ids = at + <Py_ssize_t>sizeof(kalos_item) + item.name_len + item.text_len
            self.put_back(self.tokens, KALOS_POSITION_SEGMENT(item.tokens_pos),
                          <uint64_t>KALOS_POSITION_OFFSET(item.tokens_pos) * 4,
                          table[ids:ids + item.num_tokens * 4])
            at += item.size

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

    def settle_tail(self, uint64_t stop, flaw, uint64_t promised, bint copied):
        """Judge what lies behind the last whole batch, report it, and take it out of the files."""
        tail = self.tail_bytes(stop)
        if flaw is None and tail == 0 and stop >= promised and self.log.check_header(0) is not None:
            # A segment that was begun and holds nothing yet would confuse the next roll.
            if self.log.files.last_present() > <long>KALOS_POSITION_SEGMENT(stop):
                self.log.drop_tail(stop)
            return
        if flaw is None:
            flaw = "cut" if stop < promised else "stale bytes"
        if not copied:
            self.judge_tail(stop, flaw, promised)
        self.recovery["flaw"] = flaw
        self.recovery["dropped_bytes"] = tail
        self.log.drop_tail(stop)
        if self.log.check_header(0) is None:
            self.log.begin_segment(0, 0)

    def judge_tail(self, uint64_t stop, flaw, uint64_t promised):
        """Tell a torn tail, which is dropped, from damage to what was acknowledged, which raises.

        The last segment's file may end early: that is a tail, and reported. A record that is there in full
        and does not hold is damage in front of what was promised, or where a record behind it says that it
        was durable.
        """
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(stop), off = KALOS_POSITION_OFFSET(stop)
        if flaw in ("cut", "unfinished batch") and self.log.files.last_present() <= <long>segment:
            return
        if stop < promised or self.log.any_synced_behind(stop):
            raise StoreCorrupt(
                f"{self.log.files.label(segment)} at byte {off}: a record that was acknowledged does not "
                f"hold ({flaw}); restore the file from a copy", self.log.files.label(segment), off)

    def tail_bytes(self, uint64_t stop):
        """Bytes of the log behind a position, up to the last that is not zero."""
        total = 0
        for segment in self.log.files.present():
            if segment < KALOS_POSITION_SEGMENT(stop):
                continue
            size = self.log.files.size_of(segment)
            off = KALOS_POSITION_OFFSET(stop) if segment == KALOS_POSITION_SEGMENT(stop) \
                else KALOS_SEGMENT_FIRST
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
        self.generation = other.generation
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
        self.batch.synced = self.synced == self.log.end
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
        except BaseException as e:
            self.log.end = before
            if isinstance(e, OSError) and not isinstance(e, StoreIOError):
                raise StoreIOError(e.errno, f"cannot write the log: {e.strerror}") from None
            raise
        self.index.applied = before
        try:
            self.batch.apply()
        except BaseException:
            # The log has the batch and the index does not: only the next opening brings them together.
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

    # ---- Erasure of bytes -------------------------------------------------------------------------

    def erase_listed(self, list lsns):
        """Make the committed records at `lsns` durable, then zero what they list. Call with the mutex held.

        They must be durable first, or a power loss could leave the zeros and not the reason for them.
        """
        self.checkpoint()
        try:
            for lsn in lsns:
                self.scrub_listed(lsn)
            self.control.count_up(WORD_ERASURES)
            self.sync_files()
        except BaseException:
            self.failed = self.failed or "an erasure could not be finished"
            raise

    def scrub_listed(self, uint64_t lsn):
        """Zero the content of every record that the record at `lsn` lists. Safe to repeat.

        What the records point at is zeroed and durable before the records say so: a record that says
        it was scrubbed needs nothing more than its own sections zeroed.
        """
        cdef kalos_sections s
        cdef const kalos_record* rec = self.log.record(lsn)
        if rec.flags & KALOS_RECORD_SCRUBBED or not kalos_sections_of(rec, &s):
            return
        victims = [victim for (victim,) in struct.iter_unpack("<Q", s.table[:s.change.table_len])]
        touched = [self.scrub_payload(victim) for victim in victims]
        if any(touched):
            self.tokens.sync()
            self.vectors.sync()
        for victim in victims:
            self.scrub(victim)

    cdef int scrub_payload(self, uint64_t lsn) except -1:
        """Zero the tokens and the row that a record points at; 1 unless that was done before."""
        cdef const kalos_record* rec = self.log.record(lsn)
        cdef kalos_sections s
        if rec.flags & KALOS_RECORD_SCRUBBED or not kalos_sections_of(rec, &s):
            return 0
        if s.change.entry_off and rec.kind != KALOS_KIND_DROP and rec.kind != KALOS_KIND_SHARE:
            self.scrub_entry(&s.change.entry)
        if rec.kind == KALOS_KIND_SEGMENTS or rec.kind == KALOS_KIND_SUMMARIES:
            for pos, n in item_runs(s.table[:s.change.table_len]):
                self.zero_tokens(pos, n)
        return 1

    cdef int scrub(self, uint64_t lsn) except -1:
        """Zero what a record holds; the record itself stays, so that the log can be walked.

        The header goes first and says that the record is scrubbed (one sector, so it is whole or not
        there), then the sections. A crash between leaves a record that this call finishes. Places, lengths
        and roots stay.
        """
        cdef const kalos_record* rec = self.log.record(lsn)
        cdef kalos_sections s
        cdef kalos_change c
        cdef kalos_record head
        cdef bytes body, roots = b""
        if rec.flags & KALOS_RECORD_SCRUBBED and kalos_body_holds(rec):
            return 0
        kalos_sections_of(rec, &s)
        c = s.change[0]
        if s.roots != NULL:
            roots = (<const char*>s.roots)[:sizeof(kalos_roots)]
        head = rec[0]
        c.image.hash = 0
        c.created_at = c.expires_at = 0
        c.vector_crc = 0
        c.vector_factor = 0
        c.entry.token_crc = c.entry.live_crc = 0
        memset(c.digest, 0, 16)
        body = ((<char*>&c)[:sizeof(c)] + roots).ljust(head.body_len, b"\0")
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
