"""Memory of rows on a device: how it grows, what a refusal leaves, and that it all comes back."""

import os

import numpy as np
import pytest
from helpers.device_memory import open_memory
from helpers.device_rows import dead_rows, newest, on_device, opening_rows, vectors

from kalos_ctx._device_memory import GrowingArray
from kalos_ctx._device_rows import DeviceRows
from kalos_ctx.errors import DeviceError, DeviceUnavailable
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


def needs_stand_in(memory):
    if memory.emulated is None:
        pytest.skip("a GPU's driver does not fail on demand")


# ---- Growth --------------------------------------------------------------------------------------


def test_g13_growth_keeps_addresses_and_takes_one_chunk_more(memory, store, opened):
    data = vectors(9000, 200)
    store.add_passages("c", data[:1])
    rows = opened(store, staging_nbytes=1 << 20)
    addresses = rows.base, rows.factors, rows.dead, rows.places
    before, known = memory.used(), 1
    while known < len(data):
        step = min(known, 1500, len(data) - known)
        store.add_passages("c", data[known : known + step])
        known += step
        rows.update(newest(store))
        # Each array is at most twice as long as its content while it is small.
        live = [known * size for size in (rows.stride_nbytes, 4, 1, 16)]
        spare = [min(max(nbytes, 2 * MIB), 34 * MIB) for nbytes in live]
        assert rows.nbytes <= sum(live) + sum(spare)
        assert memory.used() - before == rows.nbytes
    assert (rows.base, rows.factors, rows.dead, rows.places) == addresses
    assert on_device(memory, rows).rows[:, :200].tobytes() == data.tobytes()


def test_new_memory_is_zero(memory, store, opened):
    store.add_passages("c", vectors(10, 40))
    rows = opened(store)
    rows.update(newest(store))
    for array in rows.arrays():
        assert array.nbytes >= 2 * MIB
    behind = memory.read(rows.base + 10 * rows.stride_nbytes, np.uint8, 1 * MIB)
    assert not behind.any()
    assert not memory.read(rows.dead + 8, np.uint8, MIB).any()


def test_more_rows_than_addresses_are_refused(store, opened):
    store.add_passages("c", vectors(30, 8))
    rows = opened(store, max_rows=20)
    with pytest.raises(MemoryError, match=r"may be 20 \(30 are needed\)"):
        rows.load(newest(store))
    assert (rows.num_rows, rows.nbytes) == (0, 0)


def test_g15_memory_returns_after_every_close(memory, store):
    store.add_passages("c", vectors(500, 48))
    used, counts = memory.used(), memory.device.counts()
    for turn in range(20):
        rows = DeviceRows.open(memory.device, newest(store))
        rows.load(newest(store))
        assert memory.used() == used + rows.nbytes
        if turn % 2:  # the collector does as close does
            rows.close()
            assert (rows.num_rows, rows.nbytes, rows.arrays()) == (0, 0, ())
        del rows
        assert memory.used() == used
    after = memory.device.counts()
    assert after["pinned_nbytes"] == counts["pinned_nbytes"]
    assert after["device_nbytes"] == counts["device_nbytes"]


def test_g12_second_store_takes_little_beyond_its_rows(memory, store, opened):
    store.add_passages("c", vectors(2, 8))
    rows = opened(store)
    rows.load(newest(store))
    assert rows.nbytes <= 8 * MIB


def test_descriptors_follow_the_chunks(memory, store, opened):
    store.add_passages("c", vectors(10, 250))
    rows = opened(store)
    rows.load(newest(store))
    store.add_passages("c", vectors(4000, 250))
    rows.update(newest(store))
    handed = rows.row_memory.descriptors()
    newer = rows.row_memory.descriptors(1)
    try:
        assert len(handed) == rows.row_memory.num_chunks == 2
        assert sum(nbytes for _, nbytes in handed) == rows.row_memory.nbytes
        assert [nbytes for _, nbytes in newer] == [handed[1][1]]
        for fd, _ in handed:
            os.fstat(fd)
    finally:
        for fd, _ in handed + newer:
            os.close(fd)


def test_device_without_virtual_memory_is_refused(memory, store, monkeypatch):
    needs_stand_in(memory)
    store.add_passages("c", vectors(2, 8))
    monkeypatch.setenv("KALOS_FAKE_ATTRIBUTES", "102=0")
    with pytest.raises(DeviceUnavailable, match="no virtual memory management"):
        DeviceRows.open(memory.device, newest(store))
    monkeypatch.setenv("KALOS_FAKE_ATTRIBUTES", "103=0")
    rows = DeviceRows.open(memory.device, newest(store))
    rows.load(newest(store))
    with pytest.raises(DeviceUnavailable, match="to another process"):
        rows.row_memory.descriptors()
    rows.close()


