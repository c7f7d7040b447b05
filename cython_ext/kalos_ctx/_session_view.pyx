"""Sessions that cannot be planned where they lie, in flat arrays.

A view holds the session as a window sees it: turns that outlived their time are gone, a summary
stands in place of its turns and is a unit of its own, turns behind the last user turn have their
live form, and a result whose call is gone is an orphan. It is built once and extended while turns
are appended; a rollback, an expiry or a new summary makes a new one.
"""

from libc.math cimport INFINITY
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc

from kalos_ctx._index cimport EntryTable, Index, table_entry
from kalos_ctx._layout cimport (
    KALOS_ENTRY_GROUPED, KALOS_ENTRY_ORPHAN, KALOS_ENTRY_TTL, KALOS_IMAGE_TTL, KALOS_ROLE_ASSISTANT,
    kalos_entry,
)
from kalos_ctx._log cimport Log, kalos_round_up, kalos_sections
from kalos_ctx._planner cimport (
    KALOS_PLAN_NONE, framed_turns, is_result, merge_runs, merge_state, merged_arrays,
)

cdef uint64_t VERSIONS = 0


cdef void* grown(void* old, size_t nbytes) except NULL:
    cdef void* made = realloc(old, nbytes)
    if made == NULL:
        raise MemoryError()
    return made


cdef bytes group_of(Log log, const kalos_entry* e):
    """The group that a turn was given, or None."""
    cdef kalos_sections s
    if not e.flags & KALOS_ENTRY_GROUPED:
        return None
    log.sections(e.lsn, &s)
    return s.group[:s.change.group_len]


cdef class Arrays:
    def __dealloc__(self):
        free(self.ends)
        free(self.firsts)
        free(self.singles)
        free(self.trims)
        free(self.roles)
        free(self.items)

    cdef int reserve(self, uint32_t n) except -1:
        cdef uint32_t room = max(n, self.room * 2, <uint32_t>64)
        if n <= self.room:
            return 0
        self.ends = <uint64_t*>grown(self.ends, <size_t>room * 8)
        self.firsts = <uint32_t*>grown(self.firsts, <size_t>room * 4)
        self.singles = <uint32_t*>grown(self.singles, <size_t>room * 4)
        self.trims = <uint32_t*>grown(self.trims, <size_t>room * 4)
        self.roles = <unsigned char*>grown(self.roles, room)
        self.items = <view_item*>grown(self.items, <size_t>room * sizeof(view_item))
        self.room = room
        return 0


cdef class Merged:
    def __dealloc__(self):
        free(self.ends)
        free(self.firsts)
        free(self.trims)
        free(self.skips)


