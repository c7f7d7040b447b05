"""Listings, tenants, readers beside a writer, and what a closed or read-only store refuses."""

import threading

import numpy as np
import pytest
from helpers.store_files import OtherProcess, all_bytes, content_digest

from kalos_ctx.errors import (
    InvalidArgument,
    KalosError,
    SessionNotFound,
    StoreClosed,
    StoreReadOnly,
)
from kalos_ctx.store import SessionStore


@pytest.fixture
def store(store_path):
    """Return an empty store of token IDs."""
    with SessionStore.open(store_path, segment_bytes=65536) as store:
        yield store


def ids_of(store, session, **options):
    return [turn.token_ids.tolist() for turn in store.turns(session, **options)]


# ---- Sessions and tenants -----------------------------------------------------------------------


def test_sessions_pages_by_cursor_and_prefix(store):
    names = [f"{'ab'[i % 2]}{i:03}" for i in range(25)]
    for name in names:
        store.append(name, "user", token_ids=[1])
    page = store.sessions(limit=10)
    seen = list(page.items)
    while page.cursor is not None:
        page = store.sessions(limit=10, cursor=page.cursor)
        seen += page.items
    assert seen == names
    assert store.sessions(prefix="b").items == [name for name in names if name[0] == "b"]
    assert store.sessions(prefix=b"a02").items == ["a020", "a022", "a024"]
    assert store.sessions(prefix="").items == names
    assert store.sessions(limit=25).cursor is None
    assert store.sessions(cursor="4294967295").items == []


def test_b63_pages_neither_repeat_nor_miss_while_another_process_appends(store_path):
    with OtherProcess(store_path, "a") as writer:
        writer.ask("[store.append(f's{i}', 'user', token_ids=[i]) for i in range(10)]")
        with SessionStore.open(store_path, "r") as store:
            seen, cursor = [], None
            for turn in range(4):
                page = store.sessions(limit=3, cursor=cursor)
                seen, cursor = seen + page.items, page.cursor
                writer.ask(f"store.append('new{turn}', 'user', token_ids=[1])")
                writer.ask("store.append('s0', 'user', token_ids=[1])")
            assert seen[:10] == [f"s{i}" for i in range(10)]
            assert len(set(seen)) == len(seen)


NAMES = ["../x", "/etc/x", "a\0b", "a", "ä", "a\u0308", b"\xff\xfe", ".", "\n", "a" * 1024, "😀"]


def test_b65_names_are_opaque_bytes(store_path, tmp_path):
    """No name is a path, and no two are one."""
    with SessionStore.open(store_path) as store:
        store.append(NAMES[0], "user", token_ids=[0])
        before = set(all_bytes(tmp_path))
        for i, name in enumerate(NAMES):
            if i:
                store.append(name, "user", token_ids=[i])
            store.append("s", "user", token_ids=[i], tenant=name)
        assert set(all_bytes(tmp_path)) == before
    with SessionStore.open(store_path, "r") as store:
        assert store.sessions().items == NAMES
        assert set(store.tenants()) == {"", *NAMES}
        for i, name in enumerate(NAMES):
            assert ids_of(store, name) == [[i]]
            assert ids_of(store, "s", tenant=name) == [[i]]


@pytest.mark.parametrize("name", ["", b"", "a" * 1025, "ä" * 513, "a" * 2**20, "\ud800", None, 5])
def test_b65_other_names_are_refused(store, store_path, name):
    before = content_digest(store_path)
    with pytest.raises(InvalidArgument):
        store.append(name, "user", token_ids=[1])
    if name not in {"", b""}:
        with pytest.raises(InvalidArgument):
            store.append("s", "user", token_ids=[1], tenant=name)
    assert content_digest(store_path) == before


def test_tenants_see_nothing_of_one_another(store):
    for tenant, ids in (("", [1]), ("a", [2]), ("b", [3])):
        store.append("s", "user", token_ids=ids, tenant=tenant)
        store.append(f"only-{tenant}", "user", token_ids=ids, tenant=tenant)
    assert ids_of(store, "s", tenant="a") == [[2]]
    assert store.sessions(tenant="b").items == ["s", "only-b"]
    with pytest.raises(SessionNotFound):
        store.turns("only-a", tenant="b")
    assert store.count("only-a", tenant="b") == 0
    with pytest.raises(SessionNotFound):
        store.delete("only-a")
    assert store.tenants() == ["", "a", "b"]
    assert store.tenants() == sorted(store.tenants())


def test_tenant_and_session_do_not_run_together(store):
    store.append("bc", "user", token_ids=[1], tenant="a")
    store.append("c", "user", token_ids=[2], tenant="ab")
    assert ids_of(store, "bc", tenant="a") == [[1]]
    assert ids_of(store, "c", tenant="ab") == [[2]]


def test_b70_wrong_scope_fails_in_the_append_itself(store):
    for tenant in (None, 5, "x" * 1025, "\ud800"):
        with pytest.raises(InvalidArgument, match="tenant"):
            store.append("s", "user", token_ids=[1], tenant=tenant)
    assert store.tenants() == []


