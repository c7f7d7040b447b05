"""What a window is made of: policy, pinned blocks, spans; what the report reads; what is copied.

Nothing here looks a session up: `_session_table` does, and `_assembler` puts the two together.
"""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from kalos_ctx._layout cimport (
    KALOS_IMAGE_DEAD, KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, KALOS_ROLE_ASSISTANT,
    kalos_image,
)
from kalos_ctx._planner cimport (
    KALOS_FATE_BUDGET, KALOS_FATE_CUT, KALOS_FATE_END_ON, KALOS_FATE_KEPT, KALOS_FATE_OVERFLOW,
    KALOS_FATE_START_ON, KALOS_PASSAGE_TAKEN, KALOS_PLAN_GROUPS, KALOS_PLAN_MERGED,
    KALOS_PLAN_OVERFLOW,
    KALOS_PLAN_PARTIAL, KALOS_PLAN_STABLE, fate_of, recall_frame, select_passages,
)
from kalos_ctx._segment cimport SegmentSet
from kalos_ctx._session_view cimport (
    KALOS_SPAN_CUT, KALOS_SPAN_FRAME, KALOS_SPAN_MEMORY, KALOS_SPAN_OPENS, KALOS_SPAN_PASSAGE,
    KALOS_SPAN_PROMPT, KALOS_SPAN_TAIL, KALOS_SPAN_TURN, add_span, common_tokens, copy_checked,
    kalos_span, span_list, stands_in, view_turns,
)

from kalos_ctx.errors import StoreCorrupt

# By a fate's number, of the planner and behind those of the view; docs/windows.md explains them.
WHY_NAMES = ("", "cut", "budget", "group", "orphan", "start_on", "end_on", "overflow",
             "summarized", "expired")
KIND_NAMES = ("turn", "summary")
cdef uint8_t OF_TURN = KALOS_FATE_OF_TURN, OF_SUMMARY = KALOS_FATE_OF_SUMMARY
cdef tuple VERDICT_NAMES = ("taken", "recall_budget", "duplicate")
cdef uint64_t UNLIMITED = <uint64_t>1 << UNLIMITED_BITS
STAGE_NAMES = ("lookup", "plan", "recall", "lease", "gather")


cdef int64_t now_ns() noexcept nogil:
    cdef timespec when
    clock_gettime(CLOCK_MONOTONIC, &when)
    return <int64_t>when.tv_sec * 1000000000 + when.tv_nsec


cdef class Rules:
    """A policy, checked, as the planner takes it. Any object with a policy's fields will do."""

    def __init__(self, policy):
        self.flags = 0
        if policy.stable_prefix:
            self.flags |= KALOS_PLAN_STABLE
        if policy.allow_partial:
            self.flags |= KALOS_PLAN_PARTIAL
        if policy.keep_groups:
            self.flags |= KALOS_PLAN_GROUPS
        self.merges = policy.alternation == "merge"
        if self.merges:
            self.flags |= KALOS_PLAN_MERGED
        self.strict = policy.alternation == "strict"
        self.start_on = policy.start_mask
        self.end_on = policy.end_mask
        self.low_water = policy.low_water
        self.recall_tokens = -1
        if policy.recall_tokens is not None:
            self.recall_tokens = min(policy.recall_tokens, UNLIMITED)
        self.include_system = policy.include_system
        self.generation_prompt = policy.generation_prompt
        self.drop_overflow = policy.on_overflow == "drop"


cdef class Block:
    """Token IDs that stand in many windows, with the names of their parts.

    Parameters
    ----------
    parts : list of (str, int32 array)
    """

    def __init__(self, list parts):
        cdef const int32_t[::1] one
        cdef uint32_t at = 0
        cdef Py_ssize_t n
        self.names = [name for name, _ in parts]
        self.lengths = [len(ids) for _, ids in parts]
        self.num_tokens = sum(self.lengths)
        self.ids = <int32_t*>malloc(max(self.num_tokens, 1) * <size_t>4)
        if self.ids == NULL:
            raise MemoryError()
        for _, ids in parts:
            one = ids
            n = one.shape[0]
            if n:
                memcpy(self.ids + at, &one[0], n * 4)
                at += <uint32_t>n

    def __dealloc__(self):
        free(self.ids)


