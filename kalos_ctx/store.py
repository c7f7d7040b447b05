"""`SessionStore`: a directory that keeps chat sessions as token IDs.

This layer checks arguments, encodes text and frames turns; the compiled core below it (`_writer`,
`_reader`) takes bytes and IDs and keeps them safe. Its calls stand in groups: turns, segments and
summaries, passages, and here what concerns whole sessions and the whole store.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kalos_ctx import arguments
from kalos_ctx._reader import COLLECTION, SESSION, TENANT
from kalos_ctx.arguments import name_bytes
from kalos_ctx.errors import InvalidArgument, InvalidType, SessionNotFound
from kalos_ctx.store_base import read_again_when_left
from kalos_ctx.store_passages import PassageCalls
from kalos_ctx.store_path import absolute_path
from kalos_ctx.store_tables import TableCalls
from kalos_ctx.store_turns import TurnCalls
from kalos_ctx.types import ErasureReceipt, Page, VerifyReport

if TYPE_CHECKING:
    from kalos_ctx._reader import Slot

SLOT_ID_MAX = 2**32 - 1
CURSOR = re.compile(r"[0-9]{1,10}")


class SessionStore(TurnCalls, TableCalls, PassageCalls):
    """Chat sessions, passages and pinned segments in one directory.

    Opened by `SessionStore.open`. One process writes, any number read, also while it writes.
    Thread-safe. A context manager; use after `close` raises `StoreClosed`.

    Attributes
    ----------
    path : str
    mode : str
        `"a"` or `"r"`.
    codec : TokenCodec or None
        Tokenizer and template; None for a store of token IDs alone.
    recovery : dict
        What opening had to do: `replayed` records, `dropped_bytes` of a torn tail, `rebuilt` index.
    """

    @read_again_when_left
    def sessions(
        self,
        *,
        tenant: str | bytes = "",
        prefix: str | bytes | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """List sessions in the order in which they were made.

        Stable while others are added: pages neither repeat nor miss a session.

        Parameters
        ----------
        prefix : str or bytes, optional
            Names that begin with it.
        cursor : str, optional
            From the page before.
        limit : int
            Names a page, 1 to 100,000.

        Raises
        ------
        InvalidArgument, InvalidType
        """
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        begins = b"" if prefix is None else name_bytes(prefix, "prefix", empty=True)
        most = arguments.whole(limit, "limit", 1, 100_000)
        first = 0
        if cursor is not None:
            if not isinstance(cursor, str) or not CURSOR.fullmatch(cursor):
                kind = InvalidArgument if isinstance(cursor, str) else InvalidType
                raise kind("cursor must be one that a page gave")
            first = min(int(cursor), SLOT_ID_MAX)
        now = self._clock()
        names: list[str | bytes] = []
        self._core.check_open()
        for slot_id, _, owner, name, _, expires in self._core.slots(first, SESSION):
            if owner != tenant_b or not name.startswith(begins):
                continue
            if expires is not None and expires <= now:
                continue
            if len(names) == most:
                return Page(names, str(slot_id))
            names.append(arguments.name_out(name))
        return Page(names, None)

    @read_again_when_left
    def tenants(self) -> list[str | bytes]:
        """Return the tenants that have a session, a collection or a segment.

        Returns
        -------
        list of str or bytes
            In the order of their bytes; `bytes` where a name is not UTF-8.

        Raises
        ------
        StoreCorrupt, StoreIOError
        """
        self._core.check_open()
        found = {
            row[2] for kind in (SESSION, COLLECTION, TENANT) for row in self._core.slots(0, kind)
        }
        return [arguments.name_out(name) for name in sorted(found)]

    # ---- Deletion -------------------------------------------------------------------------------

    def delete(self, session: str | bytes, *, tenant: str | bytes = "") -> ErasureReceipt:
        """Erase a session: windows, recall, listings, export, and the bytes of the files.

        A fork survives its parent's erasure; bytes that both share stay until the last one goes.

        Raises
        ------
        SessionNotFound, StoreReadOnly, StoreFull, StoreIOError, StoreCorrupt, InvalidArgument,
        InvalidType
        """
        core = self._writer()
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        with core.mutex:
            found = core.erase(SESSION, tenant_b, session_b)
        if found is None:
            raise SessionNotFound("there is no such session in this tenant")
        self._tell_erased(tenant_b, session_b)
        counts, digest = found
        return ErasureReceipt(counts, digest)

    def delete_tenant(self, tenant: str | bytes) -> ErasureReceipt:
        """Erase everything of a tenant: sessions, segments, collections.

        Interrupted, it leaves whole sessions; call it again. A tenant that has nothing is no error:
        the receipt's counts are 0.

        Parameters
        ----------
        tenant : str or bytes
            Up to 1,024 bytes; the empty name is the default tenant.

        Raises
        ------
        StoreFull, StoreIOError
            What was erased before stays erased.
        StoreReadOnly, StoreCorrupt, InvalidArgument, InvalidType
        """
        core = self._writer()
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        total = dict.fromkeys(("turns", "vectors", "summaries", "segments", "passages"), 0)
        seal = hashlib.sha256()
        with core.mutex:
            for kind in (SESSION, COLLECTION, TENANT):
                for name in [row[3] for row in core.slots(0, kind) if row[2] == tenant_b]:
                    found = core.erase(kind, tenant_b, name)
                    if found is None:
                        continue
                    counts, digest = found
                    seal.update(digest.encode())
                    for what, n in counts.items():
                        total[what] += n
                    if kind == SESSION:
                        self._tell_erased(tenant_b, name)
        return ErasureReceipt(total, seal.hexdigest())

    def listen(self, listener: Any) -> None:
        """Have `listener.session_erased(tenant, session)` called at erasures; held weakly.

        Both names are given as bytes.
        """
        self._listeners.add(listener)

    def _tell_erased(self, tenant: bytes, session: bytes) -> None:
        for listener in list(self._listeners):
            listener.session_erased(tenant, session)

    # ---- The whole store ------------------------------------------------------------------------

    def sync(self) -> None:
        """Make everything that was acknowledged durable, whatever the durability.

        Raises
        ------
        StoreIOError
            The disk failed; the store takes no more writes until it is opened again.
        StoreReadOnly
        """
        self._writer().checkpoint()

    def compact(self) -> dict[str, int]:
        """Write the living data into new files and drop the old ones; return both sizes.

        Returns
        -------
        dict
            `before` and `after`, in bytes.

        Raises
        ------
        StoreFull, StoreIOError, StoreCorrupt
            The old files go on serving.
        StoreReadOnly

        Notes
        -----
        Needs room for a second copy of what lives. Other calls of the writer wait meanwhile.
        """
        from kalos_ctx._compaction import compact

        before = self._nbytes()
        compact(self._writer(), self._clock())
        return {"before": before, "after": self._nbytes()}

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read everything and compare it with its checksums, and the index with the log.

        Parameters
        ----------
        progress : callable, optional
            Called with (bytes read, bytes in all) now and then; what it raises ends the call.

        Raises
        ------
        StoreCorrupt, StoreIOError
            Not even the walk could begin. What it meets on its way stands in the report.
        """
        from kalos_ctx._verification import verify

        return verify(self._core, progress)

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Copy the store as it is now to a new folder, which opens as a store of its own.

        Parameters
        ----------
        path : path
            A folder that is empty, or one to make. Other calls of the writer wait for the copy.

        Raises
        ------
        NotAStore
            The folder holds something.
        StoreIOError
            The copy could not be written, for want of space too (`errno` says so); part of it may
            lie in the folder, and does not open as a store.
        StoreReadOnly
            The store was opened for reading: only the writer can copy it in order.
        StoreCorrupt, InvalidArgument, InvalidType
        """
        from kalos_ctx._verification import snapshot

        snapshot(self._writer(), absolute_path(path))

    @read_again_when_left
    def stats(self) -> dict[str, Any]:
        """Return what the store is and holds: counts, bytes by kind of file, recovery.

        Returns
        -------
        dict
            `uuid`, `format` ("major.minor"), `segment_bytes`, `created_at` (seconds),
            `vector_dtype`, `metric`, `vector_dim`, `vocab_size`, `fingerprint` (hex, or None);
            `mode`, `generation`, `durability` (None for a reader); `sessions`, `turns`, `passages`;
            `bytes` by kind of file (`log`, `tokens`, `vectors`, `index`); `recovery`.

        Raises
        ------
        StoreCorrupt, StoreIOError
        """
        self._core.check_open()
        config = self._core.control.config
        config["fingerprint"] = config["fingerprint"].hex() if self._bound else None
        rows = list(self._core.slots(0, SESSION))
        return {
            **config,
            "mode": self.mode,
            "generation": self._core.generation,
            "sessions": len(rows),
            "turns": sum(row[4] for row in rows),
            "passages": sum(self._living_passages(row) for row in self._core.slots(0, COLLECTION)),
            "bytes": self._bytes_by_kind(),
            "durability": getattr(self._core, "durability", None),
            "recovery": self.recovery,
        }

    def _living_passages(self, row: Slot) -> int:
        state = self._core.slot_state(COLLECTION, row[2], row[3])
        # A collection's image counts its deleted passages where a tenant's has the next ID.
        return 0 if state is None else state["count"] - state["next_id"]

    def _bytes_by_kind(self) -> dict[str, int]:
        folder = os.path.join(self.path, f"gen-{self._core.generation:06d}")
        kinds = {"log": 0, "tokens": 0, "vectors": 0, "index": 0}
        labels = {"log": "log", "tok": "tokens", "vec": "vectors"}
        for entry in os.scandir(folder):
            kinds[labels.get(entry.name[:3], "index")] += entry.stat().st_size
        return kinds

    def _nbytes(self) -> int:
        return sum(self._bytes_by_kind().values())

    def __repr__(self) -> str:
        return f"SessionStore({self.path!r}, mode={self.mode!r})"
