"""Recalls that come while one runs go together, as one scan of several queries.

Nothing waits for others to come: the first scan starts at once, and whoever comes meanwhile is in
the next one. A scan of several queries gives each the hits that it would have had alone, to the
bit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOGETHER_MAX = 64


class _Ask:
    """One query that waits to be taken along."""

    def __init__(self, query: NDArray[np.float32]) -> None:
        self.query = query
        self.turn = threading.Event()  # it has its answer, or leads the next scan
        self.found: Any = None
        self.error: BaseException | None = None
        self.leads = False


class Combiner:
    """Gives scans that differ in nothing but the query to one call.

    Parameters
    ----------
    scan : callable
        (key, queries of shape (B, D)) to a list of B results, one for each query.
    """

    def __init__(self, scan: Callable[[Any, NDArray[np.float32]], list[Any]]) -> None:
        self._scan = scan
        self._lock = threading.Lock()
        # By key, while a scan of it runs: those that came meanwhile.
        self._waiting: dict[Hashable, deque[_Ask]] = {}
        self.combined = 0  # queries that were taken along

    def __call__(self, key: Hashable, query: NDArray[np.float32]) -> Any:
        """Return the result for one query, which the caller has checked."""
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is None:
                self._waiting[key] = deque()
            else:
                ask = _Ask(query)
                waiting.append(ask)
        if waiting is None:
            return self._lead(key, query, [])
        ask.turn.wait()
        if ask.error is not None:
            raise ask.error
        if not ask.leads:
            return ask.found
        return self._lead(key, query, ask.found)

    def _lead(self, key: Hashable, query: NDArray[np.float32], others: list[_Ask]) -> Any:
        """Scan for one's own query and those of others, then let the next one lead."""
        try:
            rows = np.stack([query, *(ask.query for ask in others)])
            own, *found = self._scan(key, rows)
        except BaseException as error:
            for ask in others:
                ask.error = error
                ask.turn.set()
            raise
        finally:
            self._hand_over(key)
        for ask, result in zip(others, found, strict=True):
            ask.found = result
            ask.turn.set()
        return own

    def _hand_over(self, key: Hashable) -> None:
        with self._lock:
            waiting = self._waiting[key]
            if not waiting:
                del self._waiting[key]
                return
            leader = waiting.popleft()
            leader.leads = True
            leader.found = [waiting.popleft() for _ in range(min(len(waiting), TOGETHER_MAX - 1))]
            self.combined += len(leader.found)
        leader.turn.set()
