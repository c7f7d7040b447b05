"""Exact recall on the CPU, and numpy doing the same job."""

from __future__ import annotations

import os

import numpy as np

from kalos_ctx import ContextAssembler, SessionStore

from . import once


def vectors_of(rows, dim):
    """Rows and a query, the same at each call."""
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((rows, dim), dtype=np.float32)
    return vectors, rng.standard_normal(dim, dtype=np.float32)


class Recall:
    """Top 10 of n rows, one query."""

    sizes = ((4_096, 128), (65_536, 128), (50_000, 384))
    dtypes = ("float32", "float16")
    params = (sizes, dtypes)
    param_names = ("rows_dim", "dtype")
    number = 20
    repeat = (1, 10, 2.0)

    def setup_cache(self):
        """Make a store for each set of parameters, once for both benchmarks and all rounds."""
        for rows, dim in self.sizes:
            vectors, _ = vectors_of(rows, dim)
            for dtype in self.dtypes:
                name = f"{rows} x {dim} {dtype}"
                with SessionStore.open(name, vector_dtype=dtype, metric="ip") as store:
                    store.add_passages("docs", vectors)
        return os.getcwd()

    @once
    def setup(self, folder, rows_dim, dtype):
        rows, dim = rows_dim
        vectors, self.query = vectors_of(rows, dim)
        self.matrix = vectors.astype(dtype).astype(np.float32)
        path = os.path.join(folder, f"{rows} x {dim} {dtype}")
        self.assembler = ContextAssembler(SessionStore.open(path, "r"), device="cpu")
        self.time_recall_top_10()

    def time_recall_top_10(self, *_):
        self.assembler.recall(self.query, top_k=10, collections=("docs",))

    def time_numpy_matmul_argpartition(self, *_):
        scores = self.matrix @ self.query
        best = np.argpartition(scores, -10)[-10:]
        best[np.argsort(-scores[best])]
