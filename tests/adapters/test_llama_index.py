"""LlamaIndex: the chat store beside LlamaIndex's own, and the memory block inside its Memory."""

import asyncio
import base64

import numpy as np
import pytest
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.embeddings import BaseEmbedding, MockEmbedding
from llama_index.core.memory import ChatMemoryBuffer, Memory
from llama_index.core.storage.chat_store import SimpleChatStore

import kalos_ctx as kalos
from kalos_ctx import demo_data
from kalos_ctx.adapters.llama_index import KalosChatStore, KalosMemoryBlock

RAW_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content="How warm is it?", additional_kwargs={"n": [1]}),
    ChatMessage(
        role="assistant",
        blocks=[
            ThinkingBlock(content="I ask."),
            ToolCallBlock(tool_call_id="call_1", tool_name="weather", tool_kwargs={"city": "Oslo"}),
        ],
    ),
    ChatMessage(role="tool", content="3 degrees", additional_kwargs={"tool_call_id": "call_1"}),
    ChatMessage(role="assistant", additional_kwargs={"tool_calls": [RAW_CALL]}),
    ChatMessage(role="tool", content="", additional_kwargs={"tool_call_id": "c", "name": "f"}),
    ChatMessage(role="assistant", blocks=[TextBlock(text="Three"), TextBlock(text="degrees.")]),
    ChatMessage(
        role="user",
        blocks=[
            ImageBlock(url="https://a.example/b.png"),
            CachePoint(cache_control={"type": "ephemeral"}),
        ],
    ),
    ChatMessage(role="chatbot", content="Hm."),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "store"
    with kalos.SessionStore.open(folder, tokenizer=demo_data.tokenizer_dir()) as opened:
        yield opened


@pytest.fixture(params=["simple", "kalos"])
def chats(request, store):
    if request.param == "simple":
        return SimpleChatStore()
    return KalosChatStore(store, tenant=request.node.name)


@pytest.fixture
def mine(store, request):
    return KalosChatStore(store, tenant=request.node.name)


# ---- What both chat stores do -----------------------------------------------------------------


def test_messages_come_back_equal(chats):
    chats.set_messages("k", list(MESSAGES))
    assert chats.get_messages("k") == MESSAGES
    assert chats.get_messages("other") == []


def test_added_messages_follow_one_another(chats):
    for message in MESSAGES:
        chats.add_message("k", message)
    assert chats.get_messages("k") == MESSAGES


@pytest.mark.parametrize("idx", [0, 3, len(MESSAGES) - 1, -1])
def test_deleted_message_is_given_back_and_gone(chats, idx):
    chats.set_messages("k", list(MESSAGES))
    assert chats.delete_message("k", idx) == MESSAGES[idx]
    left = MESSAGES[:]
    left.pop(idx)
    assert chats.get_messages("k") == left
    assert chats.delete_message("k", len(MESSAGES)) is None
    assert chats.delete_message("other", 0) is None


def test_last_message_is_deleted(chats):
    chats.set_messages("k", list(MESSAGES))
    assert chats.delete_last_message("k") == MESSAGES[-1]
    assert chats.get_messages("k") == MESSAGES[:-1]
    assert chats.delete_last_message("other") is None


def test_deleted_history_is_given_back_and_its_key_gone(chats):
    chats.set_messages("k", list(MESSAGES))
    chats.set_messages("l", MESSAGES[:1])
    assert sorted(chats.get_keys()) == ["k", "l"]
    assert chats.delete_messages("k") == MESSAGES
    assert chats.get_keys() == ["l"]
    assert chats.delete_messages("k") is None


@pytest.mark.parametrize(
    "new", [MESSAGES[:3], [*MESSAGES[:3], MESSAGES[0]], MESSAGES[4:], MESSAGES]
)
def test_set_replaces_the_history(chats, new):
    chats.set_messages("k", list(MESSAGES))
    chats.set_messages("k", list(new))
    assert chats.get_messages("k") == new


