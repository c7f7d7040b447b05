"""One connection to a sidecar, from its acceptance to its end."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from kalos_ctx.sidecar import protocol
from kalos_ctx.sidecar.access import Grant

if TYPE_CHECKING:
    from kalos_ctx._channel import ServerChannel
    from kalos_ctx.errors import KalosError
    from kalos_ctx.sidecar.control import Control
    from kalos_ctx.sidecar.endpoint import Credentials

# Answers by the socket that a client does not take; above this its requests wait.
UNSENT_NBYTES_MAX = 1 << 20
OPEN_REQUESTS_MAX = protocol.SLOTS


class Peer:
    """One connection, from its acceptance to its end."""

    def __init__(self, control: Control, sock: socket.socket, number: int) -> None:
        self.control, self.sock, self.number = control, sock, number
        self.who: Credentials | None = None
        self.grant = Grant()
        self.channel: ServerChannel | None = None
        self.mode = ""
        self.transport = ""
        self.is_locked = False
        self.welcomed = False
        self.deadline = time.monotonic() + control.options.handshake_timeout
        self.last_seen = time.monotonic()
        self.incoming = bytearray()
        self.head: protocol.Head | None = None
        self.head_bytes = b""
        self.last_id = 0
        self.open_requests = 0
        self._unsent: deque[memoryview] = deque()
        self._unsent_nbytes = 0
        self._lock = threading.Lock()

    def may_use(self, tenant: bytes) -> bool:
        """Whether its requests may name the tenant."""
        return self.grant.may_use(tenant)

    def device_failed(self, error: KalosError) -> None:
        """A device did not do what it was asked to."""
        self.control.device_failed(error)

    # ---- Sending: from any thread ---------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send bytes behind those before, without waiting."""
        with self._lock:
            self._unsent.append(memoryview(data))
            self._unsent_nbytes += len(data)
        self.control.wake(self)

    def flush(self) -> bool:
        """Send what the socket takes; whether all is sent. Control loop only."""
        with self._lock:
            while self._unsent:
                try:
                    sent = self.sock.send(self._unsent[0], socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    return False
                self._unsent_nbytes -= sent
                rest = self._unsent[0][sent:]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        return True

    # ---- Requests by the socket: counted up on the control loop, down on a worker ----------------

    def begin_request(self) -> None:
        """A request was taken."""
        with self._lock:
            self.open_requests += 1

    def end_request(self) -> None:
        """It is answered."""
        with self._lock:
            self.open_requests -= 1

    @property
    def has_unsent(self) -> bool:
        """Whether answers wait for the socket."""
        return self._unsent_nbytes > 0

    @property
    def is_full(self) -> bool:
        """Whether it must take answers, or wait for some, before it may ask again."""
        return self._unsent_nbytes > UNSENT_NBYTES_MAX or self.open_requests >= OPEN_REQUESTS_MAX
