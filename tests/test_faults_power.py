"""The store and power losses: unsynced sectors, stale bytes (FAULTS 3, 4, 5, 7, 9)."""

import os
import random
import shutil

import pytest
from helpers.appender import APPENDER, acknowledged, found_calls
from helpers.faults import checked_child, compile_shim
from helpers.store_images import (
    answers,
    make_small,
    patch,
    read_image,
    set_boot_id,
    write_image,
    wrong_answers,
)

from kalos_ctx import _control
from kalos_ctx.errors import StoreCorrupt
from kalos_ctx.store import SessionStore

LOSSES = int(os.environ.get("KALOS_LOSSES", "60"))


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """Return the compiled shim between a process and the system."""
    return compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def other_boot(monkeypatch):
    """Return a function after which the machine has another boot ID."""

    def reboot():
        boot = os.urandom(16)
        monkeypatch.setattr(_control, "boot_id", lambda: boot)

    return reboot


# ---- 3, 4, 5, 9: power losses -------------------------------------------------------------------

SECTOR = 512


class PowerLoss:
    """What the disk may hold: what was synced, and any of the sectors written since."""

    def __init__(self, tmp_path, shim, durability):
        self.path = tmp_path / "s"
        self.ack = tmp_path / "ack"
        self.durable = tmp_path / "durable"
        SessionStore.open(self.path, durability=durability, segment_bytes=65536).close()
        shutil.copytree(self.path, self.durable)
        checked_child(
            APPENDER, self.path, durability, 0, 150, self.ack,
            LD_PRELOAD=shim, KALOS_DURABLE=self.durable,
        )  # fmt: skip
        self.live = read_image(self.path)
        self.synced = read_image(self.durable)
        names = self.synced.pop("names-gen-000000", b"").decode().split()
        self.listed = {f"gen-000000/{name}" for name in names} | {"control", "lock"}

    def leave(self, draw, torn=False):
        """Write one image that the loss could have left, in place."""
        image = {}
        share = draw.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        for name, new in self.live.items():
            old = self.synced.get(name)
            if name not in self.listed and old is None and draw.random() < 0.5:
                continue
            image[name] = mixed(old or b"", new, draw, share, torn)
        write_image(self.path, image)


def mixed(old: bytes, new: bytes, draw, share: float, torn: bool) -> bytes:
    """Sectors of two ages; with `torn`, one of them half old, half new or garbage."""
    size = draw.choice([len(old), len(new), draw.randint(min(len(old), len(new)), len(new))])
    size = max(size, len(old))
    out = bytearray(old.ljust(size, b"\0"))
    changed = [
        at
        for at in range(0, size, SECTOR)
        if out[at : at + SECTOR] != new[at : at + SECTOR][: size - at]
    ]
    for at in changed:
        if draw.random() < share:
            out[at : at + SECTOR] = new[at : at + SECTOR][: size - at]
    if torn and changed:
        at = draw.choice(changed)
        middle = draw.randrange(1, SECTOR)
        rest = draw.choice([old, new, draw.randbytes(len(new))]).ljust(size, b"\0")
        half = new[at : at + SECTOR][:middle] + rest[at + middle : at + SECTOR]
        out[at : at + SECTOR] = half[: size - at]
    return bytes(out)


@pytest.mark.parametrize("durability", ["process", "group", "each"])
@pytest.mark.parametrize("torn", [False, True], ids=["fault_03_and_04", "fault_05"])
def test_fault_03_04_05_power_loss_leaves_a_prefix_with_all_that_was_promised(
    tmp_path,
    shim,
    other_boot,
    durability,
    torn,
):
    """Any subset of the unsynced sectors, in any order; `torn`: a sector of two ages or garbage."""
    loss = PowerLoss(tmp_path, shim, durability)
    promised = 0 if durability == "process" else acknowledged(loss.ack)
    draw = random.Random(torn)
    for _ in range(LOSSES):
        loss.leave(draw, torn)
        other_boot()
        with SessionStore.open(loss.path, durability=durability) as store:
            n = found_calls(store, 150)
            assert n >= promised
            store.append("new", "user", token_ids=[7])
        with SessionStore.open(loss.path) as store:
            assert store.recovery["flaw"] is None
            assert found_calls(store, 150) == n
            assert [t.token_ids.tolist() for t in store.turns("new")] == [[7]]
            assert store.verify().errors == []


