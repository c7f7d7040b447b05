"""Windows in device memory: what they hold, who may read them, when they are lent again."""

import gc
import random
import threading

import numpy as np
import pytest
from helpers import dlpack_consumer
from helpers.device_windows import (
    CUDA,
    IDS,
    allocations,
    filled,
    on_device,
    open_with_kernels,
    place,
)

from kalos_ctx._windows import WindowPool
from kalos_ctx.errors import DeviceError, InvalidType, PoolExhausted, WindowReleased

SPARES = 64  # KALOS_WINDOW_SPARES


@pytest.fixture(scope="module")
def memory():
    """Return the device's memory as the driver shows it."""
    memory = open_with_kernels()
    yield memory
    if memory.emulated:
        assert memory.emulated.kalos_fake_problems() == 0


@pytest.fixture
def pool(memory):
    return WindowPool(2, 0.0, memory.device)


@pytest.fixture
def stream(memory):
    """A stream of the caller's own, as an address."""
    made = memory._call("cuStreamCreate", 1)
    yield int(made)
    memory._call("cuStreamDestroy", made)


def address(array):
    return array.__array_interface__["data"][0]


# ---- Contents ------------------------------------------------------------------------------------


def test_device_window_holds_the_same_tokens_in_both_places(pool, memory):
    window = filled(pool)
    assert (window.device, window.__dlpack_device__()) == ("cuda:0", CUDA)
    assert on_device(memory, window) == IDS.tolist()
    assert window.tolist() == np.asarray(window).tolist() == IDS.tolist()
    assert address(np.asarray(window)) == address(window.token_ids)
    window.write(IDS[:2], start=14)
    assert on_device(memory, window) == window.tolist() == [*IDS[:14], *IDS[:2]]


def test_host_window_has_no_cuda_interface_and_says_cpu():
    window = filled(WindowPool(1))
    assert window.device == "cpu"
    assert not hasattr(window, "__cuda_array_interface__")
    with pytest.raises(BufferError, match="stream must be None"):
        window.__dlpack__(stream=1)


def test_released_device_window_refuses_every_reading(pool):
    window = filled(pool)
    window.release()
    assert window.device == "cuda:0"
    for use in (
        window.tolist,
        window.__dlpack__,
        window.__dlpack_device__,
        lambda: window.token_ids,
        lambda: window.__cuda_array_interface__,
        lambda: window.write(IDS),
    ):
        with pytest.raises(WindowReleased):
            use()
    assert pool.free == 2


def test_device_window_of_no_tokens_is_valid(pool):
    window = pool.acquire(0)
    assert window.tolist() == []
    taken = dlpack_consumer.take(window.__dlpack__(stream=1, max_version=(1, 0)))
    assert (taken.tensor.shape[0], taken.tensor.device_type) == (0, 2)
    taken.drop()
    assert window.__cuda_array_interface__["data"] == (0, True)


def test_pool_refuses_what_is_no_device():
    with pytest.raises(InvalidType, match="device must be a Device"):
        WindowPool(1, 0.0, "cuda:0")


# ---- Exports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -2, 1 << 64, True, 1.0, "1"])
def test_dlpack_stream_that_the_standard_does_not_have_is_refused(pool, wrong):
    window = filled(pool)
    with pytest.raises(BufferError, match="stream"):
        window.__dlpack__(stream=wrong)


@pytest.mark.parametrize(
    ("given_stream", "waits"), [(None, 1), (1, 1), (2, 1), (-1, 0), ("own", 1)]
)
def test_dlpack_consumers_stream_waits_for_a_window_in_flight(memory, stream, given_stream, waits):
    """New memory is zeroed in the order of a stream, which is work in flight."""
    if not memory.emulated:
        pytest.skip("calls are counted by the stand-in driver")
    number = np.uint64(stream) if given_stream == "own" else given_stream
    window = WindowPool(1, 0.0, memory.device).acquire(16)

    def waited():
        before = memory.emulated.kalos_fake_count(b"cuStreamWaitEvent")
        window.__dlpack__(stream=number)
        return memory.emulated.kalos_fake_count(b"cuStreamWaitEvent") - before

    assert waited() == waits
    window.write(IDS)
    assert waited() == 0  # complete: nobody has to wait


@pytest.mark.parametrize(
    ("version", "name"), [(None, b"dltensor"), ((1, 0), b"dltensor_versioned")]
)
def test_dlpack_capsule_describes_the_device_window(pool, memory, version, name):
    window = filled(pool)
    taken = dlpack_consumer.take(window.__dlpack__(stream=1, max_version=version))
    tensor = taken.tensor
    assert taken.name == name
    assert (tensor.device_type, tensor.device_id, tensor.ndim) == (*CUDA, 1)
    assert (tensor.code, tensor.bits, tensor.lanes) == (0, 32, 1)
    assert (tensor.shape[0], tensor.strides[0], tensor.byte_offset) == (16, 1, 0)
    assert memory.read(tensor.data, np.int32, 16).tolist() == IDS.tolist()
    if version:
        assert taken.managed.flags == 1  # read-only
    taken.drop()


