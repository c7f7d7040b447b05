"""Row 100 of the table of faults, storms, hostile names, and kills at random."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers.raw_client import RawClient
from helpers.sidecars import (
    SERVED,
    SidecarProcess,
)

import kalos_ctx
from kalos_ctx import SessionStore


def test_100_sigterm_answers_what_is_under_way_and_ends_in_time(tmp_path, folder):
    with SidecarProcess(tmp_path / "s", f"{folder}/s", drain_timeout=5.0) as sidecar:
        clients = [kalos_ctx.connect(f"{folder}/s", **SERVED) for _ in range(4)]
        acked, stop = [0] * 4, threading.Event()

        def append(k):
            with contextlib.suppress(kalos_ctx.SidecarUnavailable):
                while not stop.is_set():
                    clients[k].append(f"s{k}", "user", token_ids=[k], framed=True, timeout=2)
                    acked[k] += 1

        threads = [threading.Thread(target=append, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        begin = time.monotonic()
        assert sidecar.stop() == 0
        assert time.monotonic() - begin < 5.0
        stop.set()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
    assert not os.path.exists(f"{folder}/s")
    with SessionStore.open(tmp_path / "s", "r") as store:
        for k in range(4):
            assert acked[k] <= store.count(f"s{k}") <= acked[k] + 1
            assert acked[k] > 0


def test_100_many_clients_reconnect_after_a_restart(tmp_path, folder):
    first = SidecarProcess(tmp_path / "s", f"{folder}/s")
    clients = [kalos_ctx.connect(f"{folder}/s", mode="served", timeout=30) for _ in range(150)]
    clients[0].append("s", "user", token_ids=[1, 2], framed=True)
    assert {client.transport for client in clients} == {"memory", "socket"}
    first.kill()
    first.__exit__()
    with SidecarProcess(tmp_path / "s", f"{folder}/s"):
        threads = [threading.Thread(target=client.ping) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert all(client.count("s") == 1 for client in clients)
        assert clients[0].status()["counts"]["reconnects"] == 150
    for client in clients:
        client.close()


def test_100_hostile_names_reach_no_log_no_metric_and_no_error(served, caplog):
    sidecar, path = served
    name = "evil\n\x1b[31m\"}{='; DROP"
    with caplog.at_level(logging.DEBUG), kalos_ctx.connect(path, **SERVED) as client:
        for _ in range(3):
            with pytest.raises(kalos_ctx.SessionNotFound) as caught:
                client.assemble(name, tenant=name, max_tokens=5)
            assert "evil" not in str(caught.value)
        with pytest.raises(kalos_ctx.KalosError) as caught:
            client._call(name, b"s", "", {}, None)
        assert "evil" not in str(caught.value)
        with pytest.raises(kalos_ctx.InvalidArgument) as caught:
            client._call("append", b"s", "", {name: 1}, None)
        assert "evil" not in str(caught.value)
    assert "evil" not in caplog.text
    assert "evil" not in json.dumps(sidecar.status.read())


def test_b55_eight_processes_append_to_one_session_through_the_sidecar(tmp_path, folder):
    code = (
        "import sys, kalos_ctx\n"
        "client = kalos_ctx.connect(sys.argv[1], mode='served', timeout=60)\n"
        "print(*[client.append('s', 'user', token_ids=[int(sys.argv[2]), n], framed=True)\n"
        "        for n in range(100)])\n"
    )
    with SidecarProcess(tmp_path / "s", f"{folder}/s"):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", code, f"{folder}/s", str(k)],
                stdout=subprocess.PIPE, text=True,
            )
            for k in range(8)
        ]  # fmt: skip
        seqs = [[int(word) for word in child.communicate()[0].split()] for child in children]
    assert sorted(seq for row in seqs for seq in row) == list(range(800))
    with SessionStore.open(tmp_path / "s", "r") as store:
        turns = store.turns("s")
        for k, row in enumerate(seqs):
            assert row == sorted(row)
            assert [turns[seq].token_ids.tolist() for seq in row] == [[k, n] for n in range(100)]


def test_63_of_64_clients_are_served_beside_a_hostile_one(served):
    _, path = served
    rng = np.random.default_rng(3)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(kalos_ctx.connect(path, **SERVED)) for _ in range(63)]
        raw = stack.enter_context(RawClient(path))
        stop = threading.Event()

        def rage():
            while not stop.is_set():
                off = int(rng.integers(0, len(raw.requests) - 64))
                raw.requests[off : off + 64] = rng.bytes(64)
                raw.requests[:128] = rng.bytes(128)

        thread = threading.Thread(target=rage)
        thread.start()
        try:
            for _ in range(5):
                for client in clients:
                    window = client.assemble("s", max_tokens=9)
                    assert window.token_ids.tolist() == [1, 2, 3]
                    assert client.count("s") == 1
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("who", ["client", "sidecar"])
def test_acknowledged_appends_survive_random_kills(tmp_path, folder, who):
    rng = np.random.default_rng(11)
    code = (
        "import sys, kalos_ctx\n"
        "client = kalos_ctx.connect(sys.argv[1], mode='served', timeout=60)\n"
        "n = client.count('s')\n"
        "print('there', flush=True)\n"
        "while True:\n"
        "    print(client.append('s', 'user', token_ids=[7], framed=True), flush=True)\n"
    )
    newest = -1
    sidecar = SidecarProcess(tmp_path / "s", f"{folder}/s")
    for _ in range(int(os.environ.get("KALOS_KILLS", "6"))):
        child = subprocess.Popen(
            [sys.executable, "-c", code, f"{folder}/s"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert child.stdout.readline() == "there\n"
        time.sleep(float(rng.uniform(0.0, 0.15)))
        if who == "sidecar":
            sidecar.kill()
        child.kill()
        lines = child.communicate()[0].splitlines()
        newest = max([newest, *(int(line) for line in lines if line.isdigit())])
        if who == "sidecar":
            sidecar.__exit__()
            sidecar = SidecarProcess(tmp_path / "s", f"{folder}/s")
        with kalos_ctx.connect(f"{folder}/s", **SERVED) as client:
            assert client.count("s") > newest
    sidecar.__exit__()
    assert newest >= 0
