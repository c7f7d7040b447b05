"""Passages: IDs, vectors, deletion; the cases B81, B83, B84 and B87 as far as the store goes."""

import numpy as np
import pytest
from helpers.store_files import OtherProcess, content_digest

from kalos_ctx._reader import COLLECTION, ENTRY_DEAD
from kalos_ctx.errors import (
    Conflict,
    DimensionMismatch,
    IdempotencyConflict,
    InvalidArgument,
    NonFiniteVector,
    PassageNotFound,
)
from kalos_ctx.store import SessionStore


@pytest.fixture
def store(store_path):
    """Return an empty store."""
    with SessionStore.open(store_path, segment_bytes=65536) as store:
        yield store


def rows(n, dim=4, seed=0):
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


def test_passages_come_back_with_every_field(store, clock):
    vectors = rows(3)
    ids = store.add_passages(
        "c",
        vectors,
        texts=["one", None, "drei ü"],
        token_ids=[[1, 2], None, np.array([3])],
        metadata=[{"a": 1}, {}, None],
    )
    assert ids.dtype == np.uint64
    assert ids.tolist() == [0, 1, 2]
    found = store.passages("c", ids)
    assert [p.id for p in found] == [0, 1, 2]
    assert [p.text for p in found] == ["one", None, "drei ü"]
    assert [p.token_ids.tolist() for p in found] == [[1, 2], [], [3]]
    assert [p.num_tokens for p in found] == [2, 0, 1]
    assert [p.metadata for p in found] == [{"a": 1}, {}, None]
    for passage, vector in zip(found, vectors, strict=True):
        assert passage.vector.dtype == np.float32
        assert (passage.vector == vector).all()
        assert passage.created_at > 1.6e9


def test_passages_in_any_order_and_repeated(store):
    store.add_passages("c", rows(5))
    assert [p.id for p in store.passages("c", [4, 0, 4, 2])] == [4, 0, 4, 2]
    assert [p.id for p in store.passages("c", (i for i in (3, 1)))] == [3, 1]
    assert [p.id for p in store.passages("c", np.array([2, 2], np.uint64))] == [2, 2]
    assert store.passages("c", []) == []


def places_in_columns(store, slot_off, wanted):
    """Find IDs in the columns of the whole collection: the reference of the bisection."""
    known, _, _, flags, _, _ = store._core.entry_columns(slot_off, 0)
    at = {int(one): place for place, one in enumerate(known)}
    places = [at.get(int(one), -1) for one in wanted]
    return places, [place >= 0 and bool(flags[place] & ENTRY_DEAD) for place in places]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 63, 64, 65, 1000])
def test_places_of_random_ids_equal_those_in_the_columns(store, n):
    draw = np.random.default_rng(n)
    # Ends of the range are IDs of some collections, and no IDs of others.
    ids = np.sort(draw.choice(3 * n + 2, n, replace=False))
    for part in np.array_split(ids, 3):  # extents of several calls
        store.add_passages("c", rows(len(part)), ids=part)
    store.delete_passages("c", ids[draw.random(n) < 0.2])
    slot_off = store._core.slot_state(COLLECTION, b"", b"c")["slot_off"]
    asked = [draw.integers(0, 3 * n + 3, draw.integers(0, 40)) for _ in range(50)]
    asked += [np.sort(one) for one in asked] + [np.arange(3 * n + 3), ids, ids[::-1]]
    asked += [np.array([0, 2**64 - 1, 0, 2**64 - 2], np.uint64), np.repeat(ids[-2:], 3)]
    for wanted in asked:
        found = store._core.passage_places(slot_off, wanted.astype(np.uint64))
        assert found == places_in_columns(store, slot_off, wanted)


def test_ids_ascend_over_all_collections_of_a_tenant(store):
    assert store.add_passages("a", rows(2)).tolist() == [0, 1]
    assert store.add_passages("b", rows(3)).tolist() == [2, 3, 4]
    assert store.add_passages("a", rows(1)).tolist() == [5]
    assert store.add_passages("a", rows(1), tenant="other").tolist() == [0]
    assert [p.id for p in store.passages("a", [0, 5])] == [0, 5]
    with pytest.raises(PassageNotFound):
        store.passages("a", [2])


def test_given_ids_are_kept_in_the_callers_order(store):
    vectors = rows(3)
    ids = store.add_passages("c", vectors, ids=[30, 10, 20], texts=["30", "10", "20"])
    assert ids.tolist() == [30, 10, 20]
    for one, vector in zip(ids, vectors, strict=True):
        [passage] = store.passages("c", [one])
        assert passage.text == str(one)
        assert (passage.vector == vector).all()
    assert store.add_passages("c", rows(1)).tolist() == [31]
    top = 2**64 - 2
    assert store.add_passages("c", rows(1), ids=[top]).tolist() == [top]


