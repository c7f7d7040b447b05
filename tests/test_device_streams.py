"""Windows whose readers work later, and processes that end or fork: each in a process of its own.

The stand-in driver takes part also on a machine with a GPU: its streams are as slow as a test asks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import device_memory, emulated_cuda

READERS = """
import numpy as np
from helpers import device_memory, dlpack_consumer
from kalos_ctx._windows import WindowPool

memory = device_memory.open_memory()
pool = WindowPool(1, 10.0, memory.device)
call = memory._call
slow, quick = (int(call("cuStreamCreate", 1)) for _ in range(2))
scratch = call("cuMemAlloc", 2000)

def check(turns, streams, reader, host=False):
    targets = []
    for turn in range(turns):
        ids = np.full(500, turn + 1, np.int32)
        with pool.acquire(500, tenant=b"one" if host else bytes([turn % 3])) as window:
            window.write(ids)
            options = {"dl_device": (1, 0)} if host else {}
            exports = [window.__dlpack__(stream=one, **options) for one in streams(turn)]
            taken = [dlpack_consumer.take(one) for one in exports]
        place, stream, target = taken[0].tensor.data, reader(turn), call("cuMemAlloc", 2000)
        for _ in range(16 if stream == slow or host else 0):
            call("cuMemcpyDtoDAsync", scratch, target, 2000, stream)
        copy = "cuMemcpyHtoDAsync" if host else "cuMemcpyDtoDAsync"
        call(copy, target, place, 2000, stream)
        for one in taken:
            one.drop()
        targets.append((target, ids))
    call("cuCtxSynchronize")
    for target, ids in targets:
        assert memory.read(int(target), np.int32, 500).tolist() == ids.tolist()
        call("cuMemFree", target)

for given, stream in ((None, 1), (1, 1), (2, 2), (slow, slow), (-1, slow)):
    check(80, lambda turn: [given], lambda turn: stream)
check(80, lambda turn: [1, slow], lambda turn: slow)
check(80, lambda turn: [[slow, quick][turn % 2]], lambda turn: [slow, quick][turn % 2])
check(80, lambda turn: [None], lambda turn: 1, host=True)
assert pool.free == 1
assert memory.emulated.kalos_fake_problems() == 0
print("read")
"""

# A consumer whose work takes long must not delay the next window while there is other memory.
BUSY = """
from helpers import device_memory, dlpack_consumer
from kalos_ctx._windows import WindowPool

memory = device_memory.open_memory()
pool = WindowPool(1, 0.0, memory.device)
call = memory._call
scratch = call("cuMemAlloc", 64)

def lend():
    with pool.acquire(16) as window:
        window.write(__import__("numpy").zeros(16, "int32"))
        taken = dlpack_consumer.take(window.__dlpack__(stream=1))
    place = taken.tensor.data
    return taken, place

free = [lend() for _ in range(2)]
for taken, _ in free:
    taken.drop()
call("cuCtxSynchronize")
busy, place = lend()
call("cuMemcpyDtoDAsync", scratch, place, 64, 1)
busy.drop()
next_one, other = lend()
assert other != place and other in [one for _, one in free], (other, place, free)
next_one.drop()
print("other")
"""

END = """
from helpers import device_memory, dlpack_consumer
from kalos_ctx._windows import WindowPool

memory = device_memory.open_memory()
pool = WindowPool(4, 0.0, memory.device)
kept = [pool.acquire(10), pool.acquire(10).token_ids, pool.acquire(10).__dlpack__(stream=1)]
kept.append(dlpack_consumer.take(pool.acquire(10).__dlpack__(stream=1)))
kept.append(kept)
print("end")
"""

FORK = """
import gc, os
from helpers import device_memory
from kalos_ctx._windows import WindowPool
from kalos_ctx.errors import ForkedHandle

memory = device_memory.open_memory()
pool = WindowPool(2, 0.0, memory.device)
window = pool.acquire(10)
capsule = window.__dlpack__(stream=1)
names = ("cuCtxPushCurrent", "cuMemFree", "cuEventRecord", "cuEventSynchronize", "cuMemAlloc")
calls = lambda: [memory.emulated.kalos_fake_count(name.encode()) for name in names]
before = calls()
child = os.fork()
if child == 0:
    try:
        pool.acquire(10)
    except ForkedHandle:
        pass
    else:
        os._exit(3)
    del capsule, window, pool
    gc.collect()
    os._exit(0 if calls() == before else 4)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run(script, **variables):
    env = {**os.environ, **emulated_cuda.environment(device_memory.FOLDER), **variables}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_queued_readers_see_their_window_although_the_host_dropped_it():
    """Streams that really work later: a window that is lent again too early would be seen."""
    done = run(READERS, KALOS_FAKE_ASYNC="100", KALOS_FAKE_STRICT="1")
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


def test_memory_that_is_still_read_is_not_lent_while_other_is_free():
    done = run(BUSY, KALOS_FAKE_ASYNC="20000")
    assert (done.returncode, done.stdout) == (0, "other\n"), done.stderr


@pytest.mark.parametrize("delay", [None, "1000"])
def test_process_ends_with_everything_alive(delay):
    done = run(END, **({} if delay is None else {"KALOS_FAKE_ASYNC": delay}))
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_forked_child_never_calls_the_driver():
    done = run(FORK)
    assert (done.returncode, done.stdout) == (0, "child 0\n"), done.stderr
