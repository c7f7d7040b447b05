"""What can be imported from: recognising a source and opening the reader for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from kalos_ctx.chat_files import Refused, opened, records
from kalos_ctx.found_chats import ChatSource, FoundChat, SourceUnavailable
from kalos_ctx.redis_chats import RedisChats, is_redis_url, opened_redis, shown_url
from kalos_ctx.sqlite_files import Database, is_sqlite, opened_database

STDIN = "-"
# The field that holds the messages, by format; either where the format was recognised.
FIELDS = {"jsonl": "messages", "sharegpt": "conversations"}
DATABASES = ("openai-agents", "langgraph")
FORMATS = (*FIELDS, *DATABASES, "redis")


@contextmanager
def opened_source(
    source: str | os.PathLike[str], form: str | None = None, *, key_prefix: str | None = None
) -> Iterator[ChatSource]:
    """Open what conversations are to be read from.

    Parameters
    ----------
    source : str or path
        A file, "-" for standard input, or the URL of a Redis server.
    form : str, optional
        One of `FORMATS`; recognised where not given.
    key_prefix : str, optional
        What the keys of Redis begin with.

    Raises
    ------
    SourceUnavailable, OSError
    """
    name = os.fspath(source)
    if is_redis_url(name):
        if form not in (None, "redis"):
            raise SourceUnavailable(f"the URL of a Redis server is not of the format {form}")
        with opened_redis(name) as client:
            yield RedisChats(client, key_prefix, shown_url(name))
    elif form == "redis":
        raise SourceUnavailable("Redis is read from a URL; give redis://HOST:PORT/DATABASE")
    elif form in DATABASES or (form is None and name != STDIN and is_sqlite(name)):
        with opened_database(name) as database:
            chats = _chats_of(database, form)
            chats.label = os.path.basename(name)
            yield chats
    else:
        with opened(name) as raw:
            yield ChatFile(raw, name, FIELDS.get(form or ""))


def _chats_of(database: Database, form: str | None) -> ChatSource:
    from kalos_ctx.agent_sessions import AgentSessions
    from kalos_ctx.langgraph_threads import LangGraphThreads

    readers: dict[str, Any] = dict(zip(DATABASES, (AgentSessions, LangGraphThreads), strict=True))
    found = [readers[name](database) for name in DATABASES if form in (None, name)]
    found = [one for one in found if one]
    if len(found) > 1:
        raise SourceUnavailable("the SQLite file holds chats of two kinds; say which by --format")
    if not found:
        wanted = " or ".join(DATABASES if form is None else (form,))
        raise SourceUnavailable(f"the SQLite file has no table of the format {wanted}")
    source: ChatSource = found[0]
    return source


class ChatFile:
    """The conversations of a JSON file.

    Attributes
    ----------
    label : str
    nbytes : int or None
        The file's size; None where it has none, as standard input.
    """

    def __init__(self, raw: IO[bytes], name: str, field: str | None = None) -> None:
        self._raw, self._field = raw, field
        self._path = "stdin" if name == STDIN else name
        self.label = os.path.basename(self._path)
        self.nbytes = None if name == STDIN else os.fstat(raw.fileno()).st_size or None

    def chats(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[FoundChat]:
        """Yield the conversations in order."""
        for line, value in records(self._raw, on_bytes):
            if self._field is not None and isinstance(value, dict) and self._field not in value:
                value = Refused(f"the conversation has no '{self._field}'; give another --format")
            yield FoundChat(f"{self._path}:{line}", value, f"{self.label}:{line}", line)
