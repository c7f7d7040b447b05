"""The store without room, descriptors or memory (FAULTS 24-26, 28, 35, 36)."""

import errno
import json

import pytest
from helpers.faults import checked_child, compile_shim, run_child, small_disk
from helpers.store_images import answers, make_small

from kalos_ctx.errors import StoreFull
from kalos_ctx.store import SessionStore


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """Return the compiled shim between a process and the system."""
    return compile_shim(tmp_path_factory.mktemp("shim"))


# Appends until the store is full, then once more when there is room again.
FILLER = """
import os, sys
from kalos_ctx.errors import StoreFull
from kalos_ctx.store import SessionStore
path, durability, ballast, arm = sys.argv[1:5]
if ballast != "-":
    open(ballast, "wb").write(bytes(300000))
store = SessionStore.open(path, durability=durability, segment_bytes=65536)
n = 0
def turn(i):
    return [{"role": "user", "token_ids": [i] * 200, "metadata": {"pad": "x" * 900}},
            {"role": "user", "token_ids": [i] * 10}]
if arm != "-":
    for n in range(1, 21):
        store.extend("a", turn(n - 1))
    open(arm, "w").close()
try:
    while n < 5000:
        store.extend("a", turn(n))
        n += 1
    print("never full")
except StoreFull as error:
    print("full", n)
before = store._core.log.end
for _ in range(3):
    try:
        store.extend("a", turn(n))
        print("not full any more")
    except StoreFull:
        pass
assert store._core.log.end == before
# Reads are fine.
assert store.count("a") == 2 * n, store.count("a")
assert [t.token_ids[0] for t in store.turns("a")] == [i // 2 for i in range(2 * n)]
with open(f"{path}/gen-000000/log-{before >> 32:06d}", "rb") as file:
    file.seek(before & 0xffffffff)
    assert not any(file.read()), "a fragment was left"
if ballast != "-":
    os.unlink(ballast)
if arm != "-":
    os.unlink(arm)
if sys.argv[5] == "again":
    assert store.extend("a", turn(n)) == [2 * n, 2 * n + 1]
    n += 1
    assert store.count("a") == 2 * n
    store.close()
print("end", n)
os._exit(0)
"""


def check_filled(path, out):
    """The store opens with exactly the calls that were acknowledged."""
    assert "never full" not in out
    assert "not full any more" not in out
    n = int(out.split()[-1])
    with SessionStore.open(path) as store:
        assert [t.token_ids[0] for t in store.turns("a")] == [i // 2 for i in range(2 * n)]
        assert store.recovery["dropped_bytes"] == 0
        assert store.verify().errors == []


@pytest.mark.parametrize("durability", ["process", "each"])
def test_fault_24_full_disk_raises_and_appends_go_on_when_there_is_room(
    tmp_path,
    shim,
    durability,
):
    """On a tmpfs of 1 MiB; by a shim where this process may not mount."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        if disk is not None:
            out = checked_child(FILLER, disk / "s", durability, disk / "ballast", "-", "again")
            check_filled(disk / "s", out)
            return
    arm = tmp_path / "arm"
    out = checked_child(
        FILLER, tmp_path / "s", durability, "-", arm, "again",
        LD_PRELOAD=shim, KALOS_FAULT=errno.ENOSPC, KALOS_OPS="pwrite", KALOS_ARM=arm,
    )  # fmt: skip
    check_filled(tmp_path / "s", out)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("file", ["index", "tok-", "log-"])
def test_fault_25_no_room_for_any_file_or_quota_raises_before_the_call_counts(
    tmp_path,
    shim,
    file,
    code,
):
    arm = tmp_path / "arm"
    out = checked_child(
        FILLER, tmp_path / "s", "process", "-", arm, "again",
        LD_PRELOAD=shim, KALOS_FAULT=code, KALOS_OPS="pwrite", KALOS_FILE=file, KALOS_ARM=arm,
    )  # fmt: skip
    check_filled(tmp_path / "s", out)


def test_fault_25_no_room_for_a_new_store_leaves_nothing_that_looks_like_one(tmp_path, shim):
    code = (
        "import sys\nfrom kalos_ctx.errors import StoreFull\n"
        "from kalos_ctx.store import SessionStore\n"
        "try:\n    SessionStore.open(sys.argv[1])\nexcept StoreFull:\n    print('full')"
    )
    for file in ("index", "log-", "rows"):
        path = tmp_path / file
        env = {"LD_PRELOAD": shim, "KALOS_FAULT": errno.ENOSPC, "KALOS_OPS": "pwrite"}
        assert checked_child(code, path, KALOS_FILE=file, **env) == "full\n"
        with SessionStore.open(path) as store:
            store.append("a", "user", token_ids=[1])


LIMITED = (
    "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))\n" + FILLER
)


def test_fault_26_file_size_limit_is_an_error_and_the_process_lives(tmp_path):
    out = checked_child(LIMITED, tmp_path / "s", "process", "-", "-", "stay")
    check_filled(tmp_path / "s", out)


WORK = """
import sys
from kalos_ctx.store import SessionStore
from helpers.store_images import answers, make_small
import json
make_small(sys.argv[1], durability=sys.argv[2])
with SessionStore.open(sys.argv[1]) as store:
    print(json.dumps(answers(store)))
"""


@pytest.mark.parametrize("fault", ["short", "eintr"])
@pytest.mark.parametrize("durability", ["process", "each"])
def test_fault_28_short_writes_and_interruptions_change_nothing(tmp_path, shim, fault, durability):
    out = checked_child(
        WORK, tmp_path / "s", durability, LD_PRELOAD=shim, KALOS_FAULT=fault, KALOS_OPS="pwrite"
    )
    make_small(tmp_path / "plain")
    with SessionStore.open(tmp_path / "plain", "r") as store:
        assert json.loads(out) == json.loads(json.dumps(answers(store)))
    with SessionStore.open(tmp_path / "s") as store:
        assert store.verify().errors == []


FAILED_SYNC = """
import os, sys
from kalos_ctx.errors import KalosError, StoreIOError, StoreReadOnly
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1], durability="each")
store.append("a", "user", token_ids=[1])
open(sys.argv[2], "w").close()
for expected in (StoreIOError, StoreReadOnly, StoreReadOnly):
    try:
        store.append("a", "user", token_ids=[2])
        print("no error")
    except expected as error:
        print(type(error).__name__)
