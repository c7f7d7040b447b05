"""The compiled planner against a plain one, and the cases from the field at the planner's level."""

import math
import random

import numpy as np
import pytest
from helpers import plain_planner
from helpers.plain_planner import Turn
from hypothesis import given
from hypothesis import strategies as st

from kalos_ctx._planner import (
    ROLE_CODES,
    FlatHistory,
    WalkState,
    low_water_mark,
    merge_history,
    select_passages_flat,
    unit_firsts,
    unit_starts,
)
from kalos_ctx.errors import InvalidArgument
from kalos_ctx.planner import divide_budget, role_mask

ROLES = ("system", "user", "assistant", "tool", "function")


def mark_trims(turns, wanted):
    """Let results that directly follow one of their own unit share its block."""
    _, orphans = plain_planner.links_and_orphans(turns)
    for now in range(1, len(turns)):
        before, turn = turns[now - 1], turns[now]
        together = before.role == turn.role == "tool" and before.group == turn.group
        if together and not {now - 1, now} & orphans:
            turn.trim = min(wanted[now], turn.length - 1, before.length - 1)
    return turns


@st.composite
def histories(draw, max_size=14):
    row = st.builds(
        Turn,
        st.sampled_from(ROLES),
        st.integers(1, 12),
        st.none() | st.integers(0, 2),
        st.just(0),
        st.lists(st.booleans(), min_size=12, max_size=12) | st.just([]),
    )
    turns = draw(st.lists(row, max_size=max_size))
    trims = st.lists(st.integers(0, 2), min_size=len(turns), max_size=len(turns))
    return mark_trims(turns, draw(trims))


def flatten(turns, keep_groups=True, characters=True):
    """Return a FlatHistory of plain turns."""
    roles = [ROLE_CODES[turn.role] for turn in turns]
    firsts, orphans = unit_firsts(roles, [turn.group for turn in turns])
    present = [t for t in range(len(turns)) if not orphans[t]]
    starts = [
        turns[t].begins_character(index) for t, index in plain_planner.tokens_of(turns, present)
    ]
    return FlatHistory(
        [0 if orphans[t] else turn.length - turn.trim for t, turn in enumerate(turns)],
        roles,
        unit_first=firsts if keep_groups else None,
        trims=[turn.trim for turn in turns],
        character_starts=starts if characters else None,
    )


def expand(turns, made):
    """Return the tokens that a compiled plan keeps, as pairs of turn and index."""
    _, orphans = plain_planner.links_and_orphans(turns)
    run = [t for t in range(made.begin, made.end) if t not in orphans]
    tokens = plain_planner.tokens_of(turns, run)[made.offset :]
    assert not tokens or tokens[0] == (made.begin, made.offset)
    if made.call is not None:
        behind = [t for t in range(made.call, made.end) if t not in orphans]
        whole = plain_planner.tokens_of(turns, behind)
        call = [token for token in whole if token[0] == made.call]
        assert whole[len(call)] != tokens[0]  # something lies between, else there is no cut
        tokens = call + tokens
    return tokens


def mask(*roles):
    return role_mask("start_on", roles) if roles else 0


options = st.fixed_dictionaries(
    {
        "low_water": st.sampled_from([0.01, 0.29, 0.5, 0.7, 1.0]) | st.floats(0.01, 1.0),
        "stable": st.booleans(),
        "partial": st.booleans(),
    }
)
role_sets = st.lists(st.sampled_from(ROLES), max_size=2, unique=True)


@given(histories(), st.integers(0, 60), options, st.booleans(), st.tuples(role_sets, role_sets))
def test_plan_of_any_history_equals_the_plain_planner(turns, budget, how, groups, ends):
    start, end = ends
    made = flatten(turns, groups).plan(budget, start_on=mask(*start), end_on=mask(*end), **how)
    kept, outcome = plain_planner.plan(
        turns, budget, keep_groups=groups, start_on=start, end_on=end, **how
    )
    assert expand(turns, made) == kept
    assert (made.outcome, made.num_tokens) == (outcome, len(kept))


