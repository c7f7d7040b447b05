"""The store and crashes of a process: cut logs, kills, signals (FAULTS 1, 2, 8, 10, 48, 49)."""

import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
from helpers.appender import APPENDER, acknowledged, found_calls
from helpers.faults import checked_child, compile_shim, environment, run_child, start_child
from helpers.store_images import answers, make_small, read_image, turn_value, write_image

from kalos_ctx.errors import StoreCorrupt
from kalos_ctx.store import SessionStore

KILLS = int(os.environ.get("KALOS_KILLS", "200"))


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """Return the compiled shim between a process and the system."""
    return compile_shim(tmp_path_factory.mktemp("shim"))


# ---- 1: cut at every byte -----------------------------------------------------------------------


def last_record(path):
    """Return (start, end) of the last record of a store's first log segment."""
    with SessionStore.open(path) as store:
        end = store._core.log.end & 0xFFFFFFFF
        store.append("s0", "user", token_ids=[1, 2, 3])
        return end, store._core.log.end & 0xFFFFFFFF


@pytest.mark.parametrize("closed", [True, False])
def test_fault_01_log_cut_at_every_byte_leaves_a_prefix(tmp_path, closed):
    path = tmp_path / "s"
    make_small(path)
    start, end = last_record(path)
    if not closed:
        checked_child(
            "import os, sys\nfrom kalos_ctx.store import SessionStore\n"
            "s = SessionStore.open(sys.argv[1])\n"
            "s.append('s0', 'user', token_ids=[4])\nos._exit(0)",
            path,
        )
        start, end = end, (path / "gen-000000/log-000000").stat().st_size
    image = read_image(path)
    before = SessionStore.open(path, "r").count("s0") - 1
    for cut in range(start, end) if os.environ.get("KALOS_EXHAUSTIVE") else range(start, end, 5):
        write_image(path, image)
        os.truncate(path / "gen-000000/log-000000", cut)
        with SessionStore.open(path) as store:
            assert store.count("s0") == before
            assert store.recovery["flaw"] == "cut"
            assert store.append("s0", "user", token_ids=[cut]) == before
        with SessionStore.open(path) as store:
            assert store.recovery["flaw"] is None
            assert store.turns("s0")[-1].token_ids.tolist() == [cut]


def test_fault_01_log_cut_anywhere_opens_with_what_is_in_front(tmp_path):
    path = tmp_path / "s"
    checked_child(APPENDER, path, "process", 0, 40, tmp_path / "ack")
    image = read_image(path)
    name = "gen-000000/log-000000"
    cuts = random.Random(1).sample(range(len(image[name])), 60)
    last = None
    for cut in sorted([*cuts, 0, 1, 63, 64, 65], reverse=True):
        write_image(path, image)
        os.truncate(path / name, cut)
        with SessionStore.open(path) as store:
            n = found_calls(store, 40)
            assert last is None or n <= last
            last = n
            store.append("new", "user", token_ids=[1])
        with SessionStore.open(path) as store:
            assert found_calls(store, 40) == n
            assert store.count("new") == 1
    assert last == 0


def test_fault_01_cut_of_an_older_segment_is_damage(tmp_path):
    path = tmp_path / "s"
    checked_child(APPENDER, path, "process", 0, 200, tmp_path / "ack")
    assert (path / "gen-000000/log-000001").exists()
    os.truncate(path / "gen-000000/log-000000", 30000)
    for name in ("index", "rows", "dead"):
        (path / "gen-000000" / name).unlink()
    with pytest.raises(StoreCorrupt) as caught:
        SessionStore.open(path)
    assert caught.value.file == "gen-000000/log-000000"
    assert (path / "gen-000000/log-000001").exists()


def test_missing_log_segment_is_damage_and_not_an_end(tmp_path):
    path = tmp_path / "s"
    checked_child(APPENDER, path, "process", 0, 400, tmp_path / "ack")
    assert (path / "gen-000000/log-000002").exists()
    (path / "gen-000000/log-000001").unlink()
    (path / "gen-000000/index").unlink()
    with pytest.raises(StoreCorrupt):
        SessionStore.open(path)
    assert (path / "gen-000000/log-000002").exists()


