"""Session in, window out: the compiled part of the assembler.

One window is made in five steps: look the session up, plan which turns stand in it, recall, lease
memory, copy. Each entry and each run of tokens is checked in the call that uses it; where the session
changed under the call (a rollback, an erasure, a move to other files), the call starts again. What is
remembered between calls makes them faster and never changes a window.

The caller holds the GIL; only waiting for a slot lets go of it. What the spans of a window point to
stays mapped while the window's parts live.
"""

from collections import OrderedDict

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from kalos_ctx._index cimport EntryTable, Index, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_ENTRY_DEAD, KALOS_IMAGE_COMPLEX, KALOS_IMAGE_DEAD, KALOS_IMAGE_LASTING, KALOS_IMAGE_TTL,
    KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, KALOS_ROLE_ASSISTANT, KALOS_ROLE_USER,
    KALOS_SLOT_SESSION, KALOS_SLOT_TENANT, kalos_crc32c, kalos_entry, kalos_image,
)
from kalos_ctx._planner cimport (
    KALOS_FATE_CUT, KALOS_FATE_KEPT, KALOS_PASSAGE_DUPLICATE, KALOS_PASSAGE_TAKEN, KALOS_PLAN_EMPTY,
    KALOS_PLAN_GROUPS, KALOS_PLAN_MERGED, KALOS_PLAN_NONE, KALOS_PLAN_OVERFLOW, KALOS_PLAN_PARTIAL,
    KALOS_PLAN_STABLE, fate_of, kalos_history_plan, kalos_plan_resume, low_mark, recall_frame,
    select_passages,
)
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._segment cimport SegmentSet
from kalos_ctx._session_view cimport (
    KALOS_SPAN_CUT, KALOS_SPAN_FRAME, KALOS_SPAN_HEAD, KALOS_SPAN_INSIDE, KALOS_SPAN_MEMORY,
    KALOS_SPAN_OPENS, KALOS_SPAN_PASSAGE, KALOS_SPAN_PROMPT, KALOS_SPAN_SUMMARY, KALOS_SPAN_TAIL,
    KALOS_SPAN_TURN, SessionView, add_call_any, add_span, add_turns_any, common_tokens, copy_checked, entry_run,
    history, is_absent, kalos_span, last_user_any, newest_unit_any, plan_any, repeated_any, span_list,
    view_turns,
)
from kalos_ctx._windows cimport KALOS_WINDOW_MAX_TOKENS, Window, WindowPool, c_tenant_key

from kalos_ctx.errors import (
    BudgetExceeded, Conflict, InvalidArgument, InvalidType, SessionExpired, SessionNotFound,
    StoreClosed, StoreCorrupt,
)

cdef extern from "string.h" nogil:
    void* memmem(const void* hay, size_t hay_n, const void* needle, size_t needle_n)

cdef extern from *:
    """
    #define KALOS_NUM_SLOTS(head) __atomic_load_n(&(head)->num_slots, __ATOMIC_ACQUIRE)
    """
    uint64_t KALOS_NUM_SLOTS(void* head) nogil

cdef uint64_t UNLIMITED = <uint64_t>1 << 53     # planner's largest budget
cdef Py_ssize_t ROOM = 4096                     # sessions remembered are one to two times this
cdef Py_ssize_t HEADS_ROOM = 1024
cdef size_t VIEW_BYTES = 128 << 20
cdef int TRIES = 64                             # of a call whose session keeps changing
cdef tuple FATE_NAMES = (
    "kept", "cut", "budget", "group", "orphan", "start_on", "end_on", "overflow")
cdef tuple VERDICT_NAMES = ("taken", "recall_budget", "duplicate")
cdef object REPORT = None
STAGE_NAMES = ("lookup", "plan", "recall", "lease", "gather")


class _Moved(Exception):
    """The session changed under the call."""


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


cdef class TenantRef:
    pass


cdef class SessionRef:
    pass


cdef class WindowParts:
    """All that a window is made of, without its tokens."""

    def __init__(self):
        raise TypeError("parts are made by the assembler")

    def __dealloc__(self):
        free(self.spans.items)

    cdef kalos_span* push(self, uint64_t length, uint8_t kind) except NULL:
        cdef kalos_span* span = add_span(&self.spans, length)
        if span == NULL:
            raise MemoryError()
        span.kind = kind
        return span

    cdef int push_memory(self, Memory which, uint64_t length, uint8_t kind, uint8_t flags) except -1:
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

    def fates(self):
        """(kind, seq, why, cut_tokens) of each turn and summary; why is "" for what is kept."""
        cdef uint64_t t, last = self.count
        cdef list out = []
        if not self.plain:
            return self.view_fates()
        for t in range(<uint64_t>self.count):
            why = ""
            if t >= self.plan.end:
                why = "end_on"
            elif t < self.plan.begin:
                why = "start_on" if t >= self.plan.fit_begin else "budget"
            if self.request.budget == 0:
                why = "budget"
            elif self.plan.code == KALOS_PLAN_OVERFLOW:
                why = "overflow" if t + 1 == last else "budget"
            cut = self.plan.offset if t == self.plan.begin and not why else 0
            out.append(("turn", t, why, cut))
        return out

    def view_fates(self):
        """As `fates`, through the session's view."""
        cdef view_turns turns
        cdef uint64_t t, gone = 0
        cdef uint32_t fate
        cdef list out = []
        cdef list lost = self.view.gone
        self.view.bind(self.groups, self.merged, self.count, &turns)
        for t in range(turns.count):
            while gone < <uint64_t>len(lost) and lost[gone][0] <= turns.items[t].id \
                    and lost[gone][0] < self.count:
                start, stop, why = lost[gone]
                out.extend(("turn", seq, why, 0) for seq in range(start, min(stop, self.count)))
                gone += 1
            fate = fate_of(turns, self.request, self.plan, t)
            why = "" if fate <= KALOS_FATE_CUT else FATE_NAMES[fate]
            kind = "turn" if turns.items[t].kind == KALOS_SPAN_TURN else "summary"
            out.append((kind, turns.items[t].id, why,
                        self.plan.offset if fate == KALOS_FATE_CUT else 0))
        while gone < <uint64_t>len(lost) and lost[gone][0] < self.count:
            start, stop, why = lost[gone]
            out.extend(("turn", seq, why, 0) for seq in range(start, min(stop, self.count)))
            gone += 1
        return out


