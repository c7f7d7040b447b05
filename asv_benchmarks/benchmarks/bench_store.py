"""The store: appends in each durability, reads, opening after a kill."""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np

from kalos_ctx.store import SessionStore

TURN_IDS = np.arange(256, dtype=np.int32)  # 1 KiB
LONG_IDS = np.arange(1000, dtype=np.int32)


class Folder:
    """A store in a temporary folder."""

    def make(self, **options):
        self.folder = tempfile.mkdtemp(prefix="kalos-bench-")
        self.store = SessionStore.open(os.path.join(self.folder, "s"), **options)

    def teardown(self, *_):
        self.store.close()
        shutil.rmtree(self.folder)


class Append(Folder):
    """One turn of 1 KiB of token IDs from Python."""

    params = ("process", "each", "group")
    param_names = ("durability",)
    # asv sets up anew for every sample: enough calls that the first, cold one does not count.
    number = 200
    repeat = (1, 3, 5.0)

    def setup(self, durability):
        self.make(durability=durability)
        self.store.append("s", "user", token_ids=TURN_IDS)

    def time_append_1kib(self, _):
        self.store.append("s", "user", token_ids=TURN_IDS)


class Extend(Folder):
    """64 turns of 1 KiB in one call: one group, one sync."""

    params = ("process", "group")
    param_names = ("durability",)

    def setup(self, durability):
        self.make(durability=durability)
        self.turns = [{"role": "user", "token_ids": TURN_IDS}] * 64
        self.store.extend("warm", self.turns)

    def time_extend_64_of_1kib(self, _):
        self.store.extend("s", self.turns)


class Read(Folder):
    """Warm reads."""

    number = 1000
    repeat = (1, 5, 5.0)

    def setup(self):
        self.make()
        for _ in range(100):
            self.store.append("s", "user", token_ids=LONG_IDS)
        self.store.turns("s")

    def time_turn_of_1000_tokens(self):
        self.store.turns("s", 50, 51)

    def time_count(self):
        self.store.count("s")


class Open(Folder):
    """Opening a store whose writer did not close."""

    params = (1_000, 100_000)
    param_names = ("sessions",)

    def setup(self, sessions):
        self.make()
        turn = [{"role": "user", "token_ids": [1, 2, 3]}]
        for i in range(sessions):
            self.store.extend(f"session {i}", turn)

    def time_open_for_reading(self, _):
        SessionStore.open(os.path.join(self.folder, "s"), "r").close()

    def track_index_bytes_a_session(self, sessions):
        return self.store.stats()["bytes"]["index"] / sessions

    track_index_bytes_a_session.unit = "bytes"