# ---- 2, 49: kills -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durability", "share"), [("process", 0.7), ("group", 0.15), ("each", 0.15)]
)
def test_fault_02_kill_at_random_instants_loses_nothing_acknowledged(tmp_path, durability, share):
    """The child forks its victims, so that a kill costs no start of an interpreter."""
    kills = max(5, int(KILLS * share))
    out = checked_child(KILL_LOOP, tmp_path / "s", durability, kills, timeout=7200)
    assert int(out.split()[-1]) == kills


KILL_LOOP = """
import os, random, signal, sys, time
from kalos_ctx.store import SessionStore
path, durability, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
draw = random.Random(5)
done = 0
for kill in range(kills):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = SessionStore.open(path, durability=durability, segment_bytes=65536)
        n = store.count("n")
        if n and n % 64 == 0 and not store.count(f"x{n}"):
            store.append(f"x{n}", "user", token_ids=[n])
        os.write(write, b"o")
        while True:
            store.extend("n", [{"role": "user", "token_ids": [n, 1], "key": str(n)},
                               {"role": "user", "token_ids": [n, 2] * draw.randrange(1, 60)}])
            n += 2
            if n % 64 == 0:
                store.append(f"x{n}", "user", token_ids=[n])
            os.write(write, b"a")
    os.close(write)
    if kill % 4:
        os.read(read, 1)
    time.sleep(draw.random() * 0.012)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    acks = b"".join(iter(lambda: os.read(read, 65536), b"")).count(b"a")
    os.close(read)
    # Opening for reading first, then for writing in a process that ends without a close.
    checker = os.fork()
    if checker == 0:
        try:
            if kill % 3 == 0 and done:
                with SessionStore.open(path, "r") as reader:
                    assert reader.count("n") >= done + 2 * acks, (reader.count("n"), done, acks)
            store = SessionStore.open(path, durability=durability, segment_bytes=65536)
            n = store.count("n")
            assert n % 2 == 0 and n >= done + 2 * acks, (n, done, acks)
            assert store.recovery["flaw"] in (None, "unfinished batch", "cut", "damage", "gap")
            last = store.turns("n", max(0, n - 400), n) if n else []
            assert [t.token_ids[0] for t in last] == [t.seq - t.seq % 2 for t in last]
            assert all(store.count(f"x{k}") == 1 for k in range(64, n - 1, 64)), "x"
            if n > 4000:
                store.rollback("n", 0)
                for k in range(64, n + 1, 64):
                    if store.count(f"x{k}"):
                        store.delete(f"x{k}")
                n = 0
        except BaseException as error:
            print(type(error).__name__, error, kill, file=sys.stderr, flush=True)
            os._exit(1)
        with open(path + ".n", "wb") as file:
            file.write(n.to_bytes(8, "little"))
        os._exit(0)
    _, status = os.waitpid(checker, 0)
    assert status == 0, kill
    with open(path + ".n", "rb") as file:
        done = int.from_bytes(file.read(8), "little")
print(kills)
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(3)", "raise KeyError", "os.abort()"])
def test_fault_49_process_that_ends_without_close_loses_nothing(tmp_path, end):
    code = (
        "import os, sys\nfrom kalos_ctx.store import SessionStore\n"
        "s = SessionStore.open(sys.argv[1])\n"
        f"for i in range(50): s.append('a', 'user', token_ids=[i])\n{end}"
    )
    run_child(code, tmp_path / "s")
    with SessionStore.open(tmp_path / "s") as store:
        assert [t.token_ids.tolist() for t in store.turns("a")] == [[i] for i in range(50)]
        assert store.recovery["dropped_bytes"] == 0
        assert not store.recovery["rebuilt"]


# ---- 8, 10: crashes while it recovers and compacts ----------------------------------------------

OPENER = """
import sys
from kalos_ctx.store import SessionStore
from kalos_ctx import _control
if len(sys.argv) > 2:
    _control.boot_id = lambda: b"another boot...."
