"""LlamaIndex: `ChatMemoryBuffer`, and `Memory`, which its documentation recommends today."""

from importlib.metadata import version

from llama_index.core.async_utils import asyncio_run
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer, Memory, StaticMemoryBlock
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.storage.chat_store import SimpleChatStore
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore
from number_text import ids_of, text_of

from kalos_ctx.conformance import Candidate, StoredTurn

VERSION = version("llama-index-core")
NO_LIMIT = 10**9
# What the source of both says: the newest message is kept so that the model's error is seen.
KEEPS_NEWEST = "the newest message is kept whatever its length, as the source says"
OVERSIZE = dict.fromkeys(("B06", "B17"), KEEPS_NEWEST)
NO_REOPENING = "SimpleChatStore.persist raises with pydantic 2.14, so nothing is opened again"
BUFFER_NOT_CLAIMED = {**OVERSIZE, **dict.fromkeys(("B28", "B60"), NO_REOPENING)}
MEMORY_NOT_CLAIMED = {
    **OVERSIZE,
    "L01": "a block of priority 0 is never truncated, as its documentation says",
    "B08": "a memory is given its limit once; a window is read, not computed anew",
}
BARE_TEXT = RichPromptTemplate(
    "{% for name, blocks in memory_blocks %}{% for block in blocks %}{{ block.text }} "
    "{% endfor %}{% endfor %}"
)


def numbers_in(text):
    """Return a text's tokens; what LlamaIndex counts of calls and names are none."""
    return [word for word in text.split() if word.isdigit()]