@cython.no_gc_clear
cdef class ContextWindow(Window):
    """A session's next input: int32 token IDs of shape (L,), in a slot of the assembler's pool.

    Made by `ContextAssembler.assemble`. `release()`, the end of a `with` block or the end of the
    object gives the slot back; arrays made from it stay valid. `token_ids`, `tolist`, `__dlpack__`
    and `len` raise `WindowReleased` afterwards, `report` does not.
    """

    def __init__(self):
        raise TypeError("windows are made by ContextAssembler.assemble")

    def __dealloc__(self):
        self.unlink()

    cdef void link(self, AssemblerCore core):
        """Become the session's latest window."""
        cdef SessionRef ref = self.ref
        self.core = core
        self.older = ref.latest
        if self.older != NULL:
            (<ContextWindow>self.older).newer = <void*>self
        else:
            core.live[ref.key] = ref
        ref.latest = <void*>self

    cdef void unlink(self) noexcept:
        cdef AssemblerCore core = self.core
        cdef SessionRef ref = self.ref
        if core is None:
            return
        self.core = None
        if self.older != NULL:
            (<ContextWindow>self.older).newer = self.newer
        if self.newer != NULL:
            (<ContextWindow>self.newer).older = self.older
        else:
            ref.latest = self.older
            # At the interpreter's end the collector may have emptied the assembler before.
            if ref.latest == NULL and core.live is not None and core.live.get(ref.key) is ref:
                del core.live[ref.key]
        self.older = self.newer = NULL

    cpdef release(self):
        """Give the slot back; arrays made from the window stay valid. Idempotent."""
        self.unlink()
        Window.release(self)

    @property
    def session(self):
        """Name of the session: str, or bytes where it is not UTF-8."""
        return self.ref.shown

    @property
    def tenant(self):
        """Name of the tenant, as `session`."""
        return shown(self.ref.tenant)

    @property
    def device(self):
        """Where the token IDs lie."""
        return "cpu"

    @property
    def report(self):
        """What stands in the window, what does not, and why."""
        if self._report is None:
            self._report = REPORT(self)
        return self._report


def use_report(cls):
    """Say what `ContextWindow.report` makes of a window; called once, at import."""
    global REPORT
    REPORT = cls


cdef object shown(bytes name):
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name