def random_history(rng):
    """Return up to 16 short turns, often grouped, orphaned, in shared blocks or cut characters."""
    turns = [
        Turn(
            rng.choice(ROLES[1:4]) if rng.random() < 0.9 else rng.choice(ROLES),
            rng.randint(1, 6),
            rng.randint(0, 2) if rng.random() < 0.4 else None,
            starts=[rng.random() < 0.6 for _ in range(6)] if rng.random() < 0.5 else [],
        )
        for _ in range(rng.randint(0, 16))
    ]
    return mark_trims(turns, [rng.choice((0, 0, 1, 2)) for _ in turns])


def random_roles(rng):
    return rng.sample(ROLES, rng.choice((0, 0, 0, 1, 2)))


@pytest.mark.parametrize("seed", range(4))
def test_plan_of_many_short_histories_equals_the_plain_planner(seed):
    """Short turns and small budgets, so that sums often meet a limit exactly."""
    rng = random.Random(seed)
    for _ in range(2000):
        turns, groups = random_history(rng), rng.random() < 0.8
        budget = rng.randint(0, sum(turn.length for turn in turns) + 1)
        how = {
            "low_water": rng.choice((0.01, 0.3, 0.5, 0.5, 0.9, 1.0)),
            "stable": rng.random() < 0.6,
            "partial": rng.random() < 0.5,
        }
        start, end = random_roles(rng), random_roles(rng)
        made = flatten(turns, groups).plan(budget, start_on=mask(*start), end_on=mask(*end), **how)
        kept, outcome = plain_planner.plan(
            turns, budget, keep_groups=groups, start_on=start, end_on=end, **how
        )
        assert (expand(turns, made), made.outcome) == (kept, outcome)
        assert made.num_tokens == len(kept)


@pytest.mark.parametrize("partial", [False, True])
def test_resume_over_many_short_histories_equals_plans_from_scratch(partial):
    rng = random.Random(partial)
    for _ in range(800):
        turns, walk, live = random_history(rng), WalkState(), 0
        budget = rng.randint(1, 20)
        for size in sorted(rng.sample(range(len(turns) + 1), min(len(turns), 6))):
            live = max(live, size - rng.choice((0, 0, 1, 3)))
            provisional = [
                Turn(turn.role, turn.length + (3 if t >= live else 0), turn.group, turn.trim)
                for t, turn in enumerate(turns[:size])
            ]
            history = flatten(provisional)
            went_on = history.plan(budget, settled=live, resume=walk, partial=partial)
            scratch = history.plan(budget, partial=partial)
            assert (went_on.begin, went_on.offset) == (scratch.begin, scratch.offset)


@given(histories(max_size=60), st.integers(1, 90), options)
def test_plan_of_a_long_history_equals_the_plain_planner(turns, budget, how):
    made = flatten(turns).plan(budget, **how)
    assert expand(turns, made) == plain_planner.plan(turns, budget, **how)[0]


@given(histories(), st.integers(0, 60), options, role_sets, role_sets)
def test_plan_is_a_bounded_suffix_of_consecutive_whole_units(turns, budget, how, start, end):
    made = flatten(turns).plan(budget, start_on=mask(*start), end_on=mask(*end), **how)
    tokens = expand(turns, made)
    assert len(tokens) <= budget
    if not how["partial"]:
        units, orphans = plain_planner.find_units(turns)
        edges = {unit[0] for unit in units} | {len(turns), made.end}
        assert made.begin in edges
        assert not (orphans & {turn for turn, _ in tokens})
    if not end and tokens:
        assert tokens[-1][0] == max(t for unit in plain_planner.find_units(turns)[0] for t in unit)


@given(histories(max_size=40), st.integers(1, 60), options, st.data())
def test_resume_after_any_appends_equals_a_plan_from_scratch(turns, budget, how, data):
    sizes = sorted(data.draw(st.lists(st.integers(0, len(turns)), max_size=12)))
    walk, live = WalkState(), 0
    for size in sizes:
        live = data.draw(st.integers(live, size))  # turns before it have their final length
        provisional = [
            Turn(turn.role, turn.length + (3 if t >= live else 0), turn.group, turn.trim)
            for t, turn in enumerate(turns[:size])
        ]
        history = flatten(provisional)
        went_on = history.plan(budget, settled=live, resume=walk, **how)
        scratch = history.plan(budget, **how)
        assert (went_on.begin, went_on.offset) == (scratch.begin, scratch.offset)


