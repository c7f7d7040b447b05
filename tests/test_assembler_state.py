"""Windows while the store changes: erasure, expiry, rollback, damage, threads and processes."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.clock import ManualClock

from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import SessionExpired, SessionNotFound, StoreClosed, StoreCorrupt
from kalos_ctx.planner import Policy
from kalos_ctx.store import SessionStore

WHOLE = {"max_tokens": None}


@pytest.fixture
def store(store_path):
    with SessionStore.open(store_path) as opened:
        yield opened


@pytest.fixture
def assembler(store):
    with ContextAssembler(store) as made:
        yield made


def ids_of(assembler, session="s", **options):
    with assembler.assemble(session, **{**WHOLE, **options}) as window:
        return window.tolist()


def test_b95_an_erased_tenant_leaves_the_others_windows_as_they_were(store, assembler):
    for tenant in ("one", "two", "three"):
        store.set_segment(None, "sys", token_ids=[len(tenant)], tenant=tenant)
        for number in range(20):
            store.append("s", "user", token_ids=[number, len(tenant)], tenant=tenant)
    before = {tenant: ids_of(assembler, tenant=tenant) for tenant in ("one", "three")}
    ids_of(assembler, tenant="two")
    store.delete_tenant("two")
    assert {tenant: ids_of(assembler, tenant=tenant) for tenant in ("one", "three")} == before
    with pytest.raises(SessionNotFound):
        ids_of(assembler, tenant="two")


def test_b96_what_was_erased_is_in_no_window_in_no_process(store_path, store, assembler):
    with SessionStore.open(store_path, mode="r") as reader, ContextAssembler(reader) as other:
        store.set_segment("s", "sys", token_ids=[77])
        store.append("s", "user", token_ids=[78])
        assert ids_of(assembler) == ids_of(other) == [77, 78]
        held = other.assemble("s", **WHOLE)
        store.delete("s")
        for one in (assembler, other):
            with pytest.raises(SessionNotFound):
                ids_of(one)
            assert "s" not in one.windows
        store.append("s", "user", token_ids=[79])
        assert ids_of(assembler) == ids_of(other) == [79]
        assert held.tolist() == [77, 78]


def test_b98_expired_turns_are_absent_everywhere(store_path):
    clock = ManualClock(100.0)
    with SessionStore.open(store_path, clock=clock, vector_dim=1) as store:
        assembler = ContextAssembler(store)
        store.append("s", "user", token_ids=[1], ttl=1.0, vector=[1.0])
        store.append("s", "user", token_ids=[2])
        store.append("gone", "user", token_ids=[3], ttl=1.0)
        recall = {"query": [1.0], "top_k": 2, "session_recall": True, "placement": "end"}
        clock.now = 100.9
        assert ids_of(assembler) == [1, 2]
        assert len(assembler.recall([1.0], top_k=2, session="s")) == 1
        clock.now = 101.1
        assert ids_of(assembler) == ids_of(assembler, **recall) == [2]
        with assembler.assemble("s", **WHOLE) as window:
            assert [(fate.seq, fate.why) for fate in window.report.dropped] == [(0, "expired")]
        assert ids_of(assembler, as_of=1) == []
        assert len(assembler.recall([1.0], top_k=2, session="s")) == 0
        for call in (assembler.assemble, assembler.plan):
            with pytest.raises(SessionExpired):
                call("gone", **WHOLE)


def test_rollback_fork_and_more_turns_are_followed(store, assembler):
    for number in range(30):
        store.append("s", "user", token_ids=[number] * 3)
    policy = Policy(low_water=0.3)
    assert len(ids_of(assembler, max_tokens=40, policy=policy)) <= 40
    store.fork("s", "t", at=10)
    store.rollback("s", 5)
    assert ids_of(assembler) == [n for n in range(5) for _ in range(3)]
    for number in range(50, 70):
        store.append("s", "user", token_ids=[number] * 3)
        store.append("t", "user", token_ids=[number + 50] * 3)
        cold = ContextAssembler(store)
        for session in ("s", "t"):
            for options in ({}, {"max_tokens": 40, "policy": policy}):
                assert ids_of(assembler, session, **options) == ids_of(cold, session, **options)


def test_compaction_changes_no_window(store_path, store, assembler):
    with SessionStore.open(store_path, mode="r") as reader, ContextAssembler(reader) as other:
        for number in range(20):
            store.append("s", "user", token_ids=[number], group=number // 3)
            store.append("x", "user", token_ids=[number])
        store.set_segment("s", "sys", token_ids=[90])
        before = ids_of(assembler), ids_of(other, max_tokens=9)
        held = assembler.assemble("s", **WHOLE)
        store.delete("x")
        store.compact()
        assert (ids_of(assembler), ids_of(other, max_tokens=9)) == before
        assert held.tolist() == before[0]
        assert assembler.windows["s"] is held
        store.append("s", "user", token_ids=[99])
        assert ids_of(assembler) == ids_of(other) == [*before[0], 99]


def test_damage_is_told_with_its_place_and_other_sessions_go_on(store, assembler):
    store.append("bad", "user", token_ids=list(range(32)))
    store.append("good", "user", token_ids=[1, 2])
    tokens = Path(store.path) / "gen-000000" / "tok-000000"
    with open(tokens, "r+b") as file:
        file.seek(8)
        file.write(b"\x07")
    for options in ({}, {"max_tokens": 9, "policy": Policy(allow_partial=True)}):
        with pytest.raises(StoreCorrupt) as found:
            ids_of(assembler, "bad", **options)
        assert (found.value.file, found.value.offset) == ("gen-000000/tok-000000", 0)
    assert ids_of(assembler, "good") == [1, 2]
    assert assembler.pool.free == assembler.pool.slots


@pytest.mark.parametrize("plain", [True, False])
def test_a_flipped_bit_in_an_entry_is_told(store_path, plain):
    """Each entry of a session, whether it is copied or only planned over."""
    with SessionStore.open(store_path) as store:
        for number in range(40):
            group = None if plain else number // 4
            store.append("s", "user", token_ids=[number] * 4, group=group)
        sound = [ids_of(ContextAssembler(store), max_tokens=n) for n in (30, 200)]
    index = Path(store_path) / "gen-000000" / "index"
    whole = index.read_bytes()
    words = np.frombuffer(whole, np.uint32)
    # An entry's sum is 8 bytes behind its beginning; those of turn n are 4 * (n + 1).
    for number in range(0, 40, 3):
        at = [
            8 * place
            for place in np.flatnonzero(words[2::2][: len(words) // 2 - 1] == 4 * (number + 1))
        ]
        told = 0
        for place in at:
            index.write_bytes(whole)
            with SessionStore.open(store_path, mode="r") as reader:
                with open(index, "r+b") as file:
                    file.seek(8 + place)
                    file.write(bytes([whole[8 + place] ^ 1]))
                for budget, wanted in ((30, sound[0]), (200, sound[1])):
                    try:
                        assert ids_of(ContextAssembler(reader), max_tokens=budget) == wanted
                    except StoreCorrupt:
                        told += 1
        assert told >= 1
    index.write_bytes(whole)


def test_b72_threads_get_what_one_thread_gets(store, assembler):
    sessions = [f"s{number}" for number in range(64)]
    for number, session in enumerate(sessions):
        rows = [[number, turn] * (turn % 4 + 1) for turn in range(30)]
        store.extend(session, [{"role": "user", "token_ids": row} for row in rows])
    store.set_segment(None, "sys", token_ids=[9])
    wanted = {session: ids_of(assembler, session, max_tokens=50) for session in sessions}
    start = threading.Barrier(64)

    def work(turn):
        start.wait()
        order = sessions[turn:] + sessions[:turn]
        return all(ids_of(assembler, s, max_tokens=50) == wanted[s] for s in order for _ in "ab")

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(work, range(64)))
    assert assembler.pool.free == assembler.pool.slots


WRITER = """
import sys
from kalos_ctx.store import SessionStore
with SessionStore.open(sys.argv[1]) as store:
    print("begun", flush=True)
    for number in range(400):
        rows = [{"role": "user", "token_ids": [number * 100 + n] * 2} for n in range(1, 12)]
        store.extend("s", rows[:5])
        store.extend("s", rows[5:])
        store.rollback("s", 1)
        if number % 40 == 39:
            store.delete("s")
            store.append("s", "user", token_ids=[0, 0])
