"""LangChain messages, as their libraries store them, to messages in OpenAI's form.

The fields are those of langchain-core's message classes; docs/importing.md says what becomes of
each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kalos_ctx.chat_files import Refused
from kalos_ctx.conversations import kind_of

# LangChain's `type` of a message to the role; a chunk is a message that was streamed.
KINDS = {
    "human": "user", "HumanMessageChunk": "user",
    "ai": "assistant", "AIMessageChunk": "assistant",
    "system": "system", "SystemMessageChunk": "system",
    "tool": "tool", "ToolMessageChunk": "tool",
    "function": "function", "FunctionMessageChunk": "function",
}  # fmt: skip
# A message whose role its author chose.
CHAT_KINDS = frozenset({"chat", "ChatMessageChunk"})
# Content parts that repeat what stands in `tool_calls`.
CALL_PARTS = frozenset({"tool_use", "tool_call", "function_call", "input_json_delta"})


def openai_message(place: str, kind: Any, fields: Any) -> dict[str, Any] | None:
    """Return a LangChain message in OpenAI's form; None for an assistant message without content.

    Parameters
    ----------
    place : str
        What the message is called in a refusal.
    kind : str
        LangChain's `type`: `human`, `ai`, `tool` and so on.
    fields : mapping
        The message's own fields: `content`, `tool_calls`, `additional_kwargs` and so on.

    Raises
    ------
    Refused
    """
    if not isinstance(fields, Mapping):
        raise Refused(f"{place} must have its fields in an object (got {kind_of(fields)})")
    extra = fields.get("additional_kwargs")
    extra = extra if isinstance(extra, Mapping) else {}
    role = _role(place, kind, fields, extra)
    text, thought = _content(place, fields.get("content"))
    made: dict[str, Any] = {"role": role, "content": text}
    calls = _calls(place, fields, extra) if role == "assistant" else []
    if calls:
        made["tool_calls"] = calls
    elif role == "assistant" and not text:
        return None
    reasoning = extra.get("reasoning_content") or thought
    if isinstance(reasoning, str) and reasoning:
        made["reasoning_content"] = reasoning
    for name in ("tool_call_id", "name", "id"):
        if fields.get(name) is not None:
            made[name] = fields[name]
    if fields.get("status") == "error":
        made["status"] = "error"
    return made


def _role(place: str, kind: Any, fields: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    if isinstance(kind, str) and kind in CHAT_KINDS:
        return fields.get("role")
    role = KINDS.get(kind) if isinstance(kind, str) else None
    if role is None:
        what = f"an unknown role {kind[:40]!a}" if isinstance(kind, str) else "no type"
        raise Refused(f"{place} has {what}")
    if role == "system" and extra.get("__openai_role__") == "developer":
        return "developer"
    return role


def _content(place: str, given: Any) -> tuple[str, str]:
    """Return the text and the reasoning of a message's content."""
    if given is None:
        return "", ""
    if isinstance(given, str):
        return given, ""
    if not isinstance(given, list):
        raise Refused(f"{place}: content must be a string or a list (got {kind_of(given)})")
    texts, thoughts = [], []
    for part in given:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("thinking", "reasoning"):
            thought = part.get(kind)
            thoughts.append(thought if isinstance(thought, str) else "")
        elif kind not in CALL_PARTS:
            raise Refused(f"{place} has a content part that is not text")
    return "".join(texts), "".join(thoughts)


def _calls(place: str, fields: Mapping[str, Any], extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls in OpenAI's form; those whose arguments are no JSON have them as is."""
    own = fields.get("tool_calls") or []
    broken = fields.get("invalid_tool_calls") or []
    if not own and not broken:
        raw = extra.get("tool_calls") or []
        if not isinstance(raw, list) or not all(isinstance(one, Mapping) for one in raw):
            raise Refused(f"{place}: tool calls must be a list of objects")
        return [{k: v for k, v in one.items() if k != "index"} for one in raw]
    if not isinstance(own, list) or not isinstance(broken, list):
        raise Refused(f"{place}: tool calls must be a list of objects")
    made = []
    for call in [*own, *broken]:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise Refused(f"{place} has a tool call without a name")
        given = call.get("args")
        function = {
            "name": call["name"],
            "arguments": given if isinstance(given, str) else _json(place, given or {}),
        }
        made.append({"id": call.get("id"), "type": "function", "function": function})
    return made


def _json(place: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise Refused(f"{place} has tool call arguments that are not JSON") from None
