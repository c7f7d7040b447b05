"""Session ID in, window out."""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np

from kalos_ctx import ContextAssembler, Policy, SessionStore


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

    params = ([(1_000, 40), (1_000, 400), (100_000, 40)], ["stable", "sliding"])
    param_names = ("turns_and_tokens_a_turn", "policy")
    # asv sets up anew for every sample: enough calls that the first, cold one does not count.
    number = 200
    repeat = (1, 3, 5.0)

    def setup(self, size, policy):
        turns, tokens = size
        self.folder = tempfile.mkdtemp(prefix="kalos-bench-")
        self.store = SessionStore.open(os.path.join(self.folder, "s"))
        fill(self.store, "s", turns, tokens)
        self.assembler = ContextAssembler(self.store, device="cpu")
        self.policy = Policy(stable_prefix=policy == "stable")
        self.time_window_8k()

    def teardown(self, *_):
        self.assembler.close()
        self.store.close()
        shutil.rmtree(self.folder)

    def time_window_8k(self, *_):
        self.assembler.assemble("s", max_tokens=8192, policy=self.policy).release()


class RecallWindow:
    """Recall of 5 from 65,536 x 128 and a window of 8,192 tokens in one call."""

    def setup(self):
        rng = np.random.default_rng(1)
        self.folder = tempfile.mkdtemp(prefix="kalos-bench-")
        self.store = SessionStore.open(os.path.join(self.folder, "s"))
        fill(self.store, "s", 1_000, 40)
        vectors = rng.standard_normal((65_536, 128), dtype=np.float32)
        self.store.add_passages(
            "docs", vectors, token_ids=rng.integers(0, 50_000, (65_536, 60), dtype=np.int32)
        )
        self.query = rng.standard_normal(128, dtype=np.float32)
        self.assembler = ContextAssembler(self.store, device="cpu")
        self.time_recall_window()

    def teardown(self):
        self.assembler.close()
        self.store.close()
        shutil.rmtree(self.folder)

    def time_recall_window(self):
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
