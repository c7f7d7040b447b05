"""Timing: calls in turn, stages of a call, many callers, and what the machine is."""

from __future__ import annotations

import gc
import importlib.metadata
import math
import os
import platform
import threading
import time
from pathlib import Path

import numpy as np

from kalos_ctx.doctor import cpu_name

LIMIT_S = 20.0  # a single call that would take longer is not run
ROUNDS = 3  # every road has its turn in each, so that a slow moment meets all of them
CALLS_MAX = 5000
PACKAGES = (
    "numpy",
    "tokenizers",
    "tiktoken",
    "redis",
    "langchain-core",
    "langchain-community",
    "llama-index-core",
    "openai-agents",
    "lmdb",
    "grpcio",
    "faiss-cpu",
    "usearch",
)


def no_lap(_stage):
    """Take no time at the end of a stage."""


class Laps:
    """Nanoseconds of each stage of one call; a stage that comes again is added up."""

    def __init__(self):
        self.spent = {}
        self.last = time.perf_counter_ns()

    def __call__(self, stage):
        now = time.perf_counter_ns()
        self.spent[stage] = self.spent.get(stage, 0) + now - self.last
        self.last = time.perf_counter_ns()


def figures(nanoseconds):
    """p50 and p99 in microseconds, three digits and more, and how many calls they are of."""
    p50, p99 = np.percentile(np.asarray(nanoseconds), (50, 99)) / 1e3
    return {"p50": rounded(p50), "p99": rounded(p99), "calls": len(nanoseconds)}


def rounded(value):
    """Round to four significant digits."""
    return float(f"{value:.4g}")


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


def spell(call, seconds, least):
    """Nanoseconds of each call, for some seconds."""
    took = []
    clock = time.perf_counter_ns
    gc.collect()
    gc.disable()
    until = clock() + int(seconds * 1e9)
    while len(took) < least or (clock() < until and len(took) < CALLS_MAX):
        start = clock()
        call()
        took.append(clock() - start)
    gc.enable()
    return took


def expected(spent, size):
    """Seconds that a call will take at a size, from the two before it; at least in proportion."""
    if not spent:
        return 0.0
    sizes = sorted(spent)
    steepness = 1.0
    if len(sizes) > 1:
        before, last = sizes[-2:]
        steepness = math.log(spent[last] / spent[before]) / math.log(last / before)
    # Below a twentieth of the limit fixed costs hide how a road grows: then it is simply tried.
    if spent[sizes[-1]] < LIMIT_S / 200:
        return 0.0
    return spent[sizes[-1]] * (size / sizes[-1]) ** max(1.0, steepness)


def in_turn(calls, seconds):
    """Measure several calls in turn: name to figures. `calls`: name to callable."""
    took = {name: [] for name in calls}
    slow = set()
    for name, call in calls.items():
        first = spell(call, 0, 1)
        if first[0] > 1e9:  # a call of a second is not repeated to warm it up
            slow.add(name)
            took[name] += first
        else:
            spell(call, min(0.1, seconds / 5), 1)
    for turn in range(ROUNDS):
        for name, call in calls.items():
            if name not in slow:
                took[name] += spell(call, seconds / ROUNDS, 4)
            elif turn:
                took[name] += spell(call, 0, 1)
    return {name: figures(row) for name, row in took.items()}


def by_stage(call, seconds):
    """p50 and p99 of each stage. `call` takes the function that ends a stage."""
    rows = {}

    def one():
        laps = Laps()
        call(laps)
        for stage, spent in laps.spent.items():
            rows.setdefault(stage, []).append(spent)

    spell(one, seconds, 2)
    return {stage: figures(row) for stage, row in rows.items()}


def together(call, callers, seconds):
    """Figures of a call from several threads at once, each without pause. `call` takes its number.

    Every thread makes one call first that does not count: connections are opened there.
    """
    took = [[] for _ in range(callers)]
    ends = [(0, 0)] * callers
    gate = threading.Barrier(callers)
    failed = []

    def work(number):
        row, clock = took[number], time.perf_counter_ns
        try:
            call(number)
        except Exception as error:
            failed.append(error)
        gate.wait()
        begin = start = clock()
        until = begin + int(seconds * 1e9)
        while start < until and not failed:
            call(number)
            now = clock()
            row.append(now - start)
            start = now
        ends[number] = begin, start

    gc.collect()
    gc.disable()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.enable()
    if failed:
        raise failed[0]
    spent = (max(end for _, end in ends) - min(begin for begin, _ in ends)) / 1e9
    every = [one for row in took for one in row]
    return {**figures(every), "worst": rounded(max(every) / 1e3),
            "a_second": round(len(every) / spent)}  # fmt: skip


def versions():
    """The version of every package that is measured, null where it is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine(name):
    """What the figures were taken on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "name": name,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "kernel": platform.release().split("-")[0],
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "all"),
    }


def here(*names):
    """Return a path below asv_benchmarks/."""
    return str(Path(__file__).resolve().parents[1].joinpath(*names))
