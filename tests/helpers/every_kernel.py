"""Launch every kernel of the package at small sizes, and compare with the CPU backend.

    compute-sanitizer --tool memcheck python tests/helpers/every_kernel.py

The same with racecheck, initcheck and synccheck; needs a GPU.
"""

from __future__ import annotations

import tempfile

import numpy as np

from kalos_ctx import ContextAssembler, SessionStore

DIM = 72


def windows(folder):
    """Windows by each way, and batches of each layout."""
    rng = np.random.default_rng(0)
    store = SessionStore.open(folder + "/windows", segment_bytes=8 << 20)
    for i, n in enumerate(rng.integers(1, 3000, 3000)):
        role = "user" if i % 2 == 0 else "assistant"
        store.append("s", role, token_ids=rng.integers(0, 9999, n, dtype=np.int32))
    gpu, cpu = ContextAssembler(store, device="cuda"), ContextAssembler(store, device="cpu")
    gpu.gatherer.zero_copy_from = 0
    paths = set()
    for budget in (4000, 20_000, 300_000, 2_000_000) * 2:
        as_of = None if budget < 1_000_000 else 2900
        with gpu.assemble("s", max_tokens=budget, as_of=as_of) as window:
            with cpu.assemble("s", max_tokens=budget, as_of=as_of) as other:
                assert (window.token_ids == other.token_ids).all()
            paths.add(window.report.path)
    for layout in ("packed", "left", "right"):
        for dtype in ("int32", "int64"):
            asks = [{"session": "s", "max_tokens": n} for n in (4000, 5001, 9000)]
            options = {"layout": layout, "pad_id": 7, "dtype": dtype}
            with (
                gpu.assemble_batch(asks, **options) as one,
                cpu.assemble_batch(asks, **options) as two,
            ):
                assert np.asarray(one.token_ids.tolist()).tolist() == two.token_ids.tolist()
    gpu.close()
    store.close()
    return paths


def recalls(folder):
    """Recall by each kernel, for both row types and all metrics."""
    rng = np.random.default_rng(1)
    scans = {}
    for metric in ("cosine", "ip", "l2"):
        for dtype in ("float32", "float16"):
            store = SessionStore.open(
                f"{folder}/{metric}-{dtype}", metric=metric, vector_dtype=dtype
            )
            store.add_passages("docs", rng.standard_normal((5000, DIM), dtype=np.float32))
            gpu, cpu = ContextAssembler(store, device="cuda"), ContextAssembler(store, device="cpu")
            for num in (1, 2, 17, 40):
                queries = rng.standard_normal((num, DIM), dtype=np.float32)
                for k in (1, 10, 100, 1024):
                    one = gpu.recall(queries, top_k=k, collections="docs")
                    two = cpu.recall(queries, top_k=k, collections="docs")
                    assert (one.ids == two.ids).all()
                    assert (one.scores == two.scores).all()
            for name, count in gpu._backend._scan.scans.items():
                scans[name] = scans.get(name, 0) + count
            gpu.close()
            store.close()
    return scans


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kalos-kernels-") as place:
        print("windows by", sorted(windows(place)), "recall by", recalls(place))
