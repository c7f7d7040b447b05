"""Kalos and what a user would pick instead, in one run: ``python asv_benchmarks/rivals.py``.

Prints p50 and p99 in microseconds with the rival's or the floor's figures beside them. Needs
`redis-server` on the PATH and the `bench` extra for the Redis rows. Quote the ratios: machines are
noisy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time

import numpy as np
from benchmarks.bench_assemble import fill

from kalos_ctx import ContextAssembler, SessionStore


def timed(call, repeats, warm=200):
    """p50 and p99 of a call, microseconds."""
    for _ in range(min(warm, repeats)):
        call()
    out = np.empty(repeats)
    clock = time.perf_counter_ns
    gc.disable()
    for i in range(repeats):
        start = clock()
        call()
        out[i] = clock() - start
    gc.enable()
    return float(np.percentile(out, 50) / 1e3), float(np.percentile(out, 99) / 1e3)


def redis_server(folder):
    """A Redis on a Unix socket, and a client; None where there is none."""
    try:
        import redis
    except ImportError:
        return None, None
    if shutil.which("redis-server") is None:
        return None, None
    path = os.path.join(folder, "redis.sock")
    process = subprocess.Popen(
        ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis(unix_socket_path=path)
    for _ in range(200):
        try:
            client.ping()
            break
        except redis.exceptions.ConnectionError:
            time.sleep(0.02)
    return process, client


def windows(folder, say):
    """8,192-token windows against raw int32 IDs from Redis."""
    store = SessionStore.open(os.path.join(folder, "windows"))
    fill(store, "short", 1_000, 40)
    fill(store, "short400", 1_000, 400)
    fill(store, "long", 100_000, 40)
    assembler = ContextAssembler(store, device="cpu")

    def window(session):
        return lambda: assembler.assemble(session, max_tokens=8192).release()

    base = say("window 8K, 1,000 turns of 40", timed(window("short"), 20_000))
    say("window 8K, 1,000 turns of 400", timed(window("short400"), 20_000), base)
    say("window 8K, 100,000 turns of 40", timed(window("long"), 20_000), base)
    with assembler.assemble("short", max_tokens=8192) as one:
        raw = one.token_ids.tobytes()
    copy = np.frombuffer(raw, np.int32)
    say("floor: numpy copy of the same window", timed(copy.copy, 20_000), base)
    process, client = redis_server(folder)
    if process is not None:
        client.set("w", raw)
        fetch = lambda: np.frombuffer(client.get("w"), np.int32)  # noqa: E731
        say("rival: raw int32 from Redis, Unix socket", timed(fetch, 5_000), base)
        process.terminate()
        process.wait()
    else:
        print("  (no redis-server or no redis package: row left out)")
    assembler.close()
    store.close()


def compile_floors(folder):
    """Compile floors.c; its path, or None where there is no C compiler."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        print(f"  (no C compiler, {compiler}: floors left out)")
        return None
    target = os.path.join(folder, "floors")
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "floors.c")
    subprocess.run([compiler, "-O2", "-o", target, source], check=True)
    return target


def appends(folder, say):
    """Turns of 1 KiB of token IDs, and the floor: the system calls alone, from C."""
    ids = np.arange(256, dtype=np.int32)
    rows = [{"role": "user", "token_ids": ids}] * 64
    floors = compile_floors(folder)

    def floor(name, what, repeats, base, turns=1):
        if floors is None:
            return
        path = os.path.join(folder, "floor")
        command = [floors, path, what, str(repeats)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        p50, p99 = (int(ns) / 1e3 / turns for ns in out.split())
        say(f"floor in C: {name}", (p50, p99), base)
        os.remove(path)

    for durability, repeats in (("process", 50_000), ("each", 2_000), ("group", 2_000)):
        store = SessionStore.open(os.path.join(folder, durability), durability=durability)
        one = lambda: store.append("s", "user", token_ids=ids)  # noqa: B023, E731
        base = say(f"append 1 KiB, {durability}", timed(one, repeats))
        if durability == "process":
            floor("pwrite of 1 KiB", "process", repeats, base)
        else:
            floor("pwrite of 1 KiB + fdatasync", "each", repeats, base)
        if durability == "group":
            p50, p99 = timed(lambda: store.extend("e", rows), 500, 20)  # noqa: B023
            base = say("extend 64 x 1 KiB, group, a turn", (p50 / 64, p99 / 64))
            floor("64 x pwrite + fdatasync, a turn", "group", 500, base, 64)
        store.close()


def reads(folder, say):
    """Warm reads of a turn of 1,000 tokens."""
    store = SessionStore.open(os.path.join(folder, "reads"))
    for _ in range(100):
        store.append("s", "user", token_ids=np.arange(1000, dtype=np.int32))
    say("turn of 1,000 tokens, warm", timed(lambda: store.turns("s", 50, 51), 50_000))
    store.close()


def recalls(folder, say):
    """Top 10 against numpy's matmul and argpartition."""
    rng = np.random.default_rng(1)
    for rows, dim in ((65_536, 128), (50_000, 384)):
        vectors = rng.standard_normal((rows, dim), dtype=np.float32)
        query = rng.standard_normal(dim, dtype=np.float32)
        store = SessionStore.open(os.path.join(folder, f"recall{dim}"), metric="ip")
        store.add_passages("docs", vectors)
        assembler = ContextAssembler(store, device="cpu")
        ours = lambda: assembler.recall(query, top_k=10, collections=("docs",))  # noqa: B023, E731
        base = say(f"recall top 10 of {rows:,} x {dim} float32", timed(ours, 500, 20))

        def numpy_way():
            scores = vectors @ query  # noqa: B023
            best = np.argpartition(scores, -10)[-10:]
            return best[np.argsort(-scores[best])]

        say("rival: numpy matmul + argpartition", timed(numpy_way, 500, 20), base)
        assembler.close()
        store.close()


PARTS = {"windows": windows, "appends": appends, "reads": reads, "recalls": recalls}


def main():
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all without one")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    figures = {}

    def say(name, value, base=None):
        ratio = "" if base is None else f"{value[0] / base[0]:8.2f} x"
        print(f"{name:45s} {value[0]:10.2f} {value[1]:10.2f} {ratio}", flush=True)
        figures[name] = value
        return value

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    print(f"{'':45s} {'p50 us':>10s} {'p99 us':>10s} {'to first':>10s}")
    with tempfile.TemporaryDirectory(prefix="kalos-rivals-") as folder:
        for name in options.parts or PARTS:
            PARTS[name](folder, say)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as f:
            json.dump(figures, f, indent=1)


if __name__ == "__main__":
    main()