def test_async_methods_do_the_same(chats):
    async def talk():
        await chats.aset_messages("k", MESSAGES[:3])
        await chats.async_add_message("k", MESSAGES[3])
        return [
            list(await chats.aget_messages("k")),
            await chats.adelete_message("k", 0),
            await chats.adelete_last_message("k"),
            await chats.aget_keys(),
            await chats.adelete_messages("k"),
        ]

    assert asyncio.run(talk()) == [
        MESSAGES[:4],
        MESSAGES[0],
        MESSAGES[3],
        ["k"],
        MESSAGES[1:3],
    ]


def test_chat_memory_buffer_remembers(chats):
    memory = ChatMemoryBuffer.from_defaults(
        token_limit=1000, chat_store=chats, chat_store_key="k", tokenizer_fn=str.split
    )
    memory.put(MESSAGES[1])
    memory.put(ChatMessage(role="assistant", content="Three degrees."))
    assert [one.content for one in memory.get()] == ["How warm is it?", "Three degrees."]
    memory.reset()
    assert memory.get_all() == []


# ---- What ours does beyond that ---------------------------------------------------------------


def test_image_of_bytes_comes_back(mine):
    pixel = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    message = ChatMessage(role="user", blocks=[ImageBlock(image=pixel)])
    mine.add_message("k", message)
    found = mine.get_messages("k")[0]
    assert found.blocks[0].resolve_image().read() == pixel


def test_window_is_the_conversation_that_the_template_renders(store, mine):
    mine.set_messages("k", [*MESSAGES[:4], MESSAGES[6], MESSAGES[7]])
    with (
        kalos.ContextAssembler(store) as assembler,
        assembler.assemble("k", tenant=mine.tenant, max_tokens=999) as window,
    ):
        text = store.codec.decode(window.token_ids)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow warm is it?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3 degrees\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nThree\ndegrees.<|im_end|>\n<|im_start|>user\n[image]<|im_end|>\n"
    )


def test_set_keeps_the_turns_before_the_first_difference(store, mine):
    mine.set_messages("k", MESSAGES)
    first = [turn.created_at for turn in store.turns("k", tenant=mine.tenant)]
    mine.set_messages("k", [*MESSAGES[:5], MESSAGES[0]])
    second = [turn.created_at for turn in store.turns("k", tenant=mine.tenant)]
    assert second[:5] == first[:5]
    assert second[5] > first[5]


def test_turns_written_by_others_are_messages(store, mine):
    store.append("k", "user", "Hello", tenant=mine.tenant)
    calls = {"tool_calls": [RAW_CALL]}
    store.append("k", "assistant", None, metadata=calls, tenant=mine.tenant)
    store.append("k", "tool", "done", metadata={"tool_call_id": "c"}, tenant=mine.tenant)
    assert mine.get_messages("k") == [
        ChatMessage(role="user", content="Hello"),
        ChatMessage(role="assistant", content="", additional_kwargs=calls),
        ChatMessage(role="tool", content="done", additional_kwargs={"tool_call_id": "c"}),
    ]
    assert mine.delete_last_message("k").content == "done"


def test_many_keys_are_listed(tmp_path):
    with kalos.SessionStore.open(tmp_path / "store") as ids_only:
        chats = KalosChatStore(ids_only)
        for i in range(1001):
            ids_only.append(f"k{i}", "user", token_ids=[1])
        ids_only.append(b"\xff", "user", token_ids=[1])
        assert chats.get_keys() == [f"k{i}" for i in range(1001)]


def test_wrong_arguments_are_refused(store, mine):
    with pytest.raises(kalos.InvalidType, match="store must be a SessionStore"):
        KalosChatStore("store")
    with pytest.raises(kalos.InvalidType, match="messages must be ChatMessages"):
        mine.add_message("k", "Hello")
    with pytest.raises(kalos.InvalidType, match="store must be a SessionStore"):
        KalosMemoryBlock(store="store", embed_model=MockEmbedding(embed_dim=4))


# ---- Memory block -----------------------------------------------------------------------------


class KnownEmbedding(BaseEmbedding):
    """Gives each message of the bundled questions the real vector of its text."""

    def _get_text_embedding(self, text):
        text = text.removeprefix("user: ")
        texts = [one["text"] for one in demo_data.queries()]
        return demo_data.query_vectors()[texts.index(text)].astype(np.float32).tolist()

    _get_query_embedding = _get_text_embedding

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


