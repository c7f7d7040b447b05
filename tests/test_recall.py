"""Recall over a store on the CPU: exact hits, scopes, filters, deletions, numbers."""

import functools
import math
import multiprocessing

import numpy as np
import pytest
from helpers import plain_recall, real_data
from helpers.recalls import bits, ids_of, make_backend, recall, serve_recalls
from hypothesis import given, settings
from hypothesis import strategies as st

from kalos_ctx.errors import (
    DimensionMismatch,
    InvalidArgument,
    InvalidType,
    NonFiniteVector,
    UnknownField,
)
from kalos_ctx.store import SessionStore

METRICS = ("cosine", "ip", "l2")


@pytest.fixture
def store(store_path, clock):
    with SessionStore.open(store_path, clock=clock) as opened:
        yield opened


# ---- Against a plain recall ----------------------------------------------------------------------


@functools.cache
def plain_score(row, query, metric):
    return plain_recall.score(row, query, metric)


def values(vector):
    return tuple(float(x) for x in vector)


class PlainStore:
    """Lists of (id, seq, collection, vector as stored, metadata), by tenant."""

    def __init__(self, dtype):
        self.dtype, self.tenants = dtype, {}

    def add(self, tenant, collection, vectors, metadata, ids):
        for vector, meta, one in zip(vectors, metadata, ids, strict=True):
            row = values(np.asarray(vector, np.float32).astype(self.dtype))
            self.tenants.setdefault(tenant, []).append((int(one), collection, row, meta or {}))

    def recall(self, tenant, collections, query, metric, k, min_score, wanted):
        query = values(np.float32(query))
        if metric == "cosine" and not any(query):
            return []
        found = []
        for one, collection, row, meta in self.tenants.get(tenant, ()):
            passes = all(meta.get(field) in asked for field, asked in (wanted or {}).items())
            if collection in collections and passes:
                score = plain_score(row, query, metric)
                if min_score is None or score >= min_score:
                    found.append((one, score, collection))
        return sorted(found, key=lambda hit: (-hit[1], hit[0]))[:k]


PALETTE = st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0, -0.1])
NAMES = st.sampled_from(["c", "d", "e"])
TENANTS = st.sampled_from(["", "t"])


@st.composite
def histories(draw):
    dim = draw(st.sampled_from([1, 2, 3, 33]))
    # Few distinct values make ties, which the ID must break.
    vectors = st.lists(PALETTE, min_size=dim, max_size=dim)
    steps = st.one_of(
        st.tuples(st.just("add"), TENANTS, NAMES, st.lists(vectors, min_size=1, max_size=4)),
        st.tuples(st.just("delete"), TENANTS, st.integers(0, 40)),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("compact")),
        st.tuples(
            st.just("recall"),
            TENANTS,
            st.lists(NAMES, unique=True, max_size=3),
            st.lists(vectors, min_size=1, max_size=3),
            st.sampled_from([0, 1, 3, 100]),
            st.sampled_from([None, 0, 0.0, 0.3, -1]),
            st.sampled_from([None, {"m": [0]}, {"m": [1, 2]}, {"m": [0, 1], "n": [1]}]),
        ),
    )
    config = draw(st.tuples(st.sampled_from(METRICS), st.sampled_from(["float32", "float16"])))
    return dim, config, draw(st.lists(steps, max_size=14))


def check_recall(backend, plain, metric, step):
    _, tenant, names, queries, k, min_score, wanted = step
    options = {
        "tenant": tenant.encode(),
        "top_k": k,
        "collections": tuple(name.encode() for name in names),
        "min_score": min_score,
        "filters": wanted,
    }
    rows = [row for row in plain.tenants.get(tenant, ()) if row[1] in names]
    if wanted and any(not any(field in row[3] for row in rows) for field in wanted):
        with pytest.raises(UnknownField):
            backend.recall(queries[0], **options)
        return
    singles = [backend.recall(query, **options) for query in queries]
    for query, single in zip(queries, singles, strict=True):
        expected = plain.recall(tenant, names, query, metric, k, min_score, wanted)
        assert ids_of(single) == [one for one, _, _ in expected]
        assert plain_recall.bits(single.hits.scores) == plain_recall.bits(
            [score for _, score, _ in expected]
        )
        assert list(single.hits.sources) == [name for _, _, name in expected]
    batch = backend.recall(queries, **options)
    assert ids_of(batch) == [one for single in singles for one in ids_of(single)]
    assert batch.hits.counts.tolist() == [len(single.hits) for single in singles]
    assert batch.places == [place for single in singles for place in single.places]


