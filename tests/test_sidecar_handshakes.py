"""Rows 72-99 of the table of faults: handshakes, versions, limits of the system, back ends."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from helpers.raw_client import RawClient
from helpers.sidecars import (
    SERVED,
    SidecarProcess,
    assert_served,
    counts,
    eventually,
    threaded,
)

import kalos_ctx
from kalos_ctx import AccessRules, SessionStore
from kalos_ctx.sidecar import endpoint, protocol
from kalos_ctx.sidecar.endpoint import Endpoint


@pytest.mark.parametrize("sent", [b"", b"K", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n" * 9,
                                  bytes(range(256)) * 256])  # fmt: skip
def test_76_a_handshake_that_is_slow_or_garbage_ends(served, sent):
    sidecar, path = served
    with RawClient(path, say_hello=False) as raw:
        raw.sock.sendall(sent)
        assert eventually(raw.is_closed) or raw.sock.recv(1 << 16)
        assert eventually(lambda: counts(sidecar)["handshakes_failed"] >= 1)
    assert_served(path)


def test_76_hello_byte_by_byte_is_welcome_while_it_is_in_time(served):
    _, path = served
    hello = protocol.message(protocol.OP_HELLO, protocol.Hello(modes=2, transports=1).body())
    with RawClient(path, say_hello=False) as raw:
        for n in range(len(hello)):
            raw.sock.sendall(hello[n : n + 1])
        raw.read_welcome()
        assert raw.error is None


def test_77_out_of_descriptors_existing_clients_are_served(tmp_path, folder):
    limited = ("prlimit", "--nofile=80:80")
    with (
        SidecarProcess(tmp_path / "s", f"{folder}/s", prefix=limited) as sidecar,
        kalos_ctx.connect(f"{folder}/s", **SERVED) as client,
    ):
        client.append("s", "user", token_ids=[1, 2, 3], framed=True)
        many = []
        for _ in range(300):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.connect(f"{folder}/s")
            many.append(sock)
        for _ in range(50):
            assert client.assemble("s", max_tokens=9).token_ids.tolist() == [1, 2, 3]
        before = cpu_seconds(sidecar.pid)
        time.sleep(0.5)
        assert cpu_seconds(sidecar.pid) - before < 0.25  # it does not spin on accept
        for sock in many:
            sock.close()
        assert eventually(lambda: connects(f"{folder}/s"))


def connects(path):
    try:
        kalos_ctx.connect(path, mode="served", timeout=0.5).close()
    except kalos_ctx.SidecarUnavailable:
        return False
    return True


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_78_a_client_at_its_descriptor_limit_gets_a_clear_error_and_leaks_nothing(served):
    _, path = served
    code = """
import os, resource, sys
import kalos_ctx, kalos_ctx.sidecar.client
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
os.close(held.pop())
os.close(held.pop())  # one for the socket, one for a first descriptor
try:
    kalos_ctx.connect(sys.argv[1], mode="served", timeout=0.3)
except kalos_ctx.KalosError as error:
    print(type(error).__name__, "descriptor" in str(error) or "ulimit" in str(error))
free = 0
try:
    while True:
        os.open(os.devnull, os.O_RDONLY)
        free += 1
except OSError:
    print(free)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["ProtocolError", "True", "2"], done
    assert_served(path)


HELLOS = {
    "magic": lambda data: b"XXXX" + data[4:],
    "endian": lambda data: data[:64] + bytes([1, 2, 3, 4]) + data[68:],
    "version": lambda data: data[:68] + struct.pack("<H", 9) + data[70:],
    "head size": lambda data: data[:72] + struct.pack("<I", 128) + data[76:],
    "slots": lambda data: data[:76] + struct.pack("<I", 4) + data[80:],
}


@pytest.mark.parametrize("what", HELLOS)
def test_80_a_hello_of_another_kind_is_refused_and_names_both_sides(served, what):
    _, path = served
    hello = protocol.message(protocol.OP_HELLO, protocol.Hello(modes=2, transports=1).body())
    with RawClient(path, hello=HELLOS[what](hello)) as raw:
        if what == "magic":
            assert isinstance(raw.error, kalos_ctx.ProtocolError)
        else:
            assert isinstance(raw.error, kalos_ctx.VersionMismatch)
            assert "client" in str(raw.error)
            assert "1.0" in str(raw.error)
        assert eventually(raw.is_closed)


