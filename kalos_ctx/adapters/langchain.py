"""LangChain on a Kalos store: chat histories, trimming, and a vector store.

Extra `langchain`. The three parts work alone: `KalosChatMessageHistory` keeps messages as turns of
which windows can be assembled, `trim_messages` cuts a list of messages by Kalos's rules, and
`KalosVectorStore` keeps documents as passages that windows can recall.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kalos_ctx.adapters.chat_turns import ChatTurns, Message, parts_text, tool_call
from kalos_ctx.adapters.extras import missing_extra
from kalos_ctx.adapters.message_units import trimmed
from kalos_ctx.adapters.off_loop import settled
from kalos_ctx.errors import InvalidArgument, InvalidType
from kalos_ctx.store import SessionStore

try:
    from langchain_core.chat_history import BaseChatMessageHistory
    from langchain_core.messages import (
        AIMessage,
        BaseMessage,
        ChatMessage,
        HumanMessage,
        SystemMessage,
        ToolMessage,
        convert_to_messages,
        message_to_dict,
        messages_from_dict,
    )
    from langchain_core.messages.utils import count_tokens_approximately
    from langchain_core.runnables import RunnableLambda

    from kalos_ctx.adapters.langchain_vectors import KalosVectorStore
except ImportError as error:
    raise missing_extra("langchain", error) from error

__all__ = [
    "KalosChatMessageHistory",
    "KalosVectorStore",
    "langchain_message",
    "trim_messages",
    "turn_message",
]

FIELD = "langchain"
ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}
# Content parts that repeat what stands in `tool_calls`.
CALL_PARTS = frozenset({"tool_use", "tool_call", "function_call", "input_json_delta"})
THOUGHTS = ("thinking", "reasoning")


# ---- Chat history -------------------------------------------------------------------------------


class KalosChatMessageHistory(BaseChatMessageHistory):
    """LangChain messages, kept as the turns of one session.

    Parameters
    ----------
    session_id : str or bytes
    store : SessionStore
        Open for writing. With a tokenizer, windows of the same session can be assembled.
    tenant : str or bytes

    Notes
    -----
    Messages come back equal to those that were added: each is kept as JSON in its turn's metadata.
    Turns that others wrote are read as messages too. `clear` erases the session's bytes and its
    pinned segments. The async methods run in threads.
    """

    def __init__(
        self, session_id: str | bytes, store: SessionStore, *, tenant: str | bytes = ""
    ) -> None:
        self.session_id = session_id
        self._turns = ChatTurns(store, session_id, tenant, FIELD)

    @property
    def messages(self) -> list[BaseMessage]:  # type: ignore[override,unused-ignore]
        """All messages, oldest first.

        Raises
        ------
        StoreCorrupt, StoreClosed
        """
        return [self._message(turn) for turn in self._turns.read()]

    def latest(self, count: int) -> list[BaseMessage]:
        """Return at most `count` of the latest messages without reading the others."""
        return [self._message(turn) for turn in self._turns.read(-count)] if count > 0 else []

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Append messages, all or none.

        Raises
        ------
        TemplateUnsafe
            The store's chat template cannot show such a turn.
        StoreReadOnly, StoreFull, StoreIOError, InvalidArgument, InvalidType
        """
        self._turns.add([(turn_message(one), message_to_dict(one)) for one in messages])

    async def aadd_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Append messages, all or none; a caller that is cancelled waits for the outcome."""
        await settled(self.add_messages, messages)

    def clear(self) -> None:
        """Erase the session with its bytes, pinned segments included."""
        self._turns.clear()

    async def aclear(self) -> None:
        """Erase the session with its bytes, pinned segments included."""
        await settled(self.clear)

    def _message(self, turn: Any) -> BaseMessage:
        kept = self._turns.kept(turn)
        if kept is not None:
            return messages_from_dict([kept])[0]
        return langchain_message(self._turns.message(turn))


def turn_message(message: BaseMessage) -> Message:
    """Return what a window needs of a LangChain message."""
    if not isinstance(message, BaseMessage):
        raise InvalidType(f"messages must be LangChain messages (got {type(message).__name__})")
    kind = message.type.removesuffix("MessageChunk").lower()
    if kind == "remove":
        raise InvalidArgument("a RemoveMessage is no turn: clear the history, or write it anew")
    extra = message.additional_kwargs
    role = ROLES.get(kind) or str(getattr(message, "role", kind))
    if role == "system" and extra.get("__openai_role__") == "developer":
        role = "developer"
    text, thought = _text_and_thought(message.content)
    calls = [tool_call(one["id"], one["name"], one["args"]) for one in _calls(message)]
    return Message(
        role,
        text,
        calls,
        getattr(message, "tool_call_id", None),
        message.name,
        extra.get("reasoning_content") or thought,
    )


def langchain_message(message: Message) -> BaseMessage:
    """Return a turn that was not written through a history as a LangChain message."""
    if message.role == "assistant":
        extra = {"reasoning_content": message.reasoning} if message.reasoning else {}
        calls = [
            {"id": call.get("id"), "type": "function", "function": call["function"]}
            for call in message.calls
        ]
        made = {"role": "assistant", "content": message.text, "tool_calls": calls}
        return convert_to_messages([made])[0].model_copy(update={"additional_kwargs": extra})
    if message.role == "tool":
        return ToolMessage(message.text, tool_call_id=message.call_id or "", name=message.name)
    if message.role == "user":
        return HumanMessage(message.text, name=message.name)
    if message.role == "system":
        return SystemMessage(message.text, name=message.name)
    return ChatMessage(content=message.text, role=message.role)


def _calls(message: BaseMessage) -> list[Mapping[str, Any]]:
    """Return a message's calls, those whose arguments are no JSON among them."""
    if not isinstance(message, AIMessage):
        return []
    broken = [{**one, "name": one["name"] or ""} for one in message.invalid_tool_calls]
    return [*message.tool_calls, *broken]