@settings(max_examples=60)
@given(histories())
def test_recall_equals_plain_recall_through_any_history(tmp_path_factory, history):
    dim, (metric, dtype), steps = history
    path = tmp_path_factory.mktemp("recall") / "s"
    store = SessionStore.open(path, metric=metric, vector_dtype=dtype, vector_dim=dim)
    reader = SessionStore.open(path, "r")
    backends = [make_backend(store), make_backend(reader)]
    plain, added = PlainStore(dtype), 0
    for step in steps:
        if step[0] == "add":
            _, tenant, name, vectors = step
            metadata = [{"m": (added + i) % 4, "n": i % 2} for i in range(len(vectors))]
            added += len(vectors)
            ids = store.add_passages(name, vectors, tenant=tenant, metadata=metadata)
            plain.add(tenant, name, vectors, metadata, ids)
        elif step[0] == "delete":
            rows = plain.tenants.get(step[1], [])
            if rows:
                one = rows.pop(step[2] % len(rows))
                store.delete_passages(one[1], [one[0]], tenant=step[1])
        elif step[0] == "reopen":
            store.close()
            store = SessionStore.open(path)
            backends[0] = make_backend(store)
        elif step[0] == "compact":
            store.compact()
        else:
            for backend in backends:
                check_recall(backend, plain, metric, step)
    store.close()
    reader.close()


