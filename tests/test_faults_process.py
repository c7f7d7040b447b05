"""The store with readers beside its writer, jumping clocks, large sizes (FAULTS 37-51)."""

import os
import random
import shutil
import signal
import subprocess
import threading

import numpy as np
import pytest
from helpers.faults import checked_child, start_child
from helpers.store_images import read_image

from kalos_ctx.errors import StoreCorrupt
from kalos_ctx.store import SessionStore

# ---- 37, 40: growth and races -------------------------------------------------------------------


def test_fault_37_views_stay_valid_while_the_files_grow(tmp_path):
    """Arrays taken before every mapping was replaced, and after the store is closed."""
    path = tmp_path / "s"
    with SessionStore.open(path, segment_bytes=65536) as writer:
        writer.append("first", "user", token_ids=list(range(100)))
        reader = SessionStore.open(path, "r")
        views = [(reader.turns("first")[0].token_ids, 0)]
        for i in range(1500):
            writer.append(f"s{i}", "user", token_ids=list(range(i, i + 100)))
            if i % 50 == 0:
                views.append((reader.turns(f"s{i}")[0].token_ids, i))
        reader.close()
        del reader
        for view, start in views:
            assert view.tolist() == list(range(start, start + 100))
        assert not views[0][0].flags.writeable


READER = """
import sys
from kalos_ctx.errors import KalosError
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1], "r")
print("open", flush=True)
looks, last = 0, 0
while True:
    n = store.count("a")
    assert n % 3 == 0, n
    try:
        turns = store.turns("a", max(0, n - 60), None)
    except LookupError:
        turns = []
    assert len(turns) % 3 == 0, len(turns)
    first = None
    for i in range(0, len(turns), 3):
        batch = turns[i : i + 3]
        ids = [t.token_ids.tolist() for t in batch]
        if 0 in ids[0] + ids[1] + ids[2]:
            # Erased since the call returned: arrays lie in the files, whose bytes are gone.
            assert store.count("a") < n
            break
        mark = ids[0][0]
        assert ids == [[mark] * (1 + mark % 50 + p) for p in range(3)], ids
        assert [t.metadata["p"] for t in batch] == [0, 1, 2]
        assert first is None or mark == first + 1, (first, mark)
        first = mark
    looks += 1
    try:
        store.passages("docs", [0])
    except LookupError:
        pass
    if store.count("stop"):
        break
print(looks, flush=True)
"""


def test_fault_40_readers_beside_a_busy_writer_see_whole_batches_in_order(tmp_path):
    """Appends, rollbacks with other turns behind, an erasure, compactions; three readers."""
    path = tmp_path / "s"
    with SessionStore.open(path, segment_bytes=65536) as store:
        store.add_passages("docs", np.ones((1, 4)))
        readers = [start_child(READER, path) for _ in range(3)]
        for child in readers:
            assert child.stdout.readline() == "open\n"
        mark = 1
        for i in range(1200):
            store.extend("a", [
                {"role": "user", "token_ids": [mark] * (1 + mark % 50 + p), "metadata": {"p": p}}
                for p in range(3)
            ])  # fmt: skip
            mark += 1
            if i % 97 == 96:
                to = max(0, store.count("a") - 30)
                store.rollback("a", to)
                mark -= 10
            if i % 300 == 299:
                store.compact()
            if i == 700:
                store.delete("a")
        store.append("stop", "user", token_ids=[1])
        for child in readers:
            looks = child.stdout.readline()
            assert looks, "a reader ended"
            assert int(looks) > 3
            assert child.wait(30) == 0
            child.stdin.close()
            child.stdout.close()


