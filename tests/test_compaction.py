"""Compaction, verification and snapshots of a store that has a bit of everything."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from kalos_ctx.errors import NotAStore, StoreCorrupt
from kalos_ctx.store import SessionStore

KINDS = ("s3", "s4", "f3", "f5", "s6")


def contents(store):
    """Everything a caller can read, as plain values."""
    names = store.sessions(limit=1000).items
    return {
        "turns": {
            n: [(t.seq, t.role, t.token_ids.tolist(), t.group, t.metadata) for t in store.turns(n)]
            for n in names
        },
        "segments": {n: repr(store.segments(n)) for n in names} | {"": repr(store.segments(None))},
        "summaries": {n: repr(store.summaries(n)) for n in names},
        "passages": [
            (p.id, p.vector.tolist(), p.text, p.token_ids.tolist(), p.metadata)
            for p in store.passages("docs", range(1, 60, 2))
        ],
    }


def fill(store):
    """A bit of everything: groups, keys, times to live, forks, rollback, passages, deletions."""
    for i in range(8):
        for j in range(12):
            store.append(
                f"s{i}",
                "user" if j % 2 == 0 else "assistant",
                token_ids=list(range(i, i + 30)),
                ttl=5 if (i == 6 and j < 4) or i == 7 else None,
                group=j // 2,
                key=f"key{j}",
                metadata={"j": j},
            )
    for i in (3, 5):
        store.fork(f"s{i}", f"f{i}", at=7)
    store.append("f3", "assistant", token_ids=[1, 2], group=3)
    store.rollback("s3", 5)
    store.append("s3", "user", token_ids=[3])
    store.set_segment("s3", "sys", token_ids=[1, 2])
    store.set_segment(None, "everybody", token_ids=[7])
    store.summarize("s4", 0, 5, token_ids=[9, 9])
    vectors = np.arange(60 * 8, dtype=np.float32).reshape(60, 8) + 1
    store.add_passages("docs", vectors, texts=[f"text {i}" for i in range(60)])
    store.delete_passages("docs", range(0, 60, 2))
    store.delete("s2")


@pytest.fixture
def filled(store_path, clock):
    with SessionStore.open(store_path, segment_bytes=65536, clock=clock) as store:
        fill(store)
        yield store


def test_compaction_keeps_everything_that_can_be_read(filled, clock):
    clock.advance(6)
    before = contents(filled)
    sizes = filled.compact()
    assert contents(filled) == before
    assert sizes["after"] < sizes["before"]
    assert filled.verify().ok
    assert filled.stats()["generation"] == 1


def test_compaction_leaves_expired_sessions_and_dead_passages_behind(filled, clock):
    clock.advance(6)
    filled.compact()
    assert "s7" not in filled.sessions(limit=100).items
    assert [t.seq for t in filled.turns("s6")] == list(range(4, 12))
    assert filled.stats()["passages"] == 30


def test_compaction_keeps_keys_groups_and_id_order(filled):
    filled.compact()
    ids = list(range(30))
    assert filled.append(
        "s0", "user", token_ids=ids, group=0, key="key0", metadata={"j": 0}
    ) == 0  # fmt: skip
    assert filled.count("s0") == 12
    assert filled.add_passages("docs", np.ones((1, 8))).tolist() == [60]


def test_compaction_keeps_forks_sharing_until_the_last_is_erased(filled):
    needle = np.arange(5, 35, dtype="<i4").tobytes()
    filled.compact()
    kept = [t.token_ids.tolist() for t in filled.turns("f5")]
    filled.delete("s5")
    assert [t.token_ids.tolist() for t in filled.turns("f5")] == kept
    filled.delete("f5")
    filled.compact()
    for folder, _, files in os.walk(filled.path):
        for name in files:
            with open(os.path.join(folder, name), "rb") as f:
                assert needle not in f.read()


def test_readers_follow_a_compaction(filled, clock):
    with SessionStore.open(filled.path, "r", clock=clock) as reader:
        old = reader.turns("s1")[0].token_ids
        filled.compact()
        assert contents(reader) == contents(filled)
        filled.append("s1", "user", token_ids=[5])
        assert reader.count("s1") == 13
        assert old.tolist() == list(range(1, 31))


def test_store_opens_after_compaction_with_and_without_close(store_path, clock):
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[2])\n"
        "from kalos_ctx.store import SessionStore\n"
        "s = SessionStore.open(sys.argv[1], segment_bytes=65536)\n"
        "[s.append(f's{i % 5}', 'user', token_ids=[i]) for i in range(100)]\n"
        "s.compact(); s.append('s0', 'user', token_ids=[7]); os._exit(0)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(store_path), os.path.dirname(__file__)], check=True
    )
    with SessionStore.open(store_path, clock=clock) as store:
        assert [t.token_ids.tolist() for t in store.turns("s0")] == [
            [i] for i in [*range(0, 100, 5), 7]
        ]
        assert not store.recovery["rebuilt"]
        assert store.verify().ok


@pytest.mark.parametrize("delay", range(6))
def test_fault_10_kill_during_compaction_leaves_old_or_new_files(store_path, delay):
    with SessionStore.open(store_path, segment_bytes=65536) as store:
        for i in range(3000):
            store.append(f"s{i % 50}", "user", token_ids=list(range(i % 7 + 1)))
        before = {n: store.count(n) for n in store.sessions(limit=100).items}
    code = (
        "import sys; from kalos_ctx.store import SessionStore\n"
        "s = SessionStore.open(sys.argv[1]); print('go', flush=True)\n"
        "while True: s.compact()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(store_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "go\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01 + delay * 0.017)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with SessionStore.open(store_path) as store:
        assert {n: store.count(n) for n in store.sessions(limit=100).items} == before
        assert store.verify().ok
        assert len([n for n in os.listdir(store_path) if n.startswith("gen-")]) == 1


def test_verify_names_file_and_offset_of_each_kind_of_damage(filled):
    folder = os.path.join(filled.path, "gen-000000")
    filled.sync()
    for name, offset in (("tok-000000", 0), ("vec-000000", 32), ("log-000000", 200)):
        path = os.path.join(folder, name)
        with open(path, "r+b") as f:
            f.seek(offset)
            old = f.read(1)
            f.seek(offset)
            f.write(bytes([old[0] ^ 1]))
            f.flush()
            report = filled.verify()
            assert not report.ok
            assert any(flaw.file == f"gen-000000/{name}" for flaw in report.errors), name
            assert all(flaw.offset <= offset for flaw in report.errors if name in flaw.file)
            f.seek(offset)
            f.write(old)
    assert filled.verify().ok


def test_reading_a_flipped_token_raises_with_its_place(filled):
    path = os.path.join(filled.path, "gen-000000", "tok-000000")
    with open(path, "r+b") as f:
        f.write(b"\x7f")
    with pytest.raises(StoreCorrupt) as caught:
        filled.turns("s0", 0, 1)
    assert (caught.value.file, caught.value.offset) == ("gen-000000/tok-000000", 0)


def test_snapshot_opens_as_the_store_it_was(filled, tmp_path, clock):
    filled.snapshot(tmp_path / "copy")
    before = contents(filled)
    filled.append("s0", "user", token_ids=[1])
    with SessionStore.open(tmp_path / "copy", clock=clock) as copy:
        assert contents(copy) == before
        assert not copy.recovery["rebuilt"]
        assert copy.verify().ok
        copy.append("s0", "user", token_ids=[2])
    with pytest.raises(NotAStore):
        filled.snapshot(tmp_path / "copy")


def test_verify_tells_its_progress(filled):
    seen = []
    filled.verify(lambda done, total: seen.append((done, total)))
    assert seen[-1][0] > 0
    assert all(done <= total for done, total in seen)


def test_listings_and_tables_are_read_again_when_the_writer_moves_on(filled, clock, monkeypatch):
    """A compaction in the middle of a reading call, of which the reader has read the first half."""
    with SessionStore.open(filled.path, "r", clock=clock) as reader:
        expected = contents(filled)
        real = reader._core.slot_state

        class Core:
            """The reader's core; the writer compacts behind its first answer."""

            moves = 1

            def __getattr__(self, name):
                return getattr(core, name)

            def slot_state(self, *args):
                state = real(*args)
                if self.moves:
                    self.moves -= 1
                    filled.compact()
                return state

        core = reader._core
        for read in (
            lambda: repr(reader.segments("s3")) == expected["segments"]["s3"],
            lambda: repr(reader.summaries("s4")) == expected["summaries"]["s4"],
            lambda: [p.id for p in reader.passages("docs", [1, 3])] == [1, 3],
        ):
            monkeypatch.setattr(reader, "_core", Core())
            assert read()
            monkeypatch.setattr(reader, "_core", core)
