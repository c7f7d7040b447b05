"""The planner over flat arrays, for Python.

The assembler calls the functions of ``kalos_plan.h`` over the store's own tables; what stands here
binds the same templates to numpy arrays, so that a history can be planned without a store and every
rule checked against a slow model.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kalos_ctx._layout cimport (
    KALOS_ROLE_ASSISTANT, KALOS_ROLE_DEVELOPER, KALOS_ROLE_FUNCTION, KALOS_ROLE_SYSTEM,
    KALOS_ROLE_TOOL, KALOS_ROLE_USER,
)

import numpy as np

from kalos_ctx.errors import InvalidArgument

ROLE_CODES = {
    "system": KALOS_ROLE_SYSTEM,
    "developer": KALOS_ROLE_DEVELOPER,
    "user": KALOS_ROLE_USER,
    "assistant": KALOS_ROLE_ASSISTANT,
    "tool": KALOS_ROLE_TOOL,
    "function": KALOS_ROLE_FUNCTION,
}
OUTCOMES = {KALOS_PLAN_OK: "ok", KALOS_PLAN_EMPTY: "empty", KALOS_PLAN_OVERFLOW: "overflow"}
FATES = {
    KALOS_FATE_KEPT: "kept",
    KALOS_FATE_CUT: "cut",
    KALOS_FATE_BUDGET: "budget",
    KALOS_FATE_GROUP: "group",
    KALOS_FATE_ABSENT: "orphan",
    KALOS_FATE_START_ON: "start_on",
    KALOS_FATE_END_ON: "end_on",
    KALOS_FATE_OVERFLOW: "overflow",
}
VERDICTS = {
    KALOS_PASSAGE_TAKEN: "taken",
    KALOS_PASSAGE_BUDGET: "recall_budget",
    KALOS_PASSAGE_DUPLICATE: "duplicate",
}
cdef uint64_t TOKENS_MAX = <uint64_t>1 << 53  # above, the double of low_mark is not exact


cdef object as_array(object values, object dtype, str name, Py_ssize_t size):
    """A one-dimensional array of `size` elements; None stays None."""
    if values is None:
        return None
    array = np.ascontiguousarray(values, dtype=dtype)
    if array.ndim != 1 or array.shape[0] != size:
        raise InvalidArgument(f"{name} must have shape ({size},) (got {array.shape})")
    return array


cdef const uint8_t* bytes_of(object array):
    """Address of a kept array's elements, or NULL for None and for no elements."""
    cdef const uint8_t[::1] view
    if array is None or array.size == 0:
        return NULL
    view = array.view(np.uint8)
    return &view[0]


cdef uint64_t checked_tokens(object value, str name) except? 0:
    if not 0 <= value <= TOKENS_MAX:
        raise InvalidArgument(f"{name} must be between 0 and {TOKENS_MAX} (got {value})")
    return value


cdef class WalkState:
    """Where the stable boundary's walk stood, to go on when turns are appended.

    For one session, one thread and an append-only history; make a new one after a rollback.
    """

    @property
    def moves(self):
        """The last two moves as (boundary, first turn not counted), newest first."""
        return (
            (self.state.mark, self.state.next),
            (self.state.mark_before, self.state.next_before),
        )


