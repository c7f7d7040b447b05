"""The store and damaged files (FAULTS 11, 12, 14-18, 29-32, 52)."""

import hashlib
import json
import os
import random
import shutil
import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.faults import checked_child, compile_shim, environment, run_child
from helpers.store_images import (
    BOOT_ID_AT,
    FORMAT_AT,
    STATES,
    answers,
    make_small,
    patch,
    patch_header,
    read_image,
    write_image,
    wrong_answers,
)

from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import (
    FormatVersionError,
    KalosError,
    NotAStore,
    StoreCorrupt,
    StoreIOError,
    StoreNotFound,
)
from kalos_ctx.store import SessionStore


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """Return the compiled shim between a process and the system."""
    return compile_shim(tmp_path_factory.mktemp("shim"))


GEN = "gen-000000"
GOLDEN = Path(__file__).parent / "golden"
EXHAUSTIVE = bool(os.environ.get("KALOS_EXHAUSTIVE"))


@pytest.fixture
def small(tmp_path):
    """Return (path, right answers) of a small store of every kind of record, closed."""
    path = tmp_path / "s"
    make_small(path)
    with SessionStore.open(path, "r") as store:
        return path, answers(store)


# ---- 11: the index ------------------------------------------------------------------------------


def spoil_missing(path):
    (path / GEN / "index").unlink()


def spoil_rows_missing(path):
    (path / GEN / "rows").unlink()
    (path / GEN / "dead").unlink()


def spoil_header(path):
    patch(path / GEN / "index", 20, b"\xff")


def spoil_cut(path):
    os.truncate(path / GEN / "index", 8192)


def spoil_rows_cut(path):
    os.truncate(path / GEN / "rows", 10)


def spoil_empty(path):
    os.truncate(path / GEN / "index", 0)


def spoil_other(path):
    other = path.parent / "other"
    make_small(other)
    for name in ("index", "rows", "dead"):
        shutil.copy(other / GEN / name, path / GEN / name)


def spoil_stale(path):
    stale = {name: (path / GEN / name).read_bytes() for name in ("index", "rows", "dead")}
    with SessionStore.open(path) as store:
        store.append("tmp", "user", token_ids=[1])
        store.delete("tmp")
    for name, raw in stale.items():
        (path / GEN / name).unlink()
        (path / GEN / name).write_bytes(raw)


@pytest.mark.parametrize(
    "spoil",
    [spoil_missing, spoil_rows_missing, spoil_header, spoil_cut, spoil_rows_cut, spoil_empty,
     spoil_other, spoil_stale],
)  # fmt: skip
def test_fault_11_index_that_is_not_right_is_built_again_and_counted(small, spoil):
    path, right = small
    spoil(path)
    with pytest.raises((StoreCorrupt, StoreIOError)):
        SessionStore.open(path, "r")
    with SessionStore.open(path) as store:
        assert store.recovery["rebuilt"]
        assert store.recovery["replayed"] > 20
        assert answers(store) == right
    with SessionStore.open(path) as store:
        assert not store.recovery["rebuilt"]
        assert answers(store) == right


@pytest.mark.parametrize(
    ("name", "ask"),
    [("index", lambda s: s.turns("s0")), ("rows", lambda s: s.passages("docs", [1]))],
)
def test_fault_11_damage_met_by_a_writer_makes_the_next_opening_build_the_index_anew(
    small, name, ask
):
    path, right = small
    file = path / GEN / name
    raw = file.read_bytes()
    start = 4096 if name == "index" else 0
    # All that is there from `start` on: the first read of anything meets it.
    patch(file, start, bytes(b ^ 0x10 for b in raw[start:]))
    with SessionStore.open(path) as store:
        assert not store.recovery["rebuilt"]
        with pytest.raises(StoreCorrupt, match=f"{GEN}/{name}"):
            ask(store)
    with SessionStore.open(path) as store:
        assert store.recovery["rebuilt"]
        assert answers(store) == right


def test_fault_11_index_is_built_beside_the_one_that_readers_have_open(small):
    path, _ = small
    with SessionStore.open(path, "r") as reader:
        patch(path / GEN / "index", 20, b"\xff")
        with SessionStore.open(path) as writer:
            assert writer.recovery["rebuilt"]
            writer.append("s0", "user", token_ids=[99])
            assert reader.turns("s0")[-1].token_ids.tolist() == [99]
            assert wrong_answers(answers(reader), answers(writer)) == []


