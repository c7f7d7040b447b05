"""Windows on the host: slots, memory that outlives them, and DLPack in both forms."""

from __future__ import annotations

import gc
import signal
import threading
import time

import numpy as np
import pytest
from helpers import dlpack_consumer

from kalos_ctx._windows import Window, WindowPool
from kalos_ctx.errors import InvalidArgument, InvalidType, PoolExhausted, WindowReleased

IDS = np.arange(100, 116, dtype=np.int32)


@pytest.fixture
def pool():
    return WindowPool(slots=2, timeout=0.0)


def filled(pool, ids=IDS, **options):
    window = pool.acquire(len(ids), **options)
    window.write(ids)
    return window


def address(array):
    return array.__array_interface__["data"][0]


# ---- Contents ------------------------------------------------------------------------------------


def test_b117_every_reading_gives_the_same_ids_without_a_copy(pool):
    window = filled(pool)
    assert len(window) == 16
    assert window.tolist() == IDS.tolist()
    assert all(type(token) is int for token in window.tolist())
    views = [window.token_ids, np.asarray(window), np.from_dlpack(window)]
    for view in views:
        assert view.dtype == np.int32
        assert view.tolist() == IDS.tolist()
        assert address(view) == address(window.token_ids)
    assert address(window.token_ids) % 64 == 0


def test_token_ids_are_read_only(pool):
    view = filled(pool).token_ids
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    assert not np.from_dlpack(filled(pool)).flags.writeable


def test_array_protocol_converts_and_copies(pool):
    window = filled(pool)
    wide = np.asarray(window, dtype=np.int64)
    assert wide.dtype == np.int64
    assert wide.tolist() == IDS.tolist()
    copied = np.array(window)
    copied[0] = -1
    assert window.token_ids[0] == IDS[0]


def test_b115_window_of_no_tokens_is_valid(pool):
    window = pool.acquire(0)
    assert len(window) == 0
    assert window.tolist() == []
    assert np.from_dlpack(window).shape == (0,)
    for version in (None, (1, 0)):
        taken = dlpack_consumer.take(window.__dlpack__(max_version=version))
        assert taken.values() == []
        assert taken.tensor.shape[0] == 0
        taken.drop()
    window.release()


# ---- Release -------------------------------------------------------------------------------------


def test_use_after_release_raises_and_release_is_idempotent(pool):
    window = filled(pool)
    window.release()
    window.release()
    assert window.released
    assert "released" in repr(window)
    assert pool.free == 2
    uses = [
        lambda: len(window),
        lambda: window.token_ids,
        window.tolist,
        window.__dlpack__,
        window.__dlpack_device__,
        window.__array__,
        window.__enter__,
        lambda: window.write(IDS),
    ]
    for use in uses:
        with pytest.raises(WindowReleased):
            use()


def test_with_block_releases_also_after_an_error(pool):
    with filled(pool) as window:
        assert pool.free == 1
    assert window.released
    with pytest.raises(ZeroDivisionError), filled(pool) as window:
        raise ZeroDivisionError
    assert window.released
    assert pool.free == 2


def test_dropped_window_gives_its_slot_back(pool):
    window = filled(pool)
    assert pool.free == 1
    assert len(window.token_ids) == 16  # the view that the window keeps counts as no export
    del window
    gc.collect()
    assert pool.free == 2
    assert pool.acquire(16).tolist() == IDS.tolist()


def test_window_outlives_its_pool():
    window = filled(WindowPool(1))
    gc.collect()
    assert window.tolist() == IDS.tolist()
    window.release()


@pytest.mark.parametrize("export", [lambda w: w.token_ids, np.from_dlpack, np.asarray])
def test_export_keeps_its_memory_after_release(export):
    """The slot comes back at once; its next window must not write into the memory of the export."""
    pool = WindowPool(slots=1, timeout=0.0)
    window = filled(pool)
    exported = export(window)
    window.release()
    assert pool.free == 1
    for fill in range(5):
        with filled(pool, np.full(16, fill, dtype=np.int32)) as other:
            assert address(other.token_ids) != address(exported)
    assert exported.tolist() == IDS.tolist()


