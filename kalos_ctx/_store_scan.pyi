from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kalos_ctx._reader import StoreReader
from kalos_ctx._vectors import Runs

# Score, ID, slot offset, seq, which of the scope's parts.
Hit: TypeAlias = tuple[float, int, int, int, int]

class Scope:
    @property
    def names(self) -> tuple[bytes, ...]: ...
    @property
    def parts(self) -> tuple[Runs, ...]: ...
    @property
    def runs(self) -> Runs: ...
    @property
    def turns(self) -> bool: ...
    @property
    def expiries(self) -> dict[int, float]: ...
    @property
    def slots(self) -> tuple[int, ...]: ...
    def filtered(self, runs: Runs, passing: dict[int, NDArray[np.uint32]]) -> Runs: ...

class StoreScan:
    def __init__(self, reader: StoreReader) -> None: ...
    def prepare(self, query: ArrayLike) -> tuple[NDArray[np.float32], list[int]]: ...
    def passages(
        self, tenant: bytes, names: tuple[bytes, ...], query: ArrayLike, k: int, min_score: float
    ) -> tuple[
        NDArray[np.uint64],
        NDArray[np.float32],
        NDArray[np.int64],
        list[tuple[int, int, bool]],
        list[int],
        Scope,
        list[int],
        int,
    ]: ...
    def collections(self, tenant: bytes, names: tuple[bytes, ...]) -> Scope: ...
    def session(self, tenant: bytes, name: bytes) -> Scope | None: ...
    def best(
        self,
        scope: Scope,
        runs: Runs,
        prepared: NDArray[np.float32],
        zero: list[int],
        k: int,
        min_score: float,
        tries: int = ...,
    ) -> list[list[Hit]] | None: ...

def lower_bound(min_score: float | None) -> float: ...
