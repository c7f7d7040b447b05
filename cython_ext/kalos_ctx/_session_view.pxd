"""What the planner reads a session through: its entries where they lie, or flat arrays."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kalos_ctx._index cimport EntryTable, Index
from kalos_ctx._layout cimport kalos_entry
from kalos_ctx._log cimport Log
from kalos_ctx._planner cimport (
    flat_turns, kalos_history_plan, kalos_plan_request, kalos_plan_resume,
)

cdef extern from "_turn_table.h" nogil:
    ctypedef struct kalos_span:
        uint64_t pos
        uint64_t id
        uint32_t start
        uint32_t length
        uint32_t skip
        uint32_t run
        uint32_t crc
        uint8_t kind
        uint8_t flags
        uint16_t role

    const uint8_t KALOS_SPAN_HEAD, KALOS_SPAN_INSIDE, KALOS_SPAN_TAIL, KALOS_SPAN_PROMPT
    const uint8_t KALOS_SPAN_TURN, KALOS_SPAN_SUMMARY, KALOS_SPAN_PASSAGE, KALOS_SPAN_FRAME
    const uint8_t KALOS_SPAN_MEMORY, KALOS_SPAN_OPENS, KALOS_SPAN_CUT

cdef extern from "_turn_table.h" namespace "kalos" nogil:
    ctypedef struct entry_run:
        uint32_t first
        uint32_t count
        const kalos_entry* entries

    ctypedef struct token_places:
        char* const* bases
        const size_t* sizes
        uint32_t count
        const uint8_t* starts
        uint32_t num_ids

    cdef cppclass table_turns:
        const entry_run* runs
        uint32_t num_runs
        uint64_t count
        uint64_t total
        token_places places
        uint64_t bad
        const kalos_entry* entry(uint64_t t) noexcept

    ctypedef struct view_item:
        uint64_t pos
        uint64_t id
        uint32_t run
        uint32_t crc
        uint32_t kind
        uint16_t prefix
        uint16_t suffix

    cdef cppclass view_turns(flat_turns):
        const view_item* items
        const uint32_t* skips
        token_places places

    ctypedef struct span_list:
        kalos_span* items
        uint32_t count
        uint32_t room
        uint64_t tokens

    kalos_span* add_span(span_list* list, uint64_t length) noexcept
    cdef cppclass history:
        bint plain
        table_turns table
        view_turns view

    kalos_history_plan plan_any(
        const history& turns, const kalos_plan_request& request,
        kalos_plan_resume* resume) noexcept
    uint64_t repeated_any(
        const history& turns, const kalos_history_plan& plan, uint64_t* before) noexcept
    uint64_t last_user_any(const history& turns, const kalos_history_plan& plan) noexcept
    uint64_t newest_unit_any(const history& turns) noexcept
    int64_t add_call_any(
        const history& turns, const kalos_history_plan& plan, span_list* list) noexcept
    int64_t add_turns_any(
        const history& turns, const kalos_history_plan& plan, uint64_t begin, uint64_t end,
        span_list* list) noexcept
    bint is_absent[T](const T& turns, uint64_t t) noexcept
    uint32_t copy_checked(int32_t* to, const void* source, uint64_t n) noexcept
    bint stands_in(
        const int32_t* history, uint64_t num_tokens, const int32_t* ids, uint64_t n) noexcept
    uint64_t common_tokens(const int32_t* a, const int32_t* b, uint64_t n) noexcept


cdef class Arrays:
    """Memory of one size a turn; grows, never moves what others point to but at `reserve`."""
    cdef uint32_t room
    cdef uint64_t* ends
    cdef uint32_t* firsts          # units are groups
    cdef uint32_t* singles         # each turn a unit, but with those that trim it
    cdef uint32_t* trims
    cdef uint8_t* roles
    cdef view_item* items
    cdef int reserve(self, uint32_t n) except -1


cdef class Merged:
    """The same history with turns in a row of one role joined."""
    cdef uint64_t* ends
    cdef uint32_t* firsts
    cdef uint32_t* trims
    cdef uint32_t* skips
    cdef uint64_t widest


cdef class SessionView:
    cdef readonly uint32_t count       # turns of the store that were looked at
    cdef uint32_t num_items            # turns and summaries, orphans included
    cdef Arrays arrays
    cdef uint32_t* item_of             # [count] item of a turn; of one that is gone: the next one
    cdef uint32_t room
    cdef double* expires               # [count] or NULL
    cdef uint64_t widest_groups
    cdef uint64_t widest_singles
    cdef uint32_t barrier              # no unit reaches before this item: a summary lies there
    cdef bint any_live                 # some turn has a live form
    cdef bint shows_live               # and it is the one in use
    cdef uint32_t last_user            # seq + 1 of the newest user turn
    cdef double built_at
    cdef double valid_until            # the next expiry
    cdef list gone                     # (start, stop, why) of turns that are no items
    cdef list summaries                # (start, stop, role, pos, n, crc, prefix, suffix)
    cdef size_t next_summary
    cdef readonly uint64_t summaries_lsn
    cdef readonly uint32_t epoch
    cdef object index                  # whose entries these are
    cdef readonly uint64_t version     # changes when what was there changes: resume states end
    cdef Merged merged_groups
    cdef Merged merged_singles
    cdef int extend(self, Index index, Log log, EntryTable* table, uint32_t stop,
                    double now) except -1
    cdef int add_turn(self, Index index, Log log, EntryTable* table,
                      const kalos_entry* e) except -1
    cdef bint read_expiry(self, Log log, const kalos_entry* e, double now) except -1
    cdef bint is_gone_from(self, uint32_t seq) except -1
    cdef bint has_call(self, Index index, Log log, EntryTable* table,
                       const kalos_entry* e) except -1
    cdef uint64_t length_of(self, uint32_t v) noexcept
    cdef int note_expired(self, uint32_t seq) except -1
    cdef int add_summary(self, tuple summary) except -1
    cdef int close_item(self, uint64_t length, uint32_t first, uint32_t single) except -1
    cdef bint serves(self, EntryTable* table, object index, double now)
    cdef Merged merge(self, bint groups)
    cdef int bind(self, bint groups, bint merged, uint32_t until, view_turns* out) except -1
    cdef uint32_t items_before(self, uint32_t seq) noexcept
    cdef size_t nbytes(self) noexcept
