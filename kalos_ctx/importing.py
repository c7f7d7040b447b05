"""Chats from files: OpenAI-style JSON lines and ShareGPT into a store.

docs/cli.md describes what is taken from a conversation and what is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kalos_ctx.arguments import name_bytes
from kalos_ctx.chat_files import Refused, opened, records
from kalos_ctx.errors import KalosError, StoreFull, StoreIOError, StoreLocked, StoreReadOnly

if TYPE_CHECKING:
    from kalos_ctx.store import SessionStore

ROLES = {
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "function": "function",
}  # fmt: skip
# Fields of a message with a place of their own in a turn; all others become its metadata.
TURN_FIELDS = frozenset(
    {"role", "from", "content", "value", "token_ids", "group", "created_at", "metadata"}
)
TOOLS_SEGMENT = "tools"
TURN_PLACE = re.compile(r"\Aturns\[(\d+)\]")
# The store itself has failed: no later line can fare better.
HOPELESS = (StoreFull, StoreIOError, StoreLocked, StoreReadOnly)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A place in the file that was not taken, and why.

    Attributes
    ----------
    line : int
        From 1: where the conversation begins.
    reason : str
    """

    line: int
    reason: str


@dataclass(slots=True)
class ImportReport:
    """What an import did.

    Attributes
    ----------
    sessions, turns : int
        New sessions, and turns added to new and old ones.
    unchanged : int
        Conversations that the store held already.
    grown : int
        Sessions that gained turns at their end.
    as_system : int
        Developer turns that stand as system turns, since the template has no developer.
    refused : list of Refusal
    """

    sessions: int = 0
    turns: int = 0
    unchanged: int = 0
    grown: int = 0
    as_system: int = 0
    refused: list[Refusal] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a file, in the store's terms."""

    session: bytes
    turns: list[dict[str, Any]]
    tools: str | None
    places: list[str]

    def place(self, found: re.Match[str], first: int) -> str:
        """Return where in the file a turn stands that the store names by its place in a call."""
        return self.places[first + int(found[1])]


