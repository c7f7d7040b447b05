"""A sidecar's control loop: who connects, what is granted, what goes by sockets, and who died.

It runs on one thread and waits in a selector; nothing here touches the store. What a subclass gives
it: the hot loop and the workers, once the store is open.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kalos_ctx._channel import ServerChannel, StatusPage
from kalos_ctx._serving import MAX_CHANNELS
from kalos_ctx.errors import KalosError, PeerDenied, ProtocolError, SidecarUnavailable
from kalos_ctx.sidecar import endpoint, protocol
from kalos_ctx.sidecar.peers import Peer

if TYPE_CHECKING:
    from kalos_ctx._serving import ServingLoop
    from kalos_ctx.sidecar.access import AccessRules
    from kalos_ctx.sidecar.options import SidecarOptions
    from kalos_ctx.sidecar.workers import Workers

log = logging.getLogger(__name__)

HANDSHAKES_A_USER = 256
TICK_S = 0.25


class Control:
    """The connections of one sidecar.

    Parameters
    ----------
    place : Endpoint
    status : StatusPage
    options : SidecarOptions
    access : AccessRules
    direct_extras : dict
        What the welcome of a direct client says: where store, tokenizer and template are.
    """

    def __init__(
        self,
        place: endpoint.Endpoint,
        status: StatusPage,
        options: SidecarOptions,
        access: AccessRules,
        direct_extras: dict[str, bytes | None],
    ) -> None:
        self._endpoint, self.status = place, status
        self.options, self.access = options, access
        self.generation = status.generation
        self._direct_extras = direct_extras
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._woken: deque[Peer] = deque()
        self._peers: set[Peer] = set()
        self._accepted = 0
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._accept_again = 0.0
        self._stopping: float | None = None
        self._ready = threading.Event()
        self._workers: Workers | None = None
        self._loop: ServingLoop | None = None

    def device_failed(self, error: KalosError) -> None:
        """A device did not do what it was asked to; the subclass decides."""
        raise NotImplementedError

    def gauges(self) -> dict[str, int]:
        """What is in use beside connections; the subclass knows."""
        return {}

    def stop(self) -> None:
        """Drain and end; from any thread or a signal handler. Idempotent."""
        if self._stopping is None:
            self._stopping = time.monotonic()
        self._poke()

    # ---- The control loop -----------------------------------------------------------------------

    def control(self) -> None:
        """Run until the sidecar is drained behind `stop`."""
        self._register(self._endpoint.socket, self._accept)
        self._register(self._wake_read, self._on_wake)
        next_tick = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_tick:
                self._tick(now)
                next_tick = now + TICK_S
            if self._stopping is not None and self._drained(now):
                return
            timeout = 0.02 if self._stopping is not None else max(0.0, next_tick - now)
            for key, events in self._selector.select(timeout):
                key.data(events)

    def _drained(self, now: float) -> bool:
        """Whether the sidecar may end: all that came before the end is answered, or time is up."""
        assert self._stopping is not None
        if self.status.state != "draining":
            self.status.state = "draining"
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._endpoint.socket)
        if now - self._stopping > self.options.drain_timeout:
            return True
        if not self._ready.is_set():
            return False
        return not any(peer.open_requests or peer.has_unsent for peer in self._peers)

    def _tick(self, now: float) -> None:
        """What is done a few times a second."""
        for peer in list(self._peers):
            if not peer.welcomed and now > peer.deadline:
                self.status.count("handshakes_failed")
                self._drop(peer, "no hello in time")
        if self._accept_again and now >= self._accept_again:
            self._accept_again = 0.0
            if self._stopping is None:
                self._register(self._endpoint.socket, self._accept)
        self._retire_idle(now)
        self._gauge()

    def _retire_idle(self, now: float) -> None:
        lease = self.options.lease
        if lease is None:
            return
        for peer in list(self._peers):
            channel = peer.channel
            if channel is None:
                continue
            asked = channel.last_id()
            if asked != peer.last_id:
                peer.last_id, peer.last_seen = asked, now
            elif now - peer.last_seen > lease:
                self.status.count("retired")
                self._drop(peer, "past its lease")

    def _gauge(self) -> None:
        status = self.status
        status.set_gauge("clients", sum(peer.welcomed for peer in self._peers))
        status.set_gauge("direct_clients", sum(peer.mode == "direct" for peer in self._peers))
        channels = [(p.channel.nbytes, p.is_locked) for p in self._peers if p.channel is not None]
        status.set_gauge("channel_bytes", sum(nbytes for nbytes, _ in channels))
        status.set_gauge("locked_bytes", sum(nbytes for nbytes, locked in channels if locked))
        if self._workers is not None:
            status.set_gauge("queued", self._workers.queued())
        for name, value in self.gauges().items():
            status.set_gauge(name, value)

    def _register(self, sock: Any, then: Callable[[int], None], events: int = 1) -> None:
        self._selector.register(sock, events, then)

    def wake(self, peer: Peer) -> None:
        """Let the control loop send what a peer has waiting."""
        self._woken.append(peer)
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has ended
            self._wake_write.send(b"\0")

    def _on_wake(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        while self._woken:
            peer = self._woken.popleft()
            if peer in self._peers:
                self._watch(peer)

    def close_connections(self) -> None:
        """End every connection, and give back what the loop stands on."""
        for peer in list(self._peers):
            with contextlib.suppress(OSError):
                peer.flush()
            self._drop(peer, "the sidecar ends")
        self._selector.close()
        self._endpoint.close()
        for sock in (self._wake_read, self._wake_write):
            sock.close()
        os.close(self._reserve)

    # ---- Connections ----------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        for _ in range(64):
            try:
                sock, _address = self._endpoint.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                elif error.errno != errno.ECONNABORTED:
                    log.warning("a connection could not be accepted: %s", error.strerror)
                return
            sock.setblocking(False)
            self._accepted += 1
            peer = Peer(self, sock, self._accepted)
            self.status.count("connections")
            try:
                self._admit(peer)
            except KalosError as error:
                self._refuse(peer, error)

    def _turn_away(self) -> None:
        """Out of descriptors: take one connection with the reserve, end it, and pause."""
        os.close(self._reserve)
        with contextlib.suppress(OSError):
            self._endpoint.socket.accept()[0].close()
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._selector.unregister(self._endpoint.socket)
        self._accept_again = time.monotonic() + 0.05
        self.status.count("handshakes_failed")
        log.warning("out of descriptors (ulimit -n): new connections wait")

    def _admit(self, peer: Peer) -> None:
        """Look at who it is, and listen to it."""
        peer.who = endpoint.credentials(peer.sock)
        self._peers.add(peer)
        self._register(peer.sock, lambda events: self._on_peer(peer, events))
        if peer.who.pidfd >= 0:
            self._register(peer.who.pidfd, lambda _: self._drop(peer, "its process ended"))
        if len(self._peers) > self.options.max_clients:
            raise SidecarUnavailable(
                f"the sidecar has its {self.options.max_clients} clients; try again later"
            )
        waiting = sum(
            not other.welcomed and other.who is not None and other.who.uid == peer.who.uid
            for other in self._peers
        )
        if waiting > HANDSHAKES_A_USER:
            raise SidecarUnavailable("too many connections of this user have not said hello")

    def _refuse(self, peer: Peer, error: KalosError) -> None:
        """Answer with an error and end the connection."""
        self.status.count("denied" if isinstance(error, PeerDenied) else "handshakes_failed")
        log.info("client %d refused: %s", peer.number, type(error).__name__)
        body = protocol.pack_error(error)
        with contextlib.suppress(OSError):
            peer.sock.send(
                protocol.message(protocol.OP_WELCOME, body, status=1), socket.MSG_NOSIGNAL
            )
        self._drop(peer, "refused")

    def _drop(self, peer: Peer, why: str) -> None:
        """End a connection and forget all of it. Idempotent."""
        if peer.channel is not None and self._loop is not None:
            self._loop.remove(peer.channel)
            peer.channel.retire()
            peer.channel = None
        if peer in self._peers:
            self._peers.remove(peer)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(peer.sock)
            if peer.welcomed:
                self.status.count("disconnects")
                log.info("client %d left: %s", peer.number, why)
        if peer.who is not None and peer.who.pidfd >= 0:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(peer.who.pidfd)
            os.close(peer.who.pidfd)
            peer.who = endpoint.Credentials(peer.who.uid, peer.who.gid, peer.who.pid)
        peer.sock.close()

    def _watch(self, peer: Peer) -> None:
        """Send what waits, and listen for what the peer may do now."""
        try:
            done = peer.flush()
        except OSError:
            self._drop(peer, "the connection broke")
            return
        events = 0 if peer.is_full else selectors.EVENT_READ
        if not done:
            events |= selectors.EVENT_WRITE
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer.sock)
        # With all of its requests under way a peer is not watched until one is answered, which
        # comes back here; its process's end is noticed all the same.
        if events:
            self._register(peer.sock, lambda ready: self._on_peer(peer, ready), events)

    def _on_peer(self, peer: Peer, events: int) -> None:
        if peer not in self._peers:
            return
        if events & selectors.EVENT_WRITE:
            self._watch(peer)
        if not events & selectors.EVENT_READ or peer not in self._peers:
            return
        try:
            data, _ = endpoint.receive(peer.sock)
            if not data:
                self._drop(peer, "it closed the connection")
                return
            peer.last_seen = time.monotonic()
            peer.incoming += data
            for head, body in self._messages(peer):
                self._on_message(peer, head, body)
                if peer not in self._peers:
                    return
        except BlockingIOError:
            return
        except KalosError as error:
            if peer.welcomed:
                self.status.count("bad_requests")
            self._refuse(peer, error)
        except OSError:
            self._drop(peer, "the connection broke")

    def _messages(self, peer: Peer) -> Iterator[tuple[protocol.Head, bytes]]:
        most = self.options.message_nbytes_max if peer.welcomed else protocol.HELLO_NBYTES_MAX
        size = protocol.HEAD.size
        while True:
            if peer.head is None:
                if len(peer.incoming) < size:
                    return
                peer.head_bytes = bytes(peer.incoming[:size])
                peer.head = protocol.read_head(peer.head_bytes, most)
                del peer.incoming[:size]
            if len(peer.incoming) < peer.head.body_nbytes:
                return
            head, peer.head = peer.head, None
            body = bytes(peer.incoming[: head.body_nbytes])
            del peer.incoming[: head.body_nbytes]
            yield head, body

    def _on_message(self, peer: Peer, head: protocol.Head, body: bytes) -> None:
        if not peer.welcomed:
            if head.opcode != protocol.OP_HELLO:
                raise ProtocolError("a connection must begin with HELLO")
            self._welcome(peer, protocol.Hello.read(body, "client"), head)
            return
        assert self._loop is not None
        assert self._workers is not None
        if head.generation != self.generation:
            raise ProtocolError("the request is for another life of the sidecar")
        loop, raw, arrived = self._loop, peer.head_bytes, time.monotonic_ns()
        peer.begin_request()

        def answer() -> None:
            try:
                data = loop.serve_message(peer, raw, body, arrived)
            finally:
                peer.end_request()
            peer.send(data)

        self._workers.submit(answer)
        if peer.is_full:
            self._watch(peer)

    # ---- The handshake --------------------------------------------------------------------------

    def _welcome(self, peer: Peer, asked: protocol.Hello, head: protocol.Head) -> None:
        assert peer.who is not None
        peer.grant = self.access.grant(peer.who.uid, peer.who.gid, peer.who.pid)
        if self.status.state != "ready":
            raise SidecarUnavailable(f"the sidecar is {self.status.state}; try again soon")
        assert self._loop is not None
        mode, mode_why = self._mode(peer, asked)
        transport, transport_why, channel = self._transport(peer, asked)
        granted = protocol.Hello(
            minor=min(asked.minor, protocol.MINOR),
            features=asked.features & protocol.FEATURE_RECONNECT,
            modes=protocol.MODES[mode],
            transports=protocol.TRANSPORTS[transport],
            request_nbytes=self.options.request_nbytes if channel else 0,
            response_nbytes=self.options.response_nbytes if channel else 0,
        )
        extras: dict[str, Any] = {
            "pid": os.getpid(),
            "mode_why": mode_why,
            "transport_why": transport_why,
        }
        if mode == "direct":
            extras.update(self._direct_extras)
        fds = [self.status.fd]
        if channel is not None:
            fds += [channel.requests.fd, channel.responses.fd]
        data = protocol.message(
            protocol.OP_WELCOME,
            granted.body() + protocol.pack(extras),
            id=head.id,
            generation=self.generation,
        )
        if channel is not None:
            peer.is_locked = self.options.lock_memory and channel.lock_in_memory()
            self._loop.add(channel)
            peer.channel = channel
        try:
            endpoint.send_all(peer.sock, data, fds, self.options.handshake_timeout)
        except (OSError, TimeoutError):
            self._drop(peer, "it took no welcome")
            return
        if channel is not None:
            channel.sent()
        peer.mode, peer.transport, peer.welcomed = mode, transport, True
        if asked.features & protocol.FEATURE_RECONNECT:
            self.status.count("reconnects")
        log.info("client %d of user %d: %s by %s", peer.number, peer.who.uid, mode, transport)

    def _mode(self, peer: Peer, asked: protocol.Hello) -> tuple[str, str]:
        """Return the mode that a client gets, and why it is no other."""
        direct = bool(asked.modes & protocol.MODES["direct"])
        served = bool(asked.modes & protocol.MODES["served"])
        if not direct and not served:
            raise ProtocolError("a client must ask for direct or served mode")
        if direct and peer.grant.every_tenant:
            return "direct", ""
        if not served:
            raise PeerDenied(
                "direct mode maps the whole store: only who may use every tenant gets it"
            )
        return "served", "direct mode is for clients that may use every tenant" if direct else ""

    def _transport(
        self, peer: Peer, asked: protocol.Hello
    ) -> tuple[str, str, ServerChannel | None]:
        """Return the transport that a client gets, why it is no other, and the shared memory."""
        memory = bool(asked.transports & protocol.TRANSPORTS["memory"])
        plain = bool(asked.transports & protocol.TRANSPORTS["socket"])
        if not memory and not plain:
            raise ProtocolError("a client must ask for shared memory or the socket")
        why = ""
        if memory:
            used = sum(other.channel is not None for other in self._peers)
            if used >= MAX_CHANNELS:
                why = f"all {MAX_CHANNELS} places for shared memory are taken"
            else:
                try:
                    channel = ServerChannel(
                        peer, self.generation, self.options.request_nbytes,
                        self.options.response_nbytes,
                    )  # fmt: skip
                    return "memory", "", channel
                except (SidecarUnavailable, MemoryError) as error:
                    why = str(error) or "no memory"
        if not plain:
            raise SidecarUnavailable(f"shared memory cannot be had: {why}")
        return "socket", why, None
