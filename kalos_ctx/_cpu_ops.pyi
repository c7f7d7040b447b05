from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_HITS: int
MAX_QUERIES: int
LEVELS: tuple[str, ...]
METRICS: dict[str, int]

_Metric: TypeAlias = Literal["cosine", "ip", "l2"]
_Rows: TypeAlias = NDArray[np.float32] | NDArray[np.float16]

def levels() -> list[str]: ...
def prepare_query(
    query: ArrayLike, *, metric: _Metric = "cosine"
) -> NDArray[np.float32] | None: ...
def score_rows(
    query: ArrayLike,
    rows: _Rows | Sequence[_Rows],
    listed: ArrayLike,
    *,
    metric: _Metric,
    factors: NDArray[np.float32] | None = None,
    level: str | None = None,
) -> NDArray[np.float32]: ...
def topk(
    query: ArrayLike,
    rows: _Rows | Sequence[_Rows],
    *,
    metric: _Metric,
    k: int,
    extents: ArrayLike | None = None,
    tombstones: NDArray[np.bool_] | None = None,
    allowed: NDArray[np.bool_] | None = None,
    ids: NDArray[np.uint64] | None = None,
    min_score: float | None = None,
    factors: NDArray[np.float32] | None = None,
    threads: int = 0,
    level: str | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]: ...
def topk_batch(
    queries: ArrayLike,
    rows: _Rows | Sequence[_Rows],
    *,
    metric: _Metric,
    k: int,
    extents: ArrayLike | None = None,
    tombstones: NDArray[np.bool_] | None = None,
    allowed: NDArray[np.bool_] | None = None,
    ids: NDArray[np.uint64] | None = None,
    min_score: float | None = None,
    factors: NDArray[np.float32] | None = None,
    threads: int = 0,
    level: str | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.uint32], NDArray[np.int64]]: ...
