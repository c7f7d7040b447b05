"""One conversation from a parsed record, in the store's terms.

docs/importing.md describes what is taken from a conversation and what is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kalos_ctx.arguments import name_bytes
from kalos_ctx.chat_files import Refused

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
# A tool may return nothing, and a turn must have tokens.
EMPTY = "[empty]"
STANDS_IN = f"empty results that stand as {EMPTY}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a source, in the store's terms."""

    session: bytes
    turns: list[dict[str, Any]]
    tools: str | None
    places: list[str]

    def place(self, found: re.Match[str], first: int) -> str:
        """Return where in the source a turn stands that the store names by its place in a call."""
        return self.places[first + int(found[1])]


def conversation(
    record: Any,
    unnamed: str,
    *,
    trust_token_ids: bool = False,
    places: Sequence[str] | None = None,
) -> Conversation:
    """Return a parsed JSON value as a conversation.

    Parameters
    ----------
    record : JSON value
        `{"messages": [...]}` or `{"conversations": [...]}`, with `id` and `tools` where they are.
    unnamed : str
        The session's name where the record has no `id`.
    places : sequence of str, optional
        What each message is called in a refusal; `messages[0]` and so on where not given.

    Raises
    ------
    Refused
    """
    if not isinstance(record, dict):
        raise Refused(f"a conversation must be a JSON object (got {kind_of(record)})")
    found = [name for name in ("messages", "conversations") if name in record]
    if len(found) != 1:
        which = "both" if found else "neither"
        raise Refused(f"a conversation must have 'messages' or 'conversations' (has {which})")
    messages = record[found[0]]
    if not isinstance(messages, list) or not messages:
        what = "an empty one" if messages == [] else kind_of(messages)
        raise Refused(f"'{found[0]}' must be a list of messages (got {what})")
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise Refused(f"'system' must be a string (got {kind_of(system)})")
    names = [f"{found[0]}[{i}]" for i in range(len(messages))] if places is None else list(places)
    if system:
        names.insert(0, "system")
        messages = [{"role": "system", "content": system}, *messages]
    turns = [_turn(place, one, trust_token_ids) for place, one in zip(names, messages, strict=True)]
    session = _session(record.get("id"), unnamed)
    return Conversation(session, turns, _tools(record.get("tools")), names)


def fill_empty_result(message: dict[str, Any], skipped: Counter[str]) -> None:
    """Let `[empty]` stand for a result without text, and count it; its call keeps an answer."""
    if message["role"] in ("tool", "function") and message["content"] == "":
        message["content"] = EMPTY
        skipped[STANDS_IN] += 1


def _session(given: Any, unnamed: str) -> bytes:
    if given is None:
        given = unnamed
    elif isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    if not isinstance(given, str):
        raise Refused(f"'id' must be a string or a whole number (got {kind_of(given)})")
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
        raise Refused(f"'tools' must be a list (got {kind_of(given)})")
    return json.dumps(given, ensure_ascii=False)


def _turn(place: str, message: Any, trust_token_ids: bool) -> dict[str, Any]:
    """Return a message as arguments of `append`."""
    if not isinstance(message, dict):
        raise Refused(f"{place} must be a JSON object (got {kind_of(message)})")
    metadata = {name: value for name, value in message.items() if name not in TURN_FIELDS}
    more = message.get("metadata")
    if more is not None:
        if not isinstance(more, dict):
            raise Refused(f"{place}: 'metadata' must be an object (got {kind_of(more)})")
        metadata.update(more)
    group = message.get("group")
    if group is not None and (isinstance(group, bool) or not isinstance(group, str | int)):
        raise Refused(f"{place}: 'group' must be a string or a whole number (got {kind_of(group)})")
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
    raise Refused(f"{place}: content must be a string (got {kind_of(given)})")


def kind_of(value: Any) -> str:
    """Name the kind of a JSON value, for a refusal."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