assert store.turns("a")[0].token_ids.tolist() == [1]
os.unlink(sys.argv[2])
store.close()
"""


@pytest.mark.parametrize("op", ["fdatasync"])
def test_failed_sync_stops_all_writes_until_the_store_is_opened_again(tmp_path, shim, op):
    """The kernel may drop the pages of a failed sync: a second one would lie."""
    arm = tmp_path / "arm"
    out = checked_child(
        FAILED_SYNC,
        tmp_path / "s",
        arm,
        LD_PRELOAD=shim,
        KALOS_FAULT=errno.EIO,
        KALOS_OPS=op,
        KALOS_ARM=arm,
    )
    assert out.split() == ["StoreIOError", "StoreReadOnly", "StoreReadOnly"]
    with SessionStore.open(tmp_path / "s") as store:
        assert store.turns("a")[0].token_ids.tolist() == [1]
        store.append("a", "user", token_ids=[3])


NO_FILES = """
import os, resource, sys
from kalos_ctx.errors import KalosError, StoreIOError
from kalos_ctx.store import SessionStore
import kalos_ctx._writer, kalos_ctx._verification
path = sys.argv[1]
with SessionStore.open(path, segment_bytes=65536) as store:
    store.append("a", "user", token_ids=[1])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for mode in ("r", "a"):
    for limit in range(3, 24):
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            SessionStore.open(path, mode).close()
            opened = limit
        except KalosError as error:
            opened = None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert len(os.listdir("/proc/self/fd")) == used, (mode, limit, "descriptors leaked")
    assert opened, mode
# On a roll: nothing of the call counts, and it works when there are descriptors again.
store = SessionStore.open(path, segment_bytes=65536)
n, failed = 1, 0
while failed < 3 and n < 2000:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
    try:
        store.append("a", "user", token_ids=[n], metadata={"pad": "x" * 2000})
        n += 1
    except StoreIOError as error:
        failed += 1
        assert store.count("a") == n
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        store.append("a", "user", token_ids=[n], metadata={"pad": "x" * 2000})
        n += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
assert failed == 3, failed
store.close()
print(n)
"""


def test_fault_35_no_descriptors_on_open_or_roll_is_an_error_and_a_retry_works(tmp_path):
    n = int(checked_child(NO_FILES, tmp_path / "s"))
    with SessionStore.open(tmp_path / "s") as store:
        assert store.count("a") == n
        assert not store.recovery["rebuilt"]
        assert store.verify().errors == []


NO_MEMORY = """
import resource, sys
from kalos_ctx.errors import KalosError, StoreIOError
from kalos_ctx.store import SessionStore
import kalos_ctx._writer, kalos_ctx._verification
path = sys.argv[1]
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
failed = 0
for extra in (0, 1 << 20, 16 << 20, 65 << 20, 512 << 20):
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, resource.RLIM_INFINITY))
    try:
        with SessionStore.open(path, "r") as store:
            turns = store.turns("s0")
            assert len(turns) == 4
    except (KalosError, MemoryError) as error:
        failed += 1
        assert extra < 512 << 20, error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(failed)
"""


def test_fault_36_mapping_that_fails_is_an_error_and_no_crash(tmp_path, shim):
    make_small(tmp_path / "small")
    with SessionStore.open(tmp_path / "s") as store:
        for j in range(4):
            store.append("s0", "user", token_ids=[j])
    assert int(checked_child(NO_MEMORY, tmp_path / "s")) >= 1
    # ENOMEM of mmap itself, as where max_map_count is reached.
    code = (
        "import sys\nfrom kalos_ctx.errors import StoreIOError\n"
        "from kalos_ctx.store import SessionStore\n"
        "store = SessionStore.open(sys.argv[1], 'r')\nopen(sys.argv[2], 'w').close()\n"
        "try:\n    store.turns('s0')\nexcept StoreIOError as error:\n    print(error.errno)\n"
        "import os; os.unlink(sys.argv[2])\nprint(len(store.turns('s0')))"
    )
    arm = tmp_path / "arm"
    out = checked_child(
        code, tmp_path / "s", arm, LD_PRELOAD=shim, KALOS_FAULT=errno.ENOMEM, KALOS_OPS="mmap",
        KALOS_FILE="tok-", KALOS_ARM=arm,
    )  # fmt: skip
    assert out.split() == [str(errno.ENOMEM), "4"]


def test_full_disk_message_says_that_nothing_was_kept(tmp_path, shim):
    done = run_child(
        "import sys\nfrom kalos_ctx.store import SessionStore\n"
        "s = SessionStore.open(sys.argv[1])\nopen(sys.argv[2], 'w').close()\n"
        "s.append('a', 'user', token_ids=[1])",
        tmp_path / "s", tmp_path / "arm", LD_PRELOAD=shim, KALOS_FAULT=errno.ENOSPC,
        KALOS_OPS="pwrite", KALOS_ARM=tmp_path / "arm",
    )  # fmt: skip
    assert done.returncode == 1
    assert StoreFull.__name__ in done.stderr
    assert "nothing of the call was kept" in done.stderr
