"""The page's server: who is answered, what is said, and that nothing is written."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import webbrowser
from contextlib import contextmanager
from urllib.parse import urlencode, urlsplit

import numpy as np
import pytest
from helpers.inspect_store import COLLECTION, EVIL, LONG, PERSONA, TOOLS, make_inspect_store
from tokenizers import Tokenizer, models

from kalos_ctx import cli, demo_data
from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import InvalidArgument, StoreCorrupt
from kalos_ctx.inspecting import server as server_module
from kalos_ctx.inspecting.queries import Query
from kalos_ctx.inspecting.server import FILES, InspectServer
from kalos_ctx.inspecting.token_text import pieces
from kalos_ctx.planner import Policy
from kalos_ctx.store import SessionStore

FULL = {"max_tokens": "100000"}


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return the path of a store with something of everything."""
    path = tmp_path_factory.mktemp("inspect") / "chats.kalos"
    make_inspect_store(path)
    return path


@contextmanager
def serving(store, **options):
    with InspectServer(store, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def reading(filled):
    with SessionStore.open(filled, "r", tokenizer=str(demo_data.tokenizer_dir())) as store:
        yield store


@pytest.fixture(scope="module")
def server(reading):
    with serving(reading) as running:
        yield running


@pytest.fixture
def kalos(capsys):
    """Return a function that runs a command: (exit status, standard output, standard error)."""

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            cli.app([str(arg) for arg in args], prog_name="kalos")
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def fetch(server, path, method="GET", headers=None, body=None):
    """Return (status, headers, body) of a request to a path as it is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        given = {"Host": f"127.0.0.1:{server.server_port}", **(headers or {})}
        connection.putrequest(method, path, skip_host=True)
        for name, value in given.items():
            for one in value if isinstance(value, list) else [value]:
                connection.putheader(name, one)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def ask(server, name, **fields):
    """Return (status, document) of one of the page's questions."""
    query = urlencode({key: one for key, one in fields.items() if one is not None}, doseq=True)
    status, _, body = fetch(server, f"/{server.token}/api/{name}?{query}")
    return status, json.loads(body)


def window(server, session, **fields):
    status, found = ask(
        server, "window", **{"session": session.encode().hex(), "tenant": "", **FULL, **fields}
    )
    assert status == 200, found
    return found


# ---- Who is answered ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(FILES))
def test_files_of_the_page_are_served_under_the_token(server, name):
    status, headers, body = fetch(server, f"/{server.token}/{name}")
    assert (status, headers["Content-Type"]) == (200, FILES[name][1])
    assert body


@pytest.mark.parametrize(
    "path",
    ["/", "/api/store", "/x/api/store", "/{token}", "/{token}x/", "/{short}/",
     "/%ff/api/store", "/open/", "/open/None", "/{token}/../{token}/api/store"],
)  # fmt: skip
def test_address_without_the_token_gives_nothing(server, path):
    token = server.token
    path = path.replace("{token}", token).replace("{short}", token[:-1])
    status, _, body = fetch(server, path)
    assert status == 404
    assert json.loads(body)["error"]["kind"] == "NotFound"
    assert b"sessions" not in body


@pytest.mark.parametrize("path", ["/{token}/", "/{token}/api/store", "/{token}/app.js", "/other"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Host": []},
        {"Host": ["127.0.0.1:{port}", "evil.example"]},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {
            "Sec-Fetch-Site": "cross-site",
            "Sec-Fetch-Mode": "navigate",
            "Sec-Fetch-Dest": "iframe",
        },
    ],
    ids=str,
)
def test_request_from_elsewhere_is_forbidden_whatever_it_asks(server, path, headers):
    port = str(server.server_port)
    filled = {
        name: [
            one.replace("{port}", port) for one in (value if isinstance(value, list) else [value])
        ]
        for name, value in headers.items()
    }
    status, answered, body = fetch(server, path.replace("{token}", server.token), headers=filled)
    assert (status, json.loads(body)["error"]["kind"]) == (403, "Forbidden")
    assert not [name for name in answered if name.lower().startswith("access-control")]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LocalHost"])
def test_request_of_the_page_itself_is_answered(server, host):
    own = f"{host}:{server.server_port}"
    headers = {"Host": own, "Origin": f"http://{own.lower()}", "Sec-Fetch-Site": "same-origin"}
    assert fetch(server, f"/{server.token}/api/store", headers=headers)[0] == 200


def test_link_to_the_page_may_be_followed_from_elsewhere(server):
    headers = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    assert fetch(server, f"/{server.token}/", headers=headers)[0] == 200
    assert fetch(server, "/other/", headers=headers)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_other_methods_are_not_answered(server, method):
    status, _, _ = fetch(server, f"/{server.token}/api/store", method)
    assert status == 501


def test_body_of_a_request_ends_the_connection(server):
    _, headers, _ = fetch(
        server, f"/{server.token}/api/store", headers={"Content-Length": "4"}, body=b"GET "
    )
    assert headers["Connection"] == "close"


@pytest.mark.parametrize("path", ["/{token}/", "/{token}/api/store", "/other"])
def test_every_answer_shuts_out_other_pages(server, path):
    _, headers, _ = fetch(server, path.replace("{token}", server.token))
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_page_names_nothing_from_elsewhere_and_has_no_inline_script():
    page = server_module.files("kalos_ctx.inspecting") / "page"
    texts = {name: (page / name).read_text() for name, _ in FILES.values()}
    for name, text in texts.items():
        assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", ""), name
        assert "innerHTML" not in text
        assert "eval(" not in text
    html = texts["index.html"]
    assert html.count("<script") == html.count('<script type="module" src=') == 1
    assert "<style" not in html
    assert " style=" not in html
    assert " on" not in html.replace(" only", "").replace(" one", "")


def test_server_listens_on_this_machine_alone(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_token_is_long_new_each_time_and_compared_in_constant_time(reading, monkeypatch):
    with InspectServer(reading) as one, InspectServer(reading) as other:
        assert one.token != other.token
        assert len(one.token) >= 43
        asked = []
        monkeypatch.setattr(
            server_module.hmac, "compare_digest", lambda a, b: asked.append((a, b)) or a == b
        )
        assert one.knows(one.token)
        assert not one.knows("x")
        assert asked[1] == (b"x", one.token.encode())


def test_launch_address_leads_to_the_page_once(reading):
    with serving(reading) as server:
        path = server.launch_url.removeprefix(f"http://127.0.0.1:{server.server_port}")
        status, headers, _ = fetch(server, path)
        assert (status, headers["Location"]) == (303, server.url)
        assert fetch(server, path)[0] == 404


def test_writer_is_no_store_to_look_at(store_path):
    with SessionStore.open(store_path) as store, pytest.raises(InvalidArgument):
        InspectServer(store)


# ---- What is listed -----------------------------------------------------------------------------


def test_overview_says_what_the_store_is(server, reading):
    status, found = ask(server, "store")
    assert status == 200
    assert found["sessions"] == reading.stats()["sessions"]
    assert [one["name"] for one in found["tenants"]] == ["", "acme"]
    assert (found["has_tokenizer"], found["has_embedder"]) == (True, False)


def test_sessions_are_found_by_a_part_of_their_name(server):
    _, found = ask(server, "sessions", tenant="", search="WITH T")
    assert [(one["name"], one["turns"] > 0) for one in found["sessions"]] == [(TOOLS, True)]
    assert bytes.fromhex(found["sessions"][0]["id"]).decode() == TOOLS
    assert ask(server, "sessions", tenant="", search="none")[1] == {"sessions": [], "cursor": None}


def test_sessions_come_in_pages_that_miss_none(server, reading, monkeypatch):
    monkeypatch.setattr("kalos_ctx.inspecting.pages.SESSIONS_A_PAGE", 4)
    names, cursor = [], None
    while True:
        _, page = ask(server, "sessions", tenant="", cursor=cursor)
        names += [one["name"] for one in page["sessions"]]
        cursor = page["cursor"]
        if cursor is None:
            break
    assert names == reading.sessions().items


def test_name_that_would_turn_the_page_is_escaped(server):
    _, found = ask(server, "sessions", tenant=b"acme".hex())
    evil = found["sessions"][0]
    assert evil["name"] == "\\x1b[31m<img src=x onerror=alert(1)>\\u202e"
    assert bytes.fromhex(evil["id"]).decode() == EVIL


def test_session_tells_what_is_pinned_summarized_and_recallable(server):
    _, found = ask(server, "session", tenant="", session=LONG.encode().hex())
    assert (found["segments"], found["summaries"]) == (["persona"], 1)
    assert [(one["name"], one["passages"]) for one in found["collections"]] == [(COLLECTION, 200)]


def test_passages_come_in_pages(server):
    ids, cursor = [], None
    for _ in range(4):
        _, page = ask(
            server, "passages", tenant="", collection=COLLECTION.encode().hex(), cursor=cursor
        )
        ids += [int(one["id"]) for one in page["passages"]]
        cursor = page["cursor"]
    assert (ids, cursor) == (list(range(200)), None)


# ---- Windows ------------------------------------------------------------------------------------


def test_window_is_the_assemblers_with_its_text_token_by_token(server, reading):
    found = window(server, LONG, max_tokens="3000", reserve="256", generation_prompt="1")
    with ContextAssembler(reading, device="cpu") as assembler:
        policy = Policy(generation_prompt=True)
        with assembler.assemble(LONG, max_tokens=3000, reserve=256, policy=policy) as wanted:
            ids = wanted.token_ids.tolist()
            tiles = [(one.kind, one.start) for one in wanted.report.segments]
    shown = [one for part in found["segments"] for piece in part["pieces"] for one in piece[1]]
    assert shown == ids
    assert [(one["kind"], one["start"]) for one in found["segments"]] == tiles
    text = "".join(piece[0] for part in found["segments"] for piece in part["pieces"])
    assert text == reading.codec.decode(ids)
    assert PERSONA in text
    assert found["segments"][-1]["kind"] == "generation_prompt"


def test_window_says_what_was_dropped_and_why_newest_first(server):
    found = window(server, LONG, max_tokens="1000")
    dropped = found["dropped"]
    assert dropped["by_reason"]["summarized"] == 40
    assert sum(dropped["by_reason"].values()) == dropped["count"]
    seqs = [one["seq"] for one in dropped["newest"]]
    assert seqs == sorted(seqs, reverse=True)
    first = next(one["seq"] for one in found["segments"] if one["kind"] == "turn")
    assert seqs[0] == first - 1
    assert dropped["newest"][0]["text"]


def test_window_is_compared_with_the_exchange_before(server, reading):
    session = reading.sessions().items[0]
    turns = reading.turns(session)
    seq = max(turn.seq for turn in turns[:-1] if turn.role == "user")
    with ContextAssembler(reading, device="cpu") as assembler:
        with assembler.assemble(session, max_tokens=100_000, as_of=seq + 1) as before:
            tokens = len(before)
        with assembler.assemble(session, max_tokens=100_000) as after:
            reused = after.report.reused_tokens
    assert window(server, session)["reuse"] == {
        "tokens": reused,
        "until": None,
        "before": {"as_of": seq + 1, "tokens": tokens, "why": None},
    }
    assert reused >= tokens


def test_window_that_a_new_summary_changed_says_where_the_match_ended(server):
    """The summary was made behind the last turn: the window of the exchange before had none."""
    reuse = window(server, LONG)["reuse"]
    assert reuse["until"] == "summary 0"
    assert 0 < reuse["tokens"] < reuse["before"]["tokens"]


def test_window_of_a_first_turn_has_nothing_to_compare_with(server):
    """Nor with a window of the same turn that was shown before."""
    for _ in range(2):
        reuse = window(server, TOOLS, as_of="1")["reuse"]
        assert reuse["before"]["why"] == "there is no exchange before it"
        assert (reuse["tokens"], reuse["until"]) == (0, None)


def test_window_is_compared_with_the_one_shown_last_where_asked(reading):
    with serving(reading) as server:
        first = window(server, TOOLS, compare="shown")
        assert first["reuse"]["tokens"] == 0
        again = window(server, TOOLS, compare="shown")
        assert again["reuse"] == {"tokens": again["num_tokens"], "until": None, "before": None}


def test_window_recalls_by_a_stored_passage_and_shows_what_became_of_each_hit(server):
    found = window(
        server, LONG, max_tokens="1200", query="passage", query_passage="3", top_k="9",
        query_collection=COLLECTION.encode().hex(), collection=[COLLECTION.encode().hex()],
    )  # fmt: skip
    hits = found["hits"]
    assert (hits[0]["id"], round(hits[0]["score"], 3), hits[0]["source"]) == ("3", 1.0, COLLECTION)
    assert [one["score"] for one in hits] == sorted((one["score"] for one in hits), reverse=True)
    inside = [one["id"] for one in found["segments"] if one["kind"] == "passage"]
    assert [one["id"] for one in hits if not one["why"]] == inside
    assert {one["why"] for one in hits} == {"", "recall_budget"}


def test_window_recalls_by_a_turn_that_has_a_vector(server, reading):
    seq = reading.count(LONG) - 3
    options = {"query": "turn", "collection": [COLLECTION.encode().hex()], "top_k": "1"}
    assert window(server, LONG, query_turn=str(seq), **options)["hits"][0]["id"] == "7"
    status, found = ask(
        server, "window", session=LONG.encode().hex(), tenant="", query_turn="0", **FULL, **options
    )
    assert (status, found["error"]["kind"]) == (400, "InvalidArgument")
    assert found["error"]["sentence"] == "Turn 0 has no vector to recall by; choose another."


def test_window_recalls_by_a_text_where_there_is_an_embedder(reading):
    vector = demo_data.passage_vectors().astype(np.float32)
    with serving(reading, embed=lambda text: vector[int(text)]) as server:
        found = window(
            server, LONG, query="text", query_text="0", top_k="1",
            collection=[COLLECTION.encode().hex()],
        )  # fmt: skip
        assert len(found["hits"]) == 1


def test_window_beyond_what_is_shown_token_by_token_gives_texts(server, reading, monkeypatch):
    monkeypatch.setattr("kalos_ctx.inspecting.windows.TOKENS_APART", 100)
    parts = window(server, LONG)["segments"]
    assert sum(part["tokens"] for part in parts if part["pieces"]) <= 100
    assert all(part["pieces"] or part["text"] for part in parts)


def test_window_without_a_tokenizer_shows_stored_texts_and_ids(filled):
    with SessionStore.open(filled, "r") as store, serving(store) as server:
        assert ask(server, "store")[1]["has_tokenizer"] is False
        part = window(server, TOOLS)["segments"][0]
        turn = store.turns(TOOLS)[0]
        assert (part["text"], part["token_ids"]) == (turn.text, turn.token_ids.tolist())
        status, found = ask(
            server, "window", session=TOOLS.encode().hex(), tenant="", generation_prompt="1", **FULL
        )
        assert (status, "--tokenizer" in found["error"]["sentence"]) == (400, True)


def test_piece_of_a_character_waits_for_the_rest_of_it(reading):
    codec = reading.codec
    ids = codec.encode_text("a 🦜𒀀 ü\n漢").tolist()
    found = pieces(codec, ids)
    assert "".join(text for text, _ in found) == "a 🦜𒀀 ü\n漢"
    assert [one for _, own in found for one in own] == ids
    assert any(len(own) > 1 for _, own in found)
    broken = pieces(codec, ids[:-1])
    assert [one for _, own in broken for one in own] == ids[:-1]


def test_piece_of_a_tokenizer_of_words_has_the_blank_before_it():
    class Words:
        tokenizer = Tokenizer(models.WordLevel({"hi": 0, "you": 1}, unk_token="hi"))

        def decode(self, ids):
            return self.tokenizer.decode(list(ids))

    assert pieces(Words(), [0, 1, 1]) == [("hi", [0]), (" you", [1]), (" you", [1])]


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "status", "words"),
    [
        ("window", {"max_tokens": ""}, 400, "max_tokens must be given"),
        ("window", {"max_tokens": "-1"}, 400, "max_tokens must be a whole number"),
        ("window", {"max_tokens": "²"}, 400, "max_tokens must be a whole number"),
        ("window", {"max_tokens": "9" * 4000}, 400, "max_tokens must be a whole number"),
        ("window", {"max_tokens": ["1", "2"]}, 400, "max_tokens must stand once"),
        ("window", {"max_tokens": "9", "reserve": "10"}, 400, "Reserve must be at most"),
        ("window", {"cut": "x"}, 400, "Cut must be one of stable, sliding"),
        ("window", {"low_water": "0"}, 400, "low_water must be a number above 0"),
        ("window", {"low_water": "nan"}, 400, "low_water must be a number above 0"),
        ("window", {"session": ""}, 400, "Session must have 1 to 1024 bytes"),
        ("window", {"session": "zz"}, 400, "Session must be a name in hex"),
        ("window", {"session": "00" * 1025}, 400, "Session must have 1 to 1024 bytes"),
        ("window", {"session": b"nobody".hex()}, 404, "There is no such session"),
        ("window", {"collection": ["x"]}, 400, "Collection must be names in hex"),
        ("window", {"query": "text", "query_text": "x"}, 400, "A text needs an embedding"),
        ("window", {"query": "passage", "query_passage": "1", "query_collection": "00"}, 404,
         "There is no such collection"),
        ("window", {"query": "turn", "query_turn": "999999"}, 400, "Turn 999999 has no vector"),
        ("sessions", {"cursor": "x"}, 400, "Cursor must be a whole number"),
        ("sessions", {"search": "x" * 70_000}, 414, "This is no request"),
        ("passages", {"collection": b"none".hex()}, 404, "There is no such collection"),
        ("nothing", {}, 404, "There is no such document"),
    ],
)  # fmt: skip
def test_request_that_cannot_be_met_gets_a_sentence(server, name, fields, status, words):
    given = {"tenant": "", "session": LONG.encode().hex(), **FULL, **fields}
    found, document = ask(server, name, **given)
    assert found == status
    assert words in document["error"]["sentence"]
    assert document["error"]["sentence"].endswith(".")


