"""LangChain, LlamaIndex and the OpenAI Agents SDK: their histories, their trimming, then IDs."""

from __future__ import annotations

import asyncio
import os
import warnings

from rivals.chats import BUDGET, FETCH, encode, joined, newest, tokenizer
from rivals.measure import no_lap
from rivals.road import MissingRival, Road, installed

ROLES = {"human": "user", "ai": "assistant"}


def plain(message):
    """A LangChain message as role and content."""
    return {"role": ROLES[message.type], "content": message.content}


class LangChainRoad(Road):
    """LangChain's history, trim_messages with an exact counter, and the tokens of what is left."""

    group = "framework"

    def __init__(self, server=None):
        try:
            from langchain_core.messages import trim_messages
        except ImportError as error:
            raise MissingRival("langchain-core") from error
        self.trim, self.server, self.known, self.histories = trim_messages, server, {}, {}
        self.name = "LangChain, Redis" if server else "LangChain, in memory, counts kept"
        if server is None:
            self.note = "its counter remembers the length of every text"

    def history(self, session):
        if session not in self.histories:
            if self.server is None:
                from langchain_core.chat_history import InMemoryChatMessageHistory

                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made = InMemoryChatMessageHistory()
            else:
                from langchain_community.chat_message_histories import RedisChatMessageHistory

                made = RedisChatMessageHistory(session, url=f"unix://{self.server.path}")
            self.histories[session] = made
        return self.histories[session]

    def fill(self, chat):
        from langchain_core.messages import AIMessage, HumanMessage

        kinds = {"user": HumanMessage, "assistant": AIMessage}
        messages = [kinds[one["role"]](one["content"]) for one in chat.messages()]
        history = self.history(chat.name)
        if self.server is None:
            history.add_messages(messages)
            return
        import json

        from langchain_core.messages import message_to_dict

        # As its add_message writes them, one LPUSH a message, but many at a time.
        rows = [json.dumps(message_to_dict(one)) for one in messages]
        for at in range(0, len(rows), 1000):
            history.redis_client.lpush(history.key, *rows[at : at + 1000])

    def count(self, messages):
        if self.server is not None:
            return sum(map(len, encode([plain(one) for one in messages])))
        new = [one for one in messages if one.content not in self.known]
        for one, ids in zip(new, encode([plain(one) for one in new]), strict=True):
            self.known[one.content] = len(ids)
        # Both roles frame a text with as many tokens.
        return sum(self.known[one.content] for one in messages)

    def window(self, session, lap=no_lap):
        messages = self.history(session).messages
        lap("fetch and parse")
        messages = self.trim(messages, max_tokens=BUDGET, token_counter=self.count, strategy="last")
        lap("trim")
        rows = encode([plain(one) for one in messages])
        lap("tokenise")
        return joined(rows, lap)


class LlamaBufferRoad(Road):
    """LlamaIndex's ChatMemoryBuffer with the demo's tokenizer."""

    name, group = "LlamaIndex, ChatMemoryBuffer", "framework"
    note = "in memory; it counts contents alone, so its window is cut again with the framing"

    def __init__(self):
        try:
            from llama_index.core.base.llms.types import ChatMessage
            from llama_index.core.memory import ChatMemoryBuffer
        except ImportError as error:
            raise MissingRival("llama-index-core") from error
        self.message, self.buffer, self.memories = ChatMessage, ChatMemoryBuffer, {}

    def fill(self, chat):
        history = [self.message(**one) for one in chat.messages()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.memories[chat.name] = self.buffer.from_defaults(
                chat_history=history, token_limit=BUDGET, tokenizer_fn=ids_of
            )

    def window(self, session, lap=no_lap):
        messages = self.memories[session].get()
        lap("trim")
        return finished(messages, lap)


def ids_of(text):
    """The token IDs of a text, as LlamaIndex wants to count them."""
    return tokenizer().encode(text, add_special_tokens=False).ids


def finished(messages, lap):
    """Token IDs of LlamaIndex's messages, cut to the budget with their framing."""
    plain_ones = [{"role": one.role.value, "content": one.content} for one in messages]
    lap("parse")
    rows = newest(plain_ones, encode, lap)
    lap("cut")
    return joined(rows, lap)


class LlamaMemoryRoad(Road):
    """LlamaIndex's Memory over its own SQLite store."""

    name, group = "LlamaIndex, Memory", "framework"
    note = "SQLite in memory; what it would have archived when turns were put is archived"

    def __init__(self):
        try:
            from llama_index.core.base.llms.types import ChatMessage
            from llama_index.core.memory import Memory
        except ImportError as error:
            raise MissingRival("llama-index-core") from error
        self.message, self.memory, self.memories = ChatMessage, Memory, {}
        self.loop = asyncio.new_event_loop()

    def fill(self, chat):
        from llama_index.core.storage.chat_store.base_db import MessageStatus

        made = self.memory.from_defaults(
            session_id=chat.name,
            token_limit=BUDGET,
            chat_history_token_ratio=1.0,
            tokenizer_fn=ids_of,
        )
        rows, active, total = list(chat), 0, 0
        while active < len(rows) and total + len(rows[-active - 1][1]) <= BUDGET:
            active += 1
            total += len(rows[-active][1])
        messages = [self.message(**message) for message, _ in rows]
        split = len(messages) - active

        async def put():
            for at in range(0, split, 1000):
                await made.sql_store.add_messages(
                    chat.name, messages[at : min(split, at + 1000)], status=MessageStatus.ARCHIVED
                )
            await made.sql_store.add_messages(
                chat.name, messages[split:], status=MessageStatus.ACTIVE
            )

        self.loop.run_until_complete(put())
        self.memories[chat.name] = made

    def window(self, session, lap=no_lap):
        messages = self.loop.run_until_complete(self.memories[session].aget())
        lap("fetch, parse and count")
        return finished(messages, lap)

    def close(self):
        for memory in self.memories.values():
            engine = getattr(memory.sql_store, "_async_engine", None)
            if engine is not None:
                self.loop.run_until_complete(engine.dispose())
        self.loop.close()


class OpenAiRoad(Road):
    """The OpenAI Agents SDK's SQLiteSession, then tokens."""

    name, group = "OpenAI SQLiteSession", "framework"
    note = f"get_items(limit={FETCH}) on a file; it has no trimming by tokens, so that is ours"

    def __init__(self, folder):
        try:
            from agents import SQLiteSession
        except ImportError as error:
            raise MissingRival("openai-agents") from error
        self.session, self.path = SQLiteSession, os.path.join(folder, "agents.sqlite")
        self.sessions, self.loop = {}, asyncio.new_event_loop()

    def fill(self, chat):
        made = self.sessions[chat.name] = self.session(chat.name, self.path)
        self.loop.run_until_complete(made.add_items(chat.messages()))

    def window(self, session, lap=no_lap):
        items = self.loop.run_until_complete(self.sessions[session].get_items(limit=FETCH))
        lap("fetch and parse")
        rows = newest(items, encode, lap)
        lap("cut")
        return joined(rows, lap)

    def close(self):
        for one in self.sessions.values():
            one.close()
        self.loop.close()


def framework_roads(folder, server):
    """Every framework that is installed."""
    return installed(
        lambda: LangChainRoad(server),
        LangChainRoad,
        LlamaBufferRoad,
        LlamaMemoryRoad,
        lambda: OpenAiRoad(folder),
    )
