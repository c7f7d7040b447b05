"""Chats in SQLite files: how a file is opened, LangGraph's checkpoints, and OpenAI Agents."""

import json
import os
import pickle
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from helpers.chat_data import QWEN3
from helpers.framework_chats import SESSION, retyped_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from kalos_ctx.agent_items import chat_of
from kalos_ctx.chat_files import Refused
from kalos_ctx.exporting import export_session
from kalos_ctx.found_chats import SourceUnavailable
from kalos_ctx.import_sources import opened_source
from kalos_ctx.importing import import_file
from kalos_ctx.langgraph_threads import checkpoint_messages
from kalos_ctx.store import SessionStore

GOLDEN = Path(__file__).parent / "golden" / "imports"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Return a store with Qwen3's tokenizer; each test has a tenant of its own in it."""
    path = tmp_path_factory.mktemp("databases") / "chats.kalos"
    with SessionStore.open(path, tokenizer=str(QWEN3)) as opened:
        yield opened


@pytest.fixture
def tenant(request):
    return request.node.name


@pytest.fixture
def golden(tmp_path):
    """Return a function that copies a golden file, which a test may change."""

    def copy(name):
        return Path(shutil.copy(GOLDEN / name, tmp_path / name))

    return copy


def refusals(report):
    return [(one.place, one.reason) for one in report.refused]


# ---- SQLite files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["agents.sqlite", "langgraph.sqlite"])
def test_sqlite_file_is_left_alone_with_nothing_beside_it(store, tenant, golden, name):
    path = golden(name)
    before = path.read_bytes()
    import_file(store, path, tenant=tenant)
    assert [one.name for one in path.parent.iterdir()] == [name]
    assert path.read_bytes() == before


def test_sqlite_file_that_is_being_written_is_read_as_it_is_now(store, tenant, golden):
    path = golden("langgraph.sqlite")
    writer = sqlite3.connect(path)
    writer.execute("UPDATE checkpoints SET thread_id = 'renamed'")
    writer.commit()
    assert path.with_name("langgraph.sqlite-wal").exists()
    import_file(store, path, tenant=tenant)
    writer.close()
    assert store.sessions(tenant=tenant).items == ["renamed"]


def test_sqlite_file_that_was_written_to_meanwhile_says_so(golden):
    path = golden("langgraph.sqlite")
    with (
        pytest.raises(SourceUnavailable, match="written to while it was read"),
        opened_source(path),
    ):
        path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("form", [None, "langgraph", "openai-agents"])
def test_sqlite_file_of_another_kind_is_refused(tmp_path, form):
    path = tmp_path / "other.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (id, text)")
    # A view could make a reader compute for ever.
    connection.execute(
        "CREATE VIEW agent_messages AS SELECT 1 AS id, 2 AS session_id, 3 AS message_data, "
        "4 AS created_at"
    )
    connection.commit()
    connection.close()
    with (
        pytest.raises(SourceUnavailable, match="has no table of the format"),
        opened_source(path, form),
    ):
        pass


def test_sqlite_file_of_both_kinds_wants_a_format(golden):
    path = golden("agents.sqlite")
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE checkpoints (thread_id, checkpoint_ns, checkpoint_id, type, checkpoint)"
    )
    connection.commit()
    connection.close()
    with pytest.raises(SourceUnavailable, match="say which by --format"), opened_source(path):
        pass
    with opened_source(path, "openai-agents") as source:
        assert [one.value["id"] for one in source.chats()] == [SESSION]