cdef class SessionView:
    """Made by `new_view`."""

    def __cinit__(self):
        global VERSIONS
        VERSIONS += 1
        self.version = VERSIONS
        self.arrays = Arrays()
        self.gone = []
        self.widest_groups = self.widest_singles = 1
        self.valid_until = INFINITY

    def __init__(self):
        raise TypeError("a SessionView is made by the assembler")

    def __dealloc__(self):
        free(self.item_of)
        free(self.expires)

    cdef size_t nbytes(self) noexcept:
        cdef size_t item = 8 + 4 + 4 + 4 + 1 + sizeof(view_item)
        cdef size_t total = self.arrays.room * item + self.room * <size_t>12
        for merged in (self.merged_groups, self.merged_singles):
            if merged is not None:
                total += self.num_items * <size_t>20
        return total

    cdef bint serves(self, EntryTable* table, object index, double now):
        """Whether the view is of this state of the session, but for turns appended since."""
        if self.index is not index or self.epoch != table.image.epoch \
                or self.summaries_lsn != table.image.summaries_lsn \
                or table.image.num_entries < self.count:
            return False
        if table.image.flags & KALOS_IMAGE_TTL and not self.built_at <= now < self.valid_until:
            return False
        return not (self.shows_live and table.image.last_user != self.last_user)

    cdef int extend(self, Index index, Log log, EntryTable* table, uint32_t stop,
                    double now) except -1:
        """Look at the turns [count, stop)."""
        cdef const kalos_entry* e
        cdef uint32_t seq = self.count, room
        if stop > self.room:
            room = max(stop, self.room * 2)
            self.item_of = <uint32_t*>grown(self.item_of, <size_t>room * 4)
            if table.image.flags & KALOS_IMAGE_TTL or self.expires != NULL:
                self.expires = <double*>grown(self.expires, <size_t>room * 8)
            self.room = room
        elif table.image.flags & KALOS_IMAGE_TTL and self.expires == NULL:
            self.expires = <double*>grown(NULL, <size_t>self.room * 8)
        self.merged_groups = self.merged_singles = None
        self.built_at = max(self.built_at, now)  # of a clock that went back, nothing is known
        self.arrays.reserve(self.num_items + stop - seq + 1)
        while seq < stop:
            if self.next_summary < <size_t>len(self.summaries) \
                    and <uint32_t>self.summaries[self.next_summary][0] == seq:
                until = min(<uint32_t>self.summaries[self.next_summary][1], stop)
                self.gone.append((seq, until, "summarized"))
                self.add_summary(self.summaries[self.next_summary])
                self.next_summary += 1
                while seq < <uint32_t>until:
                    self.item_of[seq] = self.num_items
                    if self.expires != NULL:
                        self.expires[seq] = 0
                    seq += 1
                self.count = seq
                continue
            e = table_entry(table, seq)
            index.check_entry(e, seq)
            if self.expires != NULL and not self.read_expiry(log, e, now):
                self.note_expired(seq)
            else:
                self.add_turn(index, log, table, e)
            seq += 1
            self.count = seq
        return 0

    cdef int note_expired(self, uint32_t seq) except -1:
        self.item_of[seq] = self.num_items
        if self.gone:
            start, stop, why = self.gone.pop()
            if why == "expired" and <uint32_t>stop == seq:
                self.gone.append((start, seq + 1, why))
                return 0
            self.gone.append((start, stop, why))
        self.gone.append((seq, seq + 1, "expired"))
        return 0

    cdef bint read_expiry(self, Log log, const kalos_entry* e, double now) except -1:
        """Whether the turn still lives."""
        cdef kalos_sections s
        self.expires[e.seq] = INFINITY
        if not e.flags & KALOS_ENTRY_TTL:
            return True
        log.sections(e.lsn, &s)
        self.expires[e.seq] = s.change.expires_at
        if s.change.expires_at <= now:
            return False
        self.valid_until = min(self.valid_until, s.change.expires_at)
        return True

    cdef int add_turn(self, Index index, Log log, EntryTable* table,
                      const kalos_entry* e) except -1:
        """One living turn, or an orphan."""
        cdef uint32_t v = self.num_items, seq = e.seq, first = v, single = v
        cdef view_item* item = &self.arrays.items[v]
        cdef bint absent = e.flags & KALOS_ENTRY_ORPHAN
        item.pos = e.tokens_pos
        item.id = seq
        item.kind = KALOS_SPAN_TURN
        item.run, item.crc = e.num_tokens, e.token_crc
        item.prefix, item.suffix = e.prefix_len, e.suffix_len
        if e.live_tokens:
            self.any_live = True
            if seq >= self.last_user:
                self.shows_live = True
                item.pos += kalos_round_up(e.num_tokens, 16)
                item.run, item.crc = e.live_tokens, e.live_crc
        self.item_of[seq] = v
        self.arrays.roles[v] = e.role
        self.arrays.trims[v] = e.trim_prev
        if not absent and e.unit_first < seq:
            first = max(self.item_of[e.unit_first], self.barrier)
            if is_result(e.role):
                absent = self.is_gone_from(e.unit_first) and not self.has_call(index, log, table, e)
        if e.trim_prev and not absent:
            # It continues the block of the turn before; without that it has no beginning.
            absent = v == 0 or v == self.barrier or self.arrays.items[v - 1].id + 1 != seq \
                or self.length_of(v - 1) < e.trim_prev or item.run <= e.trim_prev
            single = self.arrays.singles[v - 1] if v else 0
            first = min(first, self.arrays.firsts[v - 1] if v else 0)
        if absent:
            first = single = v
            self.arrays.trims[v] = 0
            return self.close_item(0, first, single)
        return self.close_item(item.run - self.arrays.trims[v], first, single)

    cdef bint is_gone_from(self, uint32_t seq) except -1:
        """Whether one of the turns from `seq` on is gone: expired, or in a summary."""
        return len(self.gone) > 0 and <uint32_t>self.gone[len(self.gone) - 1][1] > seq

    cdef bint has_call(self, Index index, Log log, EntryTable* table,
                       const kalos_entry* e) except -1:
        """Whether the call that a result answers still stands in the session."""
        cdef const kalos_entry* other
        cdef bytes group = group_of(log, e)
        cdef uint32_t seq = e.seq, v
        while seq > e.unit_first:
            seq -= 1
            other = table_entry(table, seq)
            index.check_entry(other, seq)
            if other.role != KALOS_ROLE_ASSISTANT:
                continue
            v = self.item_of[seq]
            here = v < self.num_items and self.arrays.items[v].id == seq \
                and self.arrays.items[v].kind == KALOS_SPAN_TURN
            if group is None:
                return here
            if here and group_of(log, other) == group:
                return True
        return False

    cdef uint64_t length_of(self, uint32_t v) noexcept:
        return self.arrays.ends[v] - (self.arrays.ends[v - 1] if v else 0)

    cdef int add_summary(self, tuple summary) except -1:
        cdef uint32_t v = self.num_items
        cdef view_item* item = &self.arrays.items[v]
        start, _, role, pos, n, crc, prefix, suffix = summary
        item.pos, item.id, item.kind = pos, start, KALOS_SPAN_SUMMARY
        item.run, item.crc, item.prefix, item.suffix = n, crc, prefix, suffix
        self.arrays.roles[v] = role
        self.arrays.trims[v] = 0
        self.close_item(item.run, v, v)
        self.barrier = v + 1
        return 0

    cdef int close_item(self, uint64_t length, uint32_t first, uint32_t single) except -1:
        cdef uint32_t v = self.num_items
        self.arrays.ends[v] = length + (self.arrays.ends[v - 1] if v else 0)
        self.arrays.firsts[v] = first
        self.arrays.singles[v] = single
        self.widest_groups = max(self.widest_groups, <uint64_t>(v + 1 - first))
        self.widest_singles = max(self.widest_singles, <uint64_t>(v + 1 - single))
        self.num_items = v + 1
        return 0

    cdef uint32_t items_before(self, uint32_t seq) noexcept:
        """Items of the turns before `seq`."""
        return self.item_of[seq] if seq < self.count else self.num_items

    cdef Merged merge(self, bint groups):
        """The history with runs of one role joined; made once a state."""
        cdef Merged made = self.merged_groups if groups else self.merged_singles
        cdef framed_turns source
        cdef merged_arrays out
        cdef merge_state state
        cdef uint32_t n = self.num_items, v
        cdef uint32_t* prefixes = NULL
        cdef uint32_t* suffixes = NULL
        if made is not None:
            return made
        made = Merged()
        made.ends = <uint64_t*>grown(NULL, n * <size_t>8 + 8)
        made.firsts = <uint32_t*>grown(NULL, n * <size_t>4 + 4)
        made.trims = <uint32_t*>grown(NULL, n * <size_t>4 + 4)
        made.skips = <uint32_t*>grown(NULL, n * <size_t>4 + 4)
        prefixes = <uint32_t*>grown(NULL, n * <size_t>8 + 8)
        suffixes = prefixes + n
        for v in range(n):
            prefixes[v] = self.arrays.items[v].prefix
            suffixes[v] = self.arrays.items[v].suffix
        source.count = n
        source.widest = self.widest_groups if groups else self.widest_singles
        source.ends = self.arrays.ends
        source.firsts = self.arrays.firsts if groups else self.arrays.singles
        source.roles = self.arrays.roles
        source.trims = self.arrays.trims
        source.character_starts = NULL
        source.prefixes = prefixes
        source.suffixes = suffixes
        out.ends, out.firsts, out.trims, out.skips = made.ends, made.firsts, made.trims, made.skips
        state.count = 0
        state.last_present = KALOS_PLAN_NONE
        state.widest = 1
        merge_runs(source, n, out, &state)
        made.widest = state.widest
        free(prefixes)
        if groups:
            self.merged_groups = made
        else:
            self.merged_singles = made
        return made

    cdef int bind(self, bint groups, bint merged, uint32_t until, view_turns* out) except -1:
        """Let `out` show the items of the turns before `until`."""
        cdef Merged joined
        out.count = self.items_before(until)
        out.items = self.arrays.items
        out.roles = self.arrays.roles
        out.character_starts = NULL
        out.skips = NULL
        if merged:
            joined = self.merge(groups)
            out.ends, out.firsts, out.trims = joined.ends, joined.firsts, joined.trims
            out.skips = joined.skips
            out.widest = joined.widest
            return 0
        out.ends = self.arrays.ends
        out.firsts = self.arrays.firsts if groups else self.arrays.singles
        out.widest = self.widest_groups if groups else self.widest_singles
        out.trims = self.arrays.trims
        return 0