def test_window_that_does_not_fit_says_what_each_part_takes(server):
    given = {"session": LONG.encode().hex(), "tenant": "", "max_tokens": "9"}
    status, found = ask(server, "window", **given)
    assert (status, found["error"]["kind"]) == (400, "BudgetExceeded")
    assert found["error"]["by_segment"]["persona"] > 9
    assert found["error"]["budget"] == 9


@pytest.mark.parametrize("text", ["a=%ff", "&".join(f"f{i}=1" for i in range(100))])
def test_query_that_is_no_text_or_too_much_is_refused(text):
    with pytest.raises(InvalidArgument):
        Query(text)


def test_fault_of_ours_is_told_without_details_and_logged(server, monkeypatch, caplog):
    def broken(query):
        raise RuntimeError("the secret")

    monkeypatch.setitem(server.routes, "store", broken)
    status, found = ask(server, "store")
    assert (status, found["error"]["kind"]) == (500, "Fault")
    assert "secret" not in str(found)
    assert "could not be made" in caplog.text


def test_damage_of_the_store_is_told(server, monkeypatch):
    def damaged(query):
        raise StoreCorrupt("a record's checksum is wrong", "log-000000", 64)

    monkeypatch.setitem(server.routes, "store", damaged)
    status, found = ask(server, "store")
    assert (status, found["error"]["kind"]) == (500, "StoreCorrupt")


