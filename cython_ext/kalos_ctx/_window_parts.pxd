"""What a window is made of."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kalos_ctx._channel_layout cimport (
    KALOS_FATE_OF_SUMMARY, KALOS_FATE_OF_TURN, kalos_window_fate,
)
from kalos_ctx._index cimport Index
from kalos_ctx._planner cimport kalos_history_plan, kalos_plan_request
from kalos_ctx._segment cimport SegmentSet
from kalos_ctx._session_view cimport SessionView, kalos_span, span_list

cdef enum:
    UNLIMITED_BITS = 53    # the planner's largest budget is 1 << this
    STAGES = 6         # begin, and the ends of lookup, plan, recall, lease, gather

cdef enum Memory:      # tokens of a window that do not lie in the store
    MEMORY_HEAD
    MEMORY_INSIDE
    MEMORY_TAIL
    MEMORY_PROMPT
    MEMORY_PREFIX
    MEMORY_SEPARATOR
    MEMORY_SUFFIX
    MEMORIES

cdef int64_t now_ns() noexcept nogil
cdef tuple choose_passages(
    list found, list numbers, sources, tuple frame, const int32_t* kept, uint64_t num_kept,
    uint64_t budget)


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


cdef class WindowParts:
    """All that a window is made of, without its tokens. What the report reads."""
    cdef object ref                # SessionRef, while the window is built
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
    cdef kalos_window_fate* fate_runs  # what became of the turns, once it was asked for
    cdef uint32_t num_fates
    cdef bint fates_known
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
    cdef public str path           # how the tokens came into the window
    cdef public str recall_path    # how recall ran where it was another way than the backend's own
    cdef public str degraded       # why the window is less than was asked for
    cdef int add_fate(self, uint8_t kind, uint64_t first, uint64_t stop, uint8_t why,
                      uint64_t cut) except -1
    cdef int find_fates(self) except -1
    cdef int find_view_fates(self) except -1
    cdef uint64_t gone_at(self, Py_ssize_t i) except? 0
    cdef int add_gone(self, Py_ssize_t i) except -1
    cdef kalos_span* push(self, uint64_t length, uint8_t kind) except NULL
    cdef int push_memory(self, Memory which, uint64_t length, uint8_t kind,
                         uint8_t flags) except -1
    cdef int gather(self, span_list* spans, int32_t* out) except -1
    cdef int gather_window(self, int32_t* out) except -1
    cdef bint is_current(self, Index now) except -1
    cdef const int32_t* tokens_at(self, const kalos_span* span) noexcept
    cdef int compare(self, WindowParts before, const int32_t* out) except -1
    cdef bint same_place(self, const kalos_span* new, WindowParts before,
                         const kalos_span* old) noexcept
