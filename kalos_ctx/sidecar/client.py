"""`connect`: the store's and the assembler's calls, asked of a sidecar."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import kalos_ctx.reports  # noqa: F401  what a window's `report` is
from kalos_ctx import arguments
from kalos_ctx._asking import Lost, TooLarge, query_values
from kalos_ctx._window_wire import WindowReader, check_out, copy_out
from kalos_ctx._windows import WindowPool
from kalos_ctx.arguments import name_bytes
from kalos_ctx.batches import ContextBatch, build_batch
from kalos_ctx.errors import (
    ForkedHandle,
    InvalidArgument,
    InvalidType,
    KalosError,
    SidecarUnavailable,
    StoreClosed,
)
from kalos_ctx.planner import Plan, Policy, token_count
from kalos_ctx.sidecar import protocol
from kalos_ctx.sidecar.connection import Connection, Wanted, connect_until
from kalos_ctx.types import ErasureReceipt, Hits, Page

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kalos_ctx._context_window import ContextWindow
    from kalos_ctx.assembler import ContextAssembler
    from kalos_ctx.store import SessionStore

MODES = ("auto", "direct", "served")
TRANSPORTS = ("auto", "memory", "socket")
TOP_K_MAX = 2**32 - 1  # of the message; the sidecar refuses what is too many
# Between tries to connect: at most this, doubling from the first, each by chance between none and
# all of it, so that many clients of one sidecar do not come back at the same moment.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.25


def pause_of(tries: int) -> float:
    """Return the seconds to wait behind the n-th failed try."""
    longest = float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 10)))
    return random.uniform(0.0, longest)


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


class Client:
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

    def __init__(
        self,
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
    ) -> None:
        arguments.choice(mode, "mode", MODES)
        arguments.choice(on_unavailable, "on_unavailable", ("raise", "empty"))
        arguments.choice(transport, "transport", TRANSPORTS)
        self._path = os.fspath(socket_path)
        if not isinstance(self._path, str):
            self._path = os.fsdecode(self._path)
        self.timeout = arguments.seconds(timeout, "timeout", positive=True)
        self._modes = ("direct", "served") if mode == "auto" else (mode,)
        self._transports = ("memory", "socket") if transport == "auto" else (transport,)
        self._empty = on_unavailable == "empty"
        self._pid = os.getpid()
        self.pool = WindowPool(slots, self.timeout)
        self._reader = WindowReader(self.pool, protocol.unpack)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._met = False
        self._closed = False
        self._tries, self._next_try = 0, 0.0
        self._counts = {"connections": 0, "degraded": 0, "ignored_answers": 0}
        self.mode: str | None = None
        self.mode_why = ""
        self.transport_why = ""
        self._policy: tuple[Policy | None, bytes] = (None, b"")
        self._device, self._slots = device, slots
        self._given_path = None if store_path is None else os.fspath(store_path)
        self._tokenizer, self._template = tokenizer, template
        self._store: SessionStore | None = None
        self._assembler: ContextAssembler | None = None
        try:
            self._connected(time.monotonic() + self.timeout)
        except SidecarUnavailable:
            if not self._empty:
                raise

    # ---- The connection -------------------------------------------------------------------------

    @property
    def transport(self) -> str | None:
        """ "memory" or "socket"; None while there is no connection."""
        connection = self._connection
        return None if connection is None else connection.transport

    @property
    def device(self) -> str:
        """Where windows lie: "cpu", or in direct mode the assembler's device."""
        return "cpu" if self._assembler is None else self._assembler.device

    def _connected(self, until: float) -> Connection:
        """Return the connection, made anew where it broke."""
        connection = self._connection
        if connection is not None:
            return connection
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise SidecarUnavailable("no sidecar answered while another thread tried to connect")
        try:
            self._check()
            if self._connection is None:
                self._connect(until)
            assert self._connection is not None
            return self._connection
        finally:
            self._lock.release()

    def _connect(self, until: float) -> None:
        if self._empty:
            # Degraded at once: one try, and none while the last is fresh.
            now = time.monotonic()
            if now < self._next_try:
                raise SidecarUnavailable("no sidecar answered a moment ago")
            until = now
        wanted = Wanted(self._modes, self._transports, self._met)
        try:
            connection = connect_until(self._path, wanted, lambda: self._reader, until, pause_of)
        except SidecarUnavailable:
            self._next_try = time.monotonic() + pause_of(self._tries)
            self._tries += 1
            raise
        self._tries, self._met = 0, True
        self._counts["connections"] += 1
        if connection.mode == "direct":
            try:
                self._open_store(connection)
            except (KalosError, OSError) as error:
                # The store cannot be had from here: another mount namespace, no permission.
                if "served" not in self._modes:
                    connection.close()
                    raise
                connection.close()
                wanted = Wanted(("served",), self._transports, self._met)
                connection = connect_until(
                    self._path, wanted, lambda: self._reader, until, pause_of
                )
                connection.mode_why = f"the store cannot be opened here: {error}"
        self.mode, self.mode_why = connection.mode, connection.mode_why
        self.transport_why = connection.transport_why
        self._connection = connection

    def _open_store(self, connection: Connection) -> None:
        """Map the store for direct mode; one that is open already stays."""
        from kalos_ctx.assembler import ContextAssembler
        from kalos_ctx.store import SessionStore

        extras = connection.extras
        path = self._given_path or os.fsdecode(extras["store"])
        if self._store is not None and self._store.path == os.path.abspath(path):
            return
        chosen: dict[str, Any] = {
            name: given if given is not None else _decoded(extras.get(name))
            for name, given in (("tokenizer", self._tokenizer), ("template", self._template))
        }
        store = SessionStore.open(path, "r", **chosen)
        self._assembler = ContextAssembler(
            store, device=self._device, slots=self._slots, timeout=self.timeout
        )
        self._store = store

    def _lose(self, connection: Connection) -> None:
        """Forget a connection that broke."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
                self._counts["ignored_answers"] += connection.ignored
        connection.close()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ForkedHandle("this client was made before a fork; connect again in the child")
        if self._closed:
            raise StoreClosed("the client is closed")

    def _until(self, timeout: float | None) -> float:
        return time.monotonic() + (self.timeout if timeout is None else timeout)

    def _ask(self, opcode: int, body: bytes, timeout: float | None, *, again: bool) -> bytes:
        """Return the body of a result; raises the error that was answered.

        `again`: what may be asked twice.
        """
        self._check()
        until = self._until(timeout)
        while True:
            connection = self._connected(until)
            try:
                done, answer = connection.ask(opcode, body, max(0.0, until - time.monotonic()))
            except Lost:
                self._lose(connection)
                if not again:
                    raise _lost() from None
                continue
            if done:
                return answer
            raise protocol.unpack_error(answer)

    def _call(
        self,
        name: str,
        session: bytes,
        tenant: Any,
        given: Mapping[str, Any],
        timeout: float | None,
        *,
        again: bool = False,
    ) -> Any:
        """Ask for a call by its name."""
        options = protocol.pack([name, given])
        body = protocol.call_body(session, name_bytes(tenant, "tenant", empty=True), options)
        return protocol.unpack(self._ask(protocol.OP_CALL, body, timeout, again=again))

    # ---- Reads ----------------------------------------------------------------------------------

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

    # ---- Writes ---------------------------------------------------------------------------------

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

    # ---- Life -----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Read the sidecar's status page; no message is sent once there is a connection.

        Returns
        -------
        dict
            `state`, `pid`, `generation`, `started_at`, `beat_age_s`, `counts`, `gauges`, `stages`.

        Raises
        ------
        SidecarUnavailable
        """
        self._check()
        connection = self._connected(self._until(None))
        if not connection.is_alive():
            self._lose(connection)
            connection = self._connected(self._until(None))
        found: dict[str, Any] = connection.status.read()
        return found

    def counts(self) -> dict[str, int]:
        """Count what this client met.

        Returns
        -------
        dict
            `connections` made; `degraded` answers given without a sidecar; `ignored_answers` that
            nobody waited for, or of another life of the sidecar.
        """
        found = dict(self._counts)
        connection = self._connection
        if connection is not None:
            found["ignored_answers"] += connection.ignored
        return found

    def close(self) -> None:
        """End the connection. Idempotent; windows stay with their owners."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if self._pid != os.getpid():
            return
        if self._assembler is not None:
            self._assembler.close()
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self._path!r}, {self.mode or 'no sidecar met'}>"


class AsyncClient:
    """`Client` for an event loop: the same calls, to be awaited. Made by `connect_async`.

    Attributes
    ----------
    client : Client
        What it asks with; its calls may be mixed with these.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name in ("close", "pool", "timeout"):
            raise AttributeError(name)
        call = getattr(self.client, name)
        if not callable(call):
            raise AttributeError(name)

        async def asked(*args: Any, **options: Any) -> Any:
            task = asyncio.ensure_future(asyncio.to_thread(call, *args, **options))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                # What comes nobody sees: a window gives its slot back.
                task.add_done_callback(_release_unseen)
                raise

        asked.__name__, asked.__doc__ = name, call.__doc__
        return asked

    async def close(self) -> None:
        """End the connection. Idempotent."""
        await asyncio.to_thread(self.client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


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


async def connect_async(socket_path: str | os.PathLike[str], **options: Any) -> AsyncClient:
    """Connect without blocking the event loop; as `connect`."""
    return AsyncClient(await asyncio.to_thread(connect, socket_path, **options))


def _decoded(value: bytes | None) -> str | None:
    return None if value is None else os.fsdecode(value)


def _lost() -> SidecarUnavailable:
    return SidecarUnavailable(
        "the sidecar went away; whether what was asked was done is not known (give `key` to ask "
        "again safely)"
    )


def _tokens(what: str, value: Any) -> int:
    count = value if type(value) is int and value >= 0 else token_count(what, value)
    if count > 2**53:
        raise InvalidArgument(f"{what} must be at most {2**53} (got {count})")
    return count


def _release_unseen(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and task.exception() is None and hasattr(task.result(), "release"):
        task.result().release()