def test_dlpack_host_view_is_the_pinned_memory(pool):
    window = filled(pool)
    taken = dlpack_consumer.take(window.__dlpack__(dl_device=(1, 0), copy=False))
    assert (taken.tensor.device_type, taken.tensor.data) == (1, address(window.token_ids))
    assert taken.values() == IDS.tolist()
    taken.drop()
    assert np.from_dlpack(window, device="cpu").tolist() == IDS.tolist()
    for wrong in ((2, 1), (13, 0)):
        with pytest.raises(BufferError, match="dl_device"):
            window.__dlpack__(dl_device=wrong)


@pytest.mark.parametrize("target", [CUDA, (1, 0)])
def test_dlpack_copy_is_writable_memory_of_its_own(pool, memory, target):
    window = filled(pool)
    capsule = window.__dlpack__(max_version=(1, 0), dl_device=target, copy=True)
    taken = dlpack_consumer.take(capsule)
    assert (taken.managed.flags, taken.tensor.device_type) == (2, target[0])
    assert taken.tensor.data not in (place(window), address(window.token_ids))
    window.write(IDS[::-1].copy())
    copied = taken.values() if target == (1, 0) else memory.read(taken.tensor.data, np.int32, 16)
    assert list(copied) == IDS.tolist()
    taken.drop()


def test_cuda_array_interface_follows_version_3(pool, memory):
    window = pool.acquire(16)
    assert window.__cuda_array_interface__["stream"] > 2  # of the zero fill, still in flight
    window.write(IDS)
    found = window.__cuda_array_interface__
    where, read_only = found.pop("data")
    assert found == {
        "shape": (16,),
        "typestr": "<i4",
        "strides": None,
        "stream": None,
        "version": 3,
    }
    assert read_only
    assert memory.read(where, np.int32, 16).tolist() == IDS.tolist()


def test_cuda_array_interface_keeps_the_memory_as_long_as_the_window_object(memory):
    """Its consumer holds the object, and knows nothing of releases."""
    pool = WindowPool(1, 0.0, memory.device)
    window = filled(pool)
    where, _ = window.__cuda_array_interface__["data"]
    window.release()
    assert pool.free == 1
    for _ in range(3):
        filled(pool, IDS[::-1].copy()).release()
    assert memory.read(where, np.int32, 16).tolist() == IDS.tolist()


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_dlpack_memory_outlives_window_pool_and_thread(memory, version):
    """The last holder is an export whose deleter runs on a thread that has no context."""
    gc.collect()
    before = memory.device.counts()
    pool = WindowPool(1, 0.0, memory.device)
    window = filled(pool)
    taken = dlpack_consumer.take(window.__dlpack__(stream=1, max_version=version))
    window.release()
    with filled(pool, IDS[::-1].copy()):
        del window, pool
        gc.collect()
        assert memory.read(taken.tensor.data, np.int32, 16).tolist() == IDS.tolist()
    thread = threading.Thread(target=taken.drop)
    thread.start()
    thread.join()
    gc.collect()
    for kind in ("device_nbytes", "pinned_nbytes"):
        assert memory.device.counts()[kind] == before[kind]


# ---- Tenants, slots, memory ----------------------------------------------------------------------


def test_device_memory_that_changes_tenants_or_grows_is_zeroed(memory):
    pool = WindowPool(1, 0.0, memory.device)
    for number, size in enumerate((16, 4, 1000, 1, 1025, 5000, 100_000, 7)):
        with pool.acquire(size, tenant=bytes([number])) as window:
            assert not np.any(window.token_ids)
            assert not any(on_device(memory, window))
            window.write(np.full(size, 9, np.int32))
    with filled(pool, tenant=b"same"):
        pass
    with pool.acquire(16, tenant=b"same") as window:
        assert window.tolist() == on_device(memory, window)


