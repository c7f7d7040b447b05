"""Chat histories that LangChain keeps in Redis, in both of its layouts.

langchain-community's has a list a session, `message_store:<session>`, newest message first.
langchain-redis's has a JSON document a message, `chat:<session>:<id>`, of a Redis with RedisJSON.
Keys are found with SCAN and read in pieces, so that a server at work is not held up.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from kalos_ctx.chat_files import MAX_RECORD_NBYTES, Refused, parsed_json, too_long
from kalos_ctx.conversations import fill_empty_result, kind_of
from kalos_ctx.found_chats import FoundChat, SourceUnavailable
from kalos_ctx.langchain_messages import openai_message

SCHEMES = ("redis://", "rediss://", "unix://")
LIST_PREFIX, DOCUMENT_PREFIX = "message_store:", "chat:"
KEYS_AT_ONCE, MESSAGES_AT_ONCE = 500, 500
CONNECT_TIMEOUT_S, TIMEOUT_S = 5.0, 60.0
# Behind the prefix: the session and a ULID.
DOCUMENT_KEY = re.compile(rb"(.+):[0-9A-HJKMNP-TV-Z]{26}", re.DOTALL)
# What a server says of a key of another type, and one without RedisJSON of the command.
NO_DOCUMENT = re.compile("wrong.*type|unknown command", re.IGNORECASE)


def is_redis_url(source: str) -> bool:
    """Say whether a source is the URL of a Redis server."""
    return source.startswith(SCHEMES)


def shown_url(url: str) -> str:
    """Return a server's URL without what may be a secret."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"


@contextmanager
def opened_redis(url: str) -> Iterator[Any]:
    """Yield a client of the server.

    Raises
    ------
    SourceUnavailable
    """
    try:
        shown = shown_url(url)
        redis = importlib.import_module("redis")
        client = redis.Redis.from_url(
            url, protocol=2, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=TIMEOUT_S
        )
    except ModuleNotFoundError:
        raise SourceUnavailable(
            "reading from Redis needs the package redis; pip install 'kalos-ctx[redis]'"
        ) from None
    except ValueError:  # its message may hold the password
        raise SourceUnavailable(
            "the URL of the server cannot be read; give redis://HOST:PORT/DATABASE"
        ) from None
    client.connection_pool.connection_kwargs["decode_responses"] = False
    try:
        yield client
    except redis.RedisError as error:
        raise SourceUnavailable(
            f"{shown} does not answer as a Redis server does "
            f"({type(error).__name__}); check the URL"
        ) from None
    finally:
        client.close()


class RedisChats:
    """The histories of one database.

    Parameters
    ----------
    client : redis.Redis
        One that gives bytes.
    prefix : str, optional
        What the keys begin with, in either layout; what the libraries take where not given.
    label : str
        The server, for a progress bar.
    """

    nbytes: int | None = None

    def __init__(self, client: Any, prefix: str | None = None, label: str = "Redis") -> None:
        self.label = label
        self._client = client
        self._list_prefix = LIST_PREFIX if prefix is None else prefix
        self._document_prefix = DOCUMENT_PREFIX if prefix is None else prefix

    def chats(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[FoundChat]:
        """Yield the sessions, by name."""
        done = 0
        prefix = self._list_prefix.encode()
        for key in self._keys(prefix, "list"):
            found, nbytes = _found(key[len(prefix) :], self._listed(key))
            yield found
            done += nbytes
            if on_bytes is not None:
                on_bytes(done)
        for session, keys in self._documented_sessions().items():
            found, nbytes = _found(session, self._documents(keys))
            if not nbytes:
                continue
            yield found
            done += nbytes
            if on_bytes is not None:
                on_bytes(done)

    def _keys(self, prefix: bytes, kind: str | None = None) -> list[bytes]:
        found = self._client.scan_iter(
            match=_glob_escaped(prefix) + b"*", count=KEYS_AT_ONCE, _type=kind
        )
        return sorted(set(found))  # SCAN may give a key twice

    def _listed(self, key: bytes) -> Iterator[bytes]:
        """Yield a list's items, oldest first: from its end, where new ones move nothing."""
        at = 0
        while items := self._client.lrange(key, -at - MESSAGES_AT_ONCE, -at - 1):
            yield from reversed(items)
            at += len(items)

    def _documented_sessions(self) -> dict[bytes, list[bytes]]:
        """Return the keys of each session's documents, told by the ID at their end."""
        prefix = self._document_prefix.encode()
        found: dict[bytes, list[bytes]] = {}
        for key in self._keys(prefix):
            if match := DOCUMENT_KEY.fullmatch(key[len(prefix) :]):
                found.setdefault(match[1], []).append(key)
        return found

    def _documents(self, keys: list[bytes]) -> Iterator[bytes]:
        """Yield the documents of the keys; what has expired meanwhile, or is none, is left out."""
        for at in range(0, len(keys), MESSAGES_AT_ONCE):
            with self._client.pipeline(transaction=False) as pipe:
                for key in keys[at : at + MESSAGES_AT_ONCE]:
                    pipe.execute_command("JSON.GET", key, "$")
                answers = pipe.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception):
                    if not NO_DOCUMENT.search(str(answer)):
                        raise answer
                elif answer is not None:
                    yield answer


