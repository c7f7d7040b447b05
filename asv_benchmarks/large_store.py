"""How long large stores take to open, and how fast they take turns.

    python asv_benchmarks/large_store.py FOLDER [--sessions N] [--gigabytes N] [--appends N]

Outside of the suite, since it needs minutes and tens of gigabytes. Prints one line a figure: what
it is, the sizes, and the median. Each opening runs in a process of its own that never closes.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

# Prints the seconds that an opening and a first read take, the bytes that went through system
# calls, and the resident memory in MiB.
OPENED = """
import os, resource, sys, time
import kalos_ctx._writer
from kalos_ctx.store import SessionStore
path, mode, session = sys.argv[1:4]
def io():
    rows = dict(line.split(": ") for line in open("/proc/self/io"))
    return int(rows["rchar"]) + int(rows["wchar"])
before, start = io(), time.perf_counter()
store = SessionStore.open(path, mode)
opened = time.perf_counter()
assert store.turns(session)
done = time.perf_counter()
rss = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
print(opened - start, done - opened, io() - before, rss, store.recovery.get("rebuilt", False))
if mode == "a":
    store.append(session, "user", token_ids=[1])
os._exit(0)
"""

FILL = """
import os, sys, time
from kalos_ctx.store import SessionStore
path, sessions, gigabytes = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
store = SessionStore.open(path)
start = time.perf_counter()
if sessions:
    ids = list(range(20))
    for i in range(sessions):
        store.append(f"session {i}", "user", token_ids=ids)
    n = sessions
else:
    import numpy as np
    ids, pad, n, total = np.arange(4096, dtype=np.int32), {"pad": "x" * 16000}, 0, 0
    while total < gigabytes * 1e9:
        turn = {"role": "user", "token_ids": ids, "metadata": pad}
        store.extend(f"session {n % 1000}", [turn] * 50)
        n += 1
        total += 50 * (4096 * 4 + 16500)
print(n, time.perf_counter() - start, flush=True)
os._exit(0)
"""


def child(code: str, *args: object) -> list[str]:
    """Run code in a process of its own; the words it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def openings(path: Path, session: str, what: str) -> None:
    """Print what opening costs, for a writer after a kill and for a reader."""
    for mode in ("a", "r"):
        runs = [[float(x) for x in child(OPENED, path, mode, session)[:4]] for _ in range(5)]
        opened, read, nbytes, rss = (
            statistics.median(column) for column in zip(*runs, strict=True)
        )
        print(
            f"open {mode!r} after a kill, {what}: {opened * 1e3:.1f} ms, first read "
            f"{read * 1e3:.2f} ms, {nbytes / 1e3:.0f} KB by system calls, {rss:.0f} MiB resident"
        )


def sessions(folder: Path, n: int) -> None:
    """Many sessions of one turn."""
    path = folder / "sessions"
    _, seconds = child(FILL, path, n, 0)
    print(f"append, {n:,} new sessions: {n / float(seconds) / 1e3:.0f} thousand a second")
    openings(path, f"session {n - 1}", f"{n:,} sessions")
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    start = time.perf_counter()
    (path / "gen-000000" / "index").unlink()
    rebuilt = child(OPENED, path, "a", f"session {n - 1}")
    print(
        f"index built anew, {n:,} sessions, {size / 1e9:.2f} GB of files: "
        f"{float(rebuilt[0]):.1f} s (process {time.perf_counter() - start:.1f} s)"
    )
    shutil.rmtree(path)


def gigabytes(folder: Path, n: float) -> None:
    """One store of many bytes."""
    path = folder / "large"
    _, seconds = child(FILL, path, 0, n)
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    print(f"write {size / 1e9:.1f} GB: {size / 1e6 / float(seconds):.0f} MB a second")
    openings(path, "session 7", f"{size / 1e9:.1f} GB")
    shutil.rmtree(path)


def floor(folder: Path, nbytes: int, count: int) -> float:
    """Seconds of one pwrite and fdatasync into blocks already written: what no store can beat."""
    fd = os.open(folder / "floor", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.pwrite(fd, bytes(nbytes * count), 0)
    os.fsync(fd)
    data = b"x" * nbytes
    start = time.perf_counter()
    for i in range(count):
        os.pwrite(fd, data, i * nbytes)
        os.fdatasync(fd)
    seconds = (time.perf_counter() - start) / count
    os.close(fd)
    (folder / "floor").unlink()
    return seconds


def appends(folder: Path, n: int) -> None:
    """Turns of 20 IDs a second for each durability, and groups from 8 threads."""
    from kalos_ctx.store import SessionStore

    ids = list(range(20))
    for durability, threads, share in (
        ("process", 1, 1.0), ("each", 1, 0.05), ("group", 1, 0.05), ("group", 8, 0.2),
        ("group", 64, 0.4),
    ):  # fmt: skip
        path = folder / f"appends-{durability}-{threads}"
        count = max(threads, int(n * share))
        with SessionStore.open(path, durability=durability) as store:

            def work(k: int, store=store, count=count, threads=threads) -> None:
                for _ in range(count // threads):
                    store.append(f"s{k}", "user", token_ids=ids)

            start = time.perf_counter()
            workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            seconds = time.perf_counter() - start
        print(
            f"append, {durability}, {threads} thread(s): "
            f"{count / seconds / 1e3:.1f} thousand a second ({seconds / count * 1e6:.1f} us)"
        )
        shutil.rmtree(path)
    batch = [{"role": "user", "token_ids": ids}] * 64
    with SessionStore.open(folder / "extend", durability="each") as store:
        start = time.perf_counter()
        for _ in range(max(1, n // 640)):
            store.extend("s", batch)
        seconds = time.perf_counter() - start
    print(
        f"extend by 64, each: {max(1, n // 640) * 64 / seconds / 1e3:.0f} thousand turns a second"
    )
    shutil.rmtree(folder / "extend")
    print(f"floor, 576 bytes, pwrite + fdatasync: {floor(folder, 576, 2000) * 1e6:.0f} us")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--appends", type=int, default=100_000)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.appends:
        appends(options.folder, options.appends)
    if options.sessions:
        sessions(options.folder, options.sessions)
    if options.gigabytes:
        gigabytes(options.folder, options.gigabytes)


if __name__ == "__main__":
    main()
