"""The emulator that runs CUDA kernels on the CPU, and the driver that stands in for NVIDIA's."""

import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import emulated_cuda

from kalos_ctx._planner import OUTCOMES, ROLE_CODES, FlatHistory, low_water_mark, unit_firsts

SELFTEST = emulated_cuda.SIMT / "selftest.cu"
PLAN = emulated_cuda.CUDA / "plan.cu"
POISON = 0xCDCDCDCD
EVEN, ODD = 0x55555555, 0xAAAAAAAA
ORDERS = ("forward", "reverse", "shuffled:1", "shuffled:2")
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE = 0, 1, 2, 201, 400
LAUNCH_TIMEOUT, ALREADY_REGISTERED, NOT_REGISTERED, LAUNCH_FAILED = 702, 712, 713, 719

FLAGS = 0x5  # stable, whole groups
# kalos_plan_session with its request, and kalos_history_plan.
SESSION = np.dtype(
    [(name, "<u8") for name in ("first", "num_turns", "max_unit_turns", "budget", "low", "settled")]
    + [(name, "<u4") for name in ("flags", "start_on", "end_on", "reserved")]
)
HISTORY_PLAN = np.dtype(
    [(name, "<u8") for name in ("begin", "end", "offset", "call", "fit_begin", "tokens")]
    + [("code", "<u4"), ("reserved", "<u4")]
)


