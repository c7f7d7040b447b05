"""Erasure: what was deleted is in no window, listing or reader, and in no byte of any file."""

import itertools

import numpy as np
import pytest
from helpers.store_files import OtherProcess, all_bytes, files_holding

from kalos_ctx.errors import PassageNotFound, SessionNotFound, StoreNotFound
from kalos_ctx.store import SessionStore

# Values that stand nowhere by chance.
IDS = [1_234_567_891, 1_987_654_321, 1_357_924_680]
OTHER_IDS = [1_111_333_555, 1_222_444_666]
NEEDLES = {
    "session": "needle-session-name",
    "tenant": "needle-tenant-name",
    "collection": "needle-collection-name",
    "key": "needle-idempotency-key",
    "group": "needle-group-name",
    "metadata": "needle-in-metadata",
    "segment": "needle-segment-name",
    "text": "needle text of a passage",
}
VECTOR = np.array([0.1234567, -9.8765432, 3.1415927, 2.7182818], np.float32)


@pytest.fixture(params=["process", "each"])
def store(request, store_path):
    """Return an empty store; with "each" its log holds tokens and vectors a second time."""
    with SessionStore.open(store_path, durability=request.param, segment_bytes=65536) as store:
        yield store


def fill(store, session, tenant="", ids=IDS):
    """Put a needle into every place that a session has."""
    for i in range(6):
        store.append(
            session,
            ("user", "assistant")[i % 2],
            tenant=tenant,
            token_ids=ids,
            vector=VECTOR,
            key=f"{NEEDLES['key']}-{i}",
            group=NEEDLES["group"],
            metadata={NEEDLES["metadata"]: NEEDLES["metadata"]},
            created_at=1234567.890123,
        )
    store.set_segment(session, NEEDLES["segment"], tenant=tenant, token_ids=ids)
    store.set_segment(session, NEEDLES["segment"], tenant=tenant, token_ids=[*ids, 1])
    store.summarize(session, 0, 2, tenant=tenant, token_ids=ids)
    store.summarize(session, 0, 4, tenant=tenant, token_ids=ids)
    store.append(session, "user", tenant=tenant, token_ids=[*ids, 2])
    store.rollback(session, 6, tenant=tenant)


def every_needle():
    return [
        *NEEDLES.values(),
        np.array(IDS),
        VECTOR.tobytes(),
        np.float64(1234567.890123).tobytes(),
    ]


def found(path):
    return files_holding(path, *every_needle())


def test_fill_puts_needles_where_they_are_looked_for(store, store_path):
    """The scan itself can find each of them."""
    fill(store, NEEDLES["session"], NEEDLES["tenant"])
    store.add_passages(NEEDLES["collection"], [VECTOR], texts=[NEEDLES["text"]])
    assert {needle for _, needle in found(store_path)} == set(range(len(every_needle())))


def test_b96_delete_leaves_no_byte(store, store_path):
    store.append("stays", "user", token_ids=OTHER_IDS)
    fill(store, NEEDLES["session"])
    receipt = store.delete(NEEDLES["session"])
    assert receipt.counts == {
        "turns": 6,
        "vectors": 6,
        "summaries": 1,
        "segments": 1,
        "passages": 0,
    }
    assert found(store_path) == []
    assert [t.token_ids.tolist() for t in store.turns("stays")] == [OTHER_IDS]
    assert store.verify().ok


def test_b96_delete_is_seen_by_another_process_at_once(store, store_path):
    fill(store, NEEDLES["session"])
    with OtherProcess(store_path) as reader:
        assert reader.ask(f"store.count('{NEEDLES['session']}')") == 6
        store.delete(NEEDLES["session"])
        assert reader.ask(f"store.count('{NEEDLES['session']}')") == 0
        for call in ("turns", "summaries", "segments"):
            assert reader.ask(f"store.{call}('{NEEDLES['session']}')") == "SessionNotFound"
        assert reader.ask("store.sessions().items") == []


def test_deleted_session_is_unknown_and_its_name_is_free(store, store_path):
    fill(store, "s")
    store.delete("s")
    with pytest.raises(SessionNotFound):
        store.delete("s")
    assert store.append("s", "user", token_ids=[5], key=f"{NEEDLES['key']}-0") == 0
    assert [t.token_ids.tolist() for t in store.turns("s")] == [[5]]
    assert store.segments("s") == {}
    assert store.summaries("s") == []