QUESTIONS = [ChatMessage(role="user", content=one["text"]) for one in demo_data.queries()]


@pytest.fixture
def block(store, request):
    return KalosMemoryBlock(
        store=store,
        embed_model=KnownEmbedding(),
        tenant=request.node.name,
        top_k=3,
        recent=1,
    )


def copies(messages):
    return [one.model_copy(deep=True) for one in messages]


def test_block_recalls_what_was_put_best_first(block):
    async def recall():
        await block.aput(copies(QUESTIONS), session_id="s")
        return await block.aget(QUESTIONS[:1], session_id="s")

    vectors = demo_data.query_vectors().astype(np.float32)
    best = np.argsort(-(vectors @ vectors[0]), kind="stable")[:3]
    assert asyncio.run(recall()).split("\n\n") == [f"user: {QUESTIONS[i].content}" for i in best]


def test_block_recalls_of_its_own_session_unless_told_otherwise(block):
    async def recall(session, *, one_session):
        block.one_session = one_session
        return await block.aget(QUESTIONS[:1], session_id=session)

    messages = copies(QUESTIONS[:2])
    asyncio.run(block.aput(messages, session_id="s"))
    assert [one.additional_kwargs for one in messages] == [{}, {}]
    assert asyncio.run(recall("s", one_session=True)).count("user: ") == 2
    assert asyncio.run(recall("t", one_session=True)) == ""
    assert asyncio.run(recall("t", one_session=False)).count("user: ") == 2


def test_block_without_messages_gives_nothing(block):
    async def recall():
        await block.aput([])
        await block.aput([ChatMessage(role="user", content="")])
        return await block.aget([]), await block.aget(QUESTIONS[:1], session_id="s")

    assert asyncio.run(recall()) == ("", "")


def test_block_leaves_out_what_scores_too_little(block):
    async def recall():
        await block.aput(copies(QUESTIONS[:9]))
        block.min_score = 0.99
        return await block.aget(QUESTIONS[:1])

    assert asyncio.run(recall()) == f"user: {QUESTIONS[0].content}"


def test_block_is_truncated_from_its_end(block, store):
    texts = ["user: one two", "user: three four five", "user: six"]
    content = "\n\n".join(texts)
    last = len(store.codec.encode_text(texts[2]))

    async def cut(tokens):
        return await block.atruncate(content, tokens)

    assert asyncio.run(cut(0)) == content
    assert asyncio.run(cut(last)) == "\n\n".join(texts[:2])
    assert asyncio.run(cut(last + 1)) == texts[0]
    assert asyncio.run(cut(1000)) is None


def test_block_works_inside_a_memory(store, request):
    block = KalosMemoryBlock(
        store=store, embed_model=MockEmbedding(embed_dim=384), tenant=request.node.name, top_k=2
    )

    async def talk():
        memory = Memory.from_defaults(
            session_id="s",
            token_limit=40,
            token_flush_size=10,
            memory_blocks=[block],
            tokenizer_fn=str.split,
        )
        for i in range(12):
            await memory.aput(ChatMessage(role="user", content=f"I parked on level {i} today."))
            await memory.aput(ChatMessage(role="assistant", content=f"Noted: level {i}."))
        found = await memory.aget(input="Where did I park?")
        await memory.sql_store._async_engine.dispose()
        return found

    messages = asyncio.run(talk())
    assert messages[0].role == "system"
    assert "<KalosMemory>" in messages[0].content
    assert "level 0" in messages[0].content
    assert store.stats()["passages"] > 0


def test_block_is_given_an_assembler_of_the_same_store(store, tmp_path):
    with (
        kalos.SessionStore.open(tmp_path / "other") as other,
        kalos.ContextAssembler(other) as assembler,
        pytest.raises(kalos.InvalidArgument, match="one of the same store"),
    ):
        KalosMemoryBlock(store=store, embed_model=KnownEmbedding(), assembler=assembler)