def test_real_embeddings_give_the_recorded_ten_best(store_path):
    rows, queries = real_data.vectors()
    with SessionStore.open(store_path, metric="ip", vector_dtype="float16") as store:
        store.add_passages("chats", rows)
        found = make_backend(store).recall(queries, top_k=10, collections=(b"chats",)).hits
    expected = real_data.queries()
    assert found.ids.reshape(-1, 10).tolist() == [one["top10"] for one in expected]
    recorded = np.array([one["scores"] for one in expected])
    scores = found.scores.reshape(-1, 10)
    best = rows[found.ids.reshape(-1, 10)].astype(np.float64)
    assert np.abs(scores - np.einsum("qkd,qd->qk", best, queries.astype(np.float64))).max() < 2e-7
    # The recorded scores are products in another order, rounded to six digits.
    assert np.abs(scores - recorded).max() < 2e-6


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_over_many_segments_equal_one_scan(store_path, dtype):
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((5000, 20)).astype(dtype)
    with SessionStore.open(store_path, segment_bytes=65536, vector_dtype=dtype) as store:
        for at in range(0, 5000, 700):
            store.add_passages("ab"[at // 700 % 2], rows[at : at + 700])
        assert len(list(store_path.glob("gen-*/vec-*"))) > 3
        query = rng.standard_normal(20).astype(np.float32)
        found = recall(store, query, 1000, "a", "b")
        unit = rows.astype(np.float64) / np.linalg.norm(rows.astype(np.float64), axis=1)[:, None]
        scores = unit @ (query / np.linalg.norm(query))
        expected = np.sort(scores)[::-1][:1000]
        assert np.abs(found.hits.scores - expected).max() < 1e-5
        assert np.abs(scores[found.hits.ids] - expected).max() < 1e-5
        for one, (slot, seq, _) in zip(ids_of(found)[:50], found.places, strict=False):
            assert np.array_equal(store._core.passage_at(slot, seq).vector, rows[one])


# ---- Scopes --------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    st.lists(st.tuples(TENANTS, NAMES, st.integers(1, 3)), min_size=1, max_size=8),
    st.sampled_from(METRICS),
    st.integers(1, 20),
)
def test_b69_no_path_gives_rows_of_another_tenant(tmp_path_factory, adds, metric, k):
    path = tmp_path_factory.mktemp("tenants") / "s"
    with SessionStore.open(path, metric=metric) as store:
        for tenant, name, n in adds:
            # Both tenants hold the same vectors, and their IDs are the same numbers.
            texts = [tenant or "default"] * n
            store.add_passages(
                name, [[1.0, 2.0]] * n, tenant=tenant, texts=texts, metadata=[{"m": 1}] * n
            )
            store.append("s", "user", token_ids=[1], vector=[1.0, 2.0], tenant=tenant)
        backend = make_backend(store)
        for tenant in ("", "t"):
            mine = [n for owner, _, n in adds if owner == tenant]
            if not mine:
                continue
            for options in (
                {},
                {"filters": {"m": 1}},
                {"min_score": -100},
                {"session": b"s"},
                {"session": b"s", "as_of": 1},
            ):
                for query in ([1.0, 2.0], [[1.0, 2.0], [2.0, 1.0]]):
                    found = backend.recall(
                        query, tenant=tenant.encode(), top_k=k, collections=(b"c", b"d", b"e"),
                        **options,
                    )  # fmt: skip
                    passages = [place for place in found.places if not place[2]]
                    texts = {store._core.passage_at(*place[:2]).text for place in passages}
                    assert texts <= {tenant or "default"}
                    turns = options.get("as_of", len(mine)) if "session" in options else 0
                    expected = min(k, sum(mine) + turns)
                    assert found.hits.counts.tolist() == [expected] * np.ndim(query)


def test_recall_collection_without_passages_gives_no_hits(store):
    assert len(recall(store, [1.0], 5, "c").hits) == 0
    store.add_passages("c", [[1.0, 0.0]])
    assert len(recall(store, [1.0, 0.0], 5, "d").hits) == 0
    assert ids_of(recall(store, [1.0, 0.0], 5, "d", "c")) == [0]
    assert ids_of(recall(store, [1.0, 0.0], 5)) == []
    assert recall(store, np.empty((0, 2)), 5, "c").hits.counts.tolist() == []


def test_recall_collections_twice_or_in_another_order_changes_nothing(store):
    store.add_passages("c", [[1, 0], [0, 1]])
    store.add_passages("d", [[1, 0], [1, 1]])
    store.add_passages("c", [[1, 0]])
    expected = bits(recall(store, [1, 0], 10, "c", "d"))
    assert expected[0] == [0, 2, 4, 3, 1]
    assert bits(recall(store, [1, 0], 10, "d", "c", "d")) == expected


# ---- Filters -------------------------------------------------------------------------------------


def test_b80_filter_acts_before_the_cut(store):
    store.add_passages(
        "c",
        [[1, i / 10] for i in range(10)],
        metadata=[{"keep": i >= 4} for i in range(10)],
    )
    assert ids_of(recall(store, [1, 0], 5, "c", filters={"keep": True})) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("field", ["x') OR 1=1 --", "__class__", "m\0", "$ne", "m.m", "", "M"])
def test_b67_b68_unknown_filter_field_is_refused(store, field):
    store.add_passages("c", [[1, 0]], metadata=[{"m": 1}])
    store.append("s", "user", token_ids=[1], vector=[1, 0])
    for options in ({}, {"session": b"s"}):
        with pytest.raises(UnknownField):
            recall(store, [1, 0], 5, "c", filters={field: 1}, **options)
        with pytest.raises(UnknownField):
            recall(store, [1, 0], 5, "c", filters={"m": 1, field: 1}, **options)


def test_b67_hostile_filter_field_that_is_known_is_plain_data(store):
    hostile = "x') OR 1=1 --"
    store.add_passages("c", [[1, 0], [1, 0]], metadata=[{hostile: "a"}, {"m": 1}])
    assert ids_of(recall(store, [1, 0], 5, "c", filters={hostile: "a"})) == [0]
    assert ids_of(recall(store, [1, 0], 5, "c", filters={hostile: hostile})) == []


def test_b68_field_of_deleted_passages_is_unknown_again(store):
    store.add_passages("c", [[1, 0], [1, 0]], metadata=[{"m": 1}, {"n": 1}])
    backend = make_backend(store)
    options = {"top_k": 5, "collections": (b"c",), "filters": {"m": 1}}
    assert ids_of(backend.recall([1, 0], **options)) == [0]
    store.delete_passages("c", [0])
    with pytest.raises(UnknownField):
        backend.recall([1, 0], **options)


def test_filter_applies_to_the_sessions_turns_too(store):
    store.add_passages("c", [[1, 0]], metadata=[{"m": 1}])
    for i in range(4):
        store.append("s", "user", token_ids=[1], vector=[1, i], metadata={"m": i % 2})
    found = recall(store, [1, 0], 9, "c", session=b"s", filters={"m": 1})
    assert list(zip(found.hits.sources, ids_of(found), strict=True)) == [
        ("c", 0), ("session", 1), ("session", 3),
    ]  # fmt: skip
    assert ids_of(recall(store, [1, 0], 9, session=b"s", filters={"m": 0})) == [0, 2]


# ---- Deletion ------------------------------------------------------------------------------------


def test_b81_deleted_rows_take_no_place(store):
    store.add_passages("c", [[1, i] for i in range(6)])
    backend = make_backend(store)
    options = {"collections": (b"c",)}
    assert ids_of(backend.recall([1, 0], top_k=3, **options)) == [0, 1, 2]
    store.delete_passages("c", [0, 1, 2])
    assert ids_of(backend.recall([1, 0], top_k=3, **options)) == [3, 4, 5]
    assert ids_of(backend.recall([1, 0], top_k=4, **options)) == [3, 4, 5]


def test_b81_delete_counts_at_once_in_another_process(store, store_path):
    store.add_passages("c", [[1, i] for i in range(6)])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_recalls, args=(store_path, there))
    process.start()
    try:
        expected = list(range(6))
        for gone in (0, 1, 2, None):
            here.send([1.0, 0.0])
            assert here.poll(30)
            assert here.recv() == expected[:3]
            if gone is not None:
                store.delete_passages("c", [gone])
                expected.remove(gone)
        store.add_passages("c", [[1.0, 0.0]])
        here.send([1.0, 0.0])
        assert here.poll(30)
        assert here.recv() == [6, 3, 4]
    finally:
        here.send(None)
        process.join(30)
    assert process.exitcode == 0