def test_erasure_holds_after_a_reopen_and_for_a_rebuilt_index(store, store_path):
    store.append("stays", "user", token_ids=OTHER_IDS)
    fill(store, NEEDLES["session"])
    store.delete(NEEDLES["session"])
    store.close()
    assert found(store_path) == []
    for name in ("index", "rows", "dead"):
        (store_path / "gen-000000" / name).unlink()
    with SessionStore.open(store_path) as again:
        assert again.recovery["rebuilt"]
        assert again.sessions().items == ["stays"]
        assert [t.token_ids.tolist() for t in again.turns("stays")] == [OTHER_IDS]
        assert again.verify().ok
    assert found(store_path) == []


def test_receipt_digest_differs_from_erasure_to_erasure(store):
    digests = []
    for _ in range(3):
        store.append("s", "user", token_ids=[1])
        digests.append(store.delete("s").digest)
    assert len(set(digests)) == 3
    assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)


def test_b95_erasing_one_tenant_leaves_the_others_as_they_are(store, store_path):
    def picture(tenant):
        return [
            (name, [t.token_ids.tolist() for t in store.turns(name, tenant=tenant)])
            for name in store.sessions(tenant=tenant).items
        ], [p.vector.tolist() for p in store.passages("c", [0, 1], tenant=tenant)]

    for i, tenant in enumerate(("one", NEEDLES["tenant"], "three", "")):
        if tenant == NEEDLES["tenant"]:
            fill(store, NEEDLES["session"], tenant)
            fill(store, "second", tenant)
            store.set_segment(None, NEEDLES["segment"], tenant=tenant, token_ids=IDS)
            store.add_passages(
                NEEDLES["collection"],
                [VECTOR] * 3,
                tenant=tenant,
                texts=[NEEDLES["text"]] * 3,
                token_ids=[IDS] * 3,
                metadata=[{"f": NEEDLES["metadata"]}] * 3,
            )
        else:
            store.append("s", "user", token_ids=[i, *OTHER_IDS], tenant=tenant)
            store.add_passages("c", np.eye(2, 4) + i, tenant=tenant)
    before = [picture(tenant) for tenant in ("one", "three", "")]
    receipt = store.delete_tenant(NEEDLES["tenant"])
    assert receipt.counts == {
        "turns": 12,
        "vectors": 15,
        "summaries": 2,
        "segments": 3,
        "passages": 3,
    }
    assert [picture(tenant) for tenant in ("one", "three", "")] == before
    assert found(store_path) == []
    assert store.tenants() == ["", "one", "three"]
    assert store.sessions(tenant=NEEDLES["tenant"]).items == []
    with pytest.raises(PassageNotFound):
        store.passages(NEEDLES["collection"], [0], tenant=NEEDLES["tenant"])
    assert store.segments(None, tenant=NEEDLES["tenant"]) == {}
    assert store.verify().ok


def test_delete_tenant_unknown_gives_a_receipt_of_nothing(store):
    store.append("s", "user", token_ids=[1])
    assert set(store.delete_tenant("nobody").counts.values()) == {0}
    assert store.count("s") == 1


def test_deleted_passages_leave_no_byte_and_the_others_stay(store, store_path):
    store.add_passages(
        "c",
        [[1.0, 0, 0, 0], VECTOR, [0, 1.0, 0, 0]],
        texts=["a", NEEDLES["text"], "b"],
        token_ids=[[1], IDS, [2]],
        metadata=[None, {NEEDLES["metadata"]: 1}, None],
    )
    with OtherProcess(store_path) as reader:
        assert reader.ask("store.passages('c', [1])[0].text") == NEEDLES["text"]
        assert store.delete_passages("c", [1]) == 1
        assert reader.ask("store.passages('c', [1])") == "PassageNotFound"
    assert found(store_path) == []
    assert [p.text for p in store.passages("c", [0, 2])] == ["a", "b"]
    assert store.verify().ok


# ---- Forks --------------------------------------------------------------------------------------


def families(store):
    """s <- child (at 3) <- grandchild (at 2), each with turns of its own."""
    for i in range(5):
        store.append("s", "user", token_ids=[*IDS, i], vector=VECTOR, key=f"{NEEDLES['key']}{i}")
    store.set_segment("s", "pin", token_ids=IDS)
    store.summarize("s", 0, 2, token_ids=IDS)
    store.fork("s", "child", at=3)
    store.append("child", "user", token_ids=[*IDS, 10])
    store.fork("child", "grandchild", at=2)
    store.append("grandchild", "user", token_ids=[*IDS, 20])