class Property(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


def random_history(rng):
    roles = [
        ROLE_CODES[name] for name in rng.choice(["user", "assistant", "tool"], rng.integers(20))
    ]
    firsts, orphans = unit_firsts(roles, [None] * len(roles))
    lengths = np.where(orphans, 0, rng.integers(1, 30, len(roles))).astype(np.uint32)
    ends = np.cumsum(lengths, dtype=np.uint64)
    budget = int(rng.integers(1, 300))
    return {"lengths": lengths, "ends": ends, "roles": roles, "firsts": firsts, "budget": budget}


@pytest.fixture(scope="session")
def folder():
    return emulated_cuda.cache_folder()


@pytest.fixture(scope="session")
def launcher(folder):
    return emulated_cuda.Launcher(folder, kernels=[SELFTEST, PLAN])


@pytest.fixture(params=ORDERS)
def any_order(request, monkeypatch):
    """Run a test with each order of a block's threads."""
    monkeypatch.setenv("KALOS_FAKE_ORDER", request.param)
    return request.param


def words(*shape):
    return np.zeros(shape, np.uint32)


# ---- Warps ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [4, 8, 32])
def test_shuffles_move_values_between_lanes(launcher, any_order, width):
    out = words(6, 32)
    assert launcher.launch("test_shuffles", 1, 32, out, ctypes.c_int(width)) == 0
    lane = np.arange(32)
    part = lane // width * width
    up, down, turned = lane - 2, lane + 2, lane ^ 5
    assert (out[0] == part + 3 % width).all()
    assert (out[1] == np.where(up >= part, up, lane)).all()
    assert (out[2] == np.where(down < part + width, down, lane)).all()
    assert (out[3] == np.where(turned < part + width, turned, lane)).all()
    assert (out[4] == 31 - lane).all()
    assert (out[5] == lane ^ 1).all()


def test_votes_of_two_halves_of_a_warp_do_not_mix(launcher, any_order):
    values = np.random.default_rng(0).integers(0, 100, 32).astype(np.uint32)
    out = words(10, 32)
    assert launcher.launch("test_votes", 1, 32, values, out) == 0
    for half, bit in ((slice(0, 32, 2), 2), (slice(1, 32, 2), 1)):
        mine = values[half].astype(np.int64)
        lanes = np.arange(32)[half]
        assert (out[0, half] == sum(1 << int(i) for i in lanes[(mine & bit) != 0])).all()
        assert (out[1, half] == (mine == 7).any()).all()
        assert (out[2, half] == (mine < 90).all()).all()
        assert (out[3, half] == mine.sum()).all()
        assert (out[4, half] == mine.min()).all()
        assert (out[5, half].astype(np.int32) == -mine.min()).all()
        assert (out[6, half] == np.bitwise_xor.reduce(mine)).all()
        assert (out[7, half] == np.bitwise_or.reduce(mine)).all()
        for row, lane in enumerate(lanes):
            equal = lanes[mine % 4 == mine[row] % 4]
            assert out[8, lane] == sum(1 << int(i) for i in equal)
    assert (out[9] == values[40 % 32]).all()


# ---- Blocks --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (1, 256), (7, 64), (40, 256)])
def test_last_block_adds_up_what_the_others_wrote(launcher, any_order, blocks, threads):
    values = np.random.default_rng(1).integers(0, 1 << 20, 5000).astype(np.uint32)
    totals, counter, result = words(blocks), words(1), words(1)
    count = ctypes.c_uint32(len(values))
    code = launcher.launch("test_sum", blocks, threads, values, count, totals, counter, result)
    assert code == 0
    assert result[0] == totals.sum(dtype=np.uint32) == values.sum(dtype=np.uint32)
    assert counter[0] == blocks


@pytest.mark.parametrize(("block", "early"), [((1, 1), 1), ((33, 3), 99), ((64, 16), 500)])
def test_block_votes_count_threads_that_have_not_ended(launcher, any_order, block, early):
    out = np.full((3, block[0] * block[1]), -1, np.int32)
    assert launcher.launch("test_block_votes", 2, block, out, ctypes.c_uint32(early)) == 0
    assert (out[0, :early] == len(range(0, early, 3))).all()
    assert (out[1, :early] == (early > 1)).all()
    assert (out[2, :early] == (early <= 1)).all()
    assert (out[:, early:] == -1).all()


def test_missing_barrier_shows_poison(launcher):
    out, neighbours = words(256), (np.arange(256) + 1) % 256
    for barrier in (1, 0):
        code = launcher.launch(
            "test_neighbour", 1, 256, out, ctypes.c_int(barrier), shared_nbytes=1024
        )
        assert code == 0
        assert (out == neighbours).all() == bool(barrier)
    assert (out[:255] == POISON).all()


def test_shared_memory_is_poisoned_before_each_block(launcher):
    out = words(5)
    assert launcher.launch("test_unwritten", 5, 32, out) == 0
    assert (out == POISON).all()


def test_atomics_of_many_threads_add_up(launcher, any_order):
    out, wide, single = words(8), np.zeros(4, np.uint64), np.zeros(1, np.float32)
    assert launcher.launch("test_atomics", 3, 256, out, wide, single) == 0
    number = np.arange(768)
    assert out[:6].tolist() == [
        number.sum(),
        (1 << 32) - 768,
        767,
        (1 << 32) - 767,
        0xFFFFFFFF,
        np.bitwise_xor.reduce(number),
    ]
    assert out[6] == out[7] != 0
    assert wide[:2].tolist() == [int(number.sum()) << 32, 767 << 32]
    assert single[0] == 384


def test_order_of_threads_is_what_was_asked_for(launcher, monkeypatch):
    seen = {}
    for order in ORDERS:
        monkeypatch.setenv("KALOS_FAKE_ORDER", order)
        came, counter = words(128), words(1)
        assert launcher.launch("test_order", 2, 64, came, counter) == 0
        assert sorted(came) == list(range(128))
        seen[order] = came.tolist()
    assert seen["forward"] == list(range(128))
    assert seen["reverse"] == list(range(127, -1, -1))
    assert seen["shuffled:1"] != seen["shuffled:2"] != seen["forward"]


def test_bit_functions_match_plain_python(launcher):
    pairs = np.random.default_rng(2).integers(0, 1 << 32, (2, 256)).astype(np.uint32)
    pairs[:, :4] = [[0, 1, 0x80000000, 0xFFFFFFFF], [0, 0, 1, 0xFFFFFFFF]]
    out = words(14, 256)
    assert launcher.launch("test_bits", 1, 256, pairs, out) == 0
    half = pairs[0].view(np.float16).reshape(256, 2).astype(np.float32).view(np.uint32)
    for i, (a, b) in enumerate(pairs.T.tolist()):
        both, picked = b << 32 | a, (a | b << 32).to_bytes(8, "little")
        signed = np.array([[a], [b]], np.uint32).view(np.int8).astype(np.int64)
        assert out[:12, i].tolist() == [
            a.bit_count(),
            both.bit_count(),
            (a & -a).bit_length(),
            32 - a.bit_length(),
            64 - both.bit_length(),
            int(f"{a:032b}"[::-1], 2),
            int.from_bytes([picked[1], picked[4], picked[5], picked[2]], "little"),
            (both << a % 32) >> 32 & 0xFFFFFFFF,
            both >> a % 32 & 0xFFFFFFFF,
            (int((signed[0] * signed[1]).sum()) + 5) & 0xFFFFFFFF,
            min(a, b),
            max(a, b, key=lambda v: v ^ 0x80000000),
        ]
        if a & 0x7C00 != 0x7C00:  # not a number, infinity: rows hold none
            assert out[12, i] == half[i, 0]
        if a >> 16 & 0x7C00 != 0x7C00:
            assert out[13, i] == half[i, 1]


# ---- What goes wrong -----------------------------------------------------------------------------
def test_stuck_block_ends_the_launch_with_a_reason(launcher, any_order, capfd):
    assert launcher.launch("test_stuck", 1, 64) == LAUNCH_TIMEOUT
    assert "32 threads wait at the block's barrier, 32 for lanes" in capfd.readouterr().err
    test_shared_memory_is_poisoned_before_each_block(launcher)


def test_endless_pause_ends_the_launch(launcher):
    assert launcher.launch("test_endless", 1, 32, words(1)) == LAUNCH_TIMEOUT


def test_thread_outside_its_mask_ends_the_launch(launcher, capfd):
    assert launcher.launch("test_wrong_mask", 1, 32) == LAUNCH_FAILED
    assert "not in" in capfd.readouterr().err


def test_trap_ends_the_launch(launcher):
    assert launcher.launch("test_trap", 1, 32) == LAUNCH_FAILED


@pytest.mark.parametrize(
    ("grid", "block", "shared_nbytes", "code"),
    [
        (0, 32, 0, 1),
        ((1, 65536), 32, 0, 1),
        (1, 0, 0, 1),
        (1, 2048, 0, 1),
        (1, 33, 0, 701),
        (1, 32, 49153, 1),
    ],
)
def test_launch_beyond_a_limit_is_refused(launcher, grid, block, shared_nbytes, code):
    refused = launcher.launch("test_trap", grid, block, shared_nbytes=shared_nbytes)
    assert refused == code


def test_build_tells_what_the_compiler_said(folder, tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text('extern "C" __global__ void broken() { missing(); }\n')
    with pytest.raises(emulated_cuda.BuildError, match=r"broken\.cu:1:.*missing"):
        emulated_cuda.build(folder, kernels=[broken])


# ---- The planner's kernel ------------------------------------------------------------------------
def test_plan_kernel_agrees_with_the_host(launcher):
    rng = np.random.default_rng(3)
    histories = [random_history(rng) for _ in range(60)]
    sessions = np.zeros(len(histories), SESSION)
    plans = np.zeros(len(histories), HISTORY_PLAN)
    first = 0
    for i, history in enumerate(histories):
        count, budget = len(history["lengths"]), history["budget"]
        low = low_water_mark(budget, 0.5)
        sessions[i] = (first, count, max(1, count), budget, low, count, FLAGS, 0, 0, 0)
        first += count
    ends, firsts, roles = (
        np.concatenate([history[name] for history in histories]).astype(kind)
        for name, kind in (("ends", np.uint64), ("firsts", np.uint32), ("roles", np.uint8))
    )
    number = ctypes.c_uint64(len(histories))
    no_trims = ctypes.c_void_p(None)
    arguments = (sessions, number, ends, firsts, no_trims, roles, plans)
    assert launcher.launch("kalos_plan_history", 2, 16, *arguments) == 0
    for history, plan in zip(histories, plans, strict=True):
        flat = FlatHistory(history["lengths"], history["roles"], unit_first=history["firsts"])
        expected = flat.plan(history["budget"])
        assert OUTCOMES[plan["code"]] == expected.outcome
        if expected.outcome == "ok":
            found = [int(plan[name]) for name in ("begin", "end", "offset", "tokens")]
            assert found == [expected.begin, expected.end, expected.offset, expected.num_tokens]


# ---- The driver ----------------------------------------------------------------------------------
class Memory:
    """Driver calls of one test by short names; codes are returned, not raised."""

    def __init__(self, launcher):
        self.library = launcher.library

    def __call__(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def alloc(self, nbytes, name="cuMemAlloc_v2", *flags):
        """Return (code, address)."""
        place = ctypes.c_uint64()
        return self(name, ctypes.byref(place), ctypes.c_size_t(nbytes), *flags), place.value

    def live(self, kind):
        return self.library.kalos_fake_live_memory(kind)


@pytest.fixture
def memory(launcher):
    """Return the driver; what a test takes of it must be given back, and no bytes overrun."""
    driver = Memory(launcher)
    kinds = (b"device", b"pinned", b"registered", b"reserved", b"created", b"mapped")
    before = [driver.live(kind) for kind in kinds], launcher.library.kalos_fake_problems()
    yield driver
    launcher.library.kalos_fake_fail(b"")
    assert ([driver.live(kind) for kind in kinds], launcher.library.kalos_fake_problems()) == before


def u64(value):
    return ctypes.c_uint64(value)


def test_device_memory_is_poisoned_bounded_and_counted(memory):
    code, place = memory.alloc(100)
    host = np.zeros(100, np.uint8)
    assert code == 0
    assert memory("cuMemcpyDtoH_v2", u64(host.ctypes.data), u64(place), u64(100)) == SUCCESS
    assert (host == 0xCD).all()
    assert memory("cuMemcpyDtoH_v2", u64(host.ctypes.data), u64(place), u64(101)) == INVALID_VALUE
    assert memory("cuMemFree_v2", u64(place + 1)) == INVALID_VALUE
    assert memory("cuMemFree_v2", u64(place)) == SUCCESS
    assert memory("cuMemFree_v2", u64(place)) == INVALID_VALUE
    assert memory.alloc((2 << 30) + 1) == (OUT_OF_MEMORY, 0)


def test_write_behind_device_memory_is_noticed_when_it_is_freed(launcher, capfd):
    memory = Memory(launcher)
    before = launcher.library.kalos_fake_problems()
    _, place = memory.alloc(40)
    assert launcher.launch("test_store", 1, 64, ctypes.c_void_p(place), ctypes.c_uint32(10)) == 0
    assert memory("cuMemFree_v2", u64(place)) == SUCCESS
    assert launcher.library.kalos_fake_problems() == before + 1
    assert "byte 0 behind 40 bytes of device memory" in capfd.readouterr().err


def test_pinned_memory_has_a_device_address(memory):
    out = ctypes.c_uint64()
    code, place = memory.alloc(4096, "cuMemHostAlloc", 3)
    assert code == 0
    get = (ctypes.byref(out), u64(place + 100), 0)
    assert memory("cuMemHostGetDevicePointer_v2", *get) == SUCCESS
    assert out.value == place + 100
    assert memory("cuMemFreeHost", u64(place)) == SUCCESS
    assert memory("cuMemHostGetDevicePointer_v2", *get) == INVALID_VALUE


@pytest.mark.parametrize(
    ("shared", "flags", "code"),
    [(True, 0, 1), (True, 2, 1), (True, 8, 1), (True, 10, 0), (False, 0, 0), (False, 10, 0)],
)
def test_file_mapping_registers_for_reading_alone(memory, tmp_path, shared, flags, code):
    file = tmp_path / "tokens"
    file.write_bytes(bytes(8192))
    with open(file, "r+b") as opened:
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        mapping = mmap.mmap(opened.fileno(), 8192, kind)
    array = np.frombuffer(mapping, np.uint8)
    place = u64(array.ctypes.data)
    assert memory("cuMemHostRegister_v2", place, u64(8192), flags) == code
    if code == 0:
        assert memory("cuMemHostRegister_v2", place, u64(4096), flags) == ALREADY_REGISTERED
        assert memory("cuMemHostUnregister", u64(array.ctypes.data + 1)) == NOT_REGISTERED
        assert memory("cuMemHostUnregister", place) == SUCCESS
    os.truncate(file, 4096)
    if shared:
        assert memory("cuMemHostRegister_v2", place, u64(8192), 10) == INVALID_VALUE


def test_address_range_grows_in_place(memory):
    unit = 2 << 20
    prop = Property(1, 1, 1, 0)
    access = (ctypes.c_int * 3)(1, 0, 3)
    base, handles = ctypes.c_uint64(), []
    reserve = (ctypes.byref(base), u64(4 * unit), u64(0), u64(0), u64(0))
    assert memory("cuMemAddressReserve", *reserve) == SUCCESS
    for at in range(2):
        handle = ctypes.c_uint64()
        make = (ctypes.byref(handle), u64(unit), ctypes.byref(prop), u64(0))
        assert memory("cuMemCreate", *make) == SUCCESS
        place = base.value + at * unit
        assert memory("cuMemMap", u64(place), u64(unit), u64(0), handle, u64(0)) == SUCCESS
        assert memory("cuMemMap", u64(place), u64(unit), u64(0), handle, u64(0)) == INVALID_VALUE
        assert memory("cuMemsetD8Async", u64(place), 7, u64(unit), None) == INVALID_VALUE
        assert memory("cuMemSetAccess", u64(place), u64(unit), access, u64(1)) == SUCCESS
        handles.append(handle)
    assert memory("cuMemsetD8Async", base, 7, u64(2 * unit), None) == SUCCESS
    assert memory("cuMemsetD8Async", base, 7, u64(2 * unit + 1), None) == INVALID_VALUE
    assert ctypes.string_at(base.value + unit - 1, 2) == b"\7\7"
    assert memory("cuMemAddressFree", base, u64(4 * unit)) == INVALID_VALUE
    assert [memory("cuMemRelease", handle) for handle in handles] == [SUCCESS] * 2
    assert memory("cuMemUnmap", base, u64(2 * unit)) == SUCCESS
    assert memory("cuMemAddressFree", base, u64(4 * unit)) == SUCCESS


def test_exported_allocation_is_the_same_memory_for_its_importer(memory):
    unit, prop = 2 << 20, Property(1, 1, 1, 0)
    first, second, base, file = u64(0), u64(0), u64(0), ctypes.c_int(-1)
    access = (ctypes.c_int * 3)(1, 0, 3)
    make = (ctypes.byref(first), u64(unit), ctypes.byref(prop), u64(0))
    assert memory("cuMemCreate", *make) == SUCCESS
    assert memory("cuMemExportToShareableHandle", ctypes.byref(file), first, 1, u64(0)) == SUCCESS
    shared = ctypes.c_void_p(file.value)
    assert memory("cuMemImportFromShareableHandle", ctypes.byref(second), shared, 1) == SUCCESS
    os.close(file.value)
    reserve = (ctypes.byref(base), u64(2 * unit), u64(0), u64(0), u64(0))
    assert memory("cuMemAddressReserve", *reserve) == SUCCESS
    places = [base.value, base.value + unit]
    for place, handle in zip(places, (first, second), strict=True):
        assert memory("cuMemMap", u64(place), u64(unit), u64(0), handle, u64(0)) == SUCCESS
        assert memory("cuMemRelease", handle) == SUCCESS
    assert memory("cuMemSetAccess", base, u64(2 * unit), access, u64(1)) == SUCCESS
    assert memory("cuMemsetD8Async", base, 9, u64(unit), None) == SUCCESS
    assert ctypes.string_at(places[1] + 100, 3) == b"\t\t\t"
    assert memory("cuMemUnmap", base, u64(2 * unit)) == SUCCESS
    assert memory("cuMemAddressFree", base, u64(2 * unit)) == SUCCESS


def test_failures_come_when_they_were_asked_for(memory, launcher):
    stream = ctypes.c_void_p()
    launcher.library.kalos_fake_fail(b"cuMemAlloc:2:2,cuStreamQuery:*:700,cuMemsetD8Async:1:-1")
    code, place = memory.alloc(16)
    assert (code, memory.alloc(16)[0]) == (SUCCESS, OUT_OF_MEMORY)
    assert memory("cuStreamQuery", stream) == memory("cuStreamQuery", stream) == 700
    assert memory("cuMemsetD8Async", u64(place), 1, u64(16), None) == SUCCESS
    assert ctypes.string_at(place, 16) == b"\xcd" * 16
    assert launcher.library.kalos_fake_count(b"cuMemAlloc") == 2
    launcher.library.kalos_fake_fail(b"cuMemsetD8Async:1:-719")
    assert memory("cuMemsetD8Async", u64(place), 1, u64(16), None) == SUCCESS
    assert memory("cuStreamSynchronize", stream) == LAUNCH_FAILED
    assert memory("cuStreamSynchronize", stream) == SUCCESS
    assert memory("cuMemFree_v2", u64(place)) == SUCCESS


def test_calls_without_a_context_or_with_a_dead_handle_are_refused(memory):
    stream, context = ctypes.c_void_p(), ctypes.c_void_p()
    assert memory("cuStreamCreate", ctypes.byref(stream), 1) == SUCCESS
    assert memory("cuStreamDestroy_v2", stream) == SUCCESS
    assert memory("cuStreamSynchronize", stream) == INVALID_HANDLE
    assert memory("cuCtxPopCurrent_v2", ctypes.byref(context)) == SUCCESS
    assert memory.alloc(16)[0] == INVALID_CONTEXT
    assert memory("cuCtxPushCurrent_v2", context) == SUCCESS


# ---- Processes that ask for a driver -------------------------------------------------------------
def run_child(folder, beyond=0, *, sanitize=False, **settings):
    variables = emulated_cuda.environment(folder, kernels=[SELFTEST, PLAN], sanitize=sanitize)
    settings = {f"KALOS_FAKE_{name}": str(value) for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, str(emulated_cuda.SIMT / "driver_child.py"), str(beyond)],
        env={**os.environ, **variables, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"ASYNC": 200}, {"STRICT": 1}, {"STRICT": 1, "ASYNC": 0, "VERSION": 12020}],
    ids=["plain", "async", "strict", "strict-async"],
)
def test_cuda_python_finds_the_driver_by_its_name(folder, tmp_path, settings):
    log = tmp_path / "calls"
    done = run_child(folder, 39, LOG=log, **settings)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen.pop("sum") == sum(range(5000))
    assert seen == {
        "name": "Emulated GPU",
        "capability": [9, 0],
        "multiprocessors": 4,
        "version": settings.get("VERSION", 13000),
        "missing": 0,
        "taken": 20164,
    }
    assert {"cuLaunchKernel 1", "cuMemAlloc 2"} <= set(log.read_text().splitlines())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"DEVICES": 0}, "NO_DEVICE"), ({"FAIL": "cuMemAlloc:2:2"}, "cuMemAlloc: .*OUT_OF_MEMORY")],
)
def test_driver_that_fails_says_so(folder, settings, message):
    done = run_child(folder, **settings)
    assert done.returncode != 0
    assert re.search(message, done.stderr)


def test_sanitized_driver_stops_at_an_access_out_of_bounds(folder):
    fine = run_child(folder, 39, sanitize=True)
    assert fine.returncode == 0, fine.stderr
    stopped = run_child(folder, 41, sanitize=True)
    assert stopped.returncode != 0
    assert "heap-buffer-overflow" in stopped.stderr
    assert "selftest.cu" in stopped.stderr


def test_launches_of_several_threads_take_turns(launcher):
    values = np.arange(5000, dtype=np.uint32)
    context = ctypes.c_void_p()
    launcher.call("cuCtxGetCurrent", ctypes.byref(context))

    def work(_):
        launcher.call("cuCtxPushCurrent_v2", context)
        totals, counter, result = words(7), words(1), words(1)
        for _ in range(20):
            counter[0] = 0
            arguments = (values, ctypes.c_uint32(5000), totals, counter, result)
            assert launcher.launch("test_sum", 7, 96, *arguments) == 0
            assert result[0] == values.sum()
        launcher.call("cuCtxPopCurrent_v2", None)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
