"""Chats of other frameworks into a store, from files that the frameworks wrote themselves."""

import contextlib
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import framework_chats
from helpers.chat_data import QWEN3
from helpers.framework_chats import SESSION, essence, expected

from kalos_ctx import redis_chats
from kalos_ctx.chat_files import Refused
from kalos_ctx.conversations import conversation
from kalos_ctx.errors import IdempotencyConflict
from kalos_ctx.exporting import export_session
from kalos_ctx.found_chats import FoundChat, SourceUnavailable
from kalos_ctx.import_sources import opened_source
from kalos_ctx.importing import import_chats, import_file, keyed_turns
from kalos_ctx.langchain_messages import openai_message
from kalos_ctx.redis_chats import opened_redis, shown_url, stored_chat
from kalos_ctx.rehearsal import Rehearsal
from kalos_ctx.store import SessionStore

GOLDEN = Path(__file__).parent / "golden" / "imports"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Return a store with Qwen3's tokenizer; each test has a tenant of its own in it."""
    path = tmp_path_factory.mktemp("sources") / "chats.kalos"
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


def redis_session(layout):
    stored = json.loads((GOLDEN / "redis.json").read_text())[layout]
    rows = next(iter(stored.values())) if layout == "lists" else stored.values()
    return stored_chat(SESSION, f"session {SESSION}", [row.encode() for row in rows])


def take(store, tenant, name):
    """Import a golden chat; return the report and the messages that the store then exports."""
    if name.endswith(".sqlite"):
        report = import_file(store, GOLDEN / name, tenant=tenant)
    else:
        report = import_chats(store, [redis_session(name)], tenant=tenant)
    return report, export_session(store, SESSION, tenant=tenant)["messages"]


def refusals(report):
    return [(one.place, one.reason) for one in report.refused]


# ---- What the frameworks wrote ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["agents.sqlite", "langgraph.sqlite", "lists"])
def test_import_of_a_frameworks_chat_keeps_texts_calls_and_pairs(store, tenant, name):
    report, messages = take(store, tenant, name)
    assert essence(messages) == expected()
    assert (report.sessions, report.turns, report.refused) == (1, 6, [])
    turns = store.turns(SESSION, tenant=tenant)
    assert report.tokens == sum(turn.num_tokens for turn in turns)


@pytest.mark.parametrize("name", ["agents.sqlite", "langgraph.sqlite", "lists", "documents"])
def test_import_of_a_frameworks_chat_again_adds_nothing(store, tenant, name):
    take(store, tenant, name)
    report, messages = take(store, tenant, name)
    assert (report.sessions, report.turns, report.unchanged) == (0, 0, 1)
    assert len(messages) == store.count(SESSION, tenant=tenant)


@pytest.mark.parametrize("name", ["agents.sqlite", "langgraph.sqlite", "lists"])
def test_import_of_the_export_gives_the_same_tokens(store, tenant, name):
    take(store, tenant, name)
    record = export_session(store, SESSION, tenant=tenant, full=True)
    import_chats(store, [FoundChat("line 1", record)], tenant=f"{tenant} again")
    first, second = (
        [turn.token_ids.tolist() for turn in store.turns(SESSION, tenant=owner)]
        for owner in (tenant, f"{tenant} again")
    )
    assert first == second


def test_import_agents_counts_what_a_turn_has_no_form_for_and_keeps_times(store, tenant):
    report, _ = take(store, tenant, "agents.sqlite")
    assert report.skipped == {"reasoning without its text": 1, "web_search_call": 1}
    assert report.as_system == 1
    with contextlib.closing(sqlite3.connect(GOLDEN / "agents.sqlite")) as connection:
        (row,) = connection.execute(
            "SELECT CAST(strftime('%s', created_at) AS REAL) FROM agent_messages LIMIT 1"
        )
    assert store.turns(SESSION, tenant=tenant)[0].created_at == row[0]


def test_import_langchain_fields_reach_the_turns_metadata(store, tenant):
    _, messages = take(store, tenant, "lists")
    assert messages[1]["id"] == "m1"
    assert messages[2]["reasoning_content"] == "Two cities."
    assert [one.get("status") for one in messages] == [None] * 4 + ["error", None]
    assert messages[3]["name"] == "weather"


def test_import_documents_leaves_out_results_whose_call_is_gone(store, tenant):
    report, messages = take(store, tenant, "documents")
    assert [one["role"] for one in messages] == ["system", "user", "assistant"]
    assert report.skipped == {
        "empty assistant messages": 1,
        "results whose call was not stored": 2,
    }