"""


def is_one_state(ids):
    """Whether these are the turns of one round, without a gap."""
    rounds = {token // 100 for token in ids[2:]}
    return len(rounds) <= 1 and [token % 100 for token in ids[::2]] == list(range(len(ids) // 2))


def test_windows_are_one_state_while_another_process_rolls_back_and_erases(store_path):
    with SessionStore.open(store_path) as store:
        store.append("s", "user", token_ids=[0, 0])
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(store_path)], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    with child, SessionStore.open(store_path, mode="r") as reader:
        assert child.stdout.readline() == b"begun\n"
        assembler, lengths = ContextAssembler(reader), set()
        while child.poll() is None:
            try:
                ids = ids_of(assembler)
            except SessionNotFound:  # between an erasure and the next turn
                continue
            assert is_one_state(ids)
            lengths.add(len(ids))
    assert child.returncode == 0
    assert lengths


ROLLING = """
import sys
from kalos_ctx.store import SessionStore
with SessionStore.open(sys.argv[1]) as store:
    print("begun", flush=True)
    for number in range(1, 300):
        store.rollback("s", 3000)
        for turn in range(10):
            store.append("s", "user", token_ids=[number * 100 + turn])
        for _ in range(60):
            store.append("other", "user", token_ids=[1])
"""


def test_a_window_never_mixes_two_states_of_its_session(store_path):
    """Long enough that entries are written over while they are read."""
    with SessionStore.open(store_path) as store:
        store.extend("s", [{"role": "user", "token_ids": [0]}] * 3010)
    child = subprocess.Popen(
        [sys.executable, "-c", ROLLING, str(store_path)], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    with child, SessionStore.open(store_path, mode="r") as reader:
        assert child.stdout.readline() == b"begun\n"
        assembler, states = ContextAssembler(reader), set()
        while child.poll() is None:
            last = ids_of(assembler)[3000:]
            rounds = {token // 100 for token in last if token}
            assert len(rounds) <= 1, rounds
            states.update(rounds)
    assert child.returncode == 0
    assert states


def test_threads_assemble_while_others_write_and_roll_back(store, assembler):
    """Each window is one state of the session."""
    store.append("s", "user", token_ids=[0, 0])
    done = threading.Event()
    seen = []

    def write():
        for number in itertools.count():
            for turn in range(1, 12):
                store.append("s", "user", token_ids=[number * 100 + turn] * 2)
            store.rollback("s", 1)
            if len(seen) > 400:
                done.set()
                return

    def read():
        while not done.is_set():
            seen.append(is_one_state(ids_of(assembler)))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=call) for call in (write, read, read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert all(seen)


def test_assembling_never_changes_the_store(store, assembler):
    store.append("s", "user", token_ids=[1])
    before = store.count("s"), store.stats()["bytes"]
    for _ in range(50):
        ids_of(assembler)
        assembler.plan("s", **WHOLE)
    assert (store.count("s"), store.stats()["bytes"]) == before


def test_many_sessions_and_views_are_forgotten_and_found_again(store, assembler):
    """More sessions than the assembler remembers; the windows of the first ones are the same."""
    for number in range(9000):
        store.append(f"s{number}", "user", token_ids=[number])
    held = assembler.assemble("s0", **WHOLE)
    for number in range(9000):
        assert ids_of(assembler, f"s{number}") == [number]
    assert assembler.windows["s0"] is held
    assert ids_of(assembler, "s0") == [0]


def test_dropped_windows_and_assemblers_leave_no_slot_taken(store):
    store.append("s", "user", token_ids=[1])
    assembler = ContextAssembler(store, slots=4, timeout=0.0)
    pool = assembler.pool
    for _ in range(20):
        assembler.assemble("s", **WHOLE)
    assert pool.free == 4
    window = assembler.assemble("s", **WHOLE)
    del assembler
    gc.collect()
    assert window.tolist() == [1]
    del window
    assert pool.free == 4


def test_recall_and_load_of_a_closed_assembler_raise(store_path):
    with SessionStore.open(store_path) as store:
        store.add_passages("c", [[1.0, 0.0]])
        assembler = ContextAssembler(store)
        assert len(assembler.recall([1, 0], top_k=1, collections="c")) == 1
        assembler.close()
        for call in (
            lambda: assembler.recall([1, 0], top_k=1, collections="c"),
            assembler.load,
            lambda: assembler.assemble("s", max_tokens=5),
        ):
            with pytest.raises(StoreClosed):
                call()
