"""The sidecar: owns the writer and the index, and answers other processes.

Three kinds of threads. The one that runs `Sidecar.run` is the control loop: it accepts, checks and
welcomes clients, watches whether they live, and carries what goes by sockets. One runs the hot loop
(`_serving`), which alone looks at shared memory. Workers run what may take long.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kalos_ctx._channel import ServerChannel, StatusPage
from kalos_ctx._serving import MAX_CHANNELS, ServingLoop
from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import (
    InvalidArgument,
    KalosError,
    PeerDenied,
    ProtocolError,
    SidecarUnavailable,
)
from kalos_ctx.sidecar import endpoint, protocol
from kalos_ctx.sidecar.access import AccessRules, Grant
from kalos_ctx.sidecar.calls import Calls
from kalos_ctx.store import SessionStore

log = logging.getLogger(__name__)

PAGE_NBYTES = 4096
RECEIVE_NBYTES = 1 << 16
# Answers by the socket that a client does not take; above this its requests wait.
UNSENT_NBYTES_MAX = 1 << 20
OPEN_REQUESTS_MAX = protocol.SLOTS
HANDSHAKES_A_USER = 256
FEATURE_RECONNECT = 1  # a hello's bit: the client was connected before
SWITCH_INTERVAL_S = 0.0005  # another thread gives the GIL back to the hot loop this soon


@dataclass(frozen=True)
class SidecarOptions:
    """How a sidecar runs.

    Attributes
    ----------
    device : str
        As `ContextAssembler`'s.
    slots : int
        Windows alive at a time in the sidecar.
    spin : float
        Seconds without a request after which the hot loop sleeps.
    poll : bool
        It never sleeps.
    cpu : int, optional
        The CPU that the hot loop is pinned to.
    workers : int
        Threads for calls that may take long.
    max_clients : int
        Connections at a time; the first 127 that want it get shared memory.
    request_nbytes, response_nbytes : int
        Of a slot of shared memory, whole pages. Larger messages go by the socket.
    handshake_timeout : float
        Seconds for a new connection to say hello.
    drain_timeout : float
        Seconds for what was taken to be answered, at the end.
    lease : float, optional
        Seconds without a request after which a client's shared memory is taken back; it connects
        again when it needs to. None: never.
    message_nbytes_max : int
        A larger message is refused.
    metrics_port : int, optional
        Where Prometheus may read, on the loopback interface; 0 picks a port.
    lock_memory : bool
        Keep shared memory from being swapped out, where the system allows it; the gauge
        `locked_bytes` says how much it did.
    """

    device: str = "auto"
    slots: int = 64
    spin: float = 0.0005
    poll: bool = False
    cpu: int | None = None
    workers: int = 8
    max_clients: int = 1024
    request_nbytes: int = 64 << 10
    response_nbytes: int = 272 << 10
    handshake_timeout: float = 2.0
    drain_timeout: float = 5.0
    lease: float | None = None
    message_nbytes_max: int = 256 << 20
    metrics_port: int | None = None
    lock_memory: bool = False

    def __post_init__(self) -> None:
        for name in ("request_nbytes", "response_nbytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < PAGE_NBYTES or value % PAGE_NBYTES:
                raise InvalidArgument(f"{name} must be a number of whole pages (got {value})")
        for name in ("workers", "max_clients"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1 (got {getattr(self, name)})")


class Workers:
    """Threads that run tasks in the order in which they came."""

    def __init__(self, count: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kalos-worker-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task soon."""
        self._tasks.put(task)

    def queued(self) -> int:
        """Tasks that no thread has begun."""
        return self._tasks.qsize()

    def close(self, timeout: float) -> bool:
        """Let the threads finish what is queued; whether they did."""
        for _ in self._threads:
            self._tasks.put(None)
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            try:
                task()
            except Exception:
                log.exception("a task failed in a way that nobody expected")


class Peer:
    """One connection, from its acceptance to its end."""

    def __init__(self, sidecar: Sidecar, sock: socket.socket, number: int) -> None:
        self.sidecar, self.sock, self.number = sidecar, sock, number
        self.who: endpoint.Credentials | None = None
        self.grant = Grant()
        self.channel: ServerChannel | None = None
        self.mode = ""
        self.transport = ""
        self.is_locked = False
        self.welcomed = False
        self.deadline = time.monotonic() + sidecar.options.handshake_timeout
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
        self.sidecar.device_failed(error)

    # ---- Sending: from any thread ---------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send bytes behind those before, without waiting."""
        with self._lock:
            self._unsent.append(memoryview(data))
            self._unsent_nbytes += len(data)
        self.sidecar.wake(self)

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

    @property
    def has_unsent(self) -> bool:
        """Whether answers wait for the socket."""
        return self._unsent_nbytes > 0

    @property
    def is_full(self) -> bool:
        """Whether it must take answers, or wait for some, before it may ask again."""
        return self._unsent_nbytes > UNSENT_NBYTES_MAX or self.open_requests >= OPEN_REQUESTS_MAX


