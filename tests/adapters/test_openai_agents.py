"""Sessions of the OpenAI Agents SDK: the same expectations of its SQLiteSession and of ours."""

import asyncio
import threading

import pytest
from agents import Agent, ModelResponse, Runner, Usage, function_tool, set_tracing_disabled
from agents.memory import Session, SessionSettings, SQLiteSession
from agents.models.interface import Model
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

import kalos_ctx as kalos
from kalos_ctx.adapters.openai_agents import KalosSession
from kalos_ctx.demo_data import tokenizer_dir

set_tracing_disabled(True)  # or the SDK would send what it saw to OpenAI

USER = {"role": "user", "content": "How warm is it in Oslo?"}
REASONING = {
    "id": "rs_1",
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "I need the weather."}],
    "encrypted_content": "gAAAA",
}
CALLS = [
    {
        "id": f"fc_{i}",
        "type": "function_call",
        "call_id": f"call_{i}",
        "name": "weather",
        "arguments": f'{{"city":"{city}"}}',
        "status": "completed",
    }
    for i, city in enumerate(("Oslo", "Bergen"))
]
OUTPUTS = [
    {"type": "function_call_output", "call_id": f"call_{i}", "output": f"{i + 3} degrees"}
    for i in range(2)
]
ANSWER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [
        {"type": "output_text", "text": "Three degrees.", "annotations": [], "logprobs": []}
    ],
}
CHAT = [USER, REASONING, *CALLS, *OUTPUTS, ANSWER]
OTHER_ITEMS = [
    {"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "low"}]},
    {"role": "user", "content": ""},
    {"role": "developer", "content": "Be brief."},
    {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"query": "Oslo"}},
    {"type": "item_reference", "id": "msg_0"},
    {
        "type": "local_shell_call",
        "id": "ls_1",
        "call_id": "call_9",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {"type": "local_shell_call_output", "id": "ls_2", "call_id": "call_9", "output": "a.txt"},
    {
        "type": "shell_call_output",
        "call_id": "call_8",
        "output": [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    {"role": "user", "content": "half a pair: \ud83d"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai") / "store"
    with kalos.SessionStore.open(folder, tokenizer=tokenizer_dir()) as opened:
        yield opened


@pytest.fixture
def ids_only(tmp_path):
    with kalos.SessionStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture(params=["sqlite", "kalos", "kalos_ids_only"])
def make(request, tmp_path, store):
    """Return a function that opens the session of a name, new in each test."""
    if request.param == "sqlite":
        opened = []

        def sqlite(name="s", **options):
            opened.append(SQLiteSession(name, tmp_path / "chats.db", **options))
            return opened[-1]

        yield sqlite
        for session in opened:
            session.close()
        return
    tenant = request.node.name
    if request.param == "kalos":
        yield lambda name="s", **options: KalosSession(name, store, tenant=tenant, **options)
        return
    with kalos.SessionStore.open(tmp_path / "store") as ids_only:
        yield lambda name="s", **options: KalosSession(name, ids_only, **options)


def filled(session, items=CHAT):
    asyncio.run(session.add_items(items))
    return session


def items(session, limit=None):
    return asyncio.run(session.get_items(limit))


def window_text(store, name, **options):
    with (
        kalos.ContextAssembler(store) as assembler,
        assembler.assemble(name, max_tokens=4096, **options) as window,
    ):
        return store.codec.decode(window.token_ids)


# ---- What both sessions do --------------------------------------------------------------------


def test_session_protocol_is_met(make):
    session = make()
    assert isinstance(session, Session)
    assert session.session_id == "s"


def test_new_session_is_empty(make):
    session = make()
    assert items(session) == []
    assert asyncio.run(session.pop_item()) is None
    asyncio.run(session.clear_session())


@pytest.mark.parametrize("one_by_one", [False, True])
def test_items_come_back_as_they_were_added(make, one_by_one):
    session = make()
    for batch in [[item] for item in CHAT + OTHER_ITEMS] if one_by_one else [CHAT, OTHER_ITEMS]:
        filled(session, batch)
    assert items(session) == CHAT + OTHER_ITEMS
    assert [list(item) for item in items(session)] == [list(item) for item in CHAT + OTHER_ITEMS]


def test_items_added_as_an_empty_list_change_nothing(make):
    session = filled(filled(make()), [])
    assert items(session) == CHAT


def test_limit_gives_the_latest_in_order(make):
    session = filled(make(), [{"role": "user", "content": str(i)} for i in range(6)])
    assert [item["content"] for item in items(session, 2)] == ["4", "5"]
    assert len(items(session, 6)) == len(items(session, 99)) == 6
    assert items(session, 0) == []
    assert len(items(session, -1)) == 6


@pytest.mark.parametrize("settings", [SessionSettings(limit=2), {"limit": 2}])
def test_limit_of_the_settings_counts_where_none_is_given(make, settings):
    texts = [{"role": "user", "content": str(i)} for i in range(4)]
    session = filled(make(session_settings=settings), texts)
    assert session.session_settings.limit == 2
    assert items(session) == texts[2:]
    assert items(session, 3) == texts[1:]


def test_pop_takes_the_items_from_the_end_one_by_one(make):
    session = filled(make(), CHAT + OTHER_ITEMS)
    left = CHAT + OTHER_ITEMS
    while left:
        assert asyncio.run(session.pop_item()) == left.pop()
        assert items(session) == left
    assert asyncio.run(session.pop_item()) is None


def test_popped_item_can_be_replaced(make):
    session = filled(make(), CHAT[:3])
    asyncio.run(session.pop_item())
    filled(session, CHAT[2:])
    assert items(session) == CHAT


def test_clear_empties_the_session_alone(make):
    session, other = filled(make("one")), filled(make("two"), [USER])
    asyncio.run(session.clear_session())
    assert items(session) == []
    assert items(other) == [USER]
    assert items(filled(session, [USER])) == [USER]


def test_second_object_of_a_session_sees_its_items(make):
    filled(make("same"))
    assert items(make("same")) == CHAT
    assert items(make("other")) == []


def test_concurrent_additions_are_all_kept(make):
    session = make()

    async def add_all():
        texts = [[{"role": "user", "content": str(i)}] for i in range(20)]
        await asyncio.gather(*(session.add_items(batch) for batch in texts))
        return await session.get_items()

    assert sorted(int(item["content"]) for item in asyncio.run(add_all())) == list(range(20))


def test_concurrent_pops_give_each_item_once(make):
    texts = [{"role": "user", "content": str(i)} for i in range(24)]
    one, two = filled(make(), texts), make()

    async def pop_all():
        return await asyncio.gather(*(s.pop_item() for s in (one, two) for _ in range(12)))

    popped = asyncio.run(pop_all())
    assert sorted(int(item["content"]) for item in popped) == list(range(24))
    assert items(one) == []


def test_cancelled_addition_is_done_when_the_caller_learns_of_it(make):
    session = make()

    async def cancelled():
        task = asyncio.create_task(session.add_items(CHAT))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await session.get_items()

    assert asyncio.run(cancelled()) == CHAT


class ScriptedModel(Model):
    """Gives prepared answers and keeps what it was asked."""

    def __init__(self, *outputs):
        self.outputs = list(outputs)
        self.inputs = []

    async def get_response(self, system_instructions, input, *args, **kwargs):
        self.inputs.append(input)
        return ModelResponse(output=self.outputs.pop(0), usage=Usage(), response_id=None)

    def stream_response(self, *args, **kwargs):
        raise NotImplementedError


def said(text):
    part = ResponseOutputText(text=text, type="output_text", annotations=[])
    return [
        ResponseOutputMessage(
            id="m", content=[part], role="assistant", status="completed", type="message"
        )
    ]


def test_runner_with_a_tool_finds_its_history_at_the_next_run(make):
    @function_tool
    def weather(city: str) -> str:
        return f"3 degrees in {city}"

    call = ResponseFunctionToolCall(
        arguments='{"city":"Oslo"}', call_id="call_1", name="weather", type="function_call"
    )
    model = ScriptedModel([call], said("Three degrees."), said("In Oslo."))
    agent = Agent(name="a", model=model, tools=[weather])
    session = make()

    async def talk():
        first = await Runner.run(agent, "How warm is it?", session=session)
        second = await Runner.run(agent, "Where?", session=session)
        return first.final_output, second.final_output

    assert asyncio.run(talk()) == ("Three degrees.", "In Oslo.")
    kinds = [item.get("type", item.get("role")) for item in model.inputs[2]]
    assert kinds == ["user", "function_call", "function_call_output", "message", "user"]
    assert len(items(session)) == 6


# ---- What ours does beyond that ---------------------------------------------------------------


@pytest.fixture
def session(store, request):
    return KalosSession(request.node.name, store)


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        (1, [ANSWER]),
        (2, [ANSWER]),
        (3, [ANSWER]),
        (4, [CALLS[1], OUTPUTS[1], ANSWER]),
        (5, [*CALLS, *OUTPUTS, ANSWER]),
        (7, CHAT),
    ],
)
def test_limit_that_cuts_a_call_off_leaves_its_output_out(session, limit, wanted):
    filled(session)
    assert items(session, limit) == wanted
    assert items(session) == CHAT


def test_limit_without_whole_calls_counts_items_alone(store):
    session = filled(KalosSession("as-they-are", store, whole_calls=False))
    assert items(session, 2) == [OUTPUTS[1], ANSWER]


def test_window_holds_the_turns_as_the_template_renders_them(store, session):
    filled(session)
    assert window_text(store, session.session_id) == (
        "<|im_start|>user\nHow warm is it in Oslo?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nI need the weather.\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3 degrees\n</tool_response>\n"
        "<tool_response>\n4 degrees\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nThree degrees.<|im_end|>\n"
    )


@pytest.mark.parametrize("split", range(1, len(CHAT)))
def test_call_and_output_added_apart_stay_in_one_group(store, split):
    session = KalosSession(f"apart-{split}", store)
    filled(filled(session, CHAT[:split]), [*CHAT[split:], USER])
    with kalos.ContextAssembler(store) as assembler:
        for budget in range(10, 200, 3):
            plan = assembler.plan(
                session.session_id, max_tokens=budget, policy=kalos.Policy(on_overflow="drop")
            )
            kept = {item.seq for item in plan.kept}
            roles = [turn.role for turn in store.turns(session.session_id) if turn.seq in kept]
            assert roles.count("tool") in (0, 2)
            assert "tool" not in roles or "assistant" in roles[: roles.index("tool")]


def test_repeated_call_ids_do_not_tie_the_session_together(store, session):
    for _ in range(8):
        filled(session, [USER, CALLS[0], OUTPUTS[0], ANSWER])
    groups = [turn.group for turn in store.turns(session.session_id)]
    assert len(set(groups) - {None}) == 8
    text = window_text(store, session.session_id, policy=kalos.Policy(start_on="user"))
    assert text.count("<tool_response>") == 8


def test_turns_written_by_others_are_items(store, session):
    name = session.session_id
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    store.append(name, "user", "Hello")
    store.append(name, "assistant", None, metadata={"tool_calls": [call]})
    store.append(name, "tool", "done", metadata={"tool_call_id": "c"})
    store.append(name, "assistant", token_ids=store.codec.encode_text("All done."))
    assert items(session) == [
        {"role": "user", "content": "Hello"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
        {"role": "assistant", "content": "All done."},
    ]
    assert asyncio.run(session.pop_item()) == {"role": "assistant", "content": "All done."}


def test_turn_of_token_ids_without_a_tokenizer_is_refused_by_its_place(ids_only):
    ids_only.append("s", "user", token_ids=[1, 2])
    with pytest.raises(kalos.InvalidArgument, match="turn 0 holds token IDs alone"):
        items(KalosSession("s", ids_only))


def test_items_that_are_no_json_are_refused_and_nothing_is_added(session):
    with pytest.raises(kalos.InvalidType, match="JSON"):
        filled(session, [USER, {"role": "user", "content": "x", "more": object()}])
    with pytest.raises(kalos.InvalidType, match=r"items\[1\] must be a mapping"):
        filled(session, [USER, "text"])
    assert items(session) == []


def test_store_opened_for_reading_gives_items_and_refuses_others(store, session):
    filled(session)
    with kalos.SessionStore.open(store.path, "r") as reader:
        other = KalosSession(session.session_id, reader)
        assert items(other) == CHAT
        with pytest.raises(kalos.StoreReadOnly):
            filled(other, [USER])


def test_tenants_have_sessions_of_their_own(store):
    one, two = (KalosSession("shared name", store, tenant=name) for name in ("acme", "globex"))
    filled(one, [USER])
    assert items(two) == []
    assert (one.tenant, one.store) == ("acme", store)


def test_store_calls_run_outside_the_loop_thread(session, monkeypatch):
    seen = set()
    for name in ("turns", "extend", "rollback", "delete"):
        real = getattr(session.store, name)

        def noted(*args, real=real, **kwargs):
            seen.add(threading.get_ident())
            return real(*args, **kwargs)

        monkeypatch.setattr(session.store, name, noted, raising=False)
    filled(session)
    items(session)
    asyncio.run(session.pop_item())
    asyncio.run(session.clear_session())
    assert seen
    assert threading.get_ident() not in seen


def test_session_name_and_store_of_another_type_are_refused(store):
    with pytest.raises(kalos.InvalidType, match="session_id must be a str"):
        KalosSession(b"s", store)
    with pytest.raises(kalos.InvalidType, match="store must be a SessionStore"):
        KalosSession("s", "chats.kalos")
