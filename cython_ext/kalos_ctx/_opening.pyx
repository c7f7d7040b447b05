"""Opening a store for writing, or making a new one."""

import os
import threading

from libc.stdint cimport uint32_t

from kalos_ctx._batch cimport Batch
from kalos_ctx._control cimport WORD_COMMITTED, WORD_GENERATION, Control
from kalos_ctx._layout cimport KALOS_SEGMENT_FIRST
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._recovery cimport RecoveringStore

from kalos_ctx import _control
from kalos_ctx._durability import DURABILITIES
from kalos_ctx.errors import NotAStore, StoreCorrupt, StoreIOError

__all__ = ["DURABILITIES", "WritableStore"]


cdef class WritableStore(RecoveringStore):
    """A store opened for writing; StoreWriter adds the calls that change it."""

    def __init__(self, str path, *, str durability="process", dict config):
        self.writable = True
        self.durability = durability
        self.payload_in_log = durability != "process"
        self.mutex = threading.RLock()
        self.sync_mutex = threading.Lock()
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

    def open_or_create(self, dict config):
        """Control file and generation, made where the folder is empty."""
        names = set(os.listdir(self.dirfd))
        if "control" not in names:
            strange = sorted(names - {"lock", "control.new", "gen-000000"})
            if strange:
                raise NotAStore(f"the folder has no control file and is not empty ({len(strange)} "
                                "other files); give an empty folder or a store", "control", 0)
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
            label = f"{folder}/log-000000"
            raise StoreCorrupt(f"{label} is missing", label, 0) from None
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

    cdef int adopt(self, WritableStore other) except -1:
        """Go on in the files of another generation, which `other` wrote."""
        cdef int old = self.genfd
        self.log, self.index = other.log, other.index
        self.tokens, self.vectors = other.tokens, other.vectors
        self.batch = other.batch
        self.genfd, other.genfd = other.genfd, -1
        if old >= 0:
            os.close(old)
        self.generation = other.generation
        self.log.ahead = self.payload_in_log
        self.synced = self.log.end
        self.checkpoint_at = self.log_bytes()
        return self.set_vector_layout()