def import_file(
    store: SessionStore,
    path: str | os.PathLike[str],
    *,
    tenant: str | bytes = "",
    strict: bool = False,
    trust_token_ids: bool = False,
    on_refusal: Callable[[Refusal], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> ImportReport:
    """Add the conversations of a file to a store.

    Each conversation becomes one session, all of it or nothing. One that the store holds already
    is left as it is, and one that has grown gains its new turns, so that an import may be
    repeated, also after it was interrupted.

    Parameters
    ----------
    store : SessionStore
        Opened for writing, with a tokenizer unless the file holds token IDs only.
    path : path
        The file; "-" is standard input.
    strict : bool
        Stop at the first refusal; what stands before it is in the store.
    trust_token_ids : bool
        Take `token_ids` of messages without text as they are, framing included.
    on_refusal, on_bytes : callable, optional
        Called with each refusal, and with the bytes of the file that were read so far.

    Raises
    ------
    StoreFull, StoreIOError, StoreLocked, StoreReadOnly, OSError
    """
    report = ImportReport()
    taker = _Taker(store, tenant, trust_token_ids, report)
    label = "stdin" if os.fspath(path) == "-" else os.path.basename(os.fspath(path))
    with opened(path) as raw:
        for line, record in records(raw, on_bytes):
            try:
                if isinstance(record, Refused):
                    raise record
                taker.take(record, f"{label}:{line}")
            except HOPELESS:
                raise
            except (Refused, KalosError) as error:
                refusal = Refusal(line, str(error))
                report.refused.append(refusal)
                if on_refusal is not None:
                    on_refusal(refusal)
                if strict:
                    break
    return report


class _Taker:
    """Puts conversations into one store."""

    def __init__(
        self, store: SessionStore, tenant: str | bytes, trust: bool, report: ImportReport
    ) -> None:
        self._store, self._tenant, self._trust, self._report = store, tenant, trust, report
        self._has_developer = _renders_developer(store)

    def take(self, record: Any, unnamed: str) -> None:
        """Add one conversation; Refused or KalosError, and nothing is changed, otherwise."""
        chat = conversation(record, unnamed, trust_token_ids=self._trust)
        if not self._has_developer:
            for turn in chat.turns:
                if turn["role"] == "developer":
                    turn["role"] = "system"
                    self._report.as_system += 1
        store, tenant = self._store, self._tenant
        if chat.tools is not None:
            self._check_tools(chat.tools)
        have = store.count(chat.session, tenant=tenant)
        if have:
            self._check_same(chat, have)
        try:
            added = store.extend(chat.session, chat.turns[have:], tenant=tenant)
        except HOPELESS:
            raise
        except KalosError as error:
            raise Refused(
                TURN_PLACE.sub(lambda found: chat.place(found, have), str(error))
            ) from None
        # Behind the turns: an import that was cut short between the two is completed by the next.
        tools_new = chat.tools is not None and self._pin_tools(chat.session, chat.tools)
        self._report.turns += len(added)
        if not have:
            self._report.sessions += 1
        elif added or tools_new:
            self._report.grown += 1
        else:
            self._report.unchanged += 1

    def _check_same(self, chat: Conversation, have: int) -> None:
        """Refuse a conversation that does not begin as the stored session does."""
        old = self._store.turns(chat.session, tenant=self._tenant)
        for stored, turn in zip(old, chat.turns, strict=False):
            if not _same(stored, turn):
                raise Refused(
                    f"the store has a session of this name whose turn {stored.seq} is another"
                )
        if have > len(chat.turns):
            raise Refused(
                f"the store has a session of this name with more turns, {have} "
                f"(the file has {len(chat.turns)})"
            )

    def _check_tools(self, tools: str) -> None:
        codec = self._store.codec
        if codec is None or not codec.has_template:
            raise Refused("tools need a tokenizer with a chat template")
        codec.head([(TOOLS_SEGMENT, "tools", tools)])

    def _pin_tools(self, session: bytes, tools: str) -> bool:
        old = self._store.segments(session, tenant=self._tenant).get(TOOLS_SEGMENT)
        if old is not None and old["text"] == tools:
            return False
        self._store.set_segment(session, TOOLS_SEGMENT, tools, tenant=self._tenant, role="tools")
        return True


def _renders_developer(store: SessionStore) -> bool:
    codec = store.codec
    if codec is None or not codec.has_template:
        return True
    try:
        codec.encode_turn("developer", "x")
    except KalosError:
        return False
    return True


def _same(stored: Any, turn: Mapping[str, Any]) -> bool:
    """Say whether a stored turn is the file's, as far as the file says."""
    if stored.role != turn["role"] or stored.text != turn["content"]:
        return False
    if (stored.metadata or None) != turn["metadata"] or stored.group != turn["group"]:
        return False
    if turn["created_at"] is not None and stored.created_at != turn["created_at"]:
        return False
    ids = turn.get("token_ids")
    return ids is None or stored.token_ids.tolist() == ids


# ---- One conversation ---------------------------------------------------------------------------


def conversation(record: Any, unnamed: str, *, trust_token_ids: bool = False) -> Conversation:
    """Return a parsed JSON value as a conversation.

    Parameters
    ----------
    record : JSON value
        `{"messages": [...]}` or `{"conversations": [...]}`, with `id` and `tools` where they are.
    unnamed : str
        The session's name where the record has no `id`.

    Raises
    ------
    Refused
    """
    if not isinstance(record, dict):
        raise Refused(f"a conversation must be a JSON object (got {_kind(record)})")
    found = [name for name in ("messages", "conversations") if name in record]
    if len(found) != 1:
        which = "both" if found else "neither"
        raise Refused(f"a conversation must have 'messages' or 'conversations' (has {which})")
    messages = record[found[0]]
    if not isinstance(messages, list) or not messages:
        what = "an empty one" if messages == [] else _kind(messages)
        raise Refused(f"'{found[0]}' must be a list of messages (got {what})")
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise Refused(f"'system' must be a string (got {_kind(system)})")
    places = [f"{found[0]}[{i}]" for i in range(len(messages))]
    if system:
        places.insert(0, "system")
        messages = [{"role": "system", "content": system}, *messages]
    turns = [
        _turn(place, one, trust_token_ids) for place, one in zip(places, messages, strict=True)
    ]
    session = _session(record.get("id"), unnamed)
    return Conversation(session, turns, _tools(record.get("tools")), places)


def _session(given: Any, unnamed: str) -> bytes:
    if given is None:
        given = unnamed
    elif isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    if not isinstance(given, str):
        raise Refused(f"'id' must be a string or a whole number (got {_kind(given)})")
    try:
        # Lone surrogates stand for the bytes of a name that is not UTF-8, as in an export.
        raw = given.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise Refused("'id' holds a lone surrogate that stands for no byte") from None
    return name_bytes(raw, "'id'")


def _tools(given: Any) -> str | None:
    if isinstance(given, str):  # ShareGPT files often hold the list as text
        try:
            given = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError):
            raise Refused("'tools' is text that is not JSON") from None
    if given is None or given == []:
        return None
    if not isinstance(given, list):
        raise Refused(f"'tools' must be a list (got {_kind(given)})")
    return json.dumps(given, ensure_ascii=False)


def _turn(place: str, message: Any, trust_token_ids: bool) -> dict[str, Any]:
    """Return a message as arguments of `append`."""
    if not isinstance(message, dict):
        raise Refused(f"{place} must be a JSON object (got {_kind(message)})")
    metadata = {name: value for name, value in message.items() if name not in TURN_FIELDS}
    more = message.get("metadata")
    if more is not None:
        if not isinstance(more, dict):
            raise Refused(f"{place}: 'metadata' must be an object (got {_kind(more)})")
        metadata.update(more)
    group = message.get("group")
    if group is not None and (isinstance(group, bool) or not isinstance(group, str | int)):
        raise Refused(f"{place}: 'group' must be a string or a whole number (got {_kind(group)})")
    turn = {
        "role": _role(place, message),
        "content": _content(place, message),
        "metadata": metadata or None,
        "group": group,
        "created_at": message.get("created_at"),
    }
    ids = message.get("token_ids")
    if turn["content"] is None and ids is not None:
        if not trust_token_ids:
            raise Refused(
                f"{place} holds token IDs in place of text; --trust-token-ids takes them as given"
            )
        turn.update(token_ids=ids, framed=True)
    elif turn["content"] is None and not metadata.get("tool_calls"):
        raise Refused(f"{place} has no content")
    elif turn["content"] == "" and not metadata.get("tool_calls"):
        raise Refused(f"{place} is empty")
    return turn


def _role(place: str, message: Mapping[str, Any]) -> str:
    given = message.get("role", message.get("from"))
    if not isinstance(given, str):
        raise Refused(f"{place} has no role" if given is None else f"{place}: role is no string")
    role = ROLES.get(given.strip().lower())
    if role is None:
        raise Refused(f"{place} has an unknown role {given[:40]!a}")
    return role


def _content(place: str, message: Mapping[str, Any]) -> str | None:
    given = message.get("content", message.get("value"))
    if isinstance(given, list):
        parts = []
        for part in given:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise Refused(f"{place} has a content part that is not text")
            parts.append(part["text"])
        return "".join(parts)
    if given is None or isinstance(given, str):
        return given
    raise Refused(f"{place}: content must be a string (got {_kind(given)})")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
