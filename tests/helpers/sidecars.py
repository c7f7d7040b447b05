"""Sidecars for tests: on a thread of this process, or in a process that can be killed."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import kalos_ctx

CHILD = """
import json, sys
import kalos_ctx
said = json.loads(sys.argv[1])
kalos_ctx.serve(said.pop("store"), said.pop("socket"),
                on_ready=lambda sidecar: print("ready", flush=True), **said)
"""
DEADLINE_S = 30.0
SERVED = {"mode": "served", "timeout": 10}


@contextlib.contextmanager
def socket_folder():
    """A folder whose path is short enough for a socket in it."""
    folder = tempfile.mkdtemp(prefix="kalos-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def threaded(store, socket, **options):
    """Serve on a thread of this process; gives the Sidecar, ends it behind the block."""
    ready, box = threading.Event(), {}
    device = os.environ.get("KALOS_DEVICE", "cpu")  # of the device under test

    def on_ready(sidecar):
        box["sidecar"] = sidecar
        ready.set()

    def run():
        try:
            kalos_ctx.serve(store, socket, on_ready=on_ready, device=device, **options)
        except BaseException as error:
            box["error"] = error
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S)
    if "sidecar" not in box:
        raise box["error"]
    box["sidecar"].thread = thread
    try:
        yield box["sidecar"]
    finally:
        box["sidecar"].stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


class SidecarProcess:
    """A sidecar in a process of its own. A context manager; ends the process."""

    def __init__(self, store, socket, *, wait=True, prefix=(), **options):
        said = {"store": str(store), "socket": str(socket), "device": "cpu", **options}
        self.socket = str(socket)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", CHILD, json.dumps(said)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if wait:
            self.wait_ready()

    @property
    def pid(self):
        return self.process.pid

    def wait_ready(self):
        line = self.process.stdout.readline()
        assert line == "ready\n", (line, self.process.stderr.read())

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """Stop it as SIGTERM does; its exit status."""
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


def eventually(condition, seconds=10.0):
    """Wait until a condition holds; what it gave last."""
    until = time.monotonic() + seconds
    while True:
        found = condition()
        if found or time.monotonic() > until:
            return found
        select.select([], [], [], 0.002)


def pause(pid):
    """Stop a process, all of its threads."""
    os.kill(pid, signal.SIGSTOP)

    def stopped():
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] != "T":
                    return False
        return True

    assert eventually(stopped)


def assert_served(path):
    """A client beside the hostile one still gets its window."""
    with kalos_ctx.connect(path, **SERVED) as client:
        assert client.assemble("s", max_tokens=10).token_ids.tolist() == [1, 2, 3]


def counts(sidecar):
    """What a sidecar counted."""
    return sidecar.status.read()["counts"]


def num_fds():
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))
