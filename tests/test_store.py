"""SessionStore's calls on turns and sessions; the cases B28 to B114 that concern the store."""

import threading

import numpy as np
import pytest
from helpers.store_files import all_bytes, content_digest

from kalos_ctx._planner import unit_firsts
from kalos_ctx.errors import (
    Conflict,
    IdempotencyConflict,
    InvalidArgument,
    InvalidTokenId,
    SessionExpired,
    SessionNotFound,
)
from kalos_ctx.store import SessionStore

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@pytest.fixture
def store(store_path, clock):
    """Return an empty store of token IDs with a clock that the test moves."""
    with SessionStore.open(store_path, segment_bytes=65536, clock=clock) as store:
        yield store


def ids_of(store, session, **options):
    return [turn.token_ids.tolist() for turn in store.turns(session, **options)]


# ---- Turns ------------------------------------------------------------------------------------


def test_append_gives_sequence_numbers_from_0(store):
    assert [store.append("s", "user", token_ids=[i]) for i in range(5)] == [0, 1, 2, 3, 4]
    assert store.append("other", "user", token_ids=[9]) == 0
    assert store.count("s") == 5


def test_append_turn_comes_back_with_every_field(store, clock):
    clock.now = 1000.25
    metadata = {"a": [1, None, True, 2.5, "ü"], "b": {"c": {}}}
    seq = store.append(
        "s", "assistant", token_ids=[3, 1, 2], group="g", key="k", metadata=metadata, ttl=60
    )
    [turn] = store.turns("s")
    assert (turn.seq, turn.role, turn.group, turn.num_tokens) == (seq, "assistant", "g", 3)
    assert turn.token_ids.tolist() == [3, 1, 2]
    assert turn.created_at == 1000.25
    assert turn.metadata == metadata
    assert turn.text is None


def test_append_without_optional_fields_gives_none(store):
    store.append("s", "user", token_ids=[1], created_at=-5)
    [turn] = store.turns("s")
    assert (turn.text, turn.group, turn.metadata, turn.created_at) == (None, None, None, -5.0)


def test_turn_ids_are_read_only_and_without_copy(store):
    store.append("s", "user", token_ids=[1, 2, 3])
    [turn] = store.turns("s")
    assert turn.token_ids.dtype == np.int32
    assert not turn.token_ids.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        turn.token_ids[0] = 7


def test_turn_ids_stay_valid_after_close(store):
    store.append("s", "user", token_ids=list(range(1000)))
    [turn] = store.turns("s")
    ids = turn.token_ids
    store.close()
    assert ids.tolist() == list(range(1000))


@pytest.mark.parametrize("role", ROLES)
def test_every_role_is_kept(store, role):
    store.append("s", role, token_ids=[1])
    assert store.turns("s")[0].role == role


@pytest.mark.parametrize("group", ["g", "ä", 0, -1, 2**100, "1"])
def test_group_comes_back_with_its_type(store, group):
    store.append("s", "user", token_ids=[1], group=group)
    found = store.turns("s")[0].group
    assert (found, type(found)) == (group, type(group))


@pytest.mark.parametrize(
    ("start", "stop"),
    [(None, None), (0, 2), (2, None), (-2, None), (None, -1), (3, 1), (7, 99), (-99, 99), (5, 5)],
)
def test_turns_range_follows_the_rules_of_slices(store, start, stop):
    store.extend("s", [{"role": "user", "token_ids": [i]} for i in range(6)])
    assert [turn.seq for turn in store.turns("s", start, stop)] == list(range(6))[start:stop]


def test_long_turn_spans_no_segment_and_comes_back(store):
    with pytest.raises(InvalidArgument, match="segment"):
        store.append("s", "user", token_ids=np.arange(70_000, dtype=np.int32))
    assert store.count("s") == 0
    ids = np.arange(16_000, dtype=np.int32)
    for _ in range(3):
        store.append("s", "user", token_ids=ids)
    assert all((turn.token_ids == ids).all() for turn in store.turns("s"))


