"""Items of the OpenAI Agents SDK, as its sessions store them, to messages in OpenAI's chat form.

A session holds items of the Responses API: messages, function calls and their outputs each stand
alone. In the chat form the calls belong to an assistant message, as in the SDK's own conversion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kalos_ctx.chat_files import Refused
from kalos_ctx.conversations import fill_empty_result, kind_of

# What a hosted tool did, or how the model came to its answer: no part of a chat's turns.
LEFT_OUT = frozenset(
    {
        "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call",
        "computer_call_output", "custom_tool_call", "custom_tool_call_output", "file_search_call",
        "image_generation_call", "local_shell_call", "local_shell_call_output",
        "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "shell_call",
        "shell_call_output", "tool_search_call", "tool_search_output", "web_search_call",
    }
)  # fmt: skip
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


@dataclass(slots=True)
class Chat:
    """Messages in OpenAI's chat form, the place of each in the source, and what was left out."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def chat_of(items: Iterable[tuple[str, float | None, Any]]) -> Chat:
    """Return the messages that a session's items make up.

    Parameters
    ----------
    items : iterable of (place, time, item)
        In order; the time in seconds, None where it is not known.

    Raises
    ------
    Refused
    """
    made = _Chat()
    for place, time, item in items:
        made.add(place, time, item)
    return made.chat


class _Chat:
    """A chat that grows item by item."""

    def __init__(self) -> None:
        self.chat = Chat()
        # The assistant message that further calls belong to.
        self._open: dict[str, Any] | None = None
        self._thought = ""

    def add(self, place: str, time: float | None, item: Any) -> None:
        """Take in the next item."""
        if not isinstance(item, dict):
            raise Refused(f"{place} must be a JSON object (got {kind_of(item)})")
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(place, time, item)
        elif kind == "function_call":
            self._call(place, time, item)
        elif kind == "function_call_output":
            output = _text(place, item.get("output"))
            self._open = None
            self._put(
                place, time, {"role": "tool", "content": output, "tool_call_id": _id(place, item)}
            )
        elif kind == "reasoning":
            self._reasoning(item)
        elif isinstance(kind, str) and kind in LEFT_OUT:
            self.chat.skipped[kind] += 1
        else:
            what = f"an unknown type {kind[:40]!a}" if isinstance(kind, str) else "no type"
            raise Refused(f"{place} has {what}")

    def _put(self, place: str, time: float | None, message: dict[str, Any]) -> None:
        if time is not None:
            message["created_at"] = time
        fill_empty_result(message, self.chat.skipped)
        self.chat.messages.append(message)
        self.chat.places.append(place)

    def _message(self, place: str, time: float | None, item: dict[str, Any]) -> None:
        role, text = item.get("role"), _text(place, item.get("content"))
        if role != "assistant":
            self._open = None
            self._put(place, time, {"role": role, "content": text})
            return
        pending = self._open
        if pending is not None and pending.get("tool_calls") and not pending["content"]:
            # A streamed answer may order its calls before its text; both are one turn.
            pending["content"] = text
            self._think(pending)
        elif text:
            self._put(place, time, self._assistant(text))
        else:
            self.chat.skipped["empty assistant messages"] += 1

    def _call(self, place: str, time: float | None, item: dict[str, Any]) -> None:
        name, given = item.get("name"), item.get("arguments") or "{}"
        if not isinstance(name, str) or not isinstance(given, str):
            raise Refused(f"{place} must have a name and arguments that are strings")
        call = {
            "id": _id(place, item),
            "type": "function",
            "function": {"name": name, "arguments": given},
        }
        if self._open is None:
            self._put(place, time, self._assistant(""))
        assert self._open is not None  # `_assistant` opened it
        self._open.setdefault("tool_calls", []).append(call)

    def _assistant(self, text: str) -> dict[str, Any]:
        """Open an assistant message."""
        self._open = {"role": "assistant", "content": text}
        self._think(self._open)
        return self._open

    def _think(self, message: dict[str, Any]) -> None:
        if self._thought:
            message["reasoning_content"] = message.get("reasoning_content", "") + self._thought
            self._thought = ""

    def _reasoning(self, item: dict[str, Any]) -> None:
        """Keep the text of a reasoning item for the assistant message behind it."""
        parts = item.get("content")
        texts = [
            part["text"]
            for part in (parts if isinstance(parts, list) else [])
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        self._thought += "".join(texts)
        if not texts:
            self.chat.skipped["reasoning without its text"] += 1


def _id(place: str, item: dict[str, Any]) -> str:
    given = item.get("call_id")
    if not isinstance(given, str) or not given:
        raise Refused(f"{place} has no call_id")
    return given


def _text(place: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise Refused(f"{place}: content must be a string or a list (got {kind_of(given)})")
    texts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXT_PARTS[kind]) if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise Refused(f"{place} has a content part that is not text")
        texts.append(text)
    return "".join(texts)