def test_80_a_sidecar_of_another_kind_is_refused_by_the_client(folder):
    welcome = protocol.Hello(major=7, modes=2, transports=2).body() + protocol.pack({})
    other = fake_sidecar(f"{folder}/s", protocol.message(protocol.OP_WELCOME, welcome))
    with other, pytest.raises(kalos_ctx.VersionMismatch, match="sidecar speaks version 7"):
        kalos_ctx.connect(f"{folder}/s", mode="served", timeout=1)
    with fake_sidecar(f"{folder}/t", b"\0" * 200), pytest.raises(kalos_ctx.ProtocolError):
        kalos_ctx.connect(f"{folder}/t", mode="served", timeout=1)


@contextlib.contextmanager
def fake_sidecar(path, welcome, answers=(), fds=()):
    """Answer a hello with given bytes, and each later message with the next of `answers`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def run():
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                sock.recv(1 << 16)
                endpoint.send_all(sock, welcome, list(fds), 5)
                for answer in answers:
                    data = sock.recv(1 << 16)
                    number = struct.unpack_from("<Q", data, 8)[0]
                    sock.sendall(answer(number))
                while sock.recv(1 << 16):
                    pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.close()
        thread.join(5)


def test_72_an_answer_with_another_id_or_generation_is_ignored(served, folder):
    sidecar, _ = served
    welcome = protocol.message(
        protocol.OP_WELCOME,
        protocol.Hello(modes=2, transports=2).body()
        + protocol.pack({"mode_why": "", "transport_why": ""}),
        generation=5,
    )

    def three(number):
        value = struct.pack("<Q", 7)
        wrong_id = protocol.message(protocol.OP_COUNT, value, id=number + 1, generation=5)
        wrong_life = protocol.message(protocol.OP_COUNT, value, id=number, generation=6)
        right = protocol.message(protocol.OP_COUNT, struct.pack("<Q", 3), id=number, generation=5)
        return wrong_id + wrong_life + right

    other = fake_sidecar(f"{folder}/f", welcome, [three], [sidecar.status.fd])
    with other, kalos_ctx.connect(f"{folder}/f", mode="served", timeout=5) as client:
        assert client.count("s") == 3
        assert client.counts()["ignored_answers"] == 1


def test_81_a_client_of_an_older_minor_version_is_served_at_its_version(served):
    _, path = served
    newer = protocol.Hello(minor=9, features=0xFF00, modes=2, transports=1).body()
    with RawClient(path, hello=protocol.message(protocol.OP_HELLO, newer)) as raw:
        assert (raw.hello.major, raw.hello.minor, raw.hello.features) == (1, 0, 0)


def test_82_a_user_without_a_rule_is_denied_and_nothing_is_made_for_it(tmp_path, folder):
    rules = AccessRules(users={os.getuid() + 12345: kalos_ctx.sidecar.access.Grant(True)})
    with threaded(tmp_path / "s", f"{folder}/s", access=rules) as sidecar:
        with pytest.raises(kalos_ctx.PeerDenied):
            kalos_ctx.connect(f"{folder}/s", timeout=1)
        with RawClient(f"{folder}/s") as raw:
            assert isinstance(raw.error, kalos_ctx.PeerDenied)
        assert counts(sidecar)["denied"] == 2
        assert sidecar.status.read()["gauges"]["channel_bytes"] == 0


def test_82_a_pid_that_cannot_be_seen_is_denied_unless_configured():
    rules = AccessRules.own_user()
    with pytest.raises(kalos_ctx.PeerDenied, match="pid 0"):
        rules.grant(os.getuid(), os.getgid(), 0)
    with pytest.raises(kalos_ctx.PeerDenied, match="user namespace"):
        rules.grant(65534, 65534, 5)
    known = AccessRules(users=rules.users, unknown_pid=True)
    assert known.grant(os.getuid(), 0, 0).every_tenant


def test_84_a_peer_is_known_by_its_process_not_by_its_pid(served):
    sidecar, path = served
    with kalos_ctx.connect(path, **SERVED) as client:
        client.ping()
        (peer,) = sidecar._peers
        assert peer.who.pid == os.getpid()
        assert peer.who.pidfd >= 0
        with open(f"/proc/self/fdinfo/{peer.who.pidfd}") as file:
            assert f"Pid:\t{os.getpid()}\n" in file.read()


@pytest.mark.parametrize("what", ["long", "file", "link", "open folder", "no folder"])
def test_85_a_socket_path_that_is_not_safe_is_refused_at_start(folder, what):
    path = f"{folder}/s"
    if what == "long":
        path = f"{folder}/{'x' * 120}"
    elif what == "file":
        with open(path, "w") as file:
            file.write("precious")
    elif what == "link":
        os.mkdir(f"{folder}/real")
        os.symlink(f"{folder}/real", f"{folder}/link")
        path = f"{folder}/link/s"
    elif what == "open folder":
        os.mkdir(f"{folder}/open")
        os.chmod(f"{folder}/open", 0o777)
        path = f"{folder}/open/s"
    else:
        path = f"{folder}/none/none/s"
    with pytest.raises(kalos_ctx.InvalidArgument):
        Endpoint(path)
    if what == "file":
        with open(path) as file:
            assert file.read() == "precious"


def test_85_the_sockets_folder_is_made_for_the_owner_alone(folder):
    endpoint_ = Endpoint(f"{folder}/made/s")
    assert os.stat(f"{folder}/made").st_mode & 0o777 == 0o700
    assert os.stat(f"{folder}/made/s").st_mode & 0o777 == 0o600
    endpoint_.close()


def test_86_without_room_for_shared_memory_a_client_gets_the_socket_and_knows(tmp_path, folder):
    with SessionStore.open(tmp_path / "s", segment_bytes=1 << 16) as store:
        store.append("s", "user", token_ids=[1, 2, 3], framed=True)
    limited = ("prlimit", "--fsize=300000:300000")
    with SidecarProcess(tmp_path / "s", f"{folder}/s", prefix=limited):
        with kalos_ctx.connect(f"{folder}/s", **SERVED) as client:
            assert client.transport == "socket"
            assert "cannot be had" in client.transport_why
            assert client.assemble("s", max_tokens=9).token_ids.tolist() == [1, 2, 3]
        with pytest.raises(kalos_ctx.SidecarUnavailable, match="cannot be had"):
            kalos_ctx.connect(f"{folder}/s", mode="served", transport="memory", timeout=0.3)


def test_87_pages_that_may_not_be_locked_are_used_unlocked(tmp_path, folder):
    with (
        threaded(tmp_path / "s", f"{folder}/s", lock_memory=True) as sidecar,
        kalos_ctx.connect(f"{folder}/s", **SERVED) as client,
    ):
        assert client.ping()
        assert eventually(lambda: sidecar.status.read()["gauges"]["channel_bytes"] > 0)
        gauges = sidecar.status.read()["gauges"]
        # Either all of it is locked or none is, and the gauge says so.
        assert gauges["locked_bytes"] in (0, gauges["channel_bytes"])


FORK = """
import os, sys
import kalos_ctx
client = kalos_ctx.connect(sys.argv[1], mode="served", timeout=10)
client.ping()
pid = os.fork()
if pid == 0:
    try:
        client.count("s")
    except kalos_ctx.ForkedHandle:
        client.close()
        del client
        os._exit(7)
    os._exit(1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(status, client.count("s"), client.assemble("s", max_tokens=9).token_ids.tolist())
"""


def test_89_a_forked_child_is_refused_and_its_end_leaves_the_parents_connection(served):
    _, path = served
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, path],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "7 1 [1, 2, 3]"


def test_92_both_sides_on_one_cpu_get_on(tmp_path, folder):
    cpu = min(os.sched_getaffinity(0))
    code = (
        "import sys, kalos_ctx\n"
        "client = kalos_ctx.connect(sys.argv[1], mode='served', timeout=30)\n"
        "client.append('s', 'user', token_ids=[1, 2], framed=True)\n"
        "print(sum(len(client.assemble('s', max_tokens=9)) for _ in range(300)))\n"
    )
    pinned = ("taskset", "-c", str(cpu))
    with SidecarProcess(tmp_path / "s", f"{folder}/s", prefix=pinned):
        done = subprocess.run(
            [*pinned, sys.executable, "-c", code, f"{folder}/s"],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    assert done.stdout.strip() == "600"


def test_93_a_wall_clock_that_jumps_kills_nobody(served, monkeypatch):
    _, path = served
    with kalos_ctx.connect(path, **SERVED) as client:
        real = time.time
        for years in (-1, 1, 100):
            monkeypatch.setattr(time, "time", lambda y=years: real() + y * 31_557_600)
            assert client.ping()
            assert client.assemble("s", max_tokens=9).token_ids.tolist() == [1, 2, 3]
            assert client.transport == "memory"


def replace_recall(sidecar, call):
    """Let another back end answer recalls."""
    calls = sidecar._calls._calls
    calls["recall"] = (call, calls["recall"][1])


def test_95_a_lost_device_fails_what_is_under_way_and_ends_the_sidecar(tmp_path, folder):
    box = {}

    def serve():
        try:
            kalos_ctx.serve(
                tmp_path / "s", f"{folder}/s", device="cpu",
                on_ready=lambda sidecar: box.update(sidecar=sidecar),
            )  # fmt: skip
        except kalos_ctx.DeviceError as error:
            box["error"] = error

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert eventually(lambda: "sidecar" in box)

    def lost(*args, **options):
        raise kalos_ctx.DeviceError("the GPU is lost (CUDA_ERROR_DEVICE_UNAVAILABLE)")

    replace_recall(box["sidecar"], lost)
    client = kalos_ctx.connect(f"{folder}/s", **SERVED)
    with client, pytest.raises(kalos_ctx.DeviceError):
        client.recall([1.0], top_k=1)
    thread.join(10)
    assert not thread.is_alive()
    assert "lost" in str(box["error"])
    with threaded(tmp_path / "s", f"{folder}/s"), kalos_ctx.connect(f"{folder}/s") as client:
        assert client.ping()


def test_96_a_back_end_out_of_memory_fails_that_request_alone(served):
    sidecar, path = served

    def greedy(*args, **options):
        raise MemoryError

    replace_recall(sidecar, greedy)
    with kalos_ctx.connect(path, **SERVED) as client:
        with pytest.raises(kalos_ctx.KalosError, match="no memory"):
            client.recall([1.0], top_k=1)
        assert client.assemble("s", max_tokens=9).token_ids.tolist() == [1, 2, 3]


SECCOMP = """
import ctypes, errno, json, struct, sys
import kalos_ctx, kalos_ctx.sidecar.server
libc = ctypes.CDLL(None, use_errno=True)
number = int(sys.argv[1])
rows = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000)]
program = b"".join(struct.pack("<HBBI", *row) for row in rows)
buffer = ctypes.create_string_buffer(program)
class Prog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Prog(len(rows), ctypes.addressof(buffer)))) == 0
try:
    kalos_ctx.serve(sys.argv[2], sys.argv[3], device="cpu",
                    on_ready=lambda sidecar: print("ready", flush=True))
except kalos_ctx.KalosError as error:
    print(type(error).__name__, error, flush=True)
"""
CALLS = {"x86_64": {"memfd_create": 319, "pidfd_open": 434, "futex_waitv": 449},
         "aarch64": {"memfd_create": 279, "pidfd_open": 434, "futex_waitv": 449}}  # fmt: skip


@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open", "futex_waitv"])
def test_99_a_system_call_that_is_denied_gives_a_clear_error_or_another_way(tmp_path, folder, call):
    number = CALLS[os.uname().machine][call]
    child = subprocess.Popen(
        [sys.executable, "-c", SECCOMP, str(number), str(tmp_path / "s"), f"{folder}/s"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        line = child.stdout.readline()
        if call == "memfd_create":
            assert "shared memory cannot be had" in line
        else:
            assert line == "ready\n"
            with kalos_ctx.connect(f"{folder}/s", **SERVED) as client:
                time.sleep(0.05)  # it sleeps
                assert client.ping()
                client.append("s", "user", token_ids=[1], framed=True)
                assert client.count("s") == 1
    finally:
        child.terminate()
        child.wait(10)
        child.stdout.close()