cdef class Head:
    """The pinned segments of one session by their place.

    Parameters
    ----------
    head, inside, tail : list of (str, int32 array)
        What stands first, before the last user turn, and at the end.
    """

    def __init__(self, list head, list inside, list tail):
        self.head = Block(head)
        self.inside = Block(inside)
        self.tail = Block(tail)
        self.num_tokens = <uint64_t>self.head.num_tokens + self.inside.num_tokens \
            + self.tail.num_tokens

    def by_segment(self):
        """Tokens by name."""
        found = {}
        for block in (self.head, self.inside, self.tail):
            for name, length in zip(block.names, block.lengths):
                found[name] = found.get(name, 0) + length
        return found


cdef class WindowParts:
    """All that a window is made of, without its tokens."""

    def __init__(self):
        raise TypeError("parts are made by the assembler")

    def __dealloc__(self):
        free(self.spans.items)
        free(self.fate_runs)

    cdef kalos_span* push(self, uint64_t length, uint8_t kind) except NULL:
        cdef kalos_span* span = add_span(&self.spans, length)
        if span == NULL:
            raise MemoryError()
        span.kind = kind
        return span

    cdef int push_memory(self, Memory which, uint64_t length, uint8_t kind,
                         uint8_t flags) except -1:
        """A run of this process's memory; nothing where it is empty."""
        cdef kalos_span* span
        if length:
            span = self.push(length, kind)
            span.flags = KALOS_SPAN_MEMORY | flags
            span.pos = <uint64_t>which << 32
        return 0

    @property
    def num_tokens(self):
        """Length of the window."""
        return self.spans.tokens

    @property
    def budget(self):
        """Tokens that the history could take."""
        return self.request.budget

    @property
    def low_mark(self):
        """Tokens to which a stable cut trims, or None for a sliding one."""
        return self.request.low if self.request.flags & KALOS_PLAN_STABLE else None

    @property
    def overflowed(self):
        """Whether the newest unit did not fit."""
        return self.plan.code == KALOS_PLAN_OVERFLOW

    def timings(self):
        """Microseconds by stage."""
        found = {
            name: (self.clocks[i + 1] - self.clocks[i]) / 1000.0
            for i, name in enumerate(STAGE_NAMES)}
        found["total"] = (self.clocks[STAGES - 1] - self.clocks[0]) / 1000.0
        return found

    def tiles(self):
        """(kind, name, seq, id, start, stop) of each part of the window, in order."""
        cdef kalos_span* span
        cdef uint32_t i, opened = 0
        cdef bint opens = False
        cdef list out = []
        for i in range(self.spans.count):
            span = &self.spans.items[i]
            start, stop = span.start, span.start + span.length
            if opens:
                start, opens = opened, False
            if span.kind <= KALOS_SPAN_TAIL:
                block = (self.head.head, self.head.inside, self.head.tail)[span.kind]
                for name, length in zip((<Block>block).names, (<Block>block).lengths):
                    out.append(("segment", name, None, None, start, start + length))
                    start += length
            elif span.kind == KALOS_SPAN_PROMPT:
                out.append(("generation_prompt", "generation_prompt", None, None, start, stop))
            elif span.kind == KALOS_SPAN_PASSAGE:
                number, source = self.passages[span.id][:2]
                out.append(("passage", source, None, number, start, stop))
            elif span.kind == KALOS_SPAN_FRAME:
                if span.flags & KALOS_SPAN_OPENS:
                    opened, opens = start, True
                else:
                    out.append((*out.pop()[:5], stop))
            else:
                kind = "turn" if span.kind == KALOS_SPAN_TURN else "summary"
                out.append((kind, None, span.id, None, start, stop))
        return out

    cdef int add_fate(self, uint8_t kind, uint64_t first, uint64_t stop, uint8_t why,
                      uint64_t cut) except -1:
        """The next turns or summaries; joined to the last run where it is the same fate."""
        cdef kalos_window_fate* run
        cdef kalos_window_fate* room
        if first >= stop:
            return 0
        if self.num_fates:
            run = &self.fate_runs[self.num_fates - 1]
            if run.kind == kind and run.why == why and run.stop == first and run.cut == cut == 0:
                run.stop = stop
                return 0
        if self.num_fates & (self.num_fates - 1) == 0:  # full at every power of two
            room = <kalos_window_fate*>realloc(
                self.fate_runs, max(4, 2 * self.num_fates) * sizeof(kalos_window_fate))
            if room == NULL:
                raise MemoryError()
            self.fate_runs = room
        run = &self.fate_runs[self.num_fates]
        memset(run, 0, sizeof(kalos_window_fate))
        run.first, run.stop, run.cut, run.kind, run.why = first, stop, cut, kind, why
        self.num_fates += 1
        return 0

    cdef int find_fates(self) except -1:
        """Fill `fate_runs`, once."""
        cdef uint64_t last = self.count, begin, end, fit
        if self.fates_known:
            return 0
        self.num_fates = 0
        if not self.plain:
            self.find_view_fates()
        elif self.request.budget == 0:
            self.add_fate(OF_TURN, 0, last, KALOS_FATE_BUDGET, 0)
        elif self.plan.code == KALOS_PLAN_OVERFLOW:
            self.add_fate(OF_TURN, 0, last - 1, KALOS_FATE_BUDGET, 0)
            self.add_fate(OF_TURN, last - 1, last, KALOS_FATE_OVERFLOW, 0)
        else:
            begin, end = min(self.plan.begin, last), min(self.plan.end, last)
            fit = min(self.plan.fit_begin, begin)
            self.add_fate(OF_TURN, 0, fit, KALOS_FATE_BUDGET, 0)
            self.add_fate(OF_TURN, fit, begin, KALOS_FATE_START_ON, 0)
            if begin < end:
                self.add_fate(OF_TURN, begin, begin + 1, KALOS_FATE_KEPT, self.plan.offset)
            self.add_fate(OF_TURN, begin + 1, end, KALOS_FATE_KEPT, 0)
            self.add_fate(OF_TURN, max(begin, end), last, KALOS_FATE_END_ON, 0)
        self.fates_known = True
        return 0

    cdef int find_view_fates(self) except -1:
        """As `find_fates`, through the session's view."""
        cdef view_turns turns
        cdef uint64_t t, number
        cdef Py_ssize_t gone = 0, num_gone = len(self.view.gone)
        cdef uint64_t next_gone = self.gone_at(0)
        cdef uint32_t fate
        cdef uint8_t kind
        self.view.bind(self.groups, self.merged, self.count, &turns)
        for t in range(turns.count):
            number = turns.items[t].id
            while gone < num_gone and next_gone <= number and next_gone < self.count:
                self.add_gone(gone)
                gone += 1
                next_gone = self.gone_at(gone)
            fate = fate_of(turns, self.request, self.plan, t)
            kind = OF_TURN if turns.items[t].kind == KALOS_SPAN_TURN else OF_SUMMARY
            if fate == KALOS_FATE_CUT:
                self.add_fate(kind, number, number + 1, KALOS_FATE_KEPT, self.plan.offset)
            else:
                self.add_fate(kind, number, number + 1, <uint8_t>fate, 0)
        while gone < num_gone and self.gone_at(gone) < self.count:
            self.add_gone(gone)
            gone += 1
        return 0

    cdef uint64_t gone_at(self, Py_ssize_t i) except? 0:
        """First turn of the view's i-th run of turns that are gone."""
        return self.view.gone[i][0] if i < len(self.view.gone) else 0

    cdef int add_gone(self, Py_ssize_t i) except -1:
        start, stop, why = self.view.gone[i]
        return self.add_fate(
            OF_TURN, start, min(<uint64_t>stop, <uint64_t>self.count), WHY_NAMES.index(why), 0)

    def fates(self):
        """(kind, seq, why, cut_tokens) of each turn and summary; why is "" for what is kept."""
        cdef kalos_window_fate* run
        cdef uint32_t i
        cdef uint64_t t
        cdef list out = []
        self.find_fates()
        for i in range(self.num_fates):
            run = &self.fate_runs[i]
            kind, why = KIND_NAMES[run.kind], WHY_NAMES[run.why]
            for t in range(run.first, run.stop):
                out.append((kind, t, why, run.cut))
        return out

    cdef int gather_window(self, int32_t* out) except -1:
        """Copy the window's tokens on the CPU."""
        self.gather(&self.spans, out)
        self.path = "cpu_mapped"
        return 0

    cdef int gather(self, span_list* spans, int32_t* out) except -1:
        """Copy the spans' tokens, each run checked in the form in which it was copied."""
        cdef SegmentSet tokens = self.tokens
        cdef kalos_span* span = spans.items
        cdef kalos_span* stop = span + spans.count
        cdef uint32_t segment, crc
        cdef size_t off
        cdef const char* p
        cdef int32_t* whole
        while span != stop:
            if span.flags & KALOS_SPAN_MEMORY:
                memcpy(out + span.start, self.memory[span.pos >> 32] + <uint32_t>span.pos,
                       <size_t>span.length * 4)
                span += 1
                continue
            segment = KALOS_POSITION_SEGMENT(span.pos)
            off = <size_t>KALOS_POSITION_OFFSET(span.pos) * 4
            if segment < tokens.count and tokens.bases[segment] != NULL \
                    and off + <size_t>span.run * 4 <= tokens.sizes[segment]:
                p = tokens.bases[segment] + off
            else:
                p = tokens.at(segment, off, <size_t>span.run * 4)
            if span.length == span.run:
                crc = copy_checked(out + span.start, p, span.run)
            else:
                if <uint64_t>span.skip + span.length > span.run:
                    raise StoreCorrupt("a turn is shorter than what stands of it in a window")
                # The checksum is over the whole run: checked aside, so that what is copied is what
                # was checked, whoever writes to the file meanwhile.
                whole = <int32_t*>malloc(<size_t>span.run * 4)
                if whole == NULL:
                    raise MemoryError()
                crc = copy_checked(whole, p, span.run)
                memcpy(out + span.start, whole + span.skip, <size_t>span.length * 4)
                free(whole)
            if crc != span.crc:
                raise StoreCorrupt(
                    f"{tokens.label(segment)} at byte {off}: {span.run} token IDs do not hold "
                    "their checksum", tokens.label(segment), off)
            span += 1
        return 0

    cdef bint is_current(self, Index now) except -1:
        """Whether the session is still the one that was planned, but for turns appended since.

        `now` is the index that the store has open.
        """
        cdef kalos_image image
        if now is not self.index:
            return False
        self.index.read_image(self.slot_off, &image)
        return image.epoch == self.epoch and image.name_lsn == self.name_lsn \
            and not image.flags & KALOS_IMAGE_DEAD

    cdef const int32_t* tokens_at(self, const kalos_span* span) noexcept:
        """Where the tokens of a span lie; NULL where they cannot be looked at."""
        cdef SegmentSet tokens = self.tokens
        cdef uint32_t segment
        cdef size_t off
        if span.flags & KALOS_SPAN_MEMORY:
            return self.memory[span.pos >> 32] + <uint32_t>span.pos
        segment = KALOS_POSITION_SEGMENT(span.pos)
        off = (<size_t>KALOS_POSITION_OFFSET(span.pos) + span.skip) * 4
        if segment >= tokens.count or tokens.bases[segment] == NULL \
                or off + <size_t>span.length * 4 > tokens.sizes[segment]:
            return NULL
        return <const int32_t*>(tokens.bases[segment] + off)

    cdef int compare(self, WindowParts before, const int32_t* out) except -1:
        """How far the window begins as the one before it and the reply that was appended since.

        Spans are compared first: equal places hold equal tokens. Where they differ, tokens are.
        """
        cdef uint64_t at = 0, n, i, total = self.spans.tokens
        cdef uint32_t j = 0, k, last = before.spans.count
        cdef kalos_span* old
        cdef kalos_span* new
        cdef const int32_t* p
        cdef uint64_t reply = before.count
        cdef bint asked = last > 0 and before.spans.items[last - 1].kind == KALOS_SPAN_PROMPT
        self.compared = True
        for k in range(last):
            old = &before.spans.items[k]
            while j < self.spans.count and self.spans.items[j].start < at:
                j += 1
            new = &self.spans.items[j] if j < self.spans.count else NULL
            if new != NULL and new.start == at and new.length == old.length \
                    and new.skip == old.skip and self.same_place(new, before, old):
                at += old.length
                continue
            p = before.tokens_at(old)
            n = min(<uint64_t>old.length, total - at)
            i = common_tokens(p, out + at, n) if p != NULL else 0
            if i < old.length:
                self.reused_tokens = at + i
                return 0
            # The generation prompt is how the reply begins.
            if asked and k + 1 == last and new != NULL and new.start == at \
                    and new.kind == KALOS_SPAN_TURN and new.id == reply \
                    and new.length > old.length and new.role == KALOS_ROLE_ASSISTANT \
                    and self.epoch == before.epoch:
                at += new.length
                reply += 1
                j += 1
                break
            at += old.length
        # A reply follows the window, or the prompt that closed it.
        while j < self.spans.count and self.spans.items[j].start < at:
            j += 1
        while self.epoch == before.epoch and j < self.spans.count:
            new = &self.spans.items[j]
            if new.start != at or new.kind != KALOS_SPAN_TURN or new.id != reply \
                    or new.role != KALOS_ROLE_ASSISTANT or new.flags & KALOS_SPAN_CUT:
                break
            at += new.length
            reply += 1
            j += 1
        self.reused_tokens = at
        self.reused_all = True
        return 0

    cdef bint same_place(self, const kalos_span* new, WindowParts before,
                         const kalos_span* old) noexcept:
        if new.flags & KALOS_SPAN_MEMORY:
            return old.flags & KALOS_SPAN_MEMORY and \
                self.memory[new.pos >> 32] == before.memory[old.pos >> 32] \
                and <uint32_t>new.pos == <uint32_t>old.pos
        return not old.flags & KALOS_SPAN_MEMORY and new.pos == old.pos \
            and <void*>self.tokens == <void*>before.tokens