def message_of(role, token_ids, calls=(), call=None, metadata=None):
    """Return a turn as a chat message; calls stand where OpenAI's models put them."""
    extra = {}
    if calls:
        extra["tool_calls"] = [
            {"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}}
            for one in calls
        ]
    if call is not None:
        extra["tool_call_id"] = call
    if metadata is not None:
        extra["metadata"] = metadata
    return ChatMessage(role=role, content=text_of(token_ids), additional_kwargs=extra)


def tokens_of(messages):
    """Return the tokens of chat messages, one after the other."""
    return [number for message in messages for number in ids_of(message.content or "")]


def turns_of(messages):
    """Return chat messages as turns."""
    return [
        StoredTurn(
            message.role.value,
            ids_of(message.content or ""),
            message.additional_kwargs.get("metadata"),
        )
        for message in messages
    ]


class BufferCandidate(Candidate):
    """`ChatMemoryBuffer` on a `SimpleChatStore`; pinned text is the chat engines' prefix."""

    name = "LlamaIndex ChatMemoryBuffer"
    version = VERSION
    settings = (
        "SimpleChatStore in memory, exact tokenizer_fn; pinned text is given as a chat engine "
        "gives its prefix messages, with initial_token_count"
    )
    capabilities = frozenset(
        {"token_limit", "groups", "pin", "read", "listing", "metadata", "threads", "delete",
         "rollback"}
    )  # fmt: skip
    not_claimed = BUFFER_NOT_CLAIMED

    def __init__(self, setup):
        self.store = SimpleChatStore()
        self.pinned = {}

    def append(self, session, role, token_ids, *, calls=(), call=None, group=None, metadata=None):
        """Add a message."""
        message = message_of(role, token_ids, calls, call, metadata)
        self.memory(session, NO_LIMIT).put(message)

    def memory(self, session, limit):
        """Return the memory of a session."""
        return ChatMemoryBuffer.from_defaults(
            token_limit=limit,
            tokenizer_fn=numbers_in,
            chat_store=self.store,
            chat_store_key=session,
        )

    def assemble(self, session, max_tokens, reserve=0):
        """Return the prefix and what the memory gives."""
        prefix = [n for ids in self.pinned.get(session, {}).values() for n in ids]
        limit = NO_LIMIT if max_tokens is None else max_tokens
        got = self.memory(session, limit).get(initial_token_count=len(prefix))
        return prefix + tokens_of(got)

    def turns(self, session, *, tenant=""):
        """Return the messages."""
        return turns_of(self.store.get_messages(session))

    def sessions(self, *, cursor=None, limit=100, tenant=""):
        """Return all keys; there are no pages."""
        return self.store.get_keys(), None

    def pin(self, session, name, token_ids, *, volatile=False):
        """Keep text for the prefix messages."""
        self.pinned.setdefault(session, {})[name] = list(token_ids)

    def rollback(self, session, to):
        """Delete the newest messages."""
        while len(self.store.get_messages(session)) > to:
            self.store.delete_last_message(session)

    def delete(self, session, *, tenant=""):
        """Delete the messages."""
        self.store.delete_messages(session)


class MemoryCandidate(Candidate):
    """`Memory` on its SQL store.

    A `Memory` has one limit for good and moves what exceeds it to its blocks when a message is
    put. So messages are kept in its store, and each limit that is asked for has a memory of its
    own, to which they are put one by one.
    """

    name = "LlamaIndex Memory"
    version = VERSION
    settings = (
        "SQLite file, exact tokenizer_fn, token_flush_size of half the limit, pinned text in a "
        "StaticMemoryBlock, chat_history_token_ratio so that both fit the limit"
    )
    capabilities = frozenset(
        {"token_limit", "groups", "pin", "read", "listing", "metadata", "delete", "reopen",
         "readers"}
    )  # fmt: skip
    not_claimed = MEMORY_NOT_CLAIMED
    low_water = 0.5

    def __init__(self, setup):
        self.store = SQLAlchemyChatStore(
            table_name="chats",
            async_database_uri=f"sqlite+aiosqlite:///{setup.folder / 'chats.db'}",
        )
        self.pinned = {}
        self.memories = {}

    def append(self, session, role, token_ids, *, calls=(), call=None, group=None, metadata=None):
        """Add a message to the store."""
        message = message_of(role, token_ids, calls, call, metadata)
        asyncio_run(self.store.add_message(session, message))

    def stored(self, session):
        """Return the messages of a session."""
        return asyncio_run(self.store.get_messages(session))

    def assemble(self, session, max_tokens, reserve=0):
        """Return what a memory of this limit gives."""
        pinned = [n for ids in self.pinned.get(session, {}).values() for n in ids]
        limit = NO_LIMIT if max_tokens is None else max_tokens
        key = (session, limit, tuple(pinned))
        memory, done = self.memories.get(key) or (self.memory(limit, pinned), 0)
        messages = self.stored(session)
        for message in messages[done:]:
            memory.put(message)
        self.memories[key] = (memory, len(messages))
        return tokens_of(memory.get())

    def memory(self, limit, pinned):
        """Return a new memory of a limit."""
        blocks = [StaticMemoryBlock(name="pinned", static_content=text_of(pinned), priority=0)]
        return Memory.from_defaults(
            token_limit=limit,
            token_flush_size=max(1, limit // 2),
            chat_history_token_ratio=max(0.0, 1 - len(pinned) / limit) if limit > 0 else 1.0,
            tokenizer_fn=numbers_in,
            memory_blocks=blocks if pinned else [],
            memory_blocks_template=BARE_TEXT,
        )

    def turns(self, session, *, tenant=""):
        """Return the messages."""
        return turns_of(self.stored(session))

    def sessions(self, *, cursor=None, limit=100, tenant=""):
        """Return all keys; there are no pages."""
        return asyncio_run(self.store.get_keys()), None

    def pin(self, session, name, token_ids, *, volatile=False):
        """Keep text for the static block."""
        self.pinned.setdefault(session, {})[name] = list(token_ids)

    def delete(self, session, *, tenant=""):
        """Delete the messages, and the memories that were made of them."""
        asyncio_run(self.store.delete_messages(session))
        self.memories = {key: kept for key, kept in self.memories.items() if key[0] != session}


def buffer_factory(setup):
    """Make a candidate of `ChatMemoryBuffer`."""
    return BufferCandidate(setup)


def memory_factory(setup):
    """Make a candidate of `Memory`."""
    return MemoryCandidate(setup)
