"""Stores as images: filled with every kind of record, read back as values, patched by bytes."""

import struct
from pathlib import Path

import numpy as np

from kalos_ctx.errors import KalosError, StoreCorrupt
from kalos_ctx.store import SessionStore

# Places in the control file (cuda/kalos_layout.h).
HEADER_BYTES = 128
FORMAT_AT = 12
STATES = (512, 1024)
STATE_BYTES = 464
BOOT_ID_AT = 56
WORDS_AT = 2048


def crc32c(data: bytes) -> int:
    """CRC32C, bit by bit: independent of the compiled one."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def patch(path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file where they lie."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def patch_header(store, offset: int, data: bytes) -> None:
    """Change bytes of a store's header and make its checksum hold again."""
    control = Path(store) / "control"
    head = bytearray(control.read_bytes()[:HEADER_BYTES])
    head[offset : offset + len(data)] = data
    head[-4:] = struct.pack("<I", crc32c(bytes(head[:-4])))
    patch(control, 0, bytes(head))


def set_boot_id(store, boot: bytes) -> None:
    """Make the store look as if its writer had run on another boot of the machine."""
    control = Path(store) / "control"
    raw = control.read_bytes()
    for at in STATES:
        state = bytearray(raw[at : at + STATE_BYTES])
        state[BOOT_ID_AT : BOOT_ID_AT + 16] = boot
        state[-4:] = struct.pack("<I", crc32c(bytes(state[:-4])))
        patch(control, at, bytes(state))


def read_image(store) -> dict[str, bytes]:
    """Return all files of a store, by name."""
    root = Path(store)
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


def write_image(store, image: dict[str, bytes]) -> None:
    """Bring a store's files back to an image, in place: files that are there keep their inode."""
    root = Path(store)
    for found in list(root.rglob("*")):
        if found.is_file() and str(found.relative_to(root)) not in image:
            found.unlink()
    for name, data in image.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        if path.exists() and path.read_bytes() == data:
            continue
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.write(data)
            file.truncate()


def fill(store) -> None:
    """Write every kind of record."""
    for i in range(3):
        for j in range(4):
            store.append(
                f"s{i}",
                "assistant" if j % 2 else "user",
                token_ids=np.arange(10 * i + j, 10 * i + j + 20, dtype=np.int32),
                metadata={"i": i, "j": j},
                key=f"key{j}",
                group=j // 2,
                vector=[i + 1.0, j, 1, 2],
                created_at=1000.0 + j,
            )
    store.fork("s0", "f0", at=3)
    store.append("f0", "user", token_ids=[7, 8, 9])
    store.append("gone", "user", token_ids=[41, 42, 43])
    store.rollback("s1", 3)
    store.append("s1", "assistant", token_ids=[5])
    store.set_segment("s0", "system", token_ids=[1, 2, 3])
    store.set_segment(None, "everybody", token_ids=[4])
    store.summarize("s2", 0, 2, token_ids=[9, 9])
    store.add_passages(
        "docs",
        np.arange(24, dtype=np.float32).reshape(6, 4) + 1,
        texts=[f"passage {i}" for i in range(6)],
        token_ids=[[i, i + 1] for i in range(6)],
        metadata=[{"n": i} for i in range(6)],
    )
    store.delete_passages("docs", [2])
    store.delete("gone")
    store.append("other", "user", token_ids=[1], tenant="t2")


def make_small(path, **options) -> None:
    """Make a small store of every kind of record, closed in order."""
    with SessionStore.open(path, segment_bytes=65536, clock=lambda: 1.7e9, **options) as store:
        fill(store)


def turn_value(turn):
    """A turn as plain values."""
    return (
        turn.seq, turn.role, turn.token_ids.tolist(), turn.text, turn.group, turn.metadata,
        turn.created_at,
    )  # fmt: skip


def passage_value(passage):
    """A passage as plain values."""
    return (
        passage.id, passage.vector.tolist(), passage.text, passage.token_ids.tolist(),
        passage.metadata,
    )  # fmt: skip


QUESTIONS = {
    "sessions": lambda s: s.sessions().items,
    "tenants": lambda s: s.tenants(),
    **{
        f"turns {n}": lambda s, n=n: [turn_value(t) for t in s.turns(n)]
        for n in ("s0", "s1", "s2", "f0")
    },
    **{f"count {n}": lambda s, n=n: s.count(n) for n in ("s0", "s1", "f0", "gone")},
    "turns other": lambda s: [turn_value(t) for t in s.turns("other", tenant="t2")],
    "segments": lambda s: repr((s.segments("s0"), s.segments(None))),
    "summaries": lambda s: repr(s.summaries("s2")),
    "passages": lambda s: [passage_value(p) for p in s.passages("docs", [0, 1, 3, 4, 5])],
    "stats": lambda s: [s.stats()[k] for k in ("sessions", "turns", "passages", "vector_dim")],
}


def answers(store) -> dict[str, object]:
    """Ask a store filled by `fill` everything; an error of Kalos stands as its class's name."""
    out: dict[str, object] = {}
    for name, ask in QUESTIONS.items():
        try:
            out[name] = ask(store)
        except KalosError as error:
            out[name] = error
    return out


def wrong_answers(found: dict[str, object], right: dict[str, object]) -> list[str]:
    """Name the questions whose answer is neither right nor StoreCorrupt."""
    return [
        name
        for name, value in found.items()
        if value != right[name] and not isinstance(value, StoreCorrupt)
    ]
