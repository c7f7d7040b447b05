from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from kalos_ctx._context_window import ContextWindow as ContextWindow
from kalos_ctx._gathering import Gatherer
from kalos_ctx._reader import StoreReader
from kalos_ctx._session_table import SessionTable
from kalos_ctx._window_parts import WindowParts
from kalos_ctx._windows import WindowPool
from kalos_ctx.planner import Policy
from kalos_ctx.store import SessionStore

class AssemblerCore(SessionTable):
    @property
    def store(self) -> SessionStore: ...
    @property
    def pool(self) -> WindowPool: ...
    @property
    def gatherer(self) -> Gatherer: ...
    def start(
        self,
        store: SessionStore,
        reader: StoreReader,
        clock: Callable[[], float],
        pool: WindowPool,
        gatherer: Gatherer,
        prompt: NDArray[Any],
        starts: NDArray[Any] | None,
    ) -> None: ...
    def fixed_segments(self, parts: WindowParts) -> dict[str, int]: ...
    def assemble(
        self,
        session: str | bytes,
        *,
        tenant: str | bytes = "",
        max_tokens: int | None,
        reserve: int = 0,
        query: Any = None,
        top_k: int = 0,
        collections: str | bytes | Sequence[str | bytes] = (),
        session_recall: bool = False,
        min_score: float | None = None,
        filters: Mapping[str, Any] | None = None,
        placement: str = "before_last_user",
        recall_role: str = "system",
        as_of: int | None = None,
        policy: Policy | None = None,
        stream: Any = None,
        out: Any = None,
    ) -> ContextWindow: ...
    def plan_parts(
        self,
        session: str | bytes,
        *,
        tenant: str | bytes = "",
        max_tokens: int | None,
        reserve: int = 0,
        query: Any = None,
        top_k: int = 0,
        collections: str | bytes | Sequence[str | bytes] = (),
        session_recall: bool = False,
        min_score: float | None = None,
        filters: Mapping[str, Any] | None = None,
        placement: str = "before_last_user",
        recall_role: str = "system",
        as_of: int | None = None,
        policy: Policy | None = None,
        stream: Any = None,
        out: Any = None,
    ) -> WindowParts: ...