CONTENT = {"s": [0, 1, 2, 3, 4], "child": [0, 1, 2, 10], "grandchild": [0, 1, 20]}


@pytest.mark.parametrize("order", list(itertools.permutations(CONTENT)), ids="-".join)
def test_fork_survives_and_shared_bytes_go_with_the_last(store, store_path, order):
    families(store)
    living = dict(CONTENT)
    for name in order:
        store.delete(name)
        del living[name]
        kept = {i for ids in living.values() for i in ids}
        for other, expected in living.items():
            turns = store.turns(other)
            assert [t.token_ids.tolist() for t in turns] == [[*IDS, i] for i in expected]
            assert store.segments(other)["pin"]["token_ids"].tolist() == IDS
            assert [one["stop"] for one in store.summaries(other)] == [2]
        for i in {i for ids in CONTENT.values() for i in ids} - kept:
            assert files_holding(store_path, np.array([*IDS, i])) == []
        assert store.verify().ok
    assert files_holding(store_path, np.array(IDS), VECTOR.tobytes(), NEEDLES["key"]) == []


@pytest.mark.parametrize("order", list(itertools.permutations(CONTENT)), ids="-".join)
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_turns_rolled_back_behind_a_fork_go_with_the_last(store, store_path, order, gone):
    """A rollback takes shared turns out of the last one's table; its erasure still knows them."""
    families(store)
    for name in order[:gone]:
        store.delete(name)
    store.rollback(order[-1], 1)
    store.append(order[-1], "user", token_ids=[*IDS, 30])
    store.rollback(order[-1], 0)
    for name in order[gone:]:
        store.delete(name)
    assert files_holding(store_path, np.array(IDS), VECTOR.tobytes(), NEEDLES["key"]) == []


def test_rolled_back_turns_of_a_fork_stay_for_the_parent(store):
    families(store)
    store.rollback("child", 0)
    store.delete("child")
    assert [t.token_ids.tolist()[-1] for t in store.turns("s")] == CONTENT["s"]
    assert [t.token_ids.tolist()[-1] for t in store.turns("grandchild")] == CONTENT["grandchild"]


def test_fork_of_one_session_many_times_and_all_gone(store, store_path):
    families(store)
    for i in range(24):
        store.fork("s", f"f{i}", at=i % 6 if i % 6 < 5 else None)
    for name in store.sessions(limit=1000).items:
        store.delete(name)
    assert files_holding(store_path, np.array(IDS)) == []
    assert store.stats()["sessions"] == 0


# ---- What stays ---------------------------------------------------------------------------------


def test_erasure_before_the_first_turn_and_of_many(store, store_path):
    store.set_segment("pins", "p", token_ids=IDS)
    assert store.delete("pins").counts["segments"] == 1
    for i in range(40):
        store.append(f"{NEEDLES['session']}{i}", "user", token_ids=IDS)
    for i in range(40):
        store.delete(f"{NEEDLES['session']}{i}")
    assert found(store_path) == []
    assert store.sessions().items == []


def test_erased_bytes_are_not_in_a_snapshot_nor_after_compaction(store, store_path, tmp_path):
    store.append("stays", "user", token_ids=OTHER_IDS)
    fill(store, NEEDLES["session"])
    store.delete(NEEDLES["session"])
    store.snapshot(tmp_path / "copy")
    assert found(tmp_path / "copy") == []
    store.compact()
    assert found(store_path) == []
    assert [t.token_ids.tolist() for t in store.turns("stays")] == [OTHER_IDS]


def test_open_array_of_an_erased_turn_shows_zeros(store):
    store.append("s", "user", token_ids=IDS)
    ids = store.turns("s")[0].token_ids
    store.delete("s")
    assert ids.tolist() == [0, 0, 0]


def test_refused_deletion_changes_nothing(store, store_path, tmp_path):
    store.append("s", "user", token_ids=[1])
    before = all_bytes(store_path)
    for call in (
        lambda: store.delete("nobody"),
        lambda: store.delete("s", tenant="t"),
        lambda: store.delete_passages("c", [0]),
    ):
        with pytest.raises(LookupError):
            call()
    assert all_bytes(store_path) == before
    with pytest.raises(StoreNotFound):
        SessionStore.open(tmp_path / "none", "r")