@pytest.mark.parametrize("ids", [[5, 6], [6, 5], [0, 20], [10, 10], [7, 11]])
def test_used_or_lower_id_raises_and_changes_nothing(store, store_path, ids):
    store.add_passages("c", rows(2), ids=[7, 10])
    before = content_digest(store_path)
    for collection in ("c", "new"):
        with pytest.raises(Conflict):
            store.add_passages(collection, rows(2), ids=ids)
    assert content_digest(store_path) == before
    with pytest.raises(PassageNotFound):
        store.passages("new", ids)
    assert store.add_passages("c", rows(1)).tolist() == [11]


def test_deleted_ids_are_never_given_again(store, store_path):
    store.add_passages("c", rows(3))
    assert store.delete_passages("c", [0, 1, 2]) == 3
    assert store.add_passages("c", rows(1)).tolist() == [3]
    assert store.delete_passages("c", [3]) == 1
    with pytest.raises(Conflict):
        store.add_passages("c", rows(1), ids=[3])
    store.close()
    with SessionStore.open(store_path) as again:
        assert again.add_passages("c", rows(1)).tolist() == [4]


def test_b81_deleted_passages_are_gone_in_every_process(store, store_path):
    store.add_passages("c", rows(6))
    with OtherProcess(store_path) as reader:
        assert reader.ask("len(store.passages('c', range(6)))") == 6
        assert store.delete_passages("c", [1, 3]) == 2
        assert reader.ask("[p.id for p in store.passages('c', [0, 2, 4, 5])]") == [0, 2, 4, 5]
        for one in (1, 3):
            assert reader.ask(f"store.passages('c', [{one}])") == "PassageNotFound"
    assert store.delete_passages("c", [1, 3, 5]) == 1
    assert store.delete_passages("c", [5, 5, 4, 4]) == 1
    assert store.delete_passages("c", []) == 0
    assert store.stats()["passages"] == 2


def test_deleting_one_that_never_was_raises_and_changes_nothing(store, store_path):
    store.add_passages("c", rows(3))
    before = content_digest(store_path)
    for ids in ([0, 3], [2**64 - 1], [7]):
        with pytest.raises(PassageNotFound):
            store.delete_passages("c", ids)
    with pytest.raises(PassageNotFound):
        store.delete_passages("nothing", [0])
    with pytest.raises(PassageNotFound):
        store.delete_passages("c", [0], tenant="t")
    assert content_digest(store_path) == before
    assert len(store.passages("c", [0, 1, 2])) == 3


def test_empty_call_adds_nothing(store):
    assert store.add_passages("c", np.empty((0, 4))).tolist() == []
    assert store.stats()["vector_dim"] is None
    assert store.tenants() == []


def test_more_than_a_batch_and_more_than_a_segment(store):
    vectors = rows(20_000, dim=2)
    ids = store.add_passages("c", vectors)
    assert ids.tolist() == list(range(20_000))
    for one in (0, 8191, 16383, 16384, 19_999):
        assert (store.passages("c", [one])[0].vector == vectors[one]).all()


# ---- Vectors ------------------------------------------------------------------------------------


def test_b87_first_vector_fixes_the_dimension(store, store_path):
    assert store.stats()["vector_dim"] is None
    store.append("s", "user", token_ids=[1], vector=[1.0, 2.0, 3.0])
    assert store.stats()["vector_dim"] == 3
    before = content_digest(store_path)
    for length in (1, 2, 4, 1536):
        with pytest.raises(DimensionMismatch, match=f"3 dimensions .got {length}"):
            store.append("s", "user", token_ids=[1], vector=[1.0] * length)
        with pytest.raises(DimensionMismatch):
            store.add_passages("c", np.ones((2, length)))
    assert content_digest(store_path) == before
    assert store.count("s") == 1
    store.close()
    with SessionStore.open(store_path) as again:
        with pytest.raises(DimensionMismatch):
            again.add_passages("c", np.ones((1, 2)))
        again.add_passages("c", np.ones((1, 3)))


def test_b87_refused_first_vector_leaves_the_dimension_open(store, clock):
    turn = {"role": "user", "token_ids": [1]}
    store.append("s", **turn, key="k")
    one, two = {**turn, "vector": [1.0]}, {**turn, "vector": [1.0, 2.0]}
    for error, call in (
        (IdempotencyConflict, lambda: store.append("s", **two, key="k")),
        (DimensionMismatch, lambda: store.extend("s", [one, two])),
        (InvalidArgument, lambda: store.extend("s", [one, {"role": "user"}])),
        (NonFiniteVector, lambda: store.add_passages("c", [[1.0], [np.nan]])),
        (InvalidArgument, lambda: store.add_passages("c", [[1.0, 2.0]], ids=[1, 2])),
    ):
        with pytest.raises(error):
            call()
        assert store.stats()["vector_dim"] is None
    store.append("s", **turn, vector=[1.0] * 5)
    assert store.stats()["vector_dim"] == 5