def test_sqlite_file_damaged_anywhere_is_refused_or_read(golden):
    """No damage may end in anything but a typed error or a chat."""
    path = golden("langgraph.sqlite")
    whole = path.read_bytes()
    outcomes = Counter()
    for at in range(16, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            with opened_source(path, "langgraph") as source:
                for found in source.chats():
                    outcomes[type(found.value)] += 1
        except SourceUnavailable:
            outcomes[SourceUnavailable] += 1
    assert outcomes.keys() <= {dict, Refused, SourceUnavailable}
    assert outcomes[Refused] + outcomes[SourceUnavailable] > 0


def test_file_that_is_no_sqlite_is_refused_where_that_was_asked_for(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("{}")
    with pytest.raises(SourceUnavailable, match="no SQLite file"), opened_source(path, "langgraph"):
        pass


# ---- LangGraph ----------------------------------------------------------------------------------


class Trap:
    """An object whose pickle makes a file where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_langgraph_pickle_is_refused_and_not_executed(store, tenant, golden, tmp_path):
    path = golden("langgraph.sqlite")
    retyped_checkpoint(path, "pickle", pickle.dumps(Trap(tmp_path / "sprung")))
    report = import_file(store, path, tenant=tenant)
    assert refusals(report) == [
        (
            f"thread {SESSION}",
            "its checkpoint is a pickle, which would have to be executed to be read",
        )
    ]
    assert not (tmp_path / "sprung").exists()


def test_langgraph_class_that_is_named_is_not_looked_up(store, tenant, golden, tmp_path):
    """A MessagePack extension may name any function; here it would make a folder."""
    path = golden("langgraph.sqlite")
    made = str(tmp_path / "sprung").encode()
    inner = b"\x93\xa2os\xa5mkdir\x91" + bytes([0xD9, len(made)]) + made
    trap = bytes([0xC7, len(inner), 1]) + inner
    data = b"\x81\xaechannel_values\x81\xa8messages\x91" + trap
    retyped_checkpoint(path, "msgpack", data)
    report = import_file(store, path, tenant=tenant)
    assert [reason for _, reason in refusals(report)] == [
        "messages[0] is no message (got a number)"
    ]
    assert not (tmp_path / "sprung").exists()


def test_langgraph_json_checkpoints_are_read(store, tenant, golden):
    path = golden("langgraph.sqlite")
    message = {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain", "schema", "messages", "HumanMessage"],
        "kwargs": {"content": "hi"},
    }
    data = json.dumps({"channel_values": {"messages": [message, USER]}})
    retyped_checkpoint(path, "json", data.encode())
    import_file(store, path, tenant=tenant)
    assert export_session(store, SESSION, tenant=tenant)["messages"] == [USER, USER]


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        ("msgpack+aes", b"x", "has the encoding 'msgpack+aes' (encrypted), which is not read"),
        ("bytes", b"x", "has the encoding 'bytes', which is not read"),
        ("msgpack", b"\xc1", "this is no whole MessagePack value"),
        ("msgpack", b"\x80", "has no channels"),
        ("json", b"{", "not JSON"),
        ("json", b'{"channel_values": {}}', "must be a list of messages (got none)"),
        ("json", b'{"channel_values": {"messages": [7]}}', "messages[0] is no message"),
        ("json", b'{"channel_values": {"messages": []}}', "must be a list of messages"),
    ],
)
def test_langgraph_checkpoint_that_cannot_be_read_says_why(
    store, tenant, golden, kind, data, reason
):
    path = golden("langgraph.sqlite")
    retyped_checkpoint(path, kind, data)
    report = import_file(store, path, tenant=tenant)
    assert [one.place for one in report.refused] == [f"thread {SESSION}"]
    assert reason in report.refused[0].reason
    assert store.sessions(tenant=tenant).items == []


def test_langgraph_subgraphs_are_counted_and_left_out(store, tenant, golden):
    path = golden("langgraph.sqlite")
    connection = sqlite3.connect(path)
    connection.execute(
        "INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, type, checkpoint) "
        "SELECT thread_id, 'inner:1', 'z', type, checkpoint FROM checkpoints LIMIT 1"
    )
    connection.commit()
    connection.close()
    report = import_file(store, path, tenant=tenant)
    assert (report.sessions, report.skipped) == (1, {"subgraphs of a thread": 1})


# ---- OpenAI Agents ------------------------------------------------------------------------------


def agents_file(path, rows, table="agent_messages"):
    connection = sqlite3.connect(path)
    connection.execute(
        f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, session_id TEXT, message_data TEXT, "
        "created_at TIMESTAMP)"
    )
    connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", rows)
    connection.commit()
    return connection


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ('{"role": "narrator", "content": "x"}', "item 7 has an unknown role 'narrator'"),
        ('{"type": "telepathy"}', "item 7 has an unknown type 'telepathy'"),
        ('{"__enc__": 1, "payload": "x"}', "item 7 has no type"),
        ("[]", "item 7 must be a JSON object (got a list)"),
        ("{", "item 7: not JSON"),
        ('{"role": "user", "content": [{"type": "input_image"}]}', "item 7 has a content part"),
        ('{"type": "function_call", "name": "f", "arguments": "{}"}', "item 7 has no call_id"),
        (b"\xff", "a text of the SQLite file is not UTF-8"),
    ],
)
def test_agents_item_that_cannot_be_taken_is_named_and_others_are_taken(
    store, tenant, tmp_path, data, reason
):
    path = tmp_path / "a.sqlite"
    rows = [(1, "a", json.dumps(USER), None), (7, "b", data, None), (9, "c", json.dumps(USER), 5)]
    agents_file(path, rows, '"my ""table"""').close()
    report = import_file(store, path, tenant=tenant)
    assert [one.place for one in report.refused] == ["session b"]
    assert report.refused[0].reason.startswith(reason)
    assert store.sessions(tenant=tenant).items == ["a", "c"]


def test_agents_branch_main_is_taken(store, tenant, tmp_path):
    path = tmp_path / "a.sqlite"
    rows = [(i, "s", json.dumps({**USER, "content": str(i)}), None) for i in range(4)]
    connection = agents_file(path, rows)
    connection.execute(
        "CREATE TABLE message_structure (session_id, message_id, branch_id, sequence_number)"
    )
    connection.executemany(
        "INSERT INTO message_structure VALUES ('s', ?, ?, ?)",
        [(2, "main", 1), (0, "main", 2), (0, "other", 1), (3, "other", 2)],
    )
    connection.commit()
    connection.close()
    report = import_file(store, path, tenant=tenant)
    assert [turn.text for turn in store.turns("s", tenant=tenant)] == ["2", "0"]
    assert report.skipped == {"branches beside 'main'": 1}


def test_agent_items_calls_join_the_message_that_they_came_with():
    text = {"type": "message", "role": "assistant", "content": "Let me see."}
    calls = [
        {"type": "function_call", "call_id": str(i), "name": "f", "arguments": "{}"}
        for i in range(2)
    ]
    output = {
        "type": "function_call_output",
        "call_id": "0",
        "output": [{"type": "input_text", "text": "done"}],
    }
    for items in ([text, *calls, output], [*calls, text, output]):
        chat = chat_of((f"item {i}", None, item) for i, item in enumerate(items))
        assert [one["role"] for one in chat.messages] == ["assistant", "tool"]
        assert chat.messages[0]["content"] == "Let me see."
        assert [one["id"] for one in chat.messages[0]["tool_calls"]] == ["0", "1"]
        assert chat.messages[1] == {"role": "tool", "content": "done", "tool_call_id": "0"}


def test_agent_items_reasoning_text_goes_to_the_answer_behind_it():
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    answer = {"role": "assistant", "content": "yes"}
    chat = chat_of([("item 0", None, thought), ("item 1", 2.0, answer)])
    assert chat.messages == [
        {"role": "assistant", "content": "yes", "reasoning_content": "hm", "created_at": 2.0}
    ]


# ---- Anything at all ----------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        "type", "role", "content", "message", "function_call", "function_call_output", "reasoning",
        "call_id", "output", "name", "arguments", "text", "input_text", "assistant", "user", "tool",
        "human", "ai", "constructor", "id", "kwargs", "HumanMessage", "tool_calls", "args",
        "additional_kwargs", "invalid_tool_calls", "status", "error",
    ]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=3))
def test_agent_items_of_any_form_are_taken_or_refused(items):
    try:
        chat = chat_of((f"item {i}", None, item) for i, item in enumerate(items))
    except Refused:
        return
    assert len(chat.messages) == len(chat.places)


@given(st.lists(VALUES, max_size=3))
def test_langgraph_messages_of_any_form_are_taken_or_refused(messages):
    data = json.dumps({"channel_values": {"messages": messages}}).encode()
    try:
        found = checkpoint_messages("json", data)
    except Refused:
        return
    assert len(found) == len(messages)
