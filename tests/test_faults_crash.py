"""The store and crashes: kills, power losses, torn writes (FAULTS 1-5, 7-10, 48, 49)."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.faults import checked_child, compile_shim, environment, run_child, start_child
from helpers.store_images import (
    answers,
    make_small,
    patch,
    read_image,
    set_boot_id,
    turn_value,
    write_image,
    wrong_answers,
)

from kalos_ctx import _control
from kalos_ctx.errors import StoreCorrupt
from kalos_ctx.store import SessionStore


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """Return the compiled shim between a process and the system."""
    return compile_shim(tmp_path_factory.mktemp("shim"))


KILLS = int(os.environ.get("KALOS_KILLS", "200"))
LOSSES = int(os.environ.get("KALOS_LOSSES", "60"))

# Appends turn i to session s<i % 5>, its content made of i, and says so once the call has returned.
APPENDER = """
import os, sys
from kalos_ctx.store import SessionStore
path, durability, first, stop, ack = sys.argv[1:6]
store = SessionStore.open(path, durability=durability, segment_bytes=65536)
fd = os.open(ack, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for i in range(int(first), int(stop)):
    if i % 7 == 3:
        store.extend(f"s{i % 5}", [{"role": "user", "token_ids": [i, part]} for part in range(3)])
    else:
        store.append(f"s{i % 5}", "user", token_ids=list(range(i, i + 1 + i % 40)),
                     metadata={"i": i, "pad": "x" * (i * 37 % 1500)})
    os.write(fd, b"%d\\n" % i)
os._exit(0)
"""


def expected_turns(stop: int) -> list[tuple[int, list[list[int]]]]:
    """What the appender writes, call by call: (session, the token IDs of its turns)."""
    return [
        (i % 5, [[i, p] for p in range(3)] if i % 7 == 3 else [list(range(i, i + 1 + i % 40))])
        for i in range(stop)
    ]


def found_calls(store, stop: int) -> int:
    """Return how many of the appender's calls the store holds: all in order, none in part."""
    have = {k: [t.token_ids.tolist() for t in store.turns(f"s{k}")] if store.count(f"s{k}") else []
            for k in range(5)}  # fmt: skip
    want = expected_turns(stop)
    left = {k: list(turns) for k, turns in have.items()}
    for n, (session, turns) in enumerate(want):
        if left[session][: len(turns)] != turns:
            assert left == {k: [] for k in range(5)}, f"call {n} is missing or in part"
            return n
        del left[session][: len(turns)]
    assert left == {k: [] for k in range(5)}
    return stop


def acknowledged(ack) -> int:
    """Return how many calls were acknowledged."""
    text = Path(ack).read_text() if Path(ack).exists() else ""
    return text.count("\n")


@pytest.fixture
def other_boot(monkeypatch):
    """Return a function after which the machine has another boot ID."""

    def reboot():
        boot = os.urandom(16)
        monkeypatch.setattr(_control, "boot_id", lambda: boot)

    return reboot


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


# ---- 3, 4, 5, 9: power losses -------------------------------------------------------------------

SECTOR = 512


class PowerLoss:
    """What the disk may hold: what was synced, and any of the sectors written since."""

    def __init__(self, tmp_path, shim, durability):
        self.path = tmp_path / "s"
        self.ack = tmp_path / "ack"
        self.durable = tmp_path / "durable"
        SessionStore.open(self.path, durability=durability, segment_bytes=65536).close()
        shutil.copytree(self.path, self.durable)
        checked_child(
            APPENDER, self.path, durability, 0, 150, self.ack,
            LD_PRELOAD=shim, KALOS_DURABLE=self.durable,
        )  # fmt: skip
        self.live = read_image(self.path)
        self.synced = read_image(self.durable)
        names = self.synced.pop("names-gen-000000", b"").decode().split()
        self.listed = {f"gen-000000/{name}" for name in names} | {"control", "lock"}

    def leave(self, draw, torn=False):
        """Write one image that the loss could have left, in place."""
        image = {}
        share = draw.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        for name, new in self.live.items():
            old = self.synced.get(name)
            if name not in self.listed and old is None and draw.random() < 0.5:
                continue
            image[name] = mixed(old or b"", new, draw, share, torn)
        write_image(self.path, image)


def mixed(old: bytes, new: bytes, draw, share: float, torn: bool) -> bytes:
    """Sectors of two ages; with `torn`, one of them half old, half new or garbage."""
    size = draw.choice([len(old), len(new), draw.randint(min(len(old), len(new)), len(new))])
    size = max(size, len(old))
    out = bytearray(old.ljust(size, b"\0"))
    changed = [
        at
        for at in range(0, size, SECTOR)
        if out[at : at + SECTOR] != new[at : at + SECTOR][: size - at]
    ]
    for at in changed:
        if draw.random() < share:
            out[at : at + SECTOR] = new[at : at + SECTOR][: size - at]
    if torn and changed:
        at = draw.choice(changed)
        middle = draw.randrange(1, SECTOR)
        rest = draw.choice([old, new, draw.randbytes(len(new))]).ljust(size, b"\0")
        half = new[at : at + SECTOR][:middle] + rest[at + middle : at + SECTOR]
        out[at : at + SECTOR] = half[: size - at]
    return bytes(out)


@pytest.mark.parametrize("durability", ["process", "group", "each"])
@pytest.mark.parametrize("torn", [False, True], ids=["fault_03_and_04", "fault_05"])
def test_fault_03_04_05_power_loss_leaves_a_prefix_with_all_that_was_promised(
    tmp_path,
    shim,
    other_boot,
    durability,
    torn,
):
    """Any subset of the unsynced sectors, in any order; `torn`: a sector of two ages or garbage."""
    loss = PowerLoss(tmp_path, shim, durability)
    promised = 0 if durability == "process" else acknowledged(loss.ack)
    draw = random.Random(torn)
    for _ in range(LOSSES):
        loss.leave(draw, torn)
        other_boot()
        with SessionStore.open(loss.path, durability=durability) as store:
            n = found_calls(store, 150)
            assert n >= promised
            store.append("new", "user", token_ids=[7])
        with SessionStore.open(loss.path) as store:
            assert store.recovery["flaw"] is None
            assert found_calls(store, 150) == n
            assert [t.token_ids.tolist() for t in store.turns("new")] == [[7]]
            assert store.verify().errors == []


def test_fault_09_lost_folder_entries_of_a_roll_lose_no_segment(tmp_path, shim, other_boot):
    """Segments whose creation was not synced are gone, older and newer ones alike."""
    loss = PowerLoss(tmp_path, shim, "process")
    segments = sorted(name for name in loss.live if "/log-" in name)
    assert len(segments) >= 3
    for gone in (segments[-1:], segments[1:2], segments[1:]):
        write_image(loss.path, {k: v for k, v in loss.live.items() if k not in gone})
        other_boot()
        with SessionStore.open(loss.path) as store:
            n = found_calls(store, 150)
            for i in range(200):
                store.append("new", "user", token_ids=[i], metadata={"pad": "y" * 400})
        with SessionStore.open(loss.path) as store:
            assert found_calls(store, 150) == n
            assert [t.token_ids[0] for t in store.turns("new")] == list(range(200))


def test_reader_after_a_power_loss_does_not_trust_the_index(tmp_path, other_boot):
    checked_child(APPENDER, tmp_path / "s", "process", 0, 20, tmp_path / "ack")
    other_boot()
    with pytest.raises(StoreCorrupt, match="open the store for writing once"):
        SessionStore.open(tmp_path / "s", "r")
    with SessionStore.open(tmp_path / "s") as store:
        assert found_calls(store, 20) == 20
        with SessionStore.open(tmp_path / "s", "r") as reader:
            assert found_calls(reader, 20) == 20


def test_index_pages_newer_than_the_log_are_forgotten(tmp_path, other_boot):
    """The index on the disk may know turns that the log lost."""
    path = tmp_path / "s"
    make_small(path)
    older = read_image(path)
    with SessionStore.open(path) as store:
        right = answers(store)
        for i in range(30):
            store.append("s0", "user", token_ids=[i])
            store.append(f"lost{i}", "user", token_ids=[i])
        image = read_image(path)
    for name in ("log-000000", "tok-000000"):
        image[f"gen-000000/{name}"] = older[f"gen-000000/{name}"]
    write_image(path, image)
    other_boot()
    with SessionStore.open(path) as store:
        assert wrong_answers(answers(store), right) == []
        assert answers(store)["turns s0"] == right["turns s0"]
        assert store.count("lost3") == 0
        assert store.append("lost3", "user", token_ids=[1]) == 0


# ---- 7: stale bytes -----------------------------------------------------------------------------


def test_fault_07_valid_records_of_an_older_segment_behind_the_end_are_rejected(tmp_path):
    path = tmp_path / "s"
    make_small(path)
    raw = (path / "gen-000000/log-000000").read_bytes()
    with SessionStore.open(path) as store:
        end = store._core.log.end
        right = answers(store)
    # The same bytes at another place, and records of another store at their own place.
    make_small(tmp_path / "other")
    strange = (tmp_path / "other/gen-000000/log-000000").read_bytes()
    for stale in (raw[64:4096], strange[end : end + 4096] or strange[64:4096]):
        patch(path / "gen-000000/log-000000", end, stale)
        with SessionStore.open(path) as store:
            assert store.recovery["dropped_bytes"] > 0
            assert answers(store) == right
            assert store._core.log.end == end
        with SessionStore.open(path) as store:
            assert store.recovery["dropped_bytes"] == 0


def test_fault_07_valid_batch_behind_a_hole_is_not_found_again(tmp_path, other_boot):
    """A batch left behind a hole must not follow what is written into the hole."""
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        start = store._core.log.end
        store.append("a", "user", token_ids=[1])
        first = store._core.log.end
        store.append("a", "user", token_ids=[2])
        store.append("a", "user", token_ids=[3])
        image = read_image(path)
    write_image(path, image)
    other_boot()
    patch(path / "gen-000000/log-000000", start, bytes(first - start))
    with SessionStore.open(path) as store:
        assert store.count("a") == 0
        store.append("a", "user", token_ids=[9])
        assert store._core.log.end == first
    with SessionStore.open(path) as store:
        (path / "gen-000000/index").unlink()
    with SessionStore.open(path) as store:
        assert [t.token_ids.tolist() for t in store.turns("a")] == [[9]]


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


def test_set_boot_id_makes_the_control_file_of_another_boot(tmp_path):
    """The helper and the store agree on the layout: the writer then builds the index anew."""
    checked_child(APPENDER, tmp_path / "s", "process", 0, 5, tmp_path / "ack")
    set_boot_id(tmp_path / "s", b"x" * 16)
    with SessionStore.open(tmp_path / "s") as store:
        assert store.recovery["rebuilt"]
        assert found_calls(store, 5) == 5


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
