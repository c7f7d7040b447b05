import threading
from typing import Any

from kalos_ctx._reader import StoreReader

DURABILITIES: tuple[str, ...]

class WritableStore(StoreReader):
    def __init__(
        self, path: str, *, durability: str = "process", config: dict[str, Any]
    ) -> None: ...
    @property
    def mutex(self) -> threading._RLock: ...
    @property
    def durability(self) -> str: ...
    @property
    def failed(self) -> str | None: ...
    @property
    def recovery(self) -> dict[str, Any]: ...
    def checkpoint(self) -> None: ...
