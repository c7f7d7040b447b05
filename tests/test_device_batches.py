"""Batches in device memory: the kernel against plain lists, and the arrays that come out."""

import ctypes
import gc
import random

import numpy as np
import pytest
from helpers import dlpack_consumer
from helpers.device_windows import CUDA, IDS, allocations, filled, kernels, open_with_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from kalos_ctx import _arranger, batches
from kalos_ctx._device_array import DeviceArray
from kalos_ctx._windows import WindowPool
from kalos_ctx.errors import DeviceError, InvalidArgument, SessionNotFound, WindowReleased


@pytest.fixture(scope="module")
def memory():
    """Return the device's memory as the driver shows it."""
    memory = open_with_kernels()
    yield memory
    if memory.emulated:
        assert memory.emulated.kalos_fake_problems() == 0


def packed(rows):
    return {
        "token_ids": [token for row in rows for token in row],
        "cu_seqlens": [sum(map(len, rows[:end])) for end in range(len(rows) + 1)],
        "positions": [place for row in rows for place in range(len(row))],
    }


def padded(rows, layout, pad_id):
    width = max(map(len, rows), default=0)

    def lay(cells, fill):
        fill = [fill] * (width - len(cells))
        return [*fill, *cells] if layout == "left" else [*cells, *fill]

    return {
        "token_ids": [lay(row, pad_id) for row in rows],
        "attention_mask": [lay([1] * len(row), 0) for row in rows],
        "position_ids": [lay(list(range(len(row))), 0) for row in rows],
    }


def arranged(arranger, pool, rows, layout, pad_id, wide):
    windows = [None if row is None else filled(pool, np.array(row, np.int32)) for row in rows]
    arrays = arranger.arrange(windows, layout, pad_id, wide)
    for window in windows:
        if window is not None:
            window.release()
    return arrays


@pytest.fixture(scope="module")
def arranger(memory):
    return _arranger.Arranger(memory.device)


@pytest.fixture(scope="module")
def wide_pool(memory):
    return WindowPool(64, 0.0, memory.device)


LENGTHS = st.one_of(st.none(), st.sampled_from([0, 1, 2, 255, 256, 257, 700]))


