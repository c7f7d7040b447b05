"""Exact recall on the CPU, and numpy doing the same job."""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np

from kalos_ctx import ContextAssembler, SessionStore


class Recall:
    """Top 10 of n rows, one query."""

    params = ([(4_096, 128), (65_536, 128), (50_000, 384)], ["float32", "float16"])
    param_names = ("rows_dim", "dtype")

    def setup(self, rows_dim, dtype):
        rows, dim = rows_dim
        rng = np.random.default_rng(1)
        vectors = rng.standard_normal((rows, dim), dtype=np.float32)
        self.query = rng.standard_normal(dim, dtype=np.float32)
        self.folder = tempfile.mkdtemp(prefix="kalos-bench-")
        self.store = SessionStore.open(
            os.path.join(self.folder, "s"), vector_dtype=dtype, metric="ip"
        )
        self.store.add_passages("docs", vectors)
        self.assembler = ContextAssembler(self.store, device="cpu")
        self.matrix = vectors.astype(dtype).astype(np.float32)
        self.time_recall_top_10()

    def teardown(self, *_):
        self.assembler.close()
        self.store.close()
        shutil.rmtree(self.folder)

    def time_recall_top_10(self, *_):
        self.assembler.recall(self.query, top_k=10, collections=("docs",))

    def time_numpy_matmul_argpartition(self, *_):
        scores = self.matrix @ self.query
        best = np.argpartition(scores, -10)[-10:]
        best[np.argsort(-scores[best])]