class Sidecar:
    """A store's sidecar at a socket.

    Parameters
    ----------
    store_path, socket_path : path-like
    options : SidecarOptions
    access : AccessRules
    store_options : mapping
        Arguments of `SessionStore.open`.

    Raises
    ------
    InvalidArgument, Conflict
        The socket's path cannot be used, or another sidecar serves it.
    """

    def __init__(
        self,
        store_path: str | os.PathLike[str],
        socket_path: str | os.PathLike[str],
        *,
        options: SidecarOptions | None = None,
        access: AccessRules | None = None,
        store_options: dict[str, Any] | None = None,
    ) -> None:
        self.options = options or SidecarOptions()
        self.access = access or AccessRules.own_user()
        self._store_path = os.path.abspath(store_path)
        self._store_options = dict(store_options or {})
        self.generation = secrets.randbits(63) | 1
        self._endpoint = endpoint.Endpoint(socket_path, shared=self.access.is_shared)
        self.status = StatusPage.create(self.generation, time.time_ns(), os.getpid())
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
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._store: SessionStore | None = None
        self._assembler: ContextAssembler | None = None
        self._calls: Calls | None = None
        self._workers: Workers | None = None
        self._loop: ServingLoop | None = None
        self._hot_thread: threading.Thread | None = None
        self._metrics: Any = None

    # ---- Life -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`; blocks.

        Raises
        ------
        KalosError
            The store cannot be opened, or a device was lost.
        """
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        opener = threading.Thread(target=self._open, name="kalos-open", daemon=True)
        try:
            self._register(self._endpoint.socket, self._accept)
            self._register(self._wake_read, self._on_wake)
            self._start_metrics()
            opener.start()
            self._control()
        finally:
            opener.join()
            self._close()
            sys.setswitchinterval(before)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Drain and end; from any thread or a signal handler. Idempotent."""
        if self._stopping is None:
            self._stopping = time.monotonic()
        self._poke()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until requests are answered; whether they are."""
        return self._ready.wait(timeout) and self._failure is None

    def device_failed(self, error: KalosError) -> None:
        """End, so that whoever watches over the sidecar starts another: the device is lost."""
        if self._failure is None:
            self._failure = error
            log.error("a device failed: %s", error)
        self.stop()

    def _open(self) -> None:
        """Open the store, load what recall needs, and start answering."""
        try:
            store = self._store = SessionStore.open(self._store_path, "a", **self._store_options)
            assembler = self._assembler = ContextAssembler(
                store, device=self.options.device, slots=self.options.slots
            )
            assembler.load(_report_load())
            assembler.combine_recalls()
            self._workers = Workers(self.options.workers)
            calls = self._calls = Calls(
                store, assembler, self._store_options.get("durability", "process")
            )
            self._loop = ServingLoop(
                store,
                assembler,
                self.status,
                protocol=protocol,
                call=calls,
                is_quick=calls.is_quick,
                offload=self._workers.submit,
                spin_ns=0 if _one_cpu() and not self.options.poll else int(self.options.spin * 1e9),
                poll=self.options.poll,
            )
            self._hot_thread = threading.Thread(target=self._serve, name="kalos-hot", daemon=True)
            self._hot_thread.start()
            self.status.state = "ready"
            log.info("ready: store of %d tenants on %s", len(store.tenants()), assembler.device)
        except BaseException as error:
            self._failure = error
            self.stop()
        self._ready.set()

    def _serve(self) -> None:
        """Run the hot loop."""
        assert self._loop is not None
        try:
            if self.options.cpu is not None:
                os.sched_setaffinity(0, {self.options.cpu})
            self._loop.run()
        except BaseException as error:
            # Without the loop nobody is answered: end, so that another is started.
            self._failure = self._failure or error
            log.exception("the hot loop ended in a way that nobody expected")
            self.stop()

    def _close(self) -> None:
        self.status.state = "draining"
        until = (self._stopping or time.monotonic()) + self.options.drain_timeout
        if self._loop is not None and self._hot_thread is not None:
            self._loop.stop()
            self._hot_thread.join(max(0.1, until - time.monotonic()))
        done = self._workers is None or self._workers.close(max(0.1, until - time.monotonic()))
        if not done:
            log.warning("requests were still running when the time to drain was over")
        for peer in list(self._peers):
            with contextlib.suppress(OSError):
                peer.flush()
            self._drop(peer, "the sidecar ends")
        self._selector.close()
        self._endpoint.close()
        if self._metrics is not None:
            self._metrics.close()
        for sock in (self._wake_read, self._wake_write):
            sock.close()
        os.close(self._reserve)
        if self._assembler is not None:
            self._assembler.close()
        if self._store is not None:
            self._store.close()

    def _start_metrics(self) -> None:
        if self.options.metrics_port is not None:
            from kalos_ctx.metrics import MetricsServer

            self._metrics = MetricsServer(self.status, self.options.metrics_port)
            log.info("metrics on http://127.0.0.1:%d/metrics", self._metrics.port)

    # ---- The control loop -----------------------------------------------------------------------

    def _control(self) -> None:
        next_tick = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_tick:
                self._tick(now)
                next_tick = now + 0.25
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
        assembler, store = self._assembler, self._store
        if assembler is not None and store is not None and self._ready.is_set():
            for name, value in assembler.gauges().items():
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
        # A peer that may do neither is watched for its end alone: EPOLLHUP always comes.
        with contextlib.suppress(KeyError):
            key = self._selector.get_key(peer.sock)
            wanted = events or selectors.EVENT_WRITE
            if key.events != wanted:
                self._selector.modify(peer.sock, wanted, key.data)

    def _on_peer(self, peer: Peer, events: int) -> None:
        if peer not in self._peers:
            return
        if events & selectors.EVENT_WRITE:
            self._watch(peer)
        if not events & selectors.EVENT_READ or peer not in self._peers:
            return
        try:
            data, _ = endpoint.receive(peer.sock, RECEIVE_NBYTES)
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
        peer.open_requests += 1

        def answer() -> None:
            try:
                data = loop.serve_message(peer, raw, body, arrived)
            finally:
                peer.open_requests -= 1
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
            features=asked.features & FEATURE_RECONNECT,
            modes=protocol.MODES[mode],
            transports=protocol.TRANSPORTS[transport],
            request_nbytes=self.options.request_nbytes if channel else 0,
            response_nbytes=self.options.response_nbytes if channel else 0,
        )
        extras = {"pid": os.getpid(), "mode_why": mode_why, "transport_why": transport_why}
        if mode == "direct":
            extras["store"] = os.fsencode(self._store_path)
            for name in ("tokenizer", "template"):
                value = self._store_options.get(name)
                extras[name] = os.fsencode(value) if isinstance(value, (str, os.PathLike)) else None
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
        if asked.features & FEATURE_RECONNECT:
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


def _report_load() -> Callable[[int, int], None]:
    """Return what logs how far the vectors are loaded, once in ten seconds at most."""
    last = [time.monotonic()]

    def report(done: int, rows: int) -> None:
        now = time.monotonic()
        if now - last[0] > 10.0:
            last[0] = now
            log.info("loading vectors: %d of %d rows", done, rows)

    return report


def _one_cpu() -> bool:
    """Whether there is one CPU: who spins there keeps the other side from answering."""
    return len(os.sched_getaffinity(0)) == 1


def serve(
    store_path: str | os.PathLike[str],
    socket_path: str | os.PathLike[str],
    *,
    access: AccessRules | str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    template: Any = None,
    vector_dim: int | None = None,
    vector_dtype: str = "float32",
    metric: str = "cosine",
    vocab_size: int | None = None,
    durability: str = "process",
    segment_bytes: int = 67108864,
    on_control: str = "literal",
    on_ready: Callable[[Sidecar], None] | None = None,
    **options: Any,
) -> None:
    """Serve a store to other processes until SIGTERM or SIGINT; blocks.

    Parameters
    ----------
    store_path : path-like
        Made where it is missing.
    socket_path : path-like
        In a folder that nobody else may write to; the folder is made where it is missing.
    access : AccessRules or path-like, optional
        Who may connect and which tenants each may use, or the TOML file that says so. By default
        the caller's own user, every tenant.
    tokenizer, template, vector_dim, vector_dtype, metric, vocab_size, durability, segment_bytes, \
