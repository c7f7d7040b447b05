"""A store as the documents that the page asks for: plain JSON values, nothing written.

Names travel in hex beside a form for the reader, since a name may be no text. Texts are escaped:
no character of a conversation can turn the page's writing direction.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kalos_ctx._reader import COLLECTION, ENTRY_DEAD, SESSION
from kalos_ctx.errors import InvalidArgument, PassageNotFound, StoreCorrupt, StoreIOError
from kalos_ctx.store import SessionStore
from kalos_ctx.terminal import short, shown

if TYPE_CHECKING:
    from kalos_ctx.inspecting.queries import Query

R = TypeVar("R")
SESSIONS_A_PAGE, PASSAGES_A_PAGE = 50, 50
# So many sessions are looked at for one page of a search.
SCANNED_A_PAGE = 50_000
PREVIEW_CHARS = 160


class StorePages:
    """Documents about one store.

    Parameters
    ----------
    store : SessionStore
        Opened for reading.
    embed : callable, optional
        Takes a text and returns its vector.
    """

    def __init__(self, store: SessionStore, embed: Callable[[str], Any] | None = None) -> None:
        self.store, self.embed = store, embed

    def overview(self, query: Query) -> dict[str, Any]:
        """Return what the store is and its tenants."""
        stats = self.store.stats()
        codec = self.store.codec
        return {
            "name": shown(os.path.basename(self.store.path)),
            "sessions": stats["sessions"],
            "turns": stats["turns"],
            "passages": stats["passages"],
            "nbytes": sum(stats["bytes"].values()),
            "vector_dim": stats["vector_dim"],
            "metric": stats["metric"],
            "has_tokenizer": codec is not None,
            "has_template": codec is not None and codec.has_template,
            "has_embedder": self.embed is not None,
            "tenants": [name_document(_raw(name)) for name in self.store.tenants()],
        }

    def sessions(self, query: Query) -> dict[str, Any]:
        """Return a page of sessions whose names hold a text."""
        tenant, wanted = query.name("tenant", empty=True), query.text("search").casefold()
        first = query.whole("cursor", 0, 2**32 - 1)
        return self.again(lambda: self._sessions(tenant, wanted, first))

    def _sessions(self, tenant: bytes, wanted: str, first: int) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        scanned = 0
        now = self.store._clock()
        for slot, _, owner, name, _, expires in self.store._core.slots(first, SESSION):
            if len(found) == SESSIONS_A_PAGE or scanned == SCANNED_A_PAGE:
                return {"sessions": found, "cursor": slot}
            scanned += 1
            if owner != tenant or (expires is not None and expires <= now):
                continue
            document = name_document(name)
            if wanted in document["name"].casefold():
                turns = self.store.count(name, tenant=tenant)
                found.append({**document, "turns": turns})
        return {"sessions": found, "cursor": None}

    def session(self, query: Query) -> dict[str, Any]:
        """Return what a session has beside its turns, and what can be recalled in its tenant."""
        tenant, session = query.name("tenant", empty=True), query.name("session")
        own = self.store.segments(session, tenant=tenant)
        shared = self.store.segments(None, tenant=tenant)
        return {
            **name_document(session),
            "turns": self.store.count(session, tenant=tenant),
            "segments": [shown(name) for name in (*shared, *own)],
            "summaries": len(self.store.summaries(session, tenant=tenant)),
            "collections": self.again(lambda: self._collections(tenant)),
        }

    def _collections(self, tenant: bytes) -> list[dict[str, Any]]:
        core = self.store._core
        rows = [row for row in core.slots(0, COLLECTION) if row[2] == tenant]
        return [
            {**name_document(row[3]), "passages": self.store._living_passages(row)} for row in rows
        ]

    def passages(self, query: Query) -> dict[str, Any]:
        """Return some passages of a collection, in the order in which they were added."""
        tenant, collection = query.name("tenant", empty=True), query.name("collection")
        first = query.whole("cursor", 0)
        ids, cursor = self.again(lambda: self._passage_ids(tenant, collection, first))
        found = self.store.passages(collection, ids, tenant=tenant) if ids else []
        rows = [{"id": str(one.id), "text": preview(one.text)} for one in found]
        return {"passages": rows, "cursor": cursor}

    def _passage_ids(
        self, tenant: bytes, collection: bytes, first: int
    ) -> tuple[list[int], int | None]:
        core = self.store._core
        state = core.slot_state(COLLECTION, tenant, collection)
        if state is None:
            raise PassageNotFound("there is no such collection in this tenant")
        ids, _, _, flags, seqs, _ = core.entry_columns(state["slot_off"], first)
        alive = np.flatnonzero((flags & ENTRY_DEAD) == 0)
        some = alive[:PASSAGES_A_PAGE]
        cursor = int(seqs[alive[PASSAGES_A_PAGE]]) if len(alive) > PASSAGES_A_PAGE else None
        return ids[some].tolist(), cursor

    def turn_vector(self, tenant: bytes, session: bytes, seq: int) -> NDArray[Any]:
        """Return the vector that a turn was stored with.

        Raises
        ------
        InvalidArgument
            It has none.
        """
        raw = self.again(lambda: self._turn_vector(tenant, session, seq))
        if raw is None:
            raise InvalidArgument(f"turn {seq} has no vector to recall by; choose another")
        half = self.store._vector_dtype == "float16"
        return np.frombuffer(raw, np.float16 if half else np.float32).astype(np.float32)

    def _turn_vector(self, tenant: bytes, session: bytes, seq: int) -> bytes | None:
        core = self.store._core
        state = core.slot_state(SESSION, tenant, session)
        if state is None or seq >= state["count"]:
            return None
        _, rows, _, flags, _, _ = core.entry_columns(state["slot_off"], seq)
        if flags[0] & ENTRY_DEAD or not rows[0]:
            return None
        return core.row_bytes(int(rows[0]) - 1)

    def again(self, read: Callable[[], R]) -> R:
        """Read, and begin again where the writer moved to other files in its middle."""
        while True:
            try:
                return read()
            except (StoreCorrupt, StoreIOError):
                if not self.store._core.was_left():
                    raise


def name_document(name: bytes) -> dict[str, str]:
    """Return a stored name: `id` in hex, and `name` for a reader."""
    return {"id": name.hex(), "name": shown(name)}


def preview(text: str | None) -> str | None:
    """Return a text's beginning on one line; None where there is none."""
    return None if text is None else short(text, PREVIEW_CHARS)


def _raw(name: str | bytes) -> bytes:
    return name.encode() if isinstance(name, str) else name