# ---- A store that lives -------------------------------------------------------------------------


def test_looking_at_everything_writes_nothing(server, filled):
    before = {one: (one.read_bytes(), one.stat().st_mtime_ns) for one in files_of(filled)}
    for name in ("store", "sessions", "session"):
        assert ask(server, name, tenant="", session=LONG.encode().hex())[0] == 200
    window(server, LONG, compare="shown", generation_prompt="1", max_tokens="2000")
    after = {one: (one.read_bytes(), one.stat().st_mtime_ns) for one in files_of(filled)}
    assert after == before


def files_of(path):
    return sorted(one for one in path.rglob("*") if one.is_file())


def test_page_follows_a_writer_also_through_compaction(tmp_path):
    path = tmp_path / "live.kalos"
    with SessionStore.open(path, vocab_size=100) as writer:
        writer.append("s", "user", token_ids=[1, 2])
        writer.add_passages("c", np.eye(2, dtype=np.float32), token_ids=[[7], [8]])
        with SessionStore.open(path, "r") as store, serving(store) as server:
            assert window(server, "s")["num_tokens"] == 2
            writer.append("s", "assistant", token_ids=[3])
            writer.delete_passages("c", [0])
            writer.compact()
            assert window(server, "s")["num_tokens"] == 3
            _, found = ask(server, "passages", tenant="", collection=b"c".hex())
            assert [one["id"] for one in found["passages"]] == ["1"]
            _, found = ask(server, "sessions", tenant="")
            assert [(one["name"], one["turns"]) for one in found["sessions"]] == [("s", 2)]


