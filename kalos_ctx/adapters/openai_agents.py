"""Sessions of the OpenAI Agents SDK in a Kalos store.

Extra `openai-agents`. `KalosSession` is a `Session` as the SDK's runner takes it::

    session = KalosSession("user-42", store)
    await Runner.run(agent, "Where did I park?", session=session)

and `ContextAssembler(store).assemble("user-42", ...)` builds the window of the same chat for a
model of one's own.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kalos_ctx.adapters.chat_turns import ChatTurns, Message, parts_text, tool_call
from kalos_ctx.adapters.extras import missing_extra
from kalos_ctx.adapters.off_loop import settled
from kalos_ctx.errors import InvalidType
from kalos_ctx.store import SessionStore

try:
    from agents.memory import SessionSettings
except ImportError as error:
    raise missing_extra("openai-agents", error) from error

if TYPE_CHECKING:
    from agents.items import TResponseInputItem

FIELD = "openai_agents"
# Fields of a call that are no part of what was asked.
NOT_ARGUMENTS = frozenset({"id", "type", "call_id", "status", "name", "namespace"})


class KalosSession:
    """A conversation of the OpenAI Agents SDK, kept as turns.

    Parameters
    ----------
    session_id : str
        Name of the Kalos session, 1 to 1,024 bytes.
    store : SessionStore
        Open for writing. With a tokenizer, windows of the same session can be assembled.
    tenant : str or bytes
    session_settings : SessionSettings or mapping, optional
        Its `limit` counts where `get_items` gets none.
    whole_calls : bool
        Leave the output of a call out where the limit cuts the call off. False gives the latest
        items as they are, like `SQLiteSession`.

    Notes
    -----
    Items come back as they were given: each is kept as JSON in a turn's metadata. What a model said
    in one go (its messages, calls and reasoning) is one assistant turn with tool calls, as chat
    templates render it; each output is a turn of role `tool`, in the call's group. Items that a
    template cannot show, such as hosted tools' calls, ride along with the next turn.

    Store calls run in threads, so that the event loop is never held up. `add_items` is all or
    nothing. `pop_item` is one rollback, and where the turn holds more items an append of the
    others: a crash between the two loses them too. Use one object a session in a process.
    """

    session_settings: SessionSettings | None

    def __init__(
        self,
        session_id: str,
        store: SessionStore,
        *,
        tenant: str | bytes = "",
        session_settings: SessionSettings | Mapping[str, Any] | None = None,
        whole_calls: bool = True,
    ) -> None:
        if not isinstance(session_id, str):
            raise InvalidType(f"session_id must be a str (got {type(session_id).__name__})")
        self.session_id = session_id
        self.session_settings = (
            SessionSettings(**session_settings)
            if isinstance(session_settings, Mapping)
            else session_settings or SessionSettings()
        )
        self.whole_calls = whole_calls
        self._turns = ChatTurns(store, session_id, tenant, FIELD)
        # Nothing comes between the two steps of a pop.
        self._lock = threading.Lock()

    @property
    def store(self) -> SessionStore:
        """The store that keeps the session."""
        return self._turns.store

    @property
    def tenant(self) -> str | bytes:
        """The session's tenant."""
        return self._turns.tenant

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Return the items in the order in which they were added.

        Parameters
        ----------
        limit : int, optional
            At most so many of the latest items; that of `session_settings` where it is not given.
            0 gives none, a negative number all. Where a tool output's call was cut off by it, the
            output is left out (`whole_calls`): fewer items than asked for, never more, and what is
            stored stays as it is.

        Raises
        ------
        StoreCorrupt, StoreClosed
        """
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        return await asyncio.to_thread(self._items, limit)

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Append items, all or none.

        Raises
        ------
        TemplateUnsafe
            The store's chat template cannot show such a turn.
        StoreReadOnly, StoreFull, StoreIOError, InvalidArgument, InvalidType
        """
        await settled(self._add, items)

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove and return the latest item; None where there is none.

        Raises
        ------
        Conflict
            Another writer appended each time that it was tried.
        StoreReadOnly, StoreFull, StoreIOError
        """
        return await settled(self._pop)

    async def clear_session(self) -> None:
        """Erase the session with its bytes, pinned segments included.

        Raises
        ------
        StoreReadOnly, StoreFull, StoreIOError
        """
        await settled(self._turns.clear)

    def _items(self, limit: int | None) -> list[Any]:
        if limit == 0:
            return []
        if limit is None or limit < 0:
            return [item for turn in self._turns.read() for item in self._of_turn(turn)]
        # A turn holds at least one item.
        items = [item for turn in self._turns.read(-limit) for item in self._of_turn(turn)]
        return with_whole_calls(items[-limit:]) if self.whole_calls else items[-limit:]

    def _of_turn(self, turn: Any) -> list[Any]:
        kept = self._turns.kept(turn)
        return items_of(self._turns.message(turn)) if kept is None else kept

    def _add(self, items: Iterable[Any]) -> None:
        entries = entries_of(items)
        with self._lock:
            self._turns.add(entries)

    def _pop(self) -> Any:
        with self._lock:
            popped = self._turns.pop()
            if popped is None:
                return None
            message, kept = popped
            items = kept if message is None else items_of(message)
            if len(items) > 1:
                self._turns.add(entries_of(items[:-1]))
            return items[-1]


def with_whole_calls(items: list[Any]) -> list[Any]:
    """Return items without the tool outputs that no call before them asked for."""
    called: set[Any] = set()
    whole = []
    for item in items:
        if _is_call(item):
            called.add(item["call_id"])
        elif _is_output(item) and item["call_id"] not in called:
            continue
        whole.append(item)
    return whole


def entries_of(items: Iterable[Any]) -> list[tuple[Message, list[Any]]]:
    """Return items as messages, each with the items that it stands for, in order."""
    entries: list[tuple[Message, list[Any]]] = []
    run = _Run()
    for place, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise InvalidType(f"items[{place}] must be a mapping (got {type(item).__name__})")
        message = _own_turn(item)
        if message is None:
            run.take(item)
            continue
        if run.speaks:
            entries.append(run.close())
            run = _Run()
        entries.append((message, [*run.items, item]))
        run = _Run()
    if run.items:
        entries.append(run.close())
    return entries


class _Run:
    """What a model says in one go; items without text wait in it for those with."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.texts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.reasoning = ""

    @property
    def speaks(self) -> bool:
        return bool(self.texts or self.calls)

    def take(self, item: Mapping[str, Any]) -> None:
        self.items.append(item)
        if _is_call(item):
            self.calls.append(tool_call(item["call_id"], *_asked(item)))
        elif item.get("type") == "reasoning":
            self.reasoning += parts_text(item.get("content") or item.get("summary"))
        elif "role" in item:
            text = parts_text(item.get("content"))
            self.texts += [text] if text else []

    def close(self) -> tuple[Message, list[Any]]:
        kind = self.items[-1].get("type", "message")
        text = "\n".join(self.texts) if self.speaks or kind == "message" else f"[{kind}]"
        return Message("assistant", text, self.calls, reasoning=self.reasoning), self.items


