"""`connect_async`: a client for an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from kalos_ctx.sidecar.client import Client, connect


class AsyncClient:
    """`Client` for an event loop: the same calls, to be awaited. Made by `connect_async`.

    Attributes
    ----------
    client : Client
        What it asks with; its calls may be mixed with these.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name in ("close", "pool", "timeout"):
            raise AttributeError(name)
        call = getattr(self.client, name)
        if not callable(call):
            raise AttributeError(name)

        async def asked(*args: Any, **options: Any) -> Any:
            task = asyncio.ensure_future(asyncio.to_thread(call, *args, **options))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                # What comes nobody sees: a window gives its slot back.
                task.add_done_callback(_release_unseen)
                raise

        asked.__name__, asked.__doc__ = name, call.__doc__
        return asked

    async def close(self) -> None:
        """End the connection. Idempotent."""
        await asyncio.to_thread(self.client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


async def connect_async(socket_path: str | os.PathLike[str], **options: Any) -> AsyncClient:
    """Connect without blocking the event loop; as `connect`."""
    return AsyncClient(await asyncio.to_thread(connect, socket_path, **options))


def _release_unseen(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and task.exception() is None and hasattr(task.result(), "release"):
        task.result().release()
