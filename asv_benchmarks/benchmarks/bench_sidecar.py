"""Calls of a sidecar's client: round trips, and windows by every way."""

import shutil
import subprocess
import sys
import tempfile

import numpy as np

try:
    from kalos_ctx import connect
except ImportError:  # an older version
    connect = None

SERVE = (
    "import sys, kalos_ctx\n"
    "kalos_ctx.serve(sys.argv[1], sys.argv[2], device='cpu',\n"
    "                on_ready=lambda sidecar: print('ready', flush=True))\n"
)


class Sidecar:
    """A sidecar in a process of its own, whose store has a session of 60,000 tokens."""

    def setup(self, *params):
        if connect is None:
            raise NotImplementedError
        from kalos_ctx import SessionStore

        self.folder = tempfile.mkdtemp(prefix="ksb-")
        rng = np.random.default_rng(1)
        with SessionStore.open(f"{self.folder}/s") as store:
            for n in range(400):
                ids = rng.integers(0, 150_000, 150, dtype=np.int32)
                store.append("s", ("user", "assistant")[n % 2], token_ids=ids, framed=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, f"{self.folder}/s", f"{self.folder}/k"],
            stdout=subprocess.PIPE,
        )
        self.process.stdout.readline()

    def teardown(self, *params):
        if connect is None:
            return
        self.client.close()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.folder)


class RoundTrips(Sidecar):
    """A request without work."""

    params = ("memory", "socket")
    param_names = ("transport",)

    def setup(self, transport):
        super().setup()
        self.client = connect(f"{self.folder}/k", mode="served", transport=transport, timeout=10)

    def time_ping(self, transport):
        self.client.ping()

    def time_append(self, transport):
        self.client.append("t", "user", token_ids=[1, 2, 3], framed=True)


class Windows(Sidecar):
    """8,192 tokens."""

    params = ("direct", "served")
    param_names = ("mode",)

    def setup(self, mode):
        super().setup()
        self.client = connect(f"{self.folder}/k", mode=mode, device="cpu", timeout=10)

    def time_window(self, mode):
        self.client.assemble("s", max_tokens=8192).release()
