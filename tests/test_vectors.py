"""Rows of slots: runs, how they merge and shrink, and how they follow a store."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kalos_ctx import _vectors
from kalos_ctx.errors import DimensionMismatch, InvalidArgument, InvalidType, StoreCorrupt
from kalos_ctx.store import SessionStore


def make_runs(rows, seqs, slot=1):
    """Runs of one slot, one a row, in the order of rows."""
    order = np.argsort(rows)
    rows, seqs = np.array(rows, np.uint64)[order], np.array(seqs, np.uint32)[order]
    spans = np.column_stack((rows, np.ones(len(rows), np.uint64)))
    edges = np.column_stack((seqs, seqs)).astype(np.uint64)
    owners = np.zeros(len(rows), np.uint32)
    return _vectors.Runs((slot,), np.ascontiguousarray(spans), seqs, owners, edges)


def pairs(runs):
    """Every (row, seq, owner) of some runs."""
    return [
        (int(start) + i, int(seq) + i, int(owner))
        for (start, count), seq, owner in zip(runs.spans, runs.seqs, runs.owners, strict=True)
        for i in range(int(count))
    ]


ROWS = st.lists(st.integers(0, 40), unique=True, max_size=20)


@given(ROWS, st.data())
def test_runs_picked_and_without_keep_what_they_should(rows, data):
    seqs = list(range(3, 3 + len(rows)))
    if data.draw(st.booleans()):
        rows = sorted(rows)
    runs = make_runs(rows, seqs)
    known = set(zip(rows, seqs, strict=True))
    assert runs.every_seq().tolist() == seqs
    chosen = sorted(data.draw(st.sets(st.integers(0, 30))))
    picked = runs.picked(np.array(chosen, np.uint32))
    expected = sorted((row, seq, 0) for row, seq in known if seq in chosen)
    assert pairs(picked) == expected
    assert picked.num_rows == len(expected)
    gone = data.draw(st.sets(st.integers(0, 40)))
    rest = picked.without(gone)
    assert pairs(rest) == [one for one in expected if one[0] not in gone]
    assert (np.diff(rest.spans.sum(axis=1).astype(np.int64)) > 0).all()


@given(st.lists(ROWS, max_size=4))
def test_merged_runs_ascend_and_keep_their_owners(parts):
    taken = set()
    parts = [[row for row in rows if not (row in taken or taken.add(row))] for rows in parts]
    runs = [make_runs(rows, range(len(rows)), slot) for slot, rows in enumerate(parts)]
    merged = _vectors.merged_runs(runs)
    assert pairs(merged) == sorted(
        (row, seq, owner if len(parts) > 1 else 0)
        for owner, rows in enumerate(parts)
        for seq, row in enumerate(rows)
    )
    if len(parts) != 1:
        assert merged.slots == tuple(range(len(parts)))


def test_ids_ascend_sees_rows_out_of_order():
    assert _vectors.ids_ascend(make_runs([], []))
    assert _vectors.ids_ascend(make_runs([5, 9], [0, 1]))
    assert not _vectors.ids_ascend(make_runs([9, 5], [0, 1]))
    assert not _vectors.ids_ascend(_vectors.merged_runs([make_runs([1], [4]), make_runs([2], [4])]))


def runs_in(store, name, kind=2):
    slot = store._core.slot_state(kind, b"", name)["slot_off"]
    return _vectors.RowFiles(store._core).runs_of_slot(slot, kind == 1)


def test_rows_of_a_slot_leave_out_what_is_gone_and_what_has_no_vector(store_path):
    with SessionStore.open(store_path) as store:
        for i in range(6):
            store.append("s", "user", token_ids=[1], vector=[1, i] if i % 2 else None)
            store.add_passages("c", [[i, 1]])
        store.delete_passages("c", [2])
        assert runs_in(store, b"s", 1).every_seq().tolist() == [1, 3, 5]
        assert runs_in(store, b"c").every_seq().tolist() == [0, 1, 3, 4, 5]
        store.rollback("s", 4)
        assert runs_in(store, b"s", 1).every_seq().tolist() == [1, 3]


def test_rows_of_a_slot_are_extended_by_one_run_where_they_go_on(store_path):
    with SessionStore.open(store_path) as store:
        store.add_passages("c", np.eye(3))
        files = _vectors.RowFiles(store._core)
        slot = store._core.slot_state(2, b"", b"c")["slot_off"]
        before = files.runs_of_slot(slot, False)
        store.add_passages("c", np.eye(3))
        after = files.runs_of_slot(slot, False)
        assert before.spans.tolist() == [[0, 3]]
        assert after.spans.tolist() == [[0, 6]]
        assert files.runs_of_slot(slot, False) is after


def vector_file(store_path):
    return next(store_path.glob("gen-*/vec-000000"))


@pytest.mark.parametrize("metric", ["cosine", "ip", "l2"])
def test_flipped_bit_in_a_row_raises_and_names_it(store_path, metric):
    with SessionStore.open(store_path, metric=metric) as store:
        store.add_passages("c", np.eye(5, dtype=np.float32))
        store.add_passages("d", np.eye(5, dtype=np.float32))
    with vector_file(store_path).open("r+b") as file:
        file.seek(32 * 3 + 13)
        file.write(b"\x01")
    with SessionStore.open(store_path, "r") as store:
        with pytest.raises(StoreCorrupt) as caught:
            runs_in(store, b"c")
        assert caught.value.file.endswith("vec-000000")
        assert caught.value.offset == 96
        assert runs_in(store, b"d").num_rows == 5


def test_flipped_factor_raises_under_cosine(store_path):
    with SessionStore.open(store_path) as store:
        store.add_passages("c", np.eye(5, dtype=np.float32))
    with next(store_path.glob("gen-*/rows")).open("r+b") as file:
        file.seek(16 * 2 + 4)
        byte = file.read(1)[0]
        file.seek(16 * 2 + 4)
        file.write(bytes([byte ^ 1]))
    with (
        SessionStore.open(store_path, "r") as store,
        pytest.raises(StoreCorrupt, match="byte 64"),
    ):
        runs_in(store, b"c")


def test_row_check_raises_again_and_learns_nothing_from_a_failure(store_path):
    with SessionStore.open(store_path) as store:
        store.add_passages("c", np.eye(4, dtype=np.float32))
    raw = vector_file(store_path).read_bytes()
    vector_file(store_path).write_bytes(raw[:16] + b"\xff" + raw[17:])
    with SessionStore.open(store_path, "r") as store:
        files = _vectors.RowFiles(store._core)
        slot = store._core.slot_state(2, b"", b"c")["slot_off"]
        for _ in range(2):
            with pytest.raises(StoreCorrupt):
                files.runs_of_slot(slot, False)
        with vector_file(store_path).open("r+b") as file:
            file.write(raw)
        assert files.runs_of_slot(slot, False).num_rows == 4


@pytest.mark.parametrize(
    ("rows", "error"),
    [([1.0], InvalidArgument), ([["a"]], InvalidType), (np.empty((2, 0)), DimensionMismatch)],
)
def test_row_factors_wrong_rows_are_refused(rows, error):
    with pytest.raises(error):
        _vectors.row_factors(rows)