def test_extend_appends_in_order_and_of_nothing_gives_nothing(store):
    assert store.extend("s", []) == []
    assert store.extend("s", iter([])) == []
    with pytest.raises(SessionNotFound):
        store.turns("s")
    rows = ({"role": "user", "token_ids": [i]} for i in range(100))
    assert store.extend("s", rows) == list(range(100))
    assert ids_of(store, "s") == [[i] for i in range(100)]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_extend_one_bad_turn_changes_nothing(store, store_path, at):
    """All or nothing, wherever the bad turn stands; the message names its place."""
    store.append("s", "user", token_ids=[1], key="old")
    before = content_digest(store_path)
    rows = [{"role": "user", "token_ids": [5], "key": f"k{i}", "group": "g"} for i in range(3)]
    rows[at] = {"role": "user", "token_ids": [-1]}
    with pytest.raises(InvalidTokenId, match=rf"turns\[{at}\]"):
        store.extend("s", rows)
    with pytest.raises(InvalidTokenId):
        store.extend("new", rows)
    assert content_digest(store_path) == before
    assert store.count("s") == 1
    assert store.sessions().items == ["s"]
    rows[at] = {"role": "user", "token_ids": [6], "key": f"k{at}"}
    assert store.extend("s", rows) == [1, 2, 3]


def test_b47_equal_timestamps_keep_the_order_of_appends_across_reopen(store_path, clock):
    with SessionStore.open(store_path, clock=clock) as store:
        for i in range(1000):
            store.append("s", "user", token_ids=[i], created_at=5.0)
    with SessionStore.open(store_path, clock=clock) as store:
        assert ids_of(store, "s") == [[i] for i in range(1000)]


def test_b50_rollback_to_a_mark_keeps_what_was_before(store):
    store.append("s", "user", token_ids=[1])
    mark = store.count("s")
    store.append("s", "assistant", token_ids=[2])
    assert store.rollback("s", mark) == 1
    assert ids_of(store, "s") == [[1]]


def test_b51_equal_turns_are_distinct(store):
    assert store.extend("s", [{"role": "user", "token_ids": [7, 7]}] * 2) == [0, 1]
    assert ids_of(store, "s") == [[7, 7], [7, 7]]


def test_b55_threads_keep_each_ones_own_order(store):
    def work(name):
        for i in range(200):
            store.append("s", "user", token_ids=[name, i])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = ids_of(store, "s")
    assert len(rows) == 1600
    for name in range(8):
        assert [i for who, i in rows if who == name] == list(range(200))


def test_b56_tight_loop_gives_distinct_sequence_numbers(store):
    assert [store.append("s", "user", token_ids=[1]) for _ in range(10_000)] == list(range(10_000))


@pytest.mark.parametrize("kind", ["stats", "file"])
def test_b58_bytes_of_an_append_do_not_grow(store, store_path, kind):
    def size():
        if kind == "stats":
            return store.stats()["bytes"]["log"] + store.stats()["bytes"]["tokens"]
        return sum(len(raw.rstrip(b"\0")) for name, raw in all_bytes(store_path).items())

    def cost(n):
        before = size()
        for _ in range(n):
            store.append("s", "user", token_ids=[1, 2, 3])
        return size() - before

    early = cost(100)
    for _ in range(5000):
        store.append("s", "user", token_ids=[1, 2, 3])
    assert cost(100) <= 2 * early + 65536


BAD_IDS = [-1, 100, 101, 2**31, 2**63, -(2**31), 2**64]


@pytest.mark.parametrize("bad", BAD_IDS)
def test_b114_id_outside_the_vocabulary_is_refused_with_its_place(store_path, bad):
    with SessionStore.open(store_path, vocab_size=100) as store:
        with pytest.raises(InvalidTokenId, match=r"token_ids\[2\] must lie in \[0, 100\)"):
            store.append("s", "user", token_ids=[0, 99, bad])
        with pytest.raises(InvalidTokenId, match=r"token_ids\[1\]"):
            store.append("s", "user", token_ids=[0, bad], framed=True)
        assert store.count("s") == 0
        assert store.append("s", "user", token_ids=[0, 99]) == 0


# ---- Idempotency --------------------------------------------------------------------------------


