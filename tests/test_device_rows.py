"""Vector rows on a device: what is read back is what the store has, also while it grows."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import faults
from helpers.device_memory import open_memory
from helpers.device_rows import (
    dead_rows,
    newest,
    on_device,
    opening_rows,
    tokens_at,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kalos_ctx import _row_follower
from kalos_ctx._device_rows import DeviceRows
from kalos_ctx._row_source import newest_rows
from kalos_ctx._vectors import StoreMoved, check_vectors
from kalos_ctx.errors import DeviceError, InvalidArgument, StoreClosed
from kalos_ctx.store import SessionStore

MIB = 1 << 20


@pytest.fixture(scope="module")
def memory():
    """Return the device's memory as the driver shows it."""
    memory = open_memory()
    before = memory.problems()
    yield memory
    assert memory.problems() == before


@pytest.fixture
def store(store_path):
    with SessionStore.open(store_path, segment_bytes=1 << 16) as opened:
        yield opened


@pytest.fixture
def opened(memory):
    with opening_rows(memory) as open_rows:
        yield open_rows


# ---- Rows are what the store has -----------------------------------------------------------------


SHAPES = st.tuples(
    st.sampled_from(["float32", "float16"]),
    st.sampled_from([8, 31, 32, 33, 64, 100, 256, 399]),
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.integers(0, 4000),
)