cdef class AssemblerCore:
    """Windows of one store on the CPU. `ContextAssembler` is the public face.

    Its hooks are methods that the subclass gives: `checked_name`, `checked_tokens`, `make_rules`,
    `make_head`, `date_key`, `read_summaries`, `recall_hits`, `recall_texts`.
    """

    def __cinit__(self, *args, **kwargs):
        self.young, self.old, self.tenants, self.live = {}, {}, {}, {}
        self.heads, self.rules = {}, {}
        self.views = OrderedDict()

    def __dealloc__(self):
        free(self.scratch)

    def start(self, store, StoreReader reader not None, clock, slots, timeout, prompt, starts):
        """Bind to a store; called once.

        Parameters
        ----------
        prompt : int32 array
            The generation prompt.
        starts : uint8 array by token ID, or None
            0 where a token begins inside a character.
        """
        cdef const int32_t[::1] ids = prompt
        self.store, self.reader, self.clock = store, reader, clock
        self.pool = WindowPool(slots, timeout)
        self.prompt, self.starts = prompt, starts
        self.prompt_length = <uint32_t>ids.shape[0]
        self.prompt_ids = &ids[0] if ids.shape[0] else NULL

    def set_dated(self, bint dated):
        """Say whether heads depend on the time."""
        self.dated = dated

    # ---- Arguments ------------------------------------------------------------------------------

    cdef bytes name_of(self, object value, str what, bint empty):
        """The bytes of a name; the hook raises for what is none."""
        cdef bytes name
        if type(value) is str:
            if (<str>value).isascii():
                name = (<str>value).encode()
                if 0 < len(name) <= 1024 or (empty and len(name) == 0):
                    return name
        elif type(value) is bytes:
            name = value
            if 0 < len(name) <= 1024 or (empty and len(name) == 0):
                return name
        return self.checked_name(value, what, empty)

    cdef int64_t tokens_of(self, object value, str what) except -2:
        """A number of tokens; None is -1."""
        if value is None:
            return -1
        if type(value) is int and 0 <= value <= UNLIMITED:
            return value
        return self.checked_tokens(what, value)

    cdef Rules rules_of(self, object policy):
        if policy is self.last_policy and self.last_rules is not None:
            return self.last_rules
        rules = self.make_rules(policy)
        self.last_policy, self.last_rules = policy, rules
        return rules

    # ---- Sessions -------------------------------------------------------------------------------

    cdef int follow(self) except -1:
        """Called first: is everything open, and are these still the files we remember?"""
        if self.closed:
            raise StoreClosed("the assembler is closed")
        self.reader.enter()
        if self.reader.index is not self.index:
            for ref in [*self.young.values(), *self.old.values(), *self.live.values()]:
                self.strip(ref)
            self.tenants.clear()
            self.heads.clear()
            self.index = self.reader.index
        return 0

    cdef SessionRef remember(self, object key, bytes tenant, bytes session):
        """The session's reference, made where there is none."""
        cdef SessionRef ref = self.young.get(key)
        if ref is not None:
            return ref
        ref = self.old.pop(key, None)
        if ref is None:
            ref = self.live.get(key)
        if ref is None:
            ref = SessionRef.__new__(SessionRef)
            ref.tenant, ref.session, ref.key = tenant, session, key
            ref.shown = shown(session)
            ref.tenant_key = c_tenant_key(<const unsigned char*><char*>tenant, len(tenant))
        if len(self.young) >= ROOM:
            for gone in self.old.values():
                self.drop_view(gone)
            self.old = self.young
            self.young = {}
        self.young[key] = ref
        return ref

    def strip(self, SessionRef ref):
        """Forget what depends on where the session lies."""
        ref.slot_off = 0
        ref.owner = None
        ref.head = None
        ref.previous = None
        memset(ref.walk_states, 0, sizeof(ref.walk_states))
        self.drop_view(ref)

    def forget(self, bytes tenant, bytes session):
        """Forget a session altogether; its live windows stay with their owners."""
        cdef object key = session if not tenant else (tenant, session)
        for table in (self.young, self.old, self.live):
            ref = table.pop(key, None)
            if ref is not None:
                self.strip(ref)

    cdef SessionRef find_session(self, bytes tenant, bytes session, EntryTable* table):
        """The session's reference and its entries; the caller clears the table."""
        cdef object key = session if not tenant else (tenant, session)
        cdef SessionRef ref = self.remember(key, tenant, session)
        cdef kalos_image image
        cdef uint64_t slot_off
        if ref.slot_off:
            self.index.open_table(ref.slot_off, table)
            if table.image.name_lsn == ref.name_lsn and not table.image.flags & KALOS_IMAGE_DEAD:
                return ref
            table_clear(table)
            self.forget(tenant, session)
            ref = self.remember(key, tenant, session)
        slot_off = self.reader.find(KALOS_SLOT_SESSION, tenant, session, &image)
        if slot_off == 0:
            self.forget(tenant, session)
            raise SessionNotFound("there is no such session in this tenant")
        ref.slot_off, ref.name_lsn = slot_off, image.name_lsn
        self.index.open_table(slot_off, table)
        if table.image.name_lsn != ref.name_lsn or table.image.flags & KALOS_IMAGE_DEAD:
            raise _Moved()
        return ref

    cdef uint64_t tenant_segments(self, SessionRef ref) except? 1:
        """Log position of the tenant's table of segments, 0 for none."""
        cdef TenantRef owner = ref.owner
        cdef kalos_image image
        cdef uint64_t slots
        if owner is None:
            owner = self.tenants.get(ref.tenant)
            if owner is None:
                owner = TenantRef.__new__(TenantRef)
                owner.name, owner.num_slots = ref.tenant, ~<uint64_t>0
                if len(self.tenants) >= ROOM:
                    self.tenants.clear()
                self.tenants[ref.tenant] = owner
            ref.owner = owner
        if owner.slot_off:
            self.index.read_image(owner.slot_off, &image)
            if image.name_lsn == owner.name_lsn and not image.flags & KALOS_IMAGE_DEAD:
                return image.segments_lsn
            owner.slot_off, owner.num_slots = 0, ~<uint64_t>0
        slots = KALOS_NUM_SLOTS(self.index.header())
        if slots == owner.num_slots:
            return 0
        owner.slot_off = self.reader.find(KALOS_SLOT_TENANT, owner.name, b"", &image)
        owner.num_slots = slots
        if owner.slot_off == 0:
            return 0
        owner.name_lsn = image.name_lsn
        return image.segments_lsn

    cdef Head head_of(self, SessionRef ref, EntryTable* table, bint include_system):
        """The session's pinned segments, encoded."""
        cdef uint64_t theirs = self.tenant_segments(ref), own = table.image.segments_lsn
        cdef object date = self.date_key() if self.dated else None
        cdef Head head = ref.head
        if head is not None and ref.head_tenant == theirs and ref.head_session == own \
                and ref.head_system == include_system and (date is None or date == ref.head_date):
            return head
        key = (theirs, own, include_system, date)
        head = self.heads.get(key)
        if head is None:
            head = self.make_head(
                self.reader.table_bytes(theirs)[0] if theirs else b"",
                self.reader.table_bytes(own)[0] if own else b"", include_system)
            if len(self.heads) >= HEADS_ROOM:
                self.heads.clear()
            self.heads[key] = head
        ref.head, ref.head_tenant, ref.head_session = head, theirs, own
        ref.head_system, ref.head_date = include_system, date
        return head

    # ---- Views ----------------------------------------------------------------------------------

    def drop_view(self, SessionRef ref):
        """Free the session's view, where it has one."""
        if ref.view is not None:
            ref.view = None
            self.view_bytes -= self.views.pop(ref.key, 0)

    cdef int keep_view(self, SessionRef ref, SessionView view) except -1:
        """Remember a view; the least recently used go where all take too much memory."""
        cdef size_t nbytes = view.nbytes()
        cdef SessionRef other
        self.view_bytes -= self.views.pop(ref.key, 0)
        ref.view = view
        self.views[ref.key] = nbytes
        self.view_bytes += nbytes
        while self.view_bytes > VIEW_BYTES and len(self.views) > 1:
            key, size = self.views.popitem(last=False)
            self.view_bytes -= size
            for known in (self.young, self.old, self.live):
                other = known.get(key)
                if other is not None:
                    other.view = None
        return 0

    cdef SessionView new_view(self, EntryTable* table, uint32_t count, double now):
        """A view that has looked at nothing yet."""
        cdef SessionView view = SessionView.__new__(SessionView)
        cdef const kalos_entry* e
        view.index = self.index
        view.epoch = table.image.epoch
        view.summaries_lsn = table.image.summaries_lsn
        view.built_at = now
        view.summaries = []
        if view.summaries_lsn:
            view.summaries = self.read_summaries(
                self.reader.table_bytes(view.summaries_lsn)[0], count)
        view.last_user = table.image.last_user
        if count < table.image.num_entries:
            view.last_user = count
            while view.last_user:
                e = table_entry(table, view.last_user - 1)
                self.index.check_entry(e, view.last_user - 1)
                if e.role == KALOS_ROLE_USER:
                    break
                view.last_user -= 1
        return view

    cdef SessionView view_of(self, SessionRef ref, EntryTable* table, uint32_t count):
        """The session's view, up to date, of at least `count` turns (of exactly that many in the past)."""
        cdef bint past = count < table.image.num_entries
        cdef double now = self.clock() if table.image.flags & KALOS_IMAGE_TTL else 0
        cdef SessionView view = ref.view
        if view is not None and not view.serves(table, self.index, now):
            view = None
        if past and view is not None and (view.any_live or view.summaries):
            view = None
        if view is None:
            view = self.new_view(table, count, now)
            if past:
                view.extend(self.index, self.reader.log, table, count, now)
                return view
        if view.count < table.image.num_entries:
            view.last_user = table.image.last_user
            view.extend(self.index, self.reader.log, table, table.image.num_entries, now)
            if past and view.any_live:
                # A turn that lost its live form since had it then.
                self.keep_view(ref, view)
                view = self.new_view(table, count, now)
                view.extend(self.index, self.reader.log, table, count, now)
                return view
        self.keep_view(ref, view)
        return view

    # ---- Plan -----------------------------------------------------------------------------------

    cdef int bind_table(self, EntryTable* table, uint32_t count, history* turns) except -1:
        """Let the planner read a plain session where it lies."""
        cdef const kalos_entry* e
        turns.table.runs = <const entry_run*>table.runs
        turns.table.num_runs = table.num_runs
        turns.table.count = count
        turns.table.bad = KALOS_PLAN_NONE
        turns.table.total = table.image.sum
        if count < table.image.num_entries:
            turns.table.total = 0
            if count:
                e = table_entry(table, count - 1)
                self.index.check_entry(e, count - 1)
                turns.table.total = e.sum
        return 0

    cdef int open_history(self, WindowParts parts, EntryTable* table, Rules rules,
                          history* turns) except -1:
        """Choose how the session is read, and open it."""
        cdef SegmentSet tokens = self.reader.tokens
        cdef const uint8_t[::1] starts
        cdef uint32_t segment
        cdef const kalos_entry* e
        memset(turns, 0, sizeof(history))
        parts.groups = rules.flags & KALOS_PLAN_GROUPS != 0
        parts.merged = rules.merges
        parts.plain = not (table.image.flags & KALOS_IMAGE_COMPLEX or table.image.summaries_lsn
                           or rules.merges)
        turns.plain = parts.plain
        if parts.plain:
            self.bind_table(table, parts.count, turns)
        else:
            parts.view = self.view_of(parts.ref, table, parts.count)
            parts.view_version = parts.view.version
            parts.view.bind(parts.groups, parts.merged, parts.count, &turns.view)
        if rules.flags & KALOS_PLAN_PARTIAL and self.starts is not None and parts.count:
            # The planner looks at single tokens: every segment must be mapped before.
            e = table_entry(table, parts.count - 1)
            self.index.check_entry(e, parts.count - 1)
            for segment in range(KALOS_POSITION_SEGMENT(e.tokens_pos) + 1):
                tokens.at(segment, 0, 4)
            starts = self.starts
            turns.table.places.bases = tokens.bases
            turns.table.places.sizes = tokens.sizes
            turns.table.places.count = tokens.count
            turns.table.places.starts = &starts[0]
            turns.table.places.num_ids = <uint32_t>starts.shape[0]
            turns.view.places = turns.table.places
        return 0

    cdef int plan_history(self, WindowParts parts, history* turns, bint keep) except -1:
        """Plan with the parts' request. `keep`: the session as it stands, so that the walk is kept."""
        cdef SessionRef ref = parts.ref
        cdef kalos_plan_resume* walk = NULL
        cdef uint64_t state = parts.view_version << 32 | 1 if not parts.plain \
            else <uint64_t>parts.epoch << 1 | <uint64_t>1 << 63
        cdef int i
        parts.request.settled = parts.count
        if not parts.plain:
            parts.request.settled = turns.view.count
            if parts.view.shows_live:
                parts.request.settled = parts.view.items_before(parts.view.last_user)
        if keep and parts.request.flags & KALOS_PLAN_STABLE:
            for i in range(WALKS):
                if ref.walk_states[i] == state and ref.walks[i].budget == parts.request.budget \
                        and ref.walks[i].low == parts.request.low \
                        and ref.walks[i].flags == parts.request.flags & ~KALOS_PLAN_STABLE:
                    walk = &ref.walks[i]
                    break
            else:
                i = <int>ref.next_walk
                ref.next_walk = (i + 1) % WALKS
                walk = &ref.walks[i]
                memset(walk, 0, sizeof(kalos_plan_resume))
                ref.walk_states[i] = state
        parts.plan = plan_any(turns[0], parts.request, walk)
        if parts.plain and turns.table.bad != KALOS_PLAN_NONE:
            memset(ref.walk_states, 0, sizeof(ref.walk_states))
            raise self.index.damage(0, f"the entry of turn {turns.table.bad} does not hold its checksum")
        return 0

    cdef int check_plan(self, WindowParts parts, history* turns, Rules rules, uint64_t used) except -1:
        """Refuse what the policy refuses."""
        cdef uint64_t before = 0, newest, found
        if parts.plan.code == KALOS_PLAN_OVERFLOW and not rules.drop_overflow:
            newest = newest_unit_any(turns[0])
            segments = self.fixed_segments(parts)
            if used:
                segments["recall"] = segments.get("recall", 0) + used
            segments["history"] = segments.get("history", 0) + newest
            raise BudgetExceeded(
                f"the newest turn and those that belong to it take {newest} tokens, "
                f"{newest - parts.request.budget} more than the history may have "
                f"({parts.request.budget} of max_tokens - reserve = {parts.total})",
                segments, parts.total, newest - parts.request.budget)
        if rules.strict:
            found = repeated_any(turns[0], parts.plan, &before)
            if found != KALOS_PLAN_NONE:
                if not parts.plain:
                    found, before = turns.view.items[found].id, turns.view.items[before].id
                raise Conflict(
                    f"alternation 'strict' refuses turns in a row of one role: {before} and {found}")
        return 0

    def fixed_segments(self, WindowParts parts):
        """Tokens by name of what stands in every window of the session."""
        found = parts.head.by_segment()
        if parts.prompt is not None:
            found["generation_prompt"] = found.get("generation_prompt", 0) + self.prompt_length
        return found

    cdef int fill_parts(self, WindowParts parts, EntryTable* table, int64_t max_tokens,
                        int64_t reserve, Rules rules, int64_t as_of, tuple recall) except -1:
        """Everything of a window but its tokens."""
        cdef history turns
        cdef uint64_t fixed, left
        cdef bint stable = rules.flags & KALOS_PLAN_STABLE != 0, past
        cdef list taken = None
        cdef uint32_t flags = table.image.flags
        if flags & KALOS_IMAGE_TTL and not flags & KALOS_IMAGE_LASTING \
                and table.image.num_entries and table.image.expires_at <= self.clock():
            raise SessionExpired("every turn of the session has expired")
        past = 0 <= as_of < parts.count
        if past:
            parts.count = <uint32_t>as_of
        parts.head = self.head_of(parts.ref, table, rules.include_system)
        fixed = parts.head.num_tokens
        if rules.generation_prompt and self.prompt_length:
            parts.prompt = self.prompt
            fixed += self.prompt_length
        parts.total = UNLIMITED if max_tokens < 0 else <uint64_t>(max_tokens - reserve)
        if fixed > parts.total:
            self.refuse_head(self.fixed_segments(parts), parts.total)
        left = parts.total - fixed
        if recall is not None:
            parts.recall_budget = parts.total // 4
            if rules.recall_tokens >= 0:
                parts.recall_budget = <uint64_t>rules.recall_tokens
            parts.recall_budget = min(parts.recall_budget, left)
        parts.request.flags = rules.flags
        parts.request.start_on, parts.request.end_on = rules.start_on, rules.end_on
        parts.request.budget = left - parts.recall_budget if stable else left
        parts.request.low = low_mark(parts.request.budget, rules.low_water)
        parts.clocks[1] = now_ns()
        self.open_history(parts, table, rules, &turns)
        self.plan_history(parts, &turns, not past)
        if stable or recall is None:
            self.check_plan(parts, &turns, rules, 0)
        parts.clocks[2] = now_ns()
        if recall is not None:
            taken = self.recalled(parts, &turns, rules, recall, fixed)
            if not stable:
                # What the passages left: a suffix that fits it, of the turns just looked at.
                parts.request.budget = left - parts.recall_used
                self.plan_history(parts, &turns, False)
                self.check_plan(parts, &turns, rules, parts.recall_used)
        parts.clocks[3] = now_ns()
        if parts.plan.tokens + fixed + parts.recall_used > KALOS_WINDOW_MAX_TOKENS:
            raise BudgetExceeded(
                f"the window would have {parts.plan.tokens + fixed + parts.recall_used} tokens, more "
                f"than a window can hold ({KALOS_WINDOW_MAX_TOKENS}): give max_tokens",
                self.fixed_segments(parts), KALOS_WINDOW_MAX_TOKENS,
                parts.plan.tokens + fixed + parts.recall_used - KALOS_WINDOW_MAX_TOKENS)
        return self.lay_out(parts, &turns, rules, taken, None if recall is None else recall[0])

    cdef int lay_out(self, WindowParts parts, history* turns, Rules rules, list taken,
                     object placement) except -1:
        """The window's spans in order."""
        cdef uint64_t split = parts.plan.end
        cdef Head head = parts.head
        cdef int64_t wrong
        cdef uint64_t start
        parts.memory[<int>MEMORY_HEAD] = head.head.ids
        parts.memory[<int>MEMORY_INSIDE] = head.inside.ids
        parts.memory[<int>MEMORY_TAIL] = head.tail.ids
        parts.memory[<int>MEMORY_PROMPT] = self.prompt_ids
        parts.push_memory(MEMORY_HEAD, head.head.num_tokens, KALOS_SPAN_HEAD, 0)
        if placement == "after_system":
            self.lay_passages(parts, taken)
        if head.inside.num_tokens or placement == "before_last_user":
            split = last_user_any(turns[0], parts.plan)
        start = parts.spans.tokens
        wrong = add_call_any(turns[0], parts.plan, &parts.spans)
        if wrong == 0:
            wrong = add_turns_any(turns[0], parts.plan, parts.plan.begin, split, &parts.spans)
        start = parts.spans.tokens - start
        if wrong == 0:
            if placement == "before_last_user":
                self.lay_passages(parts, taken)
            parts.push_memory(MEMORY_INSIDE, head.inside.num_tokens, KALOS_SPAN_INSIDE, 0)
            start = parts.spans.tokens - start
            wrong = add_turns_any(turns[0], parts.plan, split, parts.plan.end, &parts.spans)
            start = parts.spans.tokens - start
        if wrong > 0:
            raise MemoryError()
        if wrong < 0:
            raise self.index.damage(0, f"the entry of turn {-wrong - 1} does not hold its checksum")
        if start != parts.plan.tokens:
            raise self.index.damage(0, "the sums of a session's turns do not add up")
        parts.push_memory(MEMORY_TAIL, head.tail.num_tokens, KALOS_SPAN_TAIL, 0)
        if placement == "end":
            self.lay_passages(parts, taken)
        if parts.prompt is not None:
            parts.push_memory(MEMORY_PROMPT, self.prompt_length, KALOS_SPAN_PROMPT, 0)
        return 0

    # ---- Recall ---------------------------------------------------------------------------------

    cdef list recalled(self, WindowParts parts, history* turns, Rules rules, tuple recall,
                       uint64_t fixed):
        """The passages that stand in the window, as (number of the hit, pos, run, crc, skip, length)."""
        cdef span_list kept
        cdef int32_t* ids = NULL
        cdef int64_t wrong
        cdef const int32_t[::1] framing
        cdef uint32_t i
        placement, ask = recall
        parts.hits, places, sources, frame, generation = self.recall_hits(ask)
        if generation != self.reader.generation or self.reader.index is not parts.index:
            raise _Moved()
        if not places:
            parts.passages = []
            return []
        memset(&kept, 0, sizeof(kept))
        try:
            wrong = add_call_any(turns[0], parts.plan, &kept)
            if wrong == 0:
                wrong = add_turns_any(
                    turns[0], parts.plan, parts.plan.begin, parts.plan.end, &kept)
            if wrong > 0:
                raise MemoryError()
            if wrong < 0:
                raise self.index.damage(
                    0, f"the entry of turn {-wrong - 1} does not hold its checksum")
            ids = <int32_t*>malloc((kept.tokens + 1) * 4)
            if ids == NULL:
                raise MemoryError()
            self.gather(parts, &kept, ids)
            found = [self.read_passage(place) for place in places]
            taken, parts.passages, parts.recall_used = choose_passages(
                found, parts.hits.ids.tolist(), sources, frame, ids, kept.tokens,
                parts.recall_budget)
        finally:
            free(kept.items)
            free(ids)
        parts.frame = frame
        for i in range(3):
            framing = frame[i]
            parts.memory[<int>MEMORY_PREFIX + i] = &framing[0] if framing.shape[0] else NULL
        return taken

    cdef tuple read_passage(self, object place):
        """(pos, run, crc, skip, content IDs as bytes) of a hit, checked."""
        cdef EntryTable table
        cdef const kalos_entry* e
        cdef uint64_t slot_off
        cdef uint32_t seq, skip = 0, length
        cdef const int32_t* p
        slot_off, seq, is_turn = place
        self.index.open_table(slot_off, &table)
        try:
            e = table_entry(&table, seq)
            if e == NULL or e.flags & KALOS_ENTRY_DEAD or table.image.flags & KALOS_IMAGE_DEAD:
                raise _Moved()
            self.index.check_entry(e, seq)
            length = e.num_tokens
            if is_turn and e.prefix_len + e.suffix_len <= length:
                skip = e.prefix_len
                length -= skip + e.suffix_len
            p = self.reader.token_run(e.tokens_pos, e.num_tokens, e.token_crc)
            content = PyBytes_FromStringAndSize(NULL, length * 4)
            memcpy(PyBytes_AS_STRING(content), p + skip, length * 4)
            return e.tokens_pos, e.num_tokens, e.token_crc, skip, content
        finally:
            table_clear(&table)

    cdef int lay_passages(self, WindowParts parts, list taken) except -1:
        """The passages that were taken, framed as one turn."""
        cdef kalos_span* span
        cdef Py_ssize_t i, n = len(taken)
        if n == 0:
            return 0
        prefix, separator, suffix = [len(ids) for ids in parts.frame]
        parts.push_memory(MEMORY_PREFIX, prefix, KALOS_SPAN_FRAME, KALOS_SPAN_OPENS)
        for i in range(n):
            number, pos, run, crc, skip, length = taken[i]
            span = parts.push(length, KALOS_SPAN_PASSAGE)
            span.id, span.pos, span.run, span.crc, span.skip = number, pos, run, crc, skip
            if i + 1 < n:
                parts.push_memory(MEMORY_SEPARATOR, separator, KALOS_SPAN_FRAME, 0)
        return parts.push_memory(MEMORY_SUFFIX, suffix, KALOS_SPAN_FRAME, 0)

    # ---- Copy -----------------------------------------------------------------------------------

    cdef int32_t* scratch_of(self, size_t n) except NULL:
        """Room for n tokens, until the next call."""
        cdef void* made
        if n > self.scratch_room:
            made = realloc(self.scratch, n * 4)
            if made == NULL:
                raise MemoryError()
            self.scratch, self.scratch_room = <int32_t*>made, n
        return self.scratch

    cdef int gather(self, WindowParts parts, span_list* spans, int32_t* out) except -1:
        """Copy the spans' tokens, each run checked in the form in which it was copied."""
        cdef SegmentSet tokens = parts.tokens
        cdef kalos_span* span = spans.items
        cdef kalos_span* stop = span + spans.count
        cdef uint32_t segment, crc
        cdef size_t off
        cdef const char* p
        cdef int32_t* whole
        while span != stop:
            if span.flags & KALOS_SPAN_MEMORY:
                memcpy(out + span.start, parts.memory[span.pos >> 32] + <uint32_t>span.pos,
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
                # The checksum is over the whole run: checked aside, so that what is copied is what
                # was checked, whoever writes to the file meanwhile.
                whole = self.scratch_of(span.run)
                crc = copy_checked(whole, p, span.run)
                memcpy(out + span.start, whole + span.skip, <size_t>span.length * 4)
            if crc != span.crc:
                raise StoreCorrupt(
                    f"{tokens.label(segment)} at byte {off}: {span.run} token IDs do not hold their "
                    "checksum", tokens.label(segment), off)
            span += 1
        return 0

    cdef bint is_current(self, WindowParts parts) except -1:
        """Whether the session is still the one that was planned, but for turns appended since."""
        cdef kalos_image image
        if self.reader.index is not parts.index:
            return False
        parts.index.read_image(parts.slot_off, &image)
        return image.epoch == parts.epoch and image.name_lsn == parts.name_lsn \
            and not image.flags & KALOS_IMAGE_DEAD

    cdef const int32_t* tokens_at(self, WindowParts parts, const kalos_span* span):
        """Where the tokens of a span of an earlier window lie; NULL where they cannot be looked at."""
        cdef SegmentSet tokens = parts.tokens
        cdef uint32_t segment
        cdef size_t off
        if span.flags & KALOS_SPAN_MEMORY:
            return parts.memory[span.pos >> 32] + <uint32_t>span.pos
        segment = KALOS_POSITION_SEGMENT(span.pos)
        off = (<size_t>KALOS_POSITION_OFFSET(span.pos) + span.skip) * 4
        if segment >= tokens.count or tokens.bases[segment] == NULL \
                or off + <size_t>span.length * 4 > tokens.sizes[segment]:
            return NULL
        return <const int32_t*>(tokens.bases[segment] + off)

    cdef int compare(self, WindowParts parts, WindowParts before, const int32_t* out) except -1:
        """How far the window begins as the one before it and the reply that was appended since.

        Spans are compared first: equal places hold equal tokens. Where they differ, tokens are.
        """
        cdef uint64_t at = 0, n, i, total = parts.spans.tokens
        cdef uint32_t j = 0, k, last = before.spans.count
        cdef kalos_span* old
        cdef kalos_span* new
        cdef const int32_t* p
        cdef uint64_t reply = before.count
        parts.compared = True
        cdef bint asked = last > 0 and before.spans.items[last - 1].kind == KALOS_SPAN_PROMPT
        for k in range(last):
            old = &before.spans.items[k]
            while j < parts.spans.count and parts.spans.items[j].start < at:
                j += 1
            new = &parts.spans.items[j] if j < parts.spans.count else NULL
            if new != NULL and new.start == at and new.length == old.length \
                    and new.skip == old.skip and self.same_place(parts, new, before, old):
                at += old.length
                continue
            p = self.tokens_at(before, old)
            n = min(<uint64_t>old.length, total - at)
            i = common_tokens(p, out + at, n) if p != NULL else 0
            if i < old.length:
                parts.reused_tokens = at + i
                return 0
            # The generation prompt is how the reply begins.
            if asked and k + 1 == last and new != NULL and new.start == at \
                    and new.kind == KALOS_SPAN_TURN and new.id == reply and new.length > old.length \
                    and new.role == KALOS_ROLE_ASSISTANT and parts.epoch == before.epoch:
                at += new.length
                reply += 1
                j += 1
                break
            at += old.length
        # A reply follows the window, or the prompt that closed it.
        while j < parts.spans.count and parts.spans.items[j].start < at:
            j += 1
        while parts.epoch == before.epoch and j < parts.spans.count:
            new = &parts.spans.items[j]
            if new.start != at or new.kind != KALOS_SPAN_TURN or new.id != reply \
                    or new.role != KALOS_ROLE_ASSISTANT or new.flags & KALOS_SPAN_CUT:
                break
            at += new.length
            reply += 1
            j += 1
        parts.reused_tokens = at
        parts.reused_all = True
        return 0

    cdef bint same_place(self, WindowParts parts, const kalos_span* new, WindowParts before,
                         const kalos_span* old) noexcept:
        if new.flags & KALOS_SPAN_MEMORY:
            return old.flags & KALOS_SPAN_MEMORY and \
                parts.memory[new.pos >> 32] == before.memory[old.pos >> 32] \
                and <uint32_t>new.pos == <uint32_t>old.pos
        return not old.flags & KALOS_SPAN_MEMORY and new.pos == old.pos \
            and <void*>parts.tokens == <void*>before.tokens

    # ---- The whole call -------------------------------------------------------------------------

    cdef WindowParts make_parts(self, bytes tenant, bytes session, int64_t max_tokens,
                                int64_t reserve, Rules rules, int64_t as_of, tuple recall,
                                bint explain):
        """Look up, plan, recall: everything but the tokens."""
        cdef EntryTable table
        cdef WindowParts parts = WindowParts.__new__(WindowParts)
        parts.clocks[0] = now_ns()
        self.follow()
        table.runs = NULL
        parts.ref = self.find_session(tenant, session, &table)
        # Another thread may move on to other files while this one waits: these stay mapped.
        parts.index, parts.tokens = self.index, self.reader.tokens
        parts.slot_off, parts.name_lsn = table.slot_off, table.image.name_lsn
        parts.epoch, parts.count = table.image.epoch, table.image.num_entries
        try:
            self.fill_parts(parts, &table, max_tokens, reserve, rules, as_of, recall)
            if explain:
                self.explain(parts, &table)
        except StoreCorrupt:
            if not self.is_current(parts):
                raise _Moved() from None
            raise
        finally:
            table_clear(&table)
        return parts

    cdef ContextWindow build_once(self, bytes tenant, bytes session, int64_t max_tokens,
                                  int64_t reserve, Rules rules, int64_t as_of, tuple recall):
        cdef WindowParts parts = self.make_parts(
            tenant, session, max_tokens, reserve, rules, as_of, recall, False)
        cdef SessionRef ref = parts.ref
        cdef ContextWindow window = ContextWindow.__new__(ContextWindow)
        window.c_attach(self.pool, parts.spans.tokens, ref.tenant_key, self.pool.timeout)
        parts.clocks[4] = now_ns()
        try:
            self.gather(parts, &parts.spans, window.c_data())
        except StoreCorrupt:
            if not self.is_current(parts):
                raise _Moved() from None
            raise
        if not self.is_current(parts):
            raise _Moved()
        window.c_set_length(parts.spans.tokens)
        if ref.previous is not None:
            self.compare(parts, ref.previous, window.c_data())
        ref.previous = parts
        window.ref, window.parts = ref, parts
        window.link(self)
        parts.ref = None  # the session refers to its last window's parts: no cycle
        parts.clocks[5] = now_ns()
        return window

    cdef int explain(self, WindowParts parts, EntryTable* table) except -1:
        """Note the length of every turn, for a plan."""
        cdef const kalos_entry* e
        cdef uint32_t seq
        parts.lengths = [0] * parts.count
        for seq in range(parts.count):
            e = table_entry(table, seq)
            self.index.check_entry(e, seq)
            parts.lengths[seq] = e.num_tokens
        return 0

    cdef object run(self, bint only_plan, session, tenant, max_tokens, reserve, tuple recall, as_of,
                    policy, stream, out):
        """Check the arguments, then build the window or its plan."""
        cdef Rules rules = self.rules_of(policy)
        cdef bytes tenant_b = self.name_of(tenant, "tenant", True)
        cdef bytes session_b = self.name_of(session, "session", False)
        cdef int64_t most = self.tokens_of(max_tokens, "max_tokens")
        cdef int64_t kept = self.tokens_of(reserve, "reserve"), past
        cdef ContextWindow window
        cdef int i
        if kept < 0:
            raise InvalidType("reserve must be an int (got NoneType)")
        if 0 <= most < kept:
            raise InvalidArgument(f"reserve must be at most max_tokens ({most}) (got {kept})")
        past = self.tokens_of(as_of, "as_of")
        if stream is not None:
            raise InvalidArgument("stream must be None for device 'cpu' (got a stream)")
        if out is not None:
            out_tokens(out)
        for i in range(TRIES):
            try:
                if only_plan:
                    return self.make_parts(
                        tenant_b, session_b, most, kept, rules, past, recall, True)
                window = self.build_once(
                    tenant_b, session_b, most, kept, rules, past, recall)
                if out is not None:
                    fill_out(window, out)
                return window
            except _Moved:
                continue
        raise Conflict(f"the session changed {TRIES} times while its window was built")

    def assemble(
        self, session, *, tenant="", max_tokens, reserve=0, query=None, top_k=0, collections=(),
        session_recall=False, min_score=None, filters=None, placement="before_last_user",
        recall_role="system", as_of=None, policy=None, stream=None, out=None,
    ):
        """Build the session's next input.

        Parameters
        ----------
        session, tenant : str or bytes
            Opaque, 1 to 1,024 bytes (`tenant` may be empty).
        max_tokens : int or None
            Hard bound in tokens, `reserve` included; None for no bound.
        reserve : int
            Tokens left to the model's answer.
        query : float array of shape (dim,), optional
            Recall is skipped where it is None or `top_k` is 0.
        top_k : int
            Passages to recall, at most.
        collections : str, bytes or a sequence of them
            Whose passages are searched.
        session_recall : bool
            This session's own older turns too.
        min_score : float, optional
            Inclusive; a larger score is better.
        filters : mapping, optional
            Metadata field to value or list of values.
        placement : {"before_last_user", "after_system", "end"}
            Where recalled passages stand.
        recall_role : str
            Role of the one turn that recalled passages are, with a template.
        as_of : int, optional
            As if only the turns before this seq existed.
        policy : Policy, optional
        stream : None
            The CPU has none.
        out : writable int32 buffer, optional
            Filled with the window too; must be at least as long.

        Returns
        -------
        ContextWindow
            int32 token IDs of shape (L,), L <= max_tokens - reserve. Owns its slot until released.

        Raises
        ------
        SessionNotFound, SessionExpired, BudgetExceeded, PoolExhausted, StoreCorrupt, StoreClosed,
        DimensionMismatch, NonFiniteVector, UnknownField, TemplateUnsafe
        Conflict
            `alternation="strict"` and two turns in a row have one role.
        InvalidArgument, InvalidType

        Notes
        -----
        Thread-safe. Releases the GIL while it waits for a slot.
        """
        cdef tuple recall = None
        if query is not None or top_k or type(top_k) is not int or collections != () \
                or session_recall is not False or min_score is not None or filters is not None \
                or placement != "before_last_user" or recall_role != "system":
            recall = self.checked_recall(query, tenant, session, top_k, collections, session_recall,
                                         min_score, filters, placement, recall_role, as_of)
        return self.run(
            False, session, tenant, max_tokens, reserve, recall, as_of, policy, stream, out)

    def plan_parts(
        self, session, *, tenant="", max_tokens, reserve=0, query=None, top_k=0, collections=(),
        session_recall=False, min_score=None, filters=None, placement="before_last_user",
        recall_role="system", as_of=None, policy=None, stream=None, out=None,
    ):
        """As `assemble`, without tokens: the parts of the window, and the length of every turn."""
        cdef tuple recall = self.checked_recall(
            query, tenant, session, top_k, collections, session_recall, min_score, filters, placement,
            recall_role, as_of)
        return self.run(
            True, session, tenant, max_tokens, reserve, recall, as_of, policy, stream, out)

    def live_window(self, key):
        """The latest live window of a session by its key, or None."""
        cdef SessionRef ref = self.live.get(key)
        if ref is None or ref.latest == NULL:
            return None
        return <ContextWindow>ref.latest

    def live_keys(self):
        """Keys of the sessions that have live windows."""
        return list(self.live)

    def end(self):
        """Forget everything; live windows stay with their owners."""
        self.closed = True
        for table in (self.young, self.old, self.live):
            for ref in table.values():
                self.strip(ref)
            table.clear()
        self.heads.clear()


cdef Py_ssize_t out_tokens(object out) except -1:
    """Length of a caller's buffer, checked."""
    cdef Py_buffer view
    cdef Py_ssize_t n
    try:
        PyObject_GetBuffer(out, &view, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_ND)
    except (BufferError, TypeError):
        raise InvalidType("out must be a writable, contiguous int32 buffer") from None
    form = view.format.decode() if view.format != NULL else "B"
    n = view.shape[0] if view.ndim == 1 else -1
    fits = view.itemsize == 4 and form.lstrip("@=<") in ("i", "l")
    PyBuffer_Release(&view)
    if n < 0 or not fits:
        raise InvalidType(f"out must be a 1-D int32 buffer (got {view.ndim}-D of format {form!r})")
    return n


cdef int fill_out(ContextWindow window, object out) except -1:
    """Copy a window into the caller's buffer."""
    cdef Py_buffer view
    cdef Py_ssize_t n = out_tokens(out)
    if n < window.num_tokens:
        length = window.num_tokens
        window.release()
        raise InvalidArgument(f"out must have room for the window's {length} tokens (got {n})")
    PyObject_GetBuffer(out, &view, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_ND)
    if window.num_tokens:
        memcpy(view.buf, window.c_data(), window.num_tokens * 4)
    PyBuffer_Release(&view)
    return 0


cdef tuple choose_passages(
    list found, list numbers, sources, tuple frame, const int32_t* kept, uint64_t num_kept,
    uint64_t budget,
):
    """Which passages are taken.

    Returns those as `lay_passages` takes them, what became of each hit as (id, source, tokens, why),
    and the tokens used.
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
            inside[i] = stands_in(kept, num_kept, content)
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


cdef bint stands_in(const int32_t* kept, uint64_t num_kept, bytes content) noexcept:
    """Whether the IDs stand in the history as one run; no IDs count as standing there."""
    cdef const char* at = <const char*>kept
    cdef const char* stop = at + num_kept * 4
    cdef const char* needle = PyBytes_AS_STRING(content)
    cdef size_t n = PyBytes_GET_SIZE(content)
    if n == 0:
        return True
    while True:
        at = <const char*>memmem(at, stop - at, needle, n)
        if at == NULL:
            return False
        if (at - <const char*>kept) % 4 == 0:
            return True
        at += 1
