"""Windows, appends and reads beside their floors: system calls and copies alone."""

from __future__ import annotations

import os
import shutil
import subprocess

import numpy as np
from benchmarks.bench_assemble import fill

from kalos_ctx import ContextAssembler, SessionStore
from rivals.measure import here, timed
from rivals.redis_roads import RedisServer
from rivals.road import MissingRival


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
    try:
        server = RedisServer(folder)
        server.unix.set("w", raw)
        fetch = lambda: np.frombuffer(server.unix.get("w"), np.int32)  # noqa: E731
        say("rival: raw int32 from Redis, Unix socket", timed(fetch, 5_000), base)
        server.close()
    except MissingRival as error:
        print(f"  ({error} is not installed: row left out)")
    assembler.close()
    store.close()


def compile_floors(folder):
    """Compile floors.c; its path, or None where there is no C compiler."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        print(f"  (no C compiler, {compiler}: floors left out)")
        return None
    target = os.path.join(folder, "floors")
    subprocess.run([compiler, "-O2", "-o", target, here("floors.c")], check=True)
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
