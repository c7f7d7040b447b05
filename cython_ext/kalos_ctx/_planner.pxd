"""The planner of cuda/kalos_plan.h for other compiled modules, and its flat form for Python."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "kalos_plan.h" nogil:
    const uint32_t KALOS_PLAN_STABLE, KALOS_PLAN_PARTIAL, KALOS_PLAN_GROUPS, KALOS_PLAN_MERGED
    const uint32_t KALOS_PLAN_OK, KALOS_PLAN_EMPTY, KALOS_PLAN_OVERFLOW
    const uint32_t KALOS_FATE_KEPT, KALOS_FATE_CUT, KALOS_FATE_BUDGET, KALOS_FATE_GROUP
    const uint32_t KALOS_FATE_ABSENT, KALOS_FATE_START_ON, KALOS_FATE_END_ON, KALOS_FATE_OVERFLOW
    const uint32_t KALOS_PASSAGE_TAKEN, KALOS_PASSAGE_BUDGET, KALOS_PASSAGE_DUPLICATE
    const uint64_t KALOS_PLAN_NONE

    ctypedef struct kalos_plan_request:
        uint64_t budget
        uint64_t low
        uint64_t settled
        uint32_t flags
        uint32_t start_on
        uint32_t end_on
        uint32_t reserved

    ctypedef struct kalos_history_plan:
        uint64_t begin
        uint64_t end
        uint64_t offset
        uint64_t call
        uint64_t fit_begin
        uint64_t tokens
        uint32_t code
        uint32_t reserved

    ctypedef struct kalos_plan_resume:
        uint64_t budget
        uint64_t low
        uint64_t turns
        uint64_t mark
        uint64_t next
        uint64_t mark_before
        uint64_t next_before
        uint32_t flags
        uint32_t reserved

cdef extern from "kalos_plan.h" namespace "kalos" nogil:
    cdef cppclass flat_turns:
        uint64_t count
        uint64_t widest
        const uint64_t* ends
        const uint32_t* firsts
        const uint8_t* roles
        const uint32_t* trims
        const uint8_t* character_starts

    cdef cppclass framed_turns(flat_turns):
        const uint32_t* prefixes
        const uint32_t* suffixes

    ctypedef struct unit_span:
        uint64_t begin
        uint64_t end

    ctypedef struct merged_arrays:
        uint64_t* ends
        uint32_t* firsts
        uint32_t* trims
        uint32_t* skips

    ctypedef struct merge_state:
        uint64_t count
        uint64_t last_present
        uint64_t widest

    ctypedef struct recall_frame:
        uint64_t prefix
        uint64_t separator
        uint64_t suffix

    bint is_result(uint32_t role) noexcept
    uint64_t unit_anchor(
        uint32_t role, bint grouped, uint64_t last_of_group, bint group_has_assistant,
        uint64_t last_assistant) noexcept
    uint32_t unit_first_of[F](const F& firsts, uint64_t turn, uint64_t anchor) noexcept
    uint64_t push_unit(uint32_t* starts, uint64_t count, uint32_t unit_first) noexcept
    unit_span unit_of[T](const T& turns, uint64_t turn) noexcept
    uint64_t low_mark(uint64_t budget, double low_water) noexcept
    kalos_history_plan plan_history[T](
        const T& turns, const kalos_plan_request& request, kalos_plan_resume* resume) noexcept
    uint32_t fate_of[T](
        const T& turns, const kalos_plan_request& request, const kalos_history_plan& plan,
        uint64_t turn) noexcept
    uint64_t repeated_role[T](
        const T& turns, uint64_t begin, uint64_t end, uint64_t* before) noexcept
    void merge_runs[S](
        const S& source, uint64_t until, merged_arrays out, merge_state* state) noexcept
    uint64_t select_passages(
        const uint64_t* lengths, const uint8_t* in_history, const uint32_t* same_as, uint64_t count,
        recall_frame frame, uint64_t budget, uint8_t* verdicts) noexcept


# A history that counts how often its sums are read: the planner's work, without a clock.
cdef extern from *:
    """
    struct counted_turns : kalos::flat_turns {
      mutable uint64_t probes = 0;
      uint64_t sum_before(uint64_t t) const { ++probes; return flat_turns::sum_before(t); }
    };
    """
    cdef cppclass counted_turns(flat_turns):
        uint64_t probes


cdef class WalkState:
    cdef kalos_plan_resume state


cdef class FlatHistory:
    cdef counted_turns turns
    cdef object owners       # the arrays that `turns` points into
    cdef uint32_t view       # KALOS_PLAN_GROUPS where units are groups


cdef class HistoryPlan:
    cdef counted_turns turns  # the first `num_turns` of the history
    cdef FlatHistory history  # keeps the arrays alive
    cdef kalos_plan_request request
    cdef kalos_history_plan plan
    cdef readonly uint64_t probes