@pytest.mark.parametrize("call", ["turns", "rollback", "fork", "delete", "summaries", "segments"])
def test_unknown_session_raises(store, call):
    more = {"rollback": (0,), "fork": ("new",)}.get(call, ())
    with pytest.raises(SessionNotFound):
        getattr(store, call)("nobody", *more)
    assert store.count("nobody") == 0
    with pytest.raises(SessionNotFound):
        store.summarize("nobody", 0, 1, token_ids=[1])


# ---- Readers ------------------------------------------------------------------------------------


def test_b61_another_process_sees_appends_and_rollbacks_at_once(store, store_path):
    with OtherProcess(store_path) as reader:
        assert reader.ask("store.count('s')") == 0
        for i in range(20):
            store.append("s", "user", token_ids=[i])
            assert reader.ask("store.count('s')") == i + 1
        store.rollback("s", 5)
        assert reader.ask("[t.token_ids.tolist() for t in store.turns('s')]") == [
            [i] for i in range(5)
        ]
        store.delete("s")
        assert reader.ask("store.count('s')") == 0
        assert reader.ask("store.turns('s')") == "SessionNotFound"
        assert reader.ask("store.sessions().items") == []


def test_reader_in_threads_sees_whole_batches_only(store, store_path):
    stop = threading.Event()
    wrong = []

    def read():
        with SessionStore.open(store_path, "r") as reader:
            while not stop.is_set():
                rows = [] if reader.count("s") == 0 else ids_of(reader, "s")
                if len(rows) % 4 or rows != [[i, i // 4] for i in range(len(rows))]:
                    wrong.append(rows)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for batch in range(150):
        rows = [{"role": "user", "token_ids": [batch * 4 + i, batch]} for i in range(4)]
        store.extend("s", rows)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_reader_in_a_process_sees_whole_batches_only(store, store_path):
    store.append("go", "user", token_ids=[1])
    with OtherProcess(store_path) as reader:
        reader.begin(
            "[n for _ in range(400) for n in [store.count('s')] "
            "if n % 4 or (n and store.turns('s')[n - 1].token_ids.tolist() != [n - 1])]"
        )
        for batch in range(400):
            rows = [{"role": "user", "token_ids": [batch * 4 + i]} for i in range(4)]
            store.extend("s", rows)
        assert reader.finish() == []


WRITES = [
    ("append", ("s", "user"), {"token_ids": [1]}),
    ("extend", ("s", [{"role": "user", "token_ids": [1]}]), {}),
    ("extend", ("s", []), {}),
    ("set_segment", ("s", "p"), {"token_ids": [1]}),
    ("set_segment", ("s", "p"), {}),
    ("summarize", ("s", 0, 1), {"token_ids": [1]}),
    ("rollback", ("s", 0), {}),
    ("fork", ("s", "t"), {}),
    ("add_passages", ("c", [[1.0]]), {}),
    ("delete_passages", ("c", [0]), {}),
    ("delete", ("s",), {}),
    ("delete_tenant", ("",), {}),
    ("sync", (), {}),
    ("compact", (), {}),
]
READS = [
    ("turns", ("s",), {}),
    ("count", ("s",), {}),
    ("sessions", (), {}),
    ("tenants", (), {}),
    ("segments", ("s",), {}),
    ("summaries", ("s",), {}),
    ("passages", ("c", [0]), {}),
    ("stats", (), {}),
    ("verify", (), {}),
]


@pytest.mark.parametrize(("call", "args", "options"), WRITES)
def test_reader_refuses_every_write(store, store_path, call, args, options):
    store.append("s", "user", token_ids=[1])
    before = all_bytes(store_path)
    with SessionStore.open(store_path, "r") as reader, pytest.raises(StoreReadOnly):
        getattr(reader, call)(*args, **options)
    assert all_bytes(store_path) == before


@pytest.mark.parametrize(("call", "args", "options"), WRITES + READS)
@pytest.mark.parametrize("mode", ["a", "r"])
def test_use_after_close_raises(store_path, mode, call, args, options):
    SessionStore.open(store_path).close()
    store = SessionStore.open(store_path, mode)
    store.close()
    store.close()
    expected = StoreReadOnly if mode == "r" and (call, args, options) in WRITES else StoreClosed
    with pytest.raises(expected):
        getattr(store, call)(*args, **options)


# ---- The whole store ---------------------------------------------------------------------------


def test_listener_hears_of_erasures_and_is_held_weakly(store):
    class Listener:
        heard = ()

        def session_erased(self, tenant, session):
            self.heard = (*self.heard, (tenant, session))

    listener = Listener()
    store.listen(listener)
    store.append("s", "user", token_ids=[1])
    store.append("t", "user", token_ids=[1], tenant="x")
    store.delete("s")
    store.delete_tenant("x")
    assert listener.heard == ((b"", b"s"), (b"x", b"t"))
    del listener
    store.append("s", "user", token_ids=[1])
    store.delete("s")


def test_stats_counts_what_there_is(store):
    store.extend("s", [{"role": "user", "token_ids": [1]}] * 3)
    store.append("t", "user", token_ids=[1], tenant="x")
    store.add_passages("c", np.eye(4))
    store.delete_passages("c", [1, 2])
    stats = store.stats()
    assert (stats["sessions"], stats["turns"], stats["passages"]) == (2, 4, 2)
    assert stats["bytes"]["tokens"] > 0
    assert issubclass(StoreClosed, KalosError)
