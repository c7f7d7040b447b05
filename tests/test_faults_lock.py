"""The store and others that want it: locks, forks, read-only folders (FAULTS 20-23, 34, 41)."""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers.faults import checked_child, compile_shim, environment, start_child
from helpers.store_images import answers, make_small, read_image

from kalos_ctx.errors import ForkedHandle, KalosError, StoreLocked
from kalos_ctx.store import SessionStore


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """Return the compiled shim between a process and the system."""
    return compile_shim(tmp_path_factory.mktemp("shim"))


HOLDER = """
import sys
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1])
print("open", flush=True)
for line in sys.stdin:
    print(store.append("held", "user", token_ids=[1]), flush=True)
store.close()
"""


class Holder:
    """A process that has a store open for writing; `append` makes it write a turn."""

    def __init__(self, path):
        self.child = start_child(HOLDER, path)
        assert self.child.stdout.readline() == "open\n"

    def append(self):
        self.child.stdin.write("go\n")
        self.child.stdin.flush()
        return int(self.child.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.child.stdin.close()
        self.child.wait(30)
        self.child.stdout.close()


def test_fault_20_second_writer_is_refused_with_the_holder_and_the_first_goes_on(tmp_path):
    with Holder(tmp_path / "s") as holder:
        assert holder.append() == 0
        for _ in range(3):
            with pytest.raises(StoreLocked, match=f"process {holder.child.pid} "):
                SessionStore.open(tmp_path / "s")
        assert holder.append() == 1
        with SessionStore.open(tmp_path / "s", "r") as reader:
            assert reader.count("held") == 2
    with SessionStore.open(tmp_path / "s") as store:
        assert store.count("held") == 2


TRY = """
import sys
from kalos_ctx.errors import StoreLocked
from kalos_ctx.store import SessionStore
try:
    SessionStore.open(sys.argv[1]).close()
    print("opened")
except StoreLocked:
    print("locked")
"""


def in_other_pid_namespace() -> list[str]:
    """Return what runs a command in a PID namespace of its own; nothing where not allowed."""
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    try:
        allowed = (
            subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        allowed = False
    return command if allowed else []


def test_fault_21_writer_in_another_pid_namespace_is_refused(tmp_path):
    """The lock is the kernel's: no process number, which means something else elsewhere."""
    with Holder(tmp_path / "s") as holder:
        done = subprocess.run(
            [*in_other_pid_namespace(), sys.executable, "-c", TRY, str(tmp_path / "s")],
            env=environment(), capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == "locked\n"
        assert holder.append() == 0
    assert checked_child(TRY, tmp_path / "s") == "opened\n"


@pytest.mark.parametrize("how", ["removed", "made anew"])
def test_fault_22_lock_file_replaced_while_held_lets_nobody_in_and_is_seen_at_a_roll(tmp_path, how):
    path = tmp_path / "s"
    with SessionStore.open(path, segment_bytes=65536) as store:
        store.append("a", "user", token_ids=[1])
        (path / "lock").unlink()
        if how == "made anew":
            (path / "lock").touch()
        with pytest.raises(StoreLocked, match="lock file was replaced"):
            SessionStore.open(path)
        assert checked_child(TRY, path) == "locked\n"
        pad = {"pad": "x" * 3000}
        with pytest.raises(StoreLocked, match="removed or replaced"):
            assert [store.append("a", "user", token_ids=[n], metadata=pad) for n in range(999)]
        n = store.count("a")
        assert n > 10
    with SessionStore.open(path) as store:
        assert store.count("a") == n
        assert store.verify().errors == []


def test_fault_23_other_descriptors_of_the_files_may_be_closed(tmp_path):
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        for name in ("lock", "control", "gen-000000/log-000000"):
            with open(path / name, "r+b") as file:
                file.read(1)
        SessionStore.open(path, "r").close()
        assert checked_child(TRY, path) == "locked\n"
        store.append("a", "user", token_ids=[1])
    assert checked_child(TRY, path) == "opened\n"


READ_ONLY = """
import json, os, sys
from helpers.store_images import answers
from kalos_ctx.errors import KalosError
from kalos_ctx.store import SessionStore
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
with SessionStore.open(sys.argv[1], "r") as store:
    print(json.dumps(sorted(answers(store))))
try:
    SessionStore.open(sys.argv[1])
    print("opened")
except KalosError as error:
    print(type(error).__name__)
"""


def test_fault_34_read_only_folder_opens_for_reading_and_makes_no_file(tmp_path):
    path = tmp_path / "s"
    make_small(path)
    before = read_image(path)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != folder.parent:
            folder.chmod(folder.stat().st_mode | 0o055)
    for item in (path, *path.rglob("*")):
        item.chmod(0o555 if item.is_dir() else 0o444)
    try:
        code = f"import os; os.umask(0)\n{READ_ONLY}"
        out = checked_child(code, path).splitlines()
    finally:
        for item in (path, *path.rglob("*")):
            item.chmod(0o755 if item.is_dir() else 0o644)
    assert out[1] == "StoreIOError"
    assert read_image(path) == before


FORK = """
import os, sys
from kalos_ctx.errors import ForkedHandle, StoreLocked
from kalos_ctx.store import SessionStore
how = sys.argv[2]
store = SessionStore.open(sys.argv[1], durability="each")
store.append("a", "user", token_ids=[1])
pid = os.fork()
if pid == 0:
    try:
        store.append("a", "user", token_ids=[2])
    except ForkedHandle:
        code = 7
    else:
        os._exit(1)
    assert store.count("a") == 1
    if how == "closes":
        store.close()
    elif how == "exits":
        sys.exit(code)
    elif how == "drops":
        del store
    elif how == "reads":
        with SessionStore.open(sys.argv[1], "r") as reader:
            assert reader.count("a") == 1
    os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
try:
    SessionStore.open(sys.argv[1])
    print("the lock is gone")
except StoreLocked:
    pass
assert store.append("a", "user", token_ids=[3]) == 1
store.close()
# A child that lives on does not keep the store locked.
store = SessionStore.open(sys.argv[1])
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(write)
    os.read(read, 1)
    os._exit(0)
store.close()
SessionStore.open(sys.argv[1]).close()
os.write(write, b"x")
os.waitpid(pid, 0)
print("fine")
"""


@pytest.mark.parametrize("how", ["exits", "closes", "drops", "reads", "dies"])
def test_fault_41_forked_child_may_not_write_and_leaves_the_lock(tmp_path, how):
    assert checked_child(FORK, tmp_path / "s", how) == "fine\n"
    with SessionStore.open(tmp_path / "s") as store:
        assert [t.token_ids.tolist() for t in store.turns("a")] == [[1], [3]]
        assert store.recovery["dropped_bytes"] == 0


def test_fault_41_child_that_outlives_its_parent_holds_no_lock(tmp_path):
    code = (
        "import os, sys, time\nfrom kalos_ctx.store import SessionStore\n"
        "store = SessionStore.open(sys.argv[1])\nstore.append('a', 'user', token_ids=[1])\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    print(os.getpid(), flush=True)\n    os.close(1)\n    os.read(0, 1)\n"
        "os._exit(0)"
    )
    parent = start_child(code, tmp_path / "s")
    child = int(parent.stdout.readline())
    parent.wait(30)
    os.kill(child, 0)
    with SessionStore.open(tmp_path / "s") as store:
        assert store.count("a") == 1
    parent.stdin.close()
    parent.stdout.close()


OPENER = """
import sys, time
from kalos_ctx.errors import StoreLocked
from kalos_ctx.store import SessionStore
sys.stdin.readline()
for k in range(int(sys.argv[2])):
    path = f"{sys.argv[1]}/{k}"
    end = time.monotonic() + 60
    while True:
        try:
            with SessionStore.open(path) as store:
                store.append("all", "user", token_ids=[int(sys.argv[3])])
            break
        except StoreLocked:
            assert time.monotonic() < end
    with SessionStore.open(path, "r") as store:
        assert store.count("all") >= 1
"""


def test_b54_many_first_openers_make_one_store(tmp_path):
    """Writers that meet are refused and try again; nobody sees a half-made store."""
    processes, paths = 16, 5
    children = [start_child(OPENER, tmp_path, paths, i) for i in range(processes)]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        assert child.wait(120) == 0
        child.stdin.close()
        child.stdout.close()
    for k in range(paths):
        with SessionStore.open(tmp_path / str(k)) as store:
            ids = [int(t.token_ids[0]) for t in store.turns("all")]
            assert sorted(ids) == list(range(processes))
            assert store.verify().errors == []


def test_reader_waits_for_a_writer_that_builds_the_index_anew(tmp_path, shim):
    """A reader that comes while a writer recovers gets the store when it is ready, and no error."""
    path = tmp_path / "s"
    make_small(path)
    with SessionStore.open(path, "r") as store:
        right = answers(store)
    (path / "gen-000000/index").unlink()
    with pytest.raises(KalosError):
        SessionStore.open(path, "r")
    code = (
        "import sys\nfrom kalos_ctx.store import SessionStore\n"
        "SessionStore.open(sys.argv[1]).close()"
    )
    writer = start_child(code, path, LD_PRELOAD=shim, KALOS_STOP=8)
    os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
    assert checked_child(TRY, path) == "locked\n"
    reader = start_child(READER, path)
    assert reader.stdout.readline() == "opening\n"
    os.kill(writer.pid, signal.SIGCONT)
    assert json.loads(reader.stdout.readline()) == json.loads(json.dumps(right))
    assert writer.wait(60) == 0
    assert reader.wait(60) == 0
    for child in (writer, reader):
        child.stdin.close()
        child.stdout.close()


READER = """
import json, sys
from helpers.store_images import answers
from kalos_ctx.store import SessionStore
print("opening", flush=True)
with SessionStore.open(sys.argv[1], "r") as store:
    print(json.dumps(answers(store)), flush=True)
"""


def test_forked_handle_is_an_error_of_kalos():
    assert issubclass(ForkedHandle, KalosError)