def test_descriptors_that_fail_are_closed_again(memory, store, opened):
    needs_stand_in(memory)
    store.add_passages("c", vectors(10, 250))
    rows = opened(store)
    rows.load(newest(store))
    store.add_passages("c", vectors(4000, 250))
    rows.update(newest(store))
    before = len(os.listdir("/proc/self/fd"))
    with memory.failing("cuMemExportToShareableHandle:2:719"), pytest.raises(DeviceError):
        rows.row_memory.descriptors()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(TypeError, match="DeviceRows"):
        GrowingArray()


# ---- Refusals ------------------------------------------------------------------------------------


def state(memory, rows):
    return rows.num_rows, rows.nbytes, [array.num_chunks for array in rows.arrays()], memory.used()


def test_out_of_memory_changes_nothing(memory, store, opened):
    needs_stand_in(memory)  # a GPU's driver keeps memory back that it does not call free
    data = vectors(20_000, 32)
    store.add_passages("c", data[:100])
    rows = opened(store)
    before = state(memory, rows)
    # The rows themselves find room, what belongs to them does not.
    with memory.all_but(5 * MIB):
        with pytest.raises(MemoryError, match="the GPU has no memory to hold"):
            rows.update(newest(store))
        with pytest.raises(MemoryError):
            rows.load(newest(store))
    assert state(memory, rows) == before
    rows.update(newest(store))
    before = state(memory, rows)
    store.add_passages("c", data[100:])
    with memory.all_but(MIB), pytest.raises(MemoryError):
        rows.update(newest(store))
    assert state(memory, rows) == before
    assert on_device(memory, rows).rows.tobytes() == data[:100].tobytes()
    rows.update(newest(store))
    assert on_device(memory, rows).rows.tobytes() == data.tobytes()


CALLS = [
    ("cuMemCreate", 1), ("cuMemCreate", 4), ("cuMemMap", 2), ("cuMemSetAccess", 3),
    ("cuMemsetD8Async", 4), ("cuStreamSynchronize", 2), ("cuMemHostAlloc", 1),
    ("cuMemcpyHtoDAsync", 1), ("cuMemcpyHtoDAsync", 3), ("cuMemcpyHtoDAsync", 4),
    ("cuEventRecord", 1), ("cuStreamSynchronize", 5),
]  # fmt: skip


@pytest.mark.parametrize(("symbol", "nth"), CALLS)
@pytest.mark.parametrize(("code", "error"), [(2, MemoryError), (719, DeviceError)])
def test_call_that_fails_leaves_the_rows_as_they_were(
    memory, store, opened, symbol, nth, code, error
):
    needs_stand_in(memory)
    data = vectors(200, 32)
    store.add_passages("c", data)
    rows = opened(store)
    with memory.failing(f"{symbol}:{nth}:{code}"), pytest.raises(error):
        rows.update(newest(store))
    assert rows.num_rows == 0
    rows.update(newest(store))
    assert on_device(memory, rows).rows.tobytes() == data.tobytes()
    assert rows.nbytes == 8 * MIB


@pytest.mark.parametrize("symbol", ["cuMemcpyHtoDAsync", "cuStreamSynchronize"])
@pytest.mark.parametrize("row", [None, 3])
def test_deletion_that_fails_is_made_good(memory, store, opened, symbol, row):
    needs_stand_in(memory)
    ids = store.add_passages("c", vectors(200, 8))
    rows = opened(store)
    rows.load(newest(store))
    if row is None:
        store.delete_passages("c", [int(ids[150])])
    with memory.failing(f"{symbol}:1:719"), pytest.raises(DeviceError):
        rows.update(newest(store)) if row is None else rows.delete(row)
    rows.update(newest(store))
    assert dead_rows(memory, rows) == [150 if row is None else row]


@pytest.mark.parametrize(
    "call",
    ["cuMemGetInfo:1", "cuMemAddressReserve:1", "cuMemAddressReserve:4", "cuMemHostAlloc:1",
     "cuMemHostAlloc:2", "cuStreamCreateWithPriority:1", "cuEventCreate:1", "cuEventCreate:2"],
)  # fmt: skip
def test_opening_that_fails_gives_everything_back(memory, store, call):
    needs_stand_in(memory)
    store.add_passages("c", vectors(2, 8))
    kinds = (b"pinned", b"reserved", b"created", b"mapped")
    live = [memory.emulated.kalos_fake_live_memory(kind) for kind in kinds]
    with memory.failing(f"{call}:719"), pytest.raises(DeviceError):
        DeviceRows.open(memory.device, newest(store))
    assert [memory.emulated.kalos_fake_live_memory(kind) for kind in kinds] == live
