from typing import Any

from kalos_ctx._durability import DURABILITIES as DURABILITIES
from kalos_ctx._recovery import RecoveringStore

__all__ = ["DURABILITIES", "WritableStore"]

class WritableStore(RecoveringStore):
    def __init__(
        self, path: str, *, durability: str = "process", config: dict[str, Any]
    ) -> None: ...
    def open_or_create(self, config: dict[str, Any]) -> None: ...
    def index_can_be_made(self, generation: int) -> bool: ...
    def make_generation(self, generation: int) -> None: ...
