"""The assembler against plain Python, over random sessions, policies and recalled passages."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import plain_assembler as plain
from helpers.clock import ManualClock
from hypothesis import given, settings
from hypothesis import strategies as st

from kalos_ctx._batch import Draft
from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import BudgetExceeded, Conflict
from kalos_ctx.planner import Policy
from kalos_ctx.store import SessionStore
from kalos_ctx.types import Hits

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FRAME = ([90, 91], [92], [93])
NAMES = itertools.count()


class Assembler(ContextAssembler):
    """Recalls what the test says, framed as the test says."""

    found: list[int] | None = None
    frame = ((), (), ())

    def recall_hits(self, ask):
        n = len(self.found)
        state = self.store._core.slot_state(2, b"", b"all")
        hits = Hits(np.array(self.found, np.uint64), np.zeros(n, np.float32), np.array([n]))
        frame = tuple(np.array(part, np.int32) for part in self.frame)
        places = [(state["slot_off"], number, False) for number in self.found]
        return hits, places, ("all",) * n, frame, self.store._core.generation, None


def passage_ids(number):
    """Token IDs of a passage: 0 to 4 of them, some equal, some like turns."""
    return [(number * 7 + at) % 5 for at in range(number % 5)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    clock = ManualClock(1000.0)
    path = tmp_path_factory.mktemp("model") / "store"
    with SessionStore.open(path, clock=clock, vector_dim=2) as store:
        numbers = range(20)
        store.add_passages(
            "all", np.ones((20, 2), np.float32), token_ids=[passage_ids(n) for n in numbers],
            ids=list(numbers),
        )  # fmt: skip
        with Assembler(store) as assembler:
            yield SimpleNamespace(store=store, assembler=assembler, clock=clock)


@st.composite
def turns(draw, framed=True, most=14):
    made = []
    for _ in range(draw(st.integers(0, most))):
        role = draw(st.sampled_from(("user", "assistant", "assistant", "tool", "tool", "system")))
        ids = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
        turn = plain.Turn(role, ids)
        if framed:
            turn.group = draw(st.sampled_from((None, None, 1, 2)))
            turn.prefix = draw(st.integers(0, min(2, len(ids) - 1)))
            turn.suffix = draw(st.integers(0, min(1, len(ids) - 1 - turn.prefix)))
            if role == "assistant" and draw(st.booleans()):
                turn.live = [8] * draw(st.integers(1, 4)) + ids
            follows = bool(made) and made[-1].role == "tool" and len(made[-1].ids) > 1
            if role == "tool" and follows and draw(st.booleans()):
                turn.trim = 1
                turn.ids = [7, *ids]
            if draw(st.integers(0, 5)) == 0:
                turn.expires_at = draw(st.sampled_from((1001.0, 1002.0)))
        made.append(turn)
    return made


policies = st.builds(
    Policy,
    allow_partial=st.booleans(),
    include_system=st.booleans(),
    start_on=st.sampled_from((None, None, "user", ("user", "assistant"))),
    end_on=st.sampled_from((None, None, None, "user")),
    keep_groups=st.booleans(),
    stable_prefix=st.booleans(),
    low_water=st.sampled_from((0.25, 0.5, 0.9, 1.0)),
    recall_tokens=st.sampled_from((None, 0, 4, 12)),
    alternation=st.sampled_from(("off", "off", "merge")),
    on_overflow=st.sampled_from(("raise", "drop")),
)
segments = st.lists(
    st.builds(
        plain.Segment,
        st.just(""),
        st.lists(st.integers(50, 60), min_size=1, max_size=3),
        st.sampled_from(("head", "before_last_user", "end")),
        st.booleans(),
    ),
    max_size=3,
)


def draft_of(turn):
    def array(ids):
        return None if ids is None else np.array(ids, np.int32)

    lasts = turn.expires_at == float("inf")
    return Draft(
        role=ROLES.index(turn.role),
        ids=array(turn.ids),
        live=array(turn.live),
        prefix_len=turn.prefix,
        suffix_len=turn.suffix,
        trim_prev=turn.trim,
        group=None if turn.group is None else b"s%d" % turn.group,
        flags=0 if lasts else 2,
        expires_at=0 if lasts else turn.expires_at,
    )


def write(made, session, name, start=0):
    """Store the session's turns from `start` on."""
    if len(session.turns) > start:
        drafts = [draft_of(turn) for turn in session.turns[start:]]
        made.store._core.append_turns(b"", name, drafts, made.clock.now)