def test_released_slot_reuses_its_memory(pool):
    """New memory would be zero; what the same tenant left shows that it is the old."""
    filled(pool).release()
    assert pool.acquire(16).tolist() == IDS.tolist()


# ---- The pool ------------------------------------------------------------------------------------


def test_pool_without_a_free_slot_raises_and_recovers(pool):
    held = [filled(pool), filled(pool)]
    assert pool.free == 0
    with pytest.raises(PoolExhausted, match="all 2 window slots"):
        pool.acquire(1)
    with pytest.raises(PoolExhausted):
        pool.acquire(1, timeout=0.01)
    held[0].release()
    assert pool.acquire(1) is not None


def test_pool_waits_for_a_release_by_another_thread():
    """The waiter lets go of the GIL: else the release below could never run."""
    pool = WindowPool(slots=1, timeout=30.0)
    held = filled(pool)
    got = []
    waiter = threading.Thread(target=lambda: got.append(filled(pool)))
    waiter.start()
    assert got == []
    held.release()
    waiter.join(timeout=30)
    assert got[0].tolist() == IDS.tolist()


def test_pool_waits_at_least_its_timeout():
    pool = WindowPool(slots=1, timeout=0.12)
    held = filled(pool)
    start = time.monotonic()
    with pytest.raises(PoolExhausted):
        pool.acquire(1)
    assert time.monotonic() - start >= 0.12
    held.release()


def test_pool_wait_is_ended_by_a_signal_handler():
    pool = WindowPool(slots=1)
    held = filled(pool)

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            pool.acquire(1, timeout=60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    held.release()
    assert pool.free == 1


def test_pool_many_threads_never_share_a_slot():
    pool = WindowPool(slots=3, timeout=60.0)
    wrong = []

    def work(number):
        ids = np.full(2000, number, dtype=np.int32)
        for _ in range(200):
            with filled(pool, ids, tenant=bytes([number])) as window:
                if pool.free > 2 or not np.array_equal(np.from_dlpack(window), ids):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.free == 3


def test_memory_that_changes_tenants_is_zeroed():
    pool = WindowPool(slots=1, timeout=0.0)
    filled(pool, tenant=b"a").release()
    with pool.acquire(4, tenant=b"a") as same:
        assert same.tolist() == IDS[:4].tolist()
    with pool.acquire(16, tenant=b"b") as other:
        assert other.tolist() == [0] * 16


def test_short_window_leaves_nothing_for_the_next_tenant():
    """What counts is all that was written since the zeroing, not the last window's length."""
    pool = WindowPool(slots=1, timeout=0.0)
    filled(pool, tenant=b"a").release()
    filled(pool, IDS[:2], tenant=b"a").release()
    assert pool.acquire(1000, tenant=b"b").tolist() == [0] * 1000


def test_memory_that_grows_is_zeroed_and_large_enough():
    pool = WindowPool(slots=1, timeout=0.0)
    for size in (1, 1023, 1024, 1025, 100_000, (1 << 20) + 1, 7):
        with pool.acquire(size, tenant=bytes([size % 251])) as window:
            view = window.token_ids
            assert len(view) == size
            assert not view.any()
            window.write(np.full(size, 9, dtype=np.int32))
            assert view[-1] == 9
            del view


# ---- DLPack --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (None, b"dltensor"),
        ((0, 8), b"dltensor"),
        ((1, 0), b"dltensor_versioned"),
        ((1, 9), b"dltensor_versioned"),
        ((2, 0), b"dltensor_versioned"),
    ],
)
def test_dlpack_capsule_describes_the_window(pool, version, name):
    window = filled(pool)
    assert window.__dlpack_device__() == (1, 0)
    taken = dlpack_consumer.take(window.__dlpack__(max_version=version))
    assert taken.name == name
    tensor = taken.tensor
    assert (tensor.device_type, tensor.device_id, tensor.ndim) == (1, 0, 1)
    assert (tensor.code, tensor.bits, tensor.lanes) == (0, 32, 1)
    assert (tensor.shape[0], tensor.strides[0], tensor.byte_offset) == (16, 1, 0)
    assert tensor.data == address(window.token_ids)
    assert taken.values() == IDS.tolist()
    if name == b"dltensor_versioned":
        assert taken.managed.major == 1
        assert taken.managed.flags == 1  # read-only
    taken.drop()


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_dlpack_memory_lives_until_the_deleter_ran_once(version):
    """Reuse of the slot's memory shows how many references are left, without looking inside."""
    pool = WindowPool(slots=1, timeout=0.0)
    window = filled(pool)
    taken = dlpack_consumer.take(window.__dlpack__(max_version=version))
    place = taken.tensor.data
    window.release()
    with filled(pool, IDS + 1) as other:
        assert address(other.token_ids) != place
    assert taken.values() == IDS.tolist()
    del window, other, pool
    gc.collect()
    assert taken.values() == IDS.tolist()
    thread = threading.Thread(target=taken.drop)  # any thread may, without the GIL
    thread.start()
    thread.join()
    del taken
    gc.collect()  # the capsule was taken: its destructor must not free again


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("consume", [True, False])
def test_dlpack_export_that_ended_leaves_the_slot_its_memory(version, consume):
    """One reference too many would give the slot other memory, one too few would free it."""
    pool = WindowPool(slots=1, timeout=0.0)
    window = filled(pool)
    for _ in range(50):
        capsule = window.__dlpack__(max_version=version)
        if consume:
            dlpack_consumer.take(capsule).drop()
        del capsule
        gc.collect(0)
    assert window.tolist() == IDS.tolist()
    window.release()
    assert pool.acquire(16).tolist() == IDS.tolist()


