"""The log: its records in order, and why the walk over them ends."""

import os
from itertools import pairwise

import pytest
from helpers.store_images import make_small, patch

from kalos_ctx.store import SessionStore

FIRST = 64
LOG = "gen-000000/log-000000"


@pytest.fixture
def path(tmp_path):
    """Return a small store."""
    make_small(tmp_path / "s")
    return tmp_path / "s"


def walk(path, start=FIRST):
    """Return [(lsn, size, flaw)] of a log, read without an opening that would repair it."""
    with SessionStore.open(path, "r") as store:
        return [(lsn, size, flaw) for lsn, size, _, flaw in store._core.log.scan(start)]


def test_scan_yields_every_record_back_to_back_and_then_the_end(path):
    found = walk(path)
    assert found[-1][2] == "end"
    for (lsn, size, flaw), (following, _, _) in pairwise(found):
        assert flaw is None
        assert size % 64 == 0
        assert following == lsn + size
    assert walk(path, found[3][0]) == found[3:]


def test_batches_end_with_a_record_without_more(path):
    with SessionStore.open(path) as store:
        start = store._core.log.end
        store.extend("new", [{"role": "user", "token_ids": [i]} for i in range(3)])
        flags = [more for _, _, more, flaw in store._core.log.scan(start) if flaw is None]
    assert flags == [True, True, True, False]  # the session, then its turns


@pytest.mark.parametrize(
    ("at", "flaw"), [(0, "damage"), (8, "damage"), (40, "damage"), (70, "damage"), (383, "damage")]
)
def test_scan_ends_at_a_record_that_does_not_hold(path, at, flaw):
    lsn = walk(path)[2][0]
    raw = (path / LOG).read_bytes()
    patch(path / LOG, lsn + at, bytes([raw[lsn + at] ^ 4]))
    assert walk(path)[-1][::2] == (lsn, flaw)


@pytest.mark.parametrize(
    ("keep", "flaw"), [(0, "end"), (1, "cut"), (63, "cut"), (64, "cut"), (100, "cut")]
)
def test_scan_ends_where_the_file_does(path, keep, flaw):
    lsn = walk(path)[-2][0]
    os.truncate(path / LOG, lsn + keep)
    assert walk(path)[-1][::2] == (lsn, flaw)


def test_header_of_a_segment_is_checked(path):
    with SessionStore.open(path, "r") as store:
        assert store._core.log.check_header(0) == 0
        patch(path / LOG, 48, b"\1")
        assert store._core.log.check_header(0) is None


def test_synced_mark_stands_only_where_all_before_was_durable(tmp_path):
    with SessionStore.open(tmp_path / "process") as store:
        start = store._core.log.end
        store.append("a", "user", token_ids=[1])
        second = store._core.log.end
        store.append("a", "user", token_ids=[2])
        assert store._core.log.any_synced_behind(start - 64)
        assert not store._core.log.any_synced_behind(second - 64)
        store.sync()
        store.append("a", "user", token_ids=[3])
        assert store._core.log.any_synced_behind(second)
    with SessionStore.open(tmp_path / "each", durability="each") as store:
        for i in range(3):
            end = store._core.log.end
            store.append("a", "user", token_ids=[i])
            assert store._core.log.any_synced_behind(end - 64)


def test_next_segment_begins_where_a_record_no_longer_fits(tmp_path):
    with SessionStore.open(tmp_path / "s", segment_bytes=65536) as store:
        for i in range(100):
            store.append("a", "user", token_ids=[i], metadata={"pad": "x" * 2000})
        # A record that is longer than a segment gets one of its own.
        store.append("a", "user", token_ids=[7], metadata={"pad": "y" * 100_000})
        store.append("a", "user", token_ids=[8])
        found = [lsn for lsn, _, _, flaw in store._core.log.scan(FIRST) if flaw is None]
        assert store.turns("a", 100, 101)[0].metadata == {"pad": "y" * 100_000}
    assert len({lsn >> 32 for lsn in found}) >= 5
    sizes = [p.stat().st_size for p in sorted((tmp_path / "s/gen-000000").glob("log-*"))]
    assert set(sizes[:-2]) == {65536}
    assert max(sizes) > 100_000