def test_result_of_a_tool_that_returned_nothing_stands_as_empty(store, tenant):
    call = {"name": "f", "args": {}, "id": "1"}
    rows = [
        {"type": "ai", "data": {"content": "", "tool_calls": [call]}},
        {"type": "tool", "data": {"content": "", "tool_call_id": "1"}},
    ]
    found = stored_chat("s", "session s", [json.dumps(row).encode() for row in rows])
    report = import_chats(store, [found], tenant=tenant)
    assert [turn.text for turn in store.turns("s", tenant=tenant)] == ["", "[empty]"]
    assert report.skipped == {"empty results that stand as [empty]": 1}


def test_documents_stand_in_the_order_of_their_times():
    rows = [{"type": "human", "data": {"content": str(i)}, "timestamp": 10 - i} for i in range(3)]
    found = stored_chat("s", "s", [json.dumps(row).encode() for row in rows])
    assert [one["content"] for one in found.value["messages"]] == ["2", "1", "0"]


# ---- LangChain messages -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "wanted"),
    [
        ("chat", {"content": "x", "role": "user"}, {"role": "user", "content": "x"}),
        (
            "system",
            {"content": "x", "additional_kwargs": {"__openai_role__": "developer"}},
            {"role": "developer", "content": "x"},
        ),
        ("AIMessageChunk", {"content": ["a", "b"]}, {"role": "assistant", "content": "ab"}),
        (
            "ai",
            {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        ),
        ("ai", {"content": ""}, None),
    ],
)
def test_langchain_message_in_openai_form(kind, fields, wanted):
    assert openai_message("m", kind, fields) == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": [{"name": "f", "args": {"a": "ü"}, "id": "1"}]},
        {"invalid_tool_calls": [{"name": "f", "args": '{"a": "ü"}', "id": "1", "error": "x"}]},
        {
            "additional_kwargs": {
                "tool_calls": [
                    {
                        "index": 0,
                        "id": "1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"a": "ü"}'},
                    }
                ]
            }
        },
        {
            "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": "ü"}}],
            "tool_calls": [{"name": "f", "args": {"a": "ü"}, "id": "1"}],
        },
    ],
    ids=["parsed", "invalid", "raw", "anthropic"],
)
def test_langchain_tool_calls_have_one_form(fields):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
    assert openai_message("m", "ai", fields) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call],
    }


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("remove", {"content": ""}, "m has an unknown role 'remove'"),
        (None, {"content": ""}, "m has no type"),
        ("human", [], "m must have its fields in an object (got a list)"),
        ("human", {"content": 5}, "m: content must be a string or a list (got a number)"),
        ("human", {"content": [{"type": "image_url"}]}, "m has a content part that is not text"),
        ("ai", {"tool_calls": [{}]}, "m has a tool call without a name"),
        ("ai", {"tool_calls": {}, "invalid_tool_calls": [1]}, "m has a tool call without a name"),
        ("ai", {"additional_kwargs": {"tool_calls": "x"}}, "m: tool calls must be a list"),
    ],
)
def test_langchain_message_that_cannot_be_taken_says_why(kind, fields, reason):
    with pytest.raises(Refused) as refused:
        openai_message("m", kind, fields)
    assert str(refused.value).startswith(reason)


# ---- Redis without a server ---------------------------------------------------------------------


def test_redis_without_its_package_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(redis_chats.importlib, "import_module", missing)
    with (
        pytest.raises(SourceUnavailable, match=r"pip install 'kalos-ctx\[redis\]'"),
        opened_redis("redis://localhost"),
    ):
        pass


def test_redis_url_is_shown_without_its_password():
    assert shown_url("redis://me:secret@host:7/2?password=secret") == "redis://host:7/2"


@pytest.mark.parametrize(
    ("source", "form", "words"),
    [
        ("redis://localhost", "jsonl", "not of the format jsonl"),
        ("chats.jsonl", "redis", "read from a URL"),
    ],
)
def test_source_and_format_that_do_not_fit_are_refused(source, form, words):
    with pytest.raises(SourceUnavailable, match=words), opened_source(source, form):
        pass


# ---- Repeated, interrupted and rehearsed --------------------------------------------------------