SessionStore.open(sys.argv[1]).close()
"""


@pytest.mark.parametrize("boot", [(), ("other",)], ids=["killed", "power-loss"])
def test_fault_08_crash_at_each_call_of_a_recovery_changes_nothing(tmp_path, shim, boot):
    path = tmp_path / "s"
    checked_child(APPENDER, path, "process", 0, 60, tmp_path / "ack")
    # A torn tail, so that recovery has something to drop.
    with open(path / "gen-000000/log-000000", "ab") as log:
        log.write(b"KREC" + bytes(range(90)))
    image = read_image(path)
    survived = 0
    for at in range(1, 200):
        write_image(path, image)
        first = run_child(OPENER, path, *boot, LD_PRELOAD=shim, KALOS_KILL=at)
        if first.returncode == 0:
            survived = at
            break
        assert first.returncode == -signal.SIGKILL, first.stderr
        second = run_child(OPENER, path, *boot, LD_PRELOAD=shim, KALOS_KILL=max(1, at // 2))
        assert second.returncode in (0, -signal.SIGKILL), second.stderr
        with SessionStore.open(path) as store:
            assert found_calls(store, 60) == 60
    assert survived > 5


COMPACTER = """
import sys
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1])
open(sys.argv[2], "w").close()
store.compact()
store.append("s0", "user", token_ids=[77])
"""


def test_fault_10_crash_at_each_call_of_a_compaction_leaves_one_whole_generation(tmp_path, shim):
    path, arm = tmp_path / "s", tmp_path / "arm"
    make_small(path)
    image = read_image(path)
    with SessionStore.open(path, "r") as store:
        right = answers(store)
    ended = False
    step = 1 if os.environ.get("KALOS_EXHAUSTIVE") else 4
    for at in range(1, 2000, step):
        shutil.rmtree(path)
        path.mkdir()
        write_image(path, image)
        arm.unlink(missing_ok=True)
        done = run_child(COMPACTER, path, arm, LD_PRELOAD=shim, KALOS_KILL=at, KALOS_ARM=arm)
        with SessionStore.open(path) as store:
            found = answers(store)
            if done.returncode == 0:
                ended = True
                break
            assert {k: v for k, v in found.items() if k != "stats"} == {
                k: v for k, v in right.items() if k != "stats"
            }
            assert len([p for p in path.iterdir() if p.name.startswith("gen-")]) == 1
    assert ended


def test_fault_10_crash_while_the_index_is_built_leaves_the_log_serving(tmp_path, shim):
    path = tmp_path / "s"
    make_small(path)
    with SessionStore.open(path, "r") as store:
        right = answers(store)
    (path / "gen-000000/rows").unlink()
    image = read_image(path)
    for at in range(1, 100, 2):
        write_image(path, image)
        if run_child(OPENER, path, LD_PRELOAD=shim, KALOS_KILL=at).returncode == 0:
            break
        with SessionStore.open(path) as store:
            assert answers(store) == right
    assert at > 5


def test_erasure_killed_at_each_call_is_whole_or_not_begun(tmp_path, shim):
    path, arm = tmp_path / "s", tmp_path / "arm"
    make_small(path)
    image = read_image(path)
    code = COMPACTER.split("store.compact()", maxsplit=1)[0] + "store.delete('s2')"
    for at in range(1, 200, 2):
        write_image(path, image)
        arm.unlink(missing_ok=True)
        done = run_child(code, path, arm, LD_PRELOAD=shim, KALOS_KILL=at, KALOS_ARM=arm)
        with SessionStore.open(path) as store:
            assert store.count("s2") in (0, 4)
            gone = store.count("s2") == 0
            assert store.verify().errors == []
            assert [t.seq for t in store.turns("s0")] == [0, 1, 2, 3]
        needle = b"".join(i.to_bytes(4, "little") for i in range(20, 40))
        assert gone != any(needle in raw for raw in read_image(path).values())
        if done.returncode == 0:
            break
    assert at > 5


def test_rebuilt_index_finds_all_after_erasures_and_growth_of_its_tables(tmp_path):
    """Records name buckets of tables in which erased sessions still had theirs."""
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        for i in range(400):
            store.append(f"s{i}", "user", token_ids=[i + 1], key="k", group=i)
            if i % 3 == 0 and i > 100:
                store.delete(f"s{i - 99}")
        want = {n: [turn_value(t) for t in store.turns(n)] for n in store.sessions(limit=999).items}
    (path / "gen-000000/index").unlink()
    with SessionStore.open(path) as store:
        assert store.recovery["rebuilt"]
        assert store.sessions(limit=999).items == list(want)
        for name, turns in want.items():
            assert [turn_value(t) for t in store.turns(name)] == turns
            assert store._core.has_key(b"", name.encode(), b"sk") in (True, False)
        store.append("s0" if "s0" in want else "s5", "user", token_ids=[1])
        for i in range(400, 700):
            store.append(f"s{i}", "user", token_ids=[i])
        assert all(store.count(f"s{i}") == 1 for i in range(400, 700))


def test_rebuilt_index_knows_the_blocks_of_an_erased_first_session(tmp_path):
    """The first session's record places the block of slots; erased, it must still say so."""
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        for i in range(10):
            store.append(f"s{i}", "user", token_ids=[i])
        store.delete("s0")
    (path / "gen-000000/index").unlink()
    with SessionStore.open(path) as store:
        assert store.sessions().items == [f"s{i}" for i in range(1, 10)]
        store.append("s0", "user", token_ids=[1])
        assert store.sessions().items == [*(f"s{i}" for i in range(1, 10)), "s0"]


