"""The control file: what it says of a store, its words, and the boot it remembers."""

import struct

import pytest
from helpers.faults import checked_child
from helpers.store_images import (
    STATE_BYTES,
    STATES,
    WORDS_AT,
    crc32c,
    make_small,
    patch,
    read_image,
)

from kalos_ctx import _control
from kalos_ctx.errors import StoreCorrupt
from kalos_ctx.store import SessionStore


@pytest.fixture
def path(tmp_path):
    """Return a small store."""
    make_small(tmp_path / "s")
    return tmp_path / "s"


def states(path):
    raw = (path / "control").read_bytes()
    return [raw[at : at + STATE_BYTES] for at in STATES]


def versions(path):
    return [struct.unpack_from("<Q", state)[0] for state in states(path)]


def test_control_file_is_4096_bytes_and_says_what_was_chosen(tmp_path):
    with SessionStore.open(
        tmp_path / "s", vector_dim=8, metric="ip", vector_dtype="float16", vocab_size=99
    ) as store:
        config = store._core.control.config
    assert (tmp_path / "s/control").stat().st_size == 4096
    assert config["vector_dim"] == 8
    assert config["metric"] == "ip"
    assert config["vector_dtype"] == "float16"
    assert config["vocab_size"] == 99
    assert config["format"] == "1.0"


def test_both_copies_of_the_state_hold_and_are_written_in_turn(path):
    for _ in range(3):
        before = versions(path)
        SessionStore.open(path).close()
        after = versions(path)
        assert all(a > b for a, b in zip(after, before, strict=True))
        assert abs(after[0] - after[1]) == 1
        for state in states(path):
            assert struct.unpack("<I", state[-4:])[0] == crc32c(state[:-4])


@pytest.mark.parametrize("which", range(5))
def test_damaged_word_is_noticed_by_a_reader(path, which):
    at = WORDS_AT + 8 * which
    raw = (path / "control").read_bytes()
    patch(path / "control", at, bytes([raw[at] ^ 2]))
    if which in (1, 4):
        with pytest.raises(StoreCorrupt, match=f"control at byte {at}"):
            SessionStore.open(path, "r")
        return
    # The others are read only when they are needed.
    with SessionStore.open(path, "r") as store:
        assert len(store.turns("s0")) == 4
        if which == 0:
            with pytest.raises(StoreCorrupt, match=f"byte {at}"):
                assert store._core.committed


def test_control_file_made_aside_is_no_store(tmp_path):
    """A crash before the rename leaves a folder that is still free."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s/control.new").write_bytes(b"half")
    with SessionStore.open(tmp_path / "s") as store:
        store.append("a", "user", token_ids=[1])
    assert sorted(read_image(tmp_path / "s"))[0] == "control"
    assert not (tmp_path / "s/control.new").exists()


def test_boot_id_is_that_of_the_kernel():
    boot = _control.boot_id()
    assert len(boot) == 16
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        assert boot.hex() == file.read().strip().replace("-", "")


def test_unknown_boot_after_a_kill_is_treated_as_another(path, monkeypatch):
    checked_child(
        "import os, sys\nfrom kalos_ctx.store import SessionStore\n"
        "SessionStore.open(sys.argv[1]).append('s0', 'user', token_ids=[1])\nos._exit(0)",
        path,
    )
    monkeypatch.setattr(_control, "boot_id", lambda: bytes(16))
    with SessionStore.open(path) as store:
        assert store.recovery["rebuilt"]
        assert store.count("s0") == 5