def _found(session: bytes, stored: Iterable[bytes]) -> tuple[FoundChat, int]:
    """Return a session as its stored messages make it up, and how many bytes they took."""
    name = session.decode("utf-8", "surrogateescape")
    place, nbytes = f"session {name}", 0
    rows = []
    try:
        for raw in stored:
            nbytes += len(raw)
            if nbytes > MAX_RECORD_NBYTES:
                raise too_long()
            rows.append(raw)
        return stored_chat(name, place, rows), nbytes
    except Refused as refused:
        return FoundChat(place, refused), nbytes


def stored_chat(name: str, place: str, stored: Sequence[bytes]) -> FoundChat:
    """Return a session from its messages as Redis holds them, in either layout.

    Raises
    ------
    Refused
    """
    rows = [_parsed(f"messages[{i}]", raw) for i, raw in enumerate(stored)]
    documents = bool(rows) and all("timestamp" in row for row in rows)
    if documents:
        # They come by key, and IDs do not say which of one moment was first.
        rows.sort(key=_moment)
    messages, places = [], []
    calls: set[Any] = set()
    skipped: Counter[str] = Counter()
    for i, row in enumerate(rows):
        message = openai_message(f"messages[{i}]", row.get("type"), row.get("data"))
        if message is None:
            skipped["empty assistant messages"] += 1
            continue
        calls.update(one.get("id") for one in message.get("tool_calls", ()))
        if documents:
            if message["role"] == "tool" and message.get("tool_call_id") not in calls:
                # langchain-redis keeps results, but not the calls that they answer.
                skipped["results whose call was not stored"] += 1
                continue
            message["created_at"] = _moment(row)
        fill_empty_result(message, skipped)
        messages.append(message)
        places.append(f"messages[{i}]")
    record = {"id": name, "messages": messages}
    return FoundChat(place, record, places=places, skipped=skipped)


def _parsed(place: str, raw: bytes) -> dict[str, Any]:
    try:
        value = parsed_json(raw.decode())
    except UnicodeDecodeError as error:
        raise Refused(f"{place} is not UTF-8 at byte {error.start + 1}") from None
    if isinstance(value, Refused):
        raise Refused(f"{place}: {value}")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]  # the documents that a JSON path finds
    if not isinstance(value, dict):
        raise Refused(f"{place} must be a JSON object (got {kind_of(value)})")
    return value


def _moment(row: dict[str, Any]) -> float:
    given = row["timestamp"]
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise Refused(f"a timestamp must be a number (got {kind_of(given)})")
    return float(given)


def _glob_escaped(prefix: bytes) -> bytes:
    return re.sub(rb"([\\*?\[\]])", rb"\\\1", prefix)
