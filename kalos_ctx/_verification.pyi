from collections.abc import Callable

from kalos_ctx._reader import StoreReader
from kalos_ctx._writer import StoreWriter
from kalos_ctx.types import VerifyReport

def verify(
    core: StoreReader, progress: Callable[[int, int], None] | None = None
) -> VerifyReport: ...
def snapshot(core: StoreWriter, path: str) -> None: ...