def test_resume_for_another_budget_or_view_of_the_history_starts_again():
    turns = [Turn("assistant" if t % 3 else "user", 5, t // 4) for t in range(60)]
    walk = WalkState()
    for groups, budget, water in [
        (True, 40, 0.5),
        (False, 40, 0.5),
        (True, 41, 0.5),
        (True, 41, 0.3),
    ]:
        history = flatten(turns, groups)
        went_on = history.plan(budget, low_water=water, resume=walk)
        assert went_on.begin == history.plan(budget, low_water=water).begin
        assert walk.moves[0][1] > 40


@given(st.lists(histories(max_size=30), min_size=2, max_size=4), st.integers(1, 40), options)
def test_resume_of_another_session_stays_within_the_bounds(sessions, budget, how):
    walk = WalkState()
    for turns in sessions:
        made = flatten(turns).plan(budget, resume=walk, **how)
        assert len(expand(turns, made)) == made.num_tokens <= budget


@given(histories(max_size=30))
def test_units_of_every_prefix_equal_the_stretches_between_positions(turns):
    roles = [ROLE_CODES[turn.role] for turn in turns]
    firsts, orphans = unit_firsts(roles, [turn.group for turn in turns])
    for size in range(len(turns) + 1):
        units, lost = plain_planner.find_units(turns[:size])
        starts = [first for first in unit_starts(firsts[:size]).tolist() if not orphans[first]]
        assert starts == [unit[0] for unit in units]
        assert set(np.flatnonzero(orphans[:size])) == lost


@given(histories(), st.integers(0, 60), options, role_sets, role_sets)
def test_fate_of_every_turn_agrees_with_what_is_kept(turns, budget, how, start, end):
    made = flatten(turns).plan(budget, start_on=mask(*start), end_on=mask(*end), **how)
    kept = expand(turns, made)
    _, orphans = plain_planner.links_and_orphans(turns)
    unfiltered = {t for t, _ in expand(turns, flatten(turns).plan(budget, **how))}
    for t in range(len(turns)):
        fate, count = made.fate(t), sum(turn == t for turn, _ in kept)
        assert (fate == "orphan") == (t in orphans)
        assert (fate in ("kept", "cut")) == (count > 0)
        # In a cut unit the turns that the cut took whole go with the unit.
        if fate in ("start_on", "end_on") and not how["partial"]:
            assert t in unfiltered
        if fate in ("budget", "group", "overflow"):
            assert t not in unfiltered


# ---- Named decisions ---------------------------------------------------------------------------


def chat(*lengths, roles="ua"):
    names = {"u": "user", "a": "assistant", "s": "system", "r": "tool"}
    return [Turn(names[roles[t % len(roles)]], n) for t, n in enumerate(lengths)]


def kept_turns(turns, budget, **how):
    return sorted({turn for turn, _ in expand(turns, flatten(turns).plan(budget, **how))})


def test_partial_sliding_keeps_exactly_the_last_tokens():
    turns = chat(4, 4, 4)
    made = flatten(turns).plan(6, stable=False, partial=True)
    assert expand(turns, made) == [(1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert [made.fate(t) for t in range(3)] == ["budget", "cut", "kept"]


def test_partial_cut_moves_to_the_next_character():
    turns = [Turn("user", 6, starts=[True, True, False, False, True, True])]
    assert expand(turns, flatten(turns).plan(4, stable=False, partial=True)) == [(0, 4), (0, 5)]


def test_partial_cut_inside_a_group_keeps_the_call_and_cuts_the_result():
    turns = [Turn("user", 5), Turn("assistant", 3, 1), Turn("tool", 10, 1), Turn("user", 2)]
    made = flatten(turns).plan(9, stable=False, partial=True)
    assert expand(turns, made)[:3] == [(1, 0), (1, 1), (1, 2)]
    assert expand(turns, made)[3:] == [(2, 6), (2, 7), (2, 8), (2, 9), (3, 0), (3, 1)]
    assert [made.fate(t) for t in range(4)] == ["budget", "kept", "cut", "kept"]


def test_partial_cut_that_leaves_no_result_drops_the_call_too():
    turns = [Turn("assistant", 3, 1), Turn("tool", 10, 1), Turn("user", 2)]
    assert {t for t, _ in expand(turns, flatten(turns).plan(5, stable=False, partial=True))} == {2}


def test_partial_cut_in_a_unit_of_two_calls_keeps_the_nearer_call():
    turns = [Turn(role, 4, 7) for role in ("assistant", "tool", "assistant", "tool")]
    made = flatten(turns).plan(7, stable=False, partial=True)
    assert (made.call, made.begin, made.offset, made.num_tokens) == (2, 3, 1, 7)


def test_newest_unit_that_does_not_fit_is_an_overflow_and_says_so():
    turns = [*chat(3, 3), Turn("user", 30)]
    for stable in (True, False):
        made = flatten(turns).plan(10, stable=stable)
        assert (made.outcome, made.num_tokens) == ("overflow", 0)
        assert [made.fate(t) for t in range(3)] == ["budget", "budget", "overflow"]
    assert flatten(turns).plan(10, partial=True).num_tokens == 10


def test_orphan_behind_the_newest_turn_changes_nothing():
    turns = [*chat(3, 3), Turn("tool", 50, group=9)]
    made = flatten(turns).plan(6)
    assert (made.begin, made.end, made.outcome) == (0, 2, "ok")
    assert made.fate(2) == "orphan"


def test_low_water_is_the_rounded_down_double_product():
    assert low_water_mark(100, 0.29) == math.floor(0.29 * 100) == 28
    assert low_water_mark(2**53, 1.0) == 2**53
    assert low_water_mark(7, 0.1) == 0


def test_repeated_role_names_both_turns_and_lets_results_follow_results():
    turns = [
        *chat(1, 1),
        *chat(1, 1, roles="ur"),
        Turn("tool", 1),
        Turn("user", 1),
        Turn("user", 1),
    ]
    assert flatten(turns).plan(100).repeated_role() == (5, 6)
    assert flatten(turns[:6]).plan(100).repeated_role() is None
    assert flatten(turns).plan(1, stable=False).repeated_role() is None


# ---- Merged runs and recalled passages ---------------------------------------------------------


def merged(turns, prefixes, suffixes, stops=()):
    roles = [ROLE_CODES[turn.role] for turn in turns]
    firsts, orphans = unit_firsts(roles, [turn.group for turn in turns])
    lengths = [0 if orphans[t] else turn.length - turn.trim for t, turn in enumerate(turns)]
    trims = [turn.trim for turn in turns]
    return roles, merge_history(
        lengths, roles, prefixes, suffixes, unit_first=firsts, trims=trims, stops=stops
    )


@given(histories(), st.integers(0, 80), st.data())
def test_merged_history_holds_the_tokens_of_the_plain_merge(turns, budget, data):
    for turn in turns:
        turn.length += 4  # room for framing of up to two tokens on either side
    framing = st.lists(st.integers(0, 2), min_size=len(turns), max_size=len(turns))
    prefixes, suffixes = data.draw(framing), data.draw(framing)
    whole = plain_planner.merge(turns, prefixes, suffixes)
    stops = sorted(data.draw(st.lists(st.integers(0, len(turns)), max_size=4)))
    roles, (lengths, firsts, trims, skips) = merged(turns, prefixes, suffixes, stops)
    assert lengths.sum() == len(whole)
    history = FlatHistory(lengths, roles, unit_first=firsts, trims=trims)
    made = history.plan(budget, stable=False)
    assert made.num_tokens <= budget
    kept = whole[len(whole) - made.num_tokens :]
    assert not kept or kept[0] == (made.begin, 0)
    assert not kept or skips[made.begin] == 0
    cut = history.plan(budget, stable=False, partial=True)
    if cut.num_tokens and cut.call is None:
        first = (cut.begin, cut.offset + int(skips[cut.begin]))
        assert first == whole[len(whole) - cut.num_tokens]


def test_cut_in_a_merged_run_finds_the_turn_across_an_orphan():
    turns = [Turn("user", 8), Turn("tool", 5, group=9), Turn("user", 8)]
    roles, (lengths, firsts, trims, skips) = merged(turns, [2] * 3, [3] * 3)
    assert (lengths.tolist(), skips.tolist()) == ([8, 0, 3], [0, 0, 2])
    history = FlatHistory(lengths, roles, unit_first=firsts, trims=trims)
    # Five tokens of the first turn, then six of the third without its prefix.
    made = [history.plan(keep, stable=False, partial=True) for keep in (7, 6, 4)]
    assert [(plan.begin, plan.offset) for plan in made] == [(0, 4), (2, 0), (2, 2)]


def test_b39_merge_makes_two_user_turns_one_with_one_header():
    roles, (lengths, firsts, trims, skips) = merged(chat(6, 7, 5, roles="uua"), [2] * 3, [1] * 3)
    assert lengths.tolist() == [6, 4, 5]
    assert firsts.tolist() == [0, 0, 2]
    assert (trims.tolist(), skips.tolist()) == ([0, 1, 0], [0, 2, 0])
    history = FlatHistory(lengths, roles, unit_first=firsts, trims=trims)
    assert history.plan(14, stable=False).begin == 2  # the run goes as one turn
    assert history.plan(15, stable=False).begin == 0


@st.composite
def passages(draw):
    lengths = draw(st.lists(st.integers(1, 30), max_size=10))
    same_as = []
    for now in range(len(lengths)):
        twin = draw(st.integers(0, now))
        same_as.append(same_as[twin] if twin < now and lengths[twin] == lengths[now] else now)
    in_history = [draw(st.booleans()) if same == now else False for now, same in enumerate(same_as)]
    in_history = [in_history[same] for same in same_as]
    return lengths, in_history, same_as


@given(passages(), st.integers(0, 90), st.tuples(*[st.integers(0, 5)] * 3))
def test_passages_taken_equal_the_plain_selection_and_fit(found, budget, frame):
    prefix, separator, suffix = frame
    verdicts, used = select_passages_flat(
        *found, budget=budget, prefix=prefix, separator=separator, suffix=suffix
    )
    assert verdicts == plain_planner.select(*found, budget, frame)
    taken = [length for length, what in zip(found[0], verdicts, strict=True) if what == "taken"]
    framing = prefix + suffix + separator * (len(taken) - 1) if taken else 0
    assert used == sum(taken) + framing <= budget


def test_passage_that_does_not_fit_is_passed_over_and_the_next_is_tried():
    verdicts, used = select_passages_flat([50, 6, 6, 5], [0] * 4, [0, 1, 1, 3], budget=11)
    assert (verdicts, used) == (["recall_budget", "taken", "duplicate", "taken"], 11)


# ---- Cases from the field ----------------------------------------------------------------------


def test_b01_result_whose_call_is_cut_goes_because_its_call_went():
    turns = [Turn("user", 1), Turn("assistant", 3, 1), Turn("tool", 1, 1), *chat(1, 1)]
    made = flatten(turns).plan(3, stable=False)
    assert (made.begin, made.end) == (3, 5)
    assert [made.fate(t) for t in range(5)] == ["budget", "budget", "group", "kept", "kept"]


@given(histories(max_size=30), st.integers(0, 120), options)
def test_b09_kept_turns_are_consecutive(turns, budget, how):
    made = flatten(turns).plan(budget, **(how | {"partial": False}))
    kept = {turn for turn, _ in expand(turns, made)}
    _, orphans = plain_planner.links_and_orphans(turns)
    assert kept == {t for t in range(made.begin, made.end) if t not in orphans}


def test_b10_partial_keeps_the_tail_of_the_turn_that_crosses_the_limit():
    turns = chat(9)
    made = flatten(turns).plan(4, stable=False, partial=True)
    assert [index for _, index in expand(turns, made)] == [5, 6, 7, 8]
    assert flatten(turns).plan(4, stable=False).outcome == "overflow"


def test_b13_one_token_over_cuts_to_the_documented_mark_or_the_largest_suffix():
    turns = chat(*[10] * 10)
    assert flatten(turns).plan(100).num_tokens == 100
    turns[-1].length += 1
    sliding, stable = flatten(turns).plan(100, stable=False), flatten(turns).plan(100)
    assert (sliding.begin, sliding.num_tokens) == (1, 91)
    assert (stable.begin, stable.num_tokens) == (6, 41)
    assert stable.num_tokens <= low_water_mark(100, 0.5) < stable.num_tokens + 10


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=40), st.booleans())
def test_b14_window_leaves_the_reserve_and_drops_whole_pairs_oldest_first(pairs, stable):
    system = 3
    turns = [
        Turn(role, n, pair)
        for pair, both in enumerate(pairs)
        for role, n in zip(("user", "assistant"), both, strict=True)
    ]
    budget = divide_budget(32, 8, {"system": system}, recalls=False, recall_tokens=None)
    made = flatten(turns).plan(budget.history, stable=stable)
    assert system + made.num_tokens <= 24
    assert made.begin % 2 == 0
    assert made.end == len(turns)


def test_b19_no_budget_keeps_nothing_and_a_negative_one_is_refused():
    turns = chat(5, 5)
    made = flatten(turns).plan(0)
    assert (made.num_tokens, made.outcome, made.fate(1)) == (0, "empty", "budget")
    with pytest.raises(InvalidArgument, match=r"budget must be between 0 and \d+ \(got -1\)"):
        flatten(turns).plan(-1)
    assert flatten(turns).plan(2**53).num_tokens == 10


def test_b20_limit_that_parts_a_call_from_its_output_keeps_neither():
    turns = [Turn("user", 1), Turn("assistant", 1, "c"), Turn("tool", 1, "c"), Turn("assistant", 1)]
    assert kept_turns(turns, 2, stable=False) == [3]
    assert kept_turns(turns, 3, stable=False) == [1, 2, 3]


def test_b21_result_without_a_group_binds_to_the_nearest_earlier_call():
    turns = [Turn("assistant", 2), Turn("assistant", 2), Turn("user", 1), Turn("tool", 1), *chat(1)]
    assert kept_turns(turns, 4, stable=False) == [4]
    assert kept_turns(turns, 5, stable=False) == [1, 2, 3, 4]
    assert flatten([Turn("tool", 1), *turns]).plan(99).fate(0) == "orphan"


@given(histories())
def test_b27_budget_larger_than_the_history_keeps_all_of_it(turns):
    _, orphans = plain_planner.links_and_orphans(turns)
    present = [t for t in range(len(turns)) if t not in orphans]
    for stable in (True, False):
        made = flatten(turns).plan(10_000, stable=stable)
        assert expand(turns, made) == plain_planner.tokens_of(turns, present)


def test_b08_long_histories_cost_what_short_ones_do():
    def probes(count, **how):
        rng = random.Random(count)
        history = FlatHistory([rng.randint(5, 60) for _ in range(count)], [2, 3] * (count // 2))
        walk = WalkState()
        history.plan(1000, resume=walk)
        return history.plan(1000, **(how or {"resume": walk})).probes

    for how in ({}, {"stable": False}, {"stable": False, "partial": True}):
        assert probes(100_000, **how) < 3 * probes(100, **how)
    # From scratch the cost follows the moves of the boundary, not the turns.
    assert probes(100_000, stable=True) < 100_000 * 33 / 500 * 30


def test_b104_boundary_moves_seldom_and_the_prefix_is_reused():
    rng = random.Random(104)
    lengths = [rng.randint(10, 90) for _ in range(300)]
    history = FlatHistory(lengths, [ROLE_CODES["user"], ROLE_CODES["assistant"]] * 150)
    budget, walk, before, moves, reuse = 2000, WalkState(), None, 0, []
    for size in range(1, 301):
        made = history.plan(budget, num_turns=size, resume=walk)
        if before is not None:
            same = before.begin == made.begin
            moves += not same
            reuse.append(before.num_tokens / made.num_tokens if same else 0.0)
        before = made
    assert 1 <= moves <= math.ceil(sum(lengths) / low_water_mark(budget, 0.5))
    assert sum(reuse) / len(reuse) >= 0.90
