"""Segmented files: names, sizes, sealing, and taking a failed write back."""

import os

import pytest

from kalos_ctx._segment import MappedFile, SegmentSet
from kalos_ctx.errors import StoreCorrupt, StoreIOError


@pytest.fixture
def folder(tmp_path):
    """Return a descriptor of an empty folder."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_segments_are_named_by_number_and_known_from_the_folder(folder, tmp_path):
    files = SegmentSet(folder, "gen-000000", "tok", 65536, True)
    assert files.name(7) == "tok-000007"
    assert files.label(7) == "gen-000000/tok-000007"
    assert files.present() == []
    assert files.last_present() == -1
    for name in ("tok-000002", "tok-000000", "tok-x", "log-000001", "tok-000001.new"):
        (tmp_path / name).touch()
    assert files.present() == [0, 2]
    assert files.last_present() == 2


def test_zero_until_makes_the_file_longer_and_never_shorter(folder, tmp_path):
    files = SegmentSet(folder, "g", "tok", 65536, True)
    for stop in (1, 100, 300_000, 10):
        files.zero_until(0, stop)
    raw = (tmp_path / "tok-000000").read_bytes()
    assert raw == bytes(300_000)
    assert files.size_of(0) == 300_000


def test_zero_range_stays_inside_the_file(folder, tmp_path):
    (tmp_path / "tok-000000").write_bytes(b"x" * 1000)
    files = SegmentSet(folder, "g", "tok", 65536, True)
    files.zero_range(0, 100, 200)
    assert (tmp_path / "tok-000000").read_bytes() == b"x" * 100 + bytes(100) + b"x" * 800
    files.zero_range(0, 900, 5000)
    assert (tmp_path / "tok-000000").read_bytes() == b"x" * 100 + bytes(100) + b"x" * 700 + bytes(
        100
    )


def test_take_back_leaves_zeros_where_a_failed_write_was_and_the_old_end(folder, tmp_path):
    path = tmp_path / "log-000000"
    path.write_bytes(b"a" * 500)
    files = SegmentSet(folder, "g", "log", 65536, True)
    assert files.size_of(0) == 500
    with open(path, "r+b") as file:
        file.seek(400)
        file.write(b"b" * 1000)
    files.take_back(0, 400, 1400)
    assert path.read_bytes() == b"a" * 400 + bytes(100)


def test_missing_segment_and_one_that_is_no_file_are_typed_errors(folder, tmp_path):
    files = SegmentSet(folder, "g", "tok", 65536, False)
    with pytest.raises(StoreIOError, match="g/tok-000000"):
        files.size_of(0)
    os.mkfifo(tmp_path / "tok-000001")
    with pytest.raises(StoreCorrupt, match="not a regular file"):
        files.size_of(1)
    os.symlink("/etc/passwd", tmp_path / "tok-000002")
    with pytest.raises(StoreIOError):
        files.size_of(2)


def test_mapped_file_tells_a_copy_from_the_original(folder, tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").write_bytes(b"x")
    a, b = (MappedFile.open_file(folder, name) for name in "ab")
    assert a.identity() != b.identity()
    os.rename(tmp_path / "a", tmp_path / "c")
    assert MappedFile.open_file(folder, "c").identity() == a.identity()
    for file in (a, b):
        file.close()
        file.close()
