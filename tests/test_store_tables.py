"""Pinned segments and summaries of a store of token IDs."""

import numpy as np
import pytest
from helpers.store_files import OtherProcess, content_digest

from kalos_ctx.errors import Conflict, InvalidArgument, SessionNotFound
from kalos_ctx.store import SessionStore


@pytest.fixture
def store(store_path):
    """Return a store with a session `s` of ten turns."""
    with SessionStore.open(store_path, segment_bytes=65536) as store:
        store.extend("s", [{"role": "user", "token_ids": [i]} for i in range(10)])
        yield store


def segments(store, session="s", **options):
    return [
        (name, one["token_ids"].tolist())
        for name, one in store.segments(session, **options).items()
    ]


def ranges(store, session="s"):
    return [(one["start"], one["stop"]) for one in store.summaries(session)]


# ---- Segments -----------------------------------------------------------------------------------


def test_segments_stand_in_the_order_in_which_names_were_first_set(store):
    for name, i in (("b", 1), ("a", 2), ("c", 3), ("a", 4), ("b", 5)):
        store.set_segment("s", name, token_ids=[i])
    assert segments(store) == [("b", [5]), ("a", [4]), ("c", [3])]


def test_segment_removed_and_set_again_comes_last(store):
    for name in "abc":
        store.set_segment("s", name, token_ids=[1])
    store.set_segment("s", "a")
    assert [name for name, _ in segments(store)] == ["b", "c"]
    store.set_segment("s", "a", token_ids=[2])
    assert [name for name, _ in segments(store)] == ["b", "c", "a"]


def test_segment_has_its_fields_also_after_a_reopen(store, store_path):
    store.set_segment(
        "s", "ä\0", token_ids=[1, 2], role="developer", placement="end", volatile=True
    )
    store.set_segment("s", "plain", token_ids=[3], placement="before_last_user")
    store.close()
    with SessionStore.open(store_path, "r") as reader:
        found = reader.segments("s")
        ids = found["ä\0"].pop("token_ids")
    assert (ids.dtype, ids.tolist()) == (np.int32, [1, 2])
    assert found["ä\0"] == {"role": "developer", "text": None, "placement": "end", "volatile": True}
    assert (found["plain"]["role"], found["plain"]["placement"]) == ("system", "before_last_user")
    assert found["plain"]["volatile"] is False


def test_segments_of_session_and_tenant_are_apart(store):
    store.set_segment(None, "p", token_ids=[1])
    store.set_segment("s", "p", token_ids=[2])
    store.set_segment(None, "p", token_ids=[3], tenant="t")
    store.set_segment("s", "p", token_ids=[4], tenant="t")
    assert segments(store) == [("p", [2])]
    assert segments(store, None) == [("p", [1])]
    assert segments(store, None, tenant="t") == [("p", [3])]
    assert segments(store, "s", tenant="t") == [("p", [4])]
    store.set_segment(None, "p")
    assert segments(store, None) == []
    assert segments(store, None, tenant="nobody") == []
    assert segments(store) == [("p", [2])]


def test_session_of_segments_alone_is_known(store):
    store.set_segment("pins", "p", token_ids=[1])
    assert store.count("pins") == 0
    assert store.turns("pins") == []
    assert store.sessions().items == ["s", "pins"]
    assert store.rollback("pins", 0) == 0
    store.fork("pins", "copy")
    assert segments(store, "copy") == [("p", [1])]
    assert store.append("pins", "user", token_ids=[1]) == 0


def test_removing_what_is_not_there_changes_nothing(store, store_path):
    before = content_digest(store_path)
    store.set_segment("s", "nothing")
    store.set_segment("nobody", "nothing")
    store.set_segment(None, "nothing")
    assert content_digest(store_path) == before
    assert store.sessions().items == ["s"]
    with pytest.raises(SessionNotFound):
        store.segments("nobody")


def test_many_segments_and_long_ones(store, store_path):
    for i in range(60):
        store.set_segment("s", f"n{i}", token_ids=[i] * 100)
    assert segments(store) == [(f"n{i}", [i] * 100) for i in range(60)]
    before = content_digest(store_path)
    with pytest.raises(InvalidArgument):
        store.set_segment("s", "long", token_ids=[1] * 100_000)
    assert content_digest(store_path) == before


