"""Sessions of a store as JSON lines, in the form that `kalos_ctx.importing` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kalos_ctx.conversations import TURN_FIELDS
from kalos_ctx.errors import SessionExpired, SessionNotFound
from kalos_ctx.importing import TOOLS_SEGMENT
from kalos_ctx.terminal import name_text

if TYPE_CHECKING:
    from kalos_ctx._turns import Turn
    from kalos_ctx.store import SessionStore

PAGE = 1000


def export_sessions(
    store: SessionStore, *, tenant: str | bytes = "", full: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a record for each session that has turns, in the order in which they were made.

    A session that another process erases meanwhile is left out.

    Parameters
    ----------
    full : bool
        See `export_session`.
    """
    cursor = None
    while True:
        page = store.sessions(tenant=tenant, cursor=cursor, limit=PAGE)
        for session in page.items:
            try:
                record = export_session(store, session, tenant=tenant, full=full)
            except (SessionNotFound, SessionExpired):
                continue
            if record["messages"]:
                yield record
        cursor = page.cursor
        if cursor is None:
            return


def export_session(
    store: SessionStore, session: str | bytes, *, tenant: str | bytes = "", full: bool = False
) -> dict[str, Any]:
    """Return one session as `{"id", "messages"}`, and `tools` where it has them.

    Parameters
    ----------
    full : bool
        Messages also have `created_at`, and their `token_ids` wherever there is no text.

    Raises
    ------
    SessionNotFound, SessionExpired, StoreCorrupt
    """
    record: dict[str, Any] = {
        "id": name_text(session),
        "messages": [message(turn, full=full) for turn in store.turns(session, tenant=tenant)],
    }
    tools = store.segments(session, tenant=tenant).get(TOOLS_SEGMENT)
    if tools is not None and tools["role"] == "tools" and tools["text"] is not None:
        record["tools"] = json.loads(tools["text"])
    return record


def message(turn: Turn, *, full: bool = False) -> dict[str, Any]:
    """Return one turn as a message; metadata fields stand beside role and content."""
    metadata = turn.metadata or {}
    made: dict[str, Any] = {"role": turn.role, "content": turn.text}
    made.update({name: value for name, value in metadata.items() if name not in TURN_FIELDS})
    hidden = {name: value for name, value in metadata.items() if name in TURN_FIELDS}
    if hidden:
        made["metadata"] = hidden
    if turn.group is not None:
        made["group"] = turn.group
    if turn.text is None and (full or not metadata.get("tool_calls")):
        made["token_ids"] = turn.token_ids.tolist()
    if full:
        made["created_at"] = turn.created_at
    return made
