"""`kalos bench`: a quick measurement of this machine, with made-up turns of token IDs.

The benchmarks that figures in the documentation come from are under asv_benchmarks/.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kalos_ctx import terminal
from kalos_ctx.doctor import cpu_name
from kalos_ctx.store import SessionStore
from kalos_ctx.store_path import file_system

VOCAB_SIZE = 50_000
TURN_TOKENS = 256  # 1 KiB
NUM_APPENDS, NUM_SYNCED, GROUP = 20_000, 300, 64
LONG_TURNS, LONG_TOKENS, WINDOW = 1000, 100, 8192
NUM_ROWS, DIM, TOP_K = 16_384, 128, 10
NUM_CALLS = 2000
ROWS_PER_CALL = 4096


def run_bench(folder: Path | None = None) -> dict[str, Any]:
    """Measure appends, reads, opening, windows and recall; return plain JSON values.

    Parameters
    ----------
    folder : path, optional
        Where the store is made and removed again; a temporary folder if left out.

    Raises
    ------
    KalosError, OSError
    """
    with tempfile.TemporaryDirectory(prefix="kalos-bench-", dir=folder) as place:
        rng = np.random.default_rng(1)
        measures = [
            *_appends(Path(place), rng),
            *_reads(Path(place)),
            *_windows(Path(place), rng),
        ]
        kind = file_system(os.path.realpath(place))
    machine = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "file_system": kind,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    return {"machine": machine, "measures": measures}


def _ids(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.integers(0, VOCAB_SIZE, shape, dtype=np.int32)


def _rate(what: str, count: int, seconds: float) -> dict[str, Any]:
    return {"what": what, "per_second": round(count / seconds)}


def _latency(what: str, call: Callable[[int], Any], count: int = NUM_CALLS) -> dict[str, Any]:
    for i in range(min(50, count)):
        call(i)
    spent = np.empty(count)
    for i in range(count):
        begin = time.perf_counter()
        call(i)
        spent[i] = time.perf_counter() - begin
    p50, p99 = np.percentile(spent * 1e6, (50, 99))
    return {"what": what, "p50_us": round(float(p50), 2), "p99_us": round(float(p99), 2)}


def _appends(place: Path, rng: np.random.Generator) -> list[dict[str, Any]]:
    rows = _ids(rng, (256, TURN_TOKENS))
    found = []
    with SessionStore.open(place / "bench.kalos", vocab_size=VOCAB_SIZE) as store:
        begin = time.perf_counter()
        for i in range(NUM_APPENDS):
            store.append("appended", "user", token_ids=rows[i & 255])
        seconds = time.perf_counter() - begin
        found.append(_rate("append, 1 KiB turns, durability process", NUM_APPENDS, seconds))
        batch = [{"role": "user", "token_ids": row} for row in rows[:GROUP]]
        begin = time.perf_counter()
        for _ in range(NUM_APPENDS // GROUP):
            store.extend("extended", batch)
        seconds = time.perf_counter() - begin
        count = NUM_APPENDS // GROUP * GROUP
        found.append(_rate(f"extend in groups of {GROUP}, durability process", count, seconds))
    for durability, size, what in (("each", 1, "append"), ("group", GROUP, f"groups of {GROUP}")):
        path = place / f"{durability}.kalos"
        with SessionStore.open(path, vocab_size=VOCAB_SIZE, durability=durability) as store:
            batch = [{"role": "user", "token_ids": row} for row in rows[:size]]
            store.extend("s", batch)
            begin = time.perf_counter()
            for _ in range(NUM_SYNCED):
                store.extend("s", batch)
            seconds = time.perf_counter() - begin
        found.append(_rate(f"{what}, durability {durability}", NUM_SYNCED * size, seconds))
    return found


def _reads(place: Path) -> list[dict[str, Any]]:
    path = place / "bench.kalos"

    def reopen(i: int) -> None:
        SessionStore.open(path, "r").close()

    with SessionStore.open(path, "r") as store:
        read = _latency(
            "read a turn of 1 KiB",
            lambda i: store.turns("appended", i % NUM_APPENDS, i % NUM_APPENDS + 1)[0].token_ids,
        )
    return [read, _latency("open for reading", reopen, 100)]


def _windows(place: Path, rng: np.random.Generator) -> list[dict[str, Any]]:
    from kalos_ctx.assembler import ContextAssembler

    rows = _ids(rng, (LONG_TURNS, LONG_TOKENS))
    with SessionStore.open(place / "windows.kalos", vocab_size=VOCAB_SIZE) as store:
        roles = ("user", "assistant")
        store.extend(
            "long", [{"role": roles[i % 2], "token_ids": row} for i, row in enumerate(rows)]
        )
        vectors = rng.standard_normal((NUM_ROWS, DIM), dtype=np.float32)
        for at in range(0, NUM_ROWS, ROWS_PER_CALL):
            part = vectors[at : at + ROWS_PER_CALL]
            store.add_passages("bench", part, token_ids=_ids(rng, (len(part), 32)))
        queries = rng.standard_normal((64, DIM), dtype=np.float32)
        with ContextAssembler(store) as assembler:

            def window(i: int) -> None:
                assembler.assemble("long", max_tokens=WINDOW).release()

            def recall(i: int) -> Any:
                return assembler.recall(queries[i % 64], top_k=TOP_K, collections=("bench",))

            def both(i: int) -> None:
                assembler.assemble(
                    "long", max_tokens=WINDOW, query=queries[i % 64], top_k=TOP_K,
                    collections=("bench",),
                ).release()  # fmt: skip

            turns = f"{LONG_TURNS:,} turns"
            return [
                _latency(f"window of {WINDOW:,} tokens from {turns}", window),
                _latency(f"recall, {TOP_K} of {NUM_ROWS:,} x {DIM}", recall, 500),
                _latency(f"window of {WINDOW:,} tokens with recall", both, 500),
            ]


def print_bench(found: dict[str, Any]) -> None:
    """Print the figures of `run_bench`."""
    machine = found["machine"]
    terminal.say(
        terminal.shown(
            f"{machine['cpu']}, {machine['cores']} cores, {machine['file_system']}, "
            f"Linux {machine['kernel']}, Python {machine['python']}"
        )
    )
    terminal.table(
        ("what", "a second", "p50 us", "p99 us"),
        (
            (
                one["what"],
                f"{one['per_second']:,}" if "per_second" in one else "",
                one.get("p50_us", ""),
                one.get("p99_us", ""),
            )
            for one in found["measures"]
        ),
        numbers=(1, 2, 3),
    )