def test_reader_of_a_session_that_is_erased_meanwhile_gets_turns_or_nothing(tmp_path):
    """An erasure zeroes what a reader may just be reading; that is no damage."""
    path = tmp_path / "s"
    stop, errors, looks = threading.Event(), [], []
    with SessionStore.open(path) as store, SessionStore.open(path, "r") as reader:

        def look():
            while not stop.is_set():
                try:
                    looks.append(len(reader.turns("a")))
                except LookupError:
                    looks.append(0)
                except StoreCorrupt as error:
                    errors.append(error)
                    return

        thread = threading.Thread(target=look)
        thread.start()
        for _ in range(40):
            store.extend("a", [{"role": "user", "token_ids": [1] * 50} for _ in range(20)])
            store.delete("a")
        stop.set()
        thread.join()
    assert errors == []
    # A turn that was erased between may be missing; half of a batch never is.
    assert set(looks) <= {0, 20}


# ---- 39: a reader that was stopped --------------------------------------------------------------

STOPPED = """
import sys
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1], "r")
old = store.turns("a")[0]
print("open", flush=True)
for line in sys.stdin:
    turns = store.turns("a")
    print(old.token_ids.tolist() == [5] * 100, len(turns), turns[-1].token_ids[0], flush=True)
"""


def test_fault_39_reader_stopped_for_long_holds_up_nothing_and_then_follows(tmp_path):
    """What it kept stays readable, and the folder holds one generation, however long it slept."""
    path = tmp_path / "s"
    with SessionStore.open(path, segment_bytes=65536) as store:
        store.append("a", "user", token_ids=[5] * 100)
        child = start_child(STOPPED, path)
        assert child.stdout.readline() == "open\n"
        os.kill(child.pid, signal.SIGSTOP)
        for i in range(400):
            store.append("a", "user", token_ids=[i] * 50, metadata={"pad": "x" * 500})
        for _ in range(3):
            store.compact()
        assert len([p for p in path.iterdir() if p.name.startswith("gen-")]) == 1
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "True 401 399\n"
        child.stdin.close()
        child.stdout.close()
        assert child.wait(30) == 0


# ---- 42: clocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "jump", [-365 * 86400, 365 * 86400, 1, -1], ids=["-1y", "+1y", "+1s", "-1s"]
)
def test_fault_42_jumping_clock_changes_neither_order_nor_retention(store_path, clock, jump):
    with SessionStore.open(store_path, clock=clock) as store:
        for i in range(10):
            store.append("a", "user", token_ids=[i])
            clock.advance(jump if i % 2 else -jump)
        clock.advance(jump)
        assert [t.token_ids.tolist() for t in store.turns("a")] == [[i] for i in range(10)]
    clock.advance(jump)
    with SessionStore.open(store_path, clock=clock) as store:
        assert [t.seq for t in store.turns("a")] == list(range(10))
        store.compact()
        assert [t.token_ids.tolist() for t in store.turns("a")] == [[i] for i in range(10)]
        assert store.recovery["rebuilt"] is False


# ---- 46: a buffer that changes ------------------------------------------------------------------


def test_fault_46_buffer_changed_by_a_thread_is_stored_with_its_own_checksum(tmp_path):
    """What was stored is some mixture, and the checksum is of that."""
    path = tmp_path / "s"
    ids = np.zeros(20000, np.int32)
    vector = np.ones(64, np.float32)
    stop = threading.Event()

    def scribble():
        k = 0
        while not stop.is_set():
            k += 1
            ids[k % 7 :: 7] = k & 0xFFFF
            vector[k % 64] = 1 + k % 9

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for durability in ("process", "each"):
            with SessionStore.open(path, durability=durability) as store:
                for _ in range(150):
                    store.append("a", "user", token_ids=ids, vector=vector)
                assert store.verify().errors == []
    finally:
        stop.set()
        thread.join()
    with SessionStore.open(path, "r") as store:
        assert len(store.turns("a")) == 300
        assert store.verify().errors == []


# ---- 47: many -----------------------------------------------------------------------------------


