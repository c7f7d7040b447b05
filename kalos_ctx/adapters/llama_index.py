"""LlamaIndex on a Kalos store: a chat store, and a memory block that recalls.

Extra `llama-index`. `KalosChatStore` keeps the histories of `ChatMemoryBuffer` and others as turns
of which windows can be assembled; `KalosMemoryBlock` keeps what falls out of a `Memory` as passages
and finds again what belongs to the newest messages.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from kalos_ctx.adapters.chat_turns import ChatTurns, Message, tool_call
from kalos_ctx.adapters.extras import missing_extra
from kalos_ctx.adapters.off_loop import settled
from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import InvalidArgument, InvalidType, UnknownField
from kalos_ctx.store import SessionStore

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.base.llms.types import (
        ChatMessage,
        TextBlock,
        ThinkingBlock,
        ToolCallBlock,
    )
    from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
    from llama_index.core.memory import BaseMemoryBlock
    from llama_index.core.storage.chat_store.base import BaseChatStore
except ImportError as error:
    raise missing_extra("llama-index", error) from error

FIELD = "llama_index"
ROLES = {"chatbot": "assistant", "model": "assistant"}
# Blocks that say how a message is handled, and nothing to the model.
SILENT = frozenset({"cache"})
SEPARATOR = "\n\n"
PAGE = 1000


class KalosChatStore(BaseChatStore):
    """Chat histories by key, each the turns of the session of that name.

    Parameters
    ----------
    store : SessionStore
        Open for writing. With a tokenizer, windows of the same sessions can be assembled.
    tenant : str or bytes

    Notes
    -----
    Messages come back equal to those that were added. `add_message` and `delete_last_message` are
    one append and one rollback. `set_messages` and `delete_message` keep the turns up to the first
    difference, roll the others back and append the new ones: a crash between the two leaves the
    history cut there. `delete_messages` erases the session's bytes and its pinned segments.

    The async methods run in threads; a caller of one that writes who is cancelled waits for the
    outcome.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    store: Any = Field(exclude=True)
    tenant: Any = ""

    def __init__(self, store: SessionStore, *, tenant: str | bytes = "") -> None:
        if not isinstance(store, SessionStore):
            raise InvalidType(f"store must be a SessionStore (got {type(store).__name__})")
        fields: dict[str, Any] = {"store": store, "tenant": tenant}
        super().__init__(**fields)

    @classmethod
    def class_name(cls) -> str:
        """Return the class's name in serialised components."""
        return "KalosChatStore"

    def set_messages(self, key: str, messages: list[ChatMessage]) -> None:
        """Make `messages` the whole history of a key.

        Raises
        ------
        TemplateUnsafe
            The store's chat template cannot show such a turn.
        StoreReadOnly, StoreFull, StoreIOError, InvalidArgument, InvalidType
        """
        turns = self._turns(key)
        entries = [entry_of(one) for one in messages]
        old = [turns.kept(turn) for turn in turns.read()]
        same = 0
        while same < min(len(old), len(entries)) and old[same] == entries[same][1]:
            same += 1
        if same < len(old):
            turns.cut(same)
        turns.add(entries[same:])

    def get_messages(self, key: str) -> list[ChatMessage]:
        """Return the history of a key, oldest first; an empty list where there is none."""
        turns = self._turns(key)
        return [_message(turns, turn) for turn in turns.read()]

    def add_message(self, key: str, message: ChatMessage) -> None:
        """Append a message; raises as `set_messages` does."""
        self._turns(key).add([entry_of(message)])

    def delete_messages(self, key: str) -> list[ChatMessage] | None:
        """Erase the history of a key and return it; None where there is none."""
        found = self.get_messages(key)
        self._turns(key).clear()
        return found or None

    def delete_message(self, key: str, idx: int) -> ChatMessage | None:
        """Remove a message by its place, which may count from the end; None where there is none."""
        messages = self.get_messages(key)
        if not -len(messages) <= idx < len(messages):
            return None
        removed = messages.pop(idx)
        self.set_messages(key, messages)
        return removed

    def delete_last_message(self, key: str) -> ChatMessage | None:
        """Remove the latest message; None where there is none.

        Raises
        ------
        Conflict
            Another writer appended each time that it was tried.
        """
        popped = self._turns(key).pop()
        if popped is None:
            return None
        message, kept = popped
        return ChatMessage.model_validate(kept) if message is None else llama_message(message)

    def get_keys(self) -> list[str]:
        """Return the names of the tenant's sessions that are text."""
        keys: list[str] = []
        cursor: str | None = None
        while True:
            page = self.store.sessions(tenant=self.tenant, cursor=cursor, limit=PAGE)
            keys += [name for name in page.items if isinstance(name, str)]
            cursor = page.cursor
            if cursor is None:
                return keys

    async def aset_messages(self, key: str, messages: list[ChatMessage]) -> None:
        """Make `messages` the whole history of a key."""
        await settled(self.set_messages, key, messages)

    async def async_add_message(self, key: str, message: ChatMessage) -> None:
        """Append a message."""
        await settled(self.add_message, key, message)

    async def adelete_messages(self, key: str) -> list[ChatMessage] | None:
        """Erase the history of a key and return it."""
        return await settled(self.delete_messages, key)

    async def adelete_message(self, key: str, idx: int) -> ChatMessage | None:
        """Remove a message by its place."""
        return await settled(self.delete_message, key, idx)

    async def adelete_last_message(self, key: str) -> ChatMessage | None:
        """Remove the latest message."""
        return await settled(self.delete_last_message, key)

    def _turns(self, key: str) -> ChatTurns:
        return ChatTurns(self.store, key, self.tenant, FIELD)


