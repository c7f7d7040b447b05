"""Messages of other frameworks as turns of a session, and turns as messages again.

A turn keeps the framework's own object as JSON in one field of its metadata, so that it comes back
as it was, and beside it what a window needs: role, text, tool calls. So `ContextAssembler` builds
windows of the same session. Turns that were not written by the adapter are read too.

A call and its results are one group, under a name made for it: providers repeat their call IDs, and
a group that did so would hold together what lies between.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx.errors import (
    Conflict,
    InvalidArgument,
    InvalidType,
    SessionExpired,
    SessionNotFound,
    TemplateUnsafe,
)
from kalos_ctx.store import SessionStore

if TYPE_CHECKING:
    from kalos_ctx import TokenCodec, Turn

EMPTY = "[empty]"
PLACEHOLDER_IDS = (0,)
# How far back the call of a result is looked for.
CALLS_WITHIN = 64
POP_TRIES = 32
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class Message:
    """What a window needs of a message.

    Attributes
    ----------
    role : {"system", "developer", "user", "assistant", "tool", "function"}
    text : str
    calls : sequence of mappings
        Tool calls in OpenAI's chat form: `id`, `type`, and `function` with `name` and `arguments`
        as JSON text.
    call_id : str or None
        Of a result: the call that it answers.
    name : str or None
    reasoning : str
        What the model thought; shown where the template shows it.
    """

    role: str
    text: str
    calls: Sequence[Mapping[str, Any]] = ()
    call_id: str | None = None
    name: str | None = None
    reasoning: str = ""


def tool_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call in OpenAI's chat form; arguments that are no text become JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def parts_text(content: Any) -> str:
    """Return the text of a message's content: parts in a row, `[type]` for what is no text.

    Parameters
    ----------
    content : str, list of str or mappings, or None
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise InvalidType(f"a content part must be a str or a mapping (got {type(part)})")
        found = next((part[k] for k in ("text", "refusal") if isinstance(part.get(k), str)), None)
        texts.append(f"[{part.get('type', 'part')}]" if found is None else found)
    return "".join(texts)


