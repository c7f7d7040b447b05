"""Rows 57-65 of the table of faults: clients and sidecars that die, stop, or meet."""

import contextlib
import os
import signal
import socket
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
    num_fds,
    pause,
    threaded,
)

import kalos_ctx
from kalos_ctx import SessionStore
from kalos_ctx.sidecar import protocol
from kalos_ctx.sidecar.endpoint import Endpoint

CLIENT = """
import os, signal, sys, time
import kalos_ctx
client = kalos_ctx.connect(sys.argv[1], mode="served", timeout=30)
when = sys.argv[2]
if when == "holding":
    window = client.assemble("s", max_tokens=10)
elif when == "in flight":
    asker = client._connection.asker
    import threading
    threading.Thread(target=lambda: [client.assemble("s", max_tokens=10) for _ in iter(int, 1)],
                     daemon=True).start()
    time.sleep(0.05)
print("there", flush=True)
if when == "mid-write":
    import ctypes
    time.sleep(0)
time.sleep(100)
"""


@pytest.mark.parametrize("when", ["before submit", "mid-write", "in flight", "holding"])
def test_57_a_client_that_is_killed_is_forgotten_within_100_ms(served, when):
    sidecar, path = served
    assert_served(path)  # the store's files are open from now on
    assert eventually(lambda: not sidecar._peers)
    fds = num_fds()
    child = subprocess.Popen(
        [sys.executable, "-c", CLIENT, path, when], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "there\n"
    begin = time.monotonic()
    child.kill()
    assert eventually(lambda: not sidecar._peers, 5)
    took = time.monotonic() - begin
    child.wait()
    child.stdout.close()
    assert took < 1.0  # 100 ms on a quiet machine: benchmarks/bench_sidecar.py
    assert eventually(lambda: num_fds() <= fds)
    assert_served(path)


def test_57_a_process_that_dies_is_noticed_though_its_child_holds_the_socket(served):
    sidecar, path = served
    code = CLIENT.replace(
        'print("there", flush=True)', 'os.write(1, b"there\\n" if os.fork() else b"child\\n")'
    )
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, path, "before submit"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    lines = {child.stdout.readline(), child.stdout.readline()}
    assert lines == {"there\n", "child\n"}
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert eventually(lambda: not sidecar._peers, 5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.stdout.close()


def test_58_a_client_past_its_lease_writes_into_memory_that_nobody_reads(tmp_path, folder):
    with SessionStore.open(tmp_path / "s") as store:
        store.append("s", "user", token_ids=[1, 2, 3], framed=True)
    with threaded(tmp_path / "s", f"{folder}/s", lease=0.3) as sidecar:
        with RawClient(f"{folder}/s") as raw, kalos_ctx.connect(f"{folder}/s", **SERVED) as client:
            client.ping()
            assert eventually(lambda: counts(sidecar)["retired"] == 2)
            raw.put(0, raw.request(protocol.OP_PING))
            assert eventually(raw.is_closed)
            assert raw.answer_word(0) == (0, 0)
            # A client that keeps to the rules connects again by itself.
            assert client.assemble("s", max_tokens=10).token_ids.tolist() == [1, 2, 3]
        assert counts(sidecar)["reconnects"] == 1


def test_59_a_sidecar_that_is_killed_is_reported_to_who_waits(tmp_path, folder):
    with SidecarProcess(tmp_path / "s", f"{folder}/s") as sidecar:
        client = kalos_ctx.connect(f"{folder}/s", **SERVED)
        client.append("s", "user", token_ids=[1], framed=True)
        pause(sidecar.pid)  # so that the request is under way
        box = {}

        def ask():
            try:
                client.append("s", "user", token_ids=[2], framed=True)
            except kalos_ctx.SidecarUnavailable as error:
                box["error"] = error
            box["at"] = time.monotonic()

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.1)
        begin = time.monotonic()
        os.kill(sidecar.pid, signal.SIGKILL)
        thread.join(10)
        assert "not known" in str(box["error"])
        assert box["at"] - begin < 1.0
    with SidecarProcess(tmp_path / "s", f"{folder}/s"):
        assert client.count("s") in (1, 2)
        client.close()


def test_59_a_read_is_asked_again_of_the_next_sidecar(tmp_path, folder):
    first = SidecarProcess(tmp_path / "s", f"{folder}/s")
    client = kalos_ctx.connect(f"{folder}/s", mode="served", timeout=30)
    client.append("s", "user", token_ids=[1, 2], framed=True)
    pause(first.pid)
    box = {}
    thread = threading.Thread(
        target=lambda: box.update(w=client.assemble("s", max_tokens=5).token_ids.tolist())
    )
    thread.start()
    time.sleep(0.05)
    first.__exit__()
    with SidecarProcess(tmp_path / "s", f"{folder}/s"):
        thread.join(30)
        assert box["w"] == [1, 2]
        client.close()


def test_60_a_stopped_sidecar_times_out_and_does_nothing_twice(tmp_path, folder):
    with SidecarProcess(tmp_path / "s", f"{folder}/s") as sidecar:
        client = kalos_ctx.connect(f"{folder}/s", mode="served", timeout=10)
        client.append("s", "user", token_ids=[1], framed=True)
        pause(sidecar.pid)
        with pytest.raises(kalos_ctx.SidecarTimeout):
            client.append("s", "user", token_ids=[2], key="once", framed=True, timeout=0.2)
        with pytest.raises(kalos_ctx.SidecarTimeout):
            client.ping(timeout=0.1)
        os.kill(sidecar.pid, signal.SIGCONT)
        seq = client.append("s", "user", token_ids=[2], key="once", framed=True)
        assert seq == 1
        assert client.count("s") == 2
        client.close()


def test_62_without_a_sidecar_a_client_that_may_is_degraded_at_once_and_recovers(tmp_path, folder):
    with pytest.raises(kalos_ctx.SidecarUnavailable):
        kalos_ctx.connect(f"{folder}/s", timeout=0.1)
    client = kalos_ctx.connect(f"{folder}/s", mode="served", on_unavailable="empty", timeout=5)
    begin = time.monotonic()
    window = client.assemble("s", max_tokens=10)
    assert time.monotonic() - begin < 1.0
    assert (len(window), window.token_ids.tolist(), window.session) == (0, [], "s")
    assert "no sidecar" in window.report.degraded
    assert (window.report.segments, window.report.kept, window.report.dropped) == ((), (), ())
    hits = client.recall([1.0], top_k=1, collections="c")
    assert (len(hits), hits.reason) == (0, "sidecar_unavailable")
    with pytest.raises(kalos_ctx.SidecarUnavailable):
        client.append("s", "user", token_ids=[1], framed=True)
    assert client.ping() is False
    with threaded(tmp_path / "s", f"{folder}/s"):
        assert eventually(client.ping)
        client.append("s", "user", token_ids=[1], framed=True)
        assert client.assemble("s", max_tokens=10).report.degraded is None
        assert client.counts()["degraded"] == 2
        assert client.counts()["connections"] == 1
        client.close()


def test_63_a_second_sidecar_is_refused_though_the_first_is_slow(tmp_path, folder):
    with SidecarProcess(tmp_path / "a", f"{folder}/s") as first:
        pause(first.pid)
        with pytest.raises(kalos_ctx.Conflict, match="another sidecar"):
            kalos_ctx.serve(tmp_path / "b", f"{folder}/s")
        os.kill(first.pid, signal.SIGCONT)
        with kalos_ctx.connect(f"{folder}/s", **SERVED) as client:
            assert client.ping()


def test_63_two_sidecars_of_one_store_are_refused(tmp_path, folder):
    with SidecarProcess(tmp_path / "a", f"{folder}/s"), pytest.raises(kalos_ctx.StoreLocked):
        kalos_ctx.serve(tmp_path / "a", f"{folder}/t", device="cpu")
    assert not os.path.exists(f"{folder}/t")


def test_64_an_old_sidecar_that_ends_leaves_a_new_ones_socket_alone(folder):
    old = Endpoint(f"{folder}/s")
    os.unlink(f"{folder}/s")
    os.unlink(f"{folder}/s.lock")  # somebody cleaned up while it ran
    new = Endpoint(f"{folder}/s")
    old.close()
    assert os.path.exists(f"{folder}/s")
    new.close()
    assert not os.path.exists(f"{folder}/s")


def test_65_the_socket_of_a_dead_sidecar_is_taken_over(tmp_path, folder):
    with SidecarProcess(tmp_path / "s", f"{folder}/s") as dead:
        dead.kill()
    assert os.path.exists(f"{folder}/s")
    with threaded(tmp_path / "s", f"{folder}/s"), kalos_ctx.connect(f"{folder}/s") as client:
        assert client.ping()


def test_65_a_socket_that_somebody_answers_at_is_not_removed(folder):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{folder}/s")
        other.listen()
        with pytest.raises(kalos_ctx.Conflict):
            Endpoint(f"{folder}/s")
        assert os.path.exists(f"{folder}/s")
