from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx._channel import ClientChannel
from kalos_ctx._context_window import ContextWindow
from kalos_ctx._window_wire import WindowReader

class Lost(Exception): ...
class TooLarge(Exception): ...

def query_values(query: Any) -> NDArray[np.float32]: ...

class Asker:
    spins: int
    def __init__(
        self,
        channel: ClientChannel,
        reader: WindowReader,
        is_alive: Callable[[], bool],
        spins: int,
    ) -> None: ...
    @property
    def reader(self) -> WindowReader: ...
    def new_id(self) -> int: ...
    def ping(self, timeout_ns: int) -> None: ...
    def ask(self, opcode: int, body: bytes, timeout_ns: int) -> tuple[bool, bytes]: ...
    def assemble(
        self,
        session: bytes,
        tenant: bytes,
        max_tokens: int,
        reserve: int,
        as_of: int,
        top_k: int,
        query: NDArray[np.float32] | None,
        options: bytes,
        timeout_ns: int,
    ) -> ContextWindow | bytes: ...
