"""The messages of LangGraph's threads, from the checkpoints of `SqliteSaver`.

Of each thread the latest checkpoint of the outer graph is read, and in it the channel `messages`.
It is read as data: no class that it names is looked up, and a pickle is refused unread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kalos_ctx.chat_files import MAX_RECORD_NBYTES, Refused, parsed_json, too_long
from kalos_ctx.conversations import fill_empty_result, kind_of
from kalos_ctx.found_chats import FoundChat
from kalos_ctx.langchain_messages import openai_message
from kalos_ctx.msgpack_values import Extension, unpack
from kalos_ctx.sqlite_files import Database, text_of

COLUMNS = frozenset({"thread_id", "checkpoint_ns", "checkpoint_id", "type", "checkpoint"})
CHANNEL = "messages"
LATEST = (
    "WITH latest AS (SELECT thread_id, max(checkpoint_id) AS checkpoint_id, min(rowid) AS began "
    "FROM {0} WHERE checkpoint_ns = '' GROUP BY thread_id) "
    "SELECT thread_id, checkpoint_id, type, length(checkpoint) FROM {0} "
    "JOIN latest USING (thread_id, checkpoint_id) WHERE checkpoint_ns = '' ORDER BY began"
)
# Names are read as bytes, and compared as the text that they are.
SAME = "thread_id = CAST(? AS TEXT)"
# LangGraph's MessagePack extensions whose data is (module, class, fields, ...).
CODES_WITH_FIELDS = frozenset({2, 4, 5})
# Where a message has no `type`, its class says the same.
KIND_OF_CLASS = {
    "HumanMessage": "human", "AIMessage": "ai", "SystemMessage": "system", "ToolMessage": "tool",
    "FunctionMessage": "function", "ChatMessage": "chat",
}  # fmt: skip
MAX_NESTED_DATA = 32


class LangGraphThreads:
    """The threads of one file.

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
        self._rows = [
            (table, *row) for table in self._tables for row in database.rows(LATEST.format(table))
        ]
        self.nbytes = sum(row[4] or 0 for row in self._rows)

    def __bool__(self) -> bool:
        """Whether the file has such a table."""
        return bool(self._tables)

    def chats(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[FoundChat]:
        """Yield the threads in the order in which they began."""
        done = 0
        for table, thread, checkpoint, kind, size in self._rows:
            yield self._thread(table, thread, checkpoint, kind)
            done += size or 0
            if on_bytes is not None:
                on_bytes(done)

    def _thread(self, table: str, thread: Any, checkpoint: Any, kind: Any) -> FoundChat:
        place = "a thread"
        skipped: Counter[str] = Counter()
        try:
            name = text_of(thread)
            place = f"thread {name}"
            found = self._database.rows(
                f"SELECT checkpoint FROM {table} WHERE {SAME} AND checkpoint_ns = '' "
                "AND checkpoint_id = CAST(? AS TEXT) AND length(checkpoint) <= ?",
                (thread, checkpoint, MAX_RECORD_NBYTES),
            )
            if not found:
                raise too_long()
            messages = checkpoint_messages(text_of(kind), found[0][0])
        except Refused as refused:
            return FoundChat(place, refused)
        kept = [(f"{CHANNEL}[{i}]", one) for i, one in enumerate(messages) if one is not None]
        if len(kept) < len(messages):
            skipped["empty assistant messages"] = len(messages) - len(kept)
        for _, one in kept:
            if isinstance(one.get("role"), str) and "content" in one:
                fill_empty_result(one, skipped)
        inner = self._database.rows(
            f"SELECT count(DISTINCT checkpoint_ns) FROM {table} "
            f"WHERE {SAME} AND checkpoint_ns <> ''",
            (thread,),
        )
        if inner[0][0]:
            skipped["subgraphs of a thread"] = inner[0][0]
        record = {"id": name, "messages": [one for _, one in kept]}
        return FoundChat(place, record, places=[where for where, _ in kept], skipped=skipped)


def checkpoint_messages(kind: str, data: Any) -> list[dict[str, Any] | None]:
    """Return the messages of a checkpoint in OpenAI's form; None for one without content.

    Parameters
    ----------
    kind : str
        LangGraph's name of the encoding; `msgpack` and `json` are read.
    data : bytes

    Raises
    ------
    Refused
    """
    if not isinstance(data, bytes):
        raise Refused("its checkpoint holds no bytes")
    if kind == "msgpack":
        checkpoint = _resolved(unpack(data), 0)
    elif kind == "json":
        checkpoint = parsed_json(data.decode("utf-8", "replace"))
    elif kind == "pickle":
        raise Refused("its checkpoint is a pickle, which would have to be executed to be read")
    else:
        what = " (encrypted)" if "+" in kind else ""
        raise Refused(f"its checkpoint has the encoding {kind[:40]!a}{what}, which is not read")
    if isinstance(checkpoint, Refused):
        raise checkpoint
    values = checkpoint.get("channel_values") if isinstance(checkpoint, dict) else None
    if not isinstance(values, dict):
        raise Refused("its checkpoint has no channels")
    messages = values.get(CHANNEL)
    if not isinstance(messages, list):
        what = "none" if messages is None else kind_of(messages)
        raise Refused(f"its channel '{CHANNEL}' must be a list of messages (got {what})")
    return [_message(f"{CHANNEL}[{i}]", one) for i, one in enumerate(messages)]


class _Constructed(dict[str, Any]):
    """The fields of an object of a class that is named, and not looked up."""

    kind: str | None = None


def _resolved(value: Any, depth: int) -> Any:
    """Return a value with the extensions in it read, as far as they hold fields."""
    if isinstance(value, list):
        return [_resolved(one, depth) for one in value]
    if isinstance(value, dict):
        return {name: _resolved(one, depth) for name, one in value.items()}
    if not isinstance(value, Extension) or value.code not in CODES_WITH_FIELDS:
        return value
    if depth == MAX_NESTED_DATA:
        raise Refused(f"its checkpoint nests objects more than {MAX_NESTED_DATA} deep")
    parts = _resolved(unpack(value.data), depth + 1)
    if not isinstance(parts, list) or len(parts) < 3 or not isinstance(parts[2], dict):
        return value
    made = _Constructed(parts[2])
    made.kind = KIND_OF_CLASS.get(parts[1]) if isinstance(parts[1], str) else None
    return made


def _message(place: str, value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping) and value.get("type") == "constructor":
        path, fields = value.get("id"), value.get("kwargs")
        last = path[-1] if isinstance(path, list) and path else None
        kind = KIND_OF_CLASS.get(last) if isinstance(last, str) else None
        given = fields.get("type") if isinstance(fields, Mapping) else None
        return openai_message(place, given or kind, fields)
    if isinstance(value, _Constructed):
        return openai_message(place, value.get("type") or value.kind, value)
    if isinstance(value, dict) and "role" in value:
        return value
    raise Refused(f"{place} is no message (got {kind_of(value)})")