cdef class HistoryPlan:
    """What of a history is kept; made by `FlatHistory.plan`."""

    def __init__(self):
        raise TypeError("a HistoryPlan is made by FlatHistory.plan()")

    @property
    def begin(self):
        """First turn of the kept run."""
        return self.plan.begin

    @property
    def end(self):
        """First turn behind the kept run."""
        return self.plan.end

    @property
    def offset(self):
        """Tokens that turn `begin` lost at its beginning."""
        return self.plan.offset

    @property
    def call(self):
        """Turn that is kept whole before the run because the run begins in its results, or None."""
        return None if self.plan.call == KALOS_PLAN_NONE else self.plan.call

    @property
    def num_tokens(self):
        """Length of what is kept, in tokens."""
        return self.plan.tokens

    @property
    def outcome(self):
        """``ok``, ``empty`` or ``overflow``."""
        return OUTCOMES[self.plan.code]

    def fate(self, uint64_t turn):
        """What becomes of a turn: ``kept``, ``cut``, or why it is dropped."""
        if turn >= self.turns.count:
            raise InvalidArgument(f"turn must be below {self.turns.count} (got {turn})")
        return FATES[fate_of(self.turns, self.request, self.plan, turn)]

    def repeated_role(self):
        """The first two kept turns in a row that have one role, or None."""
        cdef uint64_t before = 0
        cdef uint64_t turn = repeated_role(
            self.turns, self.plan.begin, self.plan.end, &before)
        return None if turn == KALOS_PLAN_NONE else (before, turn)


cdef class FlatHistory:
    """A session's turns in flat arrays.

    Parameters
    ----------
    lengths : array of int, shape (T,)
        Tokens that each turn adds to the history, less its `trims`; 0 for an orphan.
    roles : array of int, shape (T,)
        Values of `ROLE_CODES`.
    unit_first : array of int, shape (T,), optional
        From `unit_firsts`. Without it each turn is a unit, together with those that trim it.
    trims : array of int, shape (T,), optional
        Tokens that the turn before loses at its end. A trimming turn shares its unit.
    character_starts : array of bool, shape (sum of lengths,), optional
        False where a token begins inside a character.

    Raises
    ------
    InvalidArgument
        A shape or a value is wrong.
    """

    def __init__(
        self, lengths, roles, *, unit_first=None, trims=None, character_starts=None
    ):
        cdef Py_ssize_t count = len(lengths)
        ends = np.cumsum(as_array(lengths, np.uint64, "lengths", count), dtype=np.uint64)
        total = ends[count - 1] if count else 0
        cuts = as_array(trims, np.uint32, "trims", count)
        firsts = as_array(unit_first, np.uint32, "unit_first", count)
        if firsts is None and cuts is not None:
            # Turns that share a block cannot be parted: only the first of them opens a unit.
            opens = np.where(cuts == 0, np.arange(count, dtype=np.uint32), np.uint32(0))
            firsts = np.maximum.accumulate(opens)
        self.owners = owners = (
            ends,
            firsts,
            as_array(roles, np.uint8, "roles", count),
            cuts,
            as_array(character_starts, np.uint8, "character_starts", total),
        )
        if total > TOKENS_MAX:
            raise InvalidArgument(f"lengths must add up to at most {TOKENS_MAX}")
        if count and owners[2].max() > KALOS_ROLE_FUNCTION:
            raise InvalidArgument(f"roles must be at most {KALOS_ROLE_FUNCTION}")
        self.view = KALOS_PLAN_GROUPS if unit_first is not None else 0
        self.turns.widest = 1
        if owners[1] is not None:
            spans = np.arange(count, dtype=np.int64) - owners[1] + 1
            if count and spans.min() < 1:
                raise InvalidArgument("unit_first must not lie behind its turn")
            self.turns.widest = spans.max() if count else 1
        self.turns.count = count
        self.turns.ends = <const uint64_t*>bytes_of(owners[0])
        self.turns.firsts = <const uint32_t*>bytes_of(owners[1])
        self.turns.roles = bytes_of(owners[2])
        self.turns.trims = <const uint32_t*>bytes_of(owners[3])
        self.turns.character_starts = bytes_of(owners[4])

    def plan(
        self, budget, *, double low_water=0.5, bint stable=True, bint partial=False,
        uint32_t start_on=0, uint32_t end_on=0, num_turns=None, settled=None, resume=None,
    ):
        """Plan the history.

        Parameters
        ----------
        budget : int
            Tokens the history may take.
        low_water, stable, partial : float, bool, bool
            As in `Policy`: low_water, stable_prefix, allow_partial.
        start_on, end_on : int
            One bit per role code; 0 allows any.
        num_turns : int, optional
            Plan as if only the first `num_turns` turns existed. Not with `character_starts`, which
            speak of the whole history.
        settled : int, optional
            Turns before it have their final length; `resume` remembers no later ones.
        resume : WalkState, optional
            Read and moved on.

        Returns
        -------
        HistoryPlan

        Raises
        ------
        InvalidArgument
            A number is out of range.
        """
        cdef HistoryPlan made = HistoryPlan.__new__(HistoryPlan)
        cdef WalkState walk = resume
        cdef kalos_plan_resume* state = NULL
        cdef uint64_t count = self.turns.count if num_turns is None else num_turns
        if count > self.turns.count:
            raise InvalidArgument(f"num_turns must be at most {self.turns.count} (got {count})")
        if count != self.turns.count and self.turns.character_starts != NULL:
            raise InvalidArgument("num_turns must be None where character_starts were given")
        if not 0 < low_water <= 1:
            raise InvalidArgument(f"low_water must be in (0, 1] (got {low_water})")
        made.history = self
        made.turns = self.turns
        made.turns.count = count
        made.turns.probes = 0
        made.request.budget = checked_tokens(budget, "budget")
        made.request.low = low_mark(made.request.budget, low_water)
        made.request.settled = count if settled is None else settled
        made.request.flags = self.view
        made.request.flags |= KALOS_PLAN_STABLE if stable else 0
        made.request.flags |= KALOS_PLAN_PARTIAL if partial else 0
        made.request.start_on = start_on
        made.request.end_on = end_on
        if walk is not None:
            state = &walk.state
        made.plan = plan_history(made.turns, made.request, state)
        made.probes = made.turns.probes
        return made