def test_b96_erased_collection_and_tenant_are_not_recalled(store):
    backend = make_backend(store)
    for tenant in ("", "t"):
        store.add_passages("c", [[1, 0]], tenant=tenant)
    options = {"top_k": 5, "collections": (b"c",)}
    assert len(backend.recall([1, 0], tenant=b"t", **options).hits) == 1
    store.delete_tenant("t")
    assert len(backend.recall([1, 0], tenant=b"t", **options).hits) == 0
    assert len(backend.recall([1, 0], **options).hits) == 1
    store.add_passages("c", [[0, 1]], tenant="t")
    assert len(backend.recall([1, 0], tenant=b"t", **options).hits) == 1


def test_deleted_passage_whose_bit_was_lost_is_still_not_recalled(store, store_path):
    store.add_passages("c", [[1, i] for i in range(4)])
    backend = make_backend(store)
    assert len(backend.recall([1, 0], top_k=9, collections=(b"c",)).hits) == 4
    store.delete_passages("c", [1])
    with next(store_path.glob("gen-*/dead")).open("r+b") as file:
        file.write(b"\0")
    assert ids_of(backend.recall([1, 0], top_k=9, collections=(b"c",))) == [0, 2, 3]
    assert ids_of(backend.recall([1, 0], top_k=1, collections=(b"c",))) == [0]


# ---- Vectors and numbers -------------------------------------------------------------------------


