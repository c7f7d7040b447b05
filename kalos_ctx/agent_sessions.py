"""Sessions of the OpenAI Agents SDK in an SQLite file (`SQLiteSession`, `AdvancedSQLiteSession`).

One table has a row for each item, under any name: the SDK lets its users choose. Where a session
has branches, a second table says which items make up which; the branch `main` is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

from kalos_ctx.agent_items import chat_of
from kalos_ctx.chat_files import MAX_RECORD_NBYTES, Refused, parsed_json, too_long
from kalos_ctx.found_chats import FoundChat
from kalos_ctx.sqlite_files import Database, text_of

COLUMNS = frozenset({"id", "session_id", "message_data", "created_at"})
BRANCH_COLUMNS = frozenset({"session_id", "message_id", "branch_id", "sequence_number"})
BRANCH_TABLE = '"message_structure"'
BRANCH = "main"
# Names are read as bytes, and compared as the text that they are.
SAME = "session_id = CAST(? AS TEXT)"


class AgentSessions:
    """The sessions of one file.

    Attributes
    ----------
    label : str
    nbytes : int
        What `chats` will have told in the end.
    """

    label = ""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = database.tables_with(COLUMNS)
        self._branched = BRANCH_TABLE in database.tables_with(BRANCH_COLUMNS)
        totals = [
            database.rows(f"SELECT total(length(message_data)) FROM {table}")[0][0]
            for table in self._tables
        ]
        self.nbytes = int(sum(totals))

    def __bool__(self) -> bool:
        """Whether the file has such a table."""
        return bool(self._tables)

    def chats(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[FoundChat]:
        """Yield the sessions in the order in which they began."""
        done = 0
        for table in self._tables:
            for session, _, size in self._database.rows(
                f"SELECT session_id, min(id), total(length(message_data)) FROM {table} "
                "GROUP BY session_id ORDER BY min(id)"
            ):
                yield self._session(table, session, size)
                done += int(size)
                if on_bytes is not None:
                    on_bytes(done)

    def _session(self, table: str, session: Any, size: float) -> FoundChat:
        place = "a session"
        try:
            name = text_of(session)
            place = f"session {name}"
            if size > MAX_RECORD_NBYTES:
                raise too_long()
            chat = chat_of(
                (f"item {number}", _seconds(made), _item(number, data))
                for number, data, made in self._items(table, session)
            )
            if not chat.messages:
                raise Refused("it has no messages")
        except Refused as refused:
            return FoundChat(place, refused)
        other = self._other_branches(session)
        if other:
            chat.skipped["branches beside 'main'"] += other
        record = {"id": name, "messages": chat.messages}
        return FoundChat(place, record, places=chat.places, skipped=chat.skipped)

    def _items(self, table: str, session: Any) -> list[tuple[Any, ...]]:
        if not self._branched:
            return self._database.rows(
                f"SELECT id, message_data, created_at FROM {table} WHERE {SAME} ORDER BY id",
                (session,),
            )
        return self._database.rows(
            f"SELECT item.id, item.message_data, item.created_at FROM {table} AS item "
            f"JOIN {BRANCH_TABLE} AS place ON place.message_id = item.id "
            f"WHERE place.{SAME} AND item.session_id = place.session_id "
            "AND place.branch_id = ? ORDER BY place.sequence_number",
            (session, BRANCH),
        )

    def _other_branches(self, session: Any) -> int:
        if not self._branched:
            return 0
        rows = self._database.rows(
            f"SELECT count(DISTINCT branch_id) FROM {BRANCH_TABLE} WHERE {SAME} AND branch_id <> ?",
            (session, BRANCH),
        )
        return int(rows[0][0])


def _item(number: Any, data: Any) -> Any:
    item = parsed_json(text_of(data))
    if isinstance(item, Refused):
        raise Refused(f"item {number}: {item}")
    return item


def _seconds(made: Any) -> float | None:
    """Return the time of a row; SQLite's own form of it is UTC."""
    if isinstance(made, int | float):
        return float(made)
    try:
        moment = datetime.fromisoformat(text_of(made))
    except (ValueError, Refused):
        return None
    return moment.replace(tzinfo=moment.tzinfo or timezone.utc).timestamp()
