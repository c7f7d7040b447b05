"""Opening a store: paths, modes, the writer's lock, and a configuration that must match."""

import os

import pytest
from helpers.store_files import OtherProcess, all_bytes

from kalos_ctx import store_path as store_path_module
from kalos_ctx.errors import (
    DimensionMismatch,
    FingerprintMismatch,
    InvalidArgument,
    NotAStore,
    StoreLocked,
    StoreNotFound,
)
from kalos_ctx.store import SessionStore


@pytest.fixture
def store(store_path):
    """Return an empty store of token IDs."""
    with SessionStore.open(store_path) as store:
        yield store


def ids_of(store, session):
    return [turn.token_ids.tolist() for turn in store.turns(session)]


def test_open_for_reading_makes_nothing(tmp_path):
    path = tmp_path / "nothing"
    with pytest.raises(StoreNotFound):
        SessionStore.open(path, "r")
    assert not path.exists()
    path.mkdir()
    with pytest.raises(StoreNotFound):
        SessionStore.open(path, "r")
    assert list(path.iterdir()) == []


def test_reading_changes_no_file(store_path):
    with SessionStore.open(store_path) as store:
        store.append("s", "user", token_ids=[1])
    before = all_bytes(store_path)
    with SessionStore.open(store_path, "r") as store:
        store.turns("s")
        store.sessions()
        store.stats()
        assert store.recovery == {}
    assert all_bytes(store_path) == before


def test_second_writer_is_refused_and_readers_are_not(store, store_path):
    with pytest.raises(StoreLocked):
        SessionStore.open(store_path)
    with OtherProcess(store_path) as reader:
        assert reader.ask("store.mode") == "r"
        assert reader.ask("SessionStore.open(store.path)") == "StoreLocked"


def test_open_makes_parents_and_takes_path_objects_and_bytes(tmp_path):
    path = tmp_path / "a" / "b"
    with SessionStore.open(path) as store:
        assert store.path == str(path)
        store.append("s", "user", token_ids=[1])
    with SessionStore.open(str(path).encode(), "r") as store:
        assert store.count("s") == 1


def test_open_relative_path_survives_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with SessionStore.open("store") as store:
        monkeypatch.chdir("/")
        store.append("s", "user", token_ids=[1])
        assert store.path == str(tmp_path / "store")
        assert store.compact()["after"] > 0


def test_open_file_link_fifo_and_foreign_folder_are_refused(tmp_path):
    SessionStore.open(tmp_path / "real").close()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    for name in ("file", "link", "dangling", "fifo", "full"):
        for mode in ("a", "r"):
            with pytest.raises(NotAStore):
                SessionStore.open(tmp_path / name, mode)
    assert (tmp_path / "full" / "notes.txt").read_text() == "x"
    assert not (tmp_path / "nowhere").exists()


def test_open_through_a_linked_parent_works(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with SessionStore.open(tmp_path / "link" / "store") as store:
        store.append("s", "user", token_ids=[1])
    with SessionStore.open(tmp_path / "real" / "store", "r") as store:
        assert store.count("s") == 1


@pytest.mark.parametrize("new", [True, False])
def test_open_on_a_network_file_system_is_refused(tmp_path, monkeypatch, new):
    if not new:
        SessionStore.open(tmp_path / "s").close()
    monkeypatch.setattr(store_path_module, "file_system", lambda folder: "nfs4")
    for mode in ("a",) if new else ("a", "r"):
        with pytest.raises(NotAStore, match="network"):
            SessionStore.open(tmp_path / "s", mode)
    assert (tmp_path / "s").exists() is not new


def test_file_system_of_a_folder_is_that_of_its_longest_mount():
    file_system = store_path_module.file_system
    assert file_system("/proc/self") == "proc"
    assert file_system("/processes") == file_system("/")


def test_config_of_a_store_must_be_asked_for_as_it_is(tmp_path):
    path = tmp_path / "s"
    made = {"vector_dim": 8, "vector_dtype": "float16", "metric": "ip", "vocab_size": 50}
    SessionStore.open(path, **made).close()
    for mode in ("a", "r"):
        with SessionStore.open(path, mode) as store:
            stats = store.stats()
            assert {name: stats[name] for name in made} == made
            assert store.metric == "ip"
        with SessionStore.open(path, mode, **made):
            pass
        for name, value, error in (
            ("metric", "l2", FingerprintMismatch),
            ("vocab_size", 51, FingerprintMismatch),
            ("vector_dim", 9, DimensionMismatch),
        ):
            with pytest.raises(error, match=name):
                SessionStore.open(path, mode, **{name: value})


def test_dimension_given_later_is_fixed_then(store_path):
    SessionStore.open(store_path).close()
    with SessionStore.open(store_path, vector_dim=3) as store:
        with pytest.raises(DimensionMismatch):
            store.append("s", "user", token_ids=[1], vector=[1, 2])
        assert store.stats()["vector_dim"] == 3


def test_refused_open_lets_go_of_the_lock(store_path):
    SessionStore.open(store_path, vocab_size=5).close()
    with pytest.raises(FingerprintMismatch):
        SessionStore.open(store_path, vocab_size=6)
    SessionStore.open(store_path).close()


def test_session_store_is_not_made_by_its_class():
    with pytest.raises(InvalidArgument, match="open"):
        SessionStore()


def test_repr_names_path_and_mode(store):
    assert repr(store) == f"SessionStore({store.path!r}, mode='a')"


@pytest.mark.parametrize("durability", ["process", "group", "each"])
def test_every_durability_keeps_every_kind_of_record(tmp_path, durability):
    path = tmp_path / "s"
    with SessionStore.open(path, durability=durability) as store:
        assert store.stats()["durability"] == durability
        for i in range(20):
            store.append("s", "user", token_ids=[i], vector=[i + 1.0, 0.0], key=str(i))
        store.set_segment("s", "p", token_ids=[1])
        store.add_passages("c", [[0.0, 1.0]], texts=["x"])
        store.fork("s", "t", at=3)
        store.sync()
    with SessionStore.open(path, "r") as store:
        assert ids_of(store, "s") == [[i] for i in range(20)]
        assert store.count("t") == 3
        assert store.passages("c", [0])[0].text == "x"
        assert store.verify().ok


def test_store_without_a_close_in_order_opens_with_everything(store_path):
    with OtherProcess(store_path, "a") as writer:
        writer.ask("[store.append('s', 'user', token_ids=[i], key=str(i)) for i in range(50)]")
        writer._child.kill()
    with SessionStore.open(store_path) as store:
        assert ids_of(store, "s") == [[i] for i in range(50)]
        assert store.append("s", "user", token_ids=[7], key="7") == 7
