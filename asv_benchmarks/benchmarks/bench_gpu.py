"""Windows and recall on a GPU; nothing where there is none."""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np

from kalos_ctx import ContextAssembler, SessionStore
from kalos_ctx.errors import DeviceUnavailable


class OnGpu:
    """A store in a temporary folder and an assembler on the first GPU."""

    assembler = None

    def open(self, **options):
        """Open both; asv leaves the benchmark out where there is no GPU."""
        self.folder = tempfile.mkdtemp(prefix="kalos-bench-")
        self.store = SessionStore.open(os.path.join(self.folder, "s"), **options)
        try:
            self.assembler = ContextAssembler(self.store, device="cuda")
        except DeviceUnavailable as error:
            raise NotImplementedError(str(error)) from error

    def teardown(self, *_):
        if self.assembler is not None:
            self.assembler.close()
        self.store.close()
        shutil.rmtree(self.folder)


class GpuWindow(OnGpu):
    """A window in device memory, complete on return."""

    params = ([(1_000, 40, 8_192), (1_000, 400, 8_192), (1_000, 400, 131_072)],)
    param_names = ("turns_tokens_a_turn_budget",)
    number = 200

    def setup(self, size):
        turns, tokens, self.budget = size
        self.open()
        rng = np.random.default_rng(1)
        ids = rng.integers(0, 50_000, tokens, dtype=np.int32)
        self.store.extend(
            "s",
            [{"role": ("user", "assistant")[i % 2], "token_ids": ids} for i in range(turns)],
        )
        for _ in range(50):
            self.time_window()

    def time_window(self, *_):
        self.assembler.assemble("s", max_tokens=self.budget).release()


class GpuRecall(OnGpu):
    """Top k of n rows, by one query or several."""

    params = ((65_536, 1_000_000), (1, 16), (10, 100))
    param_names = ("rows", "queries", "k")
    number = 20

    def setup(self, rows, queries, k):
        rng = np.random.default_rng(1)
        self.open(metric="ip")
        for at in range(0, rows, 100_000):
            count = min(100_000, rows - at)
            self.store.add_passages("docs", rng.standard_normal((count, 128), dtype=np.float32))
        self.asked = rng.standard_normal((queries, 128), dtype=np.float32)
        if queries == 1:
            self.asked = self.asked[0]
        self.time_recall(rows, queries, k)

    def time_recall(self, rows, queries, k):
        self.assembler.recall(self.asked, top_k=k, collections="docs")
