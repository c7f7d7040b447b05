"""Cases from the field that concern the store as a whole, named after their ids."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import DimensionMismatch, NonFiniteVector, NotAStore
from kalos_ctx.store import SessionStore


def file_digests(path):
    """SHA-256 of the files that hold what was written, by name."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            if name[:3] in ("log", "tok", "vec"):
                with open(os.path.join(folder, name), "rb") as f:
                    found[name] = hashlib.sha256(f.read()).hexdigest()
    return found


def test_b48_assembling_never_appends(store_path):
    with SessionStore.open(store_path) as store:
        for i in range(6):
            store.append("s", ("user", "assistant")[i % 2], token_ids=[i, i])
        before = file_digests(store_path)
        with ContextAssembler(store) as assembler:
            for _ in range(20):
                assembler.assemble("s", max_tokens=8).release()
        assert store.count("s") == 6
        assert file_digests(store_path) == before


def test_b59_cut_inside_the_last_record_keeps_all_earlier_turns(store_path, tmp_path):
    with SessionStore.open(store_path) as store:
        for i in range(4):
            store.append("s", "user", token_ids=[i])
        start = store._core.log.end
        store.append("s", "user", token_ids=[99])
        stop = store._core.log.end
    for cut in sorted({*range(start, stop, 16), start + 1, stop - 1}):
        copy = tmp_path / f"cut{cut}"
        shutil.copytree(store_path, copy)
        os.truncate(copy / "gen-000000" / "log-000000", cut)
        with SessionStore.open(copy) as store:
            assert [t.token_ids[0] for t in store.turns("s")] == [0, 1, 2, 3]
            assert cut == start or store.recovery["flaw"]
            store.append("s", "user", token_ids=[7])
            assert [t.token_ids[0] for t in store.turns("s")] == [0, 1, 2, 3, 7]
        shutil.rmtree(copy)


WRITER = """
import sys
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1])
while True:
    print(store.append("s", "user", token_ids=[1, 2, 3]), flush=True)
"""


def test_b60_killed_writer_loses_nothing_it_acknowledged(store_path):
    for lines in (1, 40, 150):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(store_path)], stdout=subprocess.PIPE, text=True
        )
        last = [int(writer.stdout.readline()) for _ in range(lines)][-1]
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate()[0].split()
        last = max([last, *map(int, rest[:-1])])
        with SessionStore.open(store_path) as store:
            assert store.count("s") > last
            assert [t.seq for t in store.turns("s")] == list(range(store.count("s")))


def test_b60_zero_byte_control_file_is_refused_with_a_clear_message(store_path):
    with SessionStore.open(store_path) as store:
        store.append("s", "user", token_ids=[1])
    os.truncate(store_path / "control", 0)
    for _ in range(2):
        with pytest.raises(NotAStore, match="control"):
            SessionStore.open(store_path)


def test_b60_zero_byte_log_opens_empty_and_says_that_it_was_cut(store_path):
    with SessionStore.open(store_path) as store:
        store.append("s", "user", token_ids=[1])
    os.truncate(store_path / "gen-000000" / "log-000000", 0)
    with SessionStore.open(store_path) as store:
        assert store.recovery["flaw"] == "cut"
        assert store.sessions().items == []
        store.append("s", "user", token_ids=[2])
    with SessionStore.open(store_path) as store:
        assert store.recovery["flaw"] is None
        assert [t.token_ids.tolist() for t in store.turns("s")] == [[2]]


def test_b60_zero_byte_file_in_place_of_a_store_is_refused(tmp_path):
    (tmp_path / "s").touch()
    with pytest.raises(NotAStore):
        SessionStore.open(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == b""


def test_l06_bad_vectors_are_refused_and_later_searches_work(store_path):
    with SessionStore.open(store_path, vector_dim=2) as store:
        store.add_passages("docs", [[1.0, 0.0]])
        with pytest.raises(NonFiniteVector):
            store.add_passages("docs", [[float("nan"), 1.0]])
        with pytest.raises(DimensionMismatch):
            store.add_passages("docs", [[1.0, 2.0, 3.0]])
        with ContextAssembler(store) as assembler:
            hits = assembler.recall([1.0, 1.0], top_k=5, collections=("docs",))
        assert hits.ids.tolist() == [0]
        assert np.isfinite(hits.scores).all()