EXPORTS = {
    "none": lambda window, stream: None,
    "list": lambda window, stream: window.tolist(),
    "numpy": lambda window, stream: window.token_ids,
    "legacy": lambda window, stream: window.__dlpack__(stream=1),
    "per-thread": lambda window, stream: window.__dlpack__(stream=2),
    "own": lambda window, stream: window.__dlpack__(stream=stream),
    "both": lambda window, stream: (window.token_ids, window.__dlpack__(stream=1)),
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("export", EXPORTS)
def test_steady_use_allocates_nothing(memory, stream, export, kept):
    """Whether the array goes before the window or after it."""
    pool = WindowPool(2, 0.0, memory.device)
    for turn in range(60):
        if turn == 10:
            warm = allocations(memory.device)
        with filled(pool, np.arange(turn * 17, dtype=np.int32)) as window:
            array = EXPORTS[export](window, stream)
            if not kept:
                del array
        array = None
        memory._call("cuCtxSynchronize")
    assert pool.free == 2
    assert allocations(memory.device) == warm


@pytest.mark.parametrize(
    "export",
    [
        lambda window, stream: window.__dlpack__(stream=-1),
        lambda window, stream: window.__cuda_array_interface__,
        lambda window, stream: (window.__dlpack__(stream=1), window.__dlpack__(stream=stream)),
    ],
)
def test_memory_whose_readers_are_unknown_is_lent_again_after_a_wait(memory, stream, export):
    """Without the wait it would never come back; with one each time, windows would be slow."""
    pool = WindowPool(1, 0.0, memory.device)
    before = allocations(memory.device)
    waits = memory.emulated.kalos_fake_count(b"cuCtxSynchronize") if memory.emulated else 0
    for _ in range(3 * SPARES):
        with filled(pool) as window:
            export(window, stream)
            del window
    assert allocations(memory.device)[0] - before[0] <= SPARES + 1
    if memory.emulated:
        assert memory.emulated.kalos_fake_count(b"cuCtxSynchronize") - waits <= 3


def test_pool_on_a_device_runs_out_of_slots_and_recovers(pool):
    held = [filled(pool), filled(pool)]
    with pytest.raises(PoolExhausted, match="all 2 window slots"):
        pool.acquire(1, timeout=0.01)
    held[0].release()
    assert pool.acquire(1) is not None


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("cuMemAlloc:1:2", MemoryError),
        ("cuMemHostAlloc:1:2", MemoryError),
        ("cuMemHostGetDevicePointer:1:1", DeviceError),
        ("cuMemsetD8Async:1:700", DeviceError),
        ("cuEventCreate:1:2", MemoryError),
        ("cuEventRecord:1:400", DeviceError),
    ],
)
def test_failed_call_gives_slot_and_memory_back(pool, memory, spec, error):
    if not memory.emulated:
        pytest.skip("calls fail in the stand-in driver")
    before = memory.device.counts()
    with memory.failing(spec), pytest.raises(error):
        pool.acquire(16)
    after = memory.device.counts()
    assert pool.free == 2
    for kind in ("device_nbytes", "pinned_nbytes"):
        assert after[kind] == before[kind]
    assert filled(pool).tolist() == IDS.tolist()


def test_failed_zero_fill_never_shows_another_tenants_tokens(memory):
    if not memory.emulated:
        pytest.skip("calls fail in the stand-in driver")
    pool = WindowPool(1, 0.0, memory.device)
    filled(pool, tenant=b"a").release()
    with memory.failing("cuMemsetD8Async:1:700"), pytest.raises(DeviceError):
        pool.acquire(16, tenant=b"b")
    with pool.acquire(16, tenant=b"b") as window:
        assert window.tolist() == on_device(memory, window) == [0] * 16


class Tenant(threading.Thread):
    """Leases, fills, exports and releases at random; notes every foreign token that it sees."""

    def __init__(self, number, pool, memory, stream):
        super().__init__()
        self.mark, self.pool, self.memory, self.stream = number + 1, pool, memory, stream
        self.random = random.Random(number)
        self.exports, self.wrong = [], []

    def check(self, found, expected):
        if not np.array_equal(found, expected):
            self.wrong.append((self.mark, sorted(set(np.asarray(found).tolist()))[:5]))

    def read(self, export, expected):
        if isinstance(export, np.ndarray):
            self.check(export, expected)
        else:
            data = export.tensor.data
            self.check(self.memory.read(data, np.int32, len(expected)), expected)

    def turn(self):
        size = self.random.choice((1, 100, 1024, 1025, 3000))
        ids = np.full(size, self.mark, np.int32)
        window = self.pool.acquire(size, tenant=bytes([self.mark]))
        before = {*window.tolist(), *on_device(self.memory, window)}
        if not before <= {0, self.mark}:
            self.wrong.append((self.mark, before))
        window.write(ids)
        for _ in range(self.random.randrange(3)):
            chosen = self.random.choice(("numpy", None, 1, 2, -1, self.stream))
            if chosen == "numpy":
                self.exports.append((window.token_ids, ids))
            else:
                taken = dlpack_consumer.take(window.__dlpack__(stream=chosen))
                self.exports.append((taken, ids))
        self.check(window.tolist(), ids)
        self.random.choice((window.release, lambda: None))()
        del window
        while len(self.exports) > self.random.randrange(8):
            export, expected = self.exports.pop(self.random.randrange(len(self.exports)))
            self.read(export, expected)
            if not isinstance(export, np.ndarray):
                export.drop()

    def run(self):
        for _ in range(150):
            self.turn()
        for export, expected in self.exports:
            self.read(export, expected)
            if not isinstance(export, np.ndarray):
                export.drop()
        self.exports.clear()


def test_tenants_never_see_each_other_and_slots_are_never_lost(memory, stream):
    pool = WindowPool(3, 60.0, memory.device)
    tenants = [Tenant(number, pool, memory, stream) for number in range(5)]
    for tenant in tenants:
        tenant.start()
    for tenant in tenants:
        tenant.join()
    assert [tenant.wrong for tenant in tenants] == [[]] * 5
    assert pool.free == 3
    held = [pool.acquire(10, timeout=0.0) for _ in range(3)]
    del tenants, held, pool
    gc.collect()
