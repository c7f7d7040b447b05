"""Importing what the frameworks write now, each by its own library, and Redis from a real server.

Needs the frameworks of tests/golden/make_imports.py and a `redis-server`.
"""

import asyncio
import json
import shutil
import socket
import subprocess
import threading

import pytest
import redis
from agents import SQLiteSession
from agents.extensions.memory import AdvancedSQLiteSession
from agents.models.chatcmpl_converter import Converter
from helpers.framework_chats import (
    QUESTION,
    SESSION,
    essence,
    expected,
    write_agent_session,
    write_checkpoints,
    write_redis_documents,
    write_redis_lists,
)
from langgraph.checkpoint.sqlite import SqliteSaver

from kalos_ctx.demo_data import tokenizer_dir
from kalos_ctx.exporting import export_session, export_sessions
from kalos_ctx.found_chats import SourceUnavailable
from kalos_ctx.import_sources import opened_source
from kalos_ctx.importing import import_chats, import_file
from kalos_ctx.store import SessionStore

# Of the frameworks' own, while they run here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*:langchain_core._api.deprecation.LangChainDeprecationWarning"
    ),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Return a store with Qwen3's tokenizer; each test has a tenant of its own in it."""
    path = tmp_path_factory.mktemp("frameworks") / "chats.kalos"
    with SessionStore.open(path, tokenizer=str(tokenizer_dir())) as opened:
        yield opened


@pytest.fixture
def tenant(request):
    return request.node.name


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return the URL of a Redis server of this module's own, on a Unix socket."""
    folder = tmp_path_factory.mktemp("redis")
    path = folder / "redis.sock"
    program = shutil.which("redis-server")
    assert program is not None, "install redis-server"
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder],
        stdout=subprocess.PIPE,
        text=True,
    )
    # Its log says when it answers.
    for line in process.stdout:
        if "eady to accept connections" in line:
            break
    yield f"unix://{path}"
    process.terminate()
    process.wait()
    process.stdout.close()


@pytest.fixture
def database(server):
    """Return the server's URL; it is empty."""
    with redis.Redis.from_url(server, protocol=2) as client:
        client.flushall()
    return server


@pytest.fixture(scope="module")
def document_server():
    """Return the URL of a stand-in that has RedisJSON, which Debian's server has not."""
    from fakeredis import TcpFakeServer

    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    thread.join()
    server.server_close()


def history_of(session, **options):
    """Return langchain-community's history; the package warns where it is imported."""
    from langchain_community.chat_message_histories import RedisChatMessageHistory

    return RedisChatMessageHistory(session, **options)


def messages(store, tenant, session=SESSION):
    return export_session(store, session, tenant=tenant)["messages"]


# ---- OpenAI Agents ------------------------------------------------------------------------------


def test_agents_session_is_what_the_sdk_itself_makes_of_it(store, tenant, tmp_path):
    items = write_agent_session(tmp_path / "a.sqlite")
    import_file(store, tmp_path / "a.sqlite", tenant=tenant)
    found = essence(messages(store, tenant))
    assert found == expected()
    no_hosted = [one for one in items if one.get("type") not in ("web_search_call", "reasoning")]
    theirs = Converter.items_to_messages(no_hosted)
    assert [one["role"] for one in theirs] == ["developer", *(m["role"] for m in found[1:])]
    for ours, other in zip(found, theirs, strict=True):
        assert ours.get("tool_calls", []) == other.get("tool_calls", [])
        assert ours.get("tool_call_id") == other.get("tool_call_id")
        assert ours["content"] == (other["content"] or "")


def test_agents_session_that_has_grown_adds_its_new_items(store, tenant, tmp_path):
    async def add(*contents):
        session = SQLiteSession("s", tmp_path / "a.sqlite", messages_table="my_messages")
        await session.add_items([{"role": "user", "content": one} for one in contents])
        session.close()

    asyncio.run(add("one", "two"))
    assert import_file(store, tmp_path / "a.sqlite", tenant=tenant).sessions == 1
    asyncio.run(add("three"))
    report = import_file(store, tmp_path / "a.sqlite", tenant=tenant)
    assert (report.sessions, report.grown, report.turns) == (0, 1, 1)
    assert [one["content"] for one in messages(store, tenant, "s")] == ["one", "two", "three"]


def test_agents_session_while_it_is_open_is_read(store, tenant, tmp_path):
    async def import_meanwhile():
        session = SQLiteSession("s", tmp_path / "a.sqlite")
        await session.add_items([{"role": "user", "content": "one"}])
        report = import_file(store, tmp_path / "a.sqlite", tenant=tenant)
        session.close()
        return report

    assert asyncio.run(import_meanwhile()).turns == 1


