from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROLE_CODES: dict[str, int]
OUTCOMES: dict[int, str]
FATES: dict[int, str]
VERDICTS: dict[int, str]

class WalkState:
    @property
    def moves(self) -> tuple[tuple[int, int], tuple[int, int]]: ...

class HistoryPlan:
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def call(self) -> int | None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def outcome(self) -> str: ...
    @property
    def probes(self) -> int: ...
    def fate(self, turn: int) -> str: ...
    def repeated_role(self) -> tuple[int, int] | None: ...

class FlatHistory:
    def __init__(
        self,
        lengths: ArrayLike,
        roles: ArrayLike,
        *,
        unit_first: ArrayLike | None = None,
        trims: ArrayLike | None = None,
        character_starts: ArrayLike | None = None,
    ) -> None: ...
    def plan(
        self,
        budget: int,
        *,
        low_water: float = 0.5,
        stable: bool = True,
        partial: bool = False,
        start_on: int = 0,
        end_on: int = 0,
        num_turns: int | None = None,
        settled: int | None = None,
        resume: WalkState | None = None,
    ) -> HistoryPlan: ...

def unit_firsts(
    roles: Sequence[int] | NDArray[Any], groups: Sequence[Hashable]
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]: ...
def unit_starts(unit_first: ArrayLike) -> NDArray[np.uint32]: ...
def merge_history(
    lengths: ArrayLike,
    roles: ArrayLike,
    prefixes: ArrayLike,
    suffixes: ArrayLike,
    *,
    unit_first: ArrayLike | None = None,
    trims: ArrayLike | None = None,
    stops: Sequence[int] = (),
) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]: ...
def select_passages_flat(
    lengths: ArrayLike,
    in_history: ArrayLike,
    same_as: ArrayLike,
    *,
    budget: int,
    prefix: int = 0,
    separator: int = 0,
    suffix: int = 0,
) -> tuple[list[str], int]: ...
def low_water_mark(budget: int, low_water: float) -> int: ...