def test_dlpack_copy_is_independent_and_writable(pool):
    window = filled(pool)
    taken = dlpack_consumer.take(window.__dlpack__(max_version=(1, 0), copy=True))
    assert taken.managed.flags == 2  # copied, not read-only
    assert taken.tensor.data != address(window.token_ids)
    assert taken.values() == IDS.tolist()
    taken.drop()
    mine = np.from_dlpack(window, copy=True) if int(np.__version__[0]) >= 2 else np.array(window)
    mine[:] = 0
    assert window.tolist() == IDS.tolist()


def test_dlpack_wrong_stream_or_device_is_refused(pool):
    window = filled(pool)
    with pytest.raises(BufferError, match="stream"):
        window.__dlpack__(stream=1)
    with pytest.raises(BufferError, match="dl_device"):
        window.__dlpack__(dl_device=(2, 0))
    dlpack_consumer.take(window.__dlpack__(dl_device=(1, 0), copy=False)).drop()


# ---- Wrong arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"slots": 0}, InvalidArgument),
        ({"slots": -1}, InvalidArgument),
        ({"slots": 1.0}, InvalidType),
        ({"slots": True}, InvalidType),
        ({"timeout": -1}, InvalidArgument),
        ({"timeout": float("nan")}, InvalidArgument),
        ({"timeout": float("inf")}, InvalidArgument),
        ({"timeout": None}, InvalidType),
    ],
)
def test_pool_wrong_argument_is_refused(arguments, error):
    with pytest.raises(error):
        WindowPool(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_tokens": -1}, InvalidArgument),
        ({"num_tokens": (1 << 31) + 1}, InvalidArgument),
        ({"num_tokens": 1.0}, InvalidType),
        ({"num_tokens": 1, "tenant": "a"}, InvalidType),
        ({"num_tokens": 1, "tenant": None}, InvalidType),
        ({"num_tokens": 1, "timeout": -0.5}, InvalidArgument),
    ],
)
def test_acquire_wrong_argument_is_refused_and_takes_no_slot(pool, arguments, error):
    with pytest.raises(error):
        pool.acquire(**arguments)
    assert pool.free == 2


def test_window_is_made_by_the_pool_and_write_stays_inside(pool):
    with pytest.raises(TypeError, match=r"WindowPool\.acquire"):
        Window()
    window = filled(pool)
    for ids, start, error in (
        (IDS, 1, InvalidArgument),
        (IDS[:1], 17, InvalidArgument),
        (IDS[:1], -1, InvalidArgument),
        (IDS.astype(np.int64), 0, InvalidType),
        ([1, 2], 0, InvalidType),
    ):
        with pytest.raises(error):
            window.write(ids, start)
    assert window.tolist() == IDS.tolist()