def test_fork_takes_segments_along_and_they_part(store):
    store.set_segment("s", "p", token_ids=[1])
    store.fork("s", "child", at=2)
    store.set_segment("child", "p", token_ids=[2])
    store.set_segment("s", "q", token_ids=[3])
    assert segments(store) == [("p", [1]), ("q", [3])]
    assert segments(store, "child") == [("p", [2])]


def test_segments_are_seen_by_another_process_at_once(store, store_path):
    with OtherProcess(store_path) as reader:
        for i in range(5):
            store.set_segment("s", "p", token_ids=[i])
            assert reader.ask("store.segments('s')['p']['token_ids'].tolist()") == [i]
        store.set_segment("s", "p")
        assert reader.ask("store.segments('s')") == {}


# ---- Summaries ----------------------------------------------------------------------------------


def test_summary_stands_beside_the_originals(store):
    store.summarize("s", 2, 5, token_ids=[77, 78], role="assistant")
    [one] = store.summaries("s")
    assert one.pop("token_ids").tolist() == [77, 78]
    assert one == {"start": 2, "stop": 5, "role": "assistant", "text": None}
    assert [t.token_ids.tolist() for t in store.turns("s")] == [[i] for i in range(10)]
    assert store.count("s") == 10


def test_summary_that_covers_older_ones_replaces_them(store):
    for start, stop in ((0, 2), (2, 4), (6, 8)):
        store.summarize("s", start, stop, token_ids=[1])
    assert ranges(store) == [(0, 2), (2, 4), (6, 8)]
    store.summarize("s", 0, 4, token_ids=[2])
    assert ranges(store) == [(0, 4), (6, 8)]
    store.summarize("s", 6, 8, token_ids=[3])
    assert [one["token_ids"].tolist() for one in store.summaries("s")] == [[2], [3]]
    store.summarize("s", 0, 10, token_ids=[4])
    assert ranges(store) == [(0, 10)]


@pytest.mark.parametrize(("start", "stop"), [(2, 4), (3, 5), (4, 5), (5, 7), (0, 4), (6, 10)])
def test_summary_that_overlaps_in_part_is_refused(store, store_path, start, stop):
    store.summarize("s", 3, 7, token_ids=[1])
    before = content_digest(store_path)
    with pytest.raises(Conflict, match="overlaps"):
        store.summarize("s", start, stop, token_ids=[2])
    assert content_digest(store_path) == before
    assert ranges(store) == [(3, 7)]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (5, 5), (6, 2), (0, 11), (10, 11), (-1, 2)])
def test_summary_of_turns_that_are_not_there_is_refused(store, store_path, start, stop):
    before = content_digest(store_path)
    with pytest.raises(InvalidArgument):
        store.summarize("s", start, stop, token_ids=[2])
    assert content_digest(store_path) == before


@pytest.mark.parametrize(
    ("to", "expected"), [(10, [(0, 3), (4, 8)]), (8, [(0, 3), (4, 8)]), (7, [(0, 3)]), (2, [])]
)
def test_summary_expires_with_its_turns(store, to, expected):
    store.summarize("s", 0, 3, token_ids=[1])
    store.summarize("s", 4, 8, token_ids=[2])
    store.rollback("s", to)
    assert ranges(store) == expected
    store.extend("s", [{"role": "user", "token_ids": [9]}] * 10)
    assert ranges(store) == expected


def test_fork_takes_the_summaries_of_its_turns_along(store):
    store.summarize("s", 0, 3, token_ids=[1])
    store.summarize("s", 4, 8, token_ids=[2])
    store.fork("s", "child", at=5)
    assert ranges(store, "child") == [(0, 3)]
    store.fork("s", "all")
    assert ranges(store, "all") == [(0, 3), (4, 8)]
    store.delete("s")
    assert [one["token_ids"].tolist() for one in store.summaries("all")] == [[1], [2]]


def test_summaries_and_segments_survive_a_reopen(store, store_path):
    store.summarize("s", 0, 3, token_ids=[1, 2, 3])
    store.set_segment("s", "p", token_ids=[4])
    store.close()
    with SessionStore.open(store_path) as again:
        assert [one["token_ids"].tolist() for one in again.summaries("s")] == [[1, 2, 3]]
        again.summarize("s", 0, 4, token_ids=[5])
        assert ranges(again) == [(0, 4)]
        assert segments(again) == [("p", [4])]
