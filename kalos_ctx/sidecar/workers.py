"""Threads for what may take long."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Workers:
    """Threads that run tasks in the order in which they came."""

    def __init__(self, count: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kalos-worker-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task soon."""
        self._tasks.put(task)

    def queued(self) -> int:
        """Tasks that no thread has begun."""
        return self._tasks.qsize()

    def close(self, timeout: float) -> bool:
        """Let the threads finish what is queued; whether they did."""
        for _ in self._threads:
            self._tasks.put(None)
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            try:
                task()
            except Exception:
                log.exception("a task failed in a way that nobody expected")