def entry_of(message: ChatMessage) -> tuple[Message, Any]:
    """Return what a window needs of a message, and the JSON that its turn keeps."""
    if not isinstance(message, ChatMessage):
        raise InvalidType(f"messages must be ChatMessages (got {type(message).__name__})")
    kept = message.model_dump(mode="json")
    texts, thoughts, calls = [], [], []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.content or "")
        elif isinstance(block, ToolCallBlock):
            calls.append(tool_call(block.tool_call_id, block.tool_name, block.tool_kwargs))
        elif block.block_type not in SILENT:
            texts.append(f"[{block.block_type}]")
    extra = kept["additional_kwargs"]
    role = ROLES.get(message.role.value, message.role.value)
    shown = Message(
        role,
        "\n".join(texts),
        calls or (_raw_calls(extra.get("tool_calls")) if role == "assistant" else ()),
        extra.get("tool_call_id") if role in ("tool", "function") else None,
        extra.get("name"),
        "".join(thoughts),
    )
    return shown, kept


def _raw_calls(given: Any) -> list[dict[str, Any]]:
    """Return calls in the form of a provider's own objects."""
    made = []
    for call in given if isinstance(given, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            arguments = function.get("arguments") or "{}"
            made.append(tool_call(call.get("id"), function["name"], arguments))
    return made


def llama_message(message: Message) -> ChatMessage:
    """Return a turn that was not written through a chat store as a message."""
    extra: dict[str, Any] = {}
    if message.calls:
        extra["tool_calls"] = [dict(call) for call in message.calls]
    if message.call_id is not None:
        extra["tool_call_id"] = message.call_id
    if message.name is not None:
        extra["name"] = message.name
    return ChatMessage(role=message.role, content=message.text, additional_kwargs=extra)


def _message(turns: ChatTurns, turn: Any) -> ChatMessage:
    kept = turns.kept(turn)
    if kept is None:
        return llama_message(turns.message(turn))
    return ChatMessage.model_validate(kept)


class KalosMemoryBlock(BaseMemoryBlock[str]):
    """A memory block that keeps messages as passages and recalls by meaning, exactly.

    Parameters
    ----------
    store : SessionStore
        Open for writing where messages are put.
    embed_model : BaseEmbedding
    assembler : ContextAssembler, optional
        Does the searching; one of its own where it is not given.
    collection, tenant : str or bytes
    top_k : int
        Messages that are recalled at most, 1 to 1,024.
    min_score : float, optional
        Inclusive; what scores less is left out.
    recent : int
        How many of the newest messages make the query.
    one_session : bool
        Recall what was put for the same session alone.
    name, description, priority, accept_short_term_memory
        As in `BaseMemoryBlock`.

    Notes
    -----
    The content is the recalled messages, best first, with an empty line between. `atruncate` drops
    the last of them. The same passages stand in windows of `assemble(collections=collection)`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str = "KalosMemory"
    store: Any = Field(exclude=True)
    embed_model: BaseEmbedding
    assembler: Any = Field(default=None, exclude=True)
    collection: Any = "memories"
    tenant: Any = ""
    top_k: int = Field(default=4, ge=1, le=1024)
    min_score: float | None = None
    recent: int = Field(default=2, ge=1)
    one_session: bool = True
    _assembler: Any = PrivateAttr(default=None)

    def __init__(
        self,
        *,
        store: SessionStore,
        embed_model: BaseEmbedding,
        assembler: ContextAssembler | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(store, SessionStore):
            raise InvalidType(f"store must be a SessionStore (got {type(store).__name__})")
        if assembler is not None and assembler.store is not store:
            raise InvalidArgument("assembler must be one of the same store")
        fields = {"store": store, "embed_model": embed_model, "assembler": assembler, **options}
        super().__init__(**fields)
        self._assembler = ContextAssembler(store) if assembler is None else assembler

    async def _aget(
        self,
        messages: list[ChatMessage] | None = None,
        session_id: str | None = None,
        **options: Any,
    ) -> str:
        """Return the messages that belong to the newest of `messages`."""
        query = "\n".join(filter(None, (one.content for one in (messages or [])[-self.recent :])))
        if not query:
            return ""
        vector = await self.embed_model.aget_query_embedding(query)
        texts = await asyncio.to_thread(self._recalled, vector, session_id)
        return SEPARATOR.join(texts)

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """Keep messages that have text as passages, all or none."""
        rows = []
        for message in messages:
            # `aput` writes the session into the message itself, where it should not stay.
            session = message.additional_kwargs.pop("session_id", None)
            if message.content:
                metadata = {"role": message.role.value, "session_id": session}
                rows.append((f"{message.role.value}: {message.content}", metadata))
        if not rows:
            return
        texts = [text for text, _ in rows]
        vectors = await self.embed_model.aget_text_embedding_batch(texts)
        await settled(self._keep, texts, vectors, [metadata for _, metadata in rows])

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """Drop recalled messages from the end until so many tokens are gone; None for all."""
        texts = content.split(SEPARATOR)
        while texts and tokens_to_truncate > 0:
            tokens_to_truncate -= self._num_tokens(texts.pop())
        return SEPARATOR.join(texts) or None

    def _num_tokens(self, text: str) -> int:
        """Count a text's tokens; its words where the store has no tokenizer."""
        codec = self.store.codec
        return len(text.split()) if codec is None else len(codec.encode_text(text))

    def _recalled(self, vector: Any, session: str | None) -> list[str]:
        mine = {"session_id": session} if self.one_session and session is not None else None
        try:
            hits = self._assembler.recall(
                np.asarray(vector, np.float32),
                tenant=self.tenant,
                top_k=self.top_k,
                collections=self.collection,
                min_score=self.min_score,
                filters=mine,
            )
        except UnknownField:
            return []
        if not len(hits):
            return []
        found = self.store.passages(self.collection, hits.ids, tenant=self.tenant)
        return [one.text for one in found if one.text]

    def _keep(self, texts: list[str], vectors: Any, metadata: list[dict[str, Any]]) -> None:
        self.store.add_passages(
            self.collection,
            np.asarray(vectors, np.float32),
            tenant=self.tenant,
            texts=texts,
            metadata=metadata,
        )
