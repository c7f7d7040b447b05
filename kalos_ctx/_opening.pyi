from typing import Any

from kalos_ctx._durability import DURABILITIES as DURABILITIES
from kalos_ctx._recovery import RecoveringStore

class WritableStore(RecoveringStore):
    def __init__(
        self, path: str, *, durability: str = "process", config: dict[str, Any]
    ) -> None: ...
