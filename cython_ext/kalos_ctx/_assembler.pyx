"""Session in, window out: the compiled part of the assembler.

One window is made in five steps: look the session up, plan which turns stand in it, recall, lease
memory, copy. Each entry and each run of tokens is checked in the call that uses it; where the
session changed under the call (a rollback, an erasure, a move to other files), it starts again.

Longer than most files, since it is one class whose methods hand one window's parts on.

The caller holds the GIL; only waiting for a slot and recall let go of it. What the spans of a
window point to stays mapped while the window's parts live.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from kalos_ctx._context_window cimport ContextWindow, fill_out, out_tokens
from kalos_ctx._driver cimport kalos_cu_handle
from kalos_ctx._gathering cimport Gatherer
from kalos_ctx._index cimport EntryTable, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_ENTRY_DEAD, KALOS_IMAGE_COMPLEX, KALOS_IMAGE_DEAD, KALOS_IMAGE_LASTING, KALOS_IMAGE_TTL,
    KALOS_POSITION_SEGMENT, kalos_entry,
)
from kalos_ctx._planner cimport (
    KALOS_PLAN_GROUPS, KALOS_PLAN_NONE, KALOS_PLAN_OVERFLOW, KALOS_PLAN_PARTIAL,
    KALOS_PLAN_STABLE, kalos_plan_resume, low_mark,
)
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._segment cimport SegmentSet
from kalos_ctx._session_table cimport WALKS, SessionRef, SessionTable
from kalos_ctx._session_view cimport (
    KALOS_SPAN_FRAME, KALOS_SPAN_HEAD, KALOS_SPAN_INSIDE, KALOS_SPAN_OPENS, KALOS_SPAN_PASSAGE,
    KALOS_SPAN_PROMPT, KALOS_SPAN_TAIL, add_call_any, add_turns_any, entry_run, history, kalos_span,
    last_user_any, newest_unit_any, plan_any, repeated_any, span_list,
)
from kalos_ctx._window_parts cimport (
    MEMORY_HEAD, MEMORY_INSIDE, MEMORY_PREFIX, MEMORY_PROMPT, MEMORY_SEPARATOR, MEMORY_SUFFIX,
    MEMORY_TAIL, UNLIMITED_BITS, Head, Rules, WindowParts, choose_passages, now_ns,
)
from kalos_ctx._windows cimport KALOS_WINDOW_MAX_TOKENS, WindowPool

from kalos_ctx._session_table import Moved
from kalos_ctx.errors import (
    BudgetExceeded, Conflict, InvalidArgument, InvalidType, SessionExpired, StoreCorrupt,
)

cdef uint64_t UNLIMITED = <uint64_t>1 << UNLIMITED_BITS
cdef int TRIES = 64                             # of a call whose session keeps changing


cdef class AssemblerCore(SessionTable):
    """Windows of one store. `ContextAssembler` is the public face.

    Its hooks are methods that the subclass gives: `checked_name`, `checked_tokens`, `make_rules`,
    `make_head`, `date_key`, `read_summaries`, `recall_hits`, `stream_handle`.
    """

    def start(self, store, StoreReader reader not None, clock, WindowPool pool not None,
              Gatherer gatherer not None, prompt, starts):
        """Bind to a store; called once.

        Parameters
        ----------
        pool : WindowPool
        gatherer : Gatherer
            Of the pool's device.
        prompt : int32 array
            The generation prompt.
        starts : uint8 array by token ID, or None
            0 where a token begins inside a character.
        """
        cdef const int32_t[::1] ids = prompt
        self.store, self.reader, self.clock = store, reader, clock
        self.pool, self.gatherer = pool, gatherer
        self.prompt, self.starts = prompt, starts
        self.prompt_length = <uint32_t>ids.shape[0]
        self.prompt_ids = &ids[0] if ids.shape[0] else NULL

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

    cdef int open_history(self, SessionRef ref, WindowParts parts, EntryTable* table, Rules rules,
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
            parts.view = self.view_of(ref, table, parts.count)
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

    cdef int plan_history(self, SessionRef ref, WindowParts parts, history* turns,
                          bint keep) except -1:
        """Plan with the parts' request. `keep`: it is the session as it stands; keep the walk."""
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
            raise self.index.damage(
                0, f"the entry of turn {turns.table.bad} does not hold its checksum")
        return 0

    cdef int check_plan(self, WindowParts parts, history* turns, Rules rules,
                        uint64_t used) except -1:
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
                    "alternation 'strict' refuses turns in a row of one role: "
                    f"{before} and {found}")
        return 0

    def fixed_segments(self, WindowParts parts):
        """Tokens by name of what stands in every window of the session."""
        found = parts.head.by_segment()
        if parts.prompt is not None:
            found["generation_prompt"] = found.get("generation_prompt", 0) + self.prompt_length
        return found

    cdef int fill_parts(self, SessionRef ref, WindowParts parts, EntryTable* table,
                        int64_t max_tokens, int64_t reserve, Rules rules, int64_t as_of,
                        tuple recall) except -1:
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
        parts.head = self.head_of(ref, table, rules.include_system)
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
        self.open_history(ref, parts, table, rules, &turns)
        self.plan_history(ref, parts, &turns, not past)
        if stable or recall is None:
            self.check_plan(parts, &turns, rules, 0)
        parts.clocks[2] = now_ns()
        if recall is not None:
            taken = self.recalled(parts, &turns, rules, recall, fixed)
            if not stable:
                # What the passages left: a suffix that fits it, of the turns just looked at.
                parts.request.budget = left - parts.recall_used
                self.plan_history(ref, parts, &turns, False)
                self.check_plan(parts, &turns, rules, parts.recall_used)
        parts.clocks[3] = now_ns()
        fixed += parts.plan.tokens + parts.recall_used
        if fixed > KALOS_WINDOW_MAX_TOKENS:
            raise BudgetExceeded(
                f"the window would have {fixed} tokens, more than a window can hold "
                f"({KALOS_WINDOW_MAX_TOKENS}): give max_tokens",
                self.fixed_segments(parts), KALOS_WINDOW_MAX_TOKENS,
                fixed - KALOS_WINDOW_MAX_TOKENS)
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
        """The passages that are taken, as (number of the hit, pos, run, crc, skip, length)."""
        cdef span_list kept
        cdef int32_t* ids = NULL
        cdef int64_t wrong
        cdef const int32_t[::1] framing
        cdef uint32_t i
        _, ask = recall
        parts.hits, places, sources, frame, generation, parts.recall_path = self.recall_hits(ask)
        if generation != self.reader.generation or self.reader.index is not parts.index:
            raise Moved()
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
            parts.gather(&kept, ids)
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
                raise Moved()
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
        cdef SessionRef ref = self.find_session(tenant, session, &table)
        parts.ref = ref
        # Another thread may move on to other files while this one waits: these stay mapped.
        parts.index, parts.tokens = self.index, self.reader.tokens
        parts.slot_off, parts.name_lsn = table.slot_off, table.image.name_lsn
        parts.epoch, parts.count = table.image.epoch, table.image.num_entries
        try:
            self.fill_parts(ref, parts, &table, max_tokens, reserve, rules, as_of, recall)
            if explain:
                self.explain(parts, &table)
        except StoreCorrupt:
            if not parts.is_current(self.reader.index):
                raise Moved() from None
            raise
        finally:
            table_clear(&table)
        return parts

    cdef ContextWindow build_once(self, bytes tenant, bytes session, int64_t max_tokens,
                                  int64_t reserve, Rules rules, int64_t as_of, tuple recall,
                                  kalos_cu_handle stream):
        cdef WindowParts parts = self.make_parts(
            tenant, session, max_tokens, reserve, rules, as_of, recall, False)
        cdef SessionRef ref = <SessionRef>parts.ref
        cdef ContextWindow window = ContextWindow.__new__(ContextWindow)
        window.c_attach(self.pool, parts.spans.tokens, ref.tenant_key, self.pool.timeout)
        parts.clocks[4] = now_ns()
        try:
            self.gatherer.fill(parts, window, stream)
        except StoreCorrupt:
            if not parts.is_current(self.reader.index):
                raise Moved() from None
            raise
        self.settle_parts(parts, window.c_data())
        window.c_set_length(parts.spans.tokens)
        window.ref, window.parts = ref, parts
        window.link(self)
        parts.clocks[5] = now_ns()
        return window

    cdef int settle_parts(self, WindowParts parts, const int32_t* tokens) except -1:
        """The tokens are there: compare them with the session's window before, and remember."""
        cdef SessionRef ref = <SessionRef>parts.ref
        if not parts.is_current(self.reader.index):
            raise Moved()
        if parts.recall_path is not None:
            parts.path = f"{parts.path}+{parts.recall_path}"
        if ref.previous is not None:
            parts.compare(ref.previous, tokens)
        self.keep_parts(ref, parts)
        parts.ref = None  # the session refers to its last window's parts: no cycle
        return 0

    cdef WindowParts gather_into(self, bytes tenant, bytes session, int64_t max_tokens,
                                 int64_t reserve, Rules rules, int64_t as_of, int32_t* out,
                                 uint64_t room):
        """A window without recall, gathered by the CPU into memory of the caller's.

        None where it has more than `room` tokens. The arguments are checked already.
        """
        cdef WindowParts parts
        for _ in range(TRIES):
            try:
                parts = self.make_parts(
                    tenant, session, max_tokens, reserve, rules, as_of, None, False)
                if parts.spans.tokens > room:
                    return None
                parts.clocks[4] = now_ns()
                try:
                    parts.gather_window(out)
                except StoreCorrupt:
                    if not parts.is_current(self.reader.index):
                        raise Moved() from None
                    raise
                self.settle_parts(parts, out)
                parts.clocks[5] = now_ns()
                return parts
            except Moved:
                continue
        raise self.restless()

    cdef object restless(self):
        return Conflict(f"the session changed {TRIES} times while its window was built")

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
        cdef kalos_cu_handle on = NULL
        if kept < 0:
            raise InvalidType("reserve must be an int (got NoneType)")
        if 0 <= most < kept:
            raise InvalidArgument(f"reserve must be at most max_tokens ({most}) (got {kept})")
        past = self.tokens_of(as_of, "as_of")
        if stream is not None:
            if self.pool.device is None:
                raise InvalidArgument("stream must be None for device 'cpu' (got a stream)")
            on = <kalos_cu_handle><size_t>self.stream_handle(stream)
            self.pool.c_fence(on)
        if out is not None:
            out_tokens(out)
        for _ in range(TRIES):
            try:
                if only_plan:
                    return self.make_parts(
                        tenant_b, session_b, most, kept, rules, past, recall, True)
                window = self.build_once(
                    tenant_b, session_b, most, kept, rules, past, recall, on)
                if out is not None:
                    fill_out(window, out)
                return window
            except Moved:
                continue
        raise self.restless()

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
        stream : CUDA stream, optional
            The caller's own, on the assembler's device: an address, or an object that has one
            (`__cuda_stream__`, `cuda_stream`, `ptr` or `handle`). The call then only enqueues its
            copies there, and what the caller enqueues behind them finds the window whole; with a
            query it waits for recall. None for a window that is complete on return. The CPU has
            no streams.
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
            recall = self.checked_recall(
                query=query, tenant=tenant, session=session, top_k=top_k, collections=collections,
                session_recall=session_recall, min_score=min_score, filters=filters,
                placement=placement, recall_role=recall_role, as_of=as_of)
        return self.run(
            False, session, tenant, max_tokens, reserve, recall, as_of, policy, stream, out)

    def plan_parts(
        self, session, *, tenant="", max_tokens, reserve=0, query=None, top_k=0, collections=(),
        session_recall=False, min_score=None, filters=None, placement="before_last_user",
        recall_role="system", as_of=None, policy=None, stream=None, out=None,
    ):
        """As `assemble`, without tokens: the parts of the window, and the length of every turn."""
        cdef tuple recall = self.checked_recall(
            query=query, tenant=tenant, session=session, top_k=top_k, collections=collections,
            session_recall=session_recall, min_score=min_score, filters=filters,
            placement=placement, recall_role=recall_role, as_of=as_of)
        return self.run(
            True, session, tenant, max_tokens, reserve, recall, as_of, policy, stream, out)
