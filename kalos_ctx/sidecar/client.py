"""`connect`: the store's and the assembler's calls, asked of a sidecar."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kalos_ctx import arguments
from kalos_ctx._asking import Lost, TooLarge, query_values
from kalos_ctx._window_wire import check_out, copy_out
from kalos_ctx.arguments import name_bytes
from kalos_ctx.batches import ContextBatch, build_batch
from kalos_ctx.errors import InvalidArgument, InvalidType, SidecarUnavailable
from kalos_ctx.planner import Plan, Policy, token_count
from kalos_ctx.sidecar import protocol
from kalos_ctx.sidecar.connection import Connection
from kalos_ctx.sidecar.writes import WriteCalls
from kalos_ctx.types import Hits, Page

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kalos_ctx._context_window import ContextWindow

TOP_K_MAX = 2**32 - 1  # of the message; the sidecar refuses what is too many


class _Asked(NamedTuple):
    """A window that is asked for, checked."""

    session: bytes
    tenant: bytes
    max_tokens: int
    reserve: int
    as_of: int
    top_k: int
    query: NDArray[np.float32] | None
    options: bytes


class Client(WriteCalls):
    """The calls of a store and its assembler, in another process. Made by `connect`.

    In served mode the sidecar does the work and its answers are copied into this process's memory.
    In direct mode reads run here, over the mapped store, and need no sidecar once it was met;
    writes are always asked of it. Thread-safe. A context manager.

    Attributes
    ----------
    mode : str or None
        "direct" or "served"; None while no sidecar was met.
    mode_why : str
        Why "auto" gave served mode, empty where it did not.
    transport : str or None
        "memory" or "socket"; None while there is no connection.
    transport_why : str
        Why the transport is the socket, empty where it is not or was asked for.

    Notes
    -----
    A read whose connection breaks is asked again of the sidecar that is there next, within its
    timeout. A write is not, unless it is an `append` with a `key`: whether the broken one happened
    is not known, and `SidecarUnavailable` says so.
    """

    # The last policy and what it is as bytes; replaced as a whole.
    _policy: tuple[Policy | None, bytes] = (None, b"")

    def ping(self, *, timeout: float | None = None) -> bool:
        """Make a round trip: whether the sidecar answers and is ready.

        Raises
        ------
        SidecarUnavailable
            It does not, and `on_unavailable` is "raise".
        """
        connection = self._connection
        if connection is not None and connection.asker is not None and self._pid == os.getpid():
            try:
                connection.asker.ping(int((self.timeout if timeout is None else timeout) * 1e9))
                return True
            except Lost:
                self._lose(connection)
            except SidecarUnavailable:
                if not self._empty:
                    raise
                return False
        try:
            self._ask(protocol.OP_PING, b"", timeout, again=True)
        except SidecarUnavailable:
            if not self._empty:
                raise
            return False
        return True

    def count(
        self, session: str | bytes, *, tenant: str | bytes = "", timeout: float | None = None
    ) -> int:
        """Return how many turns a session has; as `SessionStore.count`."""
        if self._store is not None:
            self._check()
            return self._store.count(session, tenant=tenant)
        body = protocol.call_body(
            name_bytes(session, "session"), name_bytes(tenant, "tenant", empty=True)
        )
        return int.from_bytes(self._ask(protocol.OP_COUNT, body, timeout, again=True), "little")

    def assemble(
        self,
        session: str | bytes,
        *,
        tenant: str | bytes = "",
        max_tokens: int | None,
        reserve: int = 0,
        query: Any = None,
        top_k: int = 0,
        collections: Any = (),
        session_recall: bool = False,
        min_score: float | None = None,
        filters: Mapping[str, Any] | None = None,
        placement: str = "before_last_user",
        recall_role: str = "system",
        as_of: int | None = None,
        policy: Policy | None = None,
        stream: Any = None,
        out: Any = None,
        timeout: float | None = None,
    ) -> ContextWindow:
        """Build the session's next input; as `ContextAssembler.assemble`.

        Parameters
        ----------
        stream
            Direct mode on a GPU alone; served windows are complete on return.
        timeout : float, optional
            Seconds; the client's where it is not given.

        Raises
        ------
        What `ContextAssembler.assemble` raises, SidecarUnavailable, PeerDenied
            With `on_unavailable="empty"` a missing sidecar gives a window without tokens instead,
            whose `report.degraded` says why.
        """
        if self._assembler is not None:
            self._check()
            return self._assembler.assemble(
                session, tenant=tenant, max_tokens=max_tokens, reserve=reserve, query=query,
                top_k=top_k, collections=collections, session_recall=session_recall,
                min_score=min_score, filters=filters, placement=placement,
                recall_role=recall_role, as_of=as_of, policy=policy, stream=stream, out=out,
            )  # fmt: skip
        given: dict[str, Any] = {}
        if collections != ():
            given["collections"] = collections
        if session_recall is not False:
            given["session_recall"] = session_recall
        if min_score is not None:
            given["min_score"] = min_score
        if filters is not None:
            given["filters"] = filters
        if placement != "before_last_user":
            given["placement"] = placement
        if recall_role != "system":
            given["recall_role"] = recall_role
        options = self._options(given, policy)
        asked = _Asked(
            name_bytes(session, "session"),
            b"" if tenant == "" else name_bytes(tenant, "tenant", empty=True),
            -1 if max_tokens is None else _tokens("max_tokens", max_tokens),
            _tokens("reserve", reserve),
            -1 if as_of is None else _tokens("as_of", as_of),
            min(arguments.whole(top_k, "top_k"), TOP_K_MAX),
            None if query is None else query_values(query),
            options,
        )
        if stream is not None:
            raise InvalidArgument("stream must be None in served mode (got a stream)")
        if out is not None:
            check_out(out)
        try:
            window = self._window(asked, timeout)
        except SidecarUnavailable as error:
            if not self._empty:
                raise
            self._counts["degraded"] += 1
            window = self._reader.empty(asked.session, asked.tenant, str(error))
        if out is not None:
            copy_out(window, out)
        return window

    def _window(self, asked: _Asked, timeout: float | None) -> ContextWindow:
        """Ask for a window until a connection holds, or the time is over."""
        self._check()
        seconds = self.timeout if timeout is None else timeout
        until = None
        while True:
            connection = self._connection
            if connection is None:
                until = until or time.monotonic() + seconds
                connection = self._connected(until)
            if until is not None:
                seconds = max(0.0, until - time.monotonic())
            try:
                answer = self._ask_window(connection, asked, seconds)
            except Lost:
                until = until or time.monotonic() + seconds
                self._lose(connection)
                continue
            if isinstance(answer, bytes):
                raise protocol.unpack_error(answer)
            return answer

    def _ask_window(
        self, connection: Connection, asked: _Asked, seconds: float
    ) -> ContextWindow | bytes:
        """Return a window, or the bytes of an error."""
        number = None
        if connection.asker is not None:
            try:
                return connection.asker.assemble(*asked, int(seconds * 1e9))
            except TooLarge as large:
                number = large.args[0]
        if number is not None:  # the answer is too large for its slot
            done, answer = connection.await_answer(number, time.monotonic() + seconds)
        else:
            body = protocol.call_body(
                asked.session,
                asked.tenant,
                asked.options,
                max_tokens=asked.max_tokens,
                reserve=asked.reserve,
                as_of=asked.as_of,
                top_k=asked.top_k,
                query=b"" if asked.query is None else asked.query.tobytes(),
            )
            done, answer = connection.ask_by_socket(protocol.OP_ASSEMBLE, body, seconds)
        return self._reader.window_from(answer, asked.session, asked.tenant) if done else answer

    def _options(self, given: Mapping[str, Any], policy: Policy | None) -> bytes:
        """Return what differs from the defaults, as bytes."""
        if policy is not None and not isinstance(policy, Policy):
            raise InvalidType(f"policy must be a Policy (got {type(policy).__name__})")
        if given:
            return protocol.pack(given if policy is None else {**given, "policy": policy})
        known, raw = self._policy
        if policy is not known:
            raw = b"" if policy is None else protocol.pack({"policy": policy})
            self._policy = (policy, raw)
        return raw

    def assemble_batch(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        layout: str = "packed",
        pad_id: int | None = None,
        on_error: str = "raise",
        dtype: str = "int32",
    ) -> ContextBatch:
        """Build several windows at once; as `ContextAssembler.assemble_batch`."""
        self._check()
        return build_batch(
            self.assemble,
            self.pool if self._assembler is None else self._assembler.pool,
            requests,
            layout=layout,
            pad_id=pad_id,
            on_error=on_error,
            dtype=dtype,
        )

    def plan(
        self, session: str | bytes, *, tenant: str | bytes = "", timeout: float | None = None,
        **options: Any,
    ) -> Plan:  # fmt: skip
        """Return what `assemble` would keep, drop or cut, and why; as `ContextAssembler.plan`."""
        if self._assembler is not None:
            self._check()
            return self._assembler.plan(session, tenant=tenant, **options)
        given = {key: value for key, value in options.items() if key not in ("stream", "out")}
        plan: Plan = self._call(
            "plan", name_bytes(session, "session"), tenant, given, timeout, again=True
        )
        return plan

    def recall(
        self,
        query: Any,
        *,
        tenant: str | bytes = "",
        top_k: int,
        collections: str | bytes | Sequence[str | bytes] = (),
        session: str | bytes | None = None,
        min_score: float | None = None,
        filters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Hits:
        """Find the rows that are nearest to a query, or to each of several.

        As `ContextAssembler.recall`. With `on_unavailable="empty"` a missing sidecar gives no hits,
        and `reason` is "sidecar_unavailable".
        """
        if self._assembler is not None:
            self._check()
            return self._assembler.recall(
                query, tenant=tenant, top_k=top_k, collections=collections, session=session,
                min_score=min_score, filters=filters,
            )  # fmt: skip
        given = {
            "query": query, "top_k": top_k, "collections": collections, "min_score": min_score,
            "filters": filters,
        }  # fmt: skip
        name = b"" if session is None else name_bytes(session, "session")
        try:
            hits: Hits = self._call("recall", name, tenant, given, timeout, again=True)
        except SidecarUnavailable:
            if not self._empty:
                raise
            self._counts["degraded"] += 1
            num_queries = len(query) if np.ndim(query) == 2 else 1
            return Hits(
                np.empty(0, np.uint64),
                np.empty(0, np.float32),
                np.zeros(num_queries, np.int64),
                (),
                "sidecar_unavailable",
            )
        return hits

    def sessions(
        self,
        *,
        tenant: str | bytes = "",
        prefix: str | bytes | None = None,
        cursor: str | None = None,
        limit: int = 100,
        timeout: float | None = None,
    ) -> Page:
        """List sessions; as `SessionStore.sessions`."""
        given = {"prefix": prefix, "cursor": cursor, "limit": limit}
        page: Page = self._call("sessions", b"", tenant, given, timeout, again=True)
        return page

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self._path!r}, {self.mode or 'no sidecar met'}>"


def connect(
    socket_path: str | os.PathLike[str],
    *,
    mode: str = "auto",
    timeout: float = 1.0,
    on_unavailable: str = "raise",
    transport: str = "auto",
    device: str = "auto",
    slots: int = 64,
    store_path: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    template: Any = None,
) -> Client:
    """Connect to the sidecar at a socket.

    Parameters
    ----------
    socket_path : path-like
    mode : {"auto", "direct", "served"}
        "direct": reads run in this process, over the mapped store; granted to who may use every
        tenant. "served": the sidecar does the work. "auto": direct where it is granted and the
        store can be opened here, else served; `Client.mode` and `mode_why` say which and why.
    timeout : float
        Seconds that a call waits, connecting again included.
    on_unavailable : {"raise", "empty"}
        Where no sidecar answers: raise `SidecarUnavailable`, or give windows without tokens and no
        hits, which say why. Writes raise always.
    transport : {"auto", "memory", "socket"}
        How served requests travel. "auto": shared memory, and the socket alone where the sidecar
        cannot give any; `Client.transport_why` says why.
    device, slots
        As `ContextAssembler`'s, in direct mode; in served mode `slots` windows may be alive.
    store_path, tokenizer, template
        Direct mode: where this process sees them, if not where the sidecar does.

    Returns
    -------
    Client

    Raises
    ------
    SidecarUnavailable, PeerDenied, VersionMismatch, ProtocolError, InvalidArgument, InvalidType
    """
    return Client(
        socket_path, mode=mode, timeout=timeout, on_unavailable=on_unavailable,
        transport=transport, device=device, slots=slots, store_path=store_path,
        tokenizer=tokenizer, template=template,
    )  # fmt: skip


def _tokens(what: str, value: Any) -> int:
    count = value if type(value) is int and value >= 0 else token_count(what, value)
    if count > 2**53:
        raise InvalidArgument(f"{what} must be at most {2**53} (got {count})")
    return count