def unit_firsts(roles, groups):
    """Apply the rule of units turn by turn, as a store does when turns are appended.

    Parameters
    ----------
    roles : sequence of int, length T
        Values of `ROLE_CODES`.
    groups : sequence, length T
        A hashable per turn, None for no group.

    Returns
    -------
    tuple of uint32 array and bool array, both of shape (T,)
        The first turn of the unit that each turn closed, and which turns are orphans.
    """
    cdef Py_ssize_t count = len(roles)
    cdef uint32_t[::1] firsts = np.zeros(count, np.uint32)
    cdef uint8_t[::1] orphans = np.zeros(count, np.uint8)
    cdef uint64_t last_assistant = KALOS_PLAN_NONE
    cdef uint64_t turn, anchor
    cdef uint32_t role
    members = {}  # group: (newest turn that is no orphan, whether an assistant turn is in it)
    for turn in range(<uint64_t>count):
        role = roles[turn]
        group = groups[turn]
        newest, has_assistant = members.get(group, (KALOS_PLAN_NONE, False))
        anchor = unit_anchor(role, group is not None, newest, has_assistant, last_assistant)
        orphans[turn] = is_result(role) and anchor == KALOS_PLAN_NONE
        firsts[turn] = turn
        if anchor != KALOS_PLAN_NONE:
            firsts[turn] = unit_first_of(&firsts[0], turn, anchor)
        if group is not None and not orphans[turn]:
            members[group] = (turn, has_assistant or role == KALOS_ROLE_ASSISTANT)
        if role == KALOS_ROLE_ASSISTANT:
            last_assistant = turn
    return np.asarray(firsts), np.asarray(orphans).view(np.bool_)


def unit_starts(unit_first):
    """First turns of the units of a history, ascending.

    Parameters
    ----------
    unit_first : array of int, shape (T,)

    Returns
    -------
    uint32 array of shape (units,)
    """
    cdef const uint32_t[::1] firsts = np.ascontiguousarray(unit_first, dtype=np.uint32)
    cdef uint32_t[::1] starts = np.zeros(firsts.shape[0] + 1, np.uint32)
    cdef uint64_t count = 0
    cdef Py_ssize_t turn
    for turn in range(firsts.shape[0]):
        count = push_unit(&starts[0], count, firsts[turn])
    return np.asarray(starts)[:count].copy()


