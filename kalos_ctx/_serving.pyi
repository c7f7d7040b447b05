from collections.abc import Callable, Mapping
from logging import Logger
from types import ModuleType
from typing import Any

from kalos_ctx._assembler import AssemblerCore
from kalos_ctx._channel import ServerChannel, StatusPage

MAX_CHANNELS: int
log: Logger

class ServingLoop:
    def __init__(
        self,
        store: Any,
        assembler: AssemblerCore,
        status: StatusPage,
        *,
        protocol: ModuleType,
        call: Callable[[str, bytes, bytes, dict[str, Any]], Any],
        is_quick: Callable[[str, Mapping[str, Any]], bool],
        offload: Callable[[Callable[[], None]], None],
        spin_ns: int,
        poll: bool,
    ) -> None: ...
    @property
    def status(self) -> StatusPage: ...
    @property
    def spin_ns(self) -> int: ...
    @property
    def poll(self) -> bool: ...
    @property
    def can_sleep(self) -> bool: ...
    def add(self, channel: ServerChannel) -> None: ...
    def remove(self, channel: ServerChannel) -> None: ...
    def order(self, what: tuple[Any, ...]) -> None: ...
    def stop(self) -> None: ...
    def run(self) -> None: ...
    def serve(
        self, channel: ServerChannel, i: int, unpacked: tuple[str, Any] | None, taken_ns: int
    ) -> None: ...
    def serve_message(
        self, client: Any, head_bytes: bytes, body: bytes, arrived_ns: int
    ) -> bytes: ...