def test_requests_at_the_same_time_are_answered(server):
    found = []

    def look(i):
        found.append(window(server, LONG, max_tokens=str(1000 + i))["max_tokens"])

    threads = [threading.Thread(target=look, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1000, 1008))


# ---- The command --------------------------------------------------------------------------------


def test_command_prints_the_address_answers_and_ends_quietly_at_ctrl_c(filled):
    # Who runs the tests in the background may have told children to ignore it.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "kalos_ctx.cli", "inspect"]
    command += [str(filled), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = process.stdout.readline().strip()
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request("GET", f"{parts.path}api/store")
    assert connection.getresponse().status == 200
    connection.close()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines()[-1].startswith("kalos: the page is at this address until Ctrl-C")


def test_command_at_a_port_that_is_taken_says_so(kalos, filled, server):
    code, out, err = kalos("inspect", filled, "--no-open", "--port", server.server_port)
    assert (code, out, err) == (1, "", "kalos: Address already in use\n")


def test_command_opens_the_browser_without_telling_it_the_token(kalos, filled, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(InspectServer, "serve_forever", lambda self: None)
    code, out, _ = kalos("inspect", filled)
    token = urlsplit(out.strip()).path.strip("/")
    assert (code, len(opened)) == (0, 1)
    assert token not in opened[0]
    assert urlsplit(opened[0]).path.startswith("/open/")


def test_command_without_a_store_is_one_line(kalos, store_path):
    code, out, err = kalos("inspect", store_path, "--no-open")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
