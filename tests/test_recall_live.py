"""Recall while things happen: a session's own turns, damage, threads, a store that moves."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.recalls import bits, ids_of, make_backend, recall
from helpers.sidecars import eventually

from kalos_ctx.errors import SessionExpired, SessionNotFound, StoreClosed, StoreCorrupt
from kalos_ctx.store import SessionStore


@pytest.fixture
def store(store_path, clock):
    with SessionStore.open(store_path, clock=clock) as opened:
        yield opened


# ---- A session's own turns -----------------------------------------------------------------------


def test_session_recall_finds_turns_and_merges_them_with_passages(store):
    store.add_passages("c", [[1, 1], [1, 0]])
    for vector in ([1, 0], None, [1, 1], [0, 1]):
        store.append("s", "user", token_ids=[1, 2], vector=vector)
    store.append("other", "user", token_ids=[1], vector=[1, 0])
    found = recall(store, [1, 0], 9, "c", session=b"s")
    assert list(zip(found.hits.sources, ids_of(found), strict=True)) == [
        ("session", 0), ("c", 1), ("c", 0), ("session", 2), ("session", 3),
    ]  # fmt: skip
    assert [place[2] for place in found.places] == [True, False, False, True, True]
    assert [place[1] for place in found.places] == [0, 1, 0, 2, 3]
    assert ids_of(recall(store, [1, 0], 2, "c", session=b"s")) == [0, 1]
    assert ids_of(recall(store, [1, 0], 9, session=b"s", as_of=3)) == [0, 2]


def test_session_recall_follows_rollback_and_fork(store):
    backend = make_backend(store)
    for i in range(4):
        store.append("s", "user", token_ids=[1], vector=[1, i])
    store.fork("s", "f", at=3)

    def seqs(session, **options):
        found = backend.recall([1, 0], top_k=9, session=session, **options)
        return ids_of(found), found.hits.scores.tolist()

    whole = seqs(b"s")
    assert whole[0] == [0, 1, 2, 3]
    assert seqs(b"f") == ([0, 1, 2], whole[1][:3])
    store.rollback("s", 1)
    store.append("s", "user", token_ids=[1], vector=[-1, 0])
    assert seqs(b"s")[0] == [0, 1]
    assert seqs(b"s")[1] == [1, -1]
    store.delete("s")
    assert seqs(b"f") == ([0, 1, 2], whole[1][:3])
    with pytest.raises(SessionNotFound):
        seqs(b"s")


def test_b98_expired_turns_are_not_recalled(store, clock):
    for i, ttl in enumerate((1, 5, None, 1)):
        store.append("s", "user", token_ids=[1], vector=[1, i], ttl=ttl)
    store.append("gone", "user", token_ids=[1], vector=[1, 0], ttl=1)
    backend = make_backend(store)
    clock.advance(0.9)
    assert ids_of(backend.recall([1, 0], top_k=9, session=b"s")) == [0, 1, 2, 3]
    clock.advance(0.2)
    assert ids_of(backend.recall([1, 0], top_k=9, session=b"s")) == [1, 2]
    assert ids_of(backend.recall([1, 0], top_k=9, session=b"s", as_of=2)) == [1]
    with pytest.raises(SessionExpired):
        backend.recall([1, 0], top_k=9, session=b"gone")


def test_unknown_session_is_refused(store):
    with pytest.raises(SessionNotFound):
        recall(store, [1.0], 5, session=b"nobody")


# ---- Damage, threads, closing --------------------------------------------------------------------


def test_flipped_bit_in_a_vector_raises_and_never_scores(store_path):
    with SessionStore.open(store_path) as store:
        store.add_passages("c", np.eye(4, dtype=np.float32))
        store.add_passages("d", np.eye(4, dtype=np.float32))
    with next(store_path.glob("gen-*/vec-000000")).open("r+b") as file:
        file.seek(16 * 2 + 3)
        file.write(b"\x41")
    with SessionStore.open(store_path, "r") as store:
        for _ in range(2):
            with pytest.raises(StoreCorrupt) as caught:
                recall(store, [1, 0, 0, 0], 1, "c")
            assert (caught.value.file[-10:], caught.value.offset) == ("vec-000000", 32)
        assert ids_of(recall(store, [1, 0, 0, 0], 1, "d")) == [4]


def test_g09_eight_threads_get_serial_results_while_the_store_grows(store):
    rng = np.random.default_rng(9)
    store.add_passages("c", rng.standard_normal((4000, 16)), metadata=[{"m": 1}] * 4000)
    backend = make_backend(store)
    queries = rng.standard_normal((64, 16))
    calls = [
        {"top_k": 5, "collections": (b"c",)},
        {"top_k": 300, "collections": (b"c", b"none"), "filters": {"m": 1}},
    ]
    serial = [bits(backend.recall(query, **call)) for query in queries for call in calls]
    stop = threading.Event()

    def grow():
        while not stop.is_set():
            store.add_passages("other", rng.standard_normal((3, 16)))

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            results = pool.map(
                lambda job: bits(backend.recall(job[0], **job[1])),
                [(query, call) for query in queries for call in calls],
            )
            assert list(results) == serial
    finally:
        stop.set()
        writer.join()


def test_recall_while_passages_come_and_go_lacks_none_that_stayed(store):
    """What came during the call may be there, what went is not; the scan itself may take long."""
    store.add_passages("c", [[1, 0]] * 100)
    backend = make_backend(store)
    stop = threading.Event()
    live = [0, 100]  # the lowest ID and the one behind the highest; one step may be under way

    def churn():
        while not stop.is_set():
            store.add_passages("c", [[1, 0]])
            live[1] += 1
            store.delete_passages("c", [live[0]])
            live[0] += 1

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        for _ in range(300):
            before = live.copy()
            hits = backend.recall([1, 0], top_k=1000, collections=(b"c",)).hits
            stayed = set(range(live[0] + 1, before[1]))
            ids = hits.ids.tolist()
            assert hits.scores.tolist() == [1.0] * len(ids)
            assert not ids or ids == list(range(ids[0], ids[-1] + 1))
            assert set(ids) >= stayed
            assert set(ids) <= set(range(before[0], live[1] + 1))
    finally:
        stop.set()
        writer.join()


def test_recall_while_the_store_is_compacted_stays_exact(store, store_path):
    rng = np.random.default_rng(10)
    rows = rng.standard_normal((600, 8))
    store.add_passages("c", rows[:300], metadata=[{"m": 1}] * 300)
    store.add_passages("d", rows[300:])
    store.append("s", "user", token_ids=[1], vector=rows[0])
    options = {"top_k": 20, "collections": (b"d", b"c"), "session": b"s"}
    filtered = {"top_k": 20, "collections": (b"c",), "filters": {"m": 1}}
    stop = threading.Event()
    with SessionStore.open(store_path, "r") as reader:
        backends = [make_backend(store), make_backend(reader)]
        expected = [bits(backends[0].recall(rows[0], **one)) for one in (options, filtered)]

        def keep_recalling(backend):
            count = 0
            while not stop.is_set() or not count:
                got = [bits(backend.recall(rows[0], **one)) for one in (options, filtered)]
                assert got == expected
                count += 1
            return count

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(keep_recalling, one) for one in backends * 2]
            try:
                for _ in range(8):
                    store.compact()
            finally:
                stop.set()
            assert all(future.result() for future in futures)


def test_recall_after_close_raises(store_path):
    store = SessionStore.open(store_path)
    store.add_passages("c", [[1, 0]])
    backend = make_backend(store)
    backend.recall([1, 0], top_k=1, collections=(b"c",))
    store.close()
    with pytest.raises(StoreClosed):
        backend.recall([1, 0], top_k=1, collections=(b"c",))


def test_threads_recall_at_once_from_a_backend_that_is_new_or_closes(store):
    rng = np.random.default_rng(11)
    store.add_passages("c", rng.standard_normal((300, 8)))
    queries = rng.standard_normal((3, 8)).astype(np.float32)
    options = {"top_k": 5, "collections": (b"c",)}
    expected = bits(make_backend(store).recall(queries, **options))
    for _ in range(10):
        backend = make_backend(store)
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(backend.recall, queries, **options) for _ in range(16)]
            backend.close()
            assert [bits(call.result()) for call in calls] == [expected] * 16


# ---- Loading -------------------------------------------------------------------------------------


def resident(backend):
    """Rows that are where recall reads them; on the CPU that is the store itself."""
    if backend.name == "cpu":
        return backend._core.num_vector_rows
    return backend._scan.num_resident


def test_rows_are_loaded_before_a_recall_and_later_ones_follow_behind_its_back(store):
    backend = make_backend(store)
    backend.load()  # a store without vectors
    store.add_passages("c", np.eye(4, dtype=np.float32))
    told = []
    backend.load(lambda done, rows: told.append((done, rows)))
    assert resident(backend) == 4
    assert backend.name == "cpu" or told[-1] == (4, 4)
    store.add_passages("c", np.eye(4, dtype=np.float32)[:3])
    assert eventually(lambda: resident(backend) == 7)
    found = backend.recall([0, 0, 1, 0], top_k=2, collections=(b"c",))
    assert ids_of(found) == [2, 6]
    backend.close()
    store.compact()
    backend.load()
    assert ids_of(backend.recall([0, 0, 1, 0], top_k=2, collections=(b"c",))) == [2, 6]
    backend.close()
