"""SessionStore against a model of dicts and lists, by random calls, reopenings and compactions."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from helpers.clock import ManualClock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kalos_ctx._planner import unit_firsts
from kalos_ctx.errors import (
    Conflict,
    IdempotencyConflict,
    InvalidTokenId,
    PassageNotFound,
    SessionExpired,
    SessionNotFound,
)
from kalos_ctx.store import SessionStore

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SESSIONS = st.sampled_from([("", "a"), ("", "b"), ("", b"\xff"), ("t", "a")])
COLLECTIONS = st.sampled_from(["c", "d"])
ROWS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "tool"]),
        "token_ids": st.lists(st.integers(0, 99), min_size=1, max_size=40),
    },
    optional={
        "key": st.sampled_from(["k", "l"]),
        "group": st.sampled_from(["g", 7]),
        "ttl": st.sampled_from([10, 1000]),
        "metadata": st.sampled_from([{}, {"a": [1, None]}]),
        "created_at": st.integers(0, 9),
    },
)


@dataclass
class Session:
    """What the store should know of one session."""

    turns: list[dict] = field(default_factory=list)
    keys: dict = field(default_factory=dict)  # key -> (seq, row)
    segments: dict = field(default_factory=dict)
    summaries: list = field(default_factory=list)
    thinned: bool = False  # compaction took expired turns, so groups have gaps

    def expired(self, now):
        return bool(self.turns) and all(
            t["until"] is not None and t["until"] <= now for t in self.turns
        )

    def visible(self, now):
        return [
            (seq, turn)
            for seq, turn in enumerate(self.turns)
            if turn["until"] is None or turn["until"] > now
        ]


class StoreMachine(RuleBasedStateMachine):
    """Each rule does one thing to the store and to the model; the invariants compare the two."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.copies = 0
        self.clock = ManualClock()
        self.sessions: dict = {}
        self.passages: dict = {}  # id -> (collection, row)
        self.next_id = 0
        self.shared: dict = {}

    @initialize(durability=st.sampled_from(["process", "each"]))
    def make(self, durability):
        self.durability = durability
        self.path = self.folder / "store"
        self.open()

    def open(self):
        self.store = SessionStore.open(
            self.path,
            durability=self.durability,
            segment_bytes=65536,
            vocab_size=100,
            clock=self.clock,
        )
        self.reader = SessionStore.open(self.path, "r", clock=self.clock)

    def teardown(self):
        self.store.close()
        self.reader.close()
        shutil.rmtree(self.folder)

    # Turns.

    def planned(self, session, rows):
        """The seqs that the rows would get, and the session after them; None for a conflict."""
        turns, keys, seqs = list(session.turns), dict(session.keys), []
        for row in rows:
            known = keys.get(row.get("key"))
            if known is not None and known[1] != row:
                return None
            if known is not None:
                seqs.append(known[0])
                continue
            seqs.append(len(turns))
            ttl = row.get("ttl")
            turns.append({**row, "until": None if ttl is None else self.clock.now + ttl})
            if "key" in row:
                keys[row["key"]] = (seqs[-1], row)
        return seqs, turns, keys

    @rule(where=SESSIONS, rows=st.lists(ROWS, min_size=1, max_size=6), single=st.booleans())
    def append(self, where, rows, single):
        tenant, name = where
        session = self.sessions.get(where, Session())
        rows = rows[:1] if single else rows
        plan = self.planned(session, rows)
        error = SessionExpired if session.expired(self.clock.now) else IdempotencyConflict
        if plan is None or error is SessionExpired:
            with pytest.raises(error):
                self.store.extend(name, rows, tenant=tenant)
            return
        seqs, session.turns, session.keys = plan
        if single:
            assert [self.store.append(name, tenant=tenant, **rows[0])] == seqs
        else:
            assert self.store.extend(name, rows, tenant=tenant) == seqs
        self.sessions.setdefault(where, session)

    @rule(where=SESSIONS, rows=st.lists(ROWS, max_size=3), bad=st.sampled_from([-1, 100, 2**40]))
    def append_with_a_bad_turn(self, where, rows, bad):
        rows = [{k: v for k, v in row.items() if k != "key"} for row in rows]
        with pytest.raises(InvalidTokenId):
            self.store.extend(
                where[1], [*rows, {"role": "user", "token_ids": [1, bad]}], tenant=where[0]
            )

    def missing(self, where):
        """The error that a call on the session must raise, or None."""
        session = self.sessions.get(where)
        if session is None:
            return SessionNotFound
        return SessionExpired if session.expired(self.clock.now) else None

    @rule(where=SESSIONS, to=st.integers(0, 12), expect=st.none() | st.integers(-1, 12))
    def rollback(self, where, to, expect):
        tenant, name = where
        error, session = self.missing(where), self.sessions.get(where)
        if error is None and expect is not None and expect != len(session.turns) - 1:
            error = Conflict
        if error is not None:
            with pytest.raises(error):
                self.store.rollback(name, to, tenant=tenant, expect_last=expect)
            return
        gone = max(0, len(session.turns) - to)
        assert self.store.rollback(name, to, tenant=tenant, expect_last=expect) == gone
        if gone:
            del session.turns[to:]
            session.keys = {k: v for k, v in session.keys.items() if v[0] < to}
            session.summaries = [one for one in session.summaries if one[1] <= to]

    @rule(where=SESSIONS, child=SESSIONS, at=st.none() | st.integers(0, 12))
    def fork(self, where, child, at):
        tenant, name = where
        target = (tenant, child[1])
        error, session = self.missing(where), self.sessions.get(where)
        if error is None and (target in self.sessions or (at or 0) > len(session.turns)):
            error = Conflict
        if error is not None:
            with pytest.raises(error):
                self.store.fork(name, target[1], tenant=tenant, at=at)
            return
        self.store.fork(name, target[1], tenant=tenant, at=at)
        n = len(session.turns) if at is None else at
        self.sessions[target] = Session(
            turns=session.turns[:n],
            segments=dict(session.segments),
            summaries=[one for one in session.summaries if one[1] <= n],
            thinned=session.thinned,
        )

    # Tables.

    @rule(
        where=SESSIONS, name=st.sampled_from("pqr"), ids=st.lists(st.integers(0, 99), max_size=20)
    )
    def set_segment(self, where, name, ids):
        tenant, owner = where
        session = self.sessions.get(where, Session())
        if session.expired(self.clock.now):
            with pytest.raises(SessionExpired):
                self.store.set_segment(owner, name, tenant=tenant, token_ids=ids or None)
            return
        self.store.set_segment(owner, name, tenant=tenant, token_ids=ids or None)
        if ids:
            session.segments[name] = ids
            self.sessions.setdefault(where, session)
        else:
            session.segments.pop(name, None)

    @rule(where=SESSIONS, start=st.integers(0, 8), length=st.integers(1, 8), i=st.integers(0, 99))
    def summarize(self, where, start, length, i):
        tenant, name = where
        error, session, stop = self.missing(where), self.sessions.get(where), start + length
        if error is None and stop > len(session.turns):
            error = ValueError
        elif error is None and any(
            a < stop and start < b and not (start <= a and b <= stop)
            for a, b, _ in session.summaries
        ):
            error = Conflict
        if error is not None:
            with pytest.raises(error):
                self.store.summarize(name, start, stop, tenant=tenant, token_ids=[i])
            return
        self.store.summarize(name, start, stop, tenant=tenant, token_ids=[i])
        kept = [one for one in session.summaries if not (start <= one[0] and one[1] <= stop)]
        session.summaries = sorted([*kept, (start, stop, i)])

    # Passages.

    @rule(collection=COLLECTIONS, values=st.lists(st.integers(0, 9), min_size=1, max_size=5))
    def add_passages(self, collection, values):
        ids = self.store.add_passages(
            collection, [[v, 1.0] for v in values], texts=[str(v) for v in values]
        )
        assert ids.tolist() == list(range(self.next_id, self.next_id + len(values)))
        self.next_id += len(values)
        for one, value in zip(ids.tolist(), values, strict=True):
            self.passages[one] = [collection, value, True]

    @rule(collection=COLLECTIONS, ids=st.lists(st.integers(0, 20), max_size=4))
    def delete_passages(self, collection, ids):
        if any(self.passages.get(one, [None])[0] != collection for one in ids) or (
            collection not in {one[0] for one in self.passages.values()}
        ):
            with pytest.raises(PassageNotFound):
                self.store.delete_passages(collection, ids)
            return
        living = {one for one in ids if self.passages[one][2]}
        assert self.store.delete_passages(collection, ids) == len(living)
        for one in living:
            self.passages[one][2] = False

    # The whole store.

    @rule(where=SESSIONS)
    def delete(self, where):
        if where not in self.sessions:
            with pytest.raises(SessionNotFound):
                self.store.delete(where[1], tenant=where[0])
            return
        counts = self.store.delete(where[1], tenant=where[0]).counts
        session = self.sessions.pop(where)
        assert counts["segments"] == len(session.segments)
        assert counts["summaries"] == len(session.summaries)
        if not session.thinned:
            assert counts["turns"] == len(session.turns)

    @rule(seconds=st.sampled_from([1, 20]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule(how=st.sampled_from(["close", "kill", "no index"]))
    def reopen(self, how):
        """Close in order, or go on with a copy of the files as a killed process leaves them."""
        if how == "kill":
            self.copies += 1
            copy = self.folder / f"copy{self.copies}"
            shutil.copytree(self.path, copy)
        self.store.close()
        self.reader.close()
        if how == "kill":
            self.path = copy
        elif how == "no index":
            for name in ("index", "rows", "dead"):
                next(self.path.glob("gen-*")).joinpath(name).unlink()
        self.open()

    @rule()
    def compact(self):
        now = self.clock.now
        self.store.compact()
        for where, session in list(self.sessions.items()):
            if session.expired(now):
                del self.sessions[where]
            elif len(session.visible(now)) < len(session.turns):
                session.thinned = True
                gone = {seq for seq in range(len(session.turns))} - {
                    seq for seq, _ in session.visible(now)
                }
                session.keys = {k: v for k, v in session.keys.items() if v[0] not in gone}
        # Deleted passages stay behind; their IDs are not given again.
        for one, (_, _, living) in list(self.passages.items()):
            if not living:
                del self.passages[one]

    # Comparison.

    @invariant()
    def sessions_agree(self):
        for store in (self.store, self.reader):
            for tenant in ("", "t"):
                expected = [
                    name
                    for (owner, name), session in self.sessions.items()
                    if owner == tenant and not session.expired(self.clock.now)
                ]
                assert store.sessions(tenant=tenant).items == expected
            for where, session in self.sessions.items():
                self.session_agrees(store, where, session)

    def session_agrees(self, store, where, session):
        tenant, name = where
        error = self.missing(where)
        if error is not None:
            for call in (store.turns, store.segments, store.summaries):
                with pytest.raises(error):
                    call(name, tenant=tenant)
            assert store.count(name, tenant=tenant) == 0
            return
        visible = session.visible(self.clock.now)
        assert store.count(name, tenant=tenant) == len(visible)
        found = store.turns(name, tenant=tenant)
        assert [(t.seq, t.role, t.group, t.token_ids.tolist(), t.metadata) for t in found] == [
            (seq, t["role"], t.get("group"), t["token_ids"], t.get("metadata"))
            for seq, t in visible
        ]
        assert [t.created_at for t in found if "created_at" in session.turns[t.seq]] == [
            t["created_at"] for _, t in visible if "created_at" in t
        ]
        assert {
            name: one["token_ids"].tolist()
            for name, one in store.segments(name, tenant=tenant).items()
        } == session.segments
        assert [
            (one["start"], one["stop"], one["token_ids"][0])
            for one in store.summaries(name, tenant=tenant)
        ] == session.summaries
        self.units_agree(store, where, session)

    def units_agree(self, store, where, session):
        if session.thinned or not session.turns:
            return
        roles = [ROLES.index(turn["role"]) for turn in session.turns]
        groups = [turn.get("group") for turn in session.turns]
        first, orphans = unit_firsts(roles, groups)
        tenant, name = (x if isinstance(x, bytes) else x.encode() for x in where)
        expected = list(zip(first.tolist(), orphans.tolist(), strict=True))
        assert store._core.units(tenant, name) == expected

    @invariant()
    def passages_agree(self):
        for store in (self.store, self.reader):
            for one, (collection, value, living) in self.passages.items():
                if not living:
                    with pytest.raises(PassageNotFound):
                        store.passages(collection, [one])
                    continue
                [found] = store.passages(collection, [one])
                assert (found.text, found.vector.tolist()) == (str(value), [value, 1.0])

    @rule()
    def verify(self):
        assert self.store.verify().errors == []


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_model_itself_tells_an_expired_session_from_one_without_turns():
    session = Session()
    assert not session.expired(0)
    session.turns.append({"until": 5})
    assert session.expired(5)
    assert not session.expired(4.9)
    assert np.isclose(len(session.visible(4)), 1)