@settings(max_examples=25)
@given(SHAPES)
def test_random_store_is_read_back_as_it_is(memory, tmp_path_factory, shape):
    dtype, dim, batches, staging = shape
    path = tmp_path_factory.mktemp("random") / "store"
    data = vectors(sum(batches), dim, dim)
    with SessionStore.open(path, segment_bytes=1 << 17, vector_dtype=dtype) as store:
        rows, begin = None, 0
        for size in batches:
            store.add_passages("c", data[begin : begin + size])
            begin += size
            if rows is None:
                rows = DeviceRows.open(memory.device, newest(store), staging_nbytes=staging)
            rows.update(newest(store))
        checked = check_vectors(data, dtype=dtype)
        found = on_device(memory, rows)
        assert rows.num_rows == len(data)
        assert (rows.dim, rows.dim_padded) == (dim, -(-dim // 32) * 32)
        assert found.rows.shape[1] == rows.dim_padded
        assert found.rows[:, :dim].tobytes() == checked.stored.tobytes()
        assert not found.rows[:, dim:].any()
        assert found.factors.tobytes() == checked.factors.tobytes()
        assert not found.dead.any()
        rows.self_check()
        rows.close()


def test_places_name_the_tokens_of_passages_and_turns(memory, store, opened):
    expected = []
    for i in range(40):
        tokens = list(range(i, 2 * i + 1))
        if i % 3:
            store.add_passages("c", vectors(1, 9, i), token_ids=[tokens])
        else:
            store.append("s", "user", token_ids=tokens, vector=vectors(1, 9, i)[0])
        expected.append(tokens)
    rows = opened(store)
    rows.load(newest(store))
    places = on_device(memory, rows).places
    assert [tokens_at(store, place) for place in places] == expected


def test_place_of_a_row_without_a_readable_entry_is_zero(memory, store, opened):
    for i in range(3):
        store.append("s", "user", token_ids=[7, i], vector=[1.0, i])
    store.rollback("s", 1)
    store.append("s", "user", token_ids=[8], vector=[2.0, 0.0])
    store.delete_passages("c", store.add_passages("c", [[1.0, 1.0]], token_ids=[[5]]))
    rows = opened(store)
    rows.update(newest(store))
    places = on_device(memory, rows).places
    assert [place["tokens"] for place in places] == [2, 0, 2, 1, 0]
    assert places[1].tobytes() == places[4].tobytes() == bytes(16)


def test_segments_padding_in_the_store_does_not_reach_the_device(memory, store, opened):
    store.add_passages("c", vectors(3, 5))
    path = next(Path(store.path).glob("gen-*/vec-000000"))
    raw = bytearray(path.read_bytes())
    raw[20:32] = b"\xff" * 12
    path.write_bytes(raw)
    rows = opened(store)
    rows.load(newest(store))
    assert not on_device(memory, rows).rows[:, 5:].any()


# ---- Following the store -------------------------------------------------------------------------


def test_nothing_new_asks_nothing_of_the_driver(memory, store, opened):
    store.add_passages("c", vectors(100, 8))
    rows = opened(store)
    known = newest(store)
    rows.load(known)
    before = memory.device.counts()
    for _ in range(10):
        rows.update(known)
        assert not rows.bring_newest(known)
    assert memory.device.counts() == before
    assert newest_rows(store._core, known) is known
    store.append("s", "user", token_ids=[1])
    assert newest_rows(store._core, known) is known
    store.append("s", "user", token_ids=[1], vector=vectors(1, 8)[0])
    assert newest_rows(store._core, known).num_rows == 101


def test_g16_deleted_rows_are_one_bit_on_the_device(memory, store, opened):
    ids = store.add_passages("c", vectors(200, 8))
    rows = opened(store)
    rows.load(newest(store))
    for row in (0, 31, 32, 63, 64, 199):
        before = memory.device.counts()["copies"]
        rows.delete(row)
        assert memory.device.counts()["copies"] == before + 1
    rows.delete(200)  # not there yet
    before = memory.device.counts()["copies"]
    rows.update(newest(store))
    assert memory.device.counts()["copies"] == before
    gone = [0, 31, 32, 63, 64, 199]
    assert dead_rows(memory, rows) == gone
    for row in (1, 130):
        store.delete_passages("c", [int(ids[row])])
    before = memory.device.counts()["copies"]
    rows.update(newest(store))
    assert memory.device.counts()["copies"] == before + 1
    assert dead_rows(memory, rows) == sorted([*gone, 1, 130])
    store.add_passages("c", vectors(1, 8))
    rows.update(newest(store))
    assert dead_rows(memory, rows) == sorted([*gone, 1, 130])


def test_rows_deleted_before_they_come_have_their_bit(memory, store, opened):
    ids = store.add_passages("c", vectors(70, 8))
    rows = opened(store)
    rows.load(newest(store))
    more = store.add_passages("c", vectors(70, 8, 1))
    for id_ in (ids[69], more[0], more[60]):
        store.delete_passages("c", [int(id_)])
    rows.update(newest(store))
    found = on_device(memory, rows)
    assert np.flatnonzero(found.dead).tolist() == [69, 70, 130]
    assert found.factors[70] == 0


def test_bits_of_rows_that_are_not_there_yet_are_not_taken(memory, store, opened):
    """Such a row may have had another owner in a batch that was lost."""
    store.add_passages("c", vectors(70, 8))
    known = newest(store)
    more = store.add_passages("c", vectors(20, 8, 1))
    store.delete_passages("c", [int(more[5])])
    rows = opened(store)
    rows.load(known)
    rows.update(known)
    assert not memory.read(rows.dead, np.uint8, 16).any()
    rows.update(newest(store))
    assert dead_rows(memory, rows) == [75]


def test_entries_behind_what_a_reader_had_mapped_are_found(memory, store, opened):
    store.add_passages("c", vectors(1, 8), token_ids=[[1, 2, 3]])
    with SessionStore.open(store.path, "r") as reader:
        rows = opened(reader)
        rows.load(newest(reader))
        store.add_passages("c", vectors(5000, 8), token_ids=[[1, 2, 3]] * 5000)
        rows.update(newest(reader))
        assert (on_device(memory, rows).places["tokens"] == 3).all()


def test_follower_brings_rows_while_a_writer_appends(memory, store, opened):
    data = vectors(600, 24)
    store.add_passages("c", data[:1])
    with SessionStore.open(store.path, "r") as reader:
        rows = opened(reader)
        rows.load(newest(reader))
        core = reader._core
        rows.start_following(lambda known: newest_rows(core, known))
        rows.start_following(lambda known: pytest.fail("a second thread"))
        for begin in range(1, 600, 37):
            store.add_passages("c", data[begin : begin + 37])
            if begin % 2:  # a recall does not wait for the thread
                rows.update(newest(reader))
                assert rows.num_rows == min(begin + 37, 600)
        wait_until(lambda: rows.num_rows == 600)
        assert on_device(memory, rows).rows[:, :24].tobytes() == data.tobytes()
        rows.self_check()
        rows.close()
        rows.close()
    assert "kalos-rows" not in {thread.name for thread in threading.enumerate()}


def wait_until(happened, seconds=30):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_follower_ends_with_its_rows_and_with_its_store(memory, store):
    store.add_passages("c", vectors(5, 8))

    def threads():
        return sum(thread.name == "kalos-rows" for thread in threading.enumerate())

    core = store._core
    rows = DeviceRows.open(memory.device, newest(store))
    rows.start_following(lambda known: newest_rows(core, known))
    assert threads() == 1
    del rows
    wait_until(lambda: threads() == 0)
    rows = DeviceRows.open(memory.device, newest(store))
    rows.start_following(lambda known: newest_rows(core, known))
    store.close()
    wait_until(lambda: threads() == 0)
    rows.close()


def test_follower_warns_once_and_goes_on(memory, store, opened, caplog, monkeypatch):
    monkeypatch.setattr(_row_follower, "ERROR_PAUSE", 0.001)
    store.add_passages("c", vectors(5, 8))
    rows, calls = opened(store), []

    def fail_twice(known):
        calls.append(known)
        if len(calls) < 3:
            raise MemoryError("no room")
        return newest(store)

    rows.start_following(fail_twice)
    wait_until(lambda: rows.num_rows == 5)
    assert [record.message for record in caplog.records] == [
        "new vectors cannot be brought onto the GPU: no room"
    ]


def test_compaction_moves_the_store_away_from_the_rows(store, opened):
    ids = store.add_passages("c", vectors(5, 8))
    rows = opened(store)
    rows.load(newest(store))
    store.delete_passages("c", [int(ids[0])])
    store.compact()
    with pytest.raises(StoreMoved):
        rows.update(newest(store))
    assert rows.num_rows == 5


def test_two_threads_follow_one_store(memory, store, opened):
    data = vectors(2000, 16)
    store.add_passages("c", data[:1])
    rows = opened(store, staging_nbytes=4096)
    maps = [newest(store)]
    for begin in range(1, 2000, 173):
        store.add_passages("c", data[begin : begin + 173])
        maps.append(newest(store))

    def follow():
        for known in maps:
            rows.update(known)
            assert rows.num_rows >= known.num_rows

    threads = [threading.Thread(target=follow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on_device(memory, rows).rows[:, :16].tobytes() == data.tobytes()


# ---- Load, check, end ----------------------------------------------------------------------------


def test_load_tells_how_far_it_is(memory, store_path, opened):
    data = vectors(17_000, 1024)
    with SessionStore.open(store_path) as store:
        store.add_passages("c", data)
        rows, told = opened(store), []
        rows.load(newest(store), lambda done, total: told.append((done, total)))
        assert told == [(64 * MIB // 4096, 17_000), (17_000, 17_000)]
        rows.load(newest(store), lambda done, total: told.append((done, total)))
        assert len(told) == 2
        assert rows.row_memory.num_chunks == 1
        assert on_device(memory, rows).rows.tobytes() == data.tobytes()


def test_load_that_its_caller_ends_keeps_what_arrived(memory, store, opened):
    store.add_passages("c", vectors(300, 8))

    def end(done, total):
        raise KeyboardInterrupt

    rows = opened(store)
    with pytest.raises(KeyboardInterrupt):
        rows.load(newest(store), end)
    assert rows.num_rows == 300
    rows.load(newest(store))


@pytest.mark.parametrize(
    ("what", "address", "nbytes"),
    [
        ("a value", lambda rows: rows.base, 4),
        ("the padding", lambda rows: rows.base + 8 * 4, 4),
        ("the place of the tokens", lambda rows: rows.places, 4),
        ("the factor", lambda rows: rows.factors, 4),
        ("the bit", lambda rows: rows.dead, 1),
    ],
)
def test_g30_self_check_finds_a_row_that_was_not_copied(
    memory, store, opened, what, address, nbytes
):
    store.add_passages("c", vectors(100, 8), token_ids=[[1, 2]] * 100)
    rows = opened(store)
    rows.load(newest(store))
    memory.write(address(rows), b"\x55" * nbytes)
    with pytest.raises(DeviceError, match=f"does not hold .*: {what} of row 0 differs"):
        rows.self_check()


def test_self_check_passes_over_rows_that_were_deleted_or_damaged_since(memory, store, opened):
    ids = store.add_passages("c", vectors(3, 8))
    rows = opened(store)
    rows.load(newest(store))
    store.delete_passages("c", [int(ids[0])])
    path = next(Path(store.path).glob("gen-*/vec-000000"))
    with path.open("r+b") as file:
        file.seek(32)
        file.write(b"\x55")
    rows.self_check()


def test_closed_rows_are_refused(store, opened):
    store.add_passages("c", vectors(3, 8))
    rows = opened(store)
    known = newest(store)
    rows.load(known)
    rows.close()
    assert rows.closed
    for call in (
        lambda: rows.update(known),
        lambda: rows.load(known),
        lambda: rows.delete(0),
        rows.self_check,
        lambda: rows.start_following(lambda known: known),
    ):
        with pytest.raises(StoreClosed, match="the rows on the device are closed"):
            call()


def test_store_without_a_dimension_is_refused(store, opened):
    with pytest.raises(InvalidArgument, match="at least 1 dimension"):
        opened(store)
    with pytest.raises(TypeError, match=r"DeviceRows\.open"):
        DeviceRows()


CHILD = """
import os, sys
import numpy as np
from helpers.device_memory import open_memory
from kalos_ctx._device_rows import DeviceRows
from kalos_ctx._row_source import newest_rows
from kalos_ctx.store import SessionStore
device = open_memory().device
store = SessionStore.open(sys.argv[1])
store.add_passages("c", np.ones((5, 8), np.float32))
core = store._core
rows = DeviceRows.open(device, newest_rows(core))
rows.start_following(lambda known: newest_rows(core, known))
"""


ASYNCHRONOUS = """
import sys
from helpers.device_memory import open_memory
from helpers.device_rows import newest, on_device, opening_rows, vectors
from kalos_ctx.store import SessionStore
memory, data = open_memory(), vectors(700, 40)
with SessionStore.open(sys.argv[1]) as store, opening_rows(memory) as open_rows:
    store.add_passages("c", data[:300])
    rows = open_rows(store, staging_nbytes=8192)
    rows.load(newest(store))
    store.add_passages("c", data[300:])
    rows.update(newest(store))
    print(on_device(memory, rows).rows[:, :40].tobytes() == data.tobytes())
"""


def test_copies_that_take_their_time_are_waited_for(memory, store_path):
    slow = {"KALOS_FAKE_ASYNC": 100, "KALOS_FAKE_STRICT": 1}
    assert faults.checked_child(ASYNCHRONOUS, store_path, **slow) == "True\n"


def test_process_ends_while_a_follower_runs(memory, store_path):
    assert faults.checked_child(CHILD + "print('end')", store_path) == "end\n"


def test_fork_closes_without_the_driver(memory, store_path):
    code = CHILD + (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    rows.close()\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "rows.close()\n"
    )
    assert faults.checked_child(code, store_path) == "7\n"
