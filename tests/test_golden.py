"""What released versions wrote: stores of every format, and the handshake of every protocol.

FORMAT.md lists the released formats. Each has a folder under `golden/`, `v1` for 1.0 and `v1.1` for
1.1, with a store and what could be read from it then; a missing one fails.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.store_images import answers, make_small, read_image

from kalos_ctx.sidecar import protocol
from kalos_ctx.store import SessionStore

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
FORMAT = (ROOT / "FORMAT.md").read_text(encoding="utf-8")
RELEASED = re.findall(r"^\| (\d+\.\d+) \| \d+\.\d+", FORMAT, re.MULTILINE)


def folder_of(version):
    return GOLDEN / f"v{version.removesuffix('.0')}"


def expected(version):
    return json.loads((folder_of(version) / "expected.json").read_text())


def found(store):
    """Return a store's answers as JSON gives them back."""
    return json.loads(json.dumps(answers(store)))


@pytest.fixture(params=RELEASED)
def version(request):
    return request.param


@pytest.fixture
def path(version, tmp_path):
    """Return a copy of the store that was written in the format."""
    shutil.copytree(folder_of(version) / "store", tmp_path / "s")
    return tmp_path / "s"


def test_golden_formats_are_those_of_the_format_page_and_no_other():
    folders = {one.name for one in GOLDEN.iterdir() if re.fullmatch(r"v[\d.]+", one.name)}
    assert len(RELEASED) == len(set(RELEASED)) > 0
    assert folders == {folder_of(version).name for version in RELEASED}
    for version in RELEASED:
        assert (folder_of(version) / "store" / "control").is_file()
        assert expected(version)


def test_golden_format_of_this_version_is_the_newest_on_the_format_page(tmp_path):
    make_small(tmp_path / "s")
    with SessionStore.open(tmp_path / "s", "r") as store:
        newest = store.stats()["format"]
    assert RELEASED[-1] == newest
    assert FORMAT.startswith(f"# Format of a store, version {newest}\n")


def test_golden_store_read_only_reads_the_same_and_is_not_touched(path, version):
    before = read_image(path)
    with SessionStore.open(path, "r") as store:
        assert found(store) == expected(version)
        assert store.stats()["format"] == version
        assert store.verify().ok
    assert read_image(path) == before


def test_golden_store_opened_for_writing_keeps_its_format(path, version):
    with SessionStore.open(path) as store:
        assert found(store) == expected(version)
        assert store.verify().ok
        count = store.count("s0")
        assert store.append("s0", "user", token_ids=[1]) == count
    with SessionStore.open(path) as store:
        assert store.count("s0") == count + 1
        assert store.stats()["format"] == version
        assert store.verify().ok


def test_golden_store_without_its_index_is_read_from_its_log(path, version):
    for name in ("index", "rows", "dead"):
        (path / "gen-000000" / name).unlink()
    with SessionStore.open(path) as store:
        assert store.recovery["rebuilt"]
        assert found(store) == expected(version)
        assert store.verify().ok


def test_golden_store_compacted_and_copied_reads_the_same(path, version, tmp_path):
    with SessionStore.open(path) as store:
        store.compact()
        assert found(store) == expected(version)
        store.snapshot(tmp_path / "copy")
    with SessionStore.open(tmp_path / "copy", "r") as store:
        assert found(store) == expected(version)
        assert store.stats()["format"] == version
        assert store.verify().ok


def test_golden_handshakes_are_there_for_every_minor_version():
    folders = {one.name for one in (GOLDEN / "channel").iterdir()}
    every = {f"v{protocol.MAJOR}.{minor}" for minor in range(protocol.MINOR + 1)}
    assert every - folders == set()
    for name in folders:
        files = {one.name for one in (GOLDEN / "channel" / name).iterdir()}
        assert files >= {"hello.bin", "welcome.bin", "count.bin"}