# ---- 12: a flip at every byte -------------------------------------------------------------------


def all_flips(image):
    """Every byte of every file, each with one bit; of long runs of zeros a sample."""
    flips = []
    for name, raw in image.items():
        if name == "lock":
            continue
        for offset, byte in enumerate(raw):
            plain = byte == 0 and not any(raw[max(0, offset - 64) : offset + 64])
            if not plain or offset % 997 == 0:
                flips.append([name, offset, (offset * 5 + offset // 8) % 8])
    return flips


@pytest.mark.parametrize("mode", ["r", "a"])
def test_fault_12_flipped_bit_gives_an_error_or_the_right_answer(tmp_path, mode):
    """Files of every kind; in processes of their own, so that a crash is seen."""
    fast = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    folder = fast / f"kalos-flips-{os.getpid()}-{mode}"
    folder.mkdir()
    try:
        make_small(folder / "store")
        image = read_image(folder / "store")
        flips = all_flips(image)
        assert {name.split("/")[-1][:5] for name, _, _ in flips} >= {
            "contr", "log-0", "tok-0", "vec-0", "index", "rows", "dead",
        }  # fmt: skip
        if not EXHAUSTIVE:
            flips = random.Random(12).sample(flips, 6000 if mode == "r" else 3000)
        (folder / "flips.json").write_text(json.dumps(flips))
        child = Path(__file__).parent / "helpers" / "flip_child.py"
        code = f"import runpy\nrunpy.run_path({str(child)!r}, run_name='__main__')"
        done = run_child(code, folder, folder / "flips.json", mode, timeout=7200)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 0, (lines[-1:], done.stderr[-1000:])
        assert len(lines) == len(flips)
        assert [line for line in lines if line[3]] == []
    finally:
        shutil.rmtree(folder)


def test_fault_12_zeros_behind_any_file_are_harmless(small):
    path, right = small
    for name in read_image(path):
        if name != "lock":
            with open(path / name, "ab") as file:
                file.write(bytes(4096))
    with SessionStore.open(path, "r") as reader:
        assert answers(reader) == right
    with SessionStore.open(path) as store:
        assert answers(store) == right
        assert store.recovery["flaw"] is None


def test_damaged_words_of_the_control_file_are_made_anew_by_a_writer(small):
    path, right = small
    patch(path / "control", 2048, b"\xff" * 40)
    with pytest.raises(StoreCorrupt, match="control"):
        SessionStore.open(path, "r")
    with SessionStore.open(path) as store:
        assert answers(store) == right
        store.delete("s2")
    with SessionStore.open(path, "r") as reader:
        assert reader.count("s2") == 0


def test_flipped_dead_bit_neither_hides_nor_resurrects_a_passage(small):
    path, _ = small
    query = [1.0, 2.0, 3.0, 4.5]

    def hits(mode):
        with SessionStore.open(path, mode) as store, ContextAssembler(store, device="cpu") as a:
            return a.recall(query, top_k=9, collections=["docs"]).ids.tolist()

    right = hits("r")
    raw = (path / GEN / "dead").read_bytes()
    for byte, bit in ((b, k) for b in range(3) for k in range(8)):
        patch(path / GEN / "dead", byte, bytes([raw[byte] ^ 1 << bit]))
        with suppress(StoreCorrupt):
            assert hits("r") == right
        patch(path / GEN / "dead", byte, raw[byte : byte + 1])
    assert hits("r") == right


# ---- 14, 15, 17, 18: what the control file says -------------------------------------------------


def digest(path):
    seal = hashlib.sha256()
    for name, raw in read_image(path).items():
        if name != "lock":
            seal.update(name.encode() + raw)
    return seal.hexdigest()


@pytest.mark.parametrize("mode", ["a", "r"])
@pytest.mark.parametrize("magic", [b"SQLite f", bytes(8), b"KALOSCTY"])
def test_fault_14_wrong_magic_is_no_store_and_is_not_touched(small, mode, magic):
    path, _ = small
    patch(path / "control", 0, magic)
    before = digest(path)
    with pytest.raises(NotAStore):
        SessionStore.open(path, mode)
    assert digest(path) == before


def test_fault_15_newer_major_is_refused(small):
    path, _ = small
    patch_header(path, FORMAT_AT, struct.pack("<I", 2 << 16))
    before = digest(path)
    for mode in ("a", "r"):
        with pytest.raises(FormatVersionError, match=r"2\.0"):
            SessionStore.open(path, mode)
    assert digest(path) == before


def test_fault_15_newer_minor_is_read_only(small):
    path, right = small
    patch_header(path, FORMAT_AT, struct.pack("<I", 1 << 16 | 7))
    before = digest(path)
    with pytest.raises(FormatVersionError, match=r"1\.7"):
        SessionStore.open(path)
    with SessionStore.open(path, "r") as store:
        assert answers(store) == right
    assert digest(path) == before


@pytest.mark.parametrize("version", ["v1"])
def test_fault_16_store_of_every_released_format_reads_the_same(tmp_path, version):
    expected = json.loads((GOLDEN / version / "expected.json").read_text())
    shutil.copytree(GOLDEN / version / "store", tmp_path / "s")
    for mode in ("r", "a", "a"):
        with SessionStore.open(tmp_path / "s", mode) as store:
            assert json.loads(json.dumps(answers(store))) == expected
            assert store.verify().errors == []
    with SessionStore.open(tmp_path / "s") as store:
        assert store.append("s0", "user", token_ids=[1]) == 4


def test_fault_16_golden_stores_are_those_of_the_released_formats():
    assert sorted(p.name for p in GOLDEN.glob("v*") if p.is_dir()) == ["v1"]


def test_fault_52_two_versions_on_one_host_agree_or_refuse(tmp_path):
    """A newer minor version's store is read and not written, this version's is both."""
    shutil.copytree(GOLDEN / "v1" / "store", tmp_path / "old")
    make_small(tmp_path / "new")
    patch_header(tmp_path / "new", FORMAT_AT, struct.pack("<I", 1 << 16 | 1))
    with (
        SessionStore.open(tmp_path / "new", "r") as newer,
        SessionStore.open(tmp_path / "old") as older,
    ):
        assert [t.seq for t in newer.turns("s0")] == [t.seq for t in older.turns("s0")]
    with pytest.raises(FormatVersionError):
        SessionStore.open(tmp_path / "new")
    with SessionStore.open(tmp_path / "old") as older:
        assert older.count("s0") == 4


def test_fault_17_other_byte_order_is_refused(small):
    path, _ = small
    patch_header(path, 8, struct.pack(">I", 0x01020304))
    for mode in ("a", "r"):
        with pytest.raises(FormatVersionError, match="byte order"):
            SessionStore.open(path, mode)


@pytest.mark.parametrize("mode", ["a", "r"])
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 128, 4095])
def test_fault_18_short_control_file_is_a_clear_error(small, nbytes, mode):
    path, _ = small
    os.truncate(path / "control", nbytes)
    before = digest(path)
    with pytest.raises(NotAStore if nbytes < 8 else StoreCorrupt, match="control"):
        SessionStore.open(path, mode)
    assert digest(path) == before


@pytest.mark.parametrize("nbytes", [0, 1, 64])
@pytest.mark.parametrize("name", ["log-000000", "tok-000000", "vec-000000"])
def test_fault_18_short_segment_gives_errors_or_what_is_left(small, name, nbytes):
    path, right = small
    os.truncate(path / GEN / name, nbytes)
    with SessionStore.open(path, "r") as reader:
        assert wrong_answers(answers(reader), right) == []
    with SessionStore.open(path) as store:
        if name.startswith("log"):
            assert store.recovery["flaw"] == "cut"
            assert store.sessions().items == []
        else:
            found = answers(store)
            assert wrong_answers(found, right) == []
            assert any(isinstance(value, StoreCorrupt) for value in found.values())
        store.append("fresh", "user", token_ids=[1])
        assert store.count("fresh") == 1


def test_fault_18_empty_folder_is_an_empty_store(tmp_path):
    (tmp_path / "s").mkdir()
    with pytest.raises(StoreNotFound):
        SessionStore.open(tmp_path / "s", "r")
    with SessionStore.open(tmp_path / "s") as store:
        assert store.sessions().items == []


def test_missing_generation_is_a_typed_error(small):
    path, _ = small
    shutil.rmtree(path / GEN)
    for mode in ("a", "r"):
        with pytest.raises(KalosError, match=GEN):
            SessionStore.open(path, mode)


def test_older_copy_of_the_state_serves_where_the_newer_is_damaged(small):
    path, right = small
    raw = (path / "control").read_bytes()
    newer = max(STATES, key=lambda at: struct.unpack_from("<Q", raw, at)[0])
    patch(path / "control", newer + BOOT_ID_AT, b"\xff\xff")
    with SessionStore.open(path) as store:
        assert answers(store) == right
    for at in STATES:
        patch(path / "control", at + BOOT_ID_AT, b"\xff\xff")
    with pytest.raises(StoreCorrupt, match="no copy of the state holds"):
        SessionStore.open(path)


# ---- 29-32: files that change under an open store -----------------------------------------------

EIO = """
import os, sys
from kalos_ctx.errors import KalosError
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1], "r")
entry = store.turns("s1", 0, 1)
with open(sys.argv[1] + "/gen-000000/tok-000000", "r+b") as file:
    file.seek(0)
    file.write(bytes(64))       # what a mapping shows where the device cannot read: zeros
open(sys.argv[2], "w").close()
try:
    store.turns("s0")
except KalosError as error:
    print(type(error).__name__, error.errno)
print(len(store.turns("s1")))
"""


def test_fault_29_read_error_concerns_its_session_alone(small, shim, tmp_path):
    path, _ = small
    out = checked_child(
        EIO, path, tmp_path / "arm", LD_PRELOAD=shim, KALOS_FAULT=5, KALOS_OPS="pread",
        KALOS_FILE="tok-", KALOS_ARM=tmp_path / "arm",
    )  # fmt: skip
    assert out.split() == ["StoreIOError", "5", "4"]


@pytest.mark.parametrize("name", ["tok-000000", "log-000000", "index", "vec-000000", "rows"])
def test_fault_30_file_cut_under_a_reader_is_an_error_and_no_crash(small, name):
    path, right = small
    code = (
        "import os, sys, json\nfrom kalos_ctx.store import SessionStore\n"
        "from helpers.store_images import answers, wrong_answers\n"
        "s = SessionStore.open(sys.argv[1], 'r')\nright = answers(s)\n"
        "os.truncate(sys.argv[1] + '/gen-000000/' + sys.argv[2], 64)\n"
        "found = answers(s)\n"
        "errors = sum(isinstance(v, Exception) for v in found.values())\n"
        "print(wrong_answers(found, right), errors)"
    )
    wrong, errors = checked_child(code, path, name).rsplit(" ", 1)
    assert wrong == "[]"
    assert int(errors) > 0
    assert right


@pytest.mark.parametrize("name", ["tok-000000", "log-000000", "index", "vec-000000", "rows"])
def test_fault_31_hole_punched_into_a_file_is_found_by_its_checksum(small, name):
    path, right = small
    image = read_image(path)
    raw = image[f"{GEN}/{name}"]
    with SessionStore.open(path, "r") as reader:
        for at in range(0, len(raw), 4096):
            patch(path / GEN / name, at, bytes(len(raw[at : at + 4096])))
            assert wrong_answers(answers(reader), right) == []
            # Pages of the index may hold only what was moved to another place since.
            if any(raw[at : at + 4096]) and name != "index":
                assert answers(reader) != right
            patch(path / GEN / name, at, raw[at : at + 4096])
        assert answers(reader) == right
    for at in range(0, len(raw), 4096):
        patch(path / GEN / name, at, bytes(len(raw[at : at + 4096])))
        try:
            with SessionStore.open(path) as store:
                assert wrong_answers(answers(store), right) == []
        except StoreCorrupt:
            pass
        write_image(path, image)


def test_fault_32_segment_replaced_while_open_serves_the_old_file_then_an_error(small):
    path, right = small
    token_file = path / GEN / "tok-000000"
    with SessionStore.open(path, "r") as reader:
        assert answers(reader) == right
        os.rename(token_file, token_file.with_name("tok-moved"))
        assert answers(reader) == right
        token_file.write_bytes(bytes(100))
        assert answers(reader) == right
    with SessionStore.open(path, "r") as reader:
        found = answers(reader)
        assert isinstance(found["turns s0"], StoreCorrupt)
        assert wrong_answers(found, right) == []
    token_file.unlink()
    with SessionStore.open(path, "r") as reader, pytest.raises(StoreIOError, match="tok-000000"):
        reader.turns("s0")


def test_flip_child_is_run_by_this_interpreter():
    assert run_child("import helpers.flip_child", timeout=60).returncode == 0
    assert environment()["PYTHONPATH"]
    assert sys.executable
