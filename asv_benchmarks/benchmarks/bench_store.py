"""The store: appends in each durability, reads, opening after a kill."""

from __future__ import annotations

import os

import numpy as np

from kalos_ctx.store import SessionStore

from . import once

TURN_IDS = np.arange(256, dtype=np.int32)  # 1 KiB
LONG_IDS = np.arange(1000, dtype=np.int32)


class Append:
    """One turn of 1 KiB of token IDs from Python."""

    params = ("process", "each", "group")
    param_names = ("durability",)
    number = 200
    repeat = (1, 10, 2.0)

    @once
    def setup(self, durability):
        self.store = SessionStore.open("store", durability=durability)
        self.time_append_1kib()

    def time_append_1kib(self, *_):
        self.store.append("s", "user", token_ids=TURN_IDS)


class Extend:
    """64 turns of 1 KiB in one call: one group, one sync."""

    params = ("process", "group")
    param_names = ("durability",)
    number = 20
    repeat = (1, 10, 2.0)

    @once
    def setup(self, durability):
        self.store = SessionStore.open("store", durability=durability)
        self.turns = [{"role": "user", "token_ids": TURN_IDS}] * 64
        self.time_extend_64_of_1kib()

    def time_extend_64_of_1kib(self, *_):
        self.store.extend("s", self.turns)


class Read:
    """Warm reads."""

    number = 1000
    repeat = (1, 10, 2.0)

    @once
    def setup(self):
        self.store = SessionStore.open("store")
        for _ in range(100):
            self.store.append("s", "user", token_ids=LONG_IDS)
        self.store.turns("s")

    def time_turn_of_1000_tokens(self):
        self.store.turns("s", 50, 51)

    def time_count(self):
        self.store.count("s")


class Open:
    """Opening a store whose writer did not close."""

    params = (1_000, 100_000)
    param_names = ("sessions",)
    number = 50
    repeat = (1, 10, 2.0)

    def setup_cache(self):
        """Make the stores in a process that ends without a close."""
        turn = [{"role": "user", "token_ids": [1, 2, 3]}]
        for sessions in self.params:
            store = SessionStore.open(f"{sessions} sessions")
            for i in range(sessions):
                store.extend(f"session {i}", turn)
        return os.getcwd()

    @once
    def setup(self, folder, sessions):
        self.path = os.path.join(folder, f"{sessions} sessions")
        self.time_open_for_reading()

    def time_open_for_reading(self, *_):
        SessionStore.open(self.path, "r").close()

    def track_index_bytes_a_session(self, _, sessions):
        with SessionStore.open(self.path, "r") as store:
            return store.stats()["bytes"]["index"] / sessions

    track_index_bytes_a_session.unit = "bytes"