def test_fault_09_lost_folder_entries_of_a_roll_lose_no_segment(tmp_path, shim, other_boot):
    """Segments whose creation was not synced are gone, older and newer ones alike."""
    loss = PowerLoss(tmp_path, shim, "process")
    segments = sorted(name for name in loss.live if "/log-" in name)
    assert len(segments) >= 3
    for gone in (segments[-1:], segments[1:2], segments[1:]):
        write_image(loss.path, {k: v for k, v in loss.live.items() if k not in gone})
        other_boot()
        with SessionStore.open(loss.path) as store:
            n = found_calls(store, 150)
            for i in range(200):
                store.append("new", "user", token_ids=[i], metadata={"pad": "y" * 400})
        with SessionStore.open(loss.path) as store:
            assert found_calls(store, 150) == n
            assert [t.token_ids[0] for t in store.turns("new")] == list(range(200))


def test_reader_after_a_power_loss_does_not_trust_the_index(tmp_path, other_boot):
    checked_child(APPENDER, tmp_path / "s", "process", 0, 20, tmp_path / "ack")
    other_boot()
    with pytest.raises(StoreCorrupt, match="open the store for writing once"):
        SessionStore.open(tmp_path / "s", "r")
    with SessionStore.open(tmp_path / "s") as store:
        assert found_calls(store, 20) == 20
        with SessionStore.open(tmp_path / "s", "r") as reader:
            assert found_calls(reader, 20) == 20


def test_index_pages_newer_than_the_log_are_forgotten(tmp_path, other_boot):
    """The index on the disk may know turns that the log lost."""
    path = tmp_path / "s"
    make_small(path)
    older = read_image(path)
    with SessionStore.open(path) as store:
        right = answers(store)
        for i in range(30):
            store.append("s0", "user", token_ids=[i])
            store.append(f"lost{i}", "user", token_ids=[i])
        image = read_image(path)
    for name in ("log-000000", "tok-000000"):
        image[f"gen-000000/{name}"] = older[f"gen-000000/{name}"]
    write_image(path, image)
    other_boot()
    with SessionStore.open(path) as store:
        assert wrong_answers(answers(store), right) == []
        assert answers(store)["turns s0"] == right["turns s0"]
        assert store.count("lost3") == 0
        assert store.append("lost3", "user", token_ids=[1]) == 0


# ---- 7: stale bytes -----------------------------------------------------------------------------


def test_fault_07_valid_records_of_an_older_segment_behind_the_end_are_rejected(tmp_path):
    path = tmp_path / "s"
    make_small(path)
    raw = (path / "gen-000000/log-000000").read_bytes()
    with SessionStore.open(path) as store:
        end = store._core.log.end
        right = answers(store)
    # The same bytes at another place, and records of another store at their own place.
    make_small(tmp_path / "other")
    strange = (tmp_path / "other/gen-000000/log-000000").read_bytes()
    for stale in (raw[64:4096], strange[end : end + 4096] or strange[64:4096]):
        patch(path / "gen-000000/log-000000", end, stale)
        with SessionStore.open(path) as store:
            assert store.recovery["dropped_bytes"] > 0
            assert answers(store) == right
            assert store._core.log.end == end
        with SessionStore.open(path) as store:
            assert store.recovery["dropped_bytes"] == 0


def test_fault_07_valid_batch_behind_a_hole_is_not_found_again(tmp_path, other_boot):
    """A batch left behind a hole must not follow what is written into the hole."""
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        start = store._core.log.end
        store.append("a", "user", token_ids=[1])
        first = store._core.log.end
        store.append("a", "user", token_ids=[2])
        store.append("a", "user", token_ids=[3])
        image = read_image(path)
    write_image(path, image)
    other_boot()
    patch(path / "gen-000000/log-000000", start, bytes(first - start))
    with SessionStore.open(path) as store:
        assert store.count("a") == 0
        store.append("a", "user", token_ids=[9])
        assert store._core.log.end == first
    with SessionStore.open(path) as store:
        (path / "gen-000000/index").unlink()
    with SessionStore.open(path) as store:
        assert [t.token_ids.tolist() for t in store.turns("a")] == [[9]]


def test_set_boot_id_makes_the_control_file_of_another_boot(tmp_path):
    """The helper and the store agree on the layout: the writer then builds the index anew."""
    checked_child(APPENDER, tmp_path / "s", "process", 0, 5, tmp_path / "ack")
    set_boot_id(tmp_path / "s", b"x" * 16)
    with SessionStore.open(tmp_path / "s") as store:
        assert store.recovery["rebuilt"]
        assert found_calls(store, 5) == 5