def test_b83_zero_row_scores_zero_and_zero_query_recalls_nothing(store):
    store.add_passages("c", [[0, 0], [1, 0], [-1, 0]])
    found = recall(store, [1, 0], 5, "c")
    assert ids_of(found) == [1, 0, 2]
    assert found.hits.scores.tolist() == [1, 0, -1]
    nothing = recall(store, [0, -0.0], 5, "c")
    assert (len(nothing.hits), nothing.hits.reason) == (0, "zero_query")
    batch = recall(store, [[1, 0], [0, 0], [-1, 0]], 1, "c")
    assert (batch.hits.counts.tolist(), ids_of(batch)) == ([1, 0, 1], [1, 2])
    assert batch.hits.reason == "zero_query"
    assert found.hits.reason is None


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_b83_zero_query_is_a_query_for_other_metrics(store_path, metric):
    with SessionStore.open(store_path, metric=metric) as store:
        store.add_passages("c", [[3, 0], [1, 0]])
        found = recall(store, [0, 0], 5, "c")
    assert ids_of(found) == ([0, 1] if metric == "ip" else [1, 0])
    assert found.hits.reason is None


@pytest.mark.parametrize("bad", [[math.nan, 1], [math.inf, 0], [1, math.nan], [1, 1e39]])
def test_b84_non_finite_query_is_refused_and_names_the_place(store, bad):
    store.add_passages("c", [[1, 0]])
    with pytest.raises(NonFiniteVector, match=r"index \d"):
        recall(store, bad, 5, "c")
    with pytest.raises(NonFiniteVector, match=r"row 1, column \d"):
        recall(store, [[1, 0], bad], 0, "c")


def test_b84_non_finite_vector_is_refused_and_nothing_is_recalled(store_path):
    with SessionStore.open(store_path, vector_dtype="float16") as store:
        store.add_passages("c", [[1, 0]])
        for bad in ([math.nan, 1], [math.inf, 0], [7e4, 0]):
            with pytest.raises(NonFiniteVector):
                store.add_passages("c", [[0, 1], bad])
            with pytest.raises(NonFiniteVector):
                store.append("s", "user", token_ids=[1], vector=bad)
        assert ids_of(recall(store, [0, 1], 5, "c")) == [0]


def test_b86_zero_and_none_are_different(store):
    store.add_passages("c", [[1, 0], [0, 1], [-1, 0]])
    store.append("s", "user", token_ids=[1], vector=[1, 0])
    assert ids_of(recall(store, [1, 0], 5, "c", min_score=None)) == [0, 1, 2]
    assert ids_of(recall(store, [1, 0], 5, "c", min_score=0)) == [0, 1]
    assert ids_of(recall(store, [1, 0], 5, "c", min_score=0.0)) == [0, 1]
    assert ids_of(recall(store, [1, 0], 5, "c", min_score=-0.0)) == [0, 1]
    assert ids_of(recall(store, [1, 0], 0, "c")) == []
    with pytest.raises(InvalidType):
        recall(store, [1, 0], None, "c")
    assert ids_of(recall(store, [1, 0], 5, session=b"s", as_of=0)) == []
    assert ids_of(recall(store, [1, 0], 5, session=b"s", as_of=None)) == [0]


def test_min_score_is_inclusive_to_the_bit(store):
    store.add_passages("c", [[0.3, 0.4]])
    score = recall(store, [1, 2], 1, "c").hits.scores[0]
    assert len(recall(store, [1, 2], 1, "c", min_score=float(score)).hits) == 1
    above = math.nextafter(float(score), math.inf)
    assert len(recall(store, [1, 2], 1, "c", min_score=above).hits) == 0


def test_b87_query_of_another_dimension_is_refused(store):
    assert len(recall(store, [1, 2, 3], 5, "c").hits) == 0
    store.add_passages("c", [[1, 0]])
    for query in ([1], [1, 0, 0], [[1], [2]], []):
        with pytest.raises(DimensionMismatch, match="must have 2 dimensions"):
            recall(store, query, 5, "c")
    with pytest.raises(DimensionMismatch):
        store.append("s", "user", token_ids=[1], vector=[1, 0, 0])
    assert store.count("s") == 0