INTERRUPTED = """
import os, signal, sys
from kalos_ctx.importing import import_file
from kalos_ctx.store import SessionStore

def until(done):
    if done >= int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

with SessionStore.open(sys.argv[2], vocab_size=10) as store:
    import_file(store, sys.argv[1], trust_token_ids=True, on_bytes=until)
"""


def test_import_killed_and_repeated_adds_nothing_twice(tmp_path):
    record = {"role": "user", "token_ids": [1, 2], "padding": "x" * 400}
    rows = [
        json.dumps({"id": f"s{i}", "messages": [record] * (i % 5 + 1)}) + "\n" for i in range(5_000)
    ]
    path, kept = tmp_path / "chats.jsonl", tmp_path / "chats.kalos"
    path.write_text("".join(rows))
    script = [sys.executable, "-c", INTERRUPTED, str(path), str(kept), str(2 << 20)]
    assert subprocess.run(script, check=False).returncode == -signal.SIGKILL
    with SessionStore.open(kept, vocab_size=10) as store:
        before = store.stats()["sessions"]
        assert 0 < before < 5_000
        report = import_file(store, path, trust_token_ids=True)
        assert (report.sessions, report.unchanged) == (5_000 - before, before)
        assert store.stats()["turns"] == 1_000 * 15


def test_turns_have_keys_by_which_the_store_knows_them(store, tenant):
    chat = conversation({"id": "s", "messages": [USER, USER]}, "")
    first = store.extend("s", keyed_turns(chat, 0), tenant=tenant)
    assert store.extend("s", keyed_turns(chat, 0), tenant=tenant) == first == [0, 1]
    other = conversation({"id": "s", "messages": [{**USER, "content": "x"}]}, "")
    with pytest.raises(IdempotencyConflict):
        store.extend("s", keyed_turns(other, 0), tenant=tenant)
    assert store.count("s", tenant=tenant) == 2


def test_rehearsal_counts_what_an_import_would_and_makes_no_store(store, tenant, tmp_path):
    report, _ = take(store, tenant, "langgraph.sqlite")
    with Rehearsal(tmp_path / "none.kalos", tokenizer=str(QWEN3)) as rehearsal:
        rehearsed = import_file(rehearsal, GOLDEN / "langgraph.sqlite")
    assert rehearsed == report
    assert list(tmp_path.iterdir()) == []


def test_rehearsal_compares_with_the_store_and_leaves_it_alone(tmp_path):
    path = tmp_path / "chats.kalos"
    hello = {"role": "assistant", "content": "hello"}

    def chats(*lists):
        return [
            FoundChat(f"{i}", {"id": name, "messages": list(messages)})
            for i, (name, *messages) in enumerate(lists)
        ]

    with SessionStore.open(path, tokenizer=str(QWEN3)) as opened:
        import_chats(opened, chats(("a", USER), ("b", USER), ("c", USER)))
    before = {one: one.read_bytes() for one in path.rglob("*") if one.is_file()}
    wanted = chats(("a", USER), ("b", USER, hello), ("c", hello), ("d", USER), ("d", USER))
    with Rehearsal(path, tokenizer=str(QWEN3)) as rehearsal:
        report = import_chats(rehearsal, wanted)
    assert (report.sessions, report.grown, report.unchanged, report.turns) == (1, 1, 1, 2)
    assert [place for place, _ in refusals(report)] == ["2", "4"]
    assert {one: one.read_bytes() for one in path.rglob("*") if one.is_file()} == before
    with SessionStore.open(path, tokenizer=str(QWEN3)) as opened:
        real = import_chats(opened, wanted[:-1])
    assert (real.tokens, real.turns) == (report.tokens, report.turns)


@pytest.mark.parametrize(("form", "taken"), [("jsonl", "a"), ("sharegpt", "b"), (None, "ab")])
def test_json_format_that_was_asked_for_refuses_the_other(store, tenant, tmp_path, form, taken):
    path = tmp_path / "chats.jsonl"
    records = [
        {"id": "a", "messages": [USER]},
        {"id": "b", "conversations": [{"from": "human", "value": "hi"}]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    report = import_file(store, path, tenant=tenant, form=form)
    assert "".join(store.sessions(tenant=tenant).items) == taken
    assert len(report.refused) == 2 - len(taken)


def test_golden_files_name_what_wrote_them():
    versions = json.loads((GOLDEN / "versions.json").read_text())
    assert {"openai-agents", "langgraph-checkpoint-sqlite", "langchain-redis"} <= versions.keys()
    assert framework_chats.SESSION == SESSION
