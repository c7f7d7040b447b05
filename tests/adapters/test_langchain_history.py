"""LangChain chat histories: what was added comes back, and windows hold it as the template does."""

import asyncio
import threading

import pytest
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables.history import RunnableWithMessageHistory

import kalos_ctx as kalos
from kalos_ctx.adapters.langchain import KalosChatMessageHistory
from kalos_ctx.demo_data import tokenizer_dir

CALL = {"name": "weather", "args": {"city": "Oslo"}, "id": "call_1", "type": "tool_call"}
MESSAGES = [
    SystemMessage("Be brief.", id="s"),
    HumanMessage("How warm is it?", name="ann", additional_kwargs={"likes": ["snow"]}),
    AIMessage(
        "",
        tool_calls=[CALL, {**CALL, "args": {"city": "Bergen"}, "id": "call_2"}],
        usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
        response_metadata={"model": "m"},
    ),
    ToolMessage("3 degrees", tool_call_id="call_1", name="weather", artifact={"raw": 3}),
    ToolMessage("", tool_call_id="call_2", status="error"),
    AIMessage([{"type": "text", "text": "Three "}, {"type": "text", "text": "degrees."}], id="a"),
    HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}]),
    ChatMessage("Hm.", role="assistant"),
    AIMessageChunk("streamed"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("langchain") / "store"
    with kalos.SessionStore.open(folder, tokenizer=tokenizer_dir()) as opened:
        yield opened


@pytest.fixture
def history(store, request):
    return KalosChatMessageHistory(request.node.name, store)


def test_messages_come_back_equal(history):
    history.add_messages(MESSAGES)
    assert history.messages == MESSAGES
    assert [type(one) for one in history.messages] == [type(one) for one in MESSAGES]
    assert history.latest(2) == MESSAGES[-2:]
    assert history.latest(0) == []


# LangChain has announced the end of these two, and of no other that the adapter stands on.
@pytest.mark.filterwarnings("ignore:The class `InMemoryChatMessageHistory` was deprecated")
def test_history_behaves_as_the_one_in_memory(history):
    other = InMemoryChatMessageHistory()
    for one in (history, other):
        one.add_user_message("Hello")
        one.add_ai_message(AIMessage("Hi", id="x"))
        one.add_message(HumanMessage("Bye"))
    assert history.messages == other.messages
    assert str(history) == str(other)
    for one in (history, other):
        one.clear()
        one.clear()
    assert history.messages == other.messages == []


def test_async_calls_do_the_same_outside_the_loop_thread(store, history, monkeypatch):
    seen = set()
    real = store.extend

    def noted(*args, **kwargs):
        seen.add(threading.get_ident())
        return real(*args, **kwargs)

    monkeypatch.setattr(store, "extend", noted, raising=False)

    async def talk():
        await history.aadd_messages(MESSAGES)
        found = await history.aget_messages()
        await history.aclear()
        return found, await history.aget_messages()

    assert asyncio.run(talk()) == (MESSAGES, [])
    assert seen
    assert threading.get_ident() not in seen


def test_window_is_the_conversation_that_the_template_renders(store, history):
    history.add_messages(MESSAGES[:6])
    with (
        kalos.ContextAssembler(store) as assembler,
        assembler.assemble(history.session_id, max_tokens=999) as window,
    ):
        text = store.codec.decode(window.token_ids)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow warm is it?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n3 degrees\n</tool_response>\n"
        "<tool_response>\n[empty]\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nThree degrees.<|im_end|>\n"
    )


def test_turns_written_by_others_are_messages(store, history):
    name = history.session_id
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    store.append(name, "system", "Be kind.")
    store.append(name, "user", "Hello")
    store.append(name, "assistant", "One moment.", metadata={"tool_calls": [call]})
    store.append(name, "tool", "done", metadata={"tool_call_id": "c", "name": "f"})
    store.append(name, "assistant", token_ids=store.codec.encode_text("All done."))
    call = {"name": "f", "args": {"a": 1}, "id": "c", "type": "tool_call"}
    assert [(one.type, one.content) for one in history.messages] == [
        ("system", "Be kind."),
        ("human", "Hello"),
        ("ai", "One moment."),
        ("tool", "done"),
        ("ai", "All done."),
    ]
    assert history.messages[2].tool_calls == [call]
    assert history.messages[3].tool_call_id == "c"


def test_refused_message_leaves_the_history_as_it_was(history):
    for refused in (RemoveMessage("x"), ChatMessage("Hm.", role="narrator")):
        with pytest.raises(kalos.InvalidArgument):
            history.add_messages([HumanMessage("Hello"), refused])
    with pytest.raises(kalos.InvalidType, match="messages must be LangChain messages"):
        history.add_messages(["Hello"])
    with pytest.raises(kalos.InvalidType, match="JSON"):
        history.add_messages([HumanMessage("Hello", additional_kwargs={"f": object()})])
    assert history.messages == []


def test_developer_message_stands_as_system_where_the_template_has_no_such_role(store, history):
    message = SystemMessage("Be brief.", additional_kwargs={"__openai_role__": "developer"})
    history.add_message(message)
    assert history.messages == [message]
    assert store.turns(history.session_id)[0].role == "system"


def test_store_of_ids_alone_keeps_the_history(tmp_path):
    with kalos.SessionStore.open(tmp_path / "store") as ids_only:
        history = KalosChatMessageHistory("s", ids_only)
        history.add_messages(MESSAGES)
        assert history.messages == MESSAGES


def test_tokenizer_without_template_keeps_calls_as_text(tmp_path):
    tokenizer = tokenizer_dir() / "tokenizer.json"
    with kalos.SessionStore.open(tmp_path / "store", tokenizer=tokenizer, template="") as plain:
        history = KalosChatMessageHistory("s", plain)
        history.add_messages(MESSAGES[:6])
        assert history.messages == MESSAGES[:6]
        assert '"arguments": "{\\"city\\": \\"Oslo\\"}"' in plain.turns("s")[2].text


@pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory is deprecated")
def test_runnable_with_message_history_remembers(store):
    prompt = ChatPromptTemplate([MessagesPlaceholder("history"), ("human", "{question}")])
    model = GenericFakeChatModel(messages=iter([AIMessage("Level 3."), AIMessage("As I said.")]))
    chain = RunnableWithMessageHistory(
        prompt | model,
        lambda session_id: KalosChatMessageHistory(session_id, store),
        input_messages_key="question",
        history_messages_key="history",
    )
    config = {"configurable": {"session_id": "with history"}}
    chain.invoke({"question": "Where did I park?"}, config=config)
    chain.invoke({"question": "Where?"}, config=config)
    kept = KalosChatMessageHistory("with history", store).messages
    assert [one.content for one in kept] == [
        "Where did I park?",
        "Level 3.",
        "Where?",
        "As I said.",
    ]