def test_b94_scores_fall_with_rank(store):
    rng = np.random.default_rng(5)
    store.add_passages("c", rng.standard_normal((300, 8)))
    store.add_passages("d", rng.standard_normal((300, 8)))
    for vector in rng.standard_normal((50, 8)):
        store.append("s", "user", token_ids=[1], vector=vector)
    hits = recall(store, rng.standard_normal(8), 200, "c", "d", session=b"s").hits
    assert len(hits) == 200
    assert (np.diff(hits.scores) <= 0).all()
    assert hits.ids.dtype == np.uint64
    assert hits.scores.dtype == np.float32
    assert set(hits.sources) == {"c", "d", "session"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"top_k": -1}, InvalidArgument),
        ({"top_k": 1025}, InvalidArgument),
        ({"top_k": True}, InvalidType),
        ({"top_k": 1.0}, InvalidType),
        ({"query": [[[1, 0]]]}, InvalidArgument),
        ({"query": 1.0}, InvalidArgument),
        ({"query": "ab"}, InvalidArgument),
        ({"query": None}, InvalidArgument),
        ({"query": ["a", "b"]}, InvalidType),
        ({"query": [1j, 0]}, InvalidType),
        ({"query": [[1, 0], [1]]}, InvalidType),
        ({"min_score": math.nan}, InvalidArgument),
        ({"min_score": "0"}, InvalidType),
        ({"min_score": True}, InvalidType),
        ({"collections": b"c"}, InvalidType),
        ({"collections": "c"}, InvalidType),
        ({"collections": None}, InvalidType),
        ({"collections": (1,)}, InvalidType),
        ({"collections": (b"",)}, InvalidArgument),
        ({"filters": [1]}, InvalidType),
        ({"as_of": -1}, InvalidArgument),
        ({"as_of": 1.5}, InvalidType),
    ],
)
def test_g19_wrong_argument_is_refused(store, options, error):
    store.add_passages("c", [[1, 0]])
    call = {"query": [1, 0], "top_k": 1, "collections": (b"c",)} | options
    with pytest.raises(error):
        make_backend(store).recall(call.pop("query"), **call)


def test_g23_scores_of_minus_infinity_keep_their_rows(store_path):
    with SessionStore.open(store_path, metric="ip") as store:
        store.add_passages("c", [[1e30, -1e30], [-1e30, 0], [1, 1]])
        found = recall(store, [1e30, 1e30], 5, "c")
        assert ids_of(found) == [2, 0, 1]
        assert found.hits.scores[1:].tolist() == [-math.inf, -math.inf]
        assert ids_of(recall(store, [1e30, 1e30], 2, "c", min_score=0)) == [2]


def test_g25_duplicate_rows_give_the_lowest_live_ids_every_time(store):
    rows = np.tile(np.arange(1, 9, dtype=np.float32), (3000, 1))
    for at in range(0, 3000, 500):
        store.add_passages("cd"[at // 500 % 2], rows[at : at + 500])
    store.delete_passages("c", [0, 3])
    for _ in range(20):
        assert ids_of(recall(store, rows[0], 4, "c", "d")) == [1, 2, 4, 5]


def test_g27_top_k_above_the_rows_gives_all_rows(store):
    store.add_passages("c", np.eye(3))
    for k in (2, 3, 4, 1024):
        assert len(recall(store, [1, 2, 3], k, "c").hits) == min(k, 3)


def test_g30_every_row_recalls_itself_first(store):
    rows = np.random.default_rng(8).standard_normal((200, 16))
    ids = store.add_passages("c", rows)
    found = recall(store, rows, 1, "c")
    assert found.hits.ids.tolist() == ids.tolist()


def test_ids_out_of_the_order_of_rows_still_break_ties(store_path):
    with SessionStore.open(store_path) as store:
        store.add_passages("c", [[1, 0]] * 3, ids=[30, 10, 20])
        store.add_passages("d", [[1, 0]] * 2, ids=[40, 35])
        assert ids_of(recall(store, [1, 0], 9, "d", "c")) == [10, 20, 30, 35, 40]
