"""The store and hostile inputs: names and token IDs (FAULTS 43, 45)."""

import array
import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from kalos_ctx.errors import InvalidArgument, InvalidTokenId, InvalidType
from kalos_ctx.store import SessionStore

NAMES = [
    b"\0", b"a\0b", b"../../etc/passwd", b"..", b"/", b"/absolute", b".", b"~", b"\xff\xfe",
    b"\x80",
    "\u00e9".encode(), "e\u0301".encode(), b"A", b"a", b" ", b"\n", b"\r\n", b"%00", b"CON",
    b"x" * 1024,
    "\U0001f600".encode(), "\u202e".encode(), b"gen-000000", b"control", b"lock",
]  # fmt: skip


def test_fault_43_names_are_kept_byte_for_byte_and_are_never_files(tmp_path):
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        for i, name in enumerate(NAMES):
            store.append(name, "user", token_ids=[i])
            store.append("in", "user", token_ids=[i], tenant=name)
        files = {p.name for p in tmp_path.rglob("*")}
    assert files == {
        "s", "control", "lock", "gen-000000", "log-000000", "tok-000000", "index", "rows", "dead",
    }  # fmt: skip
    (path / "gen-000000/index").unlink()
    for mode in ("a", "r"):
        with SessionStore.open(path, mode) as store:
            for i, name in enumerate(NAMES):
                assert [t.token_ids.tolist() for t in store.turns(name)] == [[i]]
                assert [t.token_ids.tolist() for t in store.turns("in", tenant=name)] == [[i]]
            listed = store.sessions(limit=1000).items
            assert [n if isinstance(n, bytes) else n.encode() for n in listed] == NAMES


def test_fault_43_names_of_one_letter_in_two_forms_are_two(tmp_path):
    with SessionStore.open(tmp_path / "s") as store:
        store.append("\u00e9", "user", token_ids=[1])
        store.append("e\u0301", "user", token_ids=[2])
        assert store.count("\u00e9") == store.count("e\u0301") == 1


@pytest.mark.parametrize(
    "name",
    ["", b"", b"x" * 1025, b"x" * 65536, "\ud800", "x" * 1025, None, 7, ["a"], bytearray(b"a")],
)
def test_fault_43_other_names_are_refused_and_nothing_is_kept(tmp_path, name):
    with SessionStore.open(tmp_path / "s") as store:
        end = store._core.log.end
        with pytest.raises(InvalidArgument):
            store.append(name, "user", token_ids=[1])
        assert store._core.log.end == end


@settings(max_examples=60)
@given(names=st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=12, unique=True))
def test_fault_43_any_bytes_are_a_name(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("s") / "s"
    with SessionStore.open(path) as store:
        for i, name in enumerate(names):
            store.append(name, "user", token_ids=[i])
    with SessionStore.open(path, "r") as store:
        for i, name in enumerate(names):
            assert store.turns(name)[0].token_ids.tolist() == [i]


INTEGERS = npst.integer_dtypes(endianness="?") | npst.unsigned_integer_dtypes(endianness="?")
ARRAYS = INTEGERS.flatmap(
    lambda dtype: npst.arrays(
        dtype,
        st.integers(1, 40),
        elements=st.integers(0, min(np.iinfo(dtype).max, 2**31 - 1)),
    )
)


@settings(max_examples=150)
@given(values=ARRAYS, step=st.integers(-3, 3).filter(bool), lock=st.booleans())
def test_fault_45_every_integer_array_comes_back_exactly(shared_store, values, step, lock):
    given_ids = values[::step]
    given_ids.flags.writeable = not lock and given_ids.flags.writeable
    want = [int(v) for v in given_ids]
    seq = shared_store.append("a", "user", token_ids=given_ids)
    assert shared_store.turns("a", seq, seq + 1)[0].token_ids.tolist() == want


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    """Return one store for many examples."""
    with SessionStore.open(tmp_path_factory.mktemp("inputs") / "s") as store:
        yield store


@pytest.mark.parametrize(
    "ids",
    [
        [0, 2**31 - 1], (1, 2), range(5), array.array("i", [1, 2]), array.array("q", [1, 2]),

        memoryview(array.array("H", [1, 2])), np.array([1, 2], ">i4"), np.array([1, 2], ">u8"),
        np.arange(20, dtype=np.int64)[::-3], np.array([True, False], bool).astype(np.int8),
        [np.int16(3), np.uint64(4)],
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_fault_45_every_kind_of_sequence_comes_back_exactly(shared_store, ids):
    want = [int(v) for v in ids]
    seq = shared_store.append("b", "user", token_ids=ids)
    assert shared_store.turns("b", seq, seq + 1)[0].token_ids.tolist() == want


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([], InvalidArgument), (np.empty(0, np.int32), InvalidArgument), ([-1], InvalidTokenId),
        ([2**31], InvalidTokenId), ([2**63], InvalidTokenId),
        ([2**200], InvalidTokenId), ([-(2**70)], InvalidTokenId),
        (np.array([-1], np.int8), InvalidTokenId), (np.array([2**31], np.int64), InvalidTokenId),
        (np.array([2**64 - 1], np.uint64), InvalidTokenId),
        (np.array([1.5]), InvalidType), ([1.0], InvalidType),
        ([None], InvalidType), ("12", InvalidType), (b"\1\2", InvalidType),
        (np.zeros((2, 2), np.int32), InvalidType),
        (7, InvalidType), ({1: 2}, InvalidType), (np.array(5), InvalidType), ([[1]], InvalidType),
    ],
)  # fmt: skip
def test_fault_45_other_ids_are_refused_and_nothing_is_kept(shared_store, ids, error):
    end = shared_store._core.log.end
    with pytest.raises(error):
        shared_store.append("c", "user", token_ids=ids)
    assert shared_store._core.log.end == end


def test_fault_45_buffer_freed_after_the_call_does_not_matter(shared_store):
    ids = np.arange(5000, dtype=np.int32)
    seq = shared_store.append("d", "user", token_ids=ids)
    del ids
    gc.collect()
    np.zeros(5000, np.int32)
    assert shared_store.turns("d", seq, seq + 1)[0].token_ids.tolist() == list(range(5000))
