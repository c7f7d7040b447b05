"""Session ID in, window out."""

from __future__ import annotations

import os
import tempfile

import numpy as np

from kalos_ctx import ContextAssembler, Policy, SessionStore

from . import once


def fill(store, session, turns, tokens, seed=1):
    """Append turns of about `tokens` IDs each, user and assistant in turn."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(tokens // 2, tokens * 3 // 2, turns)
    rows = [
        {
            "role": "user" if i % 2 == 0 else "assistant",
            "token_ids": rng.integers(0, 50_000, n, dtype=np.int32),
        }
        for i, n in enumerate(lengths)
    ]
    for at in range(0, turns, 1000):
        store.extend(session, rows[at : at + 1000])


class Window:
    """A window of 8,192 tokens."""

    sizes = ((1_000, 40), (1_000, 400), (100_000, 40))
    params = (sizes, ["stable", "sliding"])
    param_names = ("turns_and_tokens_a_turn", "policy")
    number = 500
    repeat = (1, 10, 2.0)

    def setup_cache(self):
        """Make one store with a session of each size; asv keeps the folder for all parameters."""
        with SessionStore.open("store") as store:
            for turns, tokens in self.sizes:
                fill(store, f"{turns} of {tokens}", turns, tokens)
        return os.path.abspath("store")

    @once
    def setup(self, path, size, policy):
        self.assembler = ContextAssembler(SessionStore.open(path, "r"), device="cpu")
        self.session = "{} of {}".format(*size)
        self.policy = Policy(stable_prefix=policy == "stable")
        self.time_window_8k()

    def time_window_8k(self, *_):
        self.assembler.assemble(self.session, max_tokens=8192, policy=self.policy).release()


class RecallWindow:
    """Recall of 5 from 65,536 x 128 and a window of 8,192 tokens in one call."""

    number = 20
    repeat = (1, 10, 2.0)

    def setup_cache(self):
        """Make the store with its passages once for all rounds."""
        rng = np.random.default_rng(1)
        with SessionStore.open("store") as store:
            fill(store, "s", 1_000, 40)
            store.add_passages(
                "docs",
                rng.standard_normal((65_536, 128), dtype=np.float32),
                token_ids=rng.integers(0, 50_000, (65_536, 60), dtype=np.int32),
            )
        return os.path.abspath("store")

    @once
    def setup(self, path):
        self.assembler = ContextAssembler(SessionStore.open(path, "r"), device="cpu")
        self.query = np.random.default_rng(2).standard_normal(128, dtype=np.float32)
        self.time_recall_window()

    def time_recall_window(self, *_):
        self.assembler.assemble(
            "s", max_tokens=8192, query=self.query, top_k=5, collections=("docs",)
        ).release()


class Reuse:
    """Share of prompt tokens that equal the last window's, over a growing real conversation."""

    params = ("stable", "sliding")
    param_names = ("policy",)

    def track_reused_share(self, policy):
        from kalos_ctx.demo_data import conversations, tokenizer_dir

        total = reused = 0
        rule = Policy(stable_prefix=policy == "stable", low_water=0.5)
        with tempfile.TemporaryDirectory(prefix="kalos-bench-") as folder:
            store = SessionStore.open(os.path.join(folder, "s"), tokenizer=tokenizer_dir())
            assembler = ContextAssembler(store, device="cpu")
            for row in conversations():
                if len(row["messages"]) < 200:
                    continue
                for message in row["messages"]:
                    store.append(row["id"], message["role"], message["content"])
                    if message["role"] != "user":
                        continue
                    with assembler.assemble(row["id"], max_tokens=4096, policy=rule) as window:
                        total += len(window)
                        reused += window.report.reused_tokens
            assembler.close()
            store.close()
        return 100 * reused / total

    track_reused_share.unit = "%"