def _own_turn(item: Mapping[str, Any]) -> Message | None:
    """Return the message of an item that no model said; None for those of a model."""
    if _is_output(item):
        output = item.get("output")
        if isinstance(output, list) and not all("type" in part for part in output):
            output = json.dumps(output, ensure_ascii=False)  # what a shell printed, for instance
        return Message("tool", parts_text(output), call_id=item["call_id"])
    if item.get("type", "message") == "message" and item.get("role") not in (None, "assistant"):
        return Message(item["role"], parts_text(item.get("content")))
    return None


def _is_call(item: Mapping[str, Any]) -> bool:
    return str(item.get("type")).endswith("_call") and isinstance(item.get("call_id"), str)


def _is_output(item: Mapping[str, Any]) -> bool:
    return str(item.get("type")).endswith("_output") and isinstance(item.get("call_id"), str)


def _asked(item: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the arguments of a call, whatever kind of tool it is for."""
    name = item.get("name") or str(item["type"]).removesuffix("_call")
    if isinstance(item.get("arguments"), str):
        return name, item["arguments"] or "{}"
    return name, {field: item[field] for field in item if field not in NOT_ARGUMENTS}


def items_of(message: Message) -> list[Any]:
    """Return the items of a turn that was not written through a session."""
    if message.role == "tool":
        call_id = message.call_id or ""
        return [{"type": "function_call_output", "call_id": call_id, "output": message.text}]
    items: list[Any] = []
    if message.text or not message.calls:
        items.append({"role": message.role, "content": message.text})
    for call in message.calls:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        items.append(
            {
                "type": "function_call",
                "call_id": call.get("id"),
                "name": function["name"],
                "arguments": text,
            }
        )
    return items
