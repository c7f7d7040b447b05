"""Tables of pinned segments and of summaries, as one log record holds them (FORMAT.md, "Items")."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kalos_ctx.errors import StoreCorrupt

# kalos_item of cuda/kalos_layout.h; a test compares the two.
ITEM = struct.Struct("<QdIIIIIIIHHBBBBI")
HAS_TEXT, VOLATILE = 1, 2
PLACEMENTS = ("head", "before_last_user", "end")

Stage = Callable[[NDArray[np.int32]], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Item:
    """A pinned segment (by name) or a summary (by the turns `[start, stop)` it stands for)."""

    name: str
    role: int
    ids: NDArray[np.int32]
    text: str | None = None
    placement: int = 0
    volatile: bool = False
    start: int = 0
    stop: int = 0
    at_count: int = 0
    created_at: float = 0.0
    prefix_len: int = 0
    suffix_len: int = 0
    tokens_pos: int = -1
    token_crc: int = 0

    def placed(self, stage: Stage) -> Item:
        """Return the item with its IDs placed in the token segments, unless they are."""
        if self.tokens_pos >= 0:
            return self
        position, crc = stage(self.ids)
        return replace(self, tokens_pos=position, token_crc=crc)

    def pack(self) -> bytes:
        """Return the item as bytes, its length a multiple of 8."""
        name = self.name.encode()
        text = b"" if self.text is None else self.text.encode()
        body = name + text + self.ids.astype("<i4").tobytes()
        size = (ITEM.size + len(body) + 7) // 8 * 8
        flags = (HAS_TEXT if self.text is not None else 0) | (VOLATILE if self.volatile else 0)
        head = ITEM.pack(
            self.tokens_pos,
            self.created_at,
            len(self.ids),
            self.token_crc,
            self.start,
            self.stop,
            self.at_count,
            len(name),
            len(text),
            self.prefix_len,
            self.suffix_len,
            self.role,
            self.placement,
            flags,
            0,
            size,
        )
        return (head + body).ljust(size, b"\0")


def unpack(table: bytes) -> Iterator[Item]:
    """Yield the items of a table section."""
    at = 0
    while at < len(table):
        if at + ITEM.size > len(table):
            raise StoreCorrupt("a table's last item is cut")
        (
            position,
            created_at,
            num_tokens,
            crc,
            start,
            stop,
            at_count,
            name_len,
            text_len,
            prefix_len,
            suffix_len,
            role,
            placement,
            flags,
            _,
            size,
        ) = ITEM.unpack_from(table, at)
        body = at + ITEM.size
        ids_at = body + name_len + text_len
        if size < ITEM.size or at + size > len(table) or ids_at + num_tokens * 4 > at + size:
            raise StoreCorrupt("an item does not fit its table")
        yield Item(
            name=_text(table[body : body + name_len]),
            role=role,
            ids=np.frombuffer(table, "<i4", num_tokens, ids_at),
            text=_text(table[body + name_len : ids_at]) if flags & HAS_TEXT else None,
            placement=placement,
            volatile=bool(flags & VOLATILE),
            start=start,
            stop=stop,
            at_count=at_count,
            created_at=created_at,
            prefix_len=prefix_len,
            suffix_len=suffix_len,
            tokens_pos=position,
            token_crc=crc,
        )
        at += size


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise StoreCorrupt("an item's name or text is no UTF-8") from None


def pack(items: list[Item]) -> bytes:
    """Return a table section."""
    return b"".join(item.pack() for item in items)