def test_agents_branches_give_the_main_one(store, tenant, tmp_path):
    async def branch():
        session = AdvancedSQLiteSession(
            session_id="s", db_path=tmp_path / "a.sqlite", create_tables=True
        )
        await session.add_items([{"role": "user", "content": "one"}])
        await session.add_items([{"role": "user", "content": "two"}])
        await session.create_branch_from_turn(2, "other")
        await session.add_items([{"role": "user", "content": "elsewhere"}])
        session.close()

    asyncio.run(branch())
    report = import_file(store, tmp_path / "a.sqlite", tenant=tenant)
    assert [one["content"] for one in messages(store, tenant, "s")] == ["one", "two"]
    assert report.skipped == {"branches beside 'main'": 1}


# ---- LangGraph ----------------------------------------------------------------------------------


def test_langgraph_thread_is_what_the_saver_gives(store, tenant, tmp_path):
    path = tmp_path / "g.sqlite"
    write_checkpoints(path)
    write_checkpoints(path, "another")
    report = import_file(store, path, tenant=tenant)
    assert (report.sessions, report.refused) == (2, [])
    with SqliteSaver.from_conn_string(str(path)) as saver:
        for name in (SESSION, "another"):
            found = messages(store, tenant, name)
            assert essence(found) == expected()
            config = {"configurable": {"thread_id": name}}
            theirs = saver.get(config)["channel_values"]["messages"]
            assert [one["id"] for one in found] == [one.id for one in theirs]


# ---- Redis --------------------------------------------------------------------------------------


def test_redis_lists_are_read_oldest_first_from_a_real_server(store, tenant, database):
    write_redis_lists(database)
    report = import_file(store, database, tenant=tenant)
    assert essence(messages(store, tenant)) == expected()
    assert (report.sessions, report.turns) == (1, 6)
    assert import_file(store, database, tenant=tenant).unchanged == 1


def test_redis_history_longer_than_a_page_grows(store, tenant, database):
    history = history_of("long", url=database)
    for i in range(1203):
        history.add_user_message(f"message {i}")
    import_file(store, database, tenant=tenant)
    history.add_user_message("the last")
    report = import_file(store, database, tenant=tenant)
    assert (report.grown, report.turns) == (1, 1)
    texts = [turn.text for turn in store.turns("long", tenant=tenant)]
    assert texts == [*(f"message {i}" for i in range(1203)), "the last"]


def test_redis_keys_of_others_are_not_touched_and_prefixes_are_literal(store, tenant, database):
    with redis.Redis.from_url(database, protocol=2) as client:
        client.set("message_store:text", "x")
        client.rpush("message_storeX:s", "x")
        client.rpush("queue", "x")
        client.set("chat:s:01M8S4AS4BQ33CHCRBDNKE249D", "x")
        client.rpush("message_store:bad", "x")
        client.rpush(b"message_store:\xff", json.dumps({"type": "human", "data": {"content": "a"}}))
    report = import_file(store, database, tenant=tenant)
    assert [(one.place, one.reason[:21]) for one in report.refused] == [
        ("session bad", "messages[0]: not JSON")
    ]
    assert store.sessions(tenant=tenant).items == [b"\xff"]


def test_redis_prefix_that_was_given_is_taken(store, tenant, database):
    history_of("s", url=database, key_prefix="my*[app]:").add_user_message(QUESTION)
    history_of("t", url=database, key_prefix="myXapp:").add_user_message(QUESTION)
    with opened_source(database, key_prefix="my*[app]:") as source:
        import_chats(store, source.chats(), tenant=tenant)
    assert store.sessions(tenant=tenant).items == ["s"]


def test_redis_documents_keep_what_the_library_keeps(store, tenant, document_server):
    write_redis_documents(document_server)
    report = import_file(store, document_server, tenant=tenant)
    kept = [one for one in expected() if one["content"] and one["role"] != "tool"]
    assert essence(messages(store, tenant)) == kept
    assert report.skipped["results whose call was not stored"] == 2


def test_redis_that_does_not_answer_is_one_sentence_without_the_password(store, tenant):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        url = f"redis://me:secret@127.0.0.1:{taken.getsockname()[1]}/0"
        with pytest.raises(SourceUnavailable, match="does not answer") as failed:
            import_file(store, url, tenant=tenant)
    assert "secret" not in str(failed.value)
    assert list(export_sessions(store, tenant=tenant)) == []
