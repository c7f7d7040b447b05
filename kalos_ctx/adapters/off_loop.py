"""Calls of the store made outside the event loop's thread."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def settled(call: Callable[..., Result], *args: Any) -> Result:
    """Run a call that writes in a thread, and wait for its outcome whatever happens.

    A caller that is cancelled meanwhile learns of it once the write is done or refused: what was
    written cannot be taken back, and a second try would write it twice.

    Raises
    ------
    asyncio.CancelledError
        After the call, where the caller was cancelled and the call itself did not fail.
    """
    context = contextvars.copy_context()
    outcome = asyncio.get_running_loop().run_in_executor(None, context.run, call, *args)
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            result = await asyncio.shield(outcome)
            break
        except asyncio.CancelledError as error:
            if outcome.cancelled():  # the executor was shut down before the call began
                raise
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return result