# ---- 48: signals --------------------------------------------------------------------------------

STORM = """
import os, signal, sys
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1], durability=sys.argv[2])
hits, inside = 0, False
def on_signal(*_):
    global hits, inside
    if inside:
        inside, hits = False, hits + 1
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, on_signal)
acked = []
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0007)
for n in range(3000):
    try:
        inside = True
        seqs = store.extend("a", [{"role": "user", "token_ids": [n, k]} for k in (1, 2)])
        inside = False
    except KeyboardInterrupt:
        continue
    acked.append((n, seqs))
    if hits > 400:
        break
signal.setitimer(signal.ITIMER_REAL, 0)
turns = store.turns("a")
assert hits > 20, hits
assert len(turns) % 2 == 0
for i in range(0, len(turns), 2):
    assert turns[i].token_ids[0] == turns[i + 1].token_ids[0]
    assert [turns[i].token_ids[1], turns[i + 1].token_ids[1]] == [1, 2]
have = {int(t.token_ids[0]) for t in turns}
assert all(k in have for k, _ in acked)
assert store.verify().errors == []
if sys.argv[3] == "term":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
store.close()
"""


@pytest.mark.parametrize("durability", ["process", "each"])
def test_fault_48_signals_inside_append_leave_whole_batches(tmp_path, durability):
    done = run_child(STORM, tmp_path / "s", durability, "term")
    assert done.returncode == -signal.SIGTERM, done.stderr
    with SessionStore.open(tmp_path / "s") as store:
        assert store.count("a") % 2 == 0
        assert store.verify().errors == []


def test_appender_runs_as_a_process(tmp_path):
    """The helper's acknowledgements are those of finished calls."""
    child = start_child(APPENDER, tmp_path / "s", "process", 0, 30, tmp_path / "ack")
    assert child.wait(60) == 0
    child.stdin.close()
    child.stdout.close()
    assert acknowledged(tmp_path / "ack") == 30
    assert (
        subprocess.run([sys.executable, "-c", ""], env=environment(), check=False).returncode == 0
    )


OPENS_AND_DIES = """
import os, sys
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1])
if sys.argv[2] == "compacts":
    store.compact()
elif sys.argv[2] == "reads":
    store.turns("s")
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("what", ["only opens", "reads", "compacts"])
def test_a_writer_killed_before_it_wrote_leaves_an_index_that_is_trusted(tmp_path, what):
    with SessionStore.open(tmp_path / "s") as store:
        for n in range(20):
            store.append("s", "user", token_ids=[n], framed=True)
    for _ in range(3):  # also after another that was killed
        done = subprocess.run(
            [sys.executable, "-c", OPENS_AND_DIES, str(tmp_path / "s"), what], check=False
        )
        assert done.returncode == -signal.SIGKILL
    with SessionStore.open(tmp_path / "s") as store:
        assert not store.recovery["rebuilt"]
        assert store.recovery["replayed"] == 0
        assert [turn.token_ids.tolist() for turn in store.turns("s")] == [[n] for n in range(20)]
        assert store.append("s", "user", token_ids=[20], framed=True) == 20
        assert store.verify().ok
