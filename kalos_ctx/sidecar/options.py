"""How a sidecar runs."""

from __future__ import annotations

from dataclasses import dataclass

from kalos_ctx.errors import InvalidArgument

PAGE_NBYTES = 4096


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
