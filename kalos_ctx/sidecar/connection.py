"""One connection to a sidecar: the handshake, and what goes over its socket."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kalos_ctx._asking import Asker, Lost, TooLarge
from kalos_ctx._channel import ClientChannel, StatusPage
from kalos_ctx._window_wire import WindowReader
from kalos_ctx.errors import ProtocolError, SidecarTimeout, SidecarUnavailable
from kalos_ctx.sidecar import endpoint, protocol

# Of a wait for the answer, before the caller sleeps: about 30 us. None where there is one CPU.
SPINS = 1500
LATE_ANSWERS_MAX = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client asks for: sets of modes and transports."""

    modes: tuple[str, ...]
    transports: tuple[str, ...]
    again: bool = False


class Connection:
    """A connection that was welcomed. Threads share it.

    Parameters
    ----------
    path : str
    wanted : Wanted
    reader_of : callable
        Gives the WindowReader for answers in shared memory.
    timeout : float
        Seconds for the handshake.

    Attributes
    ----------
    mode, transport : str
        What was granted.
    mode_why, transport_why : str
        Why it is not what would have been better; empty where it is.
    generation : int
        Which life of the sidecar.
    extras : dict
        What the welcome says further.
    status : StatusPage
    asker : Asker or None
        None where everything goes by the socket.

    Raises
    ------
    SidecarUnavailable, PeerDenied, VersionMismatch, ProtocolError
    """

    def __init__(
        self, path: str, wanted: Wanted, reader_of: Callable[[], WindowReader], timeout: float
    ) -> None:
        self.pid = os.getpid()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._answers: dict[int, tuple[protocol.Head, bytes]] = {}
        self._incoming = bytearray()
        self._next_id = 1
        self.ignored = 0  # answers that nobody waits for, or of another life
        self.asker: Asker | None = None
        try:
            self._connect(path, wanted, reader_of, time.monotonic() + timeout)
        except BaseException:
            self._sock.close()
            raise

    def _connect(
        self,
        path: str,
        wanted: Wanted,
        reader_of: Callable[[], WindowReader],
        until: float,
    ) -> None:
        try:
            self._sock.settimeout(max(0.001, until - time.monotonic()))
            self._sock.connect(path)
            hello = protocol.Hello(
                features=protocol.FEATURE_RECONNECT if wanted.again else 0,
                modes=sum(protocol.MODES[mode] for mode in wanted.modes),
                transports=sum(protocol.TRANSPORTS[name] for name in wanted.transports),
            )
            self._sock.sendall(protocol.message(protocol.OP_HELLO, hello.body()))
            head, body, fds = self._read_welcome(until)
        except TimeoutError:
            raise SidecarUnavailable("the sidecar did not welcome us in time") from None
        except OSError as error:
            raise SidecarUnavailable(
                f"no sidecar answers at the socket ({error.strerror}); start `kalos serve`"
            ) from None
        try:
            if head.status:
                raise protocol.unpack_error(body)
            self._take_welcome(head, body, fds, reader_of)
        finally:
            for fd in fds:
                os.close(fd)
        self._sock.setblocking(False)

    def _read_welcome(self, until: float) -> tuple[protocol.Head, bytes, list[int]]:
        data = bytearray()
        fds: list[int] = []
        try:
            head = None
            while head is None or len(data) < protocol.HEAD.size + head.body_nbytes:
                self._sock.settimeout(max(0.001, until - time.monotonic()))
                part, some = endpoint.receive(self._sock, descriptors=3 - len(fds))
                fds += some
                if not part:
                    raise SidecarUnavailable("the sidecar ended the connection")
                data += part
                if head is None and len(data) >= protocol.HEAD.size:
                    head = protocol.read_head(
                        bytes(data[: protocol.HEAD.size]), protocol.HELLO_NBYTES_MAX * 16
                    )
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return head, bytes(data[protocol.HEAD.size :]), fds

    def _take_welcome(
        self,
        head: protocol.Head,
        body: bytes,
        fds: list[int],
        reader_of: Callable[[], WindowReader],
    ) -> None:
        granted = protocol.Hello.read(body, "sidecar")
        modes = {number: name for name, number in protocol.MODES.items()}
        transports = {number: name for name, number in protocol.TRANSPORTS.items()}
        try:
            self.mode, self.transport = modes[granted.modes], transports[granted.transports]
            self.extras: dict[str, Any] = protocol.unpack(body[protocol.HELLO.size :])
            self.mode_why, self.transport_why = (
                str(self.extras[name]) for name in ("mode_why", "transport_why")
            )
        except (KeyError, TypeError, ValueError):
            raise ProtocolError("the sidecar's welcome is not what the protocol says") from None
        self.generation = head.generation
        if head.opcode != protocol.OP_WELCOME or len(fds) != (
            3 if self.transport == "memory" else 1
        ):
            raise ProtocolError("the sidecar's welcome came without its shared memory")
        self.status = StatusPage.open(fds.pop(0))
        self.status.close_fd()
        if self.transport == "memory":
            requests, responses = fds.pop(0), fds.pop(0)
            channel = ClientChannel(
                requests,
                responses,
                self.generation,
                granted.request_nbytes,
                granted.response_nbytes,
            )
            spins = SPINS if len(os.sched_getaffinity(0)) > 1 else 0
            self.asker = Asker(channel, reader_of(), self.is_alive, spins)

    def is_alive(self) -> bool:
        """Whether the sidecar still holds the other end."""
        return not endpoint.has_ended(self._sock)

    def close(self) -> None:
        """End the connection. Idempotent; in a forked child the parent's stays."""
        self._sock.close()

    # ---- Calls ----------------------------------------------------------------------------------

    def ask(self, opcode: int, body: bytes, timeout: float) -> tuple[bool, bytes]:
        """Send a request and return (whether it is a result, body of the answer).

        Raises
        ------
        Lost, SidecarTimeout, ProtocolError
        """
        if self.asker is not None:
            try:
                return self.asker.ask(opcode, body, int(timeout * 1e9))
            except TooLarge as large:
                if large.args[0] is not None:
                    return self.await_answer(large.args[0], time.monotonic() + timeout)
        return self.ask_by_socket(opcode, body, timeout)

    def ask_by_socket(self, opcode: int, body: bytes, timeout: float) -> tuple[bool, bytes]:
        """As `ask`, by the socket."""
        until = time.monotonic() + timeout
        number = self._new_id()
        data = protocol.message(
            opcode,
            body,
            id=number,
            generation=self.generation,
            timeout_ns=int(timeout * 1e9),
        )
        if not self._send_lock.acquire(timeout=timeout):
            raise SidecarTimeout("others' requests stayed in the way; nothing was sent")
        try:
            endpoint.send_all(self._sock, data, [], max(0.001, until - time.monotonic()))
        except TimeoutError:
            # Half a message may be under way: nothing else can follow it.
            self.close()
            raise SidecarTimeout(
                f"the sidecar did not take the request within {timeout:g} s"
            ) from None
        except OSError:
            raise Lost from None
        finally:
            self._send_lock.release()
        return self.await_answer(number, until)

    def _new_id(self) -> int:
        """Return an ID of this connection; those of shared memory come from the asker."""
        if self.asker is not None:
            number: int = self.asker.new_id()
            return number
        with self._receive_lock:
            self._next_id += 1
            return self._next_id - 1

    def await_answer(self, number: int, until: float) -> tuple[bool, bytes]:
        """Wait for an answer that comes by the socket."""
        while True:
            found = self._answers.pop(number, None)
            if found is not None:
                return found[0].status == 0, found[1]
            left = until - time.monotonic()
            if left <= 0:
                raise SidecarTimeout(
                    "the sidecar did not answer in time; what was asked may still be done"
                )
            # One thread reads for all; the others look again soon.
            if self._receive_lock.acquire(timeout=min(left, 0.002)):
                try:
                    if number not in self._answers:
                        self._read_some(min(left, 0.05))
                finally:
                    self._receive_lock.release()

    def _read_some(self, seconds: float) -> None:
        """Read what has come, waiting a little. Call with the receive lock."""
        try:
            if not select.select([self._sock], [], [], seconds)[0]:
                return
            data, _ = endpoint.receive(self._sock)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # closed by another thread
            raise Lost from None
        if not data:
            raise Lost
        self._incoming += data
        size = protocol.HEAD.size
        while len(self._incoming) >= size:
            head = protocol.read_head(bytes(self._incoming[:size]))
            if len(self._incoming) < size + head.body_nbytes:
                return
            body = bytes(self._incoming[size : size + head.body_nbytes])
            del self._incoming[: size + head.body_nbytes]
            if head.generation == self.generation or head.status:
                self._answers[head.id] = (head, body)
            else:
                self.ignored += 1
            # Nobody may wait for some any more: the oldest go.
            while len(self._answers) > LATE_ANSWERS_MAX:
                self._answers.pop(next(iter(self._answers)))
                self.ignored += 1


def connect_until(
    path: str,
    wanted: Wanted,
    reader_of: Callable[[], WindowReader],
    until: float,
    pause_of: Callable[[int], float],
) -> Connection:
    """Connect, again and again until the time is over.

    Raises
    ------
    SidecarUnavailable, PeerDenied, VersionMismatch, ProtocolError
        What the last try said; a refusal that no waiting changes is raised at once.
    """
    tries = 0
    while True:
        try:
            return Connection(path, wanted, reader_of, max(0.05, until - time.monotonic()))
        except SidecarUnavailable:
            pause = pause_of(tries)
            tries += 1
            if time.monotonic() + pause >= until:
                raise
            time.sleep(pause)