class ChatTurns:
    """One session's turns, each with a framework's own object in its metadata.

    Parameters
    ----------
    store : SessionStore
        With a tokenizer the turns stand in windows as the template frames them. In a store of token
        IDs alone each turn has the one token 0: the history is kept, and windows say nothing.
    session : str or bytes
    tenant : str or bytes
    field : str
        Of the metadata, for the framework's object.

    Notes
    -----
    Thread-safe as the store is. A turn that the template refuses raises TemplateUnsafe; a system or
    developer message that it would drop or move stands as the role that recalled passages have.
    A message without text and calls stands as `[empty]`.
    """

    def __init__(
        self, store: SessionStore, session: str | bytes, tenant: str | bytes, field: str
    ) -> None:
        if not isinstance(store, SessionStore):
            raise InvalidType(f"store must be a SessionStore (got {type(store).__name__})")
        self.store, self.session, self.tenant, self.field = store, session, tenant, field
        self._roles: dict[str, str] = {}

    def count(self) -> int:
        """Return the number of turns, 0 for a session that does not exist."""
        return self.store.count(self.session, tenant=self.tenant)

    def read(self, start: int | None = None) -> list[Turn]:
        """Return the turns from `start` on, as a slice; none for a session that is not there."""
        try:
            return self.store.turns(self.session, start, tenant=self.tenant)
        except (SessionNotFound, SessionExpired):
            return []

    def add(self, entries: Iterable[tuple[Message, Any]]) -> None:
        """Append messages, each with the object that its turn keeps; all or none.

        Raises
        ------
        As `SessionStore.extend`.
        """
        answered: dict[str, tuple[str, str | None]] = {}
        turns = [self._turn(message, kept, answered) for message, kept in entries]
        if turns:
            self.store.extend(self.session, turns, tenant=self.tenant)

    def kept(self, turn: Turn) -> Any:
        """Return the framework's object of a turn, None where another wrote it."""
        return (turn.metadata or {}).get(self.field)

    def message(self, turn: Turn) -> Message:
        """Return a turn that another wrote as a message.

        Raises
        ------
        InvalidArgument
            The turn holds token IDs and the store has no tokenizer.
        """
        extra = turn.metadata or {}
        return Message(
            turn.role,
            self._text(turn, bool(extra.get("tool_calls"))),
            extra.get("tool_calls") or (),
            extra.get("tool_call_id"),
            extra.get("name"),
            extra.get("reasoning_content") or extra.get("thinking") or "",
        )

    def pop(self) -> tuple[Message | None, Any] | None:
        """Take the last turn away and return its message or its object; None where there is none.

        Raises
        ------
        Conflict
            Others appended each time that it was tried.
        """
        for _ in range(POP_TRIES):
            last = self.read(-1)
            if not last:
                return None
            kept = self.kept(last[0])
            # Before the rollback: afterwards there is nothing to read it from.
            found = (None if kept is not None else self.message(last[0]), kept)
            try:
                seq = last[0].seq
                self.store.rollback(self.session, seq, tenant=self.tenant, expect_last=seq)
            except Conflict:
                continue
            return found
        raise Conflict(f"the session was appended to at each of {POP_TRIES} tries")

    def cut(self, to: int) -> None:
        """Keep the turns with seq < `to`."""
        if self.count():
            self.store.rollback(self.session, to, tenant=self.tenant)

    def clear(self) -> None:
        """Erase the session with its bytes, pinned segments included."""
        try:
            self.store.delete(self.session, tenant=self.tenant)
        except SessionNotFound:
            return

    def _turn(
        self, message: Message, kept: Any, answered: dict[str, tuple[str, str | None]]
    ) -> dict[str, Any]:
        """Return the arguments of `append`; `answered` holds the calls of this addition."""
        metadata: dict[str, Any] = {self.field: kept}
        group = None
        if message.calls:
            group = secrets.token_hex(8)
            metadata["tool_calls"] = list(message.calls)
            for call in message.calls:
                answered[str(call.get("id"))] = group, call["function"]["name"]
        elif message.role in ("tool", "function") and message.call_id is not None:
            metadata["tool_call_id"] = message.call_id
            found = answered.get(message.call_id) or self._stored_call(message.call_id)
            group, name = found or (None, None)
            if message.name or name:
                metadata["name"] = message.name or name
        elif message.name:
            metadata["name"] = message.name
        if message.reasoning:
            metadata["reasoning_content"] = message.reasoning
        turn = {"role": self._role(message.role), "metadata": metadata, "group": group}
        if self.store.codec is None:
            return {**turn, "token_ids": PLACEHOLDER_IDS}
        return {**turn, "content": _content(message, self.store.codec.has_template)}

    def _stored_call(self, call_id: str) -> tuple[Any, str | None] | None:
        """Return group and function of the newest stored call of an ID."""
        for turn in reversed(self.read(-CALLS_WITHIN)):
            if turn.role != "assistant":
                continue
            for call in (turn.metadata or {}).get("tool_calls") or ():
                if call.get("id") == call_id:
                    return turn.group, (call.get("function") or {}).get("name")
        return None

    def _role(self, role: str) -> str:
        """Return the role under which a message stands."""
        if role not in ROLES:
            raise InvalidArgument(f"role must be one of {', '.join(ROLES)}")
        if role == "function":
            return "tool"  # OpenAI's older name; no current template renders it
        codec = self.store.codec
        if codec is None or role not in ("system", "developer"):
            return role
        if role not in self._roles:
            self._roles[role] = _role_inside(codec, role)
        return self._roles[role]

    def _text(self, turn: Turn, calls: bool) -> str:
        if turn.text is not None or calls:
            return turn.text or ""
        codec = self.store.codec
        if codec is None:
            raise InvalidArgument(
                f"turn {turn.seq} holds token IDs alone; open the store with its tokenizer"
            )
        return codec.decode(_unframed(codec, turn.role, turn.token_ids))


def _role_inside(codec: TokenCodec, role: str) -> str:
    """Return `role`, or what stands for it where the template does not show such a turn."""
    for one in (role, "system"):
        try:
            codec.encode_turn(one, "a", "user")
        except TemplateUnsafe:
            continue
        return codec.recall_role_used(one)
    return "user"


def _content(message: Message, has_template: bool) -> str | None:
    """Return the text that is encoded; None beside calls that the template writes itself."""
    text = message.text
    if message.calls and not has_template:
        calls = json.dumps([call["function"] for call in message.calls], ensure_ascii=False)
        text = f"{text}\n{calls}" if text else calls
    if not text:
        return None if message.calls else EMPTY
    if text.isascii():
        return text
    # The object keeps a lone surrogate; no tokenizer can.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unframed(codec: TokenCodec, role: str, ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a turn's IDs without the framing that the template gives a plain turn of its role."""
    try:
        frame = codec.frame_ids(role, codec.encode_text("a"), "user")
    except TemplateUnsafe:
        return ids
    start, end = frame.prefix_len, frame.suffix_len
    if start and np.array_equal(ids[:start], frame.ids[:start]):
        ids = ids[start:]
    if end and np.array_equal(ids[-end:], frame.ids[-end:]):
        ids = ids[:-end]
    return ids
