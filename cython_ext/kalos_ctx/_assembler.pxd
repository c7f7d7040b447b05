"""Session in, window out: the compiled part of the assembler."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kalos_ctx._index cimport EntryTable, Index
from kalos_ctx._layout cimport kalos_image
from kalos_ctx._planner cimport kalos_history_plan, kalos_plan_request, kalos_plan_resume
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._segment cimport SegmentSet
from kalos_ctx._session_view cimport SessionView, history, kalos_span, span_list
from kalos_ctx._windows cimport Window, WindowPool

cdef enum:
    STAGES = 6         # begin, and the ends of lookup, plan, recall, lease, gather
    WALKS = 4          # resume states kept for a session

cdef enum Memory:      # tokens of a window that do not lie in the store
    MEMORY_HEAD
    MEMORY_INSIDE
    MEMORY_TAIL
    MEMORY_PROMPT
    MEMORY_PREFIX
    MEMORY_SEPARATOR
    MEMORY_SUFFIX
    MEMORIES


cdef class Rules:
    """A policy as the planner takes it."""
    cdef uint32_t flags
    cdef uint32_t start_on
    cdef uint32_t end_on
    cdef double low_water
    cdef int64_t recall_tokens     # -1: a quarter of the window
    cdef bint include_system
    cdef bint generation_prompt
    cdef bint drop_overflow
    cdef bint merges
    cdef bint strict


cdef class Block:
    """Token IDs that stand in many windows, with the names of their parts."""
    cdef readonly list names
    cdef readonly list lengths
    cdef int32_t* ids
    cdef readonly uint32_t num_tokens


cdef class Head:
    """The pinned segments of one session by their place."""
    cdef readonly Block head
    cdef readonly Block inside
    cdef readonly Block tail
    cdef uint64_t num_tokens


cdef class TenantRef:
    cdef bytes name
    cdef uint64_t slot_off         # 0: no slot when `num_slots` slots were there
    cdef uint64_t name_lsn
    cdef uint64_t num_slots
    cdef void* index               # whose offsets these are


cdef class SessionRef:
    """What the assembler remembers of a session. Nothing that a window depends on."""
    cdef bytes tenant
    cdef bytes session
    cdef object key
    cdef object shown              # the name as `ContextWindow.session` gives it
    cdef TenantRef owner
    cdef uint64_t slot_off         # 0: look it up
    cdef uint64_t name_lsn
    cdef uint64_t tenant_key
    cdef kalos_plan_resume walks[WALKS]
    cdef uint64_t walk_states[WALKS]   # epoch or view version that each walk is of
    cdef uint32_t next_walk
    cdef SessionView view
    cdef Head head
    cdef uint64_t head_tenant
    cdef uint64_t head_session
    cdef object head_date
    cdef bint head_system
    cdef WindowParts previous      # of the window before
    cdef void* latest              # newest live ContextWindow, not counted as a reference


cdef class WindowParts:
    """All that a window is made of, without its tokens. What the report reads."""
    cdef SessionRef ref
    cdef span_list spans
    cdef kalos_plan_request request
    cdef kalos_history_plan plan
    cdef readonly bint plain
    cdef SessionView view
    cdef bint groups, merged
    cdef readonly uint32_t count   # turns that the window was planned from
    cdef uint32_t epoch
    cdef uint64_t view_version
    cdef readonly Head head
    cdef object frame              # (prefix, separator, suffix) arrays while passages stand in it
    cdef object prompt             # the array of the generation prompt, or None
    cdef const int32_t* memory[MEMORIES]
    cdef SegmentSet tokens         # keeps mapped what the spans point to
    cdef Index index               # whose session was planned
    cdef uint64_t slot_off
    cdef uint64_t name_lsn
    cdef readonly list lengths     # tokens of every turn, for a plan
    cdef readonly uint64_t total
    cdef readonly uint64_t recall_budget
    cdef readonly uint64_t recall_used
    cdef readonly object hits      # Hits or None
    cdef readonly list passages    # (id, source, tokens, verdict) of each hit
    cdef readonly uint64_t reused_tokens
    cdef readonly bint reused_all  # the match ended where the window before and the reply did
    cdef readonly bint compared    # there was a window before
    cdef int64_t clocks[STAGES]
    cdef kalos_span* push(self, uint64_t length, uint8_t kind) except NULL
    cdef int push_memory(self, Memory which, uint64_t length, uint8_t kind, uint8_t flags) except -1


cdef class ContextWindow(Window):
    cdef AssemblerCore core
    cdef SessionRef ref
    cdef readonly WindowParts parts
    cdef object _report
    cdef object __weakref__
    cdef void* older               # live windows of the session; not counted as references
    cdef void* newer
    cdef void link(self, AssemblerCore core)
    cdef void unlink(self) noexcept
    cpdef release(self)


cdef class AssemblerCore:
    cdef readonly object store
    cdef StoreReader reader
    cdef readonly WindowPool pool
    cdef readonly bint closed
    cdef Index index               # as last seen; another one means another generation
    cdef dict young                # sessions by key; every ROOM the old half goes
    cdef dict old
    cdef dict tenants
    cdef dict live                 # sessions that have live windows
    cdef dict heads                # heads by what they are made of
    cdef dict rules                # policies seen: id -> (policy, Rules)
    cdef object views              # sessions that have a view, the least recently used first
    cdef size_t view_bytes
    cdef object clock
    cdef object prompt
    cdef const int32_t* prompt_ids
    cdef uint32_t prompt_length
    cdef object starts             # uint8 array by token ID, or None
    cdef bint dated                # the head depends on the time
    cdef object last_policy
    cdef Rules last_rules
    cdef int32_t* scratch
    cdef size_t scratch_room
    cdef int follow(self) except -1
    cdef bytes name_of(self, object value, str what, bint empty)
    cdef int64_t tokens_of(self, object value, str what) except -2
    cdef Rules rules_of(self, object policy)
    cdef SessionRef find_session(self, bytes tenant, bytes session, EntryTable* table)
    cdef SessionRef remember(self, object key, bytes tenant, bytes session)
    cdef uint64_t tenant_segments(self, SessionRef ref) except? 1
    cdef Head head_of(self, SessionRef ref, EntryTable* table, bint include_system)
    cdef SessionView view_of(self, SessionRef ref, EntryTable* table, uint32_t count)
    cdef SessionView new_view(self, EntryTable* table, uint32_t count, double now)
    cdef int keep_view(self, SessionRef ref, SessionView view) except -1
    cdef int open_history(self, WindowParts parts, EntryTable* table, Rules rules,
                          history* turns) except -1
    cdef int bind_table(self, EntryTable* table, uint32_t count, history* turns) except -1
    cdef int plan_history(self, WindowParts parts, history* turns, bint keep) except -1
    cdef int check_plan(self, WindowParts parts, history* turns, Rules rules, uint64_t used) except -1
    cdef WindowParts make_parts(self, bytes tenant, bytes session, int64_t max_tokens,
                                int64_t reserve, Rules rules, int64_t as_of, tuple recall,
                                bint explain)
    cdef int fill_parts(self, WindowParts parts, EntryTable* table, int64_t max_tokens,
                        int64_t reserve, Rules rules, int64_t as_of, tuple recall) except -1
    cdef int lay_out(self, WindowParts parts, history* turns, Rules rules, list taken,
                     object placement) except -1
    cdef int lay_passages(self, WindowParts parts, list taken) except -1
    cdef list recalled(self, WindowParts parts, history* turns, Rules rules, tuple recall,
                       uint64_t fixed)
    cdef tuple read_passage(self, object place)
    cdef int gather(self, WindowParts parts, span_list* spans, int32_t* out) except -1
    cdef int32_t* scratch_of(self, size_t n) except NULL
    cdef bint is_current(self, WindowParts parts) except -1
    cdef int compare(self, WindowParts parts, WindowParts before, const int32_t* out) except -1
    cdef const int32_t* tokens_at(self, WindowParts parts, const kalos_span* span)
    cdef ContextWindow build_once(self, bytes tenant, bytes session, int64_t max_tokens,
                                  int64_t reserve, Rules rules, int64_t as_of, tuple recall)
    cdef bint same_place(self, WindowParts parts, const kalos_span* new, WindowParts before,
                         const kalos_span* old) noexcept
    cdef int explain(self, WindowParts parts, EntryTable* table) except -1
    cdef object run(self, bint only_plan, session, tenant, max_tokens, reserve, tuple recall, as_of,
                    policy, stream, out)
