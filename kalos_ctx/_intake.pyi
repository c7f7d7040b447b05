from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx._batch import Draft

NAME_BYTES_MAX: int

def name_bytes(value: Any, what: str, *, empty: bool = False) -> bytes: ...
def as_ids(value: Any, vocab_size: int) -> NDArray[np.int32]: ...
def bare_draft(
    role: Any, token_ids: Any, vocab_size: int, created_at: float, framed: bool
) -> Draft | None: ...
def bare_drafts(
    rows: list[Mapping[str, Any]], vocab_size: int, created_at: float
) -> list[Draft] | None: ...