def check(made, name, session, policy, **options):
    """Compare one window and its plan with the plain ones; the window's IDs, or None."""
    recalled = options.pop("recalled", None)
    made.assembler.found = recalled
    told = dict(options)
    if recalled is not None:
        told.update(query=[1.0, 0.0], top_k=20, collections=["all"])
    wanted = plain.assemble(
        session, policy, now=made.clock.now, frame=made.assembler.frame,
        recalled=None if recalled is None else [passage_ids(n) for n in recalled], **options,
    )  # fmt: skip
    calls = (made.assembler.plan, made.assembler.assemble)
    if wanted is None:
        for call in calls:
            with pytest.raises(BudgetExceeded):
                call(name, policy=policy, **told)
        return None
    plan = made.assembler.plan(name, policy=policy, **told)
    with made.assembler.assemble(name, policy=policy, **told) as window:
        ids, report = window.tolist(), window.report
    assert ids == wanted.ids
    assert plan.tokens == len(ids) == sum(report.by_segment.values())
    kept = {fate.seq: fate.cut_tokens for fate in report.kept if fate.kind == "turn"}
    dropped = {fate.seq: fate.why for fate in report.dropped if fate.kind == "turn"}
    assert kept == wanted.kept
    assert dropped.keys() == wanted.dropped.keys()
    assert {s: w for s, w in wanted.dropped.items() if w} == {
        s: w for s, w in dropped.items() if w in ("expired", "summarized", "orphan")
    }
    passages = [f for f in (*report.kept, *report.dropped) if f.kind == "passage"]
    assert sorted(fate.why for fate in passages) == sorted(wanted.passages)
    assert {(i.seq, i.why) for i in plan.dropped if i.kind == "turn"} == set(dropped.items())
    ends = [0, *(tile.stop for tile in report.segments)]
    assert [tile.start for tile in report.segments] == ends[:-1]
    assert ends[-1] == len(ids)
    return ids


def options_of(draw, session):
    return {
        "max_tokens": draw(st.one_of(st.none(), st.integers(0, 60))),
        "as_of": draw(st.one_of(st.none(), st.integers(0, len(session.turns) + 1))),
        "placement": draw(st.sampled_from(("before_last_user", "after_system", "end"))),
        "recalled": draw(
            st.one_of(st.none(), st.lists(st.integers(0, 19), max_size=6, unique=True))
        ),
    }


def pin(made, session, name):
    for place, segment in enumerate(session.segments):
        segment.name = f"s{place}"
        made.store.set_segment(
            name, segment.name, token_ids=segment.ids, placement=segment.placement,
            volatile=segment.volatile,
        )  # fmt: skip


@given(st.data())
@settings(max_examples=150)
def test_plain_sessions_match_the_model(made, data):
    session = plain.Session(data.draw(turns(framed=False)), [], data.draw(segments))
    name = b"p%d" % next(NAMES)
    session.turns = session.turns or [plain.Turn("user", [1])]
    for turn in session.turns:
        turn.role = "user" if turn.role == "tool" else turn.role
    write(made, session, name)
    pin(made, session, name)
    made.assembler.frame = data.draw(st.sampled_from((((), (), ()), FRAME)))
    for _ in range(3):
        check(made, name, session, data.draw(policies), **options_of(data.draw, session))


@given(st.data())
@settings(max_examples=250)
def test_all_sessions_match_the_model(made, data):
    session = plain.Session([], [], data.draw(segments))
    name = b"v%d" % next(NAMES)
    made.clock.now = 1000.0
    session.turns = [plain.Turn("user", [1])]
    write(made, session, name)
    pin(made, session, name)
    made.assembler.frame = data.draw(st.sampled_from((((), (), ()), FRAME)))
    for _ in range(3):
        start = len(session.turns)
        session.turns += data.draw(turns())
        write(made, session, name, start)
        if data.draw(st.booleans()):
            first = data.draw(st.integers(0, len(session.turns) - 1))
            summarize(made, session, name, first, data.draw(st.integers(1, 5)))
        made.clock.now = data.draw(st.sampled_from((made.clock.now, 1001.0, 1002.5)))
        check(made, name, session, data.draw(policies), **options_of(data.draw, session))


def summarize(made, session, name, first, length):
    """Summarize a range where the store takes it, in the model too."""
    count = len(session.turns)
    last = min(first + length, count)
    made_of = plain.Summary(first, last, count, [30 + first % 9] * 2)
    try:
        made.store.summarize(name, first, last, token_ids=made_of.ids, role="system")
    except Conflict:
        return
    kept = [s for s in session.summaries if not (first <= s.start and s.stop <= last)]
    session.summaries = sorted([*kept, made_of], key=lambda s: s.start)


@given(st.data())
@settings(max_examples=80)
def test_the_view_of_a_plain_session_gives_the_same_window(made, data):
    """Merging where no two roles meet goes through flat arrays, and changes nothing."""
    session = plain.Session(data.draw(turns(framed=False, most=30)))
    for place, turn in enumerate(session.turns):
        turn.role = ("user", "assistant")[place % 2]
    session.turns = session.turns or [plain.Turn("user", [1])]
    name = b"w%d" % next(NAMES)
    write(made, session, name)
    policy = data.draw(policies)
    fields = {f: getattr(policy, f) for f in policy.__slots__}
    options = options_of(data.draw, session)
    made.assembler.frame = FRAME
    windows = [
        check(made, name, session, Policy(**{**fields, "alternation": way}), **options)
        for way in ("off", "merge")
    ]
    assert windows[0] == windows[1]
