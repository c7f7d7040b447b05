"""A client's link to whatever sidecar is there: connected, lost, connected again."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import kalos_ctx.reports  # noqa: F401  what a window's `report` is
from kalos_ctx import arguments
from kalos_ctx._asking import Lost
from kalos_ctx._window_wire import WindowReader
from kalos_ctx._windows import WindowPool
from kalos_ctx.arguments import name_bytes
from kalos_ctx.errors import ForkedHandle, KalosError, SidecarUnavailable, StoreClosed
from kalos_ctx.sidecar import protocol
from kalos_ctx.sidecar.connection import Connection, Wanted, connect_until

if TYPE_CHECKING:
    from kalos_ctx.assembler import ContextAssembler
    from kalos_ctx.store import SessionStore

MODES = ("auto", "direct", "served")
TRANSPORTS = ("auto", "memory", "socket")
# Between tries to connect: at most this, doubling from the first, each by chance between none and
# all of it, so that many clients of one sidecar do not come back at the same moment.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.25


def pause_of(tries: int) -> float:
    """Return the seconds to wait behind the n-th failed try."""
    longest = float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 10)))
    return random.uniform(0.0, longest)


class Link:
    """Asks a sidecar, and finds the next one where it is gone. `Client` is the public face."""

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


def _decoded(value: bytes | None) -> str | None:
    return None if value is None else os.fsdecode(value)


def _lost() -> SidecarUnavailable:
    return SidecarUnavailable(
        "the sidecar went away; whether what was asked was done is not known (give `key` to ask "
        "again safely)"
    )
