"""Kill clients and sidecars at random instants, many times, and look for what was lost or leaked.

    python asv_benchmarks/sidecar_kills.py [KILLS]

Half of the kills hit clients of one sidecar that lives on, half hit sidecars under one client that
lives on. Whoever dies is a fork of this process, so that a kill costs milliseconds. Ends with
status 1 where an acknowledged append is missing, or where the survivor holds more descriptors,
memory or shared memory than after the first tenth.
"""

import gc
import os
import random
import signal
import struct
import sys
import tempfile
import time

import kalos_ctx
import kalos_ctx.sidecar.client
import kalos_ctx.sidecar.server  # so that a fork starts at once

KILLS = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
RSS_SLACK = 8 << 20
LATEST_S = 0.03


def forked(work, *arguments):
    """A fork that runs `work` and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments)
        finally:
            os._exit(0)
    return pid


def serve(path, socket):
    kalos_ctx.serve(path, socket, device="cpu")


def append(socket, ack):
    """Append without end; each acknowledged number goes into the pipe."""
    with kalos_ctx.connect(socket, mode="served", timeout=20) as client:
        os.write(ack, struct.pack("<q", -1))
        while True:
            seq = client.append("s", "user", token_ids=[7, 8, 9], framed=True)
            os.write(ack, struct.pack("<q", seq))


def held(pid):
    """(descriptors, resident bytes, shared memory's names) of a process."""
    with open(f"/proc/{pid}/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir(f"/proc/{pid}/fd")), resident, len(os.listdir("/dev/shm"))


def wait_ready(socket):
    """A client, as soon as there is a sidecar."""
    return kalos_ctx.connect(socket, mode="served", timeout=30)


def drained(pipe):
    """Numbers that came through a pipe until its end."""
    data = b""
    while part := os.read(pipe, 1 << 16):
        data += part
    os.close(pipe)
    return [row[0] for row in struct.iter_unpack("<q", data[: len(data) // 8 * 8])]


def kill_clients(path, socket, kills):
    """The sidecar lives on."""
    sidecar = forked(serve, path, socket)
    watcher = wait_ready(socket)
    newest, before = -1, None
    for n in range(kills):
        read, write = os.pipe()
        client = forked(append, socket, write)
        os.close(write)
        os.read(read, 8)  # it is connected
        time.sleep(random.uniform(0, LATEST_S))
        os.kill(client, signal.SIGKILL)
        os.waitpid(client, 0)
        newest = max([newest, *drained(read)])
        assert watcher.count("s") > newest, "an acknowledged append is missing"
        if n == kills // 10:
            before = held(sidecar)
    while watcher.status()["gauges"]["clients"] > 1:
        time.sleep(0.05)
    after = held(sidecar)
    watcher.close()
    os.kill(sidecar, signal.SIGTERM)
    assert os.waitpid(sidecar, 0)[1] == 0
    report("clients", kills, newest, before, after)


def kill_sidecars(path, socket, kills):
    """The client lives on."""
    acked, before = -1, None
    client = None
    for n in range(kills):
        sidecar = forked(serve, path, socket)
        if client is None:
            client = wait_ready(socket)
        client.timeout = 30.0
        count = client.count("s")  # connects again by itself
        assert count > acked, "an acknowledged append is missing"
        until = time.monotonic() + random.uniform(0, LATEST_S)
        while time.monotonic() < until:
            acked = client.append("s", "user", token_ids=[1, 2], framed=True)
        os.kill(sidecar, signal.SIGKILL)
        os.waitpid(sidecar, 0)
        if n == kills // 10:
            gc.collect()
            before = held(os.getpid())
    client.close()
    gc.collect()
    after = held(os.getpid())
    report("sidecars", kills, acked, before, after)


def report(who, kills, newest, before, after):
    print(f"{kills} {who} killed, {newest + 1} appends acknowledged, none missing")
    print(f"  descriptors {before[0]} -> {after[0]}, resident {before[1] >> 20} -> "
          f"{after[1] >> 20} MiB, /dev/shm {before[2]} -> {after[2]}", flush=True)  # fmt: skip
    leaks = after[0] > before[0], after[1] > before[1] + RSS_SLACK, after[2] > before[2]
    if any(leaks):
        sys.exit("the survivor holds more than before")


def main():
    random.seed(1)
    with tempfile.TemporaryDirectory(prefix="ksk-") as folder:
        kill_clients(f"{folder}/a", f"{folder}/k", KILLS // 2)
        kill_sidecars(f"{folder}/b", f"{folder}/k", KILLS - KILLS // 2)
        with kalos_ctx.SessionStore.open(f"{folder}/b") as store:
            assert store.verify().ok
        print("verify: ok")


if __name__ == "__main__":
    main()
