from collections.abc import Callable
from logging import Logger
from threading import Event, Thread
from weakref import WeakSet, ref

from kalos_ctx._device_rows import DeviceRows
from kalos_ctx._vectors import RowMap

SHORTEST_PAUSE: float
LONGEST_PAUSE: float
ERROR_PAUSE: float
STOP_WAIT: float
LOG: Logger
RUNNING: WeakSet[RowFollower]

class RowFollower:
    ended: Event
    thread: Thread
    def __init__(self, rows: DeviceRows, newest: Callable[[RowMap | None], RowMap]) -> None: ...
    @property
    def runs(self) -> bool: ...
    def stop(self) -> None: ...

def keep_following(
    rows_ref: ref[DeviceRows], newest: Callable[[RowMap | None], RowMap], ended: Event
) -> None: ...
def stop_all() -> None: ...
