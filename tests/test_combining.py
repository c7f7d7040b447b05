"""Recalls of several threads go together and give each what it would have had alone."""

import threading

import numpy as np
import pytest
from helpers.recalls import bits, make_backend

from kalos_ctx import DimensionMismatch, NonFiniteVector, SessionStore, StoreCorrupt
from kalos_ctx.backends.combining import TOGETHER_MAX, Combiner


def run_all(calls):
    """Run every call on a thread of its own; what each gave or raised, in order."""
    found = [None] * len(calls)

    def run(at):
        try:
            found[at] = calls[at]()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.fixture
def store(store_path):
    rng = np.random.default_rng(2)
    with SessionStore.open(store_path, vector_dim=16) as opened:
        opened.add_passages("a", rng.standard_normal((300, 16)).astype(np.float32))
        opened.add_passages("b", rng.standard_normal((50, 16)).astype(np.float32))
        yield opened


def test_many_threads_get_the_hits_that_each_would_have_alone(store):
    rng = np.random.default_rng(3)
    alone, together = make_backend(store), make_backend(store)
    together.combine()
    asks = [
        (rng.standard_normal(16).astype(np.float32), 1 + n % 3, (b"a",) if n % 4 else (b"a", b"b"))
        for n in range(60)
    ]
    asks[7] = (np.zeros(16, np.float32), 2, (b"a",))

    def call(backend, ask):
        query, k, names = ask
        return bits(backend.recall(query, top_k=k, collections=names))

    expected = [call(alone, ask) for ask in asks]
    for _ in range(5):
        assert run_all([lambda ask=ask: call(together, ask) for ask in asks]) == expected
    alone.close()
    together.close()


def test_a_query_that_is_refused_fails_alone(store):
    backend = make_backend(store)
    backend.combine()
    queries = [np.ones(16), np.ones(3), np.full(16, np.nan), np.ones(16)] * 5
    found = run_all([lambda q=q: backend.recall(q, top_k=2, collections=(b"a",)) for q in queries])
    kinds = [type(one).__name__ for one in found]
    assert kinds == ["Recalled", "DimensionMismatch", "NonFiniteVector", "Recalled"] * 5
    assert {DimensionMismatch, NonFiniteVector} <= {type(one) for one in found}
    backend.close()


def test_what_comes_while_a_scan_runs_is_in_the_next_one():
    first, release = threading.Event(), threading.Event()
    sizes = []

    def scan(key, queries):
        sizes.append(len(queries))
        if len(sizes) == 1:
            first.set()
            assert release.wait(60)
        return [(key, float(query[0])) for query in queries]

    combiner = Combiner(scan)
    box = []
    leader = threading.Thread(target=lambda: box.append(combiner("k", np.zeros(1, np.float32))))
    leader.start()
    assert first.wait(60)
    count = TOGETHER_MAX + 20
    calls = [lambda n=n: combiner("k", np.full(1, n, np.float32)) for n in range(1, count + 1)]
    done = []
    rest = threading.Thread(target=lambda: done.extend(run_all(calls)))
    rest.start()
    while sum(len(waiting) for waiting in combiner._waiting.values()) < count:
        pass
    assert combiner("other", np.full(1, 5, np.float32)) == ("other", 5.0)  # waits for nobody
    release.set()
    leader.join(60)
    rest.join(60)
    assert box == [("k", 0.0)]
    assert done == [("k", float(n)) for n in range(1, count + 1)]
    assert sizes == [1, 1, TOGETHER_MAX, count - TOGETHER_MAX]
    assert combiner.combined == count - 2
    assert combiner._waiting == {}


def test_a_scan_that_fails_fails_for_all_that_were_in_it_and_the_next_ones_go_on():
    first, release = threading.Event(), threading.Event()
    calls = []

    def scan(key, queries):
        calls.append(len(queries))
        if len(calls) == 1:
            first.set()
            assert release.wait(60)
        if len(calls) == 2:
            raise StoreCorrupt("damage", "vectors", 5)
        return list(range(len(queries)))

    combiner = Combiner(scan)
    query = np.zeros(1, np.float32)
    leader = threading.Thread(target=lambda: combiner("k", query))
    leader.start()
    assert first.wait(60)
    done = []
    rest = threading.Thread(target=lambda: done.extend(run_all([lambda: combiner("k", query)] * 9)))
    rest.start()
    while sum(len(waiting) for waiting in combiner._waiting.values()) < 9:
        pass
    release.set()
    leader.join(60)
    rest.join(60)
    assert [type(one) for one in done] == [StoreCorrupt] * 9
    assert combiner("k", query) == 0
