"""The index: what it is trusted for, and what is noticed in it."""

import struct

import pytest
from helpers.store_images import answers, make_small, patch

from kalos_ctx.errors import StoreCorrupt
from kalos_ctx.store import SessionStore

INDEX = "gen-000000/index"
# Places in the header (cuda/kalos_layout.h).
EPOCH, ROOTS_VERSION, NUM_SLOTS, APPLIED, SUSPECT = 56, 64, 72, 80, 88


@pytest.fixture
def path(tmp_path):
    """Return a small store."""
    make_small(tmp_path / "s")
    return tmp_path / "s"


def word(path, at):
    return struct.unpack_from("<Q", (path / INDEX).read_bytes(), at)[0]


def test_epoch_is_odd_while_a_writer_has_it_open_and_even_afterwards(path):
    before = word(path, EPOCH)
    assert before % 2 == 0
    with SessionStore.open(path):
        assert word(path, EPOCH) == before + 2 | 1
    assert word(path, EPOCH) == before + 2


@pytest.mark.parametrize("at", [ROOTS_VERSION, NUM_SLOTS])
@pytest.mark.parametrize("bit", [0, 1, 20, 47, 55, 63])
def test_flipped_word_of_the_header_is_noticed(path, at, bit):
    patch(path / INDEX, at, struct.pack("<Q", word(path, at) ^ 1 << bit))
    with SessionStore.open(path, "r") as store, pytest.raises(StoreCorrupt, match=INDEX):
        assert [store.sessions(), store.turns("s0")]


def test_older_image_of_a_slot_is_not_brought_back_by_a_flipped_version(path):
    """image[version & 1]: without a check one bit would undo the last turn."""
    with SessionStore.open(path) as store:
        slot = store._core.slot_state(1, b"", b"s0")["slot_off"]
    raw = word(path, slot)
    patch(path / INDEX, slot, struct.pack("<Q", raw ^ 1))
    with SessionStore.open(path, "r") as store:
        with pytest.raises(StoreCorrupt, match="version does not hold"):
            store.turns("s0")
        assert len(store.turns("s1")) == 4


def test_suspect_index_is_built_again_once(path):
    with SessionStore.open(path, "r") as store:
        right = answers(store)
    patch(path / INDEX, SUSPECT, b"\1")
    with SessionStore.open(path) as store:
        assert store.recovery["rebuilt"]
        assert answers(store) == right
    with SessionStore.open(path) as store:
        assert not store.recovery["rebuilt"]


def test_tables_with_a_damaged_bucket_are_not_moved(tmp_path):
    """A bucket with a flipped hash would land where nobody looks for it."""
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        for i in range(150):
            store.append(f"s{i}", "user", token_ids=[i])
    table = 4096
    raw = (path / INDEX).read_bytes()
    used = next(at for at in range(table, table + 4096, 16) if raw[at : at + 8] != bytes(8))
    patch(path / INDEX, used, bytes([raw[used] ^ 1]))
    with SessionStore.open(path) as store:
        with pytest.raises(StoreCorrupt, match="bucket"):
            assert [store.append(f"s{i}", "user", token_ids=[i]) for i in range(150, 400)]
        made = len(store.sessions(limit=1000).items)
    with SessionStore.open(path) as store:
        assert store.recovery["rebuilt"]
        assert all(store.count(f"s{i}") == 1 for i in range(made))
        assert len(store.sessions(limit=1000).items) == made


def test_empty_bucket_is_not_zero(path):
    raw = (path / INDEX).read_bytes()
    words = struct.unpack("<512Q", raw[4096 : 4096 + 4096])
    assert set(words[0::2]) >= {0}
    assert 0 not in words[1::2]
    assert 1 in words[1::2]