BAD_ROWS = [[np.nan, 1], [np.inf, 0], [1, np.nan], [0, -np.inf], [1e39, 0]]


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_b84_vector_that_is_not_finite_is_refused(store, store_path, bad):
    store.append("s", "user", token_ids=[1])
    before = content_digest(store_path)
    with pytest.raises(NonFiniteVector):
        store.append("s", "user", token_ids=[1], vector=bad)
    with pytest.raises(NonFiniteVector, match="row 1"):
        store.add_passages("c", [[1.0, 1.0], bad])
    assert content_digest(store_path) == before
    assert store.stats()["vector_dim"] is None


def test_b84_float16_overflow_is_refused_and_rows_are_rounded(store_path):
    with SessionStore.open(store_path, vector_dtype="float16") as store:
        for bad in ([7e4, 0], [-7e4, 0], [65520, 0]):
            with pytest.raises(NonFiniteVector):
                store.add_passages("c", [bad])
        values = np.array([[0.1, 65504.0], [1 / 3, -1e-7]])
        store.add_passages("c", values)
        found = np.array([p.vector for p in store.passages("c", [0, 1])])
        assert found.dtype == np.float16
        assert (found == values.astype(np.float32).astype(np.float16)).all()


def test_b83_zero_vector_is_kept(store, store_path):
    store.add_passages("c", [[0.0, 0.0], [0.0, -0.0], [1.0, 0.0]])
    store.append("s", "user", token_ids=[1], vector=[0, 0])
    assert store.passages("c", [0])[0].vector.tolist() == [0.0, 0.0]
    store.close()
    with SessionStore.open(store_path, "r") as again:
        assert again.passages("c", [1, 2])[1].vector.tolist() == [1.0, 0.0]
        assert again.verify().ok


@pytest.mark.parametrize(
    "given",
    [
        [[1, 2], [3, 4]],
        np.array([[1, 2], [3, 4]], np.int8),
        np.array([[1, 2], [3, 4]], np.float16),
        np.array([[1, 2], [3, 4]], ">f8"),
        np.array([[1, 3], [2, 4]], np.float32).T,
        np.array([[1, 9, 2, 9], [3, 9, 4, 9]], np.float32)[:, ::2],
        ((1.0, 2.0), (3.0, 4.0)),
    ],
    ids=str,
)
def test_vectors_of_any_real_type_and_layout(store, given):
    store.add_passages("c", given)
    assert [p.vector.tolist() for p in store.passages("c", [0, 1])] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("dim", [1, 3, 4, 7, 8, 384, 4096])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_dimension_comes_back(tmp_path, dim, dtype):
    vectors = rows(9, dim).astype(dtype)
    path = tmp_path / "s"
    with SessionStore.open(path, vector_dtype=dtype, segment_bytes=2**20) as store:
        store.add_passages("c", vectors)
        store.append("s", "user", token_ids=[1], vector=vectors[0])
    with SessionStore.open(path, "r") as store:
        found = np.array([p.vector for p in store.passages("c", range(9))])
        assert (found == vectors).all()


@pytest.mark.parametrize(("dtype", "most"), [("float32", 256), ("float16", 512)])
def test_dimension_whose_rows_do_not_fit_a_segment_is_refused(tmp_path, dtype, most):
    options = {"vector_dtype": dtype, "segment_bytes": 65536}
    with pytest.raises(DimensionMismatch, match="segment_bytes"):
        SessionStore.open(tmp_path / "new", vector_dim=most + 1, **options)
    assert not (tmp_path / "new").exists()
    with SessionStore.open(tmp_path / "s", **options) as store:
        for dim in (most + 1, 4096):
            with pytest.raises(DimensionMismatch, match="segment_bytes"):
                store.add_passages("c", np.ones((1, dim)))
            with pytest.raises(DimensionMismatch, match="segment_bytes"):
                store.append("s", "user", token_ids=[1], vector=[1.0] * dim)
        assert store.stats()["vector_dim"] is None
        store.add_passages("c", np.ones((70, most)))
        assert store.passages("c", [69])[0].vector.tolist() == [1.0] * most
    with pytest.raises(DimensionMismatch):
        SessionStore.open(tmp_path / "s", vector_dim=most + 1)


def test_passage_vector_is_the_callers_own(store):
    store.add_passages("c", [[1.0, 2.0]])
    vector = store.passages("c", [0])[0].vector
    store.delete_passages("c", [0])
    assert vector.tolist() == [1.0, 2.0]


def test_caller_may_change_its_array_afterwards(store):
    vectors = rows(2)
    kept = vectors.copy()
    store.add_passages("c", vectors)
    vectors[:] = 0
    assert (np.array([p.vector for p in store.passages("c", [0, 1])]) == kept).all()


@pytest.mark.parametrize(
    ("column", "value"),
    [("texts", ["a"]), ("token_ids", [[1]]), ("metadata", [None] * 3), ("ids", [1])],
)
def test_column_of_another_length_is_refused(store, store_path, column, value):
    before = content_digest(store_path)
    with pytest.raises(InvalidArgument, match=column):
        store.add_passages("c", rows(2), **{column: value})
    assert content_digest(store_path) == before
