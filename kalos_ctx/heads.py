"""The head of a window: pinned system texts and tool schemas, as the template frames them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kalos_ctx.errors import InvalidArgument, InvalidType, TemplateUnsafe
from kalos_ctx.firewall import Break, Firewall, Ids
from kalos_ctx.template import HEAD_ROLES, ChatTemplate, Message

if TYPE_CHECKING:
    from kalos_ctx.tokens import TokenCodec

Segment = tuple[str, str, str]
JOIN = "\n\n"
TEMPLATE_NAME = "template"
TOOLS_ROLE = "tools"


class HeadBuilder:
    """Builds one head; made anew for each."""

    def __init__(
        self, codec: TokenCodec, template: ChatTemplate | None, firewall: Firewall
    ) -> None:
        self._codec = codec
        self._template = template
        self._firewall = firewall

    def build(
        self, segments: Sequence[Segment], tools: Sequence[Mapping[str, Any]], now: float
    ) -> list[tuple[str, Ids]]:
        """Return the tiles; `TokenCodec.head` describes them."""
        if self._template is None:
            if tools:
                raise InvalidArgument("tools need a chat template; pin their text instead")
            return [(name, self._codec.encode_text(text)) for name, _, text in segments]
        leading = next(
            (n for n, s in enumerate(segments) if s[1] not in (*HEAD_ROLES, TOOLS_ROLE)),
            len(segments),
        )
        late = [row for row in segments[leading:] if row[1] != TOOLS_ROLE]
        tool_rows = [row for row in segments if row[1] == TOOLS_ROLE]
        systems = [row for row in segments[:leading] if row[1] != TOOLS_ROLE]
        tiles = self._tiles(self._template, systems, tool_rows, tools, now)
        previous = None
        for name, role, text in late:
            # A pinned turn of another role, and what follows it, stands as a turn.
            tiles.append((name, self._codec.encode_turn(role, text, previous).ids))
            previous = role
        return tiles

    def _tiles(
        self,
        template: ChatTemplate,
        systems: Sequence[Segment],
        tool_rows: Sequence[Segment],
        tools: Sequence[Mapping[str, Any]],
        now: float,
    ) -> list[tuple[str, Ids]]:
        schemas = [schema for row in tool_rows for schema in _schemas(row)] + [*tools]
        if systems and template.head_problem is not None:
            raise TemplateUnsafe(f"head text cannot stand by itself: {template.head_problem}")
        if schemas and template.tools_problem is not None:
            raise TemplateUnsafe(f"tool schemas cannot stand in the head: {template.tools_problem}")
        texts = [text for _, _, text in systems]
        breaks = Break(self._firewall, "system", "".join([*texts, json.dumps(schemas)]))
        texts = [breaks.apply(text) for text in texts]
        schemas = breaks.apply_deep(schemas)
        messages = self._messages(template, systems, texts)
        size = sum(map(len, texts)) + len(json.dumps(schemas))
        shown = template.head_text(messages, tools=schemas, now=now, input_chars=size)
        names = [name for name, _, _ in systems]
        # Schemas stand in the first message's block, so every later message starts behind them.
        heads = [
            template.head_text(messages[:n], tools=schemas if n else None, now=now)
            for n in range(len(messages))
        ]
        starts = self._starts(shown, names, texts, heads)
        if schemas:
            label = tool_rows[0][0] if tool_rows else TEMPLATE_NAME
            bare = template.head_text(messages, now=now, input_chars=size)
            starts.append((_divergence(shown, bare), label))
        starts.sort(key=lambda start: start[0])
        if shown and (not starts or starts[0][0] > 0):
            starts.insert(0, (0, TEMPLATE_NAME))
        parts = self._firewall.encode_literal(shown, breaks, [offset for offset, _ in starts[1:]])
        tiles = [
            (name, np.array(part, dtype=np.int32))
            for (_, name), part in zip(starts, parts, strict=False)
        ]
        # A further tools segment shares the first one's block.
        return tiles + [(row[0], np.empty(0, dtype=np.int32)) for row in tool_rows[1:]]

    @staticmethod
    def _messages(
        template: ChatTemplate, systems: Sequence[Segment], texts: Sequence[str]
    ) -> list[Message]:
        if not systems:
            return []
        roles = [
            role if role == "system" or template.takes_developer else "system"
            for _, role, _ in systems
        ]
        if template.many_head_turns:
            return [
                {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
            ]
        # The template would drop or merge a second system message.
        return [{"role": roles[0], "content": JOIN.join(text for text in texts if text)}]

    @staticmethod
    def _starts(
        shown: str, names: Sequence[str], texts: Sequence[str], heads: Sequence[str]
    ) -> list[tuple[int, str]]:
        """Return where each segment starts in the rendered head.

        `heads[n]` is the head of the first n messages alone: there the next one starts, unless the
        texts were joined to one message.
        """
        starts: list[tuple[int, str]] = []
        end = 0
        for number, (name, text) in enumerate(zip(names, texts, strict=True)):
            if number < len(heads) and shown.startswith(heads[number]):
                end = len(heads[number])
            starts.append((end, name))
            wanted = text.strip()
            place = shown.find(wanted, end)
            if place < 0:
                raise TemplateUnsafe(
                    f"the template drops or changes the head text of segment {name!r}"
                )
            end = place + len(wanted)
        return starts


def checked_segment(row: Any) -> Segment:
    """Return `row` as a segment, or raise what is wrong with it."""
    fields = isinstance(row, (tuple, list)) and len(row) == 3
    if not fields or not all(isinstance(field, str) for field in row):
        raise InvalidType("a head segment must be (name, role, text), all of them str")
    name, role, text = row
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"the text of segment {name!r} has a lone surrogate at character {error.start}"
        ) from None
    return name, role, text


def checked_schemas(tools: object) -> list[Mapping[str, Any]]:
    """Return `tools` as a list of mappings that JSON can hold."""
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)) or not all(isinstance(t, Mapping) for t in tools):
        raise InvalidType("tools must be a list of mappings")
    try:
        copied: list[Mapping[str, Any]] = json.loads(json.dumps(list(tools)))
        json.dumps(copied, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        raise InvalidType("tools must hold what JSON can hold") from None
    return copied


def _schemas(row: Segment) -> list[Mapping[str, Any]]:
    name, _, text = row
    try:
        found = json.loads(text)
    except ValueError:
        raise InvalidArgument(f"segment {name!r} of role 'tools' must hold JSON") from None
    found = [found] if isinstance(found, Mapping) else found
    if not isinstance(found, list) or not all(isinstance(schema, Mapping) for schema in found):
        raise InvalidArgument(f"segment {name!r} of role 'tools' must be a list of schemas")
    return found


def _divergence(longer: str, shorter: str) -> int:
    limit = min(len(longer), len(shorter))
    return next((n for n in range(limit) if longer[n] != shorter[n]), limit)