cdef tuple choose_passages(
    list found, list numbers, sources, tuple frame, const int32_t* kept, uint64_t num_kept,
    uint64_t budget,
):
    """Which passages are taken.

    Returns those as `lay_passages` takes them, what became of each hit as (id, source, tokens,
    why), and the tokens used.
    """
    cdef Py_ssize_t n = len(found), i
    cdef recall_frame framing
    cdef uint64_t used
    cdef uint64_t* lengths = <uint64_t*>malloc(n * 8)
    cdef uint8_t* inside = <uint8_t*>malloc(n * 2)
    cdef uint32_t* same = <uint32_t*>malloc(n * 4)
    cdef dict first = {}
    cdef list taken = [], told = []
    framing.prefix, framing.separator, framing.suffix = [len(ids) for ids in frame]
    try:
        if lengths == NULL or inside == NULL or same == NULL:
            raise MemoryError()
        for i in range(n):
            content = found[i][4]
            lengths[i] = len(content) // 4
            inside[i] = stands_in(
                kept, num_kept, <const int32_t*>PyBytes_AS_STRING(content), lengths[i])
            same[i] = first.setdefault(content, i)
        used = select_passages(lengths, inside, same, n, framing, budget, inside + n)
        for i in range(n):
            why = "" if inside[n + i] == KALOS_PASSAGE_TAKEN else VERDICT_NAMES[inside[n + i]]
            if lengths[i] == 0:
                why = "empty"
            told.append((numbers[i], sources[i], lengths[i], why))
            if not why:
                taken.append((i, *found[i][:4], lengths[i]))
    finally:
        free(lengths)
        free(inside)
        free(same)
    return taken, told, used
