"""Exact top 10 on the CPU: Kalos, numpy, FAISS flat and usearch's exact search."""

from __future__ import annotations

import os
import sys
import tempfile

import numpy as np

from kalos_ctx import ContextAssembler, SessionStore
from rivals import measure
from rivals.chats import ROOT

K = 10
ROWS_384 = (1_000, 5_000, 20_000, 50_000, 100_000)


def embeddings(rows):
    """Unit rows: the 5,000 real MiniLM embeddings, and above that the same with some noise."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        from helpers.real_data import vectors
    finally:
        sys.path.pop(0)
    real, queries = (np.asarray(one, np.float32) for one in vectors())
    made = np.resize(real, (rows, real.shape[1]))
    if rows > len(real):
        rng = np.random.default_rng(3)
        made[len(real) :] += 0.02 * rng.standard_normal(made[len(real) :].shape, dtype=np.float32)
        made /= np.linalg.norm(made, axis=1, keepdims=True)
    return np.ascontiguousarray(made), queries


def random_rows(rows, dim):
    """Normal rows and queries."""
    rng = np.random.default_rng(1)
    return (
        rng.standard_normal((rows, dim), dtype=np.float32),
        rng.standard_normal((64, dim), dtype=np.float32),
    )


def numpy_way(rows):
    """Matmul and argpartition."""

    def search(query):
        scores = rows @ query
        best = np.argpartition(scores, -K)[-K:]
        return best[np.argsort(-scores[best])]

    return search


def faiss_ways(rows):
    """IndexFlatIP, as it comes and on one thread."""
    import faiss

    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    most = faiss.omp_get_max_threads()

    def on(threads):
        def search(query):
            faiss.omp_set_num_threads(threads)
            return index.search(query[None], K)[1][0]

        return search

    return {"FAISS flat": on(most), "FAISS flat, 1 thread": on(1)}


def usearch_way(rows):
    """Its exact search over an array."""
    from usearch.index import MetricKind
    from usearch.index import search as scan

    return lambda query: scan(rows, query, K, MetricKind.IP, exact=True).keys


def ways_for(rows, store):
    """Name to a function from a query to the row numbers of the best."""
    first = int(store.add_passages("docs", rows)[0])
    assembler = ContextAssembler(store, device="cpu")
    ways = {
        "Kalos": lambda query: assembler.recall(query, top_k=K, collections=("docs",)).ids - first,
        "numpy": numpy_way(rows),
    }
    for make in (faiss_ways, lambda rows: {"usearch exact": usearch_way(rows)}):
        try:
            ways |= make(rows)
        except ImportError as error:
            print(f"  ({error.name} is not installed: its rows are left out)")
    return ways, assembler


def same_best(rows, query, found, what):
    """Refuse hits that are not the best; equal scores may stand in either order."""
    scores = rows.astype(np.float64) @ query
    best = np.sort(scores)[::-1][:K]
    got = scores[np.asarray(found, np.int64)]
    if not np.allclose(got, best, atol=1e-5):
        raise AssertionError(f"{what} does not find the best {K}")


def recalls(say, out, *, quick=False):
    """Top 10 of growing numbers of rows."""
    shapes = [(rows, 384) for rows in (ROWS_384[:2] if quick else ROWS_384)]
    if not quick:
        shapes.append((65_536, 128))
    out["search"] = []
    for count, dim in shapes:
        rows, queries = embeddings(count) if dim == 384 else random_rows(count, dim)
        with (
            tempfile.TemporaryDirectory(prefix="kalos-rivals-") as folder,
            SessionStore.open(os.path.join(folder, "rows"), metric="ip") as store,
        ):
            ways, assembler = ways_for(rows, store)
            for name, search in ways.items():
                same_best(rows, queries[0], search(queries[0]), name)
            calls = {}
            for name, search in ways.items():
                turn = iter(range(10**9))
                calls[name] = lambda search=search, turn=turn: search(
                    queries[next(turn) % len(queries)]  # noqa: B023
                )
            found = measure.in_turn(calls, 0.2 if quick else 1.5)
            for name, row in found.items():
                out["search"].append({"road": name, "rows": count, "dim": dim, **row})
                say(f"{name:36} {count:8,} {row['p50']:12.2f} {row['p99']:12.2f}")
            assembler.close()
