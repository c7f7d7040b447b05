import numpy as np
from numpy.typing import NDArray

from kalos_ctx._index import Index
from kalos_ctx._log import Log
from kalos_ctx._segment import SegmentSet

class Draft:
    role: int
    flags: int
    prefix_len: int
    suffix_len: int
    trim_prev: int
    passage_id: int
    def __init__(
        self,
        *,
        role: int = 0,
        flags: int = 0,
        ids: NDArray[np.int32] | None = None,
        live: NDArray[np.int32] | None = None,
        prefix_len: int = 0,
        suffix_len: int = 0,
        trim_prev: int = 0,
        text: bytes | None = None,
        metadata: bytes | None = None,
        group: bytes | None = None,
        key: bytes | None = None,
        digest: bytes | None = None,
        created_at: float = 0,
        expires_at: float = 0,
        vector: NDArray[np.uint8] | None = None,
        vector_nbytes: int = 0,
        factor: float = 0,
        passage_id: int = 0,
    ) -> None: ...

class Batch:
    def __init__(self, log: Log, index: Index, tokens: SegmentSet, vectors: SegmentSet) -> None: ...