def _text_and_thought(content: Any) -> tuple[str, str]:
    if isinstance(content, str):
        return content, ""
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
    shown = [
        part
        for part, kind in zip(content, kinds, strict=True)
        if kind not in CALL_PARTS and kind not in THOUGHTS
    ]
    thoughts = [
        str(part.get(kind) or "")
        for part, kind in zip(content, kinds, strict=True)
        if kind in THOUGHTS
    ]
    return parts_text(shown), "".join(thoughts)


# ---- Trimming -----------------------------------------------------------------------------------


def trim_messages(
    messages: Any = None,
    *,
    max_tokens: int,
    token_counter: Any,
    strategy: str = "last",
    allow_partial: bool = False,
    end_on: str | type[BaseMessage] | Sequence[str | type[BaseMessage]] | None = None,
    start_on: str | type[BaseMessage] | Sequence[str | type[BaseMessage]] | None = None,
    include_system: bool = False,
    text_splitter: Any = None,
) -> Any:
    """Cut a list of messages to a number of tokens, calls and results kept together.

    Takes the arguments of `langchain_core.messages.trim_messages`, and can stand in its place.

    Parameters
    ----------
    messages : iterable of messages, or None
        None gives a Runnable that trims what it is given.
    max_tokens : int
        Hard bound of what `token_counter` says of the result.
    token_counter : callable, language model or "approximate"
        Counts a list of messages; one whose first parameter is annotated as BaseMessage, a message.
    strategy : {"last", "first"}
        Which end of the list is kept.
    allow_partial : bool
        The unit at the cut may lose part of its text. Inside a group the call and all its results
        stay, and the results' text is cut.
    end_on, start_on : str, message class or several, optional
        Kinds on which the result must end and begin; whole units go until it does. With "last",
        `end_on` counts before the cut and `start_on` after it; with "first" the other way round,
        and `start_on` is refused.
    include_system : bool
        Keep a system message that comes first; "last" alone.
    text_splitter : callable or TextSplitter, optional
        Splits a text into pieces that make it up; lines where it is not given.

    Returns
    -------
    list of BaseMessage, or Runnable

    Raises
    ------
    BudgetExceeded
        The system message that must stay does not fit by itself.
    InvalidArgument, InvalidType

    Notes
    -----
    Where it differs from LangChain's: a call and its results are kept or dropped together, a result
    without an earlier call never stands in the result, and what the counter says of the result is
    at most `max_tokens`, also where it is not the sum of what it says of the messages.
    """
    if messages is None:

        def trim(given: Any) -> Any:
            return trim_messages(given, **options)

        options = {
            "max_tokens": max_tokens, "token_counter": token_counter, "strategy": strategy,
            "allow_partial": allow_partial, "end_on": end_on, "start_on": start_on,
            "include_system": include_system, "text_splitter": text_splitter,
        }  # fmt: skip
        return RunnableLambda(trim)
    if strategy not in ("first", "last"):
        raise InvalidArgument(f"strategy must be 'first' or 'last' (got {strategy!r})")
    for name, given in (("start_on", start_on), ("include_system", include_system)):
        if given and strategy == "first":
            raise InvalidArgument(f"{name} is for strategy='last'")
    return trimmed(
        convert_to_messages(messages),
        max_tokens=max_tokens,
        count=_list_counter(token_counter),
        last=strategy == "last",
        allow_partial=allow_partial,
        ends=_kinds("end_on", end_on),
        starts=_kinds("start_on", start_on),
        include_system=include_system,
        split=_splitter(text_splitter),
    )


def _list_counter(counter: Any) -> Callable[[list[BaseMessage]], int]:
    """Return a counter of lists, whatever kind of counter was given."""
    if counter == "approximate":
        return lambda messages: int(count_tokens_approximately(messages))
    if hasattr(counter, "get_num_tokens_from_messages"):
        found: Callable[[list[BaseMessage]], int] = counter.get_num_tokens_from_messages
        return found
    if isinstance(counter, str) or not callable(counter):
        raise InvalidArgument(
            "token_counter must be 'approximate', a function, or a model that has "
            f"get_num_tokens_from_messages (got {type(counter).__name__})"
        )
    if _counts_one(counter):
        return lambda messages: sum(map(counter, messages))
    return counter  # type: ignore[no-any-return]


def _counts_one(counter: Callable[..., Any]) -> bool:
    try:
        first = next(iter(inspect.signature(counter).parameters.values()), None)
    except ValueError:  # a built-in that does not say what it takes
        return False
    return first is not None and first.annotation in (BaseMessage, "BaseMessage")


def _splitter(given: Any) -> Callable[[str], list[str]]:
    if given is None:
        return lambda text: text.splitlines(keepends=True)
    split = getattr(given, "split_text", given)
    if not callable(split):
        raise InvalidType(
            f"text_splitter must be callable or have split_text (got {type(given).__name__})"
        )
    return split  # type: ignore[no-any-return]


def _kinds(name: str, given: Any) -> Callable[[BaseMessage], bool] | None:
    """Return whether a message is of the kinds that were given; None for any."""
    if given is None:
        return None
    several = [given] if isinstance(given, str | type) else list(given)
    for one in several:
        if not isinstance(one, str | type):
            raise InvalidType(f"{name} must hold names or classes (got {type(one).__name__})")
    if not several:
        return None
    classes = tuple(one for one in several if isinstance(one, type))
    return lambda message: message.type in several or isinstance(message, classes)