@settings(max_examples=60)
@given(
    lengths=st.lists(LENGTHS, max_size=12),
    layout=st.sampled_from(["packed", "left", "right"]),
    wide=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_batch_on_the_device_equals_the_plain_one(arranger, wide_pool, lengths, layout, wide, seed):
    chosen = random.Random(seed)
    rows = [
        None if length is None else [chosen.randrange(2**31) for _ in range(length)]
        for length in lengths
    ]
    arrays = arranged(arranger, wide_pool, rows, layout, 7, wide)
    plain = [row or [] for row in rows]
    expected = packed(plain) if layout == "packed" else padded(plain, layout, 7)
    assert {name: array.tolist() for name, array in arrays.items()} == expected
    for name, array in arrays.items():
        assert array.dtype == (np.int64 if wide and name != "cu_seqlens" else np.int32)
        assert array.shape == np.shape(array.numpy())
    assert wide_pool.free == 64


def test_batch_larger_than_the_grid_is_filled_by_strides(arranger, wide_pool):
    """4 multiprocessors of 16 blocks of 256 threads are 16,384 cells."""
    rows = [list(range(length)) for length in (20_000, 3, 15_000)]
    found = arranged(arranger, wide_pool, rows, "packed", 0, False)
    assert found["positions"].tolist() == packed(rows)["positions"]
    found = arranged(arranger, wide_pool, rows, "left", 5, True)
    assert found["token_ids"].tolist() == padded(rows, "left", 5)["token_ids"]


def test_device_array_is_read_by_every_protocol(arranger, wide_pool, memory):
    array = arranged(arranger, wide_pool, [[1, 2], [3]], "right", 9, True)["token_ids"]
    expected = [[1, 2], [3, 9]]
    assert (array.ndim, array.shape, array.size, array.nbytes) == (2, (2, 2), 4, 32)
    assert (len(array), array.device, array.__dlpack_device__()) == (2, "cuda:0", CUDA)
    assert np.asarray(array).tolist() == array.numpy().tolist() == array.tolist() == expected
    assert np.asarray(array, dtype=np.float32).dtype == np.float32
    assert np.from_dlpack(array, device="cpu").tolist() == expected
    taken = dlpack_consumer.take(array.__dlpack__(stream=1, max_version=(1, 0)))
    tensor = taken.tensor
    assert (tensor.ndim, tensor.bits, tensor.shape[0], tensor.shape[1]) == (2, 64, 2, 2)
    assert (tensor.strides[0], tensor.strides[1], taken.managed.flags) == (2, 1, 0)
    where = tensor.data
    assert memory.read(where, np.int64, 4).reshape(2, 2).tolist() == expected
    taken.drop()
    assert array.__cuda_array_interface__ == {
        "shape": (2, 2),
        "typestr": "<i8",
        "data": (where, False),
        "strides": None,
        "stream": None,
        "version": 3,
    }
    with pytest.raises(ValueError, match="copy"):
        np.array(array, copy=False)
    with pytest.raises(BufferError, match="copy"):
        array.__dlpack__(dl_device=(1, 0), copy=False)
    with pytest.raises(TypeError, match="assemble_batch"):
        DeviceArray()


def test_batch_memory_lives_with_its_arrays_and_is_used_again(memory, wide_pool):
    own = _arranger.Arranger(memory.device)
    arrays = arranged(own, wide_pool, [[1, 2], [3]], "packed", 0, False)
    ids = arrays["token_ids"]
    del arrays
    for _ in range(20):
        arranged(own, wide_pool, [[8, 9], [7]], "packed", 0, False)
    assert ids.tolist() == [1, 2, 3]
    before = allocations(memory.device)
    for _ in range(50):
        arranged(own, wide_pool, [[8, 9], [7]], "left", 0, False)["token_ids"].__dlpack__(stream=1)
    assert allocations(memory.device) == before
    del own
    gc.collect()
    assert ids.tolist() == [1, 2, 3]


def test_batch_of_windows_that_are_elsewhere_or_released_is_refused(arranger, wide_pool):
    window = filled(wide_pool)
    with pytest.raises(InvalidArgument, match=r"windows\[1\] must lie on cuda:0"):
        arranger.arrange([window, filled(WindowPool(1))], "packed", 0, False)
    window.release()
    with pytest.raises(WindowReleased):
        arranger.arrange([window], "packed", 0, False)


@pytest.mark.parametrize("spec", ["cuLaunchKernel:1:700", "cuMemcpyHtoDAsync:2:700"])
def test_batch_that_fails_on_the_device_raises_and_holds_nothing(arranger, wide_pool, memory, spec):
    if not memory.emulated:
        pytest.skip("calls fail in the stand-in driver")
    window = filled(wide_pool)
    with memory.failing(spec), pytest.raises(DeviceError, match="arrange a batch"):
        arranger.arrange([window, None], "packed", 0, False)
    assert arranger.arrange([window], "packed", 0, False)["token_ids"].tolist() == IDS.tolist()
    window.release()
    assert wide_pool.free == 64


class Sessions:
    """As much of an assembler as a batch asks for: windows of rows by name, in one pool."""

    def __init__(self, pool, **rows):
        self.pool, self.rows = pool, rows

    def assemble(self, session, max_tokens):
        if session not in self.rows:
            raise SessionNotFound(session)
        return filled(self.pool, np.array(self.rows[session], np.int32))

    def batch(self, *names, layout="packed", on_error="raise", **options):
        requests = [{"session": name, "max_tokens": 9} for name in names]
        return batches.build_batch(
            self.assemble, self.pool, requests, layout=layout, on_error=on_error, **options
        )


@pytest.fixture(params=["cuda", "cpu"])
def sessions(request, memory):
    device = memory.device if request.param == "cuda" else None
    return Sessions(WindowPool(4, 0.0, device), three=[5, 2, 2], five=[2, 6, 7, 8, 9])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_context_batch_is_the_same_on_both_devices(sessions, dtype):
    on_gpu = sessions.pool.device is not None
    with sessions.batch(
        "three", "gone", "five", layout="left", pad_id=2, dtype=dtype, on_error="return"
    ) as batch:
        assert isinstance(batch[1], SessionNotFound)
        assert batch.__dlpack_device__() == (CUDA if on_gpu else (1, 0))
        assert np.asarray(batch.token_ids).tolist()[2] == batch[2].tolist()
    assert sessions.pool.free == 4
    arrays = (batch.token_ids, batch.attention_mask, batch.position_ids)
    assert [type(array) for array in arrays] == [DeviceArray if on_gpu else np.ndarray] * 3
    assert {array.dtype for array in arrays} == {np.dtype(dtype)}
    assert [array.tolist() for array in arrays] == list(
        padded([[5, 2, 2], [], [2, 6, 7, 8, 9]], "left", 2).values()
    )
    flat = sessions.batch("five", "three", pad_id=None, dtype=dtype)
    assert flat.cu_seqlens.dtype == np.int32
    assert flat.positions.dtype == flat.token_ids.dtype == np.dtype(dtype)
    assert flat.token_ids.tolist() == [2, 6, 7, 8, 9, 5, 2, 2]
    flat.release()


def test_context_batch_refuses_an_unknown_dtype_and_frees_what_failed(sessions):
    with pytest.raises(InvalidArgument, match="dtype"):
        sessions.batch("three", pad_id=None, dtype="float32")
    with pytest.raises(SessionNotFound, match=r"requests\[1\]"):
        sessions.batch("three", "gone", pad_id=None)
    assert sessions.pool.free == 4


class ArrangeArgs(ctypes.Structure):
    """kalos_arrange_args of cuda/kalos_launch.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("rows", "token_ids", "positions", "mask")),
        *((name, ctypes.c_uint64) for name in ("num_cells", "done", "counter")),
        *((name, ctypes.c_uint32) for name in ("num_rows", "width", "layout", "wide", "ticket")),
        ("pad_id", ctypes.c_int32),
    )


@pytest.mark.parametrize("blocks", [1, 3])
def test_arrange_kernel_publishes_its_ticket_when_all_blocks_are_done(memory, blocks):
    """The form without a synchronisation: the host polls a word."""
    call = memory._call
    room = int(call("cuMemAlloc", 4096))
    memory.write(room, bytes(4096))
    done = int(call("cuMemHostAlloc", 64, 2))
    image = kernels(memory)["arrange"]
    kernel = call("cuModuleGetFunction", call("cuModuleLoadData", image), b"kalos_arrange")
    for ticket in (5, 6):
        args = ArrangeArgs(rows=room, token_ids=room + 64, num_cells=600, done=done)
        args.counter, args.num_rows, args.width, args.layout = room + 4000, 2, 300, 2
        args.ticket, args.pad_id = ticket, ticket
        argv = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        call("cuLaunchKernel", kernel, blocks, 1, 1, 256, 1, 1, 0, 0, ctypes.addressof(argv), 0)
        call("cuCtxSynchronize")
        assert ctypes.c_uint32.from_address(done).value == ticket
        assert memory.read(room + 64, np.int32, 600).tolist() == [ticket] * 600
        assert memory.read(room + 4000, np.uint32, 1)[0] == 0
    call("cuMemFreeHost", done)
    call("cuMemFree", room)