on_control
        As `SessionStore.open`.
    on_ready : callable, optional
        Called with the `Sidecar` once it answers; `stop()` of it ends the call.
    **options
        Fields of `SidecarOptions`.

    Raises
    ------
    InvalidArgument, Conflict, StoreLocked, StoreCorrupt, StoreFull, FingerprintMismatch,
    DeviceUnavailable, DeviceError

    Notes
    -----
    On the main thread it takes the two signals; on another, `on_ready` is the way to stop it.
    """
    if access is not None and not isinstance(access, AccessRules):
        access = AccessRules.load(access)
    try:
        chosen = SidecarOptions(**options)
    except TypeError as error:
        raise InvalidArgument(f"serve has no such option: {error}") from None
    store_options = {
        "tokenizer": tokenizer, "template": template, "vector_dim": vector_dim,
        "vector_dtype": vector_dtype, "metric": metric, "vocab_size": vocab_size,
        "durability": durability, "segment_bytes": segment_bytes, "on_control": on_control,
    }  # fmt: skip
    sidecar = Sidecar(
        store_path, socket_path, options=chosen, access=access, store_options=store_options
    )
    if on_ready is not None:
        tell = on_ready

        def watch() -> None:
            if sidecar.wait_ready():
                tell(sidecar)

        threading.Thread(target=watch, name="kalos-ready", daemon=True).start()
    with _signals(sidecar):
        sidecar.run()


@contextlib.contextmanager
def _signals(sidecar: Sidecar) -> Iterator[None]:
    """Let SIGTERM and SIGINT drain the sidecar, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda *_: sidecar.stop())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
