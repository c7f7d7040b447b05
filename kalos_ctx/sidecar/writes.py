"""A client's writes: always asked of the sidecar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kalos_ctx.arguments import name_bytes
from kalos_ctx.sidecar.link import Link
from kalos_ctx.types import ErasureReceipt

if TYPE_CHECKING:
    from numpy.typing import NDArray


class WriteCalls(Link):
    """Writes of `Client`."""

    def append(
        self,
        session: str | bytes,
        role: str,
        content: str | None = None,
        *,
        tenant: str | bytes = "",
        token_ids: Any = None,
        vector: Any = None,
        group: str | int | None = None,
        key: str | bytes | None = None,
        created_at: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl: float | None = None,
        framed: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Append a turn and return its sequence number; as `SessionStore.append`.

        With a `key` it is asked again where the connection broke, and happens once.

        Raises
        ------
        What `SessionStore.append` raises, SidecarUnavailable, PeerDenied
        """
        given = {
            "role": role, "content": content, "token_ids": token_ids, "vector": vector,
            "group": group, "key": key, "created_at": created_at, "metadata": metadata,
            "ttl": ttl, "framed": framed,
        }  # fmt: skip
        name = name_bytes(session, "session")
        seq: int = self._call("append", name, tenant, given, timeout, again=key is not None)
        return seq

    def extend(
        self,
        session: str | bytes,
        turns: Sequence[Mapping[str, Any]],
        *,
        tenant: str | bytes = "",
        timeout: float | None = None,
    ) -> list[int]:
        """Append several turns, all or none; as `SessionStore.extend`."""
        given = {"turns": list(turns)}
        name = name_bytes(session, "session")
        seqs: list[int] = self._call("extend", name, tenant, given, timeout)
        return seqs

    def delete(
        self, session: str | bytes, *, tenant: str | bytes = "", timeout: float | None = None
    ) -> ErasureReceipt:
        """Erase a session; as `SessionStore.delete`."""
        name = name_bytes(session, "session")
        receipt: ErasureReceipt = self._call("delete", name, tenant, {}, timeout)
        return receipt

    def set_segment(
        self, session: str | bytes | None, name: str, content: str | None = None, *,
        tenant: str | bytes = "", timeout: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Pin a segment, replace it or take it away; as `SessionStore.set_segment`."""
        owner = b"" if session is None else name_bytes(session, "session")
        given = {"name": name, "content": content, **options}
        self._call("set_segment", owner, tenant, given, timeout)

    def summarize(
        self, session: str | bytes, start: int, stop: int, content: str | None = None, *,
        tenant: str | bytes = "", timeout: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Let a summary stand for turns; as `SessionStore.summarize`."""
        given = {"start": start, "stop": stop, "content": content, **options}
        self._call("summarize", name_bytes(session, "session"), tenant, given, timeout)

    def rollback(
        self, session: str | bytes, to: int, *, tenant: str | bytes = "",
        expect_last: int | None = None, timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Take the turns from `to` on away; as `SessionStore.rollback`."""
        given = {"to": to, "expect_last": expect_last}
        name = name_bytes(session, "session")
        gone: int = self._call("rollback", name, tenant, given, timeout)
        return gone

    def fork(
        self, session: str | bytes, new_session: str | bytes, *, tenant: str | bytes = "",
        at: int | None = None, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Begin a session with another's turns; as `SessionStore.fork`."""
        given = {"new_session": new_session, "at": at}
        self._call("fork", name_bytes(session, "session"), tenant, given, timeout)

    def add_passages(
        self, collection: str | bytes, vectors: Any, *, tenant: str | bytes = "",
        timeout: float | None = None, **options: Any,
    ) -> NDArray[np.uint64]:  # fmt: skip
        """Add passages to a collection; as `SessionStore.add_passages`."""
        given = {"collection": collection, "vectors": np.asarray(vectors), **options}
        ids: NDArray[np.uint64] = self._call("add_passages", b"", tenant, given, timeout)
        return ids

    def delete_passages(
        self, collection: str | bytes, ids: Any, *, tenant: str | bytes = "",
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Delete passages; as `SessionStore.delete_passages`."""
        given = {"collection": collection, "ids": ids}
        gone: int = self._call("delete_passages", b"", tenant, given, timeout)
        return gone
