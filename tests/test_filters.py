"""Filters: what may be asked, what matches, and the inverted index over a store that changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kalos_ctx import filters
from kalos_ctx.errors import InvalidArgument, InvalidType, UnknownField
from kalos_ctx.store import SessionStore

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.0, -0.0, 1.0, 1.5, 1e300, 2.0**70]),
    st.integers(2**70, 2**70 + 1),
    st.sampled_from(["", "a", "b", "1", "true", "null"]),
)
STORED = st.one_of(
    SCALARS,
    st.lists(st.one_of(SCALARS, st.lists(SCALARS, max_size=2)), max_size=4),
    st.dictionaries(st.sampled_from("xy"), SCALARS, max_size=2),
)
FIELDS = st.sampled_from(["a", "b", "a.b", "$or", ""])
METADATA = st.dictionaries(FIELDS, STORED, max_size=3)


def same(one, other):
    """Whether two JSON values are one value, written from the words."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other
    return type(one) is type(other) and isinstance(one, str | type(None)) and one == other


def plainly_passes(metadata, wanted):
    for field, values in wanted.items():
        if field not in metadata:
            return False
        stored = metadata[field] if isinstance(metadata[field], list) else [metadata[field]]
        asked = values if isinstance(values, list) else [values]
        if not any(same(x, y) for x in stored for y in asked):
            return False
    return True


def index_of(rows):
    index = filters.FieldIndex()
    for seq, metadata in enumerate(rows):
        index.add(seq, metadata)
    return index


@given(
    st.lists(METADATA, max_size=8),
    st.dictionaries(FIELDS, st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), min_size=1),
)
def test_filter_passing_equals_plain_python(rows, wanted):
    index = index_of(rows)
    found = index.passing(filters.checked(wanted))
    assert found.dtype == np.uint32
    assert found.tolist() == [i for i, row in enumerate(rows) if plainly_passes(row, wanted)]
    for field in wanted:
        assert index.holders(field).tolist() == [i for i, row in enumerate(rows) if field in row]


def test_filter_values_compare_as_json_values():
    rows = [{"a": v} for v in (1, 1.0, True, "1", None, [1, "x"], {"b": 1}, [[1]], False, 0)]
    index = index_of(rows)

    def passing(value):
        return index.passing(filters.checked({"a": value})).tolist()

    assert passing(1) == passing(1.0) == passing(np.int64(1)) == [0, 1, 5]
    assert passing(True) == passing(np.bool_(True)) == [2]
    assert passing("1") == [3]
    assert passing(None) == [4]
    assert passing(0) == passing(-0.0) == [9]
    assert passing(False) == [8]
    assert passing(["x", None]) == passing(("x", None)) == passing({"x", None}) == [4, 5]
    assert passing([]) == []


def test_filter_of_nothing_is_none():
    assert filters.checked(None) is None
    assert filters.checked({}) is None


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("a", InvalidType),
        ([("a", 1)], InvalidType),
        ({1: 1}, InvalidType),
        ({None: 1}, InvalidType),
        ({"a": {"$gt": 1}}, InvalidType),
        ({"a": [[1]]}, InvalidType),
        ({"a": b"x"}, InvalidType),
        ({"a": 1j}, InvalidType),
        ({"a": object()}, InvalidType),
        ({"a": float("nan")}, InvalidArgument),
        ({"a": [1, float("inf")]}, InvalidArgument),
        ({"a": np.float32("nan")}, InvalidArgument),
    ],
)
def test_g19_wrong_filter_is_refused(wrong, error):
    with pytest.raises(error, match=r"^filters"):
        filters.checked(wrong)


def test_filter_error_quotes_neither_field_nor_value():
    with pytest.raises(InvalidType) as caught:
        filters.checked({"my secret": [b"another secret"]})
    assert "secret" not in str(caught.value)
    with pytest.raises(UnknownField) as unknown:
        filters.require_known(filters.checked({"my secret": 1}), [index_of([{"a": 1}])])
    assert "secret" not in str(unknown.value)


def test_filter_known_field_needs_one_holder_in_any_slot():
    wanted = filters.checked({"a": 7, "b": 7})
    filters.require_known(wanted, [index_of([{"a": 1}]), index_of([{"b": 1}])])
    for indexes in ([], [index_of([])], [index_of([{"a": 1}]), index_of([{"c": 1}])]):
        with pytest.raises(UnknownField):
            filters.require_known(wanted, indexes)


@pytest.fixture
def store(store_path):
    with SessionStore.open(store_path, vector_dim=2) as opened:
        yield opened


def slot_of(store, name=b"c"):
    return store._core.slot_state(2, b"", name)["slot_off"]


def test_indexes_follow_a_collection_as_it_grows_and_loses(store):
    wanted = filters.checked({"a": 1})
    store.add_passages("c", [[1, 0]] * 3, metadata=[{"a": 1}, None, {"a": 2}])
    indexes = filters.MetadataIndexes(store._core)
    first = indexes.of(slot_of(store))
    assert first.passing(wanted).tolist() == [0]
    store.add_passages("c", [[1, 0]] * 2, metadata=[{"a": 1}, {"b": 1}])
    assert indexes.of(slot_of(store)) is first
    assert first.passing(wanted).tolist() == [0, 3]
    store.delete_passages("c", [0, 4])
    after = indexes.of(slot_of(store))
    assert after.passing(wanted).tolist() == [3]
    assert after.holders("b").tolist() == []


def test_indexes_of_long_unused_slots_go(store, monkeypatch):
    monkeypatch.setattr(filters, "POSTINGS_KEPT", 10)
    indexes = filters.MetadataIndexes(store._core)
    for name in ("c", "d", "e"):
        store.add_passages(name, [[1, 0]] * 2, metadata=[{"a": 1}, {"a": 2}])
    kept = [indexes.of(slot_of(store, name)) for name in (b"c", b"d", b"e")]
    assert all(one.num_postings == 4 for one in kept)
    assert indexes.of(slot_of(store, b"e")) is kept[2]
    assert indexes.of(slot_of(store, b"c")) is not kept[0]
