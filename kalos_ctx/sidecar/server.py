"""The sidecar: owns the writer and the index, and answers other processes.

Three kinds of threads. The one that runs `Sidecar.run` is the control loop (`control`): it accepts,
checks and welcomes clients, watches whether they live, and carries what goes by sockets. One runs
the hot loop (`_serving`), which alone looks at shared memory. Workers run what may take long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kalos_ctx._channel import StatusPage
from kalos_ctx._serving import ServingLoop
from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import InvalidArgument, KalosError
from kalos_ctx.sidecar import protocol
from kalos_ctx.sidecar.access import AccessRules
from kalos_ctx.sidecar.calls import Calls
from kalos_ctx.sidecar.control import Control
from kalos_ctx.sidecar.endpoint import Endpoint
from kalos_ctx.sidecar.options import SidecarOptions
from kalos_ctx.sidecar.workers import Workers
from kalos_ctx.store import SessionStore

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # another thread gives the GIL back to the hot loop this soon


class Sidecar(Control):
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
    SidecarUnavailable
        Shared memory cannot be had.
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
        access = access or AccessRules.own_user()
        self._store_path = os.path.abspath(store_path)
        self._store_options = dict(store_options or {})
        # The socket last: what fails before leaves none behind.
        status = StatusPage.create(secrets.randbits(63) | 1, time.time_ns(), os.getpid())
        place = Endpoint(socket_path, shared=access.is_shared)
        extras: dict[str, bytes | None] = {"store": os.fsencode(self._store_path)}
        for name in ("tokenizer", "template"):
            value = self._store_options.get(name)
            extras[name] = None
            if isinstance(value, (str, os.PathLike)):
                extras[name] = os.path.abspath(os.fsencode(value))
        super().__init__(place, status, options or SidecarOptions(), access, extras)
        self._failure: BaseException | None = None
        self._store: SessionStore | None = None
        self._assembler: ContextAssembler | None = None
        self._calls: Calls | None = None
        self._hot_thread: threading.Thread | None = None
        self._metrics: Any = None

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
            self._start_metrics()
            opener.start()
            self.control()
        finally:
            if opener.ident is not None:
                opener.join()
            self._close()
            sys.setswitchinterval(before)
        if self._failure is not None:
            raise self._failure

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until requests are answered; whether they are."""
        return self._ready.wait(timeout) and self._failure is None

    def device_failed(self, error: KalosError) -> None:
        """End, so that whoever watches over the sidecar starts another: the device is lost."""
        if self._failure is None:
            self._failure = error
            log.error("a device failed: %s", error)
        self.stop()

    def gauges(self) -> dict[str, int]:
        """Return what the assembler has in use, once there is one."""
        assembler = self._assembler
        return assembler.gauges() if assembler is not None and self._ready.is_set() else {}

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
        self.close_connections()
        if self._metrics is not None:
            self._metrics.close()
        if self._assembler is not None:
            self._assembler.close()
        if self._store is not None:
            self._store.close()

    def _start_metrics(self) -> None:
        if self.options.metrics_port is not None:
            from kalos_ctx.metrics import MetricsServer

            self._metrics = MetricsServer(self.status, self.options.metrics_port)
            log.info("metrics on http://127.0.0.1:%d/metrics", self._metrics.port)


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
