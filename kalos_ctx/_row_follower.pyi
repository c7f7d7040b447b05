from collections.abc import Callable
from threading import Thread

from kalos_ctx._device_rows import DeviceRows
from kalos_ctx._vectors import RowMap

SHORTEST_PAUSE: float
LONGEST_PAUSE: float
ERROR_PAUSE: float
STOP_WAIT: float

class RowFollower:
    thread: Thread
    def __init__(self, rows: DeviceRows, newest: Callable[[RowMap | None], RowMap]) -> None: ...
    @property
    def runs(self) -> bool: ...
    def stop(self) -> None: ...

def stop_all() -> None: ...