def test_fault_47_many_sessions_and_one_long_session_open_and_read_at_once(tmp_path):
    """Sizes that a test has time for; asv_benchmarks/large_store.py does the full ones."""
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        for i in range(20000):
            store.append(f"session {i}", "user", token_ids=[i, 1])
        for i in range(0, 100000, 1000):
            store.extend("long", [{"role": "user", "token_ids": [j]} for j in range(i, i + 1000)])
    code = (
        "import sys\nfrom kalos_ctx.store import SessionStore\n"
        "def read():\n"
        "    lines = open('/proc/self/io').read().splitlines()\n"
        "    return sum(int(line.split()[1]) for line in lines if line.startswith('rchar'))\n"
        "SessionStore.open(sys.argv[1], 'r').turns('session 1')\n"
        "before = read()\n"
        "with SessionStore.open(sys.argv[1], sys.argv[2]) as store:\n"
        "    assert store.turns('session 19999')[0].token_ids.tolist() == [19999, 1]\n"
        "    assert store.turns('long', 99998, None)[1].token_ids.tolist() == [99999]\n"
        "    assert store.count('long') == 100000\n"
        "    print(read() - before)\n"
    )
    for mode in ("r", "a"):
        # Bytes that opening reads do not grow with the store.
        assert int(checked_child(code, path, mode)) < 100_000
    with SessionStore.open(path) as store:
        page = store.sessions(limit=100_000)
        assert len(page.items) == 20001
        assert page.cursor is None


# ---- 51: cp of a live store ---------------------------------------------------------------------

BUSY = """
import sys
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1], durability=sys.argv[2], segment_bytes=65536)
print("open", flush=True)
i = 0
while True:
    store.append(f"s{i % 5}", "user", token_ids=[i] * (1 + i % 300),
                 metadata={"pad": "x" * (i % 700)})
    i += 1
    if i % 500 == 0:
        store.sync()
"""


@pytest.mark.parametrize("durability", ["process", "each"])
def test_fault_51_copy_of_a_live_store_opens_as_a_prefix(tmp_path, durability):
    path = tmp_path / "s"
    child = start_child(BUSY, path, durability)
    assert child.stdout.readline() == "open\n"
    last, draw = -1, random.Random(3)
    try:
        for k in range(6):
            with SessionStore.open(path, "r") as reader:
                while sum(reader.count(f"s{j}") for j in range(5)) <= last + draw.randrange(
                    20, 300
                ):
                    assert child.poll() is None
            copy = tmp_path / f"copy{k}"
            subprocess.run(["cp", "-r", path, copy], check=True)
            with SessionStore.open(copy) as store:
                turns = sorted(
                    (int(t.token_ids[0]), len(t.token_ids))
                    for j in range(5)
                    for t in store.turns(f"s{j}")
                )
                assert turns == [(i, 1 + i % 300) for i in range(len(turns))]
                assert len(turns) > 0
                store.append("s0", "user", token_ids=[1])
            with SessionStore.open(copy) as store:
                assert store.recovery["flaw"] is None
                assert sum(store.count(f"s{j}") for j in range(5)) == len(turns) + 1
                assert store.verify().errors == []
            last = len(turns)
            shutil.rmtree(copy)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def test_copy_of_a_closed_store_opens_at_once(tmp_path):
    with SessionStore.open(tmp_path / "s") as store:
        for i in range(100):
            store.append("a", "user", token_ids=[i])
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    with SessionStore.open(tmp_path / "copy", "r") as store:
        assert store.count("a") == 100
    with SessionStore.open(tmp_path / "copy") as store:
        assert store.count("a") == 100
        assert store.recovery == {"replayed": 0, "dropped_bytes": 0, "rebuilt": False, "flaw": None}


def test_copy_of_a_closed_store_whose_log_was_copied_too_early_is_built_again(tmp_path):
    path = tmp_path / "s"
    with SessionStore.open(path, durability="each") as store:
        for i in range(50):
            store.append("a", "user", token_ids=[i])
        early = read_image(path)["gen-000000/log-000000"]
        for i in range(50, 60):
            store.append("a", "user", token_ids=[i])
    shutil.copytree(path, tmp_path / "copy")
    (tmp_path / "copy/gen-000000/log-000000").write_bytes(early)
    with SessionStore.open(tmp_path / "copy") as store:
        assert store.recovery["rebuilt"]
        assert [t.token_ids.tolist() for t in store.turns("a")] == [[i] for i in range(50)]