def merge_history(lengths, roles, prefixes, suffixes, *, unit_first=None, trims=None, stops=()):
    """Merge turns in a row of one role.

    Parameters
    ----------
    lengths, roles, unit_first, trims : arrays
        As for `FlatHistory`.
    prefixes, suffixes : arrays of int, shape (T,)
        Framing tokens before and behind each turn's content.
    stops : sequence of int
        Turns before which the work is interrupted and taken up again.

    Returns
    -------
    tuple of four arrays of shape (T,)
        lengths, unit_first and trims for a `FlatHistory`, and the tokens that each turn loses at
        its beginning.
    """
    cdef FlatHistory source = FlatHistory(lengths, roles, unit_first=unit_first, trims=trims)
    cdef Py_ssize_t count = source.turns.count
    cdef framed_turns framed
    cdef merge_state state
    cdef uint64_t[::1] ends = np.zeros(count + 1, np.uint64)
    cdef uint32_t[:, ::1] out = np.zeros((3, count + 1), np.uint32)
    cdef uint64_t stop
    kept = [as_array(prefixes, np.uint32, "prefixes", count),
            as_array(suffixes, np.uint32, "suffixes", count)]
    framed.count = count
    framed.widest = source.turns.widest
    framed.ends = source.turns.ends
    framed.firsts = source.turns.firsts
    framed.roles = source.turns.roles
    framed.trims = source.turns.trims
    framed.character_starts = NULL
    framed.prefixes = <const uint32_t*>bytes_of(kept[0])
    framed.suffixes = <const uint32_t*>bytes_of(kept[1])
    state.count = 0
    state.widest = 1
    state.last_present = KALOS_PLAN_NONE
    cdef merged_arrays arrays = merged_arrays(&ends[0], &out[0, 0], &out[1, 0], &out[2, 0])
    for stop in (*stops, count):
        merge_runs(framed, stop, arrays, &state)
    firsts, trimmed, skips = np.asarray(out)[:, :count]
    return np.diff(np.asarray(ends)[:count], prepend=np.uint64(0)), firsts, trimmed, skips


def select_passages_flat(
    lengths, in_history, same_as, *, budget, uint64_t prefix=0, uint64_t separator=0,
    uint64_t suffix=0,
):
    """Take recalled passages in order of score while they fit.

    Parameters
    ----------
    lengths : array of int, shape (K,)
    in_history : array of bool, shape (K,)
        Which passages stand in the history already.
    same_as : array of int, shape (K,)
        The first passage with the same token IDs, itself where there is none.
    budget : int
        Tokens that the passages and their framing may take.
    prefix, separator, suffix : int
        Framing before, between and behind the passages, in tokens.

    Returns
    -------
    tuple of list of str and int
        ``taken``, ``recall_budget`` or ``duplicate`` per passage, and the tokens used.
    """
    cdef Py_ssize_t count = len(lengths)
    cdef uint8_t[::1] verdicts = np.zeros(count + 1, np.uint8)
    owners = (as_array(lengths, np.uint64, "lengths", count),
              as_array(in_history, np.uint8, "in_history", count),
              as_array(same_as, np.uint32, "same_as", count))
    if (owners[2] > np.arange(count)).any():
        raise InvalidArgument("same_as must not lie behind its passage")
    cdef recall_frame frame = recall_frame(prefix, separator, suffix)
    cdef uint64_t used = select_passages(
        <const uint64_t*>bytes_of(owners[0]), bytes_of(owners[1]),
        <const uint32_t*>bytes_of(owners[2]), count, frame, checked_tokens(budget, "budget"),
        &verdicts[0])
    return [VERDICTS[verdicts[i]] for i in range(count)], used


def low_water_mark(budget, double low_water):
    """Return `low_water` times `budget` in tokens, rounded down, as every backend computes it."""
    return low_mark(checked_tokens(budget, "budget"), low_water)
