"""Bringing a store's index to the end of its log when it is opened for writing.

Nothing to do after a close in order, the last batch after a kill. After a power loss, in a copy of
a store that was being written, and where the index is missing, damaged or not this store's, it is
built anew from the whole log, beside the old one, which readers may still have open.
"""

import os
import shutil

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from kalos_ctx._control cimport (
    WORD_COMMITTED, WORD_ERASURES, WORD_GENERATION, WORD_INDEX, WORD_ROWS,
)
from kalos_ctx._durability cimport DurableStore
from kalos_ctx._index cimport Index
from kalos_ctx._layout cimport (
    KALOS_ENTRY_DEAD, KALOS_KIND_DROP, KALOS_KIND_ERASE, KALOS_KIND_SEGMENTS,
    KALOS_KIND_SUMMARIES, KALOS_POSITION, KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT,
    KALOS_RECORD_SCRUBBED, KALOS_SEGMENT_FIRST, kalos_cursor, kalos_entry, kalos_item,
    kalos_record,
)
from kalos_ctx._log cimport kalos_round_up, kalos_sections, kalos_sections_of
from kalos_ctx._scrubbing cimport scrub_listed
from kalos_ctx._segment cimport SegmentSet

from kalos_ctx import _control
from kalos_ctx._durability import DURABILITIES
from kalos_ctx._index import INDEX_NAMES
from kalos_ctx.errors import StoreCorrupt, StoreIOError


cdef class RecoveringStore(DurableStore):
    """A store that is brought up to its log."""

    def recover(self):
        """Bring the index to the log's end, drop a torn tail, and start a writer epoch."""
        cdef bytes boot = _control.boot_id()
        same_boot = any(boot) and memcmp(self.control.state.boot_id, <const char*>boot, 16) == 0
        # A copy of a store that was being written is whatever its files held when they were read.
        copied = self.is_copied() and not self.control.state.clean
        promised = self.promised_end(same_boot, copied)
        in_order = False
        start = self.recovery_start(same_boot and not copied)
        whole = start is not None and self.index.is_whole
        if start is None:
            start = self.begin_rebuild()
        else:
            in_order = (start == self.control.state.checkpoint
                        and self.index.epoch == self.control.state.epoch)
        try:
            stop, flaw, partly = self.replay(start, promised)
        except StoreCorrupt as e:
            ours = tuple(f"{self.index.folder}/{n}" for n in INDEX_NAMES)
            if self.aside or not e.file.startswith(ours):
                raise
            in_order = False
            stop, flaw, partly = self.replay(self.begin_rebuild(), promised)
        if not in_order and not whole and not self.aside and stop == start:
            # The batch that the index took last is not in the log: it says more than the log does.
            stop, flaw, partly = self.replay(self.begin_rebuild(), promised)
        self.settle_tail(stop, flaw or ("unfinished batch" if partly else None), promised, copied)
        self.log.end = stop
        unsure = self.recovery["flaw"] is not None or not same_boot or copied or bool(self.aside)
        sync = self.recovery["flaw"] is not None or (unsure and not in_order)
        self.start_epoch(boot, sync, in_order)
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
            # What a writer before this one wrote and never synced has to be covered by the next
            # sync.
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
        # From here on the index is being written: its epoch is odd until the writer closes in
        # order.
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
        """Where to begin applying records to the index; None where it cannot be trusted."""
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
            self.index.mark_whole(checkpoint)
            return checkpoint
        # A writer that was killed while it opened may have begun its epoch in the index alone.
        if same_boot and self.index.is_original() \
                and self.index.epoch in (epoch | 1, (epoch + 2) | 1) \
                and self.index.applied >= KALOS_SEGMENT_FIRST \
                and self.log_reaches(self.index.applied):
            self.index.set_cursor(cursor)
            self.index.start_writing()
            return self.index.applied
        return None

    def tail_holds(self, uint64_t start, uint64_t stop):
        """Whether whole records lie between two places: a copy may have been taken too early."""
        if start < KALOS_SEGMENT_FIRST or not self.log_reaches(start):
            return False
        for lsn, _size, _more, flaw in self.log.scan(start):
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
        """Apply the whole batches from `start`; (end of the last, flaw or None, whether a part is
        left).

        Records in front of `promised` are not asked for their tokens: those were durable, and
        damage to them concerns their turn alone.
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
                    scrub_listed(self, batch[i])
        finally:
            if records != &one:
                free(records)
        return 0

    def payload_whole(self, uint64_t lsn):
        """Whether what a record points at is in place; put there where the record carries it."""
        cdef kalos_sections s
        cdef const kalos_record* rec = self.log.record(lsn)
        cdef const kalos_entry* e
        cdef uint32_t row
        if rec.flags & KALOS_RECORD_SCRUBBED or not kalos_sections_of(rec, &s):
            return True
        if rec.kind == KALOS_KIND_SEGMENTS or rec.kind == KALOS_KIND_SUMMARIES:
            self.put_back_items(s.table[:s.change.table_len])
        e = &s.change.entry
        if s.change.entry_off == 0 or rec.kind == KALOS_KIND_DROP:
            return True
        try:
            if s.change.vector_len and e.vector_row:
                row = e.vector_row - 1
                self.put_back(self.vectors, row // self.rows_per_segment,
                              <uint64_t>(row % self.rows_per_segment) * self.row_stride,
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
            self.token_run(e.tokens_pos + kalos_round_up(e.num_tokens, 16), e.live_tokens,
                           e.live_crc)
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

        The last segment's file may end early: that is a tail, and reported. A record that is there
        in full and does not hold is damage in front of what was promised, or where a record behind
        it says that it was durable.
        """
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(stop), off = KALOS_POSITION_OFFSET(stop)
        if flaw in ("cut", "unfinished batch") and self.log.files.last_present() <= <long>segment:
            return
        if stop < promised or self.log.any_synced_behind(stop):
            label = self.log.files.label(segment)
            raise StoreCorrupt(
                f"{label} at byte {off}: a record that was acknowledged does not hold ({flaw}); "
                "restore the file from a copy", label, off)

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
