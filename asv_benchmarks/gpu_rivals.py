"""Windows and recall on a GPU beside what a user would pick instead, in one run.

    python asv_benchmarks/gpu_rivals.py [PART...]

The parts: windows recall k batch half scan busy threads; without one, all.

Each line: what, p50 and p99 in microseconds from the call in Python to the result visible on the
host, and beside it the floor or the rival, measured in the same process. Needs torch; CuPy and
cuVS where they are installed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time

import numpy as np

from kalos_ctx import ContextAssembler, SessionStore

ROWS: list[dict] = []


def clocked(call, seconds=1.0, least=200, most=5000):
    """p50 and p99 of a call in microseconds."""
    for _ in range(20):
        call()
    times = []
    end = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    times.sort()
    return times[len(times) // 2] / 1000, times[len(times) * 99 // 100] / 1000


def row(what, call, **options):
    """Measure and print one line."""
    p50, p99 = clocked(call, **options)
    print(f"{what:<64} p50 {p50:9.2f} p99 {p99:9.2f} us", flush=True)
    ROWS.append({"what": what, "p50": p50, "p99": p99})
    return p50


def fill(store, session, turns, tokens):
    rng = np.random.default_rng(1)
    rows = [
        {
            "role": "user" if i % 2 == 0 else "assistant",
            "token_ids": rng.integers(0, 50_000, n, dtype=np.int32),
        }
        for i, n in enumerate(rng.integers(tokens // 2, tokens * 3 // 2, turns))
    ]
    for at in range(0, turns, 1000):
        store.extend(session, rows[at : at + 1000])


def windows(torch, folder):
    store = SessionStore.open(os.path.join(folder, "windows"))
    fill(store, "short", 1_000, 40)
    fill(store, "long", 1_000, 400)
    fill(store, "many", 100_000, 40)
    gpu, cpu = ContextAssembler(store, device="cuda"), ContextAssembler(store, device="cpu")
    pinned = torch.zeros(1 << 18, dtype=torch.int32).pin_memory()
    there = torch.zeros(1 << 18, dtype=torch.int32, device="cuda")
    for session, tokens in (("short", 8192), ("long", 8192), ("many", 8192), ("long", 131_072)):
        what = f"window of {tokens} tokens, session {session!r}"

        def build(on, session=session, tokens=tokens):
            on.assemble(session, max_tokens=tokens).release()

        for way, least in (("staged", 1 << 40), ("zero_copy", 0)):
            gpu.gatherer.zero_copy_from = least
            for _ in range(5):
                build(gpu)
            with gpu.assemble(session, max_tokens=tokens) as window:
                path, timings, n = window.report.path, window.report.timings, len(window)
                got = torch.from_dlpack(window).cpu().numpy()
                assert (got == window.token_ids).all()
                with cpu.assemble(session, max_tokens=tokens) as other:
                    assert (other.token_ids == got).all()
            row(f"{what}, {path}", lambda: build(gpu))
            print("   ", way, {name: round(value, 1) for name, value in timings.items()})
        gpu.gatherer.zero_copy_from = type(gpu.gatherer)(gpu.gatherer.device).zero_copy_from
        row(f"{what}, as chosen", lambda: build(gpu))
        row(f"{what}, device='cpu'", lambda: build(cpu))

        def copy(n=n):
            there[:n].copy_(pinned[:n], non_blocking=True)
            torch.cuda.synchronize()

        row(f"   floor: {n} pinned int32 to the device, torch", copy)
    before = gpu.gatherer.device.counts()
    for _ in range(100):
        gpu.assemble("short", max_tokens=8192).release()
    after = gpu.gatherer.device.counts()
    print("counts of 100 windows:", {k: after[k] - before[k] for k in after}, flush=True)
    gpu.close()
    store.close()


def make(folder, n, dim, dtype, metric="ip"):
    rng = np.random.default_rng(2)
    store = SessionStore.open(
        os.path.join(folder, f"r{n}-{dim}-{dtype}"), vector_dtype=dtype, metric=metric
    )
    start = time.perf_counter()
    parts = []
    for at in range(0, n, 100_000):
        part = rng.standard_normal((min(100_000, n - at), dim), dtype=np.float32)
        store.add_passages("docs", part, token_ids=np.ones((len(part), 8), np.int32))
        parts.append(part.astype(dtype))
    print(f"store of {n} x {dim} {dtype} made in {time.perf_counter() - start:.1f} s", flush=True)
    return store, np.concatenate(parts)


def torch_recall(torch, matrix, queries, k):
    """matmul and topk with outputs made before; results on the host."""
    scores = torch.empty((len(queries), len(matrix)), dtype=matrix.dtype, device="cuda")
    best = (
        torch.empty((len(queries), k), dtype=matrix.dtype, device="cuda"),
        torch.empty((len(queries), k), dtype=torch.int64, device="cuda"),
    )
    turned = matrix.t()
    given = torch.from_numpy(queries).pin_memory()

    def call():
        torch.mm(given.to("cuda", non_blocking=True).to(matrix.dtype), turned, out=scores)
        torch.topk(scores, k, out=best)
        return best[1].cpu()

    return call


def recalling(gpu, query, k):
    return lambda: gpu.recall(query, top_k=k, collections="docs")


def windowing(gpu, query):
    return lambda: gpu.assemble("s", max_tokens=8192, query=query, top_k=10, collections="docs")


def recall(torch, folder, shapes, *, ks=(10,), batches=(1,), window=True):
    for n, dim, dtype in shapes:
        store, rows = make(folder, n, dim, dtype)
        gpu = ContextAssembler(store, device="cuda")
        rng = np.random.default_rng(3)
        start = time.perf_counter()
        gpu.recall(rng.standard_normal(dim, dtype=np.float32), top_k=1, collections="docs")
        print(f"first recall (loads the rows) {time.perf_counter() - start:.2f} s", flush=True)
        matrix = torch.from_numpy(rows).cuda()
        nbytes = rows.nbytes
        for batch in batches:
            queries = rng.standard_normal((batch, dim), dtype=np.float32)
            asked = queries[0] if batch == 1 else queries
            for k in ks:
                what = f"{n} x {dim} {dtype}, k {k}, batch {batch}"
                p50 = row(f"recall {what}", recalling(gpu, asked, k))
                print(f"    {nbytes / p50 / 1e6:.2f} TB/s end to end")
                row(f"   torch matmul + topk, {what}", torch_recall(torch, matrix, queries, k))
        if window:
            fill(store, "s", 1_000, 40)
            query = rng.standard_normal(dim, dtype=np.float32)
            build = windowing(gpu, query)
            row(f"recall {n} x {dim} {dtype} + 8K window", lambda build=build: build().release())
            with build() as one:
                print("   ", {name: round(value, 1) for name, value in one.report.timings.items()})
        print("    scans:", dict(gpu._backend._scan.scans))
        gpu.close()
        store.close()
        del matrix
        torch.cuda.empty_cache()


def busy(torch, folder):
    """Windows while the same process keeps the GPU full with short kernels."""
    store = SessionStore.open(os.path.join(folder, "busy"))
    fill(store, "s", 1_000, 40)
    gpu = ContextAssembler(store, device="cuda")
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    stop = threading.Event()

    def load():
        low = torch.cuda.Stream(priority=0)
        out = torch.empty_like(a)
        with torch.cuda.stream(low):
            while not stop.is_set():
                for _ in range(50):
                    torch.mm(a, a, out=out)
                low.synchronize()

    work = threading.Thread(target=load)
    work.start()
    time.sleep(0.5)
    row(
        "window of 8192 tokens, the GPU busy with this process's short kernels",
        lambda: gpu.assemble("s", max_tokens=8192).release(),
        seconds=2.0,
    )
    stop.set()
    work.join()
    gpu.close()
    store.close()


def threads(torch, folder):
    store, _ = make(folder, 65_536, 128, "float32")
    fill(store, "s", 1_000, 40)
    gpu = ContextAssembler(store, device="cuda")
    query = np.random.default_rng(4).standard_normal((8, 128), dtype=np.float32)
    calls = {
        "window of 8192 tokens": lambda _: gpu.assemble("s", max_tokens=8192).release(),
        "recall": lambda i: gpu.recall(query[i], top_k=10, collections="docs"),
    }
    for name, call in calls.items():
        rates = []
        for count in (1, 8):
            done = [0] * count
            end = time.perf_counter() + 2

            def work(i, done=done, end=end, call=call):
                while time.perf_counter() < end:
                    call(i)
                    done[i] += 1

            pool = [threading.Thread(target=work, args=(i,)) for i in range(count)]
            for one in pool:
                one.start()
            for one in pool:
                one.join()
            rates.append(sum(done) / 2)
        print(f"{name}: {rates[0]:,.0f}/s by one thread, {rates[1]:,.0f}/s by eight", flush=True)
    gpu.close()
    store.close()


def main(what):
    import torch

    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    place = os.environ.get("KALOS_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="kalos-gpu-", dir=place) as folder:
        if "windows" in what:
            windows(torch, folder)
        if "recall" in what:
            recall(torch, folder, [(65_536, 128, "float32"), (1_000_000, 128, "float32")])
        if "k" in what:
            recall(torch, folder, [(65_537, 128, "float32")], ks=(1, 10, 100), window=False)
        if "batch" in what:
            recall(torch, folder, [(1_000_001, 128, "float32")], batches=(1, 4, 16), window=False)
        if "half" in what:
            recall(torch, folder, [(1_000_000, 768, "float16")], batches=(1, 16), window=False)
        if "scan" in what:
            recall(torch, folder, [(500_000, 768, "float32")], window=False)
        if "busy" in what:
            busy(torch, folder)
        if "threads" in what:
            threads(torch, folder)
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], "gpu_rivals.json"), "w") as file:
            json.dump(ROWS, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:] or ["windows", "recall", "k", "batch", "half", "scan", "busy", "threads"])