def test_key_gives_the_same_seq_again_also_across_reopen(store_path):
    payload = {"token_ids": [1, 2], "metadata": {"a": 1}, "group": "g", "ttl": 1e9, "key": "k"}
    with SessionStore.open(store_path) as store:
        assert store.append("s", "user", **payload) == 0
        assert store.append("s", "user", token_ids=[3]) == 1
        assert store.append("s", "user", **payload) == 0
    with SessionStore.open(store_path) as store:
        assert store.append("s", "user", **payload) == 0
        assert store.append("s", "user", **{**payload, "key": b"k"}) == 0
        assert store.count("s") == 2


@pytest.mark.parametrize(
    "other",
    [
        {"token_ids": [1, 3]},
        {"metadata": {"a": 2}},
        {"metadata": None},
        {"group": 5},
        {"ttl": 6},
        {"created_at": 1},
        {"framed": True},
        {"vector": [1.0, 2.0]},
        {"role": "assistant"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_key_with_another_payload_raises_and_changes_nothing(store, store_path, other):
    payload = {"role": "user", "token_ids": [1, 2], "metadata": {"a": 1}, "group": "5", "key": "k"}
    store.append("s", **payload)
    before = content_digest(store_path)
    with pytest.raises(IdempotencyConflict, match="turn 0"):
        store.append("s", **{**payload, **other})
    with pytest.raises(IdempotencyConflict):
        store.extend("s", [{"role": "user", "token_ids": [9]}, {**payload, **other}])
    assert content_digest(store_path) == before
    assert store.stats()["vector_dim"] is None
    assert store.append("s", **payload) == 0


def test_keys_inside_one_extend(store, store_path):
    one = {"role": "user", "token_ids": [1], "key": "a"}
    assert store.extend("s", [one, one, {**one, "key": "b"}]) == [0, 0, 1]
    assert store.extend("s", [one, {"role": "user", "token_ids": [2]}, one]) == [0, 2, 0]
    before = content_digest(store_path)
    with pytest.raises(IdempotencyConflict):
        store.extend("s", [{**one, "key": "c"}, {**one, "key": "c", "token_ids": [2]}])
    assert content_digest(store_path) == before
    assert store.append("s", "user", token_ids=[3], key="c") == 3


def test_keys_are_of_one_session_and_tenant(store):
    for session, tenant in (("a", ""), ("b", ""), ("a", "t")):
        assert store.append(session, "user", token_ids=[1], key="k", tenant=tenant) == 0
        assert store.append(session, "user", token_ids=[1], key="k", tenant=tenant) == 0
    with pytest.raises(IdempotencyConflict):
        store.append("a", "user", token_ids=[2], key="k", tenant="t")


def test_rollback_frees_keys_and_groups(store):
    store.append("s", "user", token_ids=[1], key="stays")
    store.append("s", "assistant", token_ids=[2], key="k", group="g")
    store.append("s", "tool", token_ids=[3], group="g")
    assert store.rollback("s", 1) == 2
    assert store.append("s", "tool", token_ids=[9], key="k", group="g") == 1
    assert store.append("s", "user", token_ids=[1], key="stays") == 0
    assert store._core.units(b"", b"s") == [(0, False), (1, True)]


def test_many_keys_survive_the_growth_of_their_table(store_path):
    with SessionStore.open(store_path) as store:
        for i in range(3000):
            store.append(f"s{i % 7}", "user", token_ids=[i], key=f"k{i}")
    with SessionStore.open(store_path) as store:
        for i in range(3000):
            assert store.append(f"s{i % 7}", "user", token_ids=[i], key=f"k{i}") == i // 7


# ---- Groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "turns",
    [
        "u a t a",
        "t u a t t",
        "u a1 t1 u t1",
        "a1 a2 t2 t1",
        "u1 t1 a1 t1",
        "a f u f",
        "a1 u a2 t1 t2 t1 u",
        "t1 a1 t1 t",
    ],
)
def test_units_are_those_of_the_planner(store, turns):
    """What the store writes down per turn is what CONTRACT.md's words give."""
    names = {"u": "user", "a": "assistant", "t": "tool", "f": "function"}
    rows = [
        {"role": names[one[0]], "token_ids": [i], "group": one[1:] or None}
        for i, one in enumerate(turns.split())
    ]
    store.extend("s", rows[:2])
    for row in rows[2:]:
        store.append("s", **row)
    roles = [ROLES.index(row["role"]) for row in rows]
    first, orphans = unit_firsts(roles, [row["group"] for row in rows])
    expected = list(zip(first.tolist(), orphans.tolist(), strict=True))
    assert store._core.units(b"", b"s") == expected


# ---- Rollback and fork --------------------------------------------------------------------------


def test_rollback_returns_how_many_went(store):
    store.extend("s", [{"role": "user", "token_ids": [i]} for i in range(10)])
    assert store.rollback("s", 99) == 0
    assert store.rollback("s", 10) == 0
    assert store.rollback("s", 4, expect_last=9) == 6
    assert store.append("s", "user", token_ids=[77]) == 4
    assert ids_of(store, "s") == [[0], [1], [2], [3], [77]]
    assert store.rollback("s", 0) == 5
    assert store.count("s") == 0
    assert store.turns("s") == []
    assert store.rollback("s", 0, expect_last=-1) == 0


def test_rollback_other_last_turn_raises_and_changes_nothing(store, store_path):
    store.extend("s", [{"role": "user", "token_ids": [i]} for i in range(3)])
    before = content_digest(store_path)
    for expected in (-1, 0, 1, 3, 2**40):
        with pytest.raises(Conflict):
            store.rollback("s", 0, expect_last=expected)
    assert content_digest(store_path) == before
    assert store.count("s") == 3


@pytest.mark.parametrize("at", [None, 0, 1, 4, 5, 9])
def test_fork_shares_the_turns_before_at(store, at):
    store.extend("s", [{"role": "user", "token_ids": [i], "group": i} for i in range(9)])
    tokens = store.stats()["bytes"]["tokens"]
    store.fork("s", "child", at=at)
    n = 9 if at is None else at
    assert store.stats()["bytes"]["tokens"] == tokens
    assert store.append("child", "user", token_ids=[100]) == n
    assert store.append("s", "user", token_ids=[200]) == 9
    assert ids_of(store, "child") == [[i] for i in range(n)] + [[100]]
    assert ids_of(store, "s") == [[i] for i in range(9)] + [[200]]


def test_fork_and_parent_go_their_own_ways_across_reopen(store_path):
    with SessionStore.open(store_path) as store:
        store.extend("s", [{"role": "user", "token_ids": [i]} for i in range(6)])
        store.fork("s", "child", at=5)
        store.rollback("s", 2)
        store.append("s", "user", token_ids=[50])
        store.fork("child", "grandchild", at=3)
        store.rollback("child", 4)
        store.append("child", "user", token_ids=[60])
    with SessionStore.open(store_path, "r") as store:
        assert ids_of(store, "s") == [[0], [1], [50]]
        assert ids_of(store, "child") == [[0], [1], [2], [3], [60]]
        assert ids_of(store, "grandchild") == [[0], [1], [2]]


def test_fork_takes_no_keys_along(store):
    store.append("s", "user", token_ids=[1], key="k")
    store.fork("s", "child")
    assert store.append("child", "user", token_ids=[2], key="k") == 1


def test_fork_onto_an_existing_name_raises(store, store_path):
    store.append("s", "user", token_ids=[1])
    store.append("t", "user", token_ids=[1])
    store.set_segment("pins", "p", token_ids=[1])
    before = content_digest(store_path)
    for name in ("s", "t", "pins"):
        with pytest.raises(Conflict):
            store.fork("s", name)
    with pytest.raises(Conflict):
        store.fork("s", "new", at=2)
    assert content_digest(store_path) == before
    assert store.sessions().items == ["s", "t", "pins"]


def test_fork_of_a_fork_of_a_group_keeps_its_unit(store):
    store.append("s", "assistant", token_ids=[1], group="g")
    store.fork("s", "child")
    store.append("child", "tool", token_ids=[2], group="g")
    assert store._core.units(b"", b"child") == [(0, False), (0, False)]


# ---- Time to live -------------------------------------------------------------------------------


def test_b98_ttl_present_at_0_9_and_absent_everywhere_at_1_1(store, clock):
    store.append("s", "user", token_ids=[1], ttl=1)
    store.append("lasting", "user", token_ids=[1])
    clock.advance(0.9)
    assert (store.count("s"), len(store.turns("s"))) == (1, 1)
    assert store.sessions().items == ["s", "lasting"]
    clock.advance(0.2)
    assert store.count("s") == 0
    assert store.sessions().items == ["lasting"]
    for call in (
        lambda: store.turns("s"),
        lambda: store.rollback("s", 0),
        lambda: store.fork("s", "new"),
        lambda: store.summarize("s", 0, 1, token_ids=[1]),
        lambda: store.summaries("s"),
        lambda: store.segments("s"),
        lambda: store.set_segment("s", "p", token_ids=[1]),
    ):
        with pytest.raises(SessionExpired):
            call()


def test_b101_append_to_an_expired_session_raises(store, store_path, clock):
    store.append("s", "user", token_ids=[1], ttl=1, key="k")
    clock.advance(1.1)
    before = content_digest(store_path)
    for options in ({}, {"ttl": 5}, {"key": "k"}, {"vector": [1.0]}):
        with pytest.raises(SessionExpired):
            store.append("s", "user", token_ids=[2], **options)
    assert content_digest(store_path) == before
    assert store.stats()["vector_dim"] is None
    assert store.delete("s").counts["turns"] == 1
    assert store.append("s", "user", token_ids=[2]) == 0


def test_ttl_of_some_turns_hides_those_alone(store, clock):
    for i, ttl in enumerate((None, 1, 5, None)):
        store.append("s", "user", token_ids=[i], ttl=ttl)
    clock.advance(2)
    assert [turn.seq for turn in store.turns("s")] == [0, 2, 3]
    assert store.count("s") == 3
    assert store.append("s", "user", token_ids=[4]) == 4
    clock.advance(10)
    assert [turn.seq for turn in store.turns("s")] == [0, 3, 4]


def test_ttl_turns_gone_by_compaction_leave_their_numbers_empty(store, clock):
    """The compacted session forgot that it had such turns, and counted their places."""
    for i, ttl in enumerate((None, 1, 1, None, 1)):
        store.append("s", "user", token_ids=[i], ttl=ttl)
    clock.advance(2)
    for _ in range(2):
        store.compact()
        assert [turn.seq for turn in store.turns("s")] == [0, 3]
        assert store.count("s") == 2
    assert store.append("s", "user", token_ids=[5]) == 5
    assert store.rollback("s", 3) == 3
    assert ([turn.seq for turn in store.turns("s")], store.count("s")) == ([0], 1)
    store.fork("s", "child", at=2)
    assert store.count("child") == 1
    assert store.append("child", "user", token_ids=[6]) == 2
    assert store.verify().ok


def test_ttl_after_a_rollback_is_that_of_the_turns_that_stay(store, clock):
    store.append("s", "user", token_ids=[0], ttl=1)
    store.append("s", "user", token_ids=[1])
    store.rollback("s", 1)
    clock.advance(2)
    assert store.count("s") == 0
    with pytest.raises(SessionExpired):
        store.append("s", "user", token_ids=[2])


def test_ttl_is_seen_by_a_reader_with_its_own_clock(store, store_path, clock):
    store.append("s", "user", token_ids=[1], ttl=1)
    with SessionStore.open(store_path, "r", clock=clock) as reader:
        assert reader.count("s") == 1
        clock.advance(1)
        assert reader.count("s") == 0
        assert reader.sessions().items == []


def test_b102_mass_expiry_empties_listings_and_compaction_reclaims(store, clock):
    for i in range(200):
        store.append(f"s{i}", "user", token_ids=list(range(500)), ttl=1)
    clock.advance(2)
    assert store.sessions().items == []
    sizes = store.compact()
    assert sizes["after"] < sizes["before"] / 2
    assert store.sessions().items == []
